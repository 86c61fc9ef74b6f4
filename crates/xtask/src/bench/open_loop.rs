//! What a quiet VM costs: `--open-loop`. The other loads of the bench are closed loops at full speed; most disks of a
//! host do a few hundred requests a second, and the guest does not wait for each of them.
//!
//! Plans of the lab measure all of it.

mod picture;
mod report;

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::words::{Backing, Client, Server};
use lab::client::Sample;
use lab::plan::words::Arrival;
use lab::storage::Polling;

pub use picture::write as draw;
pub use report::write;

/// Options of `--open-loop`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Measure what disks cost that are not at full load [default: all parts], instead of the workloads
    #[arg(long, value_delimiter = ',', num_args = 0.., value_name = "PART")]
    open_loop: Option<Vec<Part>>,

    /// With --open-loop: offered requests per second [default: 100,1000,4000,16000,64000]
    #[arg(
        long,
        requires = "open_loop",
        value_delimiter = ',',
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub rate: Vec<u32>,

    /// With --open-loop: the distances between requests
    #[arg(long, requires = "open_loop", default_value = "poisson", value_parser = Arrival::from_str)]
    pub arrivals: Arrival,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// An open loop at several rates
    Rates,
    /// A closed loop at depth 1, with pauses
    Think,
    /// A disk with a limit, in a closed loop
    Throttle,
    /// 64 disks with 100 requests a second each
    Disks,
    /// Requests after a silence of 100 ms
    Bursts,
}

/// What is asked of the disks of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "part")]
pub enum Load {
    /// Requests at their own times, at most `depth` of them under way.
    Rates {
        per_second: u32,
        depth: usize,
        arrivals: Arrival,
    },
    /// One request, a pause, the next one.
    Think { pause_us: u64 },
    /// A closed loop on a disk with a limit of so many IOPS.
    Throttle { limit: u32, depth: usize },
    /// Each of the disks has an open loop.
    Disks {
        disks: usize,
        iothreads: usize,
        per_second: u32,
    },
    /// Requests at once after a silence; the latency is that of the first answer.
    Bursts { requests: usize },
}

/// One line of a table: everything in it is measured in the same minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    pub backing: Backing,
    pub write: bool,
    pub client: Client,
    #[serde(flatten)]
    pub load: Load,
}

/// One sample.
#[derive(Clone, Serialize, Deserialize)]
pub struct Measured {
    #[serde(flatten)]
    pub cell: Cell,
    pub server: Server,
    pub round: usize,
    #[serde(flatten)]
    pub sample: Sample,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub polling: Option<Polling>,
}

/// Seconds of a sample where requests are many, if none are named.
pub fn runtime_s(quick: bool) -> f64 {
    if quick { 0.5 } else { 0.7 }
}

impl Args {
    /// Whether this is what is to be measured.
    pub fn wanted(&self) -> bool {
        self.open_loop.is_some()
    }

    pub fn has(&self, part: Part) -> bool {
        let parts = self.open_loop.as_deref().unwrap_or_default();
        parts.is_empty() || parts.contains(&part)
    }
}
