//! `ringdisk serve` as an operator uses it: its output, how it protects disks in use, how it starts and ends, and its
//! error messages.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use testkit::chain::{Chain, Layout, header};
use testkit::driver::{Device, DeviceConfig, HANG, Op, Queue};
use testkit::server::Server;
use virtio_bindings::virtio_blk::*;

mod fixed_buffers;
mod in_use;
mod no_io_uring;
mod output;
mod startup_errors;
use crate::support::{DISK_BYTES, Disk, content, copy_ringdisk, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;

fn ringdisk() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.stdin(Stdio::null());
    command
}

/// `ringdisk serve` as a person starts it, without `--json`. Killed on drop.
struct TextServer {
    child: Child,
    out: BufReader<ChildStdout>,
    /// All lines before `ready`.
    text: String,
}

impl TextServer {
    /// Starts a command line and reads up to the line `ready`.
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        loop {
            let mut line = String::new();
            assert!(
                out.read_line(&mut line).unwrap() > 0,
                "ended before it was ready: {text}"
            );
            if line == "ready\n" {
                break;
            }
            text += &line;
        }
        Self { child, out, text }
    }

    fn serve(disks: &[String]) -> Self {
        let mut command = ringdisk();
        command.arg("serve").args(disks);
        Self::start(command)
    }

    /// Signals it to end; returns the exit code and the output after `ready`.
    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let code = wait(&mut self.child);
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (code, rest)
    }
}

impl Drop for TextServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a process, with a time limit.
fn wait(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < HANG {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("the process does not end");
}

/// Runs a command that must end on its own.
fn run(command: &mut Command) -> (Option<i32>, String) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let code = wait(&mut child);
    let Output { stdout, stderr, .. } = child.wait_with_output().unwrap();
    let text = [stdout, stderr].concat();
    (code, String::from_utf8_lossy(&text).into_owned())
}

/// Asserts that a command fails with `code` and that its last line contains all of `words`.
fn assert_fails(mut command: Command, code: i32, words: &[&str]) {
    let (got, text) = run(&mut command);
    println!("{text}");
    assert_eq!(got, Some(code), "{text}");
    // clap explains errors of the command line itself in several lines.
    let last = text.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "no '{word}' in: {last}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

fn assert_refused(disks: &[&str], code: i32, words: &[&str]) {
    let mut command = ringdisk();
    command.arg("serve").args(disks);
    assert_fails(command, code, words);
}

/// Whether a program is installed; prints a message if not.
fn is_installed(test: &str, program: &str) -> bool {
    let found = Command::new(program)
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success());
    if !found {
        println!("skipped: {test}: there is no {program}");
    }
    found
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Asserts that a disk is served and works.
fn assert_serves(socket: &Path) {
    let mut device = Device::connect(socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
}

#[test]
fn service_manager_is_notified() {
    let dir = directory();
    let path = dir.path().join("notify");
    expect_notifications(path.to_str().unwrap(), &UnixDatagram::bind(&path).unwrap());
    // A missing service manager does not prevent serving.
    let disk = Disk::new();
    let mut command = ringdisk();
    command.env("NOTIFY_SOCKET", dir.path().join("nobody"));
    command.args(["serve", "--json", &disk.argument("")]);
    let server = Server::ringdisk_command(command).unwrap();
    assert_serves(&disk.socket);
    drop(server);
}

/// sd_notify(3): an address that begins with '@' is in the abstract namespace.
#[test]
fn service_manager_is_notified_at_an_abstract_socket() {
    let name = format!("ringdisk-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    expect_notifications(&format!("@{name}"), &manager);
}

/// systemd.exec(5): journald records the time itself, and reads the level at the start of each line.
#[test]
fn journald_gets_levels_and_no_timestamps() {
    for (stream, is_journal) in [
        ("$(stat -L -c %d:%i /proc/self/fd/2)", true),
        ("1:1", false),
    ] {
        let disk = Disk::new();
        let mut command = Command::new("sh");
        let script = format!("JOURNAL_STREAM={stream} exec \"$0\" serve --json \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ringdisk")]);
        command.arg(disk.argument(""));
        let mut server = Server::ringdisk_command(command).unwrap();
        assert!(server.terminate().unwrap().success());
        let log = server.log();
        let said = format!(
            "<6>disk {}: aio=",
            disk.file.file_stem().unwrap().to_str().unwrap()
        );
        assert_eq!(
            log.lines().any(|line| line.starts_with(&said)),
            is_journal,
            "{log}"
        );
        let levels = ["<3>", "<4>", "<6>"];
        let told = |line: &str| levels.iter().any(|level| line.starts_with(level));
        assert_eq!(log.lines().all(told), is_journal, "{log}");
        assert_eq!(log.contains("Z  INFO "), !is_journal, "{log}");
    }
}

/// Serves with NOTIFY_SOCKET set to `address`, where `manager` listens.
fn expect_notifications(address: &str, manager: &UnixDatagram) {
    manager.set_read_timeout(Some(HANG)).unwrap();
    let disk = Disk::new();
    let mut command = ringdisk();
    command.env("NOTIFY_SOCKET", address);
    command.args(["serve", "--json", &disk.argument("")]);
    let mut server = Server::ringdisk_command(command).unwrap();
    let told = || {
        let mut buffer = [0; 256];
        let n = manager.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..n]).into_owned()
    };
    assert_eq!(told().trim_end(), "READY=1");
    assert_eq!(told().trim_end(), "STATUS=all disks are served");
    assert_serves(&disk.socket);
    // Type=notify-reload needs the time, and considers the reload complete at the next READY=1.
    let mut last_us = 0;
    for _ in 0..2 {
        server.signal(Signal::HUP);
        let reloading = told();
        let (first, second) = reloading.trim_end().split_once('\n').unwrap();
        assert_eq!(first, "RELOADING=1");
        let now_us: u64 = second
            .strip_prefix("MONOTONIC_USEC=")
            .unwrap()
            .parse()
            .unwrap();
        assert!(now_us > last_us, "{now_us} {last_us}");
        last_us = now_us;
        assert_eq!(told().trim_end(), "READY=1");
    }
    assert!(server.terminate().unwrap().success());
    assert_eq!(told().trim_end(), "STOPPING=1");
}

