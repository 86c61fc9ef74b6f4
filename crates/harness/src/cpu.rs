//! CPU time as the kernel accounts for it in `/proc`, and which CPUs a process may use.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// `USER_HZ`, the unit of times in `/proc/PID/stat`; 100 on every Linux that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// The CPU time of a process so far. Kernel threads that work for it (io-wq) count: they are threads of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Nanoseconds on a core, summed over the threads that are alive.
    threads_ran_ns: u64,
    /// Nanoseconds runnable but waiting for a core.
    waited_ns: u64,
    /// Ticks of the whole process, threads that have ended included.
    user_ticks: u64,
    system_ticks: u64,
    /// Context switches, voluntary and involuntary.
    pub switches: u64,
}

impl Usage {
    /// Reads the counters of `pid`.
    ///
    /// # Errors
    /// The process has ended.
    pub fn of(pid: u32) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        for thread in threads(pid)? {
            // A thread may end between the listing and the read; the ticks of the process still count it.
            let Some(thread) = ThreadUsage::of(pid, thread) else {
                continue;
            };
            usage.threads_ran_ns += thread.ran_ns;
            usage.waited_ns += thread.waited_ns;
            usage.switches += thread.voluntary + thread.involuntary;
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is the name in parentheses and may hold anything; utime and stime are fields 14 and 15.
        let fields = stat
            .rsplit_once(") ")
            .context("/proc/PID/stat has no name field")?
            .1;
        let mut fields = fields.split_ascii_whitespace().skip(11);
        usage.user_ticks = fields.next().context("no utime")?.parse()?;
        usage.system_ticks = fields.next().context("no stime")?.parse()?;
        Ok(usage)
    }

    /// The usage since `before`.
    pub fn since(&self, before: &Usage) -> Usage {
        Usage {
            threads_ran_ns: self.threads_ran_ns.saturating_sub(before.threads_ran_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            user_ticks: self.user_ticks.saturating_sub(before.user_ticks),
            system_ticks: self.system_ticks.saturating_sub(before.system_ticks),
            switches: self.switches.saturating_sub(before.switches),
        }
    }

    /// The usage of two processes together.
    #[must_use]
    pub fn plus(&self, other: &Usage) -> Usage {
        Usage {
            threads_ran_ns: self.threads_ran_ns + other.threads_ran_ns,
            waited_ns: self.waited_ns + other.waited_ns,
            user_ticks: self.user_ticks + other.user_ticks,
            system_ticks: self.system_ticks + other.system_ticks,
            switches: self.switches + other.switches,
        }
    }

    /// Exact to the nanosecond, except where a thread ended in between: then to the tick.
    pub fn ran_s(&self) -> f64 {
        let ticks_s = self.ticks() / TICKS_PER_SECOND;
        let threads_s = self.threads_ran_ns as f64 / 1e9;
        // Both tick counters are rounded down, at both edges.
        let ticks_error_s = 2.0 / TICKS_PER_SECOND;
        if ticks_s - threads_s > ticks_error_s {
            ticks_s
        } else {
            threads_s
        }
    }

    /// Seconds runnable but not running, summed over the threads.
    pub fn waited_s(&self) -> f64 {
        self.waited_ns as f64 / 1e9
    }

    /// User time over user and system time, 0 to 1.
    pub fn user_share(&self) -> f64 {
        self.user_ticks as f64 / self.ticks().max(1.0)
    }

    fn ticks(&self) -> f64 {
        (self.user_ticks + self.system_ticks) as f64
    }
}

/// What a thread has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadUsage {
    /// Nanoseconds on a core.
    pub ran_ns: u64,
    /// Nanoseconds runnable but waiting for a core.
    pub waited_ns: u64,
    /// Context switches because the thread went to sleep.
    pub voluntary: u64,
    /// Context switches because the kernel ran another thread instead.
    pub involuntary: u64,
}

impl ThreadUsage {
    /// Reads the counters of a thread of `pid`; `None` if it has ended, or the kernel does not account for it.
    pub fn of(pid: u32, thread: i32) -> Option<ThreadUsage> {
        let read = |file| fs::read_to_string(format!("/proc/{pid}/task/{thread}/{file}")).ok();
        Self::parse(&read("schedstat")?, &read("status")?)
    }

    /// Parses the files `schedstat` and `status` of a thread.
    pub fn parse(schedstat: &str, status: &str) -> Option<ThreadUsage> {
        let mut times = schedstat
            .split_ascii_whitespace()
            .map(|ns| ns.parse().unwrap_or(0));
        let switches = |key: &str| {
            let mut lines = status.lines();
            let number = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            number.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
        };
        Some(ThreadUsage {
            ran_ns: times.next()?,
            waited_ns: times.next()?,
            voluntary: switches("voluntary_ctxt_switches"),
            involuntary: switches("nonvoluntary_ctxt_switches"),
        })
    }

