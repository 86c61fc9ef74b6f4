//! Who makes a file durable, and whom that serves: at most one `fdatasync` of a file is under way at
//! a time, and serves all who had asked before it began, on every thread.
//!
//! fdatasyncs are numbered as they begin. Who asks while the last one that began has number *n* is
//! told *n* + 1, and is served by the end of any fdatasync with that number or a later one: each of
//! these began after the question, and so after every write that had completed by then. That is all
//! of invariant 4 in ARCHITECTURE.md: a request asks only once what it covers has completed, which is
//! the write itself, or all that the guest had seen completed when it sent its flush.
//!
//! One at a time is not only cheaper. Linux tells of a page that could not be written once for each
//! open file description, to whichever fdatasync looks first. With two under way the other would
//! report success, for a flush that covers the very write that was lost.
//!
//! After such a failure the page cache calls the page clean, and a later fdatasync succeeds without
//! having written it. So a file in the page cache whose fdatasync failed once is lost: from then on
//! nothing of it is reported durable, as in QEMU. With O_DIRECT nothing is kept that could be
//! forgotten, and the next fdatasync tells the truth.
//!
//! An image that goes by tables flushes in between as well, for want of room for more changes. Through the
//! page cache, all fdatasyncs of such a file are the image's, one at a time, and it says what is lost.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::io::Errno;

use crate::wake::Wake;

/// The fdatasyncs of one file. The lock is held for a few instructions, and only where there is
/// something to be made durable, which takes a thousand times as long.
pub(crate) struct FlushCoalescer {
    state: Mutex<CoalescerState>,
    end: Condvar,
    /// What fails to reach the storage is forgotten by the page cache.
    cached: bool,
}

#[derive(Default)]
struct CoalescerState {
    /// How many have begun: the number of the last one.
    begun: u64,
    /// It is under way.
    is_running: bool,
    /// What the last one that ended said: 0 or an errno.
    result: i32,
    /// The errno with which the page cache lost something.
    lost: Option<i32>,
    /// Threads that want to know when the one under way has ended.
    waiting: VecDeque<Arc<Wake>>,
}

/// What is to be done for those who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncTurn {
    /// The caller does an fdatasync, and then says so with [`FlushCoalescer::end`].
    Begin,
    /// Somebody else's is under way; the caller's thread is woken when it has ended.
    Wait,
    /// Nothing: the page cache has lost something, with this errno.
    Lost(i32),
}

/// The last fdatasync that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncEnd {
    /// Those who were told this number or a lower one are served.
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

    /// The number that serves whoever asks now.
    pub fn ask(&self) -> u64 {
        self.state().begun + 1
    }

    /// What a thread in which somebody has asked is to do.
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

    /// The same, where it is known whether anything is lost.
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
        // As many as there were: who is woken may wait for the next one at once.
        for _ in 0..waiting {
            let next = self.state().waiting.pop_front();
            if let Some(wake) = next {
                wake.wake();
            }
        }
        ended
    }

    /// The errno with which the page cache lost something.
    pub fn lost(&self) -> Option<i32> {
        self.state().lost
    }

    /// Asks, and blocks until it is done, by `fdatasync` here or by somebody else's.
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

/// Says why nothing is durable any more.
pub(crate) fn lost(errno: i32) -> io::Error {
    io::Error::other(format!(
        "an fdatasync failed ({}), and what the page cache had to write then is lost for good \
         (PAGECACHE_LOST); no flush succeeds until the disk is served anew: repair the storage, check \
         the guest's file systems, and restart",
        io::Error::from_raw_os_error(errno)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_while_one_is_under_way_is_served_by_the_next() {
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
    fn what_the_page_cache_lost_stays_lost() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        coalescer.end(5);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Lost(5));
        let error = coalescer.sync(|| Ok(())).unwrap_err();
        assert!(error.to_string().contains("PAGECACHE_LOST"), "{error}");
    }

    #[test]
    fn an_image_says_what_is_lost() {
        let (coalescer, wake) = (FlushCoalescer::new(true), Arc::new(Wake::new().unwrap()));
        // A table for which there was no room.
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end_with(28, false).result, 28);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        coalescer.end_with(5, true);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Lost(5));
    }

    #[test]
    fn past_the_page_cache_the_next_one_counts() {
        let (coalescer, wake) = (FlushCoalescer::new(false), Arc::new(Wake::new().unwrap()));
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end(5).result, 5);
        assert_eq!(coalescer.take_turn(&wake), SyncTurn::Begin);
        assert_eq!(coalescer.end(0).result, 0);
        coalescer.sync(|| Ok(())).unwrap();
    }

    /// Who blocks waits for the end of another's, and is then served by one that began later.
    #[test]
    fn a_blocking_one_waits_its_turn() {
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
