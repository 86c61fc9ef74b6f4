//! Where the measured disk is created: beside the VM's disk, and never on it.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use ::lab::plan::Settings;
use ::lab::plan::units::size_text;
use ::lab::storage::rbd::output;
use advisor::model::Disk;

use super::device::{consists_of, sysfs};

/// The sizes of a scratch disk in bytes. A smaller one would be cached by the storage.
const SIZE_MIN: u64 = 256 << 20;
const SIZE_MAX: u64 = 4 << 30;
/// The size in bytes if the size of the VM's disk is unknown.
const SIZE_DEFAULT: u64 = 1 << 30;
/// The share of the free space.
const SHARE: u64 = 10;
/// The lab puts the number of a guest's volume here.
const VOLUME: &str = "{volume}";
/// How all scratch disks are named.
const PREFIX: &str = "ringdisk-measure-";
/// The longest part of a name that tells the disk: the plan's name, `check-` and `-thin` around it, has at most 64
/// characters.
const LABEL_MAX: usize = 53;
/// The end of a longer label that is kept: it names the disk.
const LABEL_END: usize = 16;

/// Where a scratch disk is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file in a new directory in this one.
    Directory(PathBuf),
    /// A logical volume, or with `{volume}` in its name, one for each volume of a guest.
    Volume { group: String, name: String },
    /// An image in a Ceph cluster, or with `{volume}` in its name, one for each volume of a guest.
    Rbd { pool: String, name: String },
    /// A device that the user allows to overwrite.
    Device(PathBuf),
}

/// A scratch disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    pub place: Place,
    /// A name that nothing else has.
    pub name: String,
    /// In bytes, of each volume.
    pub size: u64,
    /// The number of volumes of the guest.
    pub volumes: u16,
    /// What could not be found out here, and how it differs from the VM's storage.
    pub notes: Vec<String>,
}

impl Place {
    /// How its storage is accessed: a word of the property `disk.protocol`.
    fn kind(&self) -> &'static str {
        match self {
            Self::Directory(_) => "file",
            Self::Volume { .. } | Self::Device(_) => "block",
            Self::Rbd { .. } => "rbd",
        }
    }
}

impl Scratch {
    /// The scratch disk for a disk: beside it, or where the user wants it.
    ///
    /// # Errors
    /// There is no place, or it is of another kind than the disk; the message says how to name another.
    pub fn of(label: &str, disk: &Disk, wanted: Option<&str>) -> Result<Self, String> {
        let name = name(label);
        let mut notes = Vec::new();
        let place = match wanted {
            Some(text) => {
                let place = named(text, &name)?;
                check_kind(&place, disk, text)?;
                if !is_beside(&place, disk) {
                    notes.push(format!(
                        "{text} is not where the VM's disk is, whose storage may be slower or faster"
                    ));
                }
                place
            }
            None => beside(disk, &name)?,
        };
        let is_thin = matches!(disk.table.word("backing.lvm"), Some("thin" | "snapshot"));
        if matches!(place, Place::Volume { .. }) && is_thin {
            notes.push("a thick volume stands for a thin one".into());
        }
        Ok(Self {
            place,
            name,
            size: 0,
            volumes: 1,
            notes,
        })
    }

    /// Decides the size: a tenth of the free space, and at most that of the disk.
    ///
    /// # Errors
    /// There is not enough space.
    pub fn with_size(mut self, disk: &Disk, settings: &Settings) -> Result<Self, String> {
        let own = disk_size(disk).unwrap_or(SIZE_DEFAULT);
        let free = match self.free(settings) {
            Ok(free) => free,
            Err(problem) => {
                self.notes
                    .push(format!("the free space is unknown: {problem}"));
                None
            }
        };
        if let Place::Device(path) = &self.place {
            let bytes = free.unwrap_or(SIZE_DEFAULT);
            if bytes < SIZE_MIN {
                return Err(format!(
                    "{} has {} MiB, and at least {} are needed; name a larger one with --scratch",
                    path.display(),
                    bytes >> 20,
                    size_text(SIZE_MIN)
                ));
            }
            self.size = bytes.min(SIZE_MAX) >> 20 << 20;
            return Ok(self);
        }
        let share = free.map_or(SIZE_MAX, |free| free / SHARE);
        if share < SIZE_MIN {
            return Err(format!(
                "{} has {} MiB free; a scratch disk takes at most a tenth of that, and at least {}: free {} MiB, or \
                 name another place with --scratch",
                self.place_text(),
                free.unwrap_or(0) >> 20,
                size_text(SIZE_MIN),
                (SIZE_MIN * SHARE)
                    .saturating_sub(free.unwrap_or(0))
                    .div_ceil(1 << 20)
            ));
        }
        self.size = own.max(SIZE_MIN).min(share).min(SIZE_MAX) >> 20 << 20;
        Ok(self)
    }

