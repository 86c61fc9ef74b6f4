//! Backups of two disks at a time, while their guests and everything else go on. What was copied is what the disks were at
//! the moment, where the test knows that; and what the bitmap adds to the last backup is always the same as a full copy.

use std::fs;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::{Disk, Order, Soak};

/// The bitmap of each disk.
const BITMAP: &str = "soak";

impl Soak {
    pub(super) fn backup(&mut self) {
        let len = self.disks.len() as u64;
        let first = self.random.below(len);
        let both = [first, (first + 1 + self.random.below(len - 1)) % len].map(|i| i as usize);
        // A process has descriptors of its bitmaps.
        self.baseline = None;
        let is_known = self.random.below(2) == 0;
        if is_known {
            self.both(both, || Order::Pause);
            self.both(both, || Order::Remember);
        }
        let begun = self.begin(both);
        if is_known {
            self.both(both, || Order::Resume);
        }
        let mut copies = both.map(|i| self.copy(i));
        match self.random.below(12) {
            0 => return self.kill(),
            1 => return self.upgrade(),
            2 | 3 => self.resize(both[0]),
            4 | 5 => self.limit(both[1]),
            6 | 7 => self.disks[both[0]].driver.order(Order::Reconnect),
            _ => {}
        }
        for copy in &mut copies {
            assert!(copy.wait().unwrap().success(), "a copy of a backup");
        }
        let mut kept = Vec::new();
        for (i, action) in both.into_iter().zip(begun) {
            kept.push(self.increment(i, &action, is_known));
        }
        if self.random.below(4) == 0 {
            self.ringdisk(&["backup", "end", "--failed"]);
            return self.count("failed backup");
        }
        self.ringdisk(&["backup", "end"]);
        self.count("backup");
        for (i, content) in both.into_iter().zip(kept) {
            fs::write(self.backup_of(i), content).unwrap();
            self.disks[i].may_lack_bitmap = false;
        }
    }

    fn both(&mut self, both: [usize; 2], order: impl Fn() -> Order) {
        for i in both {
            self.disks[i].driver.order(order());
        }
    }

    fn backup_of(&self, i: usize) -> std::path::PathBuf {
        self.dir
            .path()
            .join(format!("{}.backup", self.disks[i].name))
    }

    /// Begins a backup; returns what became of the bitmaps.
    fn begin(&self, both: [usize; 2]) -> Vec<String> {
        let [a, b] = both.map(|i| self.disks[i].name.as_str());
        let bitmap = format!("--bitmap={BITMAP}");
        let begun = self.ringdisk(&["backup", "begin", a, b, &bitmap, "--memory=4M", "--json"]);
        let begun: Vec<Value> = serde_json::from_str(&begun).unwrap();
        let action = |disk: &Value| disk["bitmap-action"].as_str().unwrap().to_owned();
        begun.iter().map(action).collect()
    }

    fn uri(&self, disk: &Disk) -> String {
        let socket = self.dir.path().join("nbd.sock");
        format!(
            "nbd+unix:///{}-backup?socket={}",
            disk.name,
            socket.display()
        )
    }

    /// Begins to copy all of a disk.
    fn copy(&self, i: usize) -> Child {
        let disk = &self.disks[i];
        let to = self.dir.path().join(format!("{}.full", disk.name));
        let _ = fs::remove_file(&to);
        let mut command = Command::new("nbdcopy");
        command.args(["--connections=2", &self.uri(disk)]).arg(to);
        // It may lose its server.
        command.stderr(Stdio::null()).spawn().unwrap()
    }

    /// Compares a full copy of a disk with what is expected; returns it.
    fn increment(&mut self, i: usize, action: &str, is_known: bool) -> Vec<u8> {
        let full = self.dir.path().join(format!("{}.full", self.disks[i].name));
        let copied = fs::read(&full).unwrap();
        if is_known {
            self.disks[i]
                .driver
                .order(Order::VerifyRemembered(full.clone()));
            self.count("backup of a known moment");
        }
        fs::remove_file(&full).unwrap();
        let before = fs::read(self.backup_of(i));
        if action != "used" {
            let name = &self.disks[i].name;
            let is_expected = before.is_err() || self.disks[i].may_lack_bitmap;
            assert!(is_expected, "{name}: {action}");
            return copied;
        }
        let mut sum = before.expect("only a backup that succeeded is the base of another");
        sum.resize(copied.len(), 0);
        for (at, len) in self.dirty(i) {
            let range = at as usize..(at + len) as usize;
            sum[range.clone()].copy_from_slice(&copied[range]);
        }
        if sum != copied {
            let at = sum.iter().zip(&copied).position(|(a, b)| a != b);
            panic!("{}: a change at byte {at:?} is missing", self.disks[i].name);
        }
        self.count("increment");
        sum
    }

    /// The dirty ranges of a backup.
    fn dirty(&self, i: usize) -> Vec<(u64, u64)> {
        let mut command = Command::new("nbdinfo");
        command.args(["--json", &format!("--map=qemu:dirty-bitmap:{BITMAP}")]);
        let output = command.arg(self.uri(&self.disks[i])).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let map: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
        let dirty = map.iter().filter(|extent| number(extent, "type") == 1);
        dirty
            .map(|extent| (number(extent, "offset"), number(extent, "length")))
            .collect()
    }
}
