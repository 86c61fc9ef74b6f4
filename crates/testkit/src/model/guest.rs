//! The guest: it sends requests on several queues at once, and the oracle checks the answers.

use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};

use super::config::Serve;
use super::failure::{Failure, Outcome, hang};
use super::oracle::{Ending, Oracle, SECTOR, content, digest};
use super::steps::{Kind, Request};
use crate::driver::{DISK_FEATURES, Device, DeviceConfig, DiskConfig, Op};

const OK: u8 = 0;
const UNSUPPORTED: u8 = 2;
/// The bytes of a slot's buffer, which also limit a read or write.
const BUFFER: u32 = 128 << 10;
/// Bytes of a page of the guest's memory.
const PAGE: usize = 4096;

/// The failures that a request may be answered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leave {
    /// Requests that write may fail, because there is no space.
    pub fail: bool,
    /// Reads may fail as well: tables that cannot be written fill the cache, and leave no capacity for the tables that
    /// a read needs.
    pub fail_reads: bool,
    /// Discards are refused.
    pub no_discard: bool,
}

struct UnderWay {
    request: Request,
    sector: u64,
    range: Range<usize>,
    sent: u64,
    /// A write touched the range meanwhile, so the data of a read is not checked.
    mixed: bool,
}

pub struct Guest {
    device: Device,
    config: DeviceConfig,
    /// The server writes through the page cache.
    is_cached: bool,
    under_way: Vec<Vec<Option<UnderWay>>>,
    pub leave: Leave,
    pub completed: u64,
}

/// The part of the disk that a request concerns.
pub fn placed(oracle: &Oracle, request: &Request) -> (u64, Range<usize>) {
    let all: usize = oracle.windows.iter().map(|w| w.sectors).sum();
    let index = (request.at % all as u64) as usize;
    let window = oracle
        .windows
        .iter()
        .find(|w| (w.first..w.first + w.sectors).contains(&index))
        .expect("windows follow each other");
    let sector = window.sector + (index - window.first) as u64;
    let sector = (sector - sector % request.align).max(window.sector);
    let end = window.sector + window.sectors as u64;
    let sectors = u64::from(request.sectors).min(end - sector) as usize;
    let start = window.first + (sector - window.sector) as usize;
    (sector, start..start + sectors)
}

/// The bytes that a request writes to its range; empty if it writes none.
pub fn written(request: &Request, sector: u64, sectors: usize) -> Vec<u8> {
    match request.kind {
        Kind::Write => (0..sectors as u64)
            .flat_map(|i| content(request.mark, sector + i))
            .collect(),
        _ => vec![0; sectors * SECTOR],
    }
}

impl Guest {
    pub fn connect(socket: &Path, serve: &Serve) -> Outcome<Self> {
        let without = match serve.without_flush {
            true => 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_CONFIG_WCE,
            false => 0,
        };
        let config = DeviceConfig {
            queues: serve.queues,
            queue_size: 64,
            slots: serve.slots,
            buffer_len: BUFFER,
            buffer_offset: serve.buffer_offset,
            indirect: serve.indirect,
            event_idx: serve.event_idx,
            packed: serve.packed,
            inflight: true,
            region: None,
            features: !without,
            ..DeviceConfig::default()
        };
        let device = Device::connect(socket, &config)
            .map_err(|e| Failure::new("connect", format!("no connection: {e}")))?;
        let none = || (0..serve.slots).map(|_| None).collect();
        Ok(Self {
            device,
            is_cached: serve.is_cached(),
            under_way: (0..serve.queues).map(|_| none()).collect(),
            config,
            leave: Leave {
                fail: false,
                fail_reads: serve.l2_cache.is_some(),
                no_discard: serve.discard == "ignore",
            },
            completed: 0,
        })
    }

    /// Reconnects with all requests in flight.
    pub fn reconnect(&mut self, socket: &Path) -> Outcome<()> {
        self.device
            .reconnect(socket, &self.config)
            .map_err(|e| Failure::new("connect", format!("no connection: {e}")))
    }

