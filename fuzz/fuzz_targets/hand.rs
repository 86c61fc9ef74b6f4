#![no_main]

// The daemon is a program and not a library, but these files of it need nothing else of it.
#[path = "../../crates/daemon/src/hand.rs"]
#[expect(dead_code, reason = "nothing is sent")]
mod hand;
#[path = "../../crates/daemon/src/launch.rs"]
#[expect(dead_code, reason = "nothing is written")]
mod launch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    hand::check(data);
    launch::Launch::check(data);
});
