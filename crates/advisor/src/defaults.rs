//! QEMU's defaults by its version and the version of the machine type, for every front-end.

use std::collections::HashMap;

use crate::model::{Data, Disk, Origin, Table, Thread, Value, Vm};
use crate::version::Version;

/// Since this machine type, `num-queues` is the number of vCPUs; before, 1 (QEMU, `hw_compat_5_1`).
const QUEUES_AUTO: Version = Version(5, 2, 0);

/// Since this machine type, a queue has 256 descriptors; before, 128 (QEMU, `hw_compat_4_2`).
const QUEUE_SIZE_256: Version = Version(5, 0, 0);

/// The maximum memory that QEMU uses for an image's L2 tables by default (docs/qcow2-cache.txt).
pub const L2_CACHE_MAX: u64 = 32 << 20;

/// Sets defaults, and properties that follow from others.
pub fn fill(vm: &mut Vm) {
    vm.table.default_to("vm.memory-shared", false, "QEMU");
    vm.table.default_to("vm.hugepages", false, "QEMU");
    vm.table.default_to("vm.cpu-x2apic", "on", "KVM");
    vm.table.default_to("vm.cpu-pv-eoi", "on", "KVM");
    vm.table.default_to("vm.vcpus", 1u64, "QEMU");
    if matches!(vm.table.word("vm.machine"), Some("pc" | "q35")) {
        vm.table.default_to("vm.cpu-model", "qemu64", "QEMU");
    }
    match vm.table.word("vm.accel") {
        _ if vm.table.get("vm.host").is_some() => {}
        Some("kvm" | "xen") => vm.table.derive("vm.host", "linux", "from the accelerator"),
        Some("hvf") => vm.table.derive("vm.host", "other", "from the accelerator"),
        _ => {}
    }
    let machine = vm.table.version("vm.machine-version");
    let name = vm.table.word("vm.machine").unwrap_or_default();
    let ccw = name.starts_with("s390");
    let vcpus = vm.table.number("vm.vcpus");
    for disk in &mut vm.disks {
        fill_disk(disk, machine, ccw, vcpus);
        limits(disk);
    }
    threads(vm);
    let busy = |disk: &&Disk| matches!(disk.table.word("disk.device"), Some("disk" | "lun"));
    let busy_disks = vm.disks.iter().filter(busy).count();
    let virtio = vm.disks.iter().filter(busy).filter(|disk| {
        matches!(
            disk.table.word("disk.bus"),
            Some("virtio-blk" | "virtio-scsi")
        )
    });
    let virtio_disks = virtio.count();
    let is_served = |disk: &&Disk| {
        let bus = disk.table.word("disk.bus").unwrap_or_default();
        bus.starts_with("vhost-user")
    };
    let served_disks = vm.disks.iter().filter(busy).filter(is_served).count();
    let queues: u64 = vm
        .disks
        .iter()
        .filter_map(|disk| disk.table.number("disk.queues"))
        .fold(0, u64::saturating_add);
    vm.table
        .derive("vm.busy-disks", busy_disks, "counted in the input");
    vm.table
        .derive("vm.virtio-disks", virtio_disks, "counted in the input");
    let own_disks = busy_disks - served_disks;
    vm.table
        .derive("vm.own-disks", own_disks, "counted in the input");
    let rbd = vm
        .disks
        .iter()
        .filter(|disk| disk.table.word("disk.protocol") == Some("rbd"));
    let rbd = rbd.count();
    vm.table.derive("vm.rbd-disks", rbd, "counted in the input");
    vm.table
        .derive("vm.virtqueues", queues, "counted in the input");
    hide(vm);
}

/// The least limits of a disk, of any direction.
fn limits(disk: &mut Disk) {
    for (name, of_requests) in [("disk.limit-iops", true), ("disk.limit-bytes", false)] {
        let rates = disk.carried.limits.iter();
        let least = rates
            .filter(|(limit, _)| limit.is_rate() && limit.is_of_requests() == of_requests)
            .map(|(_, rate)| *rate)
            .min();
        if let Some(least) = least {
            disk.table.derive(name, least, "the least of its limits");
        }
    }
}

/// Whether this QEMU has deleted its machine type: since 10.1, a versioned type exists for six major versions
/// (`MACHINE_VER_DELETION`). Distributions' own types do not follow this rule.
pub fn removed_machine(vm: &mut Vm) {
    let table = &mut vm.table;
    let (Some(machine), Some(qemu), true) = (
        table.version("vm.machine-version"),
        table.version("vm.qemu"),
        table.is_yes("vm.machine-numbered"),
    ) else {
        return;
    };
    let oldest = Version(qemu.0.saturating_sub(6), qemu.1, 0);
    let is_removed = qemu >= Version(10, 1, 0) && Version(machine.0, machine.1, 0) <= oldest;
    table.derive("vm.machine-removed", is_removed, "from QEMU's version");
}

