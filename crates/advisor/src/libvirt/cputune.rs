//! `<cputune>`: the CPUs of the host that a domain's threads may use, and for how long.

use roxmltree::Node;

use super::{attribute, child, span, text};
use crate::model::Vm;
use crate::model::cpus::CpuList;

/// The period of a quota, if the domain names none (`sched_cfs_period_us`'s default), in microseconds.
const PERIOD_US: u64 = 100_000;

/// Reads the pinning and the quotas. The number of vCPUs is known.
pub fn read(domain: Node<'_, '_>, vm: &mut Vm) {
    let vcpus = vm.table.number("vm.vcpus").unwrap_or(1);
    if let Some((set, _)) = attribute(child(domain, "vcpu"), "cpuset") {
        vm.cpus.every_vcpu = CpuList::parse(set);
        vm.cpus.emulator = vm.cpus.every_vcpu.clone();
    }
    let Some(tune) = child(domain, "cputune") else {
        return;
    };
    for pin in tune.children().filter(Node::is_element) {
        let Some(cpus) = pin.attribute("cpuset").and_then(CpuList::parse) else {
            continue;
        };
        match pin.tag_name().name() {
            "vcpupin" => {
                let number = pin.attribute("vcpu").and_then(|text| text.parse().ok());
                let number = number.filter(|number: &u64| *number < vcpus);
                vm.cpus.vcpus.extend(number.map(|number| (number, cpus)));
            }
            "iothreadpin" => {
                let id = pin.attribute("iothread").map(str::to_owned);
                vm.cpus.threads.extend(id.map(|id| (id, cpus)));
            }
            "emulatorpin" => vm.cpus.emulator = Some(cpus),
            _ => {}
        }
    }
    for (whose, threads) in [
        ("vcpu", 1),
        ("iothread", 1),
        ("emulator", 1),
        ("global", vcpus),
    ] {
        quota(tune, whose, threads, vm);
    }
}

/// Reads a quota that so many threads share.
fn quota(tune: Node<'_, '_>, whose: &str, threads: u64, vm: &mut Vm) {
    let number = |what: &str| {
        let node = child(tune, &format!("{whose}_{what}"))?;
        let number: u64 = text(node).0.parse().ok()?;
        (number > 0).then_some((number, node))
    };
    // A negative quota is none.
    let Some((quota, node)) = number("quota") else {
        return;
    };
    let period = number("period").map_or(PERIOD_US, |(period, _)| period);
    let percent = quota.saturating_mul(100) / period / threads.max(1);
    vm.limit_cpus(format!("{whose}_quota={quota}"), percent, span(node));
}
