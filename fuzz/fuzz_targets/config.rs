#![no_main]

// The daemon is a program and not a library, but these files of it need nothing else of it.
#[path = "../../crates/daemon/src/config.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod config;
#[path = "../../crates/daemon/src/cpus.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod cpus;
#[path = "../../crates/daemon/src/limits.rs"]
mod limits;
#[path = "../../crates/daemon/src/sandbox/mode.rs"]
mod mode;
#[path = "../../crates/daemon/src/sandbox/people.rs"]
#[expect(dead_code, reason = "nobody becomes somebody else")]
mod people;
#[path = "../../crates/daemon/src/socket.rs"]
#[expect(dead_code, reason = "only the default path is needed")]
mod socket;
#[path = "../../crates/daemon/src/spec.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod spec;
#[path = "../../crates/daemon/src/together.rs"]
mod together;

mod sandbox {
    pub(crate) use crate::mode::Mode;
    pub(crate) use crate::people;
}

libfuzzer_sys::fuzz_target!(|text: &str| config::Config::check(text));
