//! Changes to a command line in the syntax of each option.

mod pairs;

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::bus::Boot;
use super::line::{Line, line};
use super::options::{Opt, Syntax};
use super::{fragment, words};
use crate::fix::{Edits, Setting, Target, is_plain};
use crate::input::{Input, Kind, Reading};
use crate::model::Disk;
use crate::proxmox;
use crate::text::{Edit, Span};
use pairs::{key_start, set_in};

/// A command with indexes of its options.
pub struct Parsed {
    command: words::Command,
    line: Line,
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

impl Parsed {
    /// The options that may refer to one of these names.
    pub fn users<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = &'a Opt> {
        let users = names.iter().filter_map(|name| self.uses.get(*name));
        users.flatten().map(|at| self.line.at(*at))
    }

    /// # Errors
    /// The command is missing or invalid.
    pub fn of(input: &Input, vm: usize) -> Result<Self, String> {
        let text = input.sources.first().map_or("", |source| &source.text);
        let command = match input.kind {
            Kind::Proxmox => {
                proxmox::options(text).and_then(|(options, start)| fragment(options, start))
            }
            _ => words::commands(text, 0).commands.into_iter().nth(vm),
        };
        let command = command.ok_or("the command is missing")?;
        let mut reading = Reading::default();
        let line = line(&command, &input.surroundings, &mut reading, false)
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

/// The command that a fix changes.
pub struct Changed<'a> {
    pub target: &'a Target<'a>,
    pub parsed: &'a Parsed,
    pub line: &'a Line,
}

/// The edits for a setting.
///
/// # Errors
/// The reason why the setting cannot be made.
pub fn edits(target: &Target<'_>, setting: Setting) -> Edits {
    let changed = Changed::of(target)?;
    let affects_others = matches!(
        setting,
        Setting::Virtio
            | Setting::OwnThread
            | Setting::DefineThread
            | Setting::TrimThreads
            | Setting::SharedMemory
            | Setting::QueuesAsVcpus
    );
    if target.vm()?.may_have_more && affects_others {
        return Err("a shell variable may contain more options".into());
    }
    match setting {
        Setting::TrimThreads => return changed.trim_threads(),
        Setting::SharedMemory => return changed.share_memory(),
        _ => {}
    }
    let disk = target.disk()?;
    if disk.may_have_more {
        return Err("a shell variable may contain more of its options".into());
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
                .ok_or("the size of its tables is unknown")?;
            let span = disk
                .table
                .given("disk.format")
                .or(disk.table.given("disk.syntax"))
                .ok_or("no option sets its format")?;
            let option = changed.at(span).ok_or("the option is missing")?;
            changed.set(option, "", "l2-cache-size", &needed.to_string())
        }
        Setting::OwnThread => changed.own_thread(disk),
        Setting::DefineThread => {
            let id = disk
                .table
                .word("disk.thread-missing")
                .ok_or("no thread is missing")?;
            if !is_plain(id) {
                return Err("the id of the I/O thread needs quotes".into());
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

const UNCLEAR_JSON: &str = "its position in the JSON is unclear";

/// # Errors
/// There are no edits, because JSON in a shell's quotes is unclear.
fn not_empty(edits: Vec<Edit>) -> Edits {
    if edits.is_empty() {
        return Err(UNCLEAR_JSON.into());
    }
    Ok(edits)
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

    /// The text that contains an option.
    fn source(&self, option: &Opt) -> &str {
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
        let found = self.at(disk.span).ok_or("the device is missing")?;
        match found.group.as_str() {
            "device" => Ok(found),
            _ => Err("the disk has no -device".into()),
        }
    }

    /// The device with the queues and threads: the disk, or its SCSI controller.
    fn carrier(&self, disk: &Disk) -> Result<&Opt, String> {
        let device = self.device(disk)?;
        if disk.table.word("disk.bus") != Some("virtio-scsi") {
            return Ok(device);
        }
        let controller = self.line.scsi_controller(device);
        controller.ok_or_else(|| "its controller is missing".into())
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

    fn storage(&self, disk: &Disk, key: &str, value: &str) -> Edits {
        let nodes = self.nodes(disk)?;
        let (option, prefix) = nodes.last().ok_or("no node")?;
        self.set(option, prefix, key, value)
    }

    fn all_nodes(&self, disk: &Disk, key: &str, value: &str) -> Edits {
        let nodes = self.nodes(disk)?;
        not_empty(
            nodes
                .iter()
                .filter_map(|(option, prefix)| self.set(option, prefix, key, value).ok())
                .flatten()
                .collect(),
        )
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
        // A nested node inherits its cache options.
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
        not_empty(edits)
    }

    /// Removes a pair.
    pub fn without(&self, option: &Opt, key: &str) -> Result<Edit, String> {
        let pair = option.get(key).ok_or("it is not set")?;
        match option.syntax {
            Syntax::Patchwork => Err("quotes start or end inside it".into()),
            Syntax::Pairs => {
                let mut span = pair.span;
                // Removing one quote of a pair would change the text after it.
                if self.text(span).contains(['\'', '"', '\\']) {
                    return Err("quotes start or end inside it".into());
                }
                let is_first = option.pairs.first() == Some(pair);
                if !is_first {
                    span.start -= 1;
                } else if option.pairs.len() > 1 {
                    span.end += 1;
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
                let start = key_start(self.source(option), option, pair).ok_or(UNCLEAR_JSON)?;
                let source = self
                    .target
                    .input
                    .sources
                    .get(usize::from(start.source))
                    .ok_or("no text")?;
                // Also remove the comma after it, or before it if it is the last one.
                let (from, to) = (start.start as usize, pair.value_span.end as usize);
                let after = &source.text[to..];
                let before = source.text[..from].trim_end();
                let (from, to) = match after.trim_start() {
                    rest if rest.starts_with(',') => (from, to + after.len() - rest.len() + 1),
                    _ => match before.strip_suffix(',') {
                        Some(before) => (before.len(), to),
                        None if before.ends_with('{') => (from, to),
                        None => return Err(UNCLEAR_JSON.into()),
                    },
                };
                Ok(Edit::replace(Span::new(start.source, from, to), ""))
            }
        }
    }

    /// The white space and line continuations between an option and the one before it.
    fn separator(&self, whole: Span) -> &str {
        let at = whole.before();
        let source = self.target.input.sources.get(usize::from(at.source));
        let before = source.map_or("", |source| &source.text[..at.start as usize]);
        let mut start = before.len();
        for c in before.chars().rev() {
            // A backslash continues a line only at its end.
            if !(c.is_whitespace() || (c == '\\' && before[start..].starts_with(['\n', '\r']))) {
                break;
            }
            start -= c.len_utf8();
        }
        &before[start..]
    }

    /// Inserts another option before this one, with the same separator.
    pub fn before(&self, option: &Opt, text: &str) -> Edit {
        let separator = match self.separator(option.whole) {
            "" => " ",
            separator => separator,
        };
        Edit::replace(option.whole.before(), format!("{text}{separator}"))
    }

    /// Removes an option and the separator before it.
    pub fn removed(&self, whole: Span) -> Edit {
        let start = whole.start - self.separator(whole).len() as u32;
        Edit::replace(Span { start, ..whole }, "")
    }

    /// Removes every `-set` of an option that is removed.
    pub fn sets_removed(&self, option: &Opt) -> Vec<Edit> {
        let sets = option.pairs.iter().filter(|pair| !option.writes(pair));
        sets.map(|pair| self.removed(pair.span)).collect()
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

    /// # Errors
    /// The machine may not have virtio devices on PCI, such as s390x and m68k.
    pub fn has_virtio_pci(&self) -> Result<(), String> {
        let program = &self.parsed.command.program.text;
        let known = ["x86_64", "i386", "aarch64"];
        let is_other = program
            .rsplit_once("qemu-system-")
            .is_some_and(|(_, architecture)| {
                !known.iter().any(|known| architecture.starts_with(known))
            });
        let machine = self.target.vm()?.table.word("vm.machine");
        if is_other || machine.is_some_and(|machine| machine.starts_with("s390")) {
            return Err("this machine type may not have virtio devices on PCI".into());
        }
        Ok(())
    }

    /// Gives a drive with `if=virtio` a separate device, which can name an I/O thread.
    fn device_for(&self, disk: &Disk, thread: &str, is_defined: bool) -> Edits {
        let drive = self.at(disk.span).ok_or("the drive is missing")?;
        if drive.group != "drive"
            || drive.value("if") != Some("virtio")
            || drive.syntax != Syntax::Pairs
        {
            return Err("the disk has no separate -device".into());
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
        if !is_defined {
            edits.push(self.before(drive, &format!("-object iothread,id={thread}")));
        }
        let separator = self.before(drive, "").text;
        edits.push(Edit::replace(
            anchor.whole.after(),
            format!("{separator}-device virtio-blk-pci,drive={id},iothread={thread}"),
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
                _ => self.removed(object.whole),
            });
            edits.extend(self.sets_removed(object));
        }
        not_empty(edits)
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
                "-mem-path or -numa define its memory: make that object shared manually".into(),
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
                let separator = self.before(anchor, "").text;
                object = format!("{object}{separator}-machine memory-backend=mem");
            }
        }
        edits.push(self.before(anchor, &object));
        Ok(edits)
    }

    fn reconnect(&self, disk: &Disk) -> Edits {
        let device = self.device(disk)?;
        let id = device.value("chardev").unwrap_or_default();
        let chardev = self.line.find("chardev", id);
        let chardev = chardev.ok_or("its chardev is missing")?;
        let is_old = self
            .target
            .vm()?
            .table
            .version("vm.qemu")
            .is_some_and(|version| version < crate::version::Version(9, 2, 0));
        if is_old {
            self.set(chardev, "", "reconnect", "1")
        } else {
            self.set(chardev, "", "reconnect-ms", "1000")
        }
    }

    fn even_mapping(&self, disk: &Disk) -> Edits {
        let device = self.carrier(disk)?;
        let text = self.text(device.span);
        let mut edits = Vec::new();
        let mut from = 0;
        // Remove each "vqs":[…] and its comma.
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
        not_empty(edits)
    }
}
