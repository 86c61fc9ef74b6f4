//! Random operations against a plain array: from one thread with everything that can happen to a disk,
//! failing storage included, and from several threads, each with its own part of the disk.

use block::GuestOffset;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::memory::Memory;
use crate::support::{Disk, How, WRITE};
use image::{AllowedDirectories, LayerFormat, ZeroMode, check};
use testkit::images as variants;
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

/// So small a cache that slices come and go.
const TIGHT: How = How {
    l2_cache_bytes: Some(1),
    ..WRITE
};

fn open(memory: &Memory, directory: &std::path::Path, how: How) -> Disk {
    let allowed = AllowedDirectories::of_image(&directory.join("x")).unwrap();
    let path = directory.join("disk.qcow2");
    let storage = Arc::new(memory.clone());
    Disk::with(storage, &path, LayerFormat::Qcow2, &allowed, how).unwrap()
}

#[test]
fn concurrent_threads_keep_data_consistent() {
    let test = "concurrent_threads_keep_data_consistent";
    if !qemu::is_there(test) {
        return;
    }
    const THREADS: u64 = 4;
    for variant in variants::ALL.iter().filter(|v| v.is_small()) {
        for seed in seeds(500, 1) {
            println!("{test}: {} seed {seed}", variant.name);
            let directory = tempfile::tempdir().unwrap();
            let directory = directory.path();
            variant.make_sized(directory, seed, 512 << 10);
            let file = directory.join("disk.qcow2");
            let disk = Disk::open(&file, if seed % 2 == 0 { TIGHT } else { WRITE }).unwrap();
            let start = disk.content().unwrap();
            let mut want = start.clone();
            let ended = AtomicBool::new(false);
            // Threads have every fourth piece of 2 KiB, so that they meet in the same clusters.
            std::thread::scope(|scope| {
                let parts: Vec<_> = (0..THREADS)
                    .map(|thread| {
                        let (disk, start) = (&disk, &start);
                        scope.spawn(move || work(disk, start, thread, THREADS, seed))
                    })
                    .collect();
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        disk.flush().unwrap();
                        std::thread::yield_now();
                    }
                });
                let parts: Vec<_> = parts.into_iter().map(|part| part.join()).collect();
                ended.store(true, Ordering::Relaxed);
                for (thread, part) in (0..).zip(parts) {
                    let part = part.unwrap();
                    for piece in pieces(want.len() as u64, thread, THREADS) {
                        want[piece.clone()].copy_from_slice(&part[piece]);
                    }
                }
            });
            assert!(disk.content().unwrap() == want, "{} {seed}", variant.name);
            disk.chain.close().unwrap();
            drop(disk);
            qemu::check(directory, "disk.qcow2", false);
            let got = qemu::content(directory, "disk.qcow2", "qcow2");
            assert!(got == want, "{} {seed}", variant.name);
        }
    }
}

const PIECE: u64 = 2048;

fn pieces(size: u64, thread: u64, threads: u64) -> impl Iterator<Item = std::ops::Range<usize>> {
    let all = (thread..size / PIECE).step_by(threads as usize);
    all.map(|piece| (piece * PIECE) as usize..((piece + 1) * PIECE) as usize)
}

/// One thread's operations on its pieces; returns the disk as this thread left it.
fn work(disk: &Disk, start: &[u8], thread: u64, threads: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed << 8 | thread);
    let mut want = start.to_vec();
    let all: Vec<_> = pieces(start.len() as u64, thread, threads).collect();
    for number in 0..150_u64 {
        let piece = all[random.below(all.len() as u64) as usize].clone();
        let (from, len) = random.range(PIECE, 512);
        let at = piece.start as u64 + from;
        let range = at as usize..(at + len) as usize;
        match random.below(5) {
            0 => {
                let mut got = vec![0; len as usize];
                disk.read(at, &mut got).unwrap();
                assert!(
                    got == want[range],
                    "thread {thread}, seed {seed}: {at}+{len}"
                );
            }
            1 => {
                let unmap = random.one_in(2);
                disk.zero(at, len, ZeroMode::Zeroes { unmap }).unwrap();
                want[range].fill(0);
            }
            _ => {
                let data = vec![(1 + number % 250) as u8; len as usize];
                disk.write(at, &data).unwrap();
                want[range].copy_from_slice(&data);
            }
        }
    }
    want
}

