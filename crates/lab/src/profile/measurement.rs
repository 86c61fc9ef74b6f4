//! What was measured in an interval: the input of the [verdict](super::verdict), and what a journal stores.

use serde::{Deserialize, Serialize};

use super::roles::Role;

/// With fewer requests there is nothing to judge.
pub const REQUESTS_MIN: f64 = 5.0;

/// Where the time went in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measurement {
    /// Length of the interval.
    pub seconds: f64,
    /// The threads, summed by role.
    pub roles: Vec<RoleUse>,
    /// Requests as the server of the disk, or QEMU, counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<Requests>,
    /// Requests as the guest, or the load's client, sees them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestView>,
    /// The limit of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// The block devices below the disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceUse>,
    /// The files of the disks below which the kernel counts no requests, with their file systems.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uncounted: Vec<String>,
    /// Whether no VM, and no other front-end, was connected to the disk.
    #[serde(default, skip_serializing_if = "is_false")]
    pub without_vm: bool,
    /// The kernel's pressure stall information of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pressure: Option<Pressure>,
}

/// The time of the threads of one role. Sums are in seconds per second, so that two busy threads have 2.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RoleUse {
    /// What the threads do.
    pub role: Role,
    /// The number of threads.
    pub threads: u32,
    /// Time on a CPU.
    pub on_cpu: f64,
    /// The part of it that the threads spent polling, as far as the program reports it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub polling: f64,
    /// Time in which a thread could run, but waited for a CPU.
    pub runnable: f64,
    /// The rest.
    pub asleep: f64,
    /// The part of `asleep` in which the thread could not be interrupted: usually it waited for a device.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub uninterruptible: f64,
    /// Context switches per second because a thread went to sleep.
    pub voluntary_per_s: f64,
    /// Context switches per second because the kernel ran another thread instead.
    pub involuntary_per_s: f64,
    /// The thread with the most time on a CPU, polling excluded.
    pub busiest: ThreadShare,
    /// The thread that waited longest for a CPU.
    pub most_delayed: ThreadShare,
}

/// A thread, and its shares of the interval, from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ThreadShare {
    /// Its name.
    pub name: String,
    /// On a CPU, polling excluded.
    #[serde(default)]
    pub on_cpu: f64,
    /// Runnable, but waiting for a CPU.
    #[serde(default)]
    pub runnable: f64,
}

/// The requests of one or more disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Requests {
    /// The number of disks that had requests.
    pub disks: u32,
    /// Completed requests per second.
    pub per_s: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// Its parts, if the server measures them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<Stages>,
}

/// The stages of a request in ringdisk: mean nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Stages {
    /// Until a limit let the request go.
    pub limit_ns: f64,
    /// In tables and clusters of the image.
    pub image_ns: f64,
    /// In the engine and the storage below it.
    pub engine_ns: f64,
    /// From the completion to the guest's ring.
    pub back_ns: f64,
}

/// The requests of a guest, or of the lab's client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GuestView {
    /// Completed requests per second.
    pub per_s: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// The number of disks that it used.
    pub disks: u32,
}

/// A limit of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Limit {
    /// As it was configured, such as `iops=500`.
    pub text: String,
    /// The share of it that was used, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<f64>,
}

/// A block device, as the kernel counts its requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceUse {
    /// The kernel's name, such as `nvme0n1`.
    pub name: String,
    /// The share of the interval in which it had requests.
    pub busy: f64,
    /// The mean number of requests in flight.
    pub in_flight: f64,
    /// Requests per second, after the kernel has merged them.
    pub per_s: f64,
    /// Mean nanoseconds of a request.
    pub mean_ns: f64,
}

/// The share of the interval in which tasks of the host waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Pressure {
    /// At least one task waited for a CPU.
    pub cpu_some: f64,
    /// At least one task waited for I/O.
    pub io_some: f64,
    /// All tasks that were not idle waited for I/O.
    pub io_full: f64,
}

impl Measurement {
    /// The threads of a role.
    pub fn role(&self, role: Role) -> Option<&RoleUse> {
        self.roles.iter().find(|its| its.role == role)
    }

    /// Whether there were enough requests to judge them.
    pub fn has_requests(&self) -> bool {
        let of_server = self.requests.as_ref().map_or(0.0, |its| its.per_s);
        let of_guest = self.guest.as_ref().map_or(0.0, |its| its.per_s);
        of_server.max(of_guest) * self.seconds >= REQUESTS_MIN
    }

    /// Whether all figures are possible. Code that draws them relies on it.
    pub fn is_sound(&self) -> bool {
        let is_possible = |value: &f64| (0.0..1e15).contains(value);
        let roles = self.roles.iter().flat_map(|its| {
            [
                its.on_cpu,
                its.polling,
                its.runnable,
                its.asleep,
                its.uninterruptible,
                its.voluntary_per_s,
                its.involuntary_per_s,
                its.busiest.on_cpu,
                its.busiest.runnable,
                its.most_delayed.on_cpu,
                its.most_delayed.runnable,
            ]
        });
        let requests = self.requests.iter().flat_map(|its| {
            let stages = its.stages.unwrap_or_default();
            [
                its.per_s,
                its.mean_ns,
                stages.limit_ns,
                stages.image_ns,
                stages.engine_ns,
                stages.back_ns,
            ]
        });
        let guest = self.guest.iter().flat_map(|its| [its.per_s, its.mean_ns]);
        let devices = self
            .devices
            .iter()
            .flat_map(|its| [its.busy, its.in_flight, its.per_s, its.mean_ns]);
        let limit = self.limit.iter().filter_map(|limit| limit.used);
        self.seconds > 0.0
            && roles
                .chain([self.seconds])
                .chain(requests)
                .chain(guest)
                .chain(devices)
                .chain(limit)
                .all(|value| is_possible(&value))
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}
