//! Which fdatasync serves which requests. At most one `fdatasync` of a file is in progress at a time, and it serves all
//! requests, on every thread, that asked before it began.
//!
//! fdatasyncs are numbered as they begin. A request that asks after number *n* began, and before the next one, is given
//! *n* + 1. The end of any fdatasync with that number or a later one serves it: each of these began after the request
//! asked, and so after every write that had completed by then. That is all of invariant 4 in ARCHITECTURE.md: a request
//! asks only when the writes that it covers have completed. These are the request itself, if it is a write, or all
//! writes that the guest had seen completed when it sent its flush.
//!
//! One at a time is not only cheaper. If a page could not be written, Linux reports that once for each open file
//! description, to the fdatasync that looks first. With two in progress, the other would report success, for a flush
//! that covers the very write that was lost.
//!
//! After such a failure the page cache marks the page clean, and a later fdatasync succeeds without having written it.
//! So the writes to a file in the page cache count as lost once its fdatasync has failed: from then on nothing of it is
//! reported durable, as in QEMU. With O_DIRECT the kernel keeps nothing that could be lost this way, and the next
//! fdatasync tells the truth.
//!
//! A mapped image flushes at other times as well, when it has no room for more changes. Through the page cache, all
//! fdatasyncs of such a file are the image's, one at a time, and the image says whether writes are lost.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::io::Errno;

use crate::wake::Wake;

/// The fdatasyncs of one file. The lock is held for a few instructions, and is taken only for an fdatasync, which takes
/// a thousand times as long.
pub(crate) struct FlushCoalescer {
    state: Mutex<CoalescerState>,
    end: Condvar,
    /// The page cache forgets writes that do not reach the storage.
    cached: bool,
}

#[derive(Default)]
struct CoalescerState {
    /// The number of the last one that began.
    begun: u64,
    /// It is in progress.
    is_running: bool,
    /// The result of the last one that ended: 0 or an errno.
    result: i32,
    /// The errno with which the page cache lost writes.
    lost: Option<i32>,
    /// Threads to be woken when the one in progress has ended.
    waiting: VecDeque<Arc<Wake>>,
}

/// What a thread does for its requests that asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncTurn {
    /// The caller does an fdatasync, and then calls [`FlushCoalescer::end`].
    Begin,
    /// Another thread's is in progress. The caller's thread is woken when it has ended.
    Wait,
    /// Nothing: the page cache has lost writes, with this errno.
    Lost(i32),
}

/// The last fdatasync that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncEnd {
    /// Requests that were given this number or a lower one are served.
    pub number: u64,
    /// 0 or an errno.
    pub result: i32,
}

impl FlushCoalescer {
    /// For a file that is read and written through the page cache, or past it.
    pub fn new(cached: bool) -> Self {
        Self {
            state: Mutex::default(),
            end: Condvar::new(),
            cached,
        }
    }

    /// The number of the fdatasync that serves a request that asks now.
    pub fn ask(&self) -> u64 {
        self.state().begun + 1
    }

    /// What a thread does whose requests have asked.
    pub fn take_turn(&self, wake: &Arc<Wake>) -> SyncTurn {
        let mut state = self.state();
        match state.lost {
            Some(errno) => SyncTurn::Lost(errno),
            None if state.is_running => {
                if !state.waiting.iter().any(|w| Arc::ptr_eq(w, wake)) {
                    state.waiting.push_back(wake.clone());
                }
                SyncTurn::Wait
            }
            None => {
                state.begin();
                SyncTurn::Begin
            }
        }
    }

    /// The last fdatasync that has ended.
    pub fn ended(&self) -> SyncEnd {
        self.state().ended()
    }

    /// The caller's fdatasync has ended, with 0 or an errno.
    pub fn end(&self, result: i32) -> SyncEnd {
        let refused = [Errno::INTR, Errno::AGAIN].map(Errno::raw_os_error);
        let lost = result != 0 && self.cached && !refused.contains(&result);
        self.end_with(result, lost)
    }

