//! Results of fio, in each of its output formats: JSON ([`json`]), its ordinary text ([`text`]) and terse lines ([`terse`]).
//! fio's own figures are used. What is ambiguous is refused.

mod json;
mod terse;
mod text;

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use harness::histogram::Histogram;

use super::{Load, Results};
use crate::fio::add_between;
use crate::journal::Sample;

/// The maximum number of jobs in a file.
const JOBS_MAX: usize = 4096;
/// The maximum number of bins or percentiles of a side.
const POINTS_MAX: usize = 4096;
/// Jobs that run together have the same runtime, up to this share.
const TOGETHER: f64 = 0.1;

/// A job's result.
#[derive(Clone, Debug, Default)]
pub(super) struct Job {
    name: String,
    group: u64,
    /// fio's error code.
    error: i64,
    /// When it started, in milliseconds, if fio says so.
    start_ms: Option<u64>,
    /// Without those that made no request.
    sides: Vec<Side>,
}

/// The requests of a job in one direction.
#[derive(Clone, Debug, Default)]
pub(super) struct Side {
    direction: &'static str,
    requests: u64,
    iops: f64,
    bytes_per_s: f64,
    runtime_ms: u64,
    mean_ns: Option<f64>,
    latencies: Latencies,
    /// Whether latencies include the time in fio's own queue.
    is_total: bool,
}

/// What a file says of single latencies.
#[derive(Clone, Debug, Default)]
pub(super) enum Latencies {
    #[default]
    None,
    /// Latencies in nanoseconds, with the requests of each.
    Bins(Vec<(u64, u64)>),
    /// Percentiles with their latencies in nanoseconds.
    Percentiles(Vec<(f64, u64)>),
}

/// Whether a text is a result of fio in some form.
pub(super) fn is(text: &str) -> bool {
    json::start(text).is_some() || text::is(text) || terse::is(text)
}

/// Reads a result of fio.
///
/// # Errors
/// It has no result, a job failed, or the figures have several meanings.
pub(super) fn parse(text: &str) -> Result<Results> {
    // A file of --output-format=normal,json has all figures in its JSON.
    let (version, jobs) = if json::start(text).is_some() {
        json::parse(text)?
    } else if text::is(text) {
        text::parse(text)?
    } else {
        terse::parse(text)?
    };
    loads(version, jobs)
}

/// One load for each group of jobs with the same name.
fn loads(version: String, jobs: Vec<Job>) -> Result<Results> {
    ensure!(!jobs.is_empty(), "it has no jobs of fio");
    ensure!(
        jobs.len() <= JOBS_MAX,
        "there are more than {JOBS_MAX} jobs"
    );
    if let Some(job) = jobs.iter().find(|job| job.error != 0) {
        bail!("fio's job {} ended with error {}", job.name, job.error);
    }
    let mut groups: BTreeMap<&str, BTreeMap<u64, Vec<&Job>>> = BTreeMap::new();
    for job in &jobs {
        let groups = groups.entry(&job.name).or_default();
        groups.entry(job.group).or_default().push(job);
    }
    let (mut loads, mut notes) = (Vec::new(), Vec::new());
    for (name, groups) in &groups {
        for (group, jobs) in groups {
            // Groups run one after the other.
            let load = match groups.len() {
                1 => (*name).to_owned(),
                _ => format!("{name}, group {group}"),
            };
            let sample = sample(&load, jobs, &mut notes)?;
            loads.push(Load {
                name: super::unused(load, &loads),
                sample,
                flag: None,
            });
        }
    }
    Ok(Results {
        tool: "fio",
        version,
        loads,
        notes,
    })
}