/// Marks assumptions about a VM or a disk as unknown if a shell variable may contain more options.
fn hide(vm: &mut Vm) {
    let why = "a shell variable may contain more options";
    if vm.may_have_more {
        vm.table.hide_assumed(why);
    }
    let is_known = |value: Option<&Value>| value.is_some_and(|value| value.data != Data::Unknown);
    let machine =
        is_known(vm.table.get("vm.machine")) || vm.table.word("vm.front-end") != Some("qemu");
    for disk in &mut vm.disks {
        let is_default = |table: &Table, name| {
            matches!(
                table.get(name),
                Some(Value {
                    origin: Origin::Default(_),
                    ..
                })
            )
        };
        for name in ["disk.bus", "disk.queues", "disk.queue-size"] {
            if (vm.may_have_more || !machine) && is_default(&disk.table, name) {
                disk.table.hide(name, why);
            }
        }
        if vm.may_have_more && disk.table.get("disk.thread-missing").is_some() {
            disk.table.remove("disk.thread-missing");
            disk.table.hide("disk.threads", why);
        }
        if disk.may_have_more {
            disk.table.hide_assumed(why);
        }
    }
}

fn fill_disk(disk: &mut Disk, machine: Option<Version>, ccw: bool, vcpus: Option<u64>) {
    let table = &mut disk.table;
    table.default_to("disk.device", "disk", "QEMU");
    table.default_to("disk.readonly", false, "QEMU");
    if is_cd(&disk.file) {
        table.derive("disk.iso", true, "from its name");
    }
    let bus = table.word("disk.bus").unwrap_or("other").to_owned();
    let vhost_user = bus.starts_with("vhost-user");
    if vhost_user && disk.file.contains("/ringdisk/") {
        table.derive("disk.ringdisk-socket", true, "from its socket's path");
    }
    let local = !vhost_user && bus != "pass-through" && table.word("disk.protocol").is_some();
    if local {
        table.default_to("disk.format", "raw", "QEMU");
        table.default_to("disk.cache", "writeback", "QEMU");
        table.default_to("disk.discard", "ignore", "QEMU");
        table.default_to("disk.detect-zeroes", "off", "QEMU");
        let how = "follows from the cache mode";
        match table.word("disk.cache").map(str::to_owned) {
            Some(cache) => {
                let direct = matches!(cache.as_str(), "none" | "directsync");
                table.derive("disk.direct", direct, how);
                table.derive("disk.flush", cache != "unsafe", how);
            }
            None => {
                table.hide("disk.direct", how);
                table.hide("disk.flush", how);
            }
        }
        // Only these two of QEMU's protocols have an aio option.
        if matches!(table.word("disk.protocol"), Some("file" | "block")) {
            table.default_to("disk.aio", "threads", "QEMU");
        }
    }
    if table.word("disk.protocol") == Some("rbd") {
        table.default_to("disk.raw-layer", "yes", "QEMU");
    }
    if matches!(bus.as_str(), "virtio-blk" | "virtio-scsi") || vhost_user {
        match machine {
            // Only PCI devices have a queue per vCPU.
            _ if ccw => table.default_to("disk.queues", 1u64, "QEMU for virtio-ccw"),
            Some(version) if version < QUEUES_AUTO => {
                table.default_to("disk.queues", 1u64, "machine types before 5.2");
            }
            _ => {
                let queues = vcpus.map_or(Data::Unknown, Data::Number);
                table.default_to("disk.queues", queues, "QEMU since 5.2: one per vCPU");
            }
        }
        match machine {
            _ if vhost_user => {
                table.default_to("disk.queue-size", 128u64, "QEMU for vhost-user-blk");
            }
            Some(version) if version < QUEUE_SIZE_256 => {
                table.default_to("disk.queue-size", 128u64, "machine types before 5.0");
            }
            _ => table.default_to("disk.queue-size", 256u64, "QEMU since 5.0"),
        }
        table.default_to("disk.ioeventfd", true, "QEMU");
    } else if table.get("disk.queues").is_some() {
        table.derive("disk.queues-inert", true, "this device has no such queues");
    }
}

/// Whether a file is the image of a CD, such as an installer's or cloud-init's.
fn is_cd(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
    let is_seed = ["cidata", "cloud-init", "cloudinit"]
        .iter()
        .any(|seed| name.contains(seed));
    name.ends_with(".iso") || is_seed
}

