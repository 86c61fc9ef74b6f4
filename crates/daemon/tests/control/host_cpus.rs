//! The host's number of CPUs changes, and no disk does: its number of queues is decided when it is first served.

use std::fs;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};

use super::server::Controlled;
use crate::support::{content, wait_until};

/// Runs `work` on a thread that may use only one CPU: processes that it starts inherit that. `None` where there is only
/// one.
fn on_one_cpu<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let one = one_cpu()?;
    Some(std::thread::scope(|scope| {
        let pinned = scope.spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            work()
        });
        pinned.join().unwrap()
    }))
}

fn one_cpu() -> Option<CpuSet> {
    let all = sched_getaffinity(None).unwrap();
    if all.count() < 2 {
        println!("skipped: this host has only one CPU");
        return None;
    }
    let mut one = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu));
    one.set(first.unwrap());
    Some(one)
}

/// Lets the threads of a running process use only these CPUs.
fn pin(ringdisk: &Controlled, cpus: &CpuSet) {
    for (thread, _) in ringdisk.threads() {
        let _ = sched_setaffinity(Pid::from_raw(thread as i32), cpus);
    }
}

fn start() -> Controlled {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let disk = |name: &str| {
        fs::write(path(&format!("{name}.raw")), content(0, 4 << 20)).unwrap();
        let (file, socket) = (format!("{name}.raw"), format!("{name}.sock"));
        let (file, socket) = (path(&file), path(&socket));
        format!("[[disk]]\nfile = \"{file}\"\nsocket = \"{socket}\"\n")
    };
    fs::write(path("r.toml"), disk("a") + &disk("b")).unwrap();
    let arguments = [
        format!("--config={}", path("r.toml")),
        format!("--state={}", path("state")),
    ];
    Controlled::start_in(dir, &arguments)
}

fn queues(ringdisk: &Controlled, disk: &str) -> Option<u64> {
    ringdisk.disk(disk)["queues"].as_u64()
}

fn device(ringdisk: &Controlled, disk: &str, queues: u64) -> Device {
    let config = DeviceConfig {
        queues: queues as u16,
        ..DeviceConfig::default()
    };
    Device::connect(ringdisk.path(&format!("{disk}.sock")), &config).unwrap()
}

fn verify(device: &mut Device) {
    for queue in &mut device.queues {
        assert_eq!(queue.read(8, 4096).unwrap(), content(8, 4096));
    }
}

/// A process loses CPUs while it runs; its configuration is reloaded without a change.
#[test]
fn reload_of_an_unchanged_file_disturbs_nobody_when_cpus_are_gone() {
    let Some(one) = one_cpu() else { return };
    let ringdisk = start();
    let before = queues(&ringdisk, "a").unwrap();
    assert!(before > 1);
    let mut guest = device(&ringdisk, "a", before);
    ringdisk.json(&["detach", "b"]);
    pin(&ringdisk, &one);
    ringdisk.json(&["reload"]);
    assert_eq!(queues(&ringdisk, "a"), Some(before));
    assert_eq!(ringdisk.disk("b"), Value::Null);
    verify(&mut guest);
    // What the number is does not matter; that the operator now writes it changes nothing for the guest.
    let file = ringdisk.path("r.toml");
    let text = fs::read_to_string(&file).unwrap();
    let written = text.replacen("socket", &format!("queues = {before}\nsocket"), 1);
    fs::write(&file, written).unwrap();
    ringdisk.json(&["reload"]);
    verify(&mut guest);
}

/// A restart on fewer CPUs serves each disk with the queues that its guest has, and detached disks stay detached.
#[test]
fn restart_on_fewer_cpus_keeps_queues_and_detached_disks() {
    let ringdisk = start();
    let before = queues(&ringdisk, "a").unwrap();
    ringdisk.json(&["detach", "b"]);
    let Some(ringdisk) = on_one_cpu(move || ringdisk.kill_and_restart()) else {
        return;
    };
    assert_eq!(queues(&ringdisk, "a"), Some(before));
    assert_eq!(ringdisk.disk("b"), Value::Null);
    verify(&mut device(&ringdisk, "a", before));
    // Also a disk that is not served for a while.
    let b = format!(
        "{},socket={}",
        ringdisk.path("b.raw").display(),
        ringdisk.path("b.sock").display()
    );
    ringdisk.json(&["attach", &b]);
    verify(&mut device(&ringdisk, "b", before));
}

