//! Steps that run one command on one disk, and its guest's connection.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use testkit::driver::HANG;
use testkit::qemu_img;

use super::World;
use crate::soak::driver::Order;
use crate::soak::operations::disk::{MIB, SIZE_MAX, format};

impl World {
    pub(super) fn throttle(&mut self, disk: usize, iops: u32, group: bool) {
        let its = &self.disks[disk];
        if !its.attached {
            return;
        }
        let limit = format!("iops={iops}");
        let mut arguments = vec!["throttle", &its.name];
        arguments.extend((iops > 0).then_some(limit.as_str()));
        arguments.extend(group.then_some("group=group"));
        if self.succeeds(&arguments) {
            let its = &mut self.disks[disk];
            (its.iops, its.group) = (iops, group);
            self.count("limits");
        }
    }

    pub(super) fn resize(&mut self, disk: usize, mib: u64) {
        let its = &self.disks[disk];
        let size = its.size + mib * MIB;
        if !its.attached || size > SIZE_MAX {
            return;
        }
        if self.succeeds(&["resize", &its.name, &size.to_string()]) {
            self.disks[disk].size = size;
            self.count("resizes");
        } else if let Some(size) = self.listed(disk, "size").as_u64() {
            // The file may have grown before something else failed.
            self.disks[disk].size = size;
        }
    }

    /// Lets a disconnected VM reconnect.
    pub(super) fn reconnect(&mut self, disk: usize) {
        let its = &mut self.disks[disk];
        if its.attached && its.working {
            its.driver.order(Order::Reconnect);
            self.count("reconnections");
        }
    }

    /// Stops the VM.
    pub(super) fn stop_vm(&mut self, disk: usize) {
        if !self.disks[disk].working {
            return;
        }
        for order in [Order::Pause, Order::Resume, Order::Disconnect] {
            self.disks[disk].driver.order(order);
        }
        self.disks[disk].working = false;
        let start = Instant::now();
        while self.listed(disk, "connected") == true {
            assert!(start.elapsed() < HANG, "a connection does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn detach(&mut self, disk: usize, force: bool) {
        if !self.disks[disk].attached {
            return;
        }
        if !force {
            self.stop_vm(disk);
        }
        let name = self.disks[disk].name.clone();
        let arguments = ["detach", &name, "--force"];
        let worked = self.succeeds(&arguments[..if force { 3 } else { 2 }]);
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

    pub(super) fn attach(&mut self, disk: usize) {
        if self.disks[disk].attached {
            return;
        }
        let argument = self.disks[disk].argument();
        if !self.succeeds(&["attach", &argument]) {
            return;
        }
        self.disks[disk].attached = true;
        self.count("attached");
        self.connect_after(disk);
    }

    /// The VM reconnects, or a new one starts.
    pub(super) fn connect_after(&mut self, disk: usize) {
        self.without_limits();
        let its = &mut self.disks[disk];
        if its.working {
            its.driver.order(Order::Reconnect)
        } else {
            its.driver.order(Order::Connect)
        }
        its.working = true;
        if !self.may_fail {
            self.must_work(disk);
        }
    }

    /// Requests must succeed from now on; if the disk is detached, once it is attached again.
    pub(super) fn must_work(&mut self, disk: usize) {
        let its = &mut self.disks[disk];
        if its.may_fail && (its.attached || !its.working) {
            its.driver.order(Order::MayFail(false));
            its.may_fail = false;
        }
    }

    /// Compares a file that is not served with the expected content, using QEMU's tools.
    pub(super) fn verify(&mut self, disk: usize) {
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

    /// Copies a disk, whose VM is paused if it runs.
    pub(super) fn copy(&mut self, disk: usize, qcow2: bool) -> PathBuf {
        let new = self.new_name(disk, format(qcow2));
        self.copy_to(disk, qcow2, &new);
        new
    }

    pub(super) fn pause(&mut self, disk: usize) {
        if self.disks[disk].working {
            self.disks[disk].driver.order(Order::Pause);
        }
    }

    pub(super) fn resume(&mut self, disk: usize) {
        if self.disks[disk].working {
            self.disks[disk].driver.order(Order::Resume);
        }
    }

    pub(super) fn replace(&mut self, disk: usize, qcow2: bool) {
        // With a limit on the size of files, the copy may be incomplete.
        if !self.disks[disk].attached || self.file_size_limited() {
            return;
        }
        self.pause(disk);
        let new = self.copy(disk, qcow2);
        let name = self.disks[disk].name.clone();
        if self.succeeds(&["replace", &name, new.to_str().unwrap()]) {
            self.set_files(disk, vec![new], qcow2);
            self.count("replaced");
        } else {
            fs::remove_file(new).unwrap();
        }
        self.resume(disk);
    }

    /// Records the disk's new files and removes those that it no longer uses.
    pub(super) fn set_files(&mut self, disk: usize, files: Vec<PathBuf>, qcow2: bool) {
        let its = &mut self.disks[disk];
        for old in its.files.iter().filter(|old| !files.contains(old)) {
            let _ = fs::remove_file(old);
        }
        (its.files, its.qcow2) = (files, qcow2);
    }

    pub(super) fn snapshot(&mut self, disk: usize) {
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
        if self.succeeds(&["replace", &its.name, new.to_str().unwrap()]) {
            let its = &mut self.disks[disk];
            its.files.push(new);
            its.qcow2 = true;
            self.count("snapshots");
        } else {
            fs::remove_file(new).unwrap();
        }
    }

    /// Renames or links the file of a disk, then tells ringdisk; `decoy` puts an older copy at the old name afterwards.
    pub(super) fn rename(&mut self, disk: usize, decoy: bool, link: bool) {
        if !self.disks[disk].attached {
            return;
        }
        let qcow2 = self.disks[disk].qcow2;
        let (old, new) = (
            self.disks[disk].file().to_owned(),
            self.new_name(disk, format(qcow2)),
        );
        if link {
            fs::hard_link(&old, &new).unwrap()
        } else {
            fs::rename(&old, &new).unwrap()
        }
        let name = self.disks[disk].name.clone();
        if !self.succeeds(&["replace", &name, new.to_str().unwrap()]) {
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
}
