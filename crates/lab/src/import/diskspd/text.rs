//! DiskSpd's text, which is its default output (`ResultParser.cpp` and `Common.cpp` of DiskSpd 2.0 to 2.2).

use anyhow::{Context, Result, bail, ensure};

use super::super::{Load, Results};
use super::{Measured, Planned, SPANS_MAX, decimal, nanoseconds, number};

/// What the lines of the results belong to.
#[derive(Clone, Copy, PartialEq)]
enum Table {
    Other,
    /// The threads of all requests, up to their sum.
    Total,
    Percentiles,
}

pub(in super::super) fn is(text: &str) -> bool {
    text.lines()
        .any(|line| line.starts_with("Results for timespan"))
        && text
            .lines()
            .any(|line| line.trim_start().starts_with("Command Line:"))
}

pub(in super::super) fn parse(text: &str) -> Result<Results> {
    let mut planned: Vec<Planned> = Vec::new();
    let mut measured: Vec<Measured> = Vec::new();
    let mut table = Table::Other;
    for line in text.lines() {
        let trimmed = line.trim();
        if line.starts_with("Results for timespan") {
            measured.push(Measured::default());
            table = Table::Other;
        } else if let Some(run) = measured.last_mut() {
            run.line(line, &mut table)
                .with_context(|| format!("{trimmed:.80}"))?;
        } else if trimmed.starts_with("timespan:") {
            planned.push(Planned::default());
        } else if let Some(run) = planned.last_mut() {
            run.line(trimmed)
                .with_context(|| format!("{trimmed:.80}"))?;
        }
        ensure!(
            planned.len().max(measured.len()) <= SPANS_MAX,
            "there are more than {SPANS_MAX} time spans"
        );
    }
    ensure!(
        planned.len() == measured.len(),
        "{} time spans were requested, and there are results of {}; was the run cut off?",
        planned.len(),
        measured.len()
    );
    let mut loads: Vec<Load> = Vec::new();
    let mut notes = Vec::new();
    for (index, (planned, measured)) in planned.iter().zip(measured).enumerate() {
        let name = super::super::unused(planned.name(), &loads);
        if measured.points.is_empty() {
            notes.push(format!(
                "{name}: it has no percentiles; diskspd -L measures them"
            ));
        }
        let sample = measured
            .sample()
            .with_context(|| format!("time span {}", index + 1))?;
        loads.push(Load {
            name,
            sample,
            flag: None,
        });
    }
    Ok(Results {
        tool: "diskspd",
        // The text does not name it.
        version: "unknown".into(),
        loads,
        notes,
    })
}

/// A size such as `4KiB`, `64K` or `65536`.
fn size(text: &str) -> Result<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let factor: u64 = match text[end..].trim() {
        "" | "B" | "bytes" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => bail!("'{text:.40}' is not a size"),
    };
    let bytes = number(&text[..end])?.checked_mul(factor);
    bytes.with_context(|| format!("'{text:.40}' is not a size"))
}

impl Planned {
    fn line(&mut self, line: &str) -> Result<()> {
        if line.starts_with("path:") {
            self.targets += 1;
        }
        let first = self.targets == 1;
        let after = |key: &str| line.strip_prefix(key).map(str::trim);
        if let Some(text) = after("block size:").filter(|_| first) {
            self.block_size = size(text)?;
        } else if let Some(text) = after("number of outstanding I/O operations per thread:")
            .or(after("number of outstanding I/O operations:"))
            .filter(|_| self.depth == 0)
        {
            self.depth = number(text)?;
        } else if let Some(text) = after("threads per file:").filter(|_| first) {
            self.threads_each = number(text)?;
        } else if let Some(text) = after("total threads:") {
            self.threads = number(text)?;
        } else if line.starts_with("using random I/O") && first {
            self.is_random = true;
        } else if line.starts_with("using mixed random/sequential I/O") && first {
            let (_, share) = line.split_once('(').context("no share")?;
            let share = share.split('%').next().unwrap_or_default();
            self.random_percent = Some(number(share)?);
        } else if line.starts_with("performing write test") && first {
            self.write_percent = 100;
        } else if line.starts_with("performing mix test") && first {
            // `(read/write ratio: 70/30)`, and `(write/read ratio: 30/100)` of version 2.0.
            let (_, ratio) = line.split_once("ratio:").context("no ratio")?;
            let ratio = ratio.trim().trim_end_matches(')');
            let (left, right) = ratio.split_once('/').context("no ratio")?;
            let share = if line.contains("write/read") {
                left
            } else {
                right
            };
            self.write_percent = number(share.trim())?;
        } else if let Some(text) = after("throughput rate-limited to").filter(|_| first) {
            self.throughput = Some(text.to_owned());
        }
        Ok(())
    }
}

impl Measured {
    fn line(&mut self, line: &str, table: &mut Table) -> Result<()> {
        let line = line.trim();
        match line {
            "Total IO" => *table = Table::Total,
            "Read IO" | "Write IO" => *table = Table::Other,
            _ if line.starts_with("%-ile") => *table = Table::Percentiles,
            _ if line.starts_with("actual test time:") => {
                let (_, time) = line.split_once(':').context("no time")?;
                self.seconds = decimal(time.trim().trim_end_matches('s'))?;
            }
            _ if line.starts_with("The test was interrupted") => {
                self.error = Some(line.to_owned());
            }
            _ if *table == Table::Total && line.starts_with("total:") => {
                *table = Table::Other;
                let rest = line.trim_start_matches("total:");
                let columns: Vec<&str> = rest.split('|').map(str::trim).collect();
                ensure!(columns.len() >= 4, "the sum has too few columns");
                self.bytes = number(columns[0])?;
                self.requests = number(columns[1])?;
                // With -L, the mean latency follows the rates.
                self.mean_ms = columns.get(4).and_then(|text| decimal(text).ok());
            }
            _ if *table == Table::Percentiles => {
                let mut columns = line.split('|').map(str::trim);
                let (Some(share), Some(total)) =
                    (columns.next().and_then(percentile), columns.nth(2))
                else {
                    return Ok(());
                };
                ensure!(
                    self.points.len() < SPANS_MAX,
                    "there are too many percentiles"
                );
                self.points.push((share, nanoseconds(decimal(total)?)));
            }
            _ => {}
        }
        Ok(())
    }
}

/// `50th`, `3-nines`, `max`.
fn percentile(name: &str) -> Option<f64> {
    match name {
        "min" => Some(0.0),
        "max" => Some(100.0),
        _ => {
            if let Some(nines) = name.strip_suffix("-nines") {
                let nines: i32 = nines.parse().ok().filter(|it| (1..=12).contains(it))?;
                return Some(100.0 - 100.0 / 10_f64.powi(nines));
            }
            let digits = name.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            digits
                .parse()
                .ok()
                .filter(|share| (0.0..=100.0).contains(share))
        }
    }
}
