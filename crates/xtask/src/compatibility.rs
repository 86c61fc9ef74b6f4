//! `cargo xtask compatibility`: generates docs/compatibility.md from the records of the tests.

use crate::root;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use testkit::compatibility::{Trial, folder};

const DOCUMENT: &str = "docs/compatibility.md";

const BEFORE: &str = "# Compatibility

The front-ends, firmware and kernels with which `cargo xtask test` has used ringdisk's disks. This file is generated:
`cargo xtask compatibility` writes it after a complete run of the tests. Versions are those of Debian's packages on that day. A
*replay* sends the messages of a front-end's source code, in the same order, and then reads and writes through the rings.

";

const HEAD: &str = "| Version | What was run | Result | Date |\n|---|---|---|---|\n";

/// A line of the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    name: String,
    version: String,
    steps: Vec<String>,
    result: String,
    date: String,
}

/// Writes the document. Versions that the last run did not test keep their lines.
pub fn run() -> Result<()> {
    let tried = recorded()?;
    ensure!(
        !tried.is_empty(),
        "there are no records; run `cargo xtask test` first"
    );
    let path = root().join(DOCUMENT);
    let mut rows = parse(&fs::read_to_string(&path).unwrap_or_default());
    rows.retain(|row| tried.iter().all(|new| new.name != row.name));
    rows.extend(tried);
    fs::write(&path, text(&mut rows)).with_context(|| format!("writing {DOCUMENT}"))
}

