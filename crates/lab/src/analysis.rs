//! What the cells of a journal say: medians, verdicts on comparisons, published claims and knees. An *arm* is a
//! configuration's index in the plan; one more is the twin of the first.

pub mod claims;
mod means;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use harness::histogram::Histogram;
use harness::spread::Spread;

use crate::journal::{Cell, Journal, Sample};
use crate::plan::words::Metric;
use crate::plan::{Case, Plan, Workload};
use crate::schedule::Schedule;
use crate::stats::judge::ERROR_RATE;
use crate::stats::sequential::Moments;
use crate::stats::{
    Interval, Judge, Sequential, Verdict, median, median::bootstrap, median_interval,
};
pub use claims::{ClaimResult, Replication};

/// A result, analysed.
pub struct Analysis<'a> {
    /// What was measured.
    pub journal: &'a Journal,
    /// The order of the plan's runs.
    pub schedule: Schedule,
    /// The pairs of all comparisons.
    pub judge: Judge,
    /// Its verdicts, by question.
    pub verdicts: Vec<Verdict>,
    /// The samples of each arm and load, with their blocks
    samples: BTreeMap<(usize, usize), Vec<(u32, &'a Cell)>>,
    /// Cached, because the bootstrap in [`Analysis::summary`] is slow
    summaries: RefCell<BTreeMap<(usize, usize), Option<Summary>>>,
}

/// A configuration under a load, over all its samples.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Samples.
    pub samples: usize,
    /// Requests per second: the median.
    pub iops: f64,
    /// The interval of `iops`.
    pub iops_interval: Option<Interval>,
    /// Bytes per second, the median.
    pub bytes_per_s: f64,
    /// The median latency of all samples' requests together, in microseconds.
    pub p50_us: f64,
    /// Their 99th percentile.
    pub p99_us: f64,
    /// The interval of `p99_us`.
    pub p99_interval: Option<Interval>,
    /// Their 99.9th percentile.
    pub p999_us: f64,
    /// Mean latency in microseconds: the median of the samples.
    pub mean_us: f64,
    /// CPU microseconds for each request, the median.
    pub cpu_us: Option<f64>,
    /// Context switches for each request, the median.
    pub switches: Option<f64>,
    /// Exits of KVM for each request, the median.
    pub exits: Option<f64>,
    /// Share of its CPU time that ringdisk spent polling, the median.
    pub polling: Option<f64>,
    /// Latencies of all samples.
    pub latencies: Histogram,
}

/// A comparison under a load.
#[derive(Clone, Debug)]
pub struct Question {
    /// The arm that is the base of the comparison.
    pub from: usize,
    /// The arm that is compared with it.
    pub to: usize,
    /// The load.
    pub workload: usize,
    /// The verdict so far.
    pub verdict: Verdict,
    /// The number of pairs.
    pub pairs: usize,
    /// The ratio of `to` to `from`, less 1. `None` without a pair.
    pub gain: Option<f64>,
    /// Its interval, which is valid whenever the run was stopped.
    pub interval: Option<(f64, f64)>,
    /// The smallest gain that so many pairs find nine times in ten.
    pub detectable: Option<f64>,
}

/// How two configurations compare, block by block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The median of the blocks.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
}

/// The figure to compare; a larger one is better.
fn score(metric: Metric, workload: &Workload, sample: &Sample) -> f64 {
    if metric == Metric::Cpu {
        return sample.cpu_us.filter(|us| *us > 0.0).map_or(0.0, f64::recip);
    }
    match workload.rate {
        // At a fixed rate all configurations have the same IOPS; the one with the lower latency is better.
        Some(_) if sample.mean_ns > 0.0 => 1e9 / sample.mean_ns,
        Some(_) => 0.0,
        None => sample.iops,
    }
}

impl<'a> Analysis<'a> {
    /// Analyses a result.
    pub fn of(journal: &'a Journal) -> Self {
        let sequential = match journal.header.file.as_str() {
            crate::import::PLAN => Sequential::once(),
            _ => Sequential::new(journal.plan.blocks_max as usize),
        };
        Self::with(journal, Arc::new(sequential))
    }

