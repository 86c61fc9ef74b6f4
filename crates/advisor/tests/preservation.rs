//! What `--fix` preserves: a VM that starts still starts, boots from the same disk, and its guest sees what it saw before.

use advisor::check::check;
use advisor::input::Surroundings;
use advisor::read::read;
use advisor::rules::Rules;
use advisor::text::Source;

use crate::support::{findings, fixed, input, text};

/// A domain with these devices, after the elements `more`.
fn domain(more: &str, devices: &str) -> String {
    format!(
        "<domain type='kvm'>\n  <name>vm</name>\n  <memory unit='GiB'>2</memory>\n  <vcpu>2</vcpu>\n  {more}\n  <devices>\n    \
         {devices}\n  </devices>\n</domain>\n"
    )
}

/// An I/O thread that a controller, a balloon or another device names is in use.
#[test]
fn iothreads_of_other_devices_are_kept() {
    let controller = domain(
        "<iothreads>2</iothreads>",
        "<controller type='scsi' index='0' model='virtio-scsi'>\n      <driver iothread='2'/>\n    </controller>",
    );
    let used = "<iothreads>2</iothreads>";
    assert_eq!(findings(&controller), ["iothreads-unused"]);
    let fixed = self::fixed(&controller);
    assert!(text(&fixed).contains(used), "{}", text(&fixed));
    let both = controller.replace("iothread='2'/>\n    </controller>", "iothread='2'/>\n    </controller>\n    \
        <controller type='scsi' index='1' model='virtio-scsi'>\n      <driver><iothreads><iothread id='1'/></iothreads></driver>\n    </controller>");
    assert_eq!(findings(&both), Vec::<String>::new());

    let balloon = "qemu-system-x86_64 -accel kvm -object iothread,id=i0 -object iothread,id=i1 \
                   -device virtio-balloon-pci,iothread=i0 \
                   -device '{\"driver\":\"virtio-scsi-pci\",\"iothread-vq-mapping\":[{\"iothread\":\"i1\"}]}'\n";
    assert_eq!(findings(balloon), Vec::<String>::new());
    let one = format!("{} -object iothread,id=i2\n", balloon.trim_end());
    assert_eq!(findings(&one), ["iothreads-unused"]);
    assert_eq!(text(&self::fixed(&one)), balloon);
}

/// libvirt boots the same disk: a fix that would change the order makes the old one explicit.
#[test]
fn libvirt_boots_the_same_disk() {
    let boot = "<os>\n    <type arch='x86_64' machine='pc'>hvm</type>\n    <boot dev='cdrom'/>\n    <boot dev='hd'/>\n  </os>";
    let disk = |name: &str, bus: &str, device: &str| {
        format!(
            "<disk type='block' device='{device}'>\n      <driver name='qemu' type='raw' cache='none' io='native'/>\n      \
             <source dev='/dev/vg0/{name}'/>\n      <target dev='{name}' bus='{bus}'/>\n    </disk>"
        )
    };
    let two = domain(
        boot,
        &[
            disk("hda", "ide", "disk"),
            disk("vda", "virtio", "disk"),
            disk("hdc", "ide", "cdrom"),
        ]
        .join("\n    "),
    );
    let fixed = self::fixed(&two);
    let now = text(&fixed);
    assert!(
        now.contains("<target dev='vdb' bus='virtio'/>\n      <boot order='2'/>"),
        "{now}"
    );
    assert!(
        now.contains("bus='ide'/>\n      <boot order='1'/>") && !now.contains("<boot dev"),
        "{now}"
    );
    // Where nothing changes, nothing is written.
    let one = domain(boot, &disk("hda", "ide", "disk"));
    assert!(text(&self::fixed(&one)).contains("<boot dev='hd'/>"));
    let own = two
        .replace("<boot dev='cdrom'/>\n    <boot dev='hd'/>", "")
        .replace(
            "<target dev='hda' bus='ide'/>",
            "<target dev='hda' bus='ide'/>\n      <boot order='1'/>",
        );
    assert_eq!(text(&self::fixed(&own)).matches("<boot order=").count(), 1);
}

