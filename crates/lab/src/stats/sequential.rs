//! Looking at results after every block without being fooled by it.
//!
//! Whoever looks after each pair and stops at the first p below 5 % is wrong in far more than 5 % of all cases. Here a p
//! value is replaced by the probability that *any* look up to the last has one as small, if there is no difference.
//! That probability is known: the path of t statistics does not depend on the noise, so it is simulated, once, with a
//! fixed seed.

use harness::random::Rng;

use super::student::{above, quantile};

/// Fewest pairs that anything is decided on.
pub const PAIRS_MIN: usize = 3;

const PATHS: usize = 10_000;
/// Smallest p value that the simulation speaks of: 30 paths of the 10,000. Below it, p values add up over the looks,
/// which is never too small.
const P_MIN: f64 = 0.003;

/// Corrections for looks after each pair from [`PAIRS_MIN`] to the last.
#[derive(Clone, Debug)]
pub struct Sequential {
    looks: usize,
    /// Sorted: the least p value of each path, of both sides and of one.
    two_sided: Vec<f64>,
    one_sided: Vec<f64>,
}

impl Sequential {
    /// For at most `pairs_max` pairs.
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
            looks: pairs_max - PAIRS_MIN + 1,
            two_sided,
            one_sided,
        }
    }

    /// What a p value of both sides is worth, if it is the least of all looks so far.
    pub fn two_sided(&self, p: f64) -> f64 {
        self.worth(p, &self.two_sided)
    }

    /// The same for a test of one side.
    pub fn one_sided(&self, p: f64) -> f64 {
        self.worth(p, &self.one_sided)
    }

    /// The p value of a single look that is worth `level`, for both sides.
    pub fn nominal(&self, level: f64) -> f64 {
        let (mut low, mut high) = (level / self.looks as f64 / 2.0, level);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            match self.two_sided(middle) > level {
                true => high = middle,
                false => low = middle,
            }
        }
        low
    }

    fn worth(&self, p: f64, least: &[f64]) -> f64 {
        let simulated =
            |p: f64| (least.partition_point(|x| *x <= p) + 1) as f64 / (PATHS + 1) as f64;
        match p < P_MIN {
            true => (p * self.looks as f64).min(simulated(P_MIN)),
            false => simulated(p).clamp(p, 1.0),
        }
    }
}

/// Mean and deviation, as samples come (Welford).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// Samples.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    squares: f64,
}

/// Differences below this are those of counting, not of what is counted: without it, two pairs that happen to be equal
/// to the last digit would be proof of anything.
const RESOLUTION: f64 = 1e-4;

impl Moments {
    /// One more.
    pub fn add(&mut self, x: f64) {
        self.n += 1;
        let step = x - self.mean;
        self.mean += step / self.n as f64;
        self.squares += step * (x - self.mean);
    }

    /// Of all of them.
    pub fn of(values: &[f64]) -> Self {
        let mut moments = Self::default();
        values.iter().for_each(|x| moments.add(*x));
        moments
    }

    /// The standard deviation; 0 of fewer than two.
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
