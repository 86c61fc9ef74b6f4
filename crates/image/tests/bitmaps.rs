//! Bitmaps that are stored in images: QEMU continues what we have stored, and the reverse, and no crash leaves one with
//! fewer bits than there were writes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use block::DirtyBitmap;
use image::{AllowedDirectories, LayerFormat, ZeroMode, check};
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

use crate::support::memory::{Memory, Replay, What};
use crate::support::{Disk, READ, WRITE};

macro_rules! needs_qemu {
    ($name:expr) => {
        if !qemu::is_there($name) {
            return;
        }
    };
}

/// The dirty ranges of a bitmap that was loaded.
pub fn dirty(bitmap: &DirtyBitmap) -> Vec<Range<u64>> {
    let (mut at, mut found) = (0, Vec::new());
    while let Some((is_dirty, len)) = bitmap.extent(at) {
        if is_dirty {
            found.push(at..at + len);
        }
        at += len;
    }
    found
}

/// The same operations, bit by bit.
#[derive(Clone, Debug)]
pub struct Bits {
    granularity: u64,
    pub size: u64,
    bits: BTreeSet<u64>,
}

impl Bits {
    pub fn new(granularity: u64, size: u64) -> Self {
        let bits = BTreeSet::new();
        Self {
            granularity,
            size,
            bits,
        }
    }

    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    pub fn mark(&mut self, at: u64, len: u64) {
        if len > 0 {
            let last = (at + len - 1) / self.granularity;
            self.bits.extend(at / self.granularity..=last);
        }
    }

    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for bit in &self.bits {
            let (start, end) = (bit * self.granularity, (bit + 1) * self.granularity);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        if let Some(last) = ranges.last_mut() {
            last.end = last.end.min(self.size);
        }
        ranges
    }
}

