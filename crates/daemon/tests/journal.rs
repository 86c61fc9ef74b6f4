//! Acknowledged writes of a killed ringdisk, and what others may do with its images before the next start.

mod going_on;

use crate::support;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::qemu_img;
use testkit::server::Server;
use testkit::storage::Storage;

use support::small_fs::SmallFs;
use support::{Disk, content, seed};

/// An image of 64 MiB, and its socket.
struct Image {
    disk: Disk,
    name: String,
    has_state: bool,
}

impl Image {
    /// An empty image; `None` if there is no qemu-img for `test`.
    fn new(test: &str, options: &str) -> Option<Self> {
        let disk = Disk::new();
        let name = "image.qcow2".to_owned();
        let image = Self {
            disk,
            name,
            has_state: false,
        };
        qemu_img::is_there(test).then(|| {
            image.qemu_img(&format!("create -q -f qcow2 {options} {} 64M", image.name));
            image
        })
    }

    fn directory(&self) -> &Path {
        self.disk.file.parent().unwrap()
    }

    fn qemu_img(&self, arguments: &str) {
        qemu_img::img(self.directory(), arguments);
    }

    /// The same after a kill, when the kernel may still be completing writes.
    fn qemu_img_after_kill(&self, arguments: &str) {
        loop {
            let mut command = Command::new("qemu-img");
            command.args(arguments.split(' ')).arg(&self.name);
            let output = command.current_dir(self.directory()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            if !said.contains("lock") {
                assert!(output.status.success(), "{arguments}: {said}");
                return;
            }
        }
    }

    fn command(&self, options: &str) -> Command {
        let (file, socket) = (self.directory().join(&self.name), &self.disk.socket);
        let (file, socket) = (file.display(), socket.display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args([
            "serve",
            "--json",
            &format!("file={file},socket={socket}{options}"),
        ]);
        command.env("RUNTIME_DIRECTORY", self.directory().join("runtime"));
        command.arg("--control").arg(self.control());
        if self.has_state {
            command.arg("--state").arg(self.directory().join("state"));
        }
        command
    }

    fn control(&self) -> PathBuf {
        self.directory().join("control.qmp")
    }

    fn serve(&self, options: &str) -> Server {
        let start = Instant::now();
        loop {
            let command = self.command(options);
            match Server::ringdisk_command(command) {
                // The kernel may still be completing the killed process's writes.
                Err(e) if e.to_string().contains("in use") && start.elapsed() < HANG => {}
                result => return result.unwrap(),
            }
        }
    }
}

fn connect(server: &Server) -> Device {
    Device::connect(server.socket(), &DeviceConfig::default()).unwrap()
}

fn kill(server: Server) {
    server.signal(Signal::KILL);
    drop(server);
}

/// One unflushed write to each of several tables; the cache after the kill holds only four tables.
#[test]
fn small_metadata_cache_loses_nothing() {
    let test = "small_metadata_cache_loses_nothing";
    // Sectors mapped by a table of 512 bytes.
    const REACH: u64 = 64;
    for tables in [5, 8, 300] {
        let Some(image) = Image::new(test, "-o cluster_size=512") else {
            return;
        };
        let server = image.serve("");
        let mut device = connect(&server);
        for table in 0..tables {
            let written = device.queues[0].write(table * REACH, &content(table, 512));
            assert_eq!(written, 0);
        }
        kill(server);
        let mut server = image.serve(",l2-cache-size=1k");
        server.wait_for_log(&["replayed"]);
        let mut device = connect(&server);
        for table in 0..tables {
            let found = device.queues[0].read(table * REACH, 512).unwrap();
            assert!(found == content(table, 512), "{table} of {tables}");
        }
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
        assert!(server.terminate().unwrap().success());
        let after = qemu_img::content(image.directory(), &image.name, "qcow2");
        for table in 0..tables {
            let at = (table * REACH * 512) as usize;
            assert!(after[at..at + 512] == content(table, 512), "{table}");
        }
    }
}

/// A backup is made while everything is flushed, and copied back into the same file after a kill.
#[test]
fn restored_backup_is_not_overwritten_by_the_journal() -> io::Result<()> {
    let test = "restored_backup_is_not_overwritten_by_the_journal";
    let Some(image) = Image::new(test, "") else {
        return Ok(());
    };
    let file = image.directory().join(&image.name);
    let backup = image.directory().join("backup");
    let server = image.serve("");
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &content(1, 1 << 20)), 0);
    assert_eq!(queue.run(Op::Flush, 0, 0), 0);
    fs::copy(&file, &backup)?;
    assert_eq!(queue.write(2048, &content(2, 1 << 20)), 0);
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(queue.run(zeroes, 0, 1024), 0);
    kill(server);
    // This keeps the inode.
    fs::copy(&backup, &file)?;
    let server = image.serve("");
    server.wait_for_log(&["WARN", "is not used", "backup"]);
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert!(queue.read(0, 1 << 20).unwrap() == content(1, 1 << 20));
    assert!(queue.read(2048, 1 << 20).unwrap() == vec![0; 1 << 20]);
    Ok(())
}

