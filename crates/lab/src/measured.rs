//! The part of a result that `ringdisk check` reads, and the folders in which it looks for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::analysis::Analysis;
use crate::plan::backing::Name;
use crate::plan::words::{Device, GuestKind, Metric};
use crate::plan::{Backing, Plan, Settings, Workload, settings, workload};
use crate::stats::Verdict;

/// The file's name in a result's folder.
pub const FILE: &str = "measured.json";

/// The folder for all users of the host.
const SHARED: &str = "/var/lib/ringdisk/measured";

/// The folders with results of this host. A result is written to the first, and `ringdisk check` reads all. Below
/// `$XDG_STATE_HOME` if that is set; otherwise, root's first folder is the one for all users, and other users' first is
/// their own.
pub fn folders() -> Vec<PathBuf> {
    let own = |state: PathBuf| state.join("ringdisk/measured");
    let set = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    if let Some(state) = set.filter(|state| state.is_absolute()) {
        return vec![own(state)];
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let home = home
        .filter(|home| home.is_absolute())
        .map(|home| own(home.join(".local/state")));
    let shared = PathBuf::from(SHARED);
    if rustix::process::geteuid().is_root() {
        std::iter::once(shared).chain(home).collect()
    } else {
        home.into_iter().chain([shared]).collect()
    }
}

/// The results in a folder, sorted by name; none if the folder cannot be read.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        path.extension().is_some_and(|suffix| suffix == "json")
            // A result's own folder has this file too.
            && path.file_name().is_some_and(|name| name != "result.json")
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_one).collect();
    files.sort();
    files
}

/// Writes the measurements into the result's folder and, unless there are none, into the first of [`folders`]. Returns the
/// path there. Figures of guests under TCG say nothing about this host, nor do those of a bundle,
/// which does not name its host: these stay in the result's folder.
///
/// # Errors
/// The result's folder cannot be written. A missing second folder is no error: some users have no home directory.
pub fn write(analysis: &Analysis, folder: &Path) -> Result<Option<PathBuf>> {
    let mut value = json(analysis);
    let path = folder.join(FILE);
    let text = |value: &Value| serde_json::to_string_pretty(value).map(|text| text + "\n");
    fs::write(&path, text(&value)?).with_context(|| format!("writing {}", path.display()))?;
    let mut empty = true;
    if let Some(results) = value["results"].as_array_mut() {
        results.retain(|result| result["accelerator"] != "tcg");
        empty = results.is_empty();
    }
    let header = &analysis.journal.header;
    empty |= !header.facts.contains_key("fingerprint");
    let folder = folders().into_iter().next().filter(|_| !empty);
    let text = text(&value)?;
    let name = format!("{}-{}.json", analysis.plan().name, header.started_ms);
    Ok(folder.and_then(|folder| {
        fs::create_dir_all(&folder).ok()?;
        let (path, new) = (folder.join(&name), folder.join(format!("{name}.new")));
        fs::write(&new, &text).ok()?;
        fs::rename(&new, &path).ok()?;
        Some(path)
    }))
}

/// A comparison of one setting, with all that it was measured on: what `ringdisk check` needs to know to which findings
/// it belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The plan's name.
    pub recipe: String,
    /// The setting that differs; `host` compares a guest with the host.
    pub axis: String,
    /// Its value before.
    pub from: String,
    /// Its value afterwards.
    pub to: String,
    /// Whose setting it is: `guest` or `host`.
    pub scope: &'static str,
    /// How the disks are accessed: a word of `ringdisk check`.
    pub storage: &'static str,
    /// The disk, device or directory that the plan names; empty for files of the lab.
    pub place: String,
    /// `full`, `thin`, `varied` or `unknown`: whether the disks had data everywhere.
    pub allocation: &'static str,
    /// `kvm`, `tcg`, or `none` for a load without a guest.
    pub accelerator: String,
    /// The load: what each has, and what differs from the defaults.
    pub pattern: BTreeMap<&'static str, String>,
    /// The settings that both sides share: what each disk has, and what differs from the defaults.
    pub with: BTreeMap<&'static str, String>,
    /// The load's name.
    pub load: String,
    /// `iops`, `latency`, or `cpu` for the server's CPU time per request.
    pub metric: &'static str,
}

/// The settings of every disk.
const ALWAYS: [&str; 6] = ["device", "server", "cache", "aio", "iothread", "format"];

