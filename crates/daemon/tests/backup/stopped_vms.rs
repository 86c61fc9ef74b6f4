//! Backups of disks that are locked only while their VM runs: it stops and starts, and no other host gets the disk meanwhile.

use std::fs;
use std::process::Command;

use testkit::driver::Device;

use super::{BLOCK, DISK_BYTES, Served, numbers, text, write};

/// Whether QEMU could write to the file.
fn is_free(served: &Served, file: &str) -> bool {
    let mut open = Command::new("qemu-io");
    open.args(["-f", &file[2..], "-c", "length"]);
    let output = open.arg(served.path(file)).output().unwrap();
    output.status.success()
}

/// A disk of each format, and its guest, which has written a block.
fn disks(served: &Served) -> [(&'static str, Device); 2] {
    ["r.raw", "s.qcow2"].map(|file| {
        let (name, path) = (&file[..1], served.path(file));
        let format = &file[2..];
        super::run(
            "qemu-img",
            &["create", "-q", "-f", format, text(&path), "64M"],
        );
        let (path, socket) = (path.display(), served.path(&format!("{name}.sock")));
        let socket = socket.display();
        let disk = format!(
            "file={path},format={format},name={name},socket={socket},queues=2,lock=running"
        );
        served.done(&["attach", &disk]);
        served.refused(
            &["backup", "begin", name],
            "may be in use on another host (lock=running)",
        );
        let mut guest = served.connect(name);
        write(&mut guest, 0, 7, 7);
        (file, guest)
    })
}

fn expected(change: impl Fn(&mut Vec<u64>)) -> Vec<u64> {
    let mut blocks = vec![0; (DISK_BYTES / BLOCK) as usize];
    change(&mut blocks);
    blocks
}

#[test]
fn disk_of_a_stopped_vm_is_backed_up_and_released_again() {
    let Some(served) = Served::start("disk_of_a_stopped_vm_is_backed_up", &[]) else {
        return;
    };
    for (file, mut guest) in disks(&served) {
        let name = &file[..1];
        let bases = guest.pause(false).unwrap();
        assert!(is_free(&served, file), "{file}");
        let to = served.path("copy");
        served.done(&["backup", "copy", name, "--to", text(&to), "--bitmap=b"]);
        assert!(is_free(&served, file), "{file}");
        let copied = numbers(&fs::read(&to).unwrap());
        assert_eq!(copied, expected(|blocks| blocks[7] = 7), "{file}");
        guest.go_on(&bases).unwrap();
        write(&mut guest, 0, 9, 9);
        fs::remove_file(&to).unwrap();
        served.done(&["backup", "copy", name, "--to", text(&to), "--bitmap=b"]);
        let copied = numbers(&fs::read(&to).unwrap());
        assert_eq!(copied[9], 9, "{file}");
        fs::remove_file(&to).unwrap();
        drop(guest);
        served.done(&["detach", name, "--force"]);
    }
}

/// The guest is reset, or its VM is stopped and goes on, while a backup is open.
#[test]
fn backup_stays_open_while_its_vm_is_stopped() {
    let Some(served) = Served::start("backup_stays_open_while_its_vm_is_stopped", &[]) else {
        return;
    };
    for (file, mut guest) in disks(&served) {
        let name = &file[..1];
        served.done(&["backup", "begin", name]);
        write(&mut guest, 0, 7, 8);
        let bases = guest.pause(true).unwrap();
        assert!(!is_free(&served, file), "{file}");
        let export = format!("{name}-backup");
        let copied = numbers(&served.copy(&export));
        assert_eq!(copied, expected(|blocks| blocks[7] = 7), "{file}");
        guest.go_on(&bases).unwrap();
        write(&mut guest, 0, 9, 9);
        let bases = guest.pause(false).unwrap();
        assert_eq!(numbers(&served.copy(&export)), copied, "{file}");
        served.done(&["backup", "end"]);
        assert!(is_free(&served, file), "{file}");
        guest.go_on(&bases).unwrap();
        assert!(!is_free(&served, file), "{file}");
        // The VM ends, and the backup stays.
        served.done(&["backup", "begin", name]);
        drop(guest);
        let copied = numbers(&served.copy(&export));
        let now = expected(|blocks| (blocks[7], blocks[9]) = (8, 9));
        assert_eq!(copied, now, "{file}");
        served.done(&["backup", "end"]);
        assert!(is_free(&served, file), "{file}");
    }
}
