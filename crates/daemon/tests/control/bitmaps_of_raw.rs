//! Persistent bitmaps of disks that are in no image: raw files and block devices.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::qemu_img;
use testkit::random::{Random, seeds};
use testkit::server::{Server, wait_for_exit};

use super::server::CommandOutput;

const OK: u8 = 0;
const BLOCK: u64 = 4096;
const SIZE: u64 = 64 << 20;

/// A raw disk, and ringdisk with a state directory.
struct Raw {
    dir: TempDir,
    file: PathBuf,
}

impl Raw {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = dir.path().join("disk.raw");
        File::create(&file).unwrap().set_len(SIZE).unwrap();
        for name in ["state", "runtime"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir, file }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the server, once the kernel has completed the writes of a killed one.
    fn serve(&self) -> Server {
        self.serve_with(|| Command::new(env!("CARGO_BIN_EXE_ringdisk")))
    }

    /// Starts the server as on a host that has started a moment ago.
    fn serve_after_boot(&self) -> Server {
        // The time of the start is in whole seconds, and after the last write.
        thread::sleep(Duration::from_secs(1));
        self.serve_with(|| {
            let uptime = fs::read_to_string("/proc/uptime").unwrap();
            let seconds = uptime.split('.').next().unwrap();
            let mut command = Command::new("unshare");
            command.args(["--time", &format!("--boottime=-{seconds}")]);
            command.arg(env!("CARGO_BIN_EXE_ringdisk"));
            command
        })
    }

    fn serve_with(&self, ringdisk: impl Fn() -> Command) -> Server {
        let start = Instant::now();
        loop {
            let mut command = ringdisk();
            let (file, socket) = (self.file.display(), self.path("disk.sock"));
            command
                .args(["serve", "--json", "--control"])
                .arg(self.path("control.qmp"))
                .arg("--state")
                .arg(self.path("state"))
                .arg(format!("file={file},name=d,socket={}", socket.display()))
                .env("RUNTIME_DIRECTORY", self.path("runtime"));
            match Server::ringdisk_command(command) {
                Err(e) if e.to_string().contains("in use") && start.elapsed() < HANG => {}
                server => return server.unwrap(),
            }
        }
    }

