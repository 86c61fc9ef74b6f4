//! `cargo xtask`: everything a developer or CI runs, as one program.

fn main() {}
