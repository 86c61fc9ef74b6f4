//! fio's ordinary output, of fio 2 and 3. Its rates are rounded to three digits; the number of requests is not, and gives the
//! rate together with the runtime.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use super::{Job, Latencies, POINTS_MAX, Side, scaled};

/// Units of latencies, in nanoseconds.
const TIMES: [(&str, f64); 4] = [("nsec", 1.0), ("usec", 1e3), ("msec", 1e6), ("sec", 1e9)];
const TIMES_OF_RUN: [(&str, f64); 3] = [("msec", 1.0), ("sec", 1e3), ("", 1.0)];
const COUNTS: [(&str, f64); 5] = [("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("K", 1e3)];
/// Bandwidths of fio 3.
const SIZES: [(&str, f64); 9] = [
    ("B/s", 1.0),
    ("KiB/s", 1024.0),
    ("MiB/s", 1_048_576.0),
    ("GiB/s", 1_073_741_824.0),
    ("TiB/s", 1_099_511_627_776.0),
    ("kB/s", 1e3),
    ("MB/s", 1e6),
    ("GB/s", 1e9),
    ("TB/s", 1e12),
];
/// Bandwidths of fio 2, which writes `KB` for 1024 bytes.
const OLD_SIZES: [(&str, f64); 4] = [
    ("B/s", 1.0),
    ("KB/s", 1024.0),
    ("MB/s", 1_048_576.0),
    ("GB/s", 1_073_741_824.0),
];
/// A rate may differ from the one that the number of requests gives by its rounding.
const ROUNDING: f64 = 0.02;

/// The first line of a job's result: its name, its group, and the rest.
fn header(line: &str) -> Option<(&str, u64, &str)> {
    let (name, rest) = line.split_once(": (groupid=")?;
    let (group, rest) = rest.split_once(',')?;
    rest.contains("err=").then_some(())?;
    Some((name.trim(), group.trim().parse().ok()?, rest))
}

pub(super) fn is(text: &str) -> bool {
    text.lines().any(|line| header(line).is_some())
}

/// A job while it is read.
#[derive(Default)]
struct Read {
    job: Job,
    /// Process and group of one result; the same again is a later interim result.
    id: String,
    /// Requests of reads, writes and trims.
    issued: Option<[u64; 3]>,
    /// The unit of the percentiles in the lines that follow, and whether they are of `lat`.
    percentiles: Option<(f64, bool)>,
    /// Sides with `lat` instead of `clat`.
    totals: Vec<bool>,
}

/// fio's version, and its jobs.
pub(super) fn parse(text: &str) -> Result<(String, Vec<Job>)> {
    let mut version = String::from("unknown");
    let mut sizes: BTreeMap<String, [Option<f64>; 3]> = BTreeMap::new();
    let mut all: Vec<Read> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let line = line.trim_end();
        if line.starts_with("fio-") && !line.contains(char::is_whitespace) {
            ensure!(
                version == "unknown" || version == line,
                "it has results of several versions of fio: {version} and {line}"
            );
            line.clone_into(&mut version);
        } else if let Some((name, rest)) = line.split_once(": (g=") {
            ensure!(sizes.len() <= super::JOBS_MAX, "it has too many jobs");
            sizes.insert(name.trim().to_owned(), block_sizes(rest));
        } else if let Some((name, group, rest)) = header(line) {
            inside = name != "All clients";
            if inside {
                ensure!(all.len() <= super::JOBS_MAX, "it has too many jobs");
                all.push(begin(name, group, rest)?);
            }
        } else if line.starts_with("Run status group") || line.starts_with("Disk stats") {
            inside = false;
        } else if inside && let Some(read) = all.last_mut() {
            read.line(line)
                .with_context(|| format!("job {}: {line:.80}", read.job.name))?;
        }
    }
    // Later interim results of a job replace its earlier ones.
    let mut last: BTreeMap<String, (usize, Job)> = BTreeMap::new();
    for (place, read) in all.into_iter().enumerate() {
        let (id, job) = (read.id.clone(), read.finish(&sizes)?);
        let place = last.get(&id).map_or(place, |(place, _)| *place);
        last.insert(id, (place, job));
    }
    let mut jobs: Vec<(usize, Job)> = last.into_values().collect();
    jobs.sort_by_key(|(place, _)| *place);
    Ok((version, jobs.into_iter().map(|(_, job)| job).collect()))
}

fn begin(name: &str, group: u64, rest: &str) -> Result<Read> {
    let after = |key: &str| rest.split_once(key).map(|(_, rest)| rest.trim_start());
    let word = |text: &str| -> String {
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '-'));
        text[..end.unwrap_or(text.len())].to_owned()
    };
    let error = after("err=").map(word).unwrap_or_default();
    let process = after("pid=").map(word).unwrap_or_default();
    Ok(Read {
        job: Job {
            name: name.replace(char::is_control, " "),
            group,
            error: error.parse().context("the job's error is no number")?,
            ..Job::default()
        },
        id: format!("{group} {process} {name}"),
        ..Read::default()
    })
}

