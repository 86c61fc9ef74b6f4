//! The state file: changes that were made at run time, for the next start.
//!
//! It has only what differs from the command line and the configuration, together with what these said at the time. Where
//! they have changed by the next start, they win.

pub mod store;

use std::collections::BTreeMap;
use std::time::Duration;

use block::ThrottleLimits;
use datapath::Polling;
use serde::{Deserialize, Serialize};

use crate::config::disk_keys;
use crate::config::export::ExportSpec;
use crate::config::limits;
use crate::config::spec::{self, DiskSpec};
use crate::config::{POLL_CPU, POLL_MAX_US_MAX, ThreadSpec};

/// Longest file that is read, in bytes: 4096 disks, each of them moved, with paths of 1 KiB.
pub const BYTES_MAX: u64 = 16 << 20;

/// The only version of the file.
const VERSION: u32 = 1;

/// What was changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// Disks that were attached, and those that are otherwise than they were written down.
    pub disks: Vec<DiskOverride>,
    /// Disks that were detached, as they were written down.
    pub gone: Vec<DiskSpec>,
    /// Opened files that are not served under their own name.
    pub nodes: Vec<NodeOverride>,
    pub exports: Vec<ExportOverride>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
    /// Guests' choices of a write cache, by export.
    pub write_caches: BTreeMap<String, bool>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DiskOverride {
    pub disk: DiskSpec,
    /// How it was written down, if it was.
    pub instead_of: Option<DiskSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NodeOverride {
    pub disk: DiskSpec,
    /// The node that it lies on.
    pub over: Option<String>,
}

/// A node that is served, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportOverride {
    pub node: String,
    pub spec: ExportSpec,
}

/// The file, as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Document {
    version: u32,
    disks: Vec<DiskEntry>,
    gone: Vec<String>,
    nodes: Vec<NodeEntry>,
    exports: Vec<ExportEntry>,
    throttle_groups: Vec<GroupEntry>,
    iothreads: Vec<ThreadEntry>,
    write_caches: BTreeMap<String, bool>,
}

