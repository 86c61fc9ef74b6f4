//! Programs and folders on this machine.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The cache folder of ringdisk's tools, `$XDG_CACHE_HOME/ringdisk`: for what is expensive to download or to compute.
pub fn cache_dir() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    cache
        .or_else(home)
        .unwrap_or_else(std::env::temp_dir)
        .join("ringdisk")
}

/// Whether the path is a block device's.
pub fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Finds a program in `PATH`, or in the administrator's folders, which a user's `PATH` on Debian lacks.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}
