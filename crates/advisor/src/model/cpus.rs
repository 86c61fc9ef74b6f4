//! The CPUs of the host that a VM's threads may use.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::Vm;
use crate::text::Span;

/// More CPUs than any host has.
const CPU_MAX: u32 = 4095;
/// The most ranges of a list: lists are expanded for each disk.
const RANGES_MAX: usize = 64;

/// The CPUs of the host that a VM's threads may use, as far as the input says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostCpus {
    /// Those of all vCPUs without a list of their own.
    pub every_vcpu: Option<CpuList>,
    /// Those of some vCPUs, by their numbers.
    pub vcpus: BTreeMap<u64, CpuList>,
    /// Those of some I/O threads, by their ids.
    pub threads: BTreeMap<String, CpuList>,
    /// Those of QEMU's other threads.
    pub emulator: Option<CpuList>,
    /// Those of all threads together.
    pub process: Option<CpuList>,
    /// The limits on the CPU time of its threads, each with its percentage of a CPU.
    pub quotas: Vec<(String, u64)>,
}

impl Vm {
    /// Adds a limit on the CPU time of its threads. One that leaves each thread a whole CPU has no effect.
    pub fn limit_cpus(&mut self, setting: String, percent: u64, at: Span) {
        if percent >= 100 {
            return;
        }
        let known = self.table.number("vm.cpu-quota");
        if known.is_none_or(|known| percent < known) {
            self.table.give("vm.cpu-quota", percent, at);
        }
        self.cpus.quotas.push((setting, percent));
    }
}

/// A list of CPUs such as `0-3,^2,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(Vec<CpuRange>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CpuRange {
    is_left_out: bool,
    first: u32,
    last: u32,
}

impl CpuList {
    /// Parses a list; `None` if it is none, or too long.
    pub fn parse(text: &str) -> Option<Self> {
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let (is_left_out, part) = match part.trim().strip_prefix('^') {
                Some(part) => (true, part),
                None => (false, part.trim()),
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            if first > last || last > CPU_MAX || ranges.len() >= RANGES_MAX {
                return None;
            }
            ranges.push(CpuRange {
                is_left_out,
                first,
                last,
            });
        }
        Some(Self(ranges))
    }

    pub fn cpus(&self) -> BTreeSet<u32> {
        let mut cpus = BTreeSet::new();
        for range in &self.0 {
            if range.is_left_out {
                cpus.retain(|cpu| !(range.first..=range.last).contains(cpu));
            } else {
                cpus.extend(range.first..=range.last);
            }
        }
        cpus
    }
}

/// As the lab takes it: `0,1,3,8`.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text_of(&self.cpus()))
    }
}

/// CPUs as a list without ranges.
pub fn text_of(cpus: &BTreeSet<u32>) -> String {
    let words: Vec<String> = cpus.iter().map(u32::to_string).collect();
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        let text = |text: &str| CpuList::parse(text).map(|list| list.to_string());
        assert_eq!(text("0-3,^2,8").as_deref(), Some("0,1,3,8"));
        assert_eq!(text(" 5 ").as_deref(), Some("5"));
        let long = "0-4095,".repeat(100_000) + "1";
        for refused in ["", "a", "1-", "0-5000", "3-1", "4294967296", &long] {
            assert_eq!(text(refused), None);
        }
    }
}
