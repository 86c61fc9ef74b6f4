//! Disks of a Proxmox VM that ringdisk serves.
//!
//! The drive's line becomes a comment, which Proxmox keeps as a part of the VM's description, and from which it is restored.
//! Its volume becomes an unused one, so that Proxmox continues to list it and to delete it with the VM. `args:` has the device,
//! and the hookscript serves the disk.
//!
//! ```text
//! #ringdisk%3A scsi0%3A local-lvm%3Avm-100-disk-0,discard=on,size=32G
//! args: -object memory-backend-memfd,id=ringdisk-memory,... -device vhost-user-blk-pci,chardev=ringdisk-scsi0,...
//! hookscript: local:snippets/ringdisk
//! unused0: local-lvm:vm-100-disk-0
//! ```

mod backup;
mod config;

use std::fmt::Write;

use crate::disk_keys::{Served, attributes_of, check_storage};
use crate::input::{Input, Surroundings};
use crate::model::Disk;
use crate::proxmox::{Line, disk_key, lines, parts, pending};
use crate::read::read;
use crate::text::Source;
pub use backup::{Backup, BackupDevice, backup};
use config::{Config, ID, RECORD, records, volume};

/// The name of the hookscript among the snippets of a storage.
const SNIPPET: &str = "snippets/ringdisk";

const QUEUE_SIZE: u64 = 256;

/// Proxmox' lock of a VM of which a backup is made.
const BACKUP_LOCK: &str = "backup";

/// Options of a drive that ringdisk has as well, or that are of no consequence for it.
const CARRIED: &[&str] = &[
    "",
    "file",
    "volume",
    "aio",
    "backup",
    "cache",
    "detect_zeroes",
    "discard",
    "format",
    "iothread",
    "media",
    "queues",
    "replicate",
    "rerror",
    "ro",
    "serial",
    "shared",
    "size",
    "ssd",
    "werror",
];

/// A disk that ringdisk serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedDisk {
    /// As in `scsi0`.
    pub drive: String,
    /// The drive's line without its key.
    pub line: String,
    /// The volume's name in Proxmox.
    pub volume: String,
    /// The disk's name in ringdisk.
    pub name: String,
    pub socket: String,
    /// The other keys of the disk, with their values.
    pub keys: Vec<(String, String)>,
    /// Whether Proxmox' backups are to have it.
    pub is_backed_up: bool,
}

/// What is to be changed in the configuration of a VM.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The VM's number.
    pub vm: &'a str,
    /// The drives; empty for all that can be served, or all that are served.
    pub drives: &'a [String],
    /// The storage for the hookscript; `None` if the VM's own hookscript calls ringdisk's.
    pub snippets: Option<&'a str>,
    /// `storage.cfg`
    pub storages: Option<&'a Source>,
}

/// A changed configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    pub text: String,
    /// What the administrator should know.
    pub messages: Vec<String>,
}

/// The hookscript among the snippets of a storage.
pub fn hookscript(storage: &str) -> String {
    format!("{storage}:{SNIPPET}")
}

