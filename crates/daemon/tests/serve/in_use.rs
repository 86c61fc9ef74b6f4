//! Sockets and files that are in use by others.

use super::*;

#[test]
fn stale_socket_is_replaced() {
    let disk = Disk::new();
    drop(UnixListener::bind(&disk.socket).unwrap());
    assert!(disk.socket.exists());
    let server = serve_all(&[disk.argument("")]);
    assert_serves(&disk.socket);
    // A killed server leaves its socket behind.
    drop(server);
    assert!(disk.socket.exists());
    let mut server = serve_all(&[disk.argument("")]);
    assert_serves(&disk.socket);
    assert!(server.terminate().unwrap().success());
    assert!(!disk.socket.exists());
}

#[test]
fn live_socket_is_left_alone() {
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
    // Also while a front-end is connected.
    let device = Device::connect(&first.socket, &DeviceConfig::default()).unwrap();
    assert_refused(&[&argument], 1, &words);
    drop(device);
    assert_serves(&first.socket);
    drop(server);
}

#[test]
fn non_socket_is_not_deleted() {
    let disk = Disk::new();
    let words = [
        disk.socket.to_str().unwrap(),
        "not a socket",
        "another path",
    ];
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

    // The path of the disk itself.
    let file = disk.file.display();
    let argument = format!("file={file},socket={file}");
    assert_refused(&[&argument], 1, &["not a socket"]);
    assert_eq!(disk.bytes(8, 4096), content(8, 4096));
}

#[test]
fn failed_disk_leaves_no_sockets_of_the_others() {
    let (good, bad) = (Disk::new(), Disk::new());
    fs::remove_file(&bad.file).unwrap();
    let (a, b) = (good.argument(""), bad.argument(""));
    let name = bad.file.to_str().unwrap();
    assert_refused(&[&a, &b], 1, &[name, "no such file"]);
    assert!(!good.socket.exists() && !bad.socket.exists());
}

// Files in use by others

#[test]
fn second_ringdisk_cannot_open_the_file() {
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
fn qemu_tools_respect_the_lock() {
    if !is_installed("qemu_tools_respect_the_lock", "qemu-img")
        || !is_installed("qemu_tools_respect_the_lock", "qemu-io")
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
    // On a raw disk, also with QEMU as the writer, this reads nothing that a writer could change.
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
    // A clean shutdown: a killed process keeps its lock until the kernel is done with it, and QEMU does not wait.
    assert!(server.terminate().unwrap().success());

    // A disk served read-only can be read by others but not written.
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

/// `qemu-io` with a file open until it is dropped.
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
        // The answer means that the file is open.
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
fn file_in_use_by_qemu_is_refused() {
    const TEST: &str = "file_in_use_by_qemu_is_refused";
    if !is_installed(TEST, "qemu-io") || !is_installed(TEST, "qemu-storage-daemon") {
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
    // A reader that accepts other writers.
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

/// A lock that is about to be released is waited for, so that a restarting guest finds its disk.
#[test]
fn lock_being_released_is_waited_for() {
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
        second.wait_for_log(&["is in use; waiting"]);
        assert_serves(&socket);
    });
}

#[test]
fn mounted_device_is_refused() {
    const TEST: &str = "mounted_device_is_refused";
    let backing = Disk::new();
    let file = backing.file.to_str().unwrap();
    let mount = directory();
    let mount = mount.path().to_str().unwrap();
    let (code, device) = run(Command::new("losetup").args(["-f", "--show", file]));
    let device = device.trim();
    if code != Some(0) {
        return println!("skipped: {TEST}: no loop device: {device}");
    }
    let _guard = Cleanup(vec![
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
    // While it is served, it cannot be mounted.
    assert_ne!(run(Command::new("mount").args([device, mount])).0, Some(0));
    drop(server);
}

/// Commands to run at the end of a test, even after a failure.
struct Cleanup(Vec<Vec<String>>);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for command in &self.0 {
            let _ = Command::new(&command[0]).args(&command[1..]).output();
        }
    }
}
