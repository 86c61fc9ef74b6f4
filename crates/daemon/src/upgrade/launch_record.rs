//! Records how this process was started, in a file next to its control socket: `ringdisk upgrade` starts the new process
//! the same way.
//!
//! An attacker who has taken over a sandboxed process must gain nothing by an upgrade. Therefore `ringdisk upgrade` does
//! not ask the process how it was started; the process records that in the file before it enters the sandbox. Later, it
//! cannot change the file if it runs with `--user` (the file belongs to root), or if the control socket is outside of all
//! directories for disks and state. Only environment variables with paths and log levels are passed on, none that loads
//! code.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process_settings::own_umask;

/// Variables that are passed on: of the service manager, the runtime directory, and the log level.
const ENVIRONMENT: [&str; 6] = [
    "NOTIFY_SOCKET",
    "JOURNAL_STREAM",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "XDG_RUNTIME_DIR",
    "RINGDISK_LOG",
];

/// The variable that tells it the control socket of the process that it replaces.
pub const REPLACED_CONTROL: &str = "RINGDISK_REPLACED_CONTROL";

/// The argument that tells a process to take over.
const TAKE_OVER: &str = "--take-over";

/// Limit of the file in bytes; the kernel limits arguments to 2 MiB by default.
const BYTES_MAX: u64 = 32 << 20;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchRecord {
    /// The arguments, without the name of the program.
    pub arguments: Vec<OsString>,
    pub environment: Vec<(String, OsString)>,
    pub directory: PathBuf,
    /// Its umask. Older versions did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask: Option<u32>,
}

impl LaunchRecord {
    /// How this process was started.
    ///
    /// # Errors
    /// The current directory no longer exists.
    pub fn here() -> io::Result<Self> {
        let set = |name: &str| Some((name.to_owned(), std::env::var_os(name)?));
        // `--take-over` is not an argument of the user.
        let arguments = std::env::args_os().skip(1);
        let arguments = arguments.filter(|argument| argument != TAKE_OVER);
        Ok(Self {
            arguments: arguments.collect(),
            environment: ENVIRONMENT.into_iter().filter_map(set).collect(),
            directory: std::env::current_dir()?,
            umask: own_umask(),
        })
    }

    /// The arguments of a process that takes over from this one.
    pub fn taking_over(&self) -> Vec<OsString> {
        let mut arguments = self.arguments.clone();
        // Right after the subcommand: after `--`, it would be a disk.
        let at = arguments.len().min(1);
        arguments.insert(at, TAKE_OVER.into());
        arguments
    }

    /// Whether a service manager supervises this process.
    pub fn is_managed(&self) -> bool {
        let mut set = self.environment.iter();
        set.any(|(name, _)| name == "NOTIFY_SOCKET")
    }

    /// Writes the file next to a control socket.
    ///
    /// # Errors
    /// It cannot be written; the previous file may have been removed.
    pub fn write(&self, control: &Path) -> io::Result<()> {
        let path = path(control);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // Not through a link.
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        file.write_all(&serde_json::to_vec(self)?)
    }

    /// Reads the file of the process with this control socket.
    ///
    /// # Errors
    /// There is none, or another user may have written it.
    pub fn read(control: &Path) -> io::Result<Self> {
        let path = path(control);
        let fail = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path);
        let file = file.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => fail(io::Error::other(
                "this file, which records how ringdisk was started, has been removed. SIGHUP writes it again if ringdisk's \
                 sandbox allows that; otherwise restart ringdisk instead: VMs that reconnect continue",
            )),
            _ => fail(e),
        })?;
        let stat = file.metadata().map_err(fail)?;
        let ours = [0, rustix::process::geteuid().as_raw()].contains(&stat.uid());
        if !ours {
            let e = format!(
                "ringdisk runs as user {}, and only that user may upgrade it; for the service, 'systemctl reload ringdisk' \
                 upgrades to the installed program",
                stat.uid()
            );
            return Err(fail(io::Error::other(e)));
        }
        if !stat.is_file() || stat.mode() & 0o022 != 0 {
            let e = "another user could have written it; restart ringdisk instead";
            return Err(fail(io::Error::other(e)));
        }
        let mut bytes = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut bytes).map_err(fail)?;
        Self::parse(&bytes).map_err(|e| fail(io::Error::other(e)))
    }

    /// Panics unless a valid file reads back as it is written: for tests and fuzzing.
    #[cfg(any(test, fuzzing))]
    pub fn check(bytes: &[u8]) {
        if let Ok(record) = Self::parse(bytes) {
            let again = serde_json::to_vec(&record).expect("text and numbers");
            assert_eq!(Self::parse(&again), Ok(record));
        }
    }

    /// Parses the file.
    ///
    /// # Errors
    /// It is not valid.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let record: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let known = |(name, _): &(String, _)| ENVIRONMENT.contains(&name.as_str());
        if record.environment.iter().all(known) {
            Ok(record)
        } else {
            Err("it sets an environment variable that ringdisk does not pass on".into())
        }
    }
}

/// The path of the file.
pub fn path(control: &Path) -> PathBuf {
    path_of(control, "start")
}

/// The path of a file that belongs to a control socket, in the same directory.
pub fn path_of(control: &Path, what: &str) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(".");
    path.push(what);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn file_reads_back_unless_another_user_could_have_written_it() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control.qmp");
        let record = LaunchRecord::here().unwrap();
        record.write(&control).unwrap();
        record.write(&control).unwrap();
        assert_eq!(LaunchRecord::read(&control).unwrap(), record);
        let path = path(&control);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        assert!(LaunchRecord::read(&control).is_err());
        let real = dir.path().join("real");
        fs::rename(&path, &real).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&real, &path).unwrap();
        assert!(LaunchRecord::read(&control).is_err(), "a link");
        record.write(&control).unwrap();
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn fuzzing_seeds_are_valid() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/hand");
        let mut valid = 0;
        for file in fs::read_dir(seeds).unwrap() {
            let bytes = fs::read(file.unwrap().path()).unwrap();
            LaunchRecord::check(&bytes);
            valid += usize::from(LaunchRecord::parse(&bytes).is_ok());
        }
        assert_eq!(valid, 1);
    }

    #[test]
    fn take_over_argument_follows_the_subcommand() {
        for (arguments, taking_over) in [
            ("serve", "serve --take-over"),
            ("serve --json -- a.raw", "serve --take-over --json -- a.raw"),
        ] {
            let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
            let record = LaunchRecord {
                arguments: words(arguments),
                ..LaunchRecord::here().unwrap()
            };
            assert_eq!(record.taking_over(), words(taking_over));
        }
    }

    #[test]
    fn variables_that_load_code_are_not_passed_on() {
        let preload =
            br#"{"arguments":[],"environment":[["LD_PRELOAD",{"Unix":[47]}]],"directory":"/"}"#;
        assert!(
            LaunchRecord::parse(preload)
                .unwrap_err()
                .contains("variable")
        );
        let log =
            br#"{"arguments":[],"environment":[["RINGDISK_LOG",{"Unix":[47]}]],"directory":"/"}"#;
        assert!(LaunchRecord::parse(log).is_ok());
    }
}