/// Without a bootindex, QEMU's firmware boots the first disk of the first kind of controller.
#[test]
fn qemu_boots_the_same_disk() {
    let line = |drives: &str| format!("qemu-system-x86_64 -accel kvm {drives}\n");
    let end = "cache=none,aio=native";
    let drive =
        |file: &str, bus: &str| format!("-drive file=/dev/vg0/{file},format=raw,{end},if={bus}");
    // Another disk would be first.
    let other = line(&format!("{} {}", drive("b", "virtio"), drive("a", "ide")));
    let fixed = self::fixed(&other);
    assert!(
        text(&fixed).contains("/a,format=raw,cache=none,aio=native,if=ide"),
        "{}",
        text(&fixed)
    );
    assert!(
        fixed
            .left
            .iter()
            .any(|left| left.reason.contains("boot from another")),
        "{:?}",
        fixed.left
    );
    // The order stays, if the last goes first.
    let both = line(&format!("{} {}", drive("a", "ide"), drive("b", "ide")));
    let fixed = self::fixed(&both);
    assert!(!text(&fixed).contains("if=ide"), "{}", text(&fixed));
    // A device comes before what QEMU makes for a drive: the first gets one first.
    let left = line(&format!(
        "{},$MORE {}",
        drive("a", "virtio"),
        drive("b", "virtio")
    ));
    assert_eq!(text(&self::fixed(&left)), left);
    let virtio = line(&format!(
        "{} {}",
        drive("a", "virtio"),
        drive("b", "virtio")
    ));
    let files: Vec<String> = self::fixed(&virtio).input.vms[0]
        .disks
        .iter()
        .map(|disk| disk.file.clone())
        .collect();
    assert_eq!(files, ["/dev/vg0/a", "/dev/vg0/b"]);
    // With a bootindex, it does not matter where a disk is.
    let index = line(&format!(
        "{} -drive file=/dev/vg0/a,format=raw,if=none,id=a,{end} -device ide-hd,drive=a,bootindex=1",
        drive("b", "virtio")
    ));
    assert!(text(&self::fixed(&index)).contains("-device virtio-blk-pci,drive=a,bootindex=1"));
}

/// Proxmox boots the first disk of the first bus in its own order of buses.
#[test]
fn proxmox_boots_the_same_disk() {
    let conf = |boot: &str| {
        format!(
            "{boot}ostype: l26\nscsihw: virtio-scsi-single\nide0: local-lvm:a\nscsi0: local-lvm:b,iothread=1\n"
        )
    };
    let fixed = self::fixed(&conf(""));
    assert_eq!(text(&fixed), conf(""));
    assert!(
        fixed.left[0].reason.contains("disk other than ide0"),
        "{:?}",
        fixed.left
    );
    let fixed = self::fixed(&conf("boot: order=ide0\n"));
    assert!(
        text(&fixed).contains("boot: order=scsi1") && text(&fixed).contains("scsi1: local-lvm:a"),
        "{}",
        text(&fixed)
    );
}

