//! QEMU's command line: `-drive`, `-blockdev` and `-device` as pairs and as JSON, `-object`, `-machine`, `-readconfig`
//! and files of arguments (`@file`).

mod convert;
mod devices;
mod edit;
mod graph;
mod json;
mod options;
mod words;

pub use convert::{from_ringdisk, to_ringdisk};
pub use edit::edits;
pub use words::shell;

use crate::input::{Mistake, Reading, Surroundings};
use crate::model::{Disk, Thread, Vm};
use crate::text::{Source, Span};
use crate::version::Version;
use options::Opt;
use words::{Command, Word};

/// Options that stand alone; after any other, a word without a dash is its value.
const FLAGS: &[&str] = &[
    "S",
    "s",
    "h",
    "help",
    "version",
    "enable-kvm",
    "nographic",
    "daemonize",
    "no-reboot",
    "no-shutdown",
    "snapshot",
    "nodefaults",
    "no-user-config",
    "mem-prealloc",
    "full-screen",
    "no-fd-bootchk",
    "no-acpi",
    "no-hpet",
    "usb",
    "win2k-hack",
    "only-migratable",
    "preconfig",
    "singlestep",
    "portrait",
    "no-quit",
    "alt-grab",
    "ctrl-grab",
    "semihosting",
    "old-param",
    "nouserconfig",
    "prom-env-none",
    "no-kvm",
];

/// Options that say nothing of disks; what is neither here nor understood gets a note.
const PASSED: &[&str] = &[
    "name",
    "uuid",
    "rtc",
    "boot",
    "bios",
    "kernel",
    "initrd",
    "append",
    "dtb",
    "vga",
    "display",
    "vnc",
    "spice",
    "k",
    "audio",
    "audiodev",
    "net",
    "netdev",
    "nic",
    "serial",
    "parallel",
    "monitor",
    "mon",
    "qmp",
    "qmp-pretty",
    "pidfile",
    "runas",
    "chroot",
    "sandbox",
    "msg",
    "D",
    "d",
    "trace",
    "usbdevice",
    "smbios",
    "fw_cfg",
    "tpmdev",
    "watchdog",
    "watchdog-action",
    "action",
    "global",
    "set",
    "incoming",
    "add-fd",
    "debugcon",
    "gdb",
    "icount",
    "overcommit",
    "loadvm",
    "dump-vmstate",
    "plugin",
    "compat",
    "run-with",
    "fsdev",
    "virtfs",
    "iscsi",
    "g",
    "L",
    "smp-cpus",
    "acpitable",
    "echr",
    "prom-env",
    "seed",
    "option-rom",
    "semihosting-config",
    "xen-domid",
    "pflash",
    "fda",
    "fdb",
    "mtdblock",
    "soundhw",
    "mem-path",
    "no-kvm-pit-reinjection",
];

/// A command line, with what it names.
#[derive(Default)]
pub struct Line {
    /// All of them, in their order.
    pub options: Vec<Opt>,
}

/// The group, the id and the pair of `-set GROUP.ID.KEY=VALUE`.
fn set_pair(set: &Opt) -> Option<(&str, &str, options::Pair)> {
    let first = set.pairs.first()?;
    let mut parts = first.key.splitn(3, '.');
    let (group, id, key) = (parts.next()?, parts.next()?, parts.next()?);
    let pair = options::Pair {
        key: key.to_owned(),
        value: first.value.clone(),
        // It goes as a whole.
        span: set.whole,
        value_span: first.value_span,
    };
    Some((group, id, pair))
}

/// Files of arguments that belong to one command line at most.
const FILES_MAX: usize = 16;

/// Files that the commands of a text name: `-readconfig FILE` and `@FILE`.
pub fn files_named(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for command in words::commands(text, 0).0 {
        for (i, word) in command.arguments.iter().enumerate() {
            let before = i.checked_sub(1).and_then(|i| command.arguments.get(i));
            let is_config =
                before.is_some_and(|word| word.text.trim_start_matches('-') == "readconfig");
            match word.text.strip_prefix('@') {
                Some(name) => names.push(name.to_owned()),
                None if is_config => names.push(word.text.clone()),
                None => {}
            }
        }
    }
    names.truncate(FILES_MAX);
    names
}

/// Whether some command in a text starts QEMU.
pub fn has_command(text: &str) -> bool {
    !words::commands(text, 0).0.is_empty()
}

