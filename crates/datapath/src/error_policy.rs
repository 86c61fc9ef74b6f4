//! Requests that storage failed to serve, and what is done about them: `report`, `enospc`, `stop`, `retry`.
//!
//! A request that is not reported is *stalled*: it keeps its slot, with where it was, and waits in the list
//! that its thread keeps for the disk. It goes on from there when its pause is over, as soon as another one
//! of the disk has got through on this thread, or when the operator says so. The pause grows as long as
//! nothing gets through.
//!
//! With `stop`, what the guest sends after a failure waits as well: reads, writes and discards in
//! [admit](crate::admit), as behind a limit. A flush makes durable what has completed, and may go.
//!
//! A stalled request is in the way of nobody: it gives its bounce buffer back, and when its queue stops,
//! it is left. Where the front-end has what is in flight written down, it is done again by whoever takes up
//! the ring next; where not, the guest is told of the error, because nobody else would ever answer it.
//!
//! What the kernel still works on cannot be left: it would write to the guest's memory, or an old write
//! would land on a newer one. A queue that stops waits for it, but not for ever. Then it is *abandoned*: its
//! memory stays mapped, and no queue of the disk starts anew in this process before it is done. The lock
//! on the file keeps other processes away for just as long.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use block::{Engine, OnError, Request, explain};
use guest::StoppedRing;
use guest::blk::Status;
use rustix::io::Errno;
use tracing::{error, info, warn};

use crate::blocking_pool::RequestEnd;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::flush_coalescer::lost;
use crate::queue::QueueState;
use crate::report::{IoAction, IoEvent, IoFailure, IoResumed};
use crate::slot::{Redo, Slot};
use crate::thread_disk::ThreadDisk;
use crate::timer::Timer;
use crate::worker::Worker;
use crate::zeroes;

/// First pause before a request is tried again. It doubles with each time that nothing gets through, up to the last.
const PAUSE_MIN_NS: u64 = 100_000_000;
const PAUSE_MAX_NS: u64 = 5_000_000_000;

/// Pause where an operation must end first, so that there is room for another.
const NO_ROOM_NS: u64 = 1_000_000;

/// Not before the operator says so.
const NEVER: u64 = u64::MAX;

/// The stalled requests of a disk on one thread.
#[derive(Default)]
pub(crate) struct Stalled {
    /// Those that wait, in the order in which they failed.
    pub waiting: VecDeque<(usize, u16)>,
    /// When they are tried again, in nanoseconds of the monotonic clock; 0 if none waits.
    at: u64,
    pause: u64,
}

/// The outage of a disk, as all threads share it.
#[derive(Default)]
pub(crate) struct Outage {
    /// Requests that are stalled, those included that are being tried again.
    stalled: AtomicUsize,
    /// Queues with operations that storage has not answered, and that nobody waits for.
    pub abandoned: AtomicUsize,
    progress: Mutex<OutageProgress>,
}

#[derive(Default)]
struct OutageProgress {
    /// When the first request failed.
    since: Option<Instant>,
    /// Requests of which the guest was told.
    given_up: u64,
    /// If the last ones were left to whoever takes up their rings next: since when it lasts, and how many requests had been
    /// served by then. It goes on if none has been since.
    left: Option<(Instant, u64)>,
}

