//! Real Linux guests on ringdisk's disks: a disk's usual life, checked in the guest and on the host.

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;
use testkit::memory::HugePages;
use testkit::server::Server;
use testkit::vm::{self, Disk, Qmp, Vm};

use crate::support;

/// A guest finishes within 20 s even if it is emulated; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(240);

#[test]
fn disk_lifecycle_with_one_queue() -> Result<()> {
    run_disk_lifecycle("disk_lifecycle_with_one_queue", 1, 1024, false)
}

#[test]
fn disk_lifecycle_with_four_queues() -> Result<()> {
    run_disk_lifecycle("disk_lifecycle_with_four_queues", 4, 4096, false)
}

#[test]
fn disk_lifecycle_with_packed_queues() -> Result<()> {
    run_disk_lifecycle("disk_lifecycle_with_packed_queues", 2, 4096, true)
}

/// The guest partitions, formats, fills, trims and verifies the disk; on the host it is consistent and has holes.
fn run_disk_lifecycle(test: &str, queues: u16, block_size: u32, packed: bool) -> Result<()> {
    let Some(bench) = Setup::new(test)? else {
        return Ok(());
    };
    let size = 192 << 20;
    let file = bench.disk("life.raw", size)?;
    let server = bench.serve(&[format!(
        "{},serial=life,queues={queues}",
        bench.options(&file)
    )])?;

    let mut filled = 0;
    let script = format!(
        "[ $(ls /sys/block/vda/mq | wc -l) = {queues} ] || {{ echo 'not {queues} queues'; exit 1; }}
         [ $(cut -c35 /sys/block/vda/device/features) = {} ] || {{ echo 'the wrong kind of queues'; exit 1; }}
         [ \"$(cat /sys/block/vda/queue/write_cache)\" = 'write back' ] || {{ echo 'no write cache'; exit 1; }}
         {}",
        u8::from(packed),
        vm::disk_lifecycle("life", block_size)
    );
    let guest = if packed {
        bench.guest(&server).packed()
    } else {
        bench.guest(&server)
    };
    let output = guest
        .cpus(queues.into())
        .run_watched(&script, LIMIT, &mut |line, _| {
            if line == "ok fill" {
                filled = allocated(&file);
            }
        })?;
    output.checked()?;
    stop(server)?;

    ensure!(
        filled > size * 8 / 10,
        "the guest filled its disk, but only {filled} of {size} bytes are allocated"
    );
    let trimmed = allocated(&file);
    ensure!(
        trimmed < size / 2,
        "the guest trimmed its disk, but {trimmed} of {size} bytes are still allocated"
    );
    check_file_system(&file)
}

/// Huge pages are mapped and unmapped as a whole.
#[test]
fn guest_in_huge_pages() -> Result<()> {
    let test = "guest_in_huge_pages";
    let Some(bench) = Setup::new(test)? else {
        return Ok(());
    };
    let memory = match HugePages::reserve(512 << 20) {
        Ok(pages) => pages,
        Err(why) => {
            println!("skipped: {test}: {why}");
            return Ok(());
        }
    };
    let file = bench.disk("huge.raw", 192 << 20)?;
    let server = bench.serve(&[format!("{},serial=huge", bench.options(&file))])?;
    let mut mapped = false;
    let output = bench.guest(&server).hugepages().run_watched(
        &vm::disk_lifecycle("huge", 4096),
        LIMIT,
        &mut |line, _| {
            if line == "ok copy" {
                mapped = huge_kib(&server) > 0;
            }
        },
    )?;
    output.checked()?;
    ensure!(mapped, "the guest's memory was not in huge pages");
    let left = huge_kib(&server);
    ensure!(left == 0, "{left} KiB of huge pages are still mapped");
    stop(server)?;
    drop(memory);
    check_file_system(&file)
}

/// Huge pages touched by the server, in KiB.
fn huge_kib(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("HugetlbPages:"));
    let count = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    count.unwrap_or(0)
}

