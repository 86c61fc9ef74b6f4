//! Writes and look-ups step by step: what others do between two steps, and images that no program makes.

use block::GuestOffset;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::memory::Memory;
use crate::support::{Disk, HostFiles, READ, WRITE};
use image::{
    AllowedDirectories, LayerFormat, Pin, Prepared, ReadLocation, WriteLocation, ZeroMode, check,
};
use testkit::qemu_img as qemu;

/// An image with these options, and its file.
fn made(options: &str, size: &str) -> (Disk, Memory) {
    let directory = tempfile::tempdir().unwrap();
    let create = format!("create -q -f qcow2 -o {options} disk.qcow2 {size}");
    qemu::img(directory.path(), &create);
    let bytes = std::fs::read(directory.path().join("disk.qcow2")).unwrap();
    let memory = Memory::new(bytes);
    (open(&memory), memory)
}

fn open(memory: &Memory) -> Disk {
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let (path, format) = (Path::new("/disk.qcow2"), LayerFormat::Qcow2);
    let storage = Arc::new(memory.clone());
    Disk::with_journal(
        storage,
        path,
        format,
        &allowed,
        WRITE,
        (&mut HostFiles, None),
    )
    .unwrap()
}

/// Does something as one request.
fn request<T>(disk: &Disk, f: impl FnOnce(&Pin) -> T) -> T {
    let pin = disk.chain.pins().pin(0);
    let result = f(&pin);
    disk.chain.pins().unpin(pin);
    result
}

fn read(disk: &Disk, at: u64, len: usize) -> Vec<u8> {
    let mut found = vec![0; len];
    disk.read(at, &mut found).unwrap();
    found
}

/// Between the look-up of a write and its turn, another write makes data of a subcluster at one of its edges, and
/// a third one writes there in place, while what stands beside the first is on its way.
#[test]
fn in_place_writes_survive_copy_on_write() {
    if !qemu::is_there("in_place_writes_survive_copy_on_write") {
        return;
    }
    // Subclusters of 2 KiB.
    let (disk, memory) = made("extended_l2=on,cluster_size=64k", "1M");
    let sub = 2048;
    disk.write(0, &[1; 512]).unwrap();
    for (base, at, len, other, third) in [
        // The first subcluster it touches is data by now, or the last one, or both.
        (8 * sub, 512, 3 * sub, 512, 0),
        (16 * sub, 0, sub + 512, sub, sub + 512),
        (64 * sub, 512, 40 * sub, 512, 0),
        (128 * sub, 0, 33 * sub + 512, 33 * sub, 33 * sub + 1024),
    ] {
        // The cluster is there, so that only subclusters are to become data.
        for cluster in 0..2 {
            let first = base & !0xffff;
            disk.write(first + (cluster << 16) + 31 * sub, &[2; 512])
                .unwrap();
        }
        let place = request(&disk, |pin| {
            disk.chain.map_write(pin, GuestOffset(base + at), len)
        });
        assert!(matches!(place, WriteLocation::Allocate { .. }), "{place:?}");
        disk.write(base + other, &[3; 512]).unwrap();
        let prepared = disk
            .chain
            .prepare_write(GuestOffset(base + at), len)
            .unwrap();
        // It was told where to write before what is beside it is read and put there, and writes after that.
        let fills = match &prepared {
            Prepared::Allocated(allocation) => allocation.fills.clone(),
            _ => Vec::new(),
        };
        let copied: Vec<Vec<u8>> = fills
            .iter()
            .map(|fill| match fill.from {
                Some(from) => read(&disk, from.0, fill.len as usize),
                None => vec![0; fill.len as usize],
            })
            .collect();
        disk.write(base + third, &[4; 512]).unwrap();
        let file = &disk.chain.files()[0];
        for (fill, bytes) in fills.iter().zip(copied) {
            file.write_at(fill.to, &bytes).unwrap();
        }
        if let Prepared::Allocated(allocation) = prepared {
            let bytes = vec![5; allocation.len as usize];
            file.write_at(allocation.to, &bytes).unwrap();
            disk.chain.commit(allocation).unwrap();
        }
        assert_eq!(read(&disk, base + third, 512), [4; 512], "at {base}");
        disk.write(base + at, &vec![6; len as usize]).unwrap();
        assert_eq!(read(&disk, base + at, len as usize), vec![6; len as usize]);
    }
    disk.chain.close().unwrap();
    assert_eq!(check(&memory).unwrap().errors, 0);
}