impl Outage {
    /// Requests that are stalled.
    pub fn stalled(&self) -> usize {
        self.stalled.load(Ordering::Relaxed)
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, OutageProgress> {
        self.progress.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// One is stalled; `served` says how many requests of the disk have been served.
    fn begin(&self, served: impl FnOnce() -> u64) {
        if self.stalled.fetch_add(1, Ordering::Relaxed) == 0 {
            let mut progress = self.progress();
            let left = progress
                .left
                .take()
                .filter(|(_, before)| *before == served());
            let since = left.map_or_else(Instant::now, |(since, _)| since);
            progress.since.get_or_insert(since);
        }
    }

    /// One is not stalled any more, because it was served, or its guest told. If it was the last one, says how the outage was.
    fn end(&self, is_served: bool) -> Option<IoResumed> {
        let mut progress = self.progress();
        progress.given_up += u64::from(!is_served);
        match self.stalled.fetch_sub(1, Ordering::Relaxed) {
            1 => Some(IoResumed {
                lasted: progress.since.take()?.elapsed(),
                given_up: std::mem::take(&mut progress.given_up),
            }),
            _ => None,
        }
    }

    /// One is left to whoever takes up its ring next.
    fn leave(&self, served: impl FnOnce() -> u64) {
        let mut progress = self.progress();
        if self.stalled.fetch_sub(1, Ordering::Relaxed) == 1 {
            progress.given_up = 0;
            progress.left = progress.since.take().map(|since| (since, served()));
        }
    }
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

impl Disk {
    /// Requests that have been served.
    fn served(&self) -> u64 {
        let stats = self.stats();
        let kinds = [
            stats.read,
            stats.write,
            stats.flush,
            stats.discard,
            stats.write_zeroes,
        ];
        kinds.iter().map(|kind| kind.operations).sum()
    }

    fn action(&self, slot: &Slot, errno: i32) -> IoAction {
        let policy = match slot.request {
            Request::Read { .. } => self.options.rerror,
            _ => self.options.werror,
        };
        match action(policy, errno) {
            // The next fdatasync would lie, and there is none that would tell the truth.
            _ if slot.is_syncing && self.has_lost(errno) => IoAction::Report,
            action => action,
        }
    }

    /// Requests that storage failed to serve, and that wait for it to work again.
    pub fn stalled(&self) -> u64 {
        self.outage.stalled() as u64
    }

    /// Whether what the guest sends waits for the operator.
    pub fn is_stopped(&self) -> bool {
        self.admission.is_stopped()
    }

    /// The last operation of an abandoned queue has ended.
    pub(crate) fn answered(&self) {
        if self.outage.abandoned.fetch_sub(1, Ordering::Relaxed) == 1 {
            info!(
                "disk {}: its storage has answered at last; it can be served again",
                self.name
            );
        }
    }

    /// Whether storage has not answered operations of queues that have stopped.
    pub fn is_abandoned(&self) -> bool {
        self.outage.abandoned.load(Ordering::Relaxed) > 0
    }
}

/// Says that a request failed, and that the guest is told.
#[cold]
pub(crate) fn report(disk: &Disk, slot: &Slot, status: Status, errno: i32) {
    if status == Status::IoError {
        tell(disk, slot, IoAction::Report, errno);
    }
    log(disk, slot, errno, "");
}

fn tell(disk: &Disk, slot: &Slot, action: IoAction, errno: i32) {
    disk.failed(|left_out| {
        IoEvent::Failed(IoFailure {
            request: zeroes::asked(slot),
            action,
            errno,
            left_out,
        })
    });
}

fn log(disk: &Disk, slot: &Slot, errno: i32, then: &str) {
    disk.errors.log(|left_out| {
        let cause = match errno {
            _ if slot.is_syncing && disk.has_lost(errno) => lost(errno).to_string(),
            0 => "the file ends here, it was cut short while it was served".to_owned(),
            e => explain(&std::io::Error::from_raw_os_error(e), ""),
        };
        error!(
            "disk {}: {:?} failed at {} of its file, with {} bytes to go: {cause}{then}{left_out}",
            disk.name, slot.request, slot.at, slot.left
        );
    });
}

/// A stalled request is done, with this status.
#[cold]
pub(crate) fn stalled_ended(
    disk: &Disk,
    thread_disk: Option<&mut ThreadDisk>,
    timer: &mut Timer,
    status: Status,
) {
    let ended = disk.outage.end(status == Status::Ok);
    if let Some(thread_disk) = thread_disk
        && status == Status::Ok
    {
        let stalled = &mut thread_disk.stalled;
        stalled.pause = 0;
        if !stalled.waiting.is_empty() && stalled.at != NEVER {
            stalled.at = now_ns();
            timer.set(stalled.at, stalled.at);
        }
    }
    if let Some(resumed) = ended
        && !disk.is_stopped()
    {
        let (name, seconds) = (&disk.name, resumed.lasted.as_secs_f32());
        match resumed.given_up {
            0 => info!(
                "disk {name}: storage works again, after {seconds:.1} s; nothing waits for it any more"
            ),
            n => warn!(
                "disk {name}: nothing waits for its storage any more, after {seconds:.1} s: {n} requests were given up, and \
                 the guest was told of errors"
            ),
        }
        disk.tell(&IoEvent::Resumed(resumed));
    }
}

impl<E: Engine> Worker<E> {
    /// Storage failed to serve a request, with this errno, or 0 if its file has ended.
    #[cold]
    pub fn fail(&mut self, number: usize, slot: u16, errno: i32, redo: Redo) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let is_retired = queue.is_retired();
        let s = queue.slots.get(slot);
        let action = queue.disk.action(s, errno);
        // Of a retired queue, nobody would see it served.
        if action == IoAction::Report || is_retired {
            return self.finish(number, slot, Status::IoError, -errno);
        }
        s.redo = redo;
        if !s.stalled {
            s.stalled = true;
            queue.disk.outage.begin(|| queue.disk.served());
        }
        let now = now_ns();
        if s.stamps.fetched == 0 {
            s.stamps.fetched = now;
            s.stamps.admitted = now;
            s.stamps.submitted = now;
        }
        tell(&queue.disk, s, action, errno);
        let then = match action {
            IoAction::Stop => {
                "; this and all that follows waits until 'ringdisk resume' (rerror, werror)"
            }
            _ => "; it is tried again until it succeeds (rerror, werror)",
        };
        log(&queue.disk, s, errno, then);
        let (disk, place) = (queue.disk.clone(), queue.thread_disk);
        self.release_bounce(number, slot);
        if let Some(thread_disk) = &mut self.disks[place] {
            let stalled = &mut thread_disk.stalled;
            stalled.waiting.push_back((number, slot));
            match action {
                IoAction::Stop => {
                    disk.admission.set_stopped(true);
                    stalled.at = NEVER;
                }
                _ if stalled.waiting.len() == 1 => {
                    stalled.pause = (stalled.pause * 2).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
                    stalled.at = now + stalled.pause;
                    self.timer.set(now, stalled.at);
                }
                _ => {}
            }
        }
        // Who waits for the disk to have nothing under way would wait for long.
        self.cancel_pauses(&disk);
        if self.queues[number]
            .as_ref()
            .is_some_and(|q| q.is_stopping())
        {
            self.leave_stalled(number);
        }
    }

    /// Tries again what has waited for long enough, and gives up the queues that have.
    #[cold]
    pub fn handle_timer(&mut self) {
        let now = now_ns();
        for place in 0..self.disks.len() {
            match self.disks[place].as_ref().map_or(0, |l| l.stalled.at) {
                0 | NEVER => {}
                at if at > now => self.timer.set(now, at),
                _ => self.try_again(place, now),
            }
        }
        for number in 0..self.queues.len() {
            match self.queues[number].as_ref().map(|q| &q.state) {
                Some(QueueState::Stopping { until, .. }) if *until > now => {
                    self.timer.set(now, *until)
                }
                Some(QueueState::Stopping { .. }) => self.abandon_queue(number),
                _ => {}
            }
        }
    }

    fn try_again(&mut self, place: usize, now: u64) {
        let Some(thread_disk) = &mut self.disks[place] else {
            return;
        };
        thread_disk.stalled.at = 0;
        for _ in 0..thread_disk.stalled.waiting.len() {
            let Some(thread_disk) = &mut self.disks[place] else {
                return;
            };
            if self.engine.room() == 0 {
                thread_disk.stalled.at = now + NO_ROOM_NS;
                return self.timer.set(now, thread_disk.stalled.at);
            }
            if let Some((number, slot)) = thread_disk.stalled.waiting.pop_front() {
                self.redo(number, slot);
            }
        }
    }

    fn redo(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let s = queue.slots.get(slot);
        s.retries = 0;
        match s.redo {
            _ if s.is_syncing => self.sync_request(number, slot),
            Redo::Operation => self.submit(number, slot),
            Redo::MappedRequest => self.step(number, slot),
            Redo::Commit => self.commit(number, slot),
        }
    }

    /// The operator has the disk go on: what is stalled is tried again at once, or, with `report`, the guest is
    /// told of the errors.
    pub fn resume(&mut self, disk: &Arc<Disk>, report: bool) {
        let now = now_ns();
        for number in 0..self.queues.len() {
            if let Some(queue) = &mut self.queues[number]
                && Arc::ptr_eq(&queue.disk, disk)
            {
                queue.held.look_again();
            }
        }
        let same = |l: &Option<ThreadDisk>| l.as_ref().is_some_and(|l| Arc::ptr_eq(&l.disk, disk));
        let Some(place) = self.disks.iter().position(same) else {
            return;
        };
        if !report {
            return self.try_again(place, now);
        }
        let waiting = match &mut self.disks[place] {
            Some(thread_disk) => std::mem::take(&mut thread_disk.stalled.waiting),
            None => return,
        };
        for (number, slot) in waiting {
            self.finish(number, slot, Status::IoError, -Errno::IO.raw_os_error());
        }
    }

    /// Leaves the stalled requests of a queue that stops.
    pub fn leave_stalled(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let tracked = queue.ring.is_tracked();
        let Some(thread_disk) = &mut self.disks[queue.thread_disk] else {
            return;
        };
        let mut left = Vec::new();
        thread_disk.stalled.waiting.retain(|&(its_number, slot)| {
            let stays = its_number != number;
            left.extend((!stays).then_some(slot));
            stays
        });
        if queue.disk.is_stopped() {
            queue.held.drain(&mut left);
        }
        if left.is_empty() {
            return;
        }
        let name = &queue.disk.name;
        match tracked {
            true => info!(
                "disk {name}: queue {} stops with {} requests that storage failed to serve; they are done \
                 again by whoever serves it next",
                queue.ring.number(),
                left.len()
            ),
            false => warn!(
                "disk {name}: queue {} stops with {} requests that storage failed to serve; the guest is told \
                 of the errors, since its front-end keeps no record of what is in flight",
                queue.ring.number(),
                left.len()
            ),
        }
        for slot in left {
            match tracked {
                true if self.start_abort(number, slot, RequestEnd::Leave) => {}
                true => self.leave(number, slot),
                false => {
                    self.finish(number, slot, Status::IoError, -Errno::IO.raw_os_error());
                }
            }
        }
        self.finish_stop(number);
    }

    /// Forgets a request, whose guest hears nothing of it from here.
    pub fn leave(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        queue.release_piece(slot, &mut self.disks, &mut self.cow_buffers);
        if std::mem::take(&mut queue.slots.get(slot).stalled) {
            queue.disk.outage.leave(|| queue.disk.served());
        }
        queue.slots.give_back(slot);
        queue.unfinished = true;
    }

    /// Lets go of a queue whose storage does not answer: whoever waits for it to stop goes on.
    fn abandon_queue(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let under_way = queue.slots.taken();
        queue.held.drop_all(&mut queue.slots);
        let QueueState::Stopping { reply, .. } =
            std::mem::replace(&mut queue.state, QueueState::Abandoned)
        else {
            return;
        };
        queue.disk.outage.abandoned.fetch_add(1, Ordering::Relaxed);
        error!(
            "disk {}: its storage does not answer: queue {} is left with {under_way} requests under way{}; \
             no front-end is served before they have ended",
            queue.disk.name,
            queue.ring.number(),
            match queue.ring.is_tracked() {
                true => ", which are done again when it is served anew",
                false => ", which the guest will not hear of",
            },
        );
        let base = queue.ring.base();
        self.notify_queue(number);
        let _ = reply.send(StoppedRing {
            base,
            unfinished: true,
        });
        // Some were only waiting for a limit.
        self.finish_stop(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_depends_on_the_policy_and_the_error() {
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

    #[test]
    fn the_last_one_ends_the_outage() {
        let outage = Outage::default();
        outage.begin(|| 0);
        outage.begin(|| 0);
        assert_eq!((outage.stalled(), outage.end(false)), (2, None));
        assert_eq!(outage.end(true).unwrap().given_up, 1);
        assert_eq!(outage.stalled(), 0);
        outage.begin(|| 0);
        assert_eq!(outage.end(true).unwrap().given_up, 0);
    }

    /// As long as nothing is served between two rings, it is one outage.
    #[test]
    fn what_is_left_goes_on_waiting() {
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
        for (served, is_in_service) in [(7, true), (8, false)] {
            let outage = Outage::default();
            outage.begin(|| 7);
            std::thread::sleep(PAUSE);
            outage.leave(|| 7);
            let between = Instant::now();
            outage.begin(|| served);
            let lasted = outage.end(true).unwrap().lasted;
            assert_eq!(lasted > between.elapsed(), is_in_service, "{lasted:?}");
        }
    }
}
