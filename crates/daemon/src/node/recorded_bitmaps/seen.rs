//! What a disk's file, device or image in a cluster looks like, to notice that another program has written to it.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::{DiskFile, Identity};
use rustix::fs::{major, minor};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::mark::Mark;
use crate::node::journal::boot;
use crate::token::token;

/// The kernel's times of files advance in steps of at most this (a jiffy at 100 Hz).
const TIME_STEP: Duration = Duration::from_millis(10);

/// The same of file systems that store no parts of a second: ext4 with inodes of 128 bytes, FAT.
const TIME_STEP_COARSE: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub struct Seen {
    /// The boot of the host.
    boot: String,
    /// As [`Identity`] has it. Device numbers may change with each boot.
    device: u64,
    inode: u64,
    kind: Kind,
}

#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// When its content and its inode changed, in seconds and nanoseconds.
    File {
        modified: (i64, i64),
        changed: (i64, i64),
    },
    Device {
        /// What is the same after each boot, if the kernel knows something like that.
        id: Option<String>,
        /// Another one each time that a device gets this number.
        sequence: Option<String>,
        /// How often and how much was written to it since then.
        written: Option<String>,
    },
    /// In a Ceph cluster.
    Image {
        /// No other image ever has it.
        id: String,
        /// The token of the process that has seen it, for its [mark](super::mark); empty if it had the lock not marked.
        mark: String,
        /// The token with which it had begun, until it left its own.
        begun: String,
        /// That with which a process begins that continues.
        next: String,
        /// Of the header object, without a lock.
        version: u64,
    },
}

/// What identifies the storage of a disk, as far as names of files can.
pub struct StorageKey {
    pub text: String,
    /// No other storage ever has it.
    pub is_unique: bool,
}

/// Another client may have written to an image.
pub const LOCK_LOST: &str =
    "another client has had the lock of the disk's image, and may have written to it";
const CHANGED_IMAGE: &str = "another client has had the lock of the disk's image meanwhile, or has changed the image, or the state directory is a copy that \
     is older than the last change";
const OTHER_IMAGE: &str = "it is that of another image, which had this name";

/// A write of a killed process may reach the file system this much after it was submitted.
const SUBMISSION_MAX: Duration = Duration::from_secs(2);

/// A smaller difference of [`clock_offset`] may be this process waiting for a CPU between two looks at the clocks.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(100);

/// How far the clock of the times of files is ahead of the monotonic one, in nanoseconds. It changes when the clock is set.
pub fn clock_offset() -> u64 {
    let now = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    let monotonic = now(ClockId::Monotonic);
    let offset = now(ClockId::Realtime).saturating_sub(monotonic);
    u64::try_from(offset.as_nanos()).unwrap_or(u64::MAX)
}

/// When the host started, since the epoch.
pub fn boot_time() -> Duration {
    let now = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    now(ClockId::Realtime).saturating_sub(now(ClockId::Boottime))
}

