//! Volumes with little space: a disk that fits can be written to forever, and lack of space passes.

use std::path::Path;
use std::sync::Arc;

use block::FileOffset;

use crate::support::memory::{DataInMemory, Memory};
use crate::support::{Disk, READ, WRITE};
use image::{AllowedDirectories, ImageError, LayerFormat, Storage, ZeroMode, check};
use testkit::images as variants;
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

/// Every form of tables: large and small clusters, subclusters, refcounts of other widths.
const OPTIONS: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=4k",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=64k,compat=0.10",
];

pub fn open(memory: &Memory) -> Disk {
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let (path, format) = (Path::new("/disk.qcow2"), LayerFormat::Qcow2);
    Disk::with(Arc::new(memory.clone()), path, format, &allowed, WRITE).unwrap()
}

/// A new image on a device of this many bytes.
fn device(options: &str, disk_bytes: u64, bytes: u64) -> Memory {
    let directory = tempfile::tempdir().unwrap();
    let create = format!("create -q -f qcow2 -o {options} disk.qcow2 {disk_bytes}");
    qemu::img(directory.path(), &create);
    let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
    memory.be_device(bytes);
    memory
}

/// Writes, discards and zeroes a part of the disk at random, without a flush; `model` is what it must have then.
fn change(disk: &Disk, part: u64, model: &mut [u8], random: &mut Random, operations: u64) {
    let cluster = disk.chain.image().unwrap().cluster_bytes();
    for number in 0..operations {
        let (at, len) = random.range(model.len() as u64, cluster);
        let here = &mut model[at as usize..(at + len) as usize];
        match random.below(5) {
            0 => {
                disk.zero(part + at, len, ZeroMode::Discard).unwrap();
                disk.read(part + at, here).unwrap();
            }
            1 => {
                let unmap = random.one_in(2);
                disk.zero(part + at, len, ZeroMode::Zeroes { unmap })
                    .unwrap();
                here.fill(0);
            }
            _ => {
                here.fill(1 + (number % 250) as u8);
                disk.write(part + at, here).unwrap();
            }
        }
    }
}

/// The volume has the size that `qemu-img measure` tells: whatever the guest does, no request finds no space.
#[test]
fn a_disk_fits_its_measured_device() {
    if !qemu::is_there("a_disk_fits_its_measured_device") {
        return;
    }
    for options in OPTIONS {
        for seed in seeds(1, 2) {
            let disk_bytes = 1 << 20;
            let bytes = qemu::fully_allocated_size(options, disk_bytes);
            let memory = device(options, disk_bytes, bytes);
            let disk = open(&memory);
            let mut random = Random(seed);
            let mut model = vec![0; disk_bytes as usize];
            for round in 0..4 {
                model.fill(100 + round);
                disk.write(0, &model).unwrap();
                disk.zero(0, disk_bytes, ZeroMode::Discard).unwrap();
                model.fill(200 + round);
                disk.write(0, &model).unwrap();
                change(&disk, 0, &mut model, &mut random, 400);
            }
            assert!(disk.content().unwrap() == model, "{options}, seed {seed}");
            disk.chain.close().unwrap();
            let report = check(&memory).unwrap();
            assert_eq!((report.errors, report.leaks), (0, 0), "{options}");
        }
    }
}

