//! Everything at once, and everything after the other, for long: `cargo xtask soak`.

mod all_at_once;
mod driver;
mod operations;

/// The program to be tested: the one that was built with the test, or another.
fn program() -> String {
    let given = std::env::var("RINGDISK_SOAK_PROGRAM");
    given.unwrap_or_else(|_| env!("CARGO_BIN_EXE_ringdisk").into())
}
