//! Verdicts on published figures.

use std::collections::BTreeMap;

use harness::text::printable;

use super::{Analysis, Question};
use crate::plan::claims::{Claim, Size, Won};
use crate::plan::words::{Device, Expect, GuestKind};
use crate::stats::Verdict;

/// Whether a published figure was reproduced.
#[derive(Clone, Debug)]
pub struct Replication {
    /// The result.
    pub outcome: ClaimResult,
    /// The measured ratio in the claim's direction, less 1; `None` without a measurement that may be compared.
    pub measured: Option<f64>,
    /// The interval of `measured`.
    pub interval: Option<(f64, f64)>,
    /// The reason for the result.
    pub why: String,
    /// The number of comparisons of the claim that were selected.
    pub selected: usize,
    /// The number of all comparisons of the claim.
    pub comparisons: usize,
}

/// How a published figure compares with the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimResult {
    /// The result has the published direction and size, or shows that there is no difference if that was published.
    Reproduced,
    /// The result has the published direction. Its size is another, is uncertain, or was not published.
    DirectionOnly,
    /// The result excludes the published figure.
    NotReproduced,
    /// The interval is too wide.
    Undecided,
    /// This host cannot run the configurations.
    Untestable,
}

impl std::fmt::Display for ClaimResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Reproduced => "reproduced",
            Self::DirectionOnly => "direction only",
            Self::NotReproduced => "not reproduced",
            Self::Undecided => "undecided",
            Self::Untestable => "cannot run here",
        })
    }
}

/// An effect has the published size if it is between this share of it and its inverse, as logarithms: from two thirds of
/// the size to half as much again. For +15 %, that is from +9.8 % to +23.3 %.
const BAND: f64 = 1.5;

/// Judges a published size by a measured interval; all are logarithms of ratios. Gains within `margin` count as none.
pub fn judge_size(size: Size, interval: (f64, f64), margin: f64) -> ClaimResult {
    // Mirrored, so that what was published is a gain.
    let ((low, high), (from, to)) = match size.direction() {
        Expect::Loss => ((-interval.1, -interval.0), (-size.high, -size.low)),
        Expect::Gain | Expect::Equal => (interval, (size.low, size.high)),
    };
    let (band_low, band_high) = (from / BAND, to * BAND);
    if from <= 0.0 || to.is_infinite() {
        // "Up to", which no effect at all fulfils too; or "at least".
        let least = if to.is_infinite() { from } else { -margin };
        return if least < low && high <= band_high {
            ClaimResult::Reproduced
        } else if high <= least || low > band_high {
            ClaimResult::NotReproduced
        } else {
            ClaimResult::Undecided
        };
    }
    let is_inside = band_low <= low && high <= band_high;
    // An interval that is wider than the band would contain almost any size.
    let is_around = low <= from && to <= high && high - low <= band_high - band_low;
    let is_none = -margin < low && high < margin && from >= margin;
    let is_positive = low > 0.0;
    if is_positive && (is_inside || is_around) {
        ClaimResult::Reproduced
    } else if high < 0.0 || is_none || (!is_positive && high < band_low) {
        ClaimResult::NotReproduced
    } else if is_positive {
        ClaimResult::DirectionOnly
    } else {
        ClaimResult::Undecided
    }
}

/// Judges a direction without a size. Gains within `margin` count as none.
fn judge_direction(expect: Expect, interval: (f64, f64), margin: f64) -> ClaimResult {
    let (low, high) = match expect {
        Expect::Loss => (-interval.1, -interval.0),
        Expect::Gain | Expect::Equal => interval,
    };
    if high < margin && (low > -margin || high < 0.0) {
        ClaimResult::NotReproduced
    } else if low > 0.0 {
        ClaimResult::DirectionOnly
    } else {
        ClaimResult::Undecided
    }
}

/// The verdict on a claim of which only a part was compared: what the others would add to the mean is unknown.
fn of_a_part(outcome: ClaimResult, claim: &Claim, interval: Option<(f64, f64)>) -> ClaimResult {
    let has_direction = |(low, high): (f64, f64)| match claim.expect {
        Expect::Gain => low > 0.0,
        Expect::Loss => high < 0.0,
        Expect::Equal => false,
    };
    match outcome {
        ClaimResult::Reproduced | ClaimResult::DirectionOnly
            if claim.won.is_some() || interval.is_some_and(has_direction) =>
        {
            ClaimResult::DirectionOnly
        }
        // One comparison with a difference is enough.
        ClaimResult::NotReproduced if claim.expect == Expect::Equal => outcome,
        _ => ClaimResult::Undecided,
    }
}

/// With how many values of a key the configuration is certainly ahead or behind.
struct Wins {
    won: usize,
    lost: usize,
    /// Ahead by the mean alone, certainly or not
    ahead: usize,
    all: usize,
}