/// Images that cannot have a journal lose nothing either, and QEMU's repair of an image keeps its internal snapshots.
#[test]
fn images_without_a_journal_lose_nothing() {
    let test = "images_without_a_journal_lose_nothing";
    for (options, snapshot) in [("-o compat=0.10", false), ("", true)] {
        let Some(image) = Image::new(test, options) else {
            return;
        };
        let mut server = image.serve("");
        assert_eq!(connect(&server).queues[0].write(0, &content(1, 1 << 20)), 0);
        assert!(server.terminate().unwrap().success());
        if snapshot {
            image.qemu_img(&format!("snapshot -c before {}", image.name));
        }
        let server = image.serve("");
        let mut device = connect(&server);
        for n in 0..64 {
            assert_eq!(device.queues[0].write(16 * n, &content(2 + n, 4096)), 0);
        }
        server.wait_for_log(&["is flushed before it completes"]);
        kill(server);
        image.qemu_img_after_kill("check -q -r leaks");
        let server = image.serve("");
        let mut device = connect(&server);
        for n in 0..64 {
            let found = device.queues[0].read(16 * n, 4096).unwrap();
            assert!(found == content(2 + n, 4096), "{options} {n}");
        }
        kill(server);
        if snapshot {
            image.qemu_img_after_kill("snapshot -a before");
            let before = qemu_img::content(image.directory(), &image.name, "qcow2");
            assert!(before[..1 << 20] == content(1, 1 << 20));
        }
    }
}

/// A guest discards all and flushes, and ringdisk is killed, again and again: the space is free each time, on a file that may
/// grow and on a device without any space to spare.
#[test]
fn kills_leak_no_flushed_discards() {
    const BYTES: usize = 8 << 20;
    let test = "kills_leak_no_flushed_discards";
    let Some(mut image) = Image::new(test, "") else {
        return;
    };
    image.qemu_img(&format!("create -q -f qcow2 {} {BYTES}", image.name));
    let full = qemu_img::fully_allocated_size("cluster_size=64k", BYTES as u64);
    for on_device in [false, true] {
        let file = image.directory().join(&image.name);
        let device = on_device.then(|| {
            let file = fs::File::options().write(true).open(&file).unwrap();
            file.set_len(full.next_multiple_of(4096)).unwrap();
            LoopDevice::new(&image.directory().join(&image.name))
        });
        match device.as_ref() {
            Some(None) => return println!("skipped: {test}: no loop device"),
            // An absolute path takes the place of the directory.
            Some(Some(device)) => image.name.clone_from(&device.0),
            None => {}
        }
        for round in 1..4 {
            let server = image.serve(",format=qcow2,discard=unmap");
            let mut guest = connect(&server);
            let queue = &mut guest.queues[0];
            for at in (0..BYTES).step_by(1 << 20) {
                let written = queue.write(at as u64 / 512, &content(round, 1 << 20));
                assert_eq!(written, 0, "{on_device}, round {round}, {at}");
            }
            assert_eq!(queue.run(Op::Discard, 0, BYTES as u32), 0);
            assert_eq!(queue.run(Op::Flush, 0, 0), 0);
            kill(server);
            image.qemu_img_after_kill("check -q");
            assert!(fs::metadata(&file).unwrap().len() <= full + (16 << 20));
        }
    }
}

/// A block device over a file.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["-f", "--show"])
            .arg(file)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        let name = String::from_utf8_lossy(&output.stdout);
        Some(Self(name.trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).output();
    }
}

