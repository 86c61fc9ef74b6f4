//! Which stage limits, in one sentence with its evidence.
//!
//! Each disk always has a place for its next request. The time of that place is divided: the guest has not sent the next
//! request, the request is on its way between the guest and the server, a limit holds it back, and so on. Each part has a
//! cause, which the threads tell: for example, a guest that sends nothing may have nothing to send, or its vCPU may wait for
//! a CPU. The cause with the largest share limits.

mod parts;

use serde::{Deserialize, Serialize};

use super::measurement::{DeviceUse, Measurement, REQUESTS_MIN, ThreadShare};
use super::roles::Role;
use parts::{Part, parts};

/// A thread that is on a CPU, or waits for one, for this share of the time is busy all the time.
const BUSY: f64 = 0.9;
/// A thread that waits for a CPU for this share of the time, and half as long as it runs, lacks CPU time.
const DELAYED: f64 = 0.2;
/// A cause with a smaller share is not named.
const DECIDED: f64 = 0.5;
/// A cause with a larger share is clear.
const CLEAR: f64 = 0.65;
/// A device that is busy for a smaller share of the time does not explain why requests are slow.
const DEVICE_IDLE: f64 = 0.3;
/// The share of a limit from which the limit is reached.
const LIMIT_REACHED: f64 = 0.9;
/// The share from which not even faster storage would bring more requests.
const LIMIT_USED_UP: f64 = 0.97;
/// Threads on the path of the requests to the storage.
const PATH: [Role; 8] = [
    Role::Client,
    Role::Messenger,
    Role::Librbd,
    Role::IoThread,
    Role::Server,
    Role::MainLoop,
    Role::Blocking,
    Role::KernelWorker,
];

/// What limits.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The guest, or the load's client, does not send more requests.
    Guest,
    /// A vCPU waits for a CPU of the host.
    StarvedVcpu,
    /// The client that makes the load is busy all the time.
    Client,
    /// QEMU's main loop is busy all the time.
    MainLoop,
    /// An IOThread of QEMU or qemu-storage-daemon is busy all the time.
    IoThread,
    /// ringdisk's I/O thread is busy all the time.
    Server,
    /// A thread between the guest and the storage waits for a CPU of the host.
    StarvedThread,
    /// A limit of the disk.
    Limit,
    /// Tables and clusters of the image.
    Image,
    /// A messenger of Ceph is busy all the time.
    Messenger,
    /// Another thread of librbd is busy all the time.
    Librbd,
    /// A thread for operations that would block is busy all the time.
    Worker,
    /// A worker of the kernel is busy all the time.
    KernelWorker,
    /// The storage.
    Storage,
    /// None can be named.
    #[default]
    Undecided,
}

impl Stage {
    /// The name in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Stage::Guest => "guest",
            Stage::StarvedVcpu => "starved-vcpu",
            Stage::Client => "client",
            Stage::MainLoop => "main-loop",
            Stage::IoThread => "io-thread",
            Stage::Server => "server",
            Stage::StarvedThread => "starved-thread",
            Stage::Limit => "limit",
            Stage::Image => "image",
            Stage::Messenger => "messenger",
            Stage::Librbd => "librbd",
            Stage::Worker => "worker",
            Stage::KernelWorker => "kernel-worker",
            Stage::Storage => "storage",
            Stage::Undecided => "undecided",
        }
    }
}

/// The limiting stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Verdict {
    /// The stage.
    pub stage: Stage,
    /// Its share of the time; 0 if no stage is named.
    pub share: f64,
    /// Whether the evidence leaves little doubt.
    pub clear: bool,
    /// The stage and the evidence, in one sentence.
    pub sentence: String,
}

/// A cause of a part.
struct Cause {
    stage: Stage,
    evidence: String,
}

impl Cause {
    fn new(stage: Stage, evidence: impl Into<String>) -> Cause {
        Cause {
            stage,
            evidence: evidence.into(),
        }
    }
}

