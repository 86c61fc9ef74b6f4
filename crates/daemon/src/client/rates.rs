//! What disks do per second: the difference of two answers to `x-ringdisk-stats`.

use std::collections::BTreeMap;

use datapath::{DiskStats, Histogram, Latency, RequestStats};
use serde_json::{Map, Value, json};

use crate::monitor::stats::{self, PERCENTILES};

/// One answer, parsed.
#[derive(Default)]
pub struct Sample {
    disks: BTreeMap<String, Disk>,
    /// CPU time of each I/O thread in nanoseconds, where the kernel tells.
    cpu_ns: BTreeMap<String, u64>,
    polls: Polls,
}

/// What all I/O threads together did for want of anything else to do. Times in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Polls {
    at: u64,
    polled: u64,
    /// CPU time of the sleeps that this saved.
    saved: u64,
    polls: u64,
    hit: u64,
}

struct Disk {
    connected: bool,
    /// The I/O thread of each queue.
    threads: Vec<String>,
    stats: DiskStats,
    /// As it was sent.
    total: Value,
}

/// What a disk did between two samples.
#[derive(Debug)]
pub struct Rates {
    pub name: String,
    pub connected: bool,
    /// Between the samples.
    pub seconds: f64,
    /// What was done in this time.
    pub done: DiskStats,
    /// The latencies of all requests of this time.
    pub latency: Latency,
    /// Requests under way, as a mean over this time; as of now while it is not known.
    pub depth: f64,
    /// CPU time of the I/O threads for each request in nanoseconds. Of a thread that serves several disks,
    /// each has a part as large as its part of the requests.
    pub cpu_ns: Option<f64>,
    /// Everything since the disk was first served.
    total: Value,
}

impl Polls {
    fn new(answer: &Value) -> Self {
        let of = |list: &str, key: &str| {
            let all = answer[list].as_array().into_iter().flatten();
            let numbers = all.filter_map(|entry| entry.pointer(key)?.as_u64());
            numbers.collect::<Vec<_>>()
        };
        let sum = |key| of("iothreads", key).iter().sum();
        Self {
            at: of("disks", "/stats/at-ns").into_iter().max().unwrap_or(0),
            polled: sum("/polled-ns"),
            saved: sum("/poll-saved-ns"),
            polls: sum("/polls"),
            hit: sum("/polls-hit"),
        }
    }
}

impl Sample {
    pub fn new(answer: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let disks = list(&answer["disks"]).into_iter();
        let served = disks.filter(|disk| disk["stats"].is_object());
        let disks = served.map(|disk| {
            let parsed = Disk {
                connected: disk["connected"].as_bool().unwrap_or(false),
                threads: list(&disk["iothreads"]).iter().map(text).collect(),
                stats: stats::from_json(&disk["stats"]),
                total: disk["stats"].clone(),
            };
            (text(&disk["name"]), parsed)
        });
        let threads = list(&answer["iothreads"]).into_iter();
        let cpu_ns = threads.filter_map(|t| Some((text(&t["id"]), t["cpu-ns"].as_u64()?)));
        Self {
            polls: Polls::new(answer),
            disks: disks.collect(),
            cpu_ns: cpu_ns.collect(),
        }
    }

    /// How much the I/O threads polled since an earlier sample, in a sentence; `None` if they did not.
    pub fn polling_since(&self, earlier: &Self) -> Option<String> {
        let (new, old) = (&self.polls, &earlier.polls);
        let [time, polled, saved, polls, hit] = [
            (new.at, old.at),
            (new.polled, old.polled),
            (new.saved, old.saved),
            (new.polls, old.polls),
            (new.hit, old.hit),
        ]
        .map(|(new, old)| new.saturating_sub(old) as f64);
        (time > 0.0 && polls > 0.0).then(|| {
            format!(
                "polling takes {:.0}% of a core and saves sleeps of {:.0}%; {:.0}% of the polls hit",
                polled / time * 100.0,
                saved / time * 100.0,
                hit / polls * 100.0
            )
        })
    }

