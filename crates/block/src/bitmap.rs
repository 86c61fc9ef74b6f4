//! Dirty bitmaps: which parts of a disk have changed since some moment.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fmt, io};

use crate::intent::WriteIntent;

/// Words of the first segment; each further segment has twice as many. 2,048 words are 8 GiB of disk at 64 KiB a bit.
const FIRST: u64 = 2048;
/// 2048 * (2^18 - 1) words are 4 GiB of bits.
const SEGMENTS: usize = 18;

/// A bitmap of a disk. Bit n covers the bytes from `n << granularity_bits` on.
///
/// I/O threads set bits without locks, also while the disk grows: words never move. A bit is set before its write is
/// submitted, so the bits are always a superset of what was written.
pub struct DirtyBitmap {
    name: String,
    granularity_bits: u32,
    words: Words,
    /// Bytes of the disk.
    size: AtomicU64,
    is_recording: bool,
    is_persistent: bool,
    /// Some changes were not recorded.
    is_inconsistent: AtomicBool,
}

/// The disk is too large for the bitmap, or there is no space for more words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge;

/// Why a bitmap cannot cover a disk that has grown.
#[derive(Debug)]
pub enum CannotGrow {
    /// The bits of all bitmaps, or of this one, would exceed a limit.
    Limit,
    /// There is no space for more words.
    NoSpace(io::Error),
}

/// Memory for the words of a bitmap that survives a kill of the process.
pub trait SharedWords: Send + Sync {
    /// All words that there are. They never move.
    fn words(&self) -> &[AtomicU64];

    /// Makes sure that there are so many words; new ones are 0. Only one thread at a time may call this.
    ///
    /// # Errors
    /// There is no space for them.
    fn grow(&self, words: u64) -> io::Result<()>;

    /// Notes that something is about to be written to the disk, so that a later time of writing is that of another program.
    fn note_time(&self);
}

#[expect(
    clippy::large_enum_variant,
    reason = "a pointer more would be one more access to memory for each write"
)]
enum Words {
    Own([OnceLock<Box<[AtomicU64]>>; SEGMENTS]),
    Shared(Arc<dyn SharedWords>),
}

impl Words {
    #[expect(
        clippy::declare_interior_mutable_const,
        reason = "each use is a new value"
    )]
    const NONE: Self = Self::Own([const { OnceLock::new() }; SEGMENTS]);

    #[inline]
    fn get(&self, word: u64) -> Option<&AtomicU64> {
        match self {
            Self::Own(segments) => {
                let (segment, word) = locate(word);
                segments.get(segment)?.get()?.get(word)
            }
            Self::Shared(shared) => shared.words().get(usize::try_from(word).ok()?),
        }
    }

    fn grow(&self, words: u64) -> Result<(), CannotGrow> {
        let segments = match self {
            Self::Shared(shared) => return shared.grow(words).map_err(CannotGrow::NoSpace),
            Self::Own(_) if words == 0 => return Ok(()),
            Self::Own(segments) => segments,
        };
        let (last, _) = locate(words - 1);
        let segments = segments.get(..=last).ok_or(CannotGrow::Limit)?;
        for (number, segment) in segments.iter().enumerate() {
            // Its pages exist once bits are set in them.
            let words = || vec![0; (FIRST << number) as usize].into_iter();
            segment.get_or_init(|| words().map(AtomicU64::new).collect());
        }
        Ok(())
    }
}

impl fmt::Debug for DirtyBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, granularity) = (&self.name, self.granularity());
        write!(f, "bitmap '{name}' of {granularity} bytes a bit")
    }
}

impl DirtyBitmap {
    /// A bitmap without dirty bits. `is_recording`: changes of the disk are recorded. `is_persistent`: it is stored
    /// when the disk is no longer in use.
    ///
    /// # Errors
    /// The disk is too large for this granularity.
    pub fn new(
        name: String,
        granularity_bits: u32,
        size: u64,
        is_recording: bool,
        is_persistent: bool,
    ) -> Result<Self, TooLarge> {
        let bitmap = Self {
            name,
            granularity_bits,
            words: Words::NONE,
            size: AtomicU64::new(0),
            is_recording,
            is_persistent,
            is_inconsistent: AtomicBool::new(false),
        };
        bitmap.grow(size)?;
        Ok(bitmap)
    }

    /// The same bitmap with its bits in `shared`, in addition to those that are set there.
    ///
    /// # Errors
    /// There is no space for them.
    pub fn in_shared(&self, shared: Arc<dyn SharedWords>) -> Result<Self, TooLarge> {
        let mut copy = self.cleared_without_words();
        copy.words = Words::Shared(shared);
        copy.grow(self.size())?;
        copy.merge(self);
        Ok(copy)
    }