/// Names the stage that limits.
pub fn judge(measured: &Measurement) -> Verdict {
    if measured.without_vm && !measured.has_requests() {
        return undecided("no VM is connected to the disk, and it has no requests");
    }
    let Some(parts) = parts(measured) else {
        return by_threads(measured);
    };
    let mut found: Vec<(f64, Cause)> = Vec::new();
    let all = parts
        .into_iter()
        .flat_map(|(part, share)| causes(part, share, measured));
    for (share, cause) in all {
        match found.iter_mut().find(|(_, its)| its.stage == cause.stage) {
            Some((sum, its)) if share > *sum => {
                (*sum, *its) = (*sum + share, cause);
            }
            Some((sum, _)) => *sum += share,
            None => found.push((share, cause)),
        }
    }
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let mut found = found.into_iter();
    let Some((share, first)) = found.next() else {
        return by_threads(measured);
    };
    if share < DECIDED {
        let second = found.next().map_or_else(String::new, |(share, its)| {
            format!(
                ", and {} for another {}: {}",
                its.stage.word(),
                percent(share),
                its.evidence
            )
        });
        return undecided(format!(
            "no stage takes half of the time; {} accounts for {}: {}{second}",
            first.stage.word(),
            percent(share),
            first.evidence
        ));
    }
    match first.stage {
        Stage::Undecided => undecided(first.evidence),
        stage => Verdict {
            stage,
            share,
            clear: share >= CLEAR,
            sentence: format!("{}: {}.", subject(stage), first.evidence),
        },
    }
}

/// How a sentence about a stage begins.
fn subject(stage: Stage) -> &'static str {
    match stage {
        Stage::Guest => "The guest limits, not the disk",
        Stage::StarvedVcpu => "The guest lacks CPU time",
        Stage::Client => "The client that makes the load limits, not the disk",
        Stage::MainLoop => "QEMU's main loop limits",
        Stage::IoThread => "The IOThread limits",
        Stage::Server => "ringdisk's I/O thread limits",
        Stage::StarvedThread => "The path of the requests lacks CPU time",
        Stage::Limit => "The limit of the disk holds requests back",
        Stage::Image => "The image's tables limit",
        Stage::Messenger => "Ceph's messenger limits",
        Stage::Librbd => "librbd limits",
        Stage::Worker => "A worker thread limits",
        Stage::KernelWorker => "A kernel worker limits",
        Stage::Storage => "The storage limits",
        Stage::Undecided => "Undecided",
    }
}

fn undecided(because: impl AsRef<str>) -> Verdict {
    Verdict {
        sentence: format!("Undecided, because {}.", because.as_ref()),
        ..Verdict::default()
    }
}

/// The causes of a part of the time, with their shares.
fn causes(part: Part, share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let cause = match part {
        Part::Unsent => return unsent(share, measured),
        Part::Transport => return transport(share, measured),
        Part::Limit => limit(share, measured),
        Part::Image => Cause::new(
            Stage::Image,
            format!(
                "requests wait {} of the time for tables or clusters of the image that are not in memory",
                percent(share)
            ),
        ),
        Part::Engine => return engine(share, measured),
        Part::Back => return back(share, measured),
        Part::Qemu => return in_qemu(share, measured),
        Part::Device => {
            let inside = format!(
                "requests spend {} of the time in the block device{}",
                percent(share),
                device_words(measured)
            );
            limit_used(LIMIT_USED_UP, &inside, measured)
                .unwrap_or_else(|| Cause::new(Stage::Storage, inside))
        }
    };
    vec![(share, cause)]
}

