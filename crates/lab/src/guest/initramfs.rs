//! The guest's file system: busybox, fio with its libraries, modules, and `/init`, which does what the host says.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Kernel, find_program};

/// Modules for every device of a plan, and the schedulers. Those that a kernel has built in have no file.
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

/// `/init`. One command is one line: a script in base64. The answer is a line `answer STATUS BYTES` and then what the
/// script printed. busybox runs its applets by itself, so that none needs a link.
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

/// Writes the initramfs to `target`.
///
/// # Errors
/// A program is missing, or `target` cannot be written.
pub fn write(target: &Path, kernel: &Kernel) -> Result<()> {
    let mut archive = Cpio::default();
    archive.file("/init", INIT.as_bytes(), true);
    for folder in ["/dev", "/proc", "/sys", "/tmp"] {
        archive.folder(folder);
    }
    for (index, module) in kernel.modules(&MODULES)?.iter().enumerate() {
        archive.file(&format!("/modules/{index:02}.ko"), module, false);
    }
    for (name, package) in [("busybox", "busybox-static"), ("fio", "fio")] {
        let program = find_program(name).with_context(|| {
            format!("{name} is missing; on Debian, 'apt install {package}' installs it")
        })?;
        archive.copy(&program, &format!("/bin/{name}"))?;
        for library in libraries(&program)? {
            archive.copy(&library, &library.to_string_lossy())?;
        }
    }
    archive.finish();
    fs::write(target, &archive.bytes).with_context(|| format!("writing {}", target.display()))
}

/// The shared libraries of a program, as the loader finds them; none if it is static.
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
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
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
        // magic ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [
            self.names.len() as u32,
            mode,
            0,
            0,
            1,
            0,
            data.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        fields.iter().for_each(|field| {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes())
        });
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
