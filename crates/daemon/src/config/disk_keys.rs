//! The keys of a disk. This table is the one definition of each of them: the command line, the configuration file, the
//! state file and the handover parse and write disks with it, and `--help` and the configuration reference are
//! generated from it.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use block::{Aio, CacheMode, DetectZeroes, Discard, OnError, parse_size};
use guest::{Virtqueue, blk};
use rbd::{CONNECTIONS_MAX, Location};

use super::keys::{Form, Key, key};
use super::spec::{DiskSpec, FileSpec, Lock, name};
use crate::credentials;

/// The most queues of a disk: what a PCI device has interrupt vectors for in QEMU, less one for configuration changes.
pub const QUEUES_MAX: u16 = 256;

/// The smallest queue.
pub const QUEUE_SIZE_MIN: u16 = 16;

/// The longest path of a socket in bytes: `sockaddr_un` has 108, and the last is a zero.
const SOCKET_BYTES_MAX: usize = 107;

/// Limit of a label.
const LABEL_BYTES_MAX: usize = 255;

const ON_OFF: Form = Form::Words(&["on", "off"]);

/// A key of a disk.
pub struct DiskKey {
    pub key: Key,
    /// What a reload does if the value has changed.
    pub on_reload: ReloadEffect,
    parse: fn(&mut DiskSpec, &str) -> Result<(), String>,
    show: fn(&DiskSpec) -> Option<String>,
}

/// What a reload of the configuration does with a changed disk. If several keys have changed, the last of the effects
/// counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReloadEffect {
    /// The new limits take effect at once.
    Throttle,
    /// The disk moves to the other file.
    Move,
    /// The front-end is disconnected and may connect again.
    Reconnect,
}