fn unsent(share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let idle = format!(
        "the disk has no request in flight for {} of the time",
        percent(share)
    );
    // Until the server fetches a request, only the guest knows of it.
    let hides = measured.guest.is_none();
    if let Some(its) = busy(measured, Role::Server).filter(|_| hides) {
        let evidence = format!(
            "{}, while the disk's requests wait in the guest's ring",
            its.words()
        );
        return vec![(share, Cause::new(its.stage, evidence))];
    }
    let on_path: &[Role] = match hides {
        true => &[Role::Server, Role::IoThread, Role::Client],
        false => &[Role::Client],
    };
    let lacking = starved(measured, on_path);
    if let Some(its) = busy(measured, Role::Client) {
        let client = Cause::new(its.stage, format!("{}, and {idle}", its.words()));
        return divided(share, lacking, &idle, client);
    }
    let vcpus = match (busy(measured, Role::Vcpu), measured.role(Role::Vcpu)) {
        (Some(its), _) => format!("; the guest computes: {}", its.words()),
        (None, Some(vcpus)) => {
            let share = percent(vcpus.busiest.on_cpu);
            format!("; its busiest vCPU is on CPU for {share}")
        }
        (None, None) => match burdened(measured) {
            Some((Role::Other, words)) => format!("; {words}; what it does is unknown"),
            _ => String::new(),
        },
    };
    let guest = Cause::new(Stage::Guest, format!("{idle}{vcpus}"));
    divided(share, lacking, &idle, guest)
}

/// A vCPU, or a thread of one of these roles, that lacks CPU time.
fn starved<'a>(measured: &'a Measurement, on_path: &[Role]) -> Option<(Stage, &'a ThreadShare)> {
    let vcpu = delayed(measured, Role::Vcpu).map(|thread| (Stage::StarvedVcpu, thread));
    vcpu.or_else(|| most_delayed(measured, on_path))
}

/// The thread of these roles that lacks most CPU time.
fn most_delayed<'a>(measured: &'a Measurement, roles: &[Role]) -> Option<(Stage, &'a ThreadShare)> {
    let delayed = roles.iter().filter_map(|role| delayed(measured, *role));
    let most = delayed.max_by(|a, b| a.runnable.total_cmp(&b.runnable))?;
    Some((Stage::StarvedThread, most))
}

/// Divides a part of the time between a thread that lacks CPU time and another cause. While the thread waits for a CPU, it
/// can do nothing for the requests; the rest of the part has the other cause.
fn divided(
    share: f64,
    lacking: Option<(Stage, &ThreadShare)>,
    what: &str,
    other: Cause,
) -> Vec<(f64, Cause)> {
    let Some((stage, thread)) = lacking else {
        return vec![(share, other)];
    };
    let evidence = format!("{}, and {what}", is_delayed(thread));
    vec![
        (share * (1.0 - thread.runnable), other),
        (share * thread.runnable, Cause::new(stage, evidence)),
    ]
}

fn transport(share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let way = format!(
        "requests spend {} of the time between the guest and the server of the disk",
        percent(share)
    );
    let on_path = [Role::Server, Role::IoThread, Role::Client];
    if let Some(its) = on_path.into_iter().find_map(|role| busy(measured, role)) {
        let cause = Cause::new(its.stage, format!("{}, and {way}", its.words()));
        return vec![(share, cause)];
    }
    let other = match busy(measured, Role::Vcpu) {
        Some(its) => Cause::new(its.stage, format!("{way}, and {}", its.words())),
        None => Cause::new(
            Stage::Undecided,
            format!(
                "{way}, in notifications and wake-ups, and {}",
                others(measured)
            ),
        ),
    };
    divided(share, starved(measured, &on_path), &way, other)
}

fn limit(share: f64, measured: &Measurement) -> Cause {
    let wait = format!(
        "requests wait {} of the time until they may begin",
        percent(share)
    );
    match (&measured.limit, busy(measured, Role::Server)) {
        (Some(limit), _) => Cause::new(Stage::Limit, format!("with {}, {wait}", limit.text)),
        (None, Some(its)) => Cause::new(its.stage, format!("{}, and {wait}", its.words())),
        (None, None) => Cause::new(
            Stage::Undecided,
            format!("{wait}, but the disk has no limit"),
        ),
    }
}

