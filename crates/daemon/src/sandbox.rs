//! Restricts this process to what serving disks needs.
//!
//! An attacker who takes over the process by hostile input can
//!
//! - open files only where the operator's disks are ([Landlock](files)), whatever its user may open;
//! - start no program, and make no other system calls than serving disks needs ([seccomp](calls));
//! - reach nothing over a network, and signal no other process;
//! - use only capabilities for opening disks, or none at all with `--user`, and gain no others;
//! - find no guest memory in a core dump (guest memory is excluded where it is mapped).
//!
//! The restrictions apply in two steps: [`Sandbox::enter`] while there is only one thread, since they apply to the calling
//! thread and those that it starts, and [`Sandbox::seal`] when everything is open, to all threads.

mod calls;
mod files;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{DumpableBehavior, geteuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs,
};
use thiserror::Error;
use tracing::{error, info, warn};

use files::{AllowedPaths, Files};

use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::config::{self, SandboxMode as Mode};
use crate::credentials::{self, UserAccount};
use crate::rights::Rights;

/// What the operator has configured.
#[derive(Clone, Debug, Default)]
pub struct SandboxOptions {
    pub mode: Mode,
    /// Further directories for disks and sockets, which must exist.
    pub allow: Vec<PathBuf>,
    /// The same of the configuration. One that does not exist keeps no disk elsewhere from being served.
    pub configured: Vec<PathBuf>,
    /// Disks that commands have attached or changed before the start, by the state file.
    pub attached: Vec<DiskSpec>,
    /// Further directories for files that are read.
    pub readable: Vec<PathBuf>,
    /// The user that this process becomes.
    pub user: Option<UserAccount>,
    /// This process listens at a TCP port.
    pub listens: bool,
}

#[derive(Debug, Error)]
pub enum SandboxError {
    #[error("--sandbox on: {0} does not work here: {1}; --sandbox auto continues without it")]
    Missing(&'static str, String),
    #[error("--allow-dir {0}: {1}; name an existing directory")]
    Directory(PathBuf, io::Error),
    #[error("--user: {0}")]
    User(String),
    #[error("--user {0}: {1}; only root can become another user")]
    Become(String, io::Error),
}

/// The sandbox does not allow access.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OutsideSandbox {
    #[error(
        "{}: is outside of the directories that the sandbox allows ({allowed}); start ringdisk with --allow-dir {} \
         (allow-dir in the configuration) for disks and sockets there", path.display(), directory.display()
    )]
    Path {
        path: PathBuf,
        directory: PathBuf,
        allowed: String,
    },
    #[error(
        "{0}: the sandbox has no network, because no disk was in a Ceph cluster when ringdisk was started; start it \
         with one, or with --sandbox off"
    )]
    Cluster(String),
}

/// The sandbox that this process is in.
pub struct Sandbox {
    mode: Mode,
    /// Disks may be in Ceph clusters.
    cluster: bool,
    files: Option<Files>,
    user: Option<UserAccount>,
}

impl Sandbox {
    /// Enters the sandbox. It allows access to the first disks, and to the directories `kept` of ringdisk's own files.
    /// This must be the only thread of the process.
    ///
    /// # Errors
    /// A directory does not exist, or `sandbox=on` is set and something does not work.
    pub fn enter(
        options: &SandboxOptions,
        config_file: Option<&Path>,
        disks: &[DiskSpec],
        other_sockets: &[&Path],
        backing: &[PathBuf],
        kept: &[PathBuf],
    ) -> Result<Self, SandboxError> {
        // Before its files become unreadable.
        credentials::read();
        let user = options.user.clone();
        if options.mode == Mode::Off {
            warn!("sandbox=off: this process has all rights of its user");
            return Ok(Self {
                mode: options.mode,
                cluster: true,
                files: None,
                user,
            });
        }
        let _ = set_no_new_privs(true);
        keep_capabilities(user.is_some(), options.listens);
        let paths = paths(options, config_file, disks, other_sockets, backing, kept)?;
        let cluster = paths.cluster;
        let files = Files::restrict(paths);
        match (&files, options.mode) {
            (Ok(files), _) => info!("sandbox: files: {files}"),
            (Err(why), Mode::On) => return Err(SandboxError::Missing("Landlock", why.clone())),
            (Err(why), _) => warn!("sandbox: files are not restricted: Landlock: {why}"),
        }
        Ok(Self {
            mode: options.mode,
            cluster,
            files: files.ok(),
            user,
        })
    }

    /// From now on, this thread and those that it starts open files with the rights of the configured user, except for
    /// what the operator has named. Call this before anything is opened that another process, an image or a state file
    /// names.
    ///
    /// # Errors
    /// This process cannot become that user.
    pub fn assume_rights(&self, named: &[DiskSpec]) -> Result<Rights, SandboxError> {
        let rights = Rights::assume(self.user.as_ref(), named);
        if self.user.is_some() {
            // As after a change of the user: see `seal`.
            let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
        }
        rights.map_err(|e| {
            let user = self.user.as_ref().map(|user| user.name.clone());
            SandboxError::Become(user.unwrap_or_default(), e)
        })
    }

