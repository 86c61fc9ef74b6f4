//! The client of a measurement: a closed loop of I/O against one vhost-user socket, in a process of its own.
//!
//! It takes the server's CPU counters itself, right at the edges of its window, so that I/Os and CPU time belong together.

use std::fs::File;
use std::mem;
use std::path::PathBuf;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use hdrhistogram::Histogram;
use lab::vhost;
use serde::{Deserialize, Serialize};
use testkit::driver::{Device, DeviceConfig, Op, Queue};

use super::plan::{Client, Workload};
use super::process::{self, Cores, Usage};

/// What one client process is asked to do; travels as JSON on its command line.
#[derive(Clone, Serialize, Deserialize)]
pub struct Job {
    /// One per disk.
    pub sockets: Vec<PathBuf>,
    /// So many of the disks have I/O, the others are connected.
    pub driven: usize,
    /// Queues of each disk.
    pub queues: u16,
    pub packed: bool,
    pub client: Client,
    /// Of each queue.
    pub workload: Workload,
    pub warmup_s: f64,
    pub runtime_s: f64,
    /// I/O that goes on after the window.
    pub cooldown_s: f64,
    /// Stay connected without I/O for this long instead of measuring the workload.
    pub idle_s: Option<f64>,
    pub server_pid: u32,
    /// Where all threads of the server are held once it is warm, those of the kernel included.
    pub server_cpu: Option<usize>,
    /// A thread on each of these, which share the queues in turn; one thread, wherever it is, if there are none. blkio
    /// has a thread per queue.
    pub cpus: Vec<usize>,
    /// A file that is there during the window.
    pub mark: Option<PathBuf>,
    /// In each so many bytes, one request at most: the client ends when it has been everywhere. 0 for no such limit.
    pub once: u64,
    pub seed: u64,
}

/// What one measurement yielded: the raw sample that goes into the JSON report.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Sample {
    pub iops: f64,
    /// In the window.
    #[serde(default)]
    pub ios: u64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// CPU time of the whole server process, kernel workers included.
    pub cpu_us_per_io: f64,
    pub cpu_user_us_per_io: f64,
    pub cpu_system_us_per_io: f64,
    pub switches_per_io: f64,
    /// Share of one core, 0 to 1.
    pub server_core: f64,
    pub client_core: f64,
    /// Time that the server's threads were runnable but not running, summed, over the window's length. Threads that share
    /// the server's core also wait for each other.
    pub server_starved: f64,
    /// Cores used by processes that are not part of the measurement.
    pub others_cores: f64,
    pub stolen_cores: f64,
}

/// Runs `job` and prints its [`Sample`] as one line of JSON.
pub fn run(job: &str) -> anyhow::Result<()> {
    let job: Job = serde_json::from_str(job).context("parsing the client's job")?;
    watchdog(&job);
    wait_for(&job.sockets)?;
    let sample = match job.client {
        Client::Blkio => {
            let (drivers, _devices) = BlkioDriver::connect(&job)?;
            measure(&job, drivers, drive)?.0
        }
        Client::Ring | Client::RingPoll => {
            let (drivers, _devices) = RingDriver::connect(&job)?;
            measure(&job, drivers, drive)?.0
        }
    };
    println!("{}", serde_json::to_string(&sample)?);
    Ok(())
}

/// A server that loses a request must not hang the bench: with nothing completing, a sleeping client never wakes.
pub fn watchdog(job: &Job) {
    let limit = Duration::from_secs_f64(
        job.warmup_s + job.runtime_s + job.cooldown_s + job.idle_s.unwrap_or(0.0) + 20.0,
    );
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!("client: not done after {limit:?}; the server stopped completing requests");
        std::process::exit(3);
    });
}

/// A virtio-blk driver with a fixed set of request slots, each with its own buffer.
pub trait Driver: Send {
    fn capacity(&self) -> u64;
    /// The numbers of its slots.
    fn slots(&self) -> Vec<usize>;
    fn prepare(&mut self, slot: usize, write: bool, offset: u64, len: usize) -> anyhow::Result<()>;
    /// Publishes all that was prepared, and kicks if the device wants it.
    fn submit(&mut self) -> anyhow::Result<()>;
    /// Appends the slots that have completed; a sleeping client blocks until there is one, a polling one may add none.
    fn reap(&mut self, done: &mut Vec<usize>) -> anyhow::Result<()>;
    /// Appends the slots that have completed; blocks until there is one or it is `until`. One request at least is under
    /// way.
    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> anyhow::Result<()>;
}

