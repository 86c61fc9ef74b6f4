//! `--metrics ADDR`: what disks and I/O threads do, for Prometheus (text exposition format 0.0.4).
//!
//! The text has about 1.2 KiB for each disk. However many clients ask, only a few texts exist at a time.

mod http;

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use datapath::{DiskStats, Histogram, RequestStats, ThreadStats};
use tracing::info;

use crate::config::spec;
use crate::server::Server;

/// Upper bounds of the buckets, in microseconds: three per power of ten in the range of working storage, then one.
const BOUNDS_US: [u64; 13] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000, 10_000_000,
];

/// Serves metrics at this address until the process exits, and measures latencies from now on. Returns the address,
/// with the kernel's choice for port 0.
///
/// # Errors
/// The address is not available, or no thread can be started.
pub fn start(
    address: SocketAddr,
    inherited: Option<TcpListener>,
    server: Arc<Server>,
) -> io::Result<SocketAddr> {
    let listener = match inherited {
        Some(listener) => listener,
        None => TcpListener::bind(address)?,
    };
    let _ = server.handover.metrics.set(listener.try_clone()?.into());
    let address = listener.local_addr()?;
    server.watch_always();
    let text = move || {
        let mut text = Vec::new();
        // Writing to memory does not fail.
        let _ = metrics(&server, &mut text);
        text
    };
    http::serve(listener, text)?;
    info!("metrics: http://{address}/metrics");
    Ok(address)
}

/// The numbers of a disk that its metrics show.
struct DiskSample {
    labels: Labels,
    size: u64,
    connected: bool,
    hangs: bool,
    /// Without latencies.
    counts: DiskStats,
}

/// What a disk is called: its own name, and those of its domain and there, if it has them.
struct Labels(Vec<(&'static str, String)>);

impl Labels {
    fn new(name: &str, of: &spec::Labels) -> Self {
        let mut labels = vec![("disk", name.to_owned())];
        labels.extend(of.domain.clone().map(|domain| ("domain", domain)));
        labels.extend(of.target.clone().map(|target| ("target", target)));
        Self(labels)
    }

    fn disk(&self) -> &str {
        &self.0[0].1
    }

    fn with<'a>(&'a self, more: &[(&'static str, &'a str)]) -> Vec<(&'static str, &'a str)> {
        let labels = self.0.iter().map(|(key, value)| (*key, &**value));
        labels.chain(more.iter().copied()).collect()
    }
}

/// Writes all metrics.
fn metrics(server: &Server, to: &mut impl Write) -> io::Result<()> {
    let mut disks = Vec::new();
    server.each_disk(|disk| {
        disks.extend(disk.export.map(|export| DiskSample {
            labels: Labels::new(&export.id, disk.labels),
            size: export.disk.size(),
            connected: export.connected(),
            hangs: export.device.hangs_for().is_some(),
            counts: export.disk.counts(),
        }));
    });
    let mut text = Text(to);
    let name = "ringdisk_disk_absent";
    let help = "Disks that are to be served and cannot be; they are tried again.";
    text.family(name, "gauge", help)?;
    for (disk, _) in server.absent() {
        text.value(name, &Labels::new(&disk.name, &disk.labels).with(&[]), 1)?;
    }
    write_counts(&mut text, &disks)?;
    text.family(
        REQUEST_SECONDS,
        "histogram",
        "Time of requests from the available ring to the used ring, by operation, for disks and operations that have been \
         used. Of its stages (waiting for a limit, in the image, in the engine, and until the used ring is updated), only \
         sum and count are given.",
    )?;
    for disk in disks.iter().filter(|disk| was_used(&disk.counts)) {
        // One disk at a time, because histograms are large.
        if let Some(stats) = server.served(disk.labels.disk(), |export| export.disk.stats()) {
            write_latencies(&mut text, &disk.labels, &stats)?;
        }
    }
    let threads = server.threads.running().into_iter();
    let threads: Vec<_> = threads
        .map(|(thread, _)| (thread.id, thread.thread.stats()))
        .collect();
    write_threads(&mut text, &threads)
}

const REQUEST_SECONDS: &str = "ringdisk_disk_request_seconds";

fn was_used(stats: &DiskStats) -> bool {
    let kinds = stats.kinds();
    kinds.iter().any(|(_, r)| r.operations + r.errors > 0)
}

/// A metric with one value for each disk: name, type, help and value.
type DiskMetric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&DiskSample) -> u64,
);

