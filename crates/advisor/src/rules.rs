//! Rules: data in `rules/*.toml`. Reading them checks their conditions against the known
//! [properties](crate::model::PROPERTIES).

mod condition;
mod contrast;

pub use condition::{Atom, Clause, Lookup, Verdict, evaluate};
pub(crate) use contrast::is_one_of;
pub use contrast::{Allocation, Contrast, ContrastScope, FREE_PATTERN, FREE_SETTINGS, Pattern};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::setting::Setting;

/// The files with rules.
const FILES: &[(&str, &str)] = &[
    ("device.toml", include_str!("rules/device.toml")),
    ("cache.toml", include_str!("rules/cache.toml")),
    ("threads.toml", include_str!("rules/threads.toml")),
    ("rbd.toml", include_str!("rules/rbd.toml")),
    ("backing.toml", include_str!("rules/backing.toml")),
    ("memory.toml", include_str!("rules/memory.toml")),
    ("host.toml", include_str!("rules/host.toml")),
    ("network.toml", include_str!("rules/network.toml")),
    ("vhost-user.toml", include_str!("rules/vhost-user.toml")),
];
const SOURCES: &str = include_str!("rules/sources.toml");

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The VM does not start, loses data, or a setting has no effect.
    Error,
    /// A factor.
    High,
    /// About ten percent.
    Medium,
    /// A few percent.
    Low,
    /// A note: worth knowing or measuring. It does not lead to exit code 1.
    Info,
}

/// Whether a rule is still valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    #[default]
    Current,
    /// Sources disagree, or the answer depends on the load.
    Disputed,
    /// The rule says since when it is obsolete, and what is true today.
    Obsolete,
}

/// What a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    Disk,
    Vm,
    Host,
    /// A block device of the host
    Device,
}

/// When a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// Immediately, while the VM runs
    Live,
    /// After a reboot of the guest
    Reboot,
    /// After the VM was stopped and started
    StopStart,
    /// After a reboot of the host
    HostReboot,
    /// There is nothing to change
    None,
}

/// The quality of evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Grade {
    /// One factor changed.
    P,
    /// More than one factor changed, and the source does not say so.
    C,
    /// Several factors changed together.
    B,
    /// An opinion, or documentation.
    O,
}

impl Grade {
    pub fn about(self) -> &'static str {
        match self {
            Self::P => "one factor changed",
            Self::C => "confounded",
            Self::B => "a bundle of changes",
            Self::O => "opinion or documentation",
        }
    }
}

/// A statement that supports a rule.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The key in `sources.toml`.
    pub source: String,
    /// What the source says.
    pub figure: String,
    pub grade: Grade,
}

/// A source of evidence.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Citation {
    /// Author and title.
    pub title: String,
    pub year: u16,
}

/// A rule in its file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RuleEntry {
    id: String,
    title: String,
    scope: Scope,
    severity: Severity,
    #[serde(default)]
    status: Status,
    when: Vec<String>,
    says: String,
    advice: String,
    #[serde(default)]
    fix: Vec<String>,
    #[serde(default)]
    lowers_durability: bool,
    activate: Activation,
    #[serde(default)]
    cost: String,
    gain: Option<String>,
    depends: Option<String>,
    evidence: Vec<Evidence>,
    measured: Option<Contrast>,
    unmeasured: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    rule: Vec<RuleEntry>,
}

#[derive(Clone, Debug)]
pub struct Rule {
    /// Users name it in options and comments.
    pub id: String,
    /// What is wrong, in one line.
    pub title: String,
    pub scope: Scope,
    pub severity: Severity,
    pub status: Status,
    /// The rule applies if all clauses hold.
    pub when: Vec<Clause>,
    /// The clauses as text.
    pub conditions: Vec<String>,
    /// The finding's text, with properties in braces.
    pub says: String,
    pub advice: String,
    /// The settings that fix it.
    pub fix: Vec<Setting>,
    /// Whether the fix may lose data in a crash that survives one today. `--fix` then skips it unless `--fix-rule` names the
    /// rule.
    pub lowers_durability: bool,
    pub activate: Activation,
    pub cost: String,
    /// The expected gain.
    pub gain: Option<String>,
    /// What the gain depends on.
    pub depends: Option<String>,
    pub evidence: Vec<Evidence>,
    pub measurement: Measurement,
}

/// How to measure the effect of a rule on a host.
#[derive(Clone, Debug)]
pub enum Measurement {
    /// A recipe of `ringdisk lab` makes this comparison.
    By(Contrast),
    /// Why there is none.
    None(String),
}

impl Rule {
    /// The storage of the disks that the rule is about, if it is only one kind.
    pub fn storage(&self) -> &str {
        let mut protocols = self.when.iter().filter_map(|clause| match &clause[..] {
            [only] if only.property == "disk.protocol" => only.word(),
            _ => None,
        });
        protocols.next().unwrap_or("file")
    }

