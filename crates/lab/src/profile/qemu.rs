//! What QEMU's monitor tells: the roles of threads, and the requests of disks that QEMU opens itself.

use std::collections::{BTreeMap, BTreeSet};

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

/// The roles that a monitor told, by the thread ids of this PID namespace, if the monitor is that of a process; otherwise
/// `None`. `ids` are the threads of the process: by the ids in QEMU's own PID namespace, those in this one. `is_listener`
/// says whether the process itself listens on the monitor's socket.
pub fn roles_in(
    told: &BTreeMap<i32, Role>,
    ids: &BTreeMap<i32, i32>,
    is_listener: bool,
) -> Option<BTreeMap<i32, Role>> {
    // Two containers use the same numbers, so they prove nothing.
    let is_visible = ids.iter().all(|(inner, outer)| inner == outer);
    let has_all = !told.is_empty() && told.keys().all(|tid| ids.contains_key(tid));
    if !(is_listener || is_visible && has_all) {
        return None;
    }
    let roles = told
        .iter()
        .filter_map(|(tid, role)| Some((*ids.get(tid)?, *role)));
    Some(roles.collect())
}

/// The most throttle groups that are asked for.
const GROUPS_MAX: usize = 256;

/// What QEMU has counted of its disks, since it started. `at_ns` is the time of the reading.
///
/// # Errors
/// QEMU refuses a command.
pub fn disks(qmp: &mut Qmp, at_ns: u64) -> Result<DiskCounters> {
    let stats = qmp.execute("query-blockstats", json!({}))?;
    let blocks = qmp.execute("query-block", json!({}))?;
    let disks = blocks.as_array().into_iter().flatten();
    let names: BTreeSet<&str> = disks.flat_map(throttle_groups).collect();
    let mut groups = BTreeMap::new();
    for name in names.into_iter().take(GROUPS_MAX) {
        let limits = qmp.property(&format!("/objects/{name}"), "limits");
        groups.insert(name, limits.unwrap_or_default());
    }
    Ok(DiskCounters::of_qemu(&stats, &blocks, &groups, at_ns))
}

/// The throttle groups of the nodes below a disk of `query-block`. Its file name has the options of all these nodes.
fn throttle_groups(disk: &Value) -> impl Iterator<Item = &str> {
    let file = disk["inserted"]["file"].as_str().unwrap_or_default();
    let options = file.strip_prefix("json:").unwrap_or_default();
    let values = options.split("\"throttle-group\": \"").skip(1);
    values.filter_map(|rest| Some(rest.split_once('"')?.0))
}

/// Limits, such as `iops=200`, by their names at the disk; `named` gives the value of each.
fn limits_text(named: impl Fn(&str, &str) -> Option<u64>) -> Vec<String> {
    let limits = [
        ("iops", "iops-total"),
        ("iops_rd", "iops-read"),
        ("iops_wr", "iops-write"),
        ("bps", "bps-total"),
        ("bps_rd", "bps-read"),
        ("bps_wr", "bps-write"),
    ];
    let limits = limits.into_iter().filter_map(|(own, of_group)| {
        let value = named(own, of_group).filter(|value| *value > 0)?;
        Some(format!("{own}={value}"))
    });
    limits.collect()
}

