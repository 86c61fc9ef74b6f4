//! What a change depends on: what is known to forbid it, and what neither the input nor the facts say. A VM that starts today
//! must also start after a fix, and its data must be as safe.

use crate::facts::Facts;
use crate::input::Kind;
use crate::setting::Setting;
use crate::target::Target;
use crate::version::Version;

/// Since this version, Linux serves direct writes to files with checksums on btrfs through the page cache (commit
/// 968f19c5b1b7).
const BTRFS_BUFFERS: Version = Version(6, 15, 0);

/// What the input and the facts leave open, and on which a change depends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Continues "unknown", as in "unknown whether …".
    pub text: String,
    /// Whether the wrong answer harms a VM that runs: its data, its speed, or it hangs. Such a change is made only if the
    /// user names its rule. Otherwise, the VM does not start at worst, which shows at once.
    pub may_harm: bool,
}

impl Question {
    fn start(text: String) -> Self {
        let may_harm = false;
        Self { text, may_harm }
    }

    fn harm(text: String) -> Self {
        let may_harm = true;
        Self { text, may_harm }
    }
}

/// The question on which the settings of one change depend; none if the input and the facts answer it.
///
/// # Errors
/// The reason why a setting is known to be wrong here.
pub fn of(
    target: &Target<'_>,
    settings: &[Setting],
    facts: Option<&Facts>,
) -> Result<Option<Question>, String> {
    let mut open: Vec<Question> = Vec::new();
    for setting in settings {
        open.extend(of_setting(target, *setting, facts)?);
    }
    let may_harm = open.iter().any(|question| question.may_harm);
    let texts: Vec<String> = open.into_iter().map(|question| question.text).collect();
    let text = texts.join("; ");
    Ok((!text.is_empty()).then_some(Question { text, may_harm }))
}

fn of_setting(
    target: &Target<'_>,
    setting: Setting,
    facts: Option<&Facts>,
) -> Result<Vec<Question>, String> {
    let question = match setting {
        Setting::Cache("none" | "directsync") | Setting::CacheDirect => {
            return direct(target, facts);
        }
        Setting::Aio("io_uring") => return io_uring(target, facts),
        Setting::OwnThread | Setting::DefineThread | Setting::EvenMapping => {
            return hang(target, target_aio(target) == Some("io_uring"), true);
        }
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
    };
    Ok(question.map(Question::start).into_iter().collect())
}

/// Whether the disk's storage is safe with O_DIRECT, supports it, and gains by it.
fn direct(target: &Target<'_>, facts: Option<&Facts>) -> Result<Vec<Question>, String> {
    let disk = target.disk()?;
    let (table, file) = (&disk.table, &disk.file);
    let mut open = Vec::new();
    if target.input.kind == Kind::Ringdisk {
        return Ok(open);
    }
    let is_direct = table.word("disk.direct") == Some("yes");
    match table.word("disk.protocol") {
        // Its cache mode does not change whether the page cache has the data.
        _ if is_direct => return Ok(open),
        Some("rbd") => open.extend(media(target, facts)),
        Some("block") => {}
        _ => {
            if let Some(risk) = checksums(target, facts)? {
                open.push(Question::harm(risk));
            }
            if !table.is_yes("backing.direct") {
                open.push(Question::start(format!(
                    "whether the file system of {file} supports O_DIRECT: otherwise the VM does not start"
                )));
            }
        }
    }
    Ok(open)
}

/// Whether the file system computes checksums of pages that the guest may change while they are written.
fn checksums(target: &Target<'_>, facts: Option<&Facts>) -> Result<Option<String>, String> {
    let disk = target.disk()?;
    let (table, file) = (&disk.table, &disk.file);
    let host = facts.map(Facts::table);
    let version = |name: &str| host.as_ref().and_then(|host| host.version(name));
    let btrfs = "the guest changes pages while O_DIRECT writes them, and then reads fail with checksum errors";
    let zfs = "VMs with O_DIRECT on OpenZFS 2.3 and later have failed with I/O errors and crashed until \
               `zfs set direct=disabled DATASET` (openzfs issue 18610)";
    let kernel = version("host.kernel");
    Ok(match table.word("backing.fs") {
        Some("btrfs") if table.is_yes("backing.no-cow") => None,
        Some("btrfs") if kernel.is_some_and(|kernel| kernel >= BTRFS_BUFFERS) => None,
        Some("btrfs") if table.word("backing.no-cow") == Some("no") => {
            return Err(format!(
                "{file} is on btrfs with copy-on-write: {btrfs}; copy it to a file with chattr +C first"
            ));
        }
        Some("btrfs") => Some(format!(
            "whether {file} is exempt from copy-on-write (chattr +C): otherwise {btrfs}"
        )),
        Some("zfs") if version("host.zfs").is_some_and(|zfs| zfs < Version(2, 3, 0)) => None,
        Some("zfs") if table.word("backing.zfs-direct") == Some("disabled") => None,
        Some("zfs") => Some(format!(
            "whether direct I/O is safe on the file system of {file}: {zfs}"
        )),
        Some(_) => None,
        None => Some(format!(
            "whether {file} is on a file system with checksums: on btrfs with copy-on-write, {btrfs}; {zfs}"
        )),
    })
}

