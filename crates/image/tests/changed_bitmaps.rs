//! Bitmaps that are added to images and removed from them while they are open: QEMU finds what we have stored, nothing
//! leaks, and no crash leaves a bitmap with fewer bits than there were writes since it was added.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use block::DirtyBitmap;
use image::{Qcow2, check};
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

use crate::bitmaps::{Bits, change_by_qemu, dirty, in_memory, info};
use crate::support::memory::{Memory, Replay, What};
use crate::support::{Disk, WRITE};

/// Changes the list of bitmaps as a command does.
fn set(image: &Qcow2, change: impl FnOnce(&mut Vec<Arc<DirtyBitmap>>)) {
    image.use_bitmaps().unwrap();
    let mut all = image.bitmaps().all();
    change(&mut all);
    image.set_bitmaps(all);
}

fn add(image: &Qcow2, name: &str, granularity: u64, size: u64) {
    image.check_new_bitmap().unwrap();
    let bits = granularity.trailing_zeros();
    let new = DirtyBitmap::new(name.into(), bits, size, true, true).unwrap();
    set(image, |all| all.push(Arc::new(new)));
}

fn remove(image: &Qcow2, name: &str) {
    image.remove_stored_bitmaps(&[name]).unwrap();
    set(image, |all| all.retain(|bitmap| bitmap.name() != name));
}

fn is_listed(directory: &Path, name: &str) -> bool {
    info(directory).contains(&format!("name: {name}\n"))
}

#[test]
fn added_and_removed_bitmaps_are_those_of_qemu() {
    if !qemu::is_there("added_and_removed_bitmaps_are_those_of_qemu") {
        return;
    }
    // A long name of the backing file is in the way of the header's extension, and moves.
    let long = format!("{}.raw", "b".repeat(200));
    for (options, size) in [
        ("-o cluster_size=64k".to_owned(), 64 << 20),
        ("-o cluster_size=512".into(), 1 << 20),
        ("-o cluster_size=2M".into(), 32 << 20),
        ("-o cluster_size=64k -b backing.raw -F raw".into(), 8 << 20),
        (format!("-o cluster_size=4k -b {long} -F raw"), 8 << 20),
        (
            "-o cluster_size=64k,data_file=data,data_file_raw=on".into(),
            8 << 20,
        ),
    ] {
        println!("{options}");
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        for name in ["backing.raw", &long] {
            std::fs::write(directory.join(name), vec![5; 1 << 20]).unwrap();
        }
        qemu::img(
            directory,
            &format!("create -q -f qcow2 {options} disk.qcow2 {size}"),
        );
        let content = qemu::content(directory, "disk.qcow2", "qcow2");
        add_and_remove(directory, &file, size);
        let mut now = qemu::content(directory, "disk.qcow2", "qcow2");
        // What add_and_remove does not write.
        let (kept, tail) = (512 << 10, now.split_off(768 << 10));
        assert!(now[..kept] == content[..kept] && tail == content[768 << 10..]);
    }
}

