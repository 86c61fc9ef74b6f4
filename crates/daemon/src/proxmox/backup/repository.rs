//! To Proxmox Backup Server, by its client, which reads files: nbdfuse shows each export as one.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Contents, Data, Directory};
use crate::client::CommandLineError;
use crate::client::nbd_client::Stop;

/// How long nbdfuse may take to show a file, and to end.
const MOUNT: Duration = Duration::from_secs(30);

/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// An export as a file, as long as this exists.
struct Mount {
    nbdfuse: Child,
    directory: PathBuf,
    file: PathBuf,
}

impl Mount {
    fn new(
        directory: PathBuf,
        name: &str,
        uri: &str,
        bytes: u64,
        stop: &Stop,
    ) -> Result<Self, CommandLineError> {
        fs::create_dir(&directory).map_err(|e| CommandLineError::Target(directory.clone(), e))?;
        let file = directory.join(name);
        let nbdfuse = Command::new("setpriv")
            // It does not outlive this program.
            .args(["--pdeathsig", "TERM", "nbdfuse", "-r"])
            .arg(&file)
            .arg(uri)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // A signal of the terminal would end it before its reader.
            .process_group_of_its_own()
            .spawn()
            .map_err(|e| CommandLineError::Here("cannot start nbdfuse", e))?;
        let mut mount = Self {
            nbdfuse,
            directory,
            file,
        };
        let deadline = Instant::now() + MOUNT;
        loop {
            stop.check().map_err(|_| CommandLineError::Interrupted)?;
            if fs::metadata(&mount.file).is_ok_and(|file| file.len() == bytes) {
                return Ok(mount);
            }
            let ended = mount.nbdfuse.try_wait();
            if !matches!(ended, Ok(None)) || Instant::now() > deadline {
                return Err(CommandLineError::Refused(format!(
                    "nbdfuse does not show {uri} as a file: its messages may tell why"
                )));
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let umount = |options: &[&str]| {
            let mut umount = Command::new("umount");
            let _ = umount.args(options).arg(&self.directory).output();
        };
        umount(&[]);
        let deadline = Instant::now() + MOUNT;
        while matches!(self.nbdfuse.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                umount(&["-l"]);
                let _ = self.nbdfuse.kill();
                let _ = self.nbdfuse.wait();
            }
            thread::sleep(LOOK);
        }
    }
}

trait OwnGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

/// Has Proxmox' client send all. Returns what is said to the user.
///
/// # Errors
/// It has not sent all.
pub fn send(
    vm: &str,
    repository: &str,
    more: &[OsString],
    contents: &Contents,
    directory: &Directory,
    stop: &Stop,
) -> Result<String, CommandLineError> {
    let mut client = Command::new("proxmox-backup-client");
    client.args(["backup", "--repository", repository]);
    client
        .args(["--backup-type", "vm", "--backup-id", vm])
        .args(more);
    for (name, _, text) in &contents.configs {
        let path = directory.path().join(name);
        fs::write(&path, text).map_err(|e| CommandLineError::Target(path.clone(), e))?;
        client.arg(archive(name, &path));
    }
    let mut mounts = Vec::new();
    for part in &contents.parts {
        let name = format!("{}.img", part.name);
        let path = match &part.data {
            Data::File(path) => path.clone(),
            Data::Export { uri, .. } => {
                let at = directory.path().join(&part.drive);
                let mount = Mount::new(at, &name, uri, part.bytes, stop)?;
                let file = mount.file.clone();
                mounts.push(mount);
                file
            }
        };
        client.arg(archive(&name, &path));
    }
    client.stdin(Stdio::null());
    let started = client.process_group_of_its_own().spawn();
    let mut client =
        started.map_err(|e| CommandLineError::Here("cannot start proxmox-backup-client", e))?;
    let mut is_stopped = false;
    let status = loop {
        if let Some(status) = client
            .try_wait()
            .map_err(|e| CommandLineError::Here("cannot wait for proxmox-backup-client", e))?
        {
            break status;
        }
        if !is_stopped && stop.check().is_err() {
            is_stopped = true;
            let _ = kill_process(Pid::from_child(&client), Signal::TERM);
        }
        thread::sleep(LOOK);
    };
    if !status.success() {
        return Err(CommandLineError::Refused(format!(
            "VM {vm}: proxmox-backup-client failed ({status}); its messages tell why"
        )));
    }
    Ok(format!("VM {vm} is in {repository}"))
}

fn archive(name: &str, path: &Path) -> OsString {
    let mut archive = OsString::from(name);
    archive.push(":");
    archive.push(path);
    archive
}
