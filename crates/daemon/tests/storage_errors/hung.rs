//! Storage that does not answer, for a while or forever: what it delays, and what must not happen in the meantime.

use super::*;

/// Storage that does not answer delays neither other disks of the same thread nor the shutdown.
#[test]
fn hung_storage_delays_no_other_disk_and_no_shutdown() {
    for (format, aio) in [
        ("raw", "io_uring"),
        ("raw", "threads"),
        ("qcow2", "io_uring"),
    ] {
        let Some(setup) = Setup::new(format, 3) else {
            return;
        };
        let (file, socket) = (
            setup.dir.path().join("other.raw"),
            setup.dir.path().join("o.sock"),
        );
        std::fs::File::create(&file)
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
        let other = format!("file={},socket={}", file.display(), socket.display());
        let mut server = setup.serve(&format!("cache=none,aio={aio}"), &[other]);
        let mut device = setup.connect();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        setup.storage.change(|s| s.hangs = true);
        submit(&mut device, Op::Write);
        std::thread::sleep(Duration::from_millis(100));
        let mut beside = connect(&socket);
        submit(&mut beside, Op::Write);
        assert_eq!(
            finish(&mut beside),
            vec![OK; usize::from(DEPTH)],
            "{format} {aio}"
        );
        submit(&mut beside, Op::Flush);
        assert_eq!(
            finish(&mut beside),
            vec![OK; usize::from(DEPTH)],
            "{format} {aio}"
        );
        server.signal(rustix::process::Signal::TERM);
        wait_long_until("the process says that storage hangs", || {
            server
                .log()
                .contains("what the VM wrote and did not flush may be lost")
        });
        // The kernel may keep the rest of the process until the storage answers.
        setup.storage.change(|s| s.hangs = false);
        let status = server.ended().unwrap();
        assert_eq!(status.code(), Some(1), "{format} {aio}: {status}");
    }
}

/// A disk on a file system where a submitted read waits for a server that does not answer: other disks of the thread go on,
/// and the log, the list and the metrics say which disk hangs, until it answers.
#[test]
fn hung_server_blocks_no_other_disk_and_is_named() {
    for options in ["cache=none", "cache=writeback", "cache=none,aio=io_uring"] {
        let Some(setup) = Setup::on(Submission::Blocking, "raw", 4) else {
            return;
        };
        let (file, socket) = (
            setup.dir.path().join("other.raw"),
            setup.dir.path().join("o.sock"),
        );
        let create = std::fs::File::create(&file).unwrap();
        create.set_len(DISK_BYTES).unwrap();
        let other = format!("file={},socket={}", file.display(), socket.display());
        let server = setup.serve(options, &[other]);
        let (mut device, mut beside) = (setup.connect(), connect(&socket));
        let mut client = control::Client::connect(setup.control(), HANG).unwrap();
        let mut storage = || -> Vec<String> {
            let stats = client.call("x-ringdisk-stats", json!({})).unwrap();
            let disks = stats["disks"].as_array().unwrap();
            let word = |disk: &serde_json::Value| disk["storage"].as_str().unwrap().to_owned();
            disks.iter().map(word).collect()
        };
        setup.storage.change(|s| s.hangs = true);
        submit(&mut device, Op::Read);
        wait_until("storage has one", || setup.storage.control().held > 0);
        for op in [Op::Read, Op::Write, Op::Flush] {
            submit(&mut beside, op);
            assert_eq!(
                finish(&mut beside),
                vec![OK; usize::from(DEPTH)],
                "{options}"
            );
        }
        server.wait_for_log(&["disk disk: its storage hangs"]);
        assert_eq!(storage(), ["hangs", "works"], "{options}");
        setup.storage.change(|s| s.hangs = false);
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{options}"
        );
        server.wait_for_log(&["disk disk: its storage answers again"]);
        wait_until("the disk works", || storage() == ["works", "works"]);
        assert!(!server.log().contains("disk other: its storage hangs"));
    }
}

