//! Random numbers. A seed gives the same numbers in every version of this program: journals record seeds.

/// The next number of SplitMix64 (Steele, Lea and Flood, 2014). It needs one word of state, and any state is a good seed.
pub fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

/// SplitMix64's output function: turns a counter into uniform bits.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// xoshiro256++ (Blackman and Vigna, 2019), seeded by SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// A generator from a seed.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        Self([(); 4].map(|()| split_mix(&mut state)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The bias is below 2^-20 for ranges as large as disks.
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// The index of one of `len` items; `len` must not be 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number from the normal distribution with mean 0 and standard deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Shuffles the items; every order is equally likely (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (2..=items.len()).rev() {
            items.swap(end - 1, self.index(end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn a_seed_gives_the_same_order_for_ever() {
        let mut order: Vec<u8> = (0..8).collect();
        Rng::new(7).shuffle(&mut order);
        assert_eq!(order, [7, 5, 6, 3, 2, 4, 1, 0]);
    }

    #[test]
    fn shuffles_are_fair_and_normals_normal() {
        let mut rng = Rng::new(1);
        let mut first = [0_u32; 5];
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..50_000 {
            let mut items = [0, 1, 2, 3, 4];
            rng.shuffle(&mut items);
            first[items[0]] += 1;
            let x = rng.normal();
            sum += x;
            squares += x * x;
        }
        assert!(
            first.iter().all(|n| (9_700..10_300).contains(n)),
            "{first:?}"
        );
        assert!((sum / 50_000.0).abs() < 0.02 && (squares / 50_000.0 - 1.0).abs() < 0.03);
    }
}
