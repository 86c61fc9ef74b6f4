//! Verdicts on all comparisons of a plan.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Interval;
use super::sequential::{Moments, PAIRS_MIN, Sequential};
use super::student::{above, quantile};

/// The expected share of wrong verdicts among those that are given.
pub const ERROR_RATE: f64 = 0.05;

/// How a comparison ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The second is better.
    Gain,
    /// The second is worse.
    Loss,
    /// They differ by less than the margin.
    Equivalent,
    /// The pairs so far show neither.
    Undecided,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Gain => "gain",
            Self::Loss => "loss",
            Self::Equivalent => "equivalent",
            Self::Undecided => "undecided",
        })
    }
}

/// One comparison, with the pairs so far.
#[derive(Clone, Debug, Default)]
pub struct Contrast {
    pairs: Moments,
    difference: PValue,
    equivalence: PValue,
}

/// The p value of a test that is repeated after each pair.
#[derive(Clone, Copy, Debug)]
struct PValue {
    /// The smallest so far
    least: f64,
    /// With all pairs so far
    now: f64,
}

impl Default for PValue {
    fn default() -> Self {
        Self {
            least: 1.0,
            now: 1.0,
        }
    }
}

impl PValue {
    fn set(&mut self, p: f64, is_once: bool) {
        let least = if is_once { p } else { self.least.min(p) };
        (self.least, self.now) = (least, p);
    }
}

/// Decides on all comparisons of a plan together.
#[derive(Clone, Debug)]
pub struct Judge {
    sequential: Arc<Sequential>,
    margin: f64,
    contrasts: Vec<Contrast>,
    nominal: f64,
}

impl Judge {
    /// A judge for `contrasts` comparisons of at most `pairs_max` pairs. Gains within `margin` (0.03: 3 %) count as none.
    pub fn new(contrasts: usize, pairs_max: usize, margin: f64) -> Self {
        Self::with(Arc::new(Sequential::new(pairs_max)), contrasts, margin)
    }

    /// As [`Judge::new`], with corrections that have been computed before.
    pub fn with(sequential: Arc<Sequential>, contrasts: usize, margin: f64) -> Self {
        Self {
            nominal: sequential.nominal(ERROR_RATE),
            sequential,
            margin: margin.ln_1p(),
            contrasts: vec![Contrast::default(); contrasts],
        }
    }

    /// Adds a pair, as the logarithm `ln(to / from)`.
    pub fn pair(&mut self, contrast: usize, log_ratio: f64) {
        let margin = self.margin;
        let contrast = &mut self.contrasts[contrast];
        contrast.pairs.add(log_ratio);
        let Moments { n, mean, .. } = contrast.pairs;
        if n < self.sequential.pairs_min() {
            return;
        }
        let is_once = self.sequential.is_once();
        let (error, freedom) = (contrast.pairs.error(), (n - 1) as f64);
        let difference = 2.0 * above(mean.abs() / error, freedom);
        // Two one-sided tests: the gain is below the margin, and above its negative.
        let equivalence = above((margin - mean.abs()) / error, freedom);
        contrast.difference.set(difference, is_once);
        contrast.equivalence.set(equivalence, is_once);
    }

    /// The verdicts on all comparisons, corrected for their number: of the decided ones, at most [`ERROR_RATE`] are wrong in
    /// expectation (Benjamini and Hochberg 1995, with p values that are valid whenever the run stops). A verdict that later
    /// pairs no longer support is withdrawn.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let found = |test: fn(&Contrast) -> PValue, correct: &dyn Fn(f64) -> f64| -> Vec<bool> {
            let tests: Vec<PValue> = self.contrasts.iter().map(test).collect();
            let least: Vec<f64> = tests.iter().map(|p| correct(p.least)).collect();
            let found = discoveries(&least).into_iter().zip(tests);
            let stands = |(found, p): (bool, PValue)| found && correct(p.now) <= ERROR_RATE;
            found.map(stands).collect()
        };
        let differ = found(|it| it.difference, &|p| self.sequential.two_sided(p));
        let same = found(|it| it.equivalence, &|p| self.sequential.one_sided(p));
        let verdict = |(index, contrast): (usize, &Contrast)| match (same[index], differ[index]) {
            // A gain within the margin counts as none, even if it is certainly not zero.
            (true, _) => Verdict::Equivalent,
            (false, true) if contrast.pairs.mean > 0.0 => Verdict::Gain,
            (false, true) => Verdict::Loss,
            (false, false) => Verdict::Undecided,
        };
        self.contrasts.iter().enumerate().map(verdict).collect()
    }

    /// The p value of a single two-sided test after any pair at which it is wrong in the share `level` of the runs.
    pub fn nominal(&self, level: f64) -> f64 {
        self.sequential.nominal(level)
    }

    /// The number of pairs so far.
    pub fn pairs(&self, contrast: usize) -> usize {
        self.contrasts[contrast].pairs.n
    }

    /// The mean gain, as the logarithm of a ratio; `None` without a pair.
    pub fn gain(&self, contrast: usize) -> Option<f64> {
        let pairs = self.contrasts[contrast].pairs;
        (pairs.n > 0).then_some(pairs.mean)
    }

    /// The noise of a pair: the standard deviation of its logarithm.
    pub fn deviation(&self, contrast: usize) -> f64 {
        self.contrasts[contrast].pairs.deviation()
    }

    /// The gain's interval, as logarithms. In 95 % of the runs, it covers the truth after *every* pair, so that it does not
    /// matter when the run was stopped; with a [single test](Sequential::once), after the last one.
    pub fn interval(&self, contrast: usize) -> Option<Interval> {
        let pairs = self.contrasts[contrast].pairs;
        if pairs.n < PAIRS_MIN {
            return None;
        }
        let interval = pairs.interval(1.0 - self.nominal)?;
        Some(Interval {
            level: 1.0 - ERROR_RATE,
            ..interval
        })
    }

    /// The smallest effect that the present number of pairs finds nine times in ten, with the present noise, as a logarithm.
    pub fn detectable(&self, contrast: usize) -> Option<f64> {
        let pairs = self.contrasts[contrast].pairs;
        if pairs.n < PAIRS_MIN {
            return None;
        }
        let critical = quantile(self.nominal / 2.0, (pairs.n - 1) as f64);
        Some((critical + 1.2816) * pairs.error())
    }
}

