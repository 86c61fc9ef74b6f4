//! A running guest migrates from each QEMU to the next newer one, each with its own ringdisk.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use testkit::compatibility::Record;
use testkit::qemu::{RELEASES, Release};
use testkit::qemu_img;
use testkit::server::Server;
use testkit::vm::{self, Vm};

use super::{DATA_BYTES, Disk, LIMIT, disk, reconnects, report};
use crate::support;

const DISKS: [Disk; 2] = [
    disk("split", 1, 128, "raw"),
    disk("packed", 4, 256, "qcow2"),
];

/// The oldest QEMU's machine type, and a CPU that all of them can emulate.
const HARDWARE: (&str, &str) = ("pc-q35-7.2", "Nehalem");

#[test]
fn migrates_to_each_newer_qemu() {
    let test = "matrix, migration";
    if let Some(missing) = vm::missing(true) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let mut releases = Vec::new();
    for name in RELEASES {
        match Release::find(name) {
            Ok(release) => releases.push(release),
            Err(error) => println!("skipped: {test}: {error:#}"),
        }
    }
    if releases.len() < 2 {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = |name: &str| folder.path().join(name);
    for disk in &DISKS {
        let create = format!(
            "create -q -f {0} {1}.{0} {DATA_BYTES}",
            disk.format,
            disk.name()
        );
        qemu_img::img(folder.path(), &create);
    }
    let signal = place("signal.raw");
    fs::write(&signal, [0; 4096]).unwrap();

    let (mut servers, hosts) = start_hosts(&releases, folder.path(), &signal);
    let migrations = releases.len() - 1;
    let begin = |number: usize| {
        let (from, to) = (&releases[number], &releases[number + 1]);
        let mut record = Record::new("QEMU", &format!("{} ({})", to.version, to.name));
        record.begin(&format!("live migration from {}", from.version));
        record
    };
    let (mut record, mut start) = (begin(0), Instant::now());
    let output = vm::run_migrating(&hosts, migrations, SCRIPT, LIMIT, &mut |number, moved| {
        report(
            &releases[number + 1],
            &format!("live migration, {moved:?}"),
            start,
        );
        start = Instant::now();
        if number + 1 < migrations {
            record.passed();
            record = begin(number + 1);
        } else {
            File::options()
                .write(true)
                .open(&signal)?
                .write_all(b"enough")?;
        }
        Ok(())
    });
    if let Err(error) = output.and_then(vm::Output::checked) {
        let logs: Vec<String> = servers.iter().map(Server::log).collect();
        panic!("{error:#}\n--- the servers said:\n{}", logs.join("---\n"));
    }
    for (host, server) in servers.iter_mut().enumerate() {
        assert!(server.terminate().unwrap().success());
        let log = server.log();
        support::assert_all_served(&log);
        // Firmware and Linux both start on the first host; on the others, each disk starts once.
        let left = log.matches("its VM has stopped to go on elsewhere").count();
        let came = log.matches("a VM starts on it;").count();
        let expected = if host < migrations { DISKS.len() } else { 0 };
        assert!(
            left == expected && came >= DISKS.len(),
            "{left} {came}: {log}"
        );
    }
    for disk in DISKS.iter().filter(|disk| disk.format == "qcow2") {
        qemu_img::check(folder.path(), &format!("{}.qcow2", disk.name()), false);
    }
    record.passed();
    report(&releases[migrations], "end of the migrations", start);
}

/// For each release, a server of the disks and a VM with them; the VM also has a disk to signal its end.
fn start_hosts(releases: &[Release], folder: &Path, signal: &Path) -> (Vec<Server>, Vec<Vm>) {
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm/matrix/migration");
    let guest = Vm::new(logs).cpus(4).memory_mib(384).fio();
    let guest = guest.hardware(HARDWARE.0, HARDWARE.1);
    let (mut servers, mut hosts) = (Vec::new(), Vec::new());
    for (host, release) in releases.iter().enumerate() {
        let socket = |disk: &Disk| folder.join(format!("{}.{host}", disk.name()));
        let control = format!("--control={}", folder.join(format!("c{host}")).display());
        let disks = DISKS.iter().map(|disk| {
            format!(
                "file={}.{},name={},socket={},queues={},queue-size={},lock=running",
                folder.join(disk.name()).display(),
                disk.format,
                disk.name(),
                socket(disk).display(),
                disk.queues,
                disk.queue_size
            )
        });
        let arguments: Vec<String> = [control].into_iter().chain(disks).collect();
        servers.push(Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap());

        let mut vm = guest.clone().qemu(release);
        for disk in &DISKS {
            let (name, packed) = (disk.name(), if disk.packed { "on" } else { "off" });
            let device = format!(
                "vhost-user-blk-pci,chardev={name},num-queues={},queue-size={},packed={packed}",
                disk.queues, disk.queue_size
            );
            let path = socket(disk).display().to_string();
            let chardev = format!("socket,id={name},path={path},{}", reconnects(release));
            let pasted = ["-chardev", &chardev, "-device", &device];
            vm = vm.disk(vm::Disk::Printed(pasted.map(String::from).to_vec()));
        }
        hosts.push(vm.disk(vm::Disk::Qemu {
            file: signal.to_owned(),
            cache: "writeback",
            aio: "threads",
            queues: 1,
            serial: "signal".into(),
        }));
    }
    (servers, hosts)
}

/// Writes to both disks and reads back its writes until the guest has migrated often enough.
const SCRIPT: &str = "
    load() {
        fio --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bsrange=4k-64k --size=8M \
            --verify=crc32c --verify_backlog=16 --verify_fatal=1 --eta=never --output=/tmp/fio --randrepeat=0 \
            --thread --name=one --filename=/dev/vda --name=two --filename=/dev/vdb || { cat /tmp/fio; exit 1; }
    }
    echo migrate me
    until dd if=/dev/vdc bs=512 count=1 iflag=direct 2>/dev/null | grep -q enough; do load; done
    load
    dmesg | grep -iE 'i/o error|blk_update|reset' && exit 1 || true";