/// The machine type without its version, and that: `pc-q35-8.2`, `pc-i440fx-rhel7.6.0`, `virt-9.0`, `q35`.
pub fn machine_version(machine: &str) -> (&str, Option<Version>) {
    let machine = machine.split('+').next().unwrap_or(machine);
    let name = |name: &str| match name {
        "pc-q35" => "q35",
        "pc-i440fx" => "pc",
        _ => "",
    };
    let Some((before, version)) = machine.rsplit_once('-') else {
        return (machine, None);
    };
    // Machine types of RHEL have versions of their own, as `rhel9.4.0`.
    if let Some(rhel) = version.strip_prefix("rhel") {
        let qemu = rhel.parse().ok().map(rhel_machine);
        return match name(before) {
            "" => (before, qemu),
            short => (short, qemu),
        };
    }
    match version.parse::<Version>() {
        Ok(version) => match name(before) {
            "" => (before, Some(version)),
            short => (short, Some(version)),
        },
        Err(()) => (machine, None),
    }
}

/// The upstream machine type whose defaults a machine type of RHEL has (qemu-kvm, `hw_compat_rhel_8_3` and the like): up
/// to 8.3 disks have one queue, as upstream up to 5.1; up to 8.2 queues have 128 descriptors, as up to 4.2; up to 8.0
/// virtio-blk does not discard, as up to 3.1.
fn rhel_machine(rhel: Version) -> Version {
    match rhel {
        Version(..=7, ..) => Version(2, 12, 0),
        Version(8, 0, _) => Version(3, 1, 0),
        Version(8, 1, _) => Version(4, 1, 0),
        Version(8, 2, _) => Version(4, 2, 0),
        Version(8, 3, _) => Version(5, 1, 0),
        Version(8, 4, _) => Version(5, 2, 0),
        Version(8, 5, _) => Version(6, 0, 0),
        Version(8, ..) | Version(9, 0 | 1, _) => Version(6, 2, 0),
        Version(9, 2 | 3, _) => Version(7, 2, 0),
        Version(9, 4 | 5, _) => Version(8, 1, 0),
        // 9.6, 10.0 and what comes after them.
        _ => Version(9, 1, 0),
    }
}

/// Reads every command of a text that starts QEMU.
///
/// # Errors
/// There is none, or an option is broken.
pub fn read(
    text: &str,
    name: &str,
    surroundings: &Surroundings,
    reading: &mut Reading,
) -> Result<(), Mistake> {
    let (commands, comments) = words::commands(text, 0);
    for (text, span) in comments {
        reading.comment(&text, span);
    }
    let several = commands.len() > 1;
    for (i, command) in commands.iter().enumerate() {
        let line = line(command, surroundings, reading, true)?;
        let mut vm = machine(command, &line, reading);
        if vm.name.is_empty() {
            vm.name = match several {
                true => format!("{name}#{}", i + 1),
                false => name.to_owned(),
            };
        }
        reading.vms.push(vm);
    }
    Ok(())
}

/// The options of a command, with those of the files that it names.
fn line(
    command: &Command,
    surroundings: &Surroundings,
    reading: &mut Reading,
    tell: bool,
) -> Result<Line, Mistake> {
    let mut line = Line::default();
    let mut words: std::collections::VecDeque<Word> = command.arguments.iter().cloned().collect();
    // A file that names itself would come again and again.
    let mut files: Vec<&str> = Vec::new();
    while let Some(word) = words.pop_front() {
        if let Some(file) = word.text.strip_prefix('@') {
            let source = named(surroundings, file);
            let problem = match source {
                None => "could not be read",
                Some(source) if files.contains(&source.name.as_str()) => {
                    "was read before, and is not read again"
                }
                Some(_) if files.len() == FILES_MAX => "is one too many, and passed over",
                Some(_) => "",
            };
            let Some(source) = source.filter(|_| problem.is_empty()) else {
                let note = format!("the file '{file}' of arguments {problem}");
                reading.note(word.outer, note);
                continue;
            };
            files.push(&source.name);
            let place = place(reading, source);
            let text = format!("qemu-system-any {}", source.text.replace('\n', " "));
            // Lines are no commands there. The places of its words are moved by what was set before them.
            let (mut commands, _) = words::commands(&text, place);
            let shift = (text.len() - source.text.len()) as u32;
            for word in commands
                .drain(..)
                .flat_map(|command| command.arguments)
                .rev()
            {
                words.push_front(word.moved(shift));
            }
            continue;
        }
        let Some(option) = word
            .text
            .strip_prefix('-')
            .filter(|option| !option.is_empty())
        else {
            // QEMU takes a word alone for its first hard disk.
            let mut opt = options::read("hda", &word, word.outer, "file")?;
            opt.whole = word.outer;
            line.options.push(opt);
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option).to_owned();
        if FLAGS.contains(&option.as_str()) {
            let nothing = Word::plain("", 0, 0);
            let flag = options::read(&option, &nothing, word.outer, "")?;
            line.options.push(flag);
            continue;
        }
        let Some(value) = words.pop_front() else {
            reading.note(word.outer, format!("-{option} has no value"));
            continue;
        };
        let whole = Span {
            end: value.outer.end,
            ..word.outer
        };
        let first = match option.as_str() {
            "drive" => "file",
            "blockdev" | "device" => "driver",
            "object" => "qom-type",
            "machine" | "M" => "type",
            "smp" => "cpus",
            "m" => "size",
            "accel" => "accel",
            "cpu" => "model",
            "chardev" => "backend",
            "readconfig" | "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "sd" => "file",
            other => {
                if tell && !PASSED.contains(&other) {
                    reading.note(
                        word.outer,
                        format!("-{other} is not known here, and passed over"),
                    );
                }
                if !matches!(other, "mem-path" | "name" | "set" | "global") {
                    continue;
                }
                "value"
            }
        };
        if option == "readconfig" {
            match named(surroundings, &value.text) {
                Some(source) => {
                    let place = place(reading, source);
                    line.options.extend(options::sections(&source.text, place));
                }
                None => reading.note(value.outer, format!("'{}' could not be read", value.text)),
            }
            continue;
        }
        let option = if option == "M" {
            "machine".into()
        } else {
            option
        };
        let opt = options::read(&option, &value, whole, first)?;
        if opt.expanded && matches!(option.as_str(), "drive" | "blockdev" | "device") {
            reading.note(
                value.outer,
                "what a variable of the shell stands for is not known",
            );
        }
        line.options.push(opt);
    }
    line.apply_sets();
    Ok(line)
}