/// The configuration with drives that ringdisk serves.
///
/// # Errors
/// The reason why nothing is changed.
pub fn enable(text: &str, request: &Request<'_>) -> Result<Changed, String> {
    check_quiet(text)?;
    let input = parse(text, request)?;
    let vm = &input.vms[0];
    let mut messages = Vec::new();
    let drives = chosen(text, request, &input, &mut messages)?;
    let mut config = Config::new(text);
    let vcpus = vm.table.number("vm.vcpus").unwrap_or(1).clamp(1, 256);
    let mut options = memory_options(&input, text)?;
    for disk in &drives {
        let line = config
            .value(&disk.name)
            .ok_or_else(|| format!("{} is there twice", disk.name))?;
        let address = config.free_address(&options)?;
        let boot =
            boot_index(text, &disk.name).map_or_else(String::new, |it| format!(",bootindex={it}"));
        let (drive, socket) = (&disk.name, socket(request.vm, &disk.name));
        let _ = write!(
            options,
            " -chardev socket,id={ID}{drive},path={socket},reconnect-ms=1000 -device vhost-user-blk-pci,id={ID}dev-{drive},\
             chardev={ID}{drive},num-queues={vcpus},queue-size={QUEUE_SIZE},bus=pci.2,addr={address:#x}{boot}"
        );
        let volume = volume(&line).ok_or_else(|| format!("{drive} has no volume"))?;
        let unused = config.free_unused()?;
        config.replace(drive, &unused, &volume);
        config.add_record(drive, &line);
        if disk.table.word("disk.bus") != Some("virtio-blk") {
            messages.push(format!(
                "{drive}: the guest sees a virtio disk (vda) instead of a SCSI, SATA or IDE disk: it must find its file systems by \
                 UUID or label"
            ));
        }
        if !has_no_backup(&line) {
            messages.push(format!(
                "{drive}: no backup job of Proxmox contains it from now on: with 'script: /usr/share/ringdisk/vzdump' in /etc/vzdump.conf, such \
                 a job fails"
            ));
        }
    }
    let options = options.trim_start();
    match config.value("args") {
        Some(args) => config.set("args", &format!("{args} {options}")),
        None => config.set("args", options),
    }
    match (config.value("hookscript"), request.snippets) {
        (_, None) => {}
        (None, Some(storage)) => config.set("hookscript", &hookscript(storage)),
        (Some(script), Some(_)) if script.ends_with(&format!(":{SNIPPET}")) => {}
        (Some(script), Some(_)) => {
            return Err(format!(
                "the VM has a hookscript: let {script} call 'ringdisk hook proxmox \"$@\" || exit 1' at its beginning, and \
                 give --own-hookscript"
            ));
        }
    }
    let text = config.text();
    // The same configuration comes back, and the hook finds what it needs.
    let found = served(&text, request)?;
    if drives
        .iter()
        .any(|disk| !found.iter().any(|one| one.drive == disk.name))
    {
        return Err("the changed configuration does not have the disk".into());
    }
    Ok(Changed { text, messages })
}

/// The drives that are asked for, or all that can be served.
///
/// # Errors
/// There is none, or one of them cannot be served.
fn chosen<'a>(
    text: &str,
    request: &Request<'_>,
    input: &'a Input,
    messages: &mut Vec<String>,
) -> Result<Vec<&'a Disk>, String> {
    let is_served = records(text);
    let vm = &input.vms[0];
    match request.drives {
        [] => {
            let mut found = Vec::new();
            for disk in vm.disks.iter().filter(|disk| disk_key(&disk.name)) {
                match check(disk, input) {
                    Ok(()) => found.push(disk),
                    Err(reason) if reason.is_empty() => {}
                    Err(reason) => messages.push(format!("{} stays as it is: {reason}", disk.name)),
                }
            }
            if found.is_empty() {
                messages.insert(0, "there is no drive that ringdisk could serve".into());
                return Err(messages.join("; "));
            }
            Ok(found)
        }
        named => {
            let mut found = Vec::new();
            for name in named {
                if is_served.iter().any(|(drive, _)| drive == name) {
                    return Err(format!("ringdisk serves {name} already"));
                }
                let disk = vm
                    .disks
                    .iter()
                    .find(|disk| disk.name == *name && disk_key(name));
                let disk = disk.ok_or_else(|| format!("there is no drive {name}"))?;
                check(disk, input).map_err(|reason| {
                    let reason = if reason.is_empty() {
                        "it is no disk"
                    } else {
                        &reason
                    };
                    format!("{name}: {reason}")
                })?;
                found.push(disk);
            }
            Ok(found)
        }
    }
}

