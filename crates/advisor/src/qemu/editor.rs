//! A command line that is being edited, and the options in it.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::boot::Boot;
use super::line::{Line, line};
use super::options::Opt;
use super::pairs::set_in;
use super::word::Command;
use super::{fragment, words};
use crate::input::{Input, Reading, Surroundings};
use crate::model::Disk;
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// A command with indexes of its options.
pub struct ParsedCommand {
    pub command: Command,
    pub line: Line,
    /// Options by source and first byte
    places: BTreeMap<(u16, u32), usize>,
    /// Block nodes by name
    nodes: HashMap<String, usize>,
    /// How the VM boots
    pub boot: OnceCell<Boot>,
    /// The last option that creates a device in the order of the command line
    pub last_device: OnceCell<Option<usize>>,
    /// The drives for which QEMU creates a virtio device, in QEMU's order
    pub virtio_drives: OnceCell<Vec<Span>>,
    /// The options that refer to another one, or set a property of it, by its name
    uses: HashMap<String, Vec<usize>>,
    /// Whether QEMU discards all writes (`-snapshot`)
    pub is_snapshot: bool,
}

impl ParsedCommand {
    /// The options that may refer to one of these names.
    pub fn users<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = &'a Opt> {
        let users = names.iter().filter_map(|name| self.uses.get(*name));
        users.flatten().map(|at| self.line.at(*at))
    }

    /// Parses the command of a VM.
    ///
    /// # Errors
    /// The command is missing or invalid.
    pub fn of(input: &Input, vm: usize) -> Result<Self, String> {
        let text = input.sources.first().map_or("", |source| &source.text);
        let command = words::commands(text, 0).commands.into_iter().nth(vm);
        Self::parse(command, &input.surroundings)
    }

    /// Parses the options in another front-end's configuration, which start at the byte `start` of its text.
    ///
    /// # Errors
    /// There are none, or they are invalid.
    pub fn of_options(
        options: &str,
        start: usize,
        surroundings: &Surroundings,
    ) -> Result<Self, String> {
        Self::parse(fragment(options, start), surroundings)
    }

    fn parse(command: Option<Command>, surroundings: &Surroundings) -> Result<Self, String> {
        let command = command.ok_or("the command is missing")?;
        let mut reading = Reading::default();
        let line = line(&command, surroundings, &mut reading, false)
            .map_err(|_| "the command is invalid")?;
        let options = line.all().enumerate();
        let places = options.map(|(at, option)| ((option.span.source, option.span.start), at));
        let nodes = line.all().enumerate().filter_map(|(at, option)| {
            let name = option
                .value("node-name")
                .filter(|_| option.group == "blockdev");
            Some((name?.to_owned(), at))
        });
        let mut uses: HashMap<String, Vec<usize>> = HashMap::new();
        for (at, option) in line.all().enumerate() {
            for pair in &option.pairs {
                uses.entry(pair.value.clone()).or_default().push(at);
                if let Some(id) = pair.key.split('.').nth(1).filter(|_| option.group == "set") {
                    uses.entry(id.to_owned()).or_default().push(at);
                }
            }
        }
        let is_snapshot = line.group("snapshot").next().is_some();
        Ok(Self {
            uses,
            is_snapshot,
            places: places.collect(),
            nodes: nodes.collect(),
            boot: OnceCell::new(),
            last_device: OnceCell::new(),
            virtio_drives: OnceCell::new(),
            command,
            line,
        })
    }
}

/// Edits a command for a target.
pub struct Editor<'a> {
    pub target: &'a Target<'a>,
    pub parsed: &'a ParsedCommand,
    pub line: &'a Line,
}

pub const UNCLEAR_JSON: &str = "its position in the JSON is unclear";

/// # Errors
/// There are no edits, because JSON in a shell's quotes is unclear.
pub fn not_empty(edits: Vec<Edit>) -> Edits {
    if edits.is_empty() {
        return Err(UNCLEAR_JSON.into());
    }
    Ok(edits)
}

impl<'a> Editor<'a> {
    pub fn of(target: &'a Target<'a>, parsed: &'a ParsedCommand) -> Self {
        Self {
            target,
            parsed,
            line: &parsed.line,
        }
    }

    /// The text that contains an option.
    pub fn source(&self, option: &Opt) -> &str {
        let source = self
            .target
            .input
            .sources
            .get(usize::from(option.span.source));
        source.map_or("", |source| &source.text)
    }

    /// Sets a pair of an option; `prefix` is that of a nested node.
    pub fn set(&self, option: &Opt, prefix: &str, key: &str, value: &str) -> Edits {
        not_empty(set_in(self.source(option), option, prefix, key, value))
    }

    /// The option that contains a span.
    pub fn at(&self, span: Span) -> Option<&'a Opt> {
        Some(self.line.at(self.place(span)?))
    }

    /// The index of the option that contains a span.
    pub fn place(&self, span: Span) -> Option<usize> {
        let key = (span.source, span.start);
        let (_, at) = self.parsed.places.range(..=key).next_back()?;
        let option = self.line.at(*at);
        let is_inside = option.span.source == span.source && span.end <= option.span.end;
        is_inside.then_some(*at)
    }

    /// The ids of all options.
    pub fn ids(&self) -> HashSet<String> {
        let ids = self.line.all().filter_map(|option| option.value("id"));
        ids.map(str::to_owned).collect()
    }

    pub fn text(&self, span: Span) -> &str {
        let source = self.target.input.sources.get(usize::from(span.source));
        source
            .and_then(|source| source.text.get(span.range()))
            .unwrap_or_default()
    }

    /// The options that describe a disk's storage, from the device downwards, with the prefix of each node.
    pub fn nodes(&self, disk: &Disk) -> Result<Vec<(&Opt, String)>, String> {
        let span = disk
            .table
            .given("disk.syntax")
            .ok_or("no option describes its storage")?;
        let mut option = self.at(span).ok_or("the drive is missing")?;
        match option.group.as_str() {
            "blockdev" => {}
            "drive" => return Ok(vec![(option, String::new())]),
            other => return Err(format!("-{other} has no options")),
        }
        let mut nodes = vec![(option, String::new())];
        let mut prefix = String::new();
        for _ in 0..32 {
            let key = format!("{prefix}file");
            if let Some(name) = option.value(&key) {
                let Some(next) = self.parsed.nodes.get(name) else {
                    break;
                };
                option = self.line.at(*next);
                prefix.clear();
            } else if option.get(&format!("{prefix}file.driver")).is_some() {
                prefix = format!("{prefix}file.");
            } else {
                break;
            }
            nodes.push((option, prefix.clone()));
        }
        Ok(nodes)
    }
}
