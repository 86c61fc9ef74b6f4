//! What QEMU's monitor tells: the roles of threads, and the requests of disks that QEMU opens itself.

use std::collections::BTreeMap;

use anyhow::Result;
use harness::qmp::Qmp;
use serde_json::{Value, json};

use super::disk::DiskCounters;
use super::roles::Role;

/// The roles of the threads of vCPUs and IOThreads, which QEMU names only with `debug-threads=on`.
///
/// # Errors
/// QEMU refuses a command.
pub fn thread_roles(qmp: &mut Qmp) -> Result<BTreeMap<i32, Role>> {
    let mut roles = BTreeMap::new();
    for (command, role) in [
        ("query-cpus-fast", Role::Vcpu),
        ("query-iothreads", Role::IoThread),
    ] {
        let reply = qmp.execute(command, json!({}))?;
        let threads = reply.as_array().into_iter().flatten();
        let ids = threads.filter_map(|its| i32::try_from(its["thread-id"].as_i64()?).ok());
        roles.extend(ids.map(|tid| (tid, role)));
    }
    Ok(roles)
}

/// What QEMU has counted of its disks, since it started. `at_ns` is the time of the reading.
///
/// # Errors
/// QEMU refuses a command.
pub fn disks(qmp: &mut Qmp, at_ns: u64) -> Result<DiskCounters> {
    let stats = qmp.execute("query-blockstats", json!({}))?;
    let blocks = qmp.execute("query-block", json!({}))?;
    Ok(DiskCounters::of_qemu(&stats, &blocks, at_ns))
}

impl DiskCounters {
    /// The replies to `query-blockstats` and `query-block`.
    fn of_qemu(stats: &Value, blocks: &Value, at_ns: u64) -> DiskCounters {
        let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
        let name = |value: &Value| {
            let names = ["qdev", "device"].into_iter();
            let mut names = names.filter_map(|key| value[key].as_str());
            names
                .find(|name| !name.is_empty())
                .unwrap_or_default()
                .to_owned()
        };
        let blocks = list(blocks);
        let limits = |disk: &str| {
            let block = blocks.iter().find(|its| name(its) == disk);
            let inserted = block.map_or(&Value::Null, |its| &its["inserted"]);
            let keys = ["iops", "iops_rd", "iops_wr", "bps", "bps_rd", "bps_wr"];
            let limits = keys.into_iter().filter_map(|key| {
                let value = inserted[key].as_u64().filter(|value| *value > 0)?;
                Some(format!("{key}={value}"))
            });
            limits.collect::<Vec<_>>().join(",")
        };
        let counters = |disk: &Value| {
            let (name, its) = (name(disk), &disk["stats"]);
            let sum = |what: &str| {
                let kinds = ["rd", "wr", "flush", "unmap"].into_iter();
                let each = kinds.filter_map(|kind| its[format!("{kind}_{what}")].as_u64());
                each.fold(0, u64::saturating_add)
            };
            let counters = super::disk::Counters {
                at_ns,
                requests: sum("operations"),
                // QEMU has no stages.
                measured: 0,
                sum_ns: [sum("total_time_ns"), 0, 0, 0, 0],
                limits: limits(&name),
                stalled: 0,
            };
            (name, counters)
        };
        DiskCounters {
            disks: list(stats)
                .iter()
                .map(counters)
                .filter(|(name, _)| !name.is_empty())
                .collect(),
            polled_ns: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_qemus_disks() {
        let stats = |n: u64| {
            json!([
                { "device": "", "qdev": "/machine/peripheral/d0/virtio-backend", "stats": {
                    "rd_operations": n, "rd_total_time_ns": n * 2000, "wr_operations": n, "wr_total_time_ns": n * 4000,
                } },
                { "node-name": "unnamed", "stats": {} },
            ])
        };
        let blocks = json!([{ "device": "", "qdev": "/machine/peripheral/d0/virtio-backend",
            "inserted": { "iops": 500, "bps": 0 } }]);
        let before = DiskCounters::of_qemu(&stats(100), &blocks, 1_000_000_000);
        let after = DiskCounters::of_qemu(&stats(600), &blocks, 2_000_000_000);
        assert_eq!(after.disks.len(), 1);
        let requests = after.since(&before).unwrap();
        assert_eq!((requests.per_s, requests.mean_ns), (1000.0, 3000.0));
        assert_eq!(requests.stages, None);
        assert_eq!(after.limit(Some(&requests)).unwrap().used, Some(2.0));
        assert!(
            DiskCounters::of_qemu(&json!(3), &json!({}), 1)
                .disks
                .is_empty()
        );
    }
}
