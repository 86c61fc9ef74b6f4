//! Statistics in the JSON of the control socket, written and parsed.
//!
//! Counters are totals since the disk was first served; a client computes rates from two replies.

use block::{Aio, ThrottleLimits};
use datapath::{DiskStats, Histogram, RequestStats, ThreadStats};
use serde_json::{Map, Value, json};

use crate::config::spec::DiskSpec;
use crate::config::{limits, sockets};
use crate::node::Node;
use crate::server::DiskView;
use crate::server::device::ServedDisk;
use crate::server::iothreads::NamedThread;

/// The percentiles that are given with each histogram.
pub const PERCENTILES: [(&str, f64); 3] = [("p50-ns", 50.0), ("p99-ns", 99.0), ("p99.9-ns", 99.9)];

/// Everything about a disk, with what it has done.
pub fn disk(look: &DiskView<'_>) -> Value {
    let (node, spec) = (look.node, &look.node.spec);
    let choice = node.choice.as_ref();
    let mut disk = json!({
        "name": node.name(),
        "file": node.filename,
        "format": node.format.to_string(),
        "size": look.size(),
        "readonly": spec.read_only,
        "cache": spec.cache.word(),
        "aio": choice.map(|choice| Aio::word(choice.aio)),
        "aio-reason": choice.map(|choice| &choice.reason),
        "discard": spec.discard.word(),
        "detect-zeroes": spec.detect_zeroes.word(),
        "rerror": spec.rerror.word(),
        "werror": spec.werror.word(),
        "limits": limits_of(look.limits),
        "throttle-group": look.group,
        "domain": look.labels.domain,
        "target": look.labels.target,
        "configured": look.is_configured,
    });
    if let Some(export) = look.export {
        let threads = &export.device.threads;
        disk["export"] = export.id.clone().into();
        disk["socket"] = export.socket.display().to_string().into();
        disk["connected"] = export.connected().into();
        disk["front-end-pid"] = export.front_end_pid().into();
        disk["storage"] = storage_state(node, &export.device).into();
        disk["queues"] = threads.len().into();
        disk["queue-size"] = export.device.queue_size.into();
        disk["write-cache"] = export.disk.write_cache().into();
        disk["readonly"] = export.disk.facts.read_only.into();
        disk["iothreads"] = threads.iter().map(|t| t.id.clone()).collect();
        disk["stats"] = to_json(&export.disk.stats());
    }
    disk
}

/// A disk that is to be served and cannot be.
pub fn absent((spec, reason): &(DiskSpec, String), is_configured: bool) -> Value {
    json!({
        "name": spec.name,
        "file": spec.file.to_string(),
        "socket": sockets::path(spec).display().to_string(),
        "domain": spec.labels.domain,
        "target": spec.labels.target,
        "configured": is_configured,
        "storage": "absent",
        "problem": reason,
    })
}

/// How the storage of a disk does, in a word.
fn storage_state(node: &Node, device: &ServedDisk) -> &'static str {
    let disk = &device.disk;
    if node.rbd().is_some_and(|rbd| rbd.is_blocklisted()) {
        "blocklisted"
    } else if disk.is_abandoned() || device.hangs_for().is_some() {
        "hangs"
    } else if node.is_deleted() {
        "deleted"
    } else if disk.is_stopped() {
        "stopped"
    } else if disk.stalled() > 0 {
        "fails"
    } else {
        "works"
    }
}

/// An I/O thread and what it has done. The CPU time is absent where the kernel does not say.
pub fn thread(thread: &NamedThread) -> Value {
    let ThreadStats {
        cpu_ns,
        polls,
        polls_hit,
        polled_ns,
        poll_saved_ns,
        sleeps,
    } = thread.thread.stats();
    json!({
        "id": thread.id,
        "thread-id": thread.thread.thread_id(),
        "cpu-ns": cpu_ns,
        "polls": polls,
        "polls-hit": polls_hit,
        "polled-ns": polled_ns,
        "poll-saved-ns": poll_saved_ns,
        "sleeps": sleeps,
    })
}

