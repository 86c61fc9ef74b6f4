//! The check of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in
//! `fuzz/seeds`, and with bytes changed in them.

mod checks;

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn directory() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/seeds/qcow2"
    ))
}

/// The files are what the code makes of them; `RINGDISK_WRITE_SEEDS=1` writes them. Files of other names
/// are inputs that once found something, and stay.
#[test]
fn seeds_are_as_the_code_makes_them() {
    let write = std::env::var_os("RINGDISK_WRITE_SEEDS").is_some();
    for (name, bytes) in checks::seeds() {
        let file = directory().join(name);
        if write {
            fs::create_dir_all(directory()).unwrap();
            fs::write(&file, &bytes).unwrap();
        }
        assert!(
            fs::read(&file).is_ok_and(|found| found == bytes),
            "{} is not what the test makes of it; RINGDISK_WRITE_SEEDS=1 writes it",
            file.display()
        );
    }
}

#[test]
fn seeds_hold() {
    let files: Vec<_> = fs::read_dir(directory()).unwrap().collect();
    assert!(files.len() > 30);
    for file in files {
        let path = file.unwrap().path();
        println!("{}", path.display());
        checks::image(&fs::read(path).unwrap());
    }
}

#[test]
fn any_bytes_hold() {
    let seeds: Vec<_> = checks::seeds()
        .into_iter()
        .map(|(_, bytes)| bytes)
        .collect();
    // Interesting numbers at interesting places: whole words of tables and of the header.
    let word = (
        0..512_usize,
        prop::sample::select(vec![
            0,
            1,
            511,
            512,
            513,
            1024,
            2048,
            1 << 30,
            1 << 55,
            1 << 56,
            1 << 62,
            1 << 63,
            (1 << 63) | 512,
            (1 << 63) | 1024,
            (1 << 63) | 2560,
            (1 << 62) | 2560,
            u64::MAX,
            u64::MAX - 511,
        ]),
    );
    let words = prop::collection::vec(word, 0..4);
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let input =
        (prop::sample::select(seeds), words, changes).prop_map(|(mut bytes, words, changes)| {
            for (place, word) in words {
                if let Some(at) = bytes.get_mut(place * 8..place * 8 + 8) {
                    at.copy_from_slice(&word.to_be_bytes());
                }
            }
            for (at, value) in changes {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = value;
                }
            }
            bytes
        });
    let mut runner = TestRunner::new(Config {
        cases: 3000,
        failure_persistence: None,
        ..Config::default()
    });
    runner
        .run(&input, |bytes| {
            checks::image(&bytes);
            Ok(())
        })
        .unwrap();
}