/// `taskset -c 0 ringdisk upgrade`.
#[test]
fn upgrade_from_a_pinned_shell_keeps_queues() {
    let ringdisk = start();
    let before = queues(&ringdisk, "a").unwrap();
    let mut guest = device(&ringdisk, "a", before);
    let upgraded = on_one_cpu(|| ringdisk.json(&["upgrade"]));
    let Some(upgraded) = upgraded else { return };
    assert_eq!(queues(&ringdisk, "a"), Some(before));
    verify(&mut guest);
    kill(&upgraded);
}

/// Kills the process that an upgrade has started.
/// Ends the process that an upgrade has started.
pub fn kill(upgraded: &Value) {
    let pid = upgraded["pid"].as_u64().unwrap() as i32;
    let ended =
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL);
    ended.unwrap();
}

/// Configures the disks of the files `a.raw` and `b.raw`, at their sockets, with other names.
fn rename(ringdisk: &Controlled, names: [&str; 2]) {
    let disk = |name: &str, file: &str| {
        let (file, socket) = (format!("{file}.raw"), format!("{file}.sock"));
        let (file, socket) = (ringdisk.path(&file), ringdisk.path(&socket));
        let (file, socket) = (file.display(), socket.display());
        format!("[[disk]]\nname = \"{name}\"\nfile = \"{file}\"\nsocket = \"{socket}\"\n")
    };
    let text = disk(names[0], "a") + &disk(names[1], "b");
    fs::write(ringdisk.path("r.toml"), text).unwrap();
}

/// The offset of the write cache in the configuration space.
const WCE: u32 = 32;

/// What a guest depends on stays where it connects: its number of queues, and that its write cache is off, so that it flushes
/// nothing. Names may change by a reload, an upgrade or a restart, also to that of another disk, and of a disk that a command has
/// changed.
#[test]
fn renamed_disk_keeps_its_queues_and_its_write_cache() {
    let Some(one) = one_cpu() else { return };
    let (mut ringdisk, mut upgraded) = (start(), Value::Null);
    let before = queues(&ringdisk, "a").unwrap();
    assert!(before > 1);
    let mut guest = device(&ringdisk, "a", before);
    guest.frontend.set_config(WCE, &[0]).unwrap();
    drop(guest);
    let mut last = ["a", "b"];
    for (names, how) in [
        (["c", "a"], "reload"),
        (["c", "b"], "reload"),
        (["b", "c"], "reload"),
        (["c", "b"], "reload"),
        (["d", "c"], "kill"),
        (["e", "b"], "kill"),
        (["b", "e"], "kill"),
        (["d", "e"], "upgrade"),
    ] {
        for name in last {
            ringdisk.json(&["throttle", name, "iops=100000"]);
        }
        last = names;
        rename(&ringdisk, names);
        pin(&ringdisk, &one);
        match how {
            "kill" => ringdisk = on_one_cpu(move || ringdisk.kill_and_restart()).unwrap(),
            "upgrade" => upgraded = on_one_cpu(|| ringdisk.json(&[how])).unwrap(),
            _ => _ = ringdisk.json(&[how]),
        }
        for (name, file, expected) in [(names[0], "a", 0), (names[1], "b", 1)] {
            assert_eq!(queues(&ringdisk, name), Some(before), "{names:?} {how}");
            let mut guest = device(&ringdisk, file, before);
            verify(&mut guest);
            let write_cache = guest.frontend.config(WCE, 1).unwrap();
            assert_eq!(write_cache, [expected], "{names:?} {how} {file}");
        }
    }
    kill(&upgraded);
}