/// The keys of a disk, except for its limits, in the order in which a disk is parsed and written.
pub static DISK_KEYS: &[DiskKey] = &[
    DiskKey::new(
        key(
            "file",
            Form::Text("PATH"),
            "file or block device; `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:OPTION=VALUE...]` is an image in a \
             [Ceph cluster](ceph.md), with options of librbd by their names; `null:SIZE` stores nothing",
        )
        .by_default("required"),
        set_file,
        |disk| Some(disk.file.to_string()),
    )
    .on_reload(ReloadEffect::Move),
    DiskKey::new(
        key("name", Form::Text("NAME"), "name of the disk").by_default("from the file's name"),
        |disk, text| name(text).map(|name| disk.name = name),
        |disk| Some(disk.name.clone()),
    ),
    DiskKey::new(
        key(
            "format",
            Form::Words(&["raw", "qcow2"]),
            "format of the file, never detected from its content; a file that would be raw by its suffix, and begins like an \
             image of another format, is refused",
        )
        .by_default("from the suffix `.raw`, `.img` or `.qcow2`; `raw` for a block device"),
        |disk, text| set_some(&mut disk.format, text),
        |disk| disk.format.map(|format| format.to_string()),
    )
    .on_reload(ReloadEffect::Move),
    DiskKey::new(
        key(
            "data-file",
            Form::Text("PATH"),
            "external data file of a qcow2 image that has one; the image's own name for it is not followed, because the \
             creator of an image could name another disk's file",
        )
        .by_default("none"),
        |disk, text| match text {
            "" => Err("a path is needed".into()),
            text => {
                disk.data_file = Some(text.into());
                Ok(())
            }
        },
        |disk| disk.data_file.as_ref().map(|path| path.display().to_string()),
    )
    .on_reload(ReloadEffect::Move),
    DiskKey::new(
        key(
            "socket",
            Form::Text("PATH"),
            "socket to which the VM connects",
        )
        .by_default(
            "NAME.sock in `$RUNTIME_DIRECTORY` (systemd), `/run/ringdisk` (root), `$XDG_RUNTIME_DIR/ringdisk`, or the \
             working directory",
        ),
        |disk, text| socket(text).map(|path| disk.socket = Some(path)),
        |disk| disk.socket.as_ref().map(|path| path.display().to_string()),
    ),
    DiskKey::new(
        key(
            "socket-mode",
            Form::Text("MODE"),
            "permissions of the socket, as in `0660`; connecting requires permission to write",
        )
        .by_default("0660 with a group, otherwise as for any file that ringdisk creates"),
        |disk, text| mode(text).map(|mode| disk.socket_access.mode = Some(mode)),
        |disk| disk.socket_access.mode.map(|mode| format!("{mode:04o}")),
    ),
    DiskKey::new(
        key(
            "socket-group",
            Form::Text("GROUP"),
            "group of the socket, as in `kvm`",
        )
        .by_default("QEMU's, if root runs ringdisk and sets no owner or mode: `qemu` or `kvm`"),
        |disk, text| credentials::group(text).map(|id| disk.socket_access.group = Some(id)),
        |disk| disk.socket_access.group.map(|id| id.to_string()),
    ),
    DiskKey::new(
        key("socket-owner", Form::Text("USER"), "owner of the socket")
            .by_default("the user as which ringdisk runs"),
        |disk, text| credentials::user(text).map(|id| disk.socket_access.owner = Some(id)),
        |disk| disk.socket_access.owner.map(|id| id.to_string()),
    ),
    DiskKey::new(
        key(
            "cache",
            Form::Words(CacheMode::WORDS),
            "as in QEMU, with [these guarantees](../durability.md): `none` bypasses the host's page cache (O_DIRECT), \
             `writeback` uses it, or librbd's cache for an image in a Ceph cluster; `directsync` and `writethrough` \
             are the same, but a write completes only when it is durable; `unsafe` is `writeback`, but flushes are \
             IGNORED",
        ),
        |disk, text| set(&mut disk.cache, text),
        |disk| Some(disk.cache.to_string()),
    ),
    DiskKey::new(
        key(
            "aio",
            Form::Words(Aio::WORDS),
            "how bytes are moved; [`auto`](threads.md#aio-engines) selects what suits the file and works on this host, \
             and the log gives the choice and its reason",
        ),
        |disk, text| set(&mut disk.aio, text),
        |disk| Some(disk.aio.to_string()),
    ),
    DiskKey::new(
        key(
            "queues",
            Form::Number(1, QUEUES_MAX as u64),
            "number of queues",
        )
        .by_default("the number of CPUs, up to 16, when the disk is first served"),
        |disk, text| set_some(&mut disk.queues, text),
        |disk| disk.queues.map(|queues| queues.to_string()),
    ),
    DiskKey::new(
        key(
            "queue-size",
            Form::PowerOfTwo(QUEUE_SIZE_MIN as u64, Virtqueue::MAX_SIZE as u64),
            "size of each queue",
        ),
        |disk, text| set(&mut disk.queue_size, text),
        |disk| Some(disk.queue_size.to_string()),
    ),
    DiskKey::new(
        key(
            "readonly",
            ON_OFF,
            "`on` keeps the guest from writing; a snapshot in a Ceph cluster is always read-only",
        ),
        set_read_only,
        |disk| Some(on_off(disk.read_only)),
    ),
    DiskKey::new(
        key(
            "serial",
            Form::Text("TEXT"),
            "serial number that the guest sees, up to 20 characters",
        )
        .by_default("none"),
        |disk, text| serial(text).map(|serial| disk.serial = serial),
        |disk| (!disk.serial.is_empty()).then(|| disk.serial.clone()),
    ),
    DiskKey::new(
        key(
            "domain",
            Form::Text("TEXT"),
            "libvirt domain that has the disk: a label in statistics; a disk with it that was attached at run time is detached by \
             [libvirt's hook](../libvirt.md) when that domain ends",
        )
        .by_default("none"),
        |disk, text| label(text).map(|text| disk.labels.domain = Some(text)),
        |disk| disk.labels.domain.clone(),
    )
    .on_reload(ReloadEffect::Throttle),
    DiskKey::new(
        key(
            "target",
            Form::Text("TEXT"),
            "name of the disk in that domain, as in `vda`: a label in statistics",
        )
        .by_default("none"),
        |disk, text| label(text).map(|text| disk.labels.target = Some(text)),
        |disk| disk.labels.target.clone(),
    )
    .on_reload(ReloadEffect::Throttle),
    DiskKey::new(
        key(
            "discard",
            Form::Words(Discard::WORDS),
            "`unmap` frees space that the guest discards, `ignore` keeps it",
        ),
        |disk, text| set(&mut disk.discard, text),
        |disk| Some(disk.discard.to_string()),
    ),
    DiskKey::new(
        key(
            "detect-zeroes",
            Form::Words(DetectZeroes::WORDS),
            "`on` zeroes a range instead of writing zeroes to it, `unmap` also frees its space",
        ),
        |disk, text| set(&mut disk.detect_zeroes, text),
        |disk| Some(disk.detect_zeroes.to_string()),
    ),
    DiskKey::new(
        key(
            "rerror",
            Form::Words(&["report", "stop", "retry"]),
            "[error policy](storage-errors.md) for reads: `report` returns an error to the guest; `stop` holds the \
             request and all later ones until `ringdisk resume`; `retry` holds the request and retries it",
        ),
        |disk, text| set(&mut disk.rerror, text),
        |disk| Some(disk.rerror.to_string()),
    ),
    DiskKey::new(
        key(
            "werror",
            Form::Words(OnError::WORDS),
            "error policy for writes, discards and flushes: as for `rerror`; `enospc` holds and retries a write that \
             finds no space, and reports all other errors",
        ),
        |disk, text| set(&mut disk.werror, text),
        |disk| Some(disk.werror.to_string()),
    ),
    DiskKey::new(
        key(
            "l2-cache-size",
            Form::Text("SIZE"),
            "memory for the tables of a qcow2 image, as in `4M`; with less than 32M, reads may fail while the image's \
             file system is full",
        )
        .by_default(
            "enough for all tables, which is 1 MiB for each 8 GiB with 64 KiB clusters, up to 1 GiB",
        ),
        |disk, text| parse_size(text).map(|bytes| disk.l2_cache_bytes = Some(bytes)),
        |disk| disk.l2_cache_bytes.map(|bytes| bytes.to_string()),
    ),
    DiskKey::new(
        key(
            "logical-block-size",
            Form::Text("512|4096"),
            "size of a sector as the guest sees it, in bytes",
        )
        .by_default("that of the storage"),
        |disk, text| block_size(text).map(|bytes| disk.logical_block = Some(bytes)),
        |disk| disk.logical_block.map(|bytes| bytes.to_string()),
    ),
    DiskKey::new(
        key(
            "physical-block-size",
            Form::Text("512|4096"),
            "size of a physical sector as the guest sees it, in bytes",
        )
        .by_default("that of the storage"),
        |disk, text| block_size(text).map(|bytes| disk.physical_block = Some(bytes)),
        |disk| disk.physical_block.map(|bytes| bytes.to_string()),
    ),
    DiskKey::new(
        key(
            "fixed-buffers",
            ON_OFF,
            "[`on`](threads.md#fixed-buffers) pins all guest memory, which saves CPU for each request. NEVER use it \
             with a balloon, free page reporting or virtio-mem: they would corrupt data",
        ),
        |disk, text| set_on_off(&mut disk.fixed_buffers, text),
        |disk| Some(on_off(disk.fixed_buffers)),
    ),
    DiskKey::new(
        key(
            "lock",
            Form::Words(&["always", "running"]),
            "when the file is locked: while ringdisk serves the disk, or only while a VM runs on it, for [live \
             migration](migration.md)",
        )
        .by_default("`always`"),
        set_lock,
        |disk| (disk.lock == Lock::Running).then(|| "running".into()),
    ),
    DiskKey::new(
        key(
            "iothreads",
            Form::Text("ID,..."),
            "I/O threads for the disk's queues, in turn, by id or by number in the pool",
        )
        .by_default("the next threads of the pool"),
        |disk, text| iothreads(text).map(|ids| disk.iothreads = ids),
        |disk| (!disk.iothreads.is_empty()).then(|| disk.iothreads.join(",")),
    ),
    DiskKey::new(
        key(
            "throttle-group",
            Form::Text("NAME"),
            "group whose limits the disk shares, in addition to its own [limits](#limits)",
        )
        .by_default("none"),
        |disk, text| name(text).map(|group| disk.throttle_group = Some(group)),
        |disk| disk.throttle_group.clone(),
    )
    .on_reload(ReloadEffect::Throttle),
    DiskKey::of_ceph(
        key(
            "conf",
            Form::Text("PATH"),
            "configuration file of the image's [Ceph cluster](ceph.md#connecting)",
        )
        .by_default("`/etc/ceph/ceph.conf`"),
        |disk, text| set_access(disk, "conf", text),
    ),
    DiskKey::of_ceph(
        key("id", Form::Text("USER"), "user of the cluster, as in `vms` for `client.vms`")
            .by_default("`admin`"),
        |disk, text| set_access(disk, "id", text),
    ),
    DiskKey::of_ceph(
        key("keyring", Form::Text("PATH"), "file with the user's key")
            .by_default("from the cluster's configuration file"),
        |disk, text| set_access(disk, "keyring", text),
    ),
    DiskKey::of_ceph(
        key("cluster", Form::Text("NAME"), "name of the cluster").by_default("`ceph`"),
        |disk, text| set_access(disk, "cluster", text),
    ),
    DiskKey::of_ceph(
        key(
            "connections",
            Form::Number(1, CONNECTIONS_MAX as u64),
            "number of connections to the cluster, which disks with the same options share",
        )
        .by_default("the number of CPUs, up to 4"),
        |disk, text| set_access(disk, "connections", text),
    ),
];