/// A start is interrupted during a long replay: it stops, and the next start completes the replay.
#[test]
fn replay_can_be_interrupted() -> io::Result<()> {
    let test = "replay_can_be_interrupted";
    const REACH: u64 = 64;
    const TABLES: u64 = 300;
    let Some(mut image) = Image::new(test, "-o cluster_size=512") else {
        return Ok(());
    };
    let mount = image.directory().join("mount");
    fs::create_dir(&mount)?;
    let file = fs::read(image.directory().join(&image.name))?;
    let storage = match Storage::mount(&mount, file, seed()) {
        Ok(storage) => storage,
        Err(e) => {
            println!("skipped: {test}: {e}");
            return Ok(());
        }
    };
    image.name = "mount/disk".into();
    let server = image.serve(",format=qcow2");
    let mut device = connect(&server);
    for table in 0..TABLES {
        let written = device.queues[0].write(table * REACH, &content(table, 512));
        assert_eq!(written, 0);
    }
    kill(server);
    storage.change(|c| c.mishaps.late_ms = 20);
    // Opening takes fewer operations than this; each table of a replay takes several.
    let enough = storage.control().answered + 200;
    let mut starting = image.command(",format=qcow2,l2-cache-size=1k");
    let mut starting = starting.stderr(Stdio::piped()).spawn()?;
    while storage.control().answered < enough {
        assert!(starting.try_wait()?.is_none(), "the start ended early");
        thread::yield_now();
    }
    kill_process(Pid::from_child(&starting), Signal::TERM)?;
    let ended = starting.wait_with_output()?;
    storage.change(|c| c.mishaps.late_ms = 0);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!said.contains("replayed"), "{said}");
    assert!(said.contains("stopped"), "{said}");
    let server = image.serve(",format=qcow2,l2-cache-size=1k");
    server.wait_for_log(&["replayed"]);
    let mut device = connect(&server);
    for table in 0..TABLES {
        let found = device.queues[0].read(table * REACH, 512).unwrap();
        assert!(found == content(table, 512), "{table}");
    }
    Ok(())
}

/// The journals' file system is full: acknowledged writes are durable without a journal.
#[test]
fn full_journal_directory_loses_nothing() -> io::Result<()> {
    let test = "full_journal_directory_loses_nothing";
    for trial in 0..15 {
        let Some(image) = Image::new(test, "") else {
            return Ok(());
        };
        let runtime = image.directory().join("runtime");
        let Some(_mounted) = SmallFs::mount(&runtime, "64k") else {
            return Ok(());
        };
        let server = image.serve("");
        let mut device = connect(&server);
        let queue = &mut device.queues[0];
        let mut filler = fs::File::create(runtime.join("filler"))?;
        while filler.write_all(&[1; 512]).is_ok() {}
        // Into a new cluster and beside it: the second write is done in place while the first one's table is flushed.
        let writes = [(0, content(1, 4096)), (16, content(2, 4096))];
        for (slot, (sector, bytes)) in (0..).zip(&writes) {
            queue.write_buffer(slot, bytes);
            queue.prepare(slot, Op::Write, *sector, bytes.len() as u32);
        }
        queue.submit(&[0, 1]);
        let mut done = [false; 2];
        let first = trial % 2;
        while !done[first] {
            queue.poll(|slot, status| done[usize::from(slot)] = status == 0);
        }
        kill(server);
        fs::remove_file(runtime.join("filler"))?;
        let server = image.serve("");
        let mut device = connect(&server);
        for ((sector, bytes), done) in writes.iter().zip(done) {
            let found = device.queues[0].read(*sector, bytes.len()).unwrap();
            assert!(!done || found == *bytes, "{trial}: sector {sector}");
        }
    }
    Ok(())
}

/// SIGTERM while the image's file system has no space for its tables: acknowledged writes stay in the journal, the log
/// says so, and they are there once there is space. Tables have their space from the moment when they are made, so another
/// program takes it away.
#[test]
fn shutdown_on_a_full_file_system_loses_nothing() -> io::Result<()> {
    let test = "shutdown_on_a_full_file_system_loses_nothing";
    // Sectors mapped by a table of 4096 bytes.
    const REACH: u64 = 4096;
    let Some(mut image) = Image::new(test, "-o cluster_size=4k") else {
        return Ok(());
    };
    let small = image.directory().join("small");
    let Some(_mounted) = SmallFs::mount(&small, "4M") else {
        return Ok(());
    };
    fs::copy(
        image.directory().join(&image.name),
        small.join("image.qcow2"),
    )?;
    image.name = "small/image.qcow2".into();
    let mut server = image.serve(",cache=writeback");
    let mut device = connect(&server);
    for table in 0..16 {
        let written = device.queues[0].write(table * REACH, &content(table, 4096));
        assert_eq!(written, 0);
    }
    let dug = Command::new("fallocate")
        .arg("--dig-holes")
        .arg(small.join("image.qcow2"))
        .status()?;
    assert!(dug.success());
    let mut filler = fs::File::create(small.join("filler"))?;
    while filler.write_all(&[1; 512]).is_ok() {}
    assert!(!server.terminate()?.success());
    let log = server.log();
    assert!(
        log.contains("are in the journal") && !log.contains("may be lost"),
        "{log}"
    );
    drop(filler);
    fs::remove_file(small.join("filler"))?;
    let server = image.serve(",cache=writeback");
    server.wait_for_log(&["replayed"]);
    let mut device = connect(&server);
    for table in 0..16 {
        let found = device.queues[0].read(table * REACH, 4096).unwrap();
        assert!(found == content(table, 4096), "{table}");
    }
    Ok(())
}

