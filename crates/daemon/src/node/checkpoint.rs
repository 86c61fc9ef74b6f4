//! Checkpoints: which backup a bitmap continues.
//!
//! A bitmap is found by its name only, and says nothing of the backup since which it has recorded. After an older state of a disk
//! was put back, its bitmap is an older one, too, and lacks what a later backup has copied. So each backup that succeeds gives
//! its bitmaps a random checkpoint, and tells the client. The next backup is incremental only if the bitmap
//! has the checkpoint that the client names.
//!
//! A backup of several disks has one checkpoint, so its bitmaps also say which of its disks they are those of: the image of one
//! may have been put in the place of another. The client knows the disks by their names, and so does the checkpoint. A backup of a
//! single disk needs no name, and that disk can be renamed.
//!
//! A bitmap has its checkpoint in the name of another one next to it, which records nothing and takes no space for bits. It is
//! stored, changed, copied and lost wherever the bitmap is: in an image (qcow2 has no other place that QEMU and `qemu-img`
//! keep), in the state directory, or in memory. A copy of the image has the checkpoint that the image had: it differs from the
//! backup only in what its own bitmap shows, whatever is written to the original.
//!
//! Whatever makes a bitmap lack changes since its checkpoint removes that, in the same
//! step.

use std::fmt;
use std::sync::Arc;

use block::DirtyBitmap;

use crate::token::{hash, random};

const PREFIX: &str = "ringdisk-checkpoint-";
/// 128 bits.
const DIGITS: usize = 32;
/// 64 bits of the hash of a disk's name.
const DISK_DIGITS: usize = 16;
/// How much longer the name of the bitmap with the checkpoint is, at most.
pub const NAME_EXTRA: usize = PREFIX.len() + DIGITS + 1 + DISK_DIGITS + 1;
/// The largest that there is.
pub const GRANULARITY_BITS: u32 = 31;

/// The identity of a backup that has succeeded: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint(String);

impl Checkpoint {
    /// A new one, which no other backup has.
    pub fn new() -> Self {
        Self(format!("{:016x}{:016x}", random(), random()))
    }

    /// `None` if the text is none.
    pub fn parse(text: &str) -> Option<Self> {
        has_digits(text, DIGITS).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn has_digits(text: &str, count: usize) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == count && text.bytes().all(is_digit)
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a bitmap continues: a disk of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continued {
    /// The backup.
    pub checkpoint: Checkpoint,
    /// The hash of the disk's name, if the backup has several.
    disk: Option<String>,
}

impl Continued {
    /// `disk` is the name of the disk, if the backup has several.
    pub fn new(checkpoint: Checkpoint, disk: Option<&str>) -> Self {
        let disk = disk.map(|name| hash(name.as_bytes()));
        Self { checkpoint, disk }
    }

    /// The name of the bitmap that says that `bitmap` continues this.
    pub fn name_for(&self, bitmap: &str) -> String {
        let (checkpoint, disk) = (&self.checkpoint, self.disk.as_deref());
        let (dot, disk) = disk.map_or(("", ""), |disk| (".", disk));
        format!("{PREFIX}{checkpoint}{dot}{disk}-{bitmap}")
    }

    /// What a bitmap continues. `None` if it says nothing, or several things, which another program has left.
    pub fn of(bitmap: &str, all: &[Arc<DirtyBitmap>]) -> Option<Self> {
        let usable = all.iter().filter(|other| !other.is_inconsistent());
        let mut found = usable.filter_map(|other| {
            let (continued, of) = split(other.name())?;
            (of == bitmap).then_some(continued)
        });
        found.next().filter(|_| found.next().is_none())
    }

    /// Whether it is the disk that had this name when it was backed up.
    pub fn is_of_disk(&self, name: &str) -> bool {
        let is_it = |disk: &String| *disk == hash(name.as_bytes());
        self.disk.as_ref().is_none_or(is_it)
    }
}

/// The bitmap whose checkpoint a bitmap with this name says. `None` if it is an ordinary one.
pub fn bitmap_of(name: &str) -> Option<&str> {
    split(name).map(|(_, bitmap)| bitmap)
}

fn split(name: &str) -> Option<(Continued, &str)> {
    let (continued, bitmap) = name.strip_prefix(PREFIX)?.split_once('-')?;
    let (checkpoint, disk) = match continued.split_once('.') {
        Some((checkpoint, disk)) => (checkpoint, Some(disk)),
        None => (continued, None),
    };
    let checkpoint = Checkpoint::parse(checkpoint)?;
    let disk = disk.map(str::to_owned);
    let is_valid = disk.iter().all(|disk| has_digits(disk, DISK_DIGITS));
    is_valid.then_some((Continued { checkpoint, disk }, bitmap))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_checkpoints_are_read_as_they_are_written() {
        let checkpoint = Checkpoint::new();
        assert_ne!(checkpoint, Checkpoint::new());
        assert_eq!(
            Checkpoint::parse(checkpoint.as_str()),
            Some(checkpoint.clone())
        );
        for disk in [None, Some("vm1"), Some("")] {
            let continued = Continued::new(checkpoint.clone(), disk);
            for bitmap in ["nightly", "", "a-b", "ä", "ringdisk-checkpoint-", ".-"] {
                let name = continued.name_for(bitmap);
                assert!(name.len() <= bitmap.len() + NAME_EXTRA);
                assert_eq!(split(&name), Some((continued.clone(), bitmap)));
            }
            assert_eq!(continued.is_of_disk("vm2"), disk.is_none());
            assert!(continued.is_of_disk(disk.unwrap_or("any")));
        }
        let upper = format!("{PREFIX}{}-a", "A".repeat(DIGITS));
        let short = format!("{PREFIX}{checkpoint}.12-a");
        for name in [
            "nightly",
            PREFIX,
            "ringdisk-checkpoint-12-a",
            &upper,
            &short,
        ] {
            assert_eq!(bitmap_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_bitmap_with_two_checkpoints_has_none() {
        let bitmap = |name: String| {
            Arc::new(DirtyBitmap::new(name, GRANULARITY_BITS, 1 << 20, false, false).unwrap())
        };
        let [one, other] = [0; 2].map(|_| Continued::new(Checkpoint::new(), Some("d")));
        let mut all = vec![bitmap("a".into()), bitmap(one.name_for("a"))];
        assert_eq!(Continued::of("a", &all), Some(one));
        assert_eq!(Continued::of("b", &all), None);
        all.push(bitmap(other.name_for("a")));
        assert_eq!(Continued::of("a", &all), None);
        all[1].set_inconsistent();
        assert_eq!(Continued::of("a", &all), Some(other));
    }
}