    /// The lines of `[storage]`, and the value of `backing` if the plan names the disk.
    pub fn storage(&self) -> (Vec<(&'static str, String)>, Option<String>) {
        let size = ("size", size_text(self.size));
        match &self.place {
            Place::Directory(_) => {
                let directory = self.directory().unwrap_or_default().display().to_string();
                (vec![size, ("directory", directory)], None)
            }
            Place::Volume { group, name } => (
                vec![size, ("create", "on".into())],
                Some(format!("/dev/{group}/{name}")),
            ),
            Place::Rbd { pool, name } => (
                vec![size, ("create", "on".into())],
                Some(format!("rbd:{pool}/{name}")),
            ),
            Place::Device(path) => (vec![size], Some(path.display().to_string())),
        }
    }

    /// The directory that is created for the files, and removed at the end.
    pub fn directory(&self) -> Option<PathBuf> {
        match &self.place {
            Place::Directory(parent) => Some(parent.join(&self.name)),
            _ => None,
        }
    }

    /// The disk, or the disks, for messages.
    pub fn text(&self) -> String {
        let all = |name: String| {
            let count = if name.contains(VOLUME) {
                self.volumes
            } else {
                1
            };
            let each = (0..count).map(|volume| name.replace(VOLUME, &volume.to_string()));
            each.collect::<Vec<_>>().join(", ")
        };
        match (&self.place, self.directory()) {
            (_, Some(directory)) => format!("{}/", directory.display()),
            (Place::Volume { group, name }, _) => all(format!("/dev/{group}/{name}")),
            (Place::Rbd { pool, name }, _) => all(format!("rbd:{pool}/{name}")),
            (Place::Device(path), _) => path.display().to_string(),
            (Place::Directory(path), None) => path.display().to_string(),
        }
    }

    /// Takes a place for so many volumes of a guest.
    ///
    /// # Errors
    /// The user named one disk; the message says how to name several.
    pub fn take_volumes(&mut self, volumes: u16) -> Result<(), String> {
        let next = match &self.place {
            Place::Directory(_) => None,
            Place::Volume { name, .. } | Place::Rbd { name, .. } if name.contains(VOLUME) => None,
            Place::Volume { .. } | Place::Device(_) => Some("/dev/GROUP/NAME-{volume}"),
            Place::Rbd { .. } => Some("rbd:POOL/NAME-{volume}"),
        };
        match next {
            Some(next) if volumes > 1 => Err(format!(
                "it compares {volumes} volumes with one, and --scratch names one disk; use --scratch '{next}'"
            )),
            _ => {
                self.volumes = self.volumes.max(volumes);
                Ok(())
            }
        }
    }

    /// Whether the scratch disk is on this block device of the host.
    pub fn is_on(&self, device: &str) -> bool {
        let number = match &self.place {
            Place::Directory(path) => fs::metadata(path).map(|found| found.dev()),
            Place::Device(path) => fs::metadata(path).map(|found| found.rdev()),
            Place::Volume { .. } | Place::Rbd { .. } => return false,
        };
        let folder = number.ok().and_then(|number| sysfs(number).ok());
        folder.is_some_and(|folder| consists_of(&folder, device))
    }

    fn place_text(&self) -> String {
        match &self.place {
            Place::Directory(path) | Place::Device(path) => path.display().to_string(),
            Place::Volume { group, .. } => format!("the volume group {group}"),
            Place::Rbd { pool, .. } => format!("the pool {pool}"),
        }
    }

    /// The free space in bytes, or the size of a device.
    fn free(&self, settings: &Settings) -> Result<Option<u64>, String> {
        let number = |text: &str| text.trim().parse::<f64>().map(|bytes| bytes as u64).ok();
        match &self.place {
            Place::Directory(path) => {
                let found = rustix::fs::statvfs(path);
                let found = found.map_err(|e| format!("{}: {e}", path.display()))?;
                Ok(Some(found.f_bavail.saturating_mul(found.f_frsize)))
            }
            Place::Volume { group, .. } => {
                let mut command = Command::new("vgs");
                // It would write about descriptors of whoever started ringdisk.
                command.env("LVM_SUPPRESS_FD_WARNINGS", "1");
                command.args(["--noheadings", "--units", "b", "--nosuffix"]);
                command.args(["-o", "vg_free", group]);
                let text = output(&mut command).map_err(|e| format!("{e:#}"))?;
                Ok(number(&text))
            }
            Place::Rbd { pool, .. } => {
                let ceph = &settings.ceph;
                let mut command = Command::new("ceph");
                command.arg("--conf").arg(ceph.conf());
                command.args(["--id", &ceph.user(), "--connect-timeout", "10"]);
                if let Some(keyring) = &ceph.keyring {
                    command.arg("--keyring").arg(keyring);
                }
                command.args(["df", "--format", "json"]);
                let text = output(&mut command).map_err(|e| format!("{e:#}"))?;
                let json: serde_json::Value =
                    serde_json::from_str(&text).map_err(|e| format!("'ceph df': {e}"))?;
                let mut pools = json["pools"].as_array().into_iter().flatten();
                let found = pools.find(|it| it["name"] == pool.as_str());
                Ok(found.and_then(|it| it["stats"]["max_avail"].as_u64()))
            }
            Place::Device(path) => {
                let mut file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
                let end = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0));
                end.map(Some)
                    .map_err(|e| format!("{}: {e}", path.display()))
            }
        }
    }
}

