//! Storage below which the kernel counts no requests.

use std::fs;
use std::path::Path;

use testkit::storage::Storage;
use testkit::vm::{self, Disk, Vm};

use super::{LIMIT, profile, stage};
use ::lab::profile::verdict::Stage;

/// A VM whose disk is on storage that is no block device: the kernel counts none of its requests.
#[test]
fn storage_of_a_disk_of_qemu_that_is_no_device() {
    let test = "storage_of_a_disk_of_qemu_that_is_no_device";
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mount = files.path().join("mnt");
    fs::create_dir(&mount).unwrap();
    let storage = match Storage::mount(&mount, vec![0; 16 << 20], 1) {
        Ok(storage) => storage,
        Err(e) => {
            println!("skipped: {test}: no FUSE: {e}");
            return;
        }
    };
    storage.change(|control| control.mishaps.late_ms = 200);
    let monitor = files.path().join("monitor.qmp");
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs).qmp(&monitor).disk(Disk::Qemu {
        file: storage.file().to_owned(),
        cache: "none",
        aio: "threads",
        queues: 1,
        serial: "slow".into(),
    });
    let script =
        "while :; do dd if=/dev/vda of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null; done &
        reader=$!
        sleep 2
        echo busy
        sleep 20
        kill $reader";
    let mut reply = None;
    let output = guest.run_watched(script, LIMIT, &mut |line, qemu| {
        if line == "busy" {
            let (pid, monitor) = (qemu.to_string(), monitor.display().to_string());
            reply = Some(profile(&[
                "--pid",
                &pid,
                "--qmp",
                &monitor,
                "--seconds",
                "3",
            ]));
        }
    });
    output.unwrap().checked().unwrap();
    let reply = reply.expect("the guest printed 'busy'");
    assert_eq!(stage(&reply), Stage::Storage, "{reply}");
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    let file = format!("{} (fuse", storage.file().display());
    assert!(sentence.contains(&file), "{sentence}");
}
