//! A VM migrates between two ringdisks that share its storage, and locks allow only one writer at a time.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::Server;
use testkit::vm::{self, Vm};

use crate::support;

const SIZE: u64 = 64 << 20;

/// Two hosts with shared storage.
struct Hosts {
    files: TempDir,
    disk: PathBuf,
    servers: [Server; 2],
}

impl Hosts {
    fn new(format: &str, options: [&str; 2]) -> Result<Self> {
        // Where the test was built: the file system for temporary files may lack O_DIRECT.
        let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let disk = files.path().join(format!("d.{format}"));
        match format {
            "raw" => File::create(&disk)?.set_len(SIZE)?,
            _ => {
                let mut image = Command::new("qemu-img");
                image.args(["create", "-q", "-f", format]).arg(&disk);
                let made = image.arg(SIZE.to_string()).status().context("qemu-img")?;
                ensure!(made.success(), "qemu-img: {made}");
            }
        }
        let serve = |host: usize| {
            let socket = files.path().join(format!("{host}.sock"));
            let argument = format!(
                "file={},socket={},format={format},{}",
                disk.display(),
                socket.display(),
                options[host]
            );
            let control = files.path().join(format!("{host}.qmp"));
            let control = control.display().to_string();
            Server::ringdisk(
                env!("CARGO_BIN_EXE_ringdisk"),
                &[argument.as_str(), "--control", &control],
            )
        };
        let servers = [serve(0)?, serve(1)?];
        Ok(Self {
            files,
            disk,
            servers,
        })
    }

    /// A front-end that has started its rings.
    fn connect(&self, host: usize) -> std::io::Result<Device> {
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        Device::connect(self.servers[host].socket(), &config)
    }
}

/// Stops the rings, as QEMU does when its VM stops.
fn stop(mut device: Device) -> Result<()> {
    for queue in 0..device.queues.len() {
        device.stop_queue(queue)?;
    }
    Ok(())
}

fn pattern(round: u8) -> Vec<u8> {
    (0..8192u32).map(|i| (i * 7) as u8 ^ round).collect()
}

/// Each host reads what the other wrote, and neither gets the disk while the other has it.
fn assert_one_writer_at_a_time(format: &str, options: &str) -> Result<()> {
    let options = format!("{options},lock=running");
    let hosts = Hosts::new(format, [&options, &options])?;
    for round in 0..6u8 {
        let (here, there) = (usize::from(round % 2), usize::from(1 - round % 2));
        let mut device = hosts.connect(here)?;
        let queue = &mut device.queues[1];
        let sector = |round: u8| u64::from(round) * 4096;
        if let Some(before) = round.checked_sub(1) {
            let read = queue.read(sector(before), 8192);
            ensure!(read == Ok(pattern(before)), "what the other host wrote");
        }
        ensure!(queue.write(sector(round), &pattern(round)) == 0);

        // The other host tries for three seconds, then gives the reason.
        ensure!(hosts.connect(there).is_err(), "two writers");
        // The log line may come a moment after the end of the connection.
        let start = Instant::now();
        let refusals = || {
            let log = hosts.servers[there].log();
            log.matches("in use by another process").count()
        };
        while refusals() <= usize::from(round / 2) {
            ensure!(start.elapsed() < HANG, "{}", hosts.servers[there].log());
            thread::sleep(Duration::from_millis(10));
        }

        // This host continues, whatever the other one tried.
        let queue = &mut device.queues[0];
        ensure!(queue.read(sector(round), 8192) == Ok(pattern(round)));
        stop(device)?;
        let locked = Command::new("qemu-img")
            .args(["info"])
            .arg(&hosts.disk)
            .output()?;
        ensure!(locked.status.success(), "nobody has it now: {locked:?}");
    }
    for mut server in hosts.servers {
        ensure!(server.terminate()?.success());
    }
    check(&hosts.disk, format)
}

#[test]
fn raw_file_has_one_writer_at_a_time() -> Result<()> {
    assert_one_writer_at_a_time("raw", "cache=none")
}

#[test]
fn raw_file_in_the_page_cache_has_one_writer_at_a_time() -> Result<()> {
    assert_one_writer_at_a_time("raw", "cache=writeback")
}

#[test]
fn qcow2_image_has_one_writer_at_a_time() -> Result<()> {
    assert_one_writer_at_a_time("qcow2", "cache=writeback")
}

fn check(disk: &Path, format: &str) -> Result<()> {
    if format == "qcow2" {
        let check = Command::new("qemu-img").arg("check").arg(disk).output()?;
        ensure!(check.status.success(), "{check:?}");
    }
    Ok(())
}

