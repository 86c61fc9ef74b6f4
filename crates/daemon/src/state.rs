//! The state file: changes that were made at run time, for the next start.
//!
//! It contains only what differs from the configuration (the command line and the configuration file), and the
//! configuration that each change replaced. If that configuration has changed by the next start, the change is dropped.

pub mod left;
pub mod store;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use block::ThrottleLimits;
use datapath::Polling;
use serde::{Deserialize, Serialize};
use tracing::error;

use self::left::LeftFiles;
use crate::config::disk_keys;
use crate::config::export::ExportSpec;
use crate::config::limits;
use crate::config::sockets;
use crate::config::spec::{self, DiskSpec, FileSpec};
use crate::config::{Config, POLL_CPU, POLL_MAX_US_MAX, ThreadSpec};

/// Limit of the file in bytes: 4096 disks, each of them moved, with paths of 1 KiB.
pub const BYTES_MAX: u64 = 16 << 20;

/// The only version of the format.
const VERSION: u32 = 1;

/// Changes made at run time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// Disks that were attached, and configured disks that were changed.
    pub disks: Vec<DiskOverride>,
    /// Configured disks that were detached, as they were configured.
    pub detached: Vec<DiskSpec>,
    /// Opened files that are not served under their own name.
    pub nodes: Vec<NodeOverride>,
    pub exports: Vec<ExportOverride>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
    /// What guests depend on and no configuration says, by export.
    pub remembered: BTreeMap<String, Remembered>,
    /// The files that disks have left.
    pub left: LeftFiles,
}