impl DiskKey {
    const fn new(
        key: Key,
        parse: fn(&mut DiskSpec, &str) -> Result<(), String>,
        show: fn(&DiskSpec) -> Option<String>,
    ) -> Self {
        Self {
            key,
            on_reload: ReloadEffect::Reconnect,
            parse,
            show,
        }
    }

    /// A key that says how to reach a Ceph cluster. Its value is shown with the disk's file.
    const fn of_ceph(key: Key, parse: fn(&mut DiskSpec, &str) -> Result<(), String>) -> Self {
        Self::new(key, parse, |_| None)
    }

    const fn on_reload(self, on_reload: ReloadEffect) -> Self {
        Self { on_reload, ..self }
    }

    pub fn name(&self) -> &'static str {
        self.key.name
    }

    /// Gives the disk a value.
    ///
    /// # Errors
    /// The text is not a value of this key.
    pub fn set(&self, disk: &mut DiskSpec, text: &str) -> Result<(), String> {
        self.key.form.check(text)?;
        (self.parse)(disk, text)
    }

    /// The disk's value as `set` reads it; none if it follows from other keys or from the environment.
    pub fn show(&self, disk: &DiskSpec) -> Option<String> {
        (self.show)(disk)
    }

    /// The default, in Markdown.
    pub fn default(&self) -> Option<String> {
        let of_new_disk = || {
            let value = self.show(&DiskSpec::new("new".into(), FileSpec::Null(512)))?;
            Some(match value.parse::<u64>() {
                Ok(_) => value,
                Err(_) => format!("`{value}`"),
            })
        };
        self.key.default.map(str::to_owned).or_else(of_new_disk)
    }
}

