//! `<driver>` of a disk or a controller, the settings of I/O threads, and the hosts of a network disk.

use roxmltree::Node;

use super::{at, attribute, bytes, child, text};
use crate::input::Reading;
use crate::model::{Disk, MONITORS_MAX, ThreadUse, monitor};

/// The settings of an I/O thread, except how long it polls.
pub fn thread_settings(thread: Node<'_, '_>, poll: Option<Node<'_, '_>>) -> Vec<String> {
    let settings = [
        (poll, "grow"),
        (poll, "shrink"),
        (Some(thread), "thread_pool_min"),
        (Some(thread), "thread_pool_max"),
    ];
    let given = settings.into_iter().filter_map(|(node, name)| {
        let (value, _) = attribute(node, name)?;
        let name = match name {
            "grow" | "shrink" => format!("poll-{name}"),
            _ => name.replace('_', "-"),
        };
        Some(format!("{name}={value}"))
    });
    given.collect()
}

/// The addresses of a Ceph cluster's monitors.
pub fn monitors(source: Option<Node<'_, '_>>) -> Vec<String> {
    let hosts = source.into_iter().flat_map(|source| source.children());
    let hosts = hosts.filter(|node| node.has_tag_name("host"));
    let addresses =
        hosts.filter_map(|host| Some(monitor(host.attribute("name")?, host.attribute("port"))));
    addresses.take(MONITORS_MAX).collect()
}

/// The attributes of `<driver>` that libvirt refuses for a vhostuser disk (9.0: "… is not supported with vhostuser disk").
const INAPT: [&str; 9] = [
    "cache",
    "error_policy",
    "rerror_policy",
    "io",
    "ioeventfd",
    "copy_on_read",
    "discard",
    "detect_zeroes",
    "iothread",
];

/// Finds the attributes that libvirt refuses for a vhostuser disk.
pub fn vhost_user_driver(driver: Option<Node<'_, '_>>, disk: &mut Disk) {
    let given = INAPT.into_iter().filter_map(|name| {
        let (value, at) = attribute(driver, name)?;
        (value != "default").then_some((name, at))
    });
    let given: Vec<_> = given.collect();
    if let Some((_, at)) = given.first() {
        let names: Vec<&str> = given.iter().map(|(name, _)| *name).collect();
        disk.table
            .give("disk.vhost-user-inapt", names.join(", "), *at);
    }
}

pub fn driver(driver: Option<Node<'_, '_>>, disk: &mut Disk, reading: &mut Reading) {
    let mut word = |attribute_name: &str, name: &'static str, words: &[&'static str]| {
        let Some((text, at)) = attribute(driver, attribute_name) else {
            return;
        };
        match words.iter().find(|word| **word == text) {
            Some(word) => disk.table.give(name, *word, at),
            None if text == "default" => {}
            None => reading.note(at, format!("unknown {attribute_name}='{text}'")),
        }
    };
    word(
        "cache",
        "disk.cache",
        &["none", "writeback", "writethrough", "directsync", "unsafe"],
    );
    word("io", "disk.aio", &["threads", "native", "io_uring"]);
    word("discard", "disk.discard", &["ignore", "unmap"]);
    word(
        "detect_zeroes",
        "disk.detect-zeroes",
        &["off", "on", "unmap"],
    );
    if let Some((format, at)) = attribute(driver, "type") {
        disk.table.give("disk.format", format.to_owned(), at);
    }
    for (name, property) in [
        ("ioeventfd", "disk.ioeventfd"),
        ("copy_on_read", "disk.copy-on-read"),
    ] {
        if let Some((value, at)) = attribute(driver, name) {
            disk.table.give(property, value == "on", at);
        }
    }
    if let Some(size) = driver.and_then(|node| at(node, &["metadata_cache", "max_size"])) {
        let (amount, span) = text(size);
        if let Some(bytes) = bytes(amount, size.attribute("unit").unwrap_or("bytes")) {
            disk.table.give("disk.l2-cache-size", bytes, span);
        }
    }
    driver_queues(driver, disk, reading);
}

/// Reads the queues, their layout and the I/O threads of a virtio-blk disk or a virtio-scsi controller.
pub fn driver_queues(driver: Option<Node<'_, '_>>, disk: &mut Disk, reading: &mut Reading) {
    for (name, property) in [("queues", "disk.queues"), ("queue_size", "disk.queue-size")] {
        if let Some((text, at)) = attribute(driver, name) {
            match text.parse::<u64>() {
                Ok(number @ 1..=65_535) => disk.table.give(property, number, at),
                _ => reading.note(
                    at,
                    format!("{name}='{text}' is not a number from 1 to 65535"),
                ),
            }
        }
    }
    if let Some((packed, at)) = attribute(driver, "packed") {
        disk.table.give("disk.packed", packed == "on", at);
    }
    for (name, value) in [("event_idx", "off"), ("iommu", "on")] {
        if attribute(driver, name).is_some_and(|(text, _)| text == value) {
            disk.others.push(format!("{name}={value}"));
        }
    }
    if let Some((id, span)) = attribute(driver, "iothread") {
        disk.threads.push(ThreadUse {
            id: id.to_owned(),
            span,
            queues: None,
            is_mapped: false,
        });
    }
    let map = driver.and_then(|node| child(node, "iothreads"));
    for thread in map.into_iter().flat_map(|map| map.children()) {
        let Some((id, span)) = attribute(Some(thread), "id") else {
            continue;
        };
        let queues: Vec<u64> = thread
            .children()
            .filter(|node| node.has_tag_name("queue"))
            .filter_map(|node| node.attribute("id")?.parse().ok())
            .collect();
        disk.threads.push(ThreadUse {
            id: id.to_owned(),
            span,
            queues: (!queues.is_empty()).then_some(queues),
            is_mapped: true,
        });
    }
}
