//! The checks of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in
//! `fuzz/seeds`, and with bytes changed in them.

use crate::checks;

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn directory(target: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds")).join(target)
}

/// The files are what the code makes of them; `RINGDISK_WRITE_SEEDS=1` writes them. Files of other names
/// are inputs that once found something, and stay.
#[test]
fn seeds_match_the_generator() {
    let write = std::env::var_os("RINGDISK_WRITE_SEEDS").is_some();
    let of = |target: &'static str, seeds: checks::Seeds| {
        seeds
            .into_iter()
            .map(move |(name, bytes)| (target, name, bytes))
    };
    let all = of("qcow2", checks::seeds()).chain(of("journal", checks::journal_seeds()));
    for (target, name, bytes) in all {
        let file = directory(target).join(name);
        if write {
            fs::create_dir_all(directory(target)).unwrap();
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
    let seeds = |target| {
        let files = fs::read_dir(directory(target)).unwrap();
        let read = files.map(|file| {
            let path = file.unwrap().path();
            println!("{}", path.display());
            fs::read(path).unwrap()
        });
        read.collect::<Vec<_>>()
    };
    let images = seeds("qcow2");
    assert!(images.len() > 30);
    images.iter().for_each(|bytes| checks::image(bytes));
    let done: Vec<u64> = seeds("journal")
        .iter()
        .map(|b| checks::journal(b))
        .collect();
    assert!(done.iter().filter(|&&n| n > 0).count() >= 8, "{done:?}");
}

#[test]
fn any_journals_hold() {
    let word = prop_oneof![
        0..20_u64,
        (0..20_u64).prop_map(|cluster| cluster * 512),
        (0..20_u64).prop_map(|cluster| (1 << 63) | (cluster * 512)),
        prop::sample::select(vec![1 << 55, 1 << 62, 1 << 63, u64::MAX, u64::MAX - 511]),
        any::<u64>(),
    ];
    let change = (0..6_u8, prop::array::uniform3(word)).prop_map(|(kind, words)| {
        let words = words.iter().flat_map(|word| word.to_le_bytes());
        [kind].into_iter().chain(words).collect::<Vec<u8>>()
    });
    // Clusters that are counted, so that others can lead to them.
    let counted = [
        &[3][..],
        &7_u64.to_le_bytes(),
        &1_u64.to_le_bytes(),
        &1_u64.to_le_bytes(),
    ]
    .concat();
    let input = (
        any::<bool>(),
        prop::collection::vec(change, 0..6),
        any::<[u8; 8]>(),
    );
    let input = input.prop_map(move |(count, changes, rest)| {
        let first = if count { &counted[..] } else { &[] };
        [&[0][..], first, &changes.concat(), &rest].concat()
    });
    let mut runner = TestRunner::new(Config {
        cases: 3000,
        failure_persistence: None,
        ..Config::default()
    });
    runner
        .run(&input, |bytes| {
            checks::journal(&bytes);
            Ok(())
        })
        .unwrap();
    // And the file itself, with any byte changed.
    let mut file = checks::journal_seeds()
        .into_iter()
        .find(|(name, _)| *name == "file")
        .unwrap()
        .1;
    for at in 1..file.len() {
        if (300..4097).contains(&at) {
            continue;
        }
        file[at] ^= 1 << (at % 8);
        checks::journal(&file);
        file[at] ^= 1 << (at % 8);
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
