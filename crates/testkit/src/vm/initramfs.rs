//! The guest's file system: busybox, the tools that tests call, the modules for virtio-blk, `/init` and the script.

use super::{Kernel, find_program};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the initramfs to `target`: to run `script`, or to go on with what is installed on the disk with this serial.
///
/// # Errors
/// If a program or module is missing; `cargo xtask install` installs them.
pub fn write(target: &Path, kernel: &Kernel, fio: bool, start: Start<'_>) -> Result<()> {
    let mut files = Files::default();
    for (index, module) in kernel
        .module_files(&["virtio_pci", "virtio_blk"])?
        .iter()
        .enumerate()
    {
        files.copy(module, &format!("/modules/{index:02}.ko"))?;
    }
    files.system(fio)?;
    match start {
        Start::Script(script) => files.file("/script", script.as_bytes(), false),
        Start::Disk(serial) => files.file("/root-serial", serial.as_bytes(), false),
    }
    fs::write(target, files.archive()).with_context(|| format!("writing {}", target.display()))
}

/// What the initramfs leads to.
#[derive(Clone, Copy)]
pub enum Start<'a> {
    /// This script.
    Script(&'a str),
    /// The system that is [`install`]ed on the disk with this serial.
    Disk(&'a str),
}

/// Makes a file of `bytes` that holds a system with fio, which runs `script`.
///
/// # Errors
/// A program is missing, or there is no room.
pub fn install(target: &Path, bytes: u64, script: &str) -> Result<()> {
    let mut files = Files::default();
    files.system(true)?;
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

/// busybox runs its applets by itself, so that none needs a link; for that it must find `/proc/self/exe`.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do
    [ ! -e $module ] || insmod $module || echo "vm: $module does not load"
done
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
if [ -e /root-serial ]; then
    . /tmp/functions
    mkdir /root
    mount -t ext4 $(disk $(cat /root-serial)) /root
    exec switch_root /root /init
fi
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

/// The files of a system.
#[derive(Default)]
struct Files {
    /// With their modes; those of folders before what is in them.
    all: Vec<(String, u32, Vec<u8>)>,
    names: BTreeSet<String>,
}

const FOLDER: u32 = 0o040_755;

impl Files {
    /// All that does not depend on who boots it.
    fn system(&mut self, fio: bool) -> Result<()> {
        self.file("/init", INIT.as_bytes(), true);
        for folder in ["/dev", "/proc", "/sys", "/mnt", "/tmp"] {
            self.folder(folder);
        }
        let programs = ["busybox", "mkfs.ext4", "e2fsck", "sfdisk"]
            .into_iter()
            .chain(fio.then_some("fio"));
        for name in programs {
            let program = find_program(name)
                .with_context(|| format!("{name} is missing; `cargo xtask install` installs it"))?;
            self.copy(&program, &format!("/bin/{name}"))?;
            for library in libraries(&program)? {
                self.copy(&library, &library.to_string_lossy())?;
            }
        }
        Ok(())
    }

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
        let mode = if executable { 0o100_755 } else { 0o100_644 };
        self.add(name, mode, bytes.to_vec());
    }

    fn folder(&mut self, name: &str) {
        if !self.names.contains(name) {
            self.add(name, FOLDER, Vec::new());
        }
    }

    fn add(&mut self, name: &str, mode: u32, bytes: Vec<u8>) {
        self.names.insert(name.to_owned());
        let name = name.trim_start_matches('/').to_owned();
        self.all.push((name, mode, bytes));
    }

    /// Puts them below a folder of the host.
    fn unpack(&self, root: &Path) -> Result<()> {
        for (name, mode, bytes) in &self.all {
            let path = root.join(name);
            let made = match *mode {
                FOLDER => fs::create_dir(&path),
                _ => fs::write(&path, bytes),
            };
            made.and_then(|()| {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o777))
            })
            .with_context(|| format!("making {}", path.display()))?;
        }
        Ok(())
    }

    /// As a cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst: "newc").
    fn archive(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let end = ("TRAILER!!!".to_owned(), 0, Vec::new());
        for (inode, (name, mode, data)) in (1..).zip(self.all.iter().chain([&end])) {
            let (links, size, name_size) = (1, data.len(), name.len() + 1);
            // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
            let header = format!(
                "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}",
                0
            );
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.push(0);
            pad(&mut bytes);
            bytes.extend_from_slice(data);
            pad(&mut bytes);
        }
        bytes
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}
