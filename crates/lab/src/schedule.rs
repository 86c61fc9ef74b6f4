//! The order of the runs: in each block, every configuration with an undecided comparison boots once, in random order.
//!
//! Drift (temperature, a neighbour, the wear of an SSD) therefore affects all configurations alike, and cancels in pairs
//! of one block. The first configuration runs twice in each block, as if it were two: any difference between these twins
//! is noise.

use std::time::Duration;

use harness::random::Rng;

use crate::plan::Plan;
use crate::plan::words::Interleave;
use crate::stats::judge::pairs_needed;
use crate::stats::{Judge, Verdict};

/// One boot of a configuration, with the loads that run in it one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The arm: an index of the plan's cases, or one more for the twin of the first case.
    pub arm: usize,
    /// Indexes of the plan's loads, in the order in which they run.
    pub workloads: Vec<usize>,
}

/// The parts of a plan on which the order of its runs depends.
#[derive(Clone, Debug)]
pub struct Schedule {
    arms: usize,
    workloads: usize,
    contrasts: Vec<(usize, usize)>,
    seed: u64,
    interleave: Interleave,
}

impl Schedule {
    /// The schedule of a plan.
    pub fn of(plan: &Plan, seed: u64) -> Self {
        let schedule = Self::new(
            plan.cases.len(),
            plan.workloads.len(),
            &plan.contrasts,
            seed,
        );
        Self {
            interleave: plan.interleave,
            ..schedule
        }
    }

    /// A schedule for this number of cases and loads. The comparison of the first case with its twin comes first.
    pub fn new(cases: usize, workloads: usize, contrasts: &[(usize, usize)], seed: u64) -> Self {
        let twins = (0, cases);
        let contrasts = std::iter::once(twins)
            .chain(contrasts.iter().copied())
            .collect();
        Self {
            arms: cases + 1,
            workloads,
            contrasts,
            seed,
            interleave: Interleave::Boots,
        }
    }

    /// The arms that are compared, as pairs; the first pair are the twins.
    pub fn contrasts(&self) -> &[(usize, usize)] {
        &self.contrasts
    }

    /// The number of questions for a [`Judge`]: each comparison under each load. The index of a question is
    /// `contrast * workloads + workload`.
    pub fn questions(&self) -> usize {
        self.contrasts.len() * self.workloads
    }

    /// The boots of a block, with the loads that `open` questions need.
    pub fn block(&self, number: u32, open: impl Fn(usize) -> bool) -> Vec<Boot> {
        let mut rng = Rng::new(self.seed ^ (u64::from(number) << 40));
        let is_needed = |arm: usize, load: usize| {
            let mut pairs = self.contrasts.iter().enumerate();
            pairs.any(|(index, (from, to))| {
                (*from == arm || *to == arm) && open(index * self.workloads + load)
            })
        };
        let mut boots: Vec<Boot> = (0..self.arms)
            .map(|arm| Boot {
                arm,
                workloads: (0..self.workloads)
                    .filter(|load| is_needed(arm, *load))
                    .collect(),
            })
            .filter(|boot| !boot.workloads.is_empty())
            .collect();
        rng.shuffle(&mut boots);
        // All configurations run the loads in the same order, so that both sides of a pair have the same predecessors.
        let mut order: Vec<usize> = (0..self.workloads).collect();
        rng.shuffle(&mut order);
        for boot in &mut boots {
            boot.workloads
                .sort_by_key(|load| order.iter().position(|other| other == load));
        }
        match self.interleave {
            Interleave::Boots => boots,
            Interleave::Loads => {
                let mut turns = Vec::new();
                for load in order {
                    rng.shuffle(&mut boots);
                    let with_load = boots.iter().filter(|boot| boot.workloads.contains(&load));
                    turns.extend(with_load.map(|boot| Boot {
                        arm: boot.arm,
                        workloads: vec![load],
                    }));
                }
                turns
            }
        }
    }

    /// Whether each question is undecided.
    pub fn open(verdicts: &[Verdict]) -> Vec<bool> {
        verdicts
            .iter()
            .map(|verdict| *verdict == Verdict::Undecided)
            .collect()
    }

    /// Gives a judge the pairs of a block. `sample(arm, load)` is the score, of which a larger one is better.
    pub fn judge(&self, judge: &mut Judge, sample: impl Fn(usize, usize) -> Option<f64>) {
        for (index, (from, to)) in self.contrasts.iter().enumerate() {
            for load in 0..self.workloads {
                if let (Some(from), Some(to)) = (sample(*from, load), sample(*to, load))
                    && from > 0.0
                    && to > 0.0
                {
                    judge.pair(index * self.workloads + load, (to / from).ln());
                }
            }
        }
    }
}