    /// Records where a kill may have ended a write in the middle of a sector. The kernel copies a write to the page cache up to
    /// a page of the guest's memory that it has to look up first, and a killed process gets no further. Buffers begin
    /// [this far](Serve::buffer_offset) into a page.
    pub fn killed(&self, oracle: &mut Oracle) {
        let into_sector = PAGE - self.config.buffer_offset as usize % PAGE;
        if !self.is_cached || into_sector.is_multiple_of(SECTOR) {
            return;
        }
        let under_way = self.under_way.iter().flatten().flatten();
        for write in under_way.filter(|u| u.request.kind == Kind::Write) {
            let len = write.range.len() * SECTOR;
            for at in (into_sector..len).step_by(PAGE) {
                let index = write.range.start + at / SECTOR;
                oracle.may_be_torn(index, write.request.mark, at % SECTOR);
            }
        }
    }

    pub fn in_flight(&self) -> usize {
        self.under_way.iter().flatten().flatten().count()
    }

    /// Sends requests as slots become free. Returns when all of them, or `until` of them, have been answered.
    pub fn run(
        &mut self,
        oracle: &mut Oracle,
        list: &[Request],
        until: Option<u32>,
    ) -> Outcome<()> {
        let enough = until.map(|n| self.completed + u64::from(n));
        // Send this many more, so that some are still in flight then.
        let ahead = list.len().min(2 * self.under_way.len());
        let mut left = until.map(|n| n as usize + ahead);
        for request in list {
            if left == Some(0) {
                break;
            }
            left = left.map(|left| left - 1);
            let queue = usize::from(request.queue) % self.under_way.len();
            let free = |under_way: &Vec<Vec<Option<UnderWay>>>| {
                under_way[queue].iter().position(Option::is_none)
            };
            let mut since = Instant::now();
            let slot = loop {
                if self.take(oracle)? > 0 {
                    since = Instant::now();
                }
                if let Some(slot) = free(&self.under_way) {
                    break slot;
                }
                self.rest(since)?;
            };
            self.send(oracle, queue, slot as u16, request);
        }
        match enough {
            None => self.drain(oracle),
            Some(enough) => self.wait(oracle, |guest| guest.completed >= enough),
        }
    }

    /// Waits until no request is in flight.
    pub fn drain(&mut self, oracle: &mut Oracle) -> Outcome<()> {
        self.wait(oracle, |guest| guest.in_flight() == 0)
    }

    fn wait(&mut self, oracle: &mut Oracle, done: impl Fn(&Self) -> bool) -> Outcome<()> {
        let mut since = Instant::now();
        loop {
            if self.take(oracle)? > 0 {
                since = Instant::now();
            }
            if done(self) || self.in_flight() == 0 {
                return Ok(());
            }
            self.rest(since)?;
        }
    }

    fn rest(&self, since: Instant) -> Outcome<()> {
        if since.elapsed() < hang() {
            thread::sleep(Duration::from_micros(50));
            return Ok(());
        }
        let all = self.under_way.iter().enumerate();
        let waiting: Vec<_> = all
            .flat_map(|(queue, slots)| slots.iter().flatten().map(move |u| (queue, u)))
            .map(|(queue, u)| format!("queue {queue}: {:?} at {}", u.request.kind, u.sector))
            .collect();
        Err(Failure::new(
            "hang",
            format!("not answered: {}", waiting.join(", ")),
        ))
    }

