//! Converts a disk in a domain from QEMU to ringdisk and back.

use std::fmt::Write;

use roxmltree::Node;

use super::edit::Xml;
use super::{child, span};
use crate::model::Disk;
use crate::model::carried::{Carried, Dialect, Limit};
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// What a convertible disk may contain: paths from its element, with their values; no values mean any value. A disk with
/// anything else is not converted, since ringdisk does not support it.
const MOVABLE: &[(&str, &[&str])] = &[
    ("@type", &["file", "block"]),
    ("@device", &["disk"]),
    (
        "@model",
        &["virtio", "virtio-transitional", "virtio-non-transitional"],
    ),
    ("@snapshot", &["no"]),
    ("driver", &[]),
    ("driver@name", &["qemu"]),
    ("driver@type", &["raw", "qcow2"]),
    (
        "driver@cache",
        &[
            "default",
            "none",
            "writeback",
            "writethrough",
            "directsync",
            "unsafe",
        ],
    ),
    ("driver@io", &["threads", "native", "io_uring"]),
    ("driver@ioeventfd", &[]),
    ("driver@copy_on_read", &["off"]),
    ("driver@discard", &["ignore", "unmap"]),
    ("driver@detect_zeroes", &["off", "on", "unmap"]),
    ("driver@queues", &[]),
    ("driver@queue_size", &[]),
    ("driver@error_policy", &["report", "stop", "enospace"]),
    ("driver@rerror_policy", &["report", "stop"]),
    ("driver@event_idx", &[]),
    ("driver@packed", &[]),
    ("driver@page_per_vq", &[]),
    ("driver@iommu", &["off"]),
    ("driver@ats", &["off"]),
    ("driver@iothread", &[]),
    ("driver/iothreads", &[]),
    ("driver/iothreads/iothread", &[]),
    ("driver/iothreads/iothread@id", &[]),
    ("driver/iothreads/iothread/queue", &[]),
    ("driver/iothreads/iothread/queue@id", &[]),
    ("driver/metadata_cache", &[]),
    ("driver/metadata_cache/max_size", &[]),
    ("driver/metadata_cache/max_size@unit", &[]),
    ("driver/metadata_cache/max_size#", &[]),
    ("source", &[]),
    ("source@file", &[]),
    ("source@dev", &[]),
    ("source@index", &[]),
    ("source@startupPolicy", &["mandatory"]),
    // ringdisk resolves backing files as the image names them.
    ("backingStore", &[]),
    ("target", &[]),
    ("target@dev", &[]),
    ("target@bus", &["virtio"]),
    ("iotune", &[]),
    ("iotune/group_name", &[]),
    ("iotune/group_name#", &[]),
    ("serial", &[]),
    ("serial#", &[]),
    ("blockio", &[]),
    ("blockio@logical_block_size", &["512", "4096"]),
    ("blockio@physical_block_size", &["512", "4096"]),
    ("readonly", &[]),
    ("boot", &[]),
    ("boot@order", &[]),
    ("alias", &[]),
    ("alias@name", &[]),
    ("acpi", &[]),
    ("acpi@index", &[]),
    ("address", &[]),
    ("address@type", &["pci", "virtio-mmio"]),
    ("address@domain", &[]),
    ("address@bus", &[]),
    ("address@slot", &[]),
    ("address@function", &[]),
    ("address@multifunction", &[]),
];

/// The elements that belong to the old storage and are removed. The others describe the disk that the guest sees.
const REPLACED: &[&str] = &[
    "driver",
    "source",
    "backingStore",
    "iotune",
    "serial",
    "blockio",
    "readonly",
];

/// Attributes of the device that the guest sees, which are kept.
const KEPT: &[&str] = &["event_idx", "packed", "page_per_vq", "iommu", "ats"];