    /// As [`Analysis::of`], with corrections that have been computed before.
    pub fn with(journal: &'a Journal, sequential: Arc<Sequential>) -> Self {
        let plan = &journal.plan;
        let schedule = Schedule::of(plan, journal.header.seed);
        let mut judge = Judge::with(sequential, schedule.questions(), plan.margin);
        let mut samples: BTreeMap<(usize, usize), Vec<(u32, &Cell)>> = BTreeMap::new();
        for cell in journal.cells.iter().filter(|cell| cell.sample.is_some()) {
            if let Some(key) = arm_and_load(plan, cell) {
                samples.entry(key).or_default().push((cell.block, cell));
            }
        }
        let blocks = journal
            .cells
            .iter()
            .map(|cell| cell.block)
            .max()
            .map_or(0, |last| last + 1);
        for block in 0..blocks {
            schedule.judge(&mut judge, |arm, load| {
                let found = samples
                    .get(&(arm, load))?
                    .iter()
                    .find(|(of, _)| *of == block)?;
                found
                    .1
                    .sample
                    .as_ref()
                    .map(|sample| score(plan.metric, &plan.workloads[load], sample))
            });
        }
        let verdicts = judge.verdicts();
        Self {
            journal,
            schedule,
            judge,
            verdicts,
            samples,
            summaries: RefCell::default(),
        }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.journal.plan
    }

    /// An arm's configuration.
    pub fn case(&self, arm: usize) -> &Case {
        let cases = &self.plan().cases;
        cases.get(arm).unwrap_or(&cases[0])
    }

    /// An arm's name.
    pub fn name(&self, arm: usize) -> String {
        match self.plan().cases.get(arm) {
            Some(case) => case.name.clone(),
            None => format!("{} again", self.plan().cases[0].name),
        }
    }

    /// All samples of an arm under a load, with their cells.
    pub fn samples(&self, arm: usize, load: usize) -> impl Iterator<Item = (&'a Cell, &'a Sample)> {
        let all = self
            .samples
            .get(&(arm, load))
            .map_or(&[][..], Vec::as_slice);
        all.iter()
            .filter_map(|(_, cell)| Some((*cell, cell.sample.as_ref()?)))
    }

    /// A configuration under a load; `None` without a sample.
    pub fn summary(&self, arm: usize, load: usize) -> Option<Summary> {
        if let Some(known) = self.summaries.borrow().get(&(arm, load)) {
            return known.clone();
        }
        let summary = self.summarise(arm, load);
        self.summaries
            .borrow_mut()
            .insert((arm, load), summary.clone());
        summary
    }

    fn summarise(&self, arm: usize, load: usize) -> Option<Summary> {
        let samples: Vec<&Sample> = self.samples(arm, load).map(|(_, sample)| sample).collect();
        let values = |of: &dyn Fn(&Sample) -> f64| {
            samples
                .iter()
                .map(|sample| of(sample))
                .collect::<Vec<f64>>()
        };
        let middle = |of: &dyn Fn(&Sample) -> Option<f64>| {
            median(
                &samples
                    .iter()
                    .filter_map(|sample| of(sample))
                    .collect::<Vec<f64>>(),
            )
        };
        let mut latencies = Histogram::default();
        samples
            .iter()
            .for_each(|sample| latencies.merge(&sample.latencies));
        let us = |share: f64| latencies.percentile(share).unwrap_or(0) as f64 / 1000.0;
        let p99 = |draw: &[&&Sample]| {
            let mut merged = Histogram::default();
            draw.iter()
                .for_each(|sample| merged.merge(&sample.latencies));
            merged.percentile(0.99).unwrap_or(0) as f64 / 1000.0
        };
        let iops = values(&|sample| sample.iops);
        Some(Summary {
            samples: samples.len(),
            iops: median(&iops)?,
            iops_interval: median_interval(&iops, 1.0 - ERROR_RATE),
            bytes_per_s: median(&values(&|sample| sample.bytes_per_s))?,
            p50_us: us(0.5),
            p99_us: us(0.99),
            p99_interval: bootstrap(&samples, 1.0 - ERROR_RATE, self.journal.header.seed, p99),
            p999_us: us(0.999),
            mean_us: median(&values(&|sample| sample.mean_ns))? / 1000.0,
            cpu_us: middle(&|sample| sample.cpu_us),
            switches: middle(&|sample| sample.switches),
            exits: middle(&|sample| sample.exits),
            polling: middle(&|sample| Some(sample.polling?.share())),
            latencies,
        })
    }

