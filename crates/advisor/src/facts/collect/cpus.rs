//! The CPUs that the host's running VMs share.

use std::fs;
use std::io::Read;
use std::path::Path;

use super::{Host, put};
use crate::facts::Map;
use crate::input::Surroundings;
use crate::text::Source;

/// The maximum number of QEMU processes that are inspected.
const VMS_MAX: usize = 4096;

impl Host {
    /// Adds the vCPUs of the running VMs, and how long tasks waited for a CPU.
    pub(super) fn add_running(&self, cpus: usize, host: &mut Map) {
        if let Some(vcpus) = self.running_vcpus() {
            put(host, "running-vcpus", Some(vcpus));
            let percent = vcpus.saturating_mul(100).checked_div(cpus as u64);
            put(host, "vcpus-percent", percent);
        }
        let pressure = self.text("/proc/pressure/cpu").unwrap_or_default();
        put(host, "cpu-pressure-percent", waiting(&pressure));
    }

    /// None if processes cannot be listed.
    fn running_vcpus(&self) -> Option<u64> {
        let processes = fs::read_dir(self.path("/proc")).ok()?.flatten();
        let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
        let processes = processes.filter(|entry| is_process(&entry.file_name().to_string_lossy()));
        let vcpus = processes.filter_map(|entry| vcpus(&entry.path().join("cmdline")));
        Some(vcpus.take(VMS_MAX).fold(0, u64::saturating_add))
    }
}

/// The vCPUs of a process; none if it is not QEMU.
fn vcpus(command_line: &Path) -> Option<u64> {
    let mut bytes = Vec::new();
    let file = fs::File::open(command_line).ok()?;
    file.take(1 << 20).read_to_end(&mut bytes).ok()?;
    let arguments: Vec<String> = bytes
        .split(|byte| *byte == 0)
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    let line = crate::command_line(
        arguments
            .strip_suffix(&[String::new()])
            .unwrap_or(&arguments),
    );
    if !crate::is_qemu(&line) {
        return None;
    }
    let input = crate::read::read(Source::new("process", line), Surroundings::default()).ok()?;
    let numbers = input
        .vms
        .iter()
        .filter_map(|vm| vm.table.number("vm.vcpus"));
    Some(numbers.fold(0, u64::saturating_add))
}

/// `avg300` of a line such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, rounded.
fn waiting(pressure: &str) -> Option<u64> {
    let line = pressure.lines().find(|line| line.starts_with("some "))?;
    let average = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("avg300="))?;
    let percent: f64 = average.parse().ok()?;
    (0.0..=100.0)
        .contains(&percent)
        .then_some(percent.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_read_or_unknown() {
        for (text, expected) in [
            (
                "some avg10=1.00 avg60=2.00 avg300=12.60 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0",
                Some(13),
            ),
            ("some avg300=nan", None),
            ("some avg300=1e9", None),
            ("full avg300=3.00", None),
            ("", None),
        ] {
            assert_eq!(waiting(text), expected, "{text}");
        }
    }
}