/// The edits that move a disk to ringdisk.
///
/// # Errors
/// A setting of the disk that ringdisk does not support.
pub fn to_ringdisk(
    target: &Target<'_>,
    xml: &Xml<'_>,
    socket: &str,
    queues: u64,
    queue_size: u64,
) -> Edits {
    let text = xml.text();
    let disk = xml.at(target.disk()?.span).ok_or("the disk is missing")?;
    if let Some(foreign) = foreign(disk, "") {
        return Err(format!("ringdisk has no counterpart for {foreign}"));
    }
    machine(xml, disk)?;
    let mut driver =
        format!("<driver name='qemu' type='raw' queues='{queues}' queue_size='{queue_size}'");
    for name in KEPT {
        let value = child(disk, "driver").and_then(|driver| driver.attribute(*name));
        if let Some(value) = value {
            let _ = write!(driver, " {name}='{}'", escaped(value));
        }
    }
    driver.push_str("/>");
    let source = format!("<source type='unix' path='{}'>", escaped(socket));
    replace_storage(text, disk, "vhostuser", &|apart| {
        let inner = if apart.is_empty() { "" } else { "  " };
        vec![
            driver.clone(),
            format!("{source}{apart}{inner}<reconnect enabled='yes' timeout='1'/>{apart}</source>"),
        ]
    })
}

/// The first part of a disk that is not in [`MOVABLE`], for a message.
fn foreign(node: Node<'_, '_>, path: &str) -> Option<String> {
    let name = node.tag_name().name();
    let allowed = |path: &str, value: &str| {
        let known = MOVABLE.iter().find(|(known, _)| *known == path);
        known.is_some_and(|(_, values)| values.is_empty() || values.contains(&value))
    };
    if node.tag_name().namespace().is_some() {
        return Some(format!("<{name}> of another namespace"));
    }
    for attribute in node.attributes() {
        let key = attribute.name();
        if attribute.namespace().is_some() || !allowed(&format!("{path}@{key}"), attribute.value())
        {
            return Some(format!("{key}='{}' of <{name}>", attribute.value()));
        }
    }
    for inner in node.children() {
        if inner.is_text() {
            let text = inner.text().unwrap_or_default().trim();
            if !text.is_empty() && !allowed(&format!("{path}#"), text) {
                return Some(format!("the text of <{name}>"));
            }
        }
        if !inner.is_element() {
            continue;
        }
        let inner_name = inner.tag_name().name();
        if path == "iotune" && Limit::named(inner_name, Dialect::Libvirt).is_some() {
            let is_number = inner
                .text()
                .unwrap_or_default()
                .trim()
                .parse::<u64>()
                .is_ok();
            if is_number && inner.attributes().len() == 0 {
                continue;
            }
        }
        let at = match path {
            "" => inner_name.to_owned(),
            path => format!("{path}/{inner_name}"),
        };
        match at.as_str() {
            path if allowed(path, "") => {}
            _ if path.is_empty() => return Some(format!("<{inner_name}>")),
            _ => return Some(format!("<{inner_name}> in <{name}>")),
        }
        if let Some(found) = foreign(inner, &at) {
            return Some(found);
        }
    }
    None
}

