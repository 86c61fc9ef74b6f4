//! Which regions of a disk are noted durably as being written to, so that a power cut loses no bit of a dirty bitmap.
//!
//! A write to a region that is not noted waits until it is. All others cost one load. The states of a region:
//!
//! ```text
//! Clean ──write──▶ Wanted ──note is durable──▶ Active ──tick──▶ Idle ──tick──▶ Leaving ──bits are durable──▶ Clean
//!                                                ▲              │ write           │ write
//!                                                └──────────────┴─────────────────┘
//! ```
//!
//! Each note is of all regions that are not clean. A region leaves only after its bits were read, and are durable. No write
//! is missed in between: a request sets its bits, and then looks at the state. Either it saw "Active", at least one
//! [tick](WriteIntent::begin_tick) before the bits are read, which takes seconds: its bits, set before, are visible to all
//! threads. Or it has made the region active with an atomic exchange, and then the region does not leave in this tick.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, compiler_fence};

/// Regions of a disk, at most: their bits take one sector.
pub const REGIONS_MAX: usize = 4096;
/// Regions are at least this large, as a power of two: 1 MiB.
const REGION_BITS_MIN: u32 = 20;

const CLEAN: u8 = 0;
const WANTED: u8 = 1;
const LEAVING: u8 = 2;
const IDLE: u8 = 3;
const ACTIVE: u8 = 4;

/// Where notes are written.
pub trait NoteStore: Send + Sync {
    /// Makes the notes of all regions in [`WriteIntent::wanted`] durable, and then calls [`WriteIntent::noted`], or waits
    /// until another thread has done so. Blocks. If that is impossible, the bitmaps are marked as inconsistent, and
    /// [`WriteIntent::give_up`] is called.
    fn note(&self, intent: &WriteIntent);
}

/// The states of the regions of a disk.
pub struct WriteIntent {
    region_bits: u32,
    states: Box<[AtomicU8]>,
    /// Nothing is noted any more: the bitmaps are inconsistent.
    is_off: AtomicBool,
    store: Box<dyn NoteStore>,
}

impl fmt::Debug for WriteIntent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "regions of {} bytes", 1_u64 << self.region_bits)
    }
}

/// The size of the regions of a disk of `size` bytes, as a power of two: it has less than half of the possible regions, so
/// that it can grow.
pub fn region_bits(size: u64) -> u32 {
    let fits = |bits: &u32| (size >> bits) < REGIONS_MAX as u64 / 2;
    (REGION_BITS_MIN..63).find(fits).unwrap_or(63)
}

impl WriteIntent {
    /// Regions of a disk of which nothing is known.
    pub fn new(region_bits: u32, store: Box<dyn NoteStore>) -> Self {
        Self {
            region_bits,
            states: (0..REGIONS_MAX).map(|_| AtomicU8::new(CLEAN)).collect(),
            is_off: AtomicBool::new(false),
            store,
        }
    }

    /// The regions of a range. The last one has all that is after it, too.
    #[inline]
    fn regions(&self, at: u64, len: u64) -> RangeInclusive<usize> {
        let region = |at: u64| ((at >> self.region_bits) as usize).min(REGIONS_MAX - 1);
        region(at)..=region(at.saturating_add(len.saturating_sub(1)))
    }

    /// Whether a write to a range may be submitted. Its bits have been set. If not, it may be after [`note`](Self::note).
    #[inline]
    pub fn is_noted(&self, at: u64, len: u64) -> bool {
        // The bits were set before, also in the eyes of the compiler.
        compiler_fence(SeqCst);
        let regions = self.regions(at, len);
        let is_active = |region: usize| self.states[region].load(Relaxed) == ACTIVE;
        if regions.start() == regions.end() && is_active(*regions.start()) {
            return true;
        }
        self.activate(regions)
    }

    /// Makes regions active, as far as they are noted.
    #[cold]
    fn activate(&self, regions: RangeInclusive<usize>) -> bool {
        let mut are_noted = true;
        for state in &self.states[regions] {
            let next = |state| match state {
                CLEAN => Some(WANTED),
                LEAVING | IDLE => Some(ACTIVE),
                _ => None,
            };
            let before = match state.fetch_update(AcqRel, Acquire, next) {
                Ok(before) | Err(before) => before,
            };
            are_noted &= before >= LEAVING;
        }
        are_noted || self.is_off.load(Relaxed)
    }

    /// Waits until a range is noted, or its bitmaps are inconsistent. Blocks.
    pub fn note(&self, at: u64, len: u64) {
        while !self.is_noted(at, len) {
            self.store.note(self);
        }
    }

    /// The bits of all regions that must be noted: the lowest bit of a byte comes first.
    pub fn wanted(&self) -> [u8; REGIONS_MAX / 8] {
        let mut bits = [0; REGIONS_MAX / 8];
        for (region, state) in self.states.iter().enumerate() {
            let is_wanted = state.load(Acquire) != CLEAN;
            bits[region / 8] |= u8::from(is_wanted) << (region % 8);
        }
        bits
    }

    /// These are noted durably.
    pub fn noted(&self, bits: &[u8; REGIONS_MAX / 8]) {
        for state in self.each(bits) {
            // Others were noted before.
            let _ = state.compare_exchange(WANTED, ACTIVE, AcqRel, Acquire);
        }
    }

    /// These were noted by the process before, or earlier in this one.
    pub fn found(&self, bits: &[u8; REGIONS_MAX / 8]) {
        for state in self.each(bits) {
            let next = |state| match state {
                CLEAN => Some(IDLE),
                WANTED => Some(ACTIVE),
                _ => None,
            };
            let _ = state.fetch_update(AcqRel, Acquire, next);
        }
    }

