//! Results of `ringdisk lab` on this host. They replace the gain that a rule expects.
//!
//! A file is JSON. `ringdisk lab` writes one for each run, and `ringdisk check --measured` reads files and directories
//! of such files:
//!
//! ```json
//! { "format": "ringdisk-measured-2",
//!   "fingerprint": "host1 / Some CPU",
//!   "results": [
//!     { "recipe": "aio", "axis": "iothread", "from": "off", "to": "on", "scope": "guest",
//!       "storage": "block", "allocation": "full", "accelerator": "kvm",
//!       "pattern": { "rw": "randread", "bs": "4k", "iodepth": "1" },
//!       "with": { "device": "virtio-blk", "cache": "none", "aio": "native", "format": "raw" },
//!       "load": "randread 4k, depth 1", "metric": "iops",
//!       "gain-percent": 12.1, "interval-percent": [9.0, 15.2], "verdict": "gain" } ] }
//! ```
//!
//! - `fingerprint` is that of the [facts](crate::facts::Facts): results of other hosts are skipped.
//! - `recipe` is the plan's name. It is for the reader: plans can be renamed and edited, so the other fields decide to
//!   which findings a result belongs.
//! - `axis`, `from` and `to` use the terms of the lab's plans. For the axis `backing`, `from` and `to` are kinds of
//!   storage; for `preload`, names of libraries.
//! - `scope` is `guest` or `host`: whose setting `axis` is.
//! - `storage` is a word of the property `disk.protocol`, or `ram`, `zram` or `null`.
//! - `place` is the disk, device or directory that the plan names, such as `/dev/sda`, or nothing.
//! - `allocation` is `full`, `thin`, `varied` (the axis is `prefill`) or `unknown`.
//! - `accelerator` is `kvm`, `tcg`, or `none` for a load without a guest.
//! - `pattern` are keys of the load: `rw`, `bs` and `iodepth`, and all others that differ from the lab's defaults.
//! - `with` are the settings that both sides share: those of every disk, and all others that differ from the lab's
//!   defaults.
//! - `gain-percent` is by how much `to` is better than `from`: more IOPS or bytes per second, less latency or CPU. A rule
//!   about the opposite change uses the inverse.
//! - `interval-percent` is its confidence interval (95 %).
//! - `verdict` is `gain`, `loss`, `equivalent` or `undecided`.
//! - The axis `host` compares a guest with the host itself: `from` is `guest`, and `gain-percent` is by how much the
//!   host is faster.
//!
//! Files of the format `ringdisk-measured-1` lack the context, so their results belong to no finding.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{Disk, Origin, Table, Vm};
use crate::rules::{Allocation, Contrast, ContrastScope, FREE_SETTINGS, is_one_of};
use crate::text::printable;

/// The format of a results file.
pub const FORMAT: &str = "ringdisk-measured-2";

/// The format before, without the context of a result.
const FORMAT_OLD: &str = "ringdisk-measured-1";

/// The maximum size of a results file.
pub const BYTES_MAX: usize = 64 << 20;

/// The maximum number of results shown with a finding.
const SHOWN_MAX: usize = 64;

#[derive(Deserialize)]
struct Header {
    format: String,
    #[serde(default)]
    fingerprint: String,
}

#[derive(Deserialize)]
struct File {
    results: Vec<Entry>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    recipe: String,
    axis: String,
    from: String,
    to: String,
    scope: ContrastScope,
    storage: String,
    #[serde(default)]
    place: String,
    allocation: String,
    accelerator: String,
    pattern: BTreeMap<String, String>,
    with: BTreeMap<String, String>,
    #[serde(default)]
    load: String,
    #[serde(default)]
    metric: String,
    gain_percent: f64,
    interval_percent: [f64; 2],
    #[serde(default)]
    verdict: String,
}

/// Results of this host.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    results: Vec<Entry>,
    /// Whether figures of emulated guests are shown too. They say nothing about this host under KVM.
    pub emulated: bool,
}

/// What a finding is about, as far as results depend on it.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    /// How the disk's storage is accessed (`disk.protocol`), or that of each disk of the VM.
    pub storage: Vec<String>,
    /// The block device, if the finding is about one.
    pub device: Option<String>,
    /// Settings of the disk in the terms of the lab's plans, if they are known.
    pub settings: BTreeMap<&'static str, String>,
}

/// The measured effect of a change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The plan that measured it.
    pub recipe: String,
    pub load: String,
    /// `iops`, `latency`, …
    pub metric: String,
    /// The improvement in percent.
    pub percent: f64,
    /// The 95 % confidence interval of `percent`.
    pub interval: [f64; 2],
    /// `gain`, `loss`, `equivalent` or `undecided`.
    pub verdict: String,
    /// `kvm`, `tcg` or `none`.
    pub accelerator: String,
    /// The settings that both sides shared.
    pub with: BTreeMap<String, String>,
}