    fn send(&mut self, oracle: &mut Oracle, queue: usize, slot: u16, request: &Request) {
        let op = match request.kind {
            Kind::Read => Op::Read,
            Kind::Write | Kind::WriteNothing => Op::Write,
            Kind::WriteZeroes { unmap } => Op::WriteZeroes { unmap },
            Kind::Discard => Op::Discard,
            Kind::Flush => Op::Flush,
        };
        if !self.has(op) {
            return;
        }
        let (sector, range) = match request.kind {
            Kind::Flush => (0, 0..0),
            _ => placed(oracle, request),
        };
        let device_queue = &mut self.device.queues[queue];
        let bytes = written(request, sector, range.len());
        let changes = !matches!(request.kind, Kind::Read | Kind::Flush);
        let mut mixed = false;
        for other in self.under_way.iter_mut().flatten().flatten() {
            let overlap = other.range.start < range.end && range.start < other.range.end;
            let read = other.request.kind == Kind::Read;
            if overlap && changes && read {
                other.mixed = true;
            }
            mixed |= overlap && !changes && !read;
        }
        let sent = match changes {
            true => {
                let digests: Vec<u64> = bytes.chunks(SECTOR).map(digest).collect();
                oracle.sent(range.clone(), request.mark, &digests)
            }
            false => oracle.now(),
        };
        match op {
            Op::Write => device_queue.write_buffer(slot, &bytes),
            Op::Read => device_queue.write_buffer(slot, &vec![0xa5; bytes.len()]),
            _ => {}
        }
        device_queue.prepare(slot, op, sector, bytes.len() as u32);
        device_queue.submit(&[slot]);
        self.under_way[queue][usize::from(slot)] = Some(UnderWay {
            request: *request,
            sector,
            range,
            sent,
            mixed,
        });
    }

    fn has(&self, op: Op) -> bool {
        use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};
        let bit = match op {
            Op::Flush => VIRTIO_BLK_F_FLUSH,
            Op::Discard => VIRTIO_BLK_F_DISCARD,
            Op::WriteZeroes { .. } => VIRTIO_BLK_F_WRITE_ZEROES,
            _ => return true,
        };
        debug_assert!(DISK_FEATURES & 1 << bit != 0);
        self.device.features & 1 << bit != 0
    }

    /// Switches the write cache, if the device allows it. Returns whether it does.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn switch_write_cache(&mut self, on: bool) -> Outcome<bool> {
        if self.device.features & 1 << VIRTIO_BLK_F_CONFIG_WCE == 0 {
            return Ok(false);
        }
        let frontend = &mut self.device.frontend;
        frontend.set_config(DiskConfig::WCE_AT, &[u8::from(on)])?;
        // The device has switched the cache when it answers the next message.
        frontend.config(DiskConfig::WCE_AT, 1)?;
        Ok(true)
    }

    /// Handles the requests that have been answered.
    fn take(&mut self, oracle: &mut Oracle) -> Outcome<usize> {
        let mut count = 0;
        for number in 0..self.under_way.len() {
            let mut done = Vec::new();
            self.device.queues[number].poll(|slot, status| done.push((slot, status)));
            for (slot, status) in done {
                count += 1;
                self.completed += 1;
                self.answered(oracle, number, slot, status)?;
            }
        }
        Ok(count)
    }

    fn answered(
        &mut self,
        oracle: &mut Oracle,
        number: usize,
        slot: u16,
        status: u8,
    ) -> Outcome<()> {
        let UnderWay {
            request,
            sector,
            range,
            sent,
            mixed,
        } = self.under_way[number][usize::from(slot)]
            .take()
            .ok_or_else(|| Failure::new("status", format!("slot {slot} was not in flight")))?;
        let kind = request.kind;
        let may_fail = self.leave.fail && (kind != Kind::Read || self.leave.fail_reads)
            || kind == Kind::Discard && self.leave.no_discard && status == UNSUPPORTED;
        if status != OK && !may_fail {
            let what = format!("{request:?} at sector {sector}: status {status}");
            return Err(Failure::new("status", what));
        }
        match kind {
            Kind::Flush if status == OK => oracle.flushed(sent),
            Kind::Flush => {}
            Kind::Read if mixed || status != OK => {}
            Kind::Read => {
                let bytes = self.device.queues[number].read_buffer(slot, range.len() * SECTOR);
                oracle
                    .saw(range, &bytes)
                    .map_err(|e| Failure::new("content", format!("a read: {e}")))?;
            }
            _ => {
                let ending = match kind {
                    _ if status != OK => Ending::Failed,
                    Kind::Discard => Ending::Discarded,
                    _ => Ending::Replaced,
                };
                oracle.answered(range, request.mark, sent, ending);
            }
        }
        Ok(())
    }
}
