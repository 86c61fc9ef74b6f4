//! Random faults of the storage, with a power cut at the end of each run.

use testkit::driver::Queue;

use super::*;

const SLOTS: u64 = DEPTH as u64;
/// Each slot has this many blocks of its own.
const BLOCKS_PER_SLOT: u64 = 32;
/// Requests, all slots at once, between the start and the power cut.
const BATCHES: u64 = 60;

/// Every block holds something the guest may expect, and flushed data is there. The seed is printed.
#[test]
fn power_cuts_keep_flushed_data() {
    let seed = seed();
    let rounds = std::env::var("RINGDISK_TEST_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let mut cases = 0;
    for round in 0..rounds {
        for format in ["raw", "qcow2"] {
            for cache in ["none", "directsync", "writeback", "writethrough", "unsafe"] {
                for aio in ["io_uring", "native", "threads"] {
                    if aio == "native" && !matches!(cache, "none" | "directsync") {
                        continue;
                    }
                    let seed = seed ^ (cases + round) << 32;
                    let Some(setup) = Setup::new(format, seed) else {
                        return;
                    };
                    Run::new(&setup, cache, aio, seed).run();
                    cases += 1;
                }
            }
        }
    }
    println!("{cases} runs of faults");
}

/// The possible content of a block: numbers of writes.
#[derive(Clone)]
struct Block {
    /// The last acknowledged write, and any later unacknowledged writes.
    now: Vec<u64>,
    /// What may be there after a power cut: everything since the last successful flush.
    after_power_cut: Vec<u64>,
}

/// A request: its operation, its block, and the number of the write.
type Request = (Op, usize, u64);

struct Run<'a> {
    setup: &'a Setup,
    cache: &'a str,
    aio: &'a str,
    /// Describes the run in messages.
    context: String,
    random: Random,
    blocks: Vec<Block>,
    writes: u64,
    errors: u64,
}

impl<'a> Run<'a> {
    fn new(setup: &'a Setup, cache: &'a str, aio: &'a str, seed: u64) -> Self {
        let zero = Block {
            now: vec![0],
            after_power_cut: vec![0],
        };
        Self {
            setup,
            cache,
            aio,
            context: format!("{}, cache={cache}, aio={aio}, seed {seed}", setup.format),
            random: Random(seed),
            blocks: vec![zero; (SLOTS * BLOCKS_PER_SLOT) as usize],
            writes: 0,
            errors: 0,
        }
    }

    fn run(mut self) {
        let (cache, aio) = (self.cache, self.aio);
        let options = format!("cache={cache},aio={aio},rerror=report,werror=report");
        let mut server = self.setup.serve(&options, &[]);
        let mut device = self.setup.connect();
        for batch in 0..BATCHES {
            let mishaps = Mishaps {
                short: 100,
                fail: if batch % 3 == 0 { 60 } else { 0 },
                again: 30,
                late_ms: u64::from(batch % 5 == 0),
            };
            self.setup.storage.change(|s| s.mishaps = mishaps);
            self.batch(&mut device.queues[0]);
        }
        // A kill, then a power cut: data in the kernel is lost too.
        server.signal(rustix::process::Signal::KILL);
        let _ = server.ended();
        drop(device);
        self.setup.storage.change(|s| {
            s.mishaps = Mishaps::default();
            s.cut_power(&mut self.random);
        });
        let failed = self.setup.storage.control().failed;
        if self.cache != "unsafe" {
            self.compare_after_power_cut();
        }
        println!(
            "{}: {failed} faults of storage, {} errors for the guest",
            self.context, self.errors
        );
    }

