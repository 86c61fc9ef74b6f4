//! What a change depends on and nobody has said: a machine that starts today must not stay down because of advice.

use super::{Setting, Target};
use crate::facts::Facts;
use crate::input::Kind;
use crate::version::Version;

/// What the settings of one change depend on; none if the input and the facts say all of it.
pub fn of(target: &Target<'_>, settings: &[Setting], facts: Option<&Facts>) -> Option<String> {
    let unknown: Vec<String> = settings
        .iter()
        .filter_map(|setting| of_setting(target, *setting, facts))
        .collect();
    (!unknown.is_empty()).then(|| unknown.join("; "))
}

fn of_setting(target: &Target<'_>, setting: Setting, facts: Option<&Facts>) -> Option<String> {
    match setting {
        Setting::Cache("none" | "directsync") | Setting::CacheDirect => direct(target),
        Setting::Aio("io_uring") => io_uring(target, facts),
        Setting::Virtio => {
            let guest = "whether the guest has virtio drivers where it boots from, and finds its file systems by UUID or \
                         label: its disk gets another name, and without a driver the guest does not boot";
            // A device takes the next free slot of the PCI bus.
            let slots = "; and whether it knows its network cards by their MAC addresses: the devices behind the disk on \
                         the line may get other PCI addresses, and so other names";
            let more = match target.input.kind {
                Kind::Qemu => slots,
                _ => "",
            };
            Some(format!("{guest}{more}"))
        }
        Setting::SingleController => Some(
            "whether the guest finds its file systems by UUID or label: its disks get other addresses".into(),
        ),
        Setting::Reconnect if reconnect_in_ms(target) => Some(
            "whether QEMU is 9.2 or newer: an older one does not know reconnect-ms, and does not start".into(),
        ),
        _ => None,
    }
}

/// Whether what is behind a disk takes O_DIRECT. Block devices do; RBD needs none.
fn direct(target: &Target<'_>) -> Option<String> {
    let disk = target.disk().ok()?;
    let table = &disk.table;
    let is_known = match table.word("disk.protocol") {
        Some("block" | "rbd") => true,
        _ => table.word("disk.direct") == Some("yes") || table.is_yes("backing.direct"),
    };
    (!is_known && target.input.kind != Kind::Ringdisk).then(|| {
        format!(
            "whether the file system of {} supports O_DIRECT: otherwise the machine does not start",
            disk.file
        )
    })
}

/// Whether the kernel, QEMU and libvirt have io_uring.
fn io_uring(target: &Target<'_>, facts: Option<&Facts>) -> Option<String> {
    let host = facts.map(Facts::table);
    let mut unknown = Vec::new();
    if host.and_then(|host| host.word("host.io-uring").map(|word| word == "on")) != Some(true) {
        unknown.push("the host's kernel allows io_uring to QEMU");
    }
    if qemu(target).is_none_or(|version| version < Version(5, 0, 0)) {
        unknown.push("QEMU is 5.0 or newer and built with io_uring");
    }
    (!unknown.is_empty()).then(|| {
        format!(
            "whether {}: otherwise the machine does not start",
            unknown.join(", and ")
        )
    })
}

/// Whether `reconnect-ms` is written although QEMU may be older than that.
fn reconnect_in_ms(target: &Target<'_>) -> bool {
    let known = target
        .vm()
        .is_ok_and(|vm| vm.table.version("vm.qemu").is_some());
    target.input.kind == Kind::Qemu
        && !known
        && qemu(target).is_none_or(|version| version < Version(9, 2, 0))
}

/// The version of QEMU, as far as it is known; the machine type says at least how old it may be.
fn qemu(target: &Target<'_>) -> Option<Version> {
    let table = &target.vm().ok()?.table;
    let machine = table.version("vm.machine-version");
    table.version("vm.qemu").max(machine)
}
