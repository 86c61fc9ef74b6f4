//! What happened between two readings of a [sampler](super::sampler).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::measurement::{DeviceUse, Measurement, Pressure, RoleUse, ThreadShare};
use super::procfs::DeviceCounters;
use super::roles::Role;
use super::sampler::{Readings, Seen, Tick};

/// The shortest interval that is measured.
const SHORTEST_S: f64 = 0.2;

/// A thread in an interval. Shares are of the whole interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ThreadUse {
    /// The thread's id.
    pub tid: i32,
    /// The process's id.
    pub pid: u32,
    /// The name.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// On a CPU.
    pub on_cpu: f64,
    /// The part of it that was polling, if the program reports it.
    pub polling: f64,
    /// Runnable, but waiting for a CPU.
    pub runnable: f64,
    /// The rest of the time that it existed.
    pub asleep: f64,
    /// The part of `asleep` in which it could not be interrupted.
    pub uninterruptible: f64,
    /// Context switches per second because it went to sleep.
    pub voluntary_per_s: f64,
    /// Context switches per second because the kernel ran another thread instead.
    pub involuntary_per_s: f64,
    /// Whether it started in the interval.
    pub started: bool,
    /// Whether it ended in the interval.
    pub ended: bool,
    /// The kernel function in which it slept most often, if the kernel tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_in: Option<String>,
}

/// An interval, with all threads.
#[derive(Clone, Debug, Default)]
pub struct Interval {
    /// What the verdict is made from.
    pub measurement: Measurement,
    /// The threads that were not idle all the time, the busiest first.
    pub threads: Vec<ThreadUse>,
    /// Requests that failed, and wait for the storage to work again.
    pub stalled: u64,
}

/// The end of the counters of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndOfDisks {
    /// The last reading with all of them.
    pub at_ms: u64,
    /// Whether the server still answers.
    pub is_detached: bool,
}

impl Readings {
    /// The interval from the last reading before `start_ms` to the first after `end_ms`, or the nearest that there are.
    /// `devices` are the names of the devices that were watched. `None` if it is too short.
    pub fn between(&self, start_ms: u64, end_ms: u64, devices: &[String]) -> Option<Interval> {
        let from = self
            .ticks
            .iter()
            .rposition(|tick| tick.at_ms <= start_ms)
            .unwrap_or(0);
        let to = self.ticks.iter().position(|tick| tick.at_ms >= end_ms);
        let to = to.unwrap_or(self.ticks.len().saturating_sub(1));
        let ticks = self.ticks.get(from..=to)?;
        let (first, last) = (ticks.first()?, ticks.last()?);
        let seconds = last.at_ms.saturating_sub(first.at_ms) as f64 / 1000.0;
        if seconds < SHORTEST_S {
            return None;
        }
        let threads = self.threads_in(ticks, seconds);
        let (before, after) = edges_of_disk(ticks);
        let requests = before.zip(after).and_then(|(from, to)| to.since(from));
        let limit = after.and_then(|disk| disk.limit(before));
        let used = |(name, (to, from)): (&String, (&DeviceCounters, &DeviceCounters))| {
            device(name, to, from, seconds)
        };
        let measurement = Measurement {
            seconds,
            roles: roles(&threads),
            requests,
            guest: None,
            limit,
            devices: devices
                .iter()
                .zip(last.devices.iter().zip(&first.devices))
                .map(used)
                .collect(),
            uncounted: Vec::new(),
            without_vm: false,
            pressure: pressure(first, last, seconds),
        };
        Some(Interval {
            measurement,
            threads,
            stalled: after.map_or(0, |disk| disk.stalled()),
        })
    }

    /// The time until a thread of this process was last seen.
    pub fn until_end_of(&self, pid: u32, devices: &[String]) -> Option<Interval> {
        let is_of = |tid: &i32| {
            self.threads
                .get(tid)
                .is_some_and(|thread| thread.pid == pid)
        };
        let last = self
            .ticks
            .iter()
            .rfind(|tick| tick.threads.keys().any(is_of))?;
        self.between(0, last.at_ms, devices)
    }

    /// The time while the requests of all these disks were counted; see [Readings::end_of_disks].
    pub fn until_end_of_disks(&self, disks: &[String], devices: &[String]) -> Option<Interval> {
        self.between(0, self.end_of_disks(disks)?.at_ms, devices)
    }