pub fn info(directory: &Path) -> String {
    let output = std::process::Command::new("qemu-img")
        .args(["info", "disk.qcow2"])
        .current_dir(directory)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Random changes to a disk, by us.
pub fn change(
    disk: &Disk,
    random: &mut Random,
    operations: u64,
    mut changed: impl FnMut(u64, u64),
) {
    let cluster = disk.chain.image().unwrap().cluster_bytes();
    for _ in 0..operations {
        let (at, len) = random.range(disk.chain.size(), cluster);
        let kind = random.below(5);
        if kind == 2 {
            disk.flush().unwrap();
            continue;
        }
        changed(at, len);
        match kind {
            0 => disk.zero(at, len, ZeroMode::Discard).unwrap(),
            1 => {
                let unmap = random.one_in(2);
                disk.zero(at, len, ZeroMode::Zeroes { unmap }).unwrap();
            }
            _ => disk.write(at, &vec![7; len as usize]).unwrap(),
        }
    }
}

/// The same by QEMU. Returns the ranges.
pub fn change_by_qemu(directory: &Path, random: &mut Random, size: u64) -> Vec<(u64, u64)> {
    let (mut commands, mut ranges) = (Vec::new(), Vec::new());
    for number in 0..4 {
        let (at, len) = random.range(size, 65536);
        commands.push(match number {
            0 => format!("write -z {at} {len}"),
            1 => format!("discard {at} {len}"),
            _ => format!("write -P 9 {at} {len}"),
        });
        ranges.push((at, len));
    }
    qemu::io(
        directory,
        "disk.qcow2",
        &["-f", "qcow2", "-d", "unmap"],
        &commands,
    );
    ranges
}

#[test]
fn stored_bitmaps_continue_here_and_in_qemu() {
    needs_qemu!("stored_bitmaps_continue_here_and_in_qemu");
    for (options, size, granularities) in [
        ("cluster_size=64k", 64 << 20, [512, 65536]),
        ("cluster_size=512", 3 << 20, [512, 4096]),
        (
            "cluster_size=4k,extended_l2=off",
            (5 << 20) + 512,
            [1024, 1 << 21],
        ),
        ("cluster_size=2M", 33 << 20, [4096, 32768]),
        (
            "cluster_size=16k,extended_l2=on,lazy_refcounts=on",
            8 << 20,
            [512, 65536],
        ),
        (
            "cluster_size=64k,data_file=data,data_file_raw=on",
            8 << 20,
            [512, 65536],
        ),
    ] {
        for seed in seeds(700, 1) {
            alternate(options, size, granularities, seed);
        }
    }
}

/// We and QEMU write in turn.
fn alternate(options: &str, mut size: u64, granularities: [u64; 2], seed: u64) {
    let place = format!("{options}, seed {seed}");
    println!("{place}");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    let mut random = Random(seed);
    qemu::img(
        directory,
        &format!("create -q -f qcow2 -o {options} disk.qcow2 {size}"),
    );
    let mut models = Vec::new();
    for (number, granularity) in granularities.into_iter().enumerate() {
        let add = format!("bitmap --add -g {granularity} disk.qcow2 b{number}");
        qemu::img(directory, &add);
        models.push(Bits::new(granularity, size));
    }
    // A bitmap that tracks nothing, with bits.
    qemu::img(directory, "bitmap --add -g 4096 disk.qcow2 frozen");
    let mut frozen = Bits::new(4096, size);
    for (at, len) in change_by_qemu(directory, &mut random, size) {
        frozen.mark(at, len);
        models.iter_mut().for_each(|model| model.mark(at, len));
    }
    qemu::img(directory, "bitmap --disable disk.qcow2 frozen");
    for round in 0..4 {
        let disk = Disk::open(&file, WRITE).unwrap();
        let bitmaps = disk.chain.image().unwrap().bitmaps().clone();
        for (number, model) in models.iter().enumerate() {
            let bitmap = bitmaps.find(&format!("b{number}")).unwrap();
            assert_eq!(dirty(&bitmap), model.ranges(), "{place}, round {round}");
            assert!(bitmap.is_recording());
        }
        let found = bitmaps.find("frozen").unwrap();
        assert_eq!(dirty(&found), frozen.ranges(), "{place}, round {round}");
        assert!(!found.is_recording());
        change(&disk, &mut random, 30, |at, len| {
            models.iter_mut().for_each(|model| model.mark(at, len));
        });
        if round > 0 {
            // Beyond what the tables had room for.
            size += if round == 1 { 512 } else { size };
            disk.grow(size).unwrap();
            models
                .iter_mut()
                .chain([&mut frozen])
                .for_each(|model| model.size = size);
            change(&disk, &mut random, 10, |at, len| {
                models.iter_mut().for_each(|model| model.mark(at, len));
            });
        }
        if random.one_in(2) {
            // As at an external snapshot that fails: closed, and still in use.
            disk.chain.close().unwrap();
            change(&disk, &mut random, 10, |at, len| {
                models.iter_mut().for_each(|model| model.mark(at, len));
            });
        }
        disk.chain.close().unwrap();
        drop(disk);
        assert!(
            !info(directory).contains("in-use"),
            "{place}: {}",
            info(directory)
        );
        qemu::check(directory, "disk.qcow2", false);
        for (number, model) in models.iter().enumerate() {
            let found = qemu::dirty(directory, "disk.qcow2", &format!("b{number}"));
            assert_eq!(found, model.ranges(), "{place}, round {round}");
        }
        let found = qemu::dirty(directory, "disk.qcow2", "frozen");
        assert_eq!(found, frozen.ranges(), "{place}, round {round}");
        for (at, len) in change_by_qemu(directory, &mut random, size) {
            models.iter_mut().for_each(|model| model.mark(at, len));
        }
    }
    qemu::img(directory, "bitmap --add -g 65536 disk.qcow2 all");
    qemu::img(directory, "bitmap --merge b0 disk.qcow2 all");
    qemu::img(directory, "bitmap --remove disk.qcow2 b1");
    qemu::check(directory, "disk.qcow2", false);
}

#[test]
fn bitmaps_follow_writes_of_several_threads() {
    needs_qemu!("bitmaps_follow_writes_of_several_threads");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    let size = 64 << 20;
    qemu::img(directory, &format!("create -q -f qcow2 disk.qcow2 {size}"));
    qemu::img(directory, "bitmap --add -g 512 disk.qcow2 b0");
    let disk = Disk::open(&file, WRITE).unwrap();
    let model = Mutex::new(Bits::new(512, size));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (disk, model) = (&disk, &model);
            scope.spawn(move || {
                let mut done = Vec::new();
                change(disk, &mut Random(thread), 200, |at, len| {
                    done.push((at, len))
                });
                let mut model = model.lock().unwrap();
                done.into_iter().for_each(|(at, len)| model.mark(at, len));
            });
        }
    });
    disk.chain.close().unwrap();
    drop(disk);
    let want = model.into_inner().unwrap().ranges();
    assert!(want.len() > 50);
    assert_eq!(qemu::dirty(directory, "disk.qcow2", "b0"), want);
    qemu::check(directory, "disk.qcow2", false);
}