/// A released disk, or one whose VM runs on another host, cannot be changed from here.
#[test]
fn released_disk_cannot_be_changed() -> Result<()> {
    let hosts = Hosts::new("raw", ["lock=running", "lock=running"])?;
    let resize = |host: usize| {
        Command::new(env!("CARGO_BIN_EXE_ringdisk"))
            .args(["resize", "d", "128M", "--control"])
            .arg(hosts.files.path().join(format!("{host}.qmp")))
            .output()
    };
    let away = resize(0)?;
    let error = String::from_utf8_lossy(&away.stderr);
    ensure!(
        !away.status.success() && error.contains("no VM runs on it here"),
        "{error}"
    );
    let device = hosts.connect(0)?;
    ensure!(resize(0)?.status.success());
    stop(device)?;
    // The other host sees the change when it acquires the disk.
    let mut device = hosts.connect(1)?;
    ensure!(device.config()?.capacity == (128 << 20) / 512);
    let last = device.queues[0].read((128 << 20) / 512 - 8, 4096);
    ensure!(last == Ok(vec![0; 4096]));
    Ok(())
}

/// A host without lock=running keeps the lock for as long as it serves the disk.
#[test]
fn lock_always_keeps_the_lock_after_the_vm_stops() -> Result<()> {
    let hosts = Hosts::new("raw", ["lock=always", "lock=running"])?;
    stop(hosts.connect(0)?)?;
    ensure!(hosts.connect(1).is_err());
    Ok(())
}

/// Migrations per guest.
const MIGRATIONS: usize = 10;

#[test]
fn guest_on_raw_migrates_back_and_forth() -> Result<()> {
    migrate_guest(
        "guest_on_raw_migrates_back_and_forth",
        "raw",
        "cache=none",
        false,
    )
}

#[test]
fn guest_on_qcow2_with_packed_rings_migrates_back_and_forth() -> Result<()> {
    let test = "guest_on_qcow2_with_packed_rings_migrates_back_and_forth";
    migrate_guest(test, "qcow2", "cache=writeback", true)
}

/// fio verifies all its writes while its guest migrates between two QEMUs, each with its own ringdisk.
fn migrate_guest(test: &str, format: &str, cache: &str, packed: bool) -> Result<()> {
    if let Some(missing) = vm::missing(true) {
        println!("skipped: {test}: {missing}");
        return Ok(());
    }
    // The first host was not prepared for a migration.
    let common = format!("{cache},queues=2");
    let away = format!("{common},lock=running");
    let hosts = Hosts::new(format, [&common, &away])?;
    let signal = hosts.files.path().join("signal.raw");
    File::create(&signal)?.set_len(4096)?;
    let disks = |host: usize| {
        let socket = hosts.servers[host].socket().display();
        let pasted = [
            "-chardev",
            &format!("socket,id=disk,path={socket},reconnect-ms=100"),
            "-device",
            "vhost-user-blk-pci,chardev=disk,num-queues=2,queue-size=128",
        ];
        vec![
            vm::Disk::Printed(pasted.map(String::from).to_vec()),
            vm::Disk::Qemu {
                file: signal.clone(),
                cache: "writeback",
                aio: "threads",
                queues: 1,
                serial: "signal".into(),
            },
        ]
    };
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let mut guest = Vm::new(logs).cpus(2).memory_mib(384).fio();
    if packed {
        guest = guest.packed();
    }
    let mut moves = Vec::new();
    let guests = [0, 1].map(|host| disks(host).into_iter().fold(guest.clone(), Vm::disk));
    let output = vm::run_migrating(
        &guests,
        MIGRATIONS,
        "load() {
             fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bsrange=4k-64k \\
                 --size=24M --verify=crc32c --verify_backlog=16 --verify_fatal=1 --numjobs=2 --offset_increment=28M \\
                 --group_reporting --eta=never --output=/tmp/fio --randrepeat=0 || { cat /tmp/fio; echo 'fio failed'; exit 1; }
         }
         echo migrate me
         rounds=0
         until dd if=/dev/vdb bs=512 count=1 iflag=direct 2>/dev/null | grep -q enough; do
             load
             rounds=$((rounds + 1))
         done
         load
         [ $rounds -ge 2 ] || echo \"only $rounds rounds\"
         echo rounds $rounds
         dmesg | grep -iE 'i/o error|blk_update|reset' && exit 1 || true",
        // The machine may be busy.
        Duration::from_secs(900),
        &mut |number, moved| {
            println!("move {number}: {moved:?}");
            moves.push(moved);
            if moves.len() == MIGRATIONS {
                File::options().write(true).open(&signal)?.write_all(b"enough")?;
            }
            Ok(())
        },
    )?;
    let lines = output.checked()?.lines;
    println!("{lines:?}");
    let (mut left, mut came) = (0, 0);
    for mut server in hosts.servers {
        ensure!(server.terminate()?.success());
        let log = server.log();
        support::assert_all_served(&log);
        left += log.matches("its VM has stopped to go on elsewhere").count();
        came += log.matches("a VM starts on it;").count();
    }
    ensure!(
        left == MIGRATIONS && came == MIGRATIONS,
        "left {left} times, came {came} times"
    );
    check(&hosts.disk, format)?;
    let longest = moves.iter().map(|m| m.downtime).max().unwrap_or_default();
    println!("{MIGRATIONS} moves, longest downtime {longest:?}");
    drop(fs::remove_file(&signal));
    Ok(())
}