impl Seen {
    /// As it was found when it was opened and locked.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn found(file: &DiskFile) -> io::Result<Self> {
        Self::of(file, file.found())
    }

    fn of(file: &DiskFile, stat: &Metadata) -> io::Result<Self> {
        let Identity { device, inode } = file.identity();
        let kind = match file.backing() {
            block::Backing::BlockDevice => of_device(inode),
            block::Backing::File => Kind::File {
                modified: (stat.mtime(), stat.mtime_nsec()),
                changed: (stat.ctime(), stat.ctime_nsec()),
            },
        };
        Ok(Self {
            boot: this_boot()?,
            device,
            inode,
            kind,
        })
    }

    /// As it is now, at a time at which the next write gives the file other times. Nothing writes to it meanwhile.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn at_rest(file: &DiskFile) -> io::Result<Self> {
        let now = File::from(file.as_fd().try_clone_to_owned()?);
        if let block::Backing::File = file.backing() {
            // fdatasync(2) does not make the times durable: after a power cut, they would be those of another state.
            now.sync_all()?;
        }
        let now = now.metadata()?;
        let seen = Self::of(file, &now)?;
        if let Kind::File { changed, .. } = seen.kind {
            let (seconds, nanoseconds) = changed;
            let changed = Duration::new(seconds.max(0) as u64, nanoseconds as u32);
            let until = match nanoseconds {
                0 => changed + TIME_STEP_COARSE,
                _ => changed + 2 * TIME_STEP,
            };
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            thread::sleep(
                until
                    .saturating_sub(now.unwrap_or_default())
                    .min(TIME_STEP_COARSE),
            );
        }
        Ok(seen)
    }

    /// An image in a Ceph cluster, with the token of this process, and the one that it begins with; empty if there are none.
    ///
    /// # Errors
    /// The kernel does not say which boot this is.
    pub fn of_image(id: &str, [mark, begun]: [String; 2], version: u64) -> io::Result<Self> {
        let (id, next) = (id.to_owned(), token());
        let kind = Kind::Image {
            id,
            mark,
            begun,
            next,
            version,
        };
        Ok(Self {
            boot: this_boot()?,
            device: 0,
            inode: 0,
            kind,
        })
    }

    /// The next token for the lock of an image in a Ceph cluster, and whether that was seen in this boot.
    ///
    /// # Errors
    /// The kernel does not say which boot this is, or it is no image.
    pub fn next_of_image(&self) -> io::Result<(&str, bool)> {
        match &self.kind {
            Kind::Image { next, .. } => Ok((next, self.boot == this_boot()?)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Checks that no other client has written to an image in a Ceph cluster since: while it was in use, or since it was stored.
    /// The other arguments are what is found now.
    ///
    /// # Errors
    /// What may have happened.
    pub fn check_image(
        &self,
        id_now: &str,
        found: Option<&Mark>,
        version_now: u64,
        is_stored: bool,
    ) -> Result<(), &'static str> {
        let Kind::Image {
            id,
            mark,
            begun,
            next,
            version,
        } = &self.kind
        else {
            return Err(OTHER_IMAGE);
        };
        let has = |token: &str, is_new| {
            let is_it = |found: &Mark| found.is_new == is_new && found.token == token;
            !token.is_empty() && found.is_some_and(is_it)
        };
        let is_begun = has(next, true) || !is_stored && has(begun, true);
        let is_in_use = !is_stored && has(mark, false);
        let is_unchanged = is_stored && found.is_none() && *version == version_now;
        match () {
            () if id != id_now => Err(OTHER_IMAGE),
            () if is_begun || is_in_use || is_unchanged => Ok(()),
            () => Err(CHANGED_IMAGE),
        }
    }

    /// What the records of a file or device are found by.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn key_of(file: &DiskFile) -> io::Result<StorageKey> {
        let seen = Self::found(file)?;
        let inode = seen.inode;
        let unique = match &seen.kind {
            Kind::File { .. } => {
                let born = file.found().created().ok();
                let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
                born.map(|born| format!("file {inode} {}", born.as_nanos()))
            }
            Kind::Device { id, .. } => {
                let unique = id.as_ref().filter(|id| is_unique(id));
                unique.map(|id| format!("device {id}"))
            }
            Kind::Image { .. } => None,
        };
        let is_unique = unique.is_some();
        let text = unique.unwrap_or_else(|| format!("{} {inode}", seen.device));
        Ok(StorageKey { text, is_unique })
    }

    /// As [`Identity`] has it.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// What no other device has, if it is a device that has something like that.
    pub fn unique_id(&self) -> Option<&str> {
        match &self.kind {
            Kind::Device { id, .. } => id.as_deref().filter(|id| is_unique(id)),
            Kind::File { .. } | Kind::Image { .. } => None,
        }
    }

    /// Whether it is the file or device that is there `now`, whatever has happened to it since. `has_same_key`: both have a key
    /// that no other storage has. `is_same_path`: both are at one path.
    pub fn is_storage_of(&self, now: &Self, has_same_key: bool, is_same_path: bool) -> bool {
        let is_same_boot = self.is_same_boot(now);
        match (&self.kind, &now.kind) {
            (Kind::File { .. }, Kind::File { .. }) => {
                let is_same_device = is_same_boot && self.device == now.device;
                self.inode == now.inode && (has_same_key || is_same_path || is_same_device)
            }
            (Kind::Device { id, .. }, Kind::Device { id: id_now, .. }) => {
                let is_same_number = is_same_boot && self.inode == now.inode;
                let has_same_id = || is_same_path || id.as_deref().is_some_and(is_unique);
                is_same_number || id == id_now && has_same_id()
            }
            _ => false,
        }
    }

    /// Whether it was seen in this boot, or that is not known.
    pub fn is_of_this_boot(&self) -> bool {
        this_boot().map_or(true, |boot| boot == self.boot)
    }

    pub fn is_same_boot(&self, now: &Self) -> bool {
        self.boot == now.boot
    }

    /// Whether it is the same file or device, in the same boot.
    pub fn is_same_disk(&self, now: &Self) -> bool {
        let is_same_device = match (&self.kind, &now.kind) {
            (Kind::Device { sequence, .. }, Kind::Device { sequence: now, .. }) => sequence == now,
            (Kind::File { .. }, Kind::File { .. }) => true,
            (Kind::Image { id, .. }, Kind::Image { id: now, .. }) => id == now,
            _ => false,
        };
        is_same_device && (self.device, self.inode) == (now.device, now.inode)
    }

    /// Whether it is a file that was written or changed after `noted`, the time at which the last write began by the monotonic
    /// clock, and long enough after it for another program to be the cause. That cannot be known if the clock was set
    /// since `offset`, an earlier [`clock_offset`].
    pub fn is_changed_after(&self, noted: Duration, offset: u64) -> bool {
        let Kind::File { modified, changed } = self.kind else {
            return false;
        };
        let (seconds, nanoseconds) = modified.max(changed);
        let last = Duration::new(seconds.max(0) as u64, nanoseconds as u32);
        let is_set = Duration::from_nanos(clock_offset().abs_diff(offset)) > CLOCK_TOLERANCE;
        is_set || last > noted + Duration::from_nanos(offset) + SUBMISSION_MAX
    }

    /// Whether it is the same file or device after a crash of the host, and nothing was written to it by others: it was not
    /// changed after `last`, nor after `boot`, times since the epoch. An image has been [checked](Self::check_image).
    pub fn is_same_after_crash(&self, now: &Self, last: Duration, boot: Duration) -> bool {
        match (&self.kind, &now.kind) {
            (Kind::File { .. }, &Kind::File { modified, changed }) => {
                let (seconds, nanoseconds) = modified.max(changed);
                let found = Duration::new(seconds.max(0) as u64, nanoseconds as u32);
                self.inode == now.inode && found <= last.min(boot)
            }
            (
                Kind::Device { id, .. },
                Kind::Device {
                    id: id_now,
                    written,
                    ..
                },
            ) => id == id_now && is_unwritten(written.as_deref()),
            (Kind::Image { id, .. }, Kind::Image { id: now, .. }) => id == now,
            _ => false,
        }
    }

    /// Whether it is the same file or device, and nothing was written to it, as far as that can be seen. An image has been
    /// [checked](Self::check_image).
    pub fn is_unchanged(&self, now: &Self) -> bool {
        match (&self.kind, &now.kind) {
            (Kind::File { .. }, Kind::File { .. }) => {
                self.inode == now.inode && self.kind == now.kind
            }
            (Kind::Device { .. }, Kind::Device { .. }) if self.is_same_boot(now) => {
                // What is below a device that was set up again may be another state of it.
                self.is_same_disk(now) && self.kind == now.kind
            }
            (
                Kind::Device { id, .. },
                Kind::Device {
                    id: id_now,
                    written,
                    ..
                },
            ) => id == id_now && is_unwritten(written.as_deref()),
            (Kind::Image { id, .. }, Kind::Image { id: now, .. }) => id == now,
            _ => false,
        }
    }
}

