//! libvirt domains (<https://libvirt.org/formatdomain.html>).

mod boot;
mod compared;
mod convert;
mod cputune;
mod driver;
mod edit;
mod guest;
pub mod metadata;
mod xml;

pub use compared::options_of_disks;
pub use convert::{from_ringdisk, to_ringdisk};
pub use edit::{Xml, count_threads, edits, keep_boot_order};

use std::collections::{HashMap, HashSet};

use roxmltree::{Attribute, Node};

use crate::input::{Mistake, Reading, THREADS_MAX};
use crate::model::carried::{Dialect, is_limit};
use crate::model::{Disk, Thread, Vm, is_device};
use crate::qemu::{describe_machine, is_red_hats};
use crate::text::Span;
use crate::work;
use driver::{driver, driver_queues, vhost_user_driver};
use xml::parse;

/// Models of SCSI controllers that emulate a PCI device, so that virtio-scsi can replace them.
pub const EMULATED_SCSI: &[&str] = &[
    "am53c974",
    "buslogic",
    "dc390",
    "lsilogic",
    "lsisas1068",
    "lsisas1078",
    "vmpvscsi",
];

/// Documents whose domain belongs to saved state, or that libvirt writes for its own use.
const STATES: &[(&str, &str)] = &[
    ("domainsnapshot", "a libvirt snapshot"),
    ("domaincheckpoint", "a libvirt checkpoint"),
    ("domstatus", "the state of a running domain"),
    ("qemu-migration", "the state of a migrating domain"),
];

/// Reads a domain, or all domains inside another element.
///
/// # Errors
/// The text is not XML, or contains no domain.
pub fn read(text: &str, name: &str, reading: &mut Reading) -> Result<(), Mistake> {
    let document = parse(text)?;
    let root = document.root_element();
    let domains: Vec<_> = root
        .descendants()
        .filter(|node| node.has_tag_name("domain") && !is_of_another(*node))
        .collect();
    if let Some((name, what)) = STATES
        .iter()
        .find(|(name, _)| domains.iter().any(|domain| is_inside(*domain, name)))
    {
        let problem = format!(
            "is <{name}>, {what}, whose domain must not change; check the output of 'virsh dumpxml --inactive'"
        );
        return Err(Mistake::new(root.range().start, problem));
    }
    if domains.is_empty() {
        let span = root.range();
        let problem = format!(
            "is XML, but <{}> contains no <domain>",
            root.tag_name().name()
        );
        return Err(Mistake::new(span.start, problem));
    }
    for node in document.descendants().filter(Node::is_comment) {
        reading.comment(node.text().unwrap_or_default(), span(node));
    }
    for node in domains {
        let vm = domain(node, name, reading);
        reading.vms.push(vm);
    }
    Ok(())
}

fn is_inside(node: Node<'_, '_>, name: &str) -> bool {
    node.ancestors()
        .skip(1)
        .any(|above| above.has_tag_name(name))
}

/// Whether a `<domain>` is part of another one, such as the metadata that another program stores there.
fn is_of_another(node: Node<'_, '_>) -> bool {
    is_inside(node, "domain") || is_inside(node, "metadata")
}

fn span(node: Node<'_, '_>) -> Span {
    let range = node.range();
    Span::new(0, range.start, range.end)
}

fn value_span(attribute: Attribute<'_, '_>) -> Span {
    let range = attribute.range_value();
    Span::new(0, range.start, range.end)
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    let mut children = node.children().inspect(|_| work::step());
    children.find(|node| node.has_tag_name(name))
}

/// The descendant at that path.
fn at<'a, 'i>(node: Node<'a, 'i>, path: &[&str]) -> Option<Node<'a, 'i>> {
    path.iter().try_fold(node, |node, name| child(node, name))
}

fn attribute<'a, 'i>(node: Option<Node<'a, 'i>>, name: &str) -> Option<(&'a str, Span)> {
    let attribute = node?.attribute_node(name)?;
    Some((attribute.value(), value_span(attribute)))
}

fn text<'a>(node: Node<'a, '_>) -> (&'a str, Span) {
    (node.text().unwrap_or_default().trim(), span(node))
}