    /// The end of the requests' counters, if they ended before the last reading: a disk was detached, perhaps to be attached
    /// anew, or the server does not answer any more.
    pub fn end_of_disks(&self, disks: &[String]) -> Option<EndOfDisks> {
        if disks.is_empty() {
            return None;
        }
        let counters = |tick: &Tick| {
            let counted = &tick.disk.as_ref()?.disks;
            let requests = disks.iter().map(|name| Some(counted.get(name)?.requests));
            requests.collect::<Option<Vec<u64>>>()
        };
        let first = self
            .ticks
            .iter()
            .position(|tick| counters(tick).is_some())?;
        let mut last: (&Tick, Vec<u64>) = (&self.ticks[first], vec![0; disks.len()]);
        for tick in &self.ticks[first..] {
            let now = counters(tick);
            let goes_on = |now: &Vec<u64>| now.iter().zip(&last.1).all(|(now, then)| now >= then);
            match now.filter(goes_on) {
                Some(now) => last = (tick, now),
                None => {
                    return Some(EndOfDisks {
                        at_ms: last.0.at_ms,
                        is_detached: tick.disk.is_some(),
                    });
                }
            }
        }
        None
    }

    /// The whole time.
    pub fn all(&self, devices: &[String]) -> Option<Interval> {
        self.between(0, u64::MAX, devices)
    }

    fn threads_in(&self, ticks: &[Tick], seconds: f64) -> Vec<ThreadUse> {
        let tids: BTreeSet<i32> = ticks
            .iter()
            .flat_map(|tick| tick.threads.keys())
            .copied()
            .collect();
        let last = ticks.len() - 1;
        let of_thread = |tid: i32| {
            let thread = self.threads.get(&tid)?;
            let begin = ticks
                .iter()
                .position(|tick| tick.threads.contains_key(&tid))?;
            let end = ticks
                .iter()
                .rposition(|tick| tick.threads.contains_key(&tid))?;
            let zero = Seen::default();
            // A thread that was not there at the first reading has done everything since.
            let then = if begin == 0 {
                ticks[0].threads.get(&tid)?
            } else {
                &zero
            };
            let now = ticks[end].threads.get(&tid)?;
            let usage = now.usage.since(&then.usage);
            let lived_ms = ticks[end].at_ms.saturating_sub(ticks[begin].at_ms);
            let lived = (lived_ms as f64 / 1000.0 / seconds).min(1.0);
            let on_cpu = (usage.ran_ns as f64 / 1e9 / seconds).min(1.0);
            let runnable = (usage.waited_ns as f64 / 1e9 / seconds).min(1.0 - on_cpu);
            let asleep = (lived - on_cpu - runnable).max(0.0);
            let states = now.states.saturating_sub(then.states);
            let uninterruptible = now.uninterruptible.saturating_sub(then.uninterruptible);
            let polled = |tick: &Tick| tick.disk.as_ref()?.polled_ns.get(&tid).copied();
            let polled = polled(&ticks[end]).zip(polled(&ticks[begin]));
            let polled = polled.map_or(0, |(to, from)| to.saturating_sub(from));
            let most = thread.waits.iter().max_by_key(|(_, times)| **times);
            Some(ThreadUse {
                tid,
                pid: thread.pid,
                name: thread.name.clone(),
                role: thread.role,
                on_cpu,
                polling: (polled as f64 / 1e9 / seconds).min(on_cpu),
                runnable,
                asleep,
                uninterruptible: asleep.min(f64::from(uninterruptible) / f64::from(states.max(1))),
                voluntary_per_s: usage.voluntary as f64 / seconds,
                involuntary_per_s: usage.involuntary as f64 / seconds,
                started: begin > 0,
                ended: end < last,
                waits_in: most.map(|(place, _)| place.clone()),
            })
        };
        let mut threads: Vec<ThreadUse> = tids.into_iter().filter_map(of_thread).collect();
        // Hundreds of kernel threads do nothing.
        threads.retain(|its| its.role != Role::Host || its.on_cpu + its.runnable > 0.0);
        let weight = |its: &ThreadUse| its.on_cpu + its.runnable;
        threads.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
        threads
    }
}

/// The first and the last reading of the disk's counters.
fn edges_of_disk(
    ticks: &[Tick],
) -> (
    Option<&super::disk::DiskCounters>,
    Option<&super::disk::DiskCounters>,
) {
    let mut read = ticks.iter().filter_map(|tick| tick.disk.as_ref());
    let first = read.next();
    (first, read.next_back())
}