fn engine(share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let below = format!(
        "requests spend {} of the time in the storage",
        percent(share)
    );
    let roles = [
        Role::Messenger,
        Role::Librbd,
        Role::Server,
        Role::Blocking,
        Role::KernelWorker,
    ];
    if let Some(cause) = busy_thread(&below, measured, &roles) {
        return vec![(share, cause)];
    }
    let other = storage(below.clone(), measured);
    divided(share, most_delayed(measured, &roles), &below, other)
}

fn storage(below: String, measured: &Measurement) -> Cause {
    let engine_ns = measured
        .requests
        .as_ref()
        .and_then(|its| its.stages)
        .map_or(0.0, |stages| stages.engine_ns);
    let explains =
        |its: &DeviceUse| its.busy >= DEVICE_IDLE || its.mean_ns >= engine_ns * DEVICE_IDLE;
    let devices = &measured.devices;
    let has_requests = devices
        .iter()
        .any(|its| its.per_s * measured.seconds >= REQUESTS_MIN);
    if has_requests && !devices.iter().any(explains) {
        return Cause::new(
            Stage::Undecided,
            format!(
                "{below}, {} each, but the block device is not the reason{}: look at the file system, a limit of the \
                 control group, or the layers between",
                time(engine_ns),
                device_words(measured)
            ),
        );
    }
    let busiest = [Role::Server, Role::Messenger, Role::Librbd]
        .into_iter()
        .filter_map(|role| {
            let share = percent(measured.role(role)?.busiest.on_cpu);
            Some(format!("{share} of the busiest {}", role.label()))
        });
    let busiest: Vec<String> = busiest.collect();
    let threads = match &busiest[..] {
        [] => String::new(),
        busiest => format!(", and take only {}", busiest.join(" and ")),
    };
    Cause::new(
        Stage::Storage,
        format!(
            "{below}, {} each{threads}{}",
            time(engine_ns),
            device_words(measured)
        ),
    )
}

fn back(share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let way = format!(
        "completed requests wait {} of the time until the guest is told",
        percent(share)
    );
    if let Some(its) = busy(measured, Role::Server) {
        let cause = Cause::new(its.stage, format!("{}, and {way}", its.words()));
        return vec![(share, cause)];
    }
    let other = Cause::new(
        Stage::Undecided,
        format!("{way}, but the I/O thread is not busy, and usually does not wait for a CPU"),
    );
    let lacking = most_delayed(measured, &[Role::Server]);
    divided(share, lacking, &way, other)
}

/// The limit of the disk, if at least this share of it is used.
fn limit_used(at_least: f64, what: &str, measured: &Measurement) -> Option<Cause> {
    let limit = measured.limit.as_ref()?;
    let used = limit.used.filter(|used| *used >= at_least)?;
    let evidence = format!("{} of {} is used, and {what}", percent(used), limit.text);
    Some(Cause::new(Stage::Limit, evidence))
}

fn in_qemu(share: f64, measured: &Measurement) -> Vec<(f64, Cause)> {
    let inside = format!(
        "requests spend {} of the time between the guest and the block device",
        percent(share)
    );
    if let Some(cause) = limit_used(LIMIT_REACHED, &inside, measured) {
        return vec![(share, cause)];
    }
    if let Some(cause) = busy_thread(&inside, measured, &PATH) {
        return vec![(share, cause)];
    }
    let waits_for_cluster =
        measured.role(Role::Messenger).is_some() && burdened(measured).is_none();
    let other = match busy(measured, Role::Vcpu) {
        Some(its) => Cause::new(its.stage, format!("{inside}, and {}", its.words())),
        None if waits_for_cluster => Cause::new(
            Stage::Storage,
            format!(
                "{inside}, and neither librbd's threads nor QEMU's are busy, so the cluster is waited for"
            ),
        ),
        None if waits_for_other_storage(measured) => Cause::new(
            Stage::Storage,
            format!(
                "{inside}, and QEMU's threads are not busy, so the storage of {} is waited for, whose requests the kernel does \
                 not count",
                measured.uncounted.join(" and ")
            ),
        ),
        None => Cause::new(
            Stage::Undecided,
            format!(
                "{inside}, whose stages QEMU does not report, and {}",
                others(measured)
            ),
        ),
    };
    divided(share, starved(measured, &PATH), &inside, other)
}

