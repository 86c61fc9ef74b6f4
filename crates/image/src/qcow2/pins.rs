//! Tracking of requests that use looked-up clusters, so that a freed cluster is not reused for another part
//! of the disk while a read or write of the old one is in progress.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The number of counter pairs, so that threads do not share cache lines.
const LANES: usize = 64;

/// Keeps clusters that were looked up under it from being reused. A request holds it from before its first
/// lookup until after its last operation, and returns it with [`Pins::unpin`]. A lost pin keeps freed
/// space from ever being reused.
#[derive(Debug)]
#[must_use = "a pin that is not given back keeps freed space from being reused"]
pub struct Pin {
    lane: u8,
    parity: u8,
}

/// Requests under way, counted by the epoch in which they began.
///
/// The epoch advances from e to e + 1 only when no request that began in e - 1 is left. So two steps
/// after a cluster was unlinked, every request that can have found it has ended: each of the two counters
/// has been seen at zero since. (A request that reads the epoch and is counted late may delay a step, but is
/// never missed: it is counted before it looks anything up.)
///
/// A request is counted before its lookup; a cluster is unlinked before the counters are read. These exclude each
/// other only if all threads see the four accesses in one order, so all accesses here, and the lookup
/// itself, are SeqCst. On x86 only the counting needs an atomic instruction, on a cache line that no other thread uses.
///
/// A request that waits for a mark to pass is woken by the one whose end lets it pass. The waiting request is on the list
/// before it looks at the counters, and the ending one is off its counter before it looks at the list: one of the two
/// sees the other.
pub struct Pins {
    epoch: AtomicU64,
    lanes: Box<[Lane]>,
    /// Whether `waiting` has any.
    has_waiting: AtomicBool,
    waiting: Mutex<Vec<(Mark, Waker)>>,
}

#[derive(Default)]
#[repr(align(128))]
struct Lane([AtomicU64; 2]);

/// The pins of one thread's requests to one disk. Requests that begin in the same epoch are counted as one, so
/// that of many only the first and the last access the shared counters.
///
/// A request that joins others is as safe as the first of them. While one of them is in progress, the epoch is
/// the one in which they began or the next; so a cluster that is unlinked after the joining request's lookup
/// waits for all of them. They do not delay the epoch forever: once it has advanced, new requests
/// are counted with the other parity, and the old ones end.
#[derive(Debug)]
pub struct ThreadPins {
    lane: u8,
    users: [usize; 2],
}

impl ThreadPins {
    /// Threads that pass different numbers for `lane` do not share a cache line.
    pub fn new(lane: usize) -> Self {
        Self {
            lane: (lane % LANES) as u8,
            users: [0; 2],
        }
    }

    /// Begins a request.
    #[inline]
    pub fn pin(&mut self, pins: &Pins) -> Pin {
        let (lane, parity) = (self.lane, pins.parity());
        let users = &mut self.users[usize::from(parity)];
        *users += 1;
        match *users {
            1 => pins.count(lane, parity),
            _ => Pin { lane, parity },
        }
    }

    /// Whether no request is in progress: only then may the next one be for another disk.
    pub fn is_empty(&self) -> bool {
        self.users == [0; 2]
    }

    /// Ends a request that began here.
    #[inline]
    pub fn unpin(&mut self, pins: &Pins, pin: Pin) {
        let users = &mut self.users[usize::from(pin.parity)];
        debug_assert!(*users > 0 && pin.lane == self.lane);
        *users -= 1;
        if *users == 0 {
            pins.unpin(pin);
        }
    }
}

