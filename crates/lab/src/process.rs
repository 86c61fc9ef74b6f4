//! CPU time as the kernel accounts for it, from `/proc`.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// `USER_HZ`, the unit of times in `/proc/PID/stat`; 100 on every Linux that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// What a process has used so far, kernel threads that work for it (io-wq) included: they are threads of the process.
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
    pub fn of(pid: u32) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        for thread in threads(pid)? {
            // A thread may end between the listing and the read; the ticks of the process still count it.
            let dir = format!("/proc/{pid}/task/{thread}");
            let Ok(schedstat) = fs::read_to_string(format!("{dir}/schedstat")) else {
                continue;
            };
            let Ok(status) = fs::read_to_string(format!("{dir}/status")) else {
                continue;
            };
            let mut times = schedstat
                .split_ascii_whitespace()
                .map(|n| n.parse::<u64>().unwrap_or(0));
            usage.threads_ran_ns += times.next().unwrap_or(0);
            usage.waited_ns += times.next().unwrap_or(0);
            usage.switches += status
                .lines()
                .filter_map(|line| line.split_once("ctxt_switches:"))
                .filter_map(|(_, n)| n.trim().parse::<u64>().ok())
                .sum::<u64>();
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

    /// What was used since `before`.
    pub fn since(&self, before: &Usage) -> Usage {
        Usage {
            threads_ran_ns: self.threads_ran_ns.saturating_sub(before.threads_ran_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            user_ticks: self.user_ticks.saturating_sub(before.user_ticks),
            system_ticks: self.system_ticks.saturating_sub(before.system_ticks),
            switches: self.switches.saturating_sub(before.switches),
        }
    }

    /// What two processes have used together.
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

/// Time of all cores together.
#[derive(Clone, Copy)]
pub struct Cores {
    task_ticks: u64,
    stolen_ticks: u64,
}

impl Cores {
    /// Reads the counters of the machine.
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

    /// What was used since `before`.
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

    /// Time that the hypervisor gave to somebody else.
    pub fn stolen_s(&self) -> f64 {
        self.stolen_ticks as f64 / TICKS_PER_SECOND
    }
}

/// Waits until the machine has been idle for a moment, or for `patience`: what is decided here does not know the sample.
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

/// Pins all threads that `pid` has now, io-wq workers included: those do not inherit the pin of the thread that made them.
pub fn pin(pid: u32, cpu: usize) -> anyhow::Result<()> {
    for thread in threads(pid)? {
        // Fails for a thread that has just ended, which needs no pin.
        let _ = sched_setaffinity(Pid::from_raw(thread), &only(cpu));
    }
    Ok(())
}

/// Pins the calling thread.
pub fn pin_thread(cpu: usize) -> anyhow::Result<()> {
    sched_setaffinity(None, &only(cpu)).with_context(|| format!("pinning to core {cpu}"))
}

/// Runs `action`, which starts a process, so that the process is born pinned to `cpu`.
pub fn born_on<T>(cpu: usize, action: impl FnOnce() -> T) -> anyhow::Result<T> {
    let before = sched_getaffinity(None)?;
    pin_thread(cpu)?;
    let outcome = action();
    sched_setaffinity(None, &before)?;
    Ok(outcome)
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// Ids of the threads that `pid` has now.
pub fn threads(pid: u32) -> anyhow::Result<Vec<i32>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .with_context(|| format!("process {pid} has gone"))?;
    Ok(tasks
        .flatten()
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect())
}