fn named<'a>(surroundings: &'a Surroundings, name: &str) -> Option<&'a Source> {
    surroundings.files.iter().find(|source| source.name == name)
}

/// The number of a text among those of the input.
fn place(reading: &mut Reading, source: &Source) -> u16 {
    let known = reading
        .more
        .iter()
        .position(|more| more.name == source.name);
    let place = known.unwrap_or_else(|| {
        reading.more.push(source.clone());
        reading.more.len() - 1
    });
    place as u16 + 1
}

impl Line {
    /// `-set GROUP.ID.KEY=VALUE` is one more pair of the option that it names; what is named nowhere stays.
    fn apply_sets(&mut self) {
        let (sets, mut options): (Vec<_>, Vec<_>) = std::mem::take(&mut self.options)
            .into_iter()
            .partition(|option| option.group == "set");
        for set in sets {
            let named = set_pair(&set).and_then(|(group, id, pair)| {
                let named = |option: &&mut Opt| {
                    option.group == group
                        && option.value("id") == Some(id)
                        && option.syntax == options::Syntax::Pairs
                };
                Some((options.iter_mut().find(named)?, pair))
            });
            match named {
                Some((option, pair)) => option.pairs.push(pair),
                None => options.push(set),
            }
        }
        self.options = options;
    }

    fn group<'a>(&'a self, group: &str) -> impl DoubleEndedIterator<Item = &'a Opt> + use<'a> {
        let group = group.to_owned();
        self.options
            .iter()
            .filter(move |option| option.group == group)
    }

    fn last(&self, group: &str, key: &str) -> Option<&options::Pair> {
        self.group(group).rev().find_map(|option| option.get(key))
    }

    /// The -object of that id.
    fn object(&self, id: &str) -> Option<&Opt> {
        self.group("object")
            .find(|object| object.value("id") == Some(id))
    }
}

fn machine(command: &Command, line: &Line, reading: &mut Reading) -> Vm {
    let mut vm = Vm {
        span: command.span(),
        ..Vm::default()
    };
    if let Some(name) = line
        .last("name", "value")
        .or_else(|| line.last("name", "guest"))
    {
        vm.name = name.value.clone();
    }
    let program = command.program.text.rsplit('/').next().unwrap_or_default();
    let table = &mut vm.table;
    table.give("vm.front-end", "qemu", command.program.outer);
    if program.ends_with("x86_64") || program.ends_with("kvm") || program.ends_with("i386") {
        table.default_to("vm.machine", "pc", "QEMU");
    }
    if program.ends_with("kvm") {
        table.default_to(
            "vm.accel",
            "kvm",
            "QEMU, if its program's name ends with kvm",
        );
    } else {
        table.default_to("vm.accel", "tcg", "QEMU without -accel");
    }
    table.default_to("vm.balloon", "no", "QEMU");
    environment(command, &mut vm);
    say(line, &mut vm, reading);
    vm
}

