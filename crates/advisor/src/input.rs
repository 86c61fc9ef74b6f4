//! What is checked: its kind is found from its content.

use std::path::PathBuf;

use thiserror::Error;

use crate::defaults;
use crate::model::{Note, Vm};
use crate::text::{BYTES_MAX, Position, Source, Span, printable};
use crate::{libvirt, proxmox, qemu, ringdisk};

/// Whose configuration an input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A libvirt domain.
    Libvirt,
    /// Command lines of QEMU.
    Qemu,
    /// A Proxmox VM.
    Proxmox,
    /// ringdisk's own configuration.
    Ringdisk,
}

/// What an input needs besides itself.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The storages of Proxmox (`storage.cfg`).
    pub storages: Option<Source>,
    /// Files that a command line names, by their names there: `-readconfig`, `@file`.
    pub files: Vec<Source>,
    /// The name of the machine, if the input has none.
    pub name: Option<String>,
    /// Allocator of a running QEMU, from its mappings.
    pub malloc: Option<&'static str>,
}

/// An input that was read.
#[derive(Clone, Debug)]
pub struct Input {
    /// What it is.
    pub kind: Kind,
    /// Its texts, the first of which is the input itself.
    pub sources: Vec<Source>,
    /// What it describes.
    pub vms: Vec<Vm>,
    /// What was passed over.
    pub notes: Vec<Note>,
    /// Rules that are not wanted there.
    pub ignores: Vec<Ignore>,
    /// What else was used.
    pub surroundings: Surroundings,
}

/// A comment `ringdisk: ignore RULE because …`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignore {
    /// Where.
    pub span: Span,
    /// The rule.
    pub rule: String,
    /// Why; none is a mistake that is told of.
    pub because: Option<String>,
}

/// Why an input cannot be checked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{name}:{at}: {problem}")]
pub struct ReadError {
    /// The text.
    pub name: String,
    /// Where in it.
    pub at: Position,
    /// What is wrong, and what to do.
    pub problem: String,
}

/// What is wrong with the main text, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    at: usize,
    problem: String,
}

impl Mistake {
    /// At that byte.
    pub fn new(at: usize, problem: impl Into<String>) -> Self {
        let problem = problem.into();
        Self { at, problem }
    }
}

/// What reading collects.
#[derive(Debug, Default)]
pub struct Reading {
    /// Texts besides the first.
    pub more: Vec<Source>,
    /// What the input describes.
    pub vms: Vec<Vm>,
    notes: Vec<Note>,
    ignores: Vec<Ignore>,
    /// I/O threads that are only counted, of all machines together.
    threads: u64,
}

/// Most I/O threads that machines of one input have by their number alone: each takes memory here, and a number is short.
pub const THREADS_MAX: u64 = 65_536;

impl Reading {
    /// Whether there may be that many more I/O threads.
    pub fn has_threads(&mut self, more: u64) -> bool {
        self.threads = self.threads.saturating_add(more);
        self.threads <= THREADS_MAX
    }

    /// Says that something was passed over.
    pub fn note(&mut self, span: Span, text: impl Into<String>) {
        // A hostile input may have a mistake in every byte.
        if self.notes.len() < 1000 {
            let text = printable(&text.into());
            self.notes.push(Note { span, text });
        }
    }

    /// Looks for an order to ignore a rule.
    pub fn comment(&mut self, text: &str, span: Span) {
        let Some((_, order)) = text.split_once("ringdisk:") else {
            return;
        };
        let mut words = order.split_whitespace();
        if words.next() != Some("ignore") {
            return;
        }
        let Some(rule) = words.next() else {
            self.note(span, "this comment names no rule to ignore");
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
                format!("say why: ringdisk: ignore {} because …", printable(rule)),
            );
        }
        self.ignores.push(Ignore {
            span,
            rule: rule.to_owned(),
            because,
        });
    }
}

/// Reads a configuration; its kind shows in its content.
///
/// # Errors
/// It is none that is known, or is broken: the place, and what was expected.
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
                format!("is larger than {BYTES_MAX} bytes; is it the right file?"),
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

/// Files that a text names and that are part of it.
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

/// What a text is, from what it begins with, or has in it.
fn detect(text: &str) -> Result<Kind, Mistake> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(Mistake::new(0, "is empty"));
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
            "is a unit of systemd, in which quotes and variables are not those of a shell; check the QEMU that it starts: \
             --pid",
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
        "is neither a libvirt domain (XML), nor a QEMU command line, nor a Proxmox VM configuration, nor a \
         ringdisk.toml",
    ))
}