/// Checks a value of a disk that is not given as a key of it, such as an option of QMP.
///
/// # Errors
/// It is not a value of the key with this name.
///
/// # Panics
/// There is no such key.
pub fn check(name: &str, value: impl Display) -> Result<(), String> {
    let key = DISK_KEYS.iter().find(|key| key.name() == name);
    let mut disk = DiskSpec::new("any".into(), FileSpec::Null(512));
    key.expect("a key of a disk")
        .set(&mut disk, &value.to_string())
}

/// The names of the keys that differ, limits aside.
pub fn changed(before: &DiskSpec, after: &DiskSpec) -> Vec<&'static str> {
    let keys = DISK_KEYS.iter();
    let changed = keys.filter(|key| key.show(before) != key.show(after));
    changed.map(DiskKey::name).collect()
}

/// The effect of a reload that finds `after` where `before` was; none if it finds the same disk.
pub fn effect_of_reload(before: &DiskSpec, after: &DiskSpec) -> Option<ReloadEffect> {
    let keys = DISK_KEYS.iter();
    let changed = keys.filter(|key| key.show(before) != key.show(after));
    let limits = (before.limits != after.limits).then_some(ReloadEffect::Throttle);
    changed.map(|key| key.on_reload).chain(limits).max()
}

fn set<T: FromStr<Err: Display>>(field: &mut T, text: &str) -> Result<(), String> {
    *field = text.parse().map_err(|e: T::Err| e.to_string())?;
    Ok(())
}

