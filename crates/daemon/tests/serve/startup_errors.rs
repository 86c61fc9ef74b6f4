//! Disks that cannot be served, and the error messages.

use super::*;

#[test]
fn unusable_files_are_refused() {
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
        (
            "odd.raw",
            &[
                "1000000",
                "multiple of",
                "check that it is a disk image",
                "truncate -s %",
            ],
        ),
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
    assert!(
        !Path::new(&path("missing.raw")).exists(),
        "the missing file was created"
    );

    // The suggested remedy works.
    let odd = format!("file={},socket={}", path("odd.raw"), path("s.sock"));
    let (_, text) = run(ringdisk().args(["serve", &odd]));
    let fix = text.split('\'').nth(3).expect("a command in quotes");
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
fn missing_permission_is_named() {
    const TEST: &str = "missing_permission_is_named";
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
            &["permission denied", "let that user read", "chown"],
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
    // Read permission is enough for reading.
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

    // A directory in which this user may not create sockets.
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

/// The option that names the directory is named.
#[test]
fn directories_of_others_are_refused() {
    let dir = directory();
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    let open = open.to_str().unwrap();
    for (option, other) in [("--fleece", "--state"), ("--state", "--fleece")] {
        let mut command = ringdisk();
        command.args(["serve", "null:1G", option, open]);
        let (code, text) = run(&mut command);
        assert_eq!(code, Some(1), "{text}");
        for words in [open, "others may write to it", option] {
            assert!(text.contains(words), "{text}");
        }
        assert!(!text.contains(other), "{text}");
    }
}

#[test]
fn file_system_without_o_direct_is_named() {
    // Files of sysfs have a size and are regular, but cannot be opened with O_DIRECT.
    let file = "/sys/kernel/uevent_seqnum";
    if !fs::metadata(file).is_ok_and(|m| m.is_file()) {
        return println!("skipped: file_system_without_o_direct_is_named: no {file}");
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
fn invalid_options_are_usage_errors() {
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
        ("format=vmdk", &["neither raw nor qcow2"]),
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
    assert_refused(&["null:1000"], 2, &["positive multiple of 512"]);
    let name = disk.file.file_stem().unwrap().to_str().unwrap();
    assert_refused(&[&good, &good], 2, &[name, "name="]);
    let twin = format!("{good},name=twin");
    assert_refused(&[&good, &twin], 2, &["twin", disk.socket.to_str().unwrap()]);
    assert_refused(&[], 2, &[]);
    assert_refused(&["--iothreads", "0", &good], 2, &[]);
    assert_refused(&["--poll-max-us", "fast", &good], 2, &[]);
    assert_fails(ringdisk(), 2, &[]);
}

/// A service manager does not start the program again, and the message says where to look.
#[test]
fn mistakes_in_user_and_allow_dir_are_usage_errors() {
    let disk = Disk::new();
    let good = disk.argument("");
    let missing = disk.file.with_extension("missing");
    let missing = missing.to_str().unwrap();
    assert_refused(
        &["--user", "no such user", &good],
        2,
        &["--user", "no such user"],
    );
    assert_refused(
        &["--allow-dir", missing, &good],
        2,
        &["--allow-dir", missing],
    );
    let file = disk.file.with_extension("toml");
    let config = ["--config", file.to_str().unwrap()];
    let text = format!(
        "iothreads = 1\nuser = 'no such user'\n[[disk]]\nfile = '{}'\nsocket = '{}'\n",
        disk.file.display(),
        disk.socket.display()
    );
    fs::write(&file, text).unwrap();
    let says = [config[1], "line 2", "user", "no such user"];
    assert_refused(&config, 2, &says);
}

/// Clients of an address that a command names later would not need certificates.
#[test]
fn certificates_without_an_address_are_refused() {
    let disk = Disk::new();
    let arguments = ["--nbd-tls=/etc/ringdisk/nbd-tls", &disk.argument("")];
    assert_refused(&arguments, 1, &["name it (--nbd ADDRESS"]);
}
