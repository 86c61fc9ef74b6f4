//! Reasons to doubt a sample. They are recorded with the sample.

use crate::guest::Accel;
use crate::host::Cost;
use crate::journal::Sample;
use crate::plan::{Settings, Workload};
use crate::stats::steady::{Steady, rounds, steady};

/// A sample with its circumstances.
pub struct Evidence<'a> {
    /// The sample.
    pub sample: &'a Sample,
    /// The configuration.
    pub settings: &'a Settings,
    /// The load.
    pub workload: &'a Workload,
    /// The host's load during the sample.
    pub cost: Option<Cost>,
    /// The IOPS of fio on the host's own disk.
    pub ceiling: Option<f64>,
    /// Programs that changed after the first cell.
    pub changed: &'a [String],
    /// The planned time in seconds.
    pub planned_s: f64,
    /// How guests run.
    pub accel: Accel,
}

/// The ratio to the host's own disk above which a sample is too fast; two runs differ by less.
const ABOVE_CEILING: f64 = 1.15;
const IDLE_MIN: f64 = 0.03;
const STOLEN_MAX: f64 = 0.02;
const OTHERS_MAX: f64 = 0.15;
/// Share of a CPU, for a client that sleeps while it waits
const CLIENT_MAX: f64 = 0.95;
const WINDOW_MIN: f64 = 0.6;

/// The flags of a sample; empty if there is no reason to doubt it.
pub fn flags(evidence: &Evidence) -> Vec<String> {
    let mut flags = Vec::new();
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let Evidence {
        sample,
        settings,
        workload,
        ..
    } = evidence;
    if let Some(ceiling) = evidence
        .ceiling
        .filter(|ceiling| sample.iops > ceiling * ABOVE_CEILING)
    {
        let times = sample.iops / ceiling;
        flags.push(match settings.cache.direct() {
            true => format!(
                "faster than the host's disk: {times:.1} times as fast, so a cache is involved"
            ),
            false => format!(
                "cached: {times:.1} times as fast as the host's disk, due to cache={}",
                settings.cache
            ),
        });
    }
    if let Some(cost) = evidence.cost {
        if cost.stolen > STOLEN_MAX {
            flags.push(format!(
                "stolen: other virtual machines used {} of the CPU time",
                percent(cost.stolen)
            ));
        }
        if cost.others > OTHERS_MAX {
            flags.push(format!(
                "not alone: other programs used {} of the CPUs",
                percent(cost.others)
            ));
        }
        if cost.idle < IDLE_MIN {
            let why = if evidence.accel == Accel::Tcg {
                ", as with guests under TCG"
            } else {
                ""
            };
            flags.push(format!(
                "starved: the CPUs were idle for only {}{why}",
                percent(cost.idle)
            ));
        }
    }
    if sample.window_s < WINDOW_MIN * evidence.planned_s {
        flags.push(format!(
            "short: all jobs ran together for only {:.1} s",
            sample.window_s
        ));
    }
    let series: Vec<f64> = sample.series.iter().map(|point| point.iops).collect();
    if steady(&rounds(&series)) == Steady::No {
        flags.push("not steady: the rate still changed (SNIA: 20 % range, 10 % slope)".into());
    }
    if let Some(used) = sample.client_cpu.filter(|used| *used > CLIENT_MAX)
        && settings.client.sleeps()
    {
        flags.push(format!(
            "client: it used {} of its CPU, so the server may be faster",
            percent(used)
        ));
    }
    if let Some(rate) = workload.rate {
        let offered = f64::from(rate)
            * f64::from(settings.guests)
            * f64::from(settings.active.unwrap_or(settings.volumes));
        if sample.iops < 0.97 * offered {
            flags.push(format!(
                "behind: only {} of the offered rate",
                percent(sample.iops / offered)
            ));
        }
    }
    if sample.latencies.requests() < 100 && !workload.idle {
        flags.push(format!(
            "few: only {} requests",
            sample.latencies.requests()
        ));
    }
    flags.extend(
        evidence
            .changed
            .iter()
            .map(|what| format!("changed: {what} has changed since the start")),
    );
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Point;

    fn flags_of(
        change: impl Fn(&mut Sample, &mut Settings, &mut Workload, &mut Cost),
    ) -> Vec<String> {
        let mut sample = Sample {
            iops: 1000.0,
            window_s: 10.0,
            ..Sample::default()
        };
        sample.latencies.add(1000, 10_000);
        sample.series = vec![
            Point {
                iops: 1000.0,
                ..Point::default()
            };
            10
        ];
        let (mut settings, mut workload) = (Settings::default(), Workload::default());
        let mut cost = Cost {
            idle: 0.5,
            ..Cost::default()
        };
        change(&mut sample, &mut settings, &mut workload, &mut cost);
        let changed = if sample.mean_ns < 0.0 {
            vec!["fio".to_owned()]
        } else {
            Vec::new()
        };
        flags(&Evidence {
            sample: &sample,
            settings: &settings,
            workload: &workload,
            cost: Some(cost),
            ceiling: Some(1000.0),
            changed: &changed,
            planned_s: 10.0,
            accel: Accel::Kvm,
        })
    }

    #[test]
    fn each_fault_has_its_flag_and_a_sound_sample_none() {
        assert!(flags_of(|_, _, _, _| {}).is_empty());
        let one =
            |word: &str, change: &dyn Fn(&mut Sample, &mut Settings, &mut Workload, &mut Cost)| {
                let flags = flags_of(change);
                assert!(
                    flags.len() == 1 && flags[0].starts_with(word),
                    "{word}: {flags:?}"
                );
            };
        one("faster", &|sample, _, _, _| sample.iops = 2000.0);
        one("cached", &|sample, settings, _, _| {
            sample.iops = 2000.0;
            settings.cache = crate::plan::words::Cache::Writeback;
        });
        one("stolen", &|_, _, _, cost| cost.stolen = 0.05);
        one("not alone", &|_, _, _, cost| cost.others = 0.3);
        one("starved", &|_, _, _, cost| cost.idle = 0.01);
        one("short", &|sample, _, _, _| sample.window_s = 3.0);
        one("not steady", &|sample, _, _, _| {
            sample
                .series
                .iter_mut()
                .enumerate()
                .for_each(|(n, point)| point.iops = 100.0 * n as f64);
        });
        one("behind", &|_, _, workload, _| workload.rate = Some(1100));
        one("few", &|sample, _, _, _| {
            sample.latencies = harness::histogram::Histogram::default()
        });
        one("changed", &|sample, _, _, _| sample.mean_ns = -1.0);
    }
}
