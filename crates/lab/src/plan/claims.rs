//! Published figures that a plan tests.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::settings;
use super::units::switch;
use super::values::{Entry, Mistake, Parsed, single};
use super::words::{Expect, StorageKind, not_one_of};
use super::workload::{self, Workload};
use super::{Case, Name, Plan, Settings};

/// A published figure that the plan tests.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The author, the year, and the place in the document.
    pub source: String,
    /// The published figure.
    pub figure: String,
    /// The settings of the base of the comparison.
    pub from: Vec<(String, String)>,
    /// The settings of the configuration that is compared with it.
    pub to: Vec<(String, String)>,
    /// The loads of the claim; empty means all.
    pub at: Vec<(String, String)>,
    /// The expected direction.
    pub expect: Expect,
    /// The published size; `None` if no number was published.
    pub size: Option<Size>,
    /// The storage that the claim is about; `None` is any.
    pub storage: Option<StorageKind>,
    /// Why this plan cannot test the claim.
    pub untestable: Option<String>,
}

/// The published size of an effect, as logarithms of ratios: `+4.4 %`, `10.0 times`, or `+2 % to +5 %`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// The smaller ratio's logarithm.
    pub low: f64,
    /// The larger ratio's logarithm; the same without a range.
    pub high: f64,
}

/// Largest ratio in a claim, and the inverse of the smallest.
const RATIO_MAX: f64 = 1000.0;

impl Size {
    /// The direction of the effect.
    pub fn direction(&self) -> Expect {
        if self.high > 0.0 {
            Expect::Gain
        } else {
            Expect::Loss
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem =
            || format!("'{text}' is not a size, such as +4.4 %, -29 %, 10 times or +2 % to +5 %");
        let one = |text: &str| {
            let number = |text: &str| text.trim().parse::<f64>().map_err(|_| problem());
            let ratio = match (
                text.trim().strip_suffix('%'),
                text.trim().strip_suffix("times"),
            ) {
                (Some(percent), _) => 1.0 + number(percent)? / 100.0,
                (None, Some(times)) => number(times)?,
                (None, None) => return Err(problem()),
            };
            match (1.0 / RATIO_MAX..=RATIO_MAX).contains(&ratio) {
                true => Ok(ratio.ln()),
                false => Err(problem()),
            }
        };
        let (low, high) = match text.split_once(" to ") {
            Some((low, high)) => (one(low)?, one(high)?),
            None => (one(text)?, one(text)?),
        };
        match low <= high && (low >= 0.0 || high <= 0.0) && (low, high) != (0.0, 0.0) {
            true => Ok(Self { low, high }),
            false => Err(format!(
                "'{text}' has no direction: a range goes from the smaller to the larger ratio, both gains or both losses"
            )),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |log: f64| match log.exp() {
            ratio @ 3.0.. => format!("{ratio:.1} times"),
            ratio => format!("{:+.1} %", (ratio - 1.0) * 100.0),
        };
        match self.low == self.high {
            true => f.pad(&one(self.low)),
            false => f.pad(&format!("{} to {}", one(self.low), one(self.high))),
        }
    }
}

impl Claim {
    /// Whether the claim is about this comparison under this load.
    pub fn is_about(&self, from: &Case, to: &Case, load: &Workload) -> bool {
        let at = |(key, value): &(String, String)| match key.as_str() {
            "workload" => &load.name == value,
            _ => value.split(',').any(|value| load.get(key) == value),
        };
        from.matches(&self.from) && to.matches(&self.to) && self.at.iter().all(at)
    }

    /// Whether the claim is about this comparison, or about its inverse.
    pub fn is_about_either(&self, a: &Case, b: &Case, load: &Workload) -> bool {
        self.is_about(a, b, load) || self.is_about(b, a, load)
    }
}

impl StorageKind {
    /// Whether a configuration's disks are on this kind of storage.
    pub fn is_of(self, settings: &Settings) -> bool {
        match (self, settings.backing.first()) {
            (Self::Rbd, first) => matches!(first, Some(Name::Rbd { .. })),
            (Self::Device, Some(Name::Path(path))) => path.starts_with("/dev"),
            (Self::Device, _) => settings.krbd,
        }
    }

    /// What to do for it.
    pub fn needs(self) -> &'static str {
        match self {
            Self::Rbd => "needs images in a Ceph cluster: --pool POOL",
            Self::Device => "needs block devices: --backing /dev/GROUP/lab-{guest}-{volume}",
        }
    }
}

const KEYS: [&str; 10] = [
    "source",
    "figure",
    "from",
    "to",
    "at",
    "expect",
    "size",
    "storage",
    "untestable",
    "optional",
];

/// Reads a `[[claim]]`; `number` counts from 0.
pub fn claim(plan: &Plan, number: usize, entries: &[Entry], span: Range<usize>) -> Parsed<Claim> {
    if let Some(entry) = entries.iter().find(|entry| !KEYS.contains(&entry.key)) {
        let problem = not_one_of(entry.key, &KEYS);
        return Err(Mistake::new(entry.span.clone(), problem));
    }
    let text = |key: &str| match entries.iter().find(|entry| entry.key == key) {
        Some(entry) => single(entry).map(Some),
        None => Ok(None),
    };
    let of = |key: &'static str| {
        let span = &span;
        move |problem: String| Mistake::new(span.clone(), format!("{key}: {problem}"))
    };
    let number = number + 1;
    let size: Option<Size> = text("size")?
        .map(|it| it.parse())
        .transpose()
        .map_err(of("size"))?;
    let expect = match (text("expect")?, &size) {
        (None, Some(size)) => size.direction(),
        (Some(word), None) => word.parse().map_err(of("expect"))?,
        (None, None) | (Some(_), Some(_)) => {
            let problem = format!(
                "[[claim]] {number} needs either size, or expect if no number was published"
            );
            return Err(Mistake::new(span, problem));
        }
    };
    let mut claim = Claim {
        source: text("source")?.unwrap_or_default(),
        figure: text("figure")?.unwrap_or_default(),
        from: condition(plan, entries, "from", &settings::KEYS, "case")?,
        to: condition(plan, entries, "to", &settings::KEYS, "case")?,
        at: condition(plan, entries, "at", &workload::KEYS, "workload")?,
        expect,
        size,
        storage: text("storage")?
            .map(|it| it.parse())
            .transpose()
            .map_err(of("storage"))?,
        untestable: text("untestable")?,
    };
    let optional = text("optional")?
        .map(|it| switch(&it))
        .transpose()
        .map_err(of("optional"))?;
    if claim.untestable.is_none() && !plan.tests(&claim) {
        if !optional.unwrap_or(false) {
            let problem = format!("[[claim]] {number} matches no comparison of this plan");
            return Err(Mistake::new(span, problem));
        }
        claim.untestable = Some("no comparison of the changed plan is about it".into());
    }
    Ok(claim)
}