/// What options say of a machine, of which something may be known before.
fn say(line: &Line, vm: &mut Vm, reading: &mut Reading) {
    if let Some(pair) = line.last("machine", "type") {
        let (name, version) = machine_version(&pair.value);
        vm.table
            .give("vm.machine", name.to_owned(), pair.value_span);
        vm.table.remove("vm.machine-version");
        if let Some(version) = version {
            vm.table
                .give("vm.machine-version", version, pair.value_span);
        }
    }
    accelerator(line, vm);
    vcpus(line, vm, reading);
    memory(line, vm, reading);
    if let Some(model) = line.group("cpu").next_back() {
        for pair in &model.pairs {
            let off = pair.value == "off" || pair.key.starts_with('-');
            let name = pair.key.trim_start_matches(['-', '+']).replace('_', "-");
            match name.as_str() {
                "x2apic" if off => vm.table.give("vm.cpu-x2apic", "off", pair.span),
                "kvm-pv-eoi" if off => vm.table.give("vm.cpu-pv-eoi", "off", pair.span),
                name if name.starts_with("hv-") => vm.table.give("vm.os", "windows", pair.span),
                _ => {}
            }
        }
    }
    for object in line
        .group("object")
        .filter(|object| object.value("qom-type") == Some("iothread"))
    {
        if let Some(id) = object.get("id") {
            vm.threads.push(Thread {
                id: id.value.clone(),
                span: id.value_span,
            });
        }
        if let Some(poll) = object.get("poll-max-ns") {
            let setting = if poll.value == "0" { "off" } else { "set" };
            vm.table.give("vm.thread-poll", setting, poll.value_span);
        }
    }
    let is = |opt: &&Opt, names: &[&str]| {
        opt.value("driver")
            .is_some_and(|driver| names.iter().any(|name| driver.starts_with(name)))
    };
    if let Some(device) = line
        .group("device")
        .find(|device| is(device, &["virtio-balloon"]))
    {
        vm.table.give("vm.balloon", true, device.span);
    }
    if let Some(device) = line
        .group("device")
        .find(|device| is(device, &["vfio-pci"]))
    {
        vm.table.give("vm.pass-through", true, device.span);
    }
    let graph = graph::Graph::new(line);
    devices::disks(line, &graph, vm, reading);
    for set in line.group("set") {
        let disk = set_pair(set).and_then(|(group, id, pair)| {
            let known = |disk: &&mut Disk| disk.name == id && group == "device";
            Some((vm.disks.iter_mut().find(known)?, pair))
        });
        match disk {
            Some((disk, pair)) => devices::set(disk, &pair),
            None => reading.note(set.whole, "-set names nothing that is known here"),
        }
    }
}

/// The command that options in another front-end's configuration are part of; their places are those in its text.
fn fragment(options: &str, start: usize) -> Option<Command> {
    let program = "kvm ";
    let text = " ".repeat(start.saturating_sub(program.len())) + program + options;
    words::commands(&text, 0).0.into_iter().next()
}

/// Adds what options say that Proxmox hands to QEMU as they are (`args:`); they start at the byte `start` of its text.
///
/// # Errors
/// An option is broken.
pub fn add_options(
    options: &str,
    start: usize,
    vm: &mut Vm,
    surroundings: &Surroundings,
    reading: &mut Reading,
) -> Result<(), Mistake> {
    let Some(command) = fragment(options, start) else {
        return Ok(());
    };
    let line = line(&command, surroundings, reading, true)?;
    say(&line, vm, reading);
    Ok(())
}

fn accelerator(line: &Line, vm: &mut Vm) {
    let word = |name: &str| match name {
        "kvm" => "kvm",
        "tcg" => "tcg",
        "xen" => "xen",
        "hvf" => "hvf",
        _ => "other",
    };
    let given = line
        .group("accel")
        .next()
        .and_then(|option| option.get("accel"));
    if let Some(pair) = given.or_else(|| line.last("machine", "accel")) {
        let first = pair.value.split(':').next().unwrap_or_default();
        vm.table.give("vm.accel", word(first), pair.value_span);
    } else if let Some(option) = line.group("enable-kvm").next() {
        vm.table.give("vm.accel", "kvm", option.whole);
    }
}

