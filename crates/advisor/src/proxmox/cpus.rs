//! The CPUs of a VM, and those of the host that it may use.

use super::{Line, parts};
use crate::model::cpus::CpuList;
use crate::model::{Table, Vm};

/// Reads the model of the virtual CPUs.
pub fn model(lines: &[Line<'_>], table: &mut Table) {
    let found = lines.iter().rev().find(|line| line.key == "cpu");
    let Some(line) = found else {
        return table.default_to("vm.cpu-model", "kvm64", "Proxmox");
    };
    let mut parts = parts(line).into_iter();
    let model = parts.find(|part| matches!(part.key, "" | "cputype"));
    let model = model.map_or("kvm64", |part| part.value);
    table.give("vm.cpu-model", model.to_owned(), line.value_span);
}

/// Reads the CPUs of the host that the VM may use, and for how long. The number of vCPUs is known.
pub fn of_host(lines: &[Line<'_>], vm: &mut Vm) {
    let last = |key: &str| lines.iter().rev().find(|line| line.key == key);
    if let Some(line) = last("affinity") {
        vm.cpus.process = CpuList::parse(line.value);
    }
    let vcpus = vm.table.number("vm.vcpus").unwrap_or(1);
    if let Some(line) = last("cpulimit")
        // For all threads together, in CPUs; 0 is no limit.
        && let Some(cpus) = line.value.parse::<f64>().ok().filter(|cpus| *cpus > 0.0)
    {
        let percent = (cpus * 100.0 / vcpus as f64) as u64;
        vm.limit_cpus(format!("cpulimit={}", line.value), percent, line.value_span);
    }
}
