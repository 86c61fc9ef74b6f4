//! Two results side by side: has anything become better or worse?

use std::fmt::Write as _;

use crate::analysis::Analysis;
use crate::journal::Journal;
use crate::stats::Verdict;
use crate::stats::judge::{ERROR_RATE, discoveries};
use crate::stats::sequential::Moments;
use crate::stats::student::{above, quantile};

/// Facts that must be the same, or the figures are not of the same thing. ringdisk itself may change: that is what
/// most comparisons are about.
const SAME: [&str; 9] = [
    "cpu",
    "cpus",
    "microcode",
    "kernel",
    "fio",
    "qemu",
    "accelerator",
    "guest kernel",
    "storage",
];
/// Fewest samples on each side.
const SAMPLES_MIN: usize = 3;

/// What became of a configuration under a load.
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
    /// In words.
    pub verdict: Verdict,
}

/// Compares what two results have in common.
///
/// # Errors
/// They are of different machines or programs, and that is not `force`d; or they have nothing in common.
pub fn changes(before: &Journal, after: &Journal, force: bool) -> Result<Vec<Change>, String> {
    let fact = |journal: &Journal, key: &str| {
        journal
            .header
            .facts
            .get(key)
            .cloned()
            .unwrap_or_else(|| "unknown".into())
    };
    let other: Vec<String> = SAME
        .iter()
        .filter(|key| fact(before, key) != fact(after, key))
        .map(|key| {
            format!(
                "{key}: {} before, {} after",
                fact(before, key),
                fact(after, key)
            )
        })
        .collect();
    if !other.is_empty() && !force {
        return Err(format!(
            "these results are not comparable; --force compares them all the same.\n  {}",
            other.join("\n  ")
        ));
    }
    if before.plan.runtime != after.plan.runtime || before.plan.size != after.plan.size {
        return Err("the results are of runs of other lengths, or of disks of other sizes".into());
    }
    let (old, new) = (Analysis::of(before), Analysis::of(after));
    let margin = after.plan.margin.ln_1p();
    let mut found = Vec::new();
    for (arm, case) in before.plan.cases.iter().enumerate() {
        let same =
            |other: &crate::plan::Case| other.name == case.name && other.settings == case.settings;
        let Some(arm_after) = after.plan.cases.iter().position(same) else {
            continue;
        };
        for (load, workload) in before.plan.workloads.iter().enumerate() {
            let Some(load_after) = after
                .plan
                .workloads
                .iter()
                .position(|other| other == workload)
            else {
                continue;
            };
            let logs = |analysis: &Analysis, arm, load| -> Moments {
                let scores = analysis.scores(arm, load);
                Moments::of(
                    &scores
                        .into_iter()
                        .filter(|score| *score > 0.0)
                        .map(f64::ln)
                        .collect::<Vec<_>>(),
                )
            };
            let (a, b) = (logs(&old, arm, load), logs(&new, arm_after, load_after));
            if a.n.min(b.n) < SAMPLES_MIN {
                continue;
            }
            // Welch's test: two sets of boots, which nothing pairs.
            let (va, vb) = (a.error().powi(2), b.error().powi(2));
            let error = (va + vb).sqrt();
            let freedom =
                (va + vb).powi(2) / (va * va / (a.n - 1) as f64 + vb * vb / (b.n - 1) as f64);
            let mean = b.mean - a.mean;
            let reach = quantile(ERROR_RATE / 2.0, freedom) * error;
            let change = Change {
                case: case.name.clone(),
                workload: workload.name.clone(),
                change: mean.exp_m1(),
                interval: ((mean - reach).exp_m1(), (mean + reach).exp_m1()),
                verdict: Verdict::Undecided,
            };
            let differ = 2.0 * above(mean.abs() / error, freedom);
            let same = above((margin - mean.abs()) / error, freedom);
            found.push((change, differ, same));
        }
    }
    if found.is_empty() {
        return Err(format!(
            "the results have no cell in common with {SAMPLES_MIN} samples on each side"
        ));
    }
    let differ = discoveries(&found.iter().map(|found| found.1).collect::<Vec<_>>());
    let same = discoveries(&found.iter().map(|found| found.2).collect::<Vec<_>>());
    let judged = found
        .into_iter()
        .enumerate()
        .map(|(index, (change, ..))| Change {
            verdict: match (same[index], differ[index]) {
                (true, _) => Verdict::Equivalent,
                (_, true) if change.change > 0.0 => Verdict::Gain,
                (_, true) => Verdict::Loss,
                _ => Verdict::Undecided,
            },
            ..change
        });
    Ok(judged.collect())
}

/// The changes as a table.
pub fn text(changes: &[Change]) -> String {
    let mut text = String::new();
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
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Cell, Record, Sample};

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
                    mean_ns: 1e9 / iops,
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
        let verdict = |iops| changes(&base, &result(iops, |_| {}), false).unwrap()[0].verdict;
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
