//! Finds the rates of an open loop that are worth measuring on this host: those around the knees of the configurations.

use anyhow::{Context, Result, anyhow, ensure};

use super::boot::Testbed;
use super::progress::Progress;
use crate::analysis::Knee;
use crate::plan::{RATES_MAX, Workload};
use crate::storage::Files;

/// The runs of a search in each configuration: one without a rate, one at the lowest rate, and the halvings.
pub const RUNS: u32 = 2 + HALVINGS;
/// They narrow a factor of 13 to 8 %.
const HALVINGS: u32 = 5;
/// The search is between these shares of the rate that a closed loop reaches.
const LOWEST: f64 = 0.1;
const HIGHEST: f64 = 1.3;

/// Boots each configuration of the plan once, finds its knee, and returns rates around all knees.
///
/// # Errors
/// No configuration could be measured, or the user stops the run.
pub fn rates(
    testbed: &Testbed,
    files: &mut Files,
    load: &Workload,
    progress: &mut dyn Progress,
) -> Result<Vec<u32>> {
    let (mut lowest, mut knees, mut failure) = (u32::MAX, Vec::new(), None);
    for case in &testbed.plan.cases {
        progress.boot(&case.name, false);
        let settings = &case.settings;
        let disks = f64::from(settings.guests) * f64::from(settings.volumes);
        let mut up = match testbed.boot(settings, files) {
            Ok(up) => up,
            Err(error) => {
                ensure!(!testbed.stop.is_wanted(), "stopped");
                progress.say(&format!("{}: no search for rates: {error:#}", case.name));
                failure = Some(error);
                continue;
            }
        };
        let mut at = |rate: Option<u32>| {
            let load_at_rate = Workload {
                search: false,
                rate,
                ..load.clone()
            };
            progress.cell(&match rate {
                Some(rate) => format!("{}: searching, {rate} a second", load.name),
                None => format!("{}: searching, a closed loop", load.name),
            });
            let (sample, _) = testbed.measure(&mut up, settings, &load_at_rate, 0)?;
            Ok::<_, anyhow::Error>((sample.iops / disks, sample.percentile_us(0.99)))
        };
        let found = at(None).and_then(|(capacity, _)| {
            knee(capacity, |rate| at(Some(rate))).context("the search for rates")
        });
        match found {
            Ok((low, knee)) => {
                progress.say(&format!(
                    "{}, {}: keeps up with about {knee} requests a second",
                    case.name, load.name
                ));
                lowest = lowest.min(low);
                knees.push(knee);
            }
            Err(error) => {
                ensure!(!testbed.stop.is_wanted(), "stopped");
                progress.say(&format!("{}: no search for rates: {error:#}", case.name));
                failure = Some(error);
            }
        }
    }
    match failure {
        Some(error) if knees.is_empty() => Err(error.context(format!(
            "{}: the search for rates failed in every configuration",
            load.name
        ))),
        None if knees.is_empty() => Err(anyhow!("{}: the plan has no configuration", load.name)),
        _ => Ok(around(lowest, &knees)),
    }
}

/// Returns the lowest rate that was measured, and the highest rate with which the configuration keeps up. `at` measures at a
/// rate, and returns the IOPS and the 99th percentile in microseconds.
fn knee(capacity: f64, mut at: impl FnMut(u32) -> Result<(f64, f64)>) -> Result<(u32, u32)> {
    ensure!(capacity >= 1.0, "a closed loop reached {capacity} a second");
    let rate = |rate: f64| rate.round().clamp(1.0, 1e8) as u32;
    let lowest = rate(capacity * LOWEST);
    let (_, p99_us) = at(lowest)?;
    let knee = Knee {
        lowest_p99_us: p99_us,
    };
    let (mut good, mut bad) = (capacity * LOWEST, capacity * HIGHEST);
    for _ in 0..HALVINGS {
        let middle = (good * bad).sqrt();
        let (reached, p99_us) = at(rate(middle))?;
        if knee.keeps_up(f64::from(rate(middle)), reached, p99_us) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Ok((lowest, rate(good)))
}

/// The lowest rate, and for each knee rates on both sides, rounded to three digits. Rates closer than 5 % are merged. If
/// there are more than [`RATES_MAX`], keeps the lowest and the highest, and leaves out some between.
fn around(lowest: u32, knees: &[u32]) -> Vec<u32> {
    let mut wanted: Vec<f64> = knees
        .iter()
        .flat_map(|knee| [0.6, 0.95, 1.1].map(|share| share * f64::from(*knee)))
        .collect();
    wanted.push(f64::from(lowest));
    wanted.sort_by(f64::total_cmp);
    let mut rates: Vec<u32> = Vec::new();
    for rate in wanted {
        let digits = 10_f64.powi((rate.max(1.0).log10() as i32 - 2).max(0));
        let rate = ((rate / digits).round() * digits).max(1.0) as u32;
        if rates
            .last()
            .is_none_or(|last| f64::from(rate) > 1.05 * f64::from(*last))
        {
            rates.push(rate);
        }
    }
    if rates.len() <= RATES_MAX {
        return rates;
    }
    let last = rates.len() - 1;
    (0..RATES_MAX)
        .map(|n| rates[n * last / (RATES_MAX - 1)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_knee_of_a_queue_is_found_to_a_tenth() {
        for capacity in [50.0, 1234.0, 800_000.0] {
            let mut measured = 0;
            // One server with exponential times: the 99th percentile of M/M/1.
            let (lowest, knee) = knee(capacity, |rate| {
                measured += 1;
                let load = f64::from(rate) / capacity;
                Ok(if load < 1.0 {
                    (f64::from(rate), 4.6e6 / capacity / (1.0 - load))
                } else {
                    (capacity, 1e9)
                })
            })
            .unwrap();
            assert_eq!(measured, RUNS - 1);
            assert!((f64::from(lowest) / capacity - 0.1).abs() < 0.011);
            // Five times the percentile at a load of 0.1 is that at 0.82.
            let share = f64::from(knee) / capacity;
            assert!((0.73..=0.84).contains(&share), "{capacity}: {share}");
        }
        assert!(knee(0.0, |_| Ok((0.0, 0.0))).is_err());
    }

    #[test]
    fn rates_lie_around_the_knees_and_are_few() {
        assert_eq!(around(100, &[1000]), [100, 600, 950, 1100]);
        assert_eq!(around(12_345, &[98_765]), [12_300, 59_300, 93_800, 109_000]);
        let many: Vec<u32> = (1..40).map(|n| n * 1000).collect();
        let rates = around(10, &many);
        assert_eq!(rates.len(), RATES_MAX);
        assert_eq!((rates[0], rates[RATES_MAX - 1]), (10, 41_800));
        assert!(rates.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