/// Entries lead to counted clusters that the file does not reach to.
#[test]
fn write_beyond_end_of_file_terminates() {
    if !qemu::is_there("write_beyond_end_of_file_terminates") {
        return;
    }
    let (disk, memory) = made("cluster_size=4k", "1M");
    let len = 8 * 4096;
    disk.write(0, &vec![1; len]).unwrap();
    disk.chain.close().unwrap();
    let place = request(&open(&memory), |pin| {
        let disk = open(&memory);
        let whole = len as u64;
        while let ReadLocation::Load(missing) = disk.chain.map(pin, GuestOffset(0), whole) {
            disk.chain.load(missing).unwrap();
        }
        disk.chain.map(pin, GuestOffset(0), whole)
    });
    let ReadLocation::Data { at, len: run, .. } = place else {
        panic!("{place:?}");
    };
    assert_eq!(run, len as u64);
    // Into the middle of a cluster of them, or at its start, or before all of them.
    for cut in [0, 4096, 3 * 4096 + 512] {
        let mut bytes = memory.bytes();
        assert!(bytes.len() as u64 <= at.0 + run, "they are the last ones");
        bytes.truncate((at.0 + cut) as usize);
        let cut_off = Memory::new(bytes);
        let disk = open(&cut_off);
        let mut done = 0;
        for _ in 0..100 {
            if done == len as u64 {
                break;
            }
            let rest = len as u64 - done;
            match request(&disk, |pin| {
                disk.chain.map_write(pin, GuestOffset(done), rest)
            }) {
                WriteLocation::Load(missing) => disk.chain.load(missing).unwrap(),
                WriteLocation::InPlace { at, len, .. } => {
                    let bytes = vec![7; len as usize];
                    disk.chain.write_file(at, &bytes).unwrap();
                    done += len;
                }
                WriteLocation::Allocate { len } => {
                    let prepared = disk.chain.prepare_write(GuestOffset(done), len).unwrap();
                    assert!(matches!(prepared, Prepared::Mapped), "{prepared:?}");
                }
                WriteLocation::Damaged { .. } => panic!("it is sound"),
            }
        }
        assert_eq!(done, len as u64, "it goes on for ever");
        assert_eq!(read(&disk, 0, len), vec![7; len]);
    }
}

/// However long a request is, one look-up takes no longer than a few thousand entries do.
#[test]
fn lookup_work_is_bounded() {
    if !qemu::is_there("lookup_work_is_bounded") {
        return;
    }
    let (disk, _) = made("cluster_size=512", "6M");
    let size = disk.chain.size();
    // All of its tables are there, and in memory.
    disk.write(0, &vec![1; size as usize]).unwrap();
    disk.zero(0, size, ZeroMode::Zeroes { unmap: true })
        .unwrap();
    let (mut at, mut most) = (0, 0);
    while at < size {
        match request(&disk, |pin| disk.chain.map(pin, GuestOffset(at), size - at)) {
            ReadLocation::Zero { len } => {
                most = most.max(len);
                at += len;
            }
            ReadLocation::Load(missing) => disk.chain.load(missing).unwrap(),
            place => panic!("{place:?}"),
        }
    }
    assert!((1 << 20..=2 << 20).contains(&most), "{most}");
}

/// Who may not block does not look through all refcounts because space was given back near the start.
#[test]
fn cluster_search_is_bounded() {
    if !qemu::is_there("cluster_search_is_bounded") {
        return;
    }
    // A block counts 128 KiB of the file.
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let create = "create -q -f qcow2 -o cluster_size=512 disk.qcow2 6M";
    qemu::img(directory, create);
    let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
    let used = 5 << 20;
    disk.write(0, &vec![1; used as usize]).unwrap();
    // There is a table for what is written next.
    disk.write(used + 512, &[1; 512]).unwrap();
    let take = |at| {
        request(&disk, |pin| {
            disk.chain.try_prepare_write(pin, GuestOffset(at), 512)
        })
    };
    let near = take(used).expect("it is the next one");
    disk.chain.abort(near);
    disk.zero(0, 512, ZeroMode::Discard).unwrap();
    disk.flush().unwrap();
    disk.flush().unwrap();
    disk.write(0, &[2; 512]).unwrap();
    let mut refused = 0;
    let taken = loop {
        match take(used) {
            Some(allocation) => break allocation,
            None => refused += 1,
        }
        assert!(refused < 10, "each goes on where the last one was");
    };
    assert!(refused > 0);
    disk.chain.abort(taken);
    disk.chain.close().unwrap();
    qemu::check(directory, "disk.qcow2", false);
}

