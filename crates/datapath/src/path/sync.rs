//! Stage 8: requests that must be durable before they complete. Flushes, and, where the guest has no write cache, whatever
//! changed the disk and is not on stable storage by itself.
//!
//! They wait in the order in which they came, and one fdatasync serves all that came before it began: see
//! [`FlushCoalescer`](crate::disk::flush_coalescer::FlushCoalescer) for why that is enough.

use std::sync::Arc;

use block::Request;

use super::map_jobs;
use super::next::{Next, SyncResult};
use crate::disk::flush_coalescer::{SyncEnd, SyncTurn};
use crate::queue::Queue;
use crate::queue::slot::RequestState;
use crate::request::{Ending, RequestId, Retry};
use crate::thread_disk::{SyncWaiter, ThreadDisk};
use crate::wake::Wake;

/// Whether a request whose bytes were moved must be durable before it completes.
#[inline(always)]
pub(crate) fn is_needed(queue: &mut Queue, slot: u16) -> bool {
    let s = queue.slots.get(slot);
    match s.request {
        Request::Write { .. } | Request::Discard { .. } | Request::WriteZeroes { .. } => {
            // A write that is stable by itself may be to a cluster that no table in the file leads to yet.
            queue.disk.completes_when_durable()
                && (s.needs_sync || queue.image.chain().is_some_and(|c| c.needs_flush()))
                // Whatever the cache mode: it may rest on a change that a kill would take back.
                || queue.image.chain().is_some_and(|c| c.must_flush())
        }
        Request::Read { .. } | Request::Flush | Request::GetId => false,
    }
}

/// Has a request wait for an fdatasync that covers all that has completed by now. Returns whether none is in progress or
/// waited for: if others wait, an fdatasync is in progress whose end begins the next one.
pub(crate) fn join(queue: &mut Queue, id: RequestId, disk: &mut ThreadDisk) -> bool {
    queue.slots.get(id.slot).state = RequestState::Syncing;
    disk.sync_waiters.push_back(SyncWaiter {
        number: disk.coalescer().ask(),
        request: id,
    });
    disk.sync_waiters.len() == 1
}

/// What is done for the requests of a disk that wait for an fdatasync.
pub(crate) enum SyncStart {
    /// Nothing: none waits, or the thread is woken when an fdatasync of another thread has ended.
    Nothing,
    /// The engine has no room. An operation is in flight then, and its completion tries again.
    Postponed,
    /// This request leads the fdatasync.
    Lead(RequestId),
    /// They are served: no fdatasync can help any more.
    Served(SyncEnd),
}

/// Begins an fdatasync for the requests of a disk that wait for one.
pub(crate) fn begin(disk: &mut ThreadDisk, room: usize, wake: &Arc<Wake>) -> SyncStart {
    let Some(first) = disk.sync_waiters.front() else {
        return SyncStart::Nothing;
    };
    if room == 0 {
        return SyncStart::Postponed;
    }
    match disk.coalescer().take_turn(wake) {
        SyncTurn::Begin => {
            let leader = first.request;
            disk.is_syncing = true;
            SyncStart::Lead(leader)
        }
        SyncTurn::Wait => SyncStart::Nothing,
        SyncTurn::Lost(result) => SyncStart::Served(SyncEnd {
            number: u64::MAX,
            result,
        }),
    }
}

/// What the leader of an fdatasync does to make the disk durable.
pub(crate) fn lead(queue: &mut Queue, slot: u16, disk: &ThreadDisk) -> Next {
    let Some(chain) = queue.image.chain() else {
        return Next::Submit;
    };
    if chain.needs_flush() {
        let (chain, disk) = (chain.clone(), queue.disk.clone());
        return Next::StartJob(Box::new(move || map_jobs::flush(&chain, &disk)));
    }
    if !queue.disk.options.cache.flushes() {
        return Next::Synced(SyncResult::File(0));
    }
    queue.mapped.get_or_add(slot).file = disk.written_file();
    Next::Submit
}

/// The fdatasync that this thread has begun for a disk has ended.
pub(crate) fn end(disk: &mut ThreadDisk, result: SyncResult) -> SyncEnd {
    disk.is_syncing = false;
    match result {
        SyncResult::File(errno) => disk.coalescer().end(errno),
        SyncResult::Image { errno, lost } => disk.coalescer().end_with(errno, lost),
    }
}

/// The fdatasync that ended last, if requests of the disk wait for one of another thread.
pub(crate) fn ended_elsewhere(disk: &ThreadDisk) -> Option<SyncEnd> {
    let waits = !disk.sync_waiters.is_empty() && !disk.is_syncing;
    waits.then(|| disk.coalescer().ended())
}

/// Takes the next request that an fdatasync serves, and says what comes next for it.
pub(crate) fn next_served(disk: &mut ThreadDisk, ended: SyncEnd) -> Option<(RequestId, Next)> {
    let first = disk.sync_waiters.front()?;
    if first.number > ended.number {
        return None;
    }
    let request = first.request;
    disk.sync_waiters.pop_front();
    let next = match ended.result {
        0 => Next::Finish(Ending::OK),
        errno => Next::Fail {
            errno,
            retry: Retry::Sync,
        },
    };
    Some((request, next))
}
