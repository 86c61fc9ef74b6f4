//! `--metrics ADDR`: what disks and I/O threads do, for Prometheus (text exposition format 0.0.4).

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use datapath::{DiskStats, Histogram, ThreadStats};
use tracing::{info, warn};

use crate::host::Host;

/// Upper bounds of the buckets, in microseconds.
const BOUNDS_US: [u64; 22] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000,
];

/// A scraper's request has no body, and few headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

/// One or two are there at a time. Each costs a thread.
const CLIENTS_MAX: usize = 8;

/// How long a client may take to send its request, and then to take what it asked for.
const PATIENCE: Duration = Duration::from_secs(5);

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers scrapers at this address until the process ends, and measures latencies from now on. Returns the address
/// with the port that the kernel chose, if none was given.
///
/// # Errors
/// The address cannot be listened at, or there is no thread to be had.
pub fn start(
    address: SocketAddr,
    inherited: Option<TcpListener>,
    host: Arc<Host>,
) -> io::Result<SocketAddr> {
    let listener = match inherited {
        Some(listener) => listener,
        None => TcpListener::bind(address)?,
    };
    let _ = host.handing.metrics.set(listener.try_clone()?.into());
    let address = listener.local_addr()?;
    host.watch_always();
    thread::Builder::new()
        .name("metrics".into())
        .spawn(move || listen(&listener, &host))?;
    info!("metrics: http://{address}/metrics");
    Ok(address)
}