/// QEMU commits an overlay into a killed ringdisk's image. It first opens the image read-only, then for writing, which
/// leaves unknown autoclear bits set: the journal must still not be replayed.
#[test]
fn committed_overlay_is_not_overwritten_by_the_journal() {
    let test = "committed_overlay_is_not_overwritten_by_the_journal";
    let Some(image) = Image::new(test, "") else {
        return;
    };
    let server = image.serve("");
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &content(1, 1 << 16)), 0);
    assert_eq!(queue.run(Op::Flush, 0, 0), 0);
    assert_eq!(queue.write(16 << 11, &content(2, 1 << 18)), 0);
    kill(server);
    image.qemu_img_after_kill("info");
    let at = image.directory();
    qemu_img::img(at, "create -q -f qcow2 -b image.qcow2 -F qcow2 above");
    qemu_img::io(
        at,
        "above",
        &["-f", "qcow2"],
        &["write -q -P 7 32M 256k".into()],
    );
    qemu_img::img(at, "commit -q above");
    let mut server = image.serve("");
    server.wait_for_log(&["WARN", "is not used"]);
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert!(queue.read(0, 1 << 16).unwrap() == content(1, 1 << 16));
    assert!(queue.read(32 << 11, 1 << 18).unwrap() == vec![7; 1 << 18]);
    // New clusters do not overlap existing ones.
    assert_eq!(queue.write(48 << 11, &content(3, 1 << 20)), 0);
    assert!(queue.read(32 << 11, 1 << 18).unwrap() == vec![7; 1 << 18]);
    assert!(server.terminate().unwrap().success());
    image.qemu_img_after_kill("check -q");
}

/// While a killed ringdisk's journal is pending, its image is incomplete: it cannot be a backing file, and only the
/// disk itself can be served from it. A backup copied over the image does not lose the journal, until a guest starts on it.
#[test]
fn image_with_a_pending_journal_is_not_read_without_it() -> io::Result<()> {
    let test = "image_with_a_pending_journal_is_not_read_without_it";
    let Some(mut image) = Image::new(test, "") else {
        return Ok(());
    };
    let at = image.directory().to_owned();
    fs::copy(at.join("image.qcow2"), at.join("backup"))?;
    let server = image.serve("");
    let mut device = connect(&server);
    assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    image.qemu_img_after_kill("info");
    qemu_img::img(
        &at,
        "create -q -f qcow2 -b image.qcow2 -F qcow2 above.qcow2",
    );
    for (name, options) in [("image.qcow2", ",readonly=on"), ("above.qcow2", "")] {
        image.name = name.into();
        let output = image.command(options).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.contains("serve that image itself once") && said.contains(".journal");
        assert!(!output.status.success() && told, "{name}: {said}");
    }
    image.name = "image.qcow2".into();
    // The backup gets the same name and the same inode.
    let killed = fs::read(at.join("image.qcow2"))?;
    fs::copy(at.join("backup"), at.join("image.qcow2"))?;
    let mut server = image.serve("");
    server.wait_for_log(&["is not used"]);
    assert!(server.terminate()?.success());
    fs::write(at.join("image.qcow2"), killed)?;
    let mut server = image.serve("");
    server.wait_for_log(&["replayed"]);
    assert!(connect(&server).queues[0].read(0, 1 << 16).unwrap() == content(1, 1 << 16));
    assert!(server.terminate()?.success());
    image.name = "above.qcow2".into();
    let server = image.serve("");
    assert!(connect(&server).queues[0].read(0, 1 << 16).unwrap() == content(1, 1 << 16));
    drop(server);
    // No directory for journals.
    image.name = "image.qcow2".into();
    let server = image.serve("");
    let mut device = connect(&server);
    assert_eq!(device.queues[0].write(1 << 11, &content(2, 1 << 16)), 0);
    kill(server);
    let runtime = at.join("runtime");
    fs::rename(&runtime, at.join("elsewhere"))?;
    fs::create_dir(&runtime)?;
    fs::write(runtime.join("journals"), [])?;
    let mut server = image.serve("");
    server.wait_for_log(&["WARN", "says that it has a journal"]);
    assert!(server.terminate()?.success());
    // Nothing was written, so the journal is still the image's.
    fs::remove_dir_all(&runtime)?;
    fs::rename(at.join("elsewhere"), &runtime)?;
    let server = image.serve("");
    assert!(connect(&server).queues[0].read(1 << 11, 1 << 16).unwrap() == content(2, 1 << 16));
    Ok(())
}