/// The block sizes of reads, writes and trims, if each has only one: `bs=(R) 4096B-4096B, (W) …`, `bs=4K-4K/4K-4K/4K-4K`.
fn block_sizes(rest: &str) -> [Option<f64>; 3] {
    let Some((_, list)) = rest.split_once("bs=") else {
        return [None; 3];
    };
    let one = |range: &str| {
        let (low, high) = range.trim().split_once('-')?;
        let end = high.find([',', '/', ' ']).unwrap_or(high.len());
        let units: &[(&str, f64)] = &[
            ("B", 1.0),
            ("K", 1024.0),
            ("KiB", 1024.0),
            ("M", 1_048_576.0),
            ("MiB", 1_048_576.0),
            ("", 1.0),
        ];
        let (low, high) = (scaled(low, units)?, scaled(&high[..end], units)?);
        (low == high && low > 0.0).then_some(low)
    };
    let mut sizes = [None; 3];
    for (size, mark) in sizes.iter_mut().zip(["(R)", "(W)", "(T)"]) {
        *size = list.split_once(mark).and_then(|(_, range)| one(range));
    }
    if !list.starts_with('(') {
        let old = list.split([',', ' ']).next().unwrap_or_default();
        for (size, range) in sizes.iter_mut().zip(old.split('/')) {
            *size = one(range);
        }
    }
    sizes
}

/// `key=value` in a list, up to a comma.
fn value<'a>(list: &'a str, key: &str) -> Option<&'a str> {
    let start = list.match_indices(key).find_map(|(at, _)| {
        let before = list[..at].chars().next_back();
        let is_word = before.is_none_or(|c| !c.is_ascii_alphanumeric());
        is_word.then_some(at + key.len())
    })?;
    let rest = list[start..].trim_start();
    let end = rest.find([',', ' ', ';', '(', ')']).unwrap_or(rest.len());
    Some(&rest[..end])
}

impl Read {
    fn line(&mut self, line: &str) -> Result<()> {
        let trimmed = line.trim_start();
        if let Some(points) = trimmed.strip_prefix('|') {
            return self.points(points);
        }
        self.percentiles = None;
        for direction in ["read", "write", "trim", "mixed"] {
            if let Some(rest) = trimmed.strip_prefix(direction)
                && let Some(figures) = rest.trim_start().strip_prefix(':')
                && (figures.contains("IOPS=") || figures.contains("iops="))
            {
                return self.side(direction, figures);
            }
        }
        if let Some(rest) = trimmed.strip_prefix("issued") {
            self.issued = issued(rest);
        }
        for (prefix, is_total) in [("clat", false), ("lat", true)] {
            let Some(rest) = trimmed.strip_prefix(prefix) else {
                continue;
            };
            let Some((unit, after)) = rest
                .split_once('(')
                .and_then(|(_, rest)| rest.split_once(')'))
            else {
                continue;
            };
            let Some(factor) = TIMES.iter().find(|(name, _)| *name == unit) else {
                continue;
            };
            if rest.trim_start().starts_with("percentiles") {
                self.percentiles = Some((factor.1, is_total));
            } else if let Some(mean) = value(after, "avg=") {
                self.mean(mean, factor.1, is_total)?;
            }
        }
        Ok(())
    }

    fn side(&mut self, direction: &'static str, figures: &str) -> Result<()> {
        ensure!(self.job.sides.len() < 4, "it has too many directions");
        let iops = value(figures, "IOPS=").or(value(figures, "iops="));
        let iops = iops.and_then(|text| scaled(text, &COUNTS));
        let bandwidth = match value(figures, "BW=") {
            Some(text) => scaled(text, &SIZES),
            None => value(figures, "bw=").and_then(|text| scaled(text, &OLD_SIZES)),
        };
        // fio 2: `runtime= 10000msec`; fio 3: `(195MiB/10000msec)`.
        let runtime = match value(figures, "runtime=") {
            Some(text) => Some(text),
            None => figures
                .rsplit_once('/')
                .map(|(_, text)| text.split(')').next().unwrap_or(text)),
        };
        let runtime = runtime.and_then(|text| scaled(text, &TIMES_OF_RUN));
        self.job.sides.push(Side {
            direction,
            iops: iops.context("its rate cannot be read")?,
            bytes_per_s: bandwidth.context("its bandwidth cannot be read")?,
            runtime_ms: runtime.context("its runtime cannot be read")? as u64,
            ..Side::default()
        });
        self.totals.push(false);
        Ok(())
    }

