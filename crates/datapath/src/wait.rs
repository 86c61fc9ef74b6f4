//! Stage 4: hand over what was submitted, and wait: for completions, for the guest, or not at all.

use std::io;

use block::Engine;

use crate::clock::{now_ns, thread_cpu_ns};
use crate::fetch::FetchResult;
use crate::polling::PollTarget;
use crate::queue::Event;
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Enters the kernel as the situation demands, and reaps.
    pub fn wait(&mut self, fetched: FetchResult) -> io::Result<()> {
        let more_to_reap = self.completions.len() == self.completions.capacity();
        self.completions.clear();
        let under_way = self.engine.in_flight();
        let mut waited_since = None;
        match fetched {
            _ if more_to_reap => self.engine.push()?,
            FetchResult::More => self.engine.push()?,
            FetchResult::Full => self.wait_for_room()?,
            // Nothing needed an operation; or what did is done in the kernel's first breath, and
            // needs no waiting. Other queues' kicks are looked for all the same.
            FetchResult::All if under_way == 0 || self.instant => self.engine.push()?,
            _ => {
                let now = now_ns();
                waited_since = Some(now);
                self.poll_or_sleep(under_way, now)?;
            }
        }
        self.engine.reap(&mut self.completions);
        if let Some(start) = waited_since
            && (1..=FEW).contains(&under_way)
        {
            self.learn_operations(start);
        }
        // Where all that was fetched is held or answered, no operation says how long they take.
        if fetched != FetchResult::Nothing && under_way > 0 {
            self.instant = self.engine.in_flight() == 0;
        }
        Ok(())
    }

    /// Waits for the guest if nothing is under way, else for what is under way and for the guest.
    fn poll_or_sleep(&mut self, under_way: usize, start: u64) -> io::Result<()> {
        let window = self.poll_window(under_way, start);
        if self.poller.may(start, window) {
            self.engine.push()?;
            let result = self.poll(start, window);
            let time = now_ns().saturating_sub(start);
            let saved = self.poller.polled(time, result != PollResult::Nothing);
            self.activity
                .polled(result != PollResult::Nothing, time, saved);
            match result {
                PollResult::Request => return Ok(()),
                PollResult::Completion => return self.engine.push(),
                PollResult::Nothing => {}
            }
        }
        if self.enable_kicks(start) {
            return self.engine.push();
        }
        self.activity.slept();
        let measure = under_way == 0 && self.poller.measures();
        let before = if measure { thread_cpu_ns() } else { 0 };
        self.engine.wait()?;
        if measure {
            self.poller.measured(thread_cpu_ns().saturating_sub(before));
        }
        Ok(())
    }

    /// How long to poll for the disks that are likely to come soonest; 0 for not at all.
    fn poll_window(&mut self, under_way: usize, now: u64) -> u64 {
        if under_way > FEW || self.poller.never() {
            return 0;
        }
        let mut window = 0;
        for &number in &self.active {
            let Some(queue) = &self.queues[number] else {
                continue;
            };
            let Some(thread_disk) = &mut self.disks[queue.thread_disk] else {
                continue;
            };
            let what = match (under_way, queue.slots.taken()) {
                (0, 0) => PollTarget::Guest,
                (1.., 1) => PollTarget::Operation,
                _ => continue,
            };
            if what == PollTarget::Guest {
                thread_disk.estimator.quiet(now);
            }
            let limited = queue.held.was_throttled(now);
            window = window.max(self.poller.window(&thread_disk.estimator, what, limited));
        }
        window
    }

    /// What has completed by now took this long.
    fn learn_operations(&mut self, start: u64) {
        let mut time = None;
        for completion in &self.completions {
            if let Event::Operation { queue, .. } = Event::from(completion.token)
                && let Some(queue) = &self.queues[queue]
                && let Some(thread_disk) = &mut self.disks[queue.thread_disk]
            {
                let time = *time.get_or_insert_with(|| now_ns().saturating_sub(start));
                self.poller.operated(&mut thread_disk.estimator, time);
            }
        }
    }

    /// Looks at the active queues, and at the engine.
    fn poll(&mut self, start: u64, window: u64) -> PollResult {
        loop {
            // The clock costs more than a look at a ring.
            for _ in 0..LOOKS {
                for &number in &self.active {
                    if let Some(queue) = &mut self.queues[number]
                        && queue.ring.available() != Ok(0)
                    {
                        return PollResult::Request;
                    }
                }
                if self.engine.ready() {
                    return PollResult::Completion;
                }
                if self.has_commands() {
                    return PollResult::Request;
                }
                std::hint::spin_loop();
            }
            if now_ns().saturating_sub(start) >= window {
                return PollResult::Nothing;
            }
        }
    }

    /// Some queue has requests for which there is no room: sleeps until an operation completes. The
    /// active queues that are empty can be kicked meanwhile.
    fn wait_for_room(&mut self) -> io::Result<()> {
        for i in (0..self.active.len()).rev() {
            let Some(queue) = &mut self.queues[self.active[i]] else {
                continue;
            };
            if queue.ring.available() != Ok(0) {
                continue;
            }
            if queue.ring.enable_kicks() {
                queue.ring.disable_kicks();
                return self.engine.push();
            }
            queue.active = false;
            self.active.swap_remove(i);
        }
        self.engine.wait()
    }

    /// Asks the guest to kick, on every active queue but those whose limits let nothing go for now: they stay active, and the
    /// timer goes off when they may. If something has come meanwhile, says so, and leaves all queues active.
    fn enable_kicks(&mut self, now: u64) -> bool {
        let mut shut_until = u64::MAX;
        for i in 0..self.active.len() {
            let Some(queue) = &mut self.queues[self.active[i]] else {
                continue;
            };
            if let Some(until) = queue.held.shut_until(now) {
                shut_until = shut_until.min(until);
            } else if queue.ring.enable_kicks() {
                self.active[..=i].iter().for_each(|&number| {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.ring.disable_kicks();
                    }
                });
                return true;
            }
        }
        let queues = &mut self.queues;
        self.active.retain(|&number| {
            let Some(queue) = &mut queues[number] else {
                return false;
            };
            queue.active = queue.held.shut_until(now).is_some();
            queue.active
        });
        if shut_until < u64::MAX {
            self.timer.set(now, shut_until);
        }
        false
    }
}

/// Looks at the rings between two looks at the clock.
const LOOKS: usize = 16;

/// Operations under way up to which polling for the first to end can pay. With more, a sleep costs each
/// of them less than it costs one.
const FEW: usize = 2;

/// What polling brought.
#[derive(PartialEq, Eq)]
enum PollResult {
    Request,
    Completion,
    Nothing,
}
