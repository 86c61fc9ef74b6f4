//! No start and no reload puts a disk on an image that lacks what its guest has written.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::qemu_img;

use super::server::Controlled;
use crate::support::content;

/// A ringdisk with persisted state, and a configuration with one disk at one socket. In its directory are o0.qcow2, two
/// overlays over that, and two raw files with the same data.
struct Overlays {
    ringdisk: Controlled,
}

fn configure(path: &Path, name: &str, file: &str, more: &str) {
    let (file, dir) = (path.join(file), path.display());
    let mut text =
        format!("allow-dir = [\"{dir}\"]\nallow-backing = [\"{dir}\"]\nstate = \"{dir}/state\"\n");
    if !name.is_empty() {
        text += &format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{}\"\nsocket = \"{dir}/a.sock\"\nqueues = 1\n{more}\n",
            file.display()
        );
    }
    fs::write(path.join("r.toml"), text).unwrap();
}

impl Overlays {
    /// `None` if there is no qemu-img.
    fn start(test: &str, name: &str, file: &str) -> Option<Self> {
        if !qemu_img::is_there(test) {
            return None;
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().to_owned();
        qemu_img::img(&path, "create -q -f qcow2 o0.qcow2 4M");
        for overlay in ["o1.qcow2", "o2.qcow2"] {
            let create = format!("create -q -f qcow2 -b o0.qcow2 -F qcow2 {overlay}");
            qemu_img::img(&path, &create);
        }
        for raw in ["r0.raw", "r1.raw"] {
            fs::write(path.join(raw), content(0, 4 << 20)).unwrap();
        }
        configure(&path, name, file, "");
        let config = format!("--config={}", path.join("r.toml").display());
        let ringdisk = Controlled::start_in(dir, &[config]);
        Some(Self { ringdisk })
    }

    fn configure(&self, name: &str, file: &str) {
        configure(self.ringdisk.dir.path(), name, file, "");
    }

    fn path(&self, file: &str) -> PathBuf {
        self.ringdisk.path(file)
    }

    fn reload(&self) {
        self.ringdisk.json(&["reload"]);
    }

    fn replace(&self, disk: &str, file: &str) {
        let file = self.path(file).display().to_string();
        self.ringdisk.json(&["replace", disk, &file]);
    }

    fn attach(&self, disk: &str, file: &str) {
        let (file, socket) = (self.path(file), self.path("a.sock"));
        let (file, socket) = (file.display(), socket.display());
        let disk = format!("{file},name={disk},socket={socket},queues=1");
        self.ringdisk.json(&["attach", &disk]);
    }

    /// Writes something else each time.
    fn write(&self, round: u8) {
        let mut guest = device(&self.ringdisk);
        assert_eq!(guest.queues[0].write(0, &[round; 4096]), 0);
    }

    /// Kills it and starts it again.
    fn restart(self) -> Self {
        Self {
            ringdisk: self.ringdisk.kill_and_restart(),
        }
    }

    /// Stops it and starts it again: an overlay is served over an image only after that was closed.
    fn stop_and_start(mut self) -> Self {
        assert!(self.ringdisk.server.terminate().unwrap().success());
        Self {
            ringdisk: self.ringdisk.restart(),
        }
    }

    fn assert_served(&self, disk: &str, file: &str, round: u8) {
        let now = || self.ringdisk.disk(disk);
        let start = Instant::now();
        // An absent disk is tried again after the reply.
        while !now()["problem"].is_null() && start.elapsed() < HANG {
            thread::sleep(Duration::from_millis(20));
        }
        let now = now();
        assert!(now["problem"].is_null(), "{now}");
        let file = self.path(file).display().to_string();
        assert_eq!(now["file"].as_str(), Some(&*file), "{now}");
        let read = device(&self.ringdisk).queues[0].read(0, 4096).unwrap();
        assert!(read == [round; 4096], "{:?} instead of {round}", &read[..4]);
    }

    fn assert_absent(&self, disk: &str, word: &str) {
        let now = self.ringdisk.disk(disk);
        let problem = now["problem"].as_str().unwrap_or_default();
        assert!(problem.contains(word), "{now}");
    }
}

fn device(ringdisk: &Controlled) -> Device {
    Device::connect(ringdisk.path("a.sock"), &DeviceConfig::default()).unwrap()
}

/// Moved by a command, and the configuration names a third file since.
#[test]
fn no_start_goes_to_a_stale_overlay() {
    let Some(mut it) = Overlays::start("no_start_goes_to_a_stale_overlay", "a", "o0.qcow2") else {
        return;
    };
    it.replace("a", "o2.qcow2");
    it.write(1);
    it.configure("a", "o1.qcow2");
    // The state keeps the file for the next start.
    for _ in 0..2 {
        it = it.restart();
        it.assert_absent("a", "from which the disk was moved");
    }
    it.configure("a", "o2.qcow2");
    it.reload();
    it.assert_served("a", "o2.qcow2", 1);
}

/// Moved by a reload, and the configuration is put back.
#[test]
fn no_start_goes_back_below_an_overlay() {
    let test = "no_start_goes_back_below_an_overlay";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.configure("a", "o1.qcow2");
    it.reload();
    it.write(1);
    it = it.restart();
    it.assert_served("a", "o1.qcow2", 1);
    it.configure("a", "o0.qcow2");
    it = it.restart();
    it.assert_absent("a", "a disk was moved from it");
    // The operator insists.
    it.ringdisk.json(&["detach", "a"]);
    it.attach("a", "o0.qcow2");
    it.assert_served("a", "o0.qcow2", 0);
}

/// A mistake in the configuration, put right before or after the next start, does not undo a move.
#[test]
fn a_mistake_does_not_forget_a_move() {
    let test = "a_mistake_does_not_forget_a_move";
    for by_reload in [false, true] {
        for [before, now] in [["o0.qcow2", "o2.qcow2"], ["r0.raw", "r1.raw"]] {
            let Some(mut it) = Overlays::start(test, "a", before) else {
                return;
            };
            it.replace("a", now);
            it.write(1);
            it.configure("a", "mistake.raw");
            it = it.restart();
            it.assert_absent("a", "mistake.raw");
            it.configure("a", before);
            if by_reload {
                it.ringdisk.ringdisk(&["reload"]);
            } else {
                it = it.restart();
            }
            it.assert_absent("a", "a disk was moved from it");
            it.configure("a", now);
            it.reload();
            it.assert_served("a", now, 1);
        }
    }
}

/// The configuration follows a move while ringdisk is down, and goes back later.
#[test]
fn a_move_that_the_configuration_has_followed_is_remembered() {
    let test = "a_move_that_the_configuration_has_followed_is_remembered";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.replace("a", "o2.qcow2");
    it.write(1);
    it.configure("a", "o2.qcow2");
    it = it.restart();
    it.assert_served("a", "o2.qcow2", 1);
    it.configure("a", "o0.qcow2");
    it = it.restart();
    it.assert_absent("a", "a disk was moved from it");
}

/// What a reload refuses, the next start does not do: the disk has another name, or its VM's socket.
#[test]
fn no_start_goes_back_under_another_name() {
    let test = "no_start_goes_back_under_another_name";
    for (file, word) in [
        ("o0.qcow2", "a disk was moved from it"),
        ("o1.qcow2", "from which the disk was moved"),
    ] {
        let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
            return;
        };
        it.replace("a", "o2.qcow2");
        it.write(1);
        it.configure("b", file);
        it.ringdisk.ringdisk(&["reload"]).assert_fails(1, &[]);
        it.assert_served("a", "o2.qcow2", 1);
        for _ in 0..2 {
            it = it.restart();
            it.assert_absent("b", word);
        }
        it.configure("b", "o2.qcow2");
        it = it.restart();
        it.assert_served("b", "o2.qcow2", 1);
    }
}

