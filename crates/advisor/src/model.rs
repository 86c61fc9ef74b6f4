//! What every configuration is brought to: machines with disks, each a table of properties with effective values,
//! and where each value comes from.
//!
//! A property that a disk does not have is not in its table; one that nobody can know from the input is there as
//! [`Data::Unknown`]. The distinction matters to [rules](crate::rules): nothing holds of the former, and of the
//! latter it is said that it could not be known.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use crate::text::Span;
use crate::version::Version;

pub mod carried;
mod properties;

pub use properties::{Kind, PROPERTIES, Property};

/// What a property is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// One of a few words, or a name.
    Word(Cow<'static, str>),
    /// A number; for sizes in bytes.
    Number(u64),
    /// A version.
    Version(Version),
    /// It depends on what the input does not say.
    Unknown,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It stands in the input.
    Given(Span),
    /// It is what happens if the input says nothing; the text names whose default.
    Default(Cow<'static, str>),
    /// It was found on a host; the text names the fact.
    Fact(Cow<'static, str>),
    /// It follows from others; the text says how.
    Derived(Cow<'static, str>),
}

/// An effective value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// What it is.
    pub data: Data,
    /// Why.
    pub origin: Origin,
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => f.write_str(word),
            Self::Number(number) => write!(f, "{number}"),
            Self::Version(version) => version.fmt(f),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// A table of properties.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table(BTreeMap<&'static str, Value>);

impl Table {
    /// The value of a property.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// The word that a property is.
    pub fn word(&self, name: &str) -> Option<&str> {
        match &self.get(name)?.data {
            Data::Word(word) => Some(word),
            _ => None,
        }
    }

    /// The number that a property is.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)?.data {
            Data::Number(number) => Some(number),
            _ => None,
        }
    }

    /// The version that a property is.
    pub fn version(&self, name: &str) -> Option<Version> {
        match self.get(name)?.data {
            Data::Version(version) => Some(version),
            _ => None,
        }
    }

    /// Whether a property is the word `yes`.
    pub fn is_yes(&self, name: &str) -> bool {
        self.word(name) == Some("yes")
    }

    /// Where a value stands in the input, if it does.
    pub fn given(&self, name: &str) -> Option<Span> {
        match self.get(name)?.origin {
            Origin::Given(span) => Some(span),
            _ => None,
        }
    }

    /// Sets a property, whatever it was before.
    pub fn set(&mut self, name: &'static str, data: impl Into<Data>, origin: Origin) {
        let data = data.into();
        debug_assert!(
            properties::property(name).is_some_and(|property| property.allows(&data)),
            "{name} = {data:?}"
        );
        self.0.insert(name, Value { data, origin });
    }

    /// Sets a property to what stands in the input.
    pub fn give(&mut self, name: &'static str, data: impl Into<Data>, span: Span) {
        self.set(name, data, Origin::Given(span));
    }

    /// Sets a property if it is not set yet.
    pub fn default_to(&mut self, name: &'static str, data: impl Into<Data>, whose: &'static str) {
        if !self.0.contains_key(name) {
            self.set(name, data, Origin::Default(whose.into()));
        }
    }

    /// Sets a property that follows from others.
    pub fn derive(
        &mut self,
        name: &'static str,
        data: impl Into<Data>,
        how: impl Into<Cow<'static, str>>,
    ) {
        self.set(name, data, Origin::Derived(how.into()));
    }

    /// Says that a property has a value that the input does not show.
    pub fn hide(&mut self, name: &'static str, why: &'static str) {
        self.set(name, Data::Unknown, Origin::Derived(why.into()));
    }

    /// Says so of every property that does not stand in the input.
    pub fn hide_assumed(&mut self, why: &'static str) {
        for value in self.0.values_mut() {
            if matches!(value.origin, Origin::Default(_) | Origin::Derived(_)) {
                value.data = Data::Unknown;
                value.origin = Origin::Derived(why.into());
            }
        }
    }

    /// Takes a property away.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// All of it, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }
}

impl From<&'static str> for Data {
    fn from(word: &'static str) -> Self {
        Self::Word(word.into())
    }
}

impl From<String> for Data {
    fn from(word: String) -> Self {
        Self::Word(word.into())
    }
}

impl From<u64> for Data {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<usize> for Data {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<Version> for Data {
    fn from(version: Version) -> Self {
        Self::Version(version)
    }
}

impl From<bool> for Data {
    fn from(flag: bool) -> Self {
        Self::Word(if flag { "yes" } else { "no" }.into())
    }
}

/// Whether a path is that of a block device, rather than of a file, a descriptor or a terminal in `/dev`.
pub fn is_device(path: &str) -> bool {
    let others = [
        "fd/", "fdset/", "full", "null", "shm/", "std", "tty", "zero",
    ];
    path.strip_prefix("/dev/")
        .is_some_and(|name| !others.iter().any(|other| name.starts_with(other)))
}

/// One machine.
#[derive(Clone, Debug, Default)]
pub struct Vm {
    /// Its name, or the input's.
    pub name: String,
    /// Where it is described.
    pub span: Span,
    /// The `vm.` properties.
    pub table: Table,
    /// Its disks, in the order of the input.
    pub disks: Vec<Disk>,
    /// The I/O threads that it defines.
    pub threads: Vec<Thread>,
    /// Those that serve something other than a disk: a controller, a balloon.
    pub threads_elsewhere: HashSet<String>,
    /// Whether it may have options that the input does not show: a variable of the shell stands for them.
    pub open: bool,
}

impl Vm {
    /// The I/O threads that disks and other devices name.
    pub fn threads_used(&self) -> HashSet<&str> {
        let by_disks = self.disks.iter().flat_map(|disk| &disk.threads);
        let by_disks = by_disks.map(|used| used.id.as_str());
        by_disks
            .chain(self.threads_elsewhere.iter().map(String::as_str))
            .collect()
    }
}

/// One disk.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// What its users call it: `vda`, `scsi0`, the id of its device.
    pub name: String,
    /// Where it is described.
    pub span: Span,
    /// What is behind it: a path, a volume, a URL; empty if nothing is.
    pub file: String,
    /// The `disk.` properties, and those of what is behind it, as `backing.`.
    pub table: Table,
    /// Which I/O threads it names.
    pub threads: Vec<ThreadUse>,
    /// What goes with it to another program.
    pub carried: carried::Carried,
    /// Whether its description may say more than the input shows.
    pub open: bool,
}

/// An I/O thread that is defined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Its id.
    pub id: String,
    /// Where.
    pub span: Span,
}

/// An I/O thread that a disk, or its controller, names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    /// Its id.
    pub id: String,
    /// Where.
    pub span: Span,
    /// The queues that it is named for; none for all, or for its turn of them.
    pub queues: Option<Vec<u64>>,
    /// Whether it is named in a map of queues, rather than for the device.
    pub mapped: bool,
}

/// What an input says that rules need not know, but a reader may want to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Where.
    pub span: Span,
    /// What was passed over, and why.
    pub text: String,
}