/// While a backup is open, a write waits for the old data: the disk hangs, also in the list and the log.
#[test]
fn write_that_waits_for_old_data_of_a_backup_hangs() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 5) else {
            return;
        };
        let nbd = format!("--nbd={}", setup.dir.path().join("nbd.sock").display());
        let server = setup.serve("cache=none", &[nbd]);
        let mut device = setup.connect();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        let mut begin = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        begin.args(["backup", "begin", "disk", "--control"]);
        assert!(begin.arg(setup.control()).status().unwrap().success());
        setup.storage.change(|s| s.hangs = true);
        submit(&mut device, Op::Write);
        server.wait_for_log(&["disk disk: its storage hangs"]);
        assert_eq!(stats(&setup.control())["storage"], "hangs", "{format}");
        setup.storage.change(|s| s.hangs = false);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        server.wait_for_log(&["disk disk: its storage answers again"]);
    }
}

/// Storage that fails answers. Writes to one new cluster wait for the first of them, which is tried again and again, and the
/// disk does not hang.
#[test]
fn writes_that_wait_for_a_stalled_one_do_not_hang() {
    let (Some(setup), Some(other)) = (Setup::new("qcow2", 6), Setup::new("raw", 7)) else {
        return;
    };
    let (file, socket) = (other.storage.file(), other.socket());
    let beside = format!(
        "file={},name=other,socket={},format=raw",
        file.display(),
        socket.display()
    );
    let server = setup.serve("cache=writeback,werror=retry", &[beside]);
    let (mut device, mut beside) = (setup.connect(), connect(&socket));
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &[0; LEN as usize]), OK);
    setup.storage.change(|s| s.outage = Some(EIO));
    for slot in 0..3 {
        queue.prepare(slot, Op::Write, 640 + 8 * u64::from(slot), LEN);
    }
    queue.submit(&[0, 1, 2]);
    server.wait_for_log(&["ringdisk tries it again until it succeeds"]);
    // Later, another disk of the thread hangs: when that is noticed, the writes have been waiting for longer.
    let _thaw = UnhangOnDrop(&other.storage);
    other.storage.change(|s| s.hangs = true);
    submit(&mut beside, Op::Read);
    server.wait_for_log(&["disk other: its storage hangs"]);
    assert_eq!(stats(&setup.control())["storage"], "fails");
    other.storage.change(|s| s.hangs = false);
    setup.storage.change(|s| s.outage = None);
    assert_eq!(device.queues[0].finish(3).len(), 3);
    assert!(!server.log().contains("disk disk: its storage hangs"));
}

/// One command detaches a disk even if its storage does not answer; its output says so, and nothing is left to detach.
/// A later attempt to open the file names the process that has it.
#[test]
fn hung_disk_is_detached_by_one_command() {
    let Some(setup) = Setup::new("raw", 21) else {
        return;
    };
    let server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    setup.storage.change(|s| s.hangs = true);
    submit(&mut device, Op::Write);
    wait_until("storage has them", || setup.storage.control().held > 0);
    let mut client = control::Client::connect(setup.control(), HANG).unwrap();
    let mut call = |command: &str, arguments| client.call(command, arguments);
    let id = || json!({ "id": "disk", "force": true });
    let failed = call("x-ringdisk-detach", id()).unwrap_err().to_string();
    println!("{failed}");
    for word in ["disk disk", "does not answer", "detached regardless"] {
        assert!(failed.contains(word), "{word}: {failed}");
    }
    let again = call("x-ringdisk-detach", id()).unwrap_err().to_string();
    assert!(again.contains("no disk 'disk'"), "{again}");
    let disk = format!(
        "file={},name=other,format=raw,socket={}",
        setup.storage.file().display(),
        setup.dir.path().join("other.sock").display()
    );
    let refused = call("x-ringdisk-attach", json!({ "disk": disk })).unwrap_err();
    let refused = refused.to_string();
    println!("{refused}");
    assert!(
        refused.contains("by this process: disk 'disk'"),
        "{refused}"
    );
    setup.storage.change(|s| s.hangs = false);
    server.wait_for_log(&["can be served again"]);
    wait_until("the file is free", || {
        call("x-ringdisk-attach", json!({ "disk": disk })).is_ok()
    });
}