#[test]
fn signals_shut_down_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        for connected in [false, true] {
            let disk = Disk::new();
            let server = TextServer::serve(&[disk.argument("")]);
            let device =
                connected.then(|| Device::connect(&disk.socket, &DeviceConfig::default()).unwrap());
            let start = Instant::now();
            assert_eq!(server.end(signal), (Some(0), String::new()));
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "it took {:?} to end, connected: {connected}",
                start.elapsed()
            );
            assert!(!disk.socket.exists(), "the socket was left behind");
            drop(device);
        }
    }
}

/// The reader of the output may be gone by then, and a front-end may disconnect at any time.
#[test]
fn closed_standard_output_does_not_stop_it() {
    let disk = Disk::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = ringdisk();
    command.args(["serve", &disk.argument("")]).stdout(writer);
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    while UnixStream::connect(&disk.socket).is_err() {
        assert!(start.elapsed() < HANG && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(5));
    }
    assert_serves(&disk.socket);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(wait(&mut child), Some(0));
}

#[test]
fn default_socket_is_in_a_writable_directory() {
    let dir = directory();
    let name = format!("test-{}", std::process::id());
    let argument = format!("file=null:1G,name={name}");
    let serve = |mut command: Command| {
        command.args(["serve", "--json", &argument]);
        let mut server = Server::ringdisk_command(command).unwrap();
        let socket = server.socket().to_owned();
        UnixStream::connect(&socket).unwrap();
        assert!(server.terminate().unwrap().success());
        assert!(!socket.exists());
        socket
    };
    let file = format!("{name}.sock");
    if is_root() {
        let mut command = ringdisk();
        command.env("XDG_RUNTIME_DIR", dir.path());
        assert_eq!(serve(command), Path::new("/run/ringdisk").join(&file));
    }
    // A service manager may create several directories; the first one counts.
    let mut command = ringdisk();
    let made = format!("{}:/run/other", dir.path().join("service").display());
    command.env("RUNTIME_DIRECTORY", made);
    assert_eq!(serve(command), dir.path().join("service").join(&file));
    let Some((mut command, home)) = as_nobody("default_socket_is_in_a_writable_directory") else {
        return;
    };
    command.env("XDG_RUNTIME_DIR", home.path());
    assert_eq!(serve(command), home.path().join("ringdisk").join(&file));
    let (mut command, home) = as_nobody("").unwrap();
    // Without a runtime directory: in the current directory, but never in a directory that others can write to.
    let (shared, home) = (home.path().join("tmp"), home.path().join("here"));
    for directory in [&shared, &home] {
        fs::create_dir(directory).unwrap();
        fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
    }
    command
        .env_remove("XDG_RUNTIME_DIR")
        .env("TMPDIR", &shared)
        .current_dir(&home);
    assert_eq!(serve(command), home.join(&file));
}

/// ringdisk as an unprivileged user, and a directory that this user can write to.
fn as_nobody(test: &str) -> Option<(Command, TempDir)> {
    let home = tempfile::tempdir().unwrap();
    if !is_root() {
        return Some((ringdisk(), home));
    }
    // The build directory may not be accessible to all users.
    let binary = home.path().join("binary");
    copy_ringdisk(&binary);
    fs::set_permissions(&binary, PermissionsExt::from_mode(0o755)).unwrap();
    fs::set_permissions(home.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(&binary).stdin(Stdio::null());
    let mut works = Command::new("setpriv");
    works.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    works.arg(&binary).arg("--version");
    match works.output() {
        Ok(output) if output.status.success() => Some((command, home)),
        result => {
            println!("skipped: {test}: cannot become another user: {result:?}");
            None
        }
    }
}

/// Shells and services start with a limit of 1024 descriptors, or less.
#[test]
fn starts_with_a_low_descriptor_limit() {
    let disk = Disk::new();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -n 256 && exec \"$@\"", "sh"])
        .args([env!("CARGO_BIN_EXE_ringdisk"), "serve"])
        .arg(disk.argument("queues=4"));
    let served = TextServer::start(command);
    let (code, _) = served.end(Signal::TERM);
    assert_eq!(code, Some(0));
}