    /// Whether its bits survive a kill of the process.
    pub fn is_shared(&self) -> bool {
        matches!(self.words, Words::Shared(_))
    }

    /// Its name, which is unique among those of a disk.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the disk for each bit.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// The same, as a power of two.
    pub fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// Bytes of the disk that it covers.
    pub fn size(&self) -> u64 {
        self.size.load(SeqCst)
    }

    /// The number of bits.
    fn bits(&self) -> u64 {
        self.size().div_ceil(self.granularity())
    }

    /// The number of bytes that hold its bits.
    pub fn bytes(&self) -> u64 {
        self.bytes_at(self.size())
    }

    /// The same if the disk had `size` bytes.
    pub fn bytes_at(&self, size: u64) -> u64 {
        size.div_ceil(self.granularity()).div_ceil(8)
    }

    /// Whether changes of the disk are recorded.
    pub fn is_recording(&self) -> bool {
        self.is_recording
    }

    /// Whether it is stored when the disk is no longer in use.
    pub fn is_persistent(&self) -> bool {
        self.is_persistent
    }

    /// Whether the bitmap lacks some changes, and is of no use any more.
    pub fn is_inconsistent(&self) -> bool {
        self.is_inconsistent.load(SeqCst)
    }

    /// Some changes of the disk were not recorded.
    pub fn set_inconsistent(&self) {
        self.is_inconsistent.store(true, SeqCst);
    }

    /// The same bitmap without dirty bits.
    #[must_use]
    pub fn cleared(&self) -> Self {
        self.cleared_without_words().grown_to(self.size())
    }

    fn cleared_without_words(&self) -> Self {
        Self {
            name: self.name.clone(),
            granularity_bits: self.granularity_bits,
            words: Words::NONE,
            size: AtomicU64::new(0),
            is_recording: self.is_recording,
            is_persistent: self.is_persistent,
            is_inconsistent: AtomicBool::new(self.is_inconsistent()),
        }
    }

    /// A copy that records changes, or does not.
    #[must_use]
    pub fn recording(&self, is_recording: bool) -> Self {
        let mut copy = self.cleared();
        copy.is_recording = is_recording;
        copy.merge(self);
        copy
    }

    /// Sets the bits of what is dirty in another bitmap, which has the same size.
    pub fn merge(&self, other: &Self) {
        if self.granularity_bits == other.granularity_bits {
            for number in 0..other.bits().div_ceil(64) {
                if let Some(word) = other.word(number) {
                    self.set(number, word.load(Relaxed) & self.inside(number));
                }
            }
            return;
        }
        let mut at = 0;
        while let Some((is_dirty, len)) = other.extent(at) {
            if is_dirty {
                self.mark(at, len);
            }
            at += len;
        }
    }

    fn grown_to(self, size: u64) -> Self {
        // A bitmap of the same size and granularity exists.
        let _ = self.grow(size);
        self
    }

    /// Covers a disk that has grown. The new part is clean. Only one thread at a time may call this.
    ///
    /// # Errors
    /// The disk is too large for this granularity. Nothing changes.
    pub fn grow(&self, size: u64) -> Result<(), TooLarge> {
        self.reserve(size).map_err(|_| TooLarge)?;
        self.size.fetch_max(size, SeqCst);
        Ok(())
    }

    /// Makes space for the bits of a disk of this size, which the bitmap does not cover yet. Only one thread at a time may call
    /// this.
    ///
    /// # Errors
    /// There is none. Nothing changes.
    pub fn reserve(&self, size: u64) -> Result<(), CannotGrow> {
        let words = size.div_ceil(self.granularity()).div_ceil(64);
        self.words.grow(words)
    }

    /// Sets the bits of a range of the disk, which is about to change.
    pub fn mark(&self, at: u64, len: u64) {
        if len != 0 {
            self.note_time();
            self.set_range(at, len);
        }
    }

    /// Notes the present time as that of the last change, for a bitmap that survives a kill of the process.
    pub fn note_time(&self) {
        if let Words::Shared(shared) = &self.words {
            shared.note_time();
        }
    }

    #[inline]
    fn set_range(&self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (
            at >> self.granularity_bits,
            (at + (len - 1)) >> self.granularity_bits,
        );
        if first / 64 == last / 64 {
            self.set(first / 64, mask(first % 64, last % 64));
        } else {
            self.mark_words(first, last);
        }
    }

    #[inline(never)]
    fn mark_words(&self, first: u64, last: u64) {
        // Bits after the end of the disk have no words.
        let last = last.min(self.bits().saturating_sub(1));
        for word in first / 64..=last / 64 {
            let from = if word == first / 64 { first % 64 } else { 0 };
            let to = if word == last / 64 { last % 64 } else { 63 };
            self.set(word, mask(from, to));
        }
    }