const DISK_METRICS: [DiskMetric; 6] = [
    (
        "ringdisk_disk_size_bytes",
        "gauge",
        "Size of the disk as the guest sees it.",
        |disk| disk.size,
    ),
    (
        "ringdisk_disk_connected",
        "gauge",
        "Whether a VM is connected.",
        |disk| disk.connected.into(),
    ),
    (
        "ringdisk_disk_requests_under_way",
        "gauge",
        "Requests in flight, including those that wait for a limit.",
        |disk| disk.counts.under_way,
    ),
    (
        "ringdisk_disk_requests_stalled",
        "gauge",
        "Requests that wait for failed storage to work again.",
        |disk| disk.counts.stalled,
    ),
    (
        "ringdisk_disk_storage_hangs",
        "gauge",
        "Whether storage has not answered an operation for more than four seconds.",
        |disk| disk.hangs.into(),
    ),
    (
        "ringdisk_disk_refused_total",
        "counter",
        "Invalid requests, which the disk refused.",
        |disk| disk.counts.refused,
    ),
];

/// A counter for each operation of each disk: name, help and value.
type OperationCounter = (&'static str, &'static str, fn(&RequestStats) -> u64);

const OPERATION_COUNTERS: [OperationCounter; 3] = [
    (
        "ringdisk_disk_operations_total",
        "Requests that succeeded.",
        |requests| requests.operations,
    ),
    (
        "ringdisk_disk_bytes_total",
        "Bytes read or written by requests that succeeded.",
        |requests| requests.bytes,
    ),
    (
        "ringdisk_disk_errors_total",
        "Requests that ended with an error.",
        |requests| requests.errors,
    ),
];

fn write_counts(text: &mut Text<'_, impl Write>, disks: &[DiskSample]) -> io::Result<()> {
    for (name, kind, help, value) in DISK_METRICS {
        text.family(name, kind, help)?;
        for disk in disks {
            text.value(name, &disk.labels.with(&[]), value(disk))?;
        }
    }
    for (name, help, count) in OPERATION_COUNTERS {
        text.family(name, "counter", help)?;
        for disk in disks {
            for (operation, requests) in disk.counts.kinds() {
                let labels = disk.labels.with(&[("operation", operation)]);
                text.value(name, &labels, count(requests))?;
            }
        }
    }
    Ok(())
}

/// Writes the histograms of a disk, for operations that were measured.
fn write_latencies(
    text: &mut Text<'_, impl Write>,
    disk: &Labels,
    stats: &DiskStats,
) -> io::Result<()> {
    for (operation, requests) in stats.kinds() {
        if requests.latency.total.count() == 0 {
            continue;
        }
        for (stage, histogram) in requests.latency.stages() {
            let labels = disk.with(&[("operation", operation), ("stage", stage)]);
            let bounds = if stage == "total" {
                &BOUNDS_US[..]
            } else {
                &[]
            };
            text.histogram(REQUEST_SECONDS, &labels, histogram, bounds)?;
        }
    }
    Ok(())
}

fn write_threads(
    text: &mut Text<'_, impl Write>,
    threads: &[(String, ThreadStats)],
) -> io::Result<()> {
    let name = "ringdisk_iothread_cpu_seconds_total";
    text.family(name, "counter", "CPU time of the thread, user and kernel.")?;
    for (id, stats) in threads {
        if let Some(cpu_ns) = stats.cpu_ns {
            text.seconds(name, &[("iothread", id)], cpu_ns)?;
        }
    }
    let name = "ringdisk_iothread_poll_seconds_total";
    let help = "Time that the thread polled for requests and completions.";
    text.family(name, "counter", help)?;
    for (id, stats) in threads {
        text.seconds(name, &[("iothread", id)], stats.polled_ns)?;
    }
    let name = "ringdisk_iothread_poll_saved_seconds_total";
    let help = "CPU time of the sleeps that polling avoided.";
    text.family(name, "counter", help)?;
    for (id, stats) in threads {
        text.seconds(name, &[("iothread", id)], stats.poll_saved_ns)?;
    }
    type Count = fn(&ThreadStats) -> u64;
    let counters: [(&str, &str, Count); 3] = [
        (
            "ringdisk_iothread_polls_total",
            "Times that the thread polled.",
            |s| s.polls,
        ),
        (
            "ringdisk_iothread_polls_hit_total",
            "Polls that found a request or a completion.",
            |s| s.polls_hit,
        ),
        (
            "ringdisk_iothread_sleeps_total",
            "Times that the thread slept.",
            |s| s.sleeps,
        ),
    ];
    for (name, help, count) in counters {
        text.family(name, "counter", help)?;
        for (id, stats) in threads {
            text.value(name, &[("iothread", id)], count(stats))?;
        }
    }
    Ok(())
}

/// Writes the text format.
struct Text<'a, W>(&'a mut W);