/// The same by several threads, which use what others free, and wait for them.
#[test]
fn threads_share_the_last_clusters() {
    if !qemu::is_there("threads_share_the_last_clusters") {
        return;
    }
    const THREADS: u64 = 4;
    for options in ["cluster_size=4k", "cluster_size=16k,extended_l2=on"] {
        let disk_bytes = 1 << 20;
        let bytes = qemu::fully_allocated_size(options, disk_bytes);
        let memory = device(options, disk_bytes, bytes);
        let disk = open(&memory);
        disk.write(0, &vec![9; disk_bytes as usize]).unwrap();
        let part = disk_bytes / THREADS;
        let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let disk = &disk;
            let threads = (0..THREADS).map(|thread| {
                scope.spawn(move || {
                    let mut model = vec![9; part as usize];
                    change(disk, thread * part, &mut model, &mut Random(thread), 600);
                    model
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(disk.content().unwrap() == parts.concat(), "{options}");
        disk.chain.close().unwrap();
        let report = check(&memory).unwrap();
        assert_eq!((report.errors, report.leaks), (0, 0), "{options}");
    }
}

/// A request that waits for freed clusters is woken by the end of the one that uses them.
#[test]
fn freed_clusters_are_awaited() {
    if !qemu::is_there("freed_clusters_are_awaited") {
        return;
    }
    let (options, disk_bytes) = ("cluster_size=4k", 64 << 10);
    let bytes = qemu::fully_allocated_size(options, disk_bytes);
    let memory = device(options, disk_bytes, bytes);
    let disk = open(&memory);
    disk.write(0, &vec![9; disk_bytes as usize]).unwrap();
    let reader = disk.chain.pins().pin(1);
    disk.zero(0, disk_bytes, ZeroMode::Discard).unwrap();
    let prepared = disk.chain.prepare_write(block::GuestOffset(0), 4096);
    let image::Prepared::Wait(image::Awaited::FreedClusters) = prepared.unwrap() else {
        panic!("the read may still use every cluster");
    };
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| disk.write(0, &[7; 4096]));
        disk.chain.pins().unpin(reader);
        writer.join().unwrap().unwrap();
    });
    let mut found = [0; 4096];
    disk.read(0, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
}

/// The same on a file system: no write finds no space, and no flush needs any.
#[test]
fn a_disk_fits_its_file_system() {
    if !qemu::is_there("a_disk_fits_its_file_system") {
        return;
    }
    for options in OPTIONS {
        // Blocks that small clusters share are not given back before all of them are free.
        if options.contains("cluster_size=512") {
            continue;
        }
        let disk_bytes = 1 << 20;
        let directory = tempfile::tempdir().unwrap();
        let create = format!("create -q -f qcow2 -o {options} disk.qcow2 {disk_bytes}");
        qemu::img(directory.path(), &create);
        let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
        memory.limit_space(qemu::fully_allocated_size(options, disk_bytes).div_ceil(4096));
        let disk = open(&memory);
        let (mut random, mut model) = (Random(3), vec![0; disk_bytes as usize]);
        for round in 0..4 {
            model.fill(100 + round);
            disk.write(0, &model).unwrap();
            disk.zero(0, disk_bytes, ZeroMode::Discard).unwrap();
            model.fill(200 + round);
            disk.write(0, &model).unwrap();
            change(&disk, 0, &mut model, &mut random, 300);
            disk.flush().unwrap();
        }
        assert!(disk.content().unwrap() == model, "{options}");
        disk.chain.close().unwrap();
        assert_eq!(check(&memory).unwrap().errors, 0);
    }
}

/// A flush succeeds on a file system without a free block, whatever was allocated before it was full.
#[test]
fn a_flush_needs_no_space() {
    if !qemu::is_there("a_flush_needs_no_space") {
        return;
    }
    // The second half of the refcount block of a new image is a hole, and counts clusters that the disk needs.
    let with_hole = "cluster_size=8k,refcount_bits=64";
    for options in OPTIONS.iter().copied().chain([with_hole]) {
        let directory = tempfile::tempdir().unwrap();
        // Several L2 tables, and refcount blocks.
        let create = format!("create -q -f qcow2 -o {options} disk.qcow2 5M");
        qemu::img(directory.path(), &create);
        for blocks in [1, 20, 77, 300, 900, 1060] {
            let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
            memory.limit_space_with_holes(blocks);
            let disk = open(&memory);
            let mut written = 0;
            while written < 5 << 20 {
                match disk.write(written, &[5; 4096]) {
                    Ok(()) => written += 4096,
                    Err(error) => {
                        assert!(error.is_no_space() && !error.is_permanent(), "{error}");
                        break;
                    }
                }
            }
            disk.flush().unwrap();
            let mut found = vec![0; written as usize];
            disk.read(0, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 5));
            drop(disk);
            assert_eq!(check(&memory).unwrap().errors, 0, "{options}, {blocks}");
        }
    }
}

/// The tables of an image have holes, and its file system is full: a guest can write where it has written before, and discard,
/// which makes the space for the holes.
#[test]
fn holes_in_tables_keep_no_write_in_place() {
    if !qemu::is_there("holes_in_tables_keep_no_write_in_place") {
        return;
    }
    for options in OPTIONS {
        let directory = tempfile::tempdir().unwrap();
        let create = format!("create -q -f qcow2 -o {options} disk.qcow2 5M");
        qemu::img(directory.path(), &create);
        let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
        let disk = open(&memory);
        disk.write(0, &[1; 1 << 20]).unwrap();
        disk.chain.close().unwrap();
        memory.limit_space_with_holes(0);
        let disk = open(&memory);
        disk.write(4096, &[2; 4096]).unwrap();
        disk.flush().unwrap();
        let whole = 512 << 10;
        disk.zero(whole, whole, ZeroMode::Discard).unwrap();
        disk.flush().unwrap();
        disk.write(4 << 20, &[3; 4096]).unwrap();
        disk.flush().unwrap();
        let mut found = vec![0; 5 << 20];
        disk.read(0, &mut found).unwrap();
        assert!(found[..4096].iter().all(|&byte| byte == 1));
        assert!(found[4096..8192].iter().all(|&byte| byte == 2));
        assert!(found[4 << 20..][..4096].iter().all(|&byte| byte == 3));
        drop(disk);
        assert_eq!(check(&memory).unwrap().errors, 0, "{options}");
    }
}

/// Options with clusters of several blocks of the file system.
const LARGE: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=64k,compat=0.10",
];

