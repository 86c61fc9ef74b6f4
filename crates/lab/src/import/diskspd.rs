//! DiskSpd's XML (`diskspd -Rxml -L`). Its elements are those of `XmlResultParser.cpp` and `Common.cpp` of DiskSpd 2.2.
//!
//! A file has a profile, with one time span for each run and the targets of each, and then the results of these time spans
//! in the same order. DiskSpd does not escape names of files, so its output may not be well-formed: this reads tags and
//! texts only.

mod text;

pub(super) use text::{is as is_text, parse as parse_text};

use anyhow::{Context, Result, bail, ensure};
use harness::histogram::Histogram;

use super::{Load, Results};
use crate::fio::add_between;
use crate::journal::Sample;

/// The maximum depth of elements; DiskSpd's own is nine.
const DEPTH_MAX: usize = 32;
/// The maximum number of time spans of a file, and of percentiles of one.
const SPANS_MAX: usize = 256;

/// A run as it was requested.
#[derive(Default)]
struct Planned {
    targets: u64,
    /// Of the first target.
    block_size: u64,
    is_random: bool,
    random_percent: Option<u64>,
    write_percent: u64,
    depth: u64,
    /// For each target, unless all targets share `threads`.
    threads_each: u64,
    threads: u64,
    throughput: Option<String>,
}

/// A run as it was measured.
#[derive(Default)]
struct Measured {
    seconds: f64,
    requests: u64,
    bytes: u64,
    mean_ms: Option<f64>,
    /// Percentiles of all requests, with their latencies in nanoseconds.
    points: Vec<(f64, u64)>,
    /// The percentile of the current bucket.
    percentile: Option<f64>,
    error: Option<String>,
}

pub(super) fn parse(text: &str) -> Result<Results> {
    let mut version = String::new();
    let mut planned: Vec<Planned> = Vec::new();
    let mut measured: Vec<Measured> = Vec::new();
    walk(text, |path, event| {
        match (path, event) {
            (["Results", "System", "Tool", "Version"], Event::Text(text)) => {
                text.clone_into(&mut version)
            }
            (["Results", "Profile", "TimeSpans", "TimeSpan"], Event::Open) => {
                planned.push(Planned::default())
            }
            (["Results", "TimeSpan"], Event::Open) => measured.push(Measured::default()),
            (["Results", "Profile", "TimeSpans", "TimeSpan", rest @ ..], event) => {
                if let Some(run) = planned.last_mut() {
                    run.read(rest, event)?;
                }
            }
            (["Results", "TimeSpan", rest @ ..], Event::Text(text)) => {
                if let Some(run) = measured.last_mut() {
                    run.read(rest, text)?;
                }
            }
            _ => {}
        }
        ensure!(
            planned.len().max(measured.len()) <= SPANS_MAX,
            "there are more than {SPANS_MAX} time spans"
        );
        Ok(())
    })?;
    ensure!(
        !measured.is_empty(),
        "there is no <TimeSpan> in <Results>; run diskspd with -Rxml"
    );
    ensure!(
        planned.len() == measured.len(),
        "the profile has {} time spans, and there are results of {}",
        planned.len(),
        measured.len()
    );
    let mut loads: Vec<Load> = Vec::new();
    for (index, (planned, measured)) in planned.iter().zip(measured).enumerate() {
        let sample = measured
            .sample()
            .with_context(|| format!("time span {}", index + 1))?;
        let name = super::unused(planned.name(), &loads);
        loads.push(Load {
            name,
            sample,
            flag: None,
        });
    }
    ensure!(!version.is_empty(), "there is no <Version>");
    Ok(Results {
        tool: "diskspd",
        version,
        loads,
        notes: Vec::new(),
    })
}

