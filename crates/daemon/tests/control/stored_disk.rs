//! A disk whose persistent bitmaps survive kills and crashes, and ringdisk with a state directory.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::qemu_img as qemu;
use testkit::random::Random;
use testkit::server::Server;

use super::server::CommandOutput;

pub const OK: u8 = 0;
pub const BLOCK: u64 = 4096;
pub const SIZE: u64 = 64 << 20;

/// A disk in a file or in a cluster, and ringdisk with a state directory.
pub struct StoredDisk {
    pub dir: TempDir,
    pub file: PathBuf,
    /// Options after the file.
    pub options: String,
    /// Starts ringdisk.
    ringdisk: Box<dyn Fn() -> Command>,
}

impl StoredDisk {
    pub fn raw() -> Self {
        let disk = Self::in_file("raw");
        File::create(&disk.file).unwrap().set_len(SIZE).unwrap();
        disk
    }

    /// An image with an enabled bitmap "b", which QEMU has made.
    pub fn image() -> Self {
        let disk = Self::in_file("qcow2");
        let directory = disk.dir.path();
        qemu::img(directory, &format!("create -q -f qcow2 disk.qcow2 {SIZE}"));
        qemu::img(directory, "bitmap --add -g 4k disk.qcow2 b");
        disk
    }

    fn in_file(format: &str) -> Self {
        let ringdisk = || Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        let mut disk = Self::new(PathBuf::new(), format!(",format={format}"), ringdisk);
        disk.file = disk.path(&format!("disk.{format}"));
        disk
    }

