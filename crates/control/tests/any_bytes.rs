//! The checks of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in `fuzz/seeds/qmp`, with
//! these changed, with random bytes and with random JSON.

use crate::checks;

use std::fs;

use control::{Framer, Limits};
use proptest::prelude::*;
use serde_json::Value;

fn seeds() -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/qmp");
    let files = fs::read_dir(directory).unwrap();
    let seeds: Vec<_> = files
        .map(|file| fs::read(file.unwrap().path()).unwrap())
        .collect();
    assert!(seeds.len() > 3);
    seeds
}

#[test]
fn seeds_hold() {
    seeds().iter().for_each(|seed| checks::check(seed));
}

#[test]
fn oversized_messages_are_refused_and_skipped() {
    let mut long = vec![b' '; Limits::COMMAND.bytes + 1];
    long[0] = b'"';
    let deep = [b"[".repeat(65), b"]".repeat(65)].concat();
    let many = [&b"["[..], &b"1,".repeat(10_001), b"1]"].concat();
    for (message, says) in [
        (long, "more than 1048576 bytes"),
        (deep, "more than 64"),
        (many, "more than 10000 values"),
    ] {
        let bytes = [&message[..], b"\n{}"].concat();
        let mut framer = Framer::new(Limits::COMMAND);
        let mut input = &bytes[..];
        let error = framer.next(&mut input).unwrap().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(framer.next(&mut input), Some(Ok(b"{}".to_vec())));
        assert_eq!(framer.next(&mut input), None);
    }
    let largest = [&b"["[..], &b"1, ".repeat(9_999), b"1]"].concat();
    let mut framer = Framer::new(Limits::COMMAND);
    assert_eq!(framer.next(&mut &largest[..]), Some(Ok(largest.clone())));
}

/// A seed with some bytes changed and its end cut off or prolonged, or bytes without any sense.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12);
    let end = prop::option::of(any::<prop::sample::Index>());
    let tail = prop::collection::vec(any::<u8>(), 0..64);
    let changed = (prop::sample::select(seeds()), changes, end, tail).prop_map(
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
    let punctuation = prop::sample::select(&b"{}[]\",:\\ \n\xff1ae"[..]);
    prop_oneof![
        4 => changed,
        1 => prop::collection::vec(any::<u8>(), 0..600),
        2 => prop::collection::vec(punctuation, 0..100),
    ]
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(".{0,8}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(bytes in bytes()) {
        checks::check(&bytes);
    }

    /// Values one after the other come out as they went in, with or without something between them, wherever the
    /// stream is cut.
    #[test]
    fn any_values(
        values in prop::collection::vec((json(), any::<bool>()), 0..8),
        step in 1..50usize,
    ) {
        let mut bytes = Vec::new();
        for (value, apart) in &values {
            let text = if *apart {
                serde_json::to_string_pretty(value).unwrap()
            } else {
                value.to_string()
            };
            bytes.extend(text.as_bytes());
            // Numbers and keywords have no end of their own.
            if *apart || !(value.is_object() || value.is_array() || value.is_string()) {
                bytes.push(b'\n');
            }
        }
        let mut framer = Framer::new(Limits::COMMAND);
        let mut found = Vec::new();
        for mut input in bytes.chunks(step) {
            while let Some(message) = framer.next(&mut input) {
                found.push(serde_json::from_slice::<Value>(&message.unwrap()).unwrap());
            }
        }
        let values: Vec<_> = values.into_iter().map(|(value, _)| value).collect();
        prop_assert_eq!(found, values);
        prop_assert!(!framer.is_midway());
    }
}
