#![no_main]

#[path = "../../crates/lab/tests/checks/mod.rs"]
#[expect(dead_code, reason = "each target has its own check")]
mod checks;

libfuzzer_sys::fuzz_target!(|text: &str| checks::import(text));
