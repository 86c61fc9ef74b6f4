//! What a guest sees when storage misbehaves: every request is answered exactly once, with the right status, and the
//! right bytes are on the disk and in the guest's memory, whatever the engine does.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, Backing, DiskFacts, OnError};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::chain::{Chain, Layout, Table, header};
use testkit::driver::{Device, DeviceConfig, DiskConfig, HANG, Op, segment};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::random::Random;
use testkit::ring::Used;

const DISK_BYTES: u64 = 4 << 20;
const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 1024;
/// Descriptors of the ring that belong to one slot.
const DESCRIPTORS: u16 = 8;
const SERIAL: &str = "faulty";

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const FAULTS: Faults = Faults {
    short: 150,
    again: 100,
    fail: 20,
    late: 6,
    room: 16,
    address_alignment: 1,
    length_alignment: 1,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

/// A request under way.
#[derive(Debug)]
struct Request {
    kind: Kind,
    at: u64,
    len: u64,
    data: Vec<u8>,
    chain: Chain,
    head: u16,
    /// Of a flush: sectors that it must make stable.
    must: Vec<u64>,
    /// Flushes that had failed when it was made.
    flushes_failed: u64,
}

/// A guest with a model of its disk. No two of its requests that are under way touch the same sector.
struct Guest {
    device: Device,
    disk: Arc<Mutex<MemoryDisk>>,
    random: Random,
    model: Vec<u8>,
    busy: Vec<bool>,
    /// Sectors that a misdirected write has missed or hit since they were last written.
    astray: Vec<bool>,
    slots: Vec<Option<Request>>,
    /// Most bytes in a request.
    len_max: u64,
    alignment: u64,
    /// Only buffers that need no copy, only those that need one, or both.
    odd: Option<bool>,
    write_cache: bool,
    tables: u64,
    done: u64,
    _served: Served,
}

impl Guest {
    fn new(faults: Faults, slots: u16, len_max: u64, seed: u64) -> Self {
        let facts = DiskFacts {
            logical_block: faults.length_alignment.max(512),
            address_alignment: faults.address_alignment,
            length_alignment: faults.length_alignment,
            ..FACTS
        };
        let disk = MemoryDisk::new(DISK_BYTES as usize);
        let its_disk = disk.clone();
        let thread = IoThread::spawn(
            "io-0".into(),
            Polling::up_to(Duration::from_micros(50)),
            move || Faulty::new(its_disk, faults, seed),
        );
        // The engine knows its file itself, but a disk has one.
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        let served = Served::new(
            Arc::new(Disk::new(
                "faulty".into(),
                Image::raw(),
                Some((file, Backing::File, Aio::Auto)),
                facts,
                DISK_BYTES,
                SERIAL,
                Options {
                    werror: OnError::Report,
                    ..Options::default()
                },
            )),
            Arc::new(vec![thread.unwrap()]),
            1,
            QUEUE_SIZE,
        );
        let config = DeviceConfig {
            queue_size: QUEUE_SIZE,
            slots: 1,
            buffer_len: u32::from(slots) * 2 * area(len_max) as u32,
            ..DeviceConfig::default()
        };
        let device = Device::connect(served.socket(), &config).unwrap();
        let tables = device.memory.regions()[Device::RINGS].alloc(u64::from(slots) * 256, 16);
        Self {
            device,
            disk,
            random: Random(!seed),
            model: vec![0; DISK_BYTES as usize],
            busy: vec![false; (DISK_BYTES / SECTOR) as usize],
            astray: vec![false; (DISK_BYTES / SECTOR) as usize],
            slots: (0..slots).map(|_| None).collect(),
            len_max,
            alignment: u64::from(facts.logical_block),
            odd: None,
            write_cache: true,
            tables,
            done: 0,
            _served: served,
        }
    }

    fn disk(&self) -> MutexGuard<'_, MemoryDisk> {
        self.disk.lock().unwrap()
    }

    fn set_write_cache(&mut self, on: bool) {
        let frontend = &mut self.device.frontend;
        frontend
            .set_config(DiskConfig::WCE_AT, &[u8::from(on)])
            .unwrap();
        self.write_cache = on;
    }

    fn under_way(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Sends random requests, in random batches, until as many are done.
    fn run(&mut self, requests: u64) {
        let end = self.done + requests;
        while self.done < end {
            let mut heads = Vec::new();
            for slot in 0..self.slots.len() {
                if self.slots[slot].is_none() && self.random.below(3) > 0 {
                    heads.extend(self.prepare(slot));
                }
            }
            self.device.queues[0].ring.publish(heads);
            if self.random.below(200) == 0 {
                self.stop_and_go_on();
            }
            if self.under_way() > 0 {
                assert!(self.device.queues[0].ring.wait_timeout(HANG), "a hang");
            }
            self.take_used();
        }
        while self.under_way() > 0 {
            assert!(self.device.queues[0].ring.wait_timeout(HANG), "a hang");
            self.take_used();
        }
        assert_eq!(self.disk().mistakes, [""; 0]);
        assert_eq!(self.disk().failures, []);
        assert!(self.model == self.disk().bytes);
    }

    /// Stops the queue in the middle of it all. What was fetched is done by then; the rest is sent again.
    fn stop_and_go_on(&mut self) {
        let base = self.device.stop_queue(0).unwrap();
        let left = self.device.queues[0].ring.avail_idx().wrapping_sub(base);
        self.take_used();
        assert_eq!(self.under_way(), usize::from(left));
        self.device.start_queue(0, base).unwrap();
        let heads: Vec<u16> = self.slots.iter().flatten().map(|r| r.head).collect();
        self.device.queues[0].ring.publish(heads);
    }

    fn take_used(&mut self) {
        let mut used = Vec::new();
        self.device.queues[0].ring.take_used(|u| used.push(u));
        used.into_iter().for_each(|u| self.finish(u));
    }

    /// Lays a random request out in guest memory. Gives its head, or nothing if its sectors are taken.
    fn prepare(&mut self, slot: usize) -> Option<u16> {
        let kind = match self.random.below(32) {
            0 => Kind::GetId,
            1..=3 => Kind::Discard,
            4..=6 => Kind::WriteZeroes,
            7 => Kind::Flush,
            n if n % 2 == 0 => Kind::Read,
            _ => Kind::Write,
        };
        let blocks_max = match self.random.below(8) {
            0 => self.len_max / self.alignment,
            _ => (16 << 10) / self.alignment,
        };
        let len = match kind {
            Kind::Flush | Kind::GetId => 0,
            _ => (1 + self.random.below(blocks_max)) * self.alignment,
        };
        let blocks = (DISK_BYTES - len) / self.alignment;
        let at = self.random.below(blocks + 1) * self.alignment;
        let sectors = (at / SECTOR) as usize..((at + len) / SECTOR) as usize;
        if self.busy[sectors.clone()].contains(&true) {
            return None;
        }
        let mut must = Vec::new();
        if kind == Kind::Flush {
            let disk = self.disk();
            let unstable = |&s: &u64| !disk.is_stable(s * SECTOR, 1) && !self.busy[s as usize];
            must = (0..DISK_BYTES / SECTOR).filter(unstable).collect();
        } else if kind != Kind::Read {
            // A flush that is under way promises nothing for what is written after it.
            let flushes = self.slots.iter_mut().flatten();
            flushes.for_each(|r| r.must.retain(|&s| !sectors.contains(&(s as usize))));
        }
        self.astray[sectors.clone()].fill(false);
        self.busy[sectors].fill(true);

        let mark = self.random.any().to_le_bytes();
        let mut data = mark.repeat(len as usize / 8);
        // Sectors differ from each other.
        for (i, sector) in data.chunks_mut(512).enumerate() {
            sector[..2].copy_from_slice(&(i as u16).to_le_bytes());
        }
        let range = segment(at / SECTOR, (len / SECTOR) as u32, 0);
        let sector = at / SECTOR;
        let (readable, writable) = match kind {
            Kind::Read => (header(0, sector), len as u32 + 1),
            Kind::Write => ([header(1, sector), data.clone()].concat(), 1),
            Kind::Flush => (header(4, 0), 1),
            Kind::GetId => (header(8, 0), 21),
            Kind::Discard => ([header(11, 0), range.to_vec()].concat(), 1),
            Kind::WriteZeroes => ([header(13, 0), range.to_vec()].concat(), 1),
        };
        let (layout, from, to) = self.layout(slot);
        let memory = self.device.memory.clone();
        let chain = Chain::request(&memory, &layout, from, &readable, to, writable);
        let head = chain.place(
            layout.table,
            &mut self.device.queues[0].ring,
            // The first descriptor is the driver's own slot's.
            1 + slot as u16 * DESCRIPTORS,
            &memory,
            self.tables + 256 * slot as u64,
        );
        self.slots[slot] = Some(Request {
            kind,
            at,
            len,
            data,
            chain,
            head,
            must,
            flushes_failed: self.disk.lock().unwrap().flushes[1],
        });
        Some(head)
    }

    /// How a request is cut, and where what is read and what is written stand.
    fn layout(&mut self, slot: usize) -> (Layout, u64, u64) {
        let base = self.device.queues[0].buffer(0) + slot as u64 * 2 * area(self.len_max);
        let (from, to) = (base + 4096, base + area(self.len_max) + 4096);
        let odd = self.odd.unwrap_or_else(|| self.random.below(2) == 0);
        let unit = if odd { 1 } else { self.alignment };
        let mut cuts = |first: &[u32]| {
            let mut cuts = first.to_vec();
            for _ in 0..self.random.below(3) {
                cuts.push((unit * (1 + self.random.below(8192 / unit))) as u32);
            }
            cuts
        };
        let layout = Layout {
            readable: cuts(&[16]),
            writable: cuts(&[]),
            gap: if odd { self.random.below(20) } else { 0 },
            table: [
                Table::Direct,
                Table::Backwards,
                Table::Indirect,
                Table::Mixed(1),
            ][self.random.below(4) as usize],
        };
        if odd {
            let (a, b) = (self.random.below(600), 1 + self.random.below(600));
            (layout, from + a, to + b)
        } else {
            // Data behind the header begins on a page.
            (layout, from - 16, to)
        }
    }

    fn finish(&mut self, used: Used) {
        let slot = usize::from((used.id as u16 - 1) / DESCRIPTORS);
        let mut request = self.slots[slot].take().expect("not completed twice");
        assert_eq!(used.id, u32::from(request.head));
        self.done += 1;
        let Request { kind, at, len, .. } = request;
        let range = at as usize..(at + len) as usize;
        let sectors = range.start / 512..range.end / 512;
        self.busy[sectors.clone()].fill(false);

        let mut disk = self.disk.lock().unwrap();
        for write in std::mem::take(&mut disk.misdirected) {
            let of = |at: u64| (at / SECTOR) as usize..(at + write.len).div_ceil(SECTOR) as usize;
            self.astray[of(write.meant)].fill(true);
            let landed = of(write.landed);
            let flushes = self.slots.iter_mut().flatten().chain([&mut request]);
            flushes.for_each(|r| r.must.retain(|&s| !landed.contains(&(s as usize))));
            let bytes = landed.start * 512..landed.end * 512;
            self.model[bytes.clone()].copy_from_slice(&disk.bytes[bytes]);
            self.astray[landed].fill(true);
        }
        // Whether two are the same, but for what went astray.
        let same = |a: &[u8], b: &[u8]| {
            let pairs = a.chunks(512).zip(b.chunks(512));
            a.len() == b.len()
                && pairs
                    .zip(&self.astray[sectors.clone()])
                    .all(|((a, b), astray)| *astray || a == b)
        };
        let mut failure = match kind {
            Kind::GetId | Kind::Flush => None,
            _ => disk.take_failure(at, len),
        };
        // What completes with a flush may have failed with it. That it did, if it had to, is shown by what is stable.
        let settles = kind == Kind::Flush || !self.write_cache && kind != Kind::Read;
        let mut written = request.chain.written(&self.device.memory);
        let status = written.pop().expect("a status");
        if status == IO_ERROR && settles && disk.flushes[1] > request.flushes_failed {
            failure = failure.or(Some(5));
        }
        let expected = match (kind, failure) {
            (_, None) => OK,
            (Kind::Discard | Kind::WriteZeroes, Some(95)) => UNSUPPORTED,
            _ => IO_ERROR,
        };
        assert_eq!(status, expected, "{kind:?} {at}+{len}: {failure:?}");
        if status == OK {
            let bytes = match kind {
                Kind::Read => len as u32 + 1,
                Kind::GetId => 21,
                _ => 1,
            };
            assert_eq!(used.len, bytes, "{kind:?}");
        }

        let (old, now) = (&mut self.model[range.clone()], &disk.bytes[range]);
        let ok = status == OK;
        match kind {
            Kind::Read if ok => assert!(same(&written, old), "a read of {at}+{len}"),
            Kind::GetId => assert!(written.starts_with(SERIAL.as_bytes())),
            Kind::Read | Kind::Flush => {}
            Kind::Write if ok => assert!(same(now, &request.data), "a write of {at}+{len}"),
            Kind::WriteZeroes if ok => assert!(same(now, &vec![0; now.len()])),
            // All of it or nothing.
            Kind::Discard if ok => assert!(same(now, old) || same(now, &vec![0; now.len()])),
            // Any part of it.
            Kind::Write | Kind::WriteZeroes | Kind::Discard => {
                let new = match kind {
                    Kind::Write => request.data,
                    _ => vec![0; now.len()],
                };
                let either = now.iter().zip(&*old).zip(new);
                let part: Vec<_> = either
                    .map(|((&now, &old), new)| if now == new { new } else { old })
                    .collect();
                assert!(same(now, &part), "a part of {at}+{len}");
            }
        }
        old.copy_from_slice(now);
        match kind {
            Kind::Write | Kind::WriteZeroes if ok && !self.write_cache => {
                let astray = self.astray[sectors].contains(&true);
                let stable = astray || disk.is_stable(at, len);
                assert!(stable, "{kind:?} {at}+{len} is not stable");
            }
            Kind::Flush if ok => {
                let lost = request
                    .must
                    .iter()
                    .find(|&&s| !disk.is_stable(s * SECTOR, 1));
                assert_eq!(lost, None, "a sector that was flushed is not stable");
            }
            _ => {}
        }
    }
}

/// Bytes of guest memory for one direction of one slot, with room for gaps.
fn area(len_max: u64) -> u64 {
    len_max + (12 << 10)
}

fn seed() -> u64 {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    seed
}

fn storm(alignment: u32) {
    let faults = Faults {
        address_alignment: alignment,
        length_alignment: alignment,
        ..FAULTS
    };
    // Two pieces of a bounce buffer, and a bit.
    let mut guest = Guest::new(faults, 24, 600 << 10, seed());
    guest.run(2500);
    guest.set_write_cache(false);
    guest.run(2500);
    guest.set_write_cache(true);
    guest.disk().overflow = 100;
    guest.run(500);
    let struck = guest.disk().struck;
    assert!(struck.iter().all(|&n| n > 20), "{struck:?}");
}

/// Storage that writes to other places and says nothing. No block layer can know; but nothing else goes wrong: every
/// request is answered once, and no sector changes but those that were written to, and those that were hit.
#[test]
fn misdirected_writes() {
    let mut guest = Guest::new(FAULTS, 24, 64 << 10, seed());
    guest.disk().misdirect = 50;
    guest.run(2500);
    assert!(guest.astray.contains(&true));
    guest.set_write_cache(false);
    guest.run(1500);
}

#[test]
fn buffers_of_any_alignment() {
    storm(1);
}

#[test]
fn buffers_of_512() {
    storm(512);
}

#[test]
fn buffers_of_4096() {
    storm(4096);
}

/// More requests than there are bounce buffers (64): the others wait, and none is forgotten.
#[test]
fn more_requests_than_bounce_buffers() {
    let faults = Faults {
        address_alignment: 512,
        length_alignment: 512,
        room: 256,
        late: 40,
        ..FAULTS
    };
    let mut guest = Guest::new(faults, 120, 16 << 10, seed());
    guest.odd = Some(true);
    guest.run(5000);
}

/// An engine that never gets anywhere is asked a bounded number of times.
#[test]
fn endless_eagain_fails_the_request() {
    let faults = Faults {
        again: 1000,
        ..FAULTS
    };
    let mut guest = Guest::new(faults, 1, 4096, 0);
    assert_eq!(guest.device.queues[0].read(0, 4096), Err(IO_ERROR));
    assert_eq!(guest.disk().struck, [0, 101, 0]);
}

/// A thread whose engine fails can do nothing more for its guests; their front-ends must know, and the process continues.
#[test]
fn a_failed_thread_ends_its_sessions() {
    let mut guest = Guest::new(FAULTS, 4, 4096, 1);
    assert_eq!(guest.device.queues[0].run(Op::Flush, 0, 0), OK);
    guest.disk().broken = true;
    let queue = &mut guest.device.queues[0];
    queue.prepare(0, Op::Read, 0, 4096);
    queue.submit(&[0]);
    let end = guest.device.frontend.any_reply().unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof, "{end}");
}
