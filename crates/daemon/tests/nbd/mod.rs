//! NBD exports with the clients that people use, and with clients that do what those do not.

mod bitmaps;
mod clients;
mod commands;
mod guestfish;
mod hostile;
mod kernel;
pub mod raw;
mod simple;
mod tls;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use testkit::server::Server;

use crate::support::Disk;

const BINARY: &str = env!("CARGO_BIN_EXE_ringdisk");

/// A ringdisk that serves one disk, named `vm`, and listens for NBD clients.
struct Served {
    server: Server,
    disk: Disk,
    dir: tempfile::TempDir,
}

impl Served {
    /// `options` are those of the disk.
    fn start(disk: Disk, options: &str) -> Self {
        Self::start_with(disk, options, &[])
    }

    fn start_with(disk: Disk, options: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let socket = dir.path().join("nbd.sock");
        Self::start_in(
            dir,
            disk,
            options,
            &[&["--nbd", text(&socket)], arguments].concat(),
        )
    }

    /// Listens on a port of the loopback interface, which is returned. The export has the name `vm`.
    fn start_on_tcp(disk: Disk, options: &str) -> (Self, String) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let served = Self::start_in(dir, disk, options, &["--nbd", "127.0.0.1:0"]);
        let exported = served.done(&["export", "vm", "--writable"]);
        let uri = exported["uri"].as_str().unwrap();
        let port = uri.strip_prefix("nbd://127.0.0.1:").unwrap();
        let port = port.strip_suffix("/vm").unwrap().to_owned();
        (served, port)
    }

    fn start_in(dir: tempfile::TempDir, disk: Disk, options: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--control"]);
        command.arg(dir.path().join("control.qmp"));
        command.args(arguments);
        let comma = if options.is_empty() { "" } else { "," };
        command.arg(disk.argument(&format!("name=vm{comma}{options}")));
        let server = Server::ringdisk_command(command).unwrap();
        Self { server, disk, dir }
    }

    fn nbd(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.nbd().display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a subcommand.
    fn ringdisk(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--control");
        command.arg(self.dir.path().join("control.qmp"));
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

    /// Runs a client with the export's URI at the end.
    #[track_caller]
    fn client(&self, program: &str, arguments: &[&str]) -> String {
        let uri = self.uri("vm");
        run(program, &[arguments, &[uri.as_str()]].concat())
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

/// Whether clients are installed; otherwise says that a test is skipped.
fn have(programs: &[&str], test: &str) -> bool {
    let missing = programs
        .iter()
        .find(|program| testkit::vm::find_program(program).is_none());
    if let Some(missing) = missing {
        println!("skipped: {test}: there is no {missing}; `cargo xtask install` installs it");
    }
    missing.is_none()
}

/// Converts the disk's file to qcow2.
fn to_qcow2(disk: &mut Disk) {
    let image = disk.file.with_extension("qcow2");
    let paths = [&disk.file, &image].map(|path| path.to_str().unwrap());
    run("qemu-img", &["convert", "-O", "qcow2", paths[0], paths[1]]);
    disk.file = image;
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