/// How much of the guest's memory modules of this size the server has touched.
fn touched_kib(server: &Server, size_kib: u64) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{}/smaps", server.pid())).unwrap_or_default();
    let field = |line: &str, name| {
        let value = line.strip_prefix::<&str>(name)?;
        value.split_whitespace().next()?.parse::<u64>().ok()
    };
    let (mut is_it, mut touched) = (false, 0);
    for line in maps.lines() {
        if let Some(size) = field(line, "Size:") {
            is_it = size == size_kib;
        } else if let Some(resident) = field(line, "Rss:").filter(|_| is_it) {
            touched += resident;
        }
    }
    touched
}

/// Memory is plugged in while the guest reads and writes: its queues continue, and use the memory as soon as the guest
/// does.
#[test]
fn memory_hotplug() -> Result<()> {
    let Some(bench) = Setup::new("memory_hotplug")? else {
        return Ok(());
    };
    let file = bench.disk("plug.raw", 192 << 20)?;
    let server = bench.serve(&[format!("{},serial=plug,queues=2", bench.options(&file))])?;
    let monitor = bench.files.path().join("qmp");
    let (mut plugged, mut touched) = (Vec::new(), Vec::new());
    let mut on_line = |line: &str, _| {
        if let Some(name) = line.strip_prefix("plug ") {
            plugged.push(Qmp::connect(&monitor).and_then(|mut qmp| qmp.plug_memory(name, 256)));
        } else if line.ends_with("is in use") {
            touched.push(touched_kib(&server, 256 << 10));
        }
    };
    let output = bench
        .guest(&server)
        .cpus(2)
        .packed()
        .hotplug_memory_by(&monitor)
        .run_watched(
            "memory() { sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo; }
             echo online_kernel >/sys/devices/system/memory/auto_online_blocks
             head -c 8000000 /dev/urandom >/tmp/data
             dd if=/tmp/data of=/dev/vda bs=64k seek=1024 conv=fsync,notrunc 2>/dev/null
             # The queues are never idle.
             (until [ -e /tmp/enough ]; do
                 dd if=/dev/vda bs=64k skip=1024 count=32 iflag=direct 2>/dev/null | cmp -n 2097152 - /tmp/data || exit 1
              done) &
             reader=$!
             for module in one two; do
                 before=$(memory)
                 echo plug $module
                 tries=0
                 until [ $(memory) -gt $((before + 200000)) ]; do
                     tries=$((tries + 1))
                     [ $tries -lt 600 ] || { echo \"$module did not come\"; exit 1; }
                     sleep 0.1
                 done
                 # The kernel prefers memory beyond 4 GiB, which is the new one.
                 for part in 1 2; do
                     dd if=/tmp/data of=/dev/vda bs=64k seek=$((256 * part - 256)) conv=notrunc 2>/dev/null
                 done
                 sync
                 echo 3 >/proc/sys/vm/drop_caches
                 for part in 1 2; do
                     dd if=/dev/vda bs=64k skip=$((256 * part - 256)) count=256 2>/dev/null | head -c 8000000 | cmp - /tmp/data
                 done
                 echo \"$module is in use\"
             done
             touch /tmp/enough
             wait $reader",
            LIMIT,
            &mut on_line,
        )?;
    plugged.into_iter().collect::<Result<Vec<_>>>()?;
    let lines = output.checked()?.lines;
    let expected = ["plug one", "one is in use", "plug two", "two is in use"];
    ensure!(lines == expected, "the guest printed {lines:?}");
    ensure!(
        touched[0] > 4 << 10,
        "of the new memory, the disk has seen {touched:?} KiB"
    );
    ensure!(
        !server.log().contains(support::QUEUE_RETIRED),
        "a queue was retired:\n{}",
        server.log()
    );
    stop(server)
}

/// Memory is plugged in, used for I/O and removed, twice, while the guest reads and writes: its queues continue, and
/// the module is unmapped completely.
#[test]
fn memory_unplug() -> Result<()> {
    let Some(bench) = Setup::new("memory_unplug")? else {
        return Ok(());
    };
    let file = bench.disk("unplug.raw", 192 << 20)?;
    let server = bench.serve(&[format!("{},serial=unplug,queues=2", bench.options(&file))])?;
    let monitor = bench.files.path().join("qmp");
    let (mut changed, mut touched) = (Vec::new(), Vec::new());
    let mut on_line = |line: &str, _| {
        let monitor = || Qmp::connect(&monitor);
        if let Some(name) = line.strip_prefix("plug ") {
            changed.push(monitor().and_then(|mut qmp| qmp.plug_memory(name, 256)));
        } else if let Some(name) = line.strip_prefix("unplug ") {
            touched.push(touched_kib(&server, 256 << 10));
            changed.push(monitor().and_then(|mut qmp| qmp.unplug_memory(name)));
            touched.push(touched_kib(&server, 256 << 10));
        }
    };
    let output = bench
        .guest(&server)
        .cpus(2)
        .hotplug_memory_by(&monitor)
        .run_watched(
            "memory() { sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo; }
             until_memory() {
                 tries=0
                 until [ $(memory) $1 $2 ]; do
                     tries=$((tries + 1))
                     [ $tries -lt 600 ] || { echo \"memory is $(memory) and not $1 $2\"; exit 1; }
                     sleep 0.1
                 done
             }
             # Only what can be moved elsewhere goes into such memory, so that it can be given back.
             echo online_movable >/sys/devices/system/memory/auto_online_blocks
             head -c 8000000 /dev/urandom >/tmp/data
             dd if=/tmp/data of=/dev/vda bs=64k seek=1024 conv=fsync,notrunc 2>/dev/null
             # The queues are never idle.
             (until [ -e /tmp/enough ]; do
                 dd if=/dev/vda bs=64k skip=1024 count=32 iflag=direct 2>/dev/null | cmp -n 2097152 - /tmp/data || exit 1
              done) &
             reader=$!
             before=$(memory)
             for module in one two; do
                 echo plug $module
                 until_memory -gt $((before + 200000))
                 for part in 1 2; do
                     dd if=/tmp/data of=/dev/vda bs=64k seek=$((256 * part - 256)) conv=notrunc 2>/dev/null
                 done
                 sync
                 # A program's own memory may be moved, so it goes there first.
                 for part in 1 2; do
                     dd if=/dev/vda bs=16M skip=$((part - 1)) count=1 iflag=direct 2>/dev/null | cmp -n 8000000 - /tmp/data
                 done
                 echo unplug $module
                 until_memory -lt $((before + 100000))
                 echo 3 >/proc/sys/vm/drop_caches
                 for part in 1 2; do
                     dd if=/dev/vda bs=64k skip=$((256 * part - 256)) count=256 2>/dev/null | head -c 8000000 | cmp - /tmp/data
                 done
                 echo \"$module is gone\"
             done
             touch /tmp/enough
             wait $reader",
            2 * LIMIT,
            &mut on_line,
        )?;
    changed.into_iter().collect::<Result<Vec<_>>>()?;
    let lines = output.checked()?.lines;
    let expected = [
        "plug one",
        "unplug one",
        "one is gone",
        "plug two",
        "unplug two",
        "two is gone",
    ];
    ensure!(lines == expected, "the guest printed {lines:?}");
    ensure!(
        touched[0] > 4 << 10 && touched[1] == 0 && touched[3] == 0,
        "of the memory, before and after it was taken away, the disk has {touched:?} KiB"
    );
    ensure!(
        !server.log().contains(support::QUEUE_RETIRED),
        "a queue was retired:\n{}",
        server.log()
    );
    stop(server)
}

/// A rebooting guest resets its disk and finds its data again; so does a guest that rebinds its driver.
#[test]
fn disk_survives_resets() -> Result<()> {
    let Some(bench) = Setup::new("disk_survives_resets")? else {
        return Ok(());
    };
    let file = bench.disk("reset.raw", 64 << 20)?;
    let server = bench.serve(&[format!("{},serial=reset", bench.options(&file))])?;

    let output = bench.guest(&server).may_reboot().run(
        "mount /dev/vda /mnt 2>/tmp/mount && { cat /mnt/mark; umount /mnt; exit 0; }
         mkfs.ext4 -q /dev/vda
         device=$(basename $(readlink /sys/block/vda/device))
         for i in 1 2 3; do
             echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
             [ ! -b /dev/vda ]
             echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
         done
         mount /dev/vda /mnt
         echo 'written before the reboot' >/mnt/mark
         umount /mnt
         reboot -f
         sleep 60",
        LIMIT,
    )?;
    let lines = output.checked()?.lines;
    ensure!(
        lines == ["written before the reboot"],
        "the guest printed {lines:?}"
    );
    stop(server)
}

/// Every disk of one process has its own serial, size and content.
#[test]
fn several_disks_in_one_process() -> Result<()> {
    let Some(bench) = Setup::new("several_disks_in_one_process")? else {
        return Ok(());
    };
    let sizes: Vec<(String, u64)> = (1..=4)
        .map(|n| (format!("disk-{n}"), (16 + n) << 20))
        .collect();
    let mut options = Vec::new();
    for (serial, size) in &sizes {
        let file = bench.disk(&format!("{serial}.raw"), *size)?;
        File::options()
            .write(true)
            .open(&file)?
            .write_all(format!("content of {serial}\n").as_bytes())?;
        options.push(format!("{},serial={serial},queues=2", bench.options(&file)));
    }
    let server = bench.serve(&options)?;

    let output = bench.guest(&server).cpus(2).run(
        "for n in 1 2 3 4; do
             device=$(disk disk-$n)
             echo $(blockdev --getsize64 $device) $(head -n 1 $device)
             dd if=/dev/urandom of=/tmp/$n bs=1M count=4 2>/dev/null
         done
         for n in 1 2 3 4; do dd if=/tmp/$n of=$(disk disk-$n) bs=64k seek=16 conv=fsync 2>/dev/null & done
         wait
         echo 3 >/proc/sys/vm/drop_caches
         for n in 1 2 3 4; do dd if=$(disk disk-$n) bs=64k skip=16 count=64 2>/dev/null | cmp - /tmp/$n; done",
        LIMIT,
    )?;
    let lines = output.checked()?.lines;
    let expected: Vec<String> = sizes
        .iter()
        .map(|(serial, size)| format!("{size} content of {serial}"))
        .collect();
    ensure!(
        lines == expected,
        "the guest printed {lines:?} and not {expected:?}"
    );
    stop(server)
}

/// A guest can read a read-only disk, and knows that it cannot write.
#[test]
fn readonly_disk() -> Result<()> {
    let Some(bench) = Setup::new("readonly_disk")? else {
        return Ok(());
    };
    let file = bench.disk("readonly.raw", 16 << 20)?;
    File::options()
        .write(true)
        .open(&file)?
        .write_all(b"only to be read\n")?;
    let before = fs::read(&file)?;
    let server = bench.serve(&[format!("{},serial=ro,readonly=on", bench.options(&file))])?;

    let output = bench.guest(&server).run(
        "head -n 1 /dev/vda
         blockdev --getro /dev/vda
         ! dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2>/dev/null
         ! blkdiscard /dev/vda 2>/dev/null",
        LIMIT,
    )?;
    let lines = output.checked()?.lines;
    ensure!(
        lines == ["only to be read", "1"],
        "the guest printed {lines:?}"
    );
    stop(server)?;
    ensure!(fs::read(&file)? == before, "a read-only file has changed");
    Ok(())
}

/// Each fsync of a guest reaches the underlying device as a flush. It is lost where the config space denies a write
/// cache, as that of qemu-storage-daemon 10 does. Counted by the block layer on a loop device.
#[test]
fn guest_fsync_is_a_barrier() -> Result<()> {
    let test = "guest_fsync_is_a_barrier";
    let Some(bench) = Setup::new(test)? else {
        return Ok(());
    };
    let file = bench.disk("fsync.raw", 64 << 20)?;
    let loop_device = match LoopDevice::on(&file) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {test}: a loop device is needed: {error:#}");
            return Ok(());
        }
    };
    let server = bench.serve(&[format!(
        "{},serial=fsync,format=raw",
        bench.options(&loop_device.0)
    )])?;

    let before = loop_device.flushes()?;
    let output = bench.guest(&server).run(
        "for i in $(seq 50); do dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=$i conv=fsync,notrunc 2>/dev/null; done",
        LIMIT,
    )?;
    output.checked()?;
    let flushes = loop_device.flushes()? - before;
    stop(server)?;
    ensure!(
        flushes >= 50,
        "the guest called fsync 50 times, the device saw {flushes} flushes"
    );
    Ok(())
}

/// The files of a test.
struct Setup {
    /// Disks and sockets; a short path, because a socket's path is limited to 108 bytes.
    files: TempDir,
    /// Logs that are kept when the test fails.
    logs: PathBuf,
}

impl Setup {
    /// Prints a message and returns `None` where no guest can run.
    fn new(test: &str) -> Result<Option<Setup>> {
        if let Some(missing) = vm::missing(false) {
            println!("skipped: {test}: {missing}");
            return Ok(None);
        }
        let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
        Ok(Some(Setup {
            files: tempfile::tempdir().context("making a folder for disks")?,
            logs,
        }))
    }

    fn disk(&self, name: &str, size: u64) -> Result<PathBuf> {
        let path = self.files.path().join(name);
        File::create(&path)?
            .set_len(size)
            .with_context(|| format!("making {}", path.display()))?;
        Ok(path)
    }

    fn options(&self, file: &Path) -> String {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        format!(
            "file={},socket={}/{name}.sock",
            file.display(),
            self.files.path().display()
        )
    }

    fn serve(&self, disks: &[String]) -> Result<Server> {
        // setpriv: a server must not outlive a killed test run.
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                env!("CARGO_BIN_EXE_ringdisk"),
                "serve",
                "--json",
            ])
            .args(disks);
        Server::ringdisk_command(command).context("starting ringdisk")
    }

    /// A guest with every disk of the server, using the arguments that ringdisk prints.
    fn guest(&self, server: &Server) -> Vm {
        let disks = server.ready["disks"].as_array().into_iter().flatten();
        let arguments = disks.map(|disk| {
            let arguments = disk["qemu"].as_array().into_iter().flatten();
            arguments
                .filter_map(|argument| argument.as_str().map(String::from))
                .collect()
        });
        arguments.fold(Vm::new(&self.logs), |vm, arguments| {
            vm.disk(Disk::Printed(arguments))
        })
    }
}

