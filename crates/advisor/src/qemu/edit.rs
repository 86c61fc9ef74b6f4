//! Changes to a command line, in the syntax in which each option is written.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::bus::Boot;
use super::line::{Line, line};
use super::options::{Opt, Pair, Syntax};
use super::{fragment, words};
use crate::fix::{Edits, Setting, Target, is_plain};
use crate::input::{Input, Kind, Reading};
use crate::model::Disk;
use crate::proxmox;
use crate::text::{Edit, Span};

/// A command with its options, which are found by their places and their names.
pub struct Parsed {
    command: words::Command,
    line: Line,
    /// Numbers of options, by source and first byte.
    places: BTreeMap<(u16, u32), usize>,
    /// The same of nodes, by name.
    nodes: HashMap<String, usize>,
    /// What is booted.
    pub boot: OnceCell<Boot>,
    /// The last option that makes a device as one that is written as pairs does.
    pub last_device: OnceCell<Option<usize>>,
    /// The drives for which QEMU makes a virtio device, in its order.
    pub virtio_drives: OnceCell<Vec<Span>>,
    /// The same of options that name another one, or set something of it, by its name.
    uses: HashMap<String, Vec<usize>>,
    /// Whether what is written is thrown away.
    pub is_snapshot: bool,
}

impl Parsed {
    /// The options that may name one of these.
    pub fn users<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = &'a Opt> {
        let users = names.iter().filter_map(|name| self.uses.get(*name));
        users.flatten().map(|at| self.line.at(*at))
    }

    /// # Errors
    /// The command is not there, or is broken.
    pub fn of(input: &Input, vm: usize) -> Result<Self, String> {
        let text = input.sources.first().map_or("", |source| &source.text);
        let command = match input.kind {
            Kind::Proxmox => {
                proxmox::options(text).and_then(|(options, start)| fragment(options, start))
            }
            _ => words::commands(text, 0).commands.into_iter().nth(vm),
        };
        let command = command.ok_or("the command is not there")?;
        let mut reading = Reading::default();
        let line =
            line(&command, &input.surroundings, &mut reading, false).map_err(|_| "it is broken")?;
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

/// The command that is changed.
pub struct Changed<'a> {
    pub target: &'a Target<'a>,
    pub parsed: &'a Parsed,
    /// Its options.
    pub line: &'a Line,
}

/// The changes for a setting.
///
/// # Errors
/// Why there are none.
pub fn edits(target: &Target<'_>, setting: Setting) -> Edits {
    let changed = Changed::of(target)?;
    let is_of_others = matches!(
        setting,
        Setting::Virtio
            | Setting::OwnThread
            | Setting::DefineThread
            | Setting::TrimThreads
            | Setting::SharedMemory
            | Setting::QueuesAsVcpus
    );
    if target.vm()?.open && is_of_others {
        return Err("the command has options that only a running shell knows".into());
    }
    match setting {
        Setting::TrimThreads => return changed.trim_threads(),
        Setting::SharedMemory => return changed.share_memory(),
        _ => {}
    }
    let disk = target.disk()?;
    if disk.open {
        return Err("only a running shell knows all of its options".into());
    }
    match setting {
        Setting::Virtio => changed.virtio(disk),
        Setting::Cache(_) | Setting::CacheDirect => changed.cache(disk, setting),
        Setting::Aio(word) => changed.storage(disk, "aio", word),
        Setting::Discard => changed.all_nodes(disk, "discard", "unmap"),
        Setting::L2Cache => {
            let needed = disk
                .table
                .number("backing.qcow2-l2-needed")
                .ok_or("its size is not known")?;
            let span = disk
                .table
                .given("disk.format")
                .or(disk.table.given("disk.syntax"))
                .ok_or("no option says its format")?;
            let option = changed.at(span).ok_or("the option is not there")?;
            changed.set(option, "", "l2-cache-size", &needed.to_string())
        }
        Setting::OwnThread => changed.own_thread(disk),
        Setting::DefineThread => {
            let id = disk
                .table
                .word("disk.thread-missing")
                .ok_or("no thread is missing")?;
            if !is_plain(id) {
                return Err("its name would have to be quoted".into());
            }
            changed.define_thread(id, changed.carrier(disk)?)
        }
        Setting::QueuesAsVcpus => {
            let vcpus = target
                .vm()?
                .table
                .number("vm.vcpus")
                .unwrap_or(1)
                .to_string();
            let carrier = changed.carrier(disk)?;
            let scsi = disk.table.word("disk.bus") == Some("virtio-scsi");
            let key = if scsi { "num_queues" } else { "num-queues" };
            changed.set(carrier, "", key, &vcpus)
        }
        Setting::Remove(key) => Ok(vec![changed.without(changed.carrier(disk)?, key)?]),
        Setting::EvenMapping => changed.even_mapping(disk),
        Setting::Reconnect => changed.reconnect(disk),
        _ => Err("QEMU has no such setting".into()),
    }
}