/// What a thread did between the edges of the window.
pub struct Lap {
    pub latencies_ns: Histogram<u64>,
    /// As many as the latencies, or more where not each one counts.
    pub ios: u64,
    /// Requests that were due, but could not be sent.
    pub unsent: u64,
}

/// A thread per driver, each of which runs `drive`. All stand still while the counters are read.
pub fn measure<D: Driver>(
    job: &Job,
    drivers: Vec<D>,
    drive: impl Fn(&Job, usize, D, &Barrier) -> anyhow::Result<Lap> + Sync,
) -> anyhow::Result<(Sample, Lap)> {
    let edge = Barrier::new(drivers.len() + 1);
    thread::scope(|scope| {
        let start = |(number, driver)| {
            let (drive, edge) = (&drive, &edge);
            // The others would wait for it at the next edge.
            scope.spawn(move || drive(job, number, driver, edge).unwrap_or_else(|e| give_up(&e)))
        };
        let laps: Vec<_> = drivers.into_iter().enumerate().map(start).collect();
        let used = window(job, &edge).unwrap_or_else(|e| give_up(&e));
        let mut all = Lap {
            latencies_ns: new_histogram(),
            ios: 0,
            unsent: 0,
        };
        for lap in laps {
            let its = lap
                .join()
                .map_err(|_| anyhow!("a client thread panicked"))?;
            all.latencies_ns.add(its.latencies_ns)?;
            all.ios += its.ios;
            all.unsent += its.unsent;
        }
        Ok((used.sample(&all), all))
    })
}

/// This process is nothing but the client.
fn give_up(error: &anyhow::Error) -> ! {
    eprintln!("{error:#}");
    std::process::exit(1)
}