pub fn in_memory(memory: &Memory, directory: &Path, how: crate::support::How) -> Disk {
    let allowed = AllowedDirectories::of_image(&directory.join("x")).unwrap();
    let path = directory.join("disk.qcow2");
    let storage = Arc::new(memory.clone());
    Disk::with(storage, &path, LayerFormat::Qcow2, &allowed, how).unwrap()
}

/// What must be dirty in the two bitmaps from a mark on, and the size of the disk.
struct Moment {
    bits: [Bits; 2],
    /// The bitmaps must be there: nothing was written since they were stored.
    is_stored: bool,
}

/// Sessions with few writes, so that most of what is written is about bitmaps.
fn sessions(memory: &Memory, directory: &Path, random: &mut Random) -> Vec<Moment> {
    let mut size = 256 << 10;
    let mut bits = [Bits::new(512, size), Bits::new(4096, size)];
    let mut moments: Vec<Moment> = Vec::new();
    let mut mark = |bits: &[Bits; 2], is_stored| {
        memory.mark(moments.len() as u64);
        let bits = bits.clone();
        moments.push(Moment { bits, is_stored });
    };
    memory.record();
    for session in 0..8 {
        let disk = in_memory(memory, directory, WRITE);
        mark(&bits, true);
        for _ in 0..1 + random.below(3) {
            change(&disk, random, 1, |at, len| {
                bits.iter_mut().for_each(|bits| bits.mark(at, len));
                mark(&bits, false);
            });
        }
        if session % 3 == 2 {
            // The tables move.
            size *= 2;
            bits.iter_mut().for_each(|bits| bits.size = size);
            mark(&bits, false);
            disk.grow(size).unwrap();
        }
        disk.chain.close().unwrap();
        mark(&bits, true);
    }
    moments
}

/// An image with two bitmaps, whose second entry is in two sectors.
pub fn image_with_two_bitmaps(directory: &Path) -> Vec<u8> {
    let create = "create -q -f qcow2 -o cluster_size=512 disk.qcow2 256k";
    qemu::img(directory, create);
    let first = "a".repeat(456);
    qemu::img(
        directory,
        &format!("bitmap --add -g 512 disk.qcow2 {first}"),
    );
    qemu::img(directory, "bitmap --add -g 4096 disk.qcow2 second");
    std::fs::read(directory.join("disk.qcow2")).unwrap()
}

#[test]
fn crashes_leave_no_bitmap_with_fewer_bits() {
    needs_qemu!("crashes_leave_no_bitmap_with_fewer_bits");
    let (mut cuts, mut usable, mut lost) = (0, 0, 0);
    for seed in seeds(1200, 60) {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let start = image_with_two_bitmaps(directory);
        let memory = Memory::new(start.clone());
        let mut random = Random(seed);
        let moments = sessions(&memory, directory, &mut random);
        let events = memory.take_events();
        let mut replay = Replay::new(vec![start]);
        let mut moment: Option<&Moment> = None;
        for (number, event) in events.iter().enumerate() {
            let is_at_mark = matches!(event.what, What::Mark(_));
            if number > 0 && !is_at_mark {
                let crashed = replay.crash(&mut random).remove(0);
                let place = format!("seed {seed}, event {number}");
                let found = after_crash(crashed, directory, moment.unwrap(), &place);
                (cuts, usable, lost) = (cuts + 1, usable + found, lost + 2 - found);
            }
            if let What::Mark(number) = event.what {
                moment = Some(&moments[number as usize]);
            }
            replay.event(event, &mut random);
        }
    }
    println!("{cuts} crashes: {usable} bitmaps usable, {lost} lost");
    if std::env::var_os("RINGDISK_TEST_SEED").is_none() {
        assert!(cuts >= 10_000, "only {cuts}");
        assert!(usable > 1000 && lost > 1000, "{usable} {lost}");
    }
}