fn domain(node: Node<'_, '_>, input: &str, reading: &mut Reading) -> Vm {
    let mut vm = Vm {
        name: child(node, "name")
            .map_or(input, |name| text(name).0)
            .to_owned(),
        span: span(node),
        ..Vm::default()
    };
    vm.table.give("vm.front-end", "libvirt", vm.span);
    let is_qemu = accelerator(node, &mut vm, reading);
    let table = &mut vm.table;
    if let Some(vcpu) = child(node, "vcpu") {
        // The maximum: QEMU sizes queues for it, not for `current`.
        let (count, at) = text(vcpu);
        match count.parse::<u64>() {
            Ok(count) if count > 0 => table.give("vm.vcpus", count, at),
            _ => reading.note(at, "invalid number of vCPUs"),
        }
    }
    cputune::read(node, &mut vm);
    let table = &mut vm.table;
    if let Some(memory) = child(node, "memory") {
        let (amount, at) = text(memory);
        match bytes(amount, memory.attribute("unit").unwrap_or("KiB")) {
            Some(bytes) => table.give("vm.memory", bytes, at),
            None => reading.note(at, "invalid amount of memory"),
        }
    }
    let os_type = self::at(node, &["os", "type"]);
    match (attribute(os_type, "machine"), attribute(os_type, "arch")) {
        (Some((machine, at)), _) => {
            describe_machine(machine, at, table);
        }
        (None, None | Some(("x86_64" | "i686", _))) => {
            table.default_to("vm.machine", "pc", "libvirt")
        }
        _ => {}
    }
    memory_backing(node, &mut vm);
    cpu(node, &mut vm);
    if child(node, "numatune")
        .and_then(|numa| child(numa, "memory"))
        .is_some()
    {
        vm.table.give("vm.numa-bound", true, vm.span);
    } else {
        vm.table.default_to("vm.numa-bound", false, "libvirt");
    }
    guest::system(node, &mut vm);
    threads(node, &mut vm, reading);
    let Some(devices) = child(node, "devices") else {
        reading.note(vm.span, "the domain has no <devices>");
        return vm;
    };
    if let Some((program, at)) = child(devices, "emulator").map(text)
        && is_red_hats(program)
    {
        vm.table.give("vm.rhel", true, at);
    }
    let balloon = attribute(child(devices, "memballoon"), "model");
    match balloon {
        Some(("none", at)) => vm.table.give("vm.balloon", false, at),
        Some((_, at)) => vm.table.give("vm.balloon", true, at),
        None => vm.table.default_to("vm.balloon", "yes", "libvirt"),
    }
    let passed = devices
        .children()
        .find(|node| node.has_tag_name("hostdev") && node.attribute("type") == Some("pci"));
    if let Some(passed) = passed {
        vm.table.give("vm.pass-through", true, span(passed));
    }
    let disks: Vec<_> = devices
        .children()
        .filter(|node| node.has_tag_name("disk"))
        .collect();
    vm.threads_elsewhere = devices
        .children()
        .filter(|node| !node.has_tag_name("disk"))
        .flat_map(|node| node.descendants())
        .filter_map(|node| match node.tag_name().name() {
            "iothread" => node.attribute("id"),
            _ => node.attribute("iothread"),
        })
        .map(str::to_owned)
        .collect();
    let controllers = Controllers::of(devices);
    let mates = controllers.count(&disks);
    for node in disks.iter().filter(|_| is_qemu) {
        vm.disks
            .push(disk(*node, &controllers, &mates, &vm, reading));
    }
    vm
}

/// Reads the type of a domain; false if it does not run in QEMU.
fn accelerator(node: Node<'_, '_>, vm: &mut Vm, reading: &mut Reading) -> bool {
    let Some((kind, at)) = attribute(Some(node), "type") else {
        return true;
    };
    let accel = match kind {
        "kvm" => "kvm",
        "qemu" => "tcg",
        "xen" => "xen",
        "hvf" => "hvf",
        _ => "other",
    };
    vm.table.give("vm.accel", accel, at);
    let is_qemu = matches!(kind, "kvm" | "qemu" | "hvf" | "kqemu");
    if !is_qemu {
        let text = format!("domains of type '{kind}' do not run in QEMU; its disks are skipped");
        reading.note(at, text);
    }
    is_qemu
}