impl Wins {
    /// Judges a published number of wins.
    fn judge(&self, published: &Won) -> ClaimResult {
        let most = self.all - self.lost;
        if self.won * 2 > self.all {
            let is_possible = (self.won..=most).contains(&published.count);
            if published.of == self.all && is_possible {
                ClaimResult::Reproduced
            } else {
                ClaimResult::DirectionOnly
            }
        } else if most * 2 <= self.all {
            ClaimResult::NotReproduced
        } else {
            ClaimResult::Undecided
        }
    }
}

/// The verdicts of a claim's comparisons.
struct Counts {
    gain: usize,
    loss: usize,
    equal: usize,
    all: usize,
}

impl Counts {
    fn judge_equal(&self) -> ClaimResult {
        if self.gain + self.loss > 0 {
            ClaimResult::NotReproduced
        } else if self.equal == self.all {
            ClaimResult::Reproduced
        } else {
            ClaimResult::Undecided
        }
    }
}

impl Analysis<'_> {
    /// Compares the published figures with the result.
    pub fn replications(&self) -> Vec<Replication> {
        let claims = self.plan().claims.iter();
        claims.map(|claim| self.replicate(claim)).collect()
    }

    /// Compares a published figure with the result.
    pub fn replicate(&self, claim: &Claim) -> Replication {
        let about = self.about(claim);
        if let Some(why) = self.missing(claim, &about) {
            return Replication {
                outcome: ClaimResult::Untestable,
                measured: None,
                interval: None,
                why,
                selected: about.len(),
                comparisons: claim.comparisons,
            };
        }
        let of = |verdict| about.iter().filter(|it| it.verdict == verdict).count();
        let counts = Counts {
            gain: of(Verdict::Gain),
            loss: of(Verdict::Loss),
            equal: of(Verdict::Equivalent),
            all: about.len(),
        };
        let measured = about.iter().filter(|it| it.interval.is_some()).count();
        let gains: Vec<f64> = about.iter().filter_map(|it| it.gain).collect();
        let interval = self.mean_interval(&about.iter().collect::<Vec<&Question>>());
        let margin = self.plan().margin.ln_1p();
        let won = claim.won.as_ref();
        let wins = won.map(|published| (published, self.wins(&published.key, &about)));
        let outcome = match (claim.expect, claim.size, interval) {
            (_, _, None) => ClaimResult::Undecided,
            (Expect::Equal, ..) => counts.judge_equal(),
            (_, Some(size), Some(interval)) => judge_size(size, interval, margin),
            (expect, None, Some(interval)) => match &wins {
                Some((published, wins)) => wins.judge(published),
                None => judge_direction(expect, interval, margin),
            },
        };
        let outcome = if about.len() < claim.comparisons {
            of_a_part(outcome, claim, interval)
        } else {
            outcome
        };
        let mut why = self.reason(claim, &counts, measured, &about);
        if let Some((published, wins)) = wins {
            let Wins {
                won,
                lost,
                ahead,
                all,
            } = wins;
            why = format!(
                "ahead with {ahead} of {all} values of {}, of which {won} surely, and surely behind with {lost}; {why}",
                published.key
            );
        }
        Replication {
            outcome,
            measured: (!gains.is_empty()).then(|| mean_log(gains.into_iter()).exp_m1()),
            interval: interval.map(|(low, high)| (low.exp_m1(), high.exp_m1())),
            why,
            selected: about.len(),
            comparisons: claim.comparisons,
        }
    }

    /// The wins of the claim's comparisons, each value of a key of the loads by its mean.
    fn wins(&self, key: &str, about: &[Question]) -> Wins {
        let mut values: BTreeMap<String, Vec<&Question>> = BTreeMap::new();
        for question in about {
            let value = self.plan().workloads[question.workload].get(key);
            values.entry(value).or_default().push(question);
        }
        let ends = |of: &Vec<&Question>| self.mean_interval(of).unwrap_or((-1.0, 1.0));
        let is_ahead = |of: &&Vec<&Question>| {
            let gains: Option<Vec<f64>> = of.iter().map(|it| it.gain).collect();
            gains.is_some_and(|gains| mean_log(gains.into_iter()) > 0.0)
        };
        let values = values.values();
        Wins {
            won: values.clone().filter(|of| ends(of).0 > 0.0).count(),
            lost: values.clone().filter(|of| ends(of).1 < 0.0).count(),
            ahead: values.clone().filter(is_ahead).count(),
            all: values.count(),
        }
    }

    /// The comparisons of a claim, in its direction.
    fn about(&self, claim: &Claim) -> Vec<Question> {
        let plan = self.plan();
        let directed = |mut question: Question| {
            let load = &plan.workloads[question.workload];
            let (from, to) = (plan.cases.get(question.from)?, plan.cases.get(question.to)?);
            if claim.is_about(from, to, load) {
                return Some(question);
            }
            if !claim.is_about(to, from, load) {
                return None;
            }
            let inverse = |gain: f64| (-gain.ln_1p()).exp_m1();
            (question.from, question.to) = (question.to, question.from);
            question.gain = question.gain.map(inverse);
            question.interval = question
                .interval
                .map(|(low, high)| (inverse(high), inverse(low)));
            question.verdict = match question.verdict {
                Verdict::Gain => Verdict::Loss,
                Verdict::Loss => Verdict::Gain,
                same => same,
            };
            Some(question)
        };
        self.questions().into_iter().filter_map(directed).collect()
    }

    /// Why the claim has no verdict here.
    fn missing(&self, claim: &Claim, about: &[Question]) -> Option<String> {
        if let Some(why) = &claim.untestable {
            return Some(why.clone());
        }
        if about.is_empty() {
            let left_out = self.journal.header.left_out.iter();
            let missing: Vec<String> = left_out
                .map(|(case, why)| printable(&format!("{case}: {why}")))
                .collect();
            return Some(match missing.is_empty() {
                true => "the selected part of the plan does not compare it".into(),
                false => missing.join("; "),
            });
        }
        let arms = || about.iter().flat_map(|it| [it.from, it.to]);
        // The other side may have storage of its own, such as a file in place of a device.
        if about
            .iter()
            .any(|it| !claim.is_on(&self.case(it.to).settings))
        {
            return Some(claim.needs_storage());
        }
        let facts = &self.journal.header.facts;
        let is_emulated = facts.get("accelerator").is_some_and(|it| it == "tcg");
        let is_own = self
            .plan()
            .ssh
            .as_ref()
            .is_none_or(|ssh| ssh.host.is_none());
        let guests = self.plan().guest != GuestKind::None
            && is_own
            && arms().any(|arm| self.case(arm).settings.device != Device::Host);
        (is_emulated && guests).then(|| {
            "needs KVM: these guests ran under emulation, whose figures mean nothing".into()
        })
    }

    fn reason(
        &self,
        claim: &Claim,
        counts: &Counts,
        measured: usize,
        about: &[Question],
    ) -> String {
        let Counts {
            gain,
            loss,
            equal,
            all,
        } = *counts;
        let mut why = match all {
            _ if all < claim.comparisons => {
                format!("mean of only {all} of {} comparisons", claim.comparisons)
            }
            1 => "1 comparison".to_owned(),
            _ => format!("mean of {all} comparisons"),
        };
        why += &format!(
            ": {gain} gain, {loss} loss, {equal} equivalent, {} undecided",
            all - gain - loss - equal
        );
        if measured < all {
            why += &format!("; {} have fewer than 3 pairs", all - measured);
        }
        let confounded: std::collections::BTreeSet<String> = about
            .iter()
            .filter_map(|it| self.confounded(it.from, it.to))
            .flatten()
            .collect();
        if !confounded.is_empty() {
            let settings: Vec<String> = confounded.into_iter().collect();
            why += &format!("; confounded: {}", settings.join(", "));
        }
        why
    }
}

