//! The cached parts of L2 tables, which are read without locks. A slice is the unit of caching, smaller than a table, as
//! in QEMU (`l2-cache-entry-size`). A frame is the memory for one slice.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};

use super::geometry::Geometry;
use super::types::{Frame, L2Index, SliceIndex};

/// Frames that a slice may be in; their tags are adjacent, in half a cache line.
const WAYS: usize = 4;

/// Bits of a tag that count how often its frame was refilled. To be misled, a reader would have to be
/// suspended between two instructions for exactly a multiple of a million refills.
const COUNT_BITS: u32 = 20;

/// A set-associative cache of slices.
///
/// A reader compares tags, reads entries, and then reads the tag again: if it has not changed, the
/// entries belong to the slice. A writer clears the tag before it refills a frame. All changes are made
/// under the state lock. All accesses are SeqCst, because [`Pins`](super::Pins) requires it; on x86 this
/// costs readers nothing.
pub(crate) struct Cache {
    tags: Box<[AtomicU64]>,
    was_used: Box<[AtomicBool]>,
    /// Allocated when a frame is first filled.
    frames: Box<[OnceLock<Box<[AtomicU64]>>]>,
    words: usize,
    sets: u64,
    hand: AtomicUsize,
}

/// A slice that was found. Entries read from it are usable only if it is still [valid](Self::is_valid) afterwards.
#[derive(Clone, Copy)]
pub(crate) struct Found<'a> {
    tag: &'a AtomicU64,
    expected: u64,
    words: &'a [AtomicU64],
    pub frame: Frame,
}

impl Cache {
    /// A cache of at least `slices` slices.
    pub fn new(geometry: &Geometry, slices: u64) -> Self {
        let sets = slices.div_ceil(WAYS as u64).next_power_of_two();
        let frames = sets as usize * WAYS;
        Self {
            tags: (0..frames).map(|_| AtomicU64::new(0)).collect(),
            was_used: (0..frames).map(|_| AtomicBool::new(false)).collect(),
            frames: (0..frames).map(|_| OnceLock::new()).collect(),
            words: (geometry.slice_bytes() / 8) as usize,
            sets,
            hand: AtomicUsize::new(0),
        }
    }

    /// The capacity in slices.
    pub fn slices(&self) -> u64 {
        self.sets * WAYS as u64
    }

    #[inline]
    fn first_way(&self, slice: SliceIndex) -> usize {
        (slice.number() & (self.sets - 1)) as usize * WAYS
    }

    /// Finds a slice.
    #[inline]
    pub fn find(&self, slice: SliceIndex) -> Option<Found<'_>> {
        let first = self.first_way(slice);
        for frame in (first..first + WAYS).map(Frame) {
            let tag = &self.tags[frame.0];
            let expected = tag.load(SeqCst);
            if expected >> COUNT_BITS == slice.number() + 1 {
                if !self.was_used[frame.0].load(SeqCst) {
                    self.was_used[frame.0].store(true, SeqCst);
                }
                return Some(Found {
                    tag,
                    expected,
                    words: self.frames[frame.0].get()?,
                    frame,
                });
            }
        }
        None
    }

    /// The slice in a frame.
    pub fn slice_in(&self, frame: Frame) -> Option<SliceIndex> {
        let slice = (self.tags[frame.0].load(SeqCst) >> COUNT_BITS).checked_sub(1);
        slice.map(SliceIndex::new)
    }

    /// Empties a frame for `slice`, unless all candidates `is_kept`. The caller holds the state lock.
    pub fn evict_for(&self, slice: SliceIndex, is_kept: impl Fn(Frame) -> bool) -> Option<Frame> {
        let first = self.first_way(slice);
        let candidates = || {
            (first..first + WAYS)
                .map(Frame)
                .filter(|&frame| !is_kept(frame))
        };
        let empty = candidates().find(|&frame| self.slice_in(frame).is_none());
        let victim = empty.or_else(|| {
            // Second chance: a frame that was used since is spared once.
            let hand = self.hand.fetch_add(1, SeqCst) % WAYS;
            let in_turn = || {
                let ways = (0..WAYS).map(move |way| Frame(first + (hand + way) % WAYS));
                ways.filter(|&frame| !is_kept(frame))
            };
            let idle = in_turn().find(|&frame| !self.was_used[frame.0].swap(false, SeqCst));
            idle.or_else(|| in_turn().next())
        })?;
        self.clear_tag(victim);
        Some(victim)
    }

    /// Clears the tag; only its counter remains, increased by one.
    fn clear_tag(&self, frame: Frame) {
        let count = self.tags[frame.0].load(SeqCst).wrapping_add(1) & ((1 << COUNT_BITS) - 1);
        self.tags[frame.0].store(count, SeqCst);
    }

    fn set_tag(&self, frame: Frame, slice: SliceIndex) {
        let count = self.tags[frame.0].load(SeqCst) & ((1 << COUNT_BITS) - 1);
        self.was_used[frame.0].store(true, SeqCst);
        self.tags[frame.0].store((slice.number() + 1) << COUNT_BITS | count, SeqCst);
    }

    /// Fills a frame that was emptied.
    pub fn fill(&self, frame: Frame, slice: SliceIndex, words: impl Iterator<Item = u64>) {
        let empty = || (0..self.words).map(|_| AtomicU64::new(0)).collect();
        let mut words = words;
        for to in self.frames[frame.0].get_or_init(empty) {
            to.store(words.next().unwrap_or(0), SeqCst);
        }
        self.set_tag(frame, slice);
    }

    /// Changes one entry of the slice in this frame.
    pub fn set(&self, frame: Frame, entry: L2Index, entry_words: &[u64]) {
        let entry = entry.number();
        let Some(words) = self.frames[frame.0].get() else {
            return;
        };
        if let [word] = entry_words {
            // A reader sees a single word change atomically.
            words[entry].store(*word, SeqCst);
        } else if let [word, bitmap] = entry_words
            && let Some(slice) = self.slice_in(frame)
        {
            // A reader of two words must not see one old and one new.
            self.clear_tag(frame);
            words[2 * entry].store(*word, SeqCst);
            words[2 * entry + 1].store(*bitmap, SeqCst);
            self.set_tag(frame, slice);
        }
    }

    /// A copy of some words of a frame.
    pub fn copy(&self, frame: Frame, words: std::ops::Range<usize>) -> Vec<u64> {
        let from = self.frames[frame.0].get();
        let from = from.and_then(|from| from.get(words)).unwrap_or(&[]);
        from.iter().map(|word| word.load(SeqCst)).collect()
    }
}

impl Found<'_> {
    #[inline]
    pub fn words(&self, g: &Geometry, entry: L2Index) -> (u64, u64) {
        let entry = entry.number();
        if g.extended {
            let word = self.words[2 * entry].load(SeqCst);
            (word, self.words[2 * entry + 1].load(SeqCst))
        } else {
            (self.words[entry].load(SeqCst), 0)
        }
    }

    /// Whether the entries read before this call belong to the slice.
    #[inline]
    pub fn is_valid(&self) -> bool {
        self.tag.load(SeqCst) == self.expected
    }
}