    /// The ratio of a figure of arm `to` to that of arm `from`, over the blocks that have both; `None` without such a block.
    pub fn ratio(
        &self,
        from: usize,
        to: usize,
        load: usize,
        figure: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<Ratio> {
        let of = |arm: usize, block: u32| {
            let mut cells = self.samples(arm, load);
            let (_, sample) = cells.find(|(cell, _)| cell.block == block)?;
            figure(sample).filter(|value| *value > 0.0)
        };
        let ratios = self
            .samples(to, load)
            .filter_map(|(cell, _)| Some(of(to, cell.block)? / of(from, cell.block)?));
        Spread::of(ratios).map(|Spread { median, min, max }| Ratio {
            median,
            least: min,
            most: max,
        })
    }

    /// All questions, those of the twins first.
    pub fn questions(&self) -> Vec<Question> {
        (0..self.schedule.questions())
            .map(|number| self.question(number))
            .collect()
    }

    fn question(&self, number: usize) -> Question {
        let loads = self.plan().workloads.len();
        let (from, to) = self.schedule.contrasts()[number / loads];
        Question {
            from,
            to,
            workload: number % loads,
            verdict: self.verdicts[number],
            pairs: self.judge.pairs(number),
            gain: self.judge.gain(number).map(f64::exp_m1),
            interval: self
                .judge
                .interval(number)
                .map(|interval| (interval.low.exp_m1(), interval.high.exp_m1())),
            detectable: self.judge.detectable(number).map(f64::exp_m1),
        }
    }

    /// The noise of this host: the standard deviation of a pair of the twins, as the median over all loads. `None` with
    /// fewer than 3 pairs.
    pub fn noise(&self) -> Option<f64> {
        let loads = self.plan().workloads.len();
        let deviations: Vec<f64> = (0..loads)
            .filter(|load| self.judge.pairs(*load) >= 3)
            .map(|load| self.judge.deviation(load))
            .collect();
        median(&deviations).map(f64::exp_m1)
    }

    /// The effective settings, read back from QEMU and the guests, in which two arms differ. Empty if either never booted.
    pub fn effective_differences(&self, from: usize, to: usize) -> Vec<String> {
        let of = |arm: usize| {
            let (name, twin) = (&self.case(arm).name, arm >= self.plan().cases.len());
            self.journal
                .boots
                .iter()
                .rfind(|boot| &boot.case == name && boot.twin == twin)
                .map(|boot| &boot.effective)
        };
        let (Some(from), Some(to)) = (of(from), of(to)) else {
            return Vec::new();
        };
        let keys: std::collections::BTreeSet<&String> = from.keys().chain(to.keys()).collect();
        let text = |side: &BTreeMap<String, String>, key: &String| {
            side.get(key).cloned().unwrap_or_else(|| "-".into())
        };
        keys.into_iter()
            .filter(|key| from.get(*key) != to.get(*key))
            .map(|key| format!("{key}: {} → {}", text(from, key), text(to, key)))
            .collect()
    }

    /// The settings in which a comparison differs, if there are several: the gain then cannot be attributed to one.
    pub fn confounded(&self, from: usize, to: usize) -> Option<Vec<String>> {
        let asked = self
            .case(from)
            .settings
            .differences(&self.case(to).settings);
        let (before, after) = (&self.case(from).settings, &self.case(to).settings);
        // A setting that only one of two devices or servers has belongs to that device or server.
        let other_device = asked.contains(&"device") || asked.contains(&"server");
        let by_device =
            |name: &&str| other_device && (before.get(name) == "-" || after.get(name) == "-");
        let mut names: Vec<String> = asked
            .iter()
            .filter(|name| !by_device(name))
            .map(|name| (*name).to_owned())
            .collect();
        for difference in self.effective_differences(from, to) {
            let (name, values) = difference.split_once(": ").unwrap_or((&difference, ""));
            let name = name.to_owned();
            // QEMU knows no settings of a disk that another process serves.
            let one_sided = values.starts_with("- →") || values.ends_with("→ -");
            // The driver follows from the device, and the number of requests from the queues.
            let implied = match name.as_str() {
                _ if other_device && one_sided => true,
                "driver" => asked.contains(&"device"),
                "requests" => asked.contains(&"queue-size") || asked.contains(&"queues"),
                "file bytes" => asked.contains(&"file-system"),
                "backing files" => asked.contains(&"backing-files"),
                "guest x2apic" => asked.contains(&"cpu"),
                "host-scheduler" | "host-read-ahead" | "host queue before" => {
                    ["backing", "host-scheduler", "host-read-ahead"]
                        .iter()
                        .any(|key| asked.contains(key))
                }
                "iothreads" | "poll-max-us" => ["iothread", "device", "volumes", "poll-max-us"]
                    .iter()
                    .any(|key| asked.contains(key)),
                "cache.direct" | "cache.no-flush" | "write cache" | "guest write cache" => {
                    asked.contains(&"cache")
                }
                other => asked.contains(&other),
            };
            if !implied {
                names.push(name);
            }
        }
        // Another device implies another server.
        names.retain(|name| name != "server" || !asked.contains(&"device"));
        (names.len() > 1).then_some(names)
    }

    /// The case with the largest gain over the first, as the geometric mean over all loads; `None` if no case is clearly
    /// better.
    pub fn best(&self) -> Option<(usize, f64)> {
        let loads = self.plan().workloads.len();
        let cases = self.plan().cases.len();
        let over_all = |case: usize| {
            let ratios: Vec<f64> = (0..loads)
                .filter_map(|load| {
                    let of = |arm| median(&self.scores(arm, load));
                    Some((of(case)? / of(0)?).ln())
                })
                .collect();
            (ratios.len() == loads).then(|| Moments::of(&ratios).mean.exp_m1())
        };
        let better = (1..cases)
            .filter(|case| !self.is_doubtful(*case))
            .filter_map(|case| Some((case, over_all(case)?)));
        better
            .filter(|(_, gain)| *gain > 0.0)
            .max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The mean gain of a case over the first for all loads, over the blocks that have all of them, with its interval.
    pub fn over_all(&self, case: usize) -> Option<(f64, Option<Interval>)> {
        let loads = 0..self.plan().workloads.len();
        let scores = |arm: usize, load: usize| -> BTreeMap<u32, f64> {
            let plan = self.plan();
            let cells = self.samples(arm, load);
            let score = |sample: &Sample| score(plan.metric, &plan.workloads[load], sample);
            cells
                .map(|(cell, sample)| (cell.block, score(sample)))
                .filter(|(_, score)| *score > 0.0)
                .collect()
        };
        let of_loads: Vec<_> = loads
            .map(|load| (scores(0, load), scores(case, load)))
            .collect();
        let mut means = Moments::default();
        for block in of_loads.first()?.0.keys() {
            let ratio = |(from, to): &(BTreeMap<u32, f64>, BTreeMap<u32, f64>)| {
                Some((to.get(block)? / from.get(block)?).ln())
            };
            let ratios: Option<Vec<f64>> = of_loads.iter().map(ratio).collect();
            if let Some(ratios) = ratios {
                means.add(Moments::of(&ratios).mean);
            }
        }
        let interval = means.interval(1.0 - self.judge.nominal(ERROR_RATE));
        let gain = |log: f64| log.exp_m1();
        let interval = interval.filter(|_| means.n >= 3).map(|interval| Interval {
            low: gain(interval.low),
            high: gain(interval.high),
            level: 1.0 - ERROR_RATE,
        });
        (means.n > 0).then(|| (gain(means.mean), interval))
    }

    /// Whether no comparison decided in favour of this case, or one decided against it.
    fn is_doubtful(&self, case: usize) -> bool {
        let own: Vec<Verdict> = self
            .questions()
            .iter()
            .filter(|question| question.to == case)
            .map(|question| question.verdict)
            .collect();
        !own.is_empty() && (own.contains(&Verdict::Loss) || !own.contains(&Verdict::Gain))
    }

    /// The scores of an arm under a load; a larger one is better.
    pub fn scores(&self, arm: usize, load: usize) -> Vec<f64> {
        self.samples(arm, load)
            .map(|(_, sample)| score(self.plan().metric, &self.plan().workloads[load], sample))
            .collect()
    }

    /// The knees of a configuration: for each kind of load with rising rates, the highest rate that was measured, and the
    /// highest one with which the disk [keeps up](Knee::keeps_up).
    pub fn knees(&self, arm: usize) -> Vec<(String, u32, Option<u32>)> {
        let mut kinds: BTreeMap<String, Vec<(u32, usize)>> = BTreeMap::new();
        for (index, load) in self.plan().workloads.iter().enumerate() {
            if let Some(rate) = load.rate {
                let kind = Workload {
                    rate: None,
                    name: String::new(),
                    ..load.clone()
                }
                .named()
                .name;
                kinds.entry(kind).or_default().push((rate, index));
            }
        }
        let disks =
            u32::from(self.case(arm).settings.guests) * u32::from(self.case(arm).settings.volumes);
        let mut knees = Vec::new();
        for (kind, mut rates) in kinds {
            rates.sort_unstable();
            let measured: Vec<(u32, Summary)> = rates
                .into_iter()
                .filter_map(|(rate, load)| Some((rate, self.summary(arm, load)?)))
                .collect();
            let Some(lowest) = measured.first().map(|(_, summary)| summary.p99_us) else {
                continue;
            };
            let knee = Knee {
                lowest_p99_us: lowest,
            };
            let keeps_up = |(rate, summary): &&(u32, Summary)| {
                let reached = summary.iops / f64::from(disks);
                knee.keeps_up(f64::from(*rate), reached, summary.p99_us)
            };
            let knee = measured
                .iter()
                .take_while(keeps_up)
                .last()
                .map(|(rate, _)| *rate);
            knees.push((kind, measured.last().map_or(0, |(rate, _)| *rate), knee));
        }
        knees
    }
}

/// The criterion for a disk that keeps up with an offered rate.
#[derive(Clone, Copy, Debug)]
pub struct Knee {
    /// The 99th percentile at the lowest rate.
    pub lowest_p99_us: f64,
}

impl Knee {
    /// Whether the disk completes 97 % of the offered requests, with a 99th percentile of at most five times that of the
    /// lowest rate.
    pub fn keeps_up(self, rate: f64, reached: f64, p99_us: f64) -> bool {
        reached >= 0.97 * rate && p99_us <= 5.0 * self.lowest_p99_us.max(1.0)
    }
}

/// Arm and load of a cell; `None` if the plan has no such configuration or load.
pub fn arm_and_load(plan: &Plan, cell: &Cell) -> Option<(usize, usize)> {
    let arm = plan.cases.iter().position(|case| case.name == cell.case)?;
    let load = plan
        .workloads
        .iter()
        .position(|load| load.name == cell.workload)?;
    Some((if cell.twin { plan.cases.len() } else { arm }, load))
}

#[cfg(test)]
#[path = "analysis_tests.rs"]
mod tests;