/// The same, with the text in which the option stands.
fn set_in(source: &str, option: &Opt, prefix: &str, key: &str, value: &str) -> Vec<Edit> {
    let full = format!("{prefix}{key}");
    let json = |value: &str| match value {
        "on" => "true".to_owned(),
        "off" => "false".to_owned(),
        number if number.parse::<u64>().is_ok() => number.to_owned(),
        word => format!("\"{word}\""),
    };
    let known = option.get(&full);
    match (&option.syntax, known) {
        (Syntax::Pairs, Some(pair)) => vec![Edit::replace(pair.value_span, value)],
        (Syntax::Pairs, None) => {
            // After a comma at the end, another one would make both a comma in the value.
            let text = source.get(option.span.range()).unwrap_or_default();
            let commas = text.len() - text.trim_end_matches(',').len();
            let comma = match option.pairs.is_empty() || commas % 2 == 1 {
                true => "",
                false => ",",
            };
            vec![Edit::replace(
                option.span.after(),
                format!("{comma}{full}={value}"),
            )]
        }
        (Syntax::Json(quote), Some(pair)) => {
            // Of a quote that is escaped for a shell, the backslash is no part of the value.
            let before = source.get(..pair.value_span.start as usize);
            match before.is_some_and(|before| before.ends_with('\\')) {
                true => Vec::new(),
                false => vec![Edit::replace(
                    pair.value_span,
                    escaped(&json(value), *quote),
                )],
            }
        }
        (Syntax::Json(quote), None) => {
            // Into the object that the key is of, before its first value that is no object itself. An object that is
            // not there is made, an empty one is filled.
            let inside = |prefix: &str| {
                let own = option.pairs.iter().filter(|pair| {
                    let key = pair.key.strip_prefix(prefix);
                    key.is_some_and(|key| !key.contains('.'))
                });
                own.min_by_key(|pair| pair.value_span.start)
            };
            let starts = |prefix: &str| {
                let mut pairs = option.pairs.iter();
                pairs.any(|pair| pair.key.starts_with(prefix))
            };
            let (prefix, key, body) = match key.split_once('.') {
                Some((outer, inner)) => {
                    let object = format!("{{\"{inner}\":{}}}", json(value));
                    let whole = format!("{prefix}{outer}");
                    if let Some(pair) = option.get(&whole) {
                        return match pair.value.as_str() {
                            "{}" => vec![Edit::replace(pair.value_span, escaped(&object, *quote))],
                            _ => Vec::new(),
                        };
                    }
                    match format!("{whole}.") {
                        there if starts(&there) => (there, inner, json(value)),
                        _ => (prefix.to_owned(), outer, object),
                    }
                }
                // As a list or an object it is there already.
                None if starts(&format!("{full}.")) => return Vec::new(),
                None => (prefix.to_owned(), key, json(value)),
            };
            match inside(&prefix).and_then(|pair| key_start(source, option, pair)) {
                Some(at) => vec![Edit::replace(
                    at,
                    escaped(&format!("\"{key}\":{body},"), *quote),
                )],
                None => Vec::new(),
            }
        }
        (Syntax::Patchwork, _) => Vec::new(),
        (Syntax::Section, Some(pair)) => {
            vec![Edit::replace(pair.value_span, format!("\"{value}\""))]
        }
        (Syntax::Section, None) => vec![Edit::replace(
            option.span.after(),
            format!("\n  {full} = \"{value}\""),
        )],
    }
}

