//! Changes to a command line in the syntax of each option.

use super::editor::{Editor, ParsedCommand, UNCLEAR_JSON, not_empty};
use super::options::{Opt, Syntax};
use super::pairs::key_start;
use crate::model::Disk;
use crate::setting::Setting;
use crate::target::{Edits, Target};
use crate::text::{Edit, Span, is_plain};

/// The edits for a setting.
///
/// # Errors
/// The reason why the setting cannot be made.
pub fn edits(target: &Target<'_>, parsed: &ParsedCommand, setting: Setting) -> Edits {
    let editor = Editor::of(target, parsed);
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
        Setting::TrimThreads => return editor.trim_threads(),
        Setting::SharedMemory => return editor.share_memory(),
        _ => {}
    }
    let disk = target.disk()?;
    if disk.may_have_more {
        return Err("a shell variable may contain more of its options".into());
    }
    match setting {
        Setting::Virtio => editor.virtio(disk),
        Setting::Cache(_) | Setting::CacheDirect => editor.cache(disk, setting),
        Setting::Aio(word) => editor.storage(disk, "aio", word),
        Setting::Discard => editor.all_nodes(disk, "discard", "unmap"),
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
            let option = editor.at(span).ok_or("the option is missing")?;
            editor.set(option, "", "l2-cache-size", &needed.to_string())
        }
        Setting::OwnThread => editor.own_thread(disk),
        Setting::DefineThread => {
            let id = disk
                .table
                .word("disk.thread-missing")
                .ok_or("no thread is missing")?;
            if !is_plain(id) {
                return Err("the id of the I/O thread needs quotes".into());
            }
            editor.define_thread(id, editor.carrier(disk)?)
        }
        Setting::QueuesAsVcpus => {
            let vcpus = target
                .vm()?
                .table
                .number("vm.vcpus")
                .unwrap_or(1)
                .to_string();
            let carrier = editor.carrier(disk)?;
            let scsi = disk.table.word("disk.bus") == Some("virtio-scsi");
            let key = if scsi { "num_queues" } else { "num-queues" };
            editor.set(carrier, "", key, &vcpus)
        }
        Setting::Remove(key) => Ok(vec![editor.without(editor.carrier(disk)?, key)?]),
        Setting::EvenMapping => editor.even_mapping(disk),
        Setting::Reconnect => editor.reconnect(disk),
        _ => Err("QEMU has no such setting".into()),
    }
}

impl Editor<'_> {
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
