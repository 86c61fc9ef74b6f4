//! Bitmaps in use whose bits are recorded elsewhere: after a power cut they continue, and have every bit.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use block::DirtyBitmap;
use image::{AllowedDirectories, Generations, JournalFile, LayerFormat};
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

use crate::bitmaps::{Bits, change, dirty, image_with_two_bitmaps, in_memory};
use crate::support::memory::{Memory, Replay, What};
use crate::support::{Disk, HostFiles, WRITE};

/// What a process has recorded elsewhere, durably, about the bitmaps of an image in use.
#[derive(Clone)]
struct Record {
    /// The bits of a checkpoint.
    checkpoint: [Bits; 2],
    /// The regions that may have changed since.
    noted: BTreeSet<u64>,
    generations: Generations,
    /// What must be dirty.
    bits: [Bits; 2],
}

const REGION: u64 = 16 << 10;

/// A journal that a crash of the host takes away.
fn in_memory_with_journal(memory: &Memory, directory: &Path) -> Disk {
    let allowed = AllowedDirectories::of_image(&directory.join("x")).unwrap();
    let path = directory.join("disk.qcow2");
    let journal = JournalFile {
        storage: Arc::new(Memory::new(Vec::new())),
        identity: [7; 32],
        is_of_earlier_file: false,
        on_event: Box::new(|_| ()),
    };
    let (storage, files) = (Arc::new(memory.clone()), &mut HostFiles);
    let with = (files as &mut dyn image::OpenFiles, Some(journal));
    Disk::with_journal(storage, &path, LayerFormat::Qcow2, &allowed, WRITE, with).unwrap()
}

/// Sessions of which each records what it does to the bitmaps.
fn recorded_sessions(memory: &Memory, directory: &Path, random: &mut Random) -> Vec<Record> {
    let mut size = 256 << 10;
    let mut bits = [Bits::new(512, size), Bits::new(4096, size)];
    let mut records: Vec<Record> = Vec::new();
    let mut mark = |record: &Record| {
        memory.mark(records.len() as u64);
        records.push(record.clone());
    };
    memory.record();
    for session in 0..6 {
        let disk = in_memory_with_journal(memory, directory);
        let image = disk.chain.image().unwrap();
        let generations = || image.generations().unwrap();
        let mut record = Record {
            checkpoint: bits.clone(),
            noted: BTreeSet::new(),
            generations: generations(),
            bits: bits.clone(),
        };
        mark(&record);
        for number in 0..2 + random.below(4) {
            change(&disk, random, 1, |at, len| {
                bits.iter_mut().for_each(|bits| bits.mark(at, len));
                record
                    .noted
                    .extend(at / REGION..=(at + len.max(1) - 1) / REGION);
                record.generations = generations();
                record.bits = bits.clone();
                mark(&record);
            });
            if number == 2 && session % 3 == 2 {
                // The tables move when they are stored.
                size *= 2;
                bits.iter_mut().for_each(|bits| bits.size = size);
                record.bits = bits.clone();
                mark(&record);
                disk.grow(size).unwrap();
            }
            if random.one_in(3) {
                (record.checkpoint, record.noted) = (bits.clone(), BTreeSet::new());
                mark(&record);
            }
        }
        disk.chain.close().unwrap();
    }
    records
}

#[test]
fn recorded_bitmaps_survive_crashes() {
    if !qemu::is_there("recorded_bitmaps_survive_crashes") {
        return;
    }
    let (mut cuts, mut continued) = (0, 0);
    for seed in seeds(1300, 60) {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let start = image_with_two_bitmaps(directory);
        let memory = Memory::new(start.clone());
        let mut random = Random(seed);
        let records = recorded_sessions(&memory, directory, &mut random);
        let events = memory.take_events();
        let mut replay = Replay::new(vec![start]);
        let mut record = &records[0];
        for (number, event) in events.iter().enumerate() {
            if let What::Mark(number) = event.what {
                record = &records[number as usize];
            } else if number > 0 {
                let crashed = replay.crash(&mut random).remove(0);
                let place = format!("seed {seed}, event {number}");
                continued += u32::from(continue_after_crash(crashed, directory, record, &place));
                cuts += 1;
            }
            replay.event(event, &mut random);
        }
    }
    println!("{cuts} crashes, {continued} with bitmaps in use");
    if std::env::var_os("RINGDISK_TEST_SEED").is_none() {
        assert!(cuts >= 10_000, "only {cuts}");
        assert!(continued > 1000, "{continued}");
    }
}

/// Continues with what a crash has left. Returns whether a bitmap was in use.
fn continue_after_crash(bytes: Vec<u8>, directory: &Path, record: &Record, place: &str) -> bool {
    let memory = Memory::new(bytes);
    let disk = in_memory_with_journal(&memory, directory);
    let image = disk.chain.image().unwrap();
    // The others are in the image, and nothing was written since.
    let in_use = image.unusable_bitmaps().into_iter();
    let in_use: Vec<_> = in_use.map(|bitmap| bitmap.name).collect();
    let is_continued = image.is_continued(&record.generations, false);
    assert!(is_continued || in_use.is_empty(), "{place}");
    if is_continued {
        let names = ["a".repeat(456), "second".to_owned()];
        let bitmaps = record.checkpoint.iter().zip(names).map(|(bits, name)| {
            let granularity = bits.granularity();
            let bits_of = granularity.trailing_zeros();
            let bitmap = DirtyBitmap::new(name, bits_of, image.size(), true, true).unwrap();
            for range in bits.ranges() {
                bitmap.mark(range.start, range.end - range.start);
            }
            for region in &record.noted {
                bitmap.mark(region * REGION, REGION);
            }
            Arc::new(bitmap)
        });
        let unusable = image.continue_bitmaps(bitmaps.collect()).unwrap();
        assert!(unusable.is_empty(), "{place}: {unusable:?}");
    }
    let check = |disk: &Disk| {
        let content = disk.content().unwrap();
        let image = disk.chain.image().unwrap();
        assert_eq!(image.unusable_bitmaps(), [], "{place}");
        let all = image.bitmaps().all();
        assert_eq!(all.len(), 2, "{place}");
        for bitmap in all {
            let bits = &record.bits[usize::from(bitmap.name() == "second")];
            for (at, sector) in (0..).step_by(512).zip(content.chunks(512)) {
                // The disk was empty, and so were the bitmaps.
                let is_written = sector.iter().any(|&byte| byte != 0);
                let is_dirty = || bitmap.extent(at).unwrap().0;
                assert!(!is_written || is_dirty(), "{place}: {bitmap:?} lacks {at}");
            }
            let dirty = dirty(&bitmap);
            let was_in_use = in_use.iter().any(|name| name == bitmap.name());
            for range in bits.ranges().iter().filter(|_| was_in_use) {
                let has = |at: u64| at >= bitmap.size() || dirty.iter().any(|d| d.contains(&at));
                let all = (range.start..range.end).step_by(512).all(has);
                assert!(all, "{place}: {bitmap:?} lacks some of {range:?}");
            }
        }
    };
    check(&disk);
    disk.chain.close().unwrap();
    drop(disk);
    let report = image::check(&memory).unwrap();
    assert_eq!(report.errors, 0, "{place}: {report:?}");
    check(&in_memory(&memory, directory, WRITE));
    !in_use.is_empty()
}
