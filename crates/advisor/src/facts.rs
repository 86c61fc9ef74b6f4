//! Facts about a host: collected on it, or read from a file that `ringdisk check --collect` wrote on another host.
//!
//! The file is JSON. Its keys are the names of [properties](crate::model::PROPERTIES) without the prefix. Facts that cannot
//! be collected may be added manually, such as `"ceph": {"media": "hdd"}`:
//!
//! ```json
//! { "format": "ringdisk-facts-1", "name": "host1", "fingerprint": "…",
//!   "host": { "kernel": "6.1.0", "io-uring": "on" }, "ceph": {},
//!   "devices": { "nvme0n1": { "rotational": "no" } },
//!   "files": { "/dev/vg0/vm1": { "kind": "block", "lvm": "thick" } } }
//! ```

pub mod collect;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use thiserror::Error;

use crate::defaults;
use crate::model::{Data, Kind, Origin, PROPERTIES, Table, Vm};

/// The format of a facts file.
pub const FORMAT: &str = "ringdisk-facts-1";

/// The maximum size of a facts file.
pub const BYTES_MAX: usize = 64 << 20;

type Map = BTreeMap<String, Json>;

/// The known properties of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// [`FORMAT`].
    pub format: String,
    /// The host's name.
    #[serde(default)]
    pub name: String,
    /// Identifies the host in the results of `ringdisk lab`.
    #[serde(default)]
    pub fingerprint: String,
    /// Properties `host.`
    #[serde(default)]
    pub host: Map,
    /// Properties `ceph.`
    #[serde(default)]
    pub ceph: Map,
    /// Properties `device.`, by name.
    #[serde(default)]
    pub devices: BTreeMap<String, Map>,
    /// Properties `backing.`, by path.
    #[serde(default)]
    pub files: BTreeMap<String, Map>,
}

/// A facts file that cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{name}:{line}:{column}: {problem}")]
pub struct FactsError {
    pub name: String,
    pub line: usize,
    pub column: usize,
    pub problem: String,
}

impl Facts {
    /// Reads a facts file. Returns a note for each unknown or invalid fact.
    ///
    /// # Errors
    /// The file is not a valid facts file.
    pub fn parse(name: &str, text: &str) -> Result<(Self, Vec<String>), FactsError> {
        let fail = |line, column, problem: String| FactsError {
            name: name.to_owned(),
            line,
            column,
            problem,
        };
        if text.len() > BYTES_MAX {
            let problem = format!("the file is larger than {BYTES_MAX} bytes");
            return Err(fail(1, 1, problem));
        }
        let facts: Self =
            serde_json::from_str(text).map_err(|e| fail(e.line(), e.column(), e.to_string()))?;
        if facts.format != FORMAT {
            let problem = format!(
                "the format is '{}', and must be '{FORMAT}'; write the file again with --collect",
                facts.format
            );
            return Err(fail(1, 1, crate::text::printable(&problem)));
        }
        let mut notes = Vec::new();
        let mut check = |prefix: &str, map: &Map| {
            for (key, value) in map {
                if let Err(problem) = property(prefix, key, value) {
                    notes.push(crate::text::printable(&format!(
                        "{name}: {prefix}.{key}: {problem}"
                    )));
                }
            }
        };
        check("host", &facts.host);
        check("ceph", &facts.ceph);
        facts.devices.values().for_each(|map| check("device", map));
        facts.files.values().for_each(|map| check("backing", map));
        notes.truncate(100);
        Ok((facts, notes))
    }

    /// The `host.` and `ceph.` properties.
    pub fn table(&self) -> Table {
        let mut table = Table::default();
        fill(&mut table, "host", &self.host);
        fill(&mut table, "ceph", &self.ceph);
        table
    }

    /// The name and the properties of each block device.
    pub fn devices(&self) -> Vec<(String, Table)> {
        let each = |(name, map): (&String, &Map)| {
            let mut table = Table::default();
            table.set("device.name", name.clone(), Origin::Fact("host".into()));
            fill(&mut table, "device", map);
            (name.clone(), table)
        };
        self.devices.iter().map(each).collect()
    }

    /// Adds the properties of their storage to a VM's disks.
    pub fn join(&self, vm: &mut Vm) {
        if let Some(version) = self
            .host
            .get("qemu")
            .and_then(Json::as_str)
            .and_then(|text| text.parse::<crate::version::Version>().ok())
            && vm.table.get("vm.qemu").is_none()
        {
            vm.table
                .set("vm.qemu", version, Origin::Fact("QEMU on the host".into()));
        }
        defaults::removed_machine(vm);
        for disk in &mut vm.disks {
            if let Some(map) = self.files.get(&disk.file) {
                fill(&mut disk.table, "backing", map);
                if disk
                    .table
                    .get("disk.format")
                    .is_some_and(|value| value.data == Data::Unknown)
                {
                    let word = if map.contains_key("qcow2-cluster-size") {
                        "qcow2"
                    } else {
                        "raw"
                    };
                    disk.table
                        .set("disk.format", word, Origin::Fact("the file".into()));
                }
            }
            defaults::l2_cache(disk);
        }
    }
}

fn fill(table: &mut Table, prefix: &str, map: &Map) {
    for (key, value) in map {
        if let Ok((name, data)) = property(prefix, key, value) {
            table.set(name, data, Origin::Fact("host".into()));
        }
    }
}

/// A property in a facts file.
fn property(prefix: &str, key: &str, value: &Json) -> Result<(&'static str, Data), String> {
    let known = PROPERTIES.iter().find(|property| {
        property
            .name
            .strip_prefix(prefix)
            .and_then(|rest| rest.strip_prefix('.'))
            == Some(key)
    });
    let property = known.ok_or("unknown fact")?;
    let data = match (property.kind, value) {
        (Kind::Word(_), Json::Bool(flag)) => Data::from(*flag),
        (Kind::Word(_), Json::String(word)) => Data::from(word.clone()),
        (Kind::Number, Json::Number(number)) => {
            Data::Number(number.as_u64().ok_or("not a whole number")?)
        }
        (Kind::Version, Json::String(text)) => {
            Data::Version(text.parse().map_err(|()| "not a version")?)
        }
        _ => return Err("value of the wrong type".into()),
    };
    if !property.allows(&data) {
        return Err(format!("'{data}' is not a possible value"));
    }
    Ok((property.name, data))
}
