//! CPUs of the host, and which threads run on them.

use std::fmt;
use std::str::FromStr;

use super::units::{default_or, number};

/// The keys, in the order of messages.
pub const KEYS: [&str; 3] = ["vcpu-cpus", "server-cpus", "load-cpus"];

/// The largest number of a CPU.
const CPU_MAX: usize = 1023;

/// A list of CPUs: `0`, `0-3`, `0,2`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuList(Vec<usize>);

/// The CPUs on which a configuration's threads run; `None` are those of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pinning {
    /// The CPUs of guests' virtual CPUs, in turn.
    pub vcpu: Option<CpuList>,
    /// The CPUs of the server, or of QEMU's I/O threads in turn.
    pub server: Option<CpuList>,
    /// The CPUs of the load, without a guest.
    pub load: Option<CpuList>,
}

/// The CPUs of servers and of the load. An empty list leaves them to the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus {
    /// The CPUs of servers, of QEMU's I/O threads, and of fio on the host.
    pub server: Vec<usize>,
    /// The CPUs of the client that drives a socket.
    pub load: Vec<usize>,
    /// The CPUs of guests' virtual CPUs.
    pub vcpu: Vec<usize>,
}

impl Pinning {
    /// Sets the value of `key`, one of [`KEYS`].
    ///
    /// # Errors
    /// The value is invalid; the message says what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        *match key {
            "vcpu-cpus" => &mut self.vcpu,
            "server-cpus" => &mut self.server,
            _ => &mut self.load,
        } = default_or(value, CpuList::from_str)?;
        Ok(())
    }

    /// The value of `key`, one of [`KEYS`], as a plan writes it.
    pub fn value(&self, key: &str) -> String {
        let cpus = match key {
            "vcpu-cpus" => &self.vcpu,
            "server-cpus" => &self.server,
            _ => &self.load,
        };
        cpus.as_ref()
            .map_or_else(|| "default".into(), CpuList::to_string)
    }
}

impl CpuList {
    /// A list of these CPUs.
    pub fn of(mut cpus: Vec<usize>) -> CpuList {
        cpus.sort_unstable();
        cpus.dedup();
        CpuList(cpus)
    }

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
        Ok(Self::of(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&words.join(","))
    }
}