    /// What happened from an earlier sample to this one, of the disks that were there then.
    pub fn since(&self, earlier: &Self) -> Vec<Rates> {
        let both = self.disks.iter().filter_map(|(name, disk)| {
            let before = earlier.disks.get(name)?;
            // Anew under the same name, if it has gone back.
            (before.stats.at_ns < disk.stats.at_ns
                && operations(&before.stats) <= operations(&disk.stats))
            .then(|| (name, disk, disk.stats.since(&before.stats)))
        });
        let both: Vec<_> = both.collect();
        // Queues of a disk do about as much each.
        let share = |disk: &Disk, done: &DiskStats, thread: &str| {
            let of_it = disk.threads.iter().filter(|t| *t == thread).count();
            operations(done) as f64 * of_it as f64 / disk.threads.len().max(1) as f64
        };
        let mut of_thread: BTreeMap<&str, f64> = BTreeMap::new();
        for (_, disk, done) in &both {
            for thread in unique(&disk.threads) {
                *of_thread.entry(thread).or_default() += share(disk, done, thread);
            }
        }
        let cpu = |thread: &str| {
            let (new, old) = (self.cpu_ns.get(thread)?, earlier.cpu_ns.get(thread)?);
            Some(new.saturating_sub(*old) as f64)
        };
        let cpu_of = |disk: &Disk, done: &DiskStats| {
            let n = operations(done) as f64;
            let parts = unique(&disk.threads).into_iter().map(|thread| {
                let all = of_thread.get(thread).copied().unwrap_or_default();
                (all > 0.0).then(|| Some(cpu(thread)? * share(disk, done, thread) / all))?
            });
            let sum: f64 = parts.sum::<Option<f64>>()?;
            (n > 0.0).then(|| sum / n)
        };
        let rates = both.iter().map(|(name, disk, done)| {
            let seconds = done.at_ns as f64 / 1e9;
            let mut latency = Latency::default();
            for (_, requests) in done.kinds() {
                let stages = requests.latency.stages().into_iter();
                for ((_, sum), (_, more)) in latency.stages_mut().into_iter().zip(stages) {
                    sum.add(more);
                }
            }
            let depth = match latency.total.count() {
                0 => done.under_way as f64,
                _ => latency.total.sum_ns() as f64 / done.at_ns as f64,
            };
            Rates {
                name: (*name).clone(),
                connected: disk.connected,
                seconds,
                cpu_ns: cpu_of(disk, done),
                done: done.clone(),
                latency,
                depth,
                total: disk.total.clone(),
            }
        });
        rates.collect()
    }
}

impl Rates {
    /// All requests of this time, in operations per second.
    pub fn iops(&self) -> f64 {
        operations(&self.done) as f64 / self.seconds
    }

    /// Per second.
    pub fn per_second(&self, n: u64) -> f64 {
        n as f64 / self.seconds
    }

    /// How the time of requests divides, in percent: held back, in the image, in the engine, on the
    /// way back; `None` if none was measured.
    pub fn parts(&self) -> Option<[f64; 4]> {
        let [_, parts @ ..] = self.latency.stages();
        let parts = parts.map(|(_, histogram)| histogram.sum_ns() as f64);
        let sum: f64 = parts.iter().sum();
        (sum > 0.0).then(|| parts.map(|part| 100.0 * part / sum))
    }

    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "name": self.name,
            "connected": self.connected,
            "seconds": self.seconds,
            "queue-depth": self.depth,
            "cpu-ns-per-operation": self.cpu_ns,
            "total": self.total,
        });
        for (name, requests) in self.done.kinds() {
            value[name] = self.requests_to_json(requests);
        }
        value
    }

    fn requests_to_json(&self, requests: &RequestStats) -> Value {
        let mut value = json!({
            "iops": self.per_second(requests.operations),
            "bps": self.per_second(requests.bytes),
            "errors": requests.errors,
        });
        for (stage, histogram) in requests.latency.stages() {
            value[format!("{stage}-latency")] = histogram_to_json(histogram);
        }
        value
    }
}

fn histogram_to_json(histogram: &Histogram) -> Value {
    let mut value = json!({ "mean-ns": histogram.mean_ns() });
    let percentiles = PERCENTILES.iter();
    let percentiles =
        percentiles.map(|(name, p)| ((*name).into(), histogram.percentile_ns(*p).into()));
    if let Value::Object(members) = &mut value {
        members.extend(percentiles.collect::<Map<_, _>>());
    }
    value
}

