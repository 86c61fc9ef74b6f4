//! Does the steps, knows what is to come of each, and compares.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;
use tempfile::TempDir;
use testkit::driver::HANG;
use testkit::qemu_img;
use testkit::server::{Server, gone};

use super::super::driver::Order;
use super::super::program;
use super::Counts;
use super::disk::{Disk, Entry, MIB, Origin, SIZE_MAX, format};
use super::steps::{Bad, DISKS, Edit, ON_SMALL, Step};

/// Bytes of the file system that can be filled.
const SMALL: &str = "size=48m";

pub struct World {
    dir: TempDir,
    /// A file system of its own, if it can be mounted here.
    small: Option<PathBuf>,
    arguments: Vec<String>,
    disks: Vec<Disk>,
    first: Server,
    pid: u32,
    /// Names that were given so far.
    names: u32,
    /// Commands may fail, and change nothing then.
    may_fail: bool,
    counts: Counts,
}

impl Drop for World {
    fn drop(&mut self) {
        // One that took over is not a child.
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
        // Not in /tmp, which may be a tmpfs: O_DIRECT and holes are to be those of a real file system.
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
                world.disks[disk].driver.order(Order::Work);
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

    /// A name for a file that there has not been, beside that of a disk.
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

    /// Runs `ringdisk ARGUMENTS`: whether it worked, which it must where nothing stands in its way.
    fn works(&self, arguments: &[&str]) -> bool {
        let output = self.run(arguments);
        let worked = output.status.success();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(worked || self.may_fail, "ringdisk {arguments:?}: {said}");
        worked
    }

    fn list(&self) -> Vec<Value> {
        let output = self.run(&["list", "--json"]);
        assert!(output.status.success(), "list: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Compares what is listed with what is to be there.
    pub fn check(&self) {
        let listed = self.list();
        let names: Vec<_> = listed.iter().map(|disk| disk["name"].as_str()).collect();
        let expected = self.disks.iter().filter(|disk| disk.attached);
        let expected: Vec<_> = expected.collect();
        let served: Vec<_> = expected.iter().map(|d| Some(d.name.as_str())).collect();
        assert_eq!(names, served, "disks that are listed");
        for (disk, listed) in expected.iter().zip(&listed) {
            let name = &disk.name;
            let is = |key: &str, value: Value| {
                assert_eq!(listed[key], value, "{key} of {name}, as it is listed");
            };
            is("file", disk.file().to_str().unwrap().into());
            is("format", format(disk.qcow2).into());
            is("size", disk.size.into());
            is("socket", disk.socket.to_str().unwrap().into());
            is("throttle-group", disk.group.then_some("group").into());
            is("connected", disk.working.into());
            let iops = listed["limits"]["iops"].as_u64().unwrap_or(0);
            assert_eq!(
                iops,
                u64::from(disk.iops),
                "limit of {name}, as it is listed"
            );
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

    fn throttle(&mut self, disk: usize, iops: u32, group: bool) {
        let its = &self.disks[disk];
        if !its.attached {
            return;
        }
        let limit = format!("iops={iops}");
        let mut arguments = vec!["throttle", &its.name];
        arguments.extend((iops > 0).then_some(limit.as_str()));
        arguments.extend(group.then_some("group=group"));
        if self.works(&arguments) {
            let its = &mut self.disks[disk];
            (its.iops, its.group) = (iops, group);
            self.count("limits");
        }
    }

    fn resize(&mut self, disk: usize, mib: u64) {
        let its = &self.disks[disk];
        let size = its.size + mib * MIB;
        if !its.attached || size > SIZE_MAX {
            return;
        }
        if self.works(&["resize", &its.name, &size.to_string()]) {
            self.disks[disk].size = size;
            self.count("resizes");
        } else if let Some(size) = self.listed(disk, "size").as_u64() {
            // The file may have become longer before something else failed.
            self.disks[disk].size = size;
        }
    }

    fn listed(&self, disk: usize, key: &str) -> Value {
        let name = &self.disks[disk].name;
        let list = self.list();
        let found = list.iter().find(|disk| disk["name"] == name.as_str());
        found.map_or(Value::Null, |disk| disk[key].clone())
    }

    /// Has a VM whose connection is gone connect again.
    fn reconnect(&mut self, disk: usize) {
        let its = &mut self.disks[disk];
        if its.attached && its.working {
            its.driver.order(Order::Reconnect);
            self.count("reconnections");
        }
    }

    /// Its VM ends.
    fn rest(&mut self, disk: usize) {
        if !self.disks[disk].working {
            return;
        }
        for order in [Order::Pause, Order::GoOn, Order::Rest] {
            self.disks[disk].driver.order(order);
        }
        self.disks[disk].working = false;
        let start = Instant::now();
        while self.listed(disk, "connected") == true {
            assert!(start.elapsed() < HANG, "a connection does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn detach(&mut self, disk: usize, force: bool) {
        if !self.disks[disk].attached {
            return;
        }
        if !force {
            self.rest(disk);
        }
        let name = self.disks[disk].name.clone();
        let arguments = ["detach", &name, "--force"];
        let worked = self.works(&arguments[..if force { 3 } else { 2 }]);
        if !worked && self.listed(disk, "name") == name.as_str() {
            return self.reconnect(disk);
        }
        let its = &mut self.disks[disk];
        its.attached = false;
        (its.iops, its.group) = (0, false);
        self.count("detached");
        if !self.disks[disk].working && worked {
            self.verify(disk);
        }
    }

    fn attach(&mut self, disk: usize) {
        if self.disks[disk].attached {
            return;
        }
        let argument = self.disks[disk].argument();
        if !self.works(&["attach", &argument]) {
            return;
        }
        self.disks[disk].attached = true;
        self.count("attached");
        self.connect_after(disk);
    }

    /// Its VM goes on, or one starts.
    fn connect_after(&mut self, disk: usize) {
        self.without_limits();
        let its = &mut self.disks[disk];
        match its.working {
            true => its.driver.order(Order::Reconnect),
            false => its.driver.order(Order::Work),
        }
        its.working = true;
        if !self.may_fail {
            self.must_work(disk);
        }
    }

    /// Its requests must succeed from now on, or if it is cut off, once it is back.
    fn must_work(&mut self, disk: usize) {
        let its = &mut self.disks[disk];
        if its.may_fail && (its.attached || !its.working) {
            its.driver.order(Order::MayFail(false));
            its.may_fail = false;
        }
    }

    /// What QEMU finds in a file that nobody serves.
    fn verify(&mut self, disk: usize) {
        let at = self.dir.path();
        let its = &mut self.disks[disk];
        let file = its.file().display().to_string();
        if its.qcow2 {
            qemu_img::check(at, &file, its.killed);
            if std::mem::take(&mut its.killed) {
                qemu_img::img(at, &format!("check -q -f qcow2 -r leaks {file}"));
            }
        }
        let raw = at.join("converted.raw");
        let format = format(its.qcow2);
        qemu_img::img(
            at,
            &format!("convert -f {format} -O raw {file} converted.raw"),
        );
        its.driver.order(Order::Verify(raw.clone()));
        fs::remove_file(raw).unwrap();
        self.count("files compared");
    }

    /// A copy of what a disk holds, whose VM is paused if it runs.
    fn copy(&mut self, disk: usize, qcow2: bool) -> PathBuf {
        let new = self.new_name(disk, format(qcow2));
        self.copy_to(disk, qcow2, &new);
        new
    }

    fn copy_to(&self, disk: usize, qcow2: bool, new: &Path) {
        let its = &self.disks[disk];
        let (from, to) = (format(its.qcow2), format(qcow2));
        let (file, new) = (its.file().display(), new.display());
        // Of a disk that is served: all of it was flushed.
        let convert = format!("convert -U -f {from} -O {to} {file} {new}");
        qemu_img::img(self.dir.path(), &convert);
    }

    fn pause(&mut self, disk: usize) {
        if self.disks[disk].working {
            self.disks[disk].driver.order(Order::Pause);
        }
    }

    fn go_on(&mut self, disk: usize) {
        if self.disks[disk].working {
            self.disks[disk].driver.order(Order::GoOn);
        }
    }

    fn replace(&mut self, disk: usize, qcow2: bool) {
        // With a limit on the size of files, not all of it may be in the file.
        if !self.disks[disk].attached || self.file_size_limited() {
            return;
        }
        self.pause(disk);
        let new = self.copy(disk, qcow2);
        let name = self.disks[disk].name.clone();
        if self.works(&["replace", &name, new.to_str().unwrap()]) {
            self.is_on(disk, vec![new], qcow2);
            self.count("replaced");
        } else {
            fs::remove_file(new).unwrap();
        }
        self.go_on(disk);
    }

    /// It is on other files; those before are nobody's.
    fn is_on(&mut self, disk: usize, files: Vec<PathBuf>, qcow2: bool) {
        let its = &mut self.disks[disk];
        for old in its.files.iter().filter(|old| !files.contains(old)) {
            let _ = fs::remove_file(old);
        }
        (its.files, its.qcow2) = (files, qcow2);
    }

    fn snapshot(&mut self, disk: usize) {
        let its = &self.disks[disk];
        if !its.attached || its.files.len() > 3 {
            return;
        }
        let below = its.file().display().to_string();
        let of = format(its.qcow2);
        let new = self.new_name(disk, "qcow2");
        let create = format!("create -q -f qcow2 -b {below} -F {of} {}", new.display());
        qemu_img::img(self.dir.path(), &create);
        let its = &self.disks[disk];
        if self.works(&["replace", &its.name, new.to_str().unwrap()]) {
            let its = &mut self.disks[disk];
            its.files.push(new);
            its.qcow2 = true;
            self.count("snapshots");
        } else {
            fs::remove_file(new).unwrap();
        }
    }

    /// Gives the file of a disk another name, or one more, before ringdisk is told; `decoy` puts an older copy at the old
    /// one afterwards.
    fn rename(&mut self, disk: usize, decoy: bool, link: bool) {
        if !self.disks[disk].attached {
            return;
        }
        let qcow2 = self.disks[disk].qcow2;
        let (old, new) = (
            self.disks[disk].file().to_owned(),
            self.new_name(disk, format(qcow2)),
        );
        match link {
            true => fs::hard_link(&old, &new).unwrap(),
            false => fs::rename(&old, &new).unwrap(),
        }
        let name = self.disks[disk].name.clone();
        if !self.works(&["replace", &name, new.to_str().unwrap()]) {
            return fs::rename(&new, &old).unwrap();
        }
        let its = &mut self.disks[disk];
        *its.files.last_mut().unwrap() = new.clone();
        if link {
            fs::remove_file(&old).unwrap();
        }
        self.count("renamed");
        if decoy {
            fs::copy(&new, &old).unwrap();
        }
    }

    fn reload(&mut self, edits: &[(usize, Edit)]) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let mut paused = Vec::new();
        for &(disk, ref edit) in edits {
            self.edit(disk, edit, &mut entries, &mut paused);
        }
        write_config(self.dir.path(), &self.disks, &entries, "");
        self.works(&["reload"]);
        self.count("reloads");
        for disk in self.put_into_force(entries) {
            self.connect_after(disk);
        }
        for disk in paused {
            self.go_on(disk);
        }
    }

    /// What the configuration says else by the next start wins over what was changed before.
    fn kill_and_edit(&mut self, edits: &[(usize, Edit)]) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let mut paused = Vec::new();
        for &(disk, ref edit) in edits {
            self.edit(disk, edit, &mut entries, &mut paused);
        }
        write_config(self.dir.path(), &self.disks, &entries, "");
        self.start_again(Signal::KILL);
        let new = self.put_into_force(entries);
        self.connect_all(&new);
        for disk in paused {
            self.go_on(disk);
        }
        self.count("kills with another configuration");
    }

    fn edit(
        &mut self,
        disk: usize,
        edit: &Edit,
        entries: &mut [Option<Entry>],
        paused: &mut Vec<usize>,
    ) {
        let its = &self.disks[disk];
        let (attached, qcow2) = (its.attached, its.qcow2);
        if let (Edit::Add, None) = (edit, &entries[disk]) {
            // Not one that is there, nor one of the command line.
            if attached || its.origin == Origin::CommandLine || its.entry.is_some() {
                return;
            }
            entries[disk] = Some(Entry {
                file: its.file().to_owned(),
                qcow2,
                iops: 0,
                group: false,
                serial: 0,
                socket: its.socket.clone(),
            });
            return;
        }
        // What was detached by command stays so until it is attached by command.
        if entries[disk].is_none() || !attached && !matches!(edit, Edit::Remove) {
            return;
        }
        let file = entries[disk].as_ref().expect("it is some").file.clone();
        // Once only: what is there now is what the next process finds.
        let is_its_file = its.entry.as_ref().is_some_and(|entry| entry.file == file);
        let file = match edit {
            Edit::File if is_its_file => {
                self.pause(disk);
                paused.push(disk);
                Some(self.copy(disk, qcow2))
            }
            Edit::Rename if is_its_file => {
                let old = self.disks[disk].file().to_owned();
                let new = self.new_name(disk, format(qcow2));
                fs::rename(old, &new).unwrap();
                Some(new)
            }
            _ => None,
        };
        let new_socket = matches!(edit, Edit::Socket).then(|| self.new_name(disk, "sock"));
        if let &Edit::SwapSockets(other) = edit {
            if self.disks[other].attached
                && let Ok([Some(a), Some(b)]) = entries.get_disjoint_mut([disk, other])
            {
                std::mem::swap(&mut a.socket, &mut b.socket);
            }
            return;
        }
        let Some(entry) = &mut entries[disk] else {
            return;
        };
        if let Some(file) = file {
            (entry.file, entry.qcow2) = (file, qcow2);
        }
        if let Some(socket) = new_socket {
            entry.socket = socket;
        }
        match *edit {
            Edit::Limit(iops) => entry.iops = iops,
            Edit::Group(group) => entry.group = group,
            Edit::Serial(serial) => entry.serial = serial,
            Edit::Remove => {
                let removed = entries[disk].take().expect("it is there");
                // Earlier edits of the same reload may have renamed its file, or given its socket to another disk.
                let removed_disk = &mut self.disks[disk];
                let file = removed_disk.files.last_mut().expect("it is on one");
                if !file.exists() {
                    *file = removed.file;
                }
                removed_disk.socket.clone_from(&removed.socket);
                removed_disk.driver.order(Order::Move(removed.socket));
            }
            _ => {}
        }
    }

    /// What a reload has done. Returns the disks that were cut off, or are new.
    fn put_into_force(&mut self, entries: Vec<Option<Entry>>) -> Vec<usize> {
        let mut connect = Vec::new();
        for (disk, new) in entries.into_iter().enumerate() {
            let its = &mut self.disks[disk];
            let old = std::mem::replace(&mut its.entry, new.clone());
            if old == new {
                continue;
            }
            let Some(new) = new else {
                (its.attached, its.iops, its.group) = (false, 0, false);
                its.origin = Origin::Command;
                self.count("removed by reload");
                continue;
            };
            // What a command has said of limits goes on until something else is written of them.
            let limits = |entry: &Entry| (entry.iops, entry.group);
            if old.as_ref().map(limits) != Some(limits(&new)) {
                (its.iops, its.group) = limits(&new);
            }
            let Some(old) = old else {
                its.attached = true;
                its.origin = Origin::Config;
                connect.push(disk);
                self.count("added by reload");
                continue;
            };
            if old.is_cut_by(&new) {
                its.socket = new.socket.clone();
                its.driver.order(Order::Move(new.socket.clone()));
                connect.push(disk);
            }
            if !old.has_file_of(&new) {
                let mut files = its.files.clone();
                let qcow2 = new.qcow2;
                match new.file.exists() && !its.file().exists() {
                    // It was renamed, with what is below.
                    true => *files.last_mut().unwrap() = new.file,
                    false => files = vec![new.file],
                }
                self.is_on(disk, files, qcow2);
                self.count("moved by reload");
            }
        }
        connect
    }

    fn bad_reload(&mut self, disk: usize, bad: &Bad) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let not_a_socket = self.path("not-a-socket");
        fs::write(&not_a_socket, "").unwrap();
        let at = self.dir.path().display();
        let its_socket = self.disks[disk].socket.display();
        let new = |file: &str, more: &str| {
            format!("[[disk]]\nname = \"bad\"\nfile = \"{file}\"\n{more}\n")
        };
        // Everybody else is to have another limit, which must not come into force.
        for entry in entries.iter_mut().flatten() {
            entry.iops = 77;
        }
        let more = match (bad, &mut entries[disk]) {
            (Bad::Key, _) => "[[disk]]\nfiel = \"x\"\n".to_owned(),
            (Bad::MissingFile, _) => new(&format!("{at}/missing.raw"), ""),
            (Bad::SameSocket, _) => new("null:1M", &format!("socket = \"{its_socket}\"")),
            (Bad::NoSocket, Some(entry)) => {
                entry.socket = not_a_socket.clone();
                String::new()
            }
            (Bad::NoSocket, None) => return,
            (Bad::NoGroup, _) => new("null:1M", "throttle-group = \"none\""),
        };
        if matches!(bad, Bad::SameSocket | Bad::NoSocket) && !self.disks[disk].attached {
            return;
        }
        write_config(self.dir.path(), &self.disks, &entries, &more);
        let output = self.run(&["reload"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{bad:?} was put into force");
        assert!(said.contains("nothing has been changed"), "{said}");
        self.count("reloads that were refused");
        self.check();
        let entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        write_config(self.dir.path(), &self.disks, &entries, "");
        assert!(self.works(&["reload"]));
    }

    fn remove_sockets(&mut self, disk: usize) {
        let its = &self.disks[disk];
        if !its.attached {
            return;
        }
        let mut sockets = vec![its.socket.clone()];
        sockets.extend(["control.qmp", "control.qmp.upgrade"].map(|name| self.path(name)));
        for socket in &sockets {
            fs::remove_file(socket).unwrap();
        }
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::HUP).unwrap();
        let start = Instant::now();
        while !sockets.iter().all(|socket| socket.exists()) {
            assert!(start.elapsed() < HANG, "a socket does not come back");
            thread::sleep(Duration::from_millis(5));
        }
        self.count("sockets removed");
        self.reconnect(disk);
    }

    fn upgrade(&mut self) {
        let output = self.run(&["upgrade", "--json"]);
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(self.may_fail, "ringdisk upgrade: {said}");
            return;
        }
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
        let old = self.pid;
        self.pid = reply["pid"].as_u64().unwrap() as u32;
        assert_ne!(self.pid, old);
        gone(old);
        self.count("upgrades");
    }

    /// The next process would not find the file of a disk.
    fn upgrade_without(&mut self, disk: usize) {
        if !self.disks[disk].attached {
            return;
        }
        let file = self.disks[disk].file().to_owned();
        let aside = file.with_file_name("aside");
        fs::rename(&file, &aside).unwrap();
        let before = self.may_fail;
        self.may_fail = true;
        self.upgrade();
        self.may_fail = before;
        self.check();
        fs::rename(&aside, &file).unwrap();
        self.count("upgrades without a file");
    }

    /// Ends the process in this way, and starts it with the same arguments. All is as it was.
    fn restart(&mut self, signal: Signal) {
        self.start_again(signal);
        self.connect_all(&[]);
        self.count(if signal == Signal::KILL {
            "kills"
        } else {
            "stops"
        });
    }

    /// All VMs connect again, and those of new disks start.
    fn connect_all(&mut self, new: &[usize]) {
        for disk in 0..DISKS {
            let its = &self.disks[disk];
            if its.attached && (its.working || new.contains(&disk)) {
                self.connect_after(disk);
            }
        }
    }

    fn start_again(&mut self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), signal).unwrap();
        gone(self.pid);
        // Without space, an image may not be opened: what was acknowledged is in its journal, and takes some.
        self.free();
        self.first = serve(self.dir.path(), &self.arguments);
        self.pid = self.first.pid();
        let killed = signal == Signal::KILL;
        self.disks.iter_mut().for_each(|disk| disk.killed |= killed);
    }

    /// Takes all the space that a disk could have, for a while.
    fn full(&mut self, disk: usize, then: &Step) {
        let Some(small) = &self.small else {
            return;
        };
        let on_small = |disk: &Disk| disk.attached && disk.file().starts_with(small);
        if !on_small(&self.disks[disk]) {
            return;
        }
        let ballast = small.join("ballast");
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&ballast)
            .unwrap();
        let block = [0; 64 << 10];
        while file.write_all(&block).is_ok() {}
        drop(file);
        thread::sleep(Duration::from_millis(50));
        self.check();
        let others = ON_SMALL.iter().all(|&other| then.disk() != Some(other));
        if others {
            // What waits for space may keep a disk from being handed over.
            self.may_fail = matches!(then, Step::Upgrade);
            self.step(then);
            self.may_fail = false;
        }
        self.free();
        for disk in ON_SMALL {
            if self.disks[disk].attached && self.disks[disk].working {
                self.disks[disk].driver.order(Order::Progress);
            }
        }
        self.count("full");
    }

    /// Gives back the space that was taken.
    fn free(&self) {
        if let Some(small) = &self.small {
            let _ = fs::remove_file(small.join("ballast"));
        }
    }

    fn file_size(&mut self, mib: u64, then: &Step) {
        for disk in &mut self.disks {
            disk.driver.order(Order::MayFail(true));
            disk.may_fail = true;
        }
        self.limit(Resource::Fsize, Some(mib * MIB));
        thread::sleep(Duration::from_millis(50));
        self.may_fail = true;
        self.step(then);
        self.without_limits();
        self.may_fail = false;
        for disk in 0..DISKS {
            self.must_work(disk);
        }
        self.count("limits on the size of files");
    }

    fn descriptors(&mut self, more: u64, then: &Step) {
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid))
            .unwrap()
            .count();
        // One for the command.
        self.limit(Resource::Nofile, Some(open as u64 + more));
        self.may_fail = true;
        self.step(then);
        self.without_limits();
        self.may_fail = false;
        self.count("limits on descriptors");
    }

    fn limit(&self, resource: Resource, current: Option<u64>) {
        let Rlimit {
            current: before,
            maximum,
        } = getrlimit(resource);
        let current = current.or(match resource {
            Resource::Nofile => maximum,
            _ => before,
        });
        let pid = Pid::from_raw(self.pid as i32);
        prlimit(pid, resource, Rlimit { current, maximum }).unwrap();
    }

    fn without_limits(&self) {
        if self.may_fail {
            self.limit(Resource::Fsize, None);
            self.limit(Resource::Nofile, None);
        }
    }

    fn file_size_limited(&self) -> bool {
        let pid = Pid::from_raw(self.pid as i32);
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.pid)).unwrap();
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max file size"));
        pid.is_some() && line.is_some_and(|line| !line.contains("unlimited"))
    }

    /// Ends all of it, and looks at every byte.
    pub fn end(mut self) -> Counts {
        for disk in 0..DISKS {
            // What was cut off goes on first.
            self.attach(disk);
            self.rest(disk);
        }
        self.check();
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::TERM).unwrap();
        gone(self.pid);
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

fn write_config(at: &Path, disks: &[Disk], entries: &[Option<Entry>], more: &str) {
    let mut text = "[[throttle-group]]\nname = \"group\"\niops = 100000\n".to_owned();
    for (disk, entry) in disks.iter().zip(entries) {
        text.extend(entry.as_ref().map(|entry| disk.section(entry)));
    }
    fs::write(at.join("config.toml"), text + more).unwrap();
}

/// Starts a ringdisk whose journals and other files of its own are in this directory. The kernel may still be at the
/// writes of one that was killed, and keeps files locked as long.
fn serve(at: &Path, arguments: &[String]) -> Server {
    let start = Instant::now();
    loop {
        let mut command = Command::new(program());
        command.args(["serve", "--json"]).args(arguments);
        command.env("RUNTIME_DIRECTORY", at);
        match Server::ringdisk_command(command) {
            Ok(server) => return server,
            Err(e) => {
                let busy = e.to_string().contains("in use") && start.elapsed() < HANG;
                assert!(busy, "{e}");
            }
        }
    }
}