/// The name of the scratch disk for this disk.
fn name(label: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "._-".contains(c) {
            c
        } else {
            '-'
        }
    };
    let whole: String = label.chars().map(plain).collect();
    if whole.len() <= LABEL_MAX {
        return format!("{PREFIX}{whole}");
    }
    // Long names of two VMs may begin, and their disks be named, alike.
    let mut hasher = DefaultHasher::new();
    label.hash(&mut hasher);
    let middle = format!("-{:08x}-", hasher.finish() as u32);
    let begin = LABEL_MAX - LABEL_END - middle.len();
    let end = whole.len() - LABEL_END;
    format!("{PREFIX}{}{middle}{}", &whole[..begin], &whole[end..])
}

/// How the storage of a disk is accessed. QEMU's driver for files can also open a block device.
fn kind_of(disk: &Disk) -> &str {
    match disk.table.word("disk.protocol") {
        Some("file") if disk.table.is_yes("disk.block-as-file") => "block",
        kind => kind.unwrap_or("unknown"),
    }
}

/// What `--scratch` may name for a disk of this kind; nothing if the lab has no such storage.
fn allowed(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "file" => "a directory",
        "block" => "/dev/GROUP/NAME-{volume}, or a device that may be overwritten",
        "rbd" => "rbd:POOL/NAME-{volume}",
        _ => return None,
    })
}

/// Refuses a place of another kind than the disk: its figures would not be about the disk.
fn check_kind(place: &Place, disk: &Disk, wanted: &str) -> Result<(), String> {
    let words = |kind: &str| match kind {
        "file" => "a file".to_owned(),
        "block" => "a block device".to_owned(),
        "rbd" => "an RBD image".to_owned(),
        kind => format!("storage of the kind '{kind}'"),
    };
    let kind = kind_of(disk);
    if kind == place.kind() {
        return Ok(());
    }
    let next = match allowed(kind) {
        Some(allowed) => format!("name {allowed} with --scratch"),
        None => "the lab has no such storage".into(),
    };
    Err(format!(
        "the VM's disk is {}, and --scratch {wanted} is {}, whose figures would not be about the disk; {next}",
        words(kind),
        words(place.kind())
    ))
}

/// Whether a place that the user names is on the storage of the VM's disk, as far as it is known here.
fn is_beside(place: &Place, disk: &Disk) -> bool {
    match place {
        Place::Directory(path) => {
            let number = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
            let own = number(Path::new(&disk.file));
            own.is_some() && own == number(path)
        }
        Place::Volume { group, .. } => volume(disk).as_ref() == Some(group),
        Place::Rbd { pool, .. } => disk.file.split('/').next() == Some(pool),
        Place::Device(_) => false,
    }
}