/// Writes only from 512 KiB to 768 KiB.
fn add_and_remove(directory: &Path, file: &Path, size: u64) {
    let mut models: BTreeMap<String, Bits> = BTreeMap::new();
    let mut random = Random(size);
    for round in 0..4_u64 {
        let disk = Disk::open(file, WRITE).unwrap();
        let image = disk.chain.image().unwrap();
        for number in 0..2 {
            let name = format!("b{}", round * 2 + number);
            let granularity = [512, 65536][number as usize];
            add(image, &name, granularity, size);
            models.insert(name, Bits::new(granularity, size));
            for _ in 0..5 {
                let (at, len) = random.range(256 << 10, 4096);
                let at = at + (512 << 10);
                disk.write(at, &vec![7; len as usize]).unwrap();
                models.values_mut().for_each(|model| model.mark(at, len));
            }
        }
        if round == 2 {
            remove(image, "b1");
            remove(image, "b5");
            models.retain(|name, _| name != "b1" && name != "b5");
            assert!(image.bitmaps().find("b1").is_none());
        }
        disk.chain.close().unwrap();
        if round == 3 {
            // Closed, as for an external snapshot that fails, and still in use.
            remove(image, "b6");
            models.remove("b6");
            disk.chain.close().unwrap();
        }
        drop(disk);
        qemu::check(directory, "disk.qcow2", false);
        assert!(!info(directory).contains("in-use"), "{}", info(directory));
        for (name, model) in &models {
            assert_eq!(
                qemu::dirty(directory, "disk.qcow2", name),
                model.ranges(),
                "{name}"
            );
        }
        for name in ["b1", "b5", "b6"] {
            let is_there = models.contains_key(name);
            assert_eq!(is_listed(directory, name), is_there, "{name}");
        }
    }
    qemu::img(directory, "bitmap --add -g 65536 disk.qcow2 theirs");
    qemu::img(directory, "bitmap --remove disk.qcow2 b0");
    models.remove("b0");
    // A killed process leaves them in use: they can only be removed.
    let disk = Disk::open(file, WRITE).unwrap();
    disk.write(512 << 10, &[8; 512]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    let disk = Disk::open(file, WRITE).unwrap();
    let image = disk.chain.image().unwrap();
    assert_eq!(image.unusable_bitmaps().len(), models.len() + 1);
    add(image, "last", 4096, size);
    for name in models.keys().map(String::as_str).chain(["theirs"]) {
        image.remove_stored_bitmaps(&[name]).unwrap();
    }
    assert_eq!(image.unusable_bitmaps(), []);
    disk.chain.close().unwrap();
    remove(image, "last");
    disk.chain.close().unwrap();
    drop(disk);
    assert!(!info(directory).contains("bitmaps"), "{}", info(directory));
    qemu::check(directory, "disk.qcow2", false);
    qemu::img(directory, "bitmap --add disk.qcow2 again");
    let disk = Disk::open(file, WRITE).unwrap();
    let found = disk.chain.image().unwrap().bitmaps().find("again");
    assert!(found.is_some());
}

#[test]
fn old_images_cannot_store_bitmaps() {
    if !qemu::is_there("old_images_cannot_store_bitmaps") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    qemu::img(directory, "create -q -f qcow2 -o compat=0.10 disk.qcow2 1M");
    let disk = Disk::open(&file, WRITE).unwrap();
    let image = disk.chain.image().unwrap();
    let why = image.check_new_bitmap().unwrap_err();
    assert!(why.contains("qcow2 v2"), "{why}");
}

#[test]
fn outdated_and_oddly_named_bitmaps_are_removed() {
    if !qemu::is_there("outdated_and_oddly_named_bitmaps_are_removed") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    let make = || {
        qemu::img(directory, "create -q -f qcow2 disk.qcow2 1M");
        qemu::img(directory, "bitmap --add disk.qcow2 first-of-two");
        qemu::img(directory, "bitmap --add disk.qcow2 second-of-two");
        std::fs::read(&file).unwrap()
    };
    // A program that does not know bitmaps clears the feature bit.
    let mut bytes = make();
    bytes[95] &= !1;
    std::fs::write(&file, bytes).unwrap();
    for left in [2, 0] {
        let disk = Disk::open(&file, WRITE).unwrap();
        let image = disk.chain.image().unwrap();
        assert_eq!(image.unusable_bitmaps().len(), left);
        remove(image, "first-of-two");
        assert_eq!(image.unusable_bitmaps(), []);
    }
    assert!(!info(directory).contains("bitmaps"), "{}", info(directory));
    // A name that is not UTF-8.
    let mut bytes = make();
    // QEMU leaves its old directories in the file.
    for at in 0..bytes.len() - 12 {
        if &bytes[at..at + 12] == b"first-of-two" {
            bytes[at] = 0xff;
        }
    }
    std::fs::write(&file, bytes).unwrap();
    let disk = Disk::open(&file, WRITE).unwrap();
    let image = disk.chain.image().unwrap();
    let odd = image.bitmaps().all()[0].name().to_owned();
    assert_eq!(odd, "\u{fffd}irst-of-two");
    remove(image, &odd);
    disk.chain.close().unwrap();
    drop(disk);
    let left = info(directory);
    assert!(left.contains("second-of-two") && !left.contains("irst-of-two"));
    qemu::check(directory, "disk.qcow2", false);
}

/// What must be known of the bitmaps from a mark on.
#[derive(Clone, Debug, Default)]
struct Moment {
    /// The bitmaps that there may be, and what the disk contained when they were added or cleared.
    bitmaps: BTreeMap<String, (Bits, Vec<u8>)>,
    /// Exactly these must be there, with exactly these bits: nothing was done since they were stored.
    is_stored: bool,
}

const SIZE: u64 = 128 << 10;

/// Sessions in which bitmaps come and go.
fn sessions(memory: &Memory, directory: &Path, random: &mut Random) -> Vec<Moment> {
    let mut moments = Vec::new();
    let mut now = Moment {
        is_stored: true,
        ..Moment::default()
    };
    let mut mark = |now: &Moment| {
        memory.mark(moments.len() as u64);
        moments.push(now.clone());
    };
    memory.record();
    for session in 0..6 {
        let disk = in_memory(memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        mark(&now);
        now.is_stored = false;
        for step in 0..2 + random.below(3) {
            let name = format!("n{}", random.below(3));
            let exists = now.bitmaps.contains_key(&name);
            match random.below(4) {
                0 if !exists => {
                    // The disk must have what the guest has read.
                    disk.flush().unwrap();
                    let granularity = 512 << (random.below(2) * 3);
                    let base = disk.content().unwrap();
                    let new = (Bits::new(granularity, SIZE), base);
                    now.bitmaps.insert(name.clone(), new);
                    mark(&now);
                    add(image, &name, granularity, SIZE);
                }
                1 if exists => {
                    mark(&now);
                    remove(image, &name);
                    now.bitmaps.remove(&name);
                    mark(&now);
                }
                2 if exists => {
                    mark(&now);
                    disk.flush().unwrap();
                    let (bits, base) = now.bitmaps.get_mut(&name).unwrap();
                    image.use_bitmaps().unwrap();
                    set(image, |all| {
                        for bitmap in all.iter_mut().filter(|bitmap| bitmap.name() == name) {
                            *bitmap = Arc::new(bitmap.cleared());
                        }
                    });
                    *base = disk.content().unwrap();
                    *bits = Bits::new(bits.granularity(), SIZE);
                    mark(&now);
                }
                _ => {
                    let (at, len) = random.range(SIZE, 4096);
                    let bitmaps = now.bitmaps.values_mut();
                    bitmaps.for_each(|(bits, _)| bits.mark(at, len));
                    mark(&now);
                    let byte = 1 + session * 16 + step as u8;
                    disk.write(at, &vec![byte; len as usize]).unwrap();
                }
            }
        }
        mark(&now);
        disk.chain.close().unwrap();
        now.is_stored = true;
        mark(&now);
    }
    moments
}

#[test]
fn crashes_leave_no_added_bitmap_with_fewer_bits() {
    if !qemu::is_there("crashes_leave_no_added_bitmap_with_fewer_bits") {
        return;
    }
    let (mut cuts, mut usable) = (0, 0);
    for seed in seeds(2300, 80) {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let backing = if seed % 3 == 0 {
            "-b xxxx.raw -F raw"
        } else {
            ""
        };
        std::fs::write(directory.join("xxxx.raw"), vec![0; SIZE as usize]).unwrap();
        qemu::img(
            directory,
            &format!("create -q -f qcow2 -o cluster_size=1k {backing} disk.qcow2 {SIZE}"),
        );
        let mut start = std::fs::read(directory.join("disk.qcow2")).unwrap();
        if seed % 3 == 1 {
            // An unknown extension as long as this puts that of the bitmaps in two sectors.
            start[112..512].fill(0);
            start[112..120].copy_from_slice(&[0x12, 0x34, 0x56, 0x78, 0, 0, 1, 0x70]);
        }
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
                usable += after_crash(crashed, directory, moment.unwrap(), &place);
                cuts += 1;
            }
            if let What::Mark(number) = event.what {
                moment = Some(&moments[number as usize]);
            }
            replay.event(event, &mut random);
        }
    }
    println!("{cuts} crashes, {usable} usable bitmaps");
    if std::env::var_os("RINGDISK_TEST_SEED").is_none() {
        assert!(cuts >= 10_000, "only {cuts}");
        assert!(usable > 1000, "{usable}");
    }
}