/// The configuration in which Proxmox has the drives again.
///
/// # Errors
/// The reason why nothing is changed.
pub fn disable(text: &str, request: &Request<'_>) -> Result<Changed, String> {
    check_quiet(text)?;
    let all = records(text);
    let found: Vec<_> = all
        .iter()
        .filter(|(drive, _)| request.drives.is_empty() || request.drives.contains(drive))
        .collect();
    if let Some(missing) =
        (request.drives.iter()).find(|name| !all.iter().any(|(it, _)| it == *name))
    {
        return Err(format!("ringdisk does not serve {missing}"));
    }
    if found.is_empty() {
        return Err("ringdisk serves no drive of this VM".into());
    }
    let mut config = Config::new(text);
    for (drive, line) in &found {
        config.restore(drive, line)?;
    }
    config.clear_args(
        |id| found.iter().any(|(drive, _)| id == *drive),
        found.len() == all.len(),
    );
    let is_ours = |script: String| script.ends_with(&format!(":{SNIPPET}"));
    if found.len() == all.len() && config.value("hookscript").is_some_and(is_ours) {
        config.remove("hookscript");
    }
    Ok(Changed {
        text: config.text(),
        messages: Vec::new(),
    })
}

/// The drives that ringdisk serves.
///
/// # Errors
/// The configuration contradicts itself.
pub fn served(text: &str, request: &Request<'_>) -> Result<Vec<ServedDisk>, String> {
    let records = records(text);
    let args = Config::new(text).value("args").unwrap_or_default();
    for drive in devices(&args) {
        if !records.iter().any(|(recorded, _)| *recorded == drive) {
            return Err(format!(
                "args: has ringdisk's device for {drive}, and the description no line '{RECORD}{drive}: VOLUME,...', which says \
                 what it is: put it back (Notes in the GUI)"
            ));
        }
    }
    if records.is_empty() {
        return Ok(Vec::new());
    }
    let mut config = Config::new(text);
    for (drive, line) in &records {
        config.restore(drive, line)?;
    }
    config.clear_args(|_| true, true);
    let input = parse(&config.text(), request)?;
    let mut found = Vec::new();
    for (drive, line) in records {
        let disk = input.vms[0].disks.iter().find(|disk| disk.name == drive);
        let disk = disk.ok_or_else(|| format!("{drive} in the description is no drive"))?;
        let queues = number_of_queues(&args, &drive).ok_or_else(|| {
            format!("the description has a line '{RECORD}{drive}', and args: no device of ringdisk for it")
        })?;
        let vm = vm_name(request.vm);
        let name = format!("{vm}-{drive}");
        let served = Served {
            name: name.clone(),
            socket: socket(request.vm, &drive),
            queues,
            queue_size: QUEUE_SIZE,
        };
        let mut keys = attributes_of(&vm, disk, &served);
        keys.retain(|(key, _)| key != "file" && key != "name");
        keys.push(("queues".into(), queues.to_string()));
        keys.push(("queue-size".into(), QUEUE_SIZE.to_string()));
        found.push(ServedDisk {
            volume: volume(&line)
                .ok_or_else(|| format!("{drive} in the description has no volume"))?,
            is_backed_up: !has_no_backup(&line),
            name,
            socket: served.socket,
            keys,
            drive,
            line,
        });
    }
    Ok(found)
}

/// The sockets of other disks in `args:` that a program outside of QEMU serves, which Proxmox does not know either.
pub fn other_devices(text: &str) -> Vec<String> {
    let args = Config::new(text).value("args").unwrap_or_default();
    let words: Vec<&str> = args.split_whitespace().collect();
    let part = |word: &str, key: &str| {
        let mut parts = word.split(',');
        parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
    };
    let is_disk =
        |word: &&&str| word.starts_with("vhost-user-blk") || word.starts_with("vhost-user-scsi");
    let mut found = Vec::new();
    for device in words.iter().filter(is_disk) {
        let chardev = part(device, "chardev").unwrap_or_default();
        if chardev.strip_prefix(ID).is_some_and(disk_key) {
            continue;
        }
        let socket = words
            .iter()
            .find(|word| part(word, "id").as_ref() == Some(&chardev) && !is_disk(word))
            .and_then(|word| part(word, "path"));
        found.push(socket.unwrap_or(chardev));
    }
    found
}

