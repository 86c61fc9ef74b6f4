//! Storage that fails, fills up, hangs or loses power under a whole server, for raw and qcow2, every engine and every
//! cache mode: what the guest sees, and how other disks are affected.

mod full_device;
mod hung;
mod hung_commands;
mod pauses;
mod random_faults;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::random::Random;
use testkit::server::Server;
use testkit::storage::{Mishaps, Storage, Submission};

use crate::support::wait_until;

const DISK_BYTES: u64 = 16 << 20;
const DEPTH: u16 = 16;
const LEN: u32 = 4096;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const EIO: i32 = 5;

/// A disk on controllable storage, or `None` where that is impossible.
struct Setup {
    storage: Storage,
    dir: tempfile::TempDir,
    format: &'static str,
}

impl Setup {
    fn new(format: &'static str, seed: u64) -> Option<Self> {
        Self::on(Submission::Asynchronous, format, seed)
    }

    fn on(submission: Submission, format: &'static str, seed: u64) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mount = dir.path().join("mnt");
        std::fs::create_dir(&mount).unwrap();
        let content = match format {
            "raw" => vec![0; DISK_BYTES as usize],
            _ => {
                let image = dir.path().join("image");
                let create = ["create", "-q", "-f", "qcow2"];
                let mut command = Command::new("qemu-img");
                command.args(create).arg(&image).arg(DISK_BYTES.to_string());
                assert!(command.status().unwrap().success());
                std::fs::read(&image).unwrap()
            }
        };
        match Storage::mount_as(&mount, content, seed, submission) {
            Ok(storage) => Some(Self {
                storage,
                dir,
                format,
            }),
            Err(e) => {
                println!("skipped: no FUSE file system to break: {e}");
                None
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }

    fn control(&self) -> PathBuf {
        self.dir.path().join("control.qmp")
    }

    /// Serves it, and other disks beside it.
    fn serve(&self, options: &str, others: &[String]) -> Server {
        let mut args = vec![format!(
            "file={},name=disk,format={},socket={},queues=1,{options}",
            self.storage.file().display(),
            self.format,
            self.socket().display()
        )];
        args.extend(others.iter().cloned());
        args.push(format!("--control={}", self.control().display()));
        args.push("--iothreads=1".into());
        Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &args).unwrap()
    }

    fn connect(&self) -> Device {
        connect(&self.socket())
    }
}

/// Bytes that differ from sector to sector and within a sector.
fn content(sector: u64, len: usize) -> Vec<u8> {
    let words =
        (0..len as u64 / 8).map(|i| (sector * 64 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

fn seed() -> u64 {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    seed
}

fn config() -> DeviceConfig {
    DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        inflight: true,
        ..DeviceConfig::default()
    }
}

fn connect(socket: &Path) -> Device {
    Device::connect(socket, &config()).unwrap()
}

fn submit(device: &mut Device, op: Op) {
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..DEPTH).collect();
    for &slot in &slots {
        let sector = u64::from(slot) * 1024;
        queue.prepare(slot, op, sector, LEN);
        if op == Op::Write {
            queue.write_buffer(slot, &content(sector, LEN as usize));
        }
    }
    queue.submit(&slots);
}

fn finish(device: &mut Device) -> Vec<u8> {
    let done = device.queues[0].finish(usize::from(DEPTH));
    done.into_iter().map(|(_, status)| status).collect()
}

fn stats(control: &Path) -> serde_json::Value {
    let mut client = control::Client::connect(control, HANG).unwrap();
    let stats = client.call("x-ringdisk-stats", serde_json::json!({}));
    stats.unwrap()["disks"][0].clone()
}

/// How long the storage fails: RINGDISK_TEST_OUTAGE_S, in seconds.
fn outage_time() -> Duration {
    let given = std::env::var("RINGDISK_TEST_OUTAGE_S").ok();
    Duration::from_secs_f64(given.map_or(1.0, |s| s.parse().unwrap()))
}

/// With the `retry` policy, a guest that cannot handle errors only notices a delay, with every engine.
#[test]
fn retry_policy_hides_an_outage_on_every_format_and_engine() {
    for format in ["raw", "qcow2"] {
        for aio in ["io_uring", "native", "threads"] {
            let Some(setup) = Setup::new(format, 1) else {
                return;
            };
            let options = format!("cache=none,aio={aio},rerror=retry,werror=retry");
            let mut server = setup.serve(&options, &[]);
            let mut device = setup.connect();
            setup.storage.change(|s| s.outage = Some(EIO));
            submit(&mut device, Op::Write);
            wait_until("storage fails", || {
                stats(&setup.control())["storage"] == "fails"
            });
            std::thread::sleep(outage_time());
            setup.storage.change(|s| s.outage = None);
            assert_eq!(
                finish(&mut device),
                vec![OK; usize::from(DEPTH)],
                "{format} {aio}"
            );
            // During flushes and reads as well.
            for op in [Op::Flush, Op::Read] {
                setup.storage.change(|s| s.outage = Some(EIO));
                submit(&mut device, op);
                std::thread::sleep(Duration::from_millis(200));
                setup.storage.change(|s| s.outage = None);
                assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)], "{op:?}");
            }
            for slot in 0..DEPTH {
                let read = device.queues[0].read_buffer(slot, LEN as usize);
                assert_eq!(read, content(u64::from(slot) * 1024, LEN as usize));
            }
            drop(device);
            wait_until("storage works", || {
                stats(&setup.control())["storage"] == "works"
            });
            assert!(server.terminate().unwrap().success());
            println!(
                "{format} {aio}: {} operations failed",
                setup.storage.control().failed
            );
        }
    }
}