/// Looks at what a crash has left. Returns how many bitmaps are usable.
fn after_crash(bytes: Vec<u8>, directory: &Path, moment: &Moment, place: &str) -> u32 {
    let memory = Memory::new(bytes);
    let report = check(&memory).unwrap();
    assert_eq!(report.errors, 0, "{place}: {report:?}");
    let disk = in_memory(&memory, directory, WRITE);
    let image = disk.chain.image().unwrap();
    let loaded = image.bitmaps().all();
    let content = disk.content().unwrap();
    for bitmap in &loaded {
        let model = moment.bitmaps.get(bitmap.name());
        let (bits, base) =
            model.unwrap_or_else(|| panic!("{place}: {bitmap:?} is there again: {moment:?}"));
        for (number, (now, before)) in content.chunks(512).zip(base.chunks(512)).enumerate() {
            let at = number as u64 * 512;
            let is_dirty = bitmap.extent(at).unwrap().0;
            assert!(is_dirty || now == before, "{place}: {bitmap:?} lacks {at}");
        }
        if moment.is_stored {
            assert_eq!(dirty(bitmap), bits.ranges(), "{place}");
        }
    }
    if moment.is_stored {
        assert_eq!(loaded.len(), moment.bitmaps.len(), "{place}");
        assert_eq!(image.unusable_bitmaps(), [], "{place}");
    }
    // The image can be used as before.
    for bitmap in image.unusable_bitmaps() {
        image.remove_stored_bitmaps(&[&bitmap.name]).unwrap();
    }
    add(image, "afterwards", 512, SIZE);
    disk.write(0, &[1; 512]).unwrap();
    disk.chain.close().unwrap();
    let report = check(&memory).unwrap();
    assert_eq!(report.errors, 0, "{place}: {report:?}");
    let again = in_memory(&memory, directory, WRITE);
    let image = again.chain.image().unwrap();
    assert_eq!(image.bitmaps().all().len(), loaded.len() + 1, "{place}");
    let added = image.bitmaps().find("afterwards").unwrap();
    assert_eq!(dirty(&added), std::slice::from_ref(&(0..512)), "{place}");
    loaded.len() as u32
}

