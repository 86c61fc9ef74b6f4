//! The times in which storage fails to serve a disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use crate::report::IoResumed;

/// The outage of a disk, on all threads.
#[derive(Default)]
pub(crate) struct Outage {
    /// Requests that are stalled, those included that are being tried again.
    stalled: AtomicUsize,
    /// Queues that were abandoned, with operations that storage has not answered.
    pub abandoned: AtomicUsize,
    progress: Mutex<OutageProgress>,
}

#[derive(Default)]
struct OutageProgress {
    /// When the first request failed.
    since: Option<Instant>,
    /// Stalled requests that ended with an error.
    given_up: u64,
    /// Set when the last stalled requests were left for the next server of their rings: the time of the first failure, and
    /// how many requests had been served when they were left. If none has been served since, the outage continues.
    left: Option<(Instant, u64)>,
}

impl Outage {
    /// Requests that are stalled.
    pub fn stalled(&self) -> usize {
        self.stalled.load(Ordering::Relaxed)
    }

    fn progress(&self) -> MutexGuard<'_, OutageProgress> {
        self.progress.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A request is stalled; `served` says how many requests of the disk have been served.
    pub fn begin(&self, served: impl FnOnce() -> u64) {
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

    /// A request is no longer stalled: it was served, or the guest was told of the error. Describes the outage if this was
    /// the last one.
    pub fn end(&self, is_served: bool) -> Option<IoResumed> {
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

    /// A stalled request is left for the next server of its ring.
    pub fn leave(&self, served: impl FnOnce() -> u64) {
        let mut progress = self.progress();
        if self.stalled.fetch_sub(1, Ordering::Relaxed) == 1 {
            progress.given_up = 0;
            progress.left = progress.since.take().map(|since| (since, served()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_stalled_request_ends_the_outage() {
        let outage = Outage::default();
        outage.begin(|| 0);
        outage.begin(|| 0);
        assert_eq!((outage.stalled(), outage.end(false)), (2, None));
        assert_eq!(outage.end(true).unwrap().given_up, 1);
        assert_eq!(outage.stalled(), 0);
        outage.begin(|| 0);
        assert_eq!(outage.end(true).unwrap().given_up, 0);
    }

    /// While nothing is served between two servers of a ring, it is one outage.
    #[test]
    fn an_outage_continues_until_a_request_is_served() {
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
        for (served, continues) in [(7, true), (8, false)] {
            let outage = Outage::default();
            outage.begin(|| 7);
            std::thread::sleep(PAUSE);
            outage.leave(|| 7);
            let between = Instant::now();
            outage.begin(|| served);
            let lasted = outage.end(true).unwrap().lasted;
            assert_eq!(lasted > between.elapsed(), continues, "{lasted:?}");
        }
    }
}
