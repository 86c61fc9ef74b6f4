//! A guest that boots on its own: firmware, boot loader, kernel and system all come from an overlay that ringdisk
//! serves.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use testkit::compatibility::Record;
use testkit::qemu_img as qemu;
use testkit::vm::{self, Vm};

use crate::support::serve_all;

const GUEST_LIMIT: Duration = Duration::from_secs(480);

/// The firmware reads with one queue; the guest's driver then uses two. The guest writes and verifies at random, then
/// reboots through the firmware again.
#[test]
fn guest_boots_from_firmware_and_boot_loader() {
    let test = "guest_boots_from_firmware_and_boot_loader";
    if let Some(missing) = vm::missing(true).or_else(vm::missing_loader) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let script = "
        grep -q '^/dev/vda1 / ext4' /proc/mounts || { echo 'the root is elsewhere'; exit 1; }
        verify() {
            fio --eta=never --name=verify --filename=/verify --size=32M --direct=1 --ioengine=libaio --bs=4k \
                --iodepth=16 --thread --rw=randwrite --randseed=7 --verify=crc32c --output=/tmp/fio \"$@\" \
                || { cat /tmp/fio; exit 1; }
        }
        if [ ! -e /booted ]; then
            verify --do_verify=1 --end_fsync=1
            echo 'first boot'
            touch /booted
            sync
            mount -o remount,ro /
            reboot -f
            sleep 60
        fi
        verify --verify_only
        echo 'second boot'
        cat /sys/class/dmi/id/bios_version
        sync
        mount -o remount,ro /";
    let installed = directory.join("installed.raw");
    vm::install_loader(&installed, 384 << 20, "boot", script).unwrap();
    qemu::img(
        directory,
        "convert -f raw -O qcow2 installed.raw installed.qcow2",
    );
    qemu::img(
        directory,
        "create -q -f qcow2 -b installed.qcow2 -F qcow2 boot.qcow2",
    );
    let below = std::fs::read(directory.join("installed.qcow2")).unwrap();
    let disk = format!(
        "file={},serial=boot,queues=2,socket={}",
        directory.join("boot.qcow2").display(),
        directory.join("boot.sock").display()
    );
    let control = format!("--control={}", directory.join("control.qmp").display());
    let mut server = serve_all(&[disk, control]);
    let arguments = server.ready["disks"][0]["qemu"].as_array().unwrap();
    let arguments = arguments.iter().map(|a| a.as_str().unwrap().to_owned());
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs)
        .cpus(2)
        .disk(vm::Disk::Printed(arguments.collect()))
        .boot_loader()
        .may_reboot();
    let output = guest.run("", GUEST_LIMIT).unwrap().checked().unwrap();
    let [first, second, firmware] = &output.lines[..] else {
        panic!("{:?}", output.lines)
    };
    assert_eq!([first, second], ["first boot", "second boot"]);
    let loader = Command::new("grub-mkimage").arg("--version").output();
    let loader = String::from_utf8(loader.unwrap().stdout).unwrap();
    let loader = loader.split_whitespace().last().unwrap();
    let kernel = vm::Kernel::cached().unwrap().release;
    for (name, version) in [
        ("SeaBIOS", firmware.as_str()),
        ("GRUB", loader),
        ("Linux", &kernel),
    ] {
        let mut record = Record::new(name, version);
        record.step("boot from qcow2 on qcow2, write, verify, boot again", || ());
    }
    assert!(server.terminate().unwrap().success(), "{}", server.log());

    qemu::check(directory, "boot.qcow2", false);
    assert!(below == std::fs::read(directory.join("installed.qcow2")).unwrap());
    let mut compare = Command::new("qemu-img");
    compare
        .args(["compare", "boot.qcow2", "installed.qcow2"])
        .current_dir(directory);
    let code = compare.output().unwrap().status.code();
    assert_eq!(code, Some(1), "nothing has changed");
}
