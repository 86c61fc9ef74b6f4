//! The words of the bench: storage, contestants, directions, and figures as tables show them.

use std::fmt;

pub use lab::client::Access as Workload;
pub use lab::plan::words::Client;
use serde::{Deserialize, Serialize};

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

/// Three significant digits.
pub fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
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
    use super::short;

    #[test]
    fn three_digits() {
        let texts = [0.0731, 1.704, 24.52, 153.4, 20875.0].map(short);
        assert_eq!(texts, ["0.073", "1.70", "24.5", "153", "20875"]);
    }
}