/// An overlay over the image that a disk was on last is later, whatever that has.
#[test]
fn a_start_goes_to_an_overlay_of_the_last_image() {
    let test = "a_start_goes_to_an_overlay_of_the_last_image";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.replace("a", "o2.qcow2");
    it.ringdisk
        .json(&["bitmap", "add", "a", "changes", "--persistent"]);
    it.ringdisk.json(&["detach", "a"]);
    let create = "create -q -f qcow2 -b o2.qcow2 -F qcow2 o3.qcow2";
    qemu_img::img(it.ringdisk.dir.path(), create);
    it.configure("a", "o3.qcow2");
    it = it.restart();
    it.assert_served("a", "o3.qcow2", 0);
}

/// A label says nothing about the file of a disk, nor about its limits.
#[test]
fn labels_change_nothing_else() {
    let test = "labels_change_nothing_else";
    for [before, now] in [["o0.qcow2", "o2.qcow2"], ["r0.raw", "r1.raw"]] {
        let Some(it) = Overlays::start(test, "a", before) else {
            return;
        };
        it.replace("a", now);
        it.ringdisk.json(&["throttle", "a", "iops=777"]);
        it.write(1);
        let path = it.ringdisk.dir.path();
        configure(path, "a", before, "domain = \"vm\"\ntarget = \"vda\"");
        let guest = device(&it.ringdisk);
        it.reload();
        drop(guest);
        let disk = it.ringdisk.disk("a");
        assert_eq!(disk["domain"], "vm", "{disk}");
        assert_eq!(disk["target"], "vda", "{disk}");
        assert_eq!(disk["limits"]["iops"], 777, "{disk}");
        let log = it.ringdisk.server.log();
        assert!(!log.contains("is disconnected"), "{log}");
        it.assert_served("a", now, 1);
        let it = it.restart();
        assert_eq!(it.ringdisk.disk("a")["domain"], "vm");
        it.assert_served("a", now, 1);
    }
}

