//! libvirt's own test domains, through `--fix` and `--fix --to ringdisk`, before the real libvirt.
//!
//! `cargo xtask install` fetches them: they are in Debian's source packages of the libvirt that is installed, and of a newer
//! one. Of the latter, the installed libvirt is asked too, and what it does not know it refuses before any change.

mod virsh;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use advisor::check::check;
use advisor::convert::{Direction, convert};
use advisor::fix::{Wanted, fix};
use advisor::input::{Input, Surroundings};
use advisor::read::read;
use advisor::rules::{Rules, Severity};
use advisor::text::Source;
use serde_json::Value;

use virsh::Virsh;

/// What tests/ is called in the releases that were looked at.
const FOLDERS: [&str; 2] = ["qemuxml2argvdata", "qemuxmlconfdata"];

/// The test domains of the installed libvirt, and those that are new or different in a newer one.
fn domains() -> Result<Vec<PathBuf>, String> {
    let cache = harness::paths::cache_dir().join("libvirt");
    let packages = fs::read_dir(&cache).map_err(|_| {
        format!(
            "libvirt's test domains are not in {}; 'cargo xtask install' fetches them",
            cache.display()
        )
    })?;
    let packages = packages.flatten().map(|entry| entry.path());
    // Those of the installed one are called by its version, and older ones may still lie beside it.
    let (mut newer, mut installed): (Vec<_>, Vec<_>) =
        packages.partition(|path| path.file_name().is_some_and(|name| name == "debian-13"));
    installed.sort();
    let mut files = Vec::new();
    let mut seen = HashSet::new();
    for package in installed.pop().into_iter().chain(newer.pop()) {
        let folders = FOLDERS.map(|folder| package.join("tests").join(folder));
        let folder = folders.into_iter().find(|folder| folder.is_dir());
        let folder = folder.ok_or_else(|| format!("no domains in {}", package.display()))?;
        let mut domains: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|suffix| suffix == "xml"))
            .collect();
        domains.sort();
        domains.retain(|path| seen.insert(fs::read(path).unwrap_or_default()));
        files.append(&mut domains);
    }
    if files.is_empty() {
        Err(format!("there is no package in {}", cache.display()))
    } else {
        Ok(files)
    }
}

/// The domain as this machine's libvirt can accept it: without KVM, of a machine type that its QEMU has, and without what
/// is no disk and needs privileges or libraries. Before a fix and after it, the same is left out.
fn for_this_host(text: &str) -> String {
    let mut text = text.replace("<domain type='kvm'", "<domain type='qemu'");
    text = text.replace("<domain type=\"kvm\"", "<domain type='qemu'");
    for name in [
        "interface",
        "graphics",
        "blkiotune",
        "memtune",
        "redirdev",
        "video",
        "sound",
        "hostdev",
        "filesystem",
        "rng",
        "tpm",
        "shmem",
        "audio",
    ] {
        while let Some(start) = element(&text, name) {
            let rest = &text[start..];
            let head = rest.find('>').unwrap_or(rest.len() - 1);
            let end = if rest[..head].ends_with('/') {
                head + 1
            } else {
                let close = format!("</{name}>");
                rest.find(&close).map_or(head + 1, |at| at + close.len())
            };
            text.replace_range(start..start + end, "");
        }
    }
    let Some(at) = text.find(" machine=") else {
        return text;
    };
    let quoted = at + " machine=".len() + 1;
    let end = quoted + text[quoted..].find(['\'', '"']).unwrap_or(0);
    let machine = match &text[quoted..end] {
        name if name.contains("q35") => "q35",
        name if name.starts_with("pc") => "pc",
        _ => return text,
    };
    text.replace_range(quoted..end, machine);
    text
}

fn element(text: &str, name: &str) -> Option<usize> {
    let start = format!("<{name}");
    let starts = text.match_indices(&start).map(|(at, _)| at);
    let mut starts = starts.filter(|at| {
        let next = text[at + 1 + name.len()..].chars().next();
        next.is_some_and(|c| c.is_whitespace() || "/>".contains(c))
    });
    starts.next()
}

/// A disk as QEMU gets it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Disk {
    /// The device that the guest sees with its controller's, and where: the bus, the address and the unit.
    driver: String,
    place: String,
    boot: Option<u64>,
    /// What is behind it: every node down to the storage, without what makes no difference to its bytes.
    storage: String,
    readonly: bool,
    /// How many barriers there are between a flush and the storage: 0 for none, 1 if flushes are kept, 2 if each write is one.
    durability: u8,
}

