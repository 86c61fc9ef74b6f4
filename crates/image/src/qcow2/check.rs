//! Whether an image is sound, as `qemu-img check` sees it.

use std::ops::ControlFlow;

use block::FileOffset;

use super::error::{Doing, ImageError};
use super::open::Qcow2Error;
use super::refcount::get;
use super::scan::{Scan, ScanError};
use crate::storage::{Storage, read_padded};

/// Findings that are kept for display.
const SHOWN_MAX: usize = 16;

/// What a check has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Clusters that count as used more often than they are: lost space, and no more.
    pub leaks: u64,
    /// Everything else.
    pub errors: u64,
    /// Some of the errors, in words.
    pub shown: Vec<String>,
}

impl CheckReport {
    fn error(&mut self, what: &str, at: u64) {
        self.errors += 1;
        if self.shown.len() < SHOWN_MAX {
            self.shown.push(format!("{what} ({at:#x})"));
        }
    }
}

/// Compares all refcounts of a file with what refers to its clusters. Nobody may be writing it.
///
/// # Errors
/// It is no such image, or a table could not be read.
pub fn check(storage: &dyn Storage) -> Result<CheckReport, Qcow2Error> {
    let (header, _) = super::open::read_header(storage)?;
    let mut report = CheckReport::default();
    let mut scan = Scan::new(storage, &header, true).map_err(Qcow2Error::from_scan)?;
    for window in 0..scan.windows() {
        let (range, counts) = scan
            .count(window, &mut |_| ControlFlow::Continue(()))
            .map_err(Qcow2Error::from_scan)?;
        let compared = compare(storage, &scan, &mut report, range.clone(), &counts);
        compared.map_err(Qcow2Error::Image)?;
        let copied = scan.wrong_copied(&range, &counts, |at, _| {
            report.error("an entry says wrongly whose its cluster is", at);
            Ok(())
        });
        copied.map_err(Qcow2Error::from_scan)?;
    }
    for (what, at) in &scan.findings {
        report.error(what, *at);
    }
    Ok(report)
}

fn compare(
    storage: &dyn Storage,
    scan: &Scan<'_>,
    report: &mut CheckReport,
    range: std::ops::Range<u64>,
    counts: &[u32],
) -> Result<(), ImageError> {
    let per_block = scan.g.block_entries();
    let last = scan.windows() * super::scan::WINDOW <= range.end || range.end == scan.clusters;
    let blocks = match last {
        true => scan.refcount_table.len() as u64,
        false => range.end.div_ceil(per_block),
    };
    let used = |cluster: u64| match cluster.checked_sub(range.start) {
        Some(place) => counts.get(place as usize).copied().unwrap_or(0),
        None => 0,
    };
    for block in range.start / per_block..blocks.max(range.end.div_ceil(per_block)) {
        let at = scan
            .refcount_table
            .get(block as usize)
            .copied()
            .unwrap_or(0);
        let clusters = block * per_block..(block + 1) * per_block;
        let clusters = clusters.start.max(range.start)..clusters.end;
        let mut bytes = vec![0; scan.g.cluster() as usize];
        if at == 0 {
            if clusters.start >= range.end {
                continue;
            }
        } else {
            read_padded(storage, FileOffset(at), &mut bytes).doing("reading refcounts", at)?;
        }
        for cluster in clusters {
            if !last && cluster >= range.end {
                break;
            }
            let has = get(&bytes, scan.g.refcount_order, cluster % per_block);
            let should = u64::from(used(cluster));
            let offset = cluster << scan.g.cluster_bits;
            if has < should {
                report.error(
                    "a cluster is used more often than its refcount says",
                    offset,
                );
            } else if has > should {
                report.leaks += 1;
            }
        }
    }
    Ok(())
}

impl Qcow2Error {
    pub(super) fn from_scan(error: ScanError) -> Self {
        match error {
            ScanError::Image(error) => Self::Image(error),
            ScanError::TooMuch => Self::TooMuchToRepair,
            ScanError::Stopped => Self::Stopped,
        }
    }
}