/// An upgrade is refused while requests are in flight at hung storage, because nobody could complete them. Everything
/// continues.
#[test]
fn upgrade_is_refused_while_requests_hang() {
    let Some(setup) = Setup::new("raw", 5) else {
        return;
    };
    let server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    setup.storage.change(|s| s.hangs = true);
    submit(&mut device, Op::Write);
    assert_upgrade_refused(&setup);
    setup.storage.change(|s| s.hangs = false);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    submit(&mut device, Op::Read);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    let pid = upgrade(&setup)
        .0
        .unwrap_or_else(|| panic!("{}", server.log()));
    submit(&mut device, Op::Read);
    let read = finish(&mut device);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(read, vec![OK; usize::from(DEPTH)]);
}

/// Runs an upgrade: the new process's id if it succeeded, and the output.
pub fn upgrade(setup: &Setup) -> (Option<rustix::process::Pid>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    let output = command
        .args(["upgrade", "--json", "--control"])
        .arg(setup.control())
        .output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{}", text.trim_end());
    let reply: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
    let pid = reply.and_then(|reply| Some(reply["pid"].as_u64()? as i32));
    (pid.and_then(rustix::process::Pid::from_raw), text)
}

/// Expects an upgrade to be refused because requests do not complete.
fn assert_upgrade_refused(setup: &Setup) {
    let (pid, text) = upgrade(setup);
    assert!(pid.is_none());
    assert!(
        text.contains("disk disk do not finish") && text.contains("continues to serve"),
        "{text}"
    );
}

/// A SIGTERM stops the process even during a pause that nobody waits for any more.
#[test]
fn stop_after_an_abandoned_pause_is_not_lost() {
    let Some(setup) = Setup::new("raw", 11) else {
        return;
    };
    let mut server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    setup.storage.change(|s| s.hangs = true);
    submit(&mut device, Op::Write);
    assert_upgrade_refused(&setup);
    server.signal(rustix::process::Signal::TERM);
    server.wait_for_log(&["stopping"]);
    setup.storage.change(|s| s.hangs = false);
    assert!(server.ended().unwrap().success(), "{}", server.log());
}

/// A file that is being grown stays locked until that has finished: the next owner is the only writer.
#[test]
fn lock_is_kept_until_a_resize_has_finished() {
    for (round, ending) in ["its VM stops", "it is put on another image"]
        .into_iter()
        .enumerate()
    {
        // The storage holds the backing file. The new part of the overlay must not show its content.
        let Some(setup) = Setup::new("raw", 12) else {
            return;
        };
        let [file, other] = ["top.qcow2", "other.qcow2"].map(|name| setup.dir.path().join(name));
        let create = |file: &Path, options: &[&str], size: u64| {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2"]).args(options);
            let status = command.arg(file).arg(size.to_string()).status();
            assert!(status.unwrap().success());
        };
        let below = setup.storage.file();
        // Version 0.10 of the format can only represent zeroes by writing them, and half a cluster is read from the
        // backing file.
        let options = ["-o", "compat=0.10", "-F", "raw", "-b"];
        let options = [&options[..], &[below.to_str().unwrap()]].concat();
        create(&file, &options, (1 << 20) + 4096);
        create(&other, &[], 2 << 20);
        let disk = format!(
            "file={},name=disk,socket={},queues=1,lock=running",
            file.display(),
            setup.socket().display()
        );
        let mut arguments = vec![disk, format!("--control={}", setup.control().display())];
        let allowed = below.parent().unwrap().display();
        arguments.push(format!("--allow-backing={allowed}"));
        let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
        let mut device = setup.connect();
        let ringdisk = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            command
                .args(arguments)
                .arg("--control")
                .arg(setup.control());
            command.output().unwrap()
        };
        setup.storage.change(|s| s.hangs = true);
        let (at_end, resized) = std::thread::scope(|scope| {
            let resized = scope.spawn(|| ringdisk(&["resize", "disk", "2M"]));
            wait_until("the resize waits for storage", || {
                setup.storage.control().held > 0
            });
            let at_end = scope.spawn(|| {
                match round {
                    0 => drop(device.stop_queue(0).unwrap()),
                    _ => drop(ringdisk(&["replace", "disk", other.to_str().unwrap()])),
                }
                std::fs::read(&file).unwrap()
            });
            // Long enough for a premature unlock to show.
            for _ in 0..100 {
                if !at_end.is_finished() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            setup.storage.change(|s| s.hangs = false);
            (at_end.join().unwrap(), resized.join().unwrap())
        });
        println!("{ending}: {resized:?}");
        assert!(
            std::fs::read(&file).unwrap() == at_end,
            "{ending}: written to afterwards"
        );
        assert!(server.terminate().unwrap().success());
    }
}