/// Nothing is missing in an image whose changes were flushed, or replayed, before the kill: it may be read, and be a backing file.
#[test]
fn image_whose_journal_has_nothing_left_is_read_without_it() -> io::Result<()> {
    let test = "image_whose_journal_has_nothing_left_is_read_without_it";
    for (is_replayed, has_bitmap) in [(false, false), (false, true), (true, false)] {
        let Some(mut image) = Image::new(test, "") else {
            return Ok(());
        };
        let at = image.directory().to_owned();
        let server = image.serve("");
        let mut device = connect(&server);
        assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
        if !is_replayed {
            assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
        }
        if has_bitmap {
            let mut add = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            add.args(["bitmap", "add", "image", "b", "--persistent", "--control"]);
            assert!(add.arg(image.control()).status()?.success());
        }
        kill(server);
        if is_replayed {
            let server = image.serve("");
            server.wait_for_log(&["replayed"]);
            kill(server);
        }
        image.qemu_img_after_kill("info");
        qemu_img::img(
            &at,
            "create -q -f qcow2 -b image.qcow2 -F qcow2 above.qcow2",
        );
        for (name, options) in [("image.qcow2", ",readonly=on"), ("above.qcow2", "")] {
            image.name = name.into();
            let server = image.serve(options);
            let config = DeviceConfig::default();
            let mut device = Device::connect(server.socket(), &config)?;
            assert!(device.queues[0].read(0, 1 << 16).unwrap() == content(1, 1 << 16));
            let log = server.log();
            assert!(!log.contains("WARN"), "{name}: {log}");
        }
    }
    Ok(())
}

/// The journal of a killed ringdisk is damaged: its image is not opened as if there were no journal, neither for
/// writing nor for reading.
#[test]
fn damaged_journal_keeps_its_image_closed() -> io::Result<()> {
    let Some(image) = Image::new("damaged_journal_keeps_its_image_closed", "") else {
        return Ok(());
    };
    let server = image.serve("");
    let mut device = connect(&server);
    assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    image.qemu_img_after_kill("info");
    let mut journals = fs::read_dir(image.directory().join("runtime/journals"))?;
    let journal = journals.next().unwrap()?.path();
    let whole = fs::read(&journal)?;
    let mut damaged = whole.clone();
    damaged[..4096].fill(0);
    fs::write(&journal, damaged)?;
    for options in ["", ",readonly=on"] {
        let output = image.command(options).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.contains(&*journal.to_string_lossy());
        assert!(!output.status.success() && told, "{options}: {said}");
    }
    fs::write(&journal, whole)?;
    let mut server = image.serve("");
    server.wait_for_log(&["replayed"]);
    assert!(connect(&server).queues[0].read(0, 1 << 16).unwrap() == content(1, 1 << 16));
    assert!(server.terminate()?.success());
    Ok(())
}

/// An image that cannot be opened leaves no journal behind.
#[test]
fn refused_image_leaves_no_journal() -> io::Result<()> {
    let Some(image) = Image::new("refused_image_leaves_no_journal", "") else {
        return Ok(());
    };
    let path = image.directory().join(&image.name);
    let mut bytes = fs::read(&path)?;
    // No qcow2 image has this magic number.
    bytes[0] = b'!';
    fs::write(&path, bytes)?;
    let output = image.command("").output()?;
    assert!(!output.status.success());
    let journals = image.directory().join("runtime/journals");
    let left: Vec<_> = fs::read_dir(journals)?.collect();
    assert!(left.is_empty(), "{left:?}");
    Ok(())
}
