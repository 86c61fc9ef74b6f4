//! The part of a result that `ringdisk check` reads, and the folders in which it looks for it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::analysis::Analysis;
use crate::plan::backing::Name;
use crate::plan::{Backing, Settings};
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
/// path there.
///
/// # Errors
/// The result's folder cannot be written. A missing second folder is no error: some users have no home directory.
pub fn write(analysis: &Analysis, folder: &Path) -> Result<Option<PathBuf>> {
    let value = json(analysis);
    let text = serde_json::to_string_pretty(&value)? + "\n";
    let path = folder.join(FILE);
    fs::write(&path, &text).with_context(|| format!("writing {}", path.display()))?;
    let empty = value["results"].as_array().is_none_or(Vec::is_empty);
    let folder = folders().into_iter().next().filter(|_| !empty);
    let header = &analysis.journal.header;
    let name = format!("{}-{}.json", analysis.plan().name, header.started_ms);
    Ok(folder.and_then(|folder| {
        fs::create_dir_all(&folder).ok()?;
        let (path, new) = (folder.join(&name), folder.join(format!("{name}.new")));
        fs::write(&new, &text).ok()?;
        fs::rename(&new, &path).ok()?;
        Some(path)
    }))
}

/// The content for `ringdisk check --measured`: comparisons of one setting, and of guests with the host. Figures of guests
/// under TCG say nothing about this host, and are left out.
fn json(analysis: &Analysis) -> Value {
    let plan = analysis.plan();
    let facts = &analysis.journal.header.facts;
    let under_kvm = facts.get("accelerator").is_some_and(|accel| accel == "kvm");
    let mut results: Vec<Value> = Vec::new();
    for question in analysis
        .questions()
        .iter()
        .filter(|question| under_kvm && question.to < plan.cases.len())
    {
        let (from, to) = (
            &analysis.case(question.from).settings,
            &analysis.case(question.to).settings,
        );
        let (Some(gain), Some((low, high))) = (question.gain, question.interval) else {
            continue;
        };
        if let [axis] = from.differences(to)[..]
            && analysis.confounded(question.from, question.to).is_none()
        {
            let load = &plan.workloads[question.workload];
            results.push(json!({
                "recipe": plan.name, "axis": axis, "from": from.get(axis), "to": to.get(axis),
                "scope": "guest", "storage": storage(from), "allocation": allocation(from), "load": load.name,
                "metric": if load.rate.is_some() { "latency" } else { "iops" },
                "gain-percent": gain * 100.0, "interval-percent": [low * 100.0, high * 100.0], "verdict": question.verdict,
            }));
        }
    }
    for ceiling in analysis.journal.ceilings.iter().filter(|_| under_kvm) {
        let Some(load) = plan
            .workloads
            .iter()
            .position(|load| load.name == ceiling.workload)
        else {
            continue;
        };
        for arm in 0..plan.cases.len() {
            let settings = &analysis.case(arm).settings;
            let disks = u32::from(settings.guests) * u32::from(settings.volumes);
            let Some(summary) = analysis.summary(arm, load) else {
                continue;
            };
            let (Some(interval), true) = (
                summary.iops_interval,
                disks == ceiling.disks && settings.cache.direct(),
            ) else {
                continue;
            };
            if settings.backing != Backing::File || interval.low <= 0.0 {
                continue;
            }
            let gain = |iops: f64| (ceiling.iops / iops - 1.0) * 100.0;
            let (low, high) = (gain(interval.high), gain(interval.low));
            let verdict = match (low > 0.0, high < 0.0) {
                (true, _) => Verdict::Gain,
                (_, true) => Verdict::Loss,
                _ => Verdict::Undecided,
            };
            results.push(json!({
                "recipe": plan.name, "axis": "host", "from": "guest", "to": "host",
                "scope": "guest", "storage": storage(settings), "allocation": allocation(settings),
                "load": ceiling.workload, "metric": "iops", "gain-percent": gain(summary.iops),
                "interval-percent": [low, high], "verdict": verdict,
            }));
        }
    }
    json!({
        "format": "ringdisk-measured-1",
        "fingerprint": facts.get("fingerprint").cloned().unwrap_or_default(),
        "results": results,
    })
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

/// Whether writes allocate space.
fn allocation(settings: &Settings) -> &'static str {
    if settings.prefill { "full" } else { "thin" }
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
