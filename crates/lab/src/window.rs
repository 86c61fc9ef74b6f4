//! The time that counts: the time in which all jobs of all guests ran.

use harness::histogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::fio::{Interval, Run};

/// A time span on the host's clock, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// When the last job began.
    pub start_ms: u64,
    /// When the first job ended.
    pub end_ms: u64,
}

/// A point of a run over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Seconds since the window's start, at the middle of the interval.
    pub at_s: f64,
    /// Requests per second.
    pub iops: f64,
    /// The median latency in nanoseconds.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
    /// The longest latency.
    pub max_ns: u64,
}

/// What all jobs did in the window.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Latencies of all requests together.
    pub latencies: Histogram,
    /// The same over time.
    pub series: Vec<Point>,
    /// The time that counts.
    pub window: Window,
}

/// Counts the requests of all guests while all of their jobs ran. The number with each run is the time in ms by which the
/// guest's clock is ahead of the host's.
///
/// # Errors
/// The jobs never ran at the same time.
pub fn count(runs: &[(Run, i64)]) -> Result<Counted, String> {
    let jobs: Vec<Vec<Interval>> = runs
        .iter()
        .flat_map(|(run, ahead_ms)| run.jobs.iter().map(|job| on_host(job, *ahead_ms)))
        .collect();
    let edge = |of: fn(&[Interval]) -> Option<u64>| jobs.iter().filter_map(move |job| of(job));
    let start_ms = edge(|job| {
        job.first()
            .map(|first| first.end_ms.saturating_sub(first.length_ms))
    })
    .max();
    let end_ms = edge(|job| job.last().map(|last| last.end_ms)).min();
    let (Some(start_ms), Some(end_ms)) = (start_ms, end_ms) else {
        return Err("fio measured nothing".into());
    };
    if end_ms <= start_ms {
        return Err(format!(
            "the jobs did not run at the same time: the last began {} ms after the first had ended",
            start_ms - end_ms
        ));
    }
    let window = Window { start_ms, end_ms };
    let (mut latencies, mut requests) = (Histogram::default(), 0.0);
    let longest = jobs
        .iter()
        .flatten()
        .map(|interval| interval.length_ms)
        .max()
        .unwrap_or(0)
        .max(1);
    let slots = ((end_ms - start_ms) / longest).clamp(1, 1000) as usize;
    let slot_ms = (end_ms - start_ms) as f64 / slots as f64;
    let mut over_time = vec![(Histogram::default(), 0.0); slots];
    for interval in jobs.iter().flatten() {
        let count = interval.latencies.requests() as f64;
        let begin_ms = interval.end_ms.saturating_sub(interval.length_ms);
        // Assume that the requests of an interval are spread evenly when the window contains only a part of it.
        let share = |from: f64, to: f64| {
            let inside = to.min(interval.end_ms as f64) - from.max(begin_ms as f64);
            (inside / interval.length_ms.max(1) as f64).clamp(0.0, 1.0)
        };
        requests += count * share(start_ms as f64, end_ms as f64);
        let middle_ms = begin_ms + interval.length_ms / 2;
        if (start_ms..=end_ms).contains(&middle_ms) {
            latencies.merge(&interval.latencies);
            let slot = (((middle_ms - start_ms) as f64 / slot_ms) as usize).min(slots - 1);
            over_time[slot].0.merge(&interval.latencies);
        }
        for (slot, (_, requests)) in over_time.iter_mut().enumerate() {
            let from = start_ms as f64 + slot as f64 * slot_ms;
            *requests += count * share(from, from + slot_ms);
        }
    }
    let iops = requests / (end_ms - start_ms) as f64 * 1000.0;
    let (bytes, all) = runs.iter().fold((0.0, 0.0), |(bytes, all), (run, _)| {
        (bytes + run.bytes as f64, all + run.requests as f64)
    });
    let point = |(slot, (latencies, requests)): (usize, &(Histogram, f64))| Point {
        at_s: (slot as f64 + 0.5) * slot_ms / 1000.0,
        iops: requests / slot_ms * 1000.0,
        p50_ns: latencies.percentile(0.5).unwrap_or(0),
        p99_ns: latencies.percentile(0.99).unwrap_or(0),
        max_ns: latencies.percentile(1.0).unwrap_or(0),
    };
    let series = over_time.iter().enumerate().map(point).collect();
    Ok(Counted {
        iops,
        bytes_per_s: iops * bytes / f64::max(all, 1.0),
        latencies,
        series,
        window,
    })
}

fn on_host(job: &[Interval], ahead_ms: i64) -> Vec<Interval> {
    let shifted = |interval: &Interval| Interval {
        end_ms: interval.end_ms.saturating_add_signed(-ahead_ms),
        ..interval.clone()
    };
    job.iter().map(shifted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job with so many requests in each interval of a second.
    fn run(start_ms: u64, counts: &[u64]) -> Run {
        let interval = |(index, count): (usize, &u64)| {
            let mut latencies = Histogram::default();
            latencies.add(1000 + start_ms, *count);
            Interval {
                end_ms: start_ms + 1000 * (index as u64 + 1),
                length_ms: 1000,
                latencies,
            }
        };
        let requests = counts.iter().sum();
        Run {
            jobs: vec![counts.iter().enumerate().map(interval).collect()],
            requests,
            bytes: requests * 4096,
            ..Run::default()
        }
    }

    #[test]
    fn only_the_common_time_counts() {
        // The second begins 2.5 s later; alone, the first is three times as fast.
        let first = run(10_000, &[300, 300, 200, 100, 100, 100]);
        let second = run(12_500, &[100, 100, 100, 300]);
        let counted = count(&[(first, 0), (second, 0)]).unwrap();
        assert_eq!(
            counted.window,
            Window {
                start_ms: 12_500,
                end_ms: 16_000
            }
        );
        // 100 of the third second's 200 and 300 more of the first; 350 + … of the second.
        let expected = (100.0 + 300.0 + 300.0 + 150.0) / 3.5;
        assert!(
            (counted.iops - expected).abs() < 1.0,
            "{} {expected}",
            counted.iops
        );
        assert!((counted.bytes_per_s / counted.iops - 4096.0).abs() < 1e-6);
        let over_time: f64 = counted.series.iter().map(|point| point.iops).sum::<f64>()
            / counted.series.len() as f64;
        assert!((over_time - counted.iops).abs() < 1.0);
    }

    #[test]
    fn differences_of_clocks_are_subtracted() {
        let counted = count(&[(run(10_000, &[5, 5]), 0), (run(70_000, &[7, 7]), 60_000)]).unwrap();
        assert_eq!(
            counted.window,
            Window {
                start_ms: 10_000,
                end_ms: 12_000
            }
        );
        assert!((counted.iops - 12.0).abs() < 1e-9);
        assert_eq!(counted.latencies.requests(), 24);
    }

    #[test]
    fn jobs_that_never_ran_together_are_an_error() {
        assert!(
            count(&[(run(0, &[1]), 0), (run(5000, &[1]), 0)])
                .unwrap_err()
                .contains("4000 ms")
        );
        assert!(count(&[]).is_err());
    }
}