    pub fn contrast(&self) -> Option<&Contrast> {
        match &self.measurement {
            Measurement::By(contrast) => Some(contrast),
            Measurement::None(_) => None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Rules {
    pub rules: Vec<Rule>,
    /// The sources that the rules cite, by key.
    pub sources: BTreeMap<String, Citation>,
}

/// An error in a rule. A test checks that the built-in rules have none.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{file}: rule {rule}: {problem}")]
pub struct RuleError {
    pub file: String,
    /// The rule's id, or `?`.
    pub rule: String,
    pub problem: String,
}

impl Rules {
    /// The built-in rules.
    ///
    /// # Errors
    /// A rule is invalid.
    pub fn built_in() -> Result<Self, RuleError> {
        Self::parse(SOURCES, FILES)
    }

    fn parse(sources: &str, files: &[(&str, &str)]) -> Result<Self, RuleError> {
        let fail = |file: &str, rule: &str, problem: String| RuleError {
            file: file.to_owned(),
            rule: rule.to_owned(),
            problem,
        };
        let sources: BTreeMap<String, Citation> =
            toml::from_str(sources).map_err(|e| fail("sources.toml", "?", e.to_string()))?;
        let mut rules: Vec<Rule> = Vec::new();
        for (name, text) in files {
            let file: File = toml::from_str(text).map_err(|e| fail(name, "?", e.to_string()))?;
            for entry in file.rule {
                let id = entry.id.clone();
                let rule = compile(entry, &sources).map_err(|problem| fail(name, &id, problem))?;
                if rules.iter().any(|other| other.id == rule.id) {
                    return Err(fail(name, &id, "the id exists twice".into()));
                }
                rules.push(rule);
            }
        }
        Ok(Self { rules, sources })
    }

    pub fn get(&self, id: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.id == id)
    }

    /// Similar ids, for an error message.
    pub fn like(&self, id: &str) -> Vec<&str> {
        let words: Vec<&str> = id.split('-').filter(|word| word.len() > 2).collect();
        let same =
            |a: &mut dyn Iterator<Item = (char, char)>| a.take_while(|(a, b)| a == b).count();
        let known = |rule: &&Rule| {
            let start = same(&mut rule.id.chars().zip(id.chars()));
            let end = same(&mut rule.id.chars().rev().zip(id.chars().rev()));
            words.iter().any(|word| rule.id.contains(word)) || 2 * (start + end) > 3 * id.len() / 2
        };
        self.rules
            .iter()
            .filter(known)
            .map(|rule| rule.id.as_str())
            .take(8)
            .collect()
    }
}

fn compile(entry: RuleEntry, sources: &BTreeMap<String, Citation>) -> Result<Rule, String> {
    let when = entry
        .when
        .iter()
        .map(|clause| condition::clause(clause, entry.scope))
        .collect::<Result<_, _>>()?;
    let fix = entry
        .fix
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    for name in placeholders(&entry.says) {
        let name = name.split(':').next().unwrap_or(name);
        let known = crate::model::PROPERTIES
            .iter()
            .any(|property| property.name == name);
        if !known && name != "name" && name != "file" {
            return Err(format!("says: there is no property '{name}'"));
        }
    }
    if let Some(evidence) = entry
        .evidence
        .iter()
        .find(|e| !sources.contains_key(&e.source))
    {
        return Err(format!("there is no source '{}'", evidence.source));
    }
    if entry.when.is_empty() || entry.evidence.is_empty() {
        return Err("a rule needs conditions and evidence".into());
    }
    if entry.status == Status::Disputed && entry.depends.is_none() {
        return Err("a disputed rule needs 'depends'".into());
    }
    let measurement = match (entry.measured, entry.unmeasured) {
        (Some(contrast), None) => {
            contrast.check()?;
            if entry.scope == Scope::Host {
                return Err("a host has no storage on which to measure; use 'unmeasured'".into());
            }
            Measurement::By(contrast)
        }
        (None, Some(why)) if !why.is_empty() => Measurement::None(why),
        _ => return Err("a rule needs either 'measured' or 'unmeasured'".into()),
    };
    Ok(Rule {
        id: entry.id,
        title: entry.title,
        scope: entry.scope,
        severity: entry.severity,
        status: entry.status,
        when,
        conditions: entry.when,
        says: entry.says,
        advice: entry.advice,
        fix,
        lowers_durability: entry.lowers_durability,
        activate: entry.activate,
        cost: entry.cost,
        gain: entry.gain,
        depends: entry.depends,
        evidence: entry.evidence,
        measurement,
    })
}

/// The texts in braces.
fn placeholders(text: &str) -> impl Iterator<Item = &str> {
    text.split('{')
        .skip(1)
        .filter_map(|rest| Some(rest.split_once('}')?.0))
}

/// Replaces the properties in a rule's text with their values.
pub fn fill_in(text: &str, name: &str, file: &str, lookup: &Lookup<'_>) -> String {
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        filled.push_str(before);
        let Some((key, tail)) = after.split_once('}') else {
            filled.push('{');
            rest = after;
            continue;
        };
        let (property, style) = key.split_once(':').unwrap_or((key, ""));
        filled.push_str(
            &match (property, lookup.get(property).map(|value| &value.data)) {
                ("name", _) => name.to_owned(),
                ("file", _) => file.to_owned(),
                (_, Some(crate::model::Data::Number(bytes))) if style == "size" => {
                    size_text(*bytes)
                }
                (_, Some(data)) => data.to_string(),
                (_, None) => "unknown".into(),
            },
        );
        rest = tail;
    }
    filled.push_str(rest);
    crate::text::printable(&filled)
}

/// A size such as `2 GiB`, in the largest unit that fits, with at most one decimal.
pub fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = units.iter().find(|(shift, _)| bytes >> shift > 0) else {
        return format!("{bytes} bytes");
    };
    let tenths = (u128::from(bytes) * 10) >> shift;
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}