/// A new image on a file system with much space, with the first sector of each MiB written, which occupies one block.
fn one_block_of_each_mib(options: &str) -> (Memory, Disk) {
    let directory = tempfile::tempdir().unwrap();
    let create = format!("create -q -f qcow2 -o {options} disk.qcow2 4M");
    qemu::img(directory.path(), &create);
    let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
    memory.limit_space(1 << 20);
    let disk = open(&memory);
    for mib in 0..4 {
        disk.write(mib << 20, &[1; 512]).unwrap();
    }
    disk.flush().unwrap();
    (memory, disk)
}

/// Uses all space for clusters that have been taken before.
fn use_rest(disk: &Disk, blocks: u64, options: &str) {
    for block in 0..blocks {
        let at = ((block % 2) << 20) + 4096 * (1 + block / 2);
        let written = disk.write(at, &[2; 4096]);
        written.unwrap_or_else(|error| panic!("{options}, block {block}: {error}"));
    }
}

/// A write that had space for a part of its data occupies nothing after it has failed: other clusters have their own space.
#[test]
fn a_write_that_failed_occupies_nothing() {
    if !qemu::is_there("a_write_that_failed_occupies_nothing") {
        return;
    }
    for options in LARGE {
        let (memory, disk) = one_block_of_each_mib(options);
        memory.leave_space(5);
        let error = disk.write(512 << 10, &[3; 128 << 10]).unwrap_err();
        assert!(error.is_no_space(), "{options}: {error}");
        use_rest(&disk, 5, options);
        disk.chain.close().unwrap();
        assert_eq!(check(&memory).unwrap().errors, 0, "{options}");
    }
}

/// What a killed process had written to clusters that it had taken is free space, although the clusters are not counted.
#[test]
fn a_write_that_a_kill_ended_occupies_nothing() {
    if !qemu::is_there("a_write_that_a_kill_ended_occupies_nothing") {
        return;
    }
    for options in LARGE {
        let (memory, disk) = one_block_of_each_mib(options);
        memory.leave_space(6);
        let bytes = disk.chain.image().unwrap().cluster_bytes().min(16384);
        let prepared = disk
            .chain
            .prepare_write(block::GuestOffset(512 << 10), bytes);
        let image::Prepared::Allocated(allocation) = prepared.unwrap() else {
            panic!("it needs a cluster");
        };
        let written = vec![3; bytes as usize];
        disk.chain.write_file(allocation.to, &written).unwrap();
        drop(disk);
        let disk = open(&memory);
        use_rest(&disk, 6, options);
        let mut found = [0; 512];
        disk.read(3 << 20, &mut found).unwrap();
        assert_eq!(found, [1; 512], "{options}");
        disk.chain.close().unwrap();
        assert_eq!(check(&memory).unwrap().errors, 0, "{options}");
    }
}

