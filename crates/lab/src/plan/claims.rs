//! Published figures that a plan tests.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::settings;
use super::units::switch;
use super::values::{Entry, Mistake, Parsed, single};
use super::words::{Expect, StorageKind, not_one_of};
use super::workload::{self, Workload};
use super::{Backing, Case, Name, Plan, Settings};

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
    /// The published number of wins, in place of a size.
    pub won: Option<Won>,
    /// The published words for the size, if its number is this project's.
    pub words: Option<String>,
    /// The kinds of storage that the claim is about; empty means any.
    pub storage: Vec<StorageKind>,
    /// Why this plan cannot test the claim.
    pub untestable: Option<String>,
    /// The number of comparisons of the complete plan that the claim is about.
    pub comparisons: usize,
}

/// The published size of an effect, as logarithms of ratios: `+4.4 %`, `10.0 times`, `+2 % to +5 %`, or `at least -10 %`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// The smaller ratio's logarithm.
    pub low: f64,
    /// The larger ratio's logarithm; the same without a range, and infinite without an upper end.
    pub high: f64,
}

/// A published number of wins: with 5 of 8 values of `iodepth`, `to` is ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Won {
    /// The values with which `to` is ahead.
    pub count: usize,
    /// All values.
    pub of: usize,
    /// The key of loads whose values these are.
    pub key: String,
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
        let problem = || {
            format!(
                "'{text}' is not a size, such as +4.4 %, 10 times, +2 % to +5 % or at least -10 %"
            )
        };
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
        if let Some(low) = text.trim().strip_prefix("at least ") {
            let (low, high) = (one(low)?, f64::INFINITY);
            return Ok(Self { low, high });
        }
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
        let short = |text: String| match text.strip_suffix(".0") {
            Some(short) => short.to_owned(),
            None => text,
        };
        let one = |log: f64| match log.exp() {
            1.0 => "0 %".to_owned(),
            ratio @ 3.0.. => short(format!("{ratio:.1}")) + " times",
            ratio => short(format!("{:+.1}", (ratio - 1.0) * 100.0)) + " %",
        };
        match self.low == self.high {
            true => f.pad(&one(self.low)),
            false if self.high.is_infinite() => f.pad(&format!("at least {}", one(self.low))),
            false => f.pad(&format!("{} to {}", one(self.low), one(self.high))),
        }
    }
}

impl FromStr for Won {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || format!("'{text}' is not a number of wins, such as '5 of 8 iodepth'");
        let [count, "of", of, key] = text.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(problem());
        };
        let number = |text: &str| text.parse::<usize>().map_err(|_| problem());
        let (count, of) = (number(count)?, number(of)?);
        if !workload::KEYS.contains(&key) {
            return Err(not_one_of(key, &workload::KEYS));
        }
        if count > of || count * 2 <= of {
            return Err(format!(
                "'{text}' has no winner: swap from and to, so that more than half are won"
            ));
        }
        let key = key.to_owned();
        Ok(Self { count, of, key })
    }
}

impl fmt::Display for Won {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} values of {}", self.count, self.of, self.key)
    }
}

impl Claim {
    /// The published size, number of wins, or direction.
    pub fn published(&self) -> String {
        match (&self.words, &self.size, &self.won) {
            (Some(words), ..) => words.clone(),
            (None, Some(size), _) => size.to_string(),
            (None, None, Some(won)) => won.to_string(),
            (None, None, None) => format!("{}, no number", self.expect),
        }
    }

    /// Whether the claim is about the storage of this configuration.
    pub fn is_on(&self, settings: &Settings) -> bool {
        self.storage.is_empty() || self.storage.iter().any(|kind| kind.is_of(settings))
    }

    /// Whether the claim is about this comparison under this load. Of two configurations that are the same, only that they
    /// are equal can be claimed.
    pub fn is_about(&self, from: &Case, to: &Case, load: &Workload) -> bool {
        self.names(from, to, load)
            && (self.expect == Expect::Equal || !from.settings.differences(&to.settings).is_empty())
    }

