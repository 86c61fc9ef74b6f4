//! The kernel's NBD client, in a guest that also has the disk as a virtio disk.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use testkit::vm::{self, HOST_OF_NETWORK, Vm};

use super::{Served, have};
use crate::support::{DISK_BYTES, Disk};

/// A guest finishes within 30 s even if it is emulated; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(300);

/// Over TCP and with four connections: what each client writes is there for the other, and in the file.
#[test]
fn kernel_client_shares_the_disk_with_its_guest() {
    let test = "kernel_client_shares_the_disk_with_its_guest";
    if let Some(missing) = vm::missing(false) {
        return println!("skipped: {test}: {missing}");
    }
    if !have(&["nbd-client"], test) {
        return;
    }
    let (served, port) = Served::start_on_tcp(Disk::new(), "discard=unmap");
    let before = fs::read(&served.disk.file).unwrap();
    assert!(before[..1 << 20].iter().any(|byte| *byte != 0), "a pattern");

    let script = SCRIPT
        .replace("HOST", HOST_OF_NETWORK)
        .replace("PORT", &port);
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let arguments = served.server.ready["disks"][0]["qemu"].as_array().unwrap();
    let arguments = arguments.iter().filter_map(Value::as_str);
    let guest = Vm::new(logs)
        .nbd_client()
        .disk(vm::Disk::Printed(arguments.map(str::to_owned).collect()));
    let mut most_clients = 0;
    let mut on_line = |line: &str, _| {
        if line == "connected" {
            most_clients = served.done(&["export"])[0]["clients"].as_u64().unwrap();
        }
    };
    let output = guest.run_watched(&script, LIMIT, &mut on_line).unwrap();
    let output = output.checked().unwrap();
    assert_eq!(most_clients, 4);
    assert_eq!(output.lines.last().unwrap(), "same");

    let after = fs::read(&served.disk.file).unwrap();
    assert_eq!(after.len() as u64, DISK_BYTES);
    let at = |mib: usize| mib << 20..(mib + 1) << 20;
    assert!(after[at(1)].iter().all(|byte| *byte == b'n'));
    assert!(after[at(2)].iter().all(|byte| *byte == b'v'));
    assert!(after[at(3)].iter().all(|byte| *byte == 0));
    assert!(after[at(0)] == before[at(0)] && after[4 << 20..] == before[4 << 20..]);
}

/// The kernel has simple replies only, and many requests in flight on one connection. Those of a backup that are longer than its
/// share of the storage are served in pieces, while others are answered.
#[test]
fn kernel_client_reads_a_backup() {
    let test = "kernel_client_reads_a_backup";
    if let Some(missing) = vm::missing(false) {
        return println!("skipped: {test}: {missing}");
    }
    if !have(&["nbd-client"], test) {
        return;
    }
    // Requests of several threads end in any order.
    let (served, port) = Served::start_on_tcp(Disk::new(), "aio=threads");
    served.done(&["backup", "begin", "vm"]);
    let script = BACKUP
        .replace("HOST", HOST_OF_NETWORK)
        .replace("PORT", &port);
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let arguments = served.server.ready["disks"][0]["qemu"].as_array().unwrap();
    let arguments = arguments.iter().filter_map(Value::as_str);
    let guest = Vm::new(logs)
        .nbd_client()
        .disk(vm::Disk::Printed(arguments.map(str::to_owned).collect()));
    let output = guest.run(&script, LIMIT).unwrap();
    let output = output.checked().unwrap();
    assert_eq!(output.lines.last().unwrap(), "same");
    served.done(&["backup", "end"]);
}

/// `cmp` reads both devices from the server: the guest's caches are empty after each step.
const SCRIPT: &str = "
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
nbd-client -N vm -b 512 -C 4 HOST PORT /dev/nbd0 2>&1
echo connected
[ $(cat /sys/block/nbd0/size) = $(cat /sys/block/vda/size) ]
fill() { head -c 1048576 /dev/zero | tr '\\0' $1; }
forget() { sync; echo 3 >/proc/sys/vm/drop_caches; }
cmp /dev/nbd0 /dev/vda
forget
fill n | dd of=/dev/nbd0 bs=64k seek=16 iflag=fullblock conv=fsync,notrunc 2>/dev/null
fill v | dd of=/dev/vda bs=64k seek=32 iflag=fullblock conv=fsync,notrunc 2>/dev/null
blkdiscard -o 3145728 -l 1048576 /dev/nbd0
forget
cmp /dev/nbd0 /dev/vda
grep . /sys/block/nbd0/queue/max* 2>&1
cat /sys/block/nbd0/stat
cat /proc/diskstats
nbd-client -d /dev/nbd0 2>&1
echo same
";

/// Several readers with requests of different lengths, while the guest overwrites the disk.
const BACKUP: &str = "
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
cat /dev/vda >/before
nbd-client -N vm-backup -b 512 HOST PORT /dev/nbd0 2>&1
echo 4096 >/sys/block/nbd0/queue/max_sectors_kb
compare() {
    for round in 1 2 3; do
        case $1 in
            4k) dd if=/dev/nbd0 bs=4k count=256 iflag=direct 2>/dev/null | cmp -n 1048576 - /before ;;
            *) dd if=/dev/nbd0 bs=$1 iflag=direct 2>/dev/null | cmp - /before ;;
        esac
    done
}
readers=
for size in 4M 4M 4k 4k 4k 4k 4k 4k; do
    compare $size &
    readers=\"$readers $!\"
done
head -c 8388608 /dev/zero | tr '\\0' v | dd of=/dev/vda bs=64k iflag=fullblock conv=fsync,notrunc 2>/dev/null
for reader in $readers; do
    wait $reader
done
nbd-client -d /dev/nbd0 2>&1
echo same
";