/// The same for a disk that gets another name and another socket at once, as one does that is configured without a socket: its file
/// tells. And nothing of it stays where it was: what its guest chooses later counts.
#[test]
fn disk_with_another_name_and_socket_keeps_what_its_guest_depends_on() {
    let Some(one) = one_cpu() else { return };
    let (mut ringdisk, mut upgraded) = (start(), Value::Null);
    let before = queues(&ringdisk, "a").unwrap();
    let mut guest = device(&ringdisk, "a", before);
    guest.frontend.set_config(WCE, &[0]).unwrap();
    drop(guest);
    let text = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
    for (name, how, write_cache) in [
        ("c", "reload", 0),
        ("d", "kill", 0),
        ("e", "kill", 1),
        ("a", "reload", 1),
        ("f", "kill", 0),
        ("g", "upgrade", 0),
    ] {
        let socket = format!("{name}.sock\"\nname = \"{name}");
        let before_it = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
        let text = text.replacen("a.sock", &socket, 1);
        fs::write(ringdisk.path("r.toml"), &text).unwrap();
        pin(&ringdisk, &one);
        match how {
            "kill" => ringdisk = on_one_cpu(move || ringdisk.kill_and_restart()).unwrap(),
            "upgrade" => {
                // It would end the disk, which only a reload does.
                let refused = ringdisk.ringdisk(&["upgrade"]);
                refused.assert_fails(1, &["'ringdisk reload' first"]);
                fs::write(ringdisk.path("r.toml"), &before_it).unwrap();
                upgraded = on_one_cpu(|| ringdisk.json(&[how])).unwrap();
                fs::write(ringdisk.path("r.toml"), &text).unwrap();
                ringdisk.json(&["reload"]);
            }
            _ => _ = ringdisk.json(&[how]),
        }
        wait_until("the disk", || queues(&ringdisk, name).is_some());
        let mut guest = device(&ringdisk, name, before);
        verify(&mut guest);
        let read = guest.frontend.config(WCE, 1).unwrap();
        assert_eq!(read, [write_cache], "{name} {how}");
        if let Some((_, next)) = [("d", 1), ("a", 0)].iter().find(|it| it.0 == name) {
            guest.frontend.set_config(WCE, &[*next]).unwrap();
        }
    }
    kill(&upgraded);
}

/// A command gives the name of a detached disk to another one, and the disk another name later: its guest finds what it had.
#[test]
fn detached_disk_keeps_its_queues_and_its_write_cache_under_another_name() {
    let Some(one) = one_cpu() else { return };
    for restarts in [false, true] {
        let mut ringdisk = start();
        let before = queues(&ringdisk, "a").unwrap();
        let mut guest = device(&ringdisk, "a", before);
        guest.frontend.set_config(WCE, &[0]).unwrap();
        drop(guest);
        for name in ["a", "b"] {
            ringdisk.json(&["detach", name]);
        }
        pin(&ringdisk, &one);
        let attach = |ringdisk: &Controlled, name: &str, file: &str| {
            let (file, socket) = (format!("{file}.raw"), format!("{file}.sock"));
            let (file, socket) = (ringdisk.path(&file), ringdisk.path(&socket));
            let (file, socket) = (file.display(), socket.display());
            ringdisk.json(&["attach", &format!("{file},name={name},socket={socket}")]);
        };
        ringdisk.file("n.raw", 4 << 20);
        attach(&ringdisk, "a", "n");
        if restarts {
            ringdisk = on_one_cpu(move || ringdisk.kill_and_restart()).unwrap();
        }
        attach(&ringdisk, "a-old", "a");
        assert_eq!(queues(&ringdisk, "a-old"), Some(before), "{restarts}");
        let mut guest = device(&ringdisk, "a", before);
        verify(&mut guest);
        assert_eq!(guest.frontend.config(WCE, 1).unwrap(), [0], "{restarts}");
    }
}

