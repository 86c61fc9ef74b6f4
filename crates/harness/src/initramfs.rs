//! The kernel and the files that a guest boots. The caller supplies `/init`.

mod kernel;
mod tree;

pub use kernel::{Kernel, kernel_cache};
pub use tree::Tree;
