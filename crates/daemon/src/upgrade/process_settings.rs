//! What a process inherits from the one that starts it. `ringdisk upgrade` starts the new process from an administrator's
//! shell, and first takes on the settings of the running one, so that the new process has those.

use std::fs;
use std::io;

use rustix::fs::Mode;
use rustix::process::{
    Pid, Resource, Rlimit, getpriority_process, getrlimit, setpriority_process, setrlimit, umask,
};
use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// Resource limits by their names in `/proc/PID/limits` (proc_pid_limits(5)).
const LIMITS: [(&str, Resource); 16] = [
    ("Max cpu time", Resource::Cpu),
    ("Max file size", Resource::Fsize),
    ("Max data size", Resource::Data),
    ("Max stack size", Resource::Stack),
    ("Max core file size", Resource::Core),
    ("Max resident set", Resource::Rss),
    ("Max processes", Resource::Nproc),
    ("Max open files", Resource::Nofile),
    ("Max locked memory", Resource::Memlock),
    ("Max address space", Resource::As),
    ("Max file locks", Resource::Locks),
    ("Max pending signals", Resource::Sigpending),
    ("Max msgqueue size", Resource::Msgqueue),
    ("Max nice priority", Resource::Nice),
    ("Max realtime priority", Resource::Rtprio),
    ("Max realtime timeout", Resource::Rttime),
];

/// The umask of this process.
pub fn own_umask() -> Option<u32> {
    umask_in(&fs::read_to_string("/proc/self/status").ok()?)
}

fn umask_in(status: &str) -> Option<u32> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(mask.trim(), 8).ok()
}

/// Gives this process, and those that it starts, the settings of a running one: resource limits, CPUs, priority and
/// OOM score, and `mask`, which is its umask if that is recorded. Returns what could not be set, which does not keep the
/// new process from serving.
///
/// # Errors
/// A limit would be lower than that of the running process: the new one could run out of descriptors or memory.
pub fn adopt(pid: Pid, mask: Option<u32>) -> io::Result<Vec<String>> {
    let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", pid.as_raw_nonzero()));
    if let Some(mask) = mask.or_else(|| umask_in(&of("status").ok()?)) {
        umask(Mode::from_raw_mode(mask & 0o777));
    }
    let mut left = Vec::new();
    for (name, resource, limit) in limits_in(&of("limits")?) {
        let now = getrlimit(resource);
        if now == limit || setrlimit(resource, limit).is_ok() {
            continue;
        }
        let is_lower = |ours: Option<u64>, theirs: Option<u64>| match (ours, theirs) {
            (Some(ours), Some(theirs)) => ours < theirs,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if is_lower(now.maximum, limit.current) {
            let show = |n: Option<u64>| n.map_or("unlimited".to_owned(), |n| n.to_string());
            return Err(io::Error::other(format!(
                "the new process would have a lower limit than the running one: '{name}' is at most {} here, and {} there; \
                 upgrade from a shell with that limit (ulimit -H), or with the right to raise it (CAP_SYS_RESOURCE)",
                show(now.maximum),
                show(limit.current)
            )));
        }
        let soft = Rlimit {
            current: limit.current,
            maximum: now.maximum,
        };
        if let Err(e) = setrlimit(resource, soft) {
            left.push(format!("the limit '{name}': {e}"));
        }
    }
    let mut note = |what: &str, e: io::Error| left.push(format!("{what}: {e}"));
    if let Err(e) = sched_getaffinity(Some(pid)).and_then(|cpus| sched_setaffinity(None, &cpus)) {
        note("its CPUs", e.into());
    }
    match (getpriority_process(Some(pid)), getpriority_process(None)) {
        (Ok(theirs), Ok(ours)) if theirs != ours => {
            if let Err(e) = setpriority_process(None, theirs) {
                note("its priority (nice)", e.into());
            }
        }
        _ => {}
    }
    let own = "/proc/self/oom_score_adj";
    if let (Ok(theirs), Ok(ours)) = (of("oom_score_adj"), fs::read_to_string(own))
        && theirs != ours
        && let Err(e) = fs::write(own, &theirs)
    {
        note("its OOM score", e);
    }
    Ok(left)
}

/// Soft and hard limits, each absent if it is unlimited.
fn limits_in(text: &str) -> Vec<(&'static str, Resource, Rlimit)> {
    let number = |word: &str| match word {
        "unlimited" => Some(None),
        n => n.parse::<u64>().ok().map(Some),
    };
    let parse = |line: &str| {
        let mut known = LIMITS.iter();
        let (name, resource) = known.find(|(name, _)| line.starts_with(&format!("{name} ")))?;
        let mut words = line[name.len()..].split_whitespace();
        let current = number(words.next()?)?;
        let maximum = number(words.next()?)?;
        Some((*name, *resource, Rlimit { current, maximum }))
    };
    text.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_process_are_read_as_the_kernel_has_them() {
        let read = limits_in(&fs::read_to_string("/proc/self/limits").unwrap());
        assert_eq!(read.len(), LIMITS.len(), "{read:?}");
        for (name, resource, limit) in read {
            assert_eq!(limit, getrlimit(resource), "{name}");
        }
        let mask = own_umask().unwrap();
        assert_eq!(
            umask_in(&format!("Name:\tx\nUmask:\t{mask:04o}\nState:\tR\n")),
            Some(mask)
        );
        assert_eq!(umask_in("State:\tR\n"), None);
        assert!(limits_in("Max open files  many  1 files\nMax\n").is_empty());
    }
}
