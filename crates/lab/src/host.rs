//! Facts about the host, and its load while guests run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::storage::host_queue::bracketed;
use crate::window::Window;
use harness::cpu::{self, Usage};

/// Facts on which results depend: results with different facts are not comparable.
pub type Facts = BTreeMap<String, String>;

/// Facts of this host, without the versions of programs.
pub fn facts(storage: &Path) -> Facts {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, key: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with(key))
            .unwrap_or_default();
        line.split_once(':')
            .map_or_else(String::new, |(_, value)| value.trim().to_owned())
    };
    let cpu = read("/proc/cpuinfo");
    let mut facts = Facts::new();
    let mut add = |key: &str, value: String| {
        if !value.is_empty() {
            facts.insert(key.into(), value);
        }
    };
    add("cpu", field(&cpu, "model name"));
    let name = read("/proc/sys/kernel/hostname");
    add(
        "fingerprint",
        format!("{} / {}", name.trim(), field(&cpu, "model name")),
    );
    add("microcode", field(&cpu, "microcode"));
    add(
        "cpus",
        std::thread::available_parallelism().map_or_else(|_| String::new(), |n| n.to_string()),
    );
    add("memory", field(&read("/proc/meminfo"), "MemTotal"));
    add(
        "kernel",
        rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
    );
    add(
        "governor",
        read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
            .trim()
            .to_owned(),
    );
    add(
        "transparent hugepages",
        bracketed(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
    );
    if let Some(device) = device_of(storage) {
        let queue = |name: &str| {
            let own = fs::read_to_string(format!("/sys/dev/block/{device}/queue/{name}"));
            own.or_else(|_| fs::read_to_string(format!("/sys/dev/block/{device}/../queue/{name}")))
                .unwrap_or_default()
        };
        let name = fs::read_link(format!("/sys/dev/block/{device}")).unwrap_or_default();
        add(
            "storage",
            name.file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        );
        add("storage scheduler", bracketed(&queue("scheduler")));
        add("storage rotational", queue("rotational").trim().to_owned());
    }
    facts
}

/// `major:minor` of the device on which a path is.
pub fn device_of(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok()?;
    let device = if harness::paths::is_block_device(path) {
        metadata.rdev()
    } else {
        metadata.dev()
    };
    Some(format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    ))
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

/// Counters at one time, since boot or the start of a process.
#[derive(Clone, Copy, Debug, Default)]
struct Tick {
    at_ms: u64,
    /// The time of all CPUs in clock ticks
    all: u64,
    idle: u64,
    stolen: u64,
    /// The CPU time of the watched processes
    watched: Usage,
    /// The number of the watched processes
    processes: usize,
    /// The CPU time of this program and its descendants in clock ticks
    ours: u64,
    /// KVM's exits of the watched processes
    exits: Option<u64>,
}

/// The processes whose CPU time is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// These processes.
    Processes(Vec<u32>),
    /// The fio processes that this program started.
    Fio,
}

/// The host's load in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// CPU time of the watched processes, in seconds per second.
    pub cpus_used: f64,
    /// Context switches of the watched processes per second.
    pub switches_per_s: f64,
    /// KVM's exits per second, if the host reports them.
    pub exits_per_s: Option<f64>,
    /// The share of all CPUs' time that was idle.
    pub idle: f64,
    /// The share that a hypervisor gave to other virtual machines.
    pub stolen: f64,
    /// The share that unrelated programs used.
    pub others: f64,
}