    /// Whether the claim names these sides and this load.
    fn names(&self, from: &Case, to: &Case, load: &Workload) -> bool {
        let at = |(key, value): &(String, String)| match key.as_str() {
            "workload" => &load.name == value,
            _ => value.split(',').any(|value| load.get(key) == value),
        };
        from.matches(&self.from) && to.matches(&self.to) && self.at.iter().all(at)
    }

    /// What the storage of the claim needs.
    pub fn needs_storage(&self) -> String {
        let kinds: Vec<&str> = self.storage.iter().map(|kind| kind.needs()).collect();
        format!("needs {}", kinds.join(" or "))
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
            (Self::File, Some(Name::Path(path))) => !path.starts_with("/dev"),
            (Self::File, Some(Name::Rbd { .. })) => false,
            (Self::File, None) => !matches!(settings.backing, Backing::Zram | Backing::Null),
        }
    }

    /// What to do for it.
    pub fn needs(self) -> &'static str {
        match self {
            Self::File => "files (without --pool)",
            Self::Rbd => "images in a Ceph cluster (--pool POOL)",
            Self::Device => "block devices (--backing /dev/GROUP/lab-{guest}-{volume})",
        }
    }
}

const KEYS: [&str; 12] = [
    "source",
    "figure",
    "from",
    "to",
    "at",
    "expect",
    "size",
    "won",
    "published",
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
        let entry = entries.iter().find(|entry| entry.key == key);
        let span = entry.map_or_else(|| span.clone(), |entry| entry.span.clone());
        move |problem: String| Mistake::new(span, format!("{key}: {problem}"))
    };
    let number = number + 1;
    let size: Option<Size> = text("size")?
        .map(|it| it.parse())
        .transpose()
        .map_err(of("size"))?;
    let won: Option<Won> = text("won")?
        .map(|it| it.parse())
        .transpose()
        .map_err(of("won"))?;
    let expect = match (text("expect")?, &size, &won) {
        (None, Some(size), None) => size.direction(),
        (None, None, Some(_)) => Expect::Gain,
        (Some(word), None, None) => word.parse().map_err(of("expect"))?,
        _ => {
            let problem = format!(
                "[[claim]] {number} needs either size, or won, or expect if no number was published"
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
        won,
        words: text("published")?,
        storage: text("storage")?
            .iter()
            .flat_map(|kinds| kinds.split('|'))
            .map(str::parse)
            .collect::<Result<_, String>>()
            .map_err(of("storage"))?,
        untestable: text("untestable")?,
        comparisons: 0,
    };
    claim.comparisons = plan.comparisons_of(&claim);
    let optional = text("optional")?
        .map(|it| switch(&it))
        .transpose()
        .map_err(of("optional"))?;
    if claim.untestable.is_none() && !plan.tests(&claim) {
        let left_out = left_out(plan, &claim).or_else(|| is_same(plan, &claim));
        if left_out.is_none() && !optional.unwrap_or(false) {
            let problem = format!("[[claim]] {number} matches no comparison of this plan");
            return Err(Mistake::new(span, problem));
        }
        let other = || "no comparison of the changed plan is about it".to_owned();
        claim.untestable = Some(left_out.unwrap_or_else(other));
    }
    Ok(claim)
}

/// Why the plan has no configuration for a side of the claim that is a case's name.
fn left_out(plan: &Plan, claim: &Claim) -> Option<String> {
    let sides = claim.from.iter().chain(&claim.to);
    let names = sides.filter(|(key, _)| key == "case");
    let why = |(_, name): &(String, String)| {
        let mut all = plan.left_out.iter();
        all.find(|why| {
            why.strip_prefix(name.as_str())
                .is_some_and(|it| it.starts_with(": "))
        })
    };
    let whys: BTreeSet<&String> = names.filter_map(why).collect();
    let whys: Vec<&str> = whys.into_iter().map(String::as_str).collect();
    (!whys.is_empty()).then(|| format!("left out: {}", whys.join("; ")))
}

/// Why the claim cannot be tested if its sides are the same on this storage.
fn is_same(plan: &Plan, claim: &Claim) -> Option<String> {
    let names = |&&(from, to): &&(usize, usize)| {
        let (from, to) = (&plan.cases[from], &plan.cases[to]);
        let mut loads = plan.workloads.iter();
        loads.any(|load| claim.names(from, to, load) || claim.names(to, from, load))
    };
    let &(from, to) = plan.contrasts.iter().find(names)?;
    let is_on = [from, to]
        .iter()
        .all(|side| claim.is_on(&plan.cases[*side].settings));
    if is_on {
        return Some("its two sides are the same configuration here".into());
    }
    Some(claim.needs_storage())
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
    fn wins_have_a_winner_and_a_key_of_loads() {
        let won: Won = "5 of 8 iodepth".parse().unwrap();
        assert_eq!(won.to_string(), "5 of 8 values of iodepth");
        for (wrong, word) in [
            ("5 of 8", "number of wins"),
            ("x of 8 bs", "number of wins"),
            ("4 of 8 bs", "no winner"),
            ("9 of 8 bs", "no winner"),
            ("5 of 8 aio", "not"),
        ] {
            let problem = wrong.parse::<Won>().unwrap_err();
            assert!(problem.contains(word), "{wrong}: {problem}");
        }
    }

    #[test]
    fn rates_that_are_found_are_comparisons_of_a_claim() {
        let text = "[config]\nqueues = [1, 2, 4]\n[fio]\nrate = [\"auto\", 100]\niodepth = 8\n\
            [[claim]]\nfrom = \"queues=1\"\nexpect = \"gain\"\n";
        let plan = Plan::parse(std::path::Path::new("p"), text).unwrap();
        assert_eq!(plan.claims[0].comparisons, 4);
        let load = plan.workloads.iter().find(|load| load.search).unwrap();
        let found = plan.with_rates(&load.name, &[10, 20, 30]);
        assert_eq!(found.claims[0].comparisons, 8);
        assert_eq!(found.comparisons_of(&found.claims[0]), 8);
        let part = plan.selected(&"rate=auto".parse().unwrap()).unwrap();
        let part = part.with_rates(&load.name, &[10, 20, 30]);
        assert_eq!(part.claims[0].comparisons, 8);
        assert_eq!(part.comparisons_of(&part.claims[0]), 6);
    }

    #[test]
    fn a_claim_about_kinds_of_storage_is_about_no_other() {
        let claim = |storage: &str| {
            let text = format!(
                "[config]\nqueues = [1, 2]\n[[claim]]\nfrom = \"queues=1\"\nexpect = \"gain\"\nstorage = \"{storage}\"\n"
            );
            Plan::parse(std::path::Path::new("p"), &text).map(|plan| plan.claims[0].clone())
        };
        let on = |backing: &str| Settings {
            backing: backing.parse().unwrap(),
            ..Settings::default()
        };
        let local = claim("file|device").unwrap();
        for (backing, wanted) in [
            ("file", true),
            ("/mnt/nfs/", true),
            ("/images/a", true),
            ("/dev/vg/a", true),
            ("rbd:p/a", false),
            ("null", false),
        ] {
            assert_eq!(local.is_on(&on(backing)), wanted, "{backing}");
        }
        assert!(!claim("rbd").unwrap().is_on(&on("file")));
        assert!(claim("file|disk").is_err());
    }

    #[test]
    fn sizes_are_percentages_factors_and_ranges() {
        let of = |text: &str| text.parse::<Size>().unwrap();
        assert_eq!(of("+4.4 %").to_string(), "+4.4 %");
        assert_eq!(of("-29%").direction(), Expect::Loss);
        assert!((of("-29%").low - 0.71_f64.ln()).abs() < 1e-12);
        assert!((of("10 times").high - 10_f64.ln()).abs() < 1e-12);
        // As published: no decimal that was not.
        for same in [
            "10 times",
            "+106 %",
            "-29.3 %",
            "+2 % to +5 %",
            "0 % to +11.1 %",
        ] {
            assert_eq!(of(same).to_string(), same);
        }
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
