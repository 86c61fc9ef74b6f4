//! The comparison of `ringdisk lab` that measures the effect of a rule.
//!
//! ```toml
//! measured = { recipe = "aio-iothread", axis = "iothread", from = "off", to = "on", pattern = "rw=randread iodepth<=4",
//!              with = { cache = "none" } }
//! ```
//!
//! All words are those of the lab's plans. `|` separates alternatives.
//!
//! - `from` is what the rule finds, and `to` what it recommends.
//! - `pattern` is what the load must be: `any`, or conditions on its keys, with `=`, `<=` and `>=`.
//! - `with` are settings that both sides must have. [`FREE_SETTINGS`] may have any value if `with` does not name them; all
//!   others must then have the lab's default.
//! - `scope` says whose setting the axis is: `guest` (the default) or `host`.
//! - `allocation` is `full` (the default), `thin`, or `varied` if the axis is `prefill`.
//! - `accelerator` is what the guests need: `kvm` by default; `none` is a load without a guest. With scope `host`, the
//!   default is both.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Settings whose value a rule need not name: what every configuration has, and the size and the place of the guests.
pub const FREE_SETTINGS: [&str; 22] = [
    "device",
    "server",
    "client",
    "cache",
    "aio",
    "iothread",
    "queues",
    "queue-size",
    "format",
    "machine",
    "hugepages",
    "vcpus",
    "memory",
    "guests",
    "volumes",
    "syntax",
    "vcpu-cpus",
    "server-cpus",
    "load-cpus",
    "ceph-conf",
    "ceph-user",
    "ceph-keyring",
];

/// Keys of a load that a rule need not name.
pub const FREE_PATTERN: [&str; 9] = [
    "rw",
    "bs",
    "iodepth",
    "numjobs",
    "rate",
    "arrival",
    "rwmixread",
    "engine",
    "refill",
];

/// A comparison, as a rule names it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Contrast {
    /// The recipe that makes it. Results of other plans that make it are as good.
    pub recipe: String,
    /// The setting that is varied.
    pub axis: String,
    /// The values that the rule finds.
    pub from: String,
    /// The values that the rule recommends.
    pub to: String,
    #[serde(default)]
    pub scope: ContrastScope,
    pub pattern: Pattern,
    #[serde(default)]
    pub with: BTreeMap<String, String>,
    #[serde(default)]
    pub allocation: Allocation,
    accelerator: Option<String>,
}

/// Whose setting a comparison varies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ContrastScope {
    /// The VM's configuration, or a setting inside the guest.
    #[default]
    Guest,
    /// A setting of the host, such as the scheduler of its device.
    Host,
}

/// What a comparison finds on its disks when it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Allocation {
    /// Data everywhere.
    #[default]
    Full,
    /// Nothing: writes allocate.
    Thin,
    /// The one on one side, the other on the other side.
    Varied,
}

impl Allocation {
    /// The word of a result.
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Thin => "thin",
            Self::Varied => "varied",
        }
    }
}

impl Contrast {
    /// The accelerators of the guests, of which one must have been in use.
    pub fn accelerators(&self) -> &str {
        match (&self.accelerator, self.scope) {
            (Some(named), _) => named,
            (None, ContrastScope::Guest) => "kvm",
            (None, ContrastScope::Host) => "kvm|none",
        }
    }

    /// The changes to the recipe with which it measures storage of this kind: values of `--set`. The lab creates the disks,
    /// except a device that is given, which host-scope recipes only read.
    pub fn changes(&self, storage: &str, device: Option<&str>) -> Vec<String> {
        let own = |backing: &str| {
            vec![
                "storage.create=true".into(),
                format!("config.backing={backing}"),
            ]
        };
        match (storage, device) {
            (_, Some(device)) => vec![format!("config.backing=/dev/{device}")],
            _ if self.axis == "backing" => own("file,/dev/GROUP/lab-{guest}-{volume}"),
            ("block", None) => own("/dev/GROUP/lab-{guest}-{volume}"),
            ("rbd", None) => own("rbd:POOL/lab-{guest}-{volume}"),
            _ => Vec::new(),
        }
    }

