//! A handover that fails or is aborted: exactly one process serves, and all guests continue.

use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

use super::*;

#[test]
fn failed_handover_leaves_the_old_process_serving() {
    let (mut image, raw) = (Disk::new(), Disk::new());
    if !qcow2(&mut image) {
        println!("skipped: failed_handover_leaves_the_old_process_serving: there is no qemu-img");
        return;
    }
    let options = "queues=2,queue-size=64";
    let mut served = Served::start(&[image.argument(options), raw.argument(options)]);
    let mut random = Random(seed());
    let mut devices = vec![];
    for (disk, held) in [
        (&image, BlockContent::Zeroes),
        (&raw, BlockContent::Pattern),
    ] {
        let config = DeviceConfig {
            inflight: held == BlockContent::Pattern,
            ..config()
        };
        let device = Device::connect(&disk.socket, &config).unwrap();
        let loads = Load::all(&device, 512, held, held == BlockContent::Zeroes);
        devices.push((device, loads));
    }
    let serving = send_message(r#""Serving""#);
    let gone_file = served.dir.path().join("gone");
    let [decided, too_late, tried] =
        ["decided", "too-late", "tried"].map(|name| served.dir.path().join(name));
    // This child of a new process is not killed with it. It ends with the test at the latest.
    let late = served.script(
        "later",
        &format!(
            "while [ -d {} ] && ! [ -e {} ]; do sleep 0.05; done; {serving} && touch {}; touch {}",
            served.dir.path().display(),
            decided.display(),
            too_late.display(),
            tried.display()
        ),
    );
    let programs = failing_programs(&late);
    let longest = under_load(&mut devices, &mut random, || {
        for (name, text, words) in programs {
            served.assert_upgrade_fails(&served.script(name, &text), words);
        }
        // The right program, for a disk that can no longer be opened; the reply has the reason.
        fs::rename(&raw.file, &gone_file).unwrap();
        fs::create_dir(&raw.file).unwrap();
        served.assert_upgrade_fails(Path::new(BINARY), "is a directory");
        fs::remove_dir(&raw.file).unwrap();
        fs::rename(&gone_file, &raw.file).unwrap();
        served.assert_upgrade_fails(Path::new("/nonexistent/ringdisk"), "cannot be started");
    });
    println!("the longest request took {longest:?}");
    assert!(served.first.is_running());
    // A process that answers after the old one has decided notices it and does not serve.
    fs::File::create(&decided).unwrap();
    wait_for_path(&tried);
    assert!(!too_late.exists());
    // After all these failures, an upgrade succeeds.
    under_load(&mut devices, &mut random, || {
        let pause = served.upgrade(&[]);
        println!("guests waited {pause:?}");
    });
    for (device, loads) in &mut devices {
        Load::finish(loads, device);
    }
    served.end();
    devices[1]
        .1
        .iter()
        .for_each(|load| load.verify(&raw.file).unwrap());
}

/// Programs that fail at each step of the handover: name, script, and alternatives of the error. The last but one
/// leaves `late` behind.
fn failing_programs(late: &Path) -> [(&'static str, String, &'static str); 10] {
    let hello = send_message(r#"{"protocol":2,"version":"x"}"#);
    let other = send_message(r#"{"protocol":99,"version":"x"}"#);
    let prepared = send_message(r#""Prepared""#);
    [
        ("exits", "exit 1".to_owned(), "failed to start"),
        ("other", format!("{other}; exec sleep 1000"), "version 99"),
        (
            "noise",
            "printf xyz >&0; exec sleep 1000".into(),
            "failed to start",
        ),
        (
            "dies",
            format!("{hello}; exit 3"),
            "cannot serve|be handed over",
        ),
        ("hangs", format!("{hello}; exec sleep 1000"), "cannot serve"),
        (
            "killed",
            format!("{hello}; {RECEIVE_MESSAGE}; kill -9 $$"),
            "cannot serve",
        ),
        (
            "early",
            format!("{hello}; {RECEIVE_MESSAGE}; {prepared}; exit 0"),
            "while it took over",
        ),
        (
            "taking",
            format!("{hello}; {RECEIVE_MESSAGE}; {prepared}; {RECEIVE_MESSAGE}; kill -9 $$"),
            "while it took over",
        ),
        (
            "late",
            format!(
                "{hello}; {RECEIVE_MESSAGE}; {prepared}; {RECEIVE_MESSAGE}; exec 3<&0
                 setsid {} <&3 &
                 wait",
                late.display()
            ),
            "while it took over",
        ),
        (
            "else",
            format!("{hello}; {RECEIVE_MESSAGE}; {hello}; exec sleep 1000"),
            "cannot serve",
        ),
    ]
}

/// A SIGTERM during a handover stops everything; or the successor serves, with everything that belongs to it.
#[test]
fn stop_during_a_handover_stops() {
    let mut random = Random(seed());
    let (mut stopped, mut handed) = (0, 0);
    for round in 0..14 {
        let disk = Disk::new();
        let mut served = Served::start(&[disk.argument("queues=2")]);
        let upgrade = Command::new(BINARY)
            .args(["upgrade", "--json", "--control"])
            .arg(&served.control)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if round % 2 == 0 {
            served.first.wait_for_log(&["handing over to process"]);
        }
        thread::sleep(Duration::from_micros(
            random.below(60_000 >> (5 * (1 - round % 2))),
        ));
        // The process may have ended.
        let pid = Pid::from_raw(served.pid as i32).unwrap();
        let _ = kill_process(pid, Signal::TERM);
        let output = upgrade.wait_with_output().unwrap();
        wait_for_exit(served.pid);
        let left = ["control.qmp", "control.qmp.upgrade"].map(|name| served.dir.path().join(name));
        let mut left = left.iter().chain([&disk.socket]);
        if output.status.success() {
            assert!(left.all(|path| path.exists()), "{}", served.first.log());
            let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
            served.pid = reply["pid"].as_u64().unwrap() as u32;
            assert_eq!(served.list(), 0);
            served.end();
            handed += 1;
        } else {
            assert!(!left.any(|path| path.exists()), "{}", served.first.log());
            let log = served.first.log();
            if let Some((_, pid)) = log.split_once("handing over to process ") {
                wait_for_exit(pid.split(',').next().unwrap().parse().unwrap());
            }
            stopped += 1;
        }
    }
    println!("{stopped} stopped, {handed} handed over");
    assert!(stopped > 0);
}

/// The children of a refused program are killed with it: they hold the log and a socket to the serving process.
#[test]
fn refused_program_leaves_no_children() {
    let disk = Disk::new();
    let served = Served::start(&[disk.argument("")]);
    let child = served.dir.path().join("child");
    let script = format!("sleep 1000 & echo $! > {}; exit 1", child.display());
    served.assert_upgrade_fails(&served.script("parent", &script), "failed to start");
    let pid = fs::read_to_string(&child).unwrap();
    wait_for_exit(pid.trim().parse().unwrap());
    served.end();
}

/// Whatever number of descriptors is free: an upgrade that has too few is refused, and no VM is disconnected.
#[test]
fn without_descriptors_an_upgrade_is_refused_and_vms_stay_connected() {
    let disks = [Disk::new(), Disk::new()];
    let options = "queues=2,queue-size=64";
    let mut served = Served::start(&disks.each_ref().map(|disk| disk.argument(options)));
    let config = DeviceConfig {
        inflight: true,
        ..config()
    };
    let mut devices = disks
        .each_ref()
        .map(|disk| Device::connect(&disk.socket, &config).unwrap());
    let pid = Pid::from_raw(served.pid as i32);
    let limit = getrlimit(Resource::Nofile);
    let enough = (0..).find(|&more| {
        let open = fs::read_dir(format!("/proc/{}/fd", served.pid)).unwrap();
        let current = Some(open.count() as u64 + more);
        prlimit(pid, Resource::Nofile, Rlimit { current, ..limit }).unwrap();
        let output = served.ringdisk(&["upgrade", "--json"]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{more} more: {}", text.trim_end());
        if output.status.success() {
            let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
            let before = std::mem::replace(&mut served.pid, reply["pid"].as_u64().unwrap() as u32);
            wait_for_exit(before);
        } else {
            prlimit(pid, Resource::Nofile, limit).unwrap();
            assert!(more < 64, "64 descriptors are enough: {text}");
        }
        for device in &mut devices {
            assert_eq!(device.queues[0].write(0, &[7; 4096]), 0, "{more} more");
        }
        output.status.success()
    });
    // One for the command, one for the new process, and those of the disks.
    assert!(enough.unwrap() > 4, "{enough:?}");
    support::assert_all_served(&served.first.log());
    served.end();
}
