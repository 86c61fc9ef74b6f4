//! The faulty engine is an engine: what it does to its submitter is what storage may do, and no more.

use std::sync::Arc;

use block::{Aio, Backing, Engine};
use proptest::prelude::*;
use testkit::conformance::{
    Subject, exercise, reports_watched_descriptors, runs_at_full_capacity, steps,
};
use testkit::faulty::{Faults, Faulty, MemoryDisk};

const BYTES: usize = 1 << 20;

const NONE: Faults = Faults {
    room: 64,
    address_alignment: 512,
    length_alignment: 512,
    ..Faults::NONE
};

fn engine(faults: Faults, seed: u64) -> (Faulty, Subject) {
    let mut engine = Faulty::new(MemoryDisk::new(BYTES), faults, seed).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap().into());
    let subject = Subject {
        file: engine.attach(&file, Backing::File, Aio::Auto).unwrap(),
        model: vec![0; BYTES],
        unit: 512,
        address_unit: 512,
    };
    (engine, subject)
}

proptest! {
    #[test]
    fn short_again_and_late(seed: u64, late in 0..8u64, steps in steps(80)) {
        let faults = Faults { short: 200, again: 100, late, ..NONE };
        let (mut engine, subject) = engine(faults, seed);
        exercise(&mut engine, &mut [subject], &steps);
    }
}

#[test]
fn without_faults() {
    let (mut engine, subject) = engine(NONE, 1);
    runs_at_full_capacity(&mut engine, &subject);
    reports_watched_descriptors(&mut engine, &subject);
}
