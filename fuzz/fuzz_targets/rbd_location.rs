#![no_main]

#[path = "../../crates/rbd/tests/checks/mod.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|text: &str| checks::location(text));