/// SIGTERM shuts ringdisk down in time, without an error or a leftover socket.
fn stop(mut server: Server) -> Result<()> {
    let pid = server.pid();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send((server.terminate(), server)));
    let Ok((status, server)) = receiver.recv_timeout(Duration::from_secs(10)) else {
        kill_process(
            Pid::from_raw(pid as i32).context("no process")?,
            Signal::KILL,
        )?;
        anyhow::bail!("ringdisk still runs 10 s after SIGTERM");
    };
    let status = status?;
    ensure!(
        status.success(),
        "ringdisk ended with {status}; its log:\n{}",
        server.log()
    );
    for socket in &server.sockets {
        ensure!(
            !socket.exists(),
            "ringdisk left {} behind",
            socket.display()
        );
    }
    Ok(())
}

fn allocated(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |metadata| metadata.blocks() * 512)
}

/// Asserts that the file system on the first partition has no errors.
fn check_file_system(file: &Path) -> Result<()> {
    let e2fsck = vm::find_program("e2fsck").context("e2fsck is missing")?;
    let output = Command::new(e2fsck)
        .arg("-fn")
        .arg(format!("{}?offset={}", file.display(), 1 << 20))
        .output()?;
    ensure!(
        output.status.success(),
        "e2fsck: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

/// A block device on a file, until dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn on(file: &Path) -> Result<LoopDevice> {
        let losetup = vm::find_program("losetup").context("losetup is missing")?;
        let output = Command::new(losetup)
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(LoopDevice(PathBuf::from(
            String::from_utf8_lossy(&output.stdout).trim(),
        )))
    }

    /// Flush requests that the device has completed (kernel, Documentation/block/stat.rst).
    fn flushes(&self) -> Result<u64> {
        let name = self.0.file_name().unwrap_or_default().to_string_lossy();
        let stat = fs::read_to_string(format!("/sys/block/{name}/stat"))?;
        stat.split_whitespace()
            .nth(15)
            .and_then(|count| count.parse().ok())
            .context("no flushes in the device's stat")
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let losetup = vm::find_program("losetup").unwrap_or("losetup".into());
        Command::new(losetup)
            .arg("--detach")
            .arg(&self.0)
            .status()
            .ok(); // what else could be done
    }
}
