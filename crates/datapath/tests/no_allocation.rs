//! Reads, writes and flushes allocate nothing: no memory is allocated, moved or freed on an I/O thread while it serves them,
//! once its tables have grown to the size of its queues. The test has an allocator that counts.

#![expect(unsafe_code, reason = "a global allocator")]

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, CacheMode, DiskFacts};
use datapath::{Disk, IoThread, Options, Polling};
use engine::{DiskFile, OpenError, Uring, UringError};
use image::Image;
use tempfile::TempDir;
use testkit::chain::{Chain, Layout, Table, header};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::random::Random;

const DISK_BYTES: u64 = 16 << 20;
const DEPTH: u16 = 32;
const WARM_UP: u64 = 10_000;
const REQUESTS: u64 = 100_000;

struct Counting;

thread_local! {
    /// What counts the calls of this thread, if it is an I/O thread.
    static COUNTER: Cell<Option<&'static AtomicU64>> = const { Cell::new(None) };
}

fn count() {
    if let Ok(Some(counter)) = COUNTER.try_with(Cell::get) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all is left to the system's allocator; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Memory) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Memory, new: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, new) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Serves a disk with io_uring; the counter counts what its I/O thread does. `None` where there is no io_uring.
fn serve(disk: Disk) -> Option<(Served, &'static AtomicU64)> {
    let counter: &'static AtomicU64 = Box::leak(Box::default());
    let thread = IoThread::spawn(
        "io-0".into(),
        Polling::up_to(Duration::from_micros(50)),
        move || {
            COUNTER.set(Some(counter));
            Ok(Uring::new()?)
        },
    );
    let thread = thread.map_err(|e: Box<dyn Error + Send + Sync>| {
        let missing = matches!(
            e.downcast_ref(),
            Some(UringError::Disabled(_) | UringError::Forbidden(_) | UringError::Absent)
        );
        assert!(missing, "{e}");
        println!("skipped: {e}");
    });
    Some((
        Served::new(Arc::new(disk), Arc::new(vec![thread.ok()?]), 1, 256),
        counter,
    ))
}

/// Random reads and writes of 4k and flushes at full depth.
fn load(device: &mut Device, random: &mut Random, requests: u64) {
    let queue = &mut device.queues[0];
    let mut free: Vec<u16> = (0..DEPTH).collect();
    let (mut sent, mut done) = (0, 0);
    while done < requests {
        let batch = free.len().min((requests - sent) as usize);
        for &slot in &free[..batch] {
            let op = match random.below(256) {
                0 => Op::Flush,
                1..128 => Op::Write,
                _ => Op::Read,
            };
            queue.prepare(slot, op, random.below(DISK_BYTES / 4096) * 8, 4096);
        }
        queue.submit(&free[..batch]);
        free.drain(..batch);
        sent += batch as u64;
        assert!(queue.ring.wait_timeout(HANG), "{done} requests are done");
        queue.poll(|slot, status| {
            assert_eq!(status, 0);
            free.push(slot);
            done += 1;
        });
    }
}

fn assert_no_allocation(disk: Disk) {
    let Some((served, counter)) = serve(disk) else {
        return;
    };
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: 4096,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(served.socket(), &config).unwrap();
    let mut random = Random(1);
    load(&mut device, &mut random, WARM_UP);
    let before = counter.load(Ordering::Relaxed);
    assert!(before > 0, "the allocator does not count");
    load(&mut device, &mut random, REQUESTS);
    let calls = counter.load(Ordering::Relaxed) - before;
    assert_eq!(calls, 0, "calls of the allocator in {REQUESTS} requests");
}

#[test]
fn null() {
    let name = "null".to_owned();
    assert_no_allocation(Disk::new(
        name,
        Image::Null,
        None,
        FACTS,
        DISK_BYTES,
        "",
        Options::default(),
    ));
}

#[test]
fn file_with_o_direct() {
    assert_file(CacheMode::None);
}

#[test]
fn page_cache() {
    assert_file(CacheMode::Writeback);
}

fn assert_file(cache: CacheMode) {
    let directory = real_directory();
    match open(directory.path(), cache, |facts| facts) {
        Ok(disk) => assert_no_allocation(disk),
        Err(e @ OpenError::Direct(_)) => println!("skipped: {e}"),
        Err(e) => panic!("{e}"),
    }
}

/// On the file system that the project is built on; the one for temporary files may have no O_DIRECT.
fn real_directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(
    directory: &Path,
    cache: CacheMode,
    change: impl FnOnce(DiskFacts) -> DiskFacts,
) -> Result<Disk, OpenError> {
    let path = directory.join("disk.raw");
    std::fs::write(&path, vec![1; DISK_BYTES as usize]).unwrap();
    let file = DiskFile::open(&path, cache, false)?;
    let facts = change(file.facts());
    let name = "file".to_owned();
    let backing = Some((file.descriptor().clone(), file.backing(), Aio::Auto));
    Ok(Disk::new(
        name,
        Image::raw(),
        backing,
        facts,
        DISK_BYTES,
        "",
        Options::default(),
    ))
}

/// The counter counts: buffers that are not aligned take bounce buffers, which are made when they are first needed, and
/// not again.
#[test]
fn bounce_buffers_are_made_once() {
    let directory = real_directory();
    let aligned = |facts| DiskFacts {
        address_alignment: 512,
        ..facts
    };
    let disk = open(directory.path(), CacheMode::Writeback, aligned).unwrap();
    let Some((served, counter)) = serve(disk) else {
        return;
    };
    let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
    load_aligned_reads(&mut device);
    let before = counter.load(Ordering::Relaxed);
    load_aligned_reads(&mut device);
    assert_eq!(counter.load(Ordering::Relaxed), before);

    load_odd_reads(&mut device);
    let made = counter.load(Ordering::Relaxed) - before;
    assert!(made > 0, "bounce buffers were not counted");
    for _ in 0..100 {
        load_odd_reads(&mut device);
    }
    // One for each request in flight, and the growth of two lists.
    let made = counter.load(Ordering::Relaxed) - before;
    assert!(made <= u64::from(ODD) + 16, "{made} calls");
}

fn load_aligned_reads(device: &mut Device) {
    for sector in 0..100 {
        assert_eq!(device.queues[0].read(sector, 4096).unwrap(), [1; 4096]);
    }
}

/// Requests in flight whose buffers lie at odd addresses.
const ODD: u16 = 16;

fn load_odd_reads(device: &mut Device) {
    let memory = device.memory.clone();
    let queue = &mut device.queues[0];
    let first = queue.first_free_desc();
    let place = |i: u16| {
        let chain = Chain::request(
            &memory,
            &Layout::default(),
            queue.buffer(0) + 32 * u64::from(i),
            &header(0, u64::from(i)),
            queue.buffer(i) + 4096 + 1,
            4097,
        );
        (chain, first + 2 * i)
    };
    let chains: Vec<_> = (0..ODD).map(place).collect();
    for (chain, at) in &chains {
        chain.place(Table::Direct, &mut queue.ring, *at, &memory, 0);
    }
    queue.ring.publish(chains.iter().map(|c| c.1));
    for _ in &chains {
        assert!(queue.ring.next_used(HANG).is_some());
    }
    for (chain, _) in &chains {
        let written = chain.written(&memory);
        assert!(written[..4096].iter().all(|&b| b == 1) && written[4096] == 0);
    }
}