impl<W: Write> Text<'_, W> {
    fn family(&mut self, name: &str, kind: &str, help: &str) -> io::Result<()> {
        write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n")
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: u64) -> io::Result<()> {
        self.name(name, "", labels, None)?;
        writeln!(self.0, " {value}")
    }

    fn seconds(&mut self, name: &str, labels: &[(&str, &str)], ns: u64) -> io::Result<()> {
        self.name(name, "", labels, None)?;
        writeln!(self.0, " {}", Seconds(ns))
    }

    fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        histogram: &Histogram,
        bounds_us: &[u64],
    ) -> io::Result<()> {
        let count = histogram.count();
        for us in bounds_us {
            let ns = us * 1000;
            self.name(name, "_bucket", labels, Some(&Seconds(ns).to_string()))?;
            writeln!(self.0, " {}", histogram.count_up_to(ns))?;
        }
        self.name(name, "_bucket", labels, Some("+Inf"))?;
        writeln!(self.0, " {count}")?;
        self.name(name, "_sum", labels, None)?;
        writeln!(self.0, " {}", Seconds(histogram.sum_ns()))?;
        self.name(name, "_count", labels, None)?;
        writeln!(self.0, " {count}")
    }

    fn name(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &[(&str, &str)],
        le: Option<&str>,
    ) -> io::Result<()> {
        write!(self.0, "{name}{suffix}")?;
        let labels = labels.iter().copied().chain(le.map(|le| ("le", le)));
        for (i, (key, value)) in labels.enumerate() {
            let open = if i == 0 { '{' } else { ',' };
            write!(self.0, "{open}{key}=\"")?;
            for part in value.split_inclusive(['\\', '"', '\n']) {
                let escaped = match part.as_bytes().last() {
                    Some(b'\\') => "\\\\",
                    Some(b'"') => "\\\"",
                    Some(b'\n') => "\\n",
                    _ => "",
                };
                let plain = if escaped.is_empty() {
                    part
                } else {
                    &part[..part.len() - 1]
                };
                write!(self.0, "{plain}{escaped}")?;
            }
            self.0.write_all(b"\"")?;
        }
        self.0.write_all(b"}")
    }
}

/// Nanoseconds, displayed in seconds without loss.
struct Seconds(u64);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (s, ns) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        match ns {
            0 => write!(f, "{s}"),
            _ => f.write_str(format!("{s}.{ns:09}").trim_end_matches('0')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_in_the_text_format() {
        let of = spec::Labels {
            domain: Some("vm 1".into()),
            target: Some("vda".into()),
        };
        let labels = || Labels::new("odd \"name\"\\", &of);
        let mut stats = DiskStats::default();
        stats.read.operations = 12;
        let disk = DiskSample {
            labels: labels(),
            size: 1 << 30,
            connected: true,
            hangs: true,
            counts: stats.clone(),
        };
        let times = [(1_001, 3), (300_000, 4), (20_000_000_000, 5)];
        stats.read.latency.total = Histogram::from_buckets(times, 1_500_000_000);
        let mut bytes = Vec::new();
        let mut text = Text(&mut bytes);
        write_counts(&mut text, &[disk]).unwrap();
        text.family(REQUEST_SECONDS, "histogram", "").unwrap();
        write_latencies(&mut text, &labels(), &stats).unwrap();
        write_threads(&mut text, &[("iothread0".into(), ThreadStats::default())]).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let has = |line: &str| {
            let found = text.lines().any(|l| l == line);
            assert!(found, "{line} is not in\n{}", text);
        };
        let name = r#"disk="odd \"name\"\\",domain="vm 1",target="vda",operation="read""#;
        has(&format!("ringdisk_disk_operations_total{{{name}}} 12"));
        let bucket = |le: &str| {
            format!("ringdisk_disk_request_seconds_bucket{{{name},stage=\"total\",le=\"{le}\"}}")
        };
        has(r#"ringdisk_disk_storage_hangs{disk="odd \"name\"\\",domain="vm 1",target="vda"} 1"#);
        has(&format!("{} 3", bucket("0.00001")));
        has(&format!("{} 3", bucket("0.0002")));
        has(&format!("{} 7", bucket("0.0005")));
        has(&format!("{} 7", bucket("10")));
        has(&format!("{} 12", bucket("+Inf")));
        let sum = format!("ringdisk_disk_request_seconds_sum{{{name},stage=\"total\"}} 1.5");
        has(&sum);
        has("ringdisk_iothread_polls_total{iothread=\"iothread0\"} 0");
        // Every sample follows the TYPE line of its metric, which appears once.
        let mut families = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let family = rest.split(' ').next().unwrap();
                assert!(!families.contains(&family), "{family} twice");
                families.push(family);
            } else if !line.starts_with('#') {
                let last = families.last().unwrap();
                assert!(line.starts_with(last), "{line} is not of {last}");
            }
        }
    }
}
