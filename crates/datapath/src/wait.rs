//! Stage 4: hand over what was submitted, and wait: for completions, for the guest, or not at all.
//!
//! To sleep and be woken costs about 10 µs of CPU and twice that in latency. So a thread that has
//! nothing under way looks at its hot queues for a while before it sleeps, but only where the guest
//! has lately come back within that while: the length of the wait is learned, and nothing is spent
//! on a guest that does not come.

use std::io;
use std::time::{Duration, Instant};

use block::Engine;

use crate::fetch::Fetched;
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Enters the kernel as the situation demands, and reaps.
    pub fn wait(&mut self, fetched: Fetched) -> io::Result<()> {
        let more_to_reap = self.completions.len() == self.completions.capacity();
        self.completions.clear();
        let before = self.engine.in_flight();
        match fetched {
            Fetched::Full => self.engine.wait()?,
            Fetched::More => self.engine.push()?,
            _ if more_to_reap => self.engine.push()?,
            // What is done in the kernel's first breath needs no waiting.
            Fetched::All if before > 0 && self.polling.instant => self.engine.push()?,
            Fetched::Nothing if before == 0 => return self.idle(),
            Fetched::All if before == 0 => return Ok(()),
            Fetched::Nothing | Fetched::All => {
                if self.enable_kicks() {
                    self.engine.push()?;
                } else {
                    self.engine.wait()?;
                }
            }
        }
        self.engine.reap(&mut self.completions);
        if fetched != Fetched::Nothing {
            self.polling.instant = self.engine.in_flight() == 0;
        }
        Ok(())
    }

    /// Nothing is under way: looks out for the guest, then sleeps until it kicks.
    fn idle(&mut self) -> io::Result<()> {
        let start = Instant::now();
        if !self.hot.is_empty() && self.look_out(start) {
            self.polling.came_after(start.elapsed());
            return Ok(());
        }
        if self.enable_kicks() {
            return Ok(());
        }
        self.engine.wait()?;
        self.polling.came_after(start.elapsed());
        self.engine.reap(&mut self.completions);
        Ok(())
    }

    /// Polls the hot queues; tells whether there is something to do.
    fn look_out(&mut self, start: Instant) -> bool {
        let window = self.polling.window();
        if window.is_zero() {
            return false;
        }
        loop {
            // The clock costs more than a look at a ring.
            for _ in 0..LOOKS {
                for &number in &self.hot {
                    if let Some(queue) = &mut self.queues[number]
                        && queue.ring.waiting() != Ok(0)
                    {
                        return true;
                    }
                }
                if self.commanded() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= window {
                return false;
            }
        }
    }

    /// Asks the guest to kick, on every hot queue. If something has come meanwhile, says so, and
    /// leaves the queues hot.
    fn enable_kicks(&mut self) -> bool {
        for i in 0..self.hot.len() {
            if let Some(queue) = &mut self.queues[self.hot[i]]
                && queue.ring.enable_kicks()
            {
                self.hot[..=i].iter().for_each(|&number| {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.ring.disable_kicks();
                    }
                });
                return true;
            }
        }
        for number in self.hot.drain(..) {
            if let Some(queue) = &mut self.queues[number] {
                queue.hot = false;
            }
        }
        false
    }
}

/// Looks at the rings between two looks at the clock.
const LOOKS: usize = 16;

/// What a thread has learned about when its guests come back.
pub(crate) struct Polling {
    max: Duration,
    /// Moving average of the time from nothing to do to something to do.
    gap: Duration,
    /// The last operations were done by the time that they were handed over.
    instant: bool,
}

impl Polling {
    /// Looks out for `max` at most; zero for never.
    pub fn new(max: Duration) -> Self {
        Self {
            max,
            gap: max * 4,
            instant: false,
        }
    }

    /// How long to look out now.
    #[inline]
    fn window(&self) -> Duration {
        match self.gap <= self.max {
            // Twice the average catches nearly all.
            true => (self.gap * 2).clamp(self.max / 8, self.max),
            false => Duration::ZERO,
        }
    }

    /// The guest came back after this long.
    #[inline]
    fn came_after(&mut self, gap: Duration) {
        // Bounded, so that an hour of silence is forgotten as fast as a millisecond of it.
        let gap = gap.min(self.max * 4);
        self.gap = (self.gap * 7 + gap) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);

    #[test]
    fn a_guest_that_comes_back_soon_is_waited_for_and_one_that_stays_away_is_not() {
        let mut polling = Polling::new(MAX);
        assert_eq!(polling.window(), Duration::ZERO);
        for _ in 0..32 {
            polling.came_after(Duration::from_micros(10));
        }
        let window = polling.window();
        assert!(
            window >= Duration::from_micros(10) && window <= MAX,
            "{window:?}"
        );
        polling.came_after(Duration::from_secs(3600));
        for _ in 0..8 {
            polling.came_after(Duration::from_millis(1));
        }
        assert_eq!(polling.window(), Duration::ZERO);
    }

    #[test]
    fn zero_means_never() {
        let mut polling = Polling::new(Duration::ZERO);
        for _ in 0..100 {
            polling.came_after(Duration::ZERO);
        }
        assert_eq!(polling.window(), Duration::ZERO);
    }
}