fn set_some<T: FromStr<Err: Display>>(field: &mut Option<T>, text: &str) -> Result<(), String> {
    *field = Some(text.parse().map_err(|e: T::Err| e.to_string())?);
    Ok(())
}

fn set_on_off(field: &mut bool, text: &str) -> Result<(), String> {
    *field = text == "on";
    Ok(())
}

fn on_off(on: bool) -> String {
    if on { "on".into() } else { "off".into() }
}

/// The file, and what follows from it if nothing else is given.
fn set_file(disk: &mut DiskSpec, text: &str) -> Result<(), String> {
    disk.file = match text.split_once(':') {
        Some(("null", size)) => null(size)?,
        Some(("rbd", image)) => match Location::parse(image) {
            Ok(location) => FileSpec::Rbd(Box::new(location)),
            Err(problem) => return Err(format!("'{text}' {problem}")),
        },
        _ if text.is_empty() => return Err("is empty".into()),
        _ => FileSpec::Path(text.into()),
    };
    disk.name = default_name(&disk.file);
    disk.read_only = disk.is_snapshot();
    Ok(())
}

fn null(size: &str) -> Result<FileSpec, String> {
    match parse_size(size)? {
        n if n == 0 || !n.is_multiple_of(512) => {
            Err(format!("{n} bytes is not a positive multiple of 512"))
        }
        n => Ok(FileSpec::Null(n)),
    }
}

/// The file's name without its suffix; a character that a name cannot have becomes `-`.
fn default_name(file: &FileSpec) -> String {
    let stem = match file {
        FileSpec::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy(),
        FileSpec::Rbd(location) => location.image.as_str().into(),
        FileSpec::Null(_) => return "null".into(),
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let chars = stem.chars().map(|c| if allowed(c) { c } else { '-' });
    let mut name: String = chars.take(60).collect();
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        name.insert_str(0, "disk");
    }
    name
}

fn set_access(disk: &mut DiskSpec, key: &str, text: &str) -> Result<(), String> {
    match &mut disk.file {
        FileSpec::Rbd(location) => location.access.set(key, text),
        _ => Err("is for images in a Ceph cluster: file=rbd:POOL/IMAGE".into()),
    }
}

fn set_read_only(disk: &mut DiskSpec, text: &str) -> Result<(), String> {
    if text == "off" && disk.is_snapshot() {
        return Err("a snapshot is read-only; leave it out, or serve a clone ('rbd clone')".into());
    }
    set_on_off(&mut disk.read_only, text)
}

fn set_lock(disk: &mut DiskSpec, text: &str) -> Result<(), String> {
    disk.lock = if text == "running" {
        Lock::Running
    } else {
        Lock::Always
    };
    Ok(())
}

fn socket(text: &str) -> Result<PathBuf, String> {
    match text.len() {
        0 => Err("is empty".into()),
        1..=SOCKET_BYTES_MAX => Ok(Path::new(text).into()),
        n => Err(format!(
            "has {n} bytes, and the path of a socket has at most {SOCKET_BYTES_MAX}"
        )),
    }
}