/// In double quotes, a shell takes a quote for their end.
fn escaped(text: &str, quote: Option<char>) -> String {
    match quote {
        Some('"') => text.replace('"', "\\\""),
        Some(_) => text.to_owned(),
        None => text
            .replace('"', "\\\"")
            .replace('{', "\\{")
            .replace('}', "\\}"),
    }
}

/// The place before the key of a value in JSON, as the text has it: between key and value there are quotes, perhaps
/// escaped for a shell, a colon and white space.
fn key_start(source: &str, option: &Opt, pair: &Pair) -> Option<Span> {
    let key = pair.key.rsplit('.').next()?;
    let before = source.get(option.span.start as usize..pair.value_span.start as usize)?;
    let before = before
        .trim_end()
        .strip_suffix(':')?
        .trim_end()
        .strip_suffix('"')?;
    let before = before
        .strip_suffix('\\')
        .unwrap_or(before)
        .strip_suffix(key)?
        .strip_suffix('"')?;
    let before = before.strip_suffix('\\').unwrap_or(before);
    let start = option.span.start + u32::try_from(before.len()).ok()?;
    Some(Span {
        start,
        end: start,
        ..pair.value_span
    })
}

impl<'a> Changed<'a> {
    pub fn of(target: &'a Target<'a>) -> Result<Self, String> {
        let parsed = target.round.command(match target.input.kind {
            Kind::Proxmox => 0,
            _ => target.vm,
        })?;
        Ok(Self {
            target,
            parsed,
            line: &parsed.line,
        })
    }

    /// The text that an option stands in.
    fn source(&self, option: &Opt) -> &str {
        let source = self
            .target
            .input
            .sources
            .get(usize::from(option.span.source));
        source.map_or("", |source| &source.text)
    }

    /// Sets a pair of an option; `prefix` is of a node inside another.
    pub fn set(&self, option: &Opt, prefix: &str, key: &str, value: &str) -> Edits {
        self.written(set_in(self.source(option), option, prefix, key, value))
    }