    /// Submits a request in every slot, and checks the results.
    fn batch(&mut self, queue: &mut Queue) {
        let flushes = self.random.below(4) == 0;
        let requests: Vec<_> = (0..SLOTS)
            .map(|slot| self.prepare(queue, slot, flushes))
            .collect();
        queue.submit(&(0..DEPTH).collect::<Vec<_>>());
        let mut flushed = false;
        for (slot, status) in queue.finish(usize::from(DEPTH)) {
            let request = requests[usize::from(slot)];
            self.completed(queue, slot, request, status);
            flushed |= (request.0, status) == (Op::Flush, OK);
        }
        if flushed && self.cache != "unsafe" {
            for block in &mut self.blocks {
                block.after_power_cut.clone_from(&block.now);
            }
        }
    }

    fn prepare(&mut self, queue: &mut Queue, slot: u64, flush: bool) -> Request {
        let number = self.random.below(BLOCKS_PER_SLOT);
        let op = match self.random.below(5) {
            _ if flush => Op::Flush,
            0 | 1 => Op::Read,
            _ => Op::Write,
        };
        queue.prepare(slot as u16, op, sector(slot, number), LEN);
        if op == Op::Write {
            self.writes += 1;
            let content = self.writes.to_le_bytes().repeat(LEN as usize / 8);
            queue.write_buffer(slot as u16, &content);
        }
        (op, (number * SLOTS + slot) as usize, self.writes)
    }

    fn completed(&mut self, queue: &Queue, slot: u16, request: Request, status: u8) {
        let (op, block, write) = request;
        let context = &self.context;
        self.errors += u64::from(status != OK);
        assert!(
            matches!(status, OK | IO_ERROR),
            "{context}: status {status}"
        );
        let is_write_through = matches!(self.cache, "directsync" | "writethrough");
        let block = &mut self.blocks[block];
        match (op, status) {
            (Op::Read, OK) => {
                let expected = &block.now;
                for found in writes_in(&queue.read_buffer(slot, LEN as usize)) {
                    assert!(
                        expected.contains(&found),
                        "{context}: read {found}, expected one of {expected:?}"
                    );
                }
            }
            (Op::Write, OK) => {
                block.now = vec![write];
                if is_write_through {
                    block.after_power_cut = vec![write]
                } else {
                    block.after_power_cut.push(write)
                }
            }
            // The write may be complete, partial or missing.
            (Op::Write, _) => {
                block.now.push(write);
                block.after_power_cut.push(write);
            }
            _ => {}
        }
    }

    fn compare_after_power_cut(&self) {
        let context = &self.context;
        let format = self.setup.format;
        let image = self.setup.dir.path().join("after");
        std::fs::write(&image, self.setup.storage.control().bytes()).unwrap();
        if format == "qcow2" {
            let check = Command::new("qemu-img")
                .args(["check", "-q", "-f", "qcow2"])
                .arg(&image)
                .status();
            // Exit code 3: only space is lost.
            assert!(matches!(check.unwrap().code(), Some(0 | 3)), "{context}");
        }
        let raw = self.setup.dir.path().join("raw");
        let mut convert = Command::new("qemu-img");
        convert
            .args(["convert", "-f", format, "-O", "raw"])
            .arg(&image)
            .arg(&raw);
        assert!(convert.status().unwrap().success(), "{context}");
        let bytes = std::fs::read(&raw).unwrap();
        for (number, block) in self.blocks.iter().enumerate() {
            let (slot, number) = (number as u64 % SLOTS, number as u64 / SLOTS);
            let at = sector(slot, number) as usize * 512;
            let expected = &block.after_power_cut;
            for found in writes_in(&bytes[at..at + LEN as usize]) {
                assert!(
                    expected.contains(&found),
                    "{context}: after the power cut, {found} in block {number} of slot {slot}, expected one of {expected:?}"
                );
            }
        }
    }
}

/// The first sector of a block of a slot.
fn sector(slot: u64, number: u64) -> u64 {
    (number * SLOTS + slot) * 64 + 8 * (number % 8)
}

/// The number of the write in each sector.
fn writes_in(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let sectors = bytes.chunks(512);
    sectors.map(|sector| u64::from_le_bytes(sector[..8].try_into().unwrap()))
}