/// The disks of a command line, by the id of each device.
fn disks(arguments: &str) -> BTreeMap<String, Disk> {
    let words = words(arguments);
    let mut nodes: BTreeMap<String, Value> = BTreeMap::new();
    let mut sockets: BTreeMap<String, String> = BTreeMap::new();
    let mut found = BTreeMap::new();
    let mut controllers: BTreeMap<String, String> = BTreeMap::new();
    for pair in words.windows(2) {
        let json: Value = serde_json::from_str(&pair[1]).unwrap_or_default();
        match pair[0].as_str() {
            "-blockdev" => {
                nodes.insert(text(&json["node-name"]), json);
            }
            "-chardev" => {
                let key = |key: &str| {
                    let mut parts = pair[1].split(',');
                    let value = parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('='));
                    value.unwrap_or_default().to_owned()
                };
                sockets.insert(key("id"), key("path"));
            }
            // As old as it is, libvirt writes it for SD cards.
            "-drive" => {
                let key = |key: &str| {
                    let mut parts = pair[1].split(',');
                    let value = parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('='));
                    value.unwrap_or_default().to_owned()
                };
                let (format, file) = (key("format"), key("file"));
                found.insert(
                    pair[1].clone(),
                    Disk {
                        driver: key("if"),
                        storage: format!(
                            "driver=\"{format}\" file(driver=\"file\" filename=\"{file}\" )"
                        ),
                        durability: 1,
                        ..Disk::default()
                    },
                );
            }
            "-device" => {
                let (drive, chardev) = (text(&json["drive"]), text(&json["chardev"]));
                let storage = if !drive.is_empty() {
                    chain(&nodes, &drive)
                } else if text(&json["driver"]).starts_with("vhost-user-blk") {
                    sockets.get(&chardev).cloned().unwrap_or_default()
                } else {
                    controllers.insert(text(&json["id"]), text(&json["driver"]));
                    continue;
                };
                let bus = text(&json["bus"]);
                let bus = bus.split('.').next().unwrap_or_default();
                let controller = controllers.get(bus).map_or("", String::as_str);
                let flag = |node: &Value, keys: [&str; 2]| node[keys[0]][keys[1]] == true;
                let top = nodes.get(&drive).cloned().unwrap_or_default();
                let no_flush = flag(&top, ["cache", "no-flush"]);
                let through = matches!(text(&json["write-cache"]).as_str(), "off");
                let place = ["bus", "addr", "unit", "channel", "scsi-id", "lun"]
                    .map(|key| json[key].to_string())
                    .join(" ");
                found.insert(
                    text(&json["id"]),
                    Disk {
                        driver: format!("{} {controller}", text(&json["driver"])),
                        place,
                        boot: json["bootindex"].as_u64(),
                        storage,
                        readonly: top["read-only"] == true,
                        durability: match (no_flush, through) {
                            (true, _) => 0,
                            (_, false) => 1,
                            (_, true) => 2,
                        },
                    },
                );
            }
            _ => {}
        }
    }
    found
}

/// A node and those below it, as one text: names and what concerns only speed are left out.
fn chain(nodes: &BTreeMap<String, Value>, name: &str) -> String {
    let Some(Value::Object(node)) = nodes.get(name) else {
        return name.to_owned();
    };
    let mut text = String::new();
    for (key, value) in node {
        match key.as_str() {
            "node-name" | "cache" | "aio" | "discard" | "detect-zeroes" | "auto-read-only" => {}
            // The size of a cache.
            "l2-cache-size" | "cache-size" | "read-only" => {}
            "file" | "backing" => {
                let below = value.as_str().map(|name| chain(nodes, name));
                text += &format!("{key}({})", below.unwrap_or_else(|| value.to_string()));
            }
            _ => text += &format!("{key}={value} "),
        }
    }
    text
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Words as libvirt quotes them for a shell.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\'' => quoted = !quoted,
            '\\' if !quoted => word.extend(chars.next()),
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            c => word.push(c),
        }
    }
    words.push(word);
    words
}

/// The disks that the firmware may boot, the first one first: by what is on them.
fn boot_order(disks: &BTreeMap<String, Disk>) -> Vec<String> {
    let mut order: Vec<_> = disks
        .values()
        .filter_map(|disk| Some((disk.boot?, disk.storage.clone())))
        .collect();
    order.sort();
    order.into_iter().map(|(_, storage)| storage).collect()
}

