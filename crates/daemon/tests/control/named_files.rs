//! Which files an image may make ringdisk open: its creator chooses the names in it, and the next file in the directory
//! may be another tenant's disk. And which files are taken for raw disks.

use std::fs;

use serde_json::json;
use testkit::driver::{Device, DeviceConfig};
use testkit::qemu_img as qemu;

use super::server::{Controlled, QemuClient};
use crate::support::content;

const MIB: u64 = 1 << 20;

/// A disk of 1 MiB per name, and for each an image that has it as backing file and one that has it as data file.
fn make_neighbours(ringdisk: &Controlled, names: &[&str]) {
    let at = ringdisk.dir.path();
    for name in names {
        ringdisk.file(&format!("{name}.raw"), MIB);
        let raw = format!("{name}.raw");
        let (back, data) = (format!("{name}-back.qcow2"), format!("{name}-data.qcow2"));
        qemu::img(at, &format!("create -q -f qcow2 -b {raw} -F raw {back}"));
        let options = format!("data_file={raw},data_file_raw=on");
        qemu::img(at, &format!("create -q -f qcow2 -o {options} {data} 1M"));
        // Creating the image has emptied it.
        ringdisk.file(&raw, MIB);
    }
}

#[test]
fn image_takes_no_disk_of_another_tenant() {
    if !qemu::is_there("image_takes_no_disk_of_another_tenant") {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    let kinds = [
        ("served", ""),
        ("released", ",lock=running"),
        ("read", ",readonly=on"),
    ];
    let names = kinds.map(|(name, _)| name);
    make_neighbours(&ringdisk, &names);
    make_neighbours(&ringdisk, &["unserved"]);
    for (name, options) in kinds {
        let disk = format!("{name}.raw,socket={name}.sock{options}");
        ringdisk.json(&["attach", &disk]);
    }
    let before = |name: &str| fs::read(ringdisk.path(&format!("{name}.raw"))).unwrap();
    for name in names {
        let user = format!("'{name}'");
        let image = |kind: &str| format!("{name}-{kind}.qcow2,name=image,socket=image.sock");
        let refused = ringdisk.ringdisk(&["attach", &image("back")]);
        refused.assert_fails(1, &["in use", &user]);
        let refused = ringdisk.ringdisk(&["attach", &image("data")]);
        refused.assert_fails(1, &["data-file=PATH", &format!("{name}.raw")]);
        let named = format!("{},data-file={name}.raw", image("data"));
        let refused = ringdisk.ringdisk(&["attach", &named]);
        refused.assert_fails(1, &["in use"]);
        assert_eq!(before(name).len() as u64, MIB);
    }
    // Nor does it work the other way round.
    ringdisk.json(&["attach", "unserved-back.qcow2,name=image,socket=image.sock"]);
    ringdisk
        .server
        .wait_for_log(&["unserved.raw", "as backing file"]);
    let disk = "unserved.raw,name=late,readonly=on,socket=late.sock";
    let refused = ringdisk.ringdisk(&["attach", disk]);
    refused.assert_fails(1, &["in use", "'image'"]);
    ringdisk.json(&["detach", "image"]);
    let refused =
        ringdisk.ringdisk(&["attach", "unserved-data.qcow2,name=image,socket=image.sock"]);
    refused.assert_fails(1, &["data-file=PATH"]);
    let named = "unserved-data.qcow2,data-file=unserved.raw,name=image,socket=image.sock";
    ringdisk.json(&["attach", named]);
    ringdisk
        .server
        .wait_for_log(&["opened the data file", "unserved.raw"]);
    let mut device =
        Device::connect(ringdisk.path("image.sock"), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(0, &[9; 512]), 0);
    drop(device);
    ringdisk.json(&["detach", "image", "--force"]);
    assert_eq!(before("unserved")[..512], [9; 512]);
    // A data file that the image does not have.
    let wrong = "unserved-back.qcow2,data-file=served-back.qcow2,name=image,socket=image.sock";
    ringdisk
        .ringdisk(&["attach", wrong])
        .assert_fails(1, &["no external data file"]);
}

/// A template that disks only read may be a backing file too, if the operator names its directory.
#[test]
fn template_is_shared_if_its_directory_is_named() {
    if !qemu::is_there("template_is_shared_if_its_directory_is_named") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let allow = [
        format!("--allow-backing={}", dir.path().display()),
        format!("--allow-dir={}", dir.path().display()),
    ];
    let ringdisk = Controlled::start_in(dir, &allow);
    make_neighbours(&ringdisk, &["template", "written"]);
    ringdisk.json(&["attach", "template.raw,readonly=on,socket=template.sock"]);
    ringdisk.json(&["attach", "written.raw,lock=running,socket=written.sock"]);
    ringdisk.json(&["attach", "template-back.qcow2,name=image,socket=image.sock"]);
    let refused = ringdisk.ringdisk(&["attach", "written-back.qcow2,name=other,socket=other.sock"]);
    refused.assert_fails(1, &["in use", "'written'"]);
}

/// Cloud images are qcow2 images with the name of raw ones.
#[test]
fn image_named_like_a_raw_disk_is_refused_unless_the_format_is_given() {
    let test = "image_named_like_a_raw_disk_is_refused_unless_the_format_is_given";
    if !qemu::is_there(test) {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    let at = ringdisk.dir.path();
    qemu::img(at, "create -q -f qcow2 cloud.img 1M");
    let image = fs::read(at.join("cloud.img")).unwrap();
    // Not a multiple of a sector, as many are: making it longer would not make it a raw disk.
    fs::write(at.join("odd.img"), &image[..image.len() - 100]).unwrap();
    fs::write(at.join("disk.raw"), b"KDMV").unwrap();
    fs::File::options()
        .write(true)
        .open(at.join("disk.raw"))
        .and_then(|file| file.set_len(MIB))
        .unwrap();
    for (file, words) in [
        (
            "cloud.img",
            &["cloud.img", "qcow2 format", "format=qcow2"][..],
        ),
        ("odd.img", &["odd.img", "qcow2 format", "format=qcow2"]),
        ("odd.img,format=raw", &["odd.img", "qcow2 format"]),
        ("disk.raw", &["disk.raw", "VMDK format", "qemu-img convert"]),
    ] {
        let refused = ringdisk.ringdisk(&["attach", &format!("{file},name=disk,socket=disk.sock")]);
        refused.assert_fails(1, words);
        assert!(!refused.err.contains("truncate"), "{}", refused.err);
    }
    assert!(fs::read(at.join("cloud.img")).unwrap() == image);
    ringdisk.json(&[
        "attach",
        "cloud.img,format=qcow2,name=disk,socket=disk.sock",
    ]);
    ringdisk.json(&["attach", "disk.raw,format=raw,name=raw,socket=raw.sock"]);
    // What a guest writes itself does not end its service.
    let replaced = ringdisk.ringdisk(&["replace", "disk", "odd.img"]);
    replaced.assert_fails(1, &["odd.img", "qcow2 format"]);
}

/// The same image with another data file would be another disk. The refusal says so, and the disk stays as it is.
#[test]
fn data_file_of_a_served_image_is_not_exchanged() {
    if !qemu::is_there("data_file_of_a_served_image_is_not_exchanged") {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    make_neighbours(&ringdisk, &["first"]);
    ringdisk.file("second.raw", MIB);
    ringdisk.json(&[
        "attach",
        "first-data.qcow2,name=image,socket=image.sock,data-file=first.raw",
    ]);
    let image = ringdisk.path("first-data.qcow2").display().to_string();
    let second = ringdisk.path("second.raw").display().to_string();
    let refused = ringdisk.ringdisk(&["replace", "image", &image, "--data-file", &second]);
    refused.assert_fails(
        1,
        &["disk 'image'", "first.raw", "cannot use", "second.raw"],
    );
    assert_eq!(ringdisk.disk("image")["storage"], "works");
}

/// A VM moves here, and its metadata names the file on which its disk builds where it comes from: it would go on with old data.
#[test]
fn no_vm_comes_to_a_file_on_which_its_disk_builds() {
    let test = "no_vm_comes_to_a_file_on_which_its_disk_builds";
    if !qemu::is_there(test) {
        return;
    }
    let from = Controlled::start(&[]);
    let at = from.dir.path();
    from.file("base.raw", MIB);
    qemu::img(at, "create -q -f qcow2 -b base.raw -F raw top.qcow2");
    from.json(&["attach", "base.raw,name=vm,socket=vm.sock,lock=running"]);
    let guest = Device::connect(from.path("vm.sock"), &DeviceConfig::default()).unwrap();
    from.json(&["replace", "vm", "top.qcow2"]);
    let to = Controlled::start(&[format!("--allow-dir={}", at.display())]);
    let Some(mut client) = QemuClient::connect(test, &to.control) else {
        return;
    };
    let disk = |file: &str| {
        let (file, socket) = (from.path(file), to.path("vm.sock"));
        let (file, socket) = (file.display(), socket.display());
        let disk = format!("{file},name=vm,socket={socket},lock=running");
        json!({ "disk": disk, "unless-left": true })
    };
    let says = ["base.raw", "an image that is in use builds on it"];
    client.assert_refused("x-ringdisk-attach", disk("base.raw"), "GenericError", &says);
    client.call("x-ringdisk-attach", disk("top.qcow2"));
    client.call("x-ringdisk-detach", json!({ "id": "vm" }));
    // What a VM writes to itself is no such file.
    drop(guest);
    from.json(&["detach", "vm", "--force"]);
    from.json(&["attach", "base.raw,name=vm,socket=vm.sock,lock=running"]);
    let _guest = Device::connect(from.path("vm.sock"), &DeviceConfig::default()).unwrap();
    client.call("x-ringdisk-attach", disk("base.raw"));
}

/// What commands have attached is served by the next start, wherever the disks of the configuration are by then. A directory in
/// the configuration that is not there keeps nothing from that.
#[test]
fn attached_disks_are_served_after_a_restart_beside_configured_ones() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for name in ["a", "b"] {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name) + "/disk.raw", content(0, MIB as usize)).unwrap();
    }
    fs::write(path("r.toml"), "# nothing yet\n").unwrap();
    let arguments = ["config=", "state="].map(|key| {
        let file = if key == "state=" { "state" } else { "r.toml" };
        format!("--{key}{}", path(file))
    });
    let (configured, attached) = (path("a"), path("b"));
    let mut ringdisk = Controlled::start_in(dir, &arguments);
    let log = ringdisk.server.wait_for_log(&["sandbox:", "files"]);
    if log.contains("not restricted") {
        return println!(
            "skipped: attached_disks_are_served_after_a_restart_beside_configured_ones: {log}"
        );
    }
    let disk = format!("{attached}/disk.raw,name=b,socket={attached}/b.sock");
    ringdisk.json(&["attach", &disk]);
    let text = format!(
        "allow-dir = [\"/there/is/none\"]\n[[disk]]\nname = \"a\"\nfile = \"{configured}/disk.raw\"\n\
         socket = \"{configured}/a.sock\"\n"
    );
    fs::write(ringdisk.path("r.toml"), text).unwrap();
    ringdisk.json(&["reload"]);
    ringdisk = ringdisk.kill_and_restart();
    let says = ["ERROR", "allow-dir: /there/is/none"];
    ringdisk.server.wait_for_log(&says);
    for name in ["a", "b"] {
        assert_eq!(ringdisk.disk(name)["storage"], "works", "{name}");
        let socket = ringdisk.path(&format!("{name}/{name}.sock"));
        let mut guest = Device::connect(socket, &DeviceConfig::default()).unwrap();
        assert_eq!(guest.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    }
    // Nowhere else.
    ringdisk.file("c.raw", MIB);
    let refused = ringdisk.ringdisk(&["attach", "c.raw,socket=c.sock"]);
    refused.assert_fails(1, &["--allow-dir"]);
}

/// A disk is served here, then elsewhere, where it leaves two files, and then here again: it is not served from any of them, nor
/// from a new image over one, though it is free for other hosts each time and no guest comes.
#[test]
fn files_that_a_disk_has_left_elsewhere_are_not_served() {
    let test = "files_that_a_disk_has_left_elsewhere_are_not_served";
    if !qemu::is_there(test) {
        return;
    }
    let state = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ringdisk = Controlled::start(&[format!("--state={}", state.path().display())]);
    let at = ringdisk.dir.path();
    qemu::img(at, "create -q -f qcow2 base.qcow2 4M");
    let Some(mut client) = QemuClient::connect(test, &ringdisk.control) else {
        return;
    };
    let disk = |file: &str| {
        let (file, socket) = (ringdisk.path(file), ringdisk.path("vm.sock"));
        let (file, socket) = (file.display(), socket.display());
        let disk = format!("{file},name=vm,socket={socket},lock=running,format=qcow2");
        json!({ "disk": disk, "unless-left": true })
    };
    client.call("x-ringdisk-attach", disk("base.qcow2"));
    client.call("x-ringdisk-detach", json!({ "id": "vm" }));
    qemu::img(at, "create -q -f qcow2 -b base.qcow2 -F qcow2 one.qcow2");
    qemu::img(at, "create -q -f qcow2 -b one.qcow2 -F qcow2 two.qcow2");
    for file in ["base", "one"] {
        let over = format!("create -q -f qcow2 -b {file}.qcow2 -F qcow2 over-{file}.qcow2");
        qemu::img(at, &over);
    }
    for _ in 0..2 {
        client.call("x-ringdisk-attach", disk("two.qcow2"));
        client.call("x-ringdisk-detach", json!({ "id": "vm" }));
        for file in ["base", "one", "over-base", "over-one"] {
            let says = ["was moved", "two.qcow2"];
            let file = disk(&format!("{file}.qcow2"));
            client.assert_refused("x-ringdisk-attach", file, "GenericError", &says);
        }
    }
}
