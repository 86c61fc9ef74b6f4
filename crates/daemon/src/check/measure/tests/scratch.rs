use super::*;

#[test]
fn the_place_of_a_scratch_disk_is_beside_the_disk_or_where_the_user_wants_it() {
    let place = |kind: &str, file: &str, lvm: Option<&'static str>, wanted: Option<&str>| {
        let mut disk = Disk {
            file: file.into(),
            ..Disk::default()
        };
        let kind = ["file", "block", "rbd", "nbd"]
            .into_iter()
            .find(|one| *one == kind)
            .unwrap();
        disk.table.derive("disk.protocol", kind, "test");
        if let Some(lvm) = lvm {
            disk.table.derive("backing.lvm", lvm, "test");
        }
        Scratch::of("vm1-vda", &disk, wanted).map(|scratch| scratch.text())
    };
    let name = "ringdisk-measure-vm1-vda";
    assert_eq!(
        place("file", "/vms/a.raw", None, None),
        Ok(format!("/vms/{name}/"))
    );
    assert_eq!(
        place("rbd", "vms/a", None, None),
        Ok(format!("rbd:vms/{name}-0"))
    );
    let volume = Ok(format!("/dev/vg0/{name}-0"));
    assert_eq!(place("block", "/dev/vg0/a", Some("thick"), None), volume);
    let volume = Ok(format!("/dev/vg-0/{name}-0"));
    assert_eq!(
        place("block", "/dev/mapper/vg--0-a", Some("thin"), None),
        volume
    );
    for (kind, file, lvm, words) in [
        ("block", "/dev/vg0/a", None, "with --scratch"),
        (
            "block",
            "/dev/sdb",
            Some("no"),
            "name /dev/GROUP/NAME-{volume}",
        ),
        ("nbd", "export", None, "cannot create a disk"),
        ("rbd", "vms/lab/a", None, "namespace 'lab'"),
        ("file", "$DISK", None, "name a directory with --scratch"),
    ] {
        let error = place(kind, file, lvm, None).unwrap_err();
        assert!(error.contains(words), "{file}: {error}");
    }
    let directory = tempfile::tempdir().unwrap();
    let wanted = directory.path().to_str();
    let text = format!("{}/{name}/", directory.path().display());
    assert_eq!(place("file", "$DISK", None, wanted), Ok(text));
    assert_eq!(
        place("rbd", "vms/lab/a", None, Some("rbd:p/i")),
        Ok("rbd:p/i".into())
    );
    assert_eq!(
        place("block", "/dev/sdb", None, Some("/dev/vg0/x-{volume}")),
        Ok("/dev/vg0/x-0".into())
    );
    for wrong in [
        "rbd:p",
        "rbd:p/i@s",
        "rbd:-p/i",
        "/nonexistent/x",
        "rbd:p/i-{guest}",
        "rbd:{volume}/i",
        "/nonexistent/{volume}",
    ] {
        assert!(place("rbd", "x/y", None, Some(wrong)).is_err(), "{wrong}");
    }
    let file = directory.path().join("a.raw");
    fs::write(&file, "mine").unwrap();
    let error = place("file", "x", None, file.to_str()).unwrap_err();
    assert!(error.contains("is a file"), "{error}");
}

#[test]
fn more_volumes_need_a_scratch_disk_each() {
    let command =
        "qemu-system-x86_64 -accel kvm -drive file=rbd:vms/a,format=raw,if=virtio,cache=none";
    let of_rule = |scratch: Option<&str>| {
        let args = Args {
            scratch: scratch.map(str::to_owned),
            ..Args::default()
        };
        let input = read(Source::new("vm1.sh", command), Surroundings::default()).unwrap();
        let (_, report, plans) = planned(input, None, &args, Load::Guests);
        let finding = report
            .findings
            .iter()
            .position(|one| one.rule == "rbd-one-volume");
        let finding = finding.unwrap();
        let refused = plans.not_measured.iter().find(|it| it.finding == finding);
        match refused {
            Some(refused) => Err(refused.why.clone()),
            None => {
                let mut targets = plans.targets.iter();
                let target = targets.find(|target| target.measures(finding)).unwrap();
                target.parse().unwrap();
                Ok(target.scratch.text())
            }
        }
    };
    let beside = "rbd:vms/ringdisk-measure-vm1-virtio-blk";
    let text = of_rule(None).unwrap();
    assert_eq!(text, format!("{beside}-0, {beside}-1"));
    let text = of_rule(Some("rbd:b/x-{volume}")).unwrap();
    assert_eq!(text, "rbd:b/x-0, rbd:b/x-1");
    let why = of_rule(Some("rbd:b/x")).unwrap_err();
    assert!(
        why.contains("use --scratch 'rbd:POOL/NAME-{volume}'"),
        "{why}"
    );
}

/// The user may name the VM's own disk by mistake.
#[test]
fn a_disk_of_the_vm_is_refused_as_a_scratch_disk() {
    for (disk, other) in [("rbd:vms/a", "rbd:vms/b"), ("/dev/vg0/a", "/dev/vg0/b")] {
        let command = format!(
            "qemu-system-x86_64 -accel kvm -drive file={disk},format=raw,if=virtio,cache=writeback"
        );
        let plans_on = |scratch: &str| plans_of(&command, &with_scratch(scratch));
        let refused = plans_on(disk).err().expect(disk);
        assert!(refused.contains("is a disk of a VM"), "{refused}");
        let (_, plans) = plans_on(other).unwrap();
        assert!(!plans.targets.is_empty(), "{other}");
    }
}

#[test]
fn the_directory_of_scratch_files_is_new_and_removed() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("ringdisk-measure-vm1-vda");
    let folder = Folder::create(path.clone()).unwrap();
    let error = Folder::create(path.clone()).unwrap_err();
    assert!(error.contains("exists"), "{error}");
    fs::create_dir(path.join("disks")).unwrap();
    drop(folder);
    assert!(!path.exists());
    let error = Folder::create(parent.path().join("none/x")).unwrap_err();
    assert!(error.contains("--scratch"), "{error}");
}
