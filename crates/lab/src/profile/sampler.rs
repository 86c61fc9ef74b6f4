//! Reads counters of threads, disks and the host at intervals, in a thread of its own.
//!
//! It takes at most a twentieth of a CPU: after each reading it rests twenty times as long.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use harness::cpu::{ThreadUsage, threads};
use harness::qmp::Qmp;
use serde_json::json;

use super::disk::DiskCounters;
use super::procfs::{self, DeviceCounters, Stat};
use super::roles::{Program, Role, role};
use crate::host::{named_below, now_ms};

/// The interval at which states are read.
const STATES: Duration = Duration::from_millis(20);
/// The interval at which counters are read.
const COUNTERS: Duration = Duration::from_millis(250);
/// Rest, as a multiple of the time that a reading takes.
const REST: u32 = 20;
/// The most readings that are kept. If there are more, every second one is dropped, and the interval is doubled.
const TICKS_MAX: usize = 256;
/// The name of the thread.
const NAME: &str = "profile";
/// The most threads that are followed.
const THREADS_MAX: usize = 2048;

/// What to watch.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// The processes.
    pub processes: Vec<Process>,
    /// Descendants of this process with this name are clients; they may start later.
    pub children: Option<String>,
    /// The control socket of the ringdisk that serves the disks.
    pub control: Option<PathBuf>,
    /// The disks of that ringdisk that count; empty means all.
    pub disks: Vec<String>,
    /// The block devices below the disks, as `MAJOR:MINOR` and the kernel's name.
    pub devices: Vec<(String, String)>,
}

/// A process to watch.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// What it is.
    pub program: Program,
    /// The roles of threads for which the name does not tell them.
    pub roles: BTreeMap<i32, Role>,
}

impl Process {
    /// A process whose threads have names.
    pub fn new(pid: u32) -> Process {
        Process {
            pid,
            program: Program::of(pid),
            roles: BTreeMap::new(),
        }
    }
}

/// A thread that has been seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Thread {
    pub pid: u32,
    pub name: String,
    pub role: Role,
    /// Where it was found asleep, and how often.
    pub waits: BTreeMap<String, u32>,
}

/// The counters of a thread at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    pub usage: ThreadUsage,
    /// How often its state was read so far.
    pub states: u32,
    /// How often it could not be interrupted.
    pub uninterruptible: u32,
}

/// All counters at one time.
#[derive(Clone, Debug, Default)]
pub struct Tick {
    pub at_ms: u64,
    pub threads: BTreeMap<i32, Seen>,
    pub disk: Option<DiskCounters>,
    pub devices: Vec<DeviceCounters>,
    /// In microseconds: some task waited for a CPU, some waited for I/O, all waited for I/O.
    pub pressure_us: Option<[u64; 3]>,
}

/// What a sampler has read.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    pub ticks: Vec<Tick>,
    pub threads: BTreeMap<i32, Thread>,
    /// Threads beyond the limit.
    pub threads_left_out: usize,
    /// Why something could not be read.
    pub problems: Vec<String>,
}

/// Samples until it is dropped.
pub struct Sampler {
    disks: Vec<String>,
    shared: Arc<Mutex<Readings>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts to sample. The first reading is complete when this returns.
    pub fn start(targets: Targets) -> Sampler {
        let (shared, end) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let disks = targets.disks.clone();
        let mut reader = Reader::new(targets, Arc::clone(&shared));
        reader.tick();
        let ended = end.clone();
        let thread = std::thread::Builder::new()
            .name(NAME.into())
            .spawn(move || reader.run(&ended));
        Sampler {
            disks,
            shared,
            end,
            thread: thread.ok(),
        }
    }