/// The place beside a disk.
fn beside(disk: &Disk, name: &str) -> Result<Place, String> {
    let kind = kind_of(disk);
    let refuse = |what: &str| {
        let next = allowed(kind).map_or_else(String::new, |allowed| {
            format!("; for a scratch disk, name {allowed} with --scratch")
        });
        Err(format!("{what}{next}"))
    };
    match kind {
        "file" => match Path::new(&disk.file).parent() {
            Some(parent) if parent.is_absolute() && is_plain(&disk.file) => {
                Ok(Place::Directory(parent.to_owned()))
            }
            Some(parent) if is_plain(&disk.file) => {
                let here =
                    std::env::current_dir().map_err(|e| format!("the current directory: {e}"))?;
                Ok(Place::Directory(here.join(parent)))
            }
            _ => refuse(&format!(
                "the directory of '{}' is unknown",
                advisor::text::printable(&disk.file)
            )),
        },
        "block" => match volume(disk) {
            Some(group) => Ok(Place::Volume {
                group,
                name: format!("{name}-{VOLUME}"),
            }),
            None => refuse(&format!(
                "{} is a whole block device, beside which there is no place",
                advisor::text::printable(&disk.file)
            )),
        },
        "rbd" => match disk.file.split('/').collect::<Vec<_>>()[..] {
            [pool, _] if is_word(pool) => Ok(Place::Rbd {
                pool: pool.to_owned(),
                name: format!("{name}-{VOLUME}"),
            }),
            [_, namespace, _] => refuse(&format!(
                "its image is in the namespace '{}', and the lab creates images outside of namespaces only",
                advisor::text::printable(namespace)
            )),
            _ => refuse(&format!(
                "the pool of '{}' is unknown",
                advisor::text::printable(&disk.file)
            )),
        },
        other => refuse(&format!(
            "the lab cannot create a disk on storage of the kind '{other}'"
        )),
    }
}

/// Whether a path can be part of a plan. Shell variables and nodes of JSON are no paths.
fn is_plain(path: &str) -> bool {
    !path.is_empty() && !path.contains(char::is_control) && !path.contains(['$', '`', '{', '}'])
}

fn is_word(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(allowed)
}

/// The volume group of a logical volume.
fn volume(disk: &Disk) -> Option<String> {
    if !matches!(
        disk.table.word("backing.lvm"),
        Some("thick" | "thin" | "snapshot")
    ) {
        return None;
    }
    let name = disk.file.strip_prefix("/dev/")?;
    let group = match name.split_once('/')? {
        // Device-mapper writes GROUP-VOLUME, with each hyphen of a name doubled.
        ("mapper", name) => {
            let marked = name.replace("--", "\0");
            marked.split_once('-')?.0.replace('\0', "-")
        }
        (group, volume) if !volume.contains('/') => group.to_owned(),
        _ => return None,
    };
    is_word(&group).then_some(group)
}

/// The place that the user names.
fn named(text: &str, name: &str) -> Result<Place, String> {
    let wrong = || {
        format!(
            "--scratch '{text}' is not a directory, rbd:POOL/IMAGE, /dev/GROUP/VOLUME, or a device; \
             '{VOLUME}' in the name of an image or a volume stands for a number"
        )
    };
    let is_name = |name: &str| is_word(&name.replace(VOLUME, "0"));
    if let Some(image) = text.strip_prefix("rbd:") {
        return match image.split('/').collect::<Vec<_>>()[..] {
            [pool, name] if is_word(pool) && is_name(name) => Ok(Place::Rbd {
                pool: pool.into(),
                name: name.into(),
            }),
            _ => Err(wrong()),
        };
    }
    let path = std::path::absolute(text).map_err(|e| format!("--scratch '{text}': {e}"))?;
    let volume = path.strip_prefix("/dev").ok().and_then(Path::to_str);
    let volume = match volume.and_then(|volume| volume.split_once('/')) {
        Some((group, name)) if is_word(group) && is_name(name) => Some(Place::Volume {
            group: group.into(),
            name: name.into(),
        }),
        _ => None,
    };
    if let Some(volume) = volume.clone().filter(|_| text.contains(VOLUME)) {
        return Ok(volume);
    }
    if !is_plain(&path.display().to_string()) || path.to_str().is_none() {
        return Err(wrong());
    }
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => Ok(Place::Directory(path)),
        Ok(found) if found.file_type().is_block_device() => Ok(Place::Device(path)),
        Ok(_) => Err(format!(
            "{} exists and is a file; name a directory, in which a scratch disk is created",
            path.display()
        )),
        Err(e) => {
            volume.ok_or_else(|| format!("{}: {e} ({name} would be created there)", path.display()))
        }
    }
}

fn disk_size(disk: &Disk) -> Option<u64> {
    ["disk.size", "backing.qcow2-virtual-size", "backing.size"]
        .into_iter()
        .find_map(|name| disk.table.number(name))
}
