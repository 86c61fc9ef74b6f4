//! Results that are small enough for a repository: journals without what verdicts do not need.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::findings::Results;
use super::{Run, Study};
use crate::journal::{Journal, Record};

/// The fact with the remark of the user who measured.
pub const NOTE: &str = "note";

/// The path of a run's journal below a folder of bundles.
pub fn path(folder: &Path, study: &str, run: &Run) -> PathBuf {
    folder.join(study).join(format!("{}.jsonl", run.name))
}

/// Reads a study's bundles. A run without one is not in the result.
///
/// # Errors
/// A bundle is invalid.
pub fn read(folder: &Path, name: &str, study: &Study) -> Result<Results> {
    let mut results = Results::new();
    for run in &study.runs {
        let path = path(folder, name, run);
        if path.exists() {
            results.insert(run.name.clone(), Ok(Journal::read(&path)?));
        }
    }
    Ok(results)
}

/// Writes the bundle of a run.
///
/// # Errors
/// The journal cannot be read, or the bundle not written.
pub fn write(journal: &Path, bundle: &Path, note: Option<&str>) -> Result<()> {
    let text =
        fs::read_to_string(journal).with_context(|| format!("reading {}", journal.display()))?;
    let small = trimmed(&text, note)?;
    // What cannot be read again must not replace an older bundle.
    Journal::parse(&small).with_context(|| format!("the bundle of {}", journal.display()))?;
    let folder = bundle.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    fs::write(bundle, small).with_context(|| format!("writing {}", bundle.display()))
}

/// A journal without latencies over time, and with the first boot of each configuration only.
fn trimmed(text: &str, note: Option<&str>) -> Result<String> {
    let mut booted = BTreeSet::new();
    let mut small = String::new();
    for line in text.lines() {
        // A truncated last line is left out.
        let Ok(mut record) = serde_json::from_str::<Record>(line) else {
            continue;
        };
        match &mut record {
            Record::Plan(header) => {
                // The name of the host is in it.
                header.facts.remove("fingerprint");
                if let Some(note) = note {
                    header.facts.insert(NOTE.into(), note.into());
                }
            }
            Record::Boot(boot) => {
                if !booted.insert((boot.case.clone(), boot.twin)) {
                    continue;
                }
            }
            Record::Cell(cell) => {
                if let Some(sample) = &mut cell.sample {
                    sample.series.clear();
                    sample.latencies = harness::histogram::Histogram::default();
                    let figures = [
                        &mut sample.iops,
                        &mut sample.bytes_per_s,
                        &mut sample.mean_ns,
                        &mut sample.window_s,
                    ];
                    let costs = [
                        &mut sample.cpu_us,
                        &mut sample.switches,
                        &mut sample.client_cpu,
                    ];
                    let costs = costs.into_iter().filter_map(Option::as_mut);
                    figures.into_iter().chain(costs).for_each(round);
                }
                round(&mut cell.took_s);
            }
            Record::Ceiling(_) | Record::Rates(_) | Record::Fill(_) => {}
            Record::Created(_) | Record::Removed(_) => continue,
        }
        small += &serde_json::to_string(&record)?;
        small.push('\n');
    }
    Ok(small)
}

/// Rounds to six significant digits.
fn round(figure: &mut f64) {
    if let Ok(rounded) = format!("{figure:.5e}").parse() {
        *figure = rounded;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{BootRecord, Cell, Header, Sample};
    use crate::window::Point;

    #[test]
    fn a_bundle_has_the_figures_and_neither_the_host_nor_curves() {
        let header = Header {
            version: 1,
            file: "p.toml".into(),
            plan: "[config]\nqueues = [1, 2]\n".into(),
            jobs: Default::default(),
            seed: 1,
            started_ms: 0,
            facts: [("fingerprint".to_owned(), "myhost / CPU".to_owned())].into(),
            only: Vec::new(),
            left_out: Default::default(),
        };
        let boot = || {
            Record::Boot(BootRecord {
                block: 0,
                case: "queues=1".into(),
                twin: false,
                effective: Default::default(),
                boot_s: 1.0,
            })
        };
        let mut sample = Sample {
            iops: 1_234.567_89,
            ..Sample::default()
        };
        sample.latencies.add(1000, 5);
        sample.series.push(Point::default());
        let cell = Record::Cell(Cell {
            case: "queues=1".into(),
            sample: Some(sample),
            flags: vec!["busy".into()],
            ..Cell::default()
        });
        let lines = [Record::Plan(header), boot(), boot(), cell]
            .map(|it| serde_json::to_string(&it).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (
            folder.path().join("journal.jsonl"),
            folder.path().join("a/b.jsonl"),
        );
        fs::write(&from, lines.join("\n") + "\n{\"what\":\"ce").unwrap();
        write(&from, &to, Some("busy")).unwrap();
        let text = fs::read_to_string(&to).unwrap();
        assert!(
            !text.contains("myhost") && text.lines().count() == 3,
            "{text}"
        );
        let bundle = Journal::read(&to).unwrap();
        let sample = bundle.cells[0].sample.as_ref().unwrap();
        assert_eq!((sample.iops, bundle.boots.len()), (1234.57, 1));
        assert!(sample.latencies.is_empty() && sample.series.is_empty());
        assert_eq!(bundle.header.facts[NOTE], "busy");
        assert_eq!(bundle.cells[0].flags, ["busy"]);
    }
}