    /// Everything that was read so far.
    pub fn readings(&self) -> Readings {
        let shared = self.shared.lock();
        shared.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the counters of the disks that were named have ended.
    pub fn disks_ended(&self) -> bool {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.end_of_disks(&self.disks).is_some()
    }

    /// Ends the sampling, with a last reading, and returns everything.
    pub fn finish(mut self) -> Readings {
        self.stop();
        self.readings()
    }

    fn stop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The thread of a sampler.
struct Reader {
    targets: Targets,
    shared: Arc<Mutex<Readings>>,
    control: Option<Qmp>,
    interval: Duration,
    /// Counts of states, by thread: all, and those that could not be interrupted.
    states: BTreeMap<i32, (u32, u32)>,
    /// The threads of the last look.
    threads: BTreeMap<i32, Thread>,
    left_out: usize,
    problems: Vec<String>,
}

impl Reader {
    fn new(targets: Targets, shared: Arc<Mutex<Readings>>) -> Reader {
        let mut problems = Vec::new();
        let control = targets.control.as_ref().and_then(|path| {
            let opened = Qmp::connect(path);
            opened.map_err(|e| problems.push(format!("{e:#}"))).ok()
        });
        Reader {
            targets,
            shared,
            control,
            interval: COUNTERS,
            states: BTreeMap::new(),
            threads: BTreeMap::new(),
            left_out: 0,
            problems,
        }
    }

    fn run(&mut self, end: &AtomicBool) {
        let mut next_tick = Instant::now() + self.interval;
        while !end.load(Ordering::Relaxed) {
            let begun = Instant::now();
            if begun >= next_tick {
                self.tick();
                next_tick = begun + self.interval.max(begun.elapsed() * REST);
            } else {
                self.read_states();
            }
            sleep(STATES.max(begun.elapsed() * REST).min(self.interval));
        }
        self.tick();
    }

    /// Reads the states of the threads that were found by the last look at counters.
    fn read_states(&mut self) {
        for (tid, thread) in &mut self.threads {
            if thread.role == Role::Host {
                continue;
            }
            let Some(stat) = Stat::of(thread.pid, *tid) else {
                continue;
            };
            let (all, uninterruptible) = self.states.entry(*tid).or_default();
            *all += 1;
            *uninterruptible += u32::from(stat.state == 'D');
            if matches!(stat.state, 'S' | 'D')
                && let Some(place) = procfs::wchan(thread.pid, *tid)
                && (thread.waits.len() < 16 || thread.waits.contains_key(&place))
            {
                *thread.waits.entry(place).or_default() += 1;
            }
        }
    }

    fn tick(&mut self) {
        let mut tick = Tick {
            at_ms: now_ms(),
            ..Tick::default()
        };
        self.disk(&mut tick);
        self.left_out = 0;
        let children = self.targets.children.as_ref();
        let children = children.map(|name| named_below(std::process::id(), name));
        let clients = children.into_iter().flatten().map(|pid| Process {
            pid,
            program: Program::Client,
            roles: BTreeMap::new(),
        });
        let processes: Vec<_> = self
            .targets
            .processes
            .iter()
            .cloned()
            .chain(clients)
            .collect();
        for process in processes {
            self.process(&process, &mut tick);
        }
        self.kernel_threads(&mut tick);
        for (number, _) in &self.targets.devices {
            let text = fs::read_to_string(format!("/sys/dev/block/{number}/stat"));
            let counters = text.ok().and_then(|text| DeviceCounters::parse(&text));
            tick.devices.push(counters.unwrap_or_default());
        }
        let pressure = |kind: &str| fs::read_to_string(format!("/proc/pressure/{kind}")).ok();
        if let (Some(cpu), Some(io)) = (pressure("cpu"), pressure("io")) {
            let total = |text: &str, line| procfs::pressure_us(text, line).unwrap_or(0);
            tick.pressure_us = Some([total(&cpu, "some"), total(&io, "some"), total(&io, "full")]);
        }
        self.keep(tick);
    }

    /// Reads what ringdisk has counted.
    fn disk(&mut self, tick: &mut Tick) {
        let Some(control) = &mut self.control else {
            return;
        };
        match control.execute("x-ringdisk-stats", json!({})) {
            Ok(stats) => {
                let counters = DiskCounters::parse(&stats, &self.targets.disks);
                for process in &mut self.targets.processes {
                    if process.program == Program::Ringdisk {
                        let servers = counters.polled_ns.keys();
                        process
                            .roles
                            .extend(servers.map(|tid| (*tid, Role::Server)));
                    }
                }
                tick.disk = Some(counters);
            }
            Err(e) => {
                self.problems.push(format!("{e:#}"));
                self.control = None;
            }
        }
    }

    fn process(&mut self, process: &Process, tick: &mut Tick) {
        for tid in threads(process.pid).unwrap_or_default() {
            if tick.threads.len() >= THREADS_MAX {
                self.left_out += 1;
                continue;
            }
            // It may have ended meanwhile.
            let Some(stat) = Stat::of(process.pid, tid) else {
                continue;
            };
            let Some(usage) = ThreadUsage::of(process.pid, tid) else {
                continue;
            };
            // This thread itself.
            if process.pid == std::process::id() && stat.name == NAME {
                continue;
            }
            let is_main = u32::try_from(tid) == Ok(process.pid);
            let by_name = || role(process.program, &stat.name, is_main);
            let role = process.roles.get(&tid).copied().unwrap_or_else(by_name);
            self.saw(tick, process.pid, tid, stat.name, role, usage);
        }
    }

    /// Kernel threads are children of kthreadd. Those that name the process or a device of the disk work for it; others work
    /// for the whole host.
    fn kernel_threads(&mut self, tick: &mut Tick) {
        let list = fs::read_to_string("/proc/2/task/2/children").unwrap_or_default();
        for pid in list
            .split_ascii_whitespace()
            .filter_map(|pid| pid.parse::<u32>().ok())
        {
            let tid = pid as i32;
            if tick.threads.len() >= THREADS_MAX {
                return;
            }
            let Some(usage) = ThreadUsage::of(pid, tid) else {
                continue;
            };
            let Some(stat) = Stat::of(pid, tid) else {
                continue;
            };
            self.saw_kernel_thread(tick, tid, stat.name, usage);
        }
    }

    fn saw_kernel_thread(&mut self, tick: &mut Tick, tid: i32, name: String, usage: ThreadUsage) {
        let pid = tid.unsigned_abs();
        if self.works_for_the_disk(&name) {
            return self.saw(tick, pid, tid, name, Role::KernelWorker, usage);
        }
        // A kworker has the name of its last work queue: keep the role that it had when it worked for the disk, and the
        // name that tells why it has this role.
        let before = self.threads.get(&tid);
        let before = before.filter(|thread| thread.role == Role::KernelWorker);
        let (name, role) = match before {
            Some(thread) => (thread.name.clone(), thread.role),
            None => (name, Role::Host),
        };
        self.saw(tick, pid, tid, name, role, usage);
    }

    fn works_for_the_disk(&self, name: &str) -> bool {
        let mut words = name.split(['-', '/', '+', ':', '_']);
        let is_process = |word: &str| {
            let pids = self.targets.processes.iter().map(|its| its.pid.to_string());
            name.starts_with("vhost-") && pids.into_iter().any(|pid| pid == word)
        };
        let is_device = |word: &str| self.targets.devices.iter().any(|(_, name)| name == word);
        words.any(|word| is_process(word) || is_device(word))
    }

    fn saw(
        &mut self,
        tick: &mut Tick,
        pid: u32,
        tid: i32,
        name: String,
        role: Role,
        usage: ThreadUsage,
    ) {
        let thread = self.threads.entry(tid).or_insert_with(|| Thread {
            pid,
            name: String::new(),
            role,
            waits: BTreeMap::new(),
        });
        (thread.name, thread.role) = (name, role);
        let (states, uninterruptible) = self.states.get(&tid).copied().unwrap_or_default();
        tick.threads.insert(
            tid,
            Seen {
                usage,
                states,
                uninterruptible,
            },
        );
    }

    fn keep(&mut self, tick: Tick) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.ticks.push(tick);
        if shared.ticks.len() > TICKS_MAX {
            let mut number = 0;
            shared.ticks.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.interval *= 2;
        }
        shared.threads.clone_from(&self.threads);
        shared.threads_left_out = self.left_out;
        shared.problems.clone_from(&self.problems);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kworker_keeps_the_name_with_which_it_worked_for_the_disk() {
        let targets = Targets {
            devices: vec![("254:0".into(), "vda".into())],
            ..Targets::default()
        };
        let mut reader = Reader::new(targets, Arc::default());
        let mut named = |name: &str| {
            reader.saw_kernel_thread(&mut Tick::default(), 7, name.into(), ThreadUsage::default());
            let thread = &reader.threads[&7];
            (thread.name.clone(), thread.role)
        };
        let events = ("kworker/1:1-events".to_owned(), Role::Host);
        assert_eq!(named("kworker/1:1-events"), events);
        let of_disk = ("kworker/1:1-dio/vda".to_owned(), Role::KernelWorker);
        assert_eq!(named("kworker/1:1-dio/vda"), of_disk);
        assert_eq!(named("kworker/1:1-virtio_vsock"), of_disk);
    }
}