/// Whether all disks are on storage that is no block device, such as NFS or FUSE, and no thread explains the time.
fn waits_for_other_storage(measured: &Measurement) -> bool {
    !measured.uncounted.is_empty() && measured.devices.is_empty() && burdened(measured).is_none()
}

/// The cause if a thread of one of these roles is busy all the time. With threads of two roles, it is undecided.
fn busy_thread(what: &str, measured: &Measurement, roles: &[Role]) -> Option<Cause> {
    let found = roles.iter().filter_map(|role| busy(measured, *role));
    let found: Vec<Busy> = found.collect();
    let first = found.first()?;
    let words = first.words();
    let other = found.iter().find(|its| its.stage != first.stage);
    Some(match other {
        None => Cause::new(first.stage, format!("{words}, and {what}")),
        Some(second) => Cause::new(
            Stage::Undecided,
            format!(
                "{what}, and two threads are busy: {words}, and {}",
                second.words()
            ),
        ),
    })
}

/// What the threads alone tell.
fn by_threads(measured: &Measurement) -> Verdict {
    let decided = |stage, evidence: String| Verdict {
        stage,
        share: 0.0,
        clear: false,
        sentence: format!(
            "{}: {evidence}; the times of requests are unknown.",
            subject(stage)
        ),
    };
    if let Some(cause) = busy_thread("it is on the path of the requests", measured, &PATH) {
        return match cause.stage {
            Stage::Undecided => undecided(cause.evidence),
            stage => decided(stage, cause.evidence),
        };
    }
    let lacking = starved(measured, &PATH);
    if let Some((stage, thread)) = lacking.filter(|(_, its)| its.runnable >= DECIDED) {
        return decided(stage, is_delayed(thread));
    }
    let busy_device = measured.devices.iter().find(|its| its.busy >= BUSY);
    if busy_device.is_some() {
        let words = device_words(measured);
        return decided(Stage::Storage, words.trim_start_matches("; ").to_owned());
    }
    let known = match lacking {
        Some((_, thread)) => format!("{}, which explains no more than that", is_delayed(thread)),
        None => others(measured),
    };
    undecided(format!(
        "{known}, and the times of requests are unknown; ringdisk measures them for its disks, and --qmp asks QEMU for those of \
         other disks",
    ))
}

/// A thread that runs or waits for a CPU so long that a sentence must not say that none does, with its role.
fn burdened(measured: &Measurement) -> Option<(Role, String)> {
    let roles = Role::ALL.into_iter().filter(|role| *role != Role::Host);
    let found = roles.filter_map(|role| {
        let most_delayed = &measured.role(role)?.most_delayed;
        let (thread, words) = if most_delayed.runnable >= DELAYED {
            (most_delayed, is_delayed(most_delayed))
        } else {
            let its = busy(measured, role)?;
            (its.thread, its.words())
        };
        Some((thread.on_cpu + thread.runnable, (role, words)))
    });
    let most = found.max_by(|(a, _), (b, _)| a.total_cmp(b));
    most.map(|(_, found)| found)
}

