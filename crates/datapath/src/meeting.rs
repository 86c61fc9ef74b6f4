//! Where I/O threads wait for each other, so that something can be done at one moment.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for which a thread fetches nothing.
pub(crate) const HELD_MAX: Duration = Duration::from_millis(1);

/// How long it is tried.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Where threads wait for each other.
#[derive(Default)]
pub(crate) struct Meeting {
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Default)]
struct MeetingState {
    arrived: usize,
    first: Option<Instant>,
    /// Whether all have arrived in time.
    verdict: Option<bool>,
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all have arrived, or until it is given up. Returns whether all have; `arrive` is called if this thread
    /// is in time.
    pub fn arrive(&self, arrive: impl FnOnce()) -> bool {
        let mut state = self.lock();
        if state.verdict.is_none() {
            arrive();
            state.arrived += 1;
            state.first.get_or_insert_with(Instant::now);
            self.changed.notify_all();
        }
        loop {
            if let Some(verdict) = state.verdict {
                return verdict;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Calls `decided` when so many threads have arrived, or with false if one of them has waited for too long. Returns for
    /// how long the first has waited.
    pub fn decide(&self, threads: usize, decided: impl FnOnce(bool)) -> Option<Duration> {
        let mut state = self.lock();
        let begin = Instant::now();
        while state.arrived < threads {
            let left = match state.first {
                Some(first) => HELD_MAX.saturating_sub(first.elapsed()),
                None => TIMEOUT.saturating_sub(begin.elapsed()),
            };
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        let is_reached = state.arrived >= threads;
        decided(is_reached);
        state.verdict = Some(is_reached);
        let time = state.first.map_or(Duration::ZERO, |first| first.elapsed());
        drop(state);
        self.changed.notify_all();
        is_reached.then_some(time)
    }
}
