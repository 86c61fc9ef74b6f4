//! QEMU's command line: `-drive`, `-blockdev` and `-device` in `key=value` and JSON syntax, `-object`, `-machine`,
//! `-readconfig` and arguments files (`@file`).

mod boot;
mod bus;
mod convert;
mod devices;
mod edit;
mod editor;
mod global;
mod graph;
mod json;
mod line;
mod options;
mod options_of_disks;
mod pairs;
mod script;
mod word;
mod words;

pub use convert::{from_ringdisk, to_ringdisk};
pub use edit::edits;
pub use editor::ParsedCommand;
pub use options::Pair;
pub use options_of_disks::{Options, options_in, options_of_disks};
pub use words::{shell, variable_program};

use crate::input::{Mistake, Reading, Surroundings};
use crate::model::{Disk, Table, Thread, Vm};
use crate::text::Span;
use crate::version::Version;
use line::{FILES_MAX, Line, line, set_pair};
use options::Opt;
use word::Command;

/// The files that a text includes: `-readconfig FILE` and `@FILE`.
pub fn files_named(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for command in words::commands(text, 0).commands {
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

/// Whether a text contains a command that starts QEMU.
pub fn has_command(text: &str) -> bool {
    !words::commands(text, 0).commands.is_empty()
}

/// Sets the properties that a machine type gives.
pub fn describe_machine(machine: &str, at: Span, table: &mut Table) {
    let (name, version) = machine_version(machine);
    table.give("vm.machine", name.to_owned(), at);
    table.remove("vm.machine-version");
    if let Some(version) = version {
        table.give("vm.machine-version", version, at);
    }
    let digits = machine.split('+').next().unwrap_or(machine);
    let digits = digits.rsplit('-').next().unwrap_or(digits);
    let is_numbered = version.is_some()
        && digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || c == '.');
    table.give("vm.machine-numbered", is_numbered, at);
    if machine.contains("rhel") {
        table.give("vm.rhel", true, at);
    }
}

/// Whether a path is that of Red Hat's QEMU.
pub fn is_red_hats(program: &str) -> bool {
    program == "/usr/libexec/qemu-kvm"
}

/// The machine type without its version, and the version: `pc-q35-8.2`, `pc-i440fx-rhel7.6.0`, `pc-q35-focal`, `q35`.
pub fn machine_version(machine: &str) -> (&str, Option<Version>) {
    let machine = machine.split('+').next().unwrap_or(machine);
    // Ubuntu's variants for guests with much memory or many CPUs, its first variant of upstream's `pc-1.0`, and POWER's
    // variants with mitigations of Spectre.
    let machine = ["-maxcpus", "-hpb", "-precise", "-sxxm"]
        .into_iter()
        .fold(machine, |name, end| name.strip_suffix(end).unwrap_or(name));
    let name = |name: &str| match name {
        "pc-q35" => "q35",
        "pc-i440fx" => "pc",
        _ => "",
    };
    // `rhel6.6.0` is a variant of `pc`.
    if let Some(Ok(rhel)) = machine.strip_prefix("rhel").map(str::parse) {
        return ("pc", Some(rhel_machine(rhel)));
    }
    let Some((before, version)) = machine.rsplit_once('-') else {
        return (machine, None);
    };
    // RHEL has its own machine types, such as `rhel9.4.0`.
    if let Some(rhel) = version.strip_prefix("rhel") {
        let qemu = rhel.parse().ok().map(rhel_machine);
        return match name(before) {
            "" => (before, qemu),
            short => (short, qemu),
        };
    }
    match version.parse().ok().or_else(|| ubuntu_machine(version)) {
        Some(version) => match name(before) {
            "" => (before, Some(version)),
            short => (short, Some(version)),
        },
        // Another distribution's machine type.
        None => match machine {
            _ if machine.starts_with("pc-q35-") => ("q35", None),
            _ if machine.starts_with("pc-i440fx-") => ("pc", None),
            _ if machine.starts_with("pseries-") => ("pseries", None),
            _ => (machine, None),
        },
    }
}

/// The upstream machine type with the defaults of a RHEL machine type (qemu-kvm, `hw_compat_rhel_8_3` and so on): up to 8.3,
/// disks have one queue, as upstream up to 5.1; up to 8.2, queues have 128 descriptors, as up to 4.2; up to 8.0, virtio-blk
/// does not discard, as up to 3.1.
fn rhel_machine(rhel: Version) -> Version {
    match rhel {
        Version(..=6, ..) => Version(0, 12, 0),
        Version(7, ..) => Version(2, 12, 0),
        Version(8, 0, _) => Version(3, 1, 0),
        Version(8, 1, _) => Version(4, 1, 0),
        Version(8, 2, _) => Version(4, 2, 0),
        Version(8, 3, _) => Version(5, 1, 0),
        Version(8, 4, _) => Version(5, 2, 0),
        Version(8, 5, _) => Version(6, 0, 0),
        Version(8, ..) | Version(9, 0 | 1, _) => Version(6, 2, 0),
        Version(9, 2 | 3, _) => Version(7, 2, 0),
        Version(9, 4 | 5, _) => Version(8, 1, 0),
        // 9.6, 10.0 and later.
        _ => Version(9, 1, 0),
    }
}

/// The upstream machine type of an Ubuntu release: that of its QEMU (Ubuntu's `define-ubuntu-machine-types.patch`).
fn ubuntu_machine(release: &str) -> Option<Version> {
    Some(match release {
        "trusty" => Version(2, 0, 0),
        "utopic" => Version(2, 1, 0),
        "vivid" => Version(2, 2, 0),
        "wily" => Version(2, 3, 0),
        "xenial" => Version(2, 5, 0),
        "yakkety" => Version(2, 6, 0),
        "zesty" => Version(2, 8, 0),
        "artful" => Version(2, 10, 0),
        "bionic" => Version(2, 11, 0),
        "cosmic" => Version(2, 12, 0),
        "disco" => Version(3, 1, 0),
        "eoan" => Version(4, 0, 0),
        "focal" => Version(4, 2, 0),
        "groovy" => Version(5, 0, 0),
        "hirsute" => Version(5, 2, 0),
        "impish" => Version(6, 0, 0),
        "jammy" => Version(6, 2, 0),
        "kinetic" => Version(7, 0, 0),
        "lunar" => Version(7, 2, 0),
        "mantic" => Version(8, 0, 0),
        "noble" => Version(8, 2, 0),
        "oracular" => Version(9, 0, 0),
        "plucky" => Version(9, 2, 0),
        "questing" => Version(10, 1, 0),
        _ => return None,
    })
}

/// Reads every command of a text that starts QEMU.
///
/// # Errors
/// There is none, or an option is invalid.
pub fn read(
    text: &str,
    name: &str,
    surroundings: &Surroundings,
    reading: &mut Reading,
) -> Result<(), Mistake> {
    let words::Found {
        commands,
        comments,
        broken,
    } = words::commands(text, 0);
    if let Some((at, problem)) = broken {
        return Err(Mistake::new(at, problem));
    }
    for (text, span) in comments {
        reading.comment(&text, span);
    }
    let several = commands.len() > 1;
    for (i, command) in commands.iter().enumerate() {
        let line = line(command, surroundings, reading, true)?;
        let mut vm = machine(command, &line, reading);
        if vm.name.is_empty() {
            vm.name = if several {
                format!("{name}#{}", i + 1)
            } else {
                name.to_owned()
            };
        }
        reading.vms.push(vm);
    }
    Ok(())
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
    if is_red_hats(&command.program.text) {
        table.give("vm.rhel", true, command.program.outer);
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
    add_line(line, &mut vm, reading);
    vm
}

/// Adds the options of a VM.
fn add_line(line: &Line, vm: &mut Vm, reading: &mut Reading) {
    if let Some(pair) = line.last("machine", "type") {
        describe_machine(&pair.value, pair.value_span, &mut vm.table);
    }
    accelerator(line, vm);
    vcpus(line, vm, reading);
    memory(line, vm, reading);
    if let Some(model) = line.group("cpu").next_back() {
        if let Some(pair) = model.get("model") {
            vm.table
                .give("vm.cpu-model", pair.value.clone(), pair.value_span);
        }
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
                poll_max_ns: object.number("poll-max-ns"),
                others: thread_settings(object),
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
    vm.may_have_more |= line.may_have_more;
    hide(line, vm);
    // Controllers, balloons and objects also name I/O threads.
    let users = line.all().flat_map(|option| &option.pairs);
    let users = users.filter(|pair| pair.key == "iothread" || pair.key.ends_with(".iothread"));
    vm.threads_elsewhere
        .extend(users.clone().map(|pair| pair.value.clone()));
    let may_use_any = line.group("device").any(|device| device.may_have_more);
    if may_use_any || users.clone().any(|pair| pair.unknown) {
        let all = vm.threads.iter().map(|thread| thread.id.clone());
        vm.threads_elsewhere.extend(all);
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
            None if set.may_have_more => reading.note(
                set.whole,
                "-set contains a shell variable, and may change any option with an id",
            ),
            None => reading.note(set.whole, "-set names an unknown object"),
        }
    }
}

/// Marks properties as unknown if a shell variable sets them.
fn hide(line: &Line, vm: &mut Vm) {
    for option in line.all() {
        let is_unknown = |key: &str| {
            option.may_have_more
                || option
                    .pairs
                    .iter()
                    .any(|pair| pair.unknown && pair.key == key)
        };
        let any = option.is_unknown();
        let mut hide = |property: &'static str| vm.table.hide(property, graph::SHELL);
        match option.group.as_str() {
            "smp" if any => hide("vm.vcpus"),
            "m" if is_unknown("size") => hide("vm.memory"),
            "accel" if is_unknown("accel") => hide("vm.accel"),
            "numa" if is_unknown("memdev") => hide("vm.memory-shared"),
            "cpu" if any => {
                hide("vm.cpu-model");
                hide("vm.cpu-x2apic");
                hide("vm.cpu-pv-eoi");
            }
            "machine" => {
                for (key, properties) in [
                    ("type", &["vm.machine", "vm.machine-version"][..]),
                    ("accel", &["vm.accel"]),
                    ("memory-backend", &["vm.memory-shared"]),
                ] {
                    if is_unknown(key) {
                        properties.iter().for_each(|property| hide(property));
                    }
                }
            }
            "object" => {
                if is_unknown("share") {
                    hide("vm.memory-shared");
                }
                vm.may_have_more |= is_unknown("id") || is_unknown("qom-type");
            }
            _ => {}
        }
    }
}

/// A command with the options in another front-end's configuration, with their positions in its text.
fn fragment(options: &str, start: usize) -> Option<Command> {
    let program = "kvm ";
    let text = " ".repeat(start.saturating_sub(program.len())) + program + options;
    words::arguments(&text)
}

/// Adds the options that Proxmox passes to QEMU unchanged (`args:`), which start at the byte `start` of its text.
///
/// # Errors
/// An option is invalid.
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
    add_line(&line, vm, reading);
    Ok(())
}

fn accelerator(line: &Line, vm: &mut Vm) {
    let given = line.group("accel").filter_map(|option| option.get("accel"));
    let mut given: Vec<&options::Pair> = given.collect();
    if given.is_empty() {
        given.extend(line.last("machine", "accel"));
    }
    let names = given.iter().flat_map(|pair| pair.value.split(':'));
    // QEMU uses the first that works. If one belongs to macOS, Windows or NetBSD, the host may be such a system.
    if names
        .clone()
        .any(|name| matches!(name, "hvf" | "whpx" | "nvmm"))
    {
        vm.table.derive("vm.host", "other", "from the accelerators");
    }
    let word = match names.clone().next() {
        Some("kvm") => "kvm",
        Some("tcg") => "tcg",
        Some("xen") => "xen",
        Some("hvf") => "hvf",
        _ => "other",
    };
    if let Some(pair) = given.first() {
        vm.table.give("vm.accel", word, pair.value_span);
    } else if let Some(option) = line.group("enable-kvm").next() {
        vm.table.give("vm.accel", "kvm", option.whole);
    }
}

fn vcpus(line: &Line, vm: &mut Vm, reading: &mut Reading) {
    let Some(smp) = line.group("smp").next_back() else {
        return;
    };
    // QEMU creates queues for the number of CPUs at the start.
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
        _ => reading.note(smp.span, "invalid number of vCPUs"),
    }
}

