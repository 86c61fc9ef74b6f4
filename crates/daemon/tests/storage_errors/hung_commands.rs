//! Commands, reloads and upgrades on storage that does not answer.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::hung::{UnhangOnDrop, upgrade};
use super::*;

/// Commands that wait for storage that answers nothing end with an error that names the file. When the storage answers, the
/// disk grows after all, what was to be attached can be attached, and an upgrade is possible again.
#[test]
fn resize_and_attach_on_hung_storage_end_with_an_error() {
    let (Some(setup), Some(other)) = (Setup::new("qcow2", 8), Setup::new("raw", 9)) else {
        return;
    };
    let mut server = setup.serve("cache=none", &["--sandbox=off".into()]);
    let mut device = setup.connect();
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .args(arguments)
            .arg("--control")
            .arg(setup.control());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{arguments:?}: {}", text.trim_end());
        (output.status.success(), text)
    };
    let _thaw = [&setup, &other].map(|setup| UnhangOnDrop(&setup.storage));
    for setup in [&setup, &other] {
        setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    }
    let file = other.storage.file();
    let disk = format!(
        "file={},name=other,format=raw,socket={}",
        file.display(),
        other.socket().display()
    );
    let (resized, attached) = std::thread::scope(|scope| {
        let resized = scope.spawn(|| ringdisk(&["resize", "disk", "20M"]));
        let attached = scope.spawn(|| ringdisk(&["attach", &disk]));
        (resized.join().unwrap(), attached.join().unwrap())
    });
    for ((done, text), file) in [(resized, setup.storage.file()), (attached, file.clone())] {
        let names_it = text.contains(file.to_str().unwrap());
        assert!(
            !done && names_it && text.contains("does not answer"),
            "{text}"
        );
    }
    // One thread waits for each, and not one for each attempt.
    for command in [["resize", "disk", "30M"].as_slice(), &["attach", &disk]] {
        let (done, text) = ringdisk(command);
        assert!(!done && text.contains("does not answer"), "{text}");
    }
    // Another file under that name is on storage that works.
    let good = setup.dir.path().join("good.raw");
    std::fs::write(&good, vec![0; DISK_BYTES as usize]).unwrap();
    let repaired = disk.replace(file.to_str().unwrap(), good.to_str().unwrap());
    let (done, text) = ringdisk(&["attach", &repaired]);
    assert!(done, "{text}");
    let mut served = connect(&other.socket());
    let (pid, text) = upgrade(&setup);
    assert!(pid.is_none(), "{text}");
    for setup in [&setup, &other] {
        setup
            .storage
            .change(|s| (s.hangs, s.silent) = (false, false));
    }
    server.wait_for_log(&["disk disk: its storage answers again, and it has 20M now"]);
    server.wait_for_log(&["disk other: ", "its storage answers again"]);
    submit(&mut served, Op::Write);
    assert_eq!(finish(&mut served), vec![OK; usize::from(DEPTH)]);
    drop(served);
    wait_until("it is detached", || ringdisk(&["detach", "other"]).0);
    wait_until("the file is closed", || ringdisk(&["attach", &disk]).0);
    for device in [&mut device, &mut connect(&other.socket())] {
        submit(device, Op::Write);
        assert_eq!(finish(device), vec![OK; usize::from(DEPTH)]);
    }
    let size = device.frontend.config(0, 8).unwrap();
    assert_eq!(size, (20u64 << 11).to_le_bytes());
    assert!(server.terminate().unwrap().success());
}

/// A disk is configured on storage that answers nothing. An upgrade does not wait for it: guests are served, and the disk
/// when its storage answers.
#[test]
fn upgrade_does_not_wait_for_a_new_disk_on_hung_storage() {
    let Some(setup) = Setup::new("raw", 10) else {
        return;
    };
    let (config, file) = (
        setup.dir.path().join("r.toml"),
        setup.dir.path().join("a.raw"),
    );
    std::fs::write(&file, vec![0; DISK_BYTES as usize]).unwrap();
    let socket = setup.dir.path().join("a.sock");
    let disk = |file: &Path, socket: &Path| {
        format!("[[disk]]\nfile = {file:?}\nformat = \"raw\"\nsocket = {socket:?}\nqueues = 1\n")
    };
    let first = disk(&file, &socket);
    std::fs::write(&config, &first).unwrap();
    let arguments = [
        format!("--config={}", config.display()),
        format!("--control={}", setup.control().display()),
        "--sandbox=off".into(),
    ];
    let server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    let mut device = connect(&socket);
    let both = first + &disk(&setup.storage.file(), &setup.socket());
    std::fs::write(&config, both).unwrap();
    let _thaw = UnhangOnDrop(&setup.storage);
    setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    let (pid, text) = upgrade(&setup);
    let pid = pid.unwrap_or_else(|| panic!("{text}"));
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    server.wait_for_log(&["disk disk: is not served: it cannot be opened yet"]);
    setup
        .storage
        .change(|s| (s.hangs, s.silent) = (false, false));
    server.wait_for_log(&["disk disk: can be served now, and is"]);
    submit(&mut setup.connect(), Op::Write);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// The storage of a disk that no VM uses stops answering. An upgrade is refused before the VMs on
/// other disks wait.
#[test]
fn upgrade_beside_an_idle_disk_on_hung_storage_ends() {
    let Some(setup) = Setup::new("raw", 10) else {
        return;
    };
    let file = setup.dir.path().join("a.raw");
    std::fs::write(&file, vec![0; DISK_BYTES as usize]).unwrap();
    let socket = setup.dir.path().join("a.sock");
    let disk = |file: &Path, socket: &Path| {
        format!(
            "{},format=raw,socket={},queues=1",
            file.display(),
            socket.display()
        )
    };
    let arguments = [
        disk(&file, &socket),
        disk(&setup.storage.file(), &setup.socket()),
        format!("--control={}", setup.control().display()),
        "--sandbox=off".into(),
    ];
    let server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    let mut device = connect(&socket);
    let _thaw = UnhangOnDrop(&setup.storage);
    setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    let (pid, text) = upgrade(&setup);
    assert!(text.contains("its storage does not answer"), "{text}");
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    setup
        .storage
        .change(|s| (s.hangs, s.silent) = (false, false));
    assert!(pid.is_none());
    drop(server);
}

/// A directory of the sandbox does not answer: the start names it, and SIGTERM ends it.
#[test]
fn start_names_a_directory_that_hangs() {
    let Some(setup) = Setup::new("raw", 10) else {
        return;
    };
    let file = setup.dir.path().join("a.raw");
    std::fs::write(&file, vec![0; DISK_BYTES as usize]).unwrap();
    let mount = setup.storage.file().parent().unwrap().to_owned();
    let _thaw = UnhangOnDrop(&setup.storage);
    setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command
        .arg("serve")
        .arg(&file)
        .arg("--allow-dir")
        .arg(&mount);
    command.arg("--control").arg(setup.control());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let named = format!("{}: this directory does not answer", mount.display());
    let found = lines.find(|line| line.as_ref().unwrap().contains(&named));
    assert!(found.is_some());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // If it has asked again meanwhile, the kernel lets it end when it has an answer.
    let waits = format!("/proc/{}/wchan", child.id());
    while child.try_wait().unwrap().is_none() {
        if std::fs::read_to_string(&waits).is_ok_and(|at| at.contains("request_wait_answer")) {
            setup
                .storage
                .change(|s| (s.hangs, s.silent) = (false, false));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