/// Removes the records of earlier runs.
pub fn forget() -> Result<()> {
    let folder = folder()?;
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Checks that the document has not been edited.
pub fn is_generated() -> Result<()> {
    let document = fs::read_to_string(root().join(DOCUMENT)).context(DOCUMENT)?;
    ensure!(
        text(&mut parse(&document)) == document,
        "{DOCUMENT} was edited; run `cargo xtask compatibility`, which generates it"
    );
    Ok(())
}

/// Checks that the document lists what the tests ran. Versions and dates may differ: they change without a change of ours.
pub fn is_up_to_date() -> Result<()> {
    let rows = parse(&fs::read_to_string(root().join(DOCUMENT)).context(DOCUMENT)?);
    let missing = missing(&rows, &recorded()?);
    ensure!(
        missing.is_empty(),
        "{DOCUMENT} lacks test runs of {}; run `cargo xtask compatibility`, which generates it",
        missing.join(", ")
    );
    Ok(())
}

fn missing(rows: &[Row], tried: &[Row]) -> Vec<String> {
    let same = |a: &Row, b: &Row| {
        let run = |row: &Row| {
            row.steps
                .iter()
                .map(|step| unversioned(step))
                .collect::<Vec<_>>()
        };
        (&a.name, run(a), &a.result) == (&b.name, run(b), &b.result)
    };
    let missing = tried
        .iter()
        .filter(|new| !rows.iter().any(|row| same(row, new)));
    missing
        .map(|row| format!("{} {}", row.name, row.version))
        .collect()
}

/// A step without version numbers.
fn unversioned(step: &str) -> String {
    let words = step.split(' ').filter(|word| {
        let version = word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
        !version
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The records of the last run. Several tests may be about one version.
fn recorded() -> Result<Vec<Row>> {
    let folder = folder()?;
    let files = match fs::read_dir(&folder) {
        Ok(files) => files,
        Err(_) => return Ok(Vec::new()),
    };
    let mut paths: Vec<_> = files.flatten().map(|file| file.path()).collect();
    paths.sort();
    let mut trials = Vec::new();
    for path in paths {
        let text = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let trial = serde_json::from_slice(&text);
        trials.push(trial.with_context(|| format!("reading {}", path.display()))?);
    }
    Ok(merged(trials))
}

fn merged(trials: Vec<Trial>) -> Vec<Row> {
    let mut all: BTreeMap<(String, String), Vec<Trial>> = BTreeMap::new();
    for trial in trials {
        let key = (trial.front_end.clone(), trial.version.clone());
        all.entry(key).or_default().push(trial);
    }
    let row = |((name, version), trials): ((String, String), Vec<Trial>)| {
        let mut steps: Vec<String> = Vec::new();
        for step in trials.iter().flat_map(|trial| &trial.steps) {
            if !steps.contains(step) {
                steps.push(step.clone());
            }
        }
        let failed = trials.iter().find_map(|trial| trial.failed.as_ref());
        let at_s = trials.iter().map(|trial| trial.at_s).max();
        Row {
            name,
            version,
            steps,
            result: failed.map_or("works".into(), |step| format!("fails: {step}")),
            date: date(at_s.unwrap_or_default()),
        }
    };
    all.into_iter().map(row).collect()
}

/// The day of a time, in UTC (days of the proleptic Gregorian calendar).
fn date(at_s: u64) -> String {
    let of = |year: u64, years| year.is_multiple_of(years);
    let is_leap = |year| of(year, 4) && !of(year, 100) || of(year, 400);
    let (mut year, mut day) = (1970, at_s / 86400);
    loop {
        let days = if is_leap(year) { 366 } else { 365 };
        if day < days {
            break;
        }
        (year, day) = (year + 1, day - days);
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= months[month] {
        (month, day) = (month + 1, day - months[month]);
    }
    format!("{year}-{:02}-{:02}", month + 1, day + 1)
}

/// The whole document.
fn text(rows: &mut [Row]) -> String {
    // Sort numbers by value: 10.0.2 is before 10.0.13.
    let numbers = |version: &str| {
        let numbers = version.split(|c: char| !c.is_ascii_digit());
        numbers
            .filter_map(|number| number.parse::<u64>().ok())
            .collect::<Vec<_>>()
    };
    rows.sort_by_cached_key(|row| {
        let name = row.name.to_lowercase();
        (name, numbers(&row.version), row.version.clone())
    });
    let mut text = BEFORE.to_owned();
    let mut name = "";
    for row in rows.iter() {
        if row.name != name {
            text += if name.is_empty() { "" } else { "\n" };
            text += &format!("## {}\n\n{HEAD}", row.name);
            name = &row.name;
        }
        let steps = row.steps.join("; ");
        text += &format!(
            "| {} | {steps} | {} | {} |\n",
            row.version, row.result, row.date
        );
    }
    text
}

/// The lines of a document.
fn parse(document: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut name = "";
    for line in document.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            name = heading;
        }
        let cells: Vec<_> = line.split(" | ").collect();
        if let [version, steps, result, date] = cells[..]
            && let (Some(version), Some(date)) =
                (version.strip_prefix("| "), date.strip_suffix(" |"))
            && version != "Version"
        {
            rows.push(Row {
                name: name.to_owned(),
                version: version.to_owned(),
                steps: steps.split("; ").map(str::to_owned).collect(),
                result: result.to_owned(),
                date: date.to_owned(),
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(version: &str, steps: &[&str], at_s: u64) -> Trial {
        Trial {
            front_end: "QEMU".into(),
            version: version.into(),
            steps: steps.iter().map(|step| (*step).to_owned()).collect(),
            failed: None,
            at_s,
        }
    }

    #[test]
    fn days_have_dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_795_305_600), "2026-11-22");
        assert_eq!(date(4_133_980_799), "2100-12-31");
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut rows = merged(vec![
            trial("10.0.13", &["boot", "resize"], 86400),
            trial("10.0.2", &["boot"], 0),
            trial("10.0.13", &["boot", "migration"], 0),
        ]);
        let text = text(&mut rows);
        let lines: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("| 1"))
            .collect();
        assert_eq!(
            lines,
            [
                "| 10.0.2 | boot | works | 1970-01-01 |",
                "| 10.0.13 | boot; resize; migration | works | 1970-01-02 |"
            ]
        );
        assert_eq!(parse(&text), rows);
    }

    #[test]
    fn other_versions_are_no_change() {
        let rows = merged(vec![trial(
            "10.0.13",
            &["boot", "migration from 10.0.2"],
            0,
        )]);
        let newer = trial("10.0.14", &["boot", "migration from 10.0.3"], 86400);
        assert_eq!(missing(&rows, &merged(vec![newer])), [""; 0]);
        let more = trial("10.0.14", &["boot", "migration from 10.0.3", "reset"], 0);
        assert_eq!(missing(&rows, &merged(vec![more])), ["QEMU 10.0.14"]);
        let mut failed = trial("10.0.13", &["boot", "migration from 10.0.2"], 0);
        failed.failed = Some("reset".into());
        assert_eq!(missing(&rows, &merged(vec![failed])), ["QEMU 10.0.13"]);
    }
}