/// Disks that move together keep their order, and get different names.
#[test]
fn disks_moved_together_keep_their_order() {
    let disk = |name: &str, bus: &str| {
        format!(
            "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw' cache='none' io='native'/>\n      \
             <source dev='/dev/vg0/{name}'/>\n      <target dev='{name}' bus='{bus}'/>\n      \
             <address type='drive' controller='0' bus='0' target='0' unit='0'/>\n    </disk>"
        )
    };
    let pc = "<os><type arch='x86_64' machine='pc'>hvm</type></os>";
    // The first of them is named second.
    let fixed = self::fixed(&domain(
        pc,
        &[disk("sda", "sata"), disk("hda", "ide")].join("\n    "),
    ));
    let now = text(&fixed);
    assert!(
        now.contains(
            "/sda'/>\n      <target dev='vdb' bus='virtio'/>\n      <boot order='1'/>\n    </disk>"
        ),
        "{now}"
    );
    assert!(
        !now.contains("address") && now.contains("dev='vda' bus='virtio'"),
        "{now}"
    );
    // Nothing is written where the order is the same.
    let fixed = self::fixed(&domain(
        pc,
        &[disk("hda", "ide"), disk("hdb", "ide")].join("\n    "),
    ));
    assert!(!text(&fixed).contains("<boot"), "{}", text(&fixed));

    let conf = "boot: order=ide0\nostype: l26\nscsihw: virtio-scsi-single\nide0: local-lvm:a\nsata0: local-lvm:b\nide1: local-lvm:c\n";
    let fixed = self::fixed(conf);
    for key in ["scsi0: ", "scsi1: ", "scsi2: "] {
        assert_eq!(text(&fixed).matches(key).count(), 1, "{}", text(&fixed));
    }
    let first = text(&fixed)
        .lines()
        .find(|line| line.contains("local-lvm:a"))
        .unwrap();
    let key = first.split(':').next().unwrap();
    assert!(
        text(&fixed).contains(&format!("boot: order={key}\n")),
        "{}",
        text(&fixed)
    );
    // Without that line, the first goes last, and comes behind: so it stays.
    let fixed = self::fixed(&conf.replace("boot: order=ide0\n", ""));
    assert!(
        text(&fixed).contains("\nide0: local-lvm:a"),
        "{}",
        text(&fixed)
    );
}

/// Each NUMA node may have shared memory.
#[test]
fn numa_node_memory_is_shared() {
    let line = |share: &str| {
        format!(
            "qemu-system-x86_64 -accel kvm -m 2G -object memory-backend-memfd,id=m0,size=1G{share} \
             -object '{{\"qom-type\":\"memory-backend-ram\",\"id\":\"m1\",\"size\":1073741824,\"share\":true}}' \
             -numa node,nodeid=0,memdev=m0 -numa node,nodeid=1,memdev=m1 \
             -chardev socket,id=c,path=/run/c,reconnect-ms=1000 -device vhost-user-blk-pci,chardev=c\n"
        )
    };
    for share in ["", ",share=on"] {
        assert_eq!(findings(&line(share)), Vec::<String>::new(), "{share}");
    }
    assert_eq!(findings(&line(",share=off")), ["vhost-user-unshared"]);
    assert_eq!(text(&fixed(&line(",share=off"))), line(",share=on"));
    // Proxmox shares what it takes from huge pages.
    let conf = "hugepages: 2\nnuma: 1\nmemory: 2048\nostype: l26\nscsihw: virtio-scsi-single\n\
                args: -chardev socket,id=c,path=/run/c,reconnect-ms=1000 -device vhost-user-blk-pci,chardev=c\n";
    assert_eq!(findings(conf), Vec::<String>::new());
}

/// libvirt checks the configured cache mode, not the effective one.
#[test]
fn libvirt_needs_a_cache_mode_for_native() {
    let shareable = domain(
        "",
        "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw'/>\n      <source dev='/dev/a'/>\n      \
         <target dev='vda' bus='virtio'/>\n      <shareable/>\n    </disk>",
    );
    let now = self::fixed(&shareable);
    assert!(
        text(&now).contains("type='raw' cache='none' io='native'"),
        "{}",
        text(&now)
    );
    // libvirt's default is of disks that are written to.
    let readonly = shareable.replace("<shareable/>", "<shareable/>\n      <readonly/>");
    assert!(
        findings(&readonly).contains(&"cache-host-page".to_owned()),
        "{:?}",
        findings(&readonly)
    );
}

