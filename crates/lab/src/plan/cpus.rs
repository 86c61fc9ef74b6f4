//! Lists of CPUs in plans.

use std::fmt;
use std::str::FromStr;

use super::units::number;

/// The largest number of a CPU.
const CPU_MAX: usize = 1023;

/// A list of CPUs: `0`, `0-3`, `0,2`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuList(Vec<usize>);

/// The CPUs of a run without a guest. An empty list leaves them to the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus {
    /// The CPUs of servers, and of fio on the host.
    pub server: Vec<usize>,
    /// The CPUs of the client that drives a socket.
    pub load: Vec<usize>,
}

impl CpuList {
    /// The numbers.
    pub fn to_vec(&self) -> Vec<usize> {
        self.0.clone()
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let problem = |problem| format!("{problem}; CPUs are written as in 0, 0-3 or 0,2");
            let first = number(first, 0, CPU_MAX).map_err(problem)?;
            let last = number(last, first, CPU_MAX).map_err(problem)?;
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&words.join(","))
    }
}