impl Planned {
    fn read(&mut self, path: &[&str], event: Event<'_>) -> Result<()> {
        match (path, event) {
            (["Targets", "Target"], Event::Open) => self.targets += 1,
            (["ThreadCount"], Event::Text(text)) => self.threads = number(text)?,
            // With -O, the depth of the threads that all targets share.
            (["RequestCount"], Event::Text(text)) => self.depth = number(text)?,
            (["Targets", "Target", field], Event::Text(text)) if self.targets == 1 => {
                match *field {
                    "BlockSize" => self.block_size = number(text)?,
                    "Random" => self.is_random = true,
                    "RandomRatio" => self.random_percent = Some(number(text)?),
                    "WriteRatio" => self.write_percent = number(text)?,
                    "RequestCount" if self.depth == 0 => self.depth = number(text)?,
                    "ThreadsPerFile" => self.threads_each = number(text)?,
                    "Throughput" if text != "0" => self.throughput = Some(text.to_owned()),
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// In the words of the lab's own loads.
    fn name(&self) -> String {
        let threads = match self.threads {
            0 => self.threads_each.saturating_mul(self.targets),
            shared => shared,
        };
        let mut name = super::name(
            self.is_random,
            self.write_percent,
            self.block_size,
            self.depth,
            threads,
        );
        if let Some(percent) = self.random_percent {
            name += &format!(", {percent} % random");
        }
        if self.targets > 1 {
            name += &format!(", {} targets", self.targets);
        }
        if let Some(rate) = &self.throughput {
            name += &format!(", rate {rate}");
        }
        name
    }
}

impl Measured {
    fn read(&mut self, path: &[&str], text: &str) -> Result<()> {
        match path {
            ["TestTimeSeconds"] => self.seconds = decimal(text)?,
            ["Error"] => self.error = Some(text.to_owned()),
            ["Latency", "AverageTotalMilliseconds"] => self.mean_ms = Some(decimal(text)?),
            ["Latency", "Bucket", "Percentile"] => self.percentile = Some(decimal(text)?),
            ["Latency", "Bucket", "TotalMilliseconds"] => {
                let percentile = self
                    .percentile
                    .take()
                    .context("a latency has no percentile")?;
                ensure!(
                    (0.0..=100.0).contains(&percentile),
                    "{percentile} is not a percentile"
                );
                ensure!(
                    self.points.len() < SPANS_MAX,
                    "there are more than {SPANS_MAX} percentiles"
                );
                self.points.push((percentile, nanoseconds(decimal(text)?)));
            }
            ["Thread", "Target", "IOCount"] => {
                self.requests = self.requests.saturating_add(number(text)?)
            }
            ["Thread", "Target", "BytesCount"] => {
                self.bytes = self.bytes.saturating_add(number(text)?)
            }
            _ => {}
        }
        Ok(())
    }

    fn sample(self) -> Result<Sample> {
        if let Some(error) = self.error {
            bail!("diskspd says: {error}");
        }
        ensure!(self.seconds > 0.0, "the test took no time");
        ensure!(self.requests > 0, "no request was made");
        let mean_ms = self
            .mean_ms
            .context("there are no latencies; run diskspd with -L")?;
        let mut latencies = Histogram::default();
        add_between(self.points, self.requests, &mut latencies);
        Ok(Sample {
            iops: self.requests as f64 / self.seconds,
            bytes_per_s: self.bytes as f64 / self.seconds,
            mean_ns: mean_ms * 1e6,
            window_s: self.seconds,
            latencies: latencies.coarse(),
            ..Sample::default()
        })
    }
}

/// A part of the text.
#[derive(Clone, Copy)]
enum Event<'a> {
    /// The element at the end of the path begins.
    Open,
    /// The text in the element at the end of the path, which has no elements.
    Text(&'a str),
}

/// Calls `visit` with the path of each element.
fn walk<'a>(
    text: &'a str,
    mut visit: impl FnMut(&[&'a str], Event<'a>) -> Result<()>,
) -> Result<()> {
    let mut path: Vec<&str> = Vec::new();
    let mut is_leaf = false;
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('<') {
        let (tag, tail) = after
            .split_once('>')
            .context("the file ends in a tag; was the run cut off?")?;
        if let Some(name) = tag.strip_prefix('/') {
            ensure!(path.last() == Some(&name), "</{name:.40}> ends no element");
            if std::mem::take(&mut is_leaf) {
                visit(&path, Event::Text(before.trim()))?;
            }
            path.pop();
        } else if !tag.starts_with(['?', '!']) {
            let name = tag.split([' ', '/']).next().unwrap_or_default();
            ensure!(!name.is_empty(), "a tag has no name");
            ensure!(
                path.len() < DEPTH_MAX,
                "elements are nested more than {DEPTH_MAX} levels deep"
            );
            path.push(name);
            visit(&path, Event::Open)?;
            is_leaf = !tag.ends_with('/');
            if !is_leaf {
                path.pop();
            }
        }
        rest = tail;
    }
    match path.last() {
        Some(name) => bail!("the file ends in <{name:.40}>; was the run cut off?"),
        None => Ok(()),
    }
}

fn number(text: &str) -> Result<u64> {
    text.parse()
        .with_context(|| format!("'{text:.40}' is not a whole number"))
}

fn decimal(text: &str) -> Result<f64> {
    let value: Option<f64> = text.parse().ok();
    value
        .filter(|value| (0.0..1e12).contains(value))
        .with_context(|| format!("'{text:.40}' is not a number that can be measured"))
}

fn nanoseconds(ms: f64) -> u64 {
    (ms * 1e6).round() as u64
}