    /// The option that has these bytes.
    pub fn at(&self, span: Span) -> Option<&'a Opt> {
        Some(self.line.at(self.place(span)?))
    }

    /// Its number.
    pub fn place(&self, span: Span) -> Option<usize> {
        let key = (span.source, span.start);
        let (_, at) = self.parsed.places.range(..=key).next_back()?;
        let option = self.line.at(*at);
        let is_inside = option.span.source == span.source && span.end <= option.span.end;
        is_inside.then_some(*at)
    }

    /// The ids of all options.
    fn ids(&self) -> HashSet<String> {
        let ids = self.line.all().filter_map(|option| option.value("id"));
        ids.map(str::to_owned).collect()
    }

    fn text(&self, span: Span) -> &str {
        let source = self.target.input.sources.get(usize::from(span.source));
        source
            .and_then(|source| source.text.get(span.range()))
            .unwrap_or_default()
    }

    pub fn device(&self, disk: &Disk) -> Result<&Opt, String> {
        let found = self.at(disk.span).ok_or("the device is not there")?;
        match found.group.as_str() {
            "device" => Ok(found),
            _ => Err("the disk has no -device".into()),
        }
    }

    /// The device that has queues and threads: the disk, or its SCSI controller.
    fn carrier(&self, disk: &Disk) -> Result<&Opt, String> {
        let device = self.device(disk)?;
        if disk.table.word("disk.bus") != Some("virtio-scsi") {
            return Ok(device);
        }
        let controller = self.line.scsi_controller(device);
        controller.ok_or_else(|| "its controller is not there".into())
    }

    /// The options that describe what is behind a disk, from the device to the storage, with the prefix of each node.
    pub fn nodes(&self, disk: &Disk) -> Result<Vec<(&Opt, String)>, String> {
        let span = disk
            .table
            .given("disk.syntax")
            .ok_or("nothing describes what is behind it")?;
        let mut option = self.at(span).ok_or("the drive is not there")?;
        match option.group.as_str() {
            "blockdev" => {}
            "drive" => return Ok(vec![(option, String::new())]),
            other => return Err(format!("-{other} takes no options")),
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

    fn storage(&self, disk: &Disk, key: &str, value: &str) -> Edits {
        let nodes = self.nodes(disk)?;
        let (option, prefix) = nodes.last().ok_or("no node")?;
        self.set(option, prefix, key, value)
    }

    fn all_nodes(&self, disk: &Disk, key: &str, value: &str) -> Edits {
        let nodes = self.nodes(disk)?;
        self.written(
            nodes
                .iter()
                .filter_map(|(option, prefix)| self.set(option, prefix, key, value).ok())
                .flatten()
                .collect(),
        )
    }

    fn written(&self, edits: Vec<Edit>) -> Edits {
        match edits.is_empty() {
            true => Err("its place in the JSON is not clear".into()),
            false => Ok(edits),
        }
    }

    fn cache(&self, disk: &Disk, setting: Setting) -> Edits {
        let now = disk.table.word("disk.cache").unwrap_or("writeback");
        let mode = match setting {
            Setting::CacheDirect if now == "writethrough" => "directsync",
            Setting::Cache(mode) => mode,
            _ => "none",
        };
        let nodes = self.nodes(disk)?;
        let mut edits = Vec::new();
        let is_drive = nodes
            .first()
            .is_some_and(|(option, _)| option.group != "blockdev");
        if let (Some((option, _)), true) = (nodes.first(), is_drive) {
            if mode == "writeback" && option.get("cache.no-flush").is_some() {
                return self.set(option, "", "cache.no-flush", "off");
            }
            for key in ["cache.direct", "cache.no-flush", "cache.writeback"] {
                if option.get(key).is_some() {
                    edits.push(self.without(option, key)?);
                }
            }
            edits.extend(self.set(option, "", "cache", mode)?);
            return Ok(edits);
        }
        // A node inside the description of another has its cache options from there.
        for (option, prefix) in &nodes {
            let direct = format!("{prefix}cache.direct");
            if mode != "writeback" && (prefix.is_empty() || option.get(&direct).is_some()) {
                edits.extend(self.set(option, prefix, "cache.direct", "on")?);
            }
            let flush = format!("{prefix}cache.no-flush");
            if option.value(&flush) == Some("on") {
                edits.extend(self.set(option, prefix, "cache.no-flush", "off")?);
            }
        }
        if mode == "none" && disk.table.word("disk.write-cache") == Some("off") {
            edits.extend(self.set(self.device(disk)?, "", "write-cache", "on")?);
        }
        self.written(edits)
    }

    /// The change that takes a pair away.
    pub fn without(&self, option: &Opt, key: &str) -> Result<Edit, String> {
        let pair = option.get(key).ok_or("it is not given")?;
        match option.syntax {
            Syntax::Patchwork => Err("it stands in quotes of its own".into()),
            Syntax::Pairs => {
                let first = option.pairs.first() == Some(pair);
                let mut span = pair.span;
                // A quote that starts or ends in what goes would take what follows with it.
                if self.text(span).contains(['\'', '"', '\\']) {
                    return Err("it stands in quotes of its own".into());
                }
                match first {
                    true if option.pairs.len() > 1 => span.end += 1,
                    true => {}
                    false => span.start -= 1,
                }
                Ok(Edit::replace(span, ""))
            }
            Syntax::Section => {
                let source = self
                    .target
                    .input
                    .sources
                    .get(usize::from(pair.span.source))
                    .ok_or("no text")?;
                let line = source.text[..pair.span.start as usize]
                    .rfind('\n')
                    .unwrap_or(0);
                Ok(Edit::replace(
                    Span::new(pair.span.source, line, pair.span.end as usize),
                    "",
                ))
            }
            Syntax::Json(_) => {
                let start = key_start(self.source(option), option, pair)
                    .ok_or("its place in the JSON is not clear")?;
                let source = self
                    .target
                    .input
                    .sources
                    .get(usize::from(start.source))
                    .ok_or("no text")?;
                // With the comma after it, or the one before the last, whatever white space there is.
                let (from, to) = (start.start as usize, pair.value_span.end as usize);
                let after = &source.text[to..];
                let before = source.text[..from].trim_end();
                let (from, to) = match after.trim_start() {
                    rest if rest.starts_with(',') => (from, to + after.len() - rest.len() + 1),
                    _ => match before.strip_suffix(',') {
                        Some(before) => (before.len(), to),
                        None if before.ends_with('{') => (from, to),
                        None => return Err("its place in the JSON is not clear".into()),
                    },
                };
                Ok(Edit::replace(Span::new(start.source, from, to), ""))
            }
        }
    }

    /// What sets an option apart from the one before it.
    fn apart(&self, whole: Span) -> &str {
        let at = whole.before();
        let source = self.target.input.sources.get(usize::from(at.source));
        let before = source.map_or("", |source| &source.text[..at.start as usize]);
        let mut start = before.len();
        for c in before.chars().rev() {
            // A backslash counts only at the end of a line.
            if !(c.is_whitespace() || (c == '\\' && before[start..].starts_with(['\n', '\r']))) {
                break;
            }
            start -= c.len_utf8();
        }
        &before[start..]
    }

    /// Another option before this one, set apart as this one is.
    pub fn before(&self, option: &Opt, text: &str) -> Edit {
        let apart = match self.apart(option.whole) {
            "" => " ",
            apart => apart,
        };
        Edit::replace(option.whole.before(), format!("{text}{apart}"))
    }

    /// The change that takes an option away, with what sets it apart from the one before it.
    pub fn taken(&self, whole: Span) -> Edit {
        let start = whole.start - self.apart(whole).len() as u32;
        Edit::replace(Span { start, ..whole }, "")
    }

    /// The changes that take every `-set` of an option away, as it goes itself.
    pub fn sets_taken(&self, option: &Opt) -> Vec<Edit> {
        let sets = option.pairs.iter().filter(|pair| !option.writes(pair));
        sets.map(|pair| self.taken(pair.span)).collect()
    }

    fn define_thread(&self, id: &str, before: &Opt) -> Edits {
        Ok(vec![match before.syntax {
            Syntax::Section => Edit::replace(
                before.whole.before(),
                format!("[object \"{id}\"]\n  qom-type = \"iothread\"\n\n"),
            ),
            _ => self.before(before, &format!("-object iothread,id={id}")),
        }])
    }

    fn own_thread(&self, disk: &Disk) -> Edits {
        let Target { round, vm, .. } = *self.target;
        let unused = round.unused_thread(vm);
        let id = unused.clone().unwrap_or_else(|| {
            let ids = || self.ids();
            round.name(vm, "thread", ids, |number| format!("iothread{number}"))
        });
        let Ok(carrier) = self.carrier(disk) else {
            return self.device_for(disk, &id, unused.is_some());
        };
        let mut edits = Vec::new();
        if unused.is_none() {
            edits.extend(self.define_thread(&id, carrier)?);
        }
        edits.extend(self.set(carrier, "", "iothread", &id)?);
        Ok(edits)
    }

    /// Whether virtio devices are on PCI: on s390x they are not, nor on m68k.
    pub fn has_virtio_pci(&self) -> Result<(), String> {
        let program = &self.parsed.command.program.text;
        let known = ["x86_64", "i386", "aarch64"];
        let is_other = program
            .rsplit_once("qemu-system-")
            .is_some_and(|(_, architecture)| {
                !known.iter().any(|known| architecture.starts_with(known))
            });
        let machine = self.target.vm()?.table.word("vm.machine");
        match is_other || machine.is_some_and(|machine| machine.starts_with("s390")) {
            true => Err("whether this machine has virtio devices on PCI is not known".into()),
            false => Ok(()),
        }
    }

    /// A drive with `if=virtio` cannot name a thread: it gets a device.
    fn device_for(&self, disk: &Disk, thread: &str, defined: bool) -> Edits {
        let drive = self.at(disk.span).ok_or("the drive is not there")?;
        if drive.group != "drive"
            || drive.value("if") != Some("virtio")
            || drive.syntax != Syntax::Pairs
        {
            return Err("the disk has no -device of its own".into());
        }
        self.has_virtio_pci()?;
        let anchor = self.may_have_device(disk, drive)?;
        let mut edits = self.set(drive, "", "if", "none")?;
        let id = match drive.value("id") {
            Some(id) => id.to_owned(),
            None => {
                let Target { round, vm, .. } = *self.target;
                let id = round.name(vm, "disk", || self.ids(), |number| format!("disk{number}"));
                edits.extend(self.set(drive, "", "id", &id)?);
                id
            }
        };
        for key in ["index", "bus", "unit"] {
            if drive.get(key).is_some() {
                edits.push(self.without(drive, key)?);
            }
        }
        if !defined {
            edits.push(self.before(drive, &format!("-object iothread,id={thread}")));
        }
        let apart = self.before(drive, "").text;
        edits.push(Edit::replace(
            anchor.whole.after(),
            format!("{apart}-device virtio-blk-pci,drive={id},iothread={thread}"),
        ));
        Ok(edits)
    }

    fn trim_threads(&self) -> Edits {
        let used = self.target.vm()?.threads_used();
        let mut edits = Vec::new();
        for object in self.line.group("object") {
            let is_thread = object.value("qom-type") == Some("iothread");
            let unused = |id: &&str| is_thread && !used.contains(id);
            if object.value("id").filter(unused).is_none() {
                continue;
            }
            edits.push(match object.syntax {
                Syntax::Section => Edit::replace(object.whole, ""),
                _ => self.taken(object.whole),
            });
            edits.extend(self.sets_taken(object));
        }
        self.written(edits)
    }

    fn share_memory(&self) -> Edits {
        let vm = self.target.vm()?;
        let machine = self.line.group("machine").next_back();
        let backend = self.line.last("machine", "memory-backend");
        if let Some(object) = backend.and_then(|pair| self.line.find("object", &pair.value)) {
            return self.set(object, "", "share", "on");
        }
        let nodes: Vec<_> = self
            .line
            .group("numa")
            .filter_map(|node| self.line.find("object", node.value("memdev")?))
            .collect();
        if !nodes.is_empty() {
            let mut edits = Vec::new();
            for object in nodes {
                edits.extend(self.set(object, "", "share", "on")?);
            }
            return Ok(edits);
        }
        if self.line.group("mem-path").next().is_some() || self.line.group("numa").next().is_some()
        {
            return Err(
                "-mem-path or -numa say where its memory is: make that object shared by hand"
                    .into(),
            );
        }
        let first = self.parsed.command.arguments.first().and_then(|word| {
            self.line
                .all()
                .find(|option| option.whole.start == word.outer.start)
        });
        let anchor = machine.or(first).ok_or("the command has no options")?;
        let mib = vm
            .table
            .number("vm.memory")
            .map_or(128, |bytes| bytes >> 20);
        let mut object = format!("-object memory-backend-memfd,id=mem,size={mib}M,share=on");
        let mut edits = Vec::new();
        match machine {
            Some(machine) => edits.extend(self.set(machine, "", "memory-backend", "mem")?),
            None => {
                let apart = self.before(anchor, "").text;
                object = format!("{object}{apart}-machine memory-backend=mem");
            }
        }
        edits.push(self.before(anchor, &object));
        Ok(edits)
    }

    fn reconnect(&self, disk: &Disk) -> Edits {
        let device = self.device(disk)?;
        let id = device.value("chardev").unwrap_or_default();
        let chardev = self.line.find("chardev", id);
        let chardev = chardev.ok_or("its chardev is not there")?;
        let old = self
            .target
            .vm()?
            .table
            .version("vm.qemu")
            .is_some_and(|version| version < crate::version::Version(9, 2, 0));
        match old {
            true => self.set(chardev, "", "reconnect", "1"),
            false => self.set(chardev, "", "reconnect-ms", "1000"),
        }
    }

    fn even_mapping(&self, disk: &Disk) -> Edits {
        let device = self.carrier(disk)?;
        let text = self.text(device.span);
        let mut edits = Vec::new();
        let mut from = 0;
        // "vqs":[…], with its comma, wherever it stands in the map.
        while let Some(found) = text[from..].find("vqs") {
            let mut start = from + found;
            let Some(length) = text[start..].find(']') else {
                break;
            };
            let mut end = start + length + 1;
            start = text[..start].trim_end_matches(['"', '\\', ' ']).len();
            if text[..start].ends_with(',') {
                start -= 1;
            } else if text[end..].starts_with(',') {
                end += 1;
            }
            let base = device.span.start as usize;
            edits.push(Edit::replace(
                Span::new(device.span.source, base + start, base + end),
                "",
            ));
            from = end;
        }
        self.written(edits)
    }
}