/// Whether the cluster's media gain without librbd's cache.
fn media(target: &Target<'_>, facts: Option<&Facts>) -> Option<Question> {
    let table = &target.disk().ok()?.table;
    let ceph = facts.map(Facts::table);
    let word = |name: &str| ceph.as_ref().and_then(|ceph| ceph.word(name));
    let is_known = word("ceph.media").is_some() || word("ceph.rbd-cache") == Some("no");
    (table.word("disk.cache") == Some("writeback") && !is_known).then(|| {
        Question::harm(
            "which media the cluster has: on hard disks, librbd's cache merges small writes, and without it they are \
             much slower; add \"ceph\": {\"media\": \"ssd\"} or \"hdd\" to the facts"
                .into(),
        )
    })
}

/// Whether the kernel and QEMU support io_uring, and are safe with it.
fn io_uring(target: &Target<'_>, facts: Option<&Facts>) -> Result<Vec<Question>, String> {
    let (vm, disk) = (target.vm()?, target.disk()?);
    let host = facts.map(Facts::table);
    if vm.table.is_yes("vm.rhel") {
        return Err(
            "Red Hat's QEMU is reported to have no io_uring (\"invalid aio option\")".into(),
        );
    }
    if vm.table.word("vm.front-end") == Some("proxmox")
        && disk.table.word("disk.storage") == Some("lvm")
    {
        return Err("Proxmox does not use io_uring on LVM, because requests hung".into());
    }
    let allowed = host.as_ref().and_then(|host| host.word("host.io-uring"));
    if allowed == Some("root") && vm.table.word("vm.front-end") == Some("libvirt") {
        return Err(
            "kernel.io_uring_disabled = 1 reserves io_uring for privileged processes, and libvirt's QEMU is not one"
                .into(),
        );
    }
    let mut unknown = Vec::new();
    if allowed != Some("on") {
        unknown.push("the host's kernel allows QEMU to use io_uring");
    }
    if qemu(target).is_none_or(|version| version < Version(5, 0, 0)) {
        unknown.push("QEMU is 5.0 or newer and built with io_uring");
    }
    let mut open = hang(target, true, !disk.threads.is_empty())?;
    if !unknown.is_empty() {
        open.push(Question::start(format!(
            "whether {}: otherwise the VM does not start",
            unknown.join(", and ")
        )));
    }
    Ok(open)
}

fn target_aio<'a>(target: &Target<'a>) -> Option<&'a str> {
    target.disk().ok()?.table.word("disk.aio")
}

/// Whether QEMU is 7.1, in which disks with io_uring and an I/O thread hang. Proxmox chose this combination itself.
fn hang(target: &Target<'_>, with_uring: bool, with_thread: bool) -> Result<Vec<Question>, String> {
    let vm = target.vm()?;
    let is_proxmox = vm.table.word("vm.front-end") == Some("proxmox");
    if !with_uring || !with_thread || is_proxmox {
        return Ok(Vec::new());
    }
    let broken = Version(7, 1, 0)..Version(7, 2, 0);
    match vm.table.version("vm.qemu") {
        Some(version) if broken.contains(&version) => Err(format!(
            "in QEMU {version}, disks with io_uring and an I/O thread hang (qemu issue 1193)"
        )),
        Some(_) => Ok(Vec::new()),
        // The machine type proves a newer QEMU.
        None if qemu(target).is_some_and(|machine| machine >= broken.end) => Ok(Vec::new()),
        None => Ok(vec![Question::harm(
            "whether QEMU is another version than 7.1, in which disks with io_uring and an I/O thread hang".into(),
        )]),
    }
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
