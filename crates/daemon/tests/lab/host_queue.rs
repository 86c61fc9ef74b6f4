//! Queues of the host's block devices are changed only while a configuration runs, also if the lab is killed.

use std::fs;
use std::process::Stdio;

use super::{PlanFolder, are_installed, output_text, spawn, succeed, wait_for};
use crate::support::loop_device::LoopDevice;

#[test]
fn killed_run_leaves_queues_that_the_next_run_restores() {
    if !are_installed(
        "killed_run_leaves_queues_that_the_next_run_restores",
        &["fio", "losetup"],
    ) {
        return;
    }
    let Some(disk) = LoopDevice::new() else {
        return;
    };
    let name = disk.device.file_name().unwrap().to_str().unwrap();
    let queue = |attribute: &str| {
        let path = format!("/sys/block/{name}/queue/{attribute}");
        fs::read_to_string(path).unwrap().trim().to_owned()
    };
    let before = [queue("scheduler"), queue("read_ahead_kb")];
    let bench = PlanFolder::new(&format!(
        "guest = 'none'\nblocks = 1\n[config]\nbacking = '{}'\nhost-scheduler = 'mq-deadline'\nprefill = 'off'\n\
         host-read-ahead = '64k'\n[fio]\nrw = 'randread'\nruntime = '3s'\nramp = '0s'\n",
        disk.device.display()
    ));
    let restored = format!("{name} read_ahead_kb={} is restored", before[1]);
    let is_left_and_restored = || {
        let _ = fs::remove_dir_all(bench.path("result"));
        let mut lab = spawn(bench.run().stdout(Stdio::null()));
        wait_for("the first configuration", || bench.lines("boot") > 0);
        lab.kill().unwrap();
        lab.wait().unwrap();
        let is_left =
            queue("scheduler").contains("[mq-deadline]") && queue("read_ahead_kb") == "64";
        let said = succeed(bench.run().arg("--resume"));
        assert_eq!([queue("scheduler"), queue("read_ahead_kb")], before);
        is_left && said.contains(&restored)
    };
    // Now and then, the run of another test is the next one.
    assert!((0..10).any(|_| is_left_and_restored()), "{restored}");
    let boots = bench.journal().boots;
    let effective = &boots.last().unwrap().effective;
    assert_eq!(effective["host-scheduler"], "mq-deadline");
    assert_eq!(effective["host-read-ahead"], "64k");
    assert!(effective["host queue before"].contains(&before[1]));

    // Ctrl-C
    fs::remove_dir_all(bench.path("result")).unwrap();
    let lab = spawn(&mut bench.run());
    wait_for("the first configuration", || bench.lines("boot") > 0);
    assert!(queue("scheduler").contains("[mq-deadline]"));
    let pid = rustix::process::Pid::from_child(&lab);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = lab.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", output_text(&output));
    assert_eq!([queue("scheduler"), queue("read_ahead_kb")], before);
}
