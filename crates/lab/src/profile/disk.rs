//! What ringdisk counts of its disks: the reply to `x-ringdisk-stats`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::measurement::{Limit, Requests, Stages};

/// The kinds of requests, as in the reply.
const KINDS: [&str; 5] = ["read", "write", "flush", "discard", "write-zeroes"];
/// The stages of a request, as in the reply.
const STAGES: [&str; 5] = ["total", "waiting", "image", "engine", "publishing"];

/// The counters of some disks at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskCounters {
    /// The disks, by name.
    pub disks: BTreeMap<String, Counters>,
    /// Nanoseconds that each I/O thread has polled, by thread id.
    pub polled_ns: BTreeMap<i32, u64>,
}

/// The counters of one disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Nanoseconds of the server's clock.
    pub at_ns: u64,
    /// Completed requests, including those that failed.
    pub requests: u64,
    /// Those whose time was measured.
    pub measured: u64,
    /// The sum of their times, by stage.
    pub sum_ns: [u64; STAGES.len()],
    /// Completed reads and writes.
    pub operations: [u64; 2],
    /// Their bytes.
    pub bytes: [u64; 2],
    /// Limits, such as `iops=500`; empty if there are none.
    pub limits: String,
    /// Requests that failed, and wait for the storage to work again.
    pub stalled: u64,
}

impl DiskCounters {
    /// Parses a reply. Only the disks that `names` has count, or all if it is empty. What is missing counts as 0.
    pub fn parse(reply: &Value, names: &[String]) -> DiskCounters {
        let list = |key: &str| reply[key].as_array().into_iter().flatten();
        let counts = |disk: &&Value| {
            let name = disk["name"].as_str().unwrap_or_default();
            disk["stats"].is_object() && (names.is_empty() || names.iter().any(|its| its == name))
        };
        let disks = list("disks").filter(counts).map(|disk| {
            let name = disk["name"].as_str().unwrap_or_default().to_owned();
            (name, Counters::parse(disk))
        });
        let polled = list("iothreads").filter_map(|thread| {
            let tid = i32::try_from(thread["thread-id"].as_i64()?).ok()?;
            Some((tid, thread["polled-ns"].as_u64().unwrap_or(0)))
        });
        DiskCounters {
            disks: disks.collect(),
            polled_ns: polled.collect(),
        }
    }

    /// The requests since `before`; `None` if the clock stood still.
    pub fn since(&self, before: &DiskCounters) -> Option<Requests> {
        let mut active = 0;
        let (mut per_s, mut all, mut measured) = (0.0, 0_u64, 0_u64);
        let mut sums = [0.0; STAGES.len()];
        let mut clock = false;
        for (name, now) in &self.disks {
            let Some(then) = before.disks.get(name) else {
                continue;
            };
            let seconds = now.at_ns.saturating_sub(then.at_ns) as f64 / 1e9;
            if seconds <= 0.0 {
                continue;
            }
            clock = true;
            let requests = now.requests.saturating_sub(then.requests);
            active += u32::from(requests > 0);
            per_s += requests as f64 / seconds;
            all = all.saturating_add(requests);
            measured = measured.saturating_add(now.measured.saturating_sub(then.measured));
            for ((sum, now), then) in sums.iter_mut().zip(now.sum_ns).zip(then.sum_ns) {
                *sum += now.saturating_sub(then) as f64;
            }
        }
        // QEMU measures the whole time of all requests, and no stages.
        let count = if measured > 0 { measured } else { all };
        let mean = sums.map(|sum| (sum / count.max(1) as f64).round());
        let [mean_ns, limit_ns, image_ns, engine_ns, back_ns] = mean;
        clock.then_some(Requests {
            disks: active,
            per_s,
            mean_ns,
            stages: (measured > 0).then_some(Stages {
                limit_ns,
                image_ns,
                engine_ns,
                back_ns,
            }),
        })
    }

    /// The limits of the disks, and how much of the one that is used most was used since `before`. If several disks were
    /// in use, or none, the use is unknown.
    pub fn limit(&self, before: Option<&DiskCounters>) -> Option<Limit> {
        let in_use: Vec<(&Counters, &Counters)> = self
            .disks
            .iter()
            .filter_map(|(name, now)| Some((now, before?.disks.get(name)?)))
            .filter(|(now, then)| now.requests > then.requests)
            .collect();
        if let [(now, then)] = in_use[..] {
            return (!now.limits.is_empty()).then(|| Limit {
                text: now.limits.clone(),
                used: now.limit_used(then),
            });
        }
        let mut limits = self.disks.values().map(|disk| &disk.limits);
        Some(Limit {
            text: limits.find(|limits| !limits.is_empty())?.clone(),
            used: None,
        })
    }

    /// Requests that wait for storage that has failed.
    pub fn stalled(&self) -> u64 {
        let each = self.disks.values().map(|disk| disk.stalled);
        each.fold(0, u64::saturating_add)
    }
}

