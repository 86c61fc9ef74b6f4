//! ringdisk's counters and measurements, through every interface that shows them.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use control::Client;
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::qemu_img as qemu;
use testkit::server::Server;
use virtio_bindings::virtio_blk::*;

use crate::support::{Disk, serve_all, wait_until};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;

/// The path of the control socket of a disk's server.
fn control(disk: &Disk) -> PathBuf {
    disk.socket.with_file_name("control.qmp")
}

const SCRAPE: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

/// Sends a request to the metrics address.
fn send_request(server: &Server, request: &str) -> TcpStream {
    let url = server.ready["metrics"].as_str().unwrap();
    let address = url.strip_prefix("http://").unwrap();
    let address = address.strip_suffix("/metrics").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// The head and body of the response.
fn http(server: &Server, request: &str) -> (String, String) {
    let mut text = String::new();
    send_request(server, request)
        .read_to_string(&mut text)
        .unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let body = if head.contains("Transfer-Encoding: chunked") {
        unchunked(body)
    } else {
        body.to_owned()
    };
    (head.to_owned(), body)
}

/// Decodes a chunked body (RFC 9112, 7.1).
fn unchunked(mut rest: &str) -> String {
    let mut body = String::new();
    loop {
        let (size, after) = rest
            .split_once("\r\n")
            .expect("a chunk begins with its size");
        let size = usize::from_str_radix(size, 16).unwrap();
        body.push_str(&after[..size]);
        rest = after[size..]
            .strip_prefix("\r\n")
            .expect("a chunk ends with a line");
        if size == 0 {
            assert_eq!(rest, "");
            return body;
        }
    }
}

/// A served disk with a control socket, and metrics at a port that the kernel chose.
struct Served {
    server: Server,
    disk: Disk,
}

impl Served {
    fn new(options: &str) -> Self {
        let disk = Disk::new();
        let args = [
            disk.argument(options),
            format!("--control={}", control(&disk).display()),
            "--metrics=127.0.0.1:0".into(),
        ];
        let server = serve_all(&args);
        Self { server, disk }
    }

    fn connect(&self) -> Device {
        Device::connect(&self.disk.socket, &DeviceConfig::default()).unwrap()
    }

    fn client(&self) -> Client {
        Client::connect(control(&self.disk), HANG).unwrap()
    }

    fn stats(&self) -> Value {
        let answer = self.client().call("x-ringdisk-stats", json!({})).unwrap();
        answer["disks"][0]["stats"].clone()
    }

    fn ringdisk(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.stdin(Stdio::null()).args(args);
        let output = command.arg("--control").arg(control(&self.disk)).output();
        output.unwrap()
    }

    fn http(&self, request: &str) -> (String, String) {
        http(&self.server, request)
    }

    /// The value of a metric.
    fn metric(&self, name: &str, labels: &str) -> f64 {
        let (_, body) = self.http(SCRAPE);
        let labels = labels.replace("DISK", &self.name());
        let start = format!("{name}{{{labels}}} ");
        let mut lines = body.lines().filter_map(|line| line.strip_prefix(&start));
        let value = lines
            .next()
            .unwrap_or_else(|| panic!("no {start} in\n{body}"));
        value.parse().unwrap()
    }

    fn name(&self) -> String {
        let stem = self.disk.file.file_stem().unwrap();
        stem.to_str().unwrap().to_owned()
    }
}

/// 30 reads of 4 KiB, 20 writes of 8 KiB, 3 flushes, a discard and a write of zeroes, and a read beyond the end.
fn work(device: &mut Device) {
    let queue = &mut device.queues[0];
    for i in 0..30 {
        assert_eq!(queue.run(Op::Read, i * 8, 4096), OK);
    }
    for i in 0..20 {
        assert_eq!(queue.run(Op::Write, i * 16, 8192), OK);
    }
    for _ in 0..3 {
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    }
    assert_eq!(queue.run(Op::Discard, 0, 1 << 20), OK);
    assert_eq!(
        queue.run(Op::WriteZeroes { unmap: true }, 4096, 1 << 16),
        OK
    );
    assert_eq!(queue.run(Op::Read, 1 << 40, 4096), IOERR);
}

#[test]
fn all_interfaces_report_the_same_counts() {
    let served = Served::new("queues=2");
    let mut device = served.connect();
    work(&mut device);

    let stats = served.stats();
    let expected = [
        ("read", 30, 30 * 4096),
        ("write", 20, 20 * 8192),
        ("flush", 3, 0),
        ("discard", 1, 1 << 20),
        ("write-zeroes", 1, 1 << 16),
    ];
    for (kind, operations, bytes) in expected {
        let counted = &stats[kind];
        assert_eq!(counted["operations"], operations, "{kind}");
        assert_eq!(counted["bytes"], bytes, "{kind}");
        assert_eq!(counted["errors"], 0, "{kind}");
        let latency = &counted["latency"];
        let sum = |stage: &str| latency[stage]["sum-ns"].as_u64().unwrap();
        for stage in ["total", "waiting", "image", "engine", "publishing"] {
            assert_eq!(latency[stage]["count"], operations, "{kind} {stage}");
        }
        assert!(sum("total") > 0);
        let parts = sum("waiting") + sum("image") + sum("engine") + sum("publishing");
        assert_eq!(sum("total"), parts, "{kind}: the parts make the whole");
        let labels = format!("disk=\"DISK\",operation=\"{kind}\"");
        let metric = |name: &str, more: &str| served.metric(name, &format!("{labels}{more}"));
        assert_eq!(
            metric("ringdisk_disk_operations_total", ""),
            f64::from(operations)
        );
        assert_eq!(metric("ringdisk_disk_bytes_total", ""), f64::from(bytes));
        let count = metric("ringdisk_disk_request_seconds_count", ",stage=\"engine\"");
        assert_eq!(count, f64::from(operations));
        let seconds = metric("ringdisk_disk_request_seconds_sum", ",stage=\"total\"");
        assert!((seconds * 1e9 / sum("total") as f64 - 1.0).abs() < 1e-6);
    }
    assert_eq!(stats["refused"], 1);
    assert_eq!(stats["under-way"], 0);
    assert_eq!(
        served.metric("ringdisk_disk_refused_total", "disk=\"DISK\""),
        1.0
    );
    assert_eq!(
        served.metric("ringdisk_disk_connected", "disk=\"DISK\""),
        1.0
    );

    let reply = served.client().call("query-blockstats", json!({})).unwrap();
    assert_eq!(reply[0]["device"], served.name());
    let counted = &reply[0]["stats"];
    assert_eq!(counted["rd_operations"], 30);
    assert_eq!(counted["wr_operations"], 20 + 1);
    assert_eq!(counted["wr_bytes"], 20 * 8192 + (1 << 16));
    assert_eq!(counted["flush_operations"], 3);
    assert_eq!(counted["unmap_operations"], 1);
    assert_eq!(
        counted["rd_total_time_ns"],
        stats["read"]["latency"]["total"]["sum-ns"]
    );
    let nodes = json!({ "query-nodes": true });
    let reply = served.client().call("query-blockstats", nodes).unwrap();
    assert_eq!(reply[0]["node-name"], served.name());
    assert_eq!(reply[0]["device"], Value::Null);

    // A disk keeps its counters when its VM disconnects.
    drop(device);
    let mut device = served.connect();
    assert_eq!(device.queues[0].run(Op::Read, 0, 512), OK);
    assert_eq!(served.stats()["read"]["operations"], 31);
}

#[test]
fn latencies_are_measured_after_the_first_query() {
    let disk = Disk::new();
    let args = [
        disk.argument(""),
        format!("--control={}", control(&disk).display()),
    ];
    let server = serve_all(&args);
    let served = Served { server, disk };
    let mut device = served.connect();
    let queue = &mut device.queues[0];
    assert_eq!(queue.run(Op::Read, 0, 4096), OK);
    let stats = served.stats();
    assert_eq!(stats["read"]["operations"], 1);
    assert_eq!(
        stats["read"]["latency"]["total"]["count"], 0,
        "latencies before the first query"
    );
    for _ in 0..5 {
        assert_eq!(queue.run(Op::Read, 0, 4096), OK);
    }
    assert_eq!(served.stats()["read"]["operations"], 6);
    // A request's latency includes telling the guest, so it is counted a moment later.
    wait_until("the latencies of all later reads", || {
        served.stats()["read"]["latency"]["total"]["count"] == 5
    });
}

#[test]
fn throttling_is_counted_as_waiting() {
    let served = Served::new("iops=20");
    let mut device = served.connect();
    let queue = &mut device.queues[0];
    for i in 0..20 {
        assert_eq!(queue.run(Op::Read, i * 8, 4096), OK);
    }
    let latency = &served.stats()["read"]["latency"];
    let sum = |stage: &str| latency[stage]["sum-ns"].as_u64().unwrap();
    assert!(
        sum("waiting") > sum("total") / 2,
        "waited {} of {} ns",
        sum("waiting"),
        sum("total")
    );
}

#[test]
fn text_output_shows_rates() {
    let served = Served::new("");
    let name = served.name();
    let output = std::thread::scope(|scope| {
        let running = scope.spawn(|| served.ringdisk(&["stats", "--json", "--seconds", "2"]));
        let mut device = served.connect();
        while !running.is_finished() {
            assert_eq!(device.queues[0].run(Op::Read, 0, 4096), OK);
        }
        running.join().unwrap()
    });
    assert!(output.status.success(), "{output:?}");
    let disks: Value = serde_json::from_slice(&output.stdout).unwrap();
    let disk = &disks[0];
    assert_eq!(disk["name"], name);
    let number = |value: &Value| value.as_f64().unwrap();
    let iops = number(&disk["read"]["iops"]);
    assert!(iops > 0.0);
    assert!((number(&disk["read"]["bps"]) / iops - 4096.0).abs() < 1e-6);
    let p = |name: &str| number(&disk["read"]["total-latency"][name]);
    assert!(p("p50-ns") > 0.0 && p("p50-ns") <= p("p99-ns") && p("p99-ns") <= p("p99.9-ns"));
    let depth = number(&disk["queue-depth"]);
    assert!(
        depth > 0.0 && depth <= 1.1,
        "expected a depth of 1, not {depth}"
    );
    assert!(number(&disk["cpu-ns-per-operation"]) > 0.0);
    assert!(disk["total"]["read"]["operations"].as_u64().unwrap() > 0);

    let output = served.ringdisk(&["stats", &name]);
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert!(
        lines[0].starts_with("NAME") && lines[0].contains("P99.9"),
        "{text}"
    );
    assert!(lines[1].starts_with(&name), "{text}");

    let output = served.ringdisk(&["stats", "nobody"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains(&format!("no disk 'nobody'; served are: {name}")),
        "{text}"
    );

    let output = served.ringdisk(&["top"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("'ringdisk stats' works without one"),
        "{text}"
    );
}

#[test]
fn storage_errors_are_reported() {
    let served = Served::new("");
    let mut control = served.client();
    let mut device = served.connect();
    let queue = &mut device.queues[0];
    assert_eq!(queue.run(Op::Read, 8192, 4096), OK);
    // The file is truncated while it is served.
    let file = File::options().write(true).open(&served.disk.file).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(queue.run(Op::Read, 8192, 4096), IOERR);
    let event = control.event(HANG).unwrap().expect("no event came");
    assert_eq!(event["event"], "BLOCK_IO_ERROR");
    let data = &event["data"];
    assert_eq!(data["device"], served.name());
    assert_eq!(data["node-name"], served.name());
    assert_eq!(data["operation"], "read");
    assert_eq!(data["action"], "report");
    assert_eq!(data["nospace"], false);
    assert_eq!(data["reason"], "the file ends before the disk does");
    assert_eq!(served.stats()["read"]["errors"], 1);
    // The guest's own errors are not counted as storage errors.
    assert_eq!(queue.run(Op::Read, 1 << 40, 4096), IOERR);
    assert_eq!(control.event(Duration::from_secs(2)).unwrap(), None);
}

/// As in QEMU, the event has the cause and the offset each in a field of its own.
#[test]
fn damaged_image_is_reported() {
    let at = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| at.path().join(name);
    if !qemu::is_there("damaged_image_is_reported") {
        return;
    }
    qemu::img(at.path(), "create -q -f qcow2 image.qcow2 8M");
    // An entry of the L1 table that is not at the start of a cluster (qcow2.txt: "L1 table entry").
    let image = File::options()
        .read(true)
        .write(true)
        .open(path("image.qcow2"))
        .unwrap();
    let mut l1_table = [0; 8];
    image.read_exact_at(&mut l1_table, 40).unwrap();
    let entry = 1_u64 << 63 | 0x200;
    let l1_table = u64::from_be_bytes(l1_table);
    image.write_all_at(&entry.to_be_bytes(), l1_table).unwrap();

    let (file, socket) = (path("image.qcow2"), path("disk.sock"));
    let _server = serve_all(&[
        format!("file={},socket={}", file.display(), socket.display()),
        format!("--control={}", path("control.qmp").display()),
    ]);
    let mut control = Client::connect(path("control.qmp"), HANG).unwrap();
    let mut device = Device::connect(socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(0, &[1; 4096]), IOERR);
    let event = loop {
        let event = control.event(HANG).unwrap().expect("no event came");
        if event["event"] == "BLOCK_IMAGE_CORRUPTED" {
            break event;
        }
    };
    let data = &event["data"];
    assert_eq!(data["fatal"], true);
    let message = data["msg"].as_str().unwrap();
    assert!(message.contains("L1"), "{data}");
    assert!(
        !message.contains("damaged") && !message.contains("0x"),
        "{data}"
    );
}

/// All that the dashboard shows is there under that name, with those labels.
#[test]
fn dashboard_shows_metrics_that_there_are() {
    let served = Served::new("domain=vm1,target=vda");
    let mut device = served.connect();
    assert_eq!(device.queues[0].write(0, &[1; 4096]), 0);
    let mut metrics = String::new();
    // A request's latency includes telling the guest, so it is counted a moment later.
    wait_until("the latency of the write", || {
        metrics = served.http("GET /metrics HTTP/1.0\r\n\r\n").1;
        metrics.contains("ringdisk_disk_request_seconds_bucket{")
    });
    let dashboard = include_str!("../../../packaging/grafana-dashboard.json");
    let dashboard: Value = serde_json::from_str(dashboard).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let targets = panel["targets"].as_array().unwrap();
        queries.extend(
            targets
                .iter()
                .map(|target| target["expr"].as_str().unwrap()),
        );
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        queries.extend(variable["query"]["query"].as_str());
    }
    assert!(queries.len() > 10, "{queries:?}");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for query in queries {
        for name in query
            .split(|c| !is_word(c))
            .filter(|word| word.starts_with("ringdisk_"))
        {
            let ends = ["_bucket", "_sum"]
                .into_iter()
                .find_map(|end| name.strip_suffix(end));
            let family = format!("# TYPE {} ", ends.unwrap_or(name));
            assert!(metrics.contains(&family), "{query}: no {name}");
        }
        let groups = query.split("by (").skip(1);
        for label in groups.flat_map(|group| group.split(')').next().unwrap().split(", ")) {
            assert!(
                metrics.contains(&format!("{label}=\"")),
                "{query}: no {label}"
            );
        }
    }
}

#[test]
fn metrics_endpoint_answers_every_client() {
    let served = Served::new("");
    let status = |request: &str| {
        let (head, _) = served.http(request);
        head.split(' ').nth(1).unwrap().to_owned()
    };
    let (head, whole) = served.http(SCRAPE);
    assert!(head.contains("Transfer-Encoding: chunked"), "{head}");
    let (head, body) = served.http("GET /metrics HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(!head.contains("chunked"), "{head}");
    assert_eq!(body.lines().count(), whole.lines().count());
    assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), "404");
    assert_eq!(status("DELETE /metrics HTTP/1.1\r\n\r\n"), "405");
    assert_eq!(status("nonsense\r\n\r\n"), "400");
    let endless = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(7 << 10));
    assert_eq!(status(&(endless + &"b".repeat(2 << 10))), "400");

    // An address in use is an error with a remedy.
    let taken = served.server.ready["metrics"].as_str().unwrap();
    let taken = taken
        .strip_prefix("http://")
        .and_then(|u| u.strip_suffix("/metrics"));
    let other = Disk::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.args(["serve", &other.argument(""), "--metrics", taken.unwrap()]);
    command.arg("--control").arg(control(&other));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("--metrics takes an address"), "{text}");
    assert!(!other.socket.exists(), "nothing is left behind");
}

