use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::types::L1Index;

/// Entries of the first segment; each further segment has twice as many.
const FIRST: u64 = 1024;
/// 1024 * (2^13 - 1) entries are more than the 4 Mi of the largest table.
const SEGMENTS: usize = 13;

/// The active L1 table. Readers take no lock, also while it grows: entries never move.
#[derive(Default)]
pub(crate) struct L1 {
    segments: [OnceLock<Box<[AtomicU64]>>; SEGMENTS],
    entries: AtomicU64,
}

impl L1 {
    /// How many there are.
    pub fn entries(&self) -> u64 {
        self.entries.load(SeqCst)
    }

    /// Appends entries. Only one thread at a time may call this.
    pub fn extend(&self, entries: impl Iterator<Item = u64>) {
        let mut at = self.entries();
        for word in entries {
            let (segment, entry) = locate(L1Index::new(at));
            let segment = self.segments[segment].get_or_init(|| {
                let len = FIRST << segment;
                (0..len).map(|_| AtomicU64::new(0)).collect()
            });
            segment[entry].store(word, SeqCst);
            at += 1;
        }
        self.entries.store(at, SeqCst);
    }

    /// An entry; 0 after the end.
    #[inline]
    pub fn get(&self, index: L1Index) -> u64 {
        if index.number() >= self.entries() {
            return 0;
        }
        let (segment, entry) = locate(index);
        let segment = self.segments[segment].get();
        segment.map_or(0, |segment| segment[entry].load(SeqCst))
    }

    /// Changes an existing entry.
    pub fn set(&self, index: L1Index, word: u64) {
        let (segment, entry) = locate(index);
        if let Some(segment) = self.segments[segment].get() {
            segment[entry].store(word, SeqCst);
        }
    }
}

#[inline]
fn locate(index: L1Index) -> (usize, usize) {
    let index = index.number();
    let segment = (index / FIRST + 1).ilog2();
    let before = FIRST * ((1 << segment) - 1);
    (segment as usize, (index - before) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stay_where_they_are() {
        let l1 = L1::default();
        l1.extend(0..5000);
        l1.extend(5000..20_000);
        let get = |index| l1.get(L1Index::new(index));
        assert!((0..20_000).all(|i| get(i) == i));
        assert_eq!((get(20_000), l1.entries()), (0, 20_000));
        l1.set(L1Index::new(1024), 7);
        assert_eq!((get(1023), get(1024)), (1023, 7));
        let (last, _) = locate(L1Index::new(4 << 20));
        assert!(last < SEGMENTS);
    }
}
