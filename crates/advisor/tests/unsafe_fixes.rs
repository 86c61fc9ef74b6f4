//! Fixes that would harm: each is left, with the reason, unless the facts answer its question or the user names its rule.

use advisor::check::check;
use advisor::facts::Facts;
use advisor::fix::{Fixed, Remedy, Wanted, fix};
use advisor::input::{Input, Surroundings};
use advisor::read::read;
use advisor::rules::Rules;
use advisor::text::Source;

fn facts(rest: &str) -> Facts {
    let text = format!("{{\"format\":\"ringdisk-facts-1\",\"name\":\"h\",{rest}}}");
    let (facts, notes) = Facts::parse("facts.json", &text).unwrap();
    assert_eq!(notes, Vec::<String>::new());
    facts
}

fn domain(machine: &str, emulator: &str, driver: &str) -> String {
    format!(
        "<domain type='kvm'><name>vm</name><memory unit='GiB'>1</memory><vcpu>2</vcpu>
<os><type arch='x86_64' machine='{machine}'>hvm</type></os><devices>{emulator}
<disk type='file' device='disk'><driver name='qemu' {driver}/><source file='/vms/a.img'/><target dev='vda' bus='virtio'/></disk>
</devices></domain>\n"
    )
}

fn proxmox(disk: &str) -> Input {
    let storages = "rbd: ceph\n\tpool vm\n\tkrbd 0\n\nlvm: san\n\tvgname vg\n";
    let surroundings = Surroundings {
        storages: Some(Source::new("storage.cfg", storages)),
        ..Surroundings::default()
    };
    let text = format!(
        "boot: order=scsi0\ncores: 2\ncpu: host\nmemory: 1024\nname: a\nostype: l26\nscsi0: {disk}\nscsihw: virtio-scsi-single\n"
    );
    read(Source::new("101.conf", text), surroundings).unwrap()
}

fn xml(text: &str) -> Input {
    read(Source::new("vm.xml", text), Surroundings::default()).unwrap()
}

fn fixed(input: Input, facts: Option<&Facts>, also: &[&str]) -> Fixed {
    let rules = Rules::built_in().unwrap();
    let also: Vec<String> = also.iter().map(|rule| (*rule).to_owned()).collect();
    let wanted = Wanted {
        also: &also,
        ..Wanted::default()
    };
    fix(input, &rules, facts, wanted).unwrap()
}

fn text(fixed: &Fixed) -> &str {
    &fixed.input.sources[0].text
}

fn reason(fixed: &Fixed, rule: &str) -> String {
    let left = fixed.left.iter().find(|left| left.rule == rule);
    left.map(|left| left.reason.clone()).unwrap_or_default()
}

/// Whether `check` promises a fix of this rule.
fn promises(mut input: Input, facts: Option<&Facts>, rule: &str) -> bool {
    let rules = Rules::built_in().unwrap();
    let checked = check(&mut input, &rules, facts, &[]);
    let mut found = checked.findings.iter().filter(|it| it.rule == rule);
    found.any(|finding| finding.remedy == Remedy::Fix)
}

#[test]
fn direct_io_is_not_written_for_file_systems_with_checksums() {
    let buffered = domain("pc-q35-8.2", "", "type='qcow2' discard='unmap'");
    for (host, file, says) in [
        ("", None, "checksum errors"),
        (
            "\"zfs\":\"2.3.1\"",
            Some("\"fs\":\"zfs\",\"direct\":true"),
            "direct=disabled",
        ),
        ("", Some("\"fs\":\"zfs\",\"direct\":true"), "OpenZFS 2.3"),
    ] {
        let file = file.map_or(String::new(), |file| format!("\"/vms/a.img\":{{{file}}}"));
        let facts = facts(&format!("\"host\":{{{host}}},\"files\":{{{file}}}"));
        let left = fixed(xml(&buffered), Some(&facts), &[]);
        assert!(!text(&left).contains("cache='none'"), "{}", text(&left));
        let reason = reason(&left, "cache-host-page");
        assert!(
            reason.contains(says) && reason.contains("--fix-rule"),
            "{reason}"
        );
        assert!(!promises(xml(&buffered), Some(&facts), "cache-host-page"));
        let named = fixed(xml(&buffered), Some(&facts), &["cache-host-page"]);
        assert!(text(&named).contains("cache='none'"), "{}", text(&named));
        assert!(named.done[0].unknown.is_some());
    }
    for (host, file) in [
        ("", "\"fs\":\"xfs\",\"direct\":true"),
        ("\"zfs\":\"2.2.7\"", "\"fs\":\"zfs\",\"direct\":true"),
        (
            "\"zfs\":\"2.3.1\"",
            "\"fs\":\"zfs\",\"direct\":true,\"zfs-direct\":\"disabled\"",
        ),
    ] {
        let facts = facts(&format!(
            "\"host\":{{{host}}},\"files\":{{\"/vms/a.img\":{{{file}}}}}"
        ));
        let done = fixed(xml(&buffered), Some(&facts), &[]);
        assert!(text(&done).contains("cache='none'"), "{file}");
        assert!(promises(xml(&buffered), Some(&facts), "cache-host-page"));
    }
    // A change that is known to harm is not made at all.
    let native = domain("pc-q35-8.2", "", "type='raw' cache='writeback' io='native'");
    let btrfs = facts(
        "\"host\":{\"kernel\":\"6.8.0\"},\"files\":{\"/vms/a.img\":{\"fs\":\"btrfs\",\"no-cow\":false,\"direct\":true}}",
    );
    let left = fixed(xml(&native), Some(&btrfs), &["aio-native-buffered"]);
    assert!(!text(&left).contains("cache='none'"), "{}", text(&left));
    assert!(reason(&left, "aio-native-buffered").contains("checksum errors"));
    let direct = domain("pc-q35-8.2", "", "type='raw' cache='none' io='io_uring'");
    let mended = fixed(xml(&direct), Some(&btrfs), &[]);
    assert!(
        text(&mended).contains("cache='writeback'"),
        "{}",
        text(&mended)
    );
}