/// A disk whose file is being replaced is not detached, not even partly; it can be detached afterwards.
#[test]
fn disk_is_not_detached_during_a_replacement() {
    let Some(setup) = Setup::new("raw", 14) else {
        return;
    };
    let allowed = format!("--allow-dir={}", setup.dir.path().display());
    let mut server = setup.serve("cache=none", &[allowed]);
    let other = setup.dir.path().join("other.raw");
    std::fs::write(&other, vec![0; DISK_BYTES as usize]).unwrap();
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        let output = command.arg(setup.control()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{arguments:?}: {}", text.trim_end());
        (output.status.success(), text)
    };
    setup.storage.change(|s| s.hangs = true);
    let (moved, removed) = std::thread::scope(|scope| {
        let moved = scope.spawn(|| ringdisk(&["replace", "disk", other.to_str().unwrap()]));
        wait_until("the move waits for storage", || {
            setup.storage.control().held > 0
        });
        let removed = ringdisk(&["detach", "disk", "--force"]);
        setup.storage.change(|s| s.hangs = false);
        (moved.join().unwrap(), removed)
    });
    assert!(!removed.0 && removed.1.contains("try again"), "{removed:?}");
    assert!(moved.0, "{moved:?}");
    // The guest has noticed nothing.
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    assert!(ringdisk(&["detach", "disk", "--force"]).0);
    assert!(server.terminate().unwrap().success());
}

/// Sends a QMP command that no subcommand sends to this server.
fn qmp(setup: &Setup, command: &str) {
    let mut socket = UnixStream::connect(setup.control()).unwrap();
    let lines = ["{\"execute\": \"qmp_capabilities\"}", command].map(|line| format!("{line}\n"));
    socket.write_all(lines.concat().as_bytes()).unwrap();
    let replies = BufReader::new(socket).lines().skip(1).take(2);
    for reply in replies.map(Result::unwrap) {
        assert!(reply.contains("return"), "{reply}");
    }
}

/// A disk whose resize waits for hung storage can be moved away when that command gives up. The old file, which grows when
/// its storage answers, does not let the disk grow.
#[test]
fn resize_of_a_replaced_file_does_not_grow_the_disk() {
    let Some(setup) = Setup::new("qcow2", 15) else {
        return;
    };
    let allowed = format!("--allow-dir={}", setup.dir.path().display());
    let other = setup.dir.path().join("other.raw");
    std::fs::write(&other, vec![0; DISK_BYTES as usize]).unwrap();
    let control = format!("--control={}", setup.control().display());
    let unused = format!(
        "null:1M,socket={}",
        setup.dir.path().join("null.sock").display()
    );
    let arguments = [unused, control, allowed];
    let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    // The disk has no front-end, so it moves at once.
    let file = setup.storage.file();
    let add = serde_json::json!({ "execute": "blockdev-add", "arguments":
        { "driver": "qcow2", "node-name": "disk", "file": { "driver": "file", "filename": file } } });
    qmp(&setup, &add.to_string());
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        command.arg(setup.control()).output().unwrap()
    };
    let (resized, moved) = std::thread::scope(|scope| {
        setup.storage.change(|s| s.hangs = true);
        let resized = scope.spawn(|| ringdisk(&["resize", "disk", "20M"]));
        wait_until("the resize waits for storage", || {
            setup.storage.control().held > 0
        });
        let moved = scope.spawn(|| ringdisk(&["replace", "disk", other.to_str().unwrap()]));
        server.wait_for_log(&["disk disk: moved from", "other.raw"]);
        setup.storage.change(|s| s.hangs = false);
        (resized.join().unwrap(), moved.join().unwrap())
    });
    assert!(moved.status.success(), "{moved:?}");
    let text = String::from_utf8_lossy(&resized.stderr);
    assert!(text.contains("does not answer"), "{resized:?}");
    server.wait_for_log(&["its storage answers again", "changed by another command"]);
    assert!(server.terminate().unwrap().success());
}