/// A disk with a property that virtio-blk lacks keeps its bus.
#[test]
fn disk_with_an_identity_keeps_its_bus() {
    for (element, target) in [
        ("<wwn>5000c50015ea71ad</wwn>", ""),
        ("<vendor>SEAGATE</vendor>", ""),
        ("<product>ST3146707LC</product>", ""),
        (
            "<geometry cyls='16383' heads='16' secs='63' trans='lba'/>",
            "",
        ),
        ("", " tray='open'"),
    ] {
        let ide = domain(
            "",
            &format!(
                "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw' cache='none' io='native'/>\n      \
                 <source dev='/dev/a'/>\n      <target dev='hda' bus='ide'{target}/>{element}\n    </disk>"
            ),
        );
        let fixed = self::fixed(&ide);
        assert_eq!(text(&fixed), ide);
        assert!(
            fixed.left[0].reason.contains("virtio-blk has no"),
            "{:?}",
            fixed.left
        );
    }
    for key in ["wwn=1", "model=x", "ver=1"] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -drive file=/dev/a,format=raw,if=none,id=a,cache=none,aio=native \
             -device ide-hd,drive=a,{key}\n"
        );
        assert_eq!(text(&fixed(&line)), line);
    }
}

/// A host with another system gets no advice about Linux.
#[test]
fn other_host_systems_get_no_linux_advice() {
    for accel in [
        "-accel hvf",
        "-machine q35,accel=kvm:hvf:tcg",
        "-accel whpx -accel tcg",
    ] {
        let line = format!(
            "qemu-system-x86_64 {accel} -object iothread,id=i0 -drive file=/vms/a.img,format=raw,if=none,id=a,discard=unmap \
             -drive file=/vms/b.img,format=raw,if=none,id=b,cache=none \
             -device virtio-blk-pci,drive=a,iothread=i0 -device virtio-blk-pci,drive=b,iothread=i0\n"
        );
        assert_eq!(findings(&line), Vec::<String>::new(), "{accel}");
    }
    let mac = domain("", "").replace("type='kvm'", "type='hvf'");
    let mac = mac.replace("<devices>", "<devices><disk type='file' device='disk'><source file='/a'/><target dev='vda' bus='virtio'/></disk>");
    assert_eq!(findings(&mac), ["no-iothread"]);
    // What does not run in QEMU has none of its disks.
    let other = mac.replace("type='hvf'", "type='vmware'");
    assert_eq!(findings(&other), Vec::<String>::new());
}

/// No rule changes the bus of a guest that may have no virtio driver.
#[test]
fn guests_without_virtio_drivers_keep_their_bus() {
    for os in [
        "ostype: l24\n",
        "ostype: solaris\n",
        "ostype: other\n",
        "",
        "ostype: win11\n",
    ] {
        for disk in [
            "ide0: local-lvm:a\n",
            "scsihw: lsi\nscsi0: local-lvm:a,iothread=1\n",
        ] {
            let conf = format!("{os}boot: order=ide0\nmemory: 1024\n{disk}");
            assert_eq!(text(&fixed(&conf)), conf, "{os}");
        }
    }
    for (line, why) in [
        (
            "qemu-system-arm -M raspi2b -drive file=/dev/a,format=raw,if=sd,cache=none,aio=native",
            "an SD card",
        ),
        (
            "qemu-system-x86_64 -accel kvm -drive file=/dev/a,format=raw,if=none,id=a,cache=none,aio=native \
          -device usb-storage,drive=a,removable=on",
            "a stick",
        ),
        (
            "qemu-system-x86_64 -accel kvm -drive file=/isos/seed.iso,format=raw",
            "an ISO",
        ),
        (
            "qemu-system-x86_64 -accel kvm -drive file=/var/lib/cloud-init/cidata.img,format=raw,if=virtio",
            "a seed",
        ),
        (
            "qemu-system-x86_64 -accel kvm -M isapc -drive file=/dev/a,format=raw,cache=none,aio=native",
            "no PCI bus",
        ),
    ] {
        assert_eq!(text(&fixed(line)), line, "{why}");
    }
    let haiku = domain(
        "<metadata><o:os xmlns:o='x' id='http://haiku-os.org/haiku/r1beta4'/></metadata>",
        "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw' cache='none' io='native'/>\n      \
         <source dev='/dev/a'/>\n      <target dev='hda' bus='ide'/>\n    </disk>",
    );
    assert_eq!(text(&fixed(&haiku)), haiku);
}

