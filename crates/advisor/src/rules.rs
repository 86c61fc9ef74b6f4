//! Rules: data in `rules/*.toml`, read once and checked against the [properties](crate::model::PROPERTIES) that there
//! are.

mod condition;

pub use condition::{Atom, Clause, Lookup, Verdict, evaluate};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::fix::Setting;

/// The files, and the sources that they cite.
const FILES: &[(&str, &str)] = &[
    ("device.toml", include_str!("rules/device.toml")),
    ("cache.toml", include_str!("rules/cache.toml")),
    ("threads.toml", include_str!("rules/threads.toml")),
    ("rbd.toml", include_str!("rules/rbd.toml")),
    ("backing.toml", include_str!("rules/backing.toml")),
    ("memory.toml", include_str!("rules/memory.toml")),
    ("host.toml", include_str!("rules/host.toml")),
    ("vhost-user.toml", include_str!("rules/vhost-user.toml")),
];
const SOURCES: &str = include_str!("rules/sources.toml");

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The machine does not start, or loses data, or a setting does nothing.
    Error,
    /// A factor.
    High,
    /// Ten percent, about.
    Medium,
    /// A few percent.
    Low,
    /// To know, or to measure; no reason for exit code 1.
    Info,
}

/// Whether a rule still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It does.
    #[default]
    Current,
    /// Sources disagree, or it depends.
    Disputed,
    /// It is of the past; the rule says since when, and what holds today.
    Obsolete,
}

/// What a rule is asked of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Every disk.
    Disk,
    /// Every machine.
    Vm,
    /// The host.
    Host,
    /// Every block device of the host.
    Device,
}

/// What puts a change into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// At once, while the machine runs.
    Live,
    /// A reboot of the guest.
    Reboot,
    /// The machine must be stopped and started.
    StopStart,
    /// A reboot of the host.
    HostReboot,
    /// There is nothing to activate.
    None,
}

/// How good evidence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Grade {
    /// One factor was changed.
    P,
    /// More than one was changed, without saying so.
    C,
    /// Several were changed together.
    B,
    /// Somebody's word, or the documentation of how it works.
    O,
}

impl Grade {
    /// What it means.
    pub fn about(self) -> &'static str {
        match self {
            Self::P => "one factor changed",
            Self::C => "confounded",
            Self::B => "a bundle of changes",
            Self::O => "opinion or documentation",
        }
    }
}

/// What a rule rests on.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// Key in the table of sources.
    pub source: String,
    /// What it says.
    pub figure: String,
    /// How good that is.
    pub grade: Grade,
}

/// Where evidence is from.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Citation {
    /// Author and title.
    pub title: String,
    /// When.
    pub year: u16,
}

/// The contrast of `ringdisk lab` that measures what a rule is worth.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Contrast {
    /// What is varied.
    pub axis: String,
    /// As it was found.
    pub from: String,
    /// As is advised.
    pub to: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
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
    recipe: Option<String>,
    contrast: Option<Contrast>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    rule: Vec<Written>,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its id, in words.
    pub id: String,
    /// What is wrong, in one line.
    pub title: String,
    /// What it is asked of.
    pub scope: Scope,
    /// How bad that is.
    pub severity: Severity,
    /// Whether it still holds.
    pub status: Status,
    /// All of these must hold.
    pub when: Vec<Clause>,
    /// The same as they are written.
    pub conditions: Vec<String>,
    /// What is said; properties in braces.
    pub says: String,
    /// What to do.
    pub advice: String,
    /// The settings that do it.
    pub fix: Vec<Setting>,
    /// Whether data that survives a crash today may be lost in one afterwards: then `--fix` leaves it alone unless
    /// the rule is named.
    pub lowers_durability: bool,
    /// What puts it into force.
    pub activate: Activation,
    /// What it costs.
    pub cost: String,
    /// What is to be expected.
    pub gain: Option<String>,
    /// On what that depends.
    pub depends: Option<String>,
    /// What it rests on.
    pub evidence: Vec<Evidence>,
    /// The recipe of `ringdisk lab` that measures it.
    pub recipe: Option<String>,
    /// And what of it.
    pub contrast: Option<Contrast>,
}

/// All rules.
#[derive(Clone, Debug)]
pub struct Rules {
    /// In the order of the files.
    pub rules: Vec<Rule>,
    /// What they cite.
    pub sources: BTreeMap<String, Citation>,
}

/// A mistake in a rule. The rules that the program has with it have none: a test reads them.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{file}: rule {rule}: {problem}")]
pub struct RuleError {
    /// The file of rules.
    pub file: String,
    /// The rule, if it is known.
    pub rule: String,
    /// What is wrong.
    pub problem: String,
}

impl Rules {
    /// The rules that this program has with it.
    ///
    /// # Errors
    /// A mistake in them.
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
            for written in file.rule {
                let id = written.id.clone();
                let rule =
                    compile(written, &sources).map_err(|problem| fail(name, &id, problem))?;
                if rules.iter().any(|other| other.id == rule.id) {
                    return Err(fail(name, &id, "is there twice".into()));
                }
                rules.push(rule);
            }
        }
        Ok(Self { rules, sources })
    }

    /// The rule of that id.
    pub fn get(&self, id: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.id == id)
    }

    /// Ids that are like it, for a message.
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

fn compile(written: Written, sources: &BTreeMap<String, Citation>) -> Result<Rule, String> {
    let when = written
        .when
        .iter()
        .map(|clause| condition::clause(clause, written.scope))
        .collect::<Result<_, _>>()?;
    let fix = written
        .fix
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    for name in placeholders(&written.says) {
        let name = name.split(':').next().unwrap_or(name);
        let known = crate::model::PROPERTIES
            .iter()
            .any(|property| property.name == name);
        if !known && name != "name" && name != "file" {
            return Err(format!("says: there is no property '{name}'"));
        }
    }
    if let Some(evidence) = written
        .evidence
        .iter()
        .find(|e| !sources.contains_key(&e.source))
    {
        return Err(format!("there is no source '{}'", evidence.source));
    }
    if written.when.is_empty() || written.evidence.is_empty() {
        return Err("needs conditions and evidence".into());
    }
    if written.status == Status::Disputed && written.depends.is_none() {
        return Err("is disputed, and does not say on what it depends".into());
    }
    Ok(Rule {
        id: written.id,
        title: written.title,
        scope: written.scope,
        severity: written.severity,
        status: written.status,
        when,
        conditions: written.when,
        says: written.says,
        advice: written.advice,
        fix,
        lowers_durability: written.lowers_durability,
        activate: written.activate,
        cost: written.cost,
        gain: written.gain,
        depends: written.depends,
        evidence: written.evidence,
        recipe: written.recipe,
        contrast: written.contrast,
    })
}

/// What stands in braces.
fn placeholders(text: &str) -> impl Iterator<Item = &str> {
    text.split('{')
        .skip(1)
        .filter_map(|rest| Some(rest.split_once('}')?.0))
}

/// The text of a rule with values in place of properties.
pub fn say(text: &str, name: &str, file: &str, lookup: &Lookup<'_>) -> String {
    let mut said = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        said.push_str(before);
        let Some((key, tail)) = after.split_once('}') else {
            said.push('{');
            rest = after;
            continue;
        };
        let (property, style) = key.split_once(':').unwrap_or((key, ""));
        said.push_str(
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
    said.push_str(rest);
    crate::text::printable(&said)
}

/// `2 GiB`; the largest unit of which it has one, with a decimal if that says more.
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
