//! The options of a command line and of the files that it includes.

use std::collections::{HashMap, VecDeque};

use super::options::{self, Opt, Syntax};
use super::script;
use super::word::{Command, Word};
use crate::input::{Mistake, Reading, Surroundings};
use crate::text::{Source, Span};
use crate::work;

/// Options without a value.
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
    "no-kvm",
    "async-teardown",
    "audio-help",
    "curses",
    "enable-sync-profile",
    "jitdump",
    "no-frame",
    "nodefconfig",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "perfmap",
    "sdl",
    "show-cursor",
    "xen-attach",
    "xen-domid-restrict",
];

/// Options with a value that do not affect disks. Other unknown options get a note.
const PASSED: &[&str] = &[
    "uuid",
    "rtc",
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
    "balloon",
    "bt",
    "clock",
    "dfilter",
    "hdachs",
    "qtest",
    "qtest-log",
    "rotate",
    "shim",
    "tb-size",
    "writeconfig",
];

/// SCSI controllers on a PCI bus that virtio-scsi can replace.
pub const EMULATED_SCSI: &[&str] = &["lsi", "megasas", "mptsas", "pvscsi", "am53c974", "dc390"];

/// A parsed command line.
#[derive(Default)]
pub struct Line {
    /// In the order of the command line
    options: Vec<Opt>,
    /// Whether a shell variable may contain more options
    pub may_have_more: bool,
    /// Whether it names a kernel, which boots whatever the disks are
    pub has_kernel: bool,
    /// Whether it names a firmware
    pub has_firmware: bool,
    index: Index,
}

/// Indexes of options, which avoid a search of a long command line for each device.
#[derive(Default)]
struct Index {
    groups: HashMap<String, Vec<usize>>,
    /// The first option of each group and id.
    ids: HashMap<String, HashMap<String, usize>>,
    /// The first SCSI controller.
    scsi: Option<usize>,
    /// The number of devices that may be SCSI controllers
    scsi_count: usize,
    /// The number of IDE or SATA controllers in addition to that of the machine
    ata_count: usize,
    /// Whether the controller of some SCSI disk is unclear
    is_scsi_unclear: bool,
}

impl Index {
    fn new(options: &[Opt]) -> Self {
        let mut index = Self::default();
        for (at, option) in options.iter().enumerate() {
            if option.group == "device" {
                if is_scsi_controller(option) {
                    index.scsi.get_or_insert(at);
                }
                index.scsi_count += usize::from(may_be_scsi_controller(option));
                index.ata_count += usize::from(is_ata_controller(option));
            }
            if let Some(id) = option.value("id") {
                let ids = index.ids.entry(option.group.clone()).or_default();
                ids.entry(id.to_owned()).or_insert(at);
            }
            match index.groups.get_mut(&option.group) {
                Some(group) => group.push(at),
                None => drop(index.groups.insert(option.group.clone(), vec![at])),
            }
        }
        index
    }

    fn find(&self, group: &str, id: &str) -> Option<usize> {
        self.ids.get(group)?.get(id).copied()
    }
}

/// `bus=scsi0.0` is of the controller `scsi0`.
pub fn scsi_bus(device: &Opt) -> Option<&str> {
    device
        .value("bus")
        .map(|bus| bus.split('.').next().unwrap_or(bus))
}

fn is_scsi_controller(device: &Opt) -> bool {
    let driver = device.value("driver").unwrap_or_default();
    driver.starts_with("virtio-scsi") || EMULATED_SCSI.iter().any(|name| driver.starts_with(name))
}

/// Whether a device may have a bus for SCSI disks. USB storage has a separate one.
fn may_be_scsi_controller(device: &Opt) -> bool {
    const OTHER: &[&str] = &["esp", "usb-bot", "usb-storage", "usb-uas"];
    let driver = device.value("driver").unwrap_or_default();
    is_scsi_controller(device)
        || device.has_unknown_driver()
        || OTHER.contains(&driver)
        || driver.contains("scsi") && !driver.starts_with("scsi-")
}