    fn device(&self) -> Device {
        Device::connect(self.path("disk.sock"), &DeviceConfig::default()).unwrap()
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        let ran = CommandOutput::of(command.arg(self.path("control.qmp")));
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    fn add(&self, name: &str) {
        let granularity = ["--granularity", "4k", "--persistent"];
        self.run(&[&["bitmap", "add", "d", name], &granularity[..]].concat());
    }

    /// The bitmaps as a query shows them.
    fn list(&self) -> Vec<Value> {
        let list = self.run(&["bitmap", "list", "--json"]).out;
        let list: Value = serde_json::from_str(&list).unwrap();
        list["d"].as_array().unwrap().clone()
    }

    fn bitmap(&self, name: &str) -> Value {
        let mut all = self.list().into_iter();
        all.find(|bitmap| bitmap["name"] == name)
            .unwrap_or_default()
    }

    fn record_path(&self) -> Option<PathBuf> {
        let mut files = fs::read_dir(self.path("state"))
            .unwrap()
            .flatten()
            .map(|file| file.path());
        files.find(|path| path.extension().is_some_and(|end| end == "bitmaps"))
    }

    /// The record, and the bits after it.
    fn record(&self) -> (Value, Vec<u8>) {
        let bytes = fs::read(self.record_path().unwrap()).unwrap();
        let end = bytes.iter().position(|&byte| byte == b'\n').unwrap();
        (
            serde_json::from_slice(&bytes[..end]).unwrap(),
            bytes[end + 1..].to_vec(),
        )
    }

    /// The dirty blocks of the only bitmap, while the disk is in use or after a kill.
    fn bits_in_use(&self) -> BTreeSet<u64> {
        let (record, _) = self.record();
        let name = record["bitmaps"][0]["bits"].as_str().unwrap();
        // The first page has the time of the last write.
        blocks(&fs::read(self.path("runtime/journals").join(name)).unwrap()[4096..])
    }

    /// What is left after a crash of the host, which had another boot id, and whose tmpfs is gone.
    fn crash(&self, server: Server) {
        server.signal(Signal::KILL);
        drop(server);
        let path = self.record_path().unwrap();
        let bytes = fs::read(&path).unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let boot = boot.trim().replace('-', "");
        let at = bytes
            .windows(boot.len())
            .position(|part| part == boot.as_bytes());
        let at = at.expect("the record has the boot id");
        let zeroes = "0".repeat(boot.len());
        let other = [&bytes[..at], zeroes.as_bytes(), &bytes[at + boot.len()..]].concat();
        fs::write(&path, other).unwrap();
        for file in fs::read_dir(self.path("runtime/journals")).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
    }

    /// The file with the notes.
    fn intent_path(&self) -> PathBuf {
        let (record, _) = self.record();
        let name = record["intent"]["file"].as_str().unwrap().to_owned();
        self.path("state").join(name)
    }

    /// Files with bits that are left.
    fn bits_files(&self) -> usize {
        let files = fs::read_dir(self.path("runtime/journals"))
            .unwrap()
            .flatten();
        files
            .filter(|file| file.path().extension().is_some_and(|end| end == "bits"))
            .count()
    }

    fn stop(mut server: Server) {
        assert!(server.terminate().unwrap().success(), "{}", server.log());
    }

    fn assert_inconsistent(&self, server: &Server, words: &str) {
        assert_eq!(self.bitmap("b")["inconsistent"], Value::Bool(true));
        let log = server.log();
        assert!(
            log.contains("bitmap 'b' is not continued") && log.contains(words),
            "{log}"
        );
        assert_eq!(self.bits_files(), 0);
    }
}

fn blocks(bits: &[u8]) -> BTreeSet<u64> {
    let is_set = |bit: &u64| bits[(bit / 8) as usize] >> (bit % 8) & 1 != 0;
    (0..bits.len() as u64 * 8).filter(is_set).collect()
}

fn write(device: &mut Device, block: u64) {
    assert_eq!(
        device.queues[0].write((block * BLOCK) >> 9, &[1; BLOCK as usize]),
        OK
    );
}

#[test]
fn stops_and_upgrades_keep_every_bit() {
    let raw = Raw::new();
    let server = raw.serve();
    raw.add("b");
    let mut device = raw.device();
    write(&mut device, 3);
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(device.queues[0].run(zeroes, 7 << 3, 8192), OK);
    assert_eq!(device.queues[0].run(Op::Discard, 100 << 3, 4096), OK);
    let mut dirty = BTreeSet::from([3, 7, 8, 100]);
    assert_eq!(raw.bits_in_use(), dirty);
    // An upgrade: both processes use the same bits.
    let upgraded: Value = serde_json::from_str(&raw.run(&["upgrade", "--json"]).out).unwrap();
    let pid = upgraded["pid"].as_u64().unwrap() as u32;
    write(&mut device, 5);
    dirty.insert(5);
    assert_eq!(raw.bits_in_use(), dirty);
    assert_eq!(raw.bitmap("b")["count"], dirty.len() as u64 * BLOCK);
    drop((device, server));
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::TERM).unwrap();
    wait_for_exit(pid);
    for round in 0..3 {
        let (record, bits) = raw.record();
        assert!(record["state"]["stored"].is_object(), "{record}");
        assert_eq!((blocks(&bits), raw.bits_files()), (dirty.clone(), 0));
        let server = raw.serve();
        assert!(raw.record().0["state"]["in-use"].is_object());
        assert_eq!(raw.bits_in_use(), dirty);
        let mut device = raw.device();
        write(&mut device, 1000 + round);
        dirty.insert(1000 + round);
        drop(device);
        Raw::stop(server);
    }
    // What grows is dirty: nobody knows what it contains.
    let server = raw.serve();
    raw.run(&["resize", "d", "65M"]);
    dirty.extend(SIZE / BLOCK..(SIZE + (1 << 20)) / BLOCK);
    assert_eq!(raw.bits_in_use(), dirty);
    raw.run(&["bitmap", "clear", "d", "b"]);
    assert_eq!((raw.bits_in_use(), raw.bits_files()), (BTreeSet::new(), 1));
    raw.run(&["bitmap", "remove", "d", "b"]);
    assert_eq!((raw.record_path(), raw.bits_files()), (None, 0));
    Raw::stop(server);
}