fn device(name: &str, to: &DeviceCounters, from: &DeviceCounters, seconds: f64) -> DeviceUse {
    let since = |to: u64, from: u64| to.saturating_sub(from) as f64;
    let requests = since(to.requests, from.requests);
    let of_interval = |ms: f64| ms / 1000.0 / seconds;
    DeviceUse {
        name: name.to_owned(),
        busy: rounded(of_interval(since(to.busy_ms, from.busy_ms)).min(1.0)),
        in_flight: rounded(of_interval(since(to.in_flight_ms, from.in_flight_ms))),
        per_s: rounded(requests / seconds),
        mean_ns: (since(to.requests_ms, from.requests_ms) * 1e6 / requests.max(1.0)).round(),
    }
}

fn pressure(first: &Tick, last: &Tick, seconds: f64) -> Option<Pressure> {
    let (to, from) = (last.pressure_us?, first.pressure_us?);
    let share = |at: usize| (to[at].saturating_sub(from[at]) as f64 / 1e6 / seconds).min(1.0);
    let share = |at: usize| rounded(share(at));
    Some(Pressure {
        cpu_some: share(0),
        io_some: share(1),
        io_full: share(2),
    })
}

/// To four decimal places, which keeps journals small.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// The threads summed by role, in the order in which roles are shown.
fn roles(threads: &[ThreadUse]) -> Vec<RoleUse> {
    let mut by_role: BTreeMap<Role, Vec<&ThreadUse>> = BTreeMap::new();
    for thread in threads {
        by_role.entry(thread.role).or_default().push(thread);
    }
    let of_role = |role: Role| {
        let threads = by_role.get(&role)?;
        let sum = |of: fn(&ThreadUse) -> f64| rounded(threads.iter().map(|its| of(its)).sum());
        let most = |of: fn(&ThreadUse) -> f64| {
            let thread = threads.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
            thread.map_or_else(ThreadShare::default, |its| ThreadShare {
                name: its.name.clone(),
                on_cpu: rounded(its.on_cpu - its.polling),
                runnable: rounded(its.runnable),
            })
        };
        Some(RoleUse {
            role,
            threads: threads.len() as u32,
            on_cpu: sum(|its| its.on_cpu),
            polling: sum(|its| its.polling),
            runnable: sum(|its| its.runnable),
            asleep: sum(|its| its.asleep),
            uninterruptible: sum(|its| its.uninterruptible),
            voluntary_per_s: sum(|its| its.voluntary_per_s),
            involuntary_per_s: sum(|its| its.involuntary_per_s),
            busiest: most(|its| its.on_cpu - its.polling),
            most_delayed: most(|its| its.runnable),
        })
    };
    Role::ALL.into_iter().filter_map(of_role).collect()
}

#[cfg(test)]
mod tests {
    use super::super::disk::{Counters, DiskCounters};
    use super::super::sampler::Thread;
    use super::*;
    use harness::cpu::ThreadUsage;

    fn seen(ran_s: f64, waited_s: f64, switches: u64) -> Seen {
        Seen {
            usage: ThreadUsage {
                ran_ns: (ran_s * 1e9) as u64,
                waited_ns: (waited_s * 1e9) as u64,
                voluntary: switches,
                involuntary: switches / 2,
            },
            states: switches as u32,
            uninterruptible: switches as u32 / 4,
        }
    }

    fn readings() -> Readings {
        let tick = |at_ms: u64, threads: &[(i32, Seen)]| Tick {
            at_ms,
            threads: threads.iter().copied().collect(),
            devices: vec![DeviceCounters {
                requests: at_ms,
                requests_ms: at_ms * 2,
                busy_ms: at_ms / 2,
                in_flight_ms: at_ms * 2,
            }],
            pressure_us: Some([at_ms * 100, 0, 0]),
            ..Tick::default()
        };
        let thread = |role| Thread {
            pid: 1,
            name: format!("{role:?}"),
            role,
            waits: BTreeMap::from([("futex".into(), 3), ("io_schedule".into(), 1)]),
        };
        Readings {
            ticks: vec![
                tick(1000, &[(7, seen(5.0, 1.0, 100)), (9, seen(1.0, 0.0, 0))]),
                tick(2000, &[(7, seen(5.5, 1.25, 200)), (8, seen(0.25, 0.0, 8))]),
                tick(3000, &[(7, seen(6.0, 1.5, 300)), (8, seen(0.75, 0.5, 40))]),
            ],
            threads: [(7, Role::Vcpu), (8, Role::Vcpu), (9, Role::Host)]
                .map(|(tid, role)| (tid, thread(role)))
                .into(),
            ..Readings::default()
        }
    }