/// Attached and moved by commands, and written into the configuration as it was attached: it stays where it is.
#[test]
fn no_start_goes_back_to_what_was_attached() {
    let test = "no_start_goes_back_to_what_was_attached";
    let Some(mut it) = Overlays::start(test, "", "") else {
        return;
    };
    it.attach("a", "o0.qcow2");
    it.replace("a", "o2.qcow2");
    it.write(1);
    it.configure("a", "o0.qcow2");
    it = it.restart();
    it.assert_served("a", "o2.qcow2", 1);
    let refused = it.ringdisk.ringdisk(&["reload"]);
    refused.assert_fails(1, &["a disk 'a' already", "nothing has been changed"]);
}

/// What was committed into an image is there, and the emptied overlay says so.
#[test]
fn a_start_goes_back_after_a_commit() {
    let test = "a_start_goes_back_after_a_commit";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.configure("a", "o1.qcow2");
    it.reload();
    it.write(1);
    it.ringdisk.json(&["detach", "a"]);
    qemu_img::img(it.ringdisk.dir.path(), "commit -q o1.qcow2");
    it.configure("a", "o0.qcow2");
    it = it.restart();
    it.assert_served("a", "o0.qcow2", 1);
}

/// Replaced by a command, committed while ringdisk was down, and the overlay removed: the reason says how to go back. A disk of the
/// command line does not keep ringdisk from starting, as that takes commands.
#[test]
fn a_removed_overlay_says_how_to_go_back() {
    let test = "a_removed_overlay_says_how_to_go_back";
    for place in ["configured", "attached", "command line"] {
        let name = if place == "configured" { "a" } else { "" };
        let Some(mut it) = Overlays::start(test, name, "o0.qcow2") else {
            return;
        };
        let dir = it.ringdisk.dir.path().to_owned();
        if place == "attached" {
            it.attach("a", "o0.qcow2");
        }
        if place == "command line" {
            let disk = format!(
                "{0}/o0.qcow2,name=a,socket={0}/a.sock,queues=1",
                dir.display()
            );
            it.ringdisk.arguments.push(disk);
            it = it.stop_and_start();
        }
        it.replace("a", "o1.qcow2");
        it.write(1);
        assert!(it.ringdisk.server.terminate().unwrap().success());
        qemu_img::img(&dir, "commit -q o1.qcow2");
        fs::remove_file(dir.join("o1.qcow2")).unwrap();
        it.ringdisk = it.ringdisk.restart();
        let (base, gone) = (dir.join("o0.qcow2"), dir.join("o1.qcow2"));
        let words = format!(
            "{}: no such file; disk 'a' was moved there from {}: ",
            gone.display(),
            base.display()
        );
        it.assert_absent("a", &words);
        it.assert_absent("a", "'ringdisk detach a'");
        it.ringdisk.json(&["detach", "a"]);
        it.attach("a", "o0.qcow2");
        it.assert_served("a", "o0.qcow2", 1);
        it = it.restart();
        it.assert_served("a", "o0.qcow2", 1);
    }
}