    /// The states of the regions in `bits`.
    fn each<'a>(&'a self, bits: &'a [u8]) -> impl Iterator<Item = &'a AtomicU8> {
        let is_set = |region: &usize| bits[region / 8] >> (region % 8) & 1 != 0;
        (0..REGIONS_MAX)
            .filter(is_set)
            .map(|region| &self.states[region])
    }

    /// Regions without a write since the last tick begin to leave. Returns whether there are any: then the bits of the bitmaps
    /// are read and made durable. [`end_tick`](Self::end_tick) follows. Ticks are at least some seconds apart.
    pub fn begin_tick(&self) -> bool {
        let mut any = false;
        for state in &self.states {
            any |= state
                .compare_exchange(IDLE, LEAVING, SeqCst, Relaxed)
                .is_ok();
        }
        any
    }

    /// Those that are leaving are gone, or stay if `are_durable` is false. The others count as idle until they are written to.
    /// Returns whether there are any.
    pub fn end_tick(&self, are_durable: bool) -> bool {
        let mut any = false;
        for state in &self.states {
            let left = if are_durable { CLEAN } else { IDLE };
            let _ = state.compare_exchange(LEAVING, left, AcqRel, Relaxed);
            let _ = state.compare_exchange(ACTIVE, IDLE, AcqRel, Relaxed);
            any |= state.load(Relaxed) != CLEAN;
        }
        any
    }

    /// Nothing is known of any region any more. No request is in flight.
    pub fn forget(&self) {
        self.states
            .iter()
            .for_each(|state| state.store(CLEAN, SeqCst));
    }

    /// Requests need not wait any more: the bitmaps are inconsistent.
    pub fn give_up(&self) {
        self.is_off.store(true, SeqCst);
    }

    /// Whether it was [given up](Self::give_up).
    pub fn is_given_up(&self) -> bool {
        self.is_off.load(SeqCst)
    }
}

/// The ranges of a disk that these noted regions have: offset and length.
pub fn noted_ranges(
    bits: &[u8; REGIONS_MAX / 8],
    region_bits: u32,
    size: u64,
) -> impl Iterator<Item = (u64, u64)> {
    (0..REGIONS_MAX as u64).filter_map(move |region| {
        let at = region.checked_shl(region_bits)?;
        let is_shifted_out = at >> region_bits != region || at >= size;
        if is_shifted_out || bits[region as usize / 8] >> (region % 8) & 1 == 0 {
            return None;
        }
        let rest = size - at;
        let is_last = region as usize == REGIONS_MAX - 1;
        Some((
            at,
            if is_last {
                rest
            } else {
                rest.min(1 << region_bits)
            },
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nowhere;

    impl NoteStore for Nowhere {
        fn note(&self, intent: &WriteIntent) {
            intent.noted(&intent.wanted());
        }
    }

    fn intent() -> WriteIntent {
        WriteIntent::new(20, Box::new(Nowhere))
    }

    #[test]
    fn disks_have_regions_of_a_size_that_lets_them_grow() {
        for (size, bits) in [
            (0, 20),
            (1 << 30, 20),
            (2 << 30, 21),
            (1 << 40, 30),
            (u64::MAX, 53),
        ] {
            assert_eq!(region_bits(size), bits, "{size}");
            assert!(size >> bits < REGIONS_MAX as u64 / 2);
        }
    }

    #[test]
    fn writes_wait_until_all_their_regions_are_noted() {
        let intent = intent();
        assert!(!intent.is_noted(0, 4096));
        intent.note(0, 4096);
        assert!(intent.is_noted((1 << 20) - 4096, 4096));
        // One of two, also of a range without end.
        assert!(!intent.is_noted((1 << 20) - 4096, 8192));
        assert!(!intent.is_noted(u64::MAX - 4096, 4096));
        intent.note((1 << 20) - 4096, 8192);
        assert!(intent.is_noted((1 << 20) - 4096, 8192));
        let ranges: Vec<_> = noted_ranges(&intent.wanted(), 20, 5 << 30).collect();
        let last = (REGIONS_MAX as u64 - 1) << 20;
        let expected = [(0, 1 << 20), (1 << 20, 1 << 20), (last, (5 << 30) - last)];
        assert_eq!(ranges, expected);
        assert_eq!(noted_ranges(&intent.wanted(), 20, 1 << 20).count(), 1);
    }

    #[test]
    fn idle_regions_leave_once_their_bits_are_durable_and_active_ones_stay() {
        let intent = intent();
        intent.note(0, 4096);
        intent.note(1 << 20, 4096);
        assert!(!intent.begin_tick());
        assert!(intent.end_tick(true));
        // Written to again: it does not leave.
        assert!(intent.is_noted(0, 4096));
        assert!(intent.begin_tick());
        // Until the bits are durable, a note has all of them.
        assert_eq!(intent.wanted()[0], 3);
        assert!(intent.end_tick(false));
        assert_eq!(intent.wanted()[0], 3);
        assert!(intent.begin_tick());
        // Written to while the bits are read.
        assert!(intent.is_noted(0, 4096));
        assert!(intent.end_tick(true));
        assert_eq!(intent.wanted()[0], 1);
        assert!(!intent.is_noted(1 << 20, 4096));
        intent.found(&{
            let mut bits = [0; REGIONS_MAX / 8];
            bits[0] = 6;
            bits
        });
        assert!(intent.is_noted(1 << 20, 4096) && intent.is_noted(2 << 20, 4096));
        intent.forget();
        assert_eq!(intent.wanted()[0], 0);
        assert!(!intent.is_noted(0, 1));
        intent.give_up();
        assert!(intent.is_noted(3 << 20, 1));
    }
}