fn input(name: &str, text: &str) -> Option<Input> {
    read(Source::new(name, text), Surroundings::default()).ok()
}

/// What `--fix` breaks of a domain, if anything.
fn broken_by_fix(domain: &Input, before: &str, after: &str) -> Vec<String> {
    // Where nothing is said, libvirt finds a place each time anew; what it found is in the domains that it has defined.
    let source = &domain.sources[0].text;
    let placed = |disk: &Disk| {
        domain.vms.iter().flat_map(|vm| &vm.disks).any(|known| {
            let is_placed = source[known.span.range()].contains("<address ");
            is_placed && !known.file.is_empty() && disk.storage.contains(&known.file)
        })
    };
    let (before, after) = (disks(before), disks(after));
    let mut broken = Vec::new();
    if boot_order(&before) != boot_order(&after) {
        broken.push(format!(
            "boots {:?} and not {:?}",
            boot_order(&after),
            boot_order(&before)
        ));
    }
    let mut left: Vec<&Disk> = after.values().collect();
    // A file may be behind several disks: the one that needs most is looked for first.
    let mut disks: Vec<&Disk> = before.values().collect();
    disks.sort_by_key(|disk| std::cmp::Reverse(disk.durability));
    for disk in disks {
        let stays = |other: &Disk| {
            other.storage == disk.storage
                && other.readonly == disk.readonly
                && other.durability >= disk.durability
        };
        let at_place = |other: &&Disk| {
            stays(other) && other.driver == disk.driver && other.place == disk.place
        };
        let moved = |other: &&Disk| stays(other) && (other.driver != disk.driver || !placed(disk));
        let same = left.iter().position(at_place);
        let same = same.or_else(|| left.iter().position(moved));
        match same {
            Some(at) => drop(left.remove(at)),
            None => broken.push(format!("{disk:?} is not among {after:?}")),
        }
    }
    broken.extend(left.iter().map(|disk| format!("{disk:?} is new")));
    broken
}

/// The same of `--to ringdisk`: a disk is where it was, or at the same place of the guest as what ringdisk serves.
fn broken_by_move(before: &str, after: &str, config: &str) -> Vec<String> {
    let (before, after) = (disks(before), disks(after));
    let served: toml::Table = config.parse().unwrap();
    let served = served["disk"].as_array().unwrap();
    let mut broken = Vec::new();
    if before.len() != after.len() {
        broken.push(format!("{} disks and not {}", after.len(), before.len()));
    }
    for (id, disk) in &before {
        let Some(other) = after.get(id) else {
            broken.push(format!("{id} is gone"));
            continue;
        };
        if other == disk {
            continue;
        }
        let table = served
            .iter()
            .find(|table| table["socket"].as_str() == Some(&other.storage));
        let Some(table) = table else {
            broken.push(format!("{other:?} is not served"));
            continue;
        };
        let word = |key: &str| table.get(key).and_then(|v| v.as_str()).unwrap_or_default();
        let file = format!("\"{}\"", word("file"));
        let is_format = match word("format") {
            "qcow2" => disk.storage.contains("driver=\"qcow2\""),
            _ => !disk.storage.contains("driver=\"qcow2\""),
        };
        let durability = match word("cache") {
            "unsafe" => 0,
            "directsync" | "writethrough" => 2,
            _ => 1,
        };
        let readonly = table.get("readonly").and_then(|v| v.as_bool());
        for (holds, what) in [
            (disk.storage.contains(&file), "another file"),
            (is_format, "another format"),
            (!disk.storage.contains("offset="), "an offset"),
            (!disk.storage.contains("secret"), "a secret"),
            (readonly.unwrap_or(false) == disk.readonly, "may be written"),
            (durability >= disk.durability, "less durable"),
            (other.place == disk.place, "another place"),
            (other.boot == disk.boot, "another place in the boot order"),
            (other.driver.starts_with("vhost-user-blk"), "another device"),
        ] {
            if !holds {
                broken.push(format!("{id}: {what}: {disk:?} is now {other:?}, {table}"));
            }
        }
    }
    broken
}

