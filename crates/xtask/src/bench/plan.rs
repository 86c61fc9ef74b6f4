//! What is measured: the words of the bench, and the cells that a command line selects.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use lab::client::Access as Workload;
pub use lab::plan::words::Client;

use super::setting::{Aio, Setting};

/// What lies beneath the served disk.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// Completes at once: the ceiling of the path itself.
    Null,
    /// A file in the page cache.
    Cache,
    /// A compressed RAM block device.
    Zram,
    /// A fully written file on the real disk, `O_DIRECT`.
    Disk,
}

/// Who does the I/O of a sample.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    Ringdisk,
    /// ringdisk with `fixed-buffers=on`, for guests whose memory is never taken away.
    RingdiskFixed,
    /// ringdisk with `--poll-max-us 0`.
    RingdiskNoPolling,
    /// An earlier ringdisk binary, named by `--baseline`.
    Baseline,
    /// qemu-storage-daemon with `aio=io_uring`.
    Qsd,
    /// qemu-storage-daemon with `aio=native`.
    QsdNative,
    /// fio on the host, without a virtual disk in between: the limit.
    Host,
}

/// The fio name of a workload's direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rw {
    Randread,
    Randwrite,
    /// 128k sequential read.
    Read,
    /// 128k sequential write.
    Write,
}

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

/// Empty lists mean "all".
pub struct Filter {
    pub backings: Vec<Backing>,
    pub rw: Vec<Rw>,
    pub depths: Vec<usize>,
    pub clients: Vec<Client>,
    /// At least one.
    pub settings: Vec<Setting>,
    /// Only the cells that decide one of the targets.
    pub targets_only: bool,
}

const BACKINGS: [Backing; 4] = [Backing::Null, Backing::Cache, Backing::Zram, Backing::Disk];
const DEPTHS: [usize; 4] = [1, 8, 32, 128];
const SEQUENTIAL_DEPTH: usize = 32;