/// A bitmap that becomes too large is lost, and no other.
#[test]
fn growth_keeps_small_and_persistent_bitmaps() {
    let raw = Raw::new();
    let server = raw.serve();
    let add = |name, options: &[&str]| {
        raw.run(&[&["bitmap", "add", "d", name], options].concat());
    };
    // At 1 TiB they have 256, 16, 64, 32 and 32 MiB of bits.
    add("finest", &["--granularity", "512", "--persistent"]);
    add("temporary", &["--granularity", "8k"]);
    add("fine", &["--granularity", "2k", "--persistent"]);
    add("nightly", &["--granularity", "4k", "--persistent"]);
    add(
        "disabled",
        &["--granularity", "4k", "--disabled", "--persistent"],
    );
    raw.run(&["resize", "d", "1T"]);
    let lost = |of: &Raw| -> Vec<_> {
        let all = of.list().into_iter();
        let lost = all.filter(|bitmap| bitmap["inconsistent"] == true);
        lost.map(|bitmap| bitmap["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(lost(&raw), ["temporary", "finest"]);
    assert_eq!(server.log().matches("is lost").count(), 2);
    // It does not come back, and the others stay.
    raw.run(&["resize", "d", "1025G"]);
    assert_eq!(lost(&raw), ["fine", "temporary", "finest"]);
    assert_eq!(server.log().matches("is lost").count(), 3);
    Raw::stop(server);
    let server = raw.serve();
    assert_eq!(raw.list().len(), 4);
    assert_eq!(raw.bitmap("nightly")["count"], (1025_u64 << 30) - SIZE);
    assert_eq!(raw.bitmap("disabled")["count"], 0);
    Raw::stop(server);
}

#[test]
fn kills_lose_no_bit() {
    for seed in seeds(4711, 4) {
        let raw = Raw::new();
        let mut random = Random(seed);
        let mut server = raw.serve();
        raw.add("b");
        let (mut submitted, mut completed) = (BTreeSet::new(), BTreeSet::new());
        for round in 0..5 {
            let mut device = raw.device();
            let queue = &mut device.queues[0];
            let slots = queue.slots().min(32);
            let mut at = vec![0; usize::from(slots)];
            let mut free: Vec<_> = (0..slots).collect();
            let until = 50 + random.below(2000);
            while completed.len() < (round * 1000 + until) as usize / 4 {
                for slot in free.drain(..) {
                    let block = random.below(SIZE / BLOCK);
                    at[usize::from(slot)] = block;
                    submitted.insert(block);
                    queue.write_buffer(slot, &[round as u8 + 1; BLOCK as usize]);
                    queue.prepare(slot, Op::Write, (block * BLOCK) >> 9, BLOCK as u32);
                    queue.submit(&[slot]);
                }
                queue.wait();
                queue.poll(|slot, status| {
                    assert_eq!(status, OK);
                    completed.insert(at[usize::from(slot)]);
                    free.push(slot);
                });
            }
            server.signal(Signal::KILL);
            drop((device, server));
            server = raw.serve();
            server.wait_for_log(&["continue where the process before has left them"]);
            let dirty = raw.bits_in_use();
            assert_eq!(raw.bitmap("b")["count"], dirty.len() as u64 * BLOCK);
            assert!(completed.is_subset(&dirty), "seed {seed}, round {round}");
            assert!(dirty.is_subset(&submitted), "seed {seed}, round {round}");
            let content = fs::read(&raw.file).unwrap();
            for (block, bytes) in (0..).zip(content.chunks(BLOCK as usize)) {
                let is_written = bytes.iter().any(|&byte| byte != 0);
                assert!(
                    !is_written || dirty.contains(&block),
                    "seed {seed}: {block}"
                );
            }
        }
        Raw::stop(server);
        assert_eq!(raw.bits_files(), 0);
    }
}

/// Whether processes can be shown another time of the host's start.
fn has_time_namespaces(test: &str) -> bool {
    let made = Command::new("unshare").args(["--time", "true"]).status();
    let is_there = made.is_ok_and(|status| status.success());
    if !is_there {
        println!("skipped: {test}: no time namespaces");
    }
    is_there
}

const REGION: u64 = (1 << 20) / BLOCK;

/// What may be on the disk after a power cut is dirty, and no region that was not written to.
#[test]
fn crashes_of_the_host_lose_no_bit() {
    if !has_time_namespaces("crashes_of_the_host_lose_no_bit") {
        return;
    }
    let raw = Raw::new();
    let mut random = Random(seeds(99, 1)[0]);
    let mut server = raw.serve();
    raw.add("b");
    let (mut submitted, mut regions) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..3 {
        let mut device = raw.device();
        for _ in 0..50 {
            let block = random.below(SIZE / BLOCK / 8) + round * SIZE / BLOCK / 4;
            let is_new = regions.insert(block / REGION);
            submitted.insert(block);
            write(&mut device, block);
            // The note is there before the write is.
            let notes = fs::read(raw.intent_path()).unwrap();
            assert!(!is_new || blocks(&notes[..512]).contains(&(block / REGION)));
        }
        drop(device);
        raw.crash(server);
        server = raw.serve_after_boot();
        let log = server.log();
        assert!(
            log.contains("continues after the crash of the host"),
            "{log}"
        );
        let dirty = raw.bits_in_use();
        assert!(submitted.is_subset(&dirty));
        assert!(
            dirty
                .iter()
                .all(|block| regions.contains(&(block / REGION)))
        );
        let (record, bits) = raw.record();
        assert!(record["state"]["in-use"].is_object(), "{record}");
        assert_eq!(blocks(&bits), dirty);
    }
    // A bitmap that is cleared and then stored has nothing of that.
    raw.run(&["bitmap", "clear", "d", "b"]);
    write(&mut raw.device(), 5);
    Raw::stop(server);
    assert_eq!(blocks(&raw.record().1), BTreeSet::from([5]));
    let left = fs::read_dir(raw.path("state")).unwrap().flatten();
    let is_intent = |path: &PathBuf| path.extension().is_some_and(|end| end == "intent");
    let intents: Vec<_> = left.map(|file| file.path()).filter(is_intent).collect();
    assert!(intents.is_empty(), "{intents:?}");
}

/// What was written after the host has started was written by another program.
fn check_writes_after_a_crash(raw: &Raw) {
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    raw.crash(server);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    Raw::stop(server);
}

#[test]
fn writes_to_files_after_a_crash_make_bitmaps_inconsistent() {
    check_writes_after_a_crash(&Raw::new());
}

#[test]
fn writes_to_devices_after_a_crash_make_bitmaps_inconsistent() {
    let mut raw = Raw::new();
    // It is not set up again, so the kernel still counts what was written before.
    let test = "writes_to_devices_after_a_crash_make_bitmaps_inconsistent";
    let Some(device) = Loop::new(test, &raw.file) else {
        return;
    };
    raw.file = PathBuf::from(&device.0);
    check_writes_after_a_crash(&raw);
}

/// The file with the notes cannot be written: the guest continues, and the bitmap does not.
#[test]
fn a_failed_note_costs_the_bitmap_and_not_the_write() {
    let raw = Raw::new();
    let server = raw.serve();
    raw.add("b");
    // It is read first.
    let notes = File::options().write(true).open(raw.intent_path()).unwrap();
    notes.set_len(0).unwrap();
    let mut device = raw.device();
    write(&mut device, 3);
    write(&mut device, 3000);
    assert_eq!(raw.bitmap("b")["inconsistent"], Value::Bool(true));
    server.wait_for_log(&["changes could not be noted"]);
    server.signal(Signal::KILL);
    drop((device, server));
    let server = raw.serve();
    raw.assert_inconsistent(&server, "changes could not be noted");
    Raw::stop(server);
}

#[test]
fn what_a_crash_leaves_may_be_damaged() {
    let raw = Raw::new();
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    fs::remove_file(raw.intent_path()).unwrap();
    raw.crash(server);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "it was in use when the host crashed");
    Raw::stop(server);
    // It stays so, until it is removed.
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["inconsistent"], Value::Bool(true));
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    write(&mut raw.device(), 4);
    Raw::stop(server);
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    // The bits are lost, and the boot is the same.
    server.signal(Signal::KILL);
    drop(server);
    let name = raw.record().0["bitmaps"][0]["bits"]
        .as_str()
        .unwrap()
        .to_owned();
    fs::remove_file(raw.path("runtime/journals").join(name)).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "has left no bits of it");
    // A damaged record.
    Raw::stop(server);
    fs::write(raw.record_path().unwrap(), "{").unwrap();
    let server = raw.serve();
    server.wait_for_log(&["is damaged"]);
    assert_eq!(raw.list().len(), 1);
    raw.run(&["bitmap", "remove", "d", ""]);
    assert_eq!((raw.list().len(), raw.record_path()), (0, None));
    Raw::stop(server);
}