/// A write that a device is too small for succeeds once the device was extended. What was added is not taken for zeroes.
#[test]
fn an_extended_device_is_used() {
    if !qemu::is_there("an_extended_device_is_used") {
        return;
    }
    for options in OPTIONS {
        let disk_bytes = 4 << 20;
        let full = qemu::fully_allocated_size(options, disk_bytes);
        let memory = device(options, disk_bytes, full / 4);
        let disk = open(&memory);
        let mut model = vec![0; disk_bytes as usize];
        // Most writes leave the rest of their clusters as it is.
        let step = disk.chain.image().unwrap().cluster_bytes().min(4096) as usize;
        let (mut at, mut extended) = (step - 512, 0);
        while at < disk_bytes as usize {
            model[at..at + 512].fill(3);
            match disk.write(at as u64, &[3; 512]) {
                Ok(()) => at += step,
                Err(error) => {
                    assert!(matches!(error, ImageError::NoSpace), "{error}");
                    assert!(!error.is_permanent() && error.errno() == 28);
                    disk.flush().unwrap();
                    extended += full / 4;
                    memory.be_device(full / 4 + extended);
                }
            }
        }
        assert!(extended > 0, "{options}");
        assert!(disk.content().unwrap() == model, "{options}");
        // Also if the device was extended by more than is used.
        memory.be_device(4 * full);
        disk.grow(2 * disk_bytes).unwrap();
        disk.chain.close().unwrap();
        let report = check(&memory).unwrap();
        assert_eq!((report.errors, report.leaks), (0, 0), "{options}");
    }
}

/// Images whose external data file is on a block device: one that is too short is named, with what it needs, and one that was
/// extended since is used. Nothing that was on the device before is on the disk.
#[test]
fn an_extended_data_device_is_used() {
    if !qemu::is_there("an_extended_data_device_is_used") {
        return;
    }
    const CLUSTER: u64 = 65536;
    // The last cluster of the disk is a part of one.
    const DISK: u64 = (1 << 20) + 512;
    for is_raw in [true, false] {
        let raw = if is_raw { "on" } else { "off" };
        let directory = tempfile::tempdir().unwrap();
        let options = format!("data_file=data,data_file_raw={raw}");
        let create = format!("create -q -f qcow2 -o {options} disk.qcow2 {DISK}");
        qemu::img(directory.path(), &create);
        let path = directory.path().join("disk.qcow2");
        let memory = Memory::new(std::fs::read(&path).unwrap());
        let device = Memory::new(Vec::new());
        let open = || {
            let allowed = AllowedDirectories::of_image(&path).unwrap();
            let storage = Arc::new(memory.clone());
            let mut data = DataInMemory(Some(&device));
            Disk::with_files(
                storage,
                &path,
                LayerFormat::Qcow2,
                &allowed,
                WRITE,
                &mut data,
            )
        };
        let is_short = |error: &ImageError, size: u64, needed: u64| {
            let expected = matches!(error, ImageError::ShortDataDevice { size: is, needed: must }
                if (*is, *must) == (size, needed));
            assert!(expected, "{raw}: {error}");
            assert!(error.is_no_space() && !error.is_permanent(), "{error}");
            let advice = format!("has {size}; extend the device (lvextend -L {needed}b)");
            assert!(error.to_string().contains(&advice), "{error}");
        };
        device.be_device(DISK / 2);
        let Err(error) = open() else {
            panic!("the device is shorter than the disk")
        };
        let error = error.to_string();
        assert!(error.contains(&format!("lvextend -L {DISK}b")), "{error}");
        device.be_device(DISK);
        let disk = open().unwrap();
        let mut model = vec![7; DISK as usize];
        disk.write(0, &model[..1 << 20]).unwrap();
        match disk.write(1 << 20, &[7; 512]) {
            Ok(()) => assert!(is_raw),
            // Zeroes are written to the rest of the cluster.
            Err(error) => {
                is_short(&error, DISK, (1 << 20) + CLUSTER);
                device.be_device((1 << 20) + CLUSTER);
                disk.write(1 << 20, &[7; 512]).unwrap();
            }
        }
        let size = device.size().unwrap();
        is_short(&disk.grow(2 * DISK).unwrap_err(), size, 2 * DISK);
        assert_eq!(disk.chain.size(), DISK);
        device.be_device(2 * DISK);
        disk.grow(2 * DISK).unwrap();
        model.resize(2 * DISK as usize, 0);
        assert!(disk.content().unwrap() == model, "{raw}");
        disk.write(3 << 19, &[8; 1024]).unwrap();
        model[3 << 19..][..1024].fill(8);
        disk.chain.close().unwrap();
        drop(disk);
        let disk = open().unwrap();
        assert!(disk.content().unwrap() == model, "{raw}");
        assert!(!is_raw || device.bytes() == model);
        assert_eq!(check(&memory).unwrap().errors, 0);
    }
}