/// A condition is `key=value key=value`, or the name of a case or a load.
fn condition(
    plan: &Plan,
    entries: &[Entry],
    key: &str,
    known: &[&str],
    name: &str,
) -> Parsed<Vec<(String, String)>> {
    let Some(entry) = entries.iter().find(|entry| entry.key == key) else {
        return Ok(Vec::new());
    };
    let text = single(entry)?;
    let fail = |problem: String| Mistake::new(entry.span.clone(), format!("{key}: {problem}"));
    // The name of a case may contain '=' too.
    if !text.contains('=') || plan.cases.iter().any(|case| case.name == text) {
        return Ok(vec![(name.into(), text)]);
    }
    let pair = |word: &str| match word.split_once('=') {
        Some((key, value)) if known.contains(&key) => Ok((key.to_owned(), value.to_owned())),
        Some((key, _)) => Err(fail(not_one_of(key, known))),
        None => Err(fail(format!("'{word}' is not key=value"))),
    };
    text.split_whitespace().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_percentages_factors_and_ranges() {
        let of = |text: &str| text.parse::<Size>().unwrap();
        assert_eq!(of("+4.4 %").to_string(), "+4.4 %");
        assert_eq!(of("-29%").direction(), Expect::Loss);
        assert!((of("-29%").low - 0.71_f64.ln()).abs() < 1e-12);
        assert!((of("10 times").high - 10_f64.ln()).abs() < 1e-12);
        assert_eq!(of("10 times").to_string(), "10.0 times");
        assert_eq!(of("+2 % to +5 %").to_string(), "+2.0 % to +5.0 %");
        assert_eq!(of("0 % to +10 %").direction(), Expect::Gain);
        assert_eq!(of("-10 % to 0 %").direction(), Expect::Loss);
        for wrong in [
            "",
            "5",
            "-100 %",
            "0 %",
            "5 % to 2 %",
            "-5 % to 5 %",
            "NaN %",
            "inf times",
            "1e9 times",
        ] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong}");
        }
    }
}
