//! Corrections for tests that are repeated after every block.
//!
//! A test after each pair that stops at the first p below 5 % is wrong in far more than 5 % of all cases. Here, a p value
//! is replaced by the probability that *any* of the tests has one as small if there is no difference. That probability does
//! not depend on the noise, because the path of t statistics does not. It is simulated once, with a fixed seed.

use harness::random::Rng;

use super::student::{above, quantile};

/// The fewest pairs for a verdict.
pub const PAIRS_MIN: usize = 3;

const PATHS: usize = 10_000;
/// The smallest p value that the simulation covers: 30 paths of the 10,000. Below it, the p value is multiplied by the
/// number of tests, an upper bound.
const P_MIN: f64 = 0.003;

/// The fewest pairs for a verdict on results that were not made by the lab: with fewer, noise that has two levels looks like
/// a difference.
const PAIRS_MIN_ONCE: usize = 5;

/// Corrections for tests after each pair from [`PAIRS_MIN`] to the last.
#[derive(Clone, Debug)]
pub struct Sequential {
    /// 0 is a single test after the last pair
    tests: usize,
    /// The smallest p value of each path, sorted; of two-sided and of one-sided tests
    two_sided: Vec<f64>,
    one_sided: Vec<f64>,
}

impl Sequential {
    /// Corrections for at most `pairs_max` pairs.
    pub fn new(pairs_max: usize) -> Self {
        let pairs_max = pairs_max.max(PAIRS_MIN);
        let mut rng = Rng::new(0x5eed);
        let (mut two_sided, mut one_sided) = (Vec::with_capacity(PATHS), Vec::with_capacity(PATHS));
        for _ in 0..PATHS {
            let mut moments = Moments::default();
            let (mut least_two, mut least_one) = (1.0_f64, 1.0_f64);
            for n in 1..=pairs_max {
                moments.add(rng.normal());
                if n >= PAIRS_MIN {
                    let tail = above(moments.mean / moments.error(), (n - 1) as f64);
                    least_one = least_one.min(tail);
                    least_two = least_two.min(2.0 * tail.min(1.0 - tail));
                }
            }
            two_sided.push(least_two);
            one_sided.push(least_one);
        }
        two_sided.sort_by(f64::total_cmp);
        one_sided.sort_by(f64::total_cmp);
        Self {
            tests: pairs_max - PAIRS_MIN + 1,
            two_sided,
            one_sided,
        }
    }

    /// A single test, after all pairs: nobody decided by the results when to stop.
    pub fn once() -> Self {
        Self {
            tests: 0,
            two_sided: Vec::new(),
            one_sided: Vec::new(),
        }
    }

    /// Whether there is a single test.
    pub fn is_once(&self) -> bool {
        self.tests == 0
    }

    /// The fewest pairs for a verdict.
    pub fn pairs_min(&self) -> usize {
        if self.is_once() {
            PAIRS_MIN_ONCE
        } else {
            PAIRS_MIN
        }
    }

    /// The corrected p value of a two-sided test; `p` is the smallest so far.
    pub fn two_sided(&self, p: f64) -> f64 {
        self.corrected(p, &self.two_sided)
    }

    /// The corrected p value of a one-sided test; `p` is the smallest so far.
    pub fn one_sided(&self, p: f64) -> f64 {
        self.corrected(p, &self.one_sided)
    }

    /// The p value of a single two-sided test whose corrected value is `level`.
    pub fn nominal(&self, level: f64) -> f64 {
        if self.is_once() {
            return level;
        }
        let (mut low, mut high) = (level / self.tests as f64 / 2.0, level);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if self.two_sided(middle) > level {
                high = middle
            } else {
                low = middle
            }
        }
        low
    }

    fn corrected(&self, p: f64, least: &[f64]) -> f64 {
        if self.is_once() {
            return p;
        }
        let simulated =
            |p: f64| (least.partition_point(|x| *x <= p) + 1) as f64 / (PATHS + 1) as f64;
        if p < P_MIN {
            (p * self.tests as f64).min(simulated(P_MIN))
        } else {
            simulated(p).clamp(p, 1.0)
        }
    }
}

/// Mean and standard deviation, updated with each sample (Welford).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// The number of samples.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    squares: f64,
}

/// The smallest standard deviation that is believed. Without it, two pairs that happen to be equal to the last digit would
/// prove any difference.
const RESOLUTION: f64 = 1e-4;

impl Moments {
    /// Adds a sample.
    pub fn add(&mut self, x: f64) {
        self.n += 1;
        let step = x - self.mean;
        self.mean += step / self.n as f64;
        self.squares += step * (x - self.mean);
    }

    /// The moments of all these samples.
    pub fn of(values: &[f64]) -> Self {
        let mut moments = Self::default();
        values.iter().for_each(|x| moments.add(*x));
        moments
    }

    /// The standard deviation; 0 with fewer than two samples.
    pub fn deviation(&self) -> f64 {
        match self.n {
            0 | 1 => 0.0,
            n => (self.squares / (n - 1) as f64).sqrt(),
        }
    }

    /// The mean's standard error.
    pub fn error(&self) -> f64 {
        self.deviation().max(RESOLUTION) / (self.n.max(1) as f64).sqrt()
    }

    /// The interval of the mean (Student).
    pub fn interval(&self, level: f64) -> Option<super::Interval> {
        if self.n < 2 {
            return None;
        }
        let reach = quantile((1.0 - level) / 2.0, (self.n - 1) as f64) * self.error();
        Some(super::Interval {
            low: self.mean - reach,
            high: self.mean + reach,
            level,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_looks_are_worth_less() {
        let one = Sequential::new(PAIRS_MIN);
        let many = Sequential::new(30);
        assert!(
            (one.two_sided(0.05) - 0.05).abs() < 0.011,
            "{}",
            one.two_sided(0.05)
        );
        assert!(many.two_sided(0.05) > 0.15, "{}", many.two_sided(0.05));
        for p in [1e-9, 1e-4, 0.004, 0.006, 0.03, 0.5, 1.0] {
            assert!(many.two_sided(p) >= p && many.one_sided(p) >= p);
            assert!(many.two_sided(p) <= many.two_sided((p * 1.5).min(1.0)) + 1e-12);
        }
        let nominal = many.nominal(0.05);
        assert!((many.two_sided(nominal) - 0.05).abs() < 0.002, "{nominal}");
        assert!(nominal > 0.05 / 28.0 && nominal < 0.02, "{nominal}");
    }

    #[test]
    fn moments_are_those_of_the_textbook() {
        let moments = Moments::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert!((moments.mean - 5.0).abs() < 1e-12);
        assert!((moments.deviation() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);
    }
}
