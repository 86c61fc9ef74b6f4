//! What is measured: the cells that a command line selects, and what is wanted of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::setting::{Aio, Setting};
use super::words::{Backing, Client, Server, Workload};

/// One line of the table: everything in it is measured in the same minute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub backing: Backing,
    #[serde(flatten)]
    pub workload: Workload,
    #[serde(default, skip_serializing_if = "Setting::is_default")]
    pub setting: Setting,
    pub clients: Vec<Client>,
}

/// The settings that make a difference on `backing`.
pub fn settings(wanted: &[Setting], backing: Backing) -> Vec<Setting> {
    let mut settings = Vec::new();
    for setting in wanted {
        if let Ok(setting) = setting.on(backing)
            && !settings.contains(&setting)
        {
            settings.push(setting);
        }
    }
    settings
}

/// A figure that ringdisk promises.
pub struct Target {
    pub backing: Backing,
    pub depth: usize,
    pub metric: Metric,
    pub limit: Limit,
    /// The client that the promise is about; any sleeping one if none.
    pub client: Option<Client>,
    /// What `--aio` must have said.
    pub aio: Option<Aio>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Metric {
    /// ringdisk's IOPS over the other's.
    Iops(Server),
    /// ringdisk's CPU time per I/O over the other's.
    Cpu(Server),
    /// ringdisk's server CPU per I/O in µs.
    CpuUs,
    /// ringdisk's mean latency less the other's, µs.
    LatencyOver(Server),
}

#[derive(Clone, Copy)]
pub enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

/// Reads and writes alike.
pub const TARGETS: [Target; 16] = {
    use Backing::{Cache, Disk, Null, Zram};
    use Limit::{AtLeast, AtMost};
    use Metric::{Cpu, CpuUs, Iops, LatencyOver};
    use Server::{Host, Qsd};
    const fn target(backing: Backing, depth: usize, metric: Metric, limit: Limit) -> Target {
        Target {
            backing,
            depth,
            metric,
            limit,
            client: None,
            aio: None,
        }
    }
    const fn polling(depth: usize, metric: Metric, limit: Limit) -> Target {
        Target {
            backing: Null,
            depth,
            metric,
            limit,
            client: Some(Client::RingPoll),
            aio: None,
        }
    }
    const fn native(backing: Backing, metric: Metric, limit: Limit) -> Target {
        Target {
            aio: Some(Aio::Native),
            ..target(backing, 32, metric, limit)
        }
    }
    [
        target(Disk, 32, Cpu(Qsd), AtMost(0.40)),
        target(Disk, 128, Cpu(Qsd), AtMost(0.40)),
        target(Disk, 32, Iops(Host), AtLeast(0.95)),
        target(Disk, 128, Iops(Host), AtLeast(0.97)),
        target(Disk, 1, Iops(Qsd), AtLeast(1.0)),
        target(Disk, 8, Iops(Qsd), AtLeast(1.0)),
        target(Disk, 32, Iops(Qsd), AtLeast(1.0)),
        target(Disk, 128, Iops(Qsd), AtLeast(1.0)),
        target(Disk, 1, LatencyOver(Host), AtMost(8.0)),
        target(Zram, 128, Iops(Qsd), AtLeast(2.0)),
        target(Cache, 32, Iops(Qsd), AtLeast(2.5)),
        polling(32, CpuUs, AtMost(0.10)),
        polling(32, Cpu(Qsd), AtMost(0.125)),
        target(Null, 32, Cpu(Qsd), AtMost(0.125)),
        native(Disk, Cpu(Qsd), AtMost(0.55)),
        native(Zram, Cpu(Qsd), AtMost(0.55)),
    ]
};

impl Target {
    pub fn is_about(&self, cell: &Cell) -> bool {
        self.backing == cell.backing
            && self.depth == cell.workload.depth
            && !cell.workload.sequential
            && cell.setting
                == Setting {
                    aio: self.aio,
                    ..Setting::default()
                }
    }

    pub fn is_for(&self, client: Client) -> bool {
        match self.client {
            Some(wanted) => wanted == client,
            None => client != Client::RingPoll,
        }
    }
}

impl Limit {
    pub fn holds(self, value: f64) -> bool {
        match self {
            Limit::AtLeast(limit) => value >= limit,
            Limit::AtMost(limit) => value <= limit,
        }
    }
}

/// How a comparison with what is wanted begins.
pub fn verdict(reached: bool) -> &'static str {
    if reached { "reached: " } else { "MISSED: " }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} {}", self.backing, self.workload, self.setting)
    }
}
