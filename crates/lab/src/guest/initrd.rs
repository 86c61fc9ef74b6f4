//! The guest's file system: busybox, fio with its libraries, modules, and `/init`, which runs the host's scripts.

use std::path::Path;

use anyhow::{Context, Result};
use harness::initramfs::{Kernel, Tree};

use crate::plan::words::FileSystem;

/// Modules for every device of a plan, and the schedulers. Built-in modules have no file.
const MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "ata_piix",
    "ahci",
    "bfq",
    "kyber-iosched",
    "mq-deadline",
];

/// `/init`. Each line from the host is a script in base64. The answer is a line `answer STATUS BYTES`, followed by the
/// script's output. busybox's shell runs its applets without links.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do insmod $module 2>/dev/null; done
while :; do
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat $port/name 2>/dev/null)" != ringdisk.lab ] || { port=/dev/${port##*/}; break 2; }
    done
    usleep 50000
done
exec 3<>$port
stty raw -echo <&3 2>/dev/null
echo ready >&3
while read -r script <&3; do
    echo "$script" | base64 -d >/tmp/script
    sh /tmp/script >/tmp/answer 2>&1 </dev/null 3<&-
    echo "answer $? $(stat -c %s /tmp/answer)" >&3
    cat /tmp/answer >&3
done
poweroff -f
"#;

/// Writes the initramfs to `target`, with the programs and modules of these file systems.
///
/// # Errors
/// A program is missing, or `target` cannot be written.
pub fn write(target: &Path, kernel: &Kernel, file_systems: &[FileSystem]) -> Result<()> {
    let mut files = Tree::new(INIT);
    let mut modules = MODULES.to_vec();
    if !file_systems.is_empty() {
        // Checksums, which no file system depends on by name.
        modules.extend(["crc32c_generic", "crc32c"]);
    }
    modules.extend(file_systems.iter().map(|file_system| file_system.word()));
    files.modules(kernel, &modules)?;
    for file_system in file_systems {
        files.programs(&[&format!("mkfs.{file_system}")])?;
    }
    files
        .programs(&["busybox", "fio"])
        .context("guests need it; on Debian, 'apt install busybox-static fio' installs both")?;
    files.write(target)
}