/// virtio-scsi replaces only controllers that are PCI devices.
#[test]
fn controllers_off_the_pci_bus_are_kept() {
    let scsi = |machine: &str, controller: &str| {
        domain(
            &format!("<os><type arch='ppc64' machine='{machine}'>hvm</type></os>"),
            &format!(
                "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw' cache='none' io='native'/>\n      \
                 <source dev='/dev/a'/>\n      <target dev='sda' bus='scsi'/>\n    </disk>\n    {controller}"
            ),
        )
    };
    for (machine, controller) in [
        (
            "pseries",
            "<controller type='scsi' index='0' model='ibmvscsi'>\n      <address type='spapr-vio' reg='0x2000'/>\n    </controller>",
        ),
        ("pseries", "<controller type='scsi' index='0'/>"),
        (
            "pc",
            "<controller type='scsi' index='0' model='lsilogic'>\n      <address type='spapr-vio' reg='0x2000'/>\n    </controller>",
        ),
    ] {
        let xml = scsi(machine, controller);
        assert_eq!(text(&fixed(&xml)), xml, "{controller}");
    }
    let lsi = scsi("pc", "<controller type='scsi' index='0' model='lsilogic'/>");
    assert!(text(&fixed(&lsi)).contains("model='virtio-scsi'"));
}

/// A descriptor may be of any kind, and not everything in `/dev` is a block device.
#[test]
fn descriptors_are_not_block_devices() {
    for node in [
        "-drive file=/dev/fdset/1,format=raw,if=none,id=a",
        "-blockdev driver=file,filename=/dev/fdset/1,node-name=f -blockdev driver=raw,file=f,node-name=a",
        "-blockdev driver=host_device,filename=/dev/fdset/1,node-name=f -blockdev driver=raw,file=f,node-name=a",
    ] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -object iothread,id=i0 {node} -device virtio-blk-pci,drive=a,iothread=i0\n"
        );
        assert_eq!(findings(&line), Vec::<String>::new(), "{node}");
    }
}

/// Comments and values do not count as elements.
#[test]
fn comments_are_not_elements() {
    let many = "<!-- <disk> -->".repeat(300) + &"<![CDATA[<a><b>]]>".repeat(300);
    let xml = domain(&format!("<title>{many}</title>"), "");
    assert!(read(Source::new("x", xml.as_str()), Surroundings::default()).is_ok());
    let values = domain(&"<x a='/>' b=\">-->'\"><y/></x>".repeat(300), "");
    assert!(read(Source::new("x", values), Surroundings::default()).is_ok());
    let deep = domain(&format!("{}{}", "<a>".repeat(250), "</a>".repeat(250)), "");
    let error = read(Source::new("x", deep), Surroundings::default()).unwrap_err();
    assert!(error.problem.contains("nested more than"), "{error}");
}

/// No file name ends a cell of a table.
#[test]
fn markdown_cells_are_escaped() {
    let rules = Rules::built_in().unwrap();
    let mut input = read(
        Source::new("a|b`c\\|d.sh", "qemu-system-x86_64 -accel kvm -name 'x|y\\|`z' -drive file=/vms/a.img,format=raw,if=virtio"),
        Surroundings::default(),
    )
    .unwrap();
    let checked = check(&mut input, &rules, None, &[]);
    let mut report = advisor::report::Report::default();
    report.add(&input, checked);
    let markdown = advisor::report::markdown(&report, &rules, true);
    let rows = markdown.lines().filter(|line| line.starts_with('|'));
    for row in rows {
        assert_eq!(row.matches('|').count(), 6, "{row}");
    }
}