/// A file that is discarded and written again and again without a flush has no more clusters than the disk needs, and the
/// step in which it grows.
#[test]
fn a_file_grows_to_its_full_size_and_a_step() {
    if !qemu::is_there("a_file_grows_to_its_full_size_and_a_step") {
        return;
    }
    const DISK: u64 = 8 << 20;
    const STEP: u64 = 16 << 20;
    let directory = tempfile::tempdir().unwrap();
    let create = format!("create -q -f qcow2 -o cluster_size=64k disk.qcow2 {DISK}");
    qemu::img(directory.path(), &create);
    let path = directory.path().join("disk.qcow2");
    let disk = Disk::open(&path, WRITE).unwrap();
    let full = qemu::fully_allocated_size("cluster_size=64k", DISK);
    for round in 0..12 {
        disk.write(0, &vec![round; DISK as usize]).unwrap();
        disk.zero(0, DISK, ZeroMode::Discard).unwrap();
        let bytes = std::fs::metadata(&path).unwrap().len();
        assert!(bytes <= full + STEP, "{bytes} after {round} rounds");
    }
    disk.chain.close().unwrap();
    drop(disk);
    assert!(Disk::open(&path, READ).is_ok());
    qemu::check(directory.path(), "disk.qcow2", false);
}

/// What a flush has freed is free for the next process, whether this one is killed or closes the image. So an image does not
/// grow with each kill, and a volume without spare space can be filled again.
#[test]
fn kills_leak_nothing_that_was_flushed() {
    if !qemu::is_there("kills_leak_nothing_that_was_flushed") {
        return;
    }
    let disk_bytes = 1 << 20;
    for options in OPTIONS {
        let bytes = qemu::fully_allocated_size(options, disk_bytes);
        let memory = device(options, disk_bytes, bytes);
        for round in 1..=3 {
            let disk = open(&memory);
            disk.write(0, &vec![round; disk_bytes as usize]).unwrap();
            disk.zero(0, disk_bytes, ZeroMode::Discard).unwrap();
            disk.flush().unwrap();
            // The guest's next flush has no tables to write.
            assert!(!disk.chain.needs_flush(), "{options}");
            drop(disk);
            let report = check(&memory).unwrap();
            assert_eq!((report.errors, report.leaks), (0, 0), "{options}, {round}");
        }
    }
}

/// Has the L2 tables of an image refer to nothing, so that all data is leaked.
fn leak_all(memory: &Memory) {
    let bytes = memory.bytes();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (l1_at, l1_entries, cluster_bits) = (word(40) as usize, half(36), half(20));
    for entry in 0..l1_entries {
        let table = word(l1_at + 8 * entry) & 0x00ff_ffff_ffff_fe00;
        if table != 0 {
            let zeroes = vec![0; 1 << cluster_bits];
            memory.write_at(FileOffset(table), &zeroes).unwrap();
        }
    }
}