/// The mean of gains, as a logarithm.
fn mean_log(gains: impl Iterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = gains.map(f64::ln_1p).collect();
    logs.iter().sum::<f64>() / logs.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(size: &str, low: f64, high: f64) -> ClaimResult {
        let interval = ((low / 100.0).ln_1p(), (high / 100.0).ln_1p());
        judge_size(size.parse().unwrap(), interval, 0.03_f64.ln_1p())
    }

    #[test]
    fn a_size_is_reproduced_only_by_an_interval_of_about_that_size() {
        use ClaimResult::*;
        // Inside the band from +9.8 % to +23.3 %; around the size; both.
        assert_eq!(judge("+15 %", 10.0, 13.0), Reproduced);
        assert_eq!(judge("+15 %", 8.0, 16.0), Reproduced);
        assert_eq!(judge("+15 %", 14.0, 25.0), Reproduced);
        // A gain of 2 % is not one of 15 %, and neither is one of 40 %.
        assert_eq!(judge("+15 %", 1.0, 4.0), DirectionOnly);
        assert_eq!(judge("+15 %", 35.0, 45.0), DirectionOnly);
        // It contains the size, and would contain many others.
        assert_eq!(judge("+15 %", 1.0, 60.0), DirectionOnly);
        assert_eq!(judge("+15 %", 5.0, 12.0), DirectionOnly);
        // Nothing, less, and not enough to tell.
        assert_eq!(judge("+15 %", 0.5, 2.5), NotReproduced);
        assert_eq!(judge("+15 %", -4.0, 6.0), NotReproduced);
        assert_eq!(judge("+15 %", -9.0, -2.0), NotReproduced);
        assert_eq!(judge("+15 %", -5.0, 20.0), Undecided);
    }

    #[test]
    fn a_bound_is_kept_or_broken() {
        use ClaimResult::*;
        assert_eq!(judge("at least -10 %", -9.0, -1.0), Reproduced);
        assert_eq!(judge("at least -10 %", 3.0, 7.0), Reproduced);
        assert_eq!(judge("at least -10 %", -12.0, 7.0), Undecided);
        assert_eq!(judge("at least -10 %", -30.0, -12.0), NotReproduced);
        assert_eq!(judge("at least 2 times", 120.0, 900.0), Reproduced);
        assert_eq!(judge("at least 2 times", 10.0, 90.0), NotReproduced);
    }

    #[test]
    fn losses_and_factors_are_judged_like_gains() {
        use ClaimResult::*;
        assert_eq!(judge("-29 %", -32.0, -25.0), Reproduced);
        assert_eq!(judge("-29 %", -9.0, -5.0), DirectionOnly);
        assert_eq!(judge("-29 %", 5.0, 9.0), NotReproduced);
        assert_eq!(judge("-29 %", -40.0, 5.0), Undecided);
        assert_eq!(judge("10 times", 700.0, 1100.0), Reproduced);
        assert_eq!(judge("10 times", 100.0, 120.0), DirectionOnly);
    }

    #[test]
    fn ranges_and_small_sizes_are_judged_by_their_own_size() {
        use ClaimResult::*;
        assert_eq!(judge("+2 % to +5 %", 1.5, 4.0), Reproduced);
        assert_eq!(judge("+2 % to +5 %", 9.0, 12.0), DirectionOnly);
        assert_eq!(judge("+2 % to +5 %", 3.0, 8.0), DirectionOnly);
        assert_eq!(judge("+2 % to +5 %", 1.5, 7.5), Reproduced);
    }

    #[test]
    fn a_range_from_nothing_is_an_upper_bound() {
        use ClaimResult::*;
        assert_eq!(judge("0 % to +10 %", 0.5, 6.0), Reproduced);
        assert_eq!(judge("0 % to +10 %", -0.5, 0.5), Reproduced);
        assert_eq!(judge("0 % to +10 %", -1.0, -0.5), Reproduced);
        assert_eq!(judge("0 % to +10 %", 5.0, 20.0), Undecided);
        assert_eq!(judge("0 % to +10 %", -5.0, 6.0), Undecided);
        assert_eq!(judge("0 % to +10 %", 20.0, 26.0), NotReproduced);
        assert_eq!(judge("0 % to +10 %", -9.0, -4.0), NotReproduced);
        assert_eq!(judge("-10 % to 0 %", -9.0, 1.0), Reproduced);
        assert_eq!(judge("-10 % to 0 %", -40.0, -30.0), NotReproduced);
    }

    #[test]
    fn wins_are_counted_and_not_averaged() {
        use ClaimResult::*;
        let published: Won = "5 of 8 iodepth".parse().unwrap();
        let judge = |won, lost, all| {
            let ahead = won;
            Wins {
                won,
                lost,
                ahead,
                all,
            }
            .judge(&published)
        };
        assert_eq!(judge(5, 3, 8), Reproduced);
        assert_eq!(judge(5, 0, 8), Reproduced);
        assert_eq!(judge(7, 1, 8), DirectionOnly);
        assert_eq!(judge(3, 1, 4), DirectionOnly);
        assert_eq!(judge(1, 4, 8), NotReproduced);
        assert_eq!(judge(4, 2, 8), Undecided);
    }

    #[test]
    fn without_a_number_only_the_direction_can_be_confirmed() {
        use ClaimResult::*;
        let judge = |expect, low: f64, high: f64| judge_direction(expect, (low, high), 0.03);
        assert_eq!(judge(Expect::Gain, 0.01, 0.2), DirectionOnly);
        assert_eq!(judge(Expect::Gain, 0.001, 0.02), NotReproduced);
        assert_eq!(judge(Expect::Gain, -0.2, -0.1), NotReproduced);
        assert_eq!(judge(Expect::Gain, -0.2, 0.01), Undecided);
        assert_eq!(judge(Expect::Loss, -0.2, -0.01), DirectionOnly);
        assert_eq!(judge(Expect::Loss, -0.01, 0.2), Undecided);
    }

    #[test]
    fn equality_needs_every_comparison() {
        let counts = |gain, equal, all| Counts {
            gain,
            loss: 0,
            equal,
            all,
        };
        assert_eq!(counts(0, 3, 3).judge_equal(), ClaimResult::Reproduced);
        assert_eq!(counts(1, 2, 3).judge_equal(), ClaimResult::NotReproduced);
        assert_eq!(counts(0, 2, 3).judge_equal(), ClaimResult::Undecided);
    }
}