/// Checks that the memory in `args:` is what the VM is to have: QEMU does not start otherwise.
///
/// # Errors
/// It is not, and what to do.
pub fn check_memory(text: &str, request: &Request<'_>) -> Result<(), String> {
    let args = Config::new(text).value("args").unwrap_or_default();
    let ours = format!("id={ID}memory");
    let memory = (args.split(' ')).find(|word| word.split(',').any(|part| part == ours));
    let size = memory.and_then(|word| {
        let size = word
            .split(',')
            .find_map(|part| part.strip_prefix("size="))?;
        size.strip_suffix('M')?.parse::<u64>().ok()
    });
    let Some(size) = size else {
        return Ok(());
    };
    let input = parse(&without_ringdisk(text)?, request)?;
    match input.vms[0].table.number("vm.memory") {
        Some(bytes) if bytes >> 20 != size => Err(format!(
            "'memory:' is {} MiB, and the memory in 'args:' has {size}: 'ringdisk proxmox disable {vm}' and 'enable {vm}' \
             make them the same",
            bytes >> 20,
            vm = request.vm
        )),
        _ => Ok(()),
    }
}

/// The configuration with Proxmox' lock for backups.
///
/// # Errors
/// The VM is locked.
pub fn lock_for_backup(text: &str) -> Result<String, String> {
    let mut config = Config::new(text);
    if let Some(lock) = config.value("lock") {
        return Err(format!(
            "the VM is locked ({lock}): wait until that has ended, or 'qm unlock' it"
        ));
    }
    config.set("lock", BACKUP_LOCK);
    Ok(config.text())
}

/// The configuration without that lock.
pub fn unlock_after_backup(text: &str) -> String {
    let mut config = Config::new(text);
    if config.value("lock").as_deref() == Some(BACKUP_LOCK) {
        config.remove("lock");
    }
    config.text()
}

/// The configuration for a backup: as if Proxmox had the drives, and without what only ringdisk needs.
///
/// # Errors
/// The configuration contradicts itself.
pub fn without_ringdisk(text: &str) -> Result<String, String> {
    let mut config = Config::new(text);
    for (drive, line) in records(text) {
        config.restore(&drive, &line)?;
    }
    config.clear_args(|_| true, true);
    if config
        .value("hookscript")
        .is_some_and(|script| script.ends_with(&format!(":{SNIPPET}")))
    {
        config.remove("hookscript");
    }
    Ok(config.text())
}

/// The difference of two configurations.
pub fn patch(path: &str, before: &str, after: &str) -> String {
    let diff = similar::TextDiff::from_lines(before, after);
    diff.unified_diff().header(path, path).to_string()
}

/// The directory of the snippets of a storage (`storage.cfg`).
///
/// # Errors
/// It has none: a sentence with the way out.
pub fn snippets(storages: &str, storage: &str) -> Result<String, String> {
    let (mut path, mut content, mut is_inside, mut is_there) = (None, "", false, false);
    for line in storages.lines() {
        if let Some((_, id)) = line
            .split_once(": ")
            .filter(|_| !line.starts_with([' ', '\t', '#']))
        {
            is_inside = id.trim() == storage;
            is_there |= is_inside;
        } else if let (true, Some((key, value))) =
            (is_inside, line.trim().split_once(char::is_whitespace))
        {
            match key {
                "path" => path = Some(value.trim()),
                "content" => content = value.trim(),
                _ => {}
            }
        }
    }
    let others = "name a storage of directories that has snippets with --snippets";
    if !is_there {
        return Err(format!(
            "there is no storage {storage} in storage.cfg; {others}"
        ));
    }
    let path = path.ok_or_else(|| format!("storage {storage} has no directory; {others}"))?;
    if content.split(',').any(|one| one.trim() == "snippets") {
        return Ok(format!("{path}/snippets"));
    }
    // pve-storage's default for directories.
    let content = Some(content).filter(|it| !it.is_empty());
    let content = content.unwrap_or("images,rootdir");
    Err(format!(
        "storage {storage} has no snippets, where the hookscript belongs; 'pvesm set {storage} --content {content},snippets' \
         allows them, or {others}"
    ))
}