/// Whether the VM of a disk can have vhost-user disks.
fn machine(xml: &Xml<'_>, disk: Node<'_, '_>) -> Result<(), String> {
    let domain = disk.ancestors().find(|node| node.has_tag_name("domain"));
    let domain = domain.ok_or("the domain is missing")?;
    match domain.attribute("type") {
        Some("kvm" | "qemu") => {}
        Some(other) => {
            return Err(format!(
                "a domain of type '{other}' has no vhost-user disks on Linux"
            ));
        }
        None => return Err("the domain has no type".into()),
    }
    let os = child(domain, "os").and_then(|os| child(os, "type"));
    if os.is_some_and(|os| {
        os.attribute("arch")
            .is_some_and(|arch| arch.starts_with("s390"))
    }) {
        return Err("QEMU has no vhost-user-blk for s390x".into());
    }
    if child(domain, "launchSecurity").is_some() {
        return Err(
            "its memory is encrypted (<launchSecurity>), and ringdisk could not read it".into(),
        );
    }
    if xml.has_private_memory(span(domain)) {
        return Err(
            "it has an NVDIMM without access='shared', and ringdisk could not map it".into(),
        );
    }
    let cells = child(domain, "cpu").and_then(|cpu| child(cpu, "numa"));
    let cells = cells.into_iter().flat_map(|numa| numa.children());
    if cells
        .into_iter()
        .any(|cell| cell.attribute("memAccess") == Some("private"))
    {
        return Err("a NUMA cell has memAccess='private', and ringdisk could not map it".into());
    }
    // Arguments that bypass libvirt may set further properties.
    let own = child(disk, "alias").and_then(|alias| alias.attribute("name"));
    let names_disk =
        |text: &str| text.contains("-disk") || own.is_some_and(|own| text.contains(own));
    let by_hand = domain.children().filter(|node| {
        matches!(node.tag_name().name(), "commandline" | "override")
            && node.tag_name().namespace().is_some()
    });
    for node in by_hand.flat_map(|node| node.descendants()) {
        let named = ["value", "alias"]
            .iter()
            .find_map(|name| node.attribute(*name));
        if let Some(named) = named.filter(|named| names_disk(named)) {
            return Err(format!(
                "<{}> names a disk: '{named}'",
                node.tag_name().name()
            ));
        }
    }
    Ok(())
}