    #[test]
    fn shares_are_of_the_interval() {
        let interval = readings().all(&["vda".into()]).unwrap();
        let [first, second] = &interval.threads[..] else {
            panic!("an idle kernel thread is left out: {:?}", interval.threads)
        };
        assert_eq!(
            (first.tid, first.on_cpu, first.runnable, first.asleep),
            (7, 0.5, 0.25, 0.25)
        );
        assert_eq!(
            (first.voluntary_per_s, first.uninterruptible),
            (100.0, 0.25)
        );
        assert_eq!(first.waits_in.as_deref(), Some("futex"));
        // It started in the interval: all that it has done counts, and it was not asleep before it existed.
        assert_eq!(
            (second.tid, second.on_cpu, second.runnable, second.asleep),
            (8, 0.375, 0.25, 0.0)
        );
        assert!(second.started && !second.ended);
        let measurement = &interval.measurement;
        let vcpus = measurement.role(Role::Vcpu).unwrap();
        assert_eq!(
            (vcpus.threads, vcpus.on_cpu, vcpus.runnable),
            (2, 0.875, 0.5)
        );
        assert_eq!((vcpus.busiest.on_cpu, vcpus.busiest.runnable), (0.5, 0.25));
        let device = &measurement.devices[0];
        assert_eq!(
            (device.busy, device.in_flight, device.per_s),
            (0.5, 2.0, 1000.0)
        );
        assert_eq!(device.mean_ns, 2e6);
        assert!((measurement.pressure.unwrap().cpu_some - 0.1).abs() < 1e-9);
        assert!(measurement.is_sound());
    }

    #[test]
    fn measurement_of_a_disk_ends_with_its_counters() {
        let with = |at: usize, of_disk: &[(u64, bool)]| {
            let mut readings = readings();
            let counters = |seconds: u64, requests| Counters {
                at_ns: seconds * 1_000_000_000,
                requests,
                ..Counters::default()
            };
            for (tick, (requests, is_there)) in readings.ticks[at..].iter_mut().zip(of_disk) {
                let its = counters(tick.at_ms / 1000, *requests);
                let disks = is_there.then(|| ("vm1".to_owned(), its)).into_iter();
                tick.disk = Some(DiskCounters {
                    disks: disks.collect(),
                    ..DiskCounters::default()
                });
            }
            readings
        };
        let vm1 = ["vm1".to_owned()];
        let end = |readings: Readings| readings.end_of_disks(&vm1);
        let end_at = |at_ms, is_detached| Some(EndOfDisks { at_ms, is_detached });
        assert_eq!(end(readings()), None, "it was never counted");
        assert_eq!(end(with(0, &[(5, true), (6, true), (7, true)])), None);
        assert_eq!(end(with(1, &[(6, true), (7, true)])), None);
        // The server ends; the disk is detached; another disk with its name is attached.
        assert_eq!(end(with(0, &[(5, true), (6, true)])), end_at(2000, false));
        let detached = with(0, &[(5, true), (25, true), (0, false)]);
        assert_eq!(end(detached.clone()), end_at(2000, true));
        let anew = with(0, &[(5, true), (6, true), (1, true)]);
        assert_eq!(end(anew), end_at(2000, true));
        let until = detached.until_end_of_disks(&vm1, &[]).unwrap();
        assert_eq!(until.measurement.seconds, 1.0);
        assert_eq!(until.measurement.requests.unwrap().per_s, 20.0);
        assert_eq!(until.threads[0].on_cpu, 0.5);
        assert_eq!(detached.all(&[]).unwrap().measurement.requests, None);
    }

    #[test]
    fn a_window_uses_the_readings_around_it() {
        let inside = readings().between(2100, 2900, &[]).unwrap();
        assert_eq!(inside.measurement.seconds, 1.0);
        assert_eq!(inside.threads[0].on_cpu, 0.5);
        assert!(readings().between(3000, 3000, &[]).is_none());
        assert!(Readings::default().all(&[]).is_none());
    }
}