/// Watches the host and some of its processes until it is dropped.
pub struct Watch {
    ticks: Arc<Mutex<Vec<Tick>>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

const PERIOD: Duration = Duration::from_millis(200);

impl Watch {
    /// Watches these processes, and pins all their threads if the plan names exactly one CPU.
    pub fn start(watched: Watched, cpus: Vec<usize>) -> Watch {
        let (ticks, end) = (
            Arc::new(Mutex::new(vec![tick(&watched, &cpus)])),
            Arc::new(AtomicBool::new(false)),
        );
        let (shared, ended) = (ticks.clone(), end.clone());
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(PERIOD);
                shared
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(tick(&watched, &cpus));
            }
        });
        Watch {
            ticks,
            end,
            thread: Some(thread),
        }
    }

    /// The load in a window; `None` if the window was too short, or is not over.
    pub fn cost(&self, window: Window) -> Option<Cost> {
        let ticks = self.ticks.lock().unwrap_or_else(PoisonError::into_inner);
        let from = ticks
            .iter()
            .rfind(|tick| tick.at_ms <= window.start_ms)
            .or(ticks.first())?;
        let inside = ticks
            .iter()
            .filter(|tick| (from.at_ms..=window.end_ms).contains(&tick.at_ms));
        let processes = inside.map(|tick| tick.processes).max()?;
        // fio may have ended by the first look after the window, and has no CPU time then: the look before it counts.
        let to = ticks
            .iter()
            .find(|tick| tick.at_ms >= window.end_ms)
            .filter(|tick| tick.processes >= processes)
            .or_else(|| ticks.iter().rfind(|tick| tick.processes >= processes))?;
        let seconds = to.at_ms.saturating_sub(from.at_ms) as f64 / 1000.0;
        if seconds < 0.3 {
            return None;
        }
        let all = to.all.saturating_sub(from.all).max(1) as f64;
        let watched = to.watched.since(&from.watched);
        let ours = to.ours.saturating_sub(from.ours) as f64;
        let share = |to: u64, from: u64| to.saturating_sub(from) as f64 / all;
        let (idle, stolen) = (share(to.idle, from.idle), share(to.stolen, from.stolen));
        Some(Cost {
            cpus_used: watched.ran_s() / seconds,
            switches_per_s: watched.switches as f64 / seconds,
            exits_per_s: to
                .exits
                .zip(from.exits)
                .map(|(to, from)| to.saturating_sub(from) as f64 / seconds),
            idle,
            stolen,
            others: (1.0 - idle - stolen - ours / all).max(0.0),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn tick(watched: &Watched, cpus: &[usize]) -> Tick {
    let pids = match watched {
        Watched::Processes(pids) => pids.clone(),
        Watched::Fio => named_below(std::process::id(), "fio"),
    };
    // A server with several CPUs has pinned its threads itself.
    if let [_] = cpus {
        // A process that has just ended needs no pinning.
        pids.iter().for_each(|pid| drop(cpu::pin(*pid, cpus)));
    }
    let usages: Vec<Usage> = pids.iter().filter_map(|pid| Usage::of(*pid).ok()).collect();
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    let field = |index: usize| fields.get(index).copied().unwrap_or(0);
    Tick {
        at_ms: now_ms(),
        // user nice system idle iowait irq softirq steal; user includes guests' time.
        all: fields.iter().take(8).sum(),
        idle: field(3) + field(4),
        stolen: field(7),
        watched: usages
            .iter()
            .fold(Usage::default(), |sum, usage| sum.plus(usage)),
        processes: usages.len(),
        ours: family_ticks(std::process::id()),
        exits: pids.iter().map(|pid| exits(*pid)).sum::<Option<u64>>(),
    }
}

/// The CPU time of a process and its descendants. The time of those that have ended is in that of the parent that waited for
/// them.
fn family_ticks(pid: u32) -> u64 {
    let below: u64 = children(pid).into_iter().map(family_ticks).sum();
    below + cpu_ticks(pid, 4)
}

/// The descendants of a process that have this name.
pub fn named_below(pid: u32, name: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for child in children(pid) {
        let comm = fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
        match comm.trim() == name {
            true => found.push(child),
            false => found.extend(named_below(child, name)),
        }
    }
    found
}

fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let of_task = |task: fs::DirEntry| {
        let list = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let each = list.split_whitespace().filter_map(|pid| pid.parse().ok());
        each.collect::<Vec<u32>>()
    };
    tasks
        .into_iter()
        .flatten()
        .flatten()
        .flat_map(of_task)
        .collect()
}

/// The sum of the first `fields` values from the 14th of a process's stat: user and system time, including ended threads,
/// and then those of children that it waited for. The name in parentheses may contain anything.
fn cpu_ticks(pid: u32, fields: usize) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let behind = stat.rsplit(')').next().unwrap_or_default();
    behind
        .split_whitespace()
        .skip(11)
        .take(fields)
        .filter_map(|word| word.parse::<u64>().ok())
        .sum()
}

/// KVM's exits of a process. Needs root and debugfs.
fn exits(pid: u32) -> Option<u64> {
    let prefix = format!("{pid}-");
    let folders = fs::read_dir("/sys/kernel/debug/kvm").ok()?.flatten();
    let mut own =
        folders.filter(|folder| folder.file_name().to_string_lossy().starts_with(&prefix));
    fs::read_to_string(own.next()?.path().join("exits"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_process_is_seen_to_be_busy() {
        let watch = Watch::start(Watched::Processes(vec![std::process::id()]), Vec::new());
        let start_ms = now_ms();
        // Until it has burnt half a second of CPU, however long that takes here.
        let burnt = || cpu_ticks(std::process::id(), 2);
        let (before, hz) = (burnt(), rustix::param::clock_ticks_per_second());
        while burnt() - before < hz / 2 {}
        let end_ms = now_ms();
        std::thread::sleep(2 * PERIOD);
        let cost = watch.cost(Window { start_ms, end_ms }).unwrap();
        assert!(cost.cpus_used > 0.05, "{cost:?}");
        assert!((0.0..=1.0).contains(&cost.idle) && cost.switches_per_s >= 0.0);
    }

    #[test]
    fn a_process_that_ends_before_the_next_look_has_cost_what_it_did() {
        let mut process = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let watch = Watch::start(Watched::Processes(vec![process.id()]), Vec::new());
        let start_ms = now_ms();
        while Usage::of(process.id()).unwrap().ran_s() < 0.8 {
            std::thread::sleep(PERIOD / 10);
        }
        let end_ms = now_ms();
        process.kill().unwrap();
        process.wait().unwrap();
        std::thread::sleep(2 * PERIOD);
        let cost = watch.cost(Window { start_ms, end_ms }).unwrap();
        assert!(cost.cpus_used > 0.0, "{cost:?}");
    }

    #[test]
    fn this_host_has_facts() {
        let facts = facts(Path::new("/"));
        assert!(
            facts.contains_key("kernel") && facts.contains_key("cpus"),
            "{facts:?}"
        );
        assert_eq!(bracketed("none [mq-deadline] kyber\n"), "mq-deadline");
    }
}
