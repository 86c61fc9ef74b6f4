//! Checks that must hold for any text. The fuzz targets call them as well.

use std::path::Path;
use std::time::Duration;

use lab::analysis::Analysis;
use lab::fio::Run;
use lab::journal::Journal;
use lab::plan::settings::KEYS;
use lab::plan::{CASES_MAX, Plan, Settings, WORKLOADS_MAX};
use lab::schedule::{Schedule, estimate};
use lab::window::count;

/// A plan is refused at one of its lines, or is within the limits.
pub fn plan(text: &str) {
    // Job files would be in its folder, which has none.
    let plan = match Plan::parse(Path::new("/nonexistent/plan.toml"), text) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(
                (1..=text.split('\n').count()).contains(&error.line),
                "{error}"
            );
            assert!(!error.problem.is_empty(), "{error}");
            return;
        }
    };
    assert!((1..=CASES_MAX).contains(&plan.cases.len()));
    assert!((1..=WORKLOADS_MAX).contains(&plan.workloads.len()));
    let cases = plan.cases.len();
    assert!(plan.contrasts.iter().all(|&(a, b)| a < b && b < cases));
    for case in &plan.cases {
        assert_eq!(case.settings.check(), Ok(()), "{}", case.name);
        // Every value is read again as it is written, and none ends a line of a file or an argument of a program.
        for key in KEYS {
            let (mut again, value) = (Settings::default(), case.settings.value(key));
            assert_eq!(again.set(key, &value), Ok(()), "{key}={value}");
            assert_eq!(again.value(key), value, "{key}");
            assert!(!value.contains(char::is_control), "{key}={value:?}");
        }
    }
    for load in plan.workloads.iter().filter(|load| load.job.is_none()) {
        for line in load.job_lines().lines() {
            let plain = |c: char| c.is_ascii_alphanumeric() || "_=.:,/".contains(c);
            assert!(line.chars().all(plain), "{line}");
        }
    }
    let estimate = estimate(&plan, Duration::from_secs(3));
    assert!(estimate.runs >= 2 * plan.workloads.len());
    let runs: usize = Schedule::of(&plan, 1)
        .block(0, |_| true)
        .iter()
        .map(|boot| boot.workloads.len())
        .sum();
    assert!(runs <= estimate.runs);
}

/// Output of fio is refused with a reason, or has requests.
pub fn fio(text: &str) {
    let interval = Duration::from_millis(500);
    for run in [Run::parse_json(text), Run::parse(text, interval)] {
        match run {
            Err(error) => assert!(!error.to_string().is_empty()),
            Ok(run) => {
                assert!(run.requests > 0 && run.iops.is_finite());
                if let Ok(counted) = count(&[(run, 0)]) {
                    assert!(counted.iops.is_finite() && counted.bytes_per_s.is_finite());
                    assert!(counted.window.end_ms > counted.window.start_ms);
                }
            }
        }
    }
}

/// An imported file is refused with a reason, or its figures are finite.
pub fn import(text: &str) {
    match lab::import::parse(text.as_bytes()) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(results) => {
            assert!(!results.loads.is_empty() && !results.version.is_empty());
            for load in &results.loads {
                let sample = &load.sample;
                let figures = [
                    sample.iops,
                    sample.bytes_per_s,
                    sample.mean_ns,
                    sample.window_s,
                ];
                assert!(
                    figures.iter().all(|figure| figure.is_finite()),
                    "{}",
                    load.name
                );
            }
        }
    }
}

/// A journal is refused, or has a report.
pub fn journal(text: &str) {
    let Ok(journal) = Journal::parse(text) else {
        return;
    };
    // Reports of thousands of charts take too long here.
    if journal.plan.cases.len() * journal.plan.workloads.len() > 64 {
        return;
    }
    let analysis = Analysis::of(&journal);
    assert!(!lab::report::text(&analysis).contains("NaN"));
    for (name, text) in lab::report::files(&analysis).unwrap() {
        assert!(!text.contains("NaN"), "{name}");
        match name.rsplit('.').next() {
            Some("html") => assert!(text.trim_end().ends_with("</html>")),
            Some("json") => drop(serde_json::from_str::<serde_json::Value>(&text).unwrap()),
            _ => assert!(text.lines().count() > journal.cells.len()),
        }
    }
}