    /// fio prints the completion latency first, and then the total.
    fn mean(&mut self, text: &str, unit: f64, is_total: bool) -> Result<()> {
        let mean = scaled(text, &COUNTS).context("its mean cannot be read")? * unit;
        if let Some(side) = self.job.sides.last_mut() {
            match (side.mean_ns, is_total) {
                (None, _) => (side.mean_ns, side.is_total) = (Some(mean), is_total),
                (Some(_), false) => (side.mean_ns, side.is_total) = (Some(mean), false),
                // The percentiles may turn out to be of the total.
                (Some(_), true) => {
                    side.latencies = Latencies::Percentiles(vec![(-1.0, mean as u64)])
                }
            }
        }
        Ok(())
    }

    fn points(&mut self, line: &str) -> Result<()> {
        let (Some((unit, is_total)), Some(side)) = (self.percentiles, self.job.sides.last_mut())
        else {
            return Ok(());
        };
        let mut points = match std::mem::take(&mut side.latencies) {
            Latencies::Percentiles(points) => points,
            _ => Vec::new(),
        };
        if is_total && !side.is_total {
            // The mean is of the same kind as the percentiles.
            if let Some((_, mean)) = points.iter().find(|(share, _)| *share < 0.0) {
                side.mean_ns = Some(*mean as f64);
            }
            side.is_total = true;
        }
        points.retain(|(share, _)| *share >= 0.0);
        for part in line.split(']') {
            let Some((share, latency)) = part.split_once("th=[") else {
                continue;
            };
            let share: f64 = share
                .trim_matches([' ', ','])
                .parse()
                .context("a percentile")?;
            let latency = scaled(latency, &COUNTS).context("a latency of a percentile")?;
            ensure!(
                (0.0..=100.0).contains(&share),
                "'{share}' is not a percentile"
            );
            ensure!(points.len() < POINTS_MAX, "it has too many percentiles");
            points.push((share, (latency * unit) as u64));
        }
        side.latencies = Latencies::Percentiles(points);
        Ok(())
    }

    fn finish(self, sizes: &BTreeMap<String, [Option<f64>; 3]>) -> Result<Job> {
        let mut job = self.job;
        let of = |direction: &str| {
            ["read", "write", "trim"]
                .iter()
                .position(|it| *it == direction)
        };
        let sizes = sizes.get(&job.name).copied().unwrap_or_default();
        for side in &mut job.sides {
            if let Latencies::Percentiles(points) = &mut side.latencies {
                points.retain(|(share, _)| *share >= 0.0);
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                if points.is_empty() {
                    side.latencies = Latencies::None;
                }
            }
            let seconds = side.runtime_ms as f64 / 1000.0;
            let issued = match (of(side.direction), self.issued) {
                (Some(at), Some(issued)) => Some(issued[at]),
                (None, Some(issued)) => {
                    Some(issued.iter().fold(0_u64, |sum, it| sum.saturating_add(*it)))
                }
                _ => None,
            };
            let exact = issued
                .filter(|_| seconds > 0.0)
                .map(|requests| requests as f64 / seconds);
            if let Some(exact) = exact
                && (exact / side.iops - 1.0).abs() <= ROUNDING
            {
                side.iops = exact;
            }
            side.requests = (side.iops * seconds) as u64;
            if let Some(size) = of(side.direction).and_then(|at| sizes[at])
                && (side.iops * size / side.bytes_per_s - 1.0).abs() <= ROUNDING
            {
                side.bytes_per_s = side.iops * size;
            }
        }
        job.sides.retain(|side| side.iops > 0.0);
        Ok(job)
    }
}

/// `issued rwts: total=163841,0,0,0 short=…`, and fio 2's `issued    : total=r=50000/w=0/d=0, short=…`.
fn issued(rest: &str) -> Option<[u64; 3]> {
    let (_, list) = rest.split_once("total=")?;
    let list = list.split(' ').next()?;
    let mut numbers = list
        .split([',', '/'])
        .map(|part| part.trim_start_matches(['r', 'w', 'd', '=']).parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}
