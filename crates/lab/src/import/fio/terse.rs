//! fio's terse output, versions 2 to 5 (`--output-format=terse`): a line of fields for each job.

use anyhow::{Context, Result, ensure};

use super::{Job, Latencies, Side, TOGETHER};

/// The fields of a side before its bandwidth: size, rates, runtime, two latencies, percentiles, and the total latency.
const PERCENTILES: usize = 20;

/// The version of a terse line.
fn version(line: &str) -> Option<u32> {
    let (version, rest) = line.split_once(';')?;
    let version = version.parse().ok().filter(|it| (2..=5).contains(it))?;
    (rest.matches(';').count() >= 80).then_some(version)
}

pub(super) fn is(text: &str) -> bool {
    text.lines().any(|line| version(line).is_some())
}

/// fio's version, and its jobs.
pub(super) fn parse(text: &str) -> Result<(String, Vec<Job>)> {
    let (mut program, mut jobs) = (String::new(), Vec::<Job>::new());
    for line in text.lines() {
        let Some(version) = version(line) else {
            continue;
        };
        let fields: Vec<&str> = line.split(';').collect();
        // Version 2 does not name the program's.
        let (its, head) = match version {
            2 => ("unknown", 1),
            _ => (fields[1], 2),
        };
        ensure!(
            jobs.is_empty() || program == its,
            "it has lines of several versions of fio: {program} and {its}"
        );
        its.clone_into(&mut program);
        let job = job(&fields, version, head).with_context(|| format!("line {line:.60}"))?;
        jobs.push(job);
        ensure!(jobs.len() <= super::JOBS_MAX, "it has too many lines");
    }
    // Lines of one job may be interim results or threads of numjobs=, which differ in their meaning.
    for job in &jobs {
        let same = jobs
            .iter()
            .filter(|it| (&it.name, it.group) == (&job.name, job.group));
        let of = |job: &Job| job.sides.iter().map(|side| side.runtime_ms).max();
        let runtimes: Vec<u64> = same.filter_map(of).collect();
        let (least, most) = (runtimes.iter().min(), runtimes.iter().max());
        let differ = least
            .zip(most)
            .is_some_and(|(least, most)| (*most - *least) as f64 > TOGETHER * *most as f64);
        ensure!(
            !differ,
            "{}: lines of the same job have different runtimes, and terse output does not say whether they are interim \
             results; use --output-format=json+",
            job.name
        );
    }
    Ok((program, jobs))
}

fn job(fields: &[&str], version: u32, head: usize) -> Result<Job> {
    let field = |at: usize| fields.get(at).copied().context("it has too few fields");
    let number = |at: usize| -> Result<f64> {
        let text = field(at)?;
        let value: f64 = text
            .parse()
            .with_context(|| format!("field {at}: '{text}'"))?;
        ensure!((0.0..1e15).contains(&value), "field {at}: '{text}'");
        Ok(value)
    };
    let length = match version {
        5 => 47,
        _ => 41,
    };
    let mut sides = Vec::new();
    let directions = match version {
        2 | 3 => &["read", "write"][..],
        _ => &["read", "write", "trim"],
    };
    for (index, direction) in directions.iter().enumerate() {
        let at = head + 3 + index * length;
        let (bandwidth, iops, runtime) = (number(at + 1)?, number(at + 2)?, number(at + 3)?);
        if iops == 0.0 {
            continue;
        }
        let clat = at + 8;
        let mut points = Vec::new();
        for at in clat + 4..clat + 4 + PERCENTILES {
            if let Some((share, latency)) = field(at)?.split_once("%=")
                && let (Ok(share), Ok(us)) = (share.parse::<f64>(), latency.parse::<u64>())
                && share > 0.0
                && share <= 100.0
            {
                points.push((share, us.saturating_mul(1000)));
            }
        }
        let is_known = points.iter().any(|(_, latency)| *latency > 0);
        let mean = number(clat + 2)? * 1000.0;
        sides.push(Side {
            direction,
            requests: (iops * runtime / 1000.0) as u64,
            iops,
            bytes_per_s: bandwidth * 1024.0,
            runtime_ms: runtime as u64,
            mean_ns: (mean > 0.0).then_some(mean),
            latencies: match is_known {
                true => Latencies::Percentiles(points),
                false => Latencies::None,
            },
            is_total: false,
        });
    }
    let name = field(head)?.replace(char::is_control, " ");
    Ok(Job {
        name,
        group: number(head + 1)? as u64,
        error: field(head + 2)?.parse().context("field of the error")?,
        start_ms: None,
        sides,
    })
}