#[test]
fn failing_storage_gives_up_bitmaps_visibly() {
    if !qemu::is_there("failing_storage_gives_up_bitmaps_visibly") {
        return;
    }
    let (mut failed, mut given_up) = (0, 0);
    let cases = (1..60).flat_map(|fail_in| (0..4).map(move |case| (fail_in, case)));
    for (fail_in, case) in cases {
        let (is_killed, is_added) = (case & 1 != 0, case & 2 != 0);
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        qemu::img(directory, "create -q -f qcow2 disk.qcow2 1M");
        qemu::img(directory, "bitmap --add -g 512 disk.qcow2 old");
        let memory = Memory::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
        let disk = in_memory(&memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        let lost = Arc::new(AtomicU32::new(0));
        let counter = lost.clone();
        image.on_bitmap_lost(move |_, _| {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        if is_added {
            add(image, "new", 512, 1 << 20);
        }
        disk.write(0, &[1; 512]).unwrap();
        memory.fail_in(fail_in);
        let has_failed = disk.chain.close().is_err();
        failed += u32::from(has_failed);
        given_up += u32::from(lost.load(Ordering::Relaxed) > 0);
        memory.fail_in(0);
        // Another write, and a second attempt; or a kill.
        disk.write(4096, &[2; 512]).unwrap();
        let closed = if is_killed {
            Ok(())
        } else {
            disk.chain.close()
        };
        drop(disk);
        let report = check(&memory).unwrap();
        assert_eq!(report.errors, 0, "{fail_in}: {report:?}");
        let disk = in_memory(&memory, directory, WRITE);
        for bitmap in disk.chain.image().unwrap().bitmaps().all() {
            let bits = dirty(&bitmap);
            assert_eq!(
                bits,
                [0..512, 4096..4608],
                "{fail_in}: {bitmap:?} {closed:?}"
            );
        }
    }
    assert!(failed > 5 && given_up > 0, "{failed} {given_up}");
}

/// Wherever space runs out while bitmaps are stored, only bitmaps are lost, and the image is closed as usual.
#[test]
fn missing_space_loses_only_bitmaps() {
    if !qemu::is_there("missing_space_loses_only_bitmaps") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 1G");
    qemu::img(directory, "bitmap --add -g 512 disk.qcow2 old");
    qemu::img(directory, "bitmap --add -g 65536 disk.qcow2 small");
    let start = std::fs::read(directory.join("disk.qcow2")).unwrap();
    // How many bitmaps were lost with so much space.
    let mut seen = std::collections::BTreeSet::new();
    for space in 0.. {
        let memory = Memory::new(start.clone());
        let disk = in_memory(&memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        let lost = Arc::new(AtomicU32::new(0));
        let counter = lost.clone();
        image.on_bitmap_lost(move |_, error| {
            assert_eq!(error.errno(), 28, "{error}");
            counter.fetch_add(1, Ordering::Relaxed);
        });
        add(image, "new", 512, 1 << 30);
        // Another table for 'old' too.
        disk.grow(3 << 30).unwrap();
        for at in [0, 1 << 29, 2 << 30] {
            disk.write(at, &[1; 512]).unwrap();
        }
        disk.flush().unwrap();
        memory.limit_space(space);
        disk.chain
            .close()
            .unwrap_or_else(|e| panic!("{space} blocks: {e}"));
        drop(disk);
        let lost = lost.load(Ordering::Relaxed);
        seen.insert(lost);
        std::fs::write(directory.join("disk.qcow2"), memory.bytes()).unwrap();
        let report = check(&memory).unwrap();
        assert_eq!(report.errors, 0, "{space} blocks: {report:?}");
        let disk = in_memory(&memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        let found = image.bitmaps().all();
        for bitmap in &found {
            let bits = dirty(bitmap);
            let granularity = bitmap.granularity();
            let model = [0, 1 << 29, 2 << 30].map(|at| at..at + granularity);
            assert_eq!(bits, model, "{space} blocks: {bitmap:?}");
        }
        assert_eq!(found.len() as u32 + lost, 3, "{space} blocks");
        let mut sector = [0; 512];
        disk.read(2 << 30, &mut sector).unwrap();
        assert_eq!(sector, [1; 512], "{space} blocks");
        if lost == 0 {
            println!("{space} blocks are enough");
            break;
        }
    }
    assert!(seen.len() > 2, "{seen:?}");
}

/// Wherever space runs out while bitmaps are stored for another process that has them from elsewhere, this process can continue
/// with all of them, and store them once there is space.
#[test]
fn missing_space_in_a_handover_loses_no_bitmap() {
    if !qemu::is_there("missing_space_in_a_handover_loses_no_bitmap") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 1G");
    qemu::img(directory, "bitmap --add -g 512 disk.qcow2 old");
    let start = std::fs::read(directory.join("disk.qcow2")).unwrap();
    for space in 0.. {
        let memory = Memory::new(start.clone());
        let disk = in_memory(&memory, directory, WRITE);
        let image = disk.chain.image().unwrap();
        image.on_bitmap_lost(move |name, error| panic!("{space} blocks: {name}: {error}"));
        add(image, "new", 512, 1 << 30);
        disk.grow(3 << 30).unwrap();
        disk.write(0, &[1; 512]).unwrap();
        disk.flush().unwrap();
        memory.limit_space(space);
        let kept = AtomicU32::new(0);
        let stored = image.store_bitmaps_for_handover(|_, _| {
            kept.fetch_add(1, Ordering::Relaxed);
            true
        });
        stored.unwrap_or_else(|e| panic!("{space} blocks: {e}"));
        memory.limit_space(u64::MAX);
        disk.write(2 << 30, &[1; 512]).unwrap();
        disk.chain.close().unwrap();
        drop(disk);
        let report = check(&memory).unwrap();
        assert_eq!(report.errors, 0, "{space} blocks: {report:?}");
        let disk = in_memory(&memory, directory, WRITE);
        let found = disk.chain.image().unwrap().bitmaps().all();
        assert_eq!(found.len(), 2, "{space} blocks");
        for bitmap in &found {
            let model = [0, 2 << 30].map(|at| at..at + 512);
            assert_eq!(dirty(bitmap), model, "{space} blocks: {bitmap:?}");
        }
        if kept.into_inner() == 0 {
            println!("{space} blocks are enough");
            break;
        }
    }
}

#[test]
fn qemu_continues_added_bitmaps() {
    if !qemu::is_there("qemu_continues_added_bitmaps") {
        return;
    }
    for seed in seeds(31, 3) {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        let size = 16 << 20;
        qemu::img(directory, &format!("create -q -f qcow2 disk.qcow2 {size}"));
        let mut random = Random(seed);
        let mut model = Bits::new(4096, size);
        let disk = Disk::open(&file, WRITE).unwrap();
        add(disk.chain.image().unwrap(), "b", 4096, size);
        disk.chain.close().unwrap();
        drop(disk);
        for _ in 0..3 {
            for (at, len) in change_by_qemu(directory, &mut random, size) {
                model.mark(at, len);
            }
            let disk = Disk::open(&file, WRITE).unwrap();
            let bitmap = disk.chain.image().unwrap().bitmaps().find("b").unwrap();
            assert_eq!(dirty(&bitmap), model.ranges());
            let (at, len) = random.range(size, 65536);
            disk.write(at, &vec![3; len as usize]).unwrap();
            model.mark(at, len);
            disk.chain.close().unwrap();
        }
        assert_eq!(qemu::dirty(directory, "disk.qcow2", "b"), model.ranges());
    }
}