fn is_ata_controller(device: &Opt) -> bool {
    let driver = device.value("driver").unwrap_or_default();
    driver.contains("ahci") || driver.contains("-ide") || driver == "sii3112"
}

/// The group, the id and the pair of `-set GROUP.ID.KEY=VALUE`.
pub fn set_pair(set: &Opt) -> Option<(&str, &str, options::Pair)> {
    let first = set.pairs.first()?;
    let mut parts = first.key.splitn(3, '.');
    let (group, id, key) = (parts.next()?, parts.next()?, parts.next()?);
    let pair = options::Pair {
        key: key.to_owned(),
        value: first.value.clone(),
        // Removing it removes the whole option.
        span: set.whole,
        value_span: first.value_span,
        unknown: first.unknown,
    };
    Some((group, id, pair))
}

/// The maximum number of arguments files of a command line.
pub const FILES_MAX: usize = 16;

/// Parses a command and the files that it includes. `tell` adds notes about unknown options.
pub fn line(
    command: &Command,
    surroundings: &Surroundings,
    reading: &mut Reading,
    tell: bool,
) -> Result<Line, Mistake> {
    let mut parser = Parser {
        command,
        surroundings,
        reading,
        tell,
        line: Line::default(),
        words: command.arguments.iter().cloned().collect(),
        files: Vec::new(),
        after_unknown: false,
    };
    while let Some(word) = parser.words.pop_front() {
        parser.word(&word)?;
    }
    parser.line.finish();
    Ok(parser.line)
}

/// Reads the words of a command one after the other.
struct Parser<'a> {
    command: &'a Command,
    surroundings: &'a Surroundings,
    reading: &'a mut Reading,
    /// Whether to add notes about unknown options
    tell: bool,
    line: Line,
    /// The words that are left
    words: VecDeque<Word>,
    /// The names of the arguments files that were read
    files: Vec<&'a str>,
    /// Whether the word before may be an option that takes a value
    after_unknown: bool,
}

