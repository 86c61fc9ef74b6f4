//! The host's number of CPUs changes, and no disk does: its number of queues is decided when it is first served.

use std::fs;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};

use super::server::Controlled;
use crate::support::content;

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
    for (thread, _) in ringdisk.threads() {
        let _ = sched_setaffinity(Pid::from_raw(thread as i32), &one);
    }
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
    let pid = upgraded["pid"].as_u64().unwrap() as i32;
    assert_eq!(queues(&ringdisk, "a"), Some(before));
    verify(&mut guest);
    let ended =
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL);
    ended.unwrap();
}