fn operations(stats: &DiskStats) -> u64 {
    let kinds = stats.kinds().into_iter();
    kinds
        .map(|(_, requests)| requests.operations + requests.errors)
        .sum()
}

fn unique(threads: &[String]) -> Vec<&str> {
    let mut unique: Vec<&str> = threads.iter().map(|t| &**t).collect();
    unique.sort_unstable();
    unique.dedup();
    unique
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An answer with two disks on one thread, and one of them on another as well.
    pub fn answer(seconds: u64) -> Value {
        let n = seconds * 1000;
        let stats = |reads: u64, writes: u64| {
            let histogram = |ns: u64, n: u64| json!({ "sum-ns": ns * n, "buckets": [[ns, n]] });
            json!({
                "at-ns": 1 + seconds * 1_000_000_000,
                "under-way": 4,
                "queues": 2,
                "refused": 0,
                "read": {
                    "operations": reads, "bytes": reads * 4096, "errors": 0,
                    "latency": {
                        "total": histogram(200_000, reads),
                        "waiting": histogram(50_000, reads),
                        "image": histogram(20_000, reads),
                        "engine": histogram(120_000, reads),
                        "publishing": histogram(10_000, reads),
                    },
                },
                "write": { "operations": writes, "bytes": writes * 8192, "errors": 0, "latency": {} },
            })
        };
        json!({
            "disks": [
                {
                    "name": "a", "connected": true, "iothreads": ["t0", "t1"],
                    "stats": stats(6 * n, 2 * n),
                },
                { "name": "b", "connected": false, "iothreads": ["t1", "t1"], "stats": stats(4 * n, 0) },
                { "name": "not served" },
            ],
            "iothreads": [
                { "id": "t0", "cpu-ns": seconds * 40_000_000 },
                {
                    "id": "t1", "cpu-ns": seconds * 160_000_000, "polls": n, "polls-hit": n / 2,
                    "polled-ns": seconds * 120_000_000, "poll-saved-ns": seconds * 30_000_000,
                },
            ],
        })
    }

    #[test]
    fn two_answers_make_rates() {
        let (first, second) = (Sample::new(&answer(3)), Sample::new(&answer(5)));
        let rates = second.since(&first);
        let names: Vec<_> = rates.iter().map(|r| &*r.name).collect();
        assert_eq!(names, ["a", "b"]);
        let [a, b] = &rates[..] else { unreachable!() };
        assert_eq!((a.seconds, a.iops(), b.iops()), (2.0, 8000.0, 4000.0));
        assert_eq!(
            second.polling_since(&first).unwrap(),
            "polling takes 12% of a core and saves sleeps of 3%; 50% of the polls hit"
        );
        assert_eq!(first.polling_since(&first), None);
        assert_eq!(a.per_second(a.done.write.bytes), 2000.0 * 8192.0);
        // 6000 reads a second of 200 us each.
        assert!((a.depth - 1.2).abs() < 1e-9);
        assert_eq!(a.parts().unwrap(), [25.0, 10.0, 60.0, 5.0]);
        // t0 serves half of a: 4000 at 10 us. t1 the other half and all of b: 8000 at 20 us.
        assert!((a.cpu_ns.unwrap() - 15_000.0).abs() < 1e-6);
        assert!((b.cpu_ns.unwrap() - 20_000.0).abs() < 1e-6);
        let json = a.to_json();
        assert_eq!(json["read"]["iops"], 6000.0);
        assert_eq!(json["total"]["read"]["operations"], 30_000);
        let p50 = json["read"]["total-latency"]["p50-ns"].as_f64().unwrap();
        assert!((p50 / 200_000.0 - 1.0).abs() < 0.04, "{p50}");
    }

    #[test]
    fn new_disk_has_no_rates_yet() {
        let (new, old) = (Sample::new(&answer(1)), Sample::new(&answer(5)));
        assert!(new.since(&old).is_empty());
        assert!(new.since(&Sample::default()).is_empty());
        assert!(Sample::new(&json!([1])).since(&new).is_empty());
    }
}
