//! Stage 4: hand over what was submitted, and wait: for completions, for the guest, or not at all.
//!
//! To sleep and be woken costs about 10 µs of CPU and twice that in latency. So a thread that has
//! nothing under way looks at its hot queues for a while before it sleeps, but only where the guest
//! has lately come back within that while: the length of the wait is learned, and nothing is spent
//! on a guest that does not come. Where operations themselves take long, the latency that this saves is
//! no matter, and it is done only as long as it costs no more than sleep.

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
        let under_way = self.engine.in_flight();
        match fetched {
            _ if more_to_reap => self.engine.push()?,
            Fetched::More => self.engine.push()?,
            Fetched::Full => self.wait_for_room()?,
            // Nothing needed an operation; or what did is done in the kernel's first breath, and
            // needs no waiting. Other queues' kicks are looked for all the same.
            Fetched::All if under_way == 0 || self.instant => self.engine.push()?,
            _ => self.look_out_or_sleep(under_way)?,
        }
        self.engine.reap(&mut self.completions);
        if fetched != Fetched::Nothing {
            self.instant = self.engine.in_flight() == 0;
        }
        Ok(())
    }

    /// Waits for the guest if nothing is under way, else for what is under way and for the guest.
    fn look_out_or_sleep(&mut self, under_way: usize) -> io::Result<()> {
        let start = Instant::now();
        let window = match under_way {
            0 if self.operations.are_slow() && !self.instant => self.guests.window_within(SLEEP),
            0 => self.guests.window(),
            1..=FEW => self.operations.window(),
            _ => Duration::ZERO,
        };
        if !window.is_zero() && !self.hot.is_empty() {
            self.engine.push()?;
            let seen = self.look_out(start, window);
            let hit = !matches!(seen, Seen::Nothing);
            self.activity.polled(hit, start.elapsed());
            match seen {
                Seen::Request if under_way == 0 => {
                    self.guests.came_after(start.elapsed());
                    return Ok(());
                }
                Seen::Request => return Ok(()),
                Seen::Completion => {
                    if under_way > 0 {
                        self.operations.came_after(start.elapsed());
                    }
                    return self.engine.push();
                }
                Seen::Nothing => {}
            }
        }
        if self.enable_kicks() {
            return self.engine.push();
        }
        self.activity.slept();
        self.engine.wait()?;
        match under_way {
            0 => self.guests.came_after(start.elapsed()),
            1..=FEW => self.operations.came_after(start.elapsed()),
            _ => {}
        }
        Ok(())
    }

    /// Polls the hot queues, and the engine.
    fn look_out(&mut self, start: Instant, window: Duration) -> Seen {
        loop {
            // The clock costs more than a look at a ring.
            for _ in 0..LOOKS {
                for &number in &self.hot {
                    if let Some(queue) = &mut self.queues[number]
                        && queue.ring.waiting() != Ok(0)
                    {
                        return Seen::Request;
                    }
                }
                if self.engine.ready() {
                    return Seen::Completion;
                }
                if self.commanded() {
                    return Seen::Request;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= window {
                return Seen::Nothing;
            }
        }
    }

    /// Some queue has requests for which there is no room: sleeps until an operation completes. The
    /// hot queues that are empty can be kicked meanwhile.
    fn wait_for_room(&mut self) -> io::Result<()> {
        for i in (0..self.hot.len()).rev() {
            let Some(queue) = &mut self.queues[self.hot[i]] else {
                continue;
            };
            if queue.ring.waiting() != Ok(0) {
                continue;
            }
            if queue.ring.enable_kicks() {
                queue.ring.disable_kicks();
                return self.engine.push();
            }
            queue.hot = false;
            self.hot.swap_remove(i);
        }
        self.engine.wait()
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

/// Operations under way up to which a look-out for the first to end pays. With more, sleep costs each
/// of them less than it costs one.
const FEW: usize = 2;

/// CPU time of a sleep and of being woken, about: to look out for so long costs no more.
const SLEEP: Duration = Duration::from_micros(10);

/// What a look-out brought.
enum Seen {
    Request,
    Completion,
    Nothing,
}

/// What a thread has learned about how long something takes to come.
pub(crate) struct Learned {
    max: Duration,
    /// Moving average of the time from nothing to do to something to do.
    average: Duration,
}

impl Learned {
    /// Looks out for `max` at most; zero for never.
    pub fn new(max: Duration) -> Self {
        Self {
            max,
            average: max * 2,
        }
    }

    /// How long to look out now.
    #[inline]
    fn window(&self) -> Duration {
        self.window_within(self.max)
    }

    /// The same, and no longer than this.
    #[inline]
    fn window_within(&self, max: Duration) -> Duration {
        let max = max.min(self.max);
        match self.average <= max {
            // Twice the average catches nearly all.
            true => (self.average * 2).clamp(max / 8, max),
            false => Duration::ZERO,
        }
    }

    /// They take longer than twice the longest look-out, so that what one saves is a small part of it.
    #[inline]
    fn are_slow(&self) -> bool {
        self.average > self.max * 2
    }

    /// It came after this long.
    #[inline]
    fn came_after(&mut self, time: Duration) {
        // Bounded, so that an hour of silence is forgotten as fast as a millisecond of it.
        let time = time.min(self.max * 4);
        self.average = (self.average * 7 + time) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);

    #[test]
    fn a_guest_that_comes_back_soon_is_waited_for_and_one_that_stays_away_is_not() {
        let mut guests = Learned::new(MAX);
        assert_eq!(guests.window(), Duration::ZERO);
        for _ in 0..32 {
            guests.came_after(Duration::from_micros(10));
        }
        let window = guests.window();
        assert!(
            window >= Duration::from_micros(10) && window <= MAX,
            "{window:?}"
        );
        guests.came_after(Duration::from_secs(3600));
        for _ in 0..8 {
            guests.came_after(Duration::from_millis(1));
        }
        assert_eq!(guests.window(), Duration::ZERO);
    }

    #[test]
    fn where_operations_are_slow_a_guest_is_waited_for_as_long_as_sleep_costs() {
        let (mut operations, mut guests) = (Learned::new(MAX), Learned::new(MAX));
        assert!(!operations.are_slow(), "nothing is known yet");
        for _ in 0..32 {
            operations.came_after(MAX * 3 / 2);
        }
        assert!(!operations.are_slow());
        for _ in 0..32 {
            operations.came_after(Duration::from_millis(1));
            guests.came_after(Duration::from_micros(20));
        }
        assert!(operations.are_slow());
        assert_eq!(guests.window_within(SLEEP), Duration::ZERO);
        for _ in 0..32 {
            guests.came_after(Duration::from_micros(4));
        }
        let window = guests.window_within(SLEEP);
        assert!(!window.is_zero() && window <= SLEEP, "{window:?}");
    }

    #[test]
    fn zero_means_never() {
        let mut guests = Learned::new(Duration::ZERO);
        for _ in 0..100 {
            guests.came_after(Duration::ZERO);
        }
        assert_eq!(guests.window(), Duration::ZERO);
    }
}
