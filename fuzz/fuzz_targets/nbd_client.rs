#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringdisk::fuzzing::nbd_client(data));