/// Permissions as chmod(1) takes them.
fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ 0..=0o777) => Ok(mode),
        _ => Err(format!("'{text}' is not a mode such as 0660")),
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4k" | "4K" => Ok(4096),
        _ => Err(format!("'{text}' is neither 512 nor 4096")),
    }
}

fn iothreads(text: &str) -> Result<Vec<String>, String> {
    let is_number = |id: &str| !id.is_empty() && id.chars().all(|c| c.is_ascii_digit());
    let each = text.split(',').map(|id| {
        if is_number(id) {
            Ok(id.to_owned())
        } else {
            name(id)
        }
    });
    let ids: Vec<_> = each.collect::<Result<_, _>>()?;
    if ids.len() <= usize::from(QUEUES_MAX) {
        Ok(ids)
    } else {
        Err(format!("more than {QUEUES_MAX} threads"))
    }
}

fn label(text: &str) -> Result<String, String> {
    let is_good =
        !text.is_empty() && text.len() <= LABEL_BYTES_MAX && !text.contains(char::is_control);
    match is_good {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{}' is not 1 to {LABEL_BYTES_MAX} bytes without control characters",
            text.escape_debug()
        )),
    }
}

fn serial(text: &str) -> Result<String, String> {
    if text.len() <= blk::ID_BYTES && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "'{text}' is not up to {} ASCII characters",
            blk::ID_BYTES
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> Result<DiskSpec, String> {
        let mut disk = DiskSpec::new("vm1".into(), FileSpec::Null(512));
        let key = DISK_KEYS.iter().find(|known| known.name() == key);
        key.unwrap().set(&mut disk, value).map(|()| disk)
    }

    /// Each value that the documentation lists is accepted, and shown as it was given.
    #[test]
    fn documented_values_are_accepted() {
        for key in DISK_KEYS {
            let values: Vec<String> = match &key.key.form {
                Form::Text(name) if name.contains('|') => {
                    name.split('|').map(str::to_owned).collect()
                }
                Form::Text(_) => continue,
                Form::Words(words) => words.iter().map(|word| (*word).to_owned()).collect(),
                Form::Number(first, last) | Form::PowerOfTwo(first, last) => {
                    vec![first.to_string(), last.to_string()]
                }
            };
            for value in values {
                let name = key.name();
                let disk = match name {
                    "connections" => format!("file=rbd:p/i,{name}={value}").parse(),
                    _ => format!("null:512,{name}={value}").parse::<DiskSpec>(),
                };
                let disk = disk.unwrap_or_else(|e| panic!("{e}"));
                let shown = key.show(&disk);
                assert!(shown.is_none_or(|shown| shown == value), "{name}={value}");
            }
        }
    }

    /// A default that is a value is the one of a new disk.
    #[test]
    fn documented_defaults_are_true() {
        for key in DISK_KEYS {
            let default = key.default();
            assert!(default.is_some(), "{}", key.name());
            let literal = key.key.default.and_then(|text| text.strip_prefix('`'));
            if let Some(value) = literal.and_then(|text| text.strip_suffix('`'))
                && key.name() != "conf"
                && key.name() != "id"
                && key.name() != "cluster"
            {
                let disk = set(key.name(), value).unwrap();
                assert_eq!(disk, DiskSpec::new("vm1".into(), FileSpec::Null(512)));
            }
        }
    }

    #[test]
    fn reload_disconnects_the_guest_only_if_necessary() {
        let effect = |before: &str, after: &str| {
            effect_of_reload(&before.parse().unwrap(), &after.parse().unwrap())
        };
        assert_eq!(effect("a.raw", "a.raw"), None);
        for limited in ["a.raw,iops=5", "a.raw,throttle-group=g"] {
            assert_eq!(effect("a.raw", limited), Some(ReloadEffect::Throttle));
        }
        let moved = "a.qcow2,format=qcow2,throttle-group=g";
        assert_eq!(effect("a.raw", moved), Some(ReloadEffect::Move));
        let other = "b.raw,name=a,cache=writeback";
        assert_eq!(effect("a.raw", other), Some(ReloadEffect::Reconnect));
    }
}