impl Parser<'_> {
    fn word(&mut self, word: &Word) -> Result<(), Mistake> {
        let may_be_value = std::mem::take(&mut self.after_unknown);
        if let Some(name) = word.text.strip_prefix('@') {
            self.arguments_file(name, word);
            return Ok(());
        }
        let is_option = word.text.starts_with('-') && word.text.len() > 1;
        if !word.knows(0, 1) || is_option && !word.unknown.is_empty() {
            let note = format!(
                "'{}' contains a shell variable, and may be any options",
                word.text
            );
            self.reading.note(word.outer, note);
            self.line.may_have_more = true;
            self.after_unknown = true;
        } else if is_option {
            self.option(word)?;
        } else if may_be_value {
            let note = format!(
                "'{}' may belong to the option before it, and is skipped",
                word.text
            );
            self.reading.note(word.outer, note);
        } else {
            // QEMU takes a word without an option as the first hard disk.
            let disk = options::name("hda", word, word.outer, "file");
            self.line.options.push(disk);
        }
        Ok(())
    }

    /// Reads an arguments file (`@file`): its words come next.
    fn arguments_file(&mut self, name: &str, word: &Word) {
        let source = named(self.surroundings, name);
        match source.map(|source| check_arguments_file(source, &self.files)) {
            Some(Ok(source)) => {
                self.files.push(&source.name);
                let index = index_of(self.reading, source);
                let arguments = script::arguments(&source.text, index).words;
                for word in arguments.into_iter().rev() {
                    self.words.push_front(word);
                }
            }
            refused => {
                self.line.may_have_more |= refused.is_none();
                let problem = refused.and_then(Result::err).unwrap_or("could not be read");
                let note = format!("the arguments file '{name}' {problem}");
                self.reading.note(word.outer, note);
            }
        }
    }

    /// Reads an option, and the next word as its value if it takes one.
    fn option(&mut self, word: &Word) -> Result<(), Mistake> {
        let option = word.text.trim_start_matches('-');
        if FLAGS.contains(&option) {
            let nothing = Word::plain("", 0, 0);
            let flag = options::read(option, &nothing, word.outer, "")?;
            self.line.options.push(flag);
            return Ok(());
        }
        let first = first_key(option);
        if first.is_none() && !PASSED.contains(&option) {
            if self.tell {
                let note = format!("unknown option -{option}, skipped");
                self.reading.note(word.outer, note);
            }
            // It is unknown whether the option has a value; skip the next word unless it is an option.
            self.words
                .pop_front_if(|next| !next.text.starts_with('-') || next.text.len() == 1);
            return Ok(());
        }
        let Some(value) = self.words.pop_front() else {
            let note = format!("-{option} has no value");
            self.reading.note(word.outer, note);
            return Ok(());
        };
        self.line.has_kernel |= option == "kernel";
        self.line.has_firmware |= matches!(option, "bios" | "pflash");
        match first {
            Some(_) if option == "readconfig" => {
                self.line
                    .read_config(&value, self.surroundings, self.reading);
                Ok(())
            }
            Some(first) => self.option_with_value(word, option, &value, first),
            None => Ok(()),
        }
    }

    fn option_with_value(
        &mut self,
        word: &Word,
        option: &str,
        value: &Word,
        first: &str,
    ) -> Result<(), Mistake> {
        let whole = Span {
            end: value.outer.end,
            ..word.outer
        };
        let option = if option == "M" { "machine" } else { option };
        let is_name = matches!(
            option,
            "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "sd" | "mem-path"
        );
        let mut opt = if is_name {
            options::name(option, value, whole, first)
        } else {
            options::read(option, value, whole, first)?
        };
        // Removing the option would remove a redirection between it and its value.
        opt.may_have_more |= self.command.redirections.iter().any(|redirection| {
            redirection.source == whole.source
                && whole.start <= redirection.start
                && redirection.end <= whole.end
        });
        if opt.is_unknown() && matches!(option, "drive" | "blockdev" | "device") {
            self.reading.note(
                value.outer,
                "the option contains a shell variable, whose value is unknown",
            );
        }
        self.line.has_firmware |= opt.value("if") == Some("pflash") || opt.get("pflash0").is_some();
        self.line.options.push(opt);
        Ok(())
    }
}

/// Checks that an arguments file may be read: a file that names itself would otherwise never end.
fn check_arguments_file<'a>(
    source: &'a Source,
    files: &[&str],
) -> Result<&'a Source, &'static str> {
    if files.contains(&source.name.as_str()) {
        return Err("was already read, and is skipped");
    }
    if files.len() == FILES_MAX {
        return Err("exceeds the maximum number of files, and is skipped");
    }
    Ok(source)
}

/// The key that the first part of an option's value may omit; none for options that are not read.
fn first_key(option: &str) -> Option<&'static str> {
    Some(match option {
        "drive" | "readconfig" | "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "sd" => "file",
        "blockdev" | "device" => "driver",
        "object" => "qom-type",
        "machine" | "M" | "numa" => "type",
        "smp" => "cpus",
        "m" => "size",
        "accel" => "accel",
        "cpu" => "model",
        "chardev" => "backend",
        "boot" => "order",
        "mem-path" | "name" | "set" | "global" => "value",
        _ => return None,
    })
}

fn named<'a>(surroundings: &'a Surroundings, name: &str) -> Option<&'a Source> {
    surroundings.files.iter().find(|source| source.name == name)
}

/// The index of a text in the input's texts.
fn index_of(reading: &mut Reading, source: &Source) -> u16 {
    let known = reading
        .more
        .iter()
        .position(|more| more.name == source.name);
    let index = known.unwrap_or_else(|| {
        reading.more.push(source.clone());
        reading.more.len() - 1
    });
    index as u16 + 1
}

impl Line {
    /// Adds the sections of a `-readconfig` file.
    fn read_config(&mut self, value: &Word, surroundings: &Surroundings, reading: &mut Reading) {
        if let Some(source) = named(surroundings, &value.text) {
            let index = index_of(reading, source);
            self.options.extend(options::sections(&source.text, index));
        } else {
            self.may_have_more = true;
            reading.note(value.outer, format!("'{}' could not be read", value.text));
        }
    }