#[test]
fn libvirt_accepts_changed_domains() {
    let test = "what_libvirt_accepts_it_accepts_afterwards";
    let files = match (domains(), Virsh::new()) {
        (Ok(files), Ok(_)) => files,
        (Err(why), _) | (_, Err(why)) => {
            println!("skipped: {test}: {why}");
            return;
        }
    };
    // For some domains, libvirt waits for services that are not there.
    let all = thread::scope(|scope| {
        let parts = files.chunks(files.len().div_ceil(VIRSHS).max(1));
        let started: Vec<_> = parts
            .map(|part| scope.spawn(|| Accepted::of(part)))
            .collect();
        let ended = started.into_iter().map(|part| part.join().unwrap());
        ended.fold(Accepted::default(), Accepted::plus)
    });
    let Accepted {
        tried,
        accepted,
        changed,
        moved,
        broken,
    } = all;
    println!(
        "{tried} domains, {accepted} accepted of those that change: {changed} by fixes, {moved} moves; {} broken",
        broken.len()
    );
    assert!(accepted > 100, "only {accepted} of {tried} were accepted");
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
}

/// Connections to libvirt that are used at a time.
const VIRSHS: usize = 6;

/// What libvirt says of domains before and after they were changed.
#[derive(Default)]
struct Accepted {
    tried: usize,
    accepted: usize,
    changed: usize,
    moved: usize,
    broken: Vec<String>,
}

impl Accepted {
    fn plus(self, mut other: Self) -> Self {
        other.broken.splice(..0, self.broken);
        Self {
            tried: self.tried + other.tried,
            accepted: self.accepted + other.accepted,
            changed: self.changed + other.changed,
            moved: self.moved + other.moved,
            broken: other.broken,
        }
    }

    fn of(files: &[PathBuf]) -> Self {
        let (mut virsh, rules) = (Virsh::new().unwrap(), Rules::built_in().unwrap());
        let mut all = Self::default();
        for path in files {
            all.ask(path, &mut virsh, &rules);
        }
        all
    }

    fn ask(&mut self, path: &Path, virsh: &mut Virsh, rules: &Rules) {
        let (wanted, broken) = (Wanted::default(), &mut self.broken);
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Ok(text) = fs::read_to_string(path) else {
            return;
        };
        let Some(domain) = input(&name, &text) else {
            return;
        };
        self.tried += 1;
        let fixed = fix(domain.clone(), rules, None, wanted).unwrap();
        let again = fix(fixed.input.clone(), rules, None, wanted).unwrap();
        if !again.done.is_empty() {
            broken.push(format!("{name}: fixed twice: {:?}", again.done));
        }
        let new = &fixed.input.sources[0].text;
        let there = convert(vec![domain.clone()], Direction::ToRingdisk).ok();
        let both = convert(vec![fixed.input.clone()], Direction::ToRingdisk).ok();
        if *new == text && there.is_none() {
            return;
        }
        let Ok(before) = virsh.arguments(&for_this_host(&text)) else {
            return;
        };
        self.accepted += 1;
        let mut fixed_arguments = before.clone();
        if *new != text {
            self.changed += 1;
            match virsh.arguments(&for_this_host(new)) {
                Ok(after) => {
                    for what in broken_by_fix(&domain, &before, &after) {
                        broken.push(format!("{name}: the fix: {what}"));
                    }
                    fixed_arguments = after;
                }
                Err(why) => {
                    broken.push(format!("{name}: the fix is refused: {why}"));
                    return;
                }
            }
        }
        for (there, before) in [(there, &before), (both, &fixed_arguments)] {
            let Some(there) = there else { continue };
            self.moved += 1;
            let text = &there.inputs[0].sources[0].text;
            let config = there.config.unwrap();
            match virsh.arguments(&for_this_host(text)) {
                Ok(after) => {
                    for what in broken_by_move(before, &after, &config) {
                        broken.push(format!("{name}: the move: {what}"));
                    }
                    if let Some(memory) = private_memory(&after) {
                        broken.push(format!("{name}: the move leaves memory private: {memory}"));
                    }
                }
                Err(why) => broken.push(format!("{name}: the move is refused: {why}")),
            }
            let served = read(
                Source::new("ringdisk.toml", config),
                Surroundings::default(),
            );
            let served = check(&mut served.unwrap(), rules, None, &[]);
            let errors = served
                .findings
                .iter()
                .filter(|f| f.severity == Severity::Error);
            broken.extend(errors.map(|finding| format!("{name}: {}", finding.text)));
            if convert(there.inputs, Direction::ToRingdisk).is_ok() {
                broken.push(format!("{name}: moved twice"));
            }
        }
    }
}

