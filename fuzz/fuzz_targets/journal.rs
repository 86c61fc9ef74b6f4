#![no_main]

#[path = "../../crates/image/tests/checks/mod.rs"]
#[expect(dead_code, reason = "the seeds are for the tests")]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    checks::journal(data);
});