fn bytes(amount: &str, unit: &str) -> Option<u64> {
    let factor: u64 = match unit {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    amount.parse::<u64>().ok()?.checked_mul(factor)
}

fn memory_backing(node: Node<'_, '_>, vm: &mut Vm) {
    let Some(backing) = child(node, "memoryBacking") else {
        vm.table
            .default_to("vm.memory-shared", shared_cells(node), "libvirt");
        return;
    };
    if let Some(pages) = child(backing, "hugepages") {
        vm.table.give("vm.hugepages", true, span(pages));
    }
    match attribute(child(backing, "access"), "mode") {
        Some(("shared", at)) => vm.table.give("vm.memory-shared", true, at),
        Some((_, at)) => vm.table.give("vm.memory-shared", shared_cells(node), at),
        None => vm
            .table
            .default_to("vm.memory-shared", shared_cells(node), "libvirt"),
    }
}

/// Whether all NUMA cells of the guest have shared memory.
fn shared_cells(node: Node<'_, '_>) -> bool {
    let Some(numa) = at(node, &["cpu", "numa"]) else {
        return false;
    };
    let mut cells = numa
        .children()
        .filter(|node| node.has_tag_name("cell"))
        .peekable();
    cells.peek().is_some() && cells.all(|cell| cell.attribute("memAccess") == Some("shared"))
}

fn cpu(node: Node<'_, '_>, vm: &mut Vm) {
    let cpu = child(node, "cpu");
    let model = match attribute(cpu, "mode") {
        Some(mode @ ("host-passthrough" | "host-model" | "maximum", _)) => Some(mode),
        _ => cpu.and_then(|cpu| child(cpu, "model")).map(text),
    };
    if let Some((model, at)) = model {
        vm.table.give("vm.cpu-model", model.to_owned(), at);
    }
    for feature in cpu.into_iter().flat_map(|cpu| cpu.children()) {
        if feature.attribute("name") == Some("x2apic")
            && let Some((policy @ ("disable" | "forbid"), at)) = attribute(Some(feature), "policy")
        {
            let _ = policy;
            vm.table.give("vm.cpu-x2apic", "off", at);
        }
    }
    if let Some(("off", at)) = attribute(at(node, &["features", "apic"]), "eoi") {
        vm.table.give("vm.cpu-pv-eoi", "off", at);
    }
}

fn threads(node: Node<'_, '_>, vm: &mut Vm, reading: &mut Reading) {
    let ids = child(node, "iothreadids");
    for thread in ids.into_iter().flat_map(|ids| ids.children()) {
        if let Some((id, at)) = attribute(Some(thread), "id") {
            let poll = child(thread, "poll");
            let max = poll.and_then(|poll| poll.attribute("max"));
            vm.threads.push(Thread {
                id: id.to_owned(),
                span: at,
                poll_max_ns: max.and_then(|max| max.parse().ok()),
                others: driver::thread_settings(thread, poll),
            });
            if let Some(poll) = poll {
                let setting = if max == Some("0") { "off" } else { "set" };
                vm.table.give("vm.thread-poll", setting, span(poll));
            }
        }
    }
    let Some(count) = child(node, "iothreads") else {
        return;
    };
    let (number, at) = text(count);
    match number.parse::<u64>() {
        Ok(number) if reading.has_threads(number) => {
            let mut known: HashSet<String> =
                vm.threads.iter().map(|thread| thread.id.clone()).collect();
            let mut next = 1u64;
            while (vm.threads.len() as u64) < number {
                let id = next.to_string();
                if known.insert(id.clone()) {
                    vm.threads.push(Thread {
                        id,
                        span: at,
                        poll_max_ns: None,
                        others: Vec::new(),
                    });
                }
                next += 1;
            }
        }
        _ => {
            let text = format!("invalid number of I/O threads; the maximum is {THREADS_MAX}");
            reading.note(at, text);
        }
    }
}

/// The SCSI controllers of a domain, by their index.
pub struct Controllers<'a, 'i>(HashMap<&'a str, Node<'a, 'i>>);

impl<'a, 'i> Controllers<'a, 'i> {
    /// The controllers in a domain, or in its `<devices>`.
    fn of(node: Node<'a, 'i>) -> Self {
        let devices = child(node, "devices").unwrap_or(node);
        let scsi = devices.children().filter(|node| {
            node.has_tag_name("controller") && node.attribute("type") == Some("scsi")
        });
        let mut found = HashMap::new();
        for controller in scsi {
            let index = controller.attribute("index").unwrap_or("0");
            found.entry(index).or_insert(controller);
        }
        Self(found)
    }

    /// The controller of a SCSI disk.
    fn of_disk(&self, disk: Node<'_, '_>) -> Option<Node<'a, 'i>> {
        let index = child(disk, "address")
            .and_then(|node| node.attribute("controller"))
            .unwrap_or("0");
        self.0.get(index).copied()
    }

    /// The number of SCSI disks per controller index.
    fn count(&self, disks: &[Node<'a, 'i>]) -> HashMap<&'a str, usize> {
        let mut counts = HashMap::new();
        for disk in disks {
            let bus = child(*disk, "target").and_then(|node| node.attribute("bus"));
            if bus == Some("scsi") {
                *counts.entry(index(self.of_disk(*disk))).or_default() += 1;
            }
        }
        counts
    }
}

/// The index of a controller; 0 if it has none.
fn index<'a>(controller: Option<Node<'a, '_>>) -> &'a str {
    let index = controller.and_then(|node| node.attribute("index"));
    index.unwrap_or("0")
}

fn disk(
    node: Node<'_, '_>,
    controllers: &Controllers<'_, '_>,
    mates: &HashMap<&str, usize>,
    vm: &Vm,
    reading: &mut Reading,
) -> Disk {
    let mut disk = Disk {
        span: span(node),
        ..Disk::default()
    };
    let target = child(node, "target");
    let (name, name_at) = attribute(target, "dev").unwrap_or(("?", disk.span));
    disk.name = name.to_owned();
    let table = &mut disk.table;
    match attribute(Some(node), "device") {
        Some(("disk", at)) => table.give("disk.device", "disk", at),
        Some(("cdrom", at)) => table.give("disk.device", "cdrom", at),
        Some(("floppy", at)) => table.give("disk.device", "floppy", at),
        Some(("lun", at)) => table.give("disk.device", "lun", at),
        Some((other, at)) => reading.note(at, format!("unknown device='{other}'")),
        None => table.default_to("disk.device", "disk", "libvirt"),
    }
    source(node, &mut disk, reading);
    let table = &mut disk.table;
    let vhost_user = table.word("disk.protocol") == Some("vhost-user");
    let (bus, bus_at) = attribute(target, "bus").unwrap_or_else(|| (bus_of_name(name), name_at));
    let scsi = (bus == "scsi").then(|| controllers.of_disk(node)).flatten();
    let word = bus_word(bus, vhost_user, scsi, vm).unwrap_or_else(|| {
        reading.note(bus_at, format!("unknown bus='{bus}'"));
        "other"
    });
    table.give("disk.bus", word, bus_at);
    driver(child(node, "driver"), &mut disk, reading);
    if vhost_user {
        vhost_user_driver(child(node, "driver"), &mut disk);
    }
    if let Some((bytes, at)) = attribute(child(node, "blockio"), "discard_granularity")
        && let Ok(bytes) = bytes.parse::<u64>()
    {
        disk.table.give("disk.discard-granularity", bytes, at);
    }
    if word == "virtio-scsi" {
        driver_queues(
            scsi.and_then(|node| child(node, "driver")),
            &mut disk,
            reading,
        );
        let is_alone = mates.get(index(scsi)).is_none_or(|count| *count <= 1);
        disk.table.derive(
            "disk.controller",
            if is_alone { "own" } else { "shared" },
            "from the addresses",
        );
    }
    if let Some(at) = child(node, "readonly") {
        disk.table.give("disk.readonly", true, span(at));
    }
    if child(node, "shareable").is_some() && child(node, "readonly").is_none() {
        disk.table
            .default_to("disk.cache", "none", "libvirt for shareable disks");
    }
    let encryption = child(node, "encryption").or_else(|| at(node, &["source", "encryption"]));
    if let Some(encryption) = encryption {
        disk.table.give("disk.encrypted", true, span(encryption));
    }
    carried(node, &mut disk);
    if vhost_user {
        let reconnect = at(node, &["source", "reconnect"]);
        match attribute(reconnect, "enabled") {
            Some((enabled, at)) => disk.table.give("disk.reconnect", enabled == "yes", at),
            None => disk.table.default_to("disk.reconnect", false, "libvirt"),
        }
    }
    if let Some((removable, at)) = attribute(target, "removable") {
        disk.table.give("disk.removable", removable == "on", at);
    }
    if let Some((rate, at)) = attribute(target, "rotation_rate") {
        disk.table.give("disk.ssd", rate == "1", at);
    }
    disk
}

/// Reads the limits, the error policies, the serial number and the block sizes.
fn carried(node: Node<'_, '_>, disk: &mut Disk) {
    if let Some(tune) = child(node, "iotune") {
        for limit in tune.children().filter(Node::is_element) {
            let (word, _) = text(limit);
            match limit.tag_name().name() {
                "group_name" => disk.carried.group = Some(word.to_owned()),
                name => {
                    if is_limit(name, Dialect::Libvirt, word) {
                        disk.table.give("disk.throttled", true, span(tune));
                    }
                    disk.carried
                        .limit(name, Dialect::Libvirt, word.parse().ok());
                }
            }
        }
    }
    let policy = |name| {
        let (word, _) = attribute(child(node, "driver"), name)?;
        Some(if word == "enospace" { "enospc" } else { word }.to_owned())
    };
    disk.carried.werror = policy("error_policy");
    // Without a policy for reads, libvirt uses the one for writes, unless reads cannot have it.
    disk.carried.rerror = policy("rerror_policy")
        .or_else(|| disk.carried.werror.clone().filter(|word| word != "enospc"));
    disk.carried.serial = child(node, "serial").map(|serial| text(serial).0.to_owned());
    let blocks = |name| attribute(child(node, "blockio"), name)?.0.parse().ok();
    disk.carried.logical_block = blocks("logical_block_size");
    disk.carried.physical_block = blocks("physical_block_size");
}

/// The property `disk.bus` for a bus of libvirt; none if the bus is unknown.
fn bus_word(
    bus: &str,
    is_vhost_user: bool,
    scsi: Option<Node<'_, '_>>,
    vm: &Vm,
) -> Option<&'static str> {
    Some(match bus {
        "virtio" if is_vhost_user => "vhost-user-blk",
        "virtio" => "virtio-blk",
        "scsi" => match attribute(scsi, "model").map(|(model, _)| model) {
            Some(model) if model.starts_with("virtio") => "virtio-scsi",
            Some(model) if EMULATED_SCSI.contains(&model) => "scsi-emulated",
            None | Some("auto") => match vm.table.word("vm.machine").unwrap_or("pc") {
                machine if machine.starts_with("s390") || machine == "virt" => "virtio-scsi",
                "pc" | "q35" => "scsi-emulated",
                _ => "other",
            },
            // ibmvscsi is paravirtual like virtio-scsi, and the others are not on a PCI bus.
            Some(_) => "other",
        },
        "ide" => "ide",
        "sata" => "sata",
        "usb" => "usb",
        "nvme" => "nvme",
        "sd" => "sd",
        "fdc" => "fdc",
        _ => return None,
    })
}

