//! The text that CrystalDiskMark saves or copies (`SaveText` of its `DiskMarkDlg.cpp`, version 9). Version 7 has the words
//! `Sequential` and `Random` instead of `SEQ` and `RND`; earlier ones have another format.
//!
//! Each line is the best of several passes (its DiskSpd runs for each, and the first is dropped), with a mean latency and
//! without percentiles.

use anyhow::{Context, Result, ensure};

use super::{Load, Results};
use crate::journal::Sample;

const FLAG: &str = "imported from CrystalDiskMark: the best of its passes, without percentiles";

/// Whether a text is a report of CrystalDiskMark.
pub(super) fn is(text: &str) -> bool {
    text.trim_start().starts_with("---")
        && text
            .lines()
            .take(5)
            .any(|line| line.starts_with("CrystalDiskMark "))
}

pub(super) fn parse(text: &str) -> Result<Results> {
    let head = text
        .lines()
        .find_map(|line| line.strip_prefix("CrystalDiskMark "));
    let version = head
        .and_then(|line| line.split_whitespace().next())
        .context("there is no version")?;
    let mut section = None;
    let mut loads: Vec<Load> = Vec::new();
    let seconds = text.lines().find_map(measure_time);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            section = writes(line);
        }
        let kind = line.split(' ').next().unwrap_or_default();
        let is_random = match kind {
            "SEQ" | "Sequential" => false,
            "RND" | "Random" => true,
            _ => continue,
        };
        let load =
            section.and_then(|writes| result(line, is_random, writes, seconds.unwrap_or(0.0)));
        let load = load.with_context(|| {
            let number = index + 1;
            format!(
                "line {number}: '{line:.80}' is not a result; versions before 7 have another format"
            )
        })?;
        ensure!(loads.len() < 64, "there are more than 64 results");
        // A test that was not run has zeroes.
        if load.sample.iops > 0.0 {
            let name = super::unused(load.name, &loads);
            loads.push(Load { name, ..load });
        }
    }
    ensure!(!loads.is_empty(), "no test was run");
    Ok(Results {
        tool: "crystaldiskmark",
        version: version.to_owned(),
        loads,
        notes: Vec::new(),
    })
}

/// The share of writes in a section such as `[Read]` or `[Mix] Read 70%/Write 30%`, in percent.
fn writes(head: &str) -> Option<u64> {
    match head.split_once(']')? {
        ("[Read", _) => Some(0),
        ("[Write", _) => Some(100),
        ("[Mix", ratio) => {
            let (_, writes) = ratio.split_once("/Write ")?;
            let percent = writes.trim().strip_suffix('%')?.parse().ok();
            percent.filter(|percent| *percent <= 100)
        }
        _ => None,
    }
}

/// The seconds in `Time: Measure 5 sec / Interval 5 sec`.
fn measure_time(line: &str) -> Option<f64> {
    let rest = line.trim().strip_prefix("Time: Measure ")?;
    let seconds: u32 = rest.split(' ').next()?.parse().ok()?;
    Some(f64::from(seconds))
}

/// A line such as `RND    4KiB (Q= 32, T=16):  1534.913 MB/s [ 374734.6 IOPS] <  1361.74 us>`.
fn result(line: &str, is_random: bool, write_percent: u64, seconds: f64) -> Option<Load> {
    let (_, rest) = line.split_once(' ')?;
    let (size, rest) = rest.split_once("(Q=")?;
    let (depth, rest) = rest.split_once(", T=")?;
    let (threads, rest) = rest.split_once("):")?;
    let (speed, rest) = rest.split_once("MB/s [")?;
    let (iops, rest) = rest.split_once("IOPS] <")?;
    let (us, _) = rest.split_once("us>")?;
    let size = size.trim();
    let bytes = match (size.strip_suffix("KiB"), size.strip_suffix("MiB")) {
        (Some(kib), _) => kib.parse::<u64>().ok()?.checked_mul(1 << 10)?,
        (_, Some(mib)) => mib.parse::<u64>().ok()?.checked_mul(1 << 20)?,
        _ => return None,
    };
    let whole = |text: &str| text.trim().parse::<u64>().ok();
    let decimal = |text: &str| {
        let value = text.trim().parse::<f64>().ok();
        value.filter(|value| (0.0..1e9).contains(value))
    };
    let name = super::name(
        is_random,
        write_percent,
        bytes,
        whole(depth)?,
        whole(threads)?,
    );
    let sample = Sample {
        iops: decimal(iops)?,
        bytes_per_s: decimal(speed)? * 1e6,
        mean_ns: decimal(us)? * 1e3,
        window_s: seconds,
        ..Sample::default()
    };
    Some(Load {
        name,
        sample,
        flag: Some(FLAG),
    })
}
