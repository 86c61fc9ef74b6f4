//! The effective settings of a configuration, read back from QEMU's monitor and from the guest's `/sys`. They may differ
//! from the plan's.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use harness::qmp::Qmp;
use serde_json::{Value, json};

use crate::guest::{Guest, Shell, Stop};
use crate::plan::Settings;
use crate::plan::cpu_model::CpuModel;
use crate::plan::units::on_off;
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
    let cpu = settings.cpu.iter().flat_map(CpuModel::features);
    if cpu.into_iter().any(|(name, _)| name == "x2apic") {
        script += "x=off; grep -qw x2apic /proc/cpuinfo && x=on; echo \"guest x2apic=$x\"\n";
    }
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
    let iothreads = qmp.execute("query-iothreads", json!({})).ok();
    add(
        "iothreads",
        iothreads
            .as_ref()
            .map(|list| list.as_array().map_or(0, Vec::len).into()),
    );
    let polling_ns = iothreads.and_then(|list| list[0]["poll-max-ns"].as_u64());
    add(
        "poll-max-us",
        polling_ns.map(|ns| (ns as f64 / 1000.0).to_string().into()),
    );
    let cpu = cpu(&mut qmp, settings.cpu.as_ref())?;
    add("cpu", cpu.map(Value::from));
    let device = if settings.device == Device::VirtioScsi {
        "/machine/peripheral/scsi0"
    } else {
        "/machine/peripheral/dev0"
    };
    let mapping = qmp.property(device, "iothread-vq-mapping");
    let mapped = mapping.and_then(|list| Some(list.as_array()?.len()));
    add(
        "iothread",
        mapped.filter(|threads| *threads > 0).map(Value::from),
    );
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
        add("backing files", backing_files(&nodes, node));
    }
    Ok(effective)
}

/// The model of the virtual CPUs, with the features that the plan names.
fn cpu(qmp: &mut Qmp, asked: Option<&CpuModel>) -> Result<Option<String>> {
    let cpus = qmp.execute("query-cpus-fast", json!({}))?;
    let path = cpus[0]["qom-path"].as_str().unwrap_or_default();
    let Some(Value::String(kind)) = qmp.property(path, "type") else {
        return Ok(None);
    };
    let mut text = kind.strip_suffix("-x86_64-cpu").unwrap_or(&kind).to_owned();
    for (name, wanted) in asked.into_iter().flat_map(CpuModel::features) {
        let found = match qmp.property(path, name) {
            Some(Value::Bool(found)) => on_off(found),
            Some(Value::String(found)) => found,
            Some(other) => other.to_string(),
            None => continue,
        };
        // QEMU only warns of a feature that the accelerator or the processor lacks.
        ensure!(
            !["on", "off"].contains(&wanted) || found == wanted,
            "the plan has {name}={wanted}, and the guest's processor {name}={found}: QEMU, or this host, cannot have it \
             otherwise with {text}"
        );
        text += &format!(",{name}={found}");
    }
    Ok(Some(text))
}

/// The number of backing files that QEMU has opened below a node.
fn backing_files(nodes: &Value, node: &Value) -> Option<Value> {
    let all = nodes.as_array()?;
    let below = |node: &&Value| {
        let name = node["backing_file"].as_str()?;
        // The file itself is a node as well.
        all.iter()
            .find(|it| it["file"] == name && it["drv"] == node["drv"])
    };
    let depth = std::iter::successors(Some(node), below)
        .take(all.len())
        .count()
        - 1;
    (depth > 0).then(|| depth.into())
}

/// The node of a `-drive`: QEMU generates its name.
fn qmp_drive(nodes: &Value) -> Option<&Value> {
    nodes.as_array()?.iter().find(|node| {
        node["node-name"]
            .as_str()
            .is_some_and(|name| name.starts_with("#block"))
    })
}