/// Determines which I/O threads serve which disks, and errors in the configuration.
fn threads(vm: &mut Vm) {
    let defined: Vec<String> = vm.threads.iter().map(|thread| thread.id.clone()).collect();
    let mut used = vec![0u64; defined.len()];
    let effective = |disk: &Disk| {
        matches!(
            disk.table.word("disk.bus"),
            Some("virtio-blk" | "virtio-scsi")
        ) && !disk.table.is_yes("disk.thread-ignored")
    };
    let mut places: HashMap<&str, usize> = HashMap::new();
    for (place, id) in defined.iter().enumerate() {
        places.entry(id).or_insert(place);
    }
    let place = |id: &str| places.get(id).copied();
    for disk in vm.disks.iter().filter(|disk| effective(disk)) {
        let mut places: Vec<_> = disk.threads.iter().filter_map(|u| place(&u.id)).collect();
        places.sort_unstable();
        places.dedup();
        places.into_iter().for_each(|place| used[place] += 1);
    }
    for disk in &mut vm.disks {
        let is_effective = effective(disk);
        let table = &mut disk.table;
        let virtio = matches!(table.word("disk.bus"), Some("virtio-blk" | "virtio-scsi"));
        if !disk.threads.is_empty() && !virtio {
            table.derive(
                "disk.thread-ignored",
                true,
                "only virtio-blk and virtio-scsi have I/O threads",
            );
        }
        if !virtio {
            continue;
        }
        let mut ids: Vec<_> = disk.threads.iter().map(|u| u.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        let known: Vec<_> = ids.iter().filter_map(|id| place(id)).collect();
        let count = if is_effective { known.len() } else { 0 };
        table.derive("disk.threads", count, "counted in the input");
        if let Some(sharers) = known.iter().map(|&place| used[place]).max()
            && is_effective
        {
            table.derive("disk.thread-disks", sharers, "counted in the input");
        }
        if let Some(missing) = disk.threads.iter().find(|u| place(&u.id).is_none()) {
            table.give("disk.thread-missing", missing.id.clone(), missing.span);
        }
        let single = disk.threads.iter().find(|u| !u.is_mapped);
        if let Some(single) = single
            && disk.threads.iter().any(|u| u.is_mapped)
        {
            table.give("disk.thread-twice", true, single.span);
        }
        if let Some(problem) = mapping_problem(disk) {
            let span = disk.threads.first().map_or(disk.span, |first| first.span);
            disk.table.give("disk.mapping-problem", problem, span);
        }
    }
    let elsewhere = |thread: &Thread| vm.threads_elsewhere.contains(&thread.id);
    let unused: Vec<&Thread> = vm
        .threads
        .iter()
        .zip(&used)
        .filter(|(thread, disks)| **disks == 0 && !elsewhere(thread))
        .map(|(thread, _)| thread)
        .collect();
    vm.table
        .derive("vm.threads-defined", defined.len(), "counted in the input");
    match unused.first() {
        // An option in a shell variable may use it.
        _ if vm.may_have_more => vm.table.hide(
            "vm.threads-unused",
            "a shell variable may contain more options",
        ),
        Some(thread) => vm
            .table
            .give("vm.threads-unused", unused.len(), thread.span),
        None => vm
            .table
            .derive("vm.threads-unused", 0u64, "counted in the input"),
    }
}

/// The reason why QEMU would refuse a mapping of queues to threads.
fn mapping_problem(disk: &Disk) -> Option<String> {
    let mapped: Vec<_> = disk.threads.iter().filter(|u| u.is_mapped).collect();
    let named: Vec<_> = mapped.iter().filter_map(|u| u.queues.as_ref()).collect();
    if named.is_empty() {
        return None;
    }
    if named.len() < mapped.len() {
        return Some("only some of its threads name queues".into());
    }
    let queues = disk.table.number("disk.queues")?;
    let mut all: Vec<u64> = named.into_iter().flatten().copied().collect();
    all.sort_unstable();
    if let Some(twice) = all.windows(2).find(|pair| pair[0] == pair[1]) {
        return Some(format!("queue {} is named twice", twice[0]));
    }
    if let Some(over) = all.iter().find(|&&queue| queue >= queues) {
        return Some(format!(
            "queue {over} does not exist; the last queue is {}",
            queues.saturating_sub(1)
        ));
    }
    // The queues are sorted and unique: the first one that does not match its index reveals the missing queue.
    let missing = (0..queues.min(all.len() as u64 + 1))
        .find(|&queue| all.get(queue as usize) != Some(&queue));
    missing.map(|queue| format!("no thread serves queue {queue}"))
}

/// The size of all L2 tables of a qcow2 image: 8 bytes per cluster, 16 with subclusters.
pub fn l2_needed(virtual_size: u64, cluster_size: u64, subclusters: bool) -> u64 {
    let entry = if subclusters { 16 } else { 8 };
    virtual_size
        .div_ceil(cluster_size.max(512))
        .saturating_mul(entry)
}

/// Determines whether the cache holds all L2 tables of the image.
pub fn l2_cache(disk: &mut Disk) {
    let table = &mut disk.table;
    let (Some("qcow2"), Some(size), Some(cluster)) = (
        table.word("disk.format"),
        table.number("backing.qcow2-virtual-size"),
        table.number("backing.qcow2-cluster-size"),
    ) else {
        return;
    };
    let needed = l2_needed(size, cluster, table.is_yes("backing.qcow2-subclusters"));
    let cache = match table.get("disk.l2-cache-size").map(|value| &value.data) {
        Some(Data::Number(bytes)) => *bytes,
        _ => L2_CACHE_MAX,
    };
    let how = "from its size and its clusters";
    table.derive("backing.qcow2-l2-needed", needed, how);
    table.derive("backing.qcow2-l2-short", cache < needed, how);
}
