//! libguestfs, which tools for virtual machines use to look into disks.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use testkit::guestfish::Appliance;

use super::{Served, have, run, text};
use crate::support::Disk;

/// Its file system and the file in it are in the disk's file.
#[test]
fn guestfish_makes_a_file_system() {
    let test = "guestfish_makes_a_file_system";
    let appliance = match Appliance::find() {
        Ok(appliance) => appliance,
        Err(missing) => return println!("skipped: {test}: {missing}"),
    };
    if !have(&["e2fsck", "debugfs"], test) {
        return;
    }
    let served = Served::start(Disk::new(), "discard=unmap");
    served.done(&["export", "vm", "--writable"]);
    let mut guestfish = appliance.guestfish().unwrap();
    guestfish.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guestfish = guestfish.spawn().unwrap();
    let commands = format!(
        "add vm format:raw protocol:nbd server:unix:{} discard:enable\nrun\n\
         part-disk /dev/sda mbr\nmkfs ext4 /dev/sda1\nmount /dev/sda1 /\n\
         write /file 'of guestfish'\nfill 83 3000000 /filled\nsync\ndrop-caches 3\nchecksum sha256 /filled\n\
         fstrim /\numount-all\n",
        served.nbd().display()
    );
    let mut stdin = guestfish.stdin.take().unwrap();
    stdin.write_all(commands.as_bytes()).unwrap();
    drop(stdin);
    let output = guestfish.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let sum = String::from_utf8(output.stdout).unwrap();

    // The first entry of the partition table (at byte 446) has the start at its byte 8, in sectors.
    let disk = fs::read(&served.disk.file).unwrap();
    let start = u32::from_le_bytes(disk[454..458].try_into().unwrap());
    let partition = served.path("partition.raw");
    fs::write(&partition, &disk[start as usize * 512..]).unwrap();
    run("e2fsck", &["-f", "-n", text(&partition)]);
    let cat = |file: &str| run("debugfs", &["-R", &format!("cat {file}"), text(&partition)]);
    assert_eq!(cat("/file"), "of guestfish");
    let filled = served.path("filled");
    fs::write(&filled, cat("/filled")).unwrap();
    assert_eq!(fs::read(&filled).unwrap(), vec![b'S'; 3_000_000]);
    let ours = run("sha256sum", &[text(&filled)]);
    assert_eq!(ours.split_whitespace().next(), Some(sum.trim()));
}