/// The cells that pass `filter`, null first: a broken set-up shows before the slow cells start.
pub fn cells(filter: &Filter) -> Vec<Cell> {
    let mut cells = Vec::new();
    for backing in BACKINGS
        .into_iter()
        .filter(|it| selected(*it, &filter.backings))
    {
        for rw in [Rw::Randread, Rw::Randwrite, Rw::Read, Rw::Write] {
            if !selected(rw, &filter.rw) {
                continue;
            }
            // A depth outside the plan is measured where the command line leaves no doubt that it is wanted.
            let (planned, named) = if rw.sequential() {
                (vec![SEQUENTIAL_DEPTH], filter.rw.contains(&rw))
            } else {
                (DEPTHS.to_vec(), true)
            };
            let depths = match filter.depths.is_empty() {
                true => planned,
                false if named => filter.depths.clone(),
                false => filter
                    .depths
                    .iter()
                    .copied()
                    .filter(|it| planned.contains(it))
                    .collect(),
            };
            for depth in depths {
                let workload = Workload {
                    write: matches!(rw, Rw::Randwrite | Rw::Write),
                    sequential: rw.sequential(),
                    block: if rw.sequential() { 128 << 10 } else { 4 << 10 },
                    depth,
                };
                let clients = if filter.clients.is_empty() {
                    clients(backing)
                } else {
                    filter.clients.clone()
                };
                for setting in settings(&filter.settings, backing) {
                    let mut clients = clients.clone();
                    clients.retain(|client| setting.suits(*client));
                    let cell = Cell {
                        backing,
                        workload,
                        setting,
                        clients,
                    };
                    let wanted =
                        !filter.targets_only || TARGETS.iter().any(|target| target.is_about(&cell));
                    if wanted && !cell.clients.is_empty() {
                        cells.push(cell);
                    }
                }
            }
        }
    }
    cells
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

/// Why some of `filter`'s settings are not measured on some of its backings.
pub fn left_out(filter: &Filter) -> Vec<String> {
    let backings = BACKINGS
        .into_iter()
        .filter(|it| selected(*it, &filter.backings));
    let reasons = backings.flat_map(|backing| {
        let settings = filter.settings.iter();
        settings.filter_map(move |setting| {
            let reason = setting.on(backing).err()?;
            Some(format!("{backing}, {setting}: {reason}"))
        })
    });
    reasons.collect()
}

/// A sleeping client is what a guest is; on the null disk only a polling one shows the server and not the client's wake-ups.
fn clients(backing: Backing) -> Vec<Client> {
    match backing {
        Backing::Null => vec![Client::RingPoll, Client::Blkio],
        Backing::Cache | Backing::Zram | Backing::Disk => vec![Client::Ring, Client::Blkio],
    }
}

fn selected<T: PartialEq>(item: T, wanted: &[T]) -> bool {
    wanted.is_empty() || wanted.contains(&item)
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

impl Rw {
    fn sequential(self) -> bool {
        matches!(self, Rw::Read | Rw::Write)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} {}", self.backing, self.workload, self.setting)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Backing::Null => "null",
            Backing::Cache => "page cache",
            Backing::Zram => "zram",
            Backing::Disk => "disk",
        })
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Server::Ringdisk => "ringdisk",
            Server::RingdiskFixed => "fixed",
            Server::RingdiskNoPolling => "no-polling",
            Server::Baseline => "baseline",
            Server::Qsd => "qsd",
            Server::QsdNative => "qsd-native",
            Server::Host => "host",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(filter: &Filter) -> Vec<String> {
        cells(filter)
            .iter()
            .map(|cell| cell.workload.to_string())
            .collect()
    }

    fn disk(rw: Vec<Rw>, depths: Vec<usize>) -> Filter {
        Filter {
            backings: vec![Backing::Disk],
            rw,
            depths,
            clients: Vec::new(),
            settings: vec![Setting::default()],
            targets_only: false,
        }
    }

    #[test]
    fn the_whole_plan_has_ten_workloads_for_each_of_four_backings() {
        let all = Filter {
            backings: Vec::new(),
            ..disk(Vec::new(), Vec::new())
        };
        assert_eq!(cells(&all).len(), 40);
    }

    #[test]
    fn filters_narrow_the_plan() {
        assert_eq!(
            names(&disk(vec![Rw::Randread], vec![1])),
            ["4k randread depth 1"]
        );
        assert_eq!(
            names(&disk(vec![], vec![128])),
            ["4k randread depth 128", "4k randwrite depth 128"]
        );
        assert_eq!(names(&disk(vec![Rw::Read], vec![4])), ["128k read depth 4"]);
    }

    #[test]
    fn settings_multiply_the_plan_where_they_make_a_difference() {
        let native = Setting {
            aio: Some(Aio::Native),
            ..Setting::default()
        };
        let filter = Filter {
            backings: Vec::new(),
            settings: vec![Setting::default(), native],
            ..disk(vec![Rw::Randread], vec![32])
        };
        let settings = |backing| {
            let cells = cells(&filter);
            cells.iter().filter(|it| it.backing == backing).count()
        };
        assert_eq!(BACKINGS.map(settings), [1, 1, 2, 2]);
        assert_eq!(left_out(&filter).len(), 1, "native AIO on the page cache");
    }

    #[test]
    fn every_target_has_its_cells() {
        let native = Setting {
            aio: Some(Aio::Native),
            ..Setting::default()
        };
        let targets = Filter {
            backings: Vec::new(),
            settings: vec![Setting::default(), native],
            targets_only: true,
            ..disk(Vec::new(), Vec::new())
        };
        let cells = cells(&targets);
        for target in &TARGETS {
            let its: Vec<_> = cells.iter().filter(|cell| target.is_about(cell)).collect();
            assert_eq!(its.len(), 2, "a read and a write");
            assert!(
                its.iter()
                    .all(|cell| cell.clients.iter().any(|client| target.is_for(*client)))
            );
        }
    }
}