impl Comparison {
    /// The comparison of two cases under a load, with guests under `accelerator`; `None` if they differ in more than one
    /// setting.
    pub fn of(plan: &Plan, from: usize, to: usize, load: usize, accelerator: &str) -> Option<Self> {
        let (from, to) = (
            &plan.cases.get(from)?.settings,
            &plan.cases.get(to)?.settings,
        );
        let one_sided = |key: &&str| from.get(key) == "-" || to.get(key) == "-";
        let mut differences = from.differences(to);
        // What only one of two devices has belongs to that device.
        if differences.contains(&"device") {
            differences.retain(|key| *key == "device" || !one_sided(key));
        }
        let [axis] = differences[..] else {
            return None;
        };
        let (before, after) = match axis {
            "backing" => (storage(from).to_owned(), storage(to).to_owned()),
            "preload" => (library(from), library(to)),
            _ => (from.get(axis), to.get(axis)),
        };
        let (accelerator, other) = (
            accelerator_of(plan, from, accelerator),
            accelerator_of(plan, to, accelerator),
        );
        if before == after || accelerator != other {
            return None;
        }
        let allocations = [allocation(plan, from), allocation(plan, to)];
        Some(Self {
            axis: axis.into(),
            from: before,
            to: after,
            scope: if axis.starts_with("host-") {
                "host"
            } else {
                "guest"
            },
            allocation: if axis == "prefill" {
                "varied"
            } else {
                allocations[0]
            },
            with: shared(axis, from, to),
            ..Self::under(plan, from, load, accelerator)
        })
    }

    /// The comparison of a case with the host itself.
    fn with_host(plan: &Plan, case: usize, load: usize, accelerator: &str) -> Option<Self> {
        let settings = &plan.cases.get(case)?.settings;
        let accelerator = accelerator_of(plan, settings, accelerator);
        // fio on the host reads the disk with O_DIRECT.
        let comparable = settings.cache.direct() && settings.backing == Backing::File;
        (comparable && accelerator != "none").then(|| Self {
            axis: "host".into(),
            from: "guest".into(),
            to: "host".into(),
            with: shared("host", settings, settings),
            metric: "iops",
            ..Self::under(plan, settings, load, accelerator)
        })
    }

    /// A case under a load, compared with nothing.
    fn under(plan: &Plan, settings: &Settings, load: usize, accelerator: String) -> Self {
        let load = &plan.workloads[load];
        Self {
            recipe: plan.name.clone(),
            axis: String::new(),
            from: String::new(),
            to: String::new(),
            scope: "guest",
            storage: storage(settings),
            place: match &settings.backing {
                named @ (Backing::Named(_) | Backing::Directory(_)) => named.to_string(),
                _ => String::new(),
            },
            allocation: allocation(plan, settings),
            accelerator,
            pattern: pattern(load),
            with: BTreeMap::new(),
            load: load.name.clone(),
            metric: match (plan.metric, load.rate) {
                (Metric::Cpu, _) => "cpu",
                (Metric::Speed, Some(_)) => "latency",
                (Metric::Speed, None) => "iops",
            },
        }
    }
}

/// All that a plan can say to `ringdisk check`, with guests under `accelerator`.
pub fn comparisons(plan: &Plan, accelerator: &str) -> Vec<Comparison> {
    let loads = 0..plan.workloads.len();
    let pairs = plan.contrasts.iter();
    let settings = pairs.flat_map(|&(from, to)| loads.clone().map(move |load| (from, to, load)));
    let settings =
        settings.filter_map(|(from, to, load)| Comparison::of(plan, from, to, load, accelerator));
    let cases = (0..plan.cases.len()).flat_map(|case| loads.clone().map(move |load| (case, load)));
    let host =
        cases.filter_map(|(case, load)| Comparison::with_host(plan, case, load, accelerator));
    settings.chain(host).collect()
}

