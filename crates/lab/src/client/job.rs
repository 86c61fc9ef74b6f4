//! The job of a client process, and its result.

use std::fmt;
use std::path::PathBuf;

use harness::histogram::Histogram;
use harness::random::mix;
use serde::{Deserialize, Serialize};

use super::footprint::Footprint;
use super::pace::Pace;
use crate::plan::words::Client;

/// The job of a client process, which its command line has as JSON.
#[derive(Clone, Serialize, Deserialize)]
pub struct Job {
    /// A vhost-user socket for each disk.
    pub sockets: Vec<PathBuf>,
    /// The number of disks with I/O; the others are only connected.
    pub driven: usize,
    /// The number of queues of each disk.
    pub queues: u16,
    /// The size of each queue. blkio uses three entries for a request.
    pub queue_size: u16,
    /// Whether the virtqueues are packed.
    pub packed: bool,
    /// The driver.
    pub client: Client,
    /// The requests of each queue.
    pub access: Access,
    /// When requests are sent; `None` is a closed loop, in which each completed request is replaced immediately. With a
    /// pace, each disk has a thread.
    pub pace: Option<Pace>,
    /// The seed for the times of requests; `seed` is for their offsets.
    pub schedule_seed: u64,
    /// Seconds of I/O before the window.
    pub warmup_s: f64,
    /// Length of the window in seconds.
    pub runtime_s: f64,
    /// Seconds of I/O after the window.
    pub cooldown_s: f64,
    /// Stay connected without I/O for this many seconds, instead of measuring requests.
    pub idle_s: Option<f64>,
    /// The process id of the server.
    pub server_pid: u32,
    /// The CPU to which all threads of the server, including kernel workers, are pinned after the warm-up.
    pub server_cpu: Option<usize>,
    /// A closed loop has a thread on each of these CPUs; the threads share the queues in turn. Without CPUs it has one
    /// thread, which is not pinned. blkio has a thread for each queue.
    pub cpus: Vec<usize>,
    /// A file that exists during the window.
    pub mark: Option<PathBuf>,
    /// At most one request in each area of this size in bytes: the client ends when it has accessed all areas. 0 is no limit.
    pub once: u64,
    /// The seed for the offsets.
    pub seed: u64,
    /// Whether the sample contains all latencies.
    pub latencies: bool,
}

/// The requests of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// Whether requests are writes.
    pub write: bool,
    /// Whether offsets are sequential and not random.
    pub sequential: bool,
    /// The size of each request in bytes.
    pub block: usize,
    /// The maximum number of requests in flight.
    pub depth: usize,
}

impl Access {
    /// fio's `rw=`.
    pub fn rw(&self) -> &'static str {
        match (self.sequential, self.write) {
            (false, false) => "randread",
            (false, true) => "randwrite",
            (true, false) => "read",
            (true, true) => "write",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{}k {} depth {}",
            self.block >> 10,
            self.rw(),
            self.depth
        )
    }
}

/// The figures of the window.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Requests per second.
    pub iops: f64,
    /// Requests.
    #[serde(default)]
    pub ios: u64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
    /// Longest latency in microseconds.
    pub max_us: f64,
    /// CPU time of the whole server process per request, including kernel workers, in microseconds.
    pub cpu_us_per_io: f64,
    /// Its part in user mode.
    pub cpu_user_us_per_io: f64,
    /// Its part in the kernel.
    pub cpu_system_us_per_io: f64,
    /// Context switches of the server per request.
    pub switches_per_io: f64,
    /// CPU time of the server per second.
    pub server_core: f64,
    /// CPU time of the client per second.
    pub client_core: f64,
    /// The time that the server's threads waited for a CPU, as a sum over the window's length. Threads on the same core also
    /// wait for each other.
    pub server_starved: f64,
    /// CPU time per second of processes that are not part of the measurement.
    pub others_cores: f64,
    /// CPU time per second that a hypervisor gave to other machines.
    pub stolen_cores: f64,
    /// Requests that were due in the window but could not be sent, because all slots were in use.
    #[serde(default)]
    pub unsent: u64,
    /// The server's memory and descriptors while all disks are connected and have no I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub footprint: Option<Footprint>,
    /// When the window began and ended, in milliseconds since 1970.
    #[serde(default)]
    pub window_ms: (u64, u64),
    /// The latencies.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub latencies: Histogram,
}

/// Incompressible data, so that a measurement of zram does not measure its compressor.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64).map(|word| mix(seed.wrapping_add(word)));
    let mut data: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    data.truncate(len);
    data
}