/// A disk and one that is absent exchange their names, or a command attaches a detached disk under another name.
#[test]
fn guests_of_absent_and_attached_disks_keep_what_they_depend_on() {
    let Some(one) = one_cpu() else { return };
    for how in ["absent", "attached"] {
        let mut ringdisk = start();
        let before = queues(&ringdisk, "a").unwrap();
        let mut guest = device(&ringdisk, "a", before);
        guest.frontend.set_config(WCE, &[0]).unwrap();
        drop(guest);
        pin(&ringdisk, &one);
        let name = if how == "absent" {
            let (file, away) = (ringdisk.path("b.raw"), ringdisk.path("away.raw"));
            fs::rename(&file, &away).unwrap();
            ringdisk = on_one_cpu(move || ringdisk.kill_and_restart()).unwrap();
            assert_eq!(ringdisk.disk("b")["storage"], "absent");
            fs::rename(&away, &file).unwrap();
            rename(&ringdisk, ["b", "a"]);
            let replied = ringdisk.ringdisk(&["reload"]);
            // It has been corrected, and the reply says how it is now.
            let is_told =
                replied.out.contains("no such file") || replied.err.contains("no such file");
            assert!(replied.code == Some(0) && !is_told, "{replied:?}");
            assert_eq!(ringdisk.disk("a")["storage"], "works");
            "b"
        } else {
            ringdisk.json(&["detach", "a"]);
            let (file, socket) = (ringdisk.path("a.raw"), ringdisk.path("a.sock"));
            let disk = format!("{},name=x,socket={}", file.display(), socket.display());
            ringdisk.json(&["attach", &disk]);
            "x"
        };
        for restarts in [false, true] {
            if restarts {
                ringdisk = on_one_cpu(move || ringdisk.kill_and_restart()).unwrap();
            }
            assert_eq!(queues(&ringdisk, name), Some(before), "{how} {restarts}");
            let mut guest = device(&ringdisk, "a", before);
            verify(&mut guest);
            assert_eq!(guest.frontend.config(WCE, 1).unwrap(), [0], "{how}");
        }
    }
}

/// The name of a disk that a command has detached is given to another disk, which has its own VM.
#[test]
fn name_of_a_detached_disk_can_be_given_to_another() {
    for how in ["reload", "upgrade"] {
        let ringdisk = start();
        ringdisk.json(&["detach", "a"]);
        rename(&ringdisk, ["c", "a"]);
        let replied = ringdisk.json(&[how]);
        let served = ringdisk.disk("a");
        let file = ringdisk.path("b.raw");
        assert_eq!(served["file"], file.to_str().unwrap(), "{how}: {served}");
        if how == "upgrade" {
            kill(&replied);
        }
    }
}

/// What guests depend on is in one file, which counts unless an older version has written the others since.
#[test]
fn newest_record_of_guests_counts() {
    let mut ringdisk = start();
    let before = queues(&ringdisk, "a").unwrap();
    let read = |ringdisk: &Controlled, name: &str| -> Value {
        let path = ringdisk.path("state").join(name);
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let write = |ringdisk: &Controlled, name: &str, value: &Value| {
        let path = ringdisk.path("state").join(name);
        fs::write(path, value.to_string()).unwrap();
    };
    assert_eq!(read(&ringdisk, "guests.json")["a"]["queues"], before);
    // A kill after the first of the files was written.
    let mut guests = read(&ringdisk, "guests.json");
    guests["a"]["queues"] = 7.into();
    write(&ringdisk, "guests.json", &guests);
    ringdisk = ringdisk.kill_and_restart();
    assert_eq!(queues(&ringdisk, "a"), Some(7));
    // An older version.
    let mut older = read(&ringdisk, "queues.json");
    older["a"] = 5.into();
    write(&ringdisk, "queues.json", &older);
    ringdisk = ringdisk.kill_and_restart();
    assert_eq!(queues(&ringdisk, "a"), Some(5));
    assert_eq!(read(&ringdisk, "guests.json")["a"]["queues"], 5);
}