/// Which of these p values are discoveries (Benjamini and Hochberg).
pub fn discoveries(p_values: &[f64]) -> Vec<bool> {
    let mut sorted = p_values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let threshold = sorted
        .iter()
        .enumerate()
        .rfind(|(index, p)| **p <= ERROR_RATE * (index + 1) as f64 / p_values.len() as f64)
        .map(|(_, p)| *p);
    p_values
        .iter()
        .map(|p| threshold.is_some_and(|threshold| *p <= threshold))
        .collect()
}

/// The pairs that find `effect` (0.05: 5 %) nine times in ten if a run's noise is `noise` (0.05: 5 %), even if only one of
/// the `contrasts` has an effect; `None` if `pairs_max` are too few.
pub fn pairs_needed(effect: f64, noise: f64, contrasts: usize, pairs_max: usize) -> Option<usize> {
    let sequential = Sequential::new(pairs_max);
    let nominal = sequential.nominal(ERROR_RATE / contrasts.max(1) as f64);
    // Both sides of a pair are noisy.
    let signal = effect.ln_1p() / (noise.ln_1p() * std::f64::consts::SQRT_2);
    (PAIRS_MIN..=pairs_max).find(|&n| {
        let (count, freedom) = (n as f64, (n - 1) as f64);
        let critical = quantile(nominal / 2.0, freedom);
        // The normal approximation of the noncentral t (Abramowitz and Stegun 26.7.10).
        let z = (signal * count.sqrt() - critical * (1.0 - 0.25 / freedom))
            / (1.0 + critical * critical / (2.0 * freedom)).sqrt();
        z >= 1.2816
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of later pairs may have the other sign.
    #[test]
    fn a_verdict_is_withdrawn_when_later_pairs_contradict_it() {
        let mut judge = Judge::new(1, 30, 0.03);
        for pair in 0..6 {
            judge.pair(0, 0.5_f64.ln() + f64::from(pair) * 1e-3);
        }
        assert_eq!(judge.verdicts(), [Verdict::Loss]);
        for pair in 0..16 {
            judge.pair(0, 1.5_f64.ln() + f64::from(pair) * 1e-3);
        }
        let interval = judge.interval(0).unwrap();
        assert!(judge.gain(0).unwrap() > 0.0 && interval.low < 0.0);
        assert_eq!(judge.verdicts(), [Verdict::Undecided]);
    }

    #[test]
    fn clear_comparisons_are_decided_and_noisy_ones_are_not() {
        let mut judge = Judge::new(4, 30, 0.03);
        for n in 0..12 {
            let wobble = if n % 2 == 0 { 0.004 } else { -0.004 };
            judge.pair(0, 0.2 + wobble);
            judge.pair(1, -0.2 + wobble);
            judge.pair(2, wobble);
            judge.pair(3, 20.0 * wobble);
        }
        let verdicts = judge.verdicts();
        assert_eq!(
            verdicts,
            [
                Verdict::Gain,
                Verdict::Loss,
                Verdict::Equivalent,
                Verdict::Undecided
            ]
        );
        let interval = judge.interval(0).unwrap();
        assert!(interval.low > 0.19 && interval.high < 0.21);
        assert_eq!(Judge::new(1, 30, 0.03).verdicts(), [Verdict::Undecided]);
        assert_eq!(judge.pairs(3), 12);
    }

    #[test]
    fn two_pairs_decide_nothing() {
        let mut judge = Judge::new(1, 30, 0.03);
        judge.pair(0, 1.0);
        judge.pair(0, 1.0);
        assert_eq!(judge.verdicts(), [Verdict::Undecided]);
        assert_eq!(judge.interval(0), None);
    }

    #[test]
    fn discoveries_are_those_of_the_paper() {
        // Benjamini and Hochberg's example, 1995, §4.1: the first four of 15.
        let p = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
            0.5719, 0.6528, 0.7590, 1.0,
        ];
        assert_eq!(discoveries(&p).iter().filter(|found| **found).count(), 4);
    }

    #[test]
    fn less_noise_needs_fewer_pairs() {
        let needed = |noise, contrasts| pairs_needed(0.05, noise, contrasts, 200).unwrap();
        assert!(needed(0.01, 1) < needed(0.02, 1) && needed(0.02, 1) < needed(0.05, 1));
        assert!(needed(0.05, 1) < needed(0.05, 100));
        assert_eq!(pairs_needed(0.001, 0.5, 1, 20), None);
    }
}
