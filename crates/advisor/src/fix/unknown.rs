//! What a change depends on that neither the input nor the facts say: a VM that starts today must also start after a fix.

use crate::facts::Facts;
use crate::input::Kind;
use crate::setting::Setting;
use crate::target::Target;
use crate::version::Version;

/// What the settings of one change depend on; none if the input and the facts answer it.
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
            let guest = "whether the guest has virtio drivers in its initramfs, and finds its file systems by UUID or \
                         label: its disk gets another name, and without a driver the guest does not boot";
            // A device takes the next free slot of the PCI bus.
            let slots = "; and whether it identifies its network cards by MAC address: devices after the disk on the \
                         command line may get other PCI addresses, and therefore other names";
            let more = match target.input.kind {
                Kind::Qemu => slots,
                _ => "",
            };
            Some(format!("{guest}{more}"))
        }
        Setting::SingleController => Some(
            "whether the guest finds its file systems by UUID or label: the addresses of its disks change".into(),
        ),
        Setting::Reconnect if reconnect_in_ms(target) => Some(
            "whether QEMU is 9.2 or newer: older versions do not support reconnect-ms, and do not start".into(),
        ),
        _ => None,
    }
}

/// Whether the disk's storage supports O_DIRECT. Block devices do; RBD does not need it.
fn direct(target: &Target<'_>) -> Option<String> {
    let disk = target.disk().ok()?;
    let table = &disk.table;
    let is_known = match table.word("disk.protocol") {
        Some("block" | "rbd") => true,
        _ => table.word("disk.direct") == Some("yes") || table.is_yes("backing.direct"),
    };
    (!is_known && target.input.kind != Kind::Ringdisk).then(|| {
        format!(
            "whether the file system of {} supports O_DIRECT: otherwise the VM does not start",
            disk.file
        )
    })
}

/// Whether the kernel and QEMU support io_uring.
fn io_uring(target: &Target<'_>, facts: Option<&Facts>) -> Option<String> {
    let host = facts.map(Facts::table);
    let mut unknown = Vec::new();
    if host.and_then(|host| host.word("host.io-uring").map(|word| word == "on")) != Some(true) {
        unknown.push("the host's kernel allows QEMU to use io_uring");
    }
    if qemu(target).is_none_or(|version| version < Version(5, 0, 0)) {
        unknown.push("QEMU is 5.0 or newer and built with io_uring");
    }
    (!unknown.is_empty()).then(|| {
        format!(
            "whether {}: otherwise the VM does not start",
            unknown.join(", and ")
        )
    })
}

/// Whether the fix writes `reconnect-ms` although QEMU may be too old for it.
fn reconnect_in_ms(target: &Target<'_>) -> bool {
    let known = target
        .vm()
        .is_ok_and(|vm| vm.table.version("vm.qemu").is_some());
    target.input.kind == Kind::Qemu
        && !known
        && qemu(target).is_none_or(|version| version < Version(9, 2, 0))
}

/// The known lower bound of QEMU's version: the version itself, or that of the machine type.
fn qemu(target: &Target<'_>) -> Option<Version> {
    let table = &target.vm().ok()?.table;
    let machine = table.version("vm.machine-version");
    table.version("vm.qemu").max(machine)
}