fn listen(listener: &TcpListener, host: &Arc<Host>) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let served = listener.accept().and_then(|(stream, _)| {
            if clients.load(Ordering::Relaxed) >= CLIENTS_MAX {
                return Ok(()); // hung up on
            }
            let client = Client::new(&clients);
            let host = host.clone();
            thread::Builder::new()
                .name("metrics-client".into())
                .spawn(move || {
                    let _client = client;
                    // It is the client's loss.
                    let _ = answer(&stream, || metrics(&host));
                })
                .map(drop)
        });
        if let Err(e) = served {
            warn!("metrics: cannot serve a client: {e}");
            thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Counted as long as it lives.
struct Client(Arc<AtomicUsize>);

impl Client {
    fn new(clients: &Arc<AtomicUsize>) -> Self {
        clients.fetch_add(1, Ordering::Relaxed);
        Self(clients.clone())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(mut stream: &TcpStream, metrics: impl Fn() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let deadline = Instant::now() + PATIENCE;
    let mut request = Vec::with_capacity(1024);
    let (status, body) = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break ("408 Request Timeout", "the request took too long\n".into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut part = [0; 1024];
        let n = match stream.read(&mut part) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            result => result?,
        };
        request.extend_from_slice(&part[..n]);
        match path(&request) {
            Parsed::Path => break ("200 OK", metrics()),
            Parsed::Refused(status, why) => break (status, why.into()),
            Parsed::More if n == 0 || request.len() > REQUEST_BYTES_MAX => {
                break ("400 Bad Request", "this is no whole HTTP request\n".into());
            }
            Parsed::More => {}
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    // Closed with something unread, the connection would be reset, and the answer with it.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    let rest = io::copy(&mut stream.take(REQUEST_BYTES_MAX as u64), &mut io::sink());
    rest.map(drop)
}

#[derive(Debug, PartialEq)]
enum Parsed {
    More,
    /// What is asked for is there.
    Path,
    Refused(&'static str, &'static str),
}

fn path(request: &[u8]) -> Parsed {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) => return Parsed::More,
        Ok(httparse::Status::Complete(_)) => {}
        Err(_) => return Parsed::Refused("400 Bad Request", "this is no HTTP request\n"),
    }
    let path = parsed.path.unwrap_or_default();
    match (parsed.method, path.split('?').next()) {
        (Some("GET"), Some("/metrics")) => Parsed::Path,
        (Some("GET"), _) => Parsed::Refused("404 Not Found", "there is /metrics\n"),
        _ => Parsed::Refused("405 Method Not Allowed", "only GET is allowed\n"),
    }
}

/// One disk, as it is shown.
struct Shown {
    name: String,
    size: u64,
    connected: bool,
    stats: DiskStats,
}

/// Everything, as text.
fn metrics(host: &Host) -> String {
    let mut disks = Vec::new();
    host.each(|disk| {
        disks.extend(disk.export.map(|export| Shown {
            name: export.id.clone(),
            size: export.disk.size(),
            connected: export.connected(),
            stats: export.disk.stats(),
        }));
    });
    let threads = host.threads.running().into_iter();
    let threads: Vec<_> = threads
        .map(|(thread, _)| (thread.id, thread.thread.stats()))
        .collect();
    let mut text = Text::default();
    write_disks(&mut text, &disks);
    write_threads(&mut text, &threads);
    text.0
}

fn write_disks(text: &mut Text, disks: &[Shown]) {
    text.family(
        "ringdisk_disk_size_bytes",
        "gauge",
        "Size that the guest sees.",
    );
    for disk in disks {
        text.value(
            "ringdisk_disk_size_bytes",
            &[("disk", &disk.name)],
            disk.size,
        );
    }
    text.family(
        "ringdisk_disk_connected",
        "gauge",
        "Whether a VM is connected.",
    );
    for disk in disks {
        let labels = [("disk", &*disk.name)];
        text.value("ringdisk_disk_connected", &labels, disk.connected.into());
    }
    text.family(
        "ringdisk_disk_requests_under_way",
        "gauge",
        "Requests under way, with those that a limit holds back.",
    );
    for disk in disks {
        let labels = [("disk", &*disk.name)];
        text.value(
            "ringdisk_disk_requests_under_way",
            &labels,
            disk.stats.under_way,
        );
    }
    text.family(
        "ringdisk_disk_requests_stalled",
        "gauge",
        "Requests that storage failed to serve, and that wait for it to work again.",
    );
    for disk in disks {
        let labels = [("disk", &*disk.name)];
        text.value(
            "ringdisk_disk_requests_stalled",
            &labels,
            disk.stats.stalled,
        );
    }
    text.family(
        "ringdisk_disk_refused_total",
        "counter",
        "Requests that the disk does not allow.",
    );
    for disk in disks {
        let labels = [("disk", &*disk.name)];
        text.value("ringdisk_disk_refused_total", &labels, disk.stats.refused);
    }
    type Count = fn(&datapath::RequestStats) -> u64;
    let counters: [(&str, &str, Count); 3] = [
        (
            "ringdisk_disk_operations_total",
            "Requests completed with success.",
            |r| r.operations,
        ),
        ("ringdisk_disk_bytes_total", "Bytes of these.", |r| r.bytes),
        (
            "ringdisk_disk_errors_total",
            "Requests completed with an error.",
            |r| r.errors,
        ),
    ];
    for (name, help, count) in counters {
        text.family(name, "counter", help);
        for disk in disks {
            for (operation, requests) in disk.stats.kinds() {
                let labels = [("disk", &*disk.name), ("operation", operation)];
                text.value(name, &labels, count(requests));
            }
        }
    }
    text.family(
        "ringdisk_disk_request_seconds",
        "histogram",
        "From the available ring to the used ring: in total, and held back, in the image, in the engine, \
         and on the way to the used ring.",
    );
    for disk in disks {
        for (operation, requests) in disk.stats.kinds() {
            for (stage, histogram) in requests.latency.stages() {
                let labels = [
                    ("disk", &*disk.name),
                    ("operation", operation),
                    ("stage", stage),
                ];
                text.histogram("ringdisk_disk_request_seconds", &labels, histogram);
            }
        }
    }
}

fn write_threads(text: &mut Text, threads: &[(String, ThreadStats)]) {
    text.family(
        "ringdisk_iothread_cpu_seconds_total",
        "counter",
        "CPU time, user and kernel.",
    );
    for (id, stats) in threads {
        if let Some(cpu_ns) = stats.cpu_ns {
            let labels = [("iothread", &**id)];
            text.seconds("ringdisk_iothread_cpu_seconds_total", &labels, cpu_ns);
        }
    }
    text.family(
        "ringdisk_iothread_poll_seconds_total",
        "counter",
        "Time spent looking out for guests and completions.",
    );
    for (id, stats) in threads {
        let labels = [("iothread", &**id)];
        text.seconds(
            "ringdisk_iothread_poll_seconds_total",
            &labels,
            stats.polled_ns,
        );
    }
    type Count = fn(&ThreadStats) -> u64;
    let counters: [(&str, &str, Count); 3] = [
        (
            "ringdisk_iothread_polls_total",
            "Times that it looked out.",
            |s| s.polls,
        ),
        (
            "ringdisk_iothread_polls_hit_total",
            "Times that something came meanwhile.",
            |s| s.polls_hit,
        ),
        (
            "ringdisk_iothread_sleeps_total",
            "Times that it slept.",
            |s| s.sleeps,
        ),
    ];
    for (name, help, count) in counters {
        text.family(name, "counter", help);
        for (id, stats) in threads {
            text.value(name, &[("iothread", id)], count(stats));
        }
    }
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: u64) {
        self.name(name, labels, None);
        let _ = writeln!(self.0, " {value}");
    }

    fn seconds(&mut self, name: &str, labels: &[(&str, &str)], ns: u64) {
        self.name(name, labels, None);
        let _ = writeln!(self.0, " {}", Seconds(ns));
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let count = histogram.count();
        let bucket = format!("{name}_bucket");
        for us in BOUNDS_US {
            let ns = us * 1000;
            self.name(&bucket, labels, Some(&Seconds(ns).to_string()));
            let _ = writeln!(self.0, " {}", histogram.count_up_to(ns));
        }
        self.name(&bucket, labels, Some("+Inf"));
        let _ = writeln!(self.0, " {count}");
        self.seconds(&format!("{name}_sum"), labels, histogram.sum_ns());
        self.value(&format!("{name}_count"), labels, count);
    }

    fn name(&mut self, name: &str, labels: &[(&str, &str)], le: Option<&str>) {
        self.0.push_str(name);
        let labels = labels.iter().copied().chain(le.map(|le| ("le", le)));
        for (i, (key, value)) in labels.enumerate() {
            let open = if i == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{key}=\"");
            for c in value.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        self.0.push('}');
    }
}

/// Nanoseconds, written in seconds without loss.
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
    fn requests_are_understood_or_refused() {
        assert_eq!(path(b"GET /met"), Parsed::More);
        let whole = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n";
        assert_eq!(path(whole), Parsed::Path);
        let query = b"GET /metrics?a=b HTTP/1.0\r\n\r\n";
        assert_eq!(path(query), Parsed::Path);
        let refused = |request: &[u8], start: &str| match path(request) {
            Parsed::Refused(status, _) => assert!(status.starts_with(start), "{status}"),
            other => panic!("{other:?}"),
        };
        refused(b"GET / HTTP/1.1\r\n\r\n", "404");
        refused(b"POST /metrics HTTP/1.1\r\n\r\n", "405");
        refused(b"\0\0\0\0\r\n\r\n", "400");
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
        refused(many.as_bytes(), "400");
    }

    #[test]
    fn what_is_written_is_the_text_format() {
        let mut disk = Shown {
            name: "odd \"name\"\\".into(),
            size: 1 << 30,
            connected: true,
            stats: DiskStats::default(),
        };
        disk.stats.read.operations = 12;
        let times = [(1_001, 3), (300_000, 4), (20_000_000_000, 5)];
        disk.stats.read.latency.total = Histogram::from_buckets(times, 1_500_000_000);
        let mut text = Text::default();
        write_disks(&mut text, &[disk]);
        write_threads(&mut text, &[("iothread0".into(), ThreadStats::default())]);
        let has = |line: &str| {
            let found = text.0.lines().any(|l| l == line);
            assert!(found, "{line} is not in\n{}", text.0);
        };
        let name = r#"disk="odd \"name\"\\",operation="read""#;
        has(&format!("ringdisk_disk_operations_total{{{name}}} 12"));
        let bucket = |le: &str| {
            format!("ringdisk_disk_request_seconds_bucket{{{name},stage=\"total\",le=\"{le}\"}}")
        };
        has(&format!("{} 3", bucket("0.000001")));
        has(&format!("{} 3", bucket("0.0002")));
        has(&format!("{} 7", bucket("0.0005")));
        has(&format!("{} 7", bucket("10")));
        has(&format!("{} 12", bucket("+Inf")));
        let sum = format!("ringdisk_disk_request_seconds_sum{{{name},stage=\"total\"}} 1.5");
        has(&sum);
        has("ringdisk_iothread_polls_total{iothread=\"iothread0\"} 0");
        // Every sample belongs to a family that was announced before it, once.
        let mut families = Vec::new();
        for line in text.0.lines() {
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