/// The figures of jobs that ran together.
fn sample(load: &str, jobs: &[&Job], notes: &mut Vec<String>) -> Result<Sample> {
    ran_together(load, jobs)?;
    let all = || jobs.iter().flat_map(|job| &job.sides);
    let is_trim = |side: &&Side| side.direction == "trim";
    let has_others = !all().all(|side| side.direction == "trim");
    let sides: Vec<&Side> = all().filter(|side| !has_others || !is_trim(side)).collect();
    ensure!(!sides.is_empty(), "{load}: no request was made");
    if has_others && all().any(|side| side.direction == "trim") {
        notes.push(format!(
            "{load}: its trims are not used, only its reads and writes"
        ));
    }
    let requests = |side: &Side| side.requests.max(1) as f64;
    let known: Vec<(&Side, f64)> = sides
        .iter()
        .filter_map(|side| Some((*side, side.mean_ns?)))
        .collect();
    let weight: f64 = known.iter().map(|(side, _)| requests(side)).sum();
    let sum: f64 = known.iter().map(|(side, mean)| mean * requests(side)).sum();
    let mean_ns = if known.len() == sides.len() {
        sum / weight
    } else {
        0.0
    };
    if known.len() < sides.len() {
        notes.push(format!("{load}: it has no mean latency"));
    }
    let mut latencies = Histogram::default();
    let lists = sides
        .iter()
        .filter(|side| matches!(side.latencies, Latencies::Percentiles(_)))
        .count();
    if sides
        .iter()
        .all(|side| !matches!(side.latencies, Latencies::None))
    {
        sides.iter().for_each(|side| side.add_to(&mut latencies));
    } else {
        notes.push(format!("{load}: it has no percentiles of all its requests"));
    }
    if lists > 1 {
        notes.push(format!(
            "{load}: its percentiles are an estimate from {lists} lists; --output-format=json+ has the histograms"
        ));
    }
    if sides.iter().any(|side| side.is_total) {
        notes.push(format!(
            "{load}: its latencies are fio's \"lat\", with the time in fio's own queue; others are \"clat\""
        ));
        let same = sides.iter().all(|side| side.is_total);
        ensure!(
            same,
            "{load}: some jobs have total latencies, others completion latencies"
        );
    }
    let window = sides.iter().map(|side| side.runtime_ms).max();
    Ok(Sample {
        iops: sides.iter().map(|side| side.iops).sum(),
        bytes_per_s: sides.iter().map(|side| side.bytes_per_s).sum(),
        mean_ns,
        window_s: window.unwrap_or(0) as f64 / 1000.0,
        latencies: latencies.coarse(),
        ..Sample::default()
    })
}

/// Rates of jobs that ran one after the other do not add up.
fn ran_together(load: &str, jobs: &[&Job]) -> Result<()> {
    let runtime = |job: &Job| job.sides.iter().map(|side| side.runtime_ms).max();
    let spans: Option<Vec<(u64, u64)>> = jobs
        .iter()
        .map(|job| {
            let start = job.start_ms.filter(|start| *start > 0)?;
            Some((start, start.saturating_add(runtime(job)?)))
        })
        .collect();
    if let Some(spans) = spans
        && let Some(first_end) = spans.iter().map(|(_, end)| end).min()
    {
        ensure!(
            spans.iter().all(|(start, _)| start < first_end),
            "{load}: several jobs have this name and ran one after the other; give each its own name"
        );
    }
    Ok(())
}

impl Side {
    fn add_to(&self, latencies: &mut Histogram) {
        match &self.latencies {
            Latencies::None => {}
            Latencies::Bins(bins) => bins
                .iter()
                .for_each(|(latency, requests)| latencies.add(*latency, *requests)),
            Latencies::Percentiles(points) => {
                add_between(points.clone(), self.requests, latencies);
            }
        }
    }
}

/// The last of the interim results of `--status-interval`: each has all requests so far.
fn last_of(mut all: Vec<Vec<Job>>) -> Result<Vec<Job>> {
    let grows = |pair: &[Vec<Job>]| {
        pair[0].len() == pair[1].len()
            && pair[0].iter().zip(&pair[1]).all(|(before, after)| {
                let of = |job: &Job, what: fn(&Side) -> u64| job.sides.iter().map(what).max();
                (&before.name, before.group) == (&after.name, after.group)
                    && of(before, |side| side.requests) <= of(after, |side| side.requests)
                    && of(before, |side| side.runtime_ms) <= of(after, |side| side.runtime_ms)
            })
    };
    ensure!(
        all.windows(2).all(grows),
        "it has several results, which are not the interim results of one run; import each from a file of its own"
    );
    Ok(all.pop().unwrap_or_default())
}

/// A number with one of these units.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+')))
        .unwrap_or(text.len());
    let (number, unit) = (text.get(..end)?, text.get(end..)?);
    let number: f64 = number.parse().ok()?;
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
}