#[test]
fn io_errors_affect_only_failed_requests() {
    let test = "io_errors_affect_only_failed_requests";
    if !qemu::is_there(test) {
        return;
    }
    for variant in variants::ALL
        .iter()
        .filter(|v| v.is_one_file() && v.is_small())
    {
        for seed in seeds(900, 3) {
            let directory = tempfile::tempdir().unwrap();
            let directory = directory.path();
            variant.make_sized(directory, 9, 256 << 10);
            let place = format!("{} seed {seed}", variant.name);
            let memory = Memory::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
            let mut random = Random(seed);
            let mut disk = open(&memory, directory, WRITE);
            let size = disk.chain.size();
            let cluster = disk.chain.image().unwrap().cluster_bytes();
            let mut want: Vec<Option<u8>> = disk.content().unwrap().into_iter().map(Some).collect();
            for number in 0..200_u64 {
                let (at, len) = random.range(size, cluster);
                let range = at as usize..(at + len) as usize;
                if random.one_in(4) {
                    memory.fail_in(1 + random.below(6));
                }
                let byte = (1 + number % 250) as u8;
                let (done, becomes) = match random.below(5) {
                    0 => (disk.flush(), None),
                    1 => (
                        disk.zero(at, len, ZeroMode::Zeroes { unmap: true }),
                        Some(0),
                    ),
                    _ => (disk.write(at, &vec![byte; len as usize]), Some(byte)),
                };
                memory.fail_in(0);
                if let Some(becomes) = becomes {
                    // What failed may have been done in part.
                    want[range].fill(done.is_ok().then_some(becomes));
                }
                assert!(
                    disk.chain.damage().is_none(),
                    "{place}: {:?}",
                    disk.chain.damage()
                );
                if random.one_in(30) {
                    // Closed with errors, and opened again.
                    disk.chain.close().unwrap();
                    disk = open(&memory, directory, WRITE);
                }
            }
            let content = disk.content().unwrap();
            for (at, (got, want)) in content.iter().zip(&want).enumerate() {
                assert!(want.is_none_or(|want| want == *got), "{place}: byte {at}");
            }
            disk.chain.close().unwrap();
            let report = check(&memory).unwrap();
            assert_eq!(report.errors, 0, "{place}: {report:?}");
        }
    }
}

#[test]
fn looked_up_clusters_are_not_reused_while_pinned() {
    let test = "looked_up_clusters_are_not_reused_while_pinned";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(
        directory,
        "create -q -f qcow2 -o cluster_size=4k disk.qcow2 1M",
    );
    let memory = Memory::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    let disk = open(&memory, directory, WRITE);
    disk.write(0, &[1; 4096]).unwrap();
    disk.flush().unwrap();
    let pins = disk.chain.pins();
    let pin = pins.pin(3);
    let image::ReadLocation::Data { at, .. } = disk.chain.map(&pin, GuestOffset(0), 4096) else {
        panic!("data");
    };
    // A read is on its way, while the cluster is given up, and others are taken.
    disk.zero(0, 4096, ZeroMode::Discard).unwrap();
    let taken = |n: u64| {
        disk.write(n * 4096, &[2; 4096]).unwrap();
        disk.chain.flush().unwrap();
        let pin = pins.pin(0);
        let place = disk.chain.map(&pin, GuestOffset(n * 4096), 4096);
        pins.unpin(pin);
        matches!(place, image::ReadLocation::Data { at: found, .. } if found == at)
    };
    assert!((1..20).all(|n| !taken(n)));
    pins.unpin(pin);
    assert!((20..40).any(taken), "the space is lost");
    disk.chain.close().unwrap();
    assert_eq!(check(&memory).unwrap(), image::CheckReport::default());
}

#[test]
fn concurrent_writes_share_a_new_cluster() {
    let test = "concurrent_writes_share_a_new_cluster";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 1M");
    let memory = Memory::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    let disk = open(&memory, directory, WRITE);
    // Its tables are there.
    disk.write(0, &[1; 512]).unwrap();
    let prepare = |at: u64| disk.chain.prepare_write(GuestOffset(at), 512).unwrap();
    let image::Prepared::Allocated(first) = prepare(65536) else {
        panic!("allocated");
    };
    let image::Prepared::Wait(waiting) = prepare(65536 + 4096) else {
        panic!("wait");
    };
    // Given up, not zeroed: that waits as well.
    let zeroed = disk
        .chain
        .zero_step(GuestOffset(0), 1 << 20, ZeroMode::Discard)
        .unwrap();
    assert_eq!(zeroed, image::ZeroStep::Done(65536));
    let zeroed = disk
        .chain
        .zero_step(GuestOffset(65536), 65536, ZeroMode::Discard)
        .unwrap();
    assert_eq!(zeroed, image::ZeroStep::Wait(waiting));
    let image = disk.chain.image().unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| image.wait(&waiting));
        disk.chain.commit(first).unwrap();
        waiter.join().unwrap();
    });
    assert!(matches!(prepare(65536 + 4096), image::Prepared::Mapped));
    disk.chain.close().unwrap();
    assert_eq!(check(&memory).unwrap(), image::CheckReport::default());
}