/// What a guest depends on and no configuration says. It stays with an export of this name, however often that is removed and added
/// again, and with its socket, where the guest connects, whatever the export there is called: that is its key if another has the name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Remembered {
    /// The number of queues, if the configuration leaves it to ringdisk: later starts may find other CPUs, but the
    /// guest's device keeps its queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// The guest's choice of a write cache, if it differs from the cache mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_cache: Option<bool>,
    /// The socket of the export, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// The file of the export, as text: tells it from others if it gets another name and another socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl Remembered {
    /// Whether a guest depends on nothing of it.
    pub fn is_empty(&self) -> bool {
        self.queues.is_none() && self.write_cache.is_none()
    }

    /// Whether it is remembered of a socket, which is no name of an export.
    pub fn is_of_socket(&self, id: &str) -> bool {
        self.socket
            .as_ref()
            .is_some_and(|socket| socket.as_os_str() == id)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct DiskOverride {
    pub disk: DiskSpec,
    /// The configuration that the change replaced. `None` for a disk that was attached.
    pub configured: Option<DiskSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NodeOverride {
    pub disk: DiskSpec,
    /// The node below it, whose file it uses.
    pub child: Option<String>,
}

/// An export of a node.
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
    /// Numbers of queues that are defaults. One version wrote them here, which earlier ones cannot read: see
    /// [`Overrides::queues`].
    #[serde(default, skip_serializing)]
    queues: Option<BTreeMap<String, u16>>,
}

/// A disk, in the syntax of the command line.
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

impl Document {
    fn remembered(&self) -> BTreeMap<String, Remembered> {
        let mut all: BTreeMap<String, Remembered> = BTreeMap::new();
        for (id, on) in &self.write_caches {
            all.entry(id.clone()).or_default().write_cache = Some(*on);
        }
        all
    }
}

impl Overrides {
    /// Parses the file.
    ///
    /// # Errors
    /// The file is invalid; the error says where.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let text = |e: serde_json::Error| e.to_string();
        let Versioned { version } = serde_json::from_slice(bytes).map_err(text)?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}; this ringdisk reads only version {VERSION}"
            ));
        }
        let document: Document = serde_json::from_slice(bytes).map_err(text)?;
        let remembered = document.remembered();
        let disk = |text: &str| text.parse::<DiskSpec>().map_err(|e| e.to_string());
        let name = |text: &str| spec::name(text);
        let mut overrides = Self {
            disks: each(&document.disks, |entry| {
                Ok(DiskOverride {
                    disk: disk(&entry.disk)?,
                    configured: entry.instead_of.as_deref().map(disk).transpose()?,
                })
            })?,
            detached: each(&document.gone, |text| disk(text))?,
            nodes: each(&document.nodes, |entry| {
                Ok(NodeOverride {
                    disk: disk(&entry.disk)?,
                    child: entry.over.as_deref().map(name).transpose()?,
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
                set.check().map_err(|e| e.to_string())?;
                Ok((group, set))
            })?,
            threads: each(&document.iothreads, |entry| {
                if entry.poll_max_us > POLL_MAX_US_MAX {
                    return Err(format!(
                        "I/O thread '{}': poll-max-us is above {POLL_MAX_US_MAX}",
                        entry.id
                    ));
                }
                let poll_cpu = entry.poll_cpu.unwrap_or(Polling::default().cpu);
                if !POLL_CPU.contains(&poll_cpu.into()) {
                    return Err(format!(
                        "I/O thread '{}': poll-cpu is not in {POLL_CPU:?}",
                        entry.id
                    ));
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
            remembered,
            // In a file of its own.
            left: LeftFiles::default(),
        };
        if let Some(queues) = document.queues {
            overrides.add_queues(queues)?;
        }
        Ok(overrides)
    }

    /// Adds numbers of queues that are defaults, by export. They are kept apart from the [text](Self::text), in which the
    /// previous version accepts nothing that it does not know.
    ///
    /// # Errors
    /// One of them is not a number of queues.
    pub fn add_queues(&mut self, queues: BTreeMap<String, u16>) -> Result<(), String> {
        for (id, queues) in queues {
            disk_keys::check("queues", queues).map_err(|e| format!("queues of '{id}': {e}"))?;
            self.remembered.entry(id).or_default().queues = Some(queues);
        }
        Ok(())
    }

    /// The numbers of queues that are defaults, by export.
    pub fn queues(&self) -> BTreeMap<String, u16> {
        self.remembered_as(|it| it.queues)
    }

    /// Adds the sockets of the exports of which something is remembered.
    pub fn add_sockets(&mut self, sockets: BTreeMap<String, PathBuf>) {
        for (id, socket) in sockets {
            self.remembered.entry(id).or_default().socket = Some(socket);
        }
        self.remembered.retain(|_, it| !it.is_empty());
    }

    /// The sockets of the exports of which something is remembered. One whose path is no text is left out.
    pub fn sockets(&self) -> BTreeMap<String, PathBuf> {
        let mut sockets = self.remembered_as(|it| it.socket.clone());
        sockets.retain(|_, socket| socket.to_str().is_some());
        sockets
    }

    /// What guests depend on, by export: all of it is in one file, which is replaced as a whole.
    pub fn guests(&self) -> BTreeMap<String, Remembered> {
        let mut all = self.remembered.clone();
        for it in all.values_mut() {
            it.socket.take_if(|socket| socket.to_str().is_none());
        }
        all
    }

    /// Whether the same is remembered, beside the sockets.
    pub fn agrees_with(&self, guests: &BTreeMap<String, Remembered>) -> bool {
        let of = |all: &BTreeMap<String, Remembered>| -> BTreeMap<String, Remembered> {
            let without = |it: &Remembered| Remembered {
                socket: None,
                file: None,
                ..it.clone()
            };
            let all = all.iter().map(|(id, it)| (id.clone(), without(it)));
            all.filter(|(_, it)| !it.is_empty()).collect()
        };
        of(&self.remembered) == of(guests)
    }

    /// Remembers these guests, and no others.
    ///
    /// # Errors
    /// One of them has no number of queues.
    pub fn set_guests(&mut self, guests: BTreeMap<String, Remembered>) -> Result<(), String> {
        for (id, queues) in guests.iter().filter_map(|(id, it)| Some((id, it.queues?))) {
            disk_keys::check("queues", queues).map_err(|e| format!("queues of '{id}': {e}"))?;
        }
        self.remembered = guests;
        self.remembered.retain(|_, it| !it.is_empty());
        Ok(())
    }

    /// The file's text.
    pub fn text(&self) -> String {
        let document = Document {
            version: VERSION,
            disks: collect(&self.disks, |d| DiskEntry {
                disk: d.disk.to_string(),
                instead_of: d.configured.as_ref().map(DiskSpec::to_string),
            }),
            gone: collect(&self.detached, DiskSpec::to_string),
            nodes: collect(&self.nodes, |node| NodeEntry {
                disk: node.disk.to_string(),
                over: node.child.clone(),
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
            write_caches: self.remembered_as(|it| it.write_cache),
            queues: None,
        };
        // Cannot fail: only strings, numbers, and maps with string keys.
        serde_json::to_string_pretty(&document).unwrap_or_default() + "\n"
    }

    fn remembered_as<T>(&self, field: fn(&Remembered) -> Option<T>) -> BTreeMap<String, T> {
        let each = self.remembered.iter();
        each.filter_map(|(id, it)| Some((id.clone(), field(it)?)))
            .collect()
    }

    /// With numbers of queues that are defaults told apart: disks that are configured without one had the default. Versions
    /// that gave every disk a number did not say which of them were defaults.
    pub fn with_default_queues(mut self, configured: &[DiskSpec]) -> Self {
        let changed = self.disks.iter_mut();
        let changed = changed.flat_map(|d| [Some(&mut d.disk), d.configured.as_mut()]);
        for disk in self.detached.iter_mut().chain(changed.flatten()) {
            let by_default = |other: &DiskSpec| other.name == disk.name && other.queues.is_none();
            if configured.iter().any(by_default) {
                let remembered = self.remembered.entry(disk.name.clone()).or_default();
                remembered.queues = disk.queues.take().or(remembered.queues);
            }
        }
        self
    }

    /// Whether a configured disk was detached.
    pub fn is_detached(&self, name: &str) -> bool {
        self.detached.iter().any(|disk| disk.name == name)
    }

    /// These, with the files that disks have left by the state file if there are none: older versions do not pass them on.
    pub fn with_left(mut self, persisted: Option<Self>) -> Self {
        if let (true, Some(persisted)) = (self.left.is_empty(), persisted) {
            self.left = persisted.left;
        }
        self
    }

    /// A configuration without disks whose names or sockets commands have given to others: the VMs of those go on with what they
    /// have, as a reload refuses such a disk. The log names each.
    pub fn without_conflicts(&self, mut config: Config) -> Config {
        let Config { disks, exports, .. } = &mut config;
        disks.retain(|disk| {
            let DiskSpec { name, file, .. } = disk;
            let Some(other) = self.conflict_with(disk) else {
                return true;
            };
            error!(
                "disk {name}: is not served as it is configured, from {file}: '{other}' has its name or its socket, was added by a \
                 command, and keeps it for its VM; give the configured one others, or end that one ('ringdisk detach {other}'), \
                 and reload"
            );
            exports.retain(|export| export.node != *name);
            false
        });
        config
    }

    /// What a command has added with the name or the socket of a configured disk, on another file.
    fn conflict_with(&self, disk: &DiskSpec) -> Option<&str> {
        let socket = sockets::path(disk);
        let is_other = |it: &DiskSpec| !is_same_file(&it.file, &disk.file);
        let has_name = |it: &DiskSpec| it.name == disk.name && is_other(it);
        let is_at = |it: &DiskSpec| sockets::path(it) == socket && is_other(it);
        let attached = self.disks.iter().filter(|it| it.configured.is_none());
        let mut attached = attached.map(|it| &it.disk);
        let mut nodes = self.nodes.iter().map(|it| &it.disk);
        let named = attached.find(|it| has_name(it) || is_at(it));
        if let Some(named) = named.or_else(|| nodes.find(|it| has_name(it))) {
            return Some(&named.name);
        }
        // One of the disk itself, or of its file, is no other's.
        let has_file = |node: &str| {
            let mut nodes = self.nodes.iter().map(|it| &it.disk);
            node == disk.name || nodes.any(|it| it.name == node && !is_other(it))
        };
        let mut exports = self.exports.iter();
        let at = exports.find(|it| it.spec.socket == socket && !has_file(&it.node));
        at.map(|it| it.spec.id.as_str())
    }

    /// The disks to be served, given the configured ones.
    pub fn apply(&self, configured: &[DiskSpec]) -> Start {
        let mut start = Start::default();
        for disk in configured {
            let mut overrides = self.disks.iter();
            let unchanged = overrides.find(|d| d.configured.as_ref() == Some(disk));
            match unchanged {
                _ if self.detached.contains(disk) => {}
                Some(changed) => start.disks.push(changed.disk.clone()),
                None => start.disks.push(self.reconfigured(disk)),
            }
        }
        for changed in &self.disks {
            let name = &changed.disk.name;
            match &changed.configured {
                Some(before) if configured.contains(before) => {}
                Some(_) => start.outdated.push(name.clone()),
                None if configured.iter().any(|disk| disk.name == *name) => {
                    start.outdated.push(name.clone());
                }
                // It was configured since, under another name.
                None if configured.iter().any(|disk| {
                    !self.detached.contains(disk) && is_converted(&changed.disk, disk)
                }) => {}
                None => start.attached.push(changed.disk.clone()),
            }
        }
        start
    }

    /// Whether a command has put a disk into a throttle group.
    pub fn needs_group(&self, name: &str) -> bool {
        let mut disks = self.changed_disks();
        disks.any(|(disk, before)| {
            let group = |disk: &DiskSpec| disk.throttle_group.as_deref() == Some(name);
            group(disk) && !before.is_some_and(group)
        })
    }

    /// Whether a command has given a disk or an export an I/O thread.
    pub fn needs_thread(&self, id: &str) -> bool {
        let has = |threads: &[String]| threads.iter().any(|other| other == id);
        let mut disks = self.changed_disks();
        let mut exports = self.exports.iter();
        disks.any(|(disk, before)| {
            has(&disk.iothreads) && !before.is_some_and(|it| has(&it.iothreads))
        }) || exports.any(|export| has(&export.spec.iothreads))
    }

    /// The disks and nodes that commands have made or changed, with the configuration of those that have one.
    fn changed_disks(&self) -> impl Iterator<Item = (&DiskSpec, Option<&DiskSpec>)> {
        let disks = self.disks.iter();
        let disks = disks.map(|it| (&it.disk, it.configured.as_ref()));
        disks.chain(self.nodes.iter().map(|it| (&it.disk, None)))
    }

    /// A disk whose configuration may have changed since a command changed the disk. The command's file stays, because
    /// the guest has written to it, unless the configured file has changed. The same applies to limits.
    fn reconfigured(&self, disk: &DiskSpec) -> DiskSpec {
        let mut overrides = self.disks.iter();
        let changed = overrides.find_map(|changed| {
            let before = changed.configured.as_ref();
            let before = before.filter(|before| before.name == disk.name)?;
            Some(disk.with_overrides(before, &changed.disk))
        });
        changed.unwrap_or_else(|| disk.clone())
    }
}

/// Whether an attached disk is configured now, at the same socket.
fn is_converted(attached: &DiskSpec, disk: &DiskSpec) -> bool {
    sockets::path(attached) == sockets::path(disk) && is_same_file(&attached.file, &disk.file)
}

/// Whether both are one file, perhaps by different paths. Asks storage only if the paths differ.
fn is_same_file(one: &FileSpec, other: &FileSpec) -> bool {
    match (one, other) {
        (FileSpec::Path(one), FileSpec::Path(other)) if one != other => {
            let both = [one, other].map(|path| path.canonicalize());
            matches!(both, [Ok(one), Ok(other)] if one == other)
        }
        _ => one == other,
    }
}

/// The disks to be served.
#[derive(Debug, Default, PartialEq)]
pub struct Start {
    /// Configured disks, with the changes made at run time.
    pub disks: Vec<DiskSpec>,
    /// Disks that were attached at run time.
    pub attached: Vec<DiskSpec>,
    /// Names of disks that were changed at run time and whose configuration has changed since. Their changes are
    /// dropped, except for a file or limits whose configuration is the same as before.
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
    /// Panics unless a valid file reads back as it is written: for tests and fuzzing.
    pub fn check(bytes: &[u8]) {
        if let Ok(overrides) = Self::parse(bytes) {
            let disks = overrides.disks.iter().map(|changed| &changed.disk);
            disks
                .chain(&overrides.detached)
                .for_each(DiskSpec::assert_sound);
            let text = overrides.text();
            let mut read = Self::parse(text.as_bytes()).expect("what was written");
            read.add_queues(overrides.queues())
                .expect("numbers of queues");
            read.add_sockets(overrides.sockets());
            assert_eq!(read, overrides, "{text}");
        }
    }
}

#[cfg(test)]
mod tests;
