//! Stage 6: what was submitted goes to the kernel. Then the thread waits: for completions, for the guest, or not at all.

use std::io;

use block::Engine;

use super::fetch::FetchResult;
use crate::clock::{now_ns, thread_cpu_ns};
use crate::polling::PollTarget;
use crate::queue::Queues;
use crate::queue::token::Event;
use crate::resources::timer::Timer;
use crate::thread_disk::ThreadDisks;
use crate::wake::Wake;
use crate::worker::Waiting;

/// How often the rings are looked at before the clock is read.
const LOOKS_PER_CLOCK: usize = 16;

/// Operations in flight up to which polling for the first to end can pay. With more, a sleep costs each of them less than
/// it costs one.
const POLLED_OPERATIONS_MAX: usize = 2;

/// What polling brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PollResult {
    Request,
    Completion,
    Nothing,
}

/// The wait of one turn.
pub(crate) struct Wait<'a, E> {
    pub engine: &'a mut E,
    pub queues: &'a mut Queues,
    pub disks: &'a mut ThreadDisks,
    pub timer: &'a mut Timer,
    pub wake: &'a Wake,
    pub waiting: &'a mut Waiting,
    /// A job of the blocking pool runs, or waits for its turn.
    pub has_jobs: bool,
}

impl<E: Engine> Wait<'_, E> {
    /// Hands what was submitted to the kernel, waits if nothing else is to be done, and reaps completions.
    #[inline]
    pub fn wait(mut self, fetched: FetchResult) -> io::Result<()> {
        let completions = &mut self.waiting.completions;
        let has_more_to_reap = completions.len() == completions.capacity();
        completions.clear();
        let in_flight = self.engine.in_flight();
        let mut waited_since = None;
        match fetched {
            _ if has_more_to_reap => self.engine.push()?,
            FetchResult::More => self.engine.push()?,
            FetchResult::NoRoom => self.wait_for_room()?,
            // Nothing needed an operation; or the operations are done when they have been handed over, and need no
            // waiting. Kicks of other queues are reaped all the same.
            FetchResult::All if in_flight == 0 || self.waiting.is_instant => self.engine.push()?,
            _ => {
                let now = now_ns();
                waited_since = Some(now);
                self.poll_or_sleep(in_flight, now)?;
            }
        }
        self.engine.reap(&mut self.waiting.completions);
        if let Some(start) = waited_since
            && (1..=POLLED_OPERATIONS_MAX).contains(&in_flight)
        {
            self.learn_operations(start);
        }
        // Where all that was fetched is held or answered, no operation says how long they take.
        if fetched != FetchResult::Nothing && in_flight > 0 {
            self.waiting.is_instant = self.engine.in_flight() == 0;
        }
        Ok(())
    }

    /// Waits for the guest if no operation is in flight, otherwise for operations and for the guest.
    fn poll_or_sleep(&mut self, in_flight: usize, start: u64) -> io::Result<()> {
        let window = self.poll_window(in_flight, start);
        if self.waiting.poller.may_poll(start, window) {
            self.engine.push()?;
            let result = self.poll(start, window);
            let time = now_ns().saturating_sub(start);
            let is_hit = result != PollResult::Nothing;
            let saved = self.waiting.poller.record_poll(time, is_hit);
            self.waiting.activity.polled(is_hit, time, saved);
            match result {
                PollResult::Request => return Ok(()),
                PollResult::Completion => return self.engine.push(),
                PollResult::Nothing => {}
            }
        }
        if self.enable_kicks(start) {
            return self.engine.push();
        }
        let is_idle = in_flight == 0 && !self.has_jobs;
        self.waiting.activity.sleeps(is_idle);
        let poller = &mut self.waiting.poller;
        let result = if in_flight == 0 && poller.measures_next_sleep() {
            let before = thread_cpu_ns();
            let result = self.engine.wait();
            poller.record_sleep(thread_cpu_ns().saturating_sub(before));
            result
        } else {
            self.engine.wait()
        };
        self.waiting.activity.woke();
        result
    }

    /// How long to poll for the disks that are likely to be ready soonest; 0 for not at all.
    fn poll_window(&mut self, in_flight: usize, now: u64) -> u64 {
        if in_flight > POLLED_OPERATIONS_MAX || self.waiting.poller.is_off() {
            return 0;
        }
        let mut window = 0;
        for i in 0..self.queues.active.len() {
            let queue = self.queues.get(self.queues.active[i]);
            let disk = self.disks.get(queue.thread_disk);
            let target = match (in_flight, queue.slots.taken()) {
                (0, 0) => PollTarget::Guest,
                (1.., 1) => PollTarget::Operation,
                _ => continue,
            };
            if target == PollTarget::Guest {
                disk.estimator.note_idle(now);
            }
            let limited = queue.held.was_throttled(now);
            let poller = &self.waiting.poller;
            window = window.max(poller.window(&disk.estimator, target, limited));
        }
        window
    }

    /// What has completed by now took since `start`.
    fn learn_operations(&mut self, start: u64) {
        let mut time = None;
        for completion in &self.waiting.completions {
            if let Event::Operation(id) = Event::from(completion.token) {
                let queue = self.queues.get(id.queue);
                let disk = self.disks.get(queue.thread_disk);
                let time = *time.get_or_insert_with(|| now_ns().saturating_sub(start));
                self.waiting
                    .poller
                    .record_operation(&mut disk.estimator, time);
            }
        }
    }

    /// Looks at the active queues, and at the engine.
    fn poll(&mut self, start: u64, window: u64) -> PollResult {
        loop {
            // The clock costs more than a look at a ring.
            for _ in 0..LOOKS_PER_CLOCK {
                for i in 0..self.queues.active.len() {
                    let queue = self.queues.get(self.queues.active[i]);
                    if queue.ring.available() != Ok(0) {
                        return PollResult::Request;
                    }
                }
                if self.engine.ready() {
                    return PollResult::Completion;
                }
                if self.wake.is_pending() {
                    return PollResult::Request;
                }
                std::hint::spin_loop();
            }
            if now_ns().saturating_sub(start) >= window {
                return PollResult::Nothing;
            }
        }
    }

    /// Some queue has requests for which there is no room: sleeps until an operation completes. The active queues that are
    /// empty can be kicked meanwhile.
    fn wait_for_room(&mut self) -> io::Result<()> {
        for i in (0..self.queues.active.len()).rev() {
            let queue = self.queues.get(self.queues.active[i]);
            if queue.ring.available() != Ok(0) {
                continue;
            }
            if queue.ring.enable_kicks() {
                queue.ring.disable_kicks();
                return self.engine.push();
            }
            queue.is_active = false;
            self.queues.active.swap_remove(i);
        }
        self.engine.wait()
    }

    /// Asks the guest to kick, on every active queue but those whose limits let nothing go for now: they stay active, and
    /// the timer goes off when they may. If a request has come meanwhile, returns true, and leaves all queues active.
    fn enable_kicks(&mut self, now: u64) -> bool {
        let mut shut_until = u64::MAX;
        for i in 0..self.queues.active.len() {
            let queue = self.queues.get(self.queues.active[i]);
            if let Some(until) = queue.held.shut_until(now) {
                shut_until = shut_until.min(until);
            } else if queue.ring.enable_kicks() {
                for j in 0..=i {
                    let queue = self.queues.get(self.queues.active[j]);
                    queue.ring.disable_kicks();
                }
                return true;
            }
        }
        let mut active = std::mem::take(&mut self.queues.active);
        active.retain(|&number| {
            let queue = self.queues.get(number);
            queue.is_active = queue.held.shut_until(now).is_some();
            queue.is_active
        });
        self.queues.active = active;
        if shut_until < u64::MAX {
            self.timer.set(now, shut_until);
        }
        false
    }
}
