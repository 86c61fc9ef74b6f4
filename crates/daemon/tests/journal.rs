//! What a killed ringdisk has acknowledged, and what others may do with its images before the next one starts.

use crate::support;

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::qemu_img;
use testkit::server::Server;

use support::{Disk, content};

/// An image, of 64 MiB, and where it is served.
struct Image {
    disk: Disk,
    name: String,
}

impl Image {
    /// An empty one; `None` if there is no qemu-img for `test`.
    fn new(test: &str, options: &str) -> Option<Self> {
        let disk = Disk::new();
        let name = "image.qcow2".to_owned();
        let image = Self { disk, name };
        qemu_img::is_there(test).then(|| {
            image.qemu_img(&format!("create -q -f qcow2 {options} {} 64M", image.name));
            image
        })
    }

    fn directory(&self) -> &Path {
        self.disk.file.parent().unwrap()
    }

    fn qemu_img(&self, arguments: &str) {
        qemu_img::img(self.directory(), arguments);
    }

    /// The same after a kill: the kernel may still be at the writes of the one that was killed.
    fn qemu_img_after_kill(&self, arguments: &str) {
        loop {
            let mut command = Command::new("qemu-img");
            command.args(arguments.split(' ')).arg(&self.name);
            let output = command.current_dir(self.directory()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            if !said.contains("lock") {
                assert!(output.status.success(), "{arguments}: {said}");
                return;
            }
        }
    }

    fn serve(&self, options: &str) -> Server {
        let (file, socket) = (self.directory().join(&self.name), &self.disk.socket);
        let (file, socket) = (file.display(), socket.display());
        loop {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            command.args([
                "serve",
                "--json",
                &format!("file={file},socket={socket}{options}"),
            ]);
            command.env("RUNTIME_DIRECTORY", self.directory().join("runtime"));
            match Server::ringdisk_command(command) {
                // The kernel may still be at the writes of the one that was killed.
                Err(e) if e.to_string().contains("in use") => {}
                result => return result.unwrap(),
            }
        }
    }
}

fn connect(server: &Server) -> Device {
    Device::connect(server.socket(), &DeviceConfig::default()).unwrap()
}

fn kill(server: Server) {
    server.signal(Signal::KILL);
    drop(server);
}

/// One write to each of several tables, none of them flushed, and after the kill a cache with room for four.
#[test]
fn a_small_cache_loses_nothing() {
    let test = "a_small_cache_loses_nothing";
    // Sectors that a table of 512 bytes maps.
    const REACH: u64 = 64;
    for tables in [5, 8, 300] {
        let Some(image) = Image::new(test, "-o cluster_size=512") else {
            return;
        };
        let server = image.serve("");
        let mut device = connect(&server);
        for table in 0..tables {
            let written = device.queues[0].write(table * REACH, &content(table, 512));
            assert_eq!(written, 0);
        }
        kill(server);
        let mut server = image.serve(",l2-cache-size=1k");
        server.logged(&["are done again"]);
        let mut device = connect(&server);
        for table in 0..tables {
            let found = device.queues[0].read(table * REACH, 512).unwrap();
            assert!(found == content(table, 512), "{table} of {tables}");
        }
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
        assert!(server.terminate().unwrap().success());
        let after = qemu_img::content(image.directory(), &image.name, "qcow2");
        for table in 0..tables {
            let at = (table * REACH * 512) as usize;
            assert!(after[at..at + 512] == content(table, 512), "{table}");
        }
    }
}

/// A backup is made while all is flushed, and put back into the same file after a kill.
#[test]
fn a_backup_that_is_put_back_gets_nothing_newer() -> io::Result<()> {
    let test = "a_backup_that_is_put_back_gets_nothing_newer";
    let Some(image) = Image::new(test, "") else {
        return Ok(());
    };
    let file = image.directory().join(&image.name);
    let backup = image.directory().join("backup");
    let server = image.serve("");
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &content(1, 1 << 20)), 0);
    assert_eq!(queue.run(Op::Flush, 0, 0), 0);
    fs::copy(&file, &backup)?;
    assert_eq!(queue.write(2048, &content(2, 1 << 20)), 0);
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(queue.run(zeroes, 0, 1024), 0);
    kill(server);
    // The same inode.
    fs::copy(&backup, &file)?;
    let server = image.serve("");
    server.logged(&["WARN", "is not used", "backup"]);
    let mut device = connect(&server);
    let queue = &mut device.queues[0];
    assert!(queue.read(0, 1 << 20).unwrap() == content(1, 1 << 20));
    assert!(queue.read(2048, 1 << 20).unwrap() == vec![0; 1 << 20]);
    Ok(())
}

/// Images that can have no journal lose nothing either; and what QEMU does to repair an image with internal snapshots leaves
/// these.
#[test]
fn images_without_a_journal_lose_nothing() {
    let test = "images_without_a_journal_lose_nothing";
    for (options, snapshot) in [("-o compat=0.10", false), ("", true)] {
        let Some(image) = Image::new(test, options) else {
            return;
        };
        let mut server = image.serve("");
        assert_eq!(connect(&server).queues[0].write(0, &content(1, 1 << 20)), 0);
        assert!(server.terminate().unwrap().success());
        if snapshot {
            image.qemu_img(&format!("snapshot -c before {}", image.name));
        }
        let server = image.serve("");
        let mut device = connect(&server);
        for n in 0..64 {
            assert_eq!(device.queues[0].write(16 * n, &content(2 + n, 4096)), 0);
        }
        server.logged(&["is flushed before it completes"]);
        kill(server);
        image.qemu_img_after_kill("check -q -r leaks");
        let server = image.serve("");
        let mut device = connect(&server);
        for n in 0..64 {
            let found = device.queues[0].read(16 * n, 4096).unwrap();
            assert!(found == content(2 + n, 4096), "{options} {n}");
        }
        kill(server);
        if snapshot {
            image.qemu_img_after_kill("snapshot -a before");
            let before = qemu_img::content(image.directory(), &image.name, "qcow2");
            assert!(before[..1 << 20] == content(1, 1 << 20));
        }
    }
}