/// Looks at what a crash has left. Returns how many bitmaps are usable.
fn after_crash(bytes: Vec<u8>, directory: &Path, moment: &Moment, place: &str) -> u32 {
    let memory = Memory::new(bytes.clone());
    let report = check(&memory).unwrap();
    assert_eq!(report.errors, 0, "{place}: {report:?}");
    let disk = in_memory(&memory, directory, WRITE);
    let image = disk.chain.image().unwrap();
    let loaded = image.bitmaps().all();
    let unusable = image.unusable_bitmaps();
    assert_eq!(loaded.len() + unusable.len(), 2, "{place}: {unusable:?}");
    for unusable in &unusable {
        assert!(unusable.why.contains("in use"), "{place}: {unusable:?}");
        assert!(!moment.is_stored, "{place}: {unusable:?}");
    }
    // The disk was empty, and so were the bitmaps.
    let content = disk.content().unwrap();
    let sectors = content.chunks(512).enumerate();
    let written: Vec<_> = sectors
        .filter(|(_, sector)| sector.iter().any(|&byte| byte != 0))
        .map(|(number, _)| number as u64 * 512)
        .collect();
    for bitmap in &loaded {
        let bits = &moment.bits[usize::from(bitmap.name() == "second")];
        for &at in &written {
            let is_dirty = bitmap.extent(at).unwrap().0;
            assert!(is_dirty, "{place}: {bitmap:?} lacks {at}");
        }
        if moment.is_stored {
            assert_eq!(dirty(bitmap), bits.ranges(), "{place}");
        }
    }
    // One that was in use is not continued, and does no harm.
    disk.write(0, &[1; 512]).unwrap();
    disk.chain.close().unwrap();
    let report = check(&memory).unwrap();
    assert_eq!(report.errors, 0, "{place}: {report:?}");
    let again = in_memory(&memory, directory, WRITE);
    let image = again.chain.image().unwrap();
    assert_eq!(image.bitmaps().all().len(), loaded.len(), "{place}");
    loaded.len() as u32
}

#[test]
fn full_storage_loses_the_bitmap_only() {
    needs_qemu!("full_storage_loses_the_bitmap_only");
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(
        directory,
        "create -q -f qcow2 -o cluster_size=64k disk.qcow2 128M",
    );
    qemu::img(directory, "bitmap --add -g 512 disk.qcow2 b0");
    let memory = Memory::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    let disk = in_memory(&memory, directory, WRITE);
    let image = disk.chain.image().unwrap();
    let told = Arc::new(AtomicU32::new(0));
    let counter = told.clone();
    image.on_bitmap_lost(move |name, error| {
        assert_eq!(name, "b0");
        assert!(error.to_string().contains("file"), "{error}");
        counter.fetch_add(1, Ordering::Relaxed);
    });
    // The file may have 8 MiB. Fill it.
    let mut written = 0;
    while disk.write(written << 16, &[1; 65536]).is_ok() {
        written += 1;
    }
    assert!(written > 50);
    disk.chain.close().unwrap();
    assert_eq!(told.load(Ordering::Relaxed), 1);
    std::fs::write(directory.join("disk.qcow2"), memory.bytes()).unwrap();
    qemu::check(directory, "disk.qcow2", false);
    assert!(info(directory).contains("in-use"));
    let disk = in_memory(&memory, directory, WRITE);
    assert!(
        disk.chain.image().unwrap().unusable_bitmaps()[0]
            .why
            .contains("in use")
    );
    let mut sector = [0; 512];
    disk.read((written - 1) << 16, &mut sector).unwrap();
    assert_eq!(sector, [1; 512]);
}

/// Where a word of 4 bytes is in a file.
fn position(bytes: &[u8], word: &[u8]) -> usize {
    bytes
        .windows(word.len())
        .position(|found| found == word)
        .unwrap()
}