/// A SIGTERM while tables are flushed before a handover ends the handover: guests do not wait for it, and nothing is
/// handed over.
#[test]
fn stop_during_a_handover_flush_ends_the_handover() {
    let Some(setup) = Setup::new("qcow2", 16) else {
        return;
    };
    let mut server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    setup.storage.change(|s| s.hangs = true);
    let text = std::thread::scope(|scope| {
        let asked = scope.spawn(|| upgrade(&setup).1);
        wait_until("tables wait for storage", || {
            setup.storage.control().held > 0
        });
        server.signal(rustix::process::Signal::TERM);
        server.wait_for_log(&["stopping: an upgrade is under way"]);
        setup.storage.change(|s| s.hangs = false);
        asked.join().unwrap()
    });
    assert!(text.contains("told to stop"), "{text}");
    assert!(server.ended().unwrap().success(), "{}", server.log());
    // The new process may be killed before it logs this, but must not have been handed a disk.
    let log = server.log();
    assert_eq!(log.matches("disk disk: aio=").count(), 1, "{log}");
}

/// A VM stops and its disk's release hangs: neither an upgrade nor a command waits for it, and the release completes
/// when the storage answers.
#[test]
fn hung_release_delays_neither_upgrade_nor_commands() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 13) else {
            return;
        };
        let mut server = setup.serve("cache=none,lock=running", &[]);
        let mut device = setup.connect();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        setup.storage.change(|s| s.hangs = true);
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| device.stop_queue(0));
            wait_until("the end of the VM waits for storage", || {
                setup.storage.control().held > 0
            });
            let _thaw = UnhangOnDrop(&setup.storage);
            let mut client = control::Client::connect(setup.control(), HANG).unwrap();
            let nodes = client.call("query-named-block-nodes", json!({}));
            assert_eq!(nodes.unwrap()[0]["node-name"], "disk");
            let asked = scope.spawn(|| upgrade(&setup));
            let deadline = Instant::now() + HANG;
            while !asked.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let answered = asked.is_finished();
            setup.storage.change(|s| s.hangs = false);
            let (pid, text) = asked.join().unwrap();
            stopped.join().unwrap().unwrap();
            assert!(answered, "{format}: an upgrade waits for storage");
            assert!(
                pid.is_none() && text.contains("continues to serve"),
                "{format}: {text}"
            );
        });
        assert_eq!(stats(&setup.control())["storage"], "works", "{format}");
        assert!(server.terminate().unwrap().success(), "{format}");
    }
}

/// Lets the storage answer again even after a failed assertion: it would keep processes that cannot be killed.
pub struct UnhangOnDrop<'a>(pub &'a Storage);

impl Drop for UnhangOnDrop<'_> {
    fn drop(&mut self) {
        self.0.change(|s| s.hangs = false);
    }
}

