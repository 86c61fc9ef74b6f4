#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rbd::check_lock_answer(data));