    #[inline]
    fn set(&self, word: u64, mask: u64) {
        // The order with the write that follows is given by its submission, which is a system call.
        if let Some(word) = self.word(word)
            && word.load(Relaxed) & mask != mask
        {
            word.fetch_or(mask, Relaxed);
        }
    }

    #[inline]
    fn word(&self, word: u64) -> Option<&AtomicU64> {
        self.words.get(word)
    }

    /// The length in bytes of the part from `at` on that is all dirty or all clean, and whether it is dirty. `None` at
    /// the end of the disk.
    pub fn extent(&self, at: u64) -> Option<(bool, u64)> {
        self.extent_within(at, u64::MAX)
    }

    /// The same for the first `max` bytes of that part at most, without looking at bits after them.
    pub fn extent_within(&self, at: u64, max: u64) -> Option<(bool, u64)> {
        let size = self.size().min(at.saturating_add(max));
        if at >= size {
            return None;
        }
        let first = at >> self.granularity_bits;
        let bits = size.div_ceil(self.granularity());
        let word_at = |bit: u64| self.word(bit / 64).map_or(0, |word| word.load(Relaxed));
        // Read once: with another value of the first bit, the part would be empty.
        let mut word = word_at(first);
        let is_dirty = word >> (first % 64) & 1 != 0;
        let mut bit = first;
        loop {
            let differs = if is_dirty { !word } else { word } >> (bit % 64);
            if differs != 0 {
                bit += u64::from(differs.trailing_zeros());
                break;
            }
            bit = (bit / 64 + 1) * 64;
            if bit >= bits {
                break;
            }
            word = word_at(bit);
        }
        let end = bit
            .min(bits)
            .checked_shl(self.granularity_bits)
            .map_or(size, |end| end.min(size));
        Some((is_dirty, end - at))
    }

    /// The number of dirty bits.
    pub fn dirty_bits(&self) -> u64 {
        let dirty_in = |number| {
            let word = self.word(number).map_or(0, |word| word.load(Relaxed));
            u64::from((word & self.inside(number)).count_ones())
        };
        (0..self.bits().div_ceil(64)).map(dirty_in).sum()
    }

    /// Copies bits into `to`, from the byte at `from` on, which is a multiple of 8: the lowest bit of a byte comes first. Bits
    /// after the end are 0.
    pub fn copy_to(&self, from: u64, to: &mut [u8]) {
        debug_assert!(from.is_multiple_of(8));
        for (number, bytes) in (from / 8..).zip(to.chunks_mut(8)) {
            let word = self.word(number).map_or(0, |word| word.load(Relaxed));
            let word = word & self.inside(number);
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }

    /// Sets the bits that are set in `bytes`, from the byte at `at` on, which is a multiple of 8. Bits after the end are
    /// ignored.
    pub fn merge_bytes(&self, at: u64, bytes: &[u8]) {
        debug_assert!(at.is_multiple_of(8));
        for (number, bytes) in (at / 8..).zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let word = u64::from_le_bytes(word) & self.inside(number);
            if word != 0 {
                self.set(number, word);
            }
        }
    }

    /// The bits of a word that are not after the end.
    fn inside(&self, word: u64) -> u64 {
        match self.bits().saturating_sub(word.saturating_mul(64)) {
            0 => 0,
            bits @ 1..64 => mask(0, bits - 1),
            _ => u64::MAX,
        }
    }
}

/// The bits `from` to `to` of a word.
#[inline]
fn mask(from: u64, to: u64) -> u64 {
    u64::MAX << from & u64::MAX >> (63 - to)
}

#[inline]
fn locate(word: u64) -> (usize, usize) {
    let segment = (word / FIRST + 1).ilog2();
    let before = FIRST * ((1 << segment) - 1);
    (segment as usize, (word - before) as usize)
}

/// The bitmaps of a disk.
#[derive(Debug, Default)]
pub struct DirtyBitmaps {
    all: Mutex<Vec<Arc<DirtyBitmap>>>,
    intent: Mutex<Intent>,
}

#[derive(Debug, Default)]
struct Intent {
    regions: Option<Arc<WriteIntent>>,
    /// Also while no persistent bitmap is recording.
    is_always_needed: bool,
}

impl DirtyBitmaps {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<DirtyBitmap>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What persistent bitmaps need to survive a power cut; `is_always_needed`: even if none is recording. No request is in
    /// flight.
    pub fn set_intent(&self, regions: Option<Arc<WriteIntent>>, is_always_needed: bool) {
        *self.intent.lock().unwrap_or_else(PoisonError::into_inner) = Intent {
            regions,
            is_always_needed,
        };
    }