/// So many small refcount blocks that a search for free clusters gives others their turn, and a refcount
/// table that grows several times.
#[test]
fn small_refcount_blocks_in_a_large_file() {
    if !qemu::is_there("small_refcount_blocks_in_a_large_file") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let create = "create -q -f qcow2 -o cluster_size=512,refcount_bits=64 disk.qcow2 12M";
    qemu::img(directory, create);
    let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
    disk.write(0, &vec![1; 11 << 20]).unwrap();
    disk.zero(0, 512, ZeroMode::Discard).unwrap();
    disk.flush().unwrap();
    disk.flush().unwrap();
    disk.write(0, &[2; 512]).unwrap();
    disk.write(11 << 20, &[3; 512]).unwrap();
    disk.chain.close().unwrap();
    qemu::check(directory, "disk.qcow2", false);
    let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
    for (at, byte) in [(0, 2), (512, 1), (11 << 20, 3)] {
        assert_eq!(read(&disk, at, 512), vec![byte; 512]);
    }
}

/// An L1 table of many more clusters than a refcount block counts, squared: each of its refcount blocks has
/// room, wherever the first one begins.
#[test]
fn large_l1_table_is_counted() {
    if !qemu::is_there("large_l1_table_is_counted") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for used in (0..64).step_by(8) {
        let create = "create -q -f qcow2 -o cluster_size=512,refcount_bits=64 disk.qcow2 1M";
        qemu::img(directory, create);
        let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
        disk.write(0, &vec![1; (1 + used) * 512]).unwrap();
        // The longest one that there may be: 65,536 clusters, of which a block counts 64.
        let size = 128 << 30;
        disk.grow(size).unwrap();
        disk.write(size - 512, &[4; 512]).unwrap();
        disk.chain.close().unwrap();
        qemu::check(directory, "disk.qcow2", false);
    }
}

/// A table of few bytes must not keep a search busy with one block for ever.
#[test]
fn refcount_block_is_counted_once() {
    if !qemu::is_there("refcount_block_is_counted_once") {
        return;
    }
    let (disk, memory) = made("cluster_size=4k", "1M");
    drop(disk);
    let mut bytes = memory.bytes();
    let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
    bytes.copy_within(table..table + 8, table + 8);
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let (path, format) = (Path::new("/disk.qcow2"), LayerFormat::Qcow2);
    let open = |how| {
        let storage = Arc::new(Memory::new(bytes.clone()));
        Disk::with(storage, path, format, &allowed, how)
    };
    let refused = open(WRITE).err().unwrap().to_string();
    assert!(refused.contains("more than once"), "{refused}");
    assert!(open(READ).is_ok(), "to read it does no harm");
}

/// Many writes meet the end of the refcount table while a flush lets none of them enlarge it: it is enlarged once.
#[test]
fn a_full_refcount_table_grows_once() {
    if !qemu::is_there("a_full_refcount_table_grows_once") {
        return;
    }
    const WRITERS: u64 = 16;
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    let create = "create -q -f qcow2 -o cluster_size=512,refcount_bits=64 disk.qcow2 16M";
    qemu::img(directory, create);
    let disk = Disk::open(&file, WRITE).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let flusher = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                disk.flush().unwrap();
            }
        });
        let part = (16 << 20) / WRITERS;
        let writers = (0..WRITERS).map(|writer| {
            let disk = &disk;
            scope.spawn(move || {
                for at in (writer * part..(writer + 1) * part).step_by(4096) {
                    disk.write(at, &[1; 4096]).unwrap();
                }
            })
        });
        let ended = writers.collect::<Vec<_>>().into_iter().map(|it| it.join());
        let ended: Vec<_> = ended.collect();
        is_over.store(true, Ordering::Relaxed);
        flusher.join().unwrap();
        assert!(ended.iter().all(Result::is_ok), "a write has failed");
    });
    disk.chain.close().unwrap();
    // 17 MiB have 544 refcount blocks: 4,352 bytes.
    let header = fs::read(&file).unwrap()[..60].to_vec();
    let clusters = u32::from_be_bytes(header[56..60].try_into().unwrap());
    assert!(clusters <= 32, "{clusters} clusters for the table");
    qemu::check(directory, "disk.qcow2", false);
}
