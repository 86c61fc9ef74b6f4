//! Long random tests: concurrent operations, and random sequences of operations (`cargo xtask soak`).

mod all_at_once;
mod driver;
mod operations;

/// The program under test: the one built with the test, or another.
fn program() -> String {
    let given = std::env::var("RINGDISK_SOAK_PROGRAM");
    given.unwrap_or_else(|_| env!("CARGO_BIN_EXE_ringdisk").into())
}