/// A disk is written as on the command line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskEntry {
    disk: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instead_of: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    disk: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    over: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ExportEntry {
    id: String,
    node: String,
    /// The export, as a disk without data on the command line.
    disk: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    logical_block_size: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupEntry {
    name: String,
    limits: BTreeMap<String, u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ThreadEntry {
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpus: Option<String>,
    poll_max_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    poll_cpu: Option<u8>,
}

impl Overrides {
    /// Parses the file.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let text = |e: serde_json::Error| e.to_string();
        let Versioned { version } = serde_json::from_slice(bytes).map_err(text)?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, and only {VERSION} is known"
            ));
        }
        let document: Document = serde_json::from_slice(bytes).map_err(text)?;
        let disk = |text: &str| text.parse::<DiskSpec>().map_err(|e| e.to_string());
        let name = |text: &str| spec::name(text);
        Ok(Self {
            disks: each(&document.disks, |entry| {
                Ok(DiskOverride {
                    disk: disk(&entry.disk)?,
                    instead_of: entry.instead_of.as_deref().map(disk).transpose()?,
                })
            })?,
            gone: each(&document.gone, |text| disk(text))?,
            nodes: each(&document.nodes, |entry| {
                Ok(NodeOverride {
                    disk: disk(&entry.disk)?,
                    over: entry.over.as_deref().map(name).transpose()?,
                })
            })?,
            exports: each(&document.exports, |entry| {
                let disk = disk(&entry.disk)?;
                if disk.socket.is_none() {
                    return Err(format!("export '{}' has no socket", entry.id));
                }
                let logical_block = entry.logical_block_size;
                if let Some(bytes) = logical_block {
                    disk_keys::check("logical-block-size", bytes)
                        .map_err(|e| format!("export '{}': logical-block-size: {e}", entry.id))?;
                }
                Ok(ExportOverride {
                    node: name(&entry.node)?,
                    spec: ExportSpec {
                        id: name(&entry.id)?,
                        logical_block,
                        ..ExportSpec::from(&disk)
                    },
                })
            })?,
            groups: each(&document.throttle_groups, |entry| {
                let group = name(&entry.name)?;
                let mut given = entry.limits.clone();
                let mut set = ThrottleLimits::NONE;
                limits::change(&mut set, |key| Ok::<_, String>(given.remove(key)))?;
                if let Some(key) = given.keys().next() {
                    return Err(format!(
                        "throttle group '{group}': there is no limit '{key}'"
                    ));
                }
                let sound = set.check().map_err(|e| e.to_string());
                sound.map(|()| (group, set))
            })?,
            threads: each(&document.iothreads, |entry| {
                if entry.poll_max_us > POLL_MAX_US_MAX {
                    return Err(format!("I/O thread '{}': poll-max-us", entry.id));
                }
                let poll_cpu = entry.poll_cpu.unwrap_or(Polling::default().cpu);
                if !POLL_CPU.contains(&poll_cpu.into()) {
                    return Err(format!("I/O thread '{}': poll-cpu", entry.id));
                }
                let cpus = entry.cpus.as_deref().map(str::parse).transpose()?;
                let thread = ThreadSpec {
                    cpus: cpus.unwrap_or_default(),
                    polling: Polling {
                        max: Duration::from_micros(entry.poll_max_us),
                        cpu: poll_cpu,
                    },
                };
                Ok((name(&entry.id)?, thread))
            })?,
            write_caches: document.write_caches,
        })
    }

    /// The file's text.
    pub fn text(&self) -> String {
        let document = Document {
            version: VERSION,
            disks: collect(&self.disks, |d| DiskEntry {
                disk: d.disk.to_string(),
                instead_of: d.instead_of.as_ref().map(DiskSpec::to_string),
            }),
            gone: collect(&self.gone, DiskSpec::to_string),
            nodes: collect(&self.nodes, |node| NodeEntry {
                disk: node.disk.to_string(),
                over: node.over.clone(),
            }),
            exports: collect(&self.exports, |export| ExportEntry {
                id: export.spec.id.clone(),
                node: export.node.clone(),
                disk: export.spec.on_null_disk().to_string(),
                logical_block_size: export.spec.logical_block,
            }),
            throttle_groups: collect(&self.groups, |(name, limits)| GroupEntry {
                name: name.clone(),
                limits: limits::pairs(limits)
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect(),
            }),
            iothreads: collect(&self.threads, |(id, thread)| ThreadEntry {
                id: id.clone(),
                cpus: (!thread.cpus.is_empty()).then(|| thread.cpus.to_string()),
                poll_max_us: thread.polling.max.as_micros() as u64,
                poll_cpu: Some(thread.polling.cpu).filter(|&cpu| cpu != Polling::default().cpu),
            }),
            write_caches: self.write_caches.clone(),
        };
        // Texts, numbers and maps with keys of text: there is nothing that JSON lacks.
        serde_json::to_string_pretty(&document).unwrap_or_default() + "\n"
    }

    /// What is to be served, if this is written down.
    pub fn apply(&self, written: &[DiskSpec]) -> Start {
        let mut start = Start::default();
        for disk in written {
            let instead = self
                .disks
                .iter()
                .find(|d| d.instead_of.as_ref() == Some(disk));
            match instead {
                _ if self.gone.contains(disk) => {}
                Some(changed) => start.disks.push(changed.disk.clone()),
                None => start.disks.push(self.as_changed(disk)),
            }
        }
        for changed in &self.disks {
            let there = written.iter().any(|disk| disk.name == changed.disk.name);
            match &changed.instead_of {
                Some(before) if written.contains(before) => {}
                // It is written down otherwise by now, or no longer.
                Some(_) => start.outdated.push(changed.disk.name.clone()),
                None if there => start.outdated.push(changed.disk.name.clone()),
                None => start.more.push(changed.disk.clone()),
            }
        }
        start
    }

    /// A disk of which something else is written down by now. Only who writes down another file means that: its guest
    /// has long left the one that was written down before. The same holds for limits.
    fn as_changed(&self, disk: &DiskSpec) -> DiskSpec {
        let mut its = self.disks.iter();
        let changed = its.find_map(|changed| {
            let before = changed.instead_of.as_ref();
            let before = before.filter(|before| before.name == disk.name)?;
            Some(disk.with_overrides(before, &changed.disk))
        });
        changed.unwrap_or_else(|| disk.clone())
    }
}

/// What is to be served.
#[derive(Debug, Default, PartialEq)]
pub struct Start {
    /// What is written down, as it was changed.
    pub disks: Vec<DiskSpec>,
    /// What was attached besides.
    pub more: Vec<DiskSpec>,
    /// Disks of which what is written down has changed since; their files and limits have not, if these are written down as
    /// before.
    pub outdated: Vec<String>,
}

fn each<T, U>(entries: &[T], parse: impl FnMut(&T) -> Result<U, String>) -> Result<Vec<U>, String> {
    entries.iter().map(parse).collect()
}

fn collect<T, U>(from: &[T], entry: impl FnMut(&T) -> U) -> Vec<U> {
    from.iter().map(entry).collect()
}