    /// The same, if the caller knows whether writes are lost.
    pub fn end_with(&self, result: i32, lost: bool) -> SyncEnd {
        let (ended, waiting) = {
            let mut state = self.state();
            debug_assert!(state.is_running);
            state.is_running = false;
            state.result = result;
            if lost {
                state.lost.get_or_insert(result);
            }
            (state.ended(), state.waiting.len())
        };
        self.end.notify_all();
        // Only as many as there were: a thread that is woken may wait for the next one at once.
        for _ in 0..waiting {
            let next = self.state().waiting.pop_front();
            if let Some(wake) = next {
                wake.wake();
            }
        }
        ended
    }

    /// The errno with which the page cache lost writes.
    pub fn lost(&self) -> Option<i32> {
        self.state().lost
    }

    /// Asks, and blocks until an fdatasync has served the caller, by `fdatasync` here or on another thread.
    pub fn sync(&self, fdatasync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state();
        let number = state.begun + 1;
        loop {
            if let Some(errno) = state.lost {
                return Err(lost(errno));
            }
            let ended = state.ended();
            if ended.number >= number {
                return match ended.result {
                    0 => Ok(()),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                };
            }
            if !state.is_running {
                break;
            }
            state = self.end.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        state.begin();
        drop(state);
        let result = fdatasync();
        let errno = |e: &io::Error| e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
        self.end(result.as_ref().map_or_else(errno, |()| 0));
        result
    }

    fn state(&self) -> MutexGuard<'_, CoalescerState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl CoalescerState {
    fn begin(&mut self) {
        self.is_running = true;
        self.begun += 1;
    }

    fn ended(&self) -> SyncEnd {
        SyncEnd {
            number: self.begun - u64::from(self.is_running),
            result: self.result,
        }
    }
}

/// The error of every flush after the page cache has lost writes.
pub(crate) fn lost(errno: i32) -> io::Error {
    io::Error::other(format!(
        "an fdatasync failed ({}), and writes that were in the page cache are lost (PAGECACHE_LOST); \
         every flush fails until the disk is served again: repair the storage, check the guest's file \
         systems, and restart ringdisk",
        io::Error::from_raw_os_error(errno)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_during_an_fdatasync_is_served_by_the_next() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        let early = coalescer.ask();
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        let late = coalescer.ask();
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Wait);
        assert!(!wake.is_pending());
        let ended = coalescer.end(0);
        assert!(wake.is_pending() && early <= ended.number && ended.number < late);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert!(late <= coalescer.end(0).number);
    }

    #[test]
    fn lost_writes_stay_lost() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        coalescer.end(5);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Lost(5));
        let error = coalescer.sync(|| Ok(())).unwrap_err();
        assert!(error.to_string().contains("PAGECACHE_LOST"), "{error}");
    }

    #[test]
    fn an_image_decides_whether_writes_are_lost() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        // A table for which there was no room.
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end_with(28, false).result, 28);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        coalescer.end_with(5, true);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Lost(5));
    }

    #[test]
    fn with_o_direct_the_next_fdatasync_counts() {
        let (coalescer, wake) = (FlushCoalescer::new(false), Arc::new(Wake::new().unwrap()));
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end(5).result, 5);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end(0).result, 0);
        coalescer.sync(|| Ok(())).unwrap();
    }

    /// A blocking caller waits for the end of another fdatasync, and is then served by one that began later.
    #[test]
    fn a_blocking_caller_waits_for_its_turn() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| coalescer.sync(|| Ok(())));
            let ended = coalescer.end(0);
            assert_eq!(ended.number, 1);
            blocked.join().unwrap().unwrap();
        });
        // One of its own, or, if it came late, the first that began after it asked.
        assert_eq!(coalescer.ended().number, 2);
    }
}