/// Where the findings of a domain and of libvirt's own arguments for it differ: the rule, or any, the beginning of the
/// domains' names, or all, and why they must.
const DIFFERENT: &[(&str, &str, &str)] = &[
    (
        "rbd-malloc",
        "",
        "a command line says which allocator QEMU has, and a domain does not",
    ),
    (
        "limit-low",
        "",
        "libvirt sets limits by QMP after the start, or in groups that the domain names",
    ),
    (
        "limit-low-bytes",
        "",
        "libvirt sets limits by QMP after the start, or in groups that the domain names",
    ),
    (
        "",
        "qemu-ns-",
        "what <qemu:commandline> adds is only in the arguments",
    ),
    (
        "",
        "disk-transient",
        "the overlay of a transient disk is made at the start, and is not in the arguments",
    ),
    (
        "no-iothread",
        "hostdev-scsi-",
        "a SCSI device that is passed through is a <hostdev>, and a disk of QEMU's",
    ),
    ("no-iothread", "name-escape", "the same"),
    (
        "no-iothread",
        "disk-network-source-curl-nbdkit",
        "the nbdkit that libvirt starts for a URL is an NBD server in the arguments",
    ),
    (
        "emulated-bus",
        "disk-startuppolicy-optional-drop",
        "a disk that may be missing, and is, is not in the arguments",
    ),
    (
        "cache-host-page",
        "disk-discard",
        "a CD-ROM on virtio or USB is a disk for QEMU",
    ),
    ("emulated-bus", "disk-cdrom-bus-other", "the same"),
    (
        "",
        "virtio-lun",
        "device='lun' is scsi=on, as QEMU no longer has it",
    ),
    (
        "",
        "disk-source-fd",
        "files that libvirt opens are numbers in the arguments",
    ),
    (
        "discard-thin",
        "disk-copy_on_read",
        "libvirt sets discard for the filter and for what is below it alike",
    ),
];

#[test]
fn findings_agree_for_domains_and_their_command_lines() {
    let files = match domains() {
        Ok(files) => files,
        Err(why) => {
            println!("skipped: findings_of_domains_and_of_their_arguments_agree: {why}");
            return;
        }
    };
    let rules = Rules::built_in().unwrap();
    let found = |name: &str, text: &str| {
        let mut input = input(name, text)?;
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        for finding in check(&mut input, &rules, None, &[]).findings {
            if finding.severity != Severity::Info {
                *found.entry(finding.rule).or_default() += 1;
            }
        }
        Some(found)
    };
    let (mut compared, mut different) = (0, BTreeMap::<String, Vec<String>>::new());
    for path in &files {
        let suffixes = ["x86_64-latest.args", "args"].map(|suffix| path.with_extension(suffix));
        let Some(arguments) = suffixes
            .iter()
            .find_map(|path| fs::read_to_string(path).ok())
        else {
            continue;
        };
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let domain = fs::read_to_string(path).unwrap_or_default();
        let (Some(of_domain), Some(of_arguments)) =
            (found(&name, &domain), found("vm.args", &arguments))
        else {
            continue;
        };
        compared += 1;
        let all: BTreeSet<&String> = of_domain.keys().chain(of_arguments.keys()).collect();
        for rule in all {
            let (a, b) = (of_domain.get(rule), of_arguments.get(rule));
            let known = DIFFERENT.iter().any(|(known, start, _)| {
                (known.is_empty() || known == rule) && name.starts_with(start)
            });
            if a != b && !known {
                let entry = different.entry(rule.clone()).or_default();
                entry.push(format!("{name} {}:{}", a.unwrap_or(&0), b.unwrap_or(&0)));
            }
        }
    }
    println!("{compared} domains compared with their arguments");
    assert!(compared > 500, "{compared}");
    assert!(different.is_empty(), "{different:#?}");
}

/// A memory object that ringdisk could not map.
fn private_memory(arguments: &str) -> Option<String> {
    let words = words(arguments);
    let pairs = words.windows(2).filter(|pair| pair[0] == "-object");
    let mut memory = pairs.filter_map(|pair| {
        let json: Value = serde_json::from_str(&pair[1]).ok()?;
        let kind = text(&json["qom-type"]);
        (kind.starts_with("memory-backend") && json["share"] != true).then(|| pair[1].clone())
    });
    memory.next()
}
