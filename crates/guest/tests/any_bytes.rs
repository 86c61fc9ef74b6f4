//! The checks of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in `fuzz/seeds`, and with
//! random bytes in their place and around them.

use std::fs;
use std::path::PathBuf;

use crate::checks::{
    Seeds, blk_request, changing_ring, inflight_region, packed_ring, session, split_ring,
    vhost_user_message,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// The name of the fuzz target, what it checks, and what it starts from.
type Target = (&'static str, fn(&[u8]), fn() -> Seeds);

const ALL: &[Target] = &[
    (
        "vhost_user_message",
        vhost_user_message::check,
        vhost_user_message::seeds,
    ),
    ("session", session::check, session::seeds),
    ("split_ring", split_ring::check, split_ring::seeds),
    ("packed_ring", packed_ring::check, packed_ring::seeds),
    ("changing_ring", changing_ring::check, changing_ring::seeds),
    ("blk_request", blk_request::check, blk_request::seeds),
    (
        "inflight_region",
        inflight_region::check,
        inflight_region::seeds,
    ),
];

fn directory(target: &str) -> PathBuf {
    let fuzz = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
    PathBuf::from(fuzz).join(target)
}

/// The files are what the code makes of them; `RINGDISK_WRITE_SEEDS=1` writes them. Files of other names are inputs that
/// once found something, and stay.
#[test]
fn seeds_match_the_generator() {
    let write = std::env::var_os("RINGDISK_WRITE_SEEDS").is_some();
    for (target, _, seeds) in ALL {
        let directory = directory(target);
        for (name, bytes) in seeds() {
            let file = directory.join(name);
            if write {
                fs::create_dir_all(&directory).unwrap();
                fs::write(&file, &bytes).unwrap();
            }
            assert!(
                fs::read(&file).is_ok_and(|found| found == bytes),
                "{} is not what the test makes of it; RINGDISK_WRITE_SEEDS=1 writes it",
                file.display()
            );
        }
    }
}

#[test]
fn seeds_hold() {
    for (target, check, _) in ALL {
        let files = fs::read_dir(directory(target)).unwrap();
        let inputs: Vec<_> = files
            .map(|file| fs::read(file.unwrap().path()).unwrap())
            .collect();
        assert!(inputs.len() > 3, "{target}");
        inputs.iter().for_each(|input| check(input));
    }
}

/// A seed with some bytes changed and its end cut off or prolonged, or bytes without any sense.
fn input(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12);
    let end = prop::option::of(any::<prop::sample::Index>());
    let tail = prop::collection::vec(any::<u8>(), 0..64);
    let changed = (prop::sample::select(seeds), changes, end, tail).prop_map(
        |(mut bytes, changes, end, tail)| {
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Some(end) = end {
                bytes.truncate(end.index(bytes.len()));
            }
            bytes.extend(tail);
            bytes
        },
    );
    prop_oneof![4 => changed, 1 => prop::collection::vec(any::<u8>(), 0..600)]
}

fn random(target: &str, cases: u32) {
    let (_, check, seeds) = ALL.iter().find(|t| t.0 == target).unwrap();
    let seeds = seeds().into_iter().map(|s| s.1).collect();
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&input(seeds), |bytes| {
            check(&bytes);
            Ok(())
        })
        .unwrap();
}

#[test]
fn any_message() {
    random("vhost_user_message", 20_000);
}

#[test]
fn any_session() {
    random("session", 4_000);
}

#[test]
fn any_ring() {
    random("split_ring", 20_000);
}

#[test]
fn any_packed_ring() {
    random("packed_ring", 20_000);
}

#[test]
fn any_changing_ring() {
    random("changing_ring", 3_000);
}

#[test]
fn any_request() {
    random("blk_request", 50_000);
}

#[test]
fn any_inflight_region() {
    random("inflight_region", 10_000);
}