#[test]
fn damaged_bitmaps_are_not_used() {
    needs_qemu!("damaged_bitmaps_are_not_used");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 4M");
    qemu::img(directory, "bitmap --add -g 4096 disk.qcow2 b0");
    qemu::io(
        directory,
        "disk.qcow2",
        &["-f", "qcow2"],
        &["write 0 64k".into()],
    );
    let good = std::fs::read(&file).unwrap();
    // The extension has the offset of the directory, the directory that of the table, the table that of the bits.
    let word = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    };
    let extension = position(&good, &0x2385_2875_u32.to_be_bytes()) + 8;
    let entry = word(&good, extension + 16);
    let table = word(&good, entry);
    let bits = word(&good, table) as u64;
    let cases: &[(usize, Vec<u8>, &str)] = &[
        (entry + 24, vec![0], "its name"),
        (entry + 17, vec![8], "granularity"),
        (entry + 17, vec![32], "granularity"),
        (entry + 8, vec![0, 0, 0, 2], "size"),
        (entry, 0_u64.to_be_bytes().into(), "damaged"),
        (entry, (1_u64 << 50).to_be_bytes().into(), "damaged"),
        (entry, bits.to_be_bytes().into(), "invalid entry"),
        (entry + 12, vec![0, 0, 1, 2], "unknown type"),
        (entry + 16, vec![2], "unknown type"),
        (entry + 20, vec![0xff; 4], "unknown type"),
        (table, (bits | 1).to_be_bytes().into(), "invalid entry"),
        (
            table,
            (bits | 1 << 60).to_be_bytes().into(),
            "invalid entry",
        ),
        (table, (bits + 512).to_be_bytes().into(), "invalid entry"),
        (table, (table as u64).to_be_bytes().into(), "damaged"),
        (table, (1_u64 << 40).to_be_bytes().into(), "damaged"),
        (table, 65536_u64.to_be_bytes().into(), "damaged"),
        (extension, vec![0, 0, 0, 9], "unknown type"),
        (extension + 8, vec![0x7f; 8], "directory cannot be"),
        (extension + 16, vec![0x7f; 8], "directory cannot be"),
    ];
    for (at, patch, says) in cases {
        let mut bytes = good.clone();
        bytes[*at..at + patch.len()].copy_from_slice(patch);
        let memory = Memory::new(bytes);
        let disk = in_memory(&memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        assert!(image.bitmaps().all().is_empty(), "{at} {patch:?}");
        let unusable = image.unusable_bitmaps();
        assert!(
            unusable[0].why.contains(says),
            "{at} {patch:?}: {unusable:?}"
        );
        disk.write(1 << 20, &[1; 4096]).unwrap();
        disk.chain.close().unwrap();
        drop(disk);
        // The program that made it must not treat it as up to date.
        let after = memory.bytes();
        let is_marked = after[entry + 15] & 1 != 0 || after[95] & 1 == 0;
        assert!(is_marked, "{at} {patch:?}");
        let disk = in_memory(&memory, directory, READ);
        let mut sector = [0; 512];
        disk.read(1 << 20, &mut sector).unwrap();
        assert_eq!(sector, [1; 512]);
    }
}

