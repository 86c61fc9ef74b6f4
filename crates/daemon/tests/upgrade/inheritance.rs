//! What the new process has from the old one, and not from the shell that runs `ringdisk upgrade`.

use std::io::{BufRead, BufReader};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::*;

/// The umask, the CPUs and the resource limits of a process.
fn settings(pid: u32) -> String {
    let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let status = of("status");
    let its = |line: &&str| line.starts_with("Umask:") || line.starts_with("Cpus_allowed_list:");
    let status: Vec<_> = status.lines().filter(its).collect();
    format!("{}\n{}", status.join("\n"), of("limits"))
}

fn in_shell(setup: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{setup}; exec \"$0\" \"$@\""), BINARY]);
    command
}

#[test]
fn settings_of_the_shell_are_not_those_of_the_new_process() {
    let disk = Disk::new();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let control = dir.path().join("control.qmp");
    let mut command = in_shell("umask 0007; ulimit -Ss 4096; ulimit -Sc 0");
    command.args(["serve", "--json", "--control"]).arg(&control);
    command.arg(disk.argument("queues=1,name=disk"));
    let first = Server::ringdisk_command(command).unwrap();
    let pid = first.pid();
    let mut served = Served {
        first,
        pid,
        dir,
        control,
    };
    let before = settings(pid);
    assert!(before.contains("Umask:\t0007"), "{before}");
    let upgrade = |setup: &str| {
        let mut command = in_shell(setup);
        command
            .args(["upgrade", "--json", "--control"])
            .arg(&served.control);
        std::thread::scope(|scope| {
            let ran = scope.spawn(move || {
                let all = sched_getaffinity(None).unwrap();
                let mut one = CpuSet::new();
                one.set((0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
                sched_setaffinity(None, &one).unwrap();
                command.output().unwrap()
            });
            ran.join().unwrap()
        })
    };
    // Only some may raise a hard limit again. For others, the old process continues.
    let low = upgrade("ulimit -Hs 2048");
    if low.status.code() == Some(1) {
        let why = String::from_utf8_lossy(&low.stderr).into_owned();
        assert!(
            why.contains("'Max stack size' is at most 2097152 here"),
            "{why}"
        );
        assert_eq!((served.list(), settings(pid)), (0, before.clone()));
    } else {
        let reply: Value = serde_json::from_slice(&low.stdout).unwrap();
        wait_for_exit(served.pid);
        served.pid = reply["pid"].as_u64().unwrap() as u32;
    }
    let high = upgrade("umask 0077; ulimit -Ss 3072");
    let reply: Value = serde_json::from_slice(&high.stdout).unwrap_or_else(|_| panic!("{high:?}"));
    wait_for_exit(served.pid);
    served.pid = reply["pid"].as_u64().unwrap() as u32;
    assert_eq!(settings(served.pid), before);
    served.end();
}

/// A supervisor reads the output as far as `ready`, and keeps the pipe. The new process prints everything again.
#[test]
fn output_that_nobody_reads_blocks_nothing() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let control = dir.path().join("control.qmp");
    let mut command = Command::new(BINARY);
    command.arg("serve").arg("--control").arg(&control);
    // More than a pipe takes.
    for disk in 0..120 {
        let socket = dir.path().join(format!("{disk}.sock"));
        command.arg(format!(
            "null:1M,name=v{disk},socket={},queues=1",
            socket.display()
        ));
    }
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut supervised = command.spawn().unwrap();
    let mut output = BufReader::new(supervised.stdout.take().unwrap());
    let mut line = String::new();
    while line.trim_end() != "ready" {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0);
    }
    let mut upgrade = Command::new(BINARY);
    upgrade
        .args(["upgrade", "--json", "--control"])
        .arg(&control);
    let upgraded = upgrade.output().unwrap();
    let reply: Value = serde_json::from_slice(&upgraded.stdout).unwrap();
    supervised.wait().unwrap();
    let pid = reply["pid"].as_u64().unwrap() as u32;
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::TERM).unwrap();
    wait_for_exit(pid);
    drop(output);
}

/// The file of a running disk becomes shorter: its guest keeps a disk of the old size, whatever process serves it, and
/// growing the file again, which would hide what is lost, is refused.
#[test]
fn disk_of_a_file_that_has_shrunk_keeps_its_size() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,name=disk")]);
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    let size = device.config().unwrap().capacity;
    let file = fs::OpenOptions::new().write(true).open(&disk.file).unwrap();
    file.set_len(1 << 20).unwrap();
    for _ in 0..2 {
        let resized = served.ringdisk(&["resize", "disk", "16M"]);
        let why = String::from_utf8_lossy(&resized.stderr).into_owned();
        assert_eq!(resized.status.code(), Some(1), "{why}");
        assert!(why.contains("has only 1M, and the disk 16M"), "{why}");
        assert_eq!(device.config().unwrap().capacity, size);
        assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
        assert!(device.queues[1].read(16384, 4096).is_err());
        served.upgrade(&[]);
    }
    assert_eq!(served.disk("disk")["size"], 16 << 20);
    served.end();
}
