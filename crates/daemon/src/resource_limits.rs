//! Resource limits that this process inherits (getrlimit(2)).

use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::warn;

/// Each queue takes a few descriptors, and shells and services start with a limit of 1024 that any
/// process may raise to the hard one.
pub fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Warns of limits that make requests of guests fail or end the process; services normally have none of them.
pub fn warn_of_limits() {
    let effects = [
        (
            Resource::Fsize,
            "RLIMIT_FSIZE",
            "writes beyond that offset of a file fail",
        ),
        (
            Resource::Cpu,
            "RLIMIT_CPU",
            "at the hard limit in seconds, the kernel kills this process",
        ),
        (
            Resource::As,
            "RLIMIT_AS",
            "VMs and disks whose memory does not fit are refused, or this process ends",
        ),
        (
            Resource::Data,
            "RLIMIT_DATA",
            "disks whose memory does not fit are refused, or this process ends",
        ),
    ];
    for (resource, name, effect) in effects {
        if let Some(limit) = getrlimit(resource).current {
            warn!("{name} is {limit}: {effect}");
        }
    }
}
