//! Requests that storage failed to serve: they are reported, or stalled, as the [policy](crate::control::error_policy) says.

use block::{OnError, Request, explain};
use guest::blk::Status;
use tracing::{error, info, warn};

use super::mapped;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::disk::flush_coalescer::lost;
use crate::queue::Queue;
use crate::queue::slot::{RequestState, Slot};
use crate::report::{IoAction, IoEvent, IoFailure};
use crate::request::{Ending, RequestId, Retry};
use crate::resources::timer::Timer;
use crate::thread_disk::{RetryTime, ThreadDisk};

/// First pause before a request is tried again. It doubles each time until something is served, up to the last.
const PAUSE_MIN_NS: u64 = 100_000_000;
const PAUSE_MAX_NS: u64 = 5_000_000_000;

/// Stalls a request that storage failed to serve, with this errno, or 0 if its file has ended. If the error is to be
/// reported instead, returns how the request ends.
#[cold]
pub(crate) fn stall(
    queue: &mut Queue,
    id: RequestId,
    disk: &mut ThreadDisk,
    timer: &mut Timer,
    errno: i32,
    retry: Retry,
) -> Option<Ending> {
    let (is_retired, is_client) = (queue.is_retired(), queue.is_client);
    if is_client {
        return Some(Ending::client_error(errno));
    }
    let s = queue.slots.get(id.slot);
    let action = action_for(&queue.disk, s, errno);
    // Nobody would see a request of a retired queue served.
    if action == IoAction::Report || is_retired {
        return Some(Ending::io_error(errno));
    }
    if !s.counts_as_stalled {
        s.counts_as_stalled = true;
        queue.disk.outage.begin(|| served(&queue.disk));
    }
    let now = now_ns();
    if s.stamps.fetched == 0 {
        s.stamps.fetched = now;
        s.stamps.admitted = now;
        s.stamps.submitted = now;
    }
    send_event(&queue.disk, s, action, errno);
    let consequence = match action {
        IoAction::Stop => {
            "; this request and all later ones wait for 'ringdisk resume' (rerror, werror)"
        }
        _ => "; ringdisk tries it again until it succeeds (rerror, werror)",
    };
    log(&queue.disk, s, errno, consequence);
    let retry = mapped::stalled(queue, id.slot, disk, retry);
    let s = queue.slots.get(id.slot);
    s.state = RequestState::Stalled(retry);
    let stalled = &mut disk.stalled;
    stalled.waiting.push_back(id);
    if action == IoAction::Stop {
        queue.disk.admission.set_stopped(true);
        stalled.at = RetryTime::OnResume;
    } else if stalled.waiting.len() == 1 {
        stalled.pause_ns = (stalled.pause_ns * 2).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
        let at = now + stalled.pause_ns;
        stalled.at = RetryTime::At(at);
        timer.set(now, at);
    }
    None
}

/// Says that a request failed, and that the guest is told.
#[cold]
pub(crate) fn report(disk: &Disk, slot: &Slot, ending: Ending) {
    let errno = -ending.result;
    if ending.status != Status::Unsupported {
        send_event(disk, slot, IoAction::Report, errno);
    }
    log(disk, slot, errno, "");
}

/// A request that was stalled has ended.
#[cold]
pub(crate) fn stalled_ended(disk: &mut ThreadDisk, timer: &mut Timer, status: Status) {
    let ended = disk.disk.outage.end(status == Status::Ok);
    if status == Status::Ok {
        let stalled = &mut disk.stalled;
        stalled.pause_ns = 0;
        if !stalled.waiting.is_empty() && stalled.at != RetryTime::OnResume {
            let now = now_ns();
            stalled.at = RetryTime::At(now);
            timer.set(now, now);
        }
    }
    let disk = &disk.disk;
    if let Some(resumed) = ended
        && !disk.is_stopped()
    {
        let (name, seconds) = (&disk.name, resumed.lasted.as_secs_f32());
        match resumed.given_up {
            0 => info!(
                "disk {name}: storage works again, after {seconds:.1} s; no request is stalled any more"
            ),
            n => warn!(
                "disk {name}: no request is stalled any more, after {seconds:.1} s: {n} requests ended with an error"
            ),
        }
        disk.send_event(&IoEvent::Resumed(resumed));
    }
}

/// Requests of a disk that have been served.
pub(crate) fn served(disk: &Disk) -> u64 {
    let stats = disk.counts();
    let kinds = stats.kinds();
    kinds.iter().map(|(_, kind)| kind.operations).sum()
}

fn action_for(disk: &Disk, slot: &Slot, errno: i32) -> IoAction {
    let policy = match slot.request {
        Request::Read { .. } => disk.options.rerror,
        _ => disk.options.werror,
    };
    // The next fdatasync would lie, and there is none that would tell the truth.
    if slot.is_syncing() && disk.has_lost(errno) {
        return IoAction::Report;
    }
    action(policy, errno)
}

fn send_event(disk: &Disk, slot: &Slot, action: IoAction, errno: i32) {
    disk.failed(|left_out| {
        IoEvent::Failed(IoFailure {
            request: slot.requested(),
            action,
            errno,
            left_out,
        })
    });
}

fn log(disk: &Disk, slot: &Slot, errno: i32, consequence: &str) {
    disk.storage_errors.log(|left_out| {
        let cause = match errno {
            _ if slot.is_syncing() && disk.has_lost(errno) => lost(errno).to_string(),
            0 => "the file ends here: it was truncated while ringdisk served it".to_owned(),
            e => explain(&std::io::Error::from_raw_os_error(e), ""),
        };
        let place = match slot.state {
            // It has no place in the file yet.
            RequestState::Mapping => String::new(),
            _ => format!(" at {} of its file, with {} bytes left", slot.at, slot.left),
        };
        error!(
            "disk {}: {} failed{place}: {cause}{consequence}{left_out}",
            disk.name, slot.request
        );
    });
}

/// What is to be done about a failure.
fn action(policy: OnError, errno: i32) -> IoAction {
    match policy {
        OnError::Report => IoAction::Report,
        OnError::Enospc if block::is_no_space(errno) => IoAction::Retry,
        OnError::Enospc => IoAction::Report,
        OnError::Stop => IoAction::Stop,
        OnError::Retry => IoAction::Retry,
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn the_action_depends_on_policy_and_error() {
        let (nospace, broken) = (Errno::NOSPC.raw_os_error(), Errno::IO.raw_os_error());
        for (policy, no_space, other) in [
            (OnError::Report, IoAction::Report, IoAction::Report),
            (OnError::Enospc, IoAction::Retry, IoAction::Report),
            (OnError::Stop, IoAction::Stop, IoAction::Stop),
            (OnError::Retry, IoAction::Retry, IoAction::Retry),
        ] {
            let quota = Errno::DQUOT.raw_os_error();
            assert_eq!(action(policy, nospace), no_space, "{policy}");
            assert_eq!(action(policy, quota), no_space, "{policy}");
            assert_eq!(action(policy, broken), other, "{policy}");
        }
    }
}