/// libvirt derives the bus from the start of the name.
fn bus_of_name(name: &str) -> &'static str {
    match name.get(..2) {
        Some("vd") => "virtio",
        Some("sd") => "scsi",
        Some("hd") => "ide",
        Some("fd") => "fdc",
        Some("ub") => "usb",
        _ => "none",
    }
}

fn source(node: Node<'_, '_>, disk: &mut Disk, reading: &mut Reading) {
    let source = child(node, "source");
    let Some((kind, at)) = attribute(Some(node), "type") else {
        reading.note(disk.span, "the disk has no type");
        return;
    };
    let named = |name| attribute(source, name).map(|(text, _)| text.to_owned());
    let table = &mut disk.table;
    let (protocol, file) = match kind {
        "file" => ("file", named("file")),
        "block" => ("block", named("dev")),
        "dir" => ("other", named("dir")),
        "volume" => {
            let pool = named("pool").unwrap_or_default();
            reading.note(at, "only libvirt knows the storage of a pool's volume");
            (
                "other",
                named("volume").map(|volume| format!("{pool}/{volume}")),
            )
        }
        "nvme" => ("nvme", child(node, "source").map(|_| "nvme".to_owned())),
        "vhostuser" => ("vhost-user", named("path")),
        "vhostvdpa" => ("vdpa", named("dev")),
        "network" => {
            let protocol = attribute(source, "protocol");
            let word = match protocol.map(|(text, _)| text) {
                Some("rbd") => "rbd",
                Some("nbd") => "nbd",
                Some("iscsi") => "iscsi",
                Some("gluster") => "gluster",
                Some("nfs") => "nfs",
                Some("ssh") => "ssh",
                Some("http" | "https") => "http",
                _ => "other",
            };
            let text = |node, name| attribute(node, name).map(|(text, _)| text.to_owned());
            let inside = |name| source.and_then(|source| child(source, name));
            let auth = inside("auth").or_else(|| child(node, "auth"));
            disk.ceph.user = text(auth, "username");
            disk.ceph.conf = text(inside("config"), "file");
            disk.ceph.has_key = auth.and_then(|auth| child(auth, "secret")).is_some();
            disk.ceph.monitors(driver::monitors(source));
            (word, named("name"))
        }
        other => {
            reading.note(at, format!("unknown type='{other}'"));
            ("other", None)
        }
    };
    if let Some(file) = file {
        disk.file = file;
    } else if matches!(table.word("disk.device"), Some("cdrom" | "floppy")) {
        // An empty drive has no storage.
        return;
    }
    let table_at = attribute(source, "protocol").map_or(at, |(_, at)| at);
    table.give("disk.protocol", protocol, table_at);
    if protocol == "file" && is_device(&disk.file) {
        disk.table.give("disk.block-as-file", true, at);
    }
}