/// The epoch in which something was unlinked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Pins {
    pub(crate) fn new() -> Self {
        Self {
            epoch: AtomicU64::new(0),
            lanes: (0..LANES).map(|_| Lane::default()).collect(),
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }

    /// Begins a request. Threads that pass different numbers for `lane` don't disturb each other.
    #[inline]
    pub fn pin(&self, lane: usize) -> Pin {
        self.count((lane % LANES) as u8, self.parity())
    }

    #[inline]
    fn parity(&self) -> u8 {
        (self.epoch.load(SeqCst) & 1) as u8
    }

    #[inline]
    fn count(&self, lane: u8, parity: u8) -> Pin {
        self.lanes[usize::from(lane)].0[usize::from(parity)].fetch_add(1, SeqCst);
        Pin { lane, parity }
    }

    /// Ends a request. Any thread may do it.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "a pin is given back once")]
    pub fn unpin(&self, pin: Pin) {
        let counter = &self.lanes[usize::from(pin.lane)].0[usize::from(pin.parity)];
        let before = counter.fetch_sub(1, SeqCst);
        debug_assert!(before > 0);
        if before == 1 && self.has_waiting.load(SeqCst) {
            self.wake_passed();
        }
    }

    #[cold]
    fn wake_passed(&self) {
        let passed: Vec<_> = {
            let mut waiting = self.waiting();
            let passed = waiting.extract_if(.., |(mark, _)| self.passed(*mark));
            let passed = passed.collect();
            self.has_waiting.store(!waiting.is_empty(), SeqCst);
            passed
        };
        passed.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<(Mark, Waker)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ready when the mark has passed; otherwise wakes `waker` once, when it passes.
    pub(crate) fn poll_passed(&self, mark: Mark, waker: &Waker) -> Poll<()> {
        let mut waiting = self.waiting();
        self.has_waiting.store(true, SeqCst);
        if self.passed(mark) {
            self.has_waiting.store(!waiting.is_empty(), SeqCst);
            return Poll::Ready(());
        }
        if !waiting.iter().any(|(_, known)| known.will_wake(waker)) {
            waiting.push((mark, waker.clone()));
        }
        Poll::Pending
    }

    /// To be called after something was unlinked.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.epoch.load(SeqCst))
    }

    /// Whether all requests that began before the mark have ended.
    pub(crate) fn passed(&self, mark: Mark) -> bool {
        for _ in 0..2 {
            let epoch = self.epoch.load(SeqCst);
            if epoch >= mark.0 + 2 {
                return true;
            }
            let next = ((epoch + 1) & 1) as usize;
            if self.lanes.iter().any(|lane| lane.0[next].load(SeqCst) != 0) {
                return false;
            }
            // Another thread may have advanced it already.
            let _ = self
                .epoch
                .compare_exchange(epoch, epoch + 1, SeqCst, SeqCst);
        }
        self.epoch.load(SeqCst) >= mark.0 + 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_passes_after_earlier_pins_end() {
        let pins = Pins::new();
        assert!(pins.passed(pins.mark()));
        let first = pins.pin(0);
        let mark = pins.mark();
        assert!(!pins.passed(mark));
        let second = pins.pin(1);
        assert!(!pins.passed(mark));
        pins.unpin(first);
        // Later requests do not delay it forever.
        let mut held = second;
        for lane in 0..4 {
            let next = pins.pin(lane);
            pins.unpin(std::mem::replace(&mut held, next));
            if pins.passed(mark) {
                pins.unpin(held);
                return;
            }
        }
        panic!("the mark never passed");
    }

    /// Marks pass although a thread's requests overlap without end, and no mark passes before the requests that
    /// were in progress when it was made have ended.
    #[test]
    fn shared_counts_delay_like_single_pins() {
        let (pins, mut thread) = (Pins::new(), ThreadPins::new(7));
        let counted = || {
            let lanes = pins.lanes.iter().flat_map(|lane| &lane.0);
            lanes.map(|n| n.load(SeqCst)).sum::<u64>()
        };
        let mut held = [thread.pin(&pins), thread.pin(&pins)];
        assert_eq!(counted(), 1);
        let mut passed = 0;
        for _ in 0..4 {
            let mark = pins.mark();
            assert!(!pins.passed(mark));
            for i in [0, 1, 0, 1] {
                // Another request is always in progress.
                let next = thread.pin(&pins);
                thread.unpin(&pins, std::mem::replace(&mut held[i], next));
                assert!((1..=2).contains(&counted()));
                if pins.passed(mark) {
                    passed += 1;
                    break;
                }
            }
        }
        assert_eq!(passed, 4);
        // One request that stays in progress keeps a mark from passing.
        let [first, second] = held;
        thread.unpin(&pins, second);
        let mark = pins.mark();
        for _ in 0..4 {
            let other = thread.pin(&pins);
            thread.unpin(&pins, other);
            assert!(!pins.passed(mark));
        }
        thread.unpin(&pins, first);
        assert_eq!(counted(), 0);
        assert!(pins.passed(mark));
    }

    /// One thread unlinks and reuses places; others look them up and use them. No slot in use is reused.
    #[test]
    fn pinned_clusters_are_not_reused() {
        use std::sync::atomic::AtomicBool;
        const SLOTS: usize = 4;
        const ROUNDS: usize = if cfg!(miri) { 12 } else { 20_000 };
        let pins = Pins::new();
        // `here` is where the data is now; `reused` says of each slot whether it now belongs to something else.
        let here = AtomicU64::new(0);
        let reused: [AtomicBool; SLOTS] = Default::default();
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for lane in 0..2 {
                let (pins, here, reused, end) = (&pins, &here, &reused, &end);
                scope.spawn(move || {
                    let mut thread = ThreadPins::new(lane);
                    // Two requests that overlap, and one alone.
                    let mut before: Option<(Pin, usize)> = None;
                    while !end.load(SeqCst) {
                        let pin = thread.pin(pins);
                        let slot = here.load(SeqCst) as usize;
                        assert!(!reused[slot].load(SeqCst));
                        std::thread::yield_now();
                        assert!(!reused[slot].load(SeqCst), "reused while in use");
                        if let Some((pin, slot)) = before.replace((pin, slot)) {
                            assert!(!reused[slot].load(SeqCst), "reused while in use");
                            thread.unpin(pins, pin);
                        }
                        let alone = pins.pin(lane);
                        let slot = here.load(SeqCst) as usize;
                        std::thread::yield_now();
                        assert!(!reused[slot].load(SeqCst), "reused while in use");
                        pins.unpin(alone);
                    }
                    if let Some((pin, _)) = before {
                        thread.unpin(pins, pin);
                    }
                });
            }
            for round in 0..ROUNDS {
                let (old, new) = (round % SLOTS, (round + 1) % SLOTS);
                reused[new].store(false, SeqCst);
                here.store(new as u64, SeqCst);
                let mark = pins.mark();
                while !pins.passed(mark) {
                    std::thread::yield_now();
                }
                reused[old].store(true, SeqCst);
            }
            end.store(true, SeqCst);
        });
    }
}
