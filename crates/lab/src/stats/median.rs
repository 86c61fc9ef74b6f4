//! Medians of few samples, with intervals; and the bootstrap for other statistics.

use harness::random::Rng;
use harness::spread::Spread;

/// An interval with its confidence level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The probability that it covers the truth: the requested one, or less if there are too few samples.
    pub level: f64,
}

/// The median; `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    Spread::of(values.iter().copied()).map(|spread| spread.median)
}

/// The interval of a median for any distribution; `None` with fewer than two samples.
///
/// Intervals between order statistics have only a few levels (10 samples: 89 % or 98 %). So has the bootstrap of a median,
/// which selects order statistics. Hettmansperger and Sheather (1986) interpolate between two such intervals.
pub fn median_interval(values: &[f64], level: f64) -> Option<Interval> {
    let sorted = sorted(values);
    let n = sorted.len();
    if n < 2 {
        return None;
    }
    // rates[d]: the probability that the median is between the (d+1)-th smallest and the (d+1)-th largest sample
    let mut rates = Vec::new();
    let (mut probability, mut below) = (0.5_f64.powi(n as i32), 0.0);
    for d in 0..n / 2 {
        below += probability;
        rates.push(1.0 - 2.0 * below);
        probability *= (n - d) as f64 / (d + 1) as f64;
    }
    let Some(d) = rates.iter().rposition(|rate| *rate >= level) else {
        return Some(Interval {
            low: sorted[0],
            high: sorted[n - 1],
            level: rates[0],
        });
    };
    let next = rates.get(d + 1).copied().unwrap_or(0.0);
    let share = (rates[d] - level) / (rates[d] - next);
    let (rank, n_f) = ((d + 1) as f64, n as f64);
    let weight = (n_f - rank) * share / (rank + (n_f - 2.0 * rank) * share);
    let mix = |outer: f64, inner: f64| (1.0 - weight) * outer + weight * inner;
    let inner = (d + 1).min(n - 1);
    Some(Interval {
        low: mix(sorted[d], sorted[inner]),
        high: mix(sorted[n - 1 - d], sorted[n - 1 - inner]),
        level,
    })
}

/// The bootstrap interval of a statistic of samples of any type; `None` with fewer than two samples. It is for statistics
/// without an exact interval, such as a percentile of merged histograms. With few samples, it tends to be too short.
pub fn bootstrap<T>(
    samples: &[T],
    level: f64,
    seed: u64,
    statistic: impl Fn(&[&T]) -> f64,
) -> Option<Interval> {
    const DRAWS: usize = 199;
    if samples.len() < 2 {
        return None;
    }
    let mut rng = Rng::new(seed);
    let mut drawn: Vec<f64> = (0..DRAWS)
        .map(|_| {
            let draw: Vec<&T> = samples
                .iter()
                .map(|_| &samples[rng.index(samples.len())])
                .collect();
            statistic(&draw)
        })
        .collect();
    drawn.sort_by(f64::total_cmp);
    let at = |share: f64| drawn[((share * (DRAWS + 1) as f64) as usize).clamp(1, DRAWS) - 1];
    Some(Interval {
        low: at((1.0 - level) / 2.0),
        high: at(f64::midpoint(1.0, level)),
        level,
    })
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_their_intervals() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[5.0]), Some(5.0));
        assert_eq!(median(&[]), None);
        assert_eq!(median_interval(&[1.0], 0.95), None);
        // Three samples are too few for 95 %.
        let few = median_interval(&[3.0, 1.0, 2.0], 0.95);
        assert_eq!(
            few,
            Some(Interval {
                low: 1.0,
                high: 3.0,
                level: 0.75
            })
        );
        let ten: Vec<f64> = (1..=10).map(f64::from).collect();
        let found = median_interval(&ten, 0.95).unwrap();
        assert!(
            found.low > 2.0 && found.low < 3.0 && found.high > 8.0 && found.high < 9.0,
            "{found:?}"
        );
    }

    #[test]
    fn a_bootstrap_lies_around_its_statistic() {
        let samples: Vec<f64> = (0..40).map(f64::from).collect();
        let mean = |draw: &[&f64]| draw.iter().copied().sum::<f64>() / draw.len() as f64;
        let found = bootstrap(&samples, 0.95, 1, mean).unwrap();
        assert!(
            found.low < 17.0 && found.low > 14.0 && found.high > 22.0 && found.high < 25.0,
            "{found:?}"
        );
    }
}