/// Memory of a process, in KiB.
fn memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let word = line.and_then(|rest| rest.split_whitespace().next());
    word.unwrap().parse().unwrap()
}

/// Every scraper got memory for histograms of every disk and for the whole text, of which the process returned nothing:
/// 15 MiB became 756 with 301 disks and 30 scrapes.
#[test]
fn scrapes_of_many_disks_use_little_memory() {
    const DISKS: usize = 301;
    let dir = tempfile::tempdir().unwrap();
    let disk = |i| {
        format!(
            "file=null:64M,name=d{i},socket={},queues=1",
            dir.path().join(format!("{i}.sock")).display()
        )
    };
    let mut arguments: Vec<_> = (0..DISKS).map(disk).collect();
    arguments.push(format!(
        "--control={}",
        dir.path().join("control.qmp").display()
    ));
    arguments.extend(["--iothreads=1".into(), "--metrics=127.0.0.1:0".into()]);
    let server = serve_all(&arguments);
    let used = [7, 300].map(|i| dir.path().join(format!("{i}.sock")));
    let mut used = used.map(|socket| Device::connect(socket, &DeviceConfig::default()).unwrap());
    for device in &mut used {
        assert_eq!(device.queues[0].run(Op::Read, 0, 4096), OK);
    }
    let before = memory_kib(server.pid());
    let (_, body) = http(&server, SCRAPE);
    std::thread::scope(|scope| {
        for _ in 0..29 {
            scope.spawn(|| {
                // A client that sends a request and reads the response late.
                let mut stream = send_request(&server, SCRAPE);
                std::thread::yield_now();
                std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
            });
        }
    });
    let after = memory_kib(server.pid());
    println!("{DISKS} disks, 30 scrapes: {before} KiB before, {after} KiB after");
    assert!(
        after < before + (8 << 10),
        "{before} KiB before, {after} KiB after"
    );
    let lines = |disk: &str| {
        let label = format!("{{disk=\"{disk}\"");
        body.lines().filter(|line| line.contains(&label)).count()
    };
    println!(
        "lines: {} in all, {} of an idle disk, {} of one that reads",
        body.lines().count(),
        lines("d1"),
        lines("d7")
    );
    assert!(lines("d1") <= 21, "{}", lines("d1"));
    assert!((30..60).contains(&lines("d7")), "{}", lines("d7"));
    assert_eq!(lines("d300"), lines("d7"));
}