/// A program that does not know bitmaps gives their clusters to something else, and leaves the extension. One that is damaged
/// may name a place behind the end of the file.
#[test]
fn outdated_directories_do_not_disturb_the_disk() {
    needs_qemu!("outdated_directories_do_not_disturb_the_disk");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    qemu::img(
        directory,
        "create -q -f qcow2 -o cluster_size=4k disk.qcow2 4M",
    );
    qemu::img(directory, "bitmap --add -g 4096 disk.qcow2 b0");
    let good = std::fs::read(&file).unwrap();
    let mut outdated = good.clone();
    outdated[95] &= !1;
    std::fs::write(&file, &outdated).unwrap();
    qemu::img(directory, "check -q -r leaks disk.qcow2");
    let mut outdated = std::fs::read(&file).unwrap();
    // QEMU removes the extension. Other programs leave it.
    outdated[..4096].copy_from_slice(&good[..4096]);
    outdated[95] &= !1;
    let mut behind = good.clone();
    let extension = position(&good, &0x2385_2875_u32.to_be_bytes()) + 8;
    behind[extension + 16..extension + 24].copy_from_slice(&(1_u64 << 20).to_be_bytes());
    // A copy of the directory in a free cluster, as QEMU leaves them.
    let (mut free, at) = (good.clone(), 512 << 10);
    free.resize(1 << 20, 0);
    let directory_at = be64(&good, extension + 16);
    let entry = good[directory_at..directory_at + 32].to_vec();
    free[at..at + 32].copy_from_slice(&entry);
    free[extension + 16..extension + 24].copy_from_slice(&(at as u64).to_be_bytes());
    // Zeroes.
    let mut empty = free.clone();
    empty[at..at + 32].fill(0);
    // The refcount table.
    let mut table = good.clone();
    table.copy_within(48..56, extension + 16);
    let mut reserved = good.clone();
    reserved[extension + 7] = 1;
    for (bytes, why) in [
        (outdated, "not in use"),
        (behind, "behind the end"),
        (free, "free"),
        (empty, "empty"),
        (table, "the refcount table"),
        (reserved, "a reserved field"),
    ] {
        let memory = Memory::new(bytes);
        let disk = in_memory(&memory, directory, WRITE);
        for at in (0..4 << 20).step_by(4096) {
            disk.write(at, &[1; 4096])
                .unwrap_or_else(|e| panic!("{why}: {at}: {e}"));
        }
        disk.chain.close().unwrap();
        drop(disk);
        std::fs::write(&file, memory.bytes()).unwrap();
        qemu::check(directory, "disk.qcow2", true);
        let disk = in_memory(&memory, directory, WRITE);
        let mut all = vec![0; 4 << 20];
        disk.read(0, &mut all).unwrap();
        assert!(all.iter().all(|&byte| byte == 1), "{why}");
        // It can be removed, and takes nothing along.
        let image = disk.chain.image().unwrap();
        assert_eq!(image.unusable_bitmaps().len(), 1, "{why}");
        image.remove_stored_bitmaps(&[""]).unwrap();
        assert_eq!(image.unusable_bitmaps(), [], "{why}");
        disk.read(0, &mut all).unwrap();
        disk.chain.close().unwrap();
        drop(disk);
        std::fs::write(&file, memory.bytes()).unwrap();
        assert!(!info(directory).contains("bitmaps"), "{why}");
    }
}

fn be64(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Entries 0 and 1 of a table mean all zeroes and all ones, and extra data stays as it is.
#[test]
fn tables_without_clusters_and_extra_data_are_kept() {
    needs_qemu!("tables_without_clusters_and_extra_data_are_kept");
    for (flags, is_used) in [(2_u8, false), (6, true)] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(
            directory,
            "create -q -f qcow2 -o cluster_size=512 disk.qcow2 4M",
        );
        qemu::img(directory, "bitmap --add -g 512 disk.qcow2 b0");
        let mut bytes = std::fs::read(&file).unwrap();
        let word = |bytes: &[u8], at: usize| {
            u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
        };
        let extension = position(&bytes, &0x2385_2875_u32.to_be_bytes()) + 8;
        let entry = word(&bytes, extension + 16);
        let table = word(&bytes, entry);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        // The second cluster of bits is all ones: bits 4096 to 8191.
        bytes[table + 8 + 7] = 1;
        // 8 bytes of extra data, before the name.
        bytes[entry + 15] = flags;
        bytes[entry + 23] = 8;
        bytes[entry + 24..entry + 40].copy_from_slice(b"extra123b0\0\0\0\0\0\0");
        bytes[extension + 15] = 40;
        let memory = Memory::new(bytes);
        let disk = in_memory(&memory, directory, WRITE);
        let bitmap = disk.chain.image().unwrap().bitmaps().find("b0");
        assert_eq!(bitmap.is_some(), is_used);
        disk.write(0, &[1; 512]).unwrap();
        disk.chain.close().unwrap();
        let after = memory.bytes();
        assert_eq!(&after[entry + 24..entry + 34], b"extra123b0");
        if let Some(bitmap) = bitmap {
            assert_eq!(dirty(&bitmap), [0..512, 4096 << 9..8192 << 9]);
            assert_eq!(after[entry + 15], 6);
            // A program that knows such extra data reads the same. QEMU does not, so it is taken out.
            let mut without = after.clone();
            without[entry + 15] = 2;
            without[entry + 23] = 0;
            without[entry + 24..entry + 40].copy_from_slice(b"b0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
            without[extension + 15] = 32;
            std::fs::write(&file, without).unwrap();
            qemu::check(directory, "disk.qcow2", false);
            assert_eq!(qemu::dirty(directory, "disk.qcow2", "b0"), dirty(&bitmap));
        } else {
            assert_eq!(after[entry + 15], 3);
        }
    }
}