/// A domain in the metadata of another program is not a VM.
#[test]
fn metadata_is_preserved() {
    let disk = "<disk type='file' device='disk'><source file='/vms/a.img'/><target dev='vda' bus='ide'/></disk>";
    let kept = format!(
        "<metadata><a:x xmlns:a='u'><domain><name>b</name><devices>{disk}</devices></domain></a:x></metadata>"
    );
    let whole = domain(&kept, disk);
    assert_eq!(input("vm", &whole).vms.len(), 1);
    let fixed = self::fixed(&whole);
    assert!(text(&fixed).contains(&kept), "{}", text(&fixed));
    assert_ne!(text(&fixed), whole);
}

/// The domain of a snapshot must match the saved state.
#[test]
fn domains_of_saved_states_are_refused() {
    let disk = "<disk type='file' device='disk'><source file='/vms/a.img'/><target dev='hda' bus='ide'/></disk>";
    let one = domain("", disk);
    for root in ["domainsnapshot", "domaincheckpoint", "domstatus"] {
        let whole = format!("<{root}><name>s</name>{one}</{root}>");
        let error = read(Source::new("vm", whole), Surroundings::default()).unwrap_err();
        assert!(error.problem.contains(root), "{error}");
    }
    // Several domains in one file are served as before.
    assert_eq!(input("vm", &format!("<all>{one}{one}</all>")).vms.len(), 2);
}

/// A change that Proxmox makes at the next start may affect the same disk, or use its new name.
#[test]
fn pending_disk_changes_prevent_fixes() {
    let conf = "boot: order=sata0\nostype: l26\nsata0: local:107/vm-107-disk-0.raw,size=10G\n";
    for pending in [
        "scsi0: local:107/vm-107-disk-1.raw",
        "scsihw: lsi",
        "boot: order=sata0;net0",
        "delete: sata0",
        "sata0: local:107/vm-107-disk-0.raw,cache=writeback",
    ] {
        let text = format!("{conf}\n[PENDING]\n{pending}\n\n[before]\nscsi1: local:a\n");
        let fixed = self::fixed(&text);
        assert_eq!(self::text(&fixed), text);
        assert!(
            fixed.left[0].reason.contains("[PENDING]"),
            "{:?}",
            fixed.left
        );
    }
    let other = format!("{conf}\n[PENDING]\nmemory: 4096\n\n[before]\nscsi1: local:a\n");
    assert!(text(&fixed(&other)).contains("scsi0: local:107"));
}

/// Disks that move together change the controller once.
#[test]
fn controller_is_written_once() {
    let conf = "boot: order=sata0\nostype: l26\nsata0: local:a\nsata1: local:b\nsata2: local:c\n";
    let fixed = self::fixed(conf);
    let now = text(&fixed);
    assert_eq!(now.matches("scsihw:").count(), 1, "{now}");
    for disk in ["scsi0: local:a", "scsi1: local:b", "scsi2: local:c"] {
        assert!(now.contains(disk), "{now}");
    }
}

/// Only machine types that are known to have virtio on PCI get a PCI device.
#[test]
fn vms_without_pci_get_no_pci_device() {
    for program in ["qemu-system-s390x", "/usr/bin/qemu-system-m68k -M virt"] {
        let line = format!(
            "{program} -accel kvm -m 1G -drive file=/dev/vg0/a,if=virtio,format=raw,cache=none,aio=native,discard=unmap\n"
        );
        assert!(!text(&fixed(&line)).contains("virtio-blk-pci"));
    }
}

/// A new disk on the PCI bus may move the devices after it; the message says so.
#[test]
fn changed_pci_addresses_are_reported() {
    let line = "qemu-system-x86_64 -accel kvm -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap \
                -device ide-hd,drive=a -netdev user,id=n -device virtio-net-pci,netdev=n\n";
    let fixed = fixed(line);
    let told = fixed.done.iter().filter_map(|done| done.unknown.as_ref());
    assert!(
        told.clone().any(|told| told.text.contains("network cards")),
        "{:?}",
        fixed.done
    );
}