fn limits_of(limits: &ThrottleLimits) -> Map<String, Value> {
    let pairs = limits::pairs(limits).into_iter();
    pairs.map(|(key, n)| (key.to_owned(), n.into())).collect()
}

fn to_json(stats: &DiskStats) -> Value {
    let mut value = json!({
        "at-ns": stats.at_ns,
        "refused": stats.refused,
        "under-way": stats.under_way,
        "stalled": stats.stalled,
        "queues": stats.queues,
    });
    for (name, requests) in stats.kinds() {
        value[name] = requests_to_json(requests);
    }
    value
}

fn requests_to_json(requests: &RequestStats) -> Value {
    let stages = requests.latency.stages().into_iter();
    json!({
        "operations": requests.operations,
        "bytes": requests.bytes,
        "errors": requests.errors,
        "latency": stages
            .map(|(name, histogram)| (name.to_owned(), histogram_to_json(histogram)))
            .collect::<Map<_, _>>(),
    })
}

fn histogram_to_json(histogram: &Histogram) -> Value {
    let buckets: Vec<_> = histogram.buckets().map(|(end, n)| [end, n]).collect();
    let mut value = json!({
        "count": histogram.count(),
        "sum-ns": histogram.sum_ns(),
        "buckets": buckets,
    });
    for (name, percent) in PERCENTILES {
        value[name] = histogram.percentile_ns(percent).into();
    }
    value
}

/// What the `stats` of a disk say; what is missing or not understood counts as nothing.
pub fn from_json(value: &Value) -> DiskStats {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let mut stats = DiskStats {
        at_ns: number(&value["at-ns"]),
        refused: number(&value["refused"]),
        under_way: number(&value["under-way"]),
        stalled: number(&value["stalled"]),
        queues: number(&value["queues"]),
        ..DiskStats::default()
    };
    for (name, requests) in stats.kinds_mut() {
        let value = &value[name];
        requests.operations = number(&value["operations"]);
        requests.bytes = number(&value["bytes"]);
        requests.errors = number(&value["errors"]);
        for (name, histogram) in requests.latency.stages_mut() {
            let value = &value["latency"][name];
            let buckets = value["buckets"].as_array().into_iter().flatten();
            let buckets = buckets.map(|pair| (number(&pair[0]), number(&pair[1])));
            *histogram = Histogram::from_buckets(buckets, number(&value["sum-ns"]));
        }
    }
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_parse_as_sent() {
        let mut stats = DiskStats {
            at_ns: 5_000_000_000,
            refused: 3,
            under_way: 7,
            stalled: 4,
            queues: 2,
            ..DiskStats::default()
        };
        for (i, (_, requests)) in stats.kinds_mut().into_iter().enumerate() {
            let i = i as u64 + 1;
            (requests.operations, requests.bytes, requests.errors) = (100 * i, 4096 * i, i);
            for (j, (_, histogram)) in requests.latency.stages_mut().into_iter().enumerate() {
                let time = 1000 << j;
                *histogram = Histogram::from_buckets([(time, 10 * i), (50 * time, i)], time * i);
            }
        }
        let sent = to_json(&stats).to_string();
        let read: Value = serde_json::from_str(&sent).unwrap();
        assert_eq!(from_json(&read), stats);
        assert_eq!(read["write"]["latency"]["engine"]["count"], 22);
        assert!(read["read"]["latency"]["total"]["p99.9-ns"].is_u64());
    }

    #[test]
    fn invalid_statistics_are_zero() {
        let nonsense = json!({
            "read": { "operations": "many", "latency": { "total": { "buckets": [[1], 7, ["a", 2]] } } },
            "write": 3,
        });
        let stats = from_json(&nonsense);
        assert_eq!((stats.read.operations, stats.write.bytes), (0, 0));
    }
}
