//! Backups: what clients read is what the disks were at one moment, whatever happens meanwhile.

mod bitmaps;
mod checkpoints;
mod copy;
mod failures;
mod interrupted;
pub mod moment;
mod races;
mod refusals;
mod sizes;
mod stopped_vms;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;

const BINARY: &str = env!("CARGO_BIN_EXE_ringdisk");

/// Bytes of each disk.
pub const DISK_BYTES: u64 = 64 << 20;
/// Bytes of the blocks that the tests write.
const BLOCK: u64 = 4096;
const OK: u8 = 0;

/// A ringdisk that serves a raw disk `a` and a qcow2 image `b`, with two queues each, and listens for NBD clients.
struct Served {
    server: Server,
    dir: tempfile::TempDir,
    /// More options of `serve`.
    options: Vec<String>,
}

impl Served {
    /// `None` if a program is missing.
    fn start(test: &str, options: &[&str]) -> Option<Self> {
        for program in ["nbdcopy", "nbdinfo", "qemu-img", "qemu-io"] {
            if Command::new(program).arg("--version").output().is_err() {
                println!("skipped: {test}: there is no {program}");
                return None;
            }
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let raw = std::fs::File::create(dir.path().join("a.raw")).unwrap();
        raw.set_len(DISK_BYTES).unwrap();
        let image = dir.path().join("b.qcow2");
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", text(&image), "64M"],
        );
        let options: Vec<_> = options.iter().map(|&option| option.to_owned()).collect();
        let server = Self::serve(dir.path(), &options);
        Some(Self {
            server,
            dir,
            options,
        })
    }

    fn serve(dir: &Path, options: &[String]) -> Server {
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--iothreads=2", "--control"]);
        command.arg(dir.join("control.qmp"));
        command.arg("--nbd").arg(dir.join("nbd.sock"));
        command.arg("--state").arg(dir.join("state")).args(options);
        for file in ["a.raw", "b.qcow2"] {
            let name = &file[..1];
            let dir = dir.display();
            command.arg(format!(
                "file={dir}/{file},name={name},socket={dir}/{name}.sock,queues=2"
            ));
        }
        Server::ringdisk_command(command).unwrap()
    }

    /// Starts it again after its end.
    fn restart(&mut self) {
        self.server = Self::serve(self.dir.path(), &self.options);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn connect(&self, disk: &str) -> Device {
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        Device::connect(self.path(&format!("{disk}.sock")), &config).unwrap()
    }

    fn uri(&self, export: &str) -> String {
        format!(
            "nbd+unix:///{export}?socket={}",
            self.path("nbd.sock").display()
        )
    }

    /// Copies an export to a new file, and returns its content.
    #[track_caller]
    fn copy(&self, export: &str) -> Vec<u8> {
        let to = self.path("copy.raw");
        let _ = std::fs::remove_file(&to);
        run(
            "nbdcopy",
            &["--connections=4", &self.uri(export), text(&to)],
        );
        std::fs::read(&to).unwrap()
    }

    fn ringdisk(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--control");
        command.arg(self.path("control.qmp"));
        command.output().unwrap()
    }

    /// Runs a subcommand that must succeed; returns what it prints as JSON.
    #[track_caller]
    fn done(&self, arguments: &[&str]) -> Value {
        let output = self.ringdisk(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a subcommand that must fail with these words.
    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &str) {
        let output = self.ringdisk(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        assert!(text.contains(words), "{text}");
    }
}

/// Runs a program that must succeed; returns what it prints.
#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a block that holds this number all over.
#[track_caller]
pub fn write(device: &mut Device, queue: usize, block: u64, number: u64) {
    let bytes = number.to_le_bytes().repeat(BLOCK as usize / 8);
    assert_eq!(device.queues[queue].write(block * BLOCK / 512, &bytes), OK);
}

/// The numbers of the blocks of a disk. Panics if a block holds two.
pub fn numbers(content: &[u8]) -> Vec<u64> {
    let block = |bytes: &[u8]| {
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes.chunks(8).all(|word| word == number.to_le_bytes()));
        number
    };
    content.chunks(BLOCK as usize).map(block).collect()
}