impl DiskCounters {
    /// The replies to `query-blockstats` and `query-block`, and the limits of throttle groups.
    fn of_qemu(
        stats: &Value,
        blocks: &Value,
        groups: &BTreeMap<&str, Value>,
        at_ns: u64,
    ) -> DiskCounters {
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
            let block = block.unwrap_or(&Value::Null);
            let mut limits = limits_text(|own, _| block["inserted"][own].as_u64());
            for group in throttle_groups(block) {
                let its = groups.get(group).unwrap_or(&Value::Null);
                let of_group = limits_text(|_, key| its[key].as_u64());
                if !of_group.is_empty() {
                    limits.extend(of_group);
                    limits.push(format!("group={group}"));
                }
            }
            limits.join(",")
        };
        let counters = |disk: &Value| {
            let (name, its) = (name(disk), &disk["stats"]);
            let number = |kind, what| its[format!("{kind}_{what}")].as_u64().unwrap_or(0);
            let sum = |what| {
                let each = ["rd", "wr", "flush", "unmap"].map(|kind| number(kind, what));
                each.into_iter().fold(0, u64::saturating_add)
            };
            let counters = super::disk::Counters {
                at_ns,
                requests: sum("operations"),
                // QEMU has no stages.
                measured: 0,
                sum_ns: [sum("total_time_ns"), 0, 0, 0, 0],
                operations: ["rd", "wr"].map(|kind| number(kind, "operations")),
                bytes: ["rd", "wr"].map(|kind| number(kind, "bytes")),
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
        let none = BTreeMap::new();
        let before = DiskCounters::of_qemu(&stats(100), &blocks, &none, 1_000_000_000);
        let after = DiskCounters::of_qemu(&stats(600), &blocks, &none, 2_000_000_000);
        assert_eq!(after.disks.len(), 1);
        let requests = after.since(&before).unwrap();
        assert_eq!((requests.per_s, requests.mean_ns), (1000.0, 3000.0));
        assert_eq!(requests.stages, None);
        assert_eq!(after.limit(Some(&before)).unwrap().used, Some(2.0));
        assert!(
            DiskCounters::of_qemu(&json!(3), &json!({}), &none, 1)
                .disks
                .is_empty()
        );
    }

    /// The file names are those that QEMU 10.0 reports.
    #[test]
    fn throttle_nodes_are_limits() {
        let stats = |n: u64| {
            json!([
                { "device": "", "qdev": "d0", "stats": { "rd_operations": n, "rd_bytes": n * 4096 } },
                { "device": "cd0", "qdev": "cd0", "stats": { "rd_operations": 3, "rd_bytes": 6 } },
            ])
        };
        let limit = |file: &str, limits: Value| {
            let blocks = json!([
                { "device": "cd0", "qdev": "cd0" },
                { "device": "", "qdev": "d0", "inserted": { "iops": 0, "file": file } },
            ]);
            let found: Vec<&str> = throttle_groups(&blocks[1]).collect();
            let groups: BTreeMap<&str, Value> = found
                .into_iter()
                .map(|name| (name, limits.clone()))
                .collect();
            let at = |n, seconds: u64| {
                DiskCounters::of_qemu(&stats(n), &blocks, &groups, seconds * 1_000_000_000)
            };
            let (before, after) = (at(100, 1), at(500, 3));
            after
                .limit(Some(&before))
                .map(|limit| (limit.text, limit.used))
        };
        let top = r#"json:{"throttle-group": "tg", "driver": "throttle", "file": {"driver": "file", "filename": "d.raw"}}"#;
        assert_eq!(
            limit(
                top,
                json!({ "iops-total": 200, "bps-total": 0, "iops-read-max-length": 1 })
            ),
            Some(("iops=200,group=tg".into(), Some(1.0)))
        );
        let below = r#"json:{"driver": "qcow2", "file": {"throttle-group": "th", "driver": "throttle", "file": {}}}"#;
        assert_eq!(
            limit(below, json!({ "bps-read": 200 * 4096, "iops-write": 1 })),
            Some(("iops_wr=1,bps_rd=819200,group=th".into(), Some(1.0)))
        );
        assert_eq!(limit("d.raw", json!({ "iops-total": 200 })), None);
        let in_name = r#"json:{"filename": "\"throttle-group\": \"x\""}"#;
        assert_eq!(limit(in_name, json!({ "iops-total": 200 })), None);
    }

    #[test]
    fn monitor_of_another_process_has_no_roles() {
        let told = BTreeMap::from([(11, Role::Vcpu), (12, Role::IoThread)]);
        let ids = |pairs: &[(i32, i32)]| pairs.iter().copied().collect();
        let host = ids(&[(10, 10), (11, 11), (12, 12)]);
        assert_eq!(roles_in(&told, &host, false), Some(told.clone()));
        let other = ids(&[(10, 10), (11, 11)]);
        assert_eq!(roles_in(&told, &other, false), None);
        assert_eq!(roles_in(&BTreeMap::new(), &host, false), None);
        // QEMU in a container tells numbers of its own, which another container has too.
        let container = ids(&[(1, 410), (11, 411), (12, 412)]);
        assert_eq!(roles_in(&told, &container, false), None);
        let seen = BTreeMap::from([(411, Role::Vcpu), (412, Role::IoThread)]);
        assert_eq!(roles_in(&told, &container, true), Some(seen));
    }
}