#[test]
fn io_uring_is_not_written_where_it_fails_or_hangs() {
    let threads = "type='raw' cache='none' io='threads' discard='unmap'";
    let on = facts("\"host\":{\"io-uring\":\"on\"}");
    let known = fixed(xml(&domain("pc-q35-8.2", "", threads)), Some(&on), &[]);
    assert!(text(&known).contains("io='io_uring'"));
    let rhel = "<emulator>/usr/libexec/qemu-kvm</emulator>";
    for (machine, emulator) in [("pc-q35-rhel9.4.0", ""), ("q35", rhel)] {
        let done = fixed(xml(&domain(machine, emulator, threads)), Some(&on), &[]);
        assert!(!text(&done).contains("io_uring"), "{}", text(&done));
    }
    let root = facts("\"host\":{\"io-uring\":\"root\"}");
    let done = fixed(xml(&domain("pc-q35-8.2", "", threads)), Some(&root), &[]);
    assert!(!text(&done).contains("io_uring"), "{}", text(&done));
    // With an I/O thread, QEMU 7.1 hangs.
    let uring = domain(
        "pc-q35-6.2",
        "",
        "type='raw' cache='none' io='io_uring' discard='unmap'",
    );
    for (version, says) in [("7.1.0", "hang"), ("7.2.0", ""), ("7.0.0", "")] {
        let facts = facts(&format!(
            "\"host\":{{\"io-uring\":\"on\",\"qemu\":\"{version}\"}}"
        ));
        let done = fixed(xml(&uring), Some(&facts), &[]);
        assert_eq!(
            text(&done).contains("iothread='1'"),
            says.is_empty(),
            "{version}"
        );
        assert!(reason(&done, "no-iothread").contains(says), "{version}");
    }
    let asked = fixed(xml(&uring), Some(&on), &[]);
    assert!(reason(&asked, "no-iothread").contains("7.1"));
    // Proxmox uses native on LVM in every cache mode.
    let lvm = fixed(
        proxmox("san:vm-1-disk-0,aio=io_uring,cache=writeback,discard=on,iothread=1,size=8G"),
        None,
        &[],
    );
    assert!(
        text(&lvm).contains("aio=native,cache=none"),
        "{}",
        text(&lvm)
    );
}

#[test]
fn librbds_cache_stays_on_while_the_media_are_unknown() {
    let disk = "ceph:vm-1-disk-0,cache=writeback,discard=on,iothread=1,size=8G";
    let left = fixed(proxmox(disk), None, &[]);
    assert!(text(&left).contains("cache=writeback"));
    assert!(reason(&left, "rbd-cache").contains("which media"));
    let ssd = facts("\"ceph\":{\"media\":\"ssd\"}");
    let done = fixed(proxmox(disk), Some(&ssd), &[]);
    assert!(text(&done).contains("cache=none"), "{}", text(&done));
    let hdd = facts("\"ceph\":{\"media\":\"hdd\"}");
    let kept = fixed(proxmox(disk), Some(&hdd), &[]);
    assert!(text(&kept).contains("cache=writeback"));
    assert_eq!(kept.left, []);
}
