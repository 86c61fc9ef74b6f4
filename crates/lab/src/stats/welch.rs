//! Welch's test: whether two sets of samples that nothing pairs have different means.

use super::sequential::Moments;
use super::student::{above, quantile};

/// The difference of the means of two sets.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    /// The second mean less the first.
    pub mean: f64,
    error: f64,
    freedom: f64,
}

impl Difference {
    /// Both sets need at least two samples.
    pub fn of(from: &Moments, to: &Moments) -> Self {
        let (from_variance, to_variance) = (from.error().powi(2), to.error().powi(2));
        let variance = from_variance + to_variance;
        let freedom = variance.powi(2)
            / (from_variance.powi(2) / (from.n - 1) as f64
                + to_variance.powi(2) / (to.n - 1) as f64);
        Self {
            mean: to.mean - from.mean,
            error: variance.sqrt(),
            freedom,
        }
    }

    /// The interval that misses the true difference with probability `error_rate`.
    pub fn interval(&self, error_rate: f64) -> (f64, f64) {
        let half = quantile(error_rate / 2.0, self.freedom) * self.error;
        (self.mean - half, self.mean + half)
    }

    /// The p value of "the means are equal".
    pub fn p_equal(&self) -> f64 {
        2.0 * above(self.mean.abs() / self.error, self.freedom)
    }

    /// The p value of "the means differ by more than `margin`".
    pub fn p_beyond(&self, margin: f64) -> f64 {
        above((margin - self.mean.abs()) / self.error, self.freedom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_different_sizes_and_variances() {
        let difference = Difference::of(
            &Moments::of(&[4.0, 5.0, 6.0, 5.0]),
            &Moments::of(&[7.0, 9.0, 8.0, 12.0, 9.0]),
        );
        assert!((difference.mean - 4.0).abs() < 1e-12);
        // t = 4.2967 with 5.7006 degrees of freedom.
        assert!((difference.p_equal() - 0.005_747_3).abs() < 1e-6);
        let (low, high) = difference.interval(difference.p_equal());
        assert!(low.abs() < 1e-6 && (high - 8.0).abs() < 1e-6);
        assert!((difference.p_beyond(4.0) - 0.5).abs() < 1e-9);
        assert!(difference.p_beyond(20.0) < 0.001);
    }
}
