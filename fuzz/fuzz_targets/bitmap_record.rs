#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringdisk::fuzzing::bitmap_record(data));
