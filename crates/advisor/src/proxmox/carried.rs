//! What a drive's line says that another program has to keep.

use super::{Part, description};
use crate::model::Table;
use crate::model::carried::{Carried, Dialect};

/// Limits of a disk. 0 means unlimited, and bursts have no effect without one of these.
pub const RATES: &[&str] = &["iops", "iops_rd", "iops_wr", "mbps", "mbps_rd", "mbps_wr"];

/// What the disk keeps when another program serves it (`qm.conf(5)`).
pub fn of(parts: &[Part<'_>]) -> Carried {
    let mut carried = Carried::default();
    for part in parts {
        match (part.key, part.key.strip_prefix("mbps")) {
            (_, Some(rest)) => {
                let bytes = part.value.parse().ok();
                let bytes = bytes.map(|mib: f64| (mib * f64::from(1 << 20)) as u64);
                carried.limit(&format!("bps{rest}"), Dialect::OldDrive, bytes);
            }
            ("serial", _) => carried.serial = Some(description::decoded(part.value)),
            ("werror", _) => carried.werror = Some(part.value.to_owned()),
            ("rerror", _) => carried.rerror = Some(part.value.to_owned()),
            (key, _) => carried.limit(key, Dialect::OldDrive, part.value.parse().ok()),
        }
    }
    carried
}

/// The least limits of any direction.
pub fn least_limits(parts: &[Part<'_>], table: &mut Table) {
    for (name, prefix, unit) in [
        ("disk.limit-iops", "iops", 1.0),
        ("disk.limit-bytes", "mbps", f64::from(1 << 20)),
    ] {
        let rates = parts
            .iter()
            .filter(|part| RATES.contains(&part.key) && part.key.starts_with(prefix));
        let rates = rates.filter_map(|part| Some((part.value.parse::<f64>().ok()?, part.span)));
        let limits = rates.filter(|(rate, _)| *rate > 0.0);
        if let Some((least, span)) = limits.min_by(|a, b| a.0.total_cmp(&b.0)) {
            table.give(name, (least * unit) as u64, span);
        }
    }
}