    /// The usage since `before`.
    #[must_use]
    pub fn since(&self, before: &ThreadUsage) -> ThreadUsage {
        ThreadUsage {
            ran_ns: self.ran_ns.saturating_sub(before.ran_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            voluntary: self.voluntary.saturating_sub(before.voluntary),
            involuntary: self.involuntary.saturating_sub(before.involuntary),
        }
    }
}

/// Time of all cores together.
#[derive(Clone, Copy)]
pub struct Cores {
    task_ticks: u64,
    stolen_ticks: u64,
}

impl Cores {
    /// Reads the counters of the machine.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn read() -> anyhow::Result<Cores> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().context("/proc/stat is empty")?;
        let ticks: Vec<u64> = line
            .split_ascii_whitespace()
            .skip(1)
            .map(|n| n.parse().unwrap_or(0))
            .collect();
        let [
            user,
            nice,
            system,
            _idle,
            _iowait,
            _irq,
            _softirq,
            steal,
            ..,
        ] = ticks[..]
        else {
            anyhow::bail!("/proc/stat: {line:?} has too few fields");
        };
        Ok(Cores {
            task_ticks: user + nice + system,
            stolen_ticks: steal,
        })
    }

    /// The usage since `before`.
    pub fn since(&self, before: &Cores) -> Cores {
        Cores {
            task_ticks: self.task_ticks - before.task_ticks,
            stolen_ticks: self.stolen_ticks - before.stolen_ticks,
        }
    }

    /// Seconds in which processes ran.
    pub fn tasks_s(&self) -> f64 {
        self.task_ticks as f64 / TICKS_PER_SECOND
    }

    /// Seconds that the hypervisor gave to other machines.
    pub fn stolen_s(&self) -> f64 {
        self.stolen_ticks as f64 / TICKS_PER_SECOND
    }
}

/// Waits until the machine has been idle for a moment, at most for `patience`. Samples are not selected by this: it runs
/// before the sample.
///
/// # Errors
/// `/proc` is not mounted.
pub fn wait_for_quiet(patience: Duration) -> anyhow::Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        let before = Cores::read()?;
        std::thread::sleep(Duration::from_millis(200));
        if Cores::read()?.since(&before).tasks_s() < 0.02 {
            break;
        }
    }
    Ok(())
}

/// The time on a core of the living threads of `pid` whose names do not begin with one of `without`.
///
/// # Errors
/// The process has ended.
pub fn threads_ran(pid: u32, without: &[&str]) -> anyhow::Result<Duration> {
    let mut ran_ns = 0;
    for thread in threads(pid)? {
        let dir = format!("/proc/{pid}/task/{thread}");
        let name = fs::read_to_string(format!("{dir}/comm")).unwrap_or_default();
        if !without.iter().any(|start| name.starts_with(start)) {
            ran_ns += schedstat(&dir).map_or(0, |[ran_ns, _]| ran_ns);
        }
    }
    Ok(Duration::from_nanos(ran_ns))
}

/// Nanoseconds that a thread ran, and that it waited for a core; `None` if the thread has ended. `stat` has ticks of 10
/// ms, and misses half of the time of a thread that sleeps often.
fn schedstat(dir: &str) -> Option<[u64; 2]> {
    let text = fs::read_to_string(format!("{dir}/schedstat")).ok()?;
    let mut times = text
        .split_ascii_whitespace()
        .map(|ns| ns.parse().unwrap_or(0));
    Some([times.next().unwrap_or(0), times.next().unwrap_or(0)])
}

/// Pins all threads that `pid` has now, io-wq workers included: those do not inherit the CPUs of the thread that made
/// them.
///
/// # Errors
/// The process has ended.
pub fn pin(pid: u32, cpus: &[usize]) -> anyhow::Result<()> {
    for thread in threads(pid)? {
        // Fails for a thread that has just ended, which needs no pin.
        let _ = sched_setaffinity(Pid::from_raw(thread), &set(cpus));
    }
    Ok(())
}

/// Pins the calling thread.
///
/// # Errors
/// This machine has none of these CPUs.
pub fn pin_thread(cpus: &[usize]) -> anyhow::Result<()> {
    sched_setaffinity(None, &set(cpus)).with_context(|| format!("pinning to CPUs {cpus:?}"))
}

/// Pins a thread of any process.
///
/// # Errors
/// The thread has ended, or this machine has none of these CPUs.
pub fn pin_other_thread(thread: i32, cpus: &[usize]) -> anyhow::Result<()> {
    sched_setaffinity(Pid::from_raw(thread), &set(cpus))
        .with_context(|| format!("pinning thread {thread} to CPUs {cpus:?}"))
}

/// The CPUs that a thread may use; `None` is the calling thread.
///
/// # Errors
/// The thread has ended.
pub fn affinity(thread: Option<i32>) -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(thread.and_then(Pid::from_raw)).context("reading an affinity")?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}

/// Runs `action`, which starts a process, so that the process runs on `cpus` from its start.
///
/// # Errors
/// This machine has none of these CPUs.
pub fn start_on<T>(cpus: &[usize], action: impl FnOnce() -> T) -> anyhow::Result<T> {
    let before = sched_getaffinity(None)?;
    pin_thread(cpus)?;
    let result = action();
    sched_setaffinity(None, &before)?;
    Ok(result)
}

fn set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    set
}

/// Ids of the threads that `pid` has now.
///
/// # Errors
/// The process has ended.
pub fn threads(pid: u32) -> anyhow::Result<Vec<i32>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .with_context(|| format!("process {pid} has ended"))?;
    Ok(tasks
        .flatten()
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect())
}
