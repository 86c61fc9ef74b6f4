//! Steps that restart or upgrade the process, or limit its resources.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;
use testkit::driver::HANG;
use testkit::server::{Server, wait_for_exit};

use super::World;
use crate::soak::driver::Order;
use crate::soak::operations::disk::{Disk, MIB};
use crate::soak::operations::steps::{DISKS, ON_SMALL, Step};
use crate::soak::program;

impl World {
    pub(super) fn remove_sockets(&mut self, disk: usize) {
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

    pub(super) fn upgrade(&mut self) {
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
        wait_for_exit(old);
        self.count("upgrades");
    }

    /// Upgrades while the file of a disk is missing.
    pub(super) fn upgrade_without(&mut self, disk: usize) {
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

    /// Ends the process with this signal and starts it with the same arguments. Nothing may have changed.
    pub(super) fn restart(&mut self, signal: Signal) {
        self.start_again(signal);
        self.connect_all(&[]);
        self.count(if signal == Signal::KILL {
            "kills"
        } else {
            "stops"
        });
    }

    /// All VMs reconnect, and those of new disks start.
    pub(super) fn connect_all(&mut self, new: &[usize]) {
        for disk in 0..DISKS {
            let its = &self.disks[disk];
            if its.attached && (its.working || new.contains(&disk)) {
                self.connect_after(disk);
            }
        }
    }

    pub(super) fn start_again(&mut self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), signal).unwrap();
        wait_for_exit(self.pid);
        // Without space, an image may not open: replaying its journal needs some.
        self.free();
        self.first = serve(self.dir.path(), &self.arguments);
        self.pid = self.first.pid();
        let killed = signal == Signal::KILL;
        self.disks.iter_mut().for_each(|disk| disk.killed |= killed);
    }

    /// Fills the disk's file system for a while.
    pub(super) fn full(&mut self, disk: usize, then: &Step) {
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
            // Requests that wait for space may prevent the handover.
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

    /// Frees the space.
    pub(super) fn free(&self) {
        if let Some(small) = &self.small {
            let _ = fs::remove_file(small.join("ballast"));
        }
    }

    pub(super) fn file_size(&mut self, mib: u64, then: &Step) {
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

    pub(super) fn descriptors(&mut self, more: u64, then: &Step) {
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid))
            .unwrap()
            .count();
        // One more for the command.
        self.limit(Resource::Nofile, Some(open as u64 + more));
        self.may_fail = true;
        self.step(then);
        self.without_limits();
        self.may_fail = false;
        // Has what could not be saved for want of descriptors saved now.
        self.succeeds(&["reload"]);
        self.count("limits on descriptors");
    }

    pub(super) fn limit(&self, resource: Resource, current: Option<u64>) {
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

    pub(super) fn without_limits(&self) {
        if self.may_fail {
            self.limit(Resource::Fsize, None);
            self.limit(Resource::Nofile, None);
        }
    }

    pub(super) fn file_size_limited(&self) -> bool {
        let pid = Pid::from_raw(self.pid as i32);
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.pid)).unwrap();
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max file size"));
        pid.is_some() && line.is_some_and(|line| !line.contains("unlimited"))
    }
}

/// Starts a ringdisk with its journals in this directory. After a kill, the kernel may still be completing writes and
/// hold locks.
pub(super) fn serve(at: &Path, arguments: &[String]) -> Server {
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