    /// The command that runs the recipe on storage of this kind.
    pub fn command(&self, storage: &str, device: Option<&str>) -> String {
        let changes = self.changes(storage, device).into_iter();
        let quoted = changes.map(|change| match change.contains('{') {
            true => format!(" --set \"{change}\""),
            false => format!(" --set {change}"),
        });
        format!("ringdisk lab run {}", self.recipe) + &quoted.collect::<String>()
    }

    /// # Errors
    /// The fields contradict each other.
    pub(crate) fn check(&self) -> Result<(), String> {
        if (self.axis == "prefill") != (self.allocation == Allocation::Varied) {
            return Err(
                "measured: the axis prefill has allocation 'varied', and no other has".into(),
            );
        }
        let known = |word: &str| ["kvm", "none"].contains(&word);
        if !self.accelerators().split('|').all(known) {
            return Err("measured: accelerator is kvm, none or kvm|none".into());
        }
        if self.with.contains_key(&self.axis) {
            return Err(format!("measured: 'with' names the axis {}", self.axis));
        }
        Ok(())
    }
}

/// As in `aio from native to io_uring, with cache=none, rw=randread`.
impl fmt::Display for Contrast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |text: &str| text.replace('|', " or ");
        let (from, to) = (words(&self.from), words(&self.to));
        write!(f, "{} from {from} to {to}", self.axis)?;
        for (number, (key, value)) in self.with.iter().enumerate() {
            let before = if number == 0 { ", with " } else { " " };
            write!(f, "{before}{key}={value}")?;
        }
        match self.allocation {
            Allocation::Thin => f.write_str(", while writes allocate")?,
            Allocation::Full | Allocation::Varied => {}
        }
        match self.pattern.conditions.is_empty() {
            true => Ok(()),
            false => write!(f, ", {}", self.pattern.text),
        }
    }
}

/// Whether `word` is one of the alternatives.
pub(crate) fn is_one_of(word: &str, alternatives: &str) -> bool {
    alternatives.split('|').any(|one| one == word)
}

/// Conditions on a load.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Condition {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Is(String),
    AtMost(u64),
    AtLeast(u64),
}

impl Pattern {
    /// The keys with conditions.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.conditions.iter().map(|one| one.key.as_str())
    }

    /// Whether a load with these keys is meant.
    pub fn holds(&self, load: &BTreeMap<String, String>) -> bool {
        let named = |key: &str| self.conditions.iter().any(|one| one.key == key);
        self.conditions.iter().all(|one| one.holds(load))
            && load
                .keys()
                .all(|key| FREE_PATTERN.contains(&key.as_str()) || named(key))
    }
}

impl Condition {
    fn holds(&self, load: &BTreeMap<String, String>) -> bool {
        let Some(value) = load.get(&self.key) else {
            return false;
        };
        let number = crate::qemu::size_of(value);
        match &self.test {
            Test::Is(words) => is_one_of(value, words),
            Test::AtMost(most) => number.is_some_and(|number| number <= *most),
            Test::AtLeast(least) => number.is_some_and(|number| number >= *least),
        }
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let one = |word: &str| {
            let number = |text: &str| {
                crate::qemu::size_of(text).ok_or_else(|| format!("pattern: '{word}' has no number"))
            };
            let (key, test) = if let Some((key, value)) = word.split_once("<=") {
                (key, Test::AtMost(number(value)?))
            } else if let Some((key, value)) = word.split_once(">=") {
                (key, Test::AtLeast(number(value)?))
            } else if let Some((key, value)) = word.split_once('=') {
                (key, Test::Is(value.into()))
            } else {
                return Err(format!(
                    "pattern: '{word}' is not any, KEY=VALUE, KEY<=N or KEY>=N"
                ));
            };
            Ok(Condition {
                key: key.into(),
                test,
            })
        };
        let conditions = match text.as_str() {
            "any" => Vec::new(),
            _ => text.split_whitespace().map(one).collect::<Result<_, _>>()?,
        };
        if conditions.is_empty() && text != "any" {
            return Err("pattern: is empty; 'any' is any load".into());
        }
        Ok(Self { text, conditions })
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.text
    }
}
