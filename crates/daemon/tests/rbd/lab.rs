//! The lab measures images in a cluster: those that it creates, with all programs that open them.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use lab::journal::Journal;
use testkit::ceph::POOL;

use super::cluster::{CephVersion, Cluster};

fn lab(arguments: &[&str], folder: &std::path::Path) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command
        .arg("lab")
        .args(arguments)
        .current_dir(folder)
        .env("XDG_STATE_HOME", folder.join("state"));
    command.output().unwrap()
}

#[test]
fn images_are_created_filled_measured_and_removed() {
    let test = "images_are_created_filled_measured_and_removed";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    let (conf, keyring) = (
        cluster.ceph().conf().to_owned(),
        cluster.ceph().vm_keyring().to_owned(),
    );
    let folder = cluster.folder.path().to_owned();
    let plan = format!(
        "guest = 'none'\nblocks = 1\nuntil = 'blocks'\nmetric = 'cpu'\n[storage]\nsize = '16M'\ncreate = true\n\
         [config]\ndevice = 'vhost-user-blk'\nclient = 'ring'\niothread = 'on'\nqueues = 1\nvolumes = 2\n\
         backing = 'rbd:{POOL}/measured-{{volume}}'\nceph-conf = '{}'\nceph-keyring = '{}'\nceph-user = 'vm'\n\
         ceph-options = ['ms_client_mode=crc', 'ms_client_mode=secure']\n\
         [[case]]\nname = 'fio'\ndevice = 'host'\n\
         [[case]]\nname = 'qsd'\nserver = 'qemu-storage-daemon'\n\
         [[case]]\nname = 'empty'\nprefill = 'off'\nceph-options = 'ms_client_mode=crc'\n\
         [[case]]\nname = 'ringdisk'\n\
         [fio]\nruntime = '500ms'\nramp = '100ms'\n\
         [[workload]]\nrw = ['randread', 'randwrite']\niodepth = 4\n",
        conf.display(),
        keyring.display(),
    );
    fs::write(folder.join("plan.toml"), &plan).unwrap();
    let refused = lab(&["run", "plan.toml"], &folder);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{words}");
    assert!(words.contains("created, and removed at the end"), "{words}");

    let done = lab(
        &["run", "plan.toml", "--overwrite", "--output", "result"],
        &folder,
    );
    let words = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{words}");
    let journal = Journal::read(&folder.join("result")).unwrap();
    let errors: Vec<_> = journal
        .cells
        .iter()
        .filter_map(|cell| cell.error.as_ref())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert!(
        journal.header.left_out.is_empty(),
        "{:?}",
        journal.header.left_out
    );
    assert_eq!(journal.cells.len(), (7 + 1) * 2, "with the twin");
    for cell in &journal.cells {
        let sample = cell.sample.as_ref().unwrap();
        assert!(sample.iops > 0.0, "{cell:?}");
        assert!(
            sample.cpu_us.is_some(),
            "{}: its CPU time is compared",
            cell.case
        );
    }
    let filled: BTreeSet<_> = journal
        .fills
        .iter()
        .map(|fill| fill.disk.as_str())
        .collect();
    let names = [0, 1].map(|volume| format!("rbd:{POOL}/measured-{volume}"));
    assert_eq!(filled, names.iter().map(String::as_str).collect());
    assert!(journal.fills.iter().all(|fill| fill.bytes == 16 << 20));
    let left = cluster.ceph().rbd(&["ls", POOL]).unwrap();
    assert!(!left.contains("measured-"), "{left}");
}

#[test]
fn an_image_of_the_users_is_neither_written_to_unasked_nor_removed() {
    let test = "an_image_of_the_users_is_neither_written_to_unasked_nor_removed";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    cluster.ceph().create("lab-mine", 16).unwrap();
    let conf = cluster.ceph().conf().to_owned();
    let folder = cluster.folder.path().to_owned();
    let plan = format!(
        "guest = 'none'\nblocks = 1\n[config]\ndevice = 'vhost-user-blk'\nbacking = 'rbd:{POOL}/lab-mine'\n\
         ceph-conf = '{}'\n[fio]\nrw = 'randread'\nruntime = '500ms'\nramp = '0s'\n[storage]\nsize = '16M'\n",
        conf.display()
    );
    fs::write(folder.join("plan.toml"), plan).unwrap();
    // It is thin, so that it would be filled.
    let refused = lab(&["run", "plan.toml"], &folder);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(words.contains("OVERWRITES rbd:"), "{words}");
    let run = [
        "run",
        "plan.toml",
        "--set",
        "config.prefill=off",
        "--output",
        "as-it-is",
    ];
    let done = lab(&run, &folder);
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    assert!(cluster.content("lab-mine").iter().all(|byte| *byte == 0));
    let done = lab(
        &["run", "plan.toml", "--overwrite", "--output", "filled"],
        &folder,
    );
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let content = cluster.content("lab-mine");
    assert!(
        content
            .chunks(4096)
            .all(|block| block.iter().any(|byte| *byte != 0))
    );
    // What is full needs nobody's leave to be read.
    let done = lab(&["run", "plan.toml", "--output", "again"], &folder);
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}