/// A text as the value of an attribute in single quotes.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '\'' => escaped.push_str("&apos;"),
            // Readers make spaces of these.
            '\t' | '\n' | '\r' => {
                let _ = write!(escaped, "&#{};", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// Replaces a disk's type, driver and source. `written` creates the elements from the separator of the disk's elements: a
/// new line and its indentation, or nothing.
fn replace_storage(
    text: &str,
    disk: Node<'_, '_>,
    kind: &str,
    written: &dyn Fn(&str) -> Vec<String>,
) -> Edits {
    let elements: Vec<_> = disk.children().filter(Node::is_element).collect();
    let first = elements.first().ok_or("the disk has no elements")?;
    let before = &text[..first.range().start];
    let blank = before.len() - before.trim_end().len();
    let apart = &before[before.len() - blank..];
    // Keep one of several empty lines.
    let apart = apart.rfind('\n').map_or("", |newline| &apart[newline..]);
    let kind_now = disk.attribute_node("type").ok_or("the disk has no type")?;
    let range = kind_now.range_value();
    let mut edits = vec![Edit::replace(Span::new(0, range.start, range.end), kind)];
    let mut place = None;
    for node in &elements {
        if !REPLACED.contains(&node.tag_name().name()) {
            continue;
        }
        let range = node.range();
        match place {
            None => place = Some(range),
            Some(_) => {
                let start = text[..range.start].trim_end().len();
                edits.push(Edit::replace(Span::new(0, start, range.end), ""));
            }
        }
    }
    let written = written(apart).join(apart);
    edits.push(match place {
        Some(range) => Edit::replace(Span::new(0, range.start, range.end), written),
        None => Edit::replace(span(*first).before(), format!("{written}{apart}")),
    });
    Ok(edits)
}

/// The edits that move a disk back to QEMU.
///
/// # Errors
/// The reason why it cannot be moved.
pub fn from_ringdisk(target: &Target<'_>, xml: &Xml<'_>, storage: &Disk) -> Edits {
    let text = xml.text();
    let disk = xml.at(target.disk()?.span).ok_or("the disk is missing")?;
    let word = |name| storage.table.word(name).unwrap_or_default();
    let block = word("disk.protocol") == "block";
    let format = match word("disk.format") {
        "" if storage.file.ends_with(".qcow2") => "qcow2",
        "" => "raw",
        format => format,
    };
    let mut driver = format!(
        "<driver name='qemu' type='{format}' cache='{}'",
        word("disk.cache")
    );
    if storage.table.word("disk.direct") == Some("yes") {
        driver.push_str(if block {
            " io='native'"
        } else {
            " io='io_uring'"
        });
    }
    let _ = write!(driver, " discard='{}'", word("disk.discard"));
    if let found @ ("on" | "unmap") = word("disk.detect-zeroes") {
        let _ = write!(driver, " detect_zeroes='{found}'");
    }
    let policies = [
        ("error_policy", &storage.carried.werror),
        ("rerror_policy", &storage.carried.rerror),
    ];
    for (name, policy) in policies {
        match policy.as_deref() {
            Some("enospc") => {
                let _ = write!(driver, " {name}='enospace'");
            }
            // libvirt has no policy that retries; the nearest one also hides the error from the guest.
            Some("retry" | "stop") => {
                let _ = write!(driver, " {name}='stop'");
            }
            Some(word) => {
                let _ = write!(driver, " {name}='{word}'");
            }
            None => {}
        }
    }
    let vcpus = target.vm()?.table.number("vm.vcpus").unwrap_or(1);
    let queues = child(disk, "driver").and_then(|driver| driver.attribute("queues"));
    // As many as QEMU makes by default need not be written down.
    if let Some(queues) = queues.filter(|queues| queues.parse() != Ok(vcpus)) {
        let _ = write!(driver, " queues='{}'", escaped(queues));
    }
    for name in KEPT {
        let value = child(disk, "driver").and_then(|driver| driver.attribute(*name));
        if let Some(value) = value {
            let _ = write!(driver, " {name}='{}'", escaped(value));
        }
    }
    driver.push_str("/>");
    let attribute = if block { "dev" } else { "file" };
    let source = format!("<source {attribute}='{}'/>", escaped(&storage.file));
    let kind = if block { "block" } else { "file" };
    let edits = replace_storage(text, disk, kind, &|apart| {
        let mut elements = vec![driver.clone(), source.clone()];
        elements.extend(carried(&storage.carried, apart));
        if storage.table.is_yes("disk.readonly") {
            elements.push("<readonly/>".into());
        }
        elements
    });
    // libvirt gives it to vhost-user disks by itself; it would leave this one out of snapshots without a word.
    let snapshot = disk.attribute_node("snapshot");
    let snapshot = snapshot.filter(|it| it.value() == "no").map(|it| {
        let before = &text[..it.range().start];
        Edit::replace(Span::new(0, before.trim_end().len(), it.range().end), "")
    });
    edits.map(|edits| edits.into_iter().chain(snapshot).collect())
}

/// Elements for the preserved settings of a disk.
fn carried(carried: &Carried, apart: &str) -> Vec<String> {
    let inner = if apart.is_empty() { "" } else { "  " };
    let mut elements = Vec::new();
    let sizes: String = carried
        .block_sizes()
        .into_iter()
        .filter_map(|(name, bytes)| Some(format!(" {name}='{}'", bytes?)))
        .collect();
    if !sizes.is_empty() {
        elements.push(format!("<blockio{sizes}/>"));
    }
    if !carried.limits.is_empty() {
        let mut tune = String::from("<iotune>");
        for (limit, value) in &carried.limits {
            let name = limit.name(Dialect::Libvirt);
            let _ = write!(tune, "{apart}{inner}<{name}>{value}</{name}>");
        }
        if let Some(group) = &carried.group {
            let group = escaped(group);
            let _ = write!(tune, "{apart}{inner}<group_name>{group}</group_name>");
        }
        let _ = write!(tune, "{apart}</iotune>");
        elements.push(tune);
    }
    if let Some(serial) = carried.serial.as_deref().filter(|text| !text.is_empty()) {
        elements.push(format!("<serial>{}</serial>", escaped(serial)));
    }
    elements
}