/// More clients than are served at once, which never finish their requests. They are told so after some seconds: a scrape does
/// not wait for that.
#[test]
fn silent_clients_do_not_block_scrapers() {
    let served = Served::new("");
    for count in [8, 100] {
        let is_at_once = || {
            let idle: Vec<_> = (0..count)
                .map(|_| send_request(&served.server, "GET /metrics"))
                .collect();
            let (head, body) = served.http(SCRAPE);
            assert!(head.starts_with("HTTP/1.1 200 ") && !body.is_empty());
            let last = idle.last().unwrap();
            last.set_nonblocking(true).unwrap();
            (&*last)
                .read(&mut [0])
                .is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
        };
        // The host may be busy for as long.
        assert!((0..10).any(|_| is_at_once()), "{count}");
    }
}

/// Clients that have their reply, and keep sending, keep no thread from others: they are disconnected soon.
#[test]
fn trickling_clients_do_not_block_scrapers() {
    let served = Served::new("");
    std::thread::scope(|scope| {
        let trickling: Vec<_> = (0..8)
            .map(|_| {
                let mut stream = send_request(&served.server, SCRAPE);
                scope.spawn(move || {
                    (0..4096).position(|_| {
                        std::thread::sleep(Duration::from_millis(20));
                        stream.write_all(b"x").is_err()
                    })
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        let (head, body) = served.http(SCRAPE);
        assert!(head.starts_with("HTTP/1.1 200 ") && !body.is_empty());
        let ended = |client: std::thread::ScopedJoinHandle<'_, _>| client.join().unwrap();
        assert!(trickling.into_iter().map(ended).all(|at| at.is_some()));
    });
}
