#![no_main]

#[path = "../../crates/guest/tests/checks/mod.rs"]
#[expect(dead_code, reason = "each target uses one of them")]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::changing_ring::check(data));