impl Counters {
    /// The largest share of a limit that was used since `before`.
    fn limit_used(&self, before: &Counters) -> Option<f64> {
        let seconds = self.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
        let of = |now: [u64; 2], then: [u64; 2]| {
            [0, 1].map(|kind| now[kind].saturating_sub(then[kind]) as f64 / seconds)
        };
        let ([reads, writes], [read, written]) = (
            of(self.operations, before.operations),
            of(self.bytes, before.bytes),
        );
        let used = self.limits.split(',').filter_map(|word| {
            let (key, value) = word.split_once('=')?;
            let rate = match key {
                "iops" => reads + writes,
                "iops_rd" => reads,
                "iops_wr" => writes,
                "bps" => read + written,
                "bps_rd" => read,
                "bps_wr" => written,
                _ => return None,
            };
            let limit = value.parse::<f64>().ok().filter(|limit| *limit > 0.0)?;
            (seconds > 0.0).then_some(rate / limit)
        });
        used.max_by(f64::total_cmp)
    }

    fn parse(disk: &Value) -> Counters {
        let stats = &disk["stats"];
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let mut counters = Counters {
            at_ns: number(&stats["at-ns"]),
            stalled: number(&stats["stalled"]),
            limits: limits(disk),
            ..Counters::default()
        };
        for kind in KINDS {
            let its = &stats[kind];
            let add = |sum: &mut u64, value: &Value| *sum = sum.saturating_add(number(value));
            add(&mut counters.requests, &its["operations"]);
            add(&mut counters.requests, &its["errors"]);
            if let Some(at) = ["read", "write"].iter().position(|its| *its == kind) {
                add(&mut counters.operations[at], &its["operations"]);
                add(&mut counters.bytes[at], &its["bytes"]);
            }
            add(&mut counters.measured, &its["latency"]["total"]["count"]);
            for (sum, stage) in counters.sum_ns.iter_mut().zip(STAGES) {
                add(sum, &its["latency"][stage]["sum-ns"]);
            }
        }
        counters
    }
}

fn limits(disk: &Value) -> String {
    let own = disk["limits"].as_object().into_iter().flatten();
    let own = own.map(|(key, value)| format!("{key}={value}"));
    let group = disk["throttle-group"].as_str();
    let group = group.map(|name| format!("group={name}"));
    own.chain(group).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn reply(seconds: u64, limits: Value) -> Value {
        let n = seconds * 100;
        let histogram = |ns: u64| json!({ "count": n, "sum-ns": ns * n });
        json!({
            "disks": [{
                "name": "vm1", "limits": limits, "throttle-group": null,
                "stats": {
                    "at-ns": seconds * 1_000_000_000, "stalled": 0,
                    "read": { "operations": n, "errors": 0, "latency": {
                        "total": histogram(1000), "waiting": histogram(600), "image": histogram(50),
                        "engine": histogram(300), "publishing": histogram(50),
                    } },
                },
            }, { "name": "not served" }],
            "iothreads": [{ "id": "iothread0", "thread-id": 77, "polled-ns": seconds * 5 }],
        })
    }

    #[test]
    fn two_replies_make_requests_and_stages() {
        let parse = |seconds| DiskCounters::parse(&reply(seconds, json!({ "iops": 200 })), &[]);
        let (before, after) = (parse(1), parse(3));
        let requests = after.since(&before).unwrap();
        assert_eq!(
            (requests.disks, requests.per_s, requests.mean_ns),
            (1, 100.0, 1000.0)
        );
        let stages = requests.stages.unwrap();
        assert_eq!((stages.limit_ns, stages.engine_ns), (600.0, 300.0));
        assert_eq!(after.polled_ns[&77], 15);
        let limit = after.limit(Some(&before)).unwrap();
        assert_eq!((limit.text.as_str(), limit.used), ("iops=200", Some(0.5)));
        assert_eq!(before.since(&before), None);
    }

    #[test]
    fn only_the_disks_that_are_named_count() {
        let other = DiskCounters::parse(&reply(1, json!({})), &["vm2".into()]);
        assert!(other.disks.is_empty() && other.limit(None).is_none());
        let own = DiskCounters::parse(&reply(1, json!({})), &["vm1".into()]);
        assert!(own.disks.len() == 1 && own.limit(None).is_none());
    }

    proptest! {
        #[test]
        fn any_reply_is_parsed(numbers in prop::collection::vec(any::<u64>(), 8)) {
            let reply = |at: usize| json!({
                "disks": [{ "name": 3, "limits": [1], "stats": {
                    "at-ns": numbers[at], "read": { "operations": numbers[at + 1], "latency": {
                        "total": { "count": numbers[at + 2], "sum-ns": numbers[at + 3] }, "engine": 7,
                    } }, "write": "none", "flush": { "operations": numbers[at + 1] },
                } }],
                "iothreads": [{ "thread-id": numbers[at] }, 3],
            });
            let (before, after) = (DiskCounters::parse(&reply(0), &[]), DiskCounters::parse(&reply(4), &[]));
            if let Some(requests) = after.since(&before) {
                prop_assert!(requests.per_s >= 0.0 && requests.mean_ns >= 0.0);
                let _ = after.limit(Some(&before));
            }
            let _ = after.stalled();
        }
    }
}
