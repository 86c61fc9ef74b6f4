//! Servers of one or many disks, with or without a limit, and what they use without I/O.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use harness::qmp::Qmp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::bench::backing::{NULL_BYTES, Prepared};
use crate::bench::plan::Server;
use crate::bench::server::{self, CLIENT_CPU, Programs, SERVER_CPU, doubled_commas};
use crate::bench::setting::Cache;
use lab::client::{Job, Sample};
use lab::process;

/// Longest time until a server must be ready.
const START_MAX: Duration = Duration::from_secs(180);

/// A disk that a server is given.
#[derive(Clone, Debug)]
pub enum Disk {
    Null,
    File(PathBuf),
    Device(PathBuf),
}

impl Disk {
    pub fn of(backing: &Prepared) -> Disk {
        match backing {
            Prepared::Null => Disk::Null,
            Prepared::Cache(path) | Prepared::Disk(path) => Disk::File(path.clone()),
            Prepared::Zram(zram) => Disk::Device(zram.device().to_owned()),
        }
    }
}

/// What a server is asked to serve, each disk with one queue.
pub struct Serving<'a> {
    pub disks: &'a [Disk],
    pub cache: Cache,
    pub iothreads: usize,
    /// Requests per second of each disk.
    pub iops: Option<u32>,
}

/// A server that is ready; stopped when dropped.
pub struct Running {
    child: Child,
    pub sockets: Vec<PathBuf>,
    /// ringdisk's control socket.
    control: Option<PathBuf>,
    log: PathBuf,
    /// From the start of the process.
    pub ready_s: f64,
}

/// How ringdisk's I/O threads waited, since they were started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Polling {
    pub polls: u64,
    pub polls_hit: u64,
    pub polled_ns: u64,
    pub sleeps: u64,
    /// CPU time of the threads, polling included.
    pub cpu_ns: u64,
}

/// What a process holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Footprint {
    /// Memory that no other process shares.
    pub private_kib: f64,
    /// Memory, of what is shared the process's part.
    pub pss_kib: f64,
    /// Open descriptors by kind.
    pub descriptors: BTreeMap<String, usize>,
}