/// The bytes of a size in QEMU's syntax; `default` is the unit of a number without one.
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
            None => reading.note(pair.value_span, "invalid amount of memory"),
        }
    }
    let mut shared: Option<(bool, Span)> = None;
    let backend = line.last("machine", "memory-backend");
    let mut used: Vec<&Opt> = backend
        .and_then(|pair| line.find("object", &pair.value))
        .into_iter()
        .collect();
    let nodes = line
        .group("numa")
        .filter_map(|numa| line.find("object", numa.value("memdev")?));
    used.extend(nodes);
    for object in used {
        let kind = object
            .get("qom-type")
            .map_or("", |pair| pair.value.as_str());
        // A memfd is shared by default (QEMU, memory-backend-memfd).
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

/// Reads QEMU's allocator and libraries from the environment.
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

/// The settings of an IOThread, except how long it polls.
fn thread_settings(object: &Opt) -> Vec<String> {
    let keys = [
        "poll-grow",
        "poll-shrink",
        "aio-max-batch",
        "thread-pool-min",
        "thread-pool-max",
    ];
    let given = keys
        .into_iter()
        .filter_map(|key| Some(format!("{key}={}", object.value(key)?)));
    given.collect()
}

/// The bytes of a size in QEMU's syntax, such as `4M`.
pub fn size_of(text: &str) -> Option<u64> {
    size(text, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_types_of_distributions_have_the_defaults_of_an_upstream_version() {
        for (machine, expected) in [
            ("pc-q35-8.2", ("q35", Some(Version(8, 2, 0)))),
            ("pc-i440fx-rhel7.6.0", ("pc", Some(Version(2, 12, 0)))),
            ("rhel6.6.0", ("pc", Some(Version(0, 12, 0)))),
            ("rhel", ("rhel", None)),
            ("pc-1.0-precise", ("pc", Some(Version(1, 0, 0)))),
            ("pc-i440fx-trusty", ("pc", Some(Version(2, 0, 0)))),
            ("pc-i440fx-utopic", ("pc", Some(Version(2, 1, 0)))),
            ("pc-i440fx-vivid", ("pc", Some(Version(2, 2, 0)))),
            ("pc-i440fx-wily", ("pc", Some(Version(2, 3, 0)))),
            ("pseries-2.12-sxxm", ("pseries", Some(Version(2, 12, 0)))),
            ("pseries-focal-sxxm", ("pseries", Some(Version(4, 2, 0)))),
            ("pc-i440fx-xenial", ("pc", Some(Version(2, 5, 0)))),
            ("pc-i440fx-bionic-hpb", ("pc", Some(Version(2, 11, 0)))),
            ("pc-q35-focal", ("q35", Some(Version(4, 2, 0)))),
            ("pc-q35-jammy-hpb-maxcpus", ("q35", Some(Version(6, 2, 0)))),
            ("pc-q35-noble", ("q35", Some(Version(8, 2, 0)))),
            ("pseries-focal", ("pseries", Some(Version(4, 2, 0)))),
            (
                "s390-ccw-virtio-jammy",
                ("s390-ccw-virtio", Some(Version(6, 2, 0))),
            ),
            ("pc-q35-another", ("q35", None)),
            ("q35", ("q35", None)),
        ] {
            assert_eq!(machine_version(machine), expected, "{machine}");
        }
    }
}
