#![no_main]

// The daemon is a program and not a library, but these files of it need nothing else of it.
#[path = "../../crates/daemon/src/limits.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod limits;
#[path = "../../crates/daemon/src/spec.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod spec;

libfuzzer_sys::fuzz_target!(|text: &str| {
    match text.parse::<spec::DiskSpec>() {
        Ok(disk) => disk.assert_sound(),
        // The message is made from the text as well.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