fn vcpus(line: &Line, vm: &mut Vm, reading: &mut Reading) {
    let Some(smp) = line.group("smp").next_back() else {
        return;
    };
    // QEMU makes queues for as many CPUs as there may be at the start.
    let product = ["sockets", "dies", "cores", "threads"]
        .iter()
        .filter_map(|key| smp.number(key))
        .try_fold(1u64, u64::checked_mul);
    let count = smp.number("cpus").or(product).or(smp.number("maxcpus"));
    match count {
        Some(count) if count > 0 => {
            let span = smp.get("cpus").map_or(smp.span, |pair| pair.value_span);
            vm.table.give("vm.vcpus", count, span);
        }
        _ => reading.note(smp.span, "the number of vCPUs is not one"),
    }
}

/// Bytes of a size as QEMU takes it; without a unit, of `default`.
fn size(text: &str, default: u64) -> Option<u64> {
    let (number, factor) = match text.char_indices().next_back()? {
        (at, 'b' | 'B') => (&text[..at], 1),
        (at, 'k' | 'K') => (&text[..at], 1 << 10),
        (at, 'm' | 'M') => (&text[..at], 1 << 20),
        (at, 'g' | 'G') => (&text[..at], 1 << 30),
        (at, 't' | 'T') => (&text[..at], 1 << 40),
        _ => (text, default),
    };
    match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor),
        // As in 1.5G.
        Err(_) => {
            let number: f64 = number.parse().ok()?;
            let bytes = number * factor as f64;
            (bytes.is_finite() && (0.0..1e18).contains(&bytes)).then_some(bytes as u64)
        }
    }
}

fn memory(line: &Line, vm: &mut Vm, reading: &mut Reading) {
    if let Some(pair) = line.last("m", "size") {
        match size(&pair.value, 1 << 20) {
            Some(bytes) => vm.table.give("vm.memory", bytes, pair.value_span),
            None => reading.note(pair.value_span, "the amount of memory is not one"),
        }
    }
    let mut shared: Option<(bool, Span)> = None;
    let backend = line.last("machine", "memory-backend");
    let mut used: Vec<&Opt> = backend
        .and_then(|pair| line.object(&pair.value))
        .into_iter()
        .collect();
    let nodes = line
        .group("numa")
        .filter_map(|numa| line.object(numa.value("memdev")?));
    used.extend(nodes);
    for object in used {
        let kind = object
            .get("qom-type")
            .map_or("", |pair| pair.value.as_str());
        // memfd is shared by default (QEMU, memory-backend-memfd).
        let share = match object.get("share") {
            Some(pair) => (pair.value == "on", pair.value_span),
            None => (kind == "memory-backend-memfd", object.span),
        };
        shared = Some(match shared {
            Some((before, span)) => (before && share.0, span),
            None => share,
        });
        if object.value("hugetlb") == Some("on")
            || object
                .value("mem-path")
                .is_some_and(|path| path.contains("huge"))
        {
            vm.table.give("vm.hugepages", true, object.span);
        }
        if object.get("host-nodes").is_some() || object.get("host-nodes.0").is_some() {
            vm.table.give("vm.numa-bound", true, object.span);
        }
    }
    if let Some((shared, span)) = shared {
        vm.table.give("vm.memory-shared", shared, span);
    }
    if let Some(pair) = line.last("mem-path", "value")
        && pair.value.contains("huge")
    {
        vm.table.give("vm.hugepages", true, pair.value_span);
    }
    vm.table.default_to("vm.numa-bound", false, "QEMU");
}

/// What the environment says of QEMU's allocator and libraries.
fn environment(command: &Command, vm: &mut Vm) {
    let set = |name| {
        command
            .variables
            .iter()
            .rev()
            .find(move |(known, _)| known == name)
    };
    let preload = set("LD_PRELOAD").map(|(_, word)| word);
    match preload {
        Some(word) if word.text.contains("tcmalloc") => {
            vm.table.give("vm.malloc", "tcmalloc", word.outer)
        }
        Some(word) if word.text.contains("jemalloc") => {
            vm.table.give("vm.malloc", "jemalloc", word.outer)
        }
        Some(word) => vm.table.give("vm.malloc", "other", word.outer),
        None => vm.table.default_to(
            "vm.malloc",
            "glibc",
            "the C library, without LD_PRELOAD on this command line",
        ),
    }
    let loose = command
        .not_exported
        .iter()
        .find(|(name, _)| name == "LD_LIBRARY_PATH");
    match (set("LD_LIBRARY_PATH"), loose) {
        (Some((_, word)), _) => vm.table.give("vm.library-path", "set", word.outer),
        (None, Some((_, word))) => vm.table.give("vm.library-path", "inert", word.outer),
        _ => vm
            .table
            .default_to("vm.library-path", "none", "this command line"),
    }
}

/// Bytes of a size as QEMU writes it, `4M`.
pub fn size_of(text: &str) -> Option<u64> {
    size(text, 1)
}
