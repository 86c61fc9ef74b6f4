//! Dirty bitmaps that are stored in images: an orderly end stores them for QEMU and for the next ringdisk; a kill makes them
//! inconsistent, as in QEMU.

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::qemu_img as qemu;
use testkit::server::Server;

use crate::support::serve_all;

const OK: u8 = 0;

fn serve(directory: &Path) -> (Server, Device) {
    let socket = directory.join("disk.sock");
    let (image, socket_text) = (directory.join("disk.qcow2"), socket.display());
    let disk = format!("file={},socket={socket_text},queues=2", image.display());
    let control = format!("--control={}", directory.join("control.qmp").display());
    let server = serve_all(&[disk, control]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let device = Device::connect(&socket, &config).unwrap();
    (server, device)
}

fn is_in_use(directory: &Path) -> bool {
    let info = Command::new("qemu-img")
        .args(["info", "-U", "disk.qcow2"])
        .current_dir(directory)
        .output()
        .unwrap();
    String::from_utf8(info.stdout).unwrap().contains("in-use")
}

#[test]
fn orderly_ends_store_bitmaps_and_kills_do_not() {
    if !qemu::is_there("orderly_ends_store_bitmaps_and_kills_do_not") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 64M");
    qemu::img(directory, "bitmap --add -g 4k disk.qcow2 b0");
    let mut dirty = Vec::new();
    for round in 0..3_u64 {
        let (mut server, mut device) = serve(directory);
        assert!(!is_in_use(directory), "nothing is written yet");
        let at = round << 20;
        assert_eq!(device.queues[0].write(at >> 9, &[1; 4096]), OK);
        let zeroes = Op::WriteZeroes { unmap: true };
        let queue = &mut device.queues[1];
        assert_eq!(queue.run(zeroes, (at + 65536) >> 9, 8192), OK);
        assert_eq!(queue.run(Op::Discard, (at + 131_072) >> 9, 512), OK);
        assert!(is_in_use(directory));
        drop(device);
        assert!(server.terminate().unwrap().success(), "{}", server.log());
        dirty.extend([
            at..at + 4096,
            at + 65536..at + 73728,
            at + 131_072..at + 135_168,
        ]);
        assert_eq!(qemu::dirty(directory, "disk.qcow2", "b0"), dirty);
        qemu::check(directory, "disk.qcow2", false);
    }
    let (server, mut device) = serve(directory);
    assert_eq!(device.queues[0].write(9 << 11, &[1; 4096]), OK);
    server.signal(Signal::KILL);
    drop((device, server));
    let (mut server, device) = serve(directory);
    let log = server.log();
    assert!(
        log.contains("bitmap 'b0' of its image is not continued: it was in use"),
        "{log}"
    );
    drop(device);
    assert!(server.terminate().unwrap().success(), "{}", server.log());
    assert!(is_in_use(directory));
    qemu::img(directory, "bitmap --remove disk.qcow2 b0");
    qemu::check(directory, "disk.qcow2", false);
}

#[test]
fn few_unusable_bitmaps_are_logged_one_by_one() {
    if !qemu::is_there("few_unusable_bitmaps_are_logged_one_by_one") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 64M");
    for number in 0..10 {
        qemu::img(directory, &format!("bitmap --add disk.qcow2 b{number}"));
    }
    // A program that does not know bitmaps clears the feature bit.
    let image = directory.join("disk.qcow2");
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[95] &= !1;
    std::fs::write(&image, bytes).unwrap();
    let (mut server, device) = serve(directory);
    let log = server.log();
    assert_eq!(log.matches("of its image is not continued").count(), 8);
    let rest = "2 more bitmaps of its image are not continued; 'ringdisk bitmap list";
    assert!(log.contains(rest), "{log}");
    drop(device);
    assert!(server.terminate().unwrap().success(), "{}", server.log());
}
