//! Default paths of sockets.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::config::spec::DiskSpec;

/// Whether two disks have neither the file nor the socket in common: the name of one was given to another VM's.
pub fn are_of_two_vms(one: &DiskSpec, other: &DiskSpec) -> bool {
    !one.has_file_of(other) && path(one) != path(other)
}

/// Whether a disk is another one with another name: it has its file, and its VM.
pub fn is_renamed(disk: &DiskSpec, other: &DiskSpec) -> bool {
    disk.name != other.name && disk.has_file_of(other) && path(disk) == path(other)
}

/// The path of a disk's socket.
pub fn path(spec: &DiskSpec) -> PathBuf {
    let default = || directory().join(format!("{}.sock", spec.name));
    spec.socket.clone().unwrap_or_else(default)
}

/// The default directory of sockets: that of the service manager (systemd.exec(5), `RuntimeDirectory`), otherwise the
/// user's runtime directory. Never one that others may write to: a process that replaces the socket would receive the
/// guest's memory.
///
/// Decided once: a process that becomes another user keeps its sockets where VMs know them.
pub fn directory() -> PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(decide).clone()
}

fn decide() -> PathBuf {
    let root = rustix::process::geteuid().is_root();
    if let Some(first) = std::env::var_os("RUNTIME_DIRECTORY")
        .and_then(|all| std::env::split_paths(&all).next())
        .filter(|first| first.is_absolute())
    {
        return first;
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if root => "/run/ringdisk".into(),
        Some(directory) => PathBuf::from(directory).join("ringdisk"),
        None => std::env::current_dir().unwrap_or_default(),
    }
}