/// Clusters that crashes have leaked are used before a write finds no space, also by threads that change the tables while
/// they are searched for.
#[test]
fn leaked_clusters_are_used_before_space_is_missed() {
    if !qemu::is_there("leaked_clusters_are_used_before_space_is_missed") {
        return;
    }
    const THREADS: u64 = 4;
    let disk_bytes = 1 << 20;
    for options in OPTIONS {
        let bytes = qemu::fully_allocated_size(options, disk_bytes);
        let memory = device(options, disk_bytes, bytes);
        let disk = open(&memory);
        disk.write(0, &vec![9; disk_bytes as usize]).unwrap();
        disk.chain.close().unwrap();
        leak_all(&memory);
        let disk = open(&memory);
        let clusters = disk_bytes / disk.chain.image().unwrap().cluster_bytes();
        assert_eq!(check(&memory).unwrap().leaks, clusters, "{options}");
        let part = disk_bytes / THREADS;
        let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let disk = &disk;
            let threads = (0..THREADS).map(|thread| {
                scope.spawn(move || {
                    let mut model = vec![0; part as usize];
                    change(disk, thread * part, &mut model, &mut Random(thread), 200);
                    model.fill(thread as u8);
                    disk.write(thread * part, &model).unwrap();
                    model
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(disk.content().unwrap() == parts.concat(), "{options}");
        disk.chain.close().unwrap();
        let report = check(&memory).unwrap();
        assert_eq!((report.errors, report.leaks), (0, 0), "{options}");
    }
}

/// Counts every free cluster that the first refcount block counts, and that is in the file, as if it were in use.
fn leak_free_clusters(memory: &Memory) {
    let bytes = memory.bytes();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let (block, cluster_bits) = (word(word(48) as usize) as usize, half(20));
    let order = if half(4) == 2 { 4 } else { half(96) };
    let clusters = bytes.len() >> cluster_bits;
    let entries = block..block + (1 << cluster_bits).min((clusters << order) / 8);
    let mut counts = bytes[entries].to_vec();
    match order {
        0..3 => {
            for byte in &mut counts {
                let width = 1 << order;
                for at in (0..8).step_by(width) {
                    let mask = (1_u8 << width) - 1;
                    if *byte >> at & mask == 0 {
                        *byte |= 1 << at;
                    }
                }
            }
        }
        order => {
            for count in counts.chunks_exact_mut(1 << (order - 3)) {
                if count.iter().all(|&byte| byte == 0) {
                    *count.last_mut().unwrap() = 1;
                }
            }
        }
    }
    memory.write_at(FileOffset(block as u64), &counts).unwrap();
}

/// Images of every kind without a free cluster: what is leaked is used, and nothing that anything refers to: snapshots,
/// bitmaps, compressed data.
#[test]
fn only_leaked_clusters_are_freed() {
    if !qemu::is_there("only_leaked_clusters_are_freed") {
        return;
    }
    let mut searched = 0;
    for variant in variants::ALL.iter().filter(|variant| variant.is_small()) {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        variant.make_sized(directory, 11, 192 << 10);
        let snapshots = || {
            let names = ["one", "two", "three"]
                .iter()
                .filter(|_| variant.has_snapshots());
            let contents = names.map(|name| {
                let convert = format!("convert -l snapshot.name={name} -O raw disk.qcow2 s.raw");
                qemu::img(directory, &convert);
                std::fs::read(directory.join("s.raw")).unwrap()
            });
            contents.collect::<Vec<_>>()
        };
        let before = snapshots();
        // Space for some clusters, all of them leaked.
        let mut bytes = std::fs::read(&file).unwrap();
        bytes.resize((bytes.len() + (96 << 10)).next_multiple_of(64 << 10), 0);
        let memory = Memory::new(bytes);
        leak_free_clusters(&memory);
        let leaks = check(&memory).unwrap().leaks;
        memory.be_device(memory.bytes().len() as u64);
        let allowed = AllowedDirectories::of_image(&file).unwrap();
        let storage = Arc::new(memory.clone());
        let disk = Disk::with(storage, &file, LayerFormat::Qcow2, &allowed, WRITE).unwrap();
        let cluster = disk.chain.image().unwrap().cluster_bytes();
        let (mut random, mut model) = (Random(12), disk.content().unwrap());
        for number in 0..200 {
            let (at, len) = random.range(model.len() as u64, cluster);
            let bytes = vec![number; len as usize];
            match disk.write(at, &bytes) {
                Ok(()) => model[at as usize..(at + len) as usize].copy_from_slice(&bytes),
                Err(error) => {
                    assert!(error.is_no_space(), "{}: {error}", variant.name);
                    let here = &mut model[at as usize..(at + len) as usize];
                    disk.read(at, here).unwrap();
                }
            }
        }
        assert!(disk.content().unwrap() == model, "{}", variant.name);
        disk.chain.close().unwrap();
        let report = check(&memory).unwrap();
        assert_eq!(report.errors, 0, "{}: {report:?}", variant.name);
        searched += u32::from(leaks > 0 && report.leaks == 0);
        std::fs::write(&file, memory.bytes()).unwrap();
        assert!(snapshots() == before, "{}", variant.name);
    }
    assert!(searched > 5, "{searched}");
}
