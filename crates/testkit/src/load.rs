//! A load that verifies everything it reads, whatever happens to the server meanwhile.

use std::io;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::driver::{Device, HANG, Op, Queue};
use crate::random::Random;

const OK: u8 = 0;

/// The sectors of a block.
pub const SECTORS: u64 = 8;

/// The bytes of a block.
pub const BLOCK: usize = 512 * SECTORS as usize;

/// Bytes that differ from sector to sector and within a sector.
pub fn content(sector: u64, len: usize) -> Vec<u8> {
    let words =
        (0..len as u64 / 8).map(|i| (sector * 64 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// The content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// [`content`] of its sector, as in a new disk of a test.
    Pattern,
    /// Zeroes.
    Zeroes,
    /// The content that the write with this number wrote.
    Written(u64),
    /// Unknown: a change of the block failed.
    Unknown,
}

/// Requests of one queue. A block has at most one request in flight, so that the load knows what a read must return.
#[derive(Clone)]
pub struct Load {
    held: Vec<BlockContent>,
    /// The initial content of all blocks.
    first: BlockContent,
    /// Blocks and their new content, in the order in which the changes were submitted.
    changes: Vec<(usize, BlockContent)>,
    /// The request of each slot: the block, its new content if the request changes it, and the time of submission.
    requests: Vec<Option<(usize, Option<BlockContent>, Instant)>>,
    first_block: usize,
    zeroes: bool,
    count: u64,
    /// Requests may fail. After a failed change, the content of the block is unknown until the next one.
    pub may_fail: bool,
    /// Completed requests.
    pub completed: u64,
    /// The duration of the longest request.
    pub longest: Duration,
}

impl Load {
    /// Makes a load for `blocks` blocks, all with the same kind of content. With `zeroes`, it also sends write-zeroes
    /// requests that may unmap.
    pub fn new(
        queue: &Queue,
        first_block: usize,
        blocks: usize,
        held: BlockContent,
        zeroes: bool,
    ) -> Self {
        Self {
            held: vec![held; blocks],
            first: held,
            changes: Vec::new(),
            requests: vec![None; usize::from(queue.slots())],
            first_block,
            zeroes,
            count: 0,
            may_fail: false,
            completed: 0,
            longest: Duration::ZERO,
        }
    }

    /// Makes a load for each queue of a device, each with its own blocks.
    pub fn all(device: &Device, blocks: usize, held: BlockContent, zeroes: bool) -> Vec<Self> {
        let queues = device.queues.iter().enumerate();
        queues
            .map(|(i, queue)| Self::new(queue, i * blocks, blocks, held, zeroes))
            .collect()
    }

    /// The first sector of a block.
    pub fn sector(&self, block: usize) -> u64 {
        (self.first_block + block) as u64 * SECTORS
    }

    fn bytes(&self, block: usize, held: BlockContent) -> Vec<u8> {
        let sector = self.sector(block);
        match held {
            BlockContent::Zeroes | BlockContent::Unknown => vec![0; BLOCK],
            BlockContent::Pattern => content(sector, BLOCK),
            BlockContent::Written(number) => content(sector + (number << 20), BLOCK),
        }
    }

    fn may_be(&self, block: usize, held: BlockContent, found: &[u8]) -> bool {
        held == BlockContent::Unknown || found == self.bytes(block, held)
    }

    /// Submits a request in every free slot.
    pub fn fill(&mut self, queue: &mut Queue, random: &mut Random) {
        let mut ready = Vec::new();
        for slot in 0..self.requests.len() {
            if self.requests[slot].is_some() {
                continue;
            }
            let block = random.below(self.held.len() as u64) as usize;
            let taken = |d: &Option<(usize, _, _)>| d.is_some_and(|(b, _, _)| b == block);
            if self.requests.iter().any(taken) {
                continue;
            }
            let sector = self.sector(block);
            let (op, will_hold) = match random.below(if self.zeroes { 10 } else { 8 }) {
                0..4 => (Op::Read, None),
                4..8 => {
                    self.count += 1;
                    (Op::Write, Some(BlockContent::Written(self.count)))
                }
                _ => (Op::WriteZeroes { unmap: true }, Some(BlockContent::Zeroes)),
            };
            self.changes.extend(will_hold.map(|held| (block, held)));
            match will_hold {
                Some(held) => queue.write_buffer(slot as u16, &self.bytes(block, held)),
                None => queue.write_buffer(slot as u16, &[0xa5; BLOCK]),
            }
            queue.prepare(slot as u16, op, sector, BLOCK as u32);
            self.requests[slot] = Some((block, will_hold, Instant::now()));
            ready.push(slot as u16);
        }
        queue.submit(&ready);
    }

    /// Handles completed requests. Panics if a read returned unexpected data, or if a request that was not in flight
    /// completes.
    pub fn take(&mut self, queue: &mut Queue) {
        let mut done = Vec::new();
        queue.poll(|slot, status| done.push((slot, status)));
        for (slot, status) in done {
            let (block, will_hold, since) =
                self.requests[usize::from(slot)].take().expect("in flight");
            if status != OK {
                assert!(
                    self.may_fail,
                    "status {status} of {will_hold:?} in block {block}"
                );
                if will_hold.is_some() {
                    self.held[block] = BlockContent::Unknown;
                }
                continue;
            }
            self.longest = self.longest.max(since.elapsed());
            match will_hold {
                Some(held) => self.held[block] = held,
                None => {
                    let held = self.held[block];
                    let found = queue.read_buffer(slot, BLOCK);
                    assert!(
                        self.may_be(block, held, &found),
                        "block {block}, of {held:?}"
                    );
                }
            }
            self.completed += 1;
        }
    }

    /// Keeps the queues busy for this long.
    pub fn run(loads: &mut [Self], device: &mut Device, random: &mut Random, length: Duration) {
        let start = Instant::now();
        while start.elapsed() < length {
            for (load, queue) in loads.iter_mut().zip(&mut device.queues) {
                load.fill(queue, random);
                load.take(queue);
            }
        }
    }

    /// Waits until nothing is in flight.
    pub fn finish(loads: &mut [Self], device: &mut Device) {
        let start = Instant::now();
        while loads.iter().any(|load| load.in_flight() > 0) {
            assert!(start.elapsed() < HANG, "requests were lost");
            for (load, queue) in loads.iter_mut().zip(&mut device.queues) {
                load.take(queue);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.iter().flatten().count()
    }

    /// The number of changes submitted so far.
    pub fn changes(&self) -> usize {
        self.changes.len()
    }

    /// Finds the moment that a raw file, or an image converted to one, shows: the number of changes that it contains,
    /// among the `possible` ones. The device takes a queue's requests in order, so such a moment exists if the disk was
    /// stopped and then copied.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn moment(
        &self,
        file: &Path,
        possible: RangeInclusive<usize>,
    ) -> io::Result<Option<usize>> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(file)?;
        let mut found = vec![vec![0; BLOCK]; self.held.len()];
        for (block, found) in found.iter_mut().enumerate() {
            file.read_exact_at(found, self.sector(block) * 512)?;
        }
        let mut held = vec![self.first; self.held.len()];
        for &(block, then) in &self.changes[..*possible.start()] {
            held[block] = then;
        }
        let is_right = |block: usize, held| found[block] == self.bytes(block, held);
        let mut right: Vec<_> = (0..held.len()).map(|b| is_right(b, held[b])).collect();
        for moment in possible.clone() {
            if right.iter().all(|right| *right) {
                return Ok(Some(moment));
            }
            if let Some(&(block, then)) = self.changes.get(moment) {
                right[block] = is_right(block, then);
            }
        }
        Ok(None)
    }

    /// Compares a raw file, or an image converted to one, with the content that the disk must have.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn verify(&self, file: &Path) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(file)?;
        let mut found = vec![0; BLOCK];
        for (block, &held) in self.held.iter().enumerate() {
            file.read_exact_at(&mut found, self.sector(block) * 512)?;
            assert!(self.may_be(block, held, &found), "block {block}: {held:?}");
        }
        Ok(())
    }
}
