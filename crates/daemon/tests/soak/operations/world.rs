//! Runs the steps, predicts the result of each, and compares.

mod commands;
mod process;
mod reload;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use testkit::qemu_img;
use testkit::server::{Server, wait_for_exit};

use super::Counts;
use super::disk::{Disk, Origin, format};
use super::steps::{DISKS, ON_SMALL, Step};
use crate::soak::driver::Order;
use crate::soak::program;
use process::serve;
use reload::write_config;

/// Size of the file system that can be filled.
const SMALL: &str = "size=48m";

pub struct World {
    dir: TempDir,
    /// A file system that can be filled, if it can be mounted here.
    small: Option<PathBuf>,
    arguments: Vec<String>,
    disks: Vec<Disk>,
    first: Server,
    pid: u32,
    /// The number of file names given so far.
    names: u32,
    /// Commands may fail, and then change nothing.
    may_fail: bool,
    counts: Counts,
}

impl Drop for World {
    fn drop(&mut self) {
        // A process that took over is not a child.
        if let Some(pid) = Pid::from_raw(self.pid as i32) {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Some(small) = &self.small {
            let _ = Command::new("umount").arg("-l").arg(small).output();
        }
    }
}

impl World {
    pub fn start() -> Self {
        // Not in /tmp, which may be a tmpfs: the test needs O_DIRECT and holes of a real file system.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = dir.path();
        let small = at.join("small");
        fs::create_dir(&small).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", SMALL, "ringdisk-test"])
            .arg(&small)
            .output();
        let is_mounted = mounted.is_ok_and(|mounted| mounted.status.success());
        let make = |number| {
            let on_small = ON_SMALL.contains(&number);
            Disk::make(if on_small { &small } else { at }, at, number)
        };
        let disks: Vec<_> = (0..DISKS).map(make).collect();
        let path = |name: &str| at.join(name).display().to_string();
        let mut arguments = vec![
            "--iothreads=2".to_owned(),
            format!("--control={}", path("control.qmp")),
            format!("--config={}", path("config.toml")),
            format!("--state={}", path("state")),
            format!("--allow-dir={}", small.display()),
        ];
        let named = disks.iter().filter(|d| d.origin == Origin::CommandLine);
        arguments.extend(named.map(Disk::argument));
        let entries: Vec<_> = disks.iter().map(|disk| disk.entry.clone()).collect();
        write_config(at, &disks, &entries, "");
        let first = serve(at, &arguments);
        let mut world = Self {
            pid: first.pid(),
            small: is_mounted.then_some(small),
            dir,
            arguments,
            disks,
            first,
            names: 0,
            may_fail: false,
            counts: Counts::new(),
        };
        for disk in 0..DISKS {
            world.attach(disk);
            if !world.disks[disk].working {
                world.disks[disk].driver.order(Order::Connect);
                world.disks[disk].working = true;
            }
        }
        world.check();
        world
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new file name, in the directory of the disk's file.
    fn new_name(&mut self, disk: usize, ending: &str) -> PathBuf {
        self.names += 1;
        let name = format!("d{disk}-{}.{ending}", self.names);
        self.disks[disk].file().with_file_name(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.args(arguments);
        let output = command
            .arg("--control")
            .arg(self.path("control.qmp"))
            .output();
        output.unwrap()
    }

    /// Runs `ringdisk ARGUMENTS`; returns whether it did what it was to do. It must unless commands may fail.
    fn succeeds(&self, arguments: &[&str]) -> bool {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        // Without a descriptor, the change applies and cannot be saved.
        let is_unsaved = said.contains("it is done, but a restart");
        let worked = output.status.success() || self.may_fail && is_unsaved;
        assert!(worked || self.may_fail, "ringdisk {arguments:?}: {said}");
        worked
    }

    fn list(&self) -> Vec<Value> {
        let output = self.run(&["list", "--json"]);
        assert!(output.status.success(), "list: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Compares what is listed with what is expected.
    pub fn check(&self) {
        let listed = self.list();
        let names: Vec<_> = listed.iter().map(|disk| disk["name"].as_str()).collect();
        let expected = self.disks.iter().filter(|disk| disk.attached);
        let expected: Vec<_> = expected.collect();
        let served: Vec<_> = expected.iter().map(|d| Some(d.name.as_str())).collect();
        assert_eq!(names, served, "names in the list");
        for (disk, listed) in expected.iter().zip(&listed) {
            let name = &disk.name;
            let is = |key: &str, value: Value| {
                assert_eq!(listed[key], value, "{key} of {name} in the list");
            };
            is("file", disk.file().to_str().unwrap().into());
            is("format", format(disk.qcow2).into());
            is("size", disk.size.into());
            is("socket", disk.socket.to_str().unwrap().into());
            is("throttle-group", disk.group.then_some("group").into());
            is("connected", disk.working.into());
            let iops = listed["limits"]["iops"].as_u64().unwrap_or(0);
            assert_eq!(iops, u64::from(disk.iops), "limit of {name} in the list");
        }
    }

    pub fn step(&mut self, step: &Step) {
        match step {
            &Step::Throttle { disk, iops, group } => self.throttle(disk, iops, group),
            &Step::Resize { disk, mib } => self.resize(disk, mib),
            &Step::Reconnect { disk } => self.reconnect(disk),
            &Step::Detach { disk, force } => self.detach(disk, force),
            &Step::Attach { disk } => self.attach(disk),
            &Step::Replace { disk, qcow2 } => self.replace(disk, qcow2),
            &Step::Snapshot { disk } => self.snapshot(disk),
            &Step::Rename { disk, decoy } => self.rename(disk, decoy, false),
            &Step::Link { disk, decoy } => self.rename(disk, decoy, true),
            Step::Reload { edits } => self.reload(edits),
            Step::KillAndEdit { edits } => self.kill_and_edit(edits),
            Step::BadReload { disk, bad } => self.bad_reload(*disk, bad),
            &Step::RemoveSockets { disk } => self.remove_sockets(disk),
            Step::Upgrade => self.upgrade(),
            &Step::UpgradeWithout { disk } => self.upgrade_without(disk),
            Step::Kill => self.restart(Signal::KILL),
            Step::Stop => self.restart(Signal::TERM),
            Step::Full { disk, then } => self.full(*disk, then),
            Step::FileSize { mib, then } => self.file_size(*mib, then),
            Step::Descriptors { more, then } => self.descriptors(*more, then),
        }
    }

    fn listed(&self, disk: usize, key: &str) -> Value {
        let name = &self.disks[disk].name;
        let list = self.list();
        let found = list.iter().find(|disk| disk["name"] == name.as_str());
        found.map_or(Value::Null, |disk| disk[key].clone())
    }

    fn copy_to(&self, disk: usize, qcow2: bool, new: &Path) {
        let its = &self.disks[disk];
        let (from, to) = (format(its.qcow2), format(qcow2));
        let (file, new) = (its.file().display(), new.display());
        // The disk is served, but everything is flushed.
        let convert = format!("convert -U -f {from} -O {to} {file} {new}");
        qemu_img::img(self.dir.path(), &convert);
    }

    /// Shuts down and compares every byte.
    pub fn end(mut self) -> Counts {
        for disk in 0..DISKS {
            // A disconnected disk is attached again first.
            self.attach(disk);
            self.stop_vm(disk);
        }
        self.check();
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::TERM).unwrap();
        wait_for_exit(self.pid);
        for disk in 0..DISKS {
            self.verify(disk);
        }
        let log = self.first.log();
        assert!(!log.contains("panicked"), "{log}");
        let mut counts = std::mem::take(&mut self.counts);
        let disks = std::mem::take(&mut self.disks).into_iter();
        let requests = disks.map(|disk| disk.driver.end()).sum();
        counts.insert("requests", requests);
        counts
    }
}

impl Step {
    fn disk(&self) -> Option<usize> {
        match *self {
            Self::Throttle { disk, .. }
            | Self::Resize { disk, .. }
            | Self::Reconnect { disk }
            | Self::Detach { disk, .. }
            | Self::Attach { disk }
            | Self::Replace { disk, .. }
            | Self::Snapshot { disk }
            | Self::Rename { disk, .. }
            | Self::Link { disk, .. } => Some(disk),
            _ => None,
        }
    }
}
