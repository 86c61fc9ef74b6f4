//! Checking whether an image is consistent, like `qemu-img check`.

use std::ops::ControlFlow;

use super::error::{Damage, Doing, ImageError};
use super::open::{Qcow2Error, read_header};
use super::refcount::get;
use super::scan::{Scan, WINDOW};
use super::types::{BlockIndex, HostOffset, Run};
use crate::storage::{Storage, read_padded};

/// The most findings kept for display.
const SHOWN_MAX: usize = 16;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Clusters whose refcount is higher than the number of references: lost space, and nothing worse.
    pub leaks: u64,
    /// All other errors.
    pub errors: u64,
    /// Descriptions of some of the errors.
    pub shown: Vec<String>,
}

impl CheckReport {
    fn error(&mut self, damage: &Damage) {
        self.errors += 1;
        if self.shown.len() < SHOWN_MAX {
            self.shown.push(format!("{} ({})", damage.what, damage.at));
        }
    }
}

/// Compares all refcounts of a file with the references to its clusters. Nothing may write to the file meanwhile.
///
/// # Errors
/// The file is not such an image, or a table could not be read.
pub fn check(storage: &dyn Storage) -> Result<CheckReport, Qcow2Error> {
    let (header, _) = read_header(storage)?;
    let mut report = CheckReport::default();
    let mut scan = Scan::new(storage, &header, true).map_err(Qcow2Error::from_scan)?;
    for window in 0..scan.windows() {
        let (range, counts) = scan
            .count(window, &mut |_| ControlFlow::Continue(()))
            .map_err(Qcow2Error::from_scan)?;
        let compared = compare(storage, &scan, &mut report, range, &counts);
        compared.map_err(Qcow2Error::Image)?;
        let copied = scan.wrong_copied(&range, &counts, |at, _| {
            let what = "the copied flag of an entry is wrong";
            report.error(&Damage::in_file(what, at));
            Ok(())
        });
        copied.map_err(Qcow2Error::from_scan)?;
    }
    for damage in &scan.findings {
        report.error(damage);
    }
    Ok(report)
}

fn compare(
    storage: &dyn Storage,
    scan: &Scan<'_>,
    report: &mut CheckReport,
    range: Run,
    counts: &[u32],
) -> Result<(), ImageError> {
    let per_block = scan.g.block_entries();
    let (g, end) = (&scan.g, range.end());
    let last = scan.windows() * WINDOW <= end.number() || end == scan.clusters.end();
    let blocks = if last {
        scan.refcount_table.len() as u64
    } else {
        end.number().div_ceil(per_block)
    };
    let used = |cluster| {
        let index = range.position(cluster);
        index.map_or(0, |index| counts.get(index).copied().unwrap_or(0))
    };
    let first_block = range.first.refcount_at(g).0.number();
    for block in first_block..blocks.max(end.number().div_ceil(per_block)) {
        let at = scan.refcount_table.get(block as usize).copied();
        let at = at.unwrap_or_default();
        let block = BlockIndex::new(block);
        let first = block.first(g).max(range.first);
        let mut bytes = vec![0; g.cluster() as usize];
        if at == HostOffset::START {
            if first >= end {
                continue;
            }
        } else {
            let read = read_padded(storage, at.in_file(), &mut bytes);
            read.doing("reading refcounts", at)?;
        }
        for cluster in Run::between(first, (block + 1).first(g)).each() {
            if !last && cluster >= end {
                break;
            }
            let has = get(&bytes, g.refcount_order, cluster.refcount_at(g).1);
            let should = u64::from(used(cluster));
            if has < should {
                let what = "a cluster is used more often than its refcount says";
                report.error(&Damage::in_file(what, cluster.start(g)));
            } else if has > should {
                report.leaks += 1;
            }
        }
    }
    Ok(())
}
