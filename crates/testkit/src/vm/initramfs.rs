//! The guest's file system: busybox, the tools that tests call, the modules for virtio-blk, `/init` and the script.

use super::{Kernel, find_program};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the initramfs to `target`.
///
/// # Errors
/// If a program or module is missing; `cargo xtask install` installs them.
pub fn write(target: &Path, kernel: &Kernel, fio: bool, script: &str) -> Result<()> {
    let mut archive = Cpio::default();
    archive.file("/init", INIT.as_bytes(), true);
    archive.file("/script", script.as_bytes(), false);
    for folder in ["/dev", "/proc", "/sys", "/mnt", "/tmp"] {
        archive.folder(folder);
    }
    for (index, module) in kernel
        .module_files(&["virtio_pci", "virtio_blk"])?
        .iter()
        .enumerate()
    {
        archive.copy(module, &format!("/modules/{index:02}.ko"))?;
    }
    let programs = ["busybox", "mkfs.ext4", "e2fsck", "sfdisk"]
        .into_iter()
        .chain(fio.then_some("fio"));
    for name in programs {
        let program = find_program(name)
            .with_context(|| format!("{name} is missing; `cargo xtask install` installs it"))?;
        archive.copy(&program, &format!("/bin/{name}"))?;
        for library in libraries(&program)? {
            archive.copy(&library, &library.to_string_lossy())?;
        }
    }
    archive.finish();
    fs::write(target, &archive.bytes).with_context(|| format!("writing {}", target.display()))
}

/// busybox runs its applets by itself, so that none needs a link; for that it must find `/proc/self/exe`.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do insmod $module || echo "vm: $module does not load"; done
stty -F /dev/ttyS1 raw -echo
cat >/tmp/functions <<'END'
disk() {
    for serial in /sys/block/*/serial; do
        [ "$(cat $serial)" != "$1" ] || { serial=${serial%/serial}; echo /dev/${serial##*/}; return 0; }
    done
    echo "no disk has the serial $1" >&2
    return 1
}
END
cat /tmp/functions /script >/tmp/script
sh -eu /tmp/script </dev/null >/dev/ttyS1 2>&1
echo "vm-exit: $?" >/dev/ttyS1
poweroff -f
"#;

/// The shared libraries of a program, as the loader finds them; none if it's static.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .context("starting ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        !text.contains("not found"),
        "{} lacks a library:\n{text}",
        program.display()
    );
    let paths = text
        .lines()
        .flat_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}

/// A cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst: "newc").
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Cpio {
    fn copy(&mut self, from: &Path, name: &str) -> Result<()> {
        if self.names.contains(name) {
            return Ok(()); // a library that two programs use
        }
        let bytes = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        let executable = fs::metadata(from)?.permissions().mode() & 0o111 != 0;
        self.file(name, &bytes, executable);
        Ok(())
    }

    fn file(&mut self, name: &str, bytes: &[u8], executable: bool) {
        let parents: Vec<_> = Path::new(name).ancestors().skip(1).collect();
        for parent in parents
            .into_iter()
            .rev()
            .filter(|parent| parent.parent().is_some())
        {
            self.folder(&parent.to_string_lossy());
        }
        self.entry(name, if executable { 0o100_755 } else { 0o100_644 }, bytes);
    }

    fn folder(&mut self, name: &str) {
        if !self.names.contains(name) {
            self.entry(name, 0o040_755, &[]);
        }
    }

    fn finish(&mut self) {
        self.entry("/TRAILER!!!", 0, &[]);
    }

    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.names.insert(name.to_owned());
        let name = name.trim_start_matches('/');
        let (inode, links, size, name_size) = (self.names.len(), 1, data.len(), name.len() + 1);
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let header = format!(
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}",
            0
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