fn parse(text: &str, request: &Request<'_>) -> Result<Input, String> {
    let surroundings = Surroundings {
        storages: request.storages.cloned(),
        name: Some(vm_name(request.vm)),
        ..Surroundings::default()
    };
    let input = read(
        Source::new(format!("{}.conf", request.vm), text),
        surroundings,
    );
    let input = input.map_err(|e| e.to_string())?;
    match (input.kind, input.vms.len()) {
        (crate::input::Kind::Proxmox, 1) => Ok(input),
        _ => Err("it is no configuration of a Proxmox VM".into()),
    }
}

fn vm_name(vm: &str) -> String {
    format!("vm-{vm}")
}

fn socket(vm: &str, drive: &str) -> String {
    format!("/run/ringdisk/{}-{drive}.sock", vm_name(vm))
}

/// # Errors
/// The configuration must not be changed now.
fn check_quiet(text: &str) -> Result<(), String> {
    let sections = text.lines().filter(|line| line.starts_with('['));
    for section in sections {
        let name = section.trim().trim_matches(['[', ']']);
        if name != "PENDING" && !name.starts_with("special:") {
            return Err(format!(
                "the VM has a snapshot ({name}), which names its drives: delete its snapshots first; ringdisk's snapshots take their \
                 place"
            ));
        }
    }
    if let Some(key) = pending(text) {
        return Err(format!(
            "[PENDING] changes {key} at the next start: stop and start the VM first"
        ));
    }
    let (lines, _) = lines(text);
    if let Some(line) =
        (lines.iter()).find(|line| lines.iter().filter(|it| it.key == line.key).count() > 1)
    {
        return Err(format!("it has two lines '{}'", line.key));
    }
    if let Some(lock) = lines.iter().find(|line| line.key == "lock") {
        return Err(format!(
            "the VM is locked ({}): wait until that has ended, or 'qm unlock' it",
            lock.value
        ));
    }
    if lines
        .iter()
        .any(|line| line.key == "template" && line.value != "0")
    {
        return Err("it is a template".into());
    }
    Ok(())
}

/// # Errors
/// The reason why ringdisk cannot serve a drive; empty if it is no disk.
fn check(disk: &Disk, input: &Input) -> Result<(), String> {
    if disk.table.word("disk.device") != Some("disk") || disk.file.is_empty() {
        return Err(String::new());
    }
    let (all, _) = lines(&input.sources[0].text);
    let line = all
        .iter()
        .rev()
        .find(|line| line.key == disk.name)
        .ok_or("its line is missing")?;
    for part in parts(line) {
        let is_limit = ["iops", "mbps", "bps"]
            .iter()
            .any(|rate| part.key.starts_with(rate));
        if !is_limit && !CARRIED.contains(&part.key) {
            return Err(format!(
                "ringdisk has nothing like {}={}; remove it first",
                part.key, part.value
            ));
        }
    }
    if !volume(line.value).is_some_and(|volume| is_of_storage(&volume)) {
        return Err(
            "it is a device or file of the host and no volume of a storage, which Proxmox would not keep as unused: serve it by \
             ringdisk's configuration (docs/proxmox.md, by hand)"
                .into(),
        );
    }
    check_storage(disk)?;
    let os = input.vms[0].table.word("vm.os");
    let is_virtio = |disk: &Disk| disk.table.word("disk.bus") == Some("virtio-blk");
    if !is_virtio(disk) && os != Some("linux") && !input.vms[0].disks.iter().any(is_virtio) {
        return Err(
            "the guest may have no driver for a virtio disk at its start (Windows then stops with INACCESSIBLE BOOT DEVICE): \
             add a small virtio0 disk, start the VM once, install the driver (viostor), and keep that disk until this is done"
                .into(),
        );
    }
    Ok(())
}

