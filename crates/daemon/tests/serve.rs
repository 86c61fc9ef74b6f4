//! The command as an operator uses it: what `ringdisk serve` prints, whom it keeps away from a disk, how it starts and
//! ends, and what it says when it cannot go on. Then `fixed-buffers=on`, which is the operator's choice.

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

#[expect(dead_code, reason = "nothing here is random")]
mod support;
use support::{DISK_BYTES, Disk, content, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;

fn ringdisk() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.stdin(Stdio::null());
    command
}

/// `ringdisk serve` as a person starts it, without `--json`. Killed on drop.
struct Text {
    child: Child,
    out: BufReader<ChildStdout>,
    /// All lines before `ready`.
    text: String,
}

impl Text {
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

    /// Asks it to end; gives the exit code, and what it printed after `ready`.
    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let code = wait(&mut self.child);
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (code, rest)
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a process, but not for ever.
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

/// Runs a command that has to end by itself.
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

/// Asserts that a command fails with `code` and that its last line has every one of `words`.
fn assert_fails(mut command: Command, code: i32, words: &[&str]) {
    let (got, text) = run(&mut command);
    println!("{text}");
    assert_eq!(got, Some(code), "{text}");
    // A mistake in the command line itself is explained by clap, in several lines.
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

/// A program that may be missing; says so for the test.
fn has(test: &str, program: &str) -> bool {
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

// What it prints

#[test]
fn ready_means_that_every_socket_accepts() {
    for _ in 0..10 {
        let disks = [Disk::new(), Disk::new(), Disk::new()];
        let server = Text::serve(&disks.each_ref().map(|d| d.argument("queues=1")));
        for disk in &disks {
            UnixStream::connect(&disk.socket).expect("it said that it is ready");
        }
        for disk in &disks {
            let name = disk.file.file_stem().unwrap().to_str().unwrap();
            let says = format!(
                "disk {name}: {} (raw, 16M) at {}",
                disk.file.display(),
                disk.socket.display()
            );
            assert!(
                server.text.contains(&says),
                "{says} is not in {}",
                server.text
            );
        }
        assert_eq!(server.end(Signal::TERM), (Some(0), String::new()));
        for disk in &disks {
            assert!(!disk.socket.exists(), "the socket was left behind");
        }
    }
}

/// A directory whose name means something to shells, to QEMU and in XML.
const AWKWARD: &str = "a b,c'd\"e&f<g>$h";

/// A disk whose socket lies in such a directory.
fn awkward_disk() -> (Disk, PathBuf, String) {
    let disk = Disk::new();
    let directory = disk.file.parent().unwrap().join(AWKWARD);
    let socket = directory.join("disk.sock");
    let argument = format!(
        "file={},name=vm-1.system,queues=3,queue-size=128,socket={}",
        disk.file.display(),
        socket.display().to_string().replace(',', ",,")
    );
    (disk, socket, argument)
}

#[test]
fn json_is_one_line_with_all_that_a_script_needs() {
    let (disk, socket, argument) = awkward_disk();
    let other = Disk::new();
    let server = serve_all(&[argument, other.argument("readonly=on")]);
    let ready = &server.ready;
    assert_eq!(ready["ready"], true);
    let disks = ready["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 2);
    for (key, value) in [
        ("name", "vm-1.system"),
        ("file", disk.file.to_str().unwrap()),
        ("format", "raw"),
        ("socket", socket.to_str().unwrap()),
    ] {
        assert_eq!(disks[0][key], value, "{key}");
    }
    assert_eq!(disks[0]["size"], DISK_BYTES);
    assert_eq!(
        (&disks[0]["queues"], &disks[0]["queue_size"]),
        (&3.into(), &128.into())
    );
    assert_eq!(
        (&disks[0]["readonly"], &disks[1]["readonly"]),
        (&false.into(), &true.into())
    );
    let qemu: Vec<&str> = strings(&disks[0]["qemu"]);
    assert!(qemu.contains(&"vhost-user-blk-pci,chardev=vm-1.system,num-queues=3,queue-size=128"));
    assert_serves(&socket);
}

fn strings(list: &serde_json::Value) -> Vec<&str> {
    let list = list.as_array().unwrap();
    list.iter().map(|a| a.as_str().unwrap()).collect()
}

/// What is printed for a person is what scripts get: the shell reads the same arguments, and the XML is well-formed.
#[test]
fn the_text_can_be_pasted() {
    let (_disk, socket, argument) = awkward_disk();
    let mut server = serve_all(std::slice::from_ref(&argument));
    let ready = server.ready["disks"][0].clone();
    assert!(server.terminate().unwrap().success());
    let server = Text::serve(&[argument]);

    let (qemu, libvirt) = server.text.split_once("  libvirt").unwrap();
    let lines = qemu.lines().filter(|l| l.starts_with("    "));
    let pasted: String = lines.map(|l| format!("{l}\n")).collect();
    let (others, last) = pasted.trim_end().rsplit_once('\n').unwrap();
    assert!(others.lines().all(|l| l.ends_with(" \\")), "{pasted}");
    assert!(!last.ends_with('\\'), "{pasted}");
    let script = format!("printf '%s\\n' \\\n{pasted}\n");
    let (_, read) = run(Command::new("sh").args(["-c", &script]));
    assert_eq!(read.lines().collect::<Vec<_>>(), strings(&ready["qemu"]));

    let lines = libvirt.lines().filter_map(|l| l.strip_prefix("    "));
    let xml: String = lines.map(|l| format!("{l}\n")).collect();
    let elements = elements(&xml);
    let json = [
        &ready["libvirt"]["memoryBacking"],
        &ready["libvirt"]["disk"],
    ];
    let json = json.map(|e| e.as_str().unwrap().to_owned() + "\n").concat();
    assert_eq!(xml, json);
    let attribute = |element: &str, name: &str| {
        let found = elements.iter().find(|(e, _)| e == element);
        let (_, attributes) = found.unwrap_or_else(|| panic!("no {element} in {xml}"));
        let value = attributes.iter().find(|(n, _)| n == name);
        value.map(|(_, v)| v.clone()).unwrap_or_default()
    };
    for (element, name, value) in [
        ("memoryBacking/source", "type", "memfd"),
        ("memoryBacking/access", "mode", "shared"),
        ("disk", "type", "vhostuser"),
        ("disk/driver", "queues", "3"),
        ("disk/driver", "queue_size", "128"),
        ("disk/source", "type", "unix"),
        ("disk/source", "path", socket.to_str().unwrap()),
        ("disk/target", "bus", "virtio"),
    ] {
        assert_eq!(attribute(element, name), value, "{element} {name}");
    }
}

type Element = (String, Vec<(String, String)>);

/// The elements of XML without text in it, with their paths and attributes. Panics if it is not well-formed.
fn elements(xml: &str) -> Vec<Element> {
    let (mut elements, mut open) = (Vec::new(), Vec::<&str>::new());
    let mut rest = xml.trim_start();
    while !rest.is_empty() {
        let inside = rest.strip_prefix('<').expect("nothing but elements");
        // No value here has an unescaped '>'; what is escaped is checked below.
        let end = tag_end(inside);
        let tag = &inside[..end];
        rest = inside[end + 1..].trim_start();
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "in {xml}");
            continue;
        }
        let (tag, closed) = match tag.strip_suffix('/') {
            Some(tag) => (tag, true),
            None => (tag, false),
        };
        let (name, mut text) = tag.split_once(' ').unwrap_or((tag, ""));
        open.push(name);
        let mut attributes = Vec::new();
        while !text.trim().is_empty() {
            let (name, after) = text.trim_start().split_once("='").expect("name='value'");
            let (value, after) = after.split_once('\'').expect("a closing quote");
            assert!(!value.contains('<'), "in {xml}");
            for part in value.split('&').skip(1) {
                let entity = part.split_once(';').expect("a whole entity").0;
                assert!(["amp", "lt", "gt", "apos", "quot"].contains(&entity));
            }
            let value = value
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&apos;", "'")
                .replace("&quot;", "\"")
                .replace("&amp;", "&");
            attributes.push((name.to_owned(), value));
            text = after;
        }
        elements.push((open.join("/"), attributes));
        if closed {
            open.pop();
        }
    }
    assert!(open.is_empty(), "{open:?} stay open in {xml}");
    elements
}

/// The end of a tag: the first '>' outside quotes.
fn tag_end(text: &str) -> usize {
    let mut quoted = false;
    let end = text.char_indices().find(|&(_, c)| {
        quoted ^= c == '\'';
        c == '>' && !quoted
    });
    end.expect("a tag ends").0
}

#[test]
fn qemu_takes_the_printed_arguments() {
    const QEMU: &str = "qemu-system-x86_64";
    if !has("qemu_takes_the_printed_arguments", QEMU) {
        return;
    }
    let (_disk, _, argument) = awkward_disk();
    let server = serve_all(&[argument]);
    let mut qemu = Command::new(QEMU)
        .args(strings(&server.ready["disks"][0]["qemu"]))
        .args(["-S", "-display", "none", "-nodefaults", "-qmp", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(qemu.stdout.take().unwrap());
    let mut input = qemu.stdin.take().unwrap();
    let mut greeting = String::new();
    out.read_line(&mut greeting).unwrap();
    assert!(greeting.contains("\"QMP\""), "QEMU ended: {greeting}");
    for command in ["qmp_capabilities", "x-query-virtio", "quit"] {
        writeln!(input, "{{\"execute\": \"{command}\"}}").unwrap();
    }
    let mut answers = String::new();
    out.read_to_string(&mut answers).unwrap();
    assert!(answers.contains("virtio-blk"), "{answers}");
    assert_eq!(wait(&mut qemu), Some(0));
    server.logged(&["front-end connected"]);
}

#[test]
fn help_shows_by_example() {
    for (args, says) in [
        (&["--help"][..], &["serve", "Exit codes"][..]),
        (
            &["serve", "--help"],
            &[
                "ringdisk serve vm1.raw",
                "queues=4,socket=/run/ringdisk/vm1.sock",
                "--json",
                "SIGTERM",
            ],
        ),
        (&["--version"], &["ringdisk 0."]),
    ] {
        let (code, text) = run(ringdisk().args(args));
        assert_eq!(code, Some(0), "{text}");
        for word in says {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
}

#[test]
fn a_disk_that_stores_nothing_says_so_loudly() {
    let dir = directory();
    let socket = dir.path().join("null.sock");
    let server = serve_all(&[format!("file=null:1G,socket={}", socket.display())]);
    let warning = server.logged(&["STORES NOTHING"]);
    assert!(warning.contains("WARN"), "{warning}");
    assert_eq!(server.ready["disks"][0]["file"], "null:1G");
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.config().unwrap().capacity, (1 << 30) / 512);
    assert_eq!(device.queues[0].write(0, &content(0, 4096)), OK);
}

// How it starts and ends

#[test]
fn a_service_manager_is_told() {
    let dir = directory();
    let path = dir.path().join("notify");
    is_told(path.to_str().unwrap(), &UnixDatagram::bind(&path).unwrap());
    // A manager that is not there is no reason not to serve.
    let disk = Disk::new();
    let mut command = ringdisk();
    command.env("NOTIFY_SOCKET", dir.path().join("nobody"));
    command.args(["serve", "--json", &disk.argument("")]);
    let server = Server::ringdisk_command(command).unwrap();
    assert_serves(&disk.socket);
    drop(server);
}

/// sd_notify(3): an address that begins with '@' has no place in the file system.
#[test]
fn a_service_manager_is_told_without_a_file() {
    let name = format!("ringdisk-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    is_told(&format!("@{name}"), &manager);
}

/// Serves with `address` as NOTIFY_SOCKET, at which `manager` listens.
fn is_told(address: &str, manager: &UnixDatagram) {
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
    assert_serves(&disk.socket);
    // Type=notify-reload asks for the time, and takes the reload for done at the next READY=1.
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
fn signals_end_it_in_order() {
    for signal in [Signal::TERM, Signal::INT] {
        for connected in [false, true] {
            let disk = Disk::new();
            let server = Text::serve(&[disk.argument("")]);
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

/// Whoever reads what is printed may have gone by then, and a front-end may go at any time.
#[test]
fn it_outlives_who_started_it() {
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
fn the_default_socket_is_where_this_user_may_write() {
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
    // A service manager may have made more than one, of which the first is meant.
    let mut command = ringdisk();
    let made = format!("{}:/run/other", dir.path().join("service").display());
    command.env("RUNTIME_DIRECTORY", made);
    assert_eq!(serve(command), dir.path().join("service").join(&file));
    let Some((mut command, home)) = as_nobody("the_default_socket_is_where_this_user_may_write")
    else {
        return;
    };
    command.env("XDG_RUNTIME_DIR", home.path());
    assert_eq!(serve(command), home.path().join("ringdisk").join(&file));
    let (mut command, home) = as_nobody("").unwrap();
    // Without one of its own, where it is started, and never in a directory that others write to.
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

/// ringdisk as a user without privileges, and a directory that this user may write to.
fn as_nobody(test: &str) -> Option<(Command, TempDir)> {
    let home = tempfile::tempdir().unwrap();
    if !is_root() {
        return Some((ringdisk(), home));
    }
    // The build directory may not be open to everybody.
    let binary = home.path().join("binary");
    fs::copy(env!("CARGO_BIN_EXE_ringdisk"), &binary).unwrap();
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

// Sockets of others

#[test]
fn a_stale_socket_is_replaced() {
    let disk = Disk::new();
    drop(UnixListener::bind(&disk.socket).unwrap());
    assert!(disk.socket.exists());
    let server = serve_all(&[disk.argument("")]);
    assert_serves(&disk.socket);
    // Killed, it leaves one itself.
    drop(server);
    assert!(disk.socket.exists());
    let mut server = serve_all(&[disk.argument("")]);
    assert_serves(&disk.socket);
    assert!(server.terminate().unwrap().success());
    assert!(!disk.socket.exists());
}

#[test]
fn a_live_socket_is_left_alone() {
    let (first, second) = (Disk::new(), Disk::new());
    let server = serve_all(&[first.argument("")]);
    let argument = format!(
        "file={},socket={}",
        second.file.display(),
        first.socket.display()
    );
    let words = [first.socket.to_str().unwrap(), "live server", "socket=PATH"];
    assert_refused(&[&argument], 1, &words);
    assert_serves(&first.socket);
    // Also while a front-end occupies it.
    let device = Device::connect(&first.socket, &DeviceConfig::default()).unwrap();
    assert_refused(&[&argument], 1, &words);
    drop(device);
    assert_serves(&first.socket);
    drop(server);
}

#[test]
fn what_is_no_socket_is_not_deleted() {
    let disk = Disk::new();
    let words = [disk.socket.to_str().unwrap(), "not a socket", "remove it"];
    fs::write(&disk.socket, "precious").unwrap();
    assert_refused(&[&disk.argument("")], 1, &words);
    assert_eq!(fs::read(&disk.socket).unwrap(), b"precious");
    fs::remove_file(&disk.socket).unwrap();

    fs::create_dir(&disk.socket).unwrap();
    assert_refused(&[&disk.argument("")], 1, &words);
    assert!(disk.socket.is_dir());
    fs::remove_dir(&disk.socket).unwrap();

    symlink(&disk.file, &disk.socket).unwrap();
    assert_refused(&[&disk.argument("")], 1, &words);
    assert_eq!(disk.bytes(8, 4096), content(8, 4096));
    fs::remove_file(&disk.socket).unwrap();

    // The disk itself.
    let file = disk.file.display();
    let argument = format!("file={file},socket={file}");
    assert_refused(&[&argument], 1, &["not a socket"]);
    assert_eq!(disk.bytes(8, 4096), content(8, 4096));
}

#[test]
fn a_disk_that_fails_leaves_no_socket_of_the_others() {
    let (good, bad) = (Disk::new(), Disk::new());
    fs::remove_file(&bad.file).unwrap();
    let (a, b) = (good.argument(""), bad.argument(""));
    let name = bad.file.to_str().unwrap();
    assert_refused(&[&a, &b], 1, &[name, "no such file"]);
    assert!(!good.socket.exists() && !bad.socket.exists());
}

// Files in use by others

#[test]
fn a_second_ringdisk_is_kept_away_from_a_file() {
    let disk = Disk::new();
    let socket = disk.socket.with_extension("2");
    let argument = |options: &str| {
        format!(
            "file={},socket={}{options}",
            disk.file.display(),
            socket.display()
        )
    };
    let words = [disk.file.to_str().unwrap(), "in use", "stop that one"];
    let mut server = serve_all(&[disk.argument("")]);
    assert_refused(&[&argument("")], 1, &words);
    assert_refused(&[&argument(",readonly=on")], 1, &words);
    assert_refused(&[&argument(",cache=writeback")], 1, &words);
    // Twice on one command line.
    let twice = format!("{},name=second", argument(""));
    assert!(server.terminate().unwrap().success());
    let name = disk.file.file_stem().unwrap().to_str().unwrap();
    let ours = [words[0], &format!("in use by disk '{name}'"), "detach"];
    assert_refused(&[&disk.argument(""), &twice], 1, &ours);

    let first = serve_all(&[disk.argument("readonly=on")]);
    let second = serve_all(&[argument(",readonly=on")]);
    assert_serves(&disk.socket);
    assert_serves(&socket);
    assert_refused(&[&argument("3")], 1, &words);
    drop((first, second));
    let server = serve_all(&[argument("")]);
    assert_serves(&socket);
    drop(server);
}

#[test]
fn qemus_tools_respect_the_lock() {
    if !has("qemus_tools_respect_the_lock", "qemu-img")
        || !has("qemus_tools_respect_the_lock", "qemu-io")
    {
        return;
    }
    let (mut server, disk) = serve("");
    let file = disk.file.to_str().unwrap();
    let copy = disk.file.with_extension("copy");
    let copy = copy.to_str().unwrap();
    let refuses = |program: &str, args: &[&str]| {
        let (code, text) = run(Command::new(program).args(args));
        assert_ne!(code, Some(0), "{program} {args:?}: {text}");
        assert!(text.contains("lock"), "{program} {args:?}: {text}");
    };
    let works = |program: &str, args: &[&str]| {
        let (code, text) = run(Command::new(program).args(args));
        assert_eq!(code, Some(0), "{program} {args:?}: {text}");
    };
    // Of a raw disk, QEMU's own too, this reads nothing that a writer could change.
    works("qemu-img", &["info", "-f", "raw", file]);
    works("qemu-img", &["info", "-U", "-f", "raw", file]);
    refuses(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", file, copy],
    );
    refuses("qemu-img", &["resize", "-f", "raw", file, "32M"]);
    refuses("qemu-io", &["-f", "raw", "-c", "write 0 4k", file]);
    assert_eq!(
        disk.bytes(0, DISK_BYTES as usize),
        content(0, DISK_BYTES as usize)
    );
    // In order: a killed one keeps its lock until the kernel is done with it, and QEMU does not wait.
    assert!(server.terminate().unwrap().success());

    // Served read-only, others may read but not write.
    let mut server = serve_all(&[disk.argument("readonly=on")]);
    works("qemu-img", &["info", "-f", "raw", file]);
    works(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", file, copy],
    );
    refuses("qemu-io", &["-f", "raw", "-c", "write 0 4k", file]);
    assert_serves(&disk.socket);
    assert!(server.terminate().unwrap().success());
    works("qemu-io", &["-f", "raw", "-c", "write 0 4k", file]);
}

/// `qemu-io` with a file open, until it is dropped.
struct QemuIo {
    child: Child,
    input: Option<ChildStdin>,
}

impl QemuIo {
    fn open(args: &[&str], file: &Path) -> Self {
        let mut child = Command::new("qemu-io")
            .args(["-f", "raw"])
            .args(args)
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        // An answer means that the file is open.
        writeln!(input, "length").unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("MiB") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "qemu-io ended");
        }
        Self {
            child,
            input: Some(input),
        }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

#[test]
fn a_file_that_qemu_uses_is_refused() {
    const TEST: &str = "a_file_that_qemu_uses_is_refused";
    if !has(TEST, "qemu-io") || !has(TEST, "qemu-storage-daemon") {
        return;
    }
    let disk = Disk::new();
    let file = disk.file.to_str().unwrap();
    let (writable, readonly) = (disk.argument(""), disk.argument("readonly=on"));
    let words = [file, "in use by another process", "stop that one"];

    let other = QemuIo::open(&[], &disk.file);
    assert_refused(&[&writable], 1, &words);
    assert_refused(&[&readonly], 1, &words);
    drop(other);
    // One that only reads, and says that it does not mind writers.
    let other = QemuIo::open(&["-r"], &disk.file);
    drop(serve_all(std::slice::from_ref(&writable)));
    let mut server = serve_all(std::slice::from_ref(&readonly));
    assert_serves(&disk.socket);
    assert!(server.terminate().unwrap().success());
    drop(other);

    let socket = disk.socket.with_extension("qsd");
    let other = Server::qemu(&format!("driver=file,filename={file}"), &socket, 1).unwrap();
    assert_refused(&[&writable], 1, &words);
    assert_refused(&[&readonly], 1, &words);
    drop(other);
    let server = serve_all(&[writable]);
    assert_serves(&disk.socket);
    drop(server);
}

/// Whoever is about to let a file go is waited for: a guest that restarts finds its disk.
#[test]
fn a_lock_that_is_let_go_is_taken() {
    let disk = Disk::new();
    let mut first = serve_all(&[disk.argument("")]);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(500));
            first.terminate().unwrap();
        });
        let socket = disk.socket.with_extension("2");
        let second = serve_all(&[format!(
            "file={},socket={}",
            disk.file.display(),
            socket.display()
        )]);
        second.logged(&["is in use; waiting"]);
        assert_serves(&socket);
    });
}

#[test]
fn a_mounted_device_is_refused() {
    const TEST: &str = "a_mounted_device_is_refused";
    let backing = Disk::new();
    let file = backing.file.to_str().unwrap();
    let mount = directory();
    let mount = mount.path().to_str().unwrap();
    let (code, device) = run(Command::new("losetup").args(["-f", "--show", file]));
    let device = device.trim();
    if code != Some(0) {
        return println!("skipped: {TEST}: no loop device: {device}");
    }
    let _guard = Undo(vec![
        vec!["umount".into(), "-q".into(), mount.into()],
        vec!["losetup".into(), "-d".into(), device.into()],
    ]);
    let mounted = [&["mkfs.ext4", "-q", device][..], &["mount", device, mount]]
        .iter()
        .all(|c| run(Command::new(c[0]).args(&c[1..])).0 == Some(0));
    if !mounted {
        return println!("skipped: {TEST}: cannot mount a loop device");
    }
    let argument = format!("file={device},socket={}", backing.socket.display());
    let words = [
        device,
        "in use on this host",
        "mounted",
        "lsblk",
        "released first",
    ];
    assert_refused(&[&argument], 1, &words);
    assert_eq!(run(Command::new("umount").arg(mount)).0, Some(0));
    let server = serve_all(&[argument]);
    assert_eq!(server.ready["disks"][0]["format"], "raw");
    Device::connect(&backing.socket, &DeviceConfig::default()).unwrap();
    // And while it is served, it cannot be mounted.
    assert_ne!(run(Command::new("mount").args([device, mount])).0, Some(0));
    drop(server);
}

/// Commands to run at the end of a test, however it ends.
struct Undo(Vec<Vec<String>>);

impl Drop for Undo {
    fn drop(&mut self) {
        for command in &self.0 {
            let _ = Command::new(&command[0]).args(&command[1..]).output();
        }
    }
}

// What cannot be served

#[test]
fn files_that_are_no_disks() {
    let dir = directory();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let sized = |name: &str, size: u64| {
        File::create(path(name)).unwrap().set_len(size).unwrap();
    };
    fs::create_dir(path("directory.raw")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("fifo.raw"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let _listener = UnixListener::bind(path("socket.raw")).unwrap();
    sized("empty.raw", 0);
    sized("odd.raw", 1_000_000);
    sized("sectors.raw", 4608);
    sized("unsaid", 1 << 20);
    sized("strange.vmdk", 1 << 20);
    sized("new.qcow2", 1 << 20);
    symlink("nowhere", path("dangling.raw")).unwrap();

    let disk = "a regular file or a block device";
    for (name, words) in [
        ("missing.raw", &["no such file", "qemu-img create"][..]),
        ("dangling.raw", &["no such file", "qemu-img create"]),
        ("directory.raw", &["a directory", disk]),
        ("fifo.raw", &["a FIFO", disk]),
        ("socket.raw", &["a socket", disk]),
        ("empty.raw", &["is empty", "truncate -s"]),
        ("odd.raw", &["1000000", "multiple of", "truncate -s %"]),
        ("odd.raw,cache=writeback", &["1000000", "multiple of 512"]),
        (
            "odd.raw,cache=writeback,logical-block-size=4096",
            &["1000000", "multiple of"],
        ),
        (
            "sectors.raw,cache=writeback,logical-block-size=4096",
            &["4608 bytes", "logical-block-size=4096", "truncate -s %4096"],
        ),
        ("odd.raw/below.raw", &["Not a directory"]),
        ("unsaid", &["format=raw"]),
        ("strange.vmdk", &["format=raw"]),
        ("new.qcow2", &["new.qcow2", "not a qcow2 image"]),
    ] {
        let argument = format!("file={},socket={}", path(name), path("s.sock"));
        let file = path(name.split(',').next().unwrap());
        assert_refused(&[&argument], 1, &[&[&*file], words].concat());
        assert!(!Path::new(&path("s.sock")).exists());
    }
    let zero = format!("file=/dev/zero,socket={}", path("s.sock"));
    assert_refused(&[&zero], 1, &["/dev/zero", "a character device", disk]);
    assert!(!Path::new(&path("missing.raw")).exists(), "it was created");

    // The way out that is named leads out.
    let odd = format!("file={},socket={}", path("odd.raw"), path("s.sock"));
    let (_, text) = run(ringdisk().args(["serve", &odd]));
    let fix = text.split('\'').nth(1).expect("a command in quotes");
    println!("{fix}");
    assert_eq!(run(Command::new("sh").args(["-c", fix])).0, Some(0));
    drop(serve_all(&[odd]));
    let said = format!(
        "file={},format=raw,socket={}",
        path("unsaid"),
        path("s.sock")
    );
    drop(serve_all(&[said]));
}

#[test]
fn permission_is_asked_for_by_name() {
    const TEST: &str = "permission_is_asked_for_by_name";
    for (mode, options, words) in [
        (
            0o000,
            "",
            &["permission denied for writing", "read and write"][..],
        ),
        (
            0o444,
            "",
            &["permission denied for writing", "read and write"],
        ),
        (
            0o000,
            ",readonly=on",
            &["permission denied", "let this user read"],
        ),
    ] {
        let Some((mut command, home)) = as_nobody(TEST) else {
            return;
        };
        let file = home.path().join("disk.raw");
        fs::write(&file, content(0, 1 << 20)).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        let file = file.to_str().unwrap();
        let socket = home.path().join("s.sock");
        command.arg("serve");
        command.arg(format!("file={file},socket={}{options}", socket.display()));
        assert_fails(command, 1, &[&[file], words].concat());
    }
    // Readable is enough to read.
    let (mut command, home) = as_nobody(TEST).unwrap();
    let (file, socket) = (home.path().join("disk.raw"), home.path().join("s.sock"));
    fs::write(&file, content(0, 1 << 20)).unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).unwrap();
    command.args(["serve", "--json"]).arg(format!(
        "file={},socket={},readonly=on,cache=writeback",
        file.display(),
        socket.display()
    ));
    let server = Server::ringdisk_command(command).unwrap();
    assert_serves(&socket);
    drop(server);

    // A directory that is not for this user's sockets.
    let (mut command, home) = as_nobody(TEST).unwrap();
    let closed = home.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, PermissionsExt::from_mode(0o500)).unwrap();
    let socket = closed.join("s.sock");
    let socket = socket.to_str().unwrap();
    command.args(["serve", &format!("null:1G,socket={socket}")]);
    assert_fails(command, 1, &[socket, "Permission denied", "socket=PATH"]);
    fs::set_permissions(&closed, PermissionsExt::from_mode(0o700)).unwrap();
}

#[test]
fn a_file_system_without_o_direct_is_named() {
    // Files of sysfs have a size and are regular, but cannot be opened with O_DIRECT.
    let file = "/sys/kernel/uevent_seqnum";
    if !fs::metadata(file).is_ok_and(|m| m.is_file()) {
        return println!("skipped: a_file_system_without_o_direct_is_named: no {file}");
    }
    let dir = directory();
    let socket = dir.path().join("s.sock");
    let argument = format!(
        "file={file},format=raw,readonly=on,socket={}",
        socket.display()
    );
    assert_refused(&[&argument], 1, &[file, "O_DIRECT", "cache=writeback"]);
}

#[test]
fn wrong_words_are_wrong_usage() {
    let disk = Disk::new();
    let good = disk.argument("");
    let file = disk.file.to_str().unwrap();
    for (options, words) in [
        ("cach=none", &["no option 'cach'", "cache"][..]),
        ("cache", &["'cache' is not key=value"]),
        ("cache=fast", &["none, writeback"]),
        ("aio=epoll", &["io_uring", "native"]),
        ("queues=0", &["1 to 256"]),
        ("queues=257", &["1 to 256"]),
        ("queue-size=100", &["power of two", "1024"]),
        ("queue-size=2048", &["power of two", "1024"]),
        ("readonly=yes", &["neither on nor off"]),
        ("fixed-buffers=1", &["neither on nor off"]),
        ("format=vmdk", &["raw and qcow2"]),
        ("name=9", &["not a letter"]),
        ("serial=a-serial-that-is-too-long", &["20 ASCII"]),
        ("socket=/else", &["socket is given twice"]),
    ] {
        let argument = disk.argument(options);
        assert_refused(&[&argument], 2, &[&["disk '", file], words].concat());
        assert!(!disk.socket.exists());
    }
    let long = format!("file={file},socket=/{}", "x".repeat(108));
    assert_refused(&[&long], 2, &["socket", "107"]);
    assert_refused(&["name=x"], 2, &["no file", "vm1.raw"]);
    assert_refused(&["null:1000"], 2, &["whole sectors"]);
    let name = disk.file.file_stem().unwrap().to_str().unwrap();
    assert_refused(&[&good, &good], 2, &[name, "name="]);
    let twin = format!("{good},name=twin");
    assert_refused(&[&good, &twin], 2, &["twin", disk.socket.to_str().unwrap()]);
    assert_refused(&[], 2, &[]);
    assert_refused(&["--iothreads", "0", &good], 2, &[]);
    assert_refused(&["--poll-max-us", "fast", &good], 2, &[]);
    assert_fails(ringdisk(), 2, &[]);
}

// io_uring

#[expect(unsafe_code, reason = "the standard library knows no seccomp")]
unsafe extern "C" {
    fn prctl(option: i32, ...) -> i32;
}

#[repr(C)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    operand: u32,
}

#[repr(C)]
struct Program {
    len: u16,
    instructions: *const Instruction,
}

/// Lets a command and what it starts see `errno` from io_uring_setup, and nobody else.
#[expect(unsafe_code, reason = "the standard library knows no seccomp")]
fn without_io_uring(command: &mut Command, errno: u32) {
    const PR_SET_SECCOMP: i32 = 22;
    const SECCOMP_MODE_FILTER: usize = 2;
    const PR_SET_NO_NEW_PRIVS: i32 = 38;
    const IO_URING_SETUP: u32 = 425;
    let instruction = |code, jump_false, operand| Instruction {
        code,
        jump_true: 0,
        jump_false,
        operand,
    };
    let filter = move || {
        let instructions = [
            instruction(0x20, 0, 0),              // load the number of the system call
            instruction(0x15, 1, IO_URING_SETUP), // skip one unless it is this
            instruction(0x06, 0, 0x0005_0000 | errno), // return an error
            instruction(0x06, 0, 0x7fff_0000),    // let it pass
        ];
        let program = Program {
            len: instructions.len() as u16,
            instructions: instructions.as_ptr(),
        };
        // SAFETY: the first takes numbers, the second reads a program that lives until it returns.
        let failed = unsafe {
            prctl(PR_SET_NO_NEW_PRIVS, 1usize, 0usize, 0usize, 0usize) != 0
                || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        match failed {
            true => Err(std::io::Error::last_os_error()),
            false => Ok(()),
        }
    };
    // SAFETY: between fork and exec it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(filter) };
}

#[test]
fn io_uring_that_is_forbidden_or_absent_is_named() {
    const EPERM: u32 = 1;
    const EACCES: u32 = 13;
    const ENOSYS: u32 = 38;
    const ENOMEM: u32 = 12;
    let disk = Disk::new();
    let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let forbidden = &["io_uring is forbidden", "container", "io_uring_setup"][..];
    for (errno, words) in [
        (EPERM, forbidden),
        (EACCES, forbidden),
        (ENOSYS, &["this kernel has no io_uring", "Linux 5."]),
        (ENOMEM, &["io_uring cannot be set up", "memory"]),
    ] {
        if errno == EPERM && setting.as_ref().is_ok_and(|s| s.trim() != "0") {
            continue;
        }
        let mut command = ringdisk();
        without_io_uring(&mut command, errno);
        command.args(["serve", &disk.argument("aio=io_uring")]);
        assert_fails(command, 1, &[words, &["aio=auto"]].concat());
        assert!(!disk.socket.exists());
        // Unless it was asked for, all goes on without.
        let mut command = ringdisk();
        without_io_uring(&mut command, errno);
        command.args(["serve", "--json", &disk.argument("cache=none")]);
        let mut server = Server::ringdisk_command(command).unwrap();
        let chosen = server.logged(&["aio="]);
        assert!(!chosen.contains("aio=io_uring"), "{chosen}");
        assert!(chosen.contains(words[0]), "{chosen}");
        assert_serves(&disk.socket);
        assert!(server.terminate().unwrap().success());
    }
}

/// Switched off as by `sysctl`, but only as this one process sees it.
#[test]
fn io_uring_that_is_switched_off_is_named() {
    const TEST: &str = "io_uring_that_is_switched_off_is_named";
    let disk = Disk::new();
    let setting = disk.file.with_extension("setting");
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    for value in ["1", "2"] {
        fs::write(&setting, format!("{value}\n")).unwrap();
        let script = "mount --bind \"$0\" /proc/sys/kernel/io_uring_disabled || exit 99; \
            exec \"$@\"";
        let unshare = |program: &[&str]| {
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-c", script]).arg(&setting);
            command.args(program).stdin(Stdio::null());
            command
        };
        match unshare(&["true"]).output() {
            Ok(output) if output.status.success() => {}
            result => return println!("skipped: {TEST}: no namespace of its own: {result:?}"),
        }
        let mut command = unshare(&[binary, "serve", &disk.argument("aio=io_uring")]);
        without_io_uring(&mut command, 1);
        let words = [
            "switched off",
            &format!("kernel.io_uring_disabled = {value}"),
            "sysctl -w kernel.io_uring_disabled=0",
        ];
        assert_fails(command, 1, &words);
    }
}

// Pinned guest memory

#[test]
fn pinned_memory_carries_the_right_bytes() {
    for cache in ["none", "writeback"] {
        for queues in [1, 4] {
            let (server, disk) = serve(&format!(
                "cache={cache},queues={queues},queue-size=128,fixed-buffers=on"
            ));
            for indirect in [false, true] {
                let config = DeviceConfig {
                    queues,
                    queue_size: 128,
                    indirect,
                    ..DeviceConfig::default()
                };
                // Each round is a front-end that comes back.
                let mut device = Device::connect(server.socket(), &config).unwrap();
                assert!(pinned(&server) > 0, "no memory is pinned");
                thread::scope(|scope| {
                    for queue in &mut device.queues {
                        scope.spawn(|| rewrite(queue, &disk));
                    }
                });
            }
            assert!(!server.log().contains("cannot be pinned"));
            // What a session pinned goes with it.
            let start = Instant::now();
            while pinned(&server) > 0 {
                assert!(start.elapsed() < HANG, "memory stays pinned");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    let (server, _disk) = serve("");
    let _device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(pinned(&server), 0, "not asked for");
}

/// KiB of memory that the server has pinned.
fn pinned(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmPin:"));
    let number = line.and_then(|l| l.split_whitespace().next());
    number.expect("VmPin").parse().unwrap()
}

/// Writes to an area that no other queue uses and reads it back, in the guest and on the host.
fn rewrite(queue: &mut Queue, disk: &Disk) {
    const LEN: usize = 32 << 10;
    let area = u64::from(queue.index) * 4096;
    let place = |slot: u16| area + u64::from(slot) * 64;
    let slots: Vec<u16> = (0..queue.slots()).collect();
    // In the end it is as it was.
    for shift in [5, 77, 0] {
        for op in [Op::Write, Op::Read] {
            for &slot in &slots {
                let bytes = match op {
                    Op::Write => content(place(slot) + shift, LEN),
                    _ => vec![0xa5; LEN],
                };
                queue.write_buffer(slot, &bytes);
                queue.prepare(slot, op, place(slot), LEN as u32);
            }
            queue.submit(&slots);
            for (slot, status) in queue.finish(slots.len()) {
                assert_eq!(status, OK, "{op:?} in slot {slot}");
                let right = content(place(slot) + shift, LEN);
                assert!(queue.read_buffer(slot, LEN) == right, "{op:?}, {slot}");
            }
            assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        }
        for &slot in &slots {
            let right = content(place(slot) + shift, LEN);
            assert!(disk.bytes(place(slot), LEN) == right, "on the host");
        }
    }
}

#[test]
fn pinned_memory_comes_and_goes() {
    let (server, disk) = serve("queues=2,fixed-buffers=on");
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let mut busy = device.queues.remove(1);
    let memory = device.memory.clone();
    let spare = &memory.regions()[Device::SPARE];
    let low = &memory.regions()[Device::LOW];
    let header_at = low.end() - (16 << 10);
    let before = pinned(&server);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rewrite(&mut busy, &disk);
            }
        });
        for round in 0..20 {
            device.frontend.add_mem_reg(spare).unwrap();
            assert!(pinned(&server) > before, "round {round}");
            // Into the new region, and over the border between two old ones.
            for to in [spare.gpa + 0x1000, low.gpa - 2048] {
                let got = read_to(&mut device, header_at, to);
                assert!(got == [content(8, 4096), vec![OK]].concat(), "{to:#x}");
            }
            device.frontend.rem_mem_reg(spare).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(pinned(&server), before, "a region that went stays pinned");
    let all: Vec<_> = memory.regions().iter().collect();
    device.frontend.set_mem_table(&all).unwrap();
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    drop(device);
    assert_serves(&disk.socket);
    assert!(!server.log().contains("cannot be pinned"));
}

/// Reads 4096 bytes at sector 8 to an address of guest memory; gives them and the status.
fn read_to(device: &mut Device, header_at: u64, to: u64) -> Vec<u8> {
    let layout = Layout {
        readable: vec![16],
        writable: vec![4096],
        ..Layout::default()
    };
    let (memory, queue) = (&device.memory, &mut device.queues[0]);
    let request = header(VIRTIO_BLK_T_IN, 8);
    let chain = Chain::request(memory, &layout, header_at, &request, to, 4097);
    let table = memory.regions()[Device::RINGS].end() - 4096;
    let head = chain.place(layout.table, &mut queue.ring, 0, memory, table);
    queue.ring.publish([head]);
    let used = queue.ring.next_used(HANG).expect("the request completes");
    assert_eq!(used.id, u32::from(head));
    chain.written(memory)
}

/// A balloon gives a page back to the host by punching it out of the guest's memory, and the guest gets a new one when it
/// writes there again. What is pinned is the old page, so that memory is not pinned unless the operator asks for it.
#[test]
fn a_page_that_was_replaced_is_written_as_the_guest_sees_it() {
    const LEN: usize = 4096;
    for fixed in ["off", "on"] {
        let (_server, disk) = serve(&format!("fixed-buffers={fixed}"));
        let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
        let low = &device.memory.regions()[Device::LOW];
        let queue = &mut device.queues[0];
        let (old, new) = (content(1000, LEN), content(2000, LEN));
        assert_eq!(queue.write(0, &old), OK);
        assert!(disk.bytes(0, LEN) == old);

        let at = low.mmap_offset + queue.buffer(0) - low.gpa;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&low.file, hole, at, LEN as u64).unwrap();
        assert!(queue.read_buffer(0, LEN) == vec![0; LEN]);
        assert_eq!(queue.write(0, &new), OK);
        let on_disk = disk.bytes(0, LEN);
        let seen = match on_disk {
            bytes if bytes == new => "what the guest wrote",
            bytes if bytes == old => "what was in the page before the guest gave it away",
            bytes if bytes == vec![0; LEN] => "zeroes",
            _ => "something else",
        };
        println!("fixed-buffers={fixed}: the disk has {seen}");
        // With it on, it depends on the pages of which the kernel makes memory.
        if fixed == "off" {
            assert_eq!(seen, "what the guest wrote");
        }
    }
}

/// Shells and services start with a limit of 1024 descriptors, or less.
#[test]
fn few_descriptors_are_enough() {
    let disk = Disk::new();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -n 256 && exec \"$@\"", "sh"])
        .args([env!("CARGO_BIN_EXE_ringdisk"), "serve"])
        .arg(disk.argument("queues=4"));
    let served = Text::start(command);
    let (code, _) = served.end(Signal::TERM);
    assert_eq!(code, Some(0));
}