#[test]
fn writes_of_other_programs_make_bitmaps_inconsistent() {
    let raw = Raw::new();
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    Raw::stop(server);
    // Reading it changes nothing.
    fs::read(&raw.file).unwrap();
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    Raw::stop(server);
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[9; 512], 1 << 20).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    Raw::stop(server);
    // Another file at its place, with the same times of writing.
    let (copy, modified) = (
        raw.path("copy"),
        fs::metadata(&raw.file).unwrap().modified().unwrap(),
    );
    fs::copy(&raw.file, &copy).unwrap();
    File::options()
        .write(true)
        .open(&copy)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    fs::rename(&copy, &raw.file).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "replaced the disk's file");
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    write(&mut raw.device(), 3);
    // After a kill, once some time has passed.
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    server.signal(Signal::KILL);
    drop(server);
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[8; 512], 1 << 20).unwrap();
    let later = SystemTime::now() + Duration::from_secs(5);
    file.set_modified(later).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    Raw::stop(server);
}

#[test]
fn snapshots_store_the_bitmaps_below() {
    if !qemu_img::is_there("snapshots_store_the_bitmaps_below") {
        return;
    }
    let raw = Raw::new();
    let server = raw.serve();
    raw.add("b");
    let mut device = raw.device();
    write(&mut device, 3);
    qemu_img::img(
        raw.dir.path(),
        "create -q -f qcow2 -b disk.raw -F raw above.qcow2",
    );
    let above = raw.path("above.qcow2");
    raw.run(&["replace", "d", above.to_str().unwrap()]);
    write(&mut device, 4);
    assert_eq!(raw.list().len(), 0);
    let (record, bits) = raw.record();
    assert!(record["state"]["stored"].is_object(), "{record}");
    assert_eq!((blocks(&bits), raw.bits_files()), (BTreeSet::from([3]), 0));
    drop(device);
    Raw::stop(server);
    // The disk below, by itself.
    fs::remove_file(raw.path("state/state.json")).unwrap();
    let server = raw.serve();
    assert_eq!(raw.bits_in_use(), BTreeSet::from([3]));
    Raw::stop(server);
}

/// A loop device, which is detached at the end.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

impl Loop {
    fn new(test: &str, file: &Path) -> Option<Self> {
        let made = Command::new("losetup")
            .args(["-f", "--show"])
            .arg(file)
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let device = String::from_utf8(made.stdout).unwrap();
                Some(Self(device.trim().to_owned()))
            }
            other => {
                println!("skipped: {test}: no loop device: {other:?}");
                None
            }
        }
    }
}

#[test]
fn bitmaps_of_block_devices() {
    let mut raw = Raw::new();
    let Some(device) = Loop::new("bitmaps_of_block_devices", &raw.file) else {
        return;
    };
    raw.file = PathBuf::from(&device.0);
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    write(&mut raw.device(), 4);
    Raw::stop(server);
    let server = raw.serve();
    assert_eq!(raw.bits_in_use(), BTreeSet::from([3, 4]));
    Raw::stop(server);
    // The kernel counts the writes of other programs.
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[9; 4096], 1 << 20).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    Raw::stop(server);
}