/// The content for `ringdisk check --measured`: comparisons of one setting, and of guests with the host.
fn json(analysis: &Analysis) -> Value {
    let plan = analysis.plan();
    let facts = &analysis.journal.header.facts;
    let accelerator = facts.get("accelerator").map_or("unknown", String::as_str);
    let mut results: Vec<Value> = Vec::new();
    let mut add =
        |comparison: &Comparison, gain: f64, (low, high): (f64, f64), verdict: Verdict| {
            let mut result = json!(comparison);
            result["gain-percent"] = json!(gain * 100.0);
            result["interval-percent"] = json!([low * 100.0, high * 100.0]);
            result["verdict"] = json!(verdict);
            results.push(result);
        };
    for question in analysis.questions() {
        let (from, to) = (question.from, question.to);
        if let (Some(gain), Some(interval)) = (question.gain, question.interval)
            && let Some(comparison) = Comparison::of(plan, from, to, question.workload, accelerator)
            && analysis.confounded(from, to).is_none()
        {
            add(&comparison, gain, interval, question.verdict);
        }
    }
    for ceiling in &analysis.journal.ceilings {
        let loads = plan.workloads.iter();
        let Some(load) = loads.clone().position(|load| load.name == ceiling.workload) else {
            continue;
        };
        for case in 0..plan.cases.len() {
            let settings = &analysis.case(case).settings;
            let disks = u32::from(settings.guests) * u32::from(settings.volumes);
            let Some(comparison) = Comparison::with_host(plan, case, load, accelerator) else {
                continue;
            };
            let Some(summary) = analysis.summary(case, load) else {
                continue;
            };
            let Some(interval) = summary.iops_interval else {
                continue;
            };
            if disks != ceiling.disks || interval.low <= 0.0 {
                continue;
            }
            let gain = |iops: f64| ceiling.iops / iops - 1.0;
            let (low, high) = (gain(interval.high), gain(interval.low));
            let verdict = match (low > 0.0, high < 0.0) {
                (true, _) => Verdict::Gain,
                (_, true) => Verdict::Loss,
                _ => Verdict::Undecided,
            };
            add(&comparison, gain(summary.iops), (low, high), verdict);
        }
    }
    json!({
        "format": "ringdisk-measured-2",
        "fingerprint": facts.get("fingerprint").cloned().unwrap_or_default(),
        "results": results,
    })
}

/// What a load has, and what differs from the defaults. A job file has only its name.
fn pattern(load: &Workload) -> BTreeMap<&'static str, String> {
    if load.job.is_some() {
        return BTreeMap::from([("job", load.name.clone())]);
    }
    let usual = Workload {
        rw: load.rw,
        ..Workload::default()
    };
    let keys = workload::KEYS.into_iter().map(|key| (key, load.get(key)));
    keys.filter(|(key, value)| {
        value != "-" && (["rw", "bs", "iodepth"].contains(key) || *value != usual.get(key))
    })
    .collect()
}

/// The settings that two configurations share.
fn shared(axis: &str, from: &Settings, to: &Settings) -> BTreeMap<&'static str, String> {
    let usual = Settings::default();
    let elsewhere = ["backing", "prefill"]; // storage and allocation
    let keys = settings::KEYS.into_iter();
    let keys = keys.filter(|key| *key != axis && !elsewhere.contains(key));
    keys.filter_map(|key| {
        let value = [from, to]
            .map(|side| side.get(key))
            .into_iter()
            .find(|value| value != "-")?;
        (ALWAYS.contains(&key) || value != usual.value(key)).then_some((key, value))
    })
    .collect()
}

/// What a guest runs under: `none` if there is none.
fn accelerator_of(plan: &Plan, settings: &Settings, of_guests: &str) -> String {
    let without = plan.guest == GuestKind::None || settings.device == Device::Host;
    if without {
        "none".into()
    } else {
        of_guests.into()
    }
}

/// The names of the libraries to preload, as in `tcmalloc`, with colons between them.
pub fn library(settings: &Settings) -> String {
    let Some(paths) = settings.preload.as_deref().and_then(Path::to_str) else {
        return "default".into();
    };
    let name = |path: &str| {
        let name = path.rsplit('/').next().unwrap_or(path);
        let name = name.split_once(".so").map_or(name, |(stem, _)| stem);
        name.strip_prefix("lib").unwrap_or(name).to_owned()
    };
    paths.split(':').map(name).collect::<Vec<_>>().join(":")
}

/// How a disk's storage is accessed, in the words of `ringdisk check`.
fn storage(settings: &Settings) -> &'static str {
    match &settings.backing {
        Backing::File | Backing::Directory(_) => "file",
        Backing::Ram => "ram",
        Backing::Zram => "zram",
        Backing::Null => "null",
        Backing::Named(_) if settings.is_librbd() => "rbd",
        Backing::Named(_) => match settings.backing.first() {
            Some(Name::Path(path)) if !path.starts_with("/dev") => "file",
            _ => "block",
        },
    }
}

/// Whether the disks have data everywhere.
fn allocation(plan: &Plan, settings: &Settings) -> &'static str {
    match settings.prefill {
        true => "full",
        false if settings.backing.is_own() || plan.create => "thin",
        // Disks of the user's stay as they are.
        false => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_name_the_storage_on_which_they_were_measured() {
        let of = |backing: &str, krbd| {
            let settings = Settings {
                backing: backing.parse().unwrap(),
                krbd,
                ..Settings::default()
            };
            storage(&settings)
        };
        assert_eq!(of("file", false), "file");
        assert_eq!(of("/mnt/nfs/", false), "file");
        assert_eq!(of("/images/a.raw", false), "file");
        assert_eq!(of("/dev/vg0/a", false), "block");
        assert_eq!(of("rbd:p/a", false), "rbd");
        assert_eq!(of("rbd:p/a", true), "block");
    }
}