impl Serving<'_> {
    /// Starts `server` on its core and waits until it is ready.
    pub fn start(
        &self,
        server: Server,
        programs: &Programs,
        dir: &Path,
    ) -> anyhow::Result<Running> {
        let sockets: Vec<PathBuf> = (0..self.disks.len())
            .map(|i| dir.join(format!("open-{i}.sock")))
            .collect();
        for socket in &sockets {
            let _ = fs::remove_file(socket);
        }
        let (log, ready) = (dir.join("open.log"), dir.join("open.ready"));
        let control = dir.join("open.qmp");
        let _ = fs::remove_file(&ready);
        let mut command = match server {
            Server::Qsd => self.qsd("io_uring", &sockets, &ready),
            Server::QsdNative => self.qsd("native", &sockets, &ready),
            Server::Ringdisk | Server::RingdiskFixed | Server::RingdiskNoPolling => {
                self.ringdisk(server, &programs.ringdisk, programs, &sockets, &control)
            }
            Server::Baseline => {
                let binary = programs.baseline.as_deref();
                let binary = binary.context("no --baseline was given")?;
                self.ringdisk(server, binary, programs, &sockets, &control)
            }
            Server::Host => bail!("the host is no server"),
        };
        let is_ours = command.get_program() != "qemu-storage-daemon";
        command.stdin(Stdio::null()).stderr(File::create(&log)?);
        // ringdisk prints a line when it is ready, qemu-storage-daemon writes a file.
        match is_ours {
            true => command.stdout(File::create(&ready)?),
            false => command.stdout(Stdio::null()),
        };
        let begun = Instant::now();
        let child = process::born_on(SERVER_CPU, || command.spawn())?
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        let mut running = Running {
            child,
            sockets,
            control: is_ours.then_some(control),
            log,
            ready_s: 0.0,
        };
        while fs::metadata(&ready).map_or(0, |it| it.len()) == 0 {
            if let Some(status) = running.child.try_wait()? {
                bail!("{server} ended, {status}: {}", running.last_line());
            }
            if begun.elapsed() > START_MAX {
                bail!(
                    "{server} was not ready after {START_MAX:?}: {}",
                    running.last_line()
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        running.ready_s = begun.elapsed().as_secs_f64();
        Ok(running)
    }

    fn ringdisk(
        &self,
        server: Server,
        binary: &Path,
        programs: &Programs,
        sockets: &[PathBuf],
        control: &Path,
    ) -> Command {
        let mut command = Command::new(binary);
        command.args(["serve", "--json"]);
        command.arg(format!("--iothreads={}", self.iothreads));
        command.arg("--control").arg(control);
        command.args(&programs.ringdisk_args);
        if server == Server::RingdiskNoPolling {
            command.arg("--poll-max-us=0");
        }
        let mut more = format!(",cache={},queues=1,queue-size=1024", self.cache);
        if let Some(iops) = self.iops {
            more += &format!(",iops={iops}");
        }
        if server == Server::RingdiskFixed {
            more += ",fixed-buffers=on";
        }
        for (i, (disk, socket)) in self.disks.iter().zip(sockets).enumerate() {
            let file = match disk {
                Disk::Null => format!("null:{}G", NULL_BYTES >> 30),
                Disk::File(path) | Disk::Device(path) => {
                    format!("{},format=raw", doubled_commas(path))
                }
            };
            let socket = doubled_commas(socket);
            command.arg(format!("file={file},name=open-{i},socket={socket}{more}"));
        }
        command
    }

    fn qsd(&self, aio: &str, sockets: &[PathBuf], ready: &Path) -> Command {
        let on_off = |on| if on { "on" } else { "off" };
        let (direct, through) = (on_off(self.cache.direct()), on_off(self.cache.through()));
        let mut command = Command::new("qemu-storage-daemon");
        for thread in 0..self.iothreads {
            command
                .arg("--object")
                .arg(format!("iothread,id=t{thread}"));
        }
        for (i, (disk, socket)) in self.disks.iter().zip(sockets).enumerate() {
            let (driver, path) = match disk {
                Disk::Null => ("null-co", None),
                Disk::File(path) => ("file", Some(path)),
                Disk::Device(path) => ("host_device", Some(path)),
            };
            let options = match path {
                None => format!("size={NULL_BYTES}"),
                Some(path) => {
                    let path = doubled_commas(path);
                    format!("filename={path},cache.direct={direct},aio={aio}")
                }
            };
            let node = format!("driver={driver},node-name=f{i},{options}");
            command.arg("--blockdev").arg(node);
            let mut served = format!("f{i}");
            if let Some(iops) = self.iops {
                command
                    .arg("--object")
                    .arg(format!("throttle-group,id=g{i},x-iops-total={iops}"));
                let filter =
                    format!("driver=throttle,node-name=n{i},throttle-group=g{i},file=f{i}");
                command.arg("--blockdev").arg(filter);
                served = format!("n{i}");
            }
            command.arg("--export").arg(format!(
                "vhost-user-blk,id=e{i},node-name={served},addr.type=unix,addr.path={},iothread=t{},num-queues=1,\
                 writable=on,writethrough={through}",
                doubled_commas(socket),
                i % self.iothreads
            ));
        }
        command.arg("--pidfile").arg(ready);
        command
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a client against all disks and waits for its sample.
    pub fn measure(&self, job: &Job, programs: &Programs) -> anyhow::Result<Sample> {
        let job = serde_json::to_string(job)?;
        let mut command = Command::new(&programs.xtask);
        command.args(["bench", "client", &job]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let client = process::born_on(CLIENT_CPU, || command.spawn())?;
        let output = client.context("starting the client")?.wait_with_output()?;
        if !output.status.success() {
            let client = String::from_utf8_lossy(&output.stderr);
            let server = self.last_line();
            bail!("{}; the server's last line: {server:?}", client.trim());
        }
        serde_json::from_slice(&output.stdout).context("reading the client's sample")
    }

    fn last_line(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.trim_end().lines().last().unwrap_or_default().to_owned()
    }

    /// How ringdisk's threads have waited so far; `None` for others, and for one too old to say. To be asked after the
    /// measurement: ringdisk measures latencies from then on.
    pub fn polling(&self) -> Option<Polling> {
        let control = self.control.as_ref()?;
        let mut qmp = Qmp::connect(control).ok()?;
        let answer = qmp.execute("x-ringdisk-stats", json!({})).ok()?;
        let mut sum = Polling::default();
        for thread in answer["iothreads"].as_array()? {
            let count = |key: &str| thread[key].as_u64().unwrap_or(0);
            sum.polls += count("polls");
            sum.polls_hit += count("polls-hit");
            sum.polled_ns += count("polled-ns");
            sum.sleeps += count("sleeps");
            sum.cpu_ns += count("cpu-ns");
        }
        Some(sum)
    }

    /// What the process holds now.
    pub fn footprint(&self) -> anyhow::Result<Footprint> {
        let dir = PathBuf::from(format!("/proc/{}", self.pid()));
        let rollup = fs::read_to_string(dir.join("smaps_rollup"))?;
        let kib = |name: &str| -> f64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
            number.unwrap_or(0.0)
        };
        let mut descriptors = BTreeMap::new();
        for entry in fs::read_dir(dir.join("fd"))?.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            *descriptors.entry(kind_of(&target)).or_insert(0) += 1;
        }
        Ok(Footprint {
            private_kib: kib("Private_Clean:") + kib("Private_Dirty:"),
            pss_kib: kib("Pss:"),
            descriptors,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        server::stop(&mut self.child);
        for socket in self.sockets.iter().chain(&self.control) {
            let _ = fs::remove_file(socket);
        }
    }
}

/// What a descriptor is, by where its link in `/proc` leads.
fn kind_of(target: &Path) -> String {
    let text = target.to_string_lossy();
    match text.strip_prefix("anon_inode:") {
        Some(kind) => kind.trim_matches(['[', ']']).to_owned(),
        None if text.starts_with("socket:") => "socket".into(),
        None if text.starts_with("pipe:") => "pipe".into(),
        None if text.starts_with("/memfd:") => "memfd".into(),
        None => "file".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        let args = command.get_args().map(|arg| arg.to_string_lossy());
        args.map(|arg| arg.into_owned()).collect()
    }

    fn serving(disks: &[Disk]) -> Serving<'_> {
        Serving {
            disks,
            cache: Cache::None,
            iothreads: 2,
            iops: Some(500),
        }
    }

    #[test]
    fn exports_take_turns_on_the_threads_and_each_has_its_limit() {
        let disks = ["/a,b.raw", "/c.raw", "/d.raw"].map(|path| Disk::File(path.into()));
        let sockets = ["/0.sock", "/1.sock", "/2.sock"].map(PathBuf::from);
        let words = words(&serving(&disks).qsd("native", &sockets, Path::new("/ready")));
        let exports: Vec<&String> = words.iter().filter(|it| it.starts_with("vhost")).collect();
        let threads = ["iothread=t0", "iothread=t1", "iothread=t0"];
        for (i, (export, thread)) in exports.iter().zip(threads).enumerate() {
            assert!(export.contains(thread), "{export}");
            assert!(export.contains(&format!("node-name=n{i}")), "{export}");
        }
        assert!(words.iter().any(|it| it.contains("filename=/a,,b.raw,")));
        let groups = words.iter().filter(|it| it.starts_with("throttle-group"));
        assert_eq!(groups.count(), 3);
    }

    #[test]
    fn descriptors_are_counted_by_kind() {
        let kinds = [
            "anon_inode:[eventfd]",
            "socket:[123]",
            "/memfd:mem (deleted)",
            "/var/disk.raw",
        ];
        let kinds = kinds.map(|target| kind_of(Path::new(target)));
        assert_eq!(kinds, ["eventfd", "socket", "memfd", "file"]);
    }
}
