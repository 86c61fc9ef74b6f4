#![no_main]

#[path = "../../crates/nbd/tests/checks/mod.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::session(data));
