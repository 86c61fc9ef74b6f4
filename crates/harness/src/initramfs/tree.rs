//! The files of a guest's system, in memory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Kernel;
use crate::paths::find_program;

/// The files of a system: as an initramfs, or below a folder.
#[derive(Default)]
pub struct Tree {
    /// Name, mode and content. A folder comes before its files.
    all: Vec<(String, u32, Vec<u8>)>,
    names: BTreeSet<String>,
}

const FOLDER: u32 = 0o040_755;

impl Tree {
    /// A system that starts with this script and has the mount points `/dev`, `/proc`, `/sys`, `/mnt` and `/tmp`.
    pub fn new(init: &str) -> Self {
        let mut tree = Self::default();
        tree.file("/init", init.as_bytes(), true);
        for folder in ["/dev", "/proc", "/sys", "/mnt", "/tmp"] {
            tree.folder(folder);
        }
        tree
    }

    /// Adds programs of the host to `/bin`, with their libraries.
    ///
    /// # Errors
    /// A program is missing, or one of its libraries is.
    pub fn programs(&mut self, names: &[&str]) -> Result<()> {
        for name in names {
            let program = find_program(name).with_context(|| format!("{name} is missing"))?;
            self.copy(&program, &format!("/bin/{name}"))?;
            for library in libraries(&program)? {
                self.copy(&library, &library.to_string_lossy())?;
            }
        }
        Ok(())
    }

    /// Adds modules and their dependencies as `/modules/NN.ko`, in the order in which to load them. Modules that are
    /// built into the kernel have no file.
    ///
    /// # Errors
    /// A module is unreadable.
    pub fn modules(&mut self, kernel: &Kernel, names: &[&str]) -> Result<()> {
        for (index, module) in kernel.modules(names)?.iter().enumerate() {
            self.file(&format!("/modules/{index:02}.ko"), module, false);
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

    /// Adds a file and its parent folders.
    pub fn file(&mut self, name: &str, bytes: &[u8], executable: bool) {
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

    /// Writes the files below a folder of the host.
    ///
    /// # Errors
    /// The folder is not writable.
    pub fn unpack(&self, root: &Path) -> Result<()> {
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

    /// Writes the files as an initramfs, in the kernel's cpio format
    /// (Documentation/driver-api/early-userspace/buffer-format.rst: "newc").
    ///
    /// # Errors
    /// `target` is not writable.
    pub fn write(&self, target: &Path) -> Result<()> {
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
        fs::write(target, bytes).with_context(|| format!("writing {}", target.display()))
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// The shared libraries of a program, as the loader finds them; empty for a static program.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_and_a_folder_hold_the_same() {
        let mut tree = Tree::new("#!/bin/sh\n");
        tree.file("/etc/deep/file", b"12345", false);
        tree.programs(&["sh"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        tree.unpack(folder.path()).unwrap();
        let read = fs::read(folder.path().join("etc/deep/file")).unwrap();
        assert_eq!(read, b"12345");
        let init = fs::metadata(folder.path().join("init")).unwrap();
        assert_eq!(init.permissions().mode() & 0o777, 0o755);

        let archive = folder.path().join("archive");
        tree.write(&archive).unwrap();
        let bytes = fs::read(archive).unwrap();
        let (mut at, mut names) = (0, Vec::new());
        let number = |at: usize, field: usize| {
            let digits = &bytes[at + 6 + 8 * field..][..8];
            usize::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap()
        };
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (size, name_size) = (number(at, 6), number(at, 11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            let data = (at + 110 + name_size).next_multiple_of(4);
            if name == b"etc/deep/file" {
                assert_eq!(&bytes[data..data + size], b"12345");
            }
            names.push(String::from_utf8_lossy(name).into_owned());
            at = (data + size).next_multiple_of(4);
        }
        let place = |name: &str| names.iter().position(|found| found == name).unwrap();
        assert!(place("etc") < place("etc/deep") && place("etc/deep") < place("etc/deep/file"));
        assert_eq!(names.last().map(String::as_str), Some("TRAILER!!!"));
        assert!(tree.programs(&["no-such-program"]).is_err());
    }
}
