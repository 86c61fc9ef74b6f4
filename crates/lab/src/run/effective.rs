//! The effective settings of a configuration, read back from QEMU's monitor and from the guest's `/sys`. They may differ
//! from the plan's.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::guest::{Guest, Shell, Stop};
use crate::plan::Settings;
use crate::plan::words::{Device, Scheduler};

/// Settings by their names.
pub type Effective = BTreeMap<String, String>;

/// Sets the guest's scheduler, and reads the settings of the guest's first disk. `disks` are as for fio.
///
/// # Errors
/// A disk is missing, or does not have that scheduler.
pub fn of_guest(
    shell: &mut dyn Shell,
    settings: &Settings,
    disks: &[String],
    stop: &Stop,
) -> Result<Effective> {
    let mut script = crate::fio::FIND_DISK.to_owned();
    let quoted = |disk: &String| disk.replace('\'', "'\\''");
    for disk in disks.iter().map(quoted) {
        script += &format!("d=$(disk '{disk}') || exit 9\nb=${{d##*/}}\n");
        if settings.scheduler != Scheduler::Default {
            script += &format!(
                "echo {} >/sys/block/\"$b\"/queue/scheduler || exit 9\n",
                settings.scheduler
            );
        }
    }
    script += &format!(
        "d=$(disk '{}')\nb=${{d##*/}}\n",
        disks.first().map_or_else(String::new, quoted)
    );
    script += QUERY;
    let answer = shell.run(&script, Duration::from_secs(120), stop)?;
    ensure!(
        answer.status == 0,
        "the guest's disks are not as planned: {}",
        answer.text().trim()
    );
    let pairs = |line: &str| {
        line.split_once('=')
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
    };
    let mut effective: Effective = answer
        .text()
        .lines()
        .filter_map(pairs)
        .filter(|(_, value)| !value.is_empty())
        .collect();
    if let Some(scheduler) = effective.get_mut("scheduler")
        && let Some((_, rest)) = scheduler.split_once('[')
    {
        *scheduler = rest.split(']').next().unwrap_or_default().to_owned();
    }
    Ok(effective)
}

const QUERY: &str = r#"
b=/sys/block/"$b"
q=$b/queue
read_one() { [ -f "$2" ] && echo "$1=$(cat "$2")"; }
echo "driver=$(basename $(readlink -f "$b"/device/driver) 2>/dev/null)"
echo "queues=$(ls -d "$b"/mq/* 2>/dev/null | wc -l)"
read_one scheduler "$q"/scheduler
read_one requests "$q"/nr_requests
read_one "logical block" "$q"/logical_block_size
read_one "guest write cache" "$q"/write_cache
read_one rotational "$q"/rotational
read_one "largest request KiB" "$q"/max_sectors_kb
echo "guest kernel=$(uname -r)"
echo "guest cpus=$(nproc)"
echo "guest fio=$(fio --version 2>/dev/null)"
true
"#;

/// Reads the settings from QEMU.
///
/// # Errors
/// QEMU does not answer.
pub fn of_qemu(guest: &Guest, settings: &Settings) -> Result<Effective> {
    let mut qmp = guest.qmp()?;
    let mut effective = Effective::new();
    let mut add = |key: &str, value: Option<Value>| {
        match value {
            Some(Value::String(text)) => drop(effective.insert(key.into(), text)),
            Some(value) if !value.is_null() => {
                drop(effective.insert(key.into(), value.to_string()))
            }
            _ => {}
        };
    };
    let machine = qmp.property("/machine", "type");
    // Without the version, which is that of QEMU.
    add(
        "machine",
        machine.and_then(|machine| Some(machine.as_str()?.split("-machine").next()?.into())),
    );
    add(
        "iothreads",
        qmp.execute("query-iothreads", json!({}))
            .ok()
            .map(|list| list.as_array().map_or(0, Vec::len).into()),
    );
    let device = if settings.device == Device::VirtioScsi {
        "/machine/peripheral/scsi0"
    } else {
        "/machine/peripheral/dev0"
    };
    for (key, property) in [
        ("queue-size", "queue-size"),
        ("queue-size", "virtqueue_size"),
    ] {
        add(key, qmp.property(device, property));
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let node = nodes
        .as_array()
        .into_iter()
        .flatten()
        .find(|node| node["node-name"] == "disk0");
    let drive = || qmp_drive(&nodes);
    if let Some(node) = node.or_else(drive) {
        add("cache.direct", Some(node["cache"]["direct"].clone()));
        add("cache.no-flush", Some(node["cache"]["no-flush"].clone()));
        add("write cache", Some(node["cache"]["writeback"].clone()));
        add("format", Some(node["drv"].clone()));
    }
    Ok(effective)
}

/// The node of a `-drive`: QEMU generates its name.
fn qmp_drive(nodes: &Value) -> Option<&Value> {
    nodes.as_array()?.iter().find(|node| {
        node["node-name"]
            .as_str()
            .is_some_and(|name| name.starts_with("#block"))
    })
}
