//! Random numbers and seeds for tests.

use harness::random::split_mix;

const SECTOR: u64 = 512;

/// Random numbers that depend only on the seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// Returns a random number.
    pub fn any(&mut self) -> u64 {
        split_mix(&mut self.0)
    }

    /// Returns a random number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any() % end
    }

    /// Whether an event with a probability of `often` in 1000 occurs.
    pub fn occurs_in_1000(&mut self, often: u32) -> bool {
        self.below(1000) < u64::from(often)
    }

    /// Whether an event with a probability of 1 in `n` occurs.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a range of sectors in a disk, as its start and length in bytes; mostly short, often aligned.
    pub fn range(&mut self, size: u64, cluster: u64) -> (u64, u64) {
        let unit = match self.below(4) {
            0 => cluster.min(size),
            1 => 4096.min(size),
            _ => SECTOR,
        };
        let at = self.below(size.div_ceil(unit)) * unit;
        let most = [1, 4, 16, 64][self.below(4) as usize];
        let len = (1 + self.below(most)) * unit;
        (at, len.min(size - at))
    }
}

/// The seeds to run: the one in the environment, otherwise `count` seeds from `base` on.
///
/// # Panics
/// The environment variable is not a number.
pub fn seeds(base: u64, count: u64) -> Vec<u64> {
    match std::env::var("RINGDISK_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("RINGDISK_TEST_SEED is a number")],
        Err(_) => (base..base + count).collect(),
    }
}