    /// Applies `-set` and builds the index, after all options have been read.
    fn finish(&mut self) {
        self.apply_sets();
        self.index = Index::new(&self.options);
        let is_unclear = |device: &Opt| {
            let driver = device.value("driver").unwrap_or_default();
            driver.starts_with("scsi-") && self.scsi_controller(device).is_none()
        };
        let is_scsi_unclear = self.group("device").any(is_unclear);
        self.index.is_scsi_unclear = is_scsi_unclear;
    }

    /// Adds each `-set GROUP.ID.KEY=VALUE` to the option that it names, and keeps those that name none. If its key is a shell
    /// variable, it may change any option with an id.
    fn apply_sets(&mut self) {
        let (sets, mut options): (Vec<_>, Vec<_>) = std::mem::take(&mut self.options)
            .into_iter()
            .partition(|option| option.group == "set");
        let index = if sets.is_empty() {
            Index::default()
        } else {
            Index::new(&options)
        };
        let any = sets.iter().any(|set| set.may_have_more);
        self.may_have_more |= any;
        for option in &mut options {
            let is_settable = matches!(option.syntax, Syntax::Pairs | Syntax::Section);
            option.may_have_more |= any && is_settable && option.get("id").is_some();
        }
        for set in sets {
            let named = set_pair(&set).and_then(|(group, id, pair)| {
                Some((options.get_mut(index.find(group, id)?)?, pair))
            });
            match named {
                Some((option, pair)) if option.syntax == Syntax::Pairs && !set.may_have_more => {
                    option.pairs.push(pair);
                }
                Some((option, _)) => {
                    option.may_have_more |= option.syntax == Syntax::Section;
                    options.push(set);
                }
                None => options.push(set),
            }
        }
        self.options = options;
    }

    /// All options in the order of the command line.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Opt> + ExactSizeIterator + Clone {
        self.options.iter().inspect(|_| work::step())
    }

    /// The option at an index.
    pub fn at(&self, number: usize) -> &Opt {
        &self.options[number]
    }

    /// The options of a group in the order of the command line.
    pub fn group<'a>(&'a self, group: &str) -> impl DoubleEndedIterator<Item = &'a Opt> + use<'a> {
        let numbers = self.index.groups.get(group).map_or(&[][..], Vec::as_slice);
        let numbers = numbers.iter().inspect(|_| work::step());
        numbers.map(|at| &self.options[*at])
    }

    pub fn last(&self, group: &str, key: &str) -> Option<&options::Pair> {
        self.group(group).rev().find_map(|option| option.get(key))
    }

    /// The first option with this group and id.
    pub fn find(&self, group: &str, id: &str) -> Option<&Opt> {
        Some(self.at(self.index.find(group, id)?))
    }

    /// The controller of a SCSI disk, unless it is unclear.
    ///
    /// QEMU puts a disk without a bus on the last controller before it, and numbers the buses of controllers without an id.
    /// This is clear only if there is one controller.
    pub fn scsi_controller(&self, disk: &Opt) -> Option<&Opt> {
        let named = match scsi_bus(disk) {
            Some(id) if id != "scsi" => self.find("device", id)?,
            _ if self.index.scsi_count == 1 => self.at(self.index.scsi?),
            _ => return None,
        };
        is_scsi_controller(named).then_some(named)
    }

    /// Whether the controller of some SCSI disk is unclear.
    pub fn is_scsi_unclear(&self) -> bool {
        self.index.is_scsi_unclear
    }

    /// Whether the controller of an IDE or SATA disk is clear. If there are controllers in addition to the machine's, the
    /// disk must name one by its id.
    pub fn is_ata_clear(&self, disk: &Opt) -> bool {
        let is_disk = disk.group == "device"
            && disk
                .value("driver")
                .is_some_and(|driver| driver.starts_with("ide-"));
        let has_id = disk
            .value("bus")
            .is_some_and(|bus| !bus.starts_with("ide."));
        !is_disk || has_id || self.index.ata_count == 0
    }
}
