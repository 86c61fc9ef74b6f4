#![no_main]

// The daemon is a program and not a library, but these files of it need nothing else of it.
#[path = "../../crates/daemon/src/limits.rs"]
mod limits;
#[path = "../../crates/daemon/src/sandbox/people.rs"]
#[expect(dead_code, reason = "nobody becomes somebody else")]
mod people;
#[path = "../../crates/daemon/src/spec.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod spec;

mod sandbox {
    pub(crate) use crate::people;
}

libfuzzer_sys::fuzz_target!(|text: &str| {
    match text.parse::<spec::DiskSpec>() {
        Ok(disk) => {
            disk.assert_sound();
            assert_eq!(disk.to_string().parse(), Ok(disk));
        }
        // The message is made from the text as well.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