/// A disk that gets another name keeps its file.
#[test]
fn no_renamed_disk_goes_to_the_file_that_it_has_left() {
    let test = "no_renamed_disk_goes_to_the_file_that_it_has_left";
    for [before, now] in [["o0.qcow2", "o2.qcow2"], ["r0.raw", "r1.raw"]] {
        let Some(it) = Overlays::start(test, "a", before) else {
            return;
        };
        it.replace("a", now);
        it.write(1);
        it.configure("b", before);
        for reload in [&["reload"][..], &["reload", "--upgrade"]] {
            // After an upgrade, the reload is the new process' own.
            let refused = it.ringdisk.ringdisk(reload);
            assert!(reload.len() > 1 || refused.code == Some(1), "{refused:?}");
            it.assert_served("a", now, 1);
        }
        it.configure("b", now);
        it.reload();
        it.assert_served("b", now, 1);
    }
}

/// While a disk gets another name, no other command may take its files, or those below.
#[test]
fn a_renamed_disk_keeps_its_files() {
    let Some(it) = Overlays::start("a_renamed_disk_keeps_its_files", "a", "o1.qcow2") else {
        return;
    };
    qemu_img::img(
        it.ringdisk.dir.path(),
        "create -q -f qcow2 -b o1.qcow2 -F qcow2 over.qcow2",
    );
    let mut names = ["a", "b"];
    for round in 0..120 {
        let file = if round % 2 == 0 {
            "over.qcow2"
        } else {
            "o0.qcow2"
        };
        let socket = it.path("x.sock").display().to_string();
        let disk = format!("{},name=x,socket={socket}", it.path(file).display());
        names.swap(0, 1);
        it.configure(names[0], "o1.qcow2");
        thread::scope(|scope| {
            scope.spawn(|| it.reload());
            thread::sleep(Duration::from_micros(100 * round));
            let attached = it.ringdisk.ringdisk(&["attach", &disk]);
            attached.assert_fails(1, &["in use"]);
        });
        assert_eq!(
            it.ringdisk.disk(names[0])["storage"],
            "works",
            "round {round}"
        );
    }
}

/// Nothing moved while it ran: the configuration named another file at each start.
#[test]
fn no_start_goes_back_to_what_a_start_has_left() {
    let test = "no_start_goes_back_to_what_a_start_has_left";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.write(1);
    it.configure("a", "o1.qcow2");
    it = it.stop_and_start();
    it.assert_served("a", "o1.qcow2", 1);
    it.write(2);
    it.configure("a", "o0.qcow2");
    it = it.stop_and_start();
    it.assert_absent("a", "a disk was moved from it");
    // A fresh overlay over it would lose the same.
    it.configure("a", "o2.qcow2");
    it = it.stop_and_start();
    it.assert_absent("a", "o0.qcow2");
    it.configure("a", "o1.qcow2");
    it = it.stop_and_start();
    it.assert_served("a", "o1.qcow2", 2);
    // An overlay in place of the one before is how a desktop is reset.
    let dir = it.ringdisk.dir.path().to_owned();
    qemu_img::img(&dir, "create -q -f qcow2 -b o0.qcow2 -F qcow2 fresh");
    fs::rename(dir.join("fresh"), dir.join("o1.qcow2")).unwrap();
    it = it.stop_and_start();
    it.assert_served("a", "o1.qcow2", 1);
}

