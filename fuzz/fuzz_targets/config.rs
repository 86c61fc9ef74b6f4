#![no_main]

// The daemon is a program and not a library, but these files of it need nothing else of it.
#[path = "../../crates/daemon/src/config.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod config;
#[path = "../../crates/daemon/src/cpus.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod cpus;
#[path = "../../crates/daemon/src/limits.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod limits;
#[path = "../../crates/daemon/src/socket.rs"]
#[expect(dead_code, reason = "only the default path is needed")]
mod socket;
#[path = "../../crates/daemon/src/spec.rs"]
#[expect(dead_code, reason = "what is parsed is only looked at")]
mod spec;
#[path = "../../crates/daemon/src/together.rs"]
mod together;

libfuzzer_sys::fuzz_target!(|text: &str| config::Config::check(text));