impl std::fmt::Display for Gain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [low, high] = self.interval;
        write!(f, "{:+.0} % [{low:.0}, {high:.0}]", self.percent)
    }
}

impl Measured {
    /// Adds the results of a file, unless they were measured on another host.
    ///
    /// # Errors
    /// The file is not a valid results file.
    pub fn add(&mut self, name: &str, text: &str, fingerprint: &str) -> Result<Added, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("{name}: the file is larger than {BYTES_MAX} bytes"));
        }
        let fail = |e: serde_json::Error| {
            let (line, column) = (e.line(), e.column());
            format!("{name}:{line}:{column}: {}", printable(&e.to_string()))
        };
        let header: Header = serde_json::from_str(text).map_err(fail)?;
        if header.format == FORMAT_OLD {
            return Ok(Added::OldFormat);
        }
        if header.format != FORMAT {
            return Err(format!(
                "{name}:1:1: the format is '{}', and must be '{FORMAT}'",
                printable(&header.format)
            ));
        }
        if header.fingerprint != fingerprint {
            return Ok(Added::OtherHost(printable(&header.fingerprint)));
        }
        let file: File = serde_json::from_str(text).map_err(fail)?;
        let before = self.results.len();
        let finite = file.results.into_iter().filter(Entry::is_finite);
        self.results.extend(finite);
        Ok(Added::Results(self.results.len() - before))
    }

    /// The results that a rule's comparison has for a finding.
    pub fn join(&self, of: &Contrast, subject: &Subject) -> Vec<Gain> {
        let gains = self.results.iter().filter_map(|found| {
            let emulated = self.emulated && found.accelerator == "tcg";
            if !emulated && !is_one_of(&found.accelerator, of.accelerators()) {
                return None;
            }
            if found.is(of, subject) {
                return Some(found.gain());
            }
            let inverse = found.inverse()?;
            inverse.is(of, subject).then(|| inverse.gain())
        });
        gains.take(SHOWN_MAX).collect()
    }

    /// Adds to each disk the property `measured.of-host-percent`.
    pub fn describe(&self, vm: &mut Vm) {
        for disk in &mut vm.disks {
            if let Some(percent) = self.of_host_percent(&Subject::of(disk)) {
                let origin = Origin::Fact("results of ringdisk lab".into());
                disk.table.set("measured.of-host-percent", percent, origin);
            }
        }
    }

    /// The guest's speed in percent of the host's, for a disk with these settings: the median of the results.
    fn of_host_percent(&self, subject: &Subject) -> Option<u64> {
        let is_about = |found: &&Entry| {
            found.axis == "host"
                && found.from == "guest"
                && (found.accelerator == "kvm" || self.emulated && found.accelerator == "tcg")
                && found.allocation == Allocation::Full.word()
                && subject.storage.contains(&found.storage)
                && found.has_settings(&BTreeMap::new())
                && subject.has(&found.with)
        };
        let mut percents: Vec<f64> = self
            .results
            .iter()
            .filter(is_about)
            .map(|found| 100.0 / (1.0 + found.gain_percent / 100.0))
            .filter(|percent| percent.is_finite() && *percent >= 0.0)
            .collect();
        percents.sort_by(f64::total_cmp);
        percents
            .get(percents.len() / 2)
            .map(|percent| percent.round() as u64)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Added {
    /// The number of results added
    Results(usize),
    /// Nothing: the results are from the host with this fingerprint
    OtherHost(String),
    /// Nothing: the file has no context for its results
    OldFormat,
}

impl Entry {
    fn is_finite(&self) -> bool {
        self.gain_percent.is_finite() && self.interval_percent.iter().all(|end| end.is_finite())
    }

    /// Whether this is the comparison that a rule names, for this finding.
    fn is(&self, of: &Contrast, subject: &Subject) -> bool {
        let found = subject.settings.get(self.axis.as_str());
        // The storage of `from` is that of the disk.
        let storage = match self.axis.as_str() {
            "backing" => &self.from,
            _ => &self.storage,
        };
        let device = self.place.rsplit('/').next();
        let same_place = subject.device.is_none() || subject.device.as_deref() == device;
        let alike = self.axis != "host" || subject.has(&self.with);
        self.axis == of.axis
            && is_one_of(&self.from, &of.from)
            && is_one_of(&self.to, &of.to)
            && found.is_none_or(|value| *value == self.from)
            && self.scope == of.scope
            && self.allocation == of.allocation.word()
            && subject.storage.contains(storage)
            && of.pattern.holds(&self.pattern)
            && self.has_settings(&of.with)
            && same_place
            && alike
    }

    /// Whether the settings of both sides are those that the rule names, and nothing else is unusual.
    fn has_settings(&self, named: &BTreeMap<String, String>) -> bool {
        let as_named = named.iter().all(|(key, values)| {
            let found = self.with.get(key);
            found.is_some_and(|found| is_one_of(found, values))
        });
        let is_known =
            |key: &String| FREE_SETTINGS.contains(&key.as_str()) || named.contains_key(key);
        as_named && self.with.keys().all(is_known)
    }

    /// The opposite change: if `to` has 1.25 times the speed of `from`, then `from` has 0.8 times that of `to`.
    fn inverse(&self) -> Option<Self> {
        let inverse = |percent: f64| (1.0 / (1.0 + percent / 100.0) - 1.0) * 100.0;
        let [low, high] = self.interval_percent;
        // A bound at or below -100 % has no inverse.
        let inverted = Self {
            from: self.to.clone(),
            to: self.from.clone(),
            gain_percent: inverse(self.gain_percent),
            interval_percent: [inverse(high), inverse(low)],
            verdict: match self.verdict.as_str() {
                "gain" => "loss".into(),
                "loss" => "gain".into(),
                same => same.into(),
            },
            ..self.clone()
        };
        (low > -100.0 && self.axis != "host" && inverted.is_finite()).then_some(inverted)
    }

    fn gain(&self) -> Gain {
        let with = self.with.iter();
        Gain {
            recipe: printable(&self.recipe),
            load: printable(&self.load),
            metric: printable(&self.metric),
            percent: self.gain_percent,
            interval: self.interval_percent,
            verdict: printable(&self.verdict),
            accelerator: printable(&self.accelerator),
            with: with
                .map(|(key, value)| (printable(key), printable(value)))
                .collect(),
        }
    }
}

impl Subject {
    /// A disk of a VM.
    pub fn of(disk: &Disk) -> Self {
        let word = |name| disk.table.word(name).map(str::to_owned);
        let settings = [
            ("device", word("disk.bus")),
            ("cache", word("disk.cache")),
            ("aio", word("disk.aio")),
            ("format", word("disk.format")),
            ("host-scheduler", word("backing.scheduler")),
            (
                "host-read-ahead",
                read_ahead(&disk.table, "backing.read-ahead-kb"),
            ),
        ];
        let number = |name| disk.table.number(name);
        let numbers = [
            (
                "queue-size",
                number("disk.queue-size").map(|size| size.to_string()),
            ),
            ("iothread", number("disk.threads").map(iothread)),
        ];
        let known = settings.into_iter().chain(numbers);
        Self {
            storage: vec![word("disk.protocol").unwrap_or_else(|| "unknown".into())],
            device: None,
            settings: known
                .filter_map(|(key, value)| Some((key, value?)))
                .collect(),
        }
    }

    /// A VM: the storage of its disks.
    pub fn of_vm(vm: &Vm) -> Self {
        let mut storage: Vec<String> = vm
            .disks
            .iter()
            .flat_map(|disk| Self::of(disk).storage)
            .collect();
        storage.sort();
        storage.dedup();
        Self {
            storage,
            ..Self::default()
        }
    }

    /// A block device of the host.
    pub fn of_device(name: &str, device: &Table) -> Self {
        let settings = [
            (
                "host-scheduler",
                device.word("device.scheduler").map(str::to_owned),
            ),
            (
                "host-read-ahead",
                read_ahead(device, "device.read-ahead-kb"),
            ),
        ];
        let known = settings.into_iter();
        Self {
            storage: vec!["block".into()],
            device: Some(name.to_owned()),
            settings: known
                .filter_map(|(key, value)| Some((key, value?)))
                .collect(),
        }
    }

    /// Whether none of these settings contradicts the disk's.
    fn has(&self, settings: &BTreeMap<String, String>) -> bool {
        let mut known = self.settings.iter();
        known.all(|(key, value)| {
            let found = settings.get(*key);
            found.is_none_or(|found| found == value || found == "default")
        })
    }
}

/// A read-ahead as a plan writes it.
fn read_ahead(table: &Table, property: &'static str) -> Option<String> {
    Some(match table.number(property)? {
        0 => "0".into(),
        kib if kib.is_multiple_of(1024) => format!("{}M", kib >> 10),
        kib => format!("{kib}k"),
    })
}

/// A number of I/O threads as a plan writes it.
fn iothread(threads: u64) -> String {
    match threads {
        0 => "off".into(),
        1 => "on".into(),
        several => several.to_string(),
    }
}

#[cfg(test)]
#[path = "measured_tests.rs"]
mod tests;