/// What the threads do that explain nothing, as the end of a sentence.
fn others(measured: &Measurement) -> String {
    match burdened(measured) {
        Some((Role::Other, words)) => format!("{words}; what it does is unknown"),
        Some((Role::Vcpu, words)) => {
            format!("{words}; whether the guest's requests wait for it is unknown")
        }
        Some((role, words)) => format!("{words} ({}), which does not explain it", role.label()),
        None => format!(
            "no thread runs or waits for a CPU for {} of the time (polling aside), and none waits for {}",
            percent(BUSY),
            percent(DELAYED)
        ),
    }
}

/// A thread that never sleeps: whatever waits for it waits all the time. Polling counts as sleep.
struct Busy<'a> {
    /// What limits if this thread does.
    stage: Stage,
    thread: &'a ThreadShare,
}

impl Busy<'_> {
    fn words(&self) -> String {
        match self.stage {
            Stage::StarvedThread => is_delayed(self.thread),
            _ => is_busy(self.thread),
        }
    }
}

/// A thread of a role that is busy all the time. A vCPU that lacks CPU time does not count: how long the guest would sleep
/// on a CPU of its own is unknown.
fn busy(measured: &Measurement, role: Role) -> Option<Busy<'_>> {
    let its = measured.role(role)?;
    let mut threads = [&its.busiest, &its.most_delayed].into_iter();
    let thread = threads.find(|thread| thread.on_cpu + thread.runnable >= BUSY)?;
    let stage = match role {
        Role::Vcpu if lacks_cpu(thread) => return None,
        _ if lacks_cpu(thread) => Stage::StarvedThread,
        Role::Vcpu => Stage::Guest,
        Role::Client => Stage::Client,
        Role::Messenger => Stage::Messenger,
        Role::Librbd => Stage::Librbd,
        Role::Blocking => Stage::Worker,
        Role::IoThread => Stage::IoThread,
        Role::MainLoop => Stage::MainLoop,
        Role::Server => Stage::Server,
        Role::KernelWorker => Stage::KernelWorker,
        Role::Other | Role::Host => Stage::Undecided,
    };
    Some(Busy { stage, thread })
}

/// The thread of a role that lacks CPU time, if there is one.
fn delayed(measured: &Measurement, role: Role) -> Option<&ThreadShare> {
    let thread = &measured.role(role)?.most_delayed;
    lacks_cpu(thread).then_some(thread)
}

fn lacks_cpu(thread: &ThreadShare) -> bool {
    thread.runnable >= DELAYED && thread.runnable >= thread.on_cpu / 2.0
}

fn is_busy(thread: &ThreadShare) -> String {
    let waits = match thread.runnable {
        ..0.005 => String::new(),
        share => format!(", and waits for a CPU for {}", percent(share)),
    };
    format!(
        "thread '{}' is on CPU for {} of the time{waits}",
        thread.name,
        percent(thread.on_cpu)
    )
}

fn is_delayed(thread: &ThreadShare) -> String {
    format!(
        "thread '{}' is runnable but waits for a CPU for {} of the time, and runs for {}",
        thread.name,
        percent(thread.runnable),
        percent(thread.on_cpu)
    )
}

/// The busiest device, as the end of a sentence; empty if none is known.
fn device_words(measured: &Measurement) -> String {
    let busiest = measured
        .devices
        .iter()
        .max_by(|a, b| a.busy.total_cmp(&b.busy));
    busiest.map_or_else(String::new, |its| {
        format!(
            "; {} is busy for {} and returns a request after {}",
            its.name,
            percent(its.busy),
            time(its.mean_ns)
        )
    })
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Nanoseconds, in three digits or so.
pub fn time(ns: f64) -> String {
    match ns {
        ..9_950.0 => format!("{:.1} µs", ns / 1e3),
        ..999_500.0 => format!("{:.0} µs", ns / 1e3),
        ..9_950_000.0 => format!("{:.1} ms", ns / 1e6),
        ..999_500_000.0 => format!("{:.0} ms", ns / 1e6),
        _ => format!("{:.1} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests;
