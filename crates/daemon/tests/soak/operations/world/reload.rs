//! Steps that change the configuration.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use super::World;
use crate::soak::driver::Order;
use crate::soak::operations::disk::{Disk, Entry, Origin, format};
use crate::soak::operations::steps::{Bad, Edit};

impl World {
    pub(super) fn reload(&mut self, edits: &[(usize, Edit)]) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let mut paused = Vec::new();
        for &(disk, ref edit) in edits {
            self.edit(disk, edit, &mut entries, &mut paused);
        }
        write_config(self.dir.path(), &self.disks, &entries, "");
        self.succeeds(&["reload"]);
        self.count("reloads");
        for disk in self.apply(entries) {
            self.connect_after(disk);
        }
        for disk in paused {
            self.resume(disk);
        }
    }

    /// At a start, changes to the configuration win over earlier commands.
    pub(super) fn kill_and_edit(&mut self, edits: &[(usize, Edit)]) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let mut paused = Vec::new();
        for &(disk, ref edit) in edits {
            self.edit(disk, edit, &mut entries, &mut paused);
        }
        write_config(self.dir.path(), &self.disks, &entries, "");
        self.start_again(Signal::KILL);
        let new = self.apply(entries);
        self.connect_all(&new);
        for disk in paused {
            self.resume(disk);
        }
        self.count("kills with another configuration");
    }

    pub(super) fn edit(
        &mut self,
        disk: usize,
        edit: &Edit,
        entries: &mut [Option<Entry>],
        paused: &mut Vec<usize>,
    ) {
        let its = &self.disks[disk];
        let (attached, qcow2) = (its.attached, its.qcow2);
        if let (Edit::Add, None) = (edit, &entries[disk]) {
            // Neither an existing disk nor one of the command line.
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
        // A disk detached by command stays detached until it is attached by command.
        if entries[disk].is_none() || !attached && !matches!(edit, Edit::Remove) {
            return;
        }
        let file = entries[disk].as_ref().expect("checked above").file.clone();
        // Only once: the next process uses the files as they are now.
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
                let removed = entries[disk].take().expect("checked above");
                // Earlier edits of the same reload may have renamed its file, or given its socket to another disk.
                let removed_disk = &mut self.disks[disk];
                let file = removed_disk.files.last_mut().expect("a disk has a file");
                if !file.exists() {
                    *file = removed.file;
                }
                removed_disk.socket.clone_from(&removed.socket);
                removed_disk.driver.order(Order::UseSocket(removed.socket));
            }
            _ => {}
        }
    }

    /// Records the effect of a reload. Returns the disks that are new or were disconnected.
    pub(super) fn apply(&mut self, entries: Vec<Option<Entry>>) -> Vec<usize> {
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
            // Limits set by command stay until the configuration changes its own.
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
                its.driver.order(Order::UseSocket(new.socket.clone()));
                connect.push(disk);
            }
            if !old.has_file_of(&new) {
                let mut files = its.files.clone();
                let qcow2 = new.qcow2;
                match new.file.exists() && !its.file().exists() {
                    // The file was renamed, and keeps its backing files.
                    true => *files.last_mut().unwrap() = new.file,
                    false => files = vec![new.file],
                }
                self.set_files(disk, files, qcow2);
                self.count("moved by reload");
            }
        }
        connect
    }

    pub(super) fn bad_reload(&mut self, disk: usize, bad: &Bad) {
        let mut entries: Vec<_> = self.disks.iter().map(|disk| disk.entry.clone()).collect();
        let not_a_socket = self.path("not-a-socket");
        fs::write(&not_a_socket, "").unwrap();
        let at = self.dir.path().display();
        let its_socket = self.disks[disk].socket.display();
        let new = |file: &str, more: &str| {
            format!("[[disk]]\nname = \"bad\"\nfile = \"{file}\"\n{more}\n")
        };
        // All other disks get another limit, which must not take effect.
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
        assert!(self.succeeds(&["reload"]));
    }
}

pub(super) fn write_config(at: &Path, disks: &[Disk], entries: &[Option<Entry>], more: &str) {
    let mut text = "[[throttle-group]]\nname = \"group\"\niops = 100000\n".to_owned();
    for (disk, entry) in disks.iter().zip(entries) {
        text.extend(entry.as_ref().map(|entry| disk.section(entry)));
    }
    fs::write(at.join("config.toml"), text + more).unwrap();
}