/// The time that a plan is expected to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The runs of a complete block.
    pub runs: usize,
    /// The time of a complete block.
    pub block: Duration,
    /// The blocks that find the plan's effect under the plan's noise; `None` if the budget allows fewer.
    pub blocks: Option<usize>,
    /// Blocks that the budget allows.
    pub affordable: usize,
}

/// Estimates a plan's time, if starting and stopping a guest takes `boot`.
pub fn estimate(plan: &Plan, boot: Duration) -> Estimate {
    let schedule = Schedule::of(plan, 0);
    let runs = schedule.arms * schedule.workloads;
    let boots = match plan.interleave {
        Interleave::Boots => schedule.arms,
        Interleave::Loads => runs,
    };
    let block = boot * boots as u32 + plan.run_time() * runs as u32;
    let affordable = (plan.budget.as_secs_f64() / block.as_secs_f64().max(1e-3)) as usize;
    let affordable = affordable.min(plan.blocks_max as usize);
    let blocks = pairs_needed(
        plan.effect,
        plan.noise,
        schedule.questions(),
        plan.blocks_max as usize,
    );
    Estimate {
        runs,
        block,
        blocks: blocks.filter(|blocks| *blocks <= affordable),
        affordable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_every_arm_once_in_an_order_that_depends_only_on_the_seed() {
        let schedule = Schedule::new(3, 4, &[(0, 1), (0, 2)], 9);
        let block = schedule.block(0, |_| true);
        let mut arms: Vec<_> = block.iter().map(|boot| boot.arm).collect();
        arms.sort_unstable();
        assert_eq!(arms, [0, 1, 2, 3]);
        assert!(
            block
                .iter()
                .all(|boot| boot.workloads == block[0].workloads && boot.workloads.len() == 4)
        );
        assert_eq!(block, schedule.block(0, |_| true));
        let orders: std::collections::BTreeSet<Vec<usize>> = (0..200)
            .map(|n| {
                schedule
                    .block(n, |_| true)
                    .iter()
                    .map(|boot| boot.arm)
                    .collect()
            })
            .collect();
        assert_eq!(orders.len(), 24, "all orders occur");
    }

    #[test]
    fn configurations_take_turns_under_each_load() {
        let mut schedule = Schedule::new(3, 4, &[(0, 1), (0, 2)], 9);
        schedule.interleave = Interleave::Loads;
        let block = schedule.block(0, |_| true);
        assert_eq!(block.len(), 16);
        for turns in block.chunks(4) {
            let mut arms: Vec<_> = turns.iter().map(|boot| boot.arm).collect();
            arms.sort_unstable();
            assert_eq!(arms, [0, 1, 2, 3]);
            assert!(
                turns
                    .iter()
                    .all(|boot| boot.workloads == turns[0].workloads)
            );
        }
        let orders: std::collections::BTreeSet<Vec<usize>> = block
            .chunks(4)
            .map(|turns| turns.iter().map(|boot| boot.arm).collect())
            .collect();
        assert!(orders.len() > 1, "each load has an order of its own");
    }

    #[test]
    fn decided_comparisons_do_not_run_again() {
        let schedule = Schedule::new(3, 2, &[(0, 1), (0, 2)], 9);
        // Question 5: case 0 against case 2 under load 1.
        let block = schedule.block(3, |question| question == 5);
        let mut arms: Vec<_> = block
            .iter()
            .map(|boot| (boot.arm, boot.workloads.clone()))
            .collect();
        arms.sort();
        assert_eq!(arms, [(0, vec![1]), (2, vec![1])]);
        assert!(schedule.block(3, |_| false).is_empty());
    }

    #[test]
    fn pairs_reach_the_judge_where_both_sides_were_measured() {
        let schedule = Schedule::new(2, 1, &[(0, 1)], 9);
        let mut judge = Judge::new(schedule.questions(), 10, 0.03);
        for _ in 0..5 {
            schedule.judge(&mut judge, |arm, _| [Some(100.0), Some(200.0), None][arm]);
        }
        assert_eq!((judge.pairs(0), judge.pairs(1)), (0, 5));
        assert_eq!(judge.verdicts(), [Verdict::Undecided, Verdict::Gain]);
    }
}
