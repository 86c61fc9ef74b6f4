//! Pins the threads of guests and servers, and reads back on which CPUs they may run.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::effective::Effective;
use crate::guest::Guest;
use crate::plan::cpus::{CpuList, Cpus};
use harness::cpu;

/// Pins virtual CPUs and QEMU's I/O threads, all guests together: the first thread to the first CPU of the list, and so on
/// in turn. Threads that a pinned thread starts inherit its CPU.
///
/// # Errors
/// QEMU does not answer, or a thread does not stay on its CPU.
pub fn guests(guests: &[Guest], cpus: &Cpus) -> Result<Effective> {
    let mut effective = Effective::new();
    if cpus.vcpu.is_empty() && cpus.server.is_empty() {
        return Ok(effective);
    }
    let (mut vcpus, mut iothreads) = (Vec::new(), Vec::new());
    for guest in guests {
        let mut qmp = guest.qmp()?;
        vcpus.extend(threads(&qmp.execute("query-cpus-fast", json!({}))?));
        let mut of_guest = threads(&qmp.execute("query-iothreads", json!({}))?);
        // In the order in which QEMU has started them: its answer has none.
        of_guest.sort_unstable();
        iothreads.extend(of_guest);
    }
    for (key, threads, cpus) in [
        ("vcpu-cpus", vcpus, &cpus.vcpu),
        ("server-cpus", iothreads, &cpus.server),
    ] {
        if !cpus.is_empty() && !threads.is_empty() {
            effective.insert(key.into(), in_turn(&threads, cpus)?.to_string());
        }
    }
    Ok(effective)
}

/// The CPUs on which a server's threads may run.
///
/// # Errors
/// The server has ended.
pub fn of_server(pid: u32) -> Result<CpuList> {
    let mut cpus = Vec::new();
    for thread in cpu::threads(pid)? {
        // A thread that has just ended has none.
        cpus.extend(cpu::affinity(Some(thread)).unwrap_or_default());
    }
    Ok(CpuList::of(cpus))
}

fn threads(answer: &Value) -> Vec<i32> {
    let id = |thread: &Value| thread["thread-id"].as_i64()?.try_into().ok();
    answer
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(id)
        .collect()
}

/// Pins each thread to one CPU. Returns the CPUs that the kernel reports.
fn in_turn(threads: &[i32], cpus: &[usize]) -> Result<CpuList> {
    let mut found = Vec::new();
    for (thread, wanted) in threads.iter().zip(cpus.iter().cycle()) {
        cpu::pin_other_thread(*thread, &[*wanted])?;
        let now = cpu::affinity(Some(*thread)).context("reading back a pinned thread")?;
        ensure!(
            now == [*wanted],
            "thread {thread} was pinned to CPU {wanted}, and may run on {}",
            CpuList::of(now)
        );
        found.extend(now);
    }
    Ok(CpuList::of(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_spread_in_turn_and_read_back() {
        let allowed = cpu::affinity(None).unwrap();
        let mut sleep = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let thread = sleep.id() as i32;
        let last = *allowed.last().unwrap();
        // The second turn of the only thread counts.
        let pinned = in_turn(&[thread, thread], &[allowed[0], last]);
        let error = in_turn(&[thread], &[1023]).unwrap_err();
        let read = of_server(sleep.id());
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert_eq!(pinned.unwrap(), CpuList::of(vec![allowed[0], last]));
        assert_eq!(read.unwrap(), CpuList::of(vec![last]));
        assert!(format!("{error:#}").contains("pinning thread"), "{error:#}");
    }
}