/// The storage answers nothing, not even whether a file exists: commands that need an answer wait for it, but no other
/// command, no other guest and no shutdown waits for them.
#[test]
fn command_on_hung_storage_delays_no_other_command() {
    let Some(setup) = Setup::new("raw", 14) else {
        return;
    };
    let [file, later] = ["other.raw", "later.raw"].map(|n| setup.dir.path().join(n));
    for file in [&file, &later] {
        std::fs::File::create(file)
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
    }
    let sockets = ["o.sock", "l.sock"].map(|n| setup.dir.path().join(n));
    let disk =
        |file: &Path, socket: &Path| format!("file={},socket={}", file.display(), socket.display());
    let Some(served) = Setup::new("raw", 15) else {
        return;
    };
    let others = [
        disk(&file, &sockets[0]),
        disk(&served.storage.file(), &served.socket()) + ",name=served,format=raw",
        // The sandbox would look at the files first.
        "--sandbox=off".into(),
    ];
    let mut server = setup.serve("cache=none", &others);
    let mut beside = connect(&sockets[0]);
    let client = || control::Client::connect(setup.control(), HANG).unwrap();
    let node = json!({
        "driver": "raw", "node-name": "idle",
        "file": { "driver": "file", "filename": setup.storage.file() },
    });
    client()
        .call("x-ringdisk-detach", json!({ "id": "disk" }))
        .unwrap();
    client().call("blockdev-add", node).unwrap();
    let _thaw = [&setup, &served].map(|setup| UnhangOnDrop(&setup.storage));
    for setup in [&setup, &served] {
        setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    }
    // Each of these commands accesses the file in its own way.
    let export = json!({
        "type": "vhost-user-blk", "id": "export", "node-name": "idle",
        "addr": { "type": "unix", "path": setup.socket() },
    });
    let again =
        json!({ "disk": format!("file={},name=again,format=raw", setup.storage.file().display()) });
    let place = json!({ "id": "other", "file": setup.storage.file() });
    let hang = [
        ("block-export-add", export),
        ("x-ringdisk-attach", again),
        ("x-ringdisk-replace", place),
        ("x-ringdisk-resize", json!({ "id": "idle" })),
    ];
    for (command, arguments) in hang {
        let before = setup.storage.control().held;
        let mut its = client();
        let ask = move || drop(its.call(command, arguments));
        std::thread::spawn(ask);
        // The last command waits in the kernel behind the first one.
        let last = command == "x-ringdisk-resize";
        wait_until(command, || last || setup.storage.control().held > before);
        // Known facts are shown without access to the file.
        let nodes = client().call("query-named-block-nodes", json!({})).unwrap();
        let idle = nodes
            .as_array()
            .unwrap()
            .iter()
            .find(|node| node["node-name"] == "idle");
        let size = idle.map(|idle| &idle["image"]["virtual-size"]);
        assert_eq!(size, Some(&json!(DISK_BYTES)), "{command}: {nodes}");
        client().call("x-ringdisk-stats", json!({})).unwrap();
    }
    server.signal(rustix::process::Signal::HUP);
    // Other disks are served and attached, and their settings are persisted.
    beside.frontend.set_config(32, &[0]).unwrap();
    submit(&mut beside, Op::Write);
    assert_eq!(finish(&mut beside), vec![OK; usize::from(DEPTH)]);
    let later = json!({ "disk": disk(&later, &sockets[1]) });
    client().call("x-ringdisk-attach", later).unwrap();
    submit(&mut connect(&sockets[1]), Op::Read);
    server.wait_for_log(&["disk served", "so its size is unknown"]);
    server.signal(rustix::process::Signal::TERM);
    wait_long_until("the process says that storage hangs", || {
        let log = server.log();
        let hangs = |name| log.contains(&format!("disk {name}: its storage does not answer; what"));
        hangs("idle") && hangs("served")
    });
    for setup in [&setup, &served] {
        setup.storage.change(|s| s.hangs = false);
    }
    let status = server.ended().unwrap();
    assert_eq!(status.code(), Some(1), "{status}");
}

/// A configured disk is on storage that answers nothing: a start or reload that waits for it can be interrupted.
#[test]
fn reload_on_hung_storage_can_be_interrupted() {
    let Some(setup) = Setup::new("raw", 16) else {
        return;
    };
    let config = setup.dir.path().join("ringdisk.toml");
    std::fs::write(&config, "").unwrap();
    let arguments = [
        format!("--config={}", config.display()),
        format!("--control={}", setup.control().display()),
        "--sandbox=off".into(),
    ];
    let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    let (file, socket) = (setup.storage.file(), setup.socket());
    let disk = format!("[[disk]]\nfile = {file:?}\nformat = \"raw\"\nsocket = {socket:?}\n");
    std::fs::write(&config, disk).unwrap();
    let _thaw = UnhangOnDrop(&setup.storage);
    setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    server.signal(rustix::process::Signal::HUP);
    wait_until("the configuration waits for storage", || {
        setup.storage.control().held > 0
    });
    server.signal(rustix::process::Signal::TERM);
    server.wait_for_log(&["stopping"]);
    setup.storage.change(|s| s.hangs = false);
    assert!(server.ended().unwrap().success(), "{}", server.log());
}

/// Waits longer than a server waits for storage.
fn wait_long_until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !is() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