#[cfg(any(test, fuzzing))]
impl Overrides {
    /// Panics unless what can be parsed reads back as it is written: for tests and fuzzing.
    pub fn check(bytes: &[u8]) {
        if let Ok(changed) = Self::parse(bytes) {
            let disks = changed.disks.iter().map(|changed| &changed.disk);
            disks.chain(&changed.gone).for_each(DiskSpec::assert_sound);
            let text = changed.text();
            assert_eq!(Self::parse(text.as_bytes()), Ok(changed), "{text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn disk(text: &str) -> DiskSpec {
        text.parse().unwrap()
    }

    fn changed() -> Overrides {
        let mut limits = ThrottleLimits::NONE;
        limits.iops_total.average = 100;
        Overrides {
            disks: vec![
                DiskOverride {
                    disk: disk("/vms/b,,2.raw,name=b,iops=7,cache=writeback"),
                    instead_of: Some(disk("/vms/b.raw")),
                },
                DiskOverride {
                    disk: disk("/vms/new.qcow2,queues=3,iothreads=0,2,l2-cache-size=4M"),
                    instead_of: None,
                },
            ],
            gone: vec![disk("/vms/gone.raw")],
            nodes: vec![NodeOverride {
                disk: disk("/vms/x.raw,name=top"),
                over: Some("below".into()),
            }],
            exports: vec![ExportOverride {
                node: "top".into(),
                spec: ExportSpec {
                    logical_block: Some(4096),
                    ..ExportSpec::from(&disk(
                        "null:512,name=e,socket=/run/e.sock,socket-mode=0660,queues=2,queue-size=128,\
                         iothreads=t,readonly=on,cache=directsync",
                    ))
                },
            }],
            groups: vec![("g".into(), limits)],
            threads: vec![("t".into(), ThreadSpec::default())],
            write_caches: [("b".into(), false)].into(),
        }
    }

    #[test]
    fn it_reads_back_as_written() {
        let text = changed().text();
        assert_eq!(Overrides::parse(text.as_bytes()), Ok(changed()), "{text}");
    }

    #[test]
    fn what_is_written_down_since_wins() {
        let changed = changed();
        let written = ["/vms/a.raw", "/vms/b.raw", "/vms/gone.raw"].map(disk);
        let start = changed.apply(&written);
        let names = |disks: &[DiskSpec]| disks.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&start.disks), ["a", "b"]);
        assert_eq!(start.disks[1], changed.disks[0].disk);
        assert_eq!(names(&start.more), ["new"]);
        assert!(start.outdated.is_empty());

        // What it is on, and its limits, are not outdated by what else is said of it.
        let later = ["/vms/b.raw,queues=9", "/vms/b.raw,format=raw,iops=8"].map(disk);
        let start = later
            .each_ref()
            .map(|b| changed.apply(std::slice::from_ref(b)));
        assert_eq!(
            start[0].disks,
            [disk("/vms/b,,2.raw,name=b,queues=9,iops=7")]
        );
        assert_eq!(start[1].disks, later[1..]);
        assert_eq!(start[0].outdated, ["b"]);

        let later = ["/x/b.raw,queues=9", "/vms/gone.raw,queues=9", "/x/new.raw"].map(disk);
        let start = changed.apply(&later);
        let limited = disk("/x/b.raw,queues=9,iops=7");
        assert_eq!(start.disks[0], limited);
        assert_eq!(start.disks[1..], later[1..]);
        assert!(start.more.is_empty());
        assert_eq!(start.outdated, ["b", "new"]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let text = changed().text();
        for (from, to, says) in [
            ("\"version\": 1", "\"version\": 2", "version 2"),
            ("\"gone\"", "\"going\"", "unknown field"),
            ("queues=3", "queues=0", "1 to 256"),
            ("\"iops\"", "\"iopz\"", "no limit 'iopz'"),
            ("\"top\"", "\"../top\"", "not a letter"),
            (",socket=/run/e.sock", "", "no socket"),
            ("4096", "4095", "logical-block-size"),
            (
                "\"poll-max-us\": 100",
                "\"poll-max-us\": 99999999",
                "poll-max-us",
            ),
            (
                "\"poll-max-us\": 100",
                "\"poll-max-us\": 100, \"poll-cpu\": 0",
                "poll-cpu",
            ),
        ] {
            assert!(text.contains(from), "{from}: {text}");
            let error = Overrides::parse(text.replace(from, to).as_bytes()).unwrap_err();
            assert!(error.contains(says), "{to}: {error}");
        }
        for len in 0..text.trim_end().len() {
            assert!(Overrides::parse(&text.as_bytes()[..len]).is_err(), "{len}");
        }
    }

    /// What fuzzing starts from, and what it has found.
    #[test]
    fn fuzzing_seeds_are_sound() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/state");
        let mut sound = 0;
        for file in std::fs::read_dir(seeds).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            Overrides::check(&bytes);
            match Overrides::parse(&bytes) {
                Ok(_) => sound += 1,
                Err(e) => println!("{}: {e}", path.display()),
            }
        }
        assert!(sound >= 3);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(at in 0_usize..2000, to in any::<u8>(), cut in 0_usize..2000) {
            let mut bytes = changed().text().into_bytes();
            let len = bytes.len();
            bytes[at % len] = to;
            bytes.remove(cut % len);
            Overrides::check(&bytes);
        }
    }
}
