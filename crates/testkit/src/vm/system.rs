//! The guest's file system: busybox, the tools that tests call, the modules for virtio-blk, `/init` and the script.

use anyhow::{Context, Result, ensure};
use harness::initramfs::{Kernel, Tree};
use harness::paths::find_program;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Writes the initramfs to `target`. It runs `script`, or continues with the system on the disk with this serial.
///
/// # Errors
/// A program or module is missing; `cargo xtask install` installs them.
pub fn write(target: &Path, kernel: &Kernel, software: Software, start: Start<'_>) -> Result<()> {
    let mut files = system(software)?;
    let modules = ["virtio_pci", "virtio_blk", "virtio_net", "nbd"];
    files.modules(kernel, &modules[..if software.nbd_client { 4 } else { 2 }])?;
    match start {
        Start::Script(script) => files.file("/script", script.as_bytes(), false),
        Start::Disk(serial) => files.file("/root-serial", serial.as_bytes(), false),
    }
    files.write(target)
}

/// What a guest has in addition to what all have.
#[derive(Clone, Copy, Debug)]
pub struct Software {
    pub fio: bool,
    /// `nbd-client`, and the modules for NBD and the network.
    pub nbd_client: bool,
}

impl Software {
    pub const NONE: Self = Self {
        fio: false,
        nbd_client: false,
    };

    pub const FIO: Self = Self {
        fio: true,
        ..Self::NONE
    };
}

/// QEMU's arguments for a network that reaches this host.
pub const NETWORK: [&str; 4] = [
    "-netdev",
    "user,id=network",
    "-device",
    "virtio-net-pci,netdev=network",
];

/// The host's own loopback interface, as seen from a guest with a network.
pub const HOST_OF_NETWORK: &str = "10.0.2.2";

/// What the initramfs starts.
#[derive(Clone, Copy)]
pub enum Start<'a> {
    /// This script.
    Script(&'a str),
    /// The system that [`install`] has put on the disk with this serial, or on the disk's first partition.
    Disk(&'a str),
}

/// Makes a file of `bytes` bytes that contains a system with fio, which runs `script`.
///
/// # Errors
/// A program is missing, or there is not enough space.
pub fn install(target: &Path, bytes: u64, script: &str) -> Result<()> {
    let mut files = system(Software::FIO)?;
    files.file("/script", script.as_bytes(), false);
    let tree = tempfile::tempdir().context("making a folder for the system")?;
    files.unpack(tree.path())?;
    fs::File::create(target)?
        .set_len(bytes)
        .with_context(|| format!("making {}", target.display()))?;
    let output = Command::new(find_program("mkfs.ext4").context("mkfs.ext4 is missing")?)
        .args(["-q", "-d"])
        .arg(tree.path())
        .arg(target)
        .output()
        .context("starting mkfs.ext4")?;
    ensure!(
        output.status.success(),
        "mkfs.ext4: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The files that do not depend on how the guest boots.
pub(super) fn system(software: Software) -> Result<Tree> {
    let mut files = Tree::new(INIT);
    let mut programs = vec!["busybox", "mkfs.ext4", "e2fsck", "sfdisk"];
    programs.extend(software.fio.then_some("fio"));
    programs.extend(software.nbd_client.then_some("nbd-client"));
    files
        .programs(&programs)
        .context("`cargo xtask install` installs what guests need")?;
    Ok(files)
}

/// busybox runs its applets without links to them; for that it must find `/proc/self/exe`.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do
    [ ! -e $module ] || insmod $module || echo "vm: $module does not load"
done
# Stays open: opening it fails while the last one who had it open closes it.
exec 3<>/dev/ttyS1
stty raw -echo <&3
cat >/tmp/functions <<'END'
disk() {
    for serial in /sys/block/*/serial; do
        [ "$(cat $serial)" != "$1" ] || { serial=${serial%/serial}; echo /dev/${serial##*/}; return 0; }
    done
    echo "no disk has the serial $1" >&2
    return 1
}
END
if [ -e /root-serial ]; then
    . /tmp/functions
    mkdir /root
    root=$(disk $(cat /root-serial))
    [ ! -e ${root}1 ] || root=${root}1
    mount -t ext4 $root /root
    exec switch_root /root /init
fi
cat /tmp/functions /script >/tmp/script
sh -eu /tmp/script </dev/null >&3 2>&1 3>&-
echo "vm-exit: $?" >&3
poweroff -f
"#;