/// Whether a volume's name begins with its storage.
fn is_of_storage(volume: &str) -> bool {
    volume.split_once(':').is_some_and(|(storage, name)| {
        !storage.is_empty() && !storage.contains('/') && !name.is_empty()
    })
}

/// The options that share the VM's memory, if Proxmox does not.
fn memory_options(input: &Input, text: &str) -> Result<String, String> {
    let table = &input.vms[0].table;
    if table.word("vm.memory-shared") == Some("yes") {
        return Ok(String::new());
    }
    let (lines, _) = lines(text);
    let is_on = |line: &&Line<'_>| line.key == "numa" && line.value != "0";
    if lines.iter().any(|line| is_on(&line)) {
        return Err("with 'numa: 1', Proxmox makes the memory, which is not shared: add 'hugepages: 2', or set 'numa: 0'".into());
    }
    let hotplug = lines
        .iter()
        .find(|line| line.key == "hotplug" && line.value.contains("memory"));
    if hotplug.is_some() {
        return Err(
            "memory hotplug makes the memory in another way: remove 'memory' from 'hotplug:'"
                .into(),
        );
    }
    let bytes = table
        .number("vm.memory")
        .ok_or("the amount of memory is not readable")?;
    Ok(format!(
        "-object memory-backend-memfd,id={ID}memory,size={}M,share=on -machine memory-backend={ID}memory",
        bytes >> 20
    ))
}

/// The place in the boot order as Proxmox counts it; `None` if the VM does not boot from the drive.
fn boot_index(text: &str, drive: &str) -> Option<usize> {
    let (lines, _) = lines(text);
    let last = |key: &str| lines.iter().rev().find(|line| line.key == key);
    let boot = last("boot").map(parts).unwrap_or_default();
    if let Some(order) = boot.iter().find(|part| part.key == "order") {
        return order
            .value
            .split(';')
            .position(|one| one == drive)
            .map(|at| 100 + at);
    }
    let first = lines
        .iter()
        .find(|line| disk_key(line.key) && !line.value.contains("media=cdrom"));
    let boots = match last("bootdisk") {
        Some(line) => line.value == drive,
        None => first.is_some_and(|line| line.key == drive),
    };
    let legacy = boot.iter().find(|part| matches!(part.key, "" | "legacy"));
    let legacy = legacy.map_or("cdn", |part| part.value);
    legacy.find('c').filter(|_| boots).map(|at| 100 * (at + 1))
}

/// Whether Proxmox' backups leave a drive out.
fn has_no_backup(line: &str) -> bool {
    line.split(',')
        .any(|part| matches!(part, "backup=0" | "backup=no" | "backup=off"))
}

/// The drives that ringdisk's devices in `args:` are for.
fn devices(args: &str) -> Vec<String> {
    let chardevs = args
        .split(' ')
        .filter_map(|word| word.strip_prefix("socket,id=")?.strip_prefix(ID));
    let drives = chardevs.map(|rest| rest.split(',').next().unwrap_or(rest).to_owned());
    drives.filter(|drive| disk_key(drive)).collect()
}

fn number_of_queues(args: &str, drive: &str) -> Option<u64> {
    let chardev = format!("chardev={ID}{drive}");
    let device = args
        .split(' ')
        .find(|word| word.split(',').any(|part| part == chardev))?;
    device
        .split(',')
        .find_map(|part| part.strip_prefix("num-queues=")?.parse().ok())
}

#[cfg(test)]
mod tests;
