//! Reads a configuration. Its kind is detected from its content.

use std::path::PathBuf;

use thiserror::Error;

use crate::defaults;
use crate::model::{Note, Vm};
use crate::text::{BYTES_MAX, Position, Source, Span, printable};
use crate::{libvirt, proxmox, qemu, ringdisk};

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
    at: usize,
    problem: String,
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
    notes: Vec<Note>,
    ignores: Vec<Ignore>,
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

/// Reads a configuration.
///
/// # Errors
/// The kind is unknown, or the text is invalid. The error says where, and what was expected.
pub fn read(source: Source, surroundings: Surroundings) -> Result<Input, ReadError> {
    let fail = |source: &Source, Mistake { at, problem }| ReadError {
        name: printable(&source.name),
        at: source.position(u32::try_from(at).unwrap_or(u32::MAX)),
        problem,
    };
    if source.text.len() > BYTES_MAX {
        return Err(fail(
            &source,
            Mistake::new(
                0,
                format!("is larger than {BYTES_MAX} bytes; check that this is the right file"),
            ),
        ));
    }
    let kind = detect(&source.text).map_err(|mistake| fail(&source, mistake))?;
    let name = surroundings
        .name
        .clone()
        .unwrap_or_else(|| stem(&source.name));
    let mut reading = Reading::default();
    match kind {
        Kind::Libvirt => libvirt::read(&source.text, &name, &mut reading),
        Kind::Qemu => qemu::read(&source.text, &name, &surroundings, &mut reading),
        Kind::Proxmox => proxmox::read(&source.text, &name, &surroundings, &mut reading),
        Kind::Ringdisk => ringdisk::read(&source.text, &name, &mut reading),
    }
    .map_err(|mistake| fail(&source, mistake))?;
    if let Some(malloc) = surroundings.malloc {
        for vm in &mut reading.vms {
            vm.table
                .derive("vm.malloc", malloc, "from the running process");
        }
    }
    if kind != Kind::Ringdisk {
        reading.vms.iter_mut().for_each(defaults::fill);
    }
    let mut sources = vec![source];
    sources.append(&mut reading.more);
    Ok(Input {
        kind,
        sources,
        vms: reading.vms,
        notes: reading.notes,
        ignores: reading.ignores,
        surroundings,
    })
}

/// The files that a text includes.
pub fn files_named(text: &str) -> Vec<String> {
    if text.trim_start().starts_with('<') {
        Vec::new()
    } else {
        qemu::files_named(text)
    }
}

/// The name of a file without directories and suffix.
fn stem(name: &str) -> String {
    let path = PathBuf::from(name);
    path.file_stem()
        .map_or(name.into(), |stem| stem.to_string_lossy().into_owned())
}

/// Detects the kind of a text.
fn detect(text: &str) -> Result<Kind, Mistake> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(Mistake::new(0, "the file is empty"));
    }
    if start.starts_with('<') {
        return Ok(Kind::Libvirt);
    }
    let has_line = |start: &str| {
        text.lines()
            .any(|line| line.trim_start().starts_with(start))
    };
    if has_line("[Service]") && has_line("Exec") {
        return Err(Mistake::new(
            text.len() - start.len(),
            "is a systemd unit, whose quotes and variables differ from those of a shell; check the running QEMU \
             instead: --pid",
        ));
    }
    if qemu::has_command(text) {
        return Ok(Kind::Qemu);
    }
    if proxmox::looks_like(text) {
        return Ok(Kind::Proxmox);
    }
    if ringdisk::looks_like(text) {
        return Ok(Kind::Ringdisk);
    }
    Err(Mistake::new(
        text.len() - start.len(),
        "is not a libvirt domain (XML), a QEMU command line, a Proxmox VM configuration or a ringdisk.toml",
    ))
}
