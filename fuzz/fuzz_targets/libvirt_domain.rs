#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| ringdisk::fuzzing::domain(text));