/// Whether a device's counters say that nothing was written to it since the host started, or it was set up: then they begin at 0.
fn is_unwritten(counted: Option<&str>) -> bool {
    let mut numbers = counted.unwrap_or_default().split(' ');
    numbers.all(|number| number.is_empty() || number == "0")
}

fn this_boot() -> io::Result<String> {
    Ok(format!("{:032x}", u128::from_be_bytes(boot()?)))
}

/// Whether no other device has this id: device mapper makes such, and disks that have a name from a registry.
fn is_unique(id: &str) -> bool {
    let kinds = [
        "LVM-", "CRYPT-", "mpath-", "DMRAID-", "naa.", "eui.", "uuid.",
    ];
    kinds.iter().any(|kind| id.starts_with(kind))
}

fn of_device(number: u64) -> Kind {
    let directory = format!("/sys/dev/block/{}:{}", major(number), minor(number));
    let read = |name: &str| {
        let text = fs::read_to_string(format!("{directory}/{name}")).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let ids = [
        "dm/uuid",
        "loop/backing_file",
        "wwid",
        "device/wwid",
        "serial",
        "partition",
        "start",
        "../wwid",
        "../serial",
    ];
    let id: Vec<_> = ids.iter().filter_map(|name| read(name)).collect();
    // Writes, merged ones, sectors; discards, merged ones, sectors (Documentation/block/stat.rst).
    let written = read("stat").map(|stat| {
        let fields: Vec<_> = stat.split_ascii_whitespace().collect();
        let counted = [4, 5, 6, 11, 12, 13].map(|field| fields.get(field).copied().unwrap_or("0"));
        counted.join(" ")
    });
    Kind::Device {
        id: (!id.is_empty()).then(|| id.join(" ")),
        sequence: read("diskseq").or_else(|| read("../diskseq")),
        written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_changed_after_the_last_write_or_when_the_clock_was_set() {
        let noted = Duration::from_secs(1000);
        let offset = clock_offset();
        let of = |late: Duration| {
            let last = noted + Duration::from_nanos(offset) + late;
            let modified = (last.as_secs() as i64, i64::from(last.subsec_nanos()));
            Seen {
                boot: String::new(),
                device: 0,
                inode: 0,
                kind: Kind::File {
                    modified,
                    changed: (0, 0),
                },
            }
        };
        let hour = 3_600_000_000_000;
        assert!(!of(Duration::ZERO).is_changed_after(noted, offset));
        assert!(of(Duration::from_secs(3)).is_changed_after(noted, offset));
        for offset in [0, offset - hour, offset + hour] {
            assert!(of(Duration::ZERO).is_changed_after(noted, offset));
        }
    }

    #[test]
    fn storage_is_recognized_by_what_no_other_has() {
        let seen = |boot: &str, device, inode, kind| Seen {
            boot: boot.into(),
            device,
            inode,
            kind,
        };
        let file = |boot, device, inode| {
            let (modified, changed) = ((1, 2), (3, inode as i64));
            seen(boot, device, inode, Kind::File { modified, changed })
        };
        let is_same = |then: Seen, now: Seen| {
            [(false, false), (true, false), (false, true)].map(|(has_same_key, is_same_path)| {
                then.is_storage_of(&now, has_same_key, is_same_path)
            })
        };
        assert_eq!(is_same(file("a", 1, 7), file("a", 1, 7)), [true; 3]);
        // Another file system, or the same after a restart.
        let unknown = [false, true, true];
        assert_eq!(is_same(file("a", 1, 7), file("a", 2, 7)), unknown);
        assert_eq!(is_same(file("a", 1, 7), file("b", 1, 7)), unknown);
        assert_eq!(is_same(file("a", 1, 7), file("a", 1, 8)), [false; 3]);
        let device = |boot, number, id: Option<&str>| {
            let id = id.map(String::from);
            let (sequence, written) = (None, None);
            let kind = Kind::Device {
                id,
                sequence,
                written,
            };
            seen(boot, u64::MAX, number, kind)
        };
        let (x, y) = (Some("LVM-x"), Some("LVM-y"));
        assert_eq!(is_same(device("a", 7, x), device("a", 7, x)), [true; 3]);
        // Its identity is in records of all versions.
        assert_eq!(is_same(device("a", 7, x), device("b", 8, x)), [true; 3]);
        assert_eq!(is_same(device("a", 7, x), device("b", 7, y)), [false; 3]);
        let of_path = [false, false, true];
        assert_eq!(is_same(device("a", 7, None), device("b", 7, None)), of_path);
        assert_eq!(is_same(device("a", 7, x), file("a", 1, 7)), [false; 3]);
    }

    #[test]
    fn images_are_the_same_with_their_mark_or_version() {
        let tokens = ["m", "begun"].map(String::from);
        let then = Seen::of_image("f/1//a", tokens, 7).unwrap();
        let next = then.next_of_image().unwrap().0.to_owned();
        let mark = |token: &str, is_new| Some(Mark::new(token.to_owned(), is_new));
        let check = |id, found: Option<Mark>, version, is_stored| {
            then.check_image(id, found.as_ref(), version, is_stored)
        };
        let (stored, in_use) = (true, false);
        assert_eq!(check("f/1//a", None, 7, stored), Ok(()));
        assert_eq!(check("f/1//a", mark(&next, true), 9, stored), Ok(()));
        assert_eq!(check("f/1//a", mark(&next, true), 9, in_use), Ok(()));
        assert_eq!(check("f/1//a", mark("m", false), 9, in_use), Ok(()));
        assert_eq!(check("f/1//a", mark("begun", true), 9, in_use), Ok(()));
        // It is not known where this record was while the disk was in use.
        let changed = Err(CHANGED_IMAGE);
        assert_eq!(check("f/1//a", mark("m", false), 7, stored), changed);
        assert_eq!(check("f/1//a", mark(&next, false), 9, stored), changed);
        assert_eq!(check("f/1//a", None, 8, stored), changed);
        assert_eq!(
            check("f/1//b", mark(&next, true), 7, stored),
            Err(OTHER_IMAGE)
        );
        assert_eq!(check("f/1//a", mark("begun", true), 9, stored), changed);
        for (token, is_new) in [
            ("n", false),
            (&*next, false),
            ("n", true),
            ("m", true),
            ("begun", false),
        ] {
            assert_eq!(check("f/1//a", mark(token, is_new), 7, in_use), changed);
        }
        assert_eq!(check("f/1//a", None, 7, in_use), changed);
        // Without a mark, nothing proves anything.
        let unmarked = Seen::of_image("f/1//a", [String::new(), String::new()], 7).unwrap();
        for found in [None, mark("", true), mark("", false)] {
            assert!(
                unmarked
                    .check_image("f/1//a", found.as_ref(), 7, in_use)
                    .is_err()
            );
        }
    }

    #[test]
    fn a_device_is_unchanged_if_it_was_neither_written_nor_set_up_again() {
        let seen = |boot: &str, sequence: &str, written: &str| Seen {
            boot: boot.into(),
            device: 0,
            inode: 7,
            kind: Kind::Device {
                id: Some("a".into()),
                sequence: Some(sequence.into()),
                written: Some(written.into()),
            },
        };
        let [stored, zero] = ["9 0 72 0 0 0", "0 0 0 0 0 0"];
        let then = seen("1", "5", stored);
        assert!(then.is_unchanged(&seen("1", "5", stored)));
        assert!(!then.is_unchanged(&seen("1", "5", "10 0 80 0 0 0")));
        for written in [zero, stored] {
            assert!(!then.is_unchanged(&seen("1", "6", written)));
        }
        assert!(then.is_unchanged(&seen("2", "6", zero)));
        assert!(!then.is_unchanged(&seen("2", "6", "1 0 8 0 0 0")));
    }

    #[test]
    fn writes_of_others_show_after_a_crash() {
        let seen = |kind| Seen {
            boot: String::new(),
            device: 0,
            inode: 7,
            kind,
        };
        let file = |changed| {
            seen(Kind::File {
                modified: (5, 0),
                changed: (changed, 0),
            })
        };
        let seconds = Duration::from_secs;
        let is_same = |changed, last, boot| {
            file(1).is_same_after_crash(&file(changed), seconds(last), seconds(boot))
        };
        assert!(is_same(50, 60, 70) && is_same(3, 5, 5));
        assert!(!is_same(61, 60, 70) && !is_same(71, 80, 70) && !is_same(3, 4, 70));
        let other = Seen {
            inode: 8,
            ..file(1)
        };
        assert!(!other.is_same_after_crash(&file(1), seconds(60), seconds(60)));
        let device = |id: &str, written: &str| {
            seen(Kind::Device {
                id: Some(id.into()),
                sequence: None,
                written: Some(written.into()),
            })
        };
        let before = device("a", "9 0 72 0 0 0");
        let is_same = |now: Seen| before.is_same_after_crash(&now, seconds(0), seconds(0));
        assert!(is_same(device("a", "0 0 0 0 0 0")));
        assert!(!is_same(device("a", "1 0 8 0 0 0")) && !is_same(device("b", "0 0 0 0 0 0")));
        assert!(!is_same(file(0)));
    }
}