    /// Replaces all of them.
    pub fn set(&self, bitmaps: Vec<Arc<DirtyBitmap>>) {
        *self.lock() = bitmaps;
    }

    /// Adds a bitmap with a new name.
    pub fn add(&self, bitmap: Arc<DirtyBitmap>) {
        self.lock().push(bitmap);
    }

    /// Removes this one. Threads record in it until they take over which bitmaps record changes.
    pub fn remove(&self, bitmap: &Arc<DirtyBitmap>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, bitmap));
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<DirtyBitmap>> {
        self.lock().clone()
    }

    /// Makes space for the bits of a disk of `size` bytes. Only one thread at a time may call this. Returns those for which there
    /// is none, and which must become inconsistent before the disk grows: the bits of all take at most `bytes_max` bytes.
    /// Backups depend on those that persist, which come first, and many small ones are worth more than a large one.
    #[must_use]
    pub fn reserve(&self, size: u64, bytes_max: u64) -> Vec<(Arc<DirtyBitmap>, CannotGrow)> {
        let mut all = self.all();
        all.retain(|bitmap| !bitmap.is_inconsistent());
        all.sort_by_key(|bitmap| (!bitmap.is_persistent(), bitmap.bytes_at(size)));
        let mut left = bytes_max;
        let mut without = Vec::new();
        for bitmap in all {
            let needed = bitmap.bytes_at(size);
            let reserved = if needed > left {
                Err(CannotGrow::Limit)
            } else {
                bitmap.reserve(size)
            };
            match reserved {
                Ok(()) => left -= needed,
                Err(why) => without.push((bitmap, why)),
            }
        }
        without
    }

    /// Lets those cover a disk that has grown to `size` for whose bits there is [space](Self::reserve); the new part is clean. Only
    /// one thread at a time may call this.
    pub fn grow(&self, size: u64) {
        for bitmap in self.all() {
            if !bitmap.is_inconsistent() && bitmap.grow(size).is_err() {
                bitmap.set_inconsistent();
            }
        }
    }

    /// The one with this name.
    pub fn find(&self, name: &str) -> Option<Arc<DirtyBitmap>> {
        let bitmaps = self.lock();
        bitmaps.iter().find(|bitmap| bitmap.name() == name).cloned()
    }

    /// Those that record changes. A thread that writes to the disk has a copy of this list, which changes only while it
    /// has no request in flight.
    pub fn recording(&self) -> RecordingBitmaps {
        let recording = |bitmap: &&Arc<DirtyBitmap>| bitmap.is_recording();
        let bitmaps: Box<[_]> = self.lock().iter().filter(recording).cloned().collect();
        let is_needed = bitmaps.iter().any(|bitmap| bitmap.is_persistent());
        let intent = self.intent.lock().unwrap_or_else(PoisonError::into_inner);
        RecordingBitmaps {
            bitmaps,
            intent: (intent.regions.clone()).filter(|_| is_needed || intent.is_always_needed),
        }
    }
}

/// Whether the time was noted for writes that are submitted together. To look at the clock takes as long as to set a bit.
#[derive(Debug, Default)]
pub struct TimeNoted(bool);

/// The bitmaps that record the changes of a disk.
#[derive(Clone, Debug, Default)]
pub struct RecordingBitmaps {
    bitmaps: Box<[Arc<DirtyBitmap>]>,
    intent: Option<Arc<WriteIntent>>,
}

impl RecordingBitmaps {
    /// Sets the bits of a range that is about to change. Returns whether it may change now; if not, it must be
    /// [noted](Self::intent) first. All that have the same `noted` are submitted together, at once.
    #[inline]
    #[must_use]
    pub fn mark(&self, at: u64, len: u64, noted: &mut TimeNoted) -> bool {
        for bitmap in &self.bitmaps {
            if !noted.0 {
                self.note_time(noted);
            }
            bitmap.set_range(at, len);
        }
        self.intent
            .as_ref()
            .is_none_or(|intent| intent.is_noted(at, len))
    }

    #[cold]
    fn note_time(&self, noted: &mut TimeNoted) {
        self.note_again();
        noted.0 = true;
    }

    /// Notes the time again: a range that was [marked](Self::mark) earlier is submitted only now.
    pub fn note_again(&self) {
        self.bitmaps.iter().for_each(|bitmap| bitmap.note_time());
    }

    /// Where ranges are noted that are about to change, if that is needed.
    pub fn intent(&self) -> Option<Arc<WriteIntent>> {
        self.intent.clone()
    }
}

#[cfg(test)]
mod tests;
