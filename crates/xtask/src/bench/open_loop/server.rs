//! Servers of one or many disks, and what they use without I/O.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::bench::plan::Server;
use crate::bench::server::{self, Programs, SERVER_CPU, doubled_commas};
use harness::cpu;

/// Longest time until a server must be ready.
const START_MAX: Duration = Duration::from_secs(180);

/// What a server is asked to serve: files with O_DIRECT, each with one queue, on one I/O thread.
pub struct Serving<'a> {
    pub disks: &'a [PathBuf],
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
        let child = cpu::start_on(&[SERVER_CPU], || command.spawn())?
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
        command.arg("--iothreads=1");
        command.arg("--control").arg(control);
        command.args(&programs.ringdisk_args);
        if server == Server::RingdiskNoPolling {
            command.arg("--poll-max-us=0");
        }
        let mut more = String::from(",format=raw,cache=none,queues=1,queue-size=1024");
        if server == Server::RingdiskFixed {
            more += ",fixed-buffers=on";
        }
        for (i, (disk, socket)) in self.disks.iter().zip(sockets).enumerate() {
            let (disk, socket) = (doubled_commas(disk), doubled_commas(socket));
            command.arg(format!("file={disk},name=open-{i},socket={socket}{more}"));
        }
        command
    }

    fn qsd(&self, aio: &str, sockets: &[PathBuf], ready: &Path) -> Command {
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--object").arg("iothread,id=t0");
        for (i, (disk, socket)) in self.disks.iter().zip(sockets).enumerate() {
            let (disk, socket) = (doubled_commas(disk), doubled_commas(socket));
            command.arg("--blockdev").arg(format!(
                "driver=file,node-name=f{i},filename={disk},cache.direct=on,aio={aio}"
            ));
            command.arg("--export").arg(format!(
                "vhost-user-blk,id=e{i},node-name=f{i},addr.type=unix,addr.path={socket},iothread=t0,num-queues=1,\
                 writable=on,writethrough=off"
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

    fn last_line(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.trim_end().lines().last().unwrap_or_default().to_owned()
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
