//! The mean effect of several comparisons.

use std::collections::BTreeMap;

use super::{Analysis, Question, score};
use crate::stats::judge::ERROR_RATE;
use crate::stats::sequential::{Moments, PAIRS_MIN};

impl Analysis<'_> {
    /// The interval of the mean of these gains, as logarithms of ratios; `None` if one of them has fewer than
    /// [`PAIRS_MIN`] pairs.
    ///
    /// Two intervals hold at once, each with half of the error rate, and the result is what they have in common:
    ///
    /// - the mean of the comparisons' own intervals. A mean deviates by at most the mean of the deviations, however the
    ///   comparisons depend on each other.
    /// - Student's interval of the means of the blocks that have all comparisons. Blocks are independent, comparisons
    ///   within one need not be. It is far narrower if there are many comparisons, and absent if there are few such
    ///   blocks, because the lab stops to measure what is decided.
    pub(super) fn mean_interval(&self, questions: &[&Question]) -> Option<(f64, f64)> {
        if let [one] = questions {
            return one.interval.map(|(low, high)| (low.ln_1p(), high.ln_1p()));
        }
        let all: Vec<BTreeMap<u32, f64>> = questions.iter().map(|it| self.pairs(it)).collect();
        let level = 1.0 - self.judge.nominal(ERROR_RATE / 2.0);
        let interval = |values: &[f64]| {
            let moments = Moments::of(values);
            let interval = (values.len() >= PAIRS_MIN).then(|| moments.interval(level))??;
            Some((interval.low, interval.high))
        };
        let own: Option<Vec<(f64, f64)>> = all
            .iter()
            .map(|pairs| interval(&pairs.values().copied().collect::<Vec<f64>>()))
            .collect();
        let own = own.filter(|own| !own.is_empty())?;
        let count = own.len() as f64;
        let (low, high) = own.iter().fold((0.0, 0.0), |(low, high), it| {
            (low + it.0 / count, high + it.1 / count)
        });
        let complete = all[0].keys().filter_map(|block| {
            let pairs: Option<Vec<f64>> = all.iter().map(|it| it.get(block).copied()).collect();
            Some(pairs?.iter().sum::<f64>() / count)
        });
        let common = interval(&complete.collect::<Vec<f64>>())
            .map(|(of_low, of_high)| (of_low.max(low), of_high.min(high)))
            .filter(|(low, high)| low <= high);
        Some(common.unwrap_or((low, high)))
    }

    /// The pairs of a comparison by their blocks, as logarithms of ratios.
    fn pairs(&self, question: &Question) -> BTreeMap<u32, f64> {
        let load = question.workload;
        let scores = |arm: usize| -> BTreeMap<u32, f64> {
            self.samples(arm, load)
                .map(|(cell, sample)| {
                    let score = score(self.plan().metric, &self.plan().workloads[load], sample);
                    (cell.block, score)
                })
                .filter(|(_, score)| *score > 0.0)
                .collect()
        };
        let from = scores(question.from);
        scores(question.to)
            .into_iter()
            .filter_map(|(block, to)| Some((block, (to / from.get(&block)?).ln())))
            .collect()
    }
}