/// The I/O of one thread, with the edges of the window where all threads meet; gives the latencies within it.
fn drive(job: &Job, number: usize, mut driver: impl Driver, edge: &Barrier) -> anyhow::Result<Lap> {
    if let Some(cpu) = job.cpus.get(number) {
        process::pin_thread(*cpu)?;
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
    let latencies_ns = lap.forget();
    if job.idle_s.is_none() {
        lap.run(&mut driver, Duration::from_secs_f64(job.cooldown_s))?;
        lap.drain(&mut driver)?;
    }
    Ok(Lap {
        ios: latencies_ns.len(),
        latencies_ns,
        unsent: 0,
    })
}

/// What was used between the edges.
fn window(job: &Job, edge: &Barrier) -> anyhow::Result<Window> {
    edge.wait();
    if let Some(cpu) = job.server_cpu {
        process::pin(job.server_pid, cpu)?;
    }
    if job.idle_s.is_some() {
        thread::sleep(Duration::from_secs(1));
    }
    let before = Counters::read(job)?;
    if let Some(mark) = &job.mark {
        File::create(mark).with_context(|| format!("creating {}", mark.display()))?;
    }
    edge.wait();
    if let Some(idle) = job.idle_s {
        thread::sleep(Duration::from_secs_f64(idle));
    }
    edge.wait();
    if let Some(mark) = &job.mark {
        std::fs::remove_file(mark).with_context(|| format!("removing {}", mark.display()))?;
    }
    let used = Counters::read(job)?.since(&before);
    edge.wait();
    Ok(used)
}

/// The closed loop: every completed request is replaced at once.
struct Loop {
    workload: Workload,
    blocks: u64,
    next_block: u64,
    random: u64,
    once: Option<Once>,
    in_flight: usize,
    slots: Vec<usize>,
    submitted_at: Vec<Instant>,
    done: Vec<usize>,
    latencies_ns: Histogram<u64>,
}

/// Where one client thread has not been yet.
struct Once {
    /// Blocks of one request in each area.
    area_blocks: u64,
    areas: u64,
    /// The number of the next one, in the order in which they are visited, and how many threads take turns.
    next: u64,
    threads: u64,
}

impl Once {
    fn new(job: &Job, number: usize, blocks: u64) -> Option<Once> {
        let area_blocks = job.once / job.workload.block as u64;
        (area_blocks > 0).then(|| Once {
            area_blocks,
            areas: blocks / area_blocks,
            next: number as u64,
            threads: job.cpus.len().max(1) as u64,
        })
    }

    /// The next block; none when all areas have been visited. Their order is scattered, unless it is to be sequential.
    fn next(&mut self, sequential: bool, random: u64) -> Option<u64> {
        let all = self.areas.next_power_of_two();
        loop {
            let number = self.next;
            self.next += self.threads;
            if number >= all {
                return None;
            }
            // An odd factor makes a permutation of it.
            let area = match sequential {
                true => number,
                false => number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & (all - 1),
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
        let blocks = driver.capacity() / job.workload.block as u64;
        Loop {
            workload: job.workload,
            blocks,
            // Threads that read in sequence do not read the same.
            next_block: blocks / 16 * (number as u64 % 16),
            random: mix(job.seed.wrapping_add((number as u64) << 32)),
            once: Once::new(job, number, blocks),
            in_flight: 0,
            submitted_at: vec![Instant::now(); end],
            done: Vec::with_capacity(slots.len()),
            slots,
            latencies_ns: new_histogram(),
        }
    }

    fn start(&mut self, driver: &mut impl Driver) -> anyhow::Result<()> {
        for i in 0..self.slots.len() {
            self.in_flight += usize::from(self.prepare(driver, self.slots[i])?);
        }
        self.submitted_at.fill(Instant::now());
        driver.submit()
    }

    /// One clock read per batch of completions: it is the end of their latency and the start of their successors'.
    fn run(&mut self, driver: &mut impl Driver, length: Duration) -> anyhow::Result<()> {
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

    fn drain(&mut self, driver: &mut impl Driver) -> anyhow::Result<()> {
        while self.in_flight > 0 {
            self.done.clear();
            driver.reap(&mut self.done)?;
            self.in_flight -= self.done.len();
        }
        Ok(())
    }

    /// Gives what was recorded, and begins anew.
    fn forget(&mut self) -> Histogram<u64> {
        mem::replace(&mut self.latencies_ns, new_histogram())
    }

    /// Requests that were submitted together and are seen together have one latency: recorded as one run.
    fn record(&mut self, now: Instant) {
        let submitted_at = &self.submitted_at;
        for run in self
            .done
            .chunk_by(|a, b| submitted_at[*a] == submitted_at[*b])
        {
            let latency = now.duration_since(submitted_at[run[0]]).as_nanos() as u64;
            self.latencies_ns
                .saturating_record_n(latency, run.len() as u64);
        }
    }

    /// Whether there was anything left to do.
    fn prepare(&mut self, driver: &mut impl Driver, slot: usize) -> anyhow::Result<bool> {
        let block = if let Some(once) = &mut self.once {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            match once.next(self.workload.sequential, mix(self.random)) {
                Some(block) => block,
                None => return Ok(false),
            }
        } else if self.workload.sequential {
            let block = self.next_block;
            self.next_block = (block + 1) % self.blocks;
            block
        } else {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            ((u128::from(mix(self.random)) * u128::from(self.blocks)) >> 64) as u64
        };
        let len = self.workload.block;
        driver.prepare(slot, self.workload.write, block * len as u64, len)?;
        Ok(true)
    }
}

/// The output function of `SplitMix64`: a counter in, uniform bits out.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 3 digits, 1 ns to 60 s.
pub fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are constants")
}

/// All that is read at both edges of the window.
struct Counters {
    at: Instant,
    server: Usage,
    client: Usage,
    cores: Cores,
}

impl Counters {
    fn read(job: &Job) -> anyhow::Result<Counters> {
        Ok(Counters {
            server: Usage::of(job.server_pid).context("reading the server's CPU time")?,
            client: Usage::of(std::process::id())?,
            cores: Cores::read()?,
            at: Instant::now(),
        })
    }

    fn since(&self, before: &Counters) -> Window {
        Window {
            seconds: self.at.duration_since(before.at).as_secs_f64(),
            server: self.server.since(&before.server),
            client: self.client.since(&before.client),
            cores: self.cores.since(&before.cores),
        }
    }
}

struct Window {
    seconds: f64,
    server: Usage,
    client: Usage,
    cores: Cores,
}

impl Window {
    fn sample(&self, lap: &Lap) -> Sample {
        let latencies_ns = &lap.latencies_ns;
        let us = |q: f64| latencies_ns.value_at_quantile(q) as f64 / 1e3;
        let ios = lap.ios as f64;
        let per_io = |total: f64| if ios > 0.0 { total / ios } else { 0.0 };
        let (server_s, client_s) = (self.server.ran_s(), self.client.ran_s());
        Sample {
            iops: ios / self.seconds,
            ios: lap.ios,
            mean_us: latencies_ns.mean() / 1e3,
            p50_us: us(0.50),
            p99_us: us(0.99),
            max_us: latencies_ns.max() as f64 / 1e3,
            cpu_us_per_io: per_io(server_s * 1e6),
            cpu_user_us_per_io: per_io(server_s * 1e6 * self.server.user_share()),
            cpu_system_us_per_io: per_io(server_s * 1e6 * (1.0 - self.server.user_share())),
            switches_per_io: per_io(self.server.switches as f64),
            server_core: server_s / self.seconds,
            client_core: client_s / self.seconds,
            server_starved: self.server.waited_s() / self.seconds,
            others_cores: (self.cores.tasks_s() - server_s - client_s).max(0.0) / self.seconds,
            stolen_cores: self.cores.stolen_s() / self.seconds,
        }
    }
}

/// Bytes that do not compress: of a zram device, the path to it is to be measured and not its compressor.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64).map(|word| mix(seed.wrapping_add(word)));
    let mut data: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    data.truncate(len);
    data
}

/// testkit's ring driver: as little client as possible. Chains are built once, then only sectors change.
pub struct RingDriver {
    lanes: Vec<Lane>,
    /// A slot's number is that of its lane above that within the lane.
    lane_shift: u32,
    capacity: u64,
    sleeps: bool,
}

/// A queue of a driver.
struct Lane {
    queue: Queue,
    built: Vec<bool>,
    prepared: Vec<u16>,
}

impl RingDriver {
    /// The devices behind the drivers come with them: dropping one would end its connection.
    pub fn connect(job: &Job) -> anyhow::Result<(Vec<RingDriver>, Vec<Device>)> {
        let Workload { depth, block, .. } = job.workload;
        let config = DeviceConfig {
            queues: job.queues,
            queue_size: QUEUE_SIZE,
            slots: depth as u16,
            buffer_len: block as u32,
            packed: job.packed,
            ..DeviceConfig::default()
        };
        let driver = || RingDriver {
            lanes: Vec::new(),
            lane_shift: depth.next_power_of_two().trailing_zeros(),
            capacity: 0,
            sleeps: job.client.sleeps(),
        };
        let mut drivers: Vec<_> = (0..job.cpus.len().max(1)).map(|_| driver()).collect();
        let mut devices = Vec::new();
        let data = noise(depth * block, job.seed);
        for (disk, socket) in job.sockets.iter().enumerate() {
            let mut device = Device::connect(socket, &config).context("testkit: connecting")?;
            if job.packed && !device.queues.iter().all(|queue| queue.ring.is_packed()) {
                bail!("the server does not offer packed rings");
            }
            let capacity = device.config()?.capacity * 512;
            for (number, mut queue) in device.queues.drain(..).enumerate() {
                if disk >= job.driven {
                    // It has had something to do.
                    let read = queue.read(0, 512);
                    read.map_err(|status| anyhow!("a read failed with status {status}"))?;
                    continue;
                }
                for (slot, buffer) in data.chunks(block).enumerate() {
                    queue.write_buffer(slot as u16, buffer);
                }
                let threads = drivers.len();
                let driver = &mut drivers[number % threads];
                driver.capacity = capacity;
                driver.lanes.push(Lane {
                    queue,
                    built: vec![false; depth],
                    prepared: Vec::with_capacity(depth),
                });
            }
            devices.push(device);
        }
        if drivers.iter().any(|driver| driver.lanes.is_empty()) {
            bail!("a client thread has no queue to drive");
        }
        Ok((drivers, devices))
    }
}

impl Driver for RingDriver {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn slots(&self) -> Vec<usize> {
        let lanes = self.lanes.iter().enumerate();
        lanes
            .flat_map(|(i, lane)| {
                (0..lane.built.len()).map(move |slot| i << self.lane_shift | slot)
            })
            .collect()
    }

    #[inline]
    fn prepare(&mut self, slot: usize, write: bool, offset: u64, len: usize) -> anyhow::Result<()> {
        let sector = offset / 512;
        let lane = &mut self.lanes[slot >> self.lane_shift];
        let slot = slot & ((1 << self.lane_shift) - 1);
        if lane.built[slot] {
            lane.queue.set_sector(slot as u16, sector);
        } else {
            let op = if write { Op::Write } else { Op::Read };
            lane.queue.prepare(slot as u16, op, sector, len as u32);
            lane.built[slot] = true;
        }
        lane.prepared.push(slot as u16);
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> anyhow::Result<()> {
        for lane in &mut self.lanes {
            if !lane.prepared.is_empty() {
                lane.queue.submit(&lane.prepared);
                lane.prepared.clear();
            }
        }
        Ok(())
    }

    #[inline]
    fn reap(&mut self, done: &mut Vec<usize>) -> anyhow::Result<()> {
        loop {
            let mut failed = 0;
            for (i, lane) in self.lanes.iter_mut().enumerate() {
                let first = i << self.lane_shift;
                lane.queue.poll(|slot, status| {
                    failed |= status;
                    done.push(first | slot as usize);
                });
            }
            if failed != 0 {
                bail!("a request failed with status {failed}");
            }
            if !self.sleeps || !done.is_empty() {
                return Ok(());
            }
            match &mut self.lanes[..] {
                [only] => only.queue.wait(),
                lanes => Queue::wait_any(lanes.iter_mut().map(|lane| &mut lane.queue)),
            }
        }
    }

    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> anyhow::Result<()> {
        let [lane] = &mut self.lanes[..] else {
            bail!("a client with a schedule drives one queue per thread");
        };
        if !lane.queue.wait_until(until) {
            return Ok(());
        }
        self.reap(done)
    }
}

/// Descriptors of a queue: blkio uses three per request and no indirect ones, so 128 requests need 384.
const QUEUE_SIZE: u16 = 512;

/// The blkio crate's virtio-blk: a driver that ringdisk's authors did not write.
pub struct BlkioDriver {
    queue: vhost::Queue,
    capacity: u64,
}

impl BlkioDriver {
    /// A driver per queue: it sleeps on one queue only.
    pub fn connect(job: &Job) -> anyhow::Result<(Vec<BlkioDriver>, vhost::Device)> {
        let [socket] = &job.sockets[..] else {
            bail!("this client drives one disk");
        };
        let Workload { depth, block, .. } = job.workload;
        let shape = vhost::Shape {
            queues: job.queues,
            queue_size: QUEUE_SIZE,
            depth,
            block,
        };
        let fill = noise(usize::from(job.queues) * depth * block, job.seed);
        let (device, queues) = vhost::Device::connect(socket, shape, &fill)?;
        let capacity = device.capacity;
        let driver = |queue| BlkioDriver { queue, capacity };
        Ok((queues.into_iter().map(driver).collect(), device))
    }
}

impl Driver for BlkioDriver {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn slots(&self) -> Vec<usize> {
        (0..self.queue.slots()).collect()
    }

    fn prepare(&mut self, slot: usize, write: bool, offset: u64, _: usize) -> anyhow::Result<()> {
        self.queue.prepare(slot, write, offset);
        Ok(())
    }

    /// [`vhost::Queue::reap`] kicks before it waits.
    fn submit(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> anyhow::Result<()> {
        self.queue.reap(1, None, done)
    }

    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> anyhow::Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        self.queue.reap(1, Some(left), done)
    }
}

/// A server makes its sockets before it listens on them.
pub fn wait_for(sockets: &[PathBuf]) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    for path in sockets {
        while !path.exists() {
            if Instant::now() > deadline {
                bail!("no socket at {} after 5 s", path.display());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
    thread::sleep(Duration::from_millis(20));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Once;

    #[test]
    fn threads_go_everywhere_once() {
        for sequential in [false, true] {
            // As many areas as are no power of two.
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
