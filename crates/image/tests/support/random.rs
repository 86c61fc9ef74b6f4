//! Numbers that follow from a printed seed.

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// The next one (splitmix64).
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A range on sectors inside a disk; mostly short, often aligned.
    pub fn range(&mut self, size: u64, cluster: u64) -> (u64, u64) {
        let unit = match self.below(4) {
            0 => cluster.min(size),
            1 => 4096.min(size),
            _ => 512,
        };
        let at = self.below(size.div_ceil(unit)) * unit;
        let most = [1, 4, 16, 64][self.below(4) as usize];
        let len = (1 + self.below(most)) * unit;
        (at, len.min(size - at))
    }

    /// The seeds to run: the one in the environment, or some from `base` on.
    pub fn seeds(base: u64, count: u64) -> Vec<u64> {
        match std::env::var("RINGDISK_SEED") {
            Ok(seed) => vec![seed.parse().expect("RINGDISK_SEED is a number")],
            Err(_) => (base..base + count).collect(),
        }
    }
}
