//! The closed loop: each completed request is replaced immediately.

use std::mem;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use harness::histogram::Bins;
use harness::random::mix;

use super::drivers::Driver;
use super::job::{Access, Job};
use super::window::Lap;
use harness::cpu;

/// Runs the I/O of one thread. All threads meet at the edges of the window. Returns the latencies in the window.
pub fn drive(job: &Job, number: usize, mut driver: impl Driver, edge: &Barrier) -> Result<Lap> {
    if let Some(cpu) = job.cpus.get(number) {
        cpu::pin_thread(&[*cpu])?;
    }
    let mut lap = Loop::new(job, number, &driver);
    lap.start(&mut driver)?;
    lap.run(&mut driver, Duration::from_secs_f64(job.warmup_s))?;
    if job.idle_s.is_some() {
        lap.drain(&mut driver)?;
    }
    edge.wait();
    edge.wait();
    lap.forget();
    if job.idle_s.is_none() {
        lap.run(&mut driver, Duration::from_secs_f64(job.runtime_s))?;
    }
    edge.wait();
    edge.wait();
    let latencies = lap.forget();
    if job.idle_s.is_none() {
        lap.run(&mut driver, Duration::from_secs_f64(job.cooldown_s))?;
        lap.drain(&mut driver)?;
    }
    Ok(Lap {
        ios: latencies.requests(),
        latencies,
        unsent: 0,
    })
}

/// The closed loop of one thread.
struct Loop {
    access: Access,
    blocks: u64,
    next_block: u64,
    random: u64,
    once: Option<Once>,
    in_flight: usize,
    slots: Vec<usize>,
    submitted_at: Vec<Instant>,
    done: Vec<usize>,
    latencies: Bins,
}

/// The areas that a thread has not accessed yet.
struct Once {
    /// The number of blocks in each area
    area_blocks: u64,
    areas: u64,
    /// The index of this thread's next area; threads take turns
    next: u64,
    threads: u64,
}

impl Once {
    fn new(job: &Job, number: usize, blocks: u64) -> Option<Once> {
        let area_blocks = job.once / job.access.block as u64;
        (area_blocks > 0).then(|| Once {
            area_blocks,
            areas: blocks / area_blocks,
            next: number as u64,
            threads: job.cpus.len().max(1) as u64,
        })
    }

    /// The next block; `None` after all areas. The order of areas is scattered, or sequential.
    fn next(&mut self, sequential: bool, random: u64) -> Option<u64> {
        let all = self.areas.next_power_of_two();
        loop {
            let number = self.next;
            self.next += self.threads;
            if number >= all {
                return None;
            }
            // Multiplication by an odd number permutes the indexes.
            let area = if sequential {
                number
            } else {
                number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & (all - 1)
            };
            if area < self.areas {
                return Some(area * self.area_blocks + random % self.area_blocks);
            }
        }
    }
}

impl Loop {
    fn new(job: &Job, number: usize, driver: &impl Driver) -> Loop {
        let slots = driver.slots();
        let end = slots.iter().max().map_or(0, |last| last + 1);
        let blocks = driver.capacity() / job.access.block as u64;
        Loop {
            access: job.access,
            blocks,
            // Threads that read sequentially start at different blocks.
            next_block: blocks / 16 * (number as u64 % 16),
            random: mix(job.seed.wrapping_add((number as u64) << 32)),
            once: Once::new(job, number, blocks),
            in_flight: 0,
            submitted_at: vec![Instant::now(); end],
            done: Vec::with_capacity(slots.len()),
            slots,
            latencies: Bins::default(),
        }
    }

    fn start(&mut self, driver: &mut impl Driver) -> Result<()> {
        for i in 0..self.slots.len() {
            self.in_flight += usize::from(self.prepare(driver, self.slots[i])?);
        }
        self.submitted_at.fill(Instant::now());
        driver.submit()
    }

    /// Reads the clock once per batch of completions: it ends their latencies and starts those of their successors.
    fn run(&mut self, driver: &mut impl Driver, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        let mut empty_polls = 0_u32;
        while self.in_flight > 0 {
            self.done.clear();
            driver.reap(&mut self.done)?;
            if self.done.is_empty() {
                empty_polls = empty_polls.wrapping_add(1);
                if empty_polls.is_multiple_of(1 << 16) && Instant::now() >= end {
                    return Ok(());
                }
                continue;
            }
            let now = Instant::now();
            self.record(now);
            for i in 0..self.done.len() {
                let slot = self.done[i];
                self.in_flight -= usize::from(!self.prepare(driver, slot)?);
                self.submitted_at[slot] = now;
            }
            driver.submit()?;
            if now >= end {
                return Ok(());
            }
        }
        Ok(())
    }

    fn drain(&mut self, driver: &mut impl Driver) -> Result<()> {
        while self.in_flight > 0 {
            self.done.clear();
            driver.reap(&mut self.done)?;
            self.in_flight -= self.done.len();
        }
        Ok(())
    }

    /// Returns the recorded latencies, and starts again.
    fn forget(&mut self) -> Bins {
        mem::take(&mut self.latencies)
    }

    /// Records latencies. Requests that were submitted together and completed together have the same latency.
    fn record(&mut self, now: Instant) {
        let submitted_at = &self.submitted_at;
        for run in self
            .done
            .chunk_by(|a, b| submitted_at[*a] == submitted_at[*b])
        {
            let latency = now.duration_since(submitted_at[run[0]]).as_nanos() as u64;
            self.latencies.add_many(latency, run.len() as u64);
        }
    }

    /// Prepares the next request in a slot; `false` if there is none.
    fn prepare(&mut self, driver: &mut impl Driver, slot: usize) -> Result<bool> {
        let block = if let Some(once) = &mut self.once {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            match once.next(self.access.sequential, mix(self.random)) {
                Some(block) => block,
                None => return Ok(false),
            }
        } else if self.access.sequential {
            let block = self.next_block;
            self.next_block = (block + 1) % self.blocks;
            block
        } else {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            ((u128::from(mix(self.random)) * u128::from(self.blocks)) >> 64) as u64
        };
        let len = self.access.block;
        driver.prepare(slot, self.access.write, block * len as u64, len)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::Once;

    #[test]
    fn threads_go_everywhere_once() {
        for sequential in [false, true] {
            // The number of areas is not a power of two.
            let once = |next| Once {
                area_blocks: 16,
                areas: 1000,
                next,
                threads: 2,
            };
            let visits = |number: u64| {
                let mut once = once(number);
                let blocks = std::iter::from_fn(move || once.next(sequential, 12345 + number));
                blocks.map(|block| block / 16)
            };
            let mut areas: Vec<u64> = (0..2).flat_map(visits).collect();
            areas.sort_unstable();
            assert!(areas.into_iter().eq(0..1000), "sequential: {sequential}");
        }
    }
}
