//! Compares two results: what became faster or slower?

use std::fmt::Write as _;

use crate::analysis::Analysis;
use harness::text::printable;

use crate::journal::{Cell, Journal};
use crate::plan::Case;
use crate::stats::Verdict;
use crate::stats::judge::{ERROR_RATE, discoveries};
use crate::stats::sequential::Moments;
use crate::stats::welch::Difference;

/// Facts that must be equal, so that the figures are of the same thing. ringdisk itself may differ: most comparisons are
/// about that.
const SAME: [&str; 11] = [
    "cpu",
    "cpus",
    "microcode",
    "kernel",
    "fio",
    "diskspd",
    "crystaldiskmark",
    "qemu",
    "accelerator",
    "guest kernel",
    "storage",
];
/// Fewest samples on each side.
const SAMPLES_MIN: usize = 3;

/// How a configuration under a load changed from one result to another.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The configuration.
    pub case: String,
    /// The load.
    pub workload: String,
    /// Ratio of after to before, less 1.
    pub change: f64,
    /// Its interval.
    pub interval: (f64, f64),
    /// Whether it is more than chance.
    pub verdict: Verdict,
}

/// How one result compares with another.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The cells that both have.
    pub changes: Vec<Change>,
    /// Cells that only the earlier result has although the later one was to measure them, with the reason.
    pub missing: Vec<String>,
}

/// Compares two results.
///
/// # Errors
/// They are from different machines or programs, and `force` is not set; or the later one was to measure nothing that the
/// earlier one has.
pub fn changes(before: &Journal, after: &Journal, force: bool) -> Result<Comparison, String> {
    check_comparable(before, after, force)?;
    let (cells, missing) = common_cells(before, after);
    if cells.is_empty() && missing.is_empty() {
        return Err(format!(
            "the results have no cell in common with {SAMPLES_MIN} samples on each side"
        ));
    }
    let margin = after.plan.margin.ln_1p();
    let differ = discoveries(&p_values(&cells, Difference::p_equal));
    let same = discoveries(&p_values(&cells, |found| found.p_beyond(margin)));
    let verdict = |index: usize, mean: f64| match (same[index], differ[index]) {
        (true, _) => Verdict::Equivalent,
        (_, true) if mean > 0.0 => Verdict::Gain,
        (_, true) => Verdict::Loss,
        _ => Verdict::Undecided,
    };
    let changes = cells.into_iter().enumerate().map(|(index, cell)| {
        let (low, high) = cell.difference.interval(ERROR_RATE);
        Change {
            case: cell.case,
            workload: cell.workload,
            change: cell.difference.mean.exp_m1(),
            interval: (low.exp_m1(), high.exp_m1()),
            verdict: verdict(index, cell.difference.mean),
        }
    });
    Ok(Comparison {
        changes: changes.collect(),
        missing,
    })
}

fn check_comparable(before: &Journal, after: &Journal, force: bool) -> Result<(), String> {
    let fact = |journal: &Journal, key: &str| {
        let facts = &journal.header.facts;
        facts.get(key).cloned().unwrap_or_else(|| "unknown".into())
    };
    let differences: Vec<String> = SAME
        .iter()
        .map(|key| (key, fact(before, key), fact(after, key)))
        .filter(|(_, before, after)| before != after)
        .map(|(key, before, after)| format!("{key}: {before} before, {after} after"))
        .collect();
    if !differences.is_empty() && !force {
        return Err(format!(
            "these results are not comparable; --force compares them all the same.\n  {}",
            differences.join("\n  ")
        ));
    }
    if before.plan.runtime != after.plan.runtime || before.plan.size != after.plan.size {
        return Err("the results are of runs of other lengths, or of disks of other sizes".into());
    }
    Ok(())
}

/// A configuration under a load that both results have.
struct CommonCell {
    case: String,
    workload: String,
    /// Of the logarithms of the scores
    difference: Difference,
}

fn common_cells(before: &Journal, after: &Journal) -> (Vec<CommonCell>, Vec<String>) {
    let (old, new) = (Analysis::of(before), Analysis::of(after));
    let (mut cells, mut missing) = (Vec::new(), Vec::new());
    for (arm, case) in before.plan.cases.iter().enumerate() {
        let is_same = |other: &Case| other.name == case.name && other.settings == case.settings;
        let Some(arm_after) = after.plan.cases.iter().position(is_same) else {
            continue;
        };
        for (load, workload) in before.plan.workloads.iter().enumerate() {
            let mut loads_after = after.plan.workloads.iter();
            let Some(load_after) = loads_after.position(|other| other == workload) else {
                continue;
            };
            let (from, to) = (
                logarithms(&old, arm, load),
                logarithms(&new, arm_after, load_after),
            );
            if from.n < SAMPLES_MIN {
                continue;
            }
            if to.n < SAMPLES_MIN {
                let why = failure(after, &case.name, &workload.name);
                missing.push(format!(
                    "{}, {}: {} samples before, {} after{why}",
                    case.name, workload.name, from.n, to.n
                ));
                continue;
            }
            cells.push(CommonCell {
                case: case.name.clone(),
                workload: workload.name.clone(),
                difference: Difference::of(&from, &to),
            });
        }
    }
    (cells, missing)
}