    /// Becomes the configured user, and restricts all threads to the system calls that they need.
    ///
    /// # Errors
    /// This process cannot become that user, or `sandbox=on` is set and system calls cannot be restricted.
    pub fn seal(&self) -> Result<(), SandboxError> {
        if let Some(user) = &self.user {
            let fail = |e| SandboxError::Become(user.name.clone(), e);
            user.become_user().map_err(fail)?;
            // The kernel hides /proc/self from a process that has changed its user. A core dump contains no guest memory.
            let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
            info!("sandbox: user {}", user.name);
        }
        if self.mode == Mode::Off {
            return Ok(());
        }
        let left = capabilities(None).map(|sets| sets.effective);
        match (calls::restrict(self.cluster), self.mode) {
            (Ok(calls), _) => {
                let left = left.unwrap_or(CapabilitySet::empty());
                let left = if left.is_empty() {
                    "none".to_owned()
                } else {
                    left.iter_names()
                        .map(|(name, _)| name)
                        .collect::<Vec<_>>()
                        .join(", ")
                };
                info!("sandbox: {calls}; capabilities: {left}");
                Ok(())
            }
            (Err(why), Mode::On) => Err(SandboxError::Missing("seccomp", why)),
            (Err(why), _) => {
                warn!("sandbox: system calls are not restricted: seccomp: {why}");
                Ok(())
            }
        }
    }

    /// Checks that the sandbox allows a disk at this path.
    ///
    /// # Errors
    /// It does not. The error names the option that allows it.
    pub fn check_file(&self, file: &FileSpec) -> Result<(), OutsideSandbox> {
        match (&self.files, file) {
            (Some(files), FileSpec::Path(path)) => files.check(path),
            (_, FileSpec::Rbd(location)) if !self.cluster => {
                Err(OutsideSandbox::Cluster(location.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the sandbox allows the files of a disk.
    ///
    /// # Errors
    /// It does not. The error names the option that allows it.
    pub fn check_disk(&self, disk: &DiskSpec) -> Result<(), OutsideSandbox> {
        self.check_file(&disk.file)?;
        match &disk.data_file {
            Some(path) => self.check_file(&FileSpec::Path(path.clone())),
            None => Ok(()),
        }
    }

    /// Checks that the sandbox allows a socket at this path.
    ///
    /// # Errors
    /// It does not. The error names the option that allows it.
    pub fn check_socket(&self, path: &Path) -> Result<(), OutsideSandbox> {
        self.files.as_ref().map_or(Ok(()), |f| f.check_socket(path))
    }
}

/// Checks that a directory exists. Not that its files can be listed: nobody needs that.
///
/// # Errors
/// It does not exist, or this user may not look at it, or it is a file.
fn check_directory(directory: &Path) -> io::Result<()> {
    match std::fs::metadata(directory)?.is_dir() {
        true => Ok(()),
        false => Err(io::ErrorKind::NotADirectory.into()),
    }
}

/// Those of the configured directories that exist.
fn usable(directories: &[PathBuf]) -> Vec<PathBuf> {
    let is_usable = |directory: &&PathBuf| {
        let checked = check_directory(directory);
        let checked = checked.inspect_err(|e| {
            error!(
                "allow-dir: {}: {e}; disks there are not served: name a directory that exists and that ringdisk's user may look at",
                directory.display()
            );
        });
        checked.is_ok()
    };
    directories.iter().filter(is_usable).cloned().collect()
}

/// The paths to which this process needs access.
fn paths(
    options: &SandboxOptions,
    config_file: Option<&Path>,
    disks: &[DiskSpec],
    other_sockets: &[&Path],
    backing: &[PathBuf],
    kept: &[PathBuf],
) -> Result<AllowedPaths, SandboxError> {
    let mut paths = AllowedPaths::default();
    for disk in disks.iter().chain(&options.attached) {
        match &disk.file {
            FileSpec::Path(path) => paths.disk(path),
            FileSpec::Rbd(_) => paths.cluster = true,
            FileSpec::Null(_) => {}
        }
        disk.data_file.iter().for_each(|path| paths.disk(path));
        paths.socket(&sockets::path(disk));
    }
    paths.socket(&sockets::directory().join("any"));
    kept.iter().for_each(|directory| paths.kept(directory));
    other_sockets.iter().for_each(|path| paths.socket(path));
    for directory in backing.iter().filter(|d| d.as_os_str() != "none") {
        let is_here = |file: &FileSpec| matches!(file, FileSpec::Path(path) if path.parent() == Some(directory.as_path()));
        paths.backing(directory, disks.iter().any(|disk| is_here(&disk.file)));
    }
    for directory in &options.allow {
        check_directory(directory).map_err(|e| SandboxError::Directory(directory.clone(), e))?;
    }
    for directory in options.allow.iter().chain(&usable(&options.configured)) {
        paths.storage(directory);
        paths.sockets(directory);
    }
    options.readable.iter().for_each(|d| paths.readable(d));
    // Directories, because editors replace files.
    let read_again = config_file.map(config::read_directories);
    read_again.iter().flatten().for_each(|d| paths.readable(d));
    // No disk is configured: commands may attach disks at any path.
    let mut allowed = options.allow.iter().chain(&options.configured);
    let is_restricted = !disks.is_empty() || allowed.clone().next().is_some();
    paths.anywhere = !is_restricted || allowed.any(|it| it == Path::new("/"));
    paths.cluster |= paths.anywhere;
    Ok(paths)
}

/// Drops capabilities that serving disks does not need. The remaining ones open files of other users, and pin memory.
fn keep_capabilities(becomes_another: bool, listens: bool) {
    let mut kept = CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::FOWNER
        | CapabilitySet::CHOWN
        | CapabilitySet::IPC_LOCK;
    kept.set(
        CapabilitySet::SETUID | CapabilitySet::SETGID,
        becomes_another,
    );
    // For a port below 1024.
    kept.set(CapabilitySet::NET_BIND_SERVICE, listens);
    let result = capabilities(None).and_then(|now| {
        set_capabilities(
            None,
            CapabilitySets {
                effective: now.effective & kept,
                permitted: now.permitted & kept,
                inheritable: CapabilitySet::empty(),
            },
        )
    });
    if let Err(e) = result
        && geteuid().is_root()
    {
        warn!("sandbox: cannot drop capabilities: {e}");
    }
}
