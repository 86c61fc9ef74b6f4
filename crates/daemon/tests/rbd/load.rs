//! A load that verifies what it reads.

use std::time::{Duration, Instant};

use testkit::driver::{Device, HANG, Op};
use testkit::random::Random;

/// Sectors per block.
pub const SECTORS: u64 = 8;

/// A block, and the number of the write if it is a write.
type InFlight = Option<(usize, Option<u64>)>;

/// Reads and writes in every slot of every queue, each queue on its own blocks: at random, or sequentially, in which
/// case they can be merged.
pub struct Load {
    /// The number of the last write to each block, if any.
    written: Vec<Option<u64>>,
    /// What each slot of each queue is doing.
    in_flight: Vec<Vec<InFlight>>,
    random: Random,
    /// Writes repeat what the block already holds.
    repeats: bool,
    count: u64,
    pub completed: u64,
}

impl Load {
    pub fn new(device: &Device, blocks: usize) -> Self {
        let slots = |queue: &testkit::driver::Queue| vec![None; usize::from(queue.slots())];
        Self {
            written: vec![None; blocks],
            in_flight: device.queues.iter().map(slots).collect(),
            random: Random(7),
            repeats: false,
            count: 0,
            completed: 0,
        }
    }

    /// From now on the content does not change: each write repeats the last one.
    pub fn repeat(&mut self) {
        self.repeats = true;
    }

    /// The expected content of a block.
    fn expected(&self, block: usize, number: Option<u64>) -> Vec<u8> {
        let Some(number) = number else {
            return vec![0; 512 * SECTORS as usize];
        };
        let seed = (block as u64) << 32 | number;
        let words = (0..64 * SECTORS).map(|i| (seed + i).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        words.flat_map(u64::to_le_bytes).collect()
    }

    /// Starts a request in every free slot.
    pub fn fill(&mut self, device: &mut Device) {
        let queues = device.queues.len();
        for (q, queue) in device.queues.iter_mut().enumerate() {
            let mut ready = Vec::new();
            let part = (self.written.len() / queues) as u64;
            let mut within = 0;
            let mut write = false;
            for slot in 0..self.in_flight[q].len() {
                within = match self.random.below(3) {
                    0 => self.random.below(part),
                    _ => (within + 1) % part,
                };
                if self.random.below(4) == 0 {
                    write = !write;
                }
                let block = (q as u64 * part + within) as usize;
                let taken = |d: &Option<(usize, _)>| d.is_some_and(|(b, _)| b == block);
                if self.in_flight[q][slot].is_some() || self.in_flight[q].iter().any(taken) {
                    continue;
                }
                let number = match (write, self.repeats) {
                    (true, false) => {
                        self.count += 1;
                        Some(self.count)
                    }
                    (true, true) => self.written[block],
                    (false, _) => None,
                };
                let (op, bytes) = match number {
                    Some(_) => (Op::Write, self.expected(block, number)),
                    None => (Op::Read, vec![0xa5; 512 * SECTORS as usize]),
                };
                queue.write_buffer(slot as u16, &bytes);
                queue.prepare(slot as u16, op, block as u64 * SECTORS, bytes.len() as u32);
                self.in_flight[q][slot] = Some((block, number));
                ready.push(slot as u16);
            }
            queue.submit(&ready);
        }
    }

    /// Takes and verifies completed requests.
    pub fn take(&mut self, device: &mut Device) {
        for (q, queue) in device.queues.iter_mut().enumerate() {
            let mut done = Vec::new();
            queue.poll(|slot, status| done.push((slot, status)));
            for (slot, status) in done {
                assert_eq!(status, 0);
                let (block, number) = self.in_flight[q][usize::from(slot)]
                    .take()
                    .expect("in flight");
                match number {
                    Some(_) => self.written[block] = number,
                    None => {
                        let found = queue.read_buffer(slot, 512 * SECTORS as usize);
                        let expected = self.expected(block, self.written[block]);
                        assert!(
                            found == expected,
                            "block {block} of {:?}",
                            self.written[block]
                        );
                    }
                }
                self.completed += 1;
            }
        }
    }

    /// Runs until this many requests have completed.
    pub fn run(&mut self, device: &mut Device, requests: u64) {
        let (end, start) = (self.completed + requests, Instant::now());
        while self.completed < end {
            assert!(start.elapsed() < 4 * HANG, "requests hang");
            self.fill(device);
            self.take(device);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits for everything in flight.
    pub fn finish(&mut self, device: &mut Device) {
        let start = Instant::now();
        while self.in_flight.iter().flatten().any(Option::is_some) {
            assert!(start.elapsed() < 4 * HANG, "requests were lost");
            self.take(device);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Compares everything written with the content.
    pub fn compare(&self, content: &[u8]) {
        let len = 512 * SECTORS as usize;
        let mut compared = 0;
        for (block, number) in self.written.iter().enumerate() {
            let found = &content[block * len..][..len];
            assert!(
                found == self.expected(block, *number),
                "block {block}: {number:?}"
            );
            compared += usize::from(number.is_some());
        }
        assert!(compared > 0, "nothing was written");
    }
}
