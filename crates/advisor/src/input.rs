//! A configuration, and what its readers find in it.

use thiserror::Error;

use crate::model::{Note, Vm};
use crate::text::{Position, Source, Span, printable};

/// The kind of configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A libvirt domain
    Libvirt,
    /// QEMU command lines
    Qemu,
    /// A Proxmox VM
    Proxmox,
    /// `ringdisk.toml`
    Ringdisk,
}

/// Further information that the reader of an input may need.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The storages of Proxmox (`storage.cfg`).
    pub storages: Option<Source>,
    /// Files that a command line includes (`-readconfig`, `@file`), under the names that it uses.
    pub files: Vec<Source>,
    /// The VM's name, if the input has none.
    pub name: Option<String>,
    /// The allocator of a running QEMU, from its mappings.
    pub malloc: Option<&'static str>,
}

/// A configuration after reading.
#[derive(Clone, Debug)]
pub struct Input {
    pub kind: Kind,
    /// The input itself, then the files that it includes.
    pub sources: Vec<Source>,
    pub vms: Vec<Vm>,
    /// Parts of the input that were skipped.
    pub notes: Vec<Note>,
    /// Comments in the input that suppress findings.
    pub ignores: Vec<Ignore>,
    pub surroundings: Surroundings,
}

/// A comment `ringdisk: ignore RULE because …`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignore {
    pub span: Span,
    pub rule: String,
    /// The reason; a note asks for it if it is missing.
    pub because: Option<String>,
}

/// An input that cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{name}:{at}: {problem}")]
pub struct ReadError {
    /// The name of the file, or of what was read instead.
    pub name: String,
    pub at: Position,
    /// What is wrong, and what to do.
    pub problem: String,
}

/// An error at a byte of the main text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    pub(crate) at: usize,
    pub(crate) problem: String,
}

impl Mistake {
    pub fn new(at: usize, problem: impl Into<String>) -> Self {
        let problem = problem.into();
        Self { at, problem }
    }
}

/// The result of reading, while it is being read.
#[derive(Debug, Default)]
pub struct Reading {
    /// Included texts.
    pub more: Vec<Source>,
    pub vms: Vec<Vm>,
    pub(crate) notes: Vec<Note>,
    pub(crate) ignores: Vec<Ignore>,
    /// The number of I/O threads of all VMs that the input only counts.
    threads: u64,
}

/// The maximum number of I/O threads that an input defines by a mere count. Each takes memory here, so a short input could
/// otherwise take much memory.
pub const THREADS_MAX: u64 = 65_536;

impl Reading {
    /// Counts more I/O threads; false if they exceed the maximum.
    pub fn has_threads(&mut self, more: u64) -> bool {
        self.threads = self.threads.saturating_add(more);
        self.threads <= THREADS_MAX
    }

    /// Records a part of the input that was skipped.
    pub fn note(&mut self, span: Span, text: impl Into<String>) {
        // A hostile input may have an error in every byte.
        if self.notes.len() < 1000 {
            let text = printable(&text.into());
            self.notes.push(Note { span, text });
        }
    }

    /// Records the rule that a comment suppresses, if it does.
    pub fn comment(&mut self, text: &str, span: Span) {
        let Some((_, command)) = text.split_once("ringdisk:") else {
            return;
        };
        let mut words = command.split_whitespace();
        if words.next() != Some("ignore") {
            return;
        }
        let Some(rule) = words.next() else {
            self.note(span, "the comment does not name a rule to ignore");
            return;
        };
        let because = match words.next() {
            Some("because") => {
                Some(words.collect::<Vec<_>>().join(" ")).filter(|why| !why.is_empty())
            }
            _ => None,
        };
        if because.is_none() {
            self.note(
                span,
                format!(
                    "give a reason: ringdisk: ignore {} because …",
                    printable(rule)
                ),
            );
        }
        self.ignores.push(Ignore {
            span,
            rule: rule.to_owned(),
            because,
        });
    }
}