/// The VM goes on above an image to which its overlay was committed: the image is as old as before.
#[test]
fn no_start_goes_back_below_a_commit() {
    let test = "no_start_goes_back_below_a_commit";
    let Some(mut it) = Overlays::start(test, "a", "o0.qcow2") else {
        return;
    };
    it.replace("a", "o1.qcow2");
    it.write(2);
    it.configure("a", "o1.qcow2");
    assert!(it.ringdisk.server.terminate().unwrap().success());
    let dir = it.ringdisk.dir.path().to_owned();
    qemu_img::img(&dir, "commit -q o1.qcow2");
    let ringdisk = it.ringdisk.restart();
    it = Overlays { ringdisk };
    it.write(3);
    it.configure("a", "o0.qcow2");
    it = it.stop_and_start();
    it.assert_absent("a", "a disk was moved from it");
    it.configure("a", "o1.qcow2");
    it = it.stop_and_start();
    it.assert_served("a", "o1.qcow2", 3);
}

/// Going back by hand is a move as well, and so is its correction.
#[test]
fn no_start_goes_where_an_administrator_went_back_from() {
    let test = "no_start_goes_where_an_administrator_went_back_from";
    let Some(mut it) = Overlays::start(test, "a", "r0.raw") else {
        return;
    };
    it.replace("a", "r1.raw");
    it.write(2);
    for (mistake, correction) in [("r0.raw", "r1.raw"), ("r1.raw", "r0.raw")] {
        for file in [mistake, correction] {
            it.ringdisk.json(&["detach", "a"]);
            it.attach("a", file);
        }
        // What was attached is known to the state, under a configuration that says nothing of it.
        it.configure("", "");
        it.ringdisk.json(&["detach", "a"]);
        it.configure("b", mistake);
        it = it.stop_and_start();
        it.assert_absent("b", "a disk was moved from it");
        it.attach("a", correction);
    }
}

/// A reload that starts a disk again takes it to no left file, nor to a new image over one.
#[test]
fn no_reload_goes_back() {
    let Some(it) = Overlays::start("no_reload_goes_back", "a", "r0.raw") else {
        return;
    };
    let ringdisk = &it.ringdisk;
    let dir = ringdisk.dir.path();
    qemu_img::img(dir, "create -q -f qcow2 -b r0.raw -F raw over.qcow2");
    it.configure("a", "r1.raw");
    it.reload();
    it.write(2);
    for (file, word) in [
        ("r0.raw", "a disk was moved from it"),
        ("over.qcow2", "builds on"),
    ] {
        configure(dir, "a", file, "cache = \"writeback\"");
        let refused = ringdisk.ringdisk(&["reload"]);
        refused.assert_fails(1, &[word, "r1.raw", "nothing has been changed"]);
    }
    configure(dir, "a", "r1.raw", "");
    it.reload();
    it.assert_served("a", "r1.raw", 2);
}

/// A restart puts no disk on an image that lacks what its guest has written.
#[test]
fn a_restart_goes_to_no_older_image() {
    let Some(it) = Overlays::start("a_restart_goes_to_no_older_image", "a", "o0.qcow2") else {
        return;
    };
    let ringdisk = &it.ringdisk;
    let cached = |file: &str| {
        configure(ringdisk.dir.path(), "a", file, "cache = \"writeback\"");
    };
    it.configure("a", "o1.qcow2");
    ringdisk.json(&["reload"]);
    let mut guest = device(ringdisk);
    let written = content(1 << 20, 4096);
    assert_eq!(guest.queues[0].write(0, &written), 0);
    for (file, words) in [
        ("o2.qcow2", "below what the disk is on"),
        ("o0.qcow2", "lacks what was written since"),
    ] {
        cached(file);
        let refused = ringdisk.ringdisk(&["reload"]);
        refused.assert_fails(1, &[words, "nothing has been changed"]);
        assert_eq!(guest.queues[0].read(0, 4096).unwrap(), written);
    }
    cached("o1.qcow2");
    ringdisk.json(&["reload"]);
    assert_eq!(device(ringdisk).queues[0].read(0, 4096).unwrap(), written);
}
