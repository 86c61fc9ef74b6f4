//! The keys of a disk in ringdisk's configuration that keep what it was in QEMU.

use crate::model::Disk;
use crate::model::carried::Dialect;

/// How ringdisk serves a disk.
pub struct Served {
    pub name: String,
    pub socket: String,
    pub queues: u64,
    pub queue_size: u64,
}

/// # Errors
/// The reason why ringdisk cannot serve it.
pub fn check_storage(disk: &Disk) -> Result<(), String> {
    let word = |name| disk.table.word(name).unwrap_or_default();
    match word("disk.protocol") {
        "file" | "block" | "rbd" => {}
        "" => return Err("a shell variable names its storage".into()),
        other => return Err(format!("ringdisk does not serve {other}")),
    }
    if !matches!(word("disk.format"), "raw" | "qcow2") {
        return Err("its format is unknown, or neither raw nor qcow2".into());
    }
    disk.carried.serial()?;
    for bytes in [disk.carried.logical_block, disk.carried.physical_block] {
        if let Some(bytes) = bytes.filter(|bytes| !matches!(bytes, 512 | 4096)) {
            return Err(format!(
                "its block size is {bytes} bytes, and ringdisk supports 512 and 4096"
            ));
        }
    }
    Ok(())
}

/// The attributes of a disk in the metadata of its domain: all but what is in its element there.
pub fn attributes_of(vm: &str, disk: &Disk, served: &Served) -> Vec<(String, String)> {
    let default = format!("{vm}-{}", disk.name);
    let mut attributes = Vec::new();
    for (key, value) in keys_of(disk, served) {
        let is_there = matches!(key, "socket" | "queues" | "queue-size");
        if is_there || (key == "name" && served.name == default) {
            continue;
        }
        let value = match value {
            toml::Value::String(text) => text,
            toml::Value::Boolean(is_on) => if is_on { "on" } else { "off" }.into(),
            value => value.to_string(),
        };
        attributes.push((key.to_owned(), value));
    }
    for (limit, value) in &disk.carried.limits {
        attributes.push((limit.name(Dialect::Ringdisk), value.to_string()));
    }
    attributes
}

/// The keys of a disk without its limits.
pub fn keys_of(disk: &Disk, served: &Served) -> Vec<(&'static str, toml::Value)> {
    let word = |name| disk.table.word(name).unwrap_or_default();
    let mut keys = Vec::new();
    let mut put = |key: &'static str, value: toml::Value| keys.push((key, value));
    let text = |text: &str| toml::Value::String(text.to_owned());
    let number = |number: u64| toml::Value::Integer(number.cast_signed());
    put("name", text(&served.name));
    put("file", text(&disk.file));
    put("format", text(word("disk.format")));
    put("socket", text(&served.socket));
    // Bypass the page cache unless the input sets the cache mode. Never less durable than before.
    let cache = match word("disk.cache") {
        "writeback" if disk.table.given("disk.cache").is_none() => "none",
        "unsafe" => "none",
        cache => cache,
    };
    put("cache", text(cache));
    put("queues", number(served.queues));
    put("queue-size", number(served.queue_size));
    let discards = word("disk.discard") != "ignore";
    if !discards {
        put("discard", text("ignore"));
    }
    if disk.table.is_yes("disk.readonly") {
        put("readonly", toml::Value::Boolean(true));
    }
    match word("disk.detect-zeroes") {
        // Without discard, QEMU writes zeroes instead of unmapping.
        "unmap" if discards => put("detect-zeroes", text("unmap")),
        "on" | "unmap" => put("detect-zeroes", text("on")),
        _ => {}
    }
    for (key, policy) in [
        ("rerror", &disk.carried.rerror),
        ("werror", &disk.carried.werror),
    ] {
        if let Some(policy) = policy {
            put(key, text(policy));
        }
    }
    if let (Some(bytes), "qcow2") = (disk.table.number("disk.l2-cache-size"), word("disk.format")) {
        put("l2-cache-size", number(bytes));
    }
    if let Ok(Some(serial)) = disk.carried.serial() {
        put("serial", text(serial));
    }
    // Partition tables count in logical blocks. QEMU's default is 512 bytes, whatever the storage has.
    put(
        "logical-block-size",
        number(disk.carried.logical_block.unwrap_or(512)),
    );
    if let Some(physical) = disk.carried.physical_block {
        put("physical-block-size", number(physical));
    }
    keys
}
