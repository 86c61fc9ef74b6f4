//! The common model of all configurations: VMs with disks. Each has a table of properties with effective values and their
//! origins.
//!
//! A property that a disk does not have is absent from its table. A property that the input does not reveal is present as
//! [`Data::Unknown`]. [Rules](crate::rules) treat them differently: a condition on an absent property is false, and one on
//! an unknown property is reported as unknown.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use crate::text::Span;
use crate::version::Version;

pub mod carried;
pub mod cpus;
mod properties;
mod property;

pub use properties::PROPERTIES;
pub use property::{Kind, Property};

/// The value of a property, without its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// A keyword or a name.
    Word(Cow<'static, str>),
    /// Sizes are in bytes.
    Number(u64),
    Version(Version),
    /// The input does not reveal it.
    Unknown,
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The input sets it.
    Given(Span),
    /// The input does not set it, and this program's default applies.
    Default(Cow<'static, str>),
    /// It was found on a host; the text names the source.
    Fact(Cow<'static, str>),
    /// It follows from other values; the text says how.
    Derived(Cow<'static, str>),
}

/// An effective value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub data: Data,
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

/// Properties with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table(BTreeMap<&'static str, Value>);

impl Table {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// The property, if it is a word.
    pub fn word(&self, name: &str) -> Option<&str> {
        match &self.get(name)?.data {
            Data::Word(word) => Some(word),
            _ => None,
        }
    }

    /// The property, if it is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)?.data {
            Data::Number(number) => Some(number),
            _ => None,
        }
    }

    /// The property, if it is a version.
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

    /// The place in the input that sets a value, if there is one.
    pub fn given(&self, name: &str) -> Option<Span> {
        match self.get(name)?.origin {
            Origin::Given(span) => Some(span),
            _ => None,
        }
    }

    /// Sets a property and replaces an earlier value.
    pub fn set(&mut self, name: &'static str, data: impl Into<Data>, origin: Origin) {
        let data = data.into();
        debug_assert!(
            properties::property(name).is_some_and(|property| property.allows(&data)),
            "{name} = {data:?}"
        );
        self.0.insert(name, Value { data, origin });
    }

    /// Sets a property to a value from the input.
    pub fn give(&mut self, name: &'static str, data: impl Into<Data>, span: Span) {
        self.set(name, data, Origin::Given(span));
    }

    /// Sets a property if it is not set yet.
    pub fn default_to(&mut self, name: &'static str, data: impl Into<Data>, whose: &'static str) {
        if !self.0.contains_key(name) {
            self.set(name, data, Origin::Default(whose.into()));
        }
    }

    /// Sets a property that follows from other values.
    pub fn derive(
        &mut self,
        name: &'static str,
        data: impl Into<Data>,
        how: impl Into<Cow<'static, str>>,
    ) {
        self.set(name, data, Origin::Derived(how.into()));
    }

    /// Marks a property as unknown.
    pub fn hide(&mut self, name: &'static str, why: &'static str) {
        self.set(name, Data::Unknown, Origin::Derived(why.into()));
    }

    /// Marks every property that the input does not set as unknown.
    pub fn hide_assumed(&mut self, why: &'static str) {
        for value in self.0.values_mut() {
            if matches!(value.origin, Origin::Default(_) | Origin::Derived(_)) {
                value.data = Data::Unknown;
                value.origin = Origin::Derived(why.into());
            }
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// All properties, sorted by name.
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

/// Whether a path may name a block device. Other things in `/dev`, such as descriptors and terminals, do not count.
pub fn is_device(path: &str) -> bool {
    let others = [
        "fd/", "fdset/", "full", "null", "shm/", "std", "tty", "zero",
    ];
    path.strip_prefix("/dev/")
        .is_some_and(|name| !others.iter().any(|other| name.starts_with(other)))
}

#[derive(Clone, Debug, Default)]
pub struct Vm {
    /// The VM's name, or the input's.
    pub name: String,
    /// The VM's description in the input.
    pub span: Span,
    /// The `vm.` properties.
    pub table: Table,
    /// In the order of the input.
    pub disks: Vec<Disk>,
    /// The I/O threads that the VM defines.
    pub threads: Vec<Thread>,
    /// The ids of I/O threads that serve something other than a disk: a controller, a balloon.
    pub threads_elsewhere: HashSet<String>,
    /// The CPUs of the host that its threads may use.
    pub cpus: cpus::HostCpus,
    /// Whether a shell variable may add options that the input does not show.
    pub may_have_more: bool,
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

#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// The name that users see: `vda`, `scsi0`, the id of its device.
    pub name: String,
    /// The disk's description in the input.
    pub span: Span,
    /// The disk's storage: a path, a volume, a URL; empty if there is none.
    pub file: String,
    /// Where ringdisk's configuration says that it serves the disk.
    pub socket: Option<String>,
    /// The `disk.` properties, and the `backing.` properties of its storage.
    pub table: Table,
    /// The I/O threads that the disk names.
    pub threads: Vec<ThreadUse>,
    /// Settings that a conversion must preserve.
    pub carried: carried::Carried,
    /// Settings without a property that may change its speed, such as `event_idx=off`.
    pub others: Vec<String>,
    /// How its image is accessed, if it is in a Ceph cluster.
    pub ceph: CephAccess,
    /// Whether a shell variable may add settings that the input does not show.
    pub may_have_more: bool,
}

/// How an image in a Ceph cluster is accessed, as far as the input says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CephAccess {
    /// The configuration file.
    pub conf: Option<String>,
    /// The user, without `client.`.
    pub user: Option<String>,
    /// The file with the user's key.
    pub keyring: Option<String>,
    /// Options of librbd and librados, such as `mon_host`. Keys of users are not among them.
    pub options: Vec<(String, String)>,
    /// Whether the input has the user's key, or names a secret that has it.
    pub has_key: bool,
}

/// The most monitors of a cluster that are read.
pub const MONITORS_MAX: usize = 64;

impl CephAccess {
    /// Adds the addresses of monitors, if there are some.
    pub fn monitors(&mut self, addresses: Vec<String>) {
        if !addresses.is_empty() {
            self.options.push(("mon_host".into(), addresses.join(",")));
        }
    }
}

/// The address of a monitor as Ceph's `mon_host` has it.
pub fn monitor(host: &str, port: Option<&str>) -> String {
    let host = if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host.to_owned()
    };
    port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"))
}

/// The definition of an I/O thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    pub id: String,
    pub span: Span,
    /// The longest time that it polls, in nanoseconds; none is QEMU's default.
    pub poll_max_ns: Option<u64>,
    /// Other settings, such as `poll-grow=4`.
    pub others: Vec<String>,
}

/// The reference of a disk, or of its controller, to an I/O thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    pub id: String,
    pub span: Span,
    /// The queues that the thread serves; none if it serves all queues, or takes turns with other threads.
    pub queues: Option<Vec<u64>>,
    /// Whether a queue mapping names it, rather than the device.
    pub is_mapped: bool,
}

/// A part of the input that the reader skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub span: Span,
    /// What was skipped, and why.
    pub text: String,
}
