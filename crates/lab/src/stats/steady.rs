//! Whether a disk was in steady state (SNIA Solid State Storage Performance Test Specification 2.0.2, "Steady State").

/// The number of rounds to check.
pub const ROUNDS: usize = 5;
const EXCURSION_MAX: f64 = 0.20;
const SLOPE_MAX: f64 = 0.10;

/// Whether a measurement was steady.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steady {
    /// The last rounds lie within 20 % of their mean, and a line through them within 10 %.
    Yes,
    /// They do not.
    No,
    /// There are too few rounds.
    Unknown,
}

/// Checks the last rounds. Rounds are equally long parts of a run, or runs one after the other.
pub fn steady(rounds: &[f64]) -> Steady {
    let Some(window) = rounds
        .len()
        .checked_sub(ROUNDS)
        .map(|start| &rounds[start..])
    else {
        return Steady::Unknown;
    };
    let mean = window.iter().sum::<f64>() / ROUNDS as f64;
    let least = window.iter().copied().fold(f64::INFINITY, f64::min);
    let most = window.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // The least squares line over -2 … 2
    let slope = window
        .iter()
        .enumerate()
        .map(|(x, y)| (x as f64 - 2.0) * y)
        .sum::<f64>()
        / 10.0;
    let is_steady = most - least <= EXCURSION_MAX * mean
        && (slope * (ROUNDS - 1) as f64).abs() <= SLOPE_MAX * mean;
    if is_steady { Steady::Yes } else { Steady::No }
}

/// Cuts a series into [`ROUNDS`] rounds, and returns their means.
pub fn rounds(series: &[f64]) -> Vec<f64> {
    let each = series.len() / ROUNDS;
    if each == 0 {
        return Vec::new();
    }
    let start = series.len() - each * ROUNDS;
    series[start..]
        .chunks(each)
        .map(|part| part.iter().sum::<f64>() / part.len() as f64)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_state_is_that_of_the_specification() {
        assert_eq!(steady(&[100.0, 102.0, 99.0, 101.0, 100.0]), Steady::Yes);
        // Within 20 %, but with a slope.
        assert_eq!(steady(&[92.0, 96.0, 100.0, 104.0, 108.0]), Steady::No);
        // No slope, but a wide excursion.
        assert_eq!(steady(&[100.0, 85.0, 115.0, 85.0, 100.0]), Steady::No);
        assert_eq!(steady(&[1.0, 1.0, 1.0, 1.0]), Steady::Unknown);
        // Earlier rounds do not matter.
        assert_eq!(
            steady(&[900.0, 100.0, 100.0, 100.0, 100.0, 100.0]),
            Steady::Yes
        );
        assert_eq!(
            rounds(&[9.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0]),
            [2.0, 2.0, 2.0, 2.0, 3.0]
        );
    }
}