/// Why a result lacks samples: its last failure.
fn failure(journal: &Journal, case: &str, workload: &str) -> String {
    let is_it = |cell: &&Cell| cell.case == case && cell.workload == workload;
    let mut cells = journal.cells.iter().rev().filter(is_it);
    let failed = cells.find_map(|cell| cell.error.as_ref());
    failed.map_or_else(String::new, |error| format!(": {}", printable(error)))
}

fn logarithms(analysis: &Analysis<'_>, arm: usize, load: usize) -> Moments {
    let scores = analysis.scores(arm, load);
    let positive = scores.into_iter().filter(|score| *score > 0.0);
    Moments::of(&positive.map(f64::ln).collect::<Vec<_>>())
}

fn p_values(cells: &[CommonCell], p: impl Fn(&Difference) -> f64) -> Vec<f64> {
    cells.iter().map(|cell| p(&cell.difference)).collect()
}

/// The comparison as a table.
pub fn text(comparison: &Comparison) -> String {
    let mut text = String::new();
    let changes = &comparison.changes;
    let width = |of: fn(&Change) -> &str| {
        changes
            .iter()
            .map(|change| of(change).chars().count())
            .max()
            .unwrap_or(0)
    };
    let (cases, loads) = (
        width(|change| &change.case),
        width(|change| &change.workload),
    );
    for change in changes {
        let _ = writeln!(
            text,
            "{:<cases$}  {:<loads$}  {:+7.1} %  [{:+.1}, {:+.1}]  {}",
            change.case,
            change.workload,
            change.change * 100.0,
            change.interval.0 * 100.0,
            change.interval.1 * 100.0,
            change.verdict
        );
    }
    for missing in &comparison.missing {
        let _ = writeln!(text, "missing: {missing}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Record, Sample};

    fn result(iops: [f64; 5], change: impl Fn(&mut crate::journal::Header)) -> Journal {
        let mut header = crate::journal::Header {
            version: 1,
            file: "p.toml".into(),
            plan: "[config]\nqueues = [1, 2]\n".into(),
            jobs: Default::default(),
            seed: 1,
            started_ms: 0,
            facts: [("fio".to_owned(), "fio-3.33".to_owned())].into(),
            only: Vec::new(),
            left_out: Default::default(),
        };
        change(&mut header);
        let mut text = serde_json::to_string(&Record::Plan(header)).unwrap() + "\n";
        for (block, iops) in iops.into_iter().enumerate() {
            let cell = Cell {
                block: block as u32,
                case: "queues=1".into(),
                workload: "randread 4k, depth 1".into(),
                sample: Some(Sample {
                    iops,
                    mean_ns: 1e9 / iops.max(1.0),
                    ..Sample::default()
                }),
                ..Cell::default()
            };
            text += &(serde_json::to_string(&Record::Cell(cell)).unwrap() + "\n");
        }
        Journal::parse(&text).unwrap()
    }

    #[test]
    fn worse_better_and_the_same_are_told_apart() {
        let base = result([100.0, 101.0, 99.0, 100.5, 99.5], |_| {});
        let verdict = |iops| {
            changes(&base, &result(iops, |_| {}), false)
                .unwrap()
                .changes[0]
                .verdict
        };
        assert_eq!(verdict([80.0, 81.0, 79.0, 80.0, 80.0]), Verdict::Loss);
        assert_eq!(verdict([120.0, 121.0, 119.0, 120.0, 120.0]), Verdict::Gain);
        assert_eq!(
            verdict([100.2, 100.9, 99.1, 100.4, 99.6]),
            Verdict::Equivalent
        );
        assert_eq!(
            verdict([60.0, 140.0, 99.0, 100.0, 110.0]),
            Verdict::Undecided
        );
    }

    #[test]
    fn what_cannot_be_measured_any_more_is_named() {
        let base = result([100.0; 5], |_| {});
        let missing = |after: &Journal| {
            let found = changes(&base, after, false).unwrap();
            assert!(found.changes.is_empty());
            found.missing
        };
        let name = "queues=1, randread 4k, depth 1: 5 samples before";
        let idle = result([0.0; 5], |_| {});
        assert_eq!(missing(&idle), [format!("{name}, 0 after")]);
        let mut failed = result([100.0; 5], |_| {});
        for cell in &mut failed.cells[2..] {
            (cell.sample, cell.error) = (None, Some("the server died".into()));
        }
        let found = missing(&failed);
        assert_eq!(found, [format!("{name}, 2 after: the server died")]);
        // A plan without the case is no failure, and leaves nothing to compare.
        let other = result([100.0; 5], |header| {
            header.plan = "[config]\nqueues = [2, 4]\nvcpus = 4\n".into()
        });
        assert!(changes(&base, &other, false).is_err());
    }

    #[test]
    fn what_is_not_comparable_is_refused() {
        let base = result([100.0; 5], |_| {});
        let newer = result([100.0; 5], |header| {
            drop(header.facts.insert("fio".into(), "fio-3.40".into()))
        });
        let problem = changes(&base, &newer, false).unwrap_err();
        assert!(
            problem.contains("fio: fio-3.33 before, fio-3.40 after"),
            "{problem}"
        );
        assert!(changes(&base, &newer, true).is_ok());
        let longer = result([100.0; 5], |header| {
            header.plan += "[fio]\nruntime = \"60s\"\n"
        });
        assert!(
            changes(&base, &longer, true)
                .unwrap_err()
                .contains("other lengths")
        );
    }
}