    /// `ringdisk` makes the command that is started.
    pub fn new(file: PathBuf, options: String, ringdisk: impl Fn() -> Command + 'static) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for name in ["state", "runtime"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let ringdisk = Box::new(ringdisk);
        Self {
            dir,
            file,
            options,
            ringdisk,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the server, once the kernel has completed the writes of a killed one.
    pub fn serve(&self) -> Server {
        self.serve_with(&self.ringdisk)
    }

    /// Starts the server as on a host that has started a moment ago.
    pub fn serve_after_boot(&self) -> Server {
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

    pub fn serve_with(&self, ringdisk: impl Fn() -> Command) -> Server {
        let start = Instant::now();
        loop {
            let mut command = ringdisk();
            let disk = format!("file={}{},name=d", self.file.display(), self.options);
            let socket = self.path("disk.sock");
            command
                .args(["serve", "--json", "--control"])
                .arg(self.path("control.qmp"))
                .arg("--state")
                .arg(self.path("state"))
                .arg(format!("{disk},socket={}", socket.display()))
                .env("RUNTIME_DIRECTORY", self.path("runtime"));
            match Server::ringdisk_command(command) {
                Err(e) if e.to_string().contains("in use") && start.elapsed() < HANG => {}
                server => return server.unwrap(),
            }
        }
    }

    pub fn device(&self) -> Device {
        Device::connect(self.path("disk.sock"), &DeviceConfig::default()).unwrap()
    }

    pub fn run(&self, arguments: &[&str]) -> CommandOutput {
        let ran = self.try_to(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    pub fn try_to(&self, arguments: &[&str]) -> CommandOutput {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        CommandOutput::of(command.arg(self.path("control.qmp")))
    }

    pub fn add(&self, name: &str) {
        let granularity = ["--granularity", "4k", "--persistent"];
        self.run(&[&["bitmap", "add", "d", name], &granularity[..]].concat());
    }

    /// The bitmaps as a query shows them.
    pub fn list(&self) -> Vec<Value> {
        let list = self.run(&["bitmap", "list", "--json"]).out;
        let list: Value = serde_json::from_str(&list).unwrap();
        list["d"].as_array().unwrap().clone()
    }

    pub fn bitmap(&self, name: &str) -> Value {
        let mut all = self.list().into_iter();
        all.find(|bitmap| bitmap["name"] == name)
            .unwrap_or_default()
    }

    pub fn record_path(&self) -> Option<PathBuf> {
        let mut files = fs::read_dir(self.path("state"))
            .unwrap()
            .flatten()
            .map(|file| file.path());
        files.find(|path| path.extension().is_some_and(|end| end == "bitmaps"))
    }

    /// The record, and the bits after it.
    pub fn record(&self) -> (Value, Vec<u8>) {
        let bytes = fs::read(self.record_path().unwrap()).unwrap();
        let end = bytes.iter().position(|&byte| byte == b'\n').unwrap();
        (
            serde_json::from_slice(&bytes[..end]).unwrap(),
            bytes[end + 1..].to_vec(),
        )
    }

    /// The dirty blocks of the only bitmap, while the disk is in use or after a kill.
    pub fn bits_in_use(&self) -> BTreeSet<u64> {
        let (record, _) = self.record();
        let name = record["bitmaps"][0]["bits"].as_str().unwrap();
        // The first page has the time of the last write.
        blocks(&fs::read(self.path("runtime/journals").join(name)).unwrap()[4096..])
    }

    /// What is left after a crash of the host, which had another boot id, and whose tmpfs is gone.
    pub fn crash(&self, server: Server) {
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
    pub fn intent_path(&self) -> PathBuf {
        let (record, _) = self.record();
        let name = record["intent"]["file"].as_str().unwrap().to_owned();
        self.path("state").join(name)
    }

    /// Files with bits that are left.
    pub fn bits_files(&self) -> usize {
        let files = fs::read_dir(self.path("runtime/journals"))
            .unwrap()
            .flatten();
        files
            .filter(|file| file.path().extension().is_some_and(|end| end == "bits"))
            .count()
    }

    pub fn stop(mut server: Server) {
        assert!(server.terminate().unwrap().success(), "{}", server.log());
    }

    pub fn assert_inconsistent(&self, server: &Server, words: &str) {
        assert_eq!(self.bitmap("b")["inconsistent"], Value::Bool(true));
        server.wait_for_log(&["bitmap 'b' is not continued", words]);
        assert_eq!(self.bits_files(), 0);
    }
}

pub fn blocks(bits: &[u8]) -> BTreeSet<u64> {
    let is_set = |bit: &u64| bits[(bit / 8) as usize] >> (bit % 8) & 1 != 0;
    (0..bits.len() as u64 * 8).filter(is_set).collect()
}

pub fn write(device: &mut Device, block: u64) {
    assert_eq!(
        device.queues[0].write((block * BLOCK) >> 9, &[1; BLOCK as usize]),
        OK
    );
}

/// Writes random blocks, 32 at a time, until `completed` has so many. Returns those that were submitted.
pub fn write_load(
    device: &mut Device,
    random: &mut Random,
    fill: u8,
    completed: &mut BTreeSet<u64>,
    until: usize,
) -> BTreeSet<u64> {
    let queue = &mut device.queues[0];
    let slots = queue.slots().min(32);
    let mut submitted = BTreeSet::new();
    let mut at = vec![0; usize::from(slots)];
    let mut free: Vec<_> = (0..slots).collect();
    while completed.len() < until {
        for slot in free.drain(..) {
            let block = random.below(SIZE / BLOCK);
            at[usize::from(slot)] = block;
            submitted.insert(block);
            queue.write_buffer(slot, &[fill; BLOCK as usize]);
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
    submitted
}

/// Whether processes can be shown another time of the host's start.
pub fn has_time_namespaces(test: &str) -> bool {
    let made = Command::new("unshare").args(["--time", "true"]).status();
    let is_there = made.is_ok_and(|status| status.success());
    if !is_there {
        println!("skipped: {test}: no time namespaces");
    }
    is_there
}

/// A loop device, which is detached at the end.
pub struct Loop(pub String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

impl Loop {
    pub fn new(test: &str, file: &Path) -> Option<Self> {
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