/// Waiting requests outlive the process: the next one completes them from the front-end's inflight region.
#[test]
fn requests_waiting_for_storage_survive_a_restart() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 2) else {
            return;
        };
        let options = "cache=none,rerror=stop,werror=stop";
        let mut server = setup.serve(options, &[]);
        let mut device = setup.connect();
        setup.storage.change(|s| s.outage = Some(EIO));
        submit(&mut device, Op::Write);
        wait_until("it stops", || {
            stats(&setup.control())["storage"] == "stopped"
        });
        // Neither the guest nor the process has to wait for the operator.
        let status = server.terminate().unwrap();
        println!("{format}: {status}");
        setup.storage.change(|s| s.outage = None);
        let _server = setup.serve(options, &[]);
        device.reconnect(setup.socket(), &config()).unwrap();
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{format}"
        );
        for slot in 0..DEPTH {
            let sector = u64::from(slot) * 1024;
            let read = device.queues[0].read(sector, LEN as usize).unwrap();
            assert_eq!(read, content(sector, LEN as usize), "{format}");
        }
    }
}

/// The default of `werror`: writes wait for space, and continue when there is space.
#[test]
fn writes_wait_for_space() {
    // Also for front-ends that keep no record of requests in flight.
    for (format, inflight) in [("raw", true), ("qcow2", true), ("raw", false)] {
        let Some(setup) = Setup::new(format, 4) else {
            return;
        };
        let dir = setup.dir.path().display();
        let more = [
            format!("--allow-dir={dir}"),
            format!("--nbd={dir}/nbd.sock"),
        ];
        let _server = setup.serve("cache=none", &more);
        let config = DeviceConfig {
            inflight,
            ..config()
        };
        let mut device = Device::connect(setup.socket(), &config).unwrap();
        setup.storage.change(|s| s.full = true);
        submit(&mut device, Op::Write);
        wait_until("writes wait", || {
            stats(&setup.control())["storage"] == "fails"
        });
        let waiting = stats(&setup.control())["stats"]["stalled"].clone();
        assert!(waiting.as_u64().unwrap() > 0, "{waiting}");
        // A command that must wait for these requests reports how to end the wait.
        let new = setup.dir.path().join("new.raw");
        std::fs::write(&new, vec![0; DISK_BYTES as usize]).unwrap();
        for command in [
            &["upgrade"][..],
            &["replace", "disk", "new.raw"],
            &["backup", "begin", "disk"],
        ] {
            let mut ringdisk = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            ringdisk.args(command).arg("--control").arg(setup.control());
            let failed = ringdisk.current_dir(setup.dir.path()).output().unwrap();
            assert_eq!(failed.status.code(), Some(1), "{failed:?}");
            let said = String::from_utf8(failed.stderr).unwrap();
            assert!(said.contains("'ringdisk resume disk'"), "{said}");
            // That would give the guest errors.
            assert!(!said.contains("--report"), "{said}");
        }
        setup.storage.change(|s| s.full = false);
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{format}"
        );
        for sector in (0..u64::from(DEPTH)).map(|slot| slot * 1024) {
            let read = device.queues[0].read(sector, LEN as usize).unwrap();
            assert_eq!(read, content(sector, LEN as usize));
        }
        assert_eq!(stats(&setup.control())["stats"]["write"]["errors"], 0);
    }
}
