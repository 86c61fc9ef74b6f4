//! What guests boot that are made on the spot: a [`Kernel`], and a [`Tree`] of files in memory. Whoever boots one, the
//! lab or a test, brings its own `/init`.

mod kernel;
mod tree;

pub use kernel::{Kernel, cache_dir, kernel_cache};
pub use tree::Tree;

use std::path::PathBuf;

/// Finds a program in `PATH` and in the administrator's folders, which a user's `PATH` on Debian lacks.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}
