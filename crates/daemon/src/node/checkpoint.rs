//! Checkpoints: which backup a bitmap continues.
//!
//! A bitmap is found by its name only, and says nothing of the backup since which it has recorded. After an older state of a disk
//! was put back, its bitmap is an older one, too, and lacks what a later backup has copied. So each backup that succeeds gives
//! its bitmaps a random checkpoint, and tells the client. The next backup is incremental only if the bitmap
//! has the checkpoint that the client names.
//!
//! A bitmap has its checkpoint in the name of another one next to it, which records nothing and takes no space for bits. It is
//! stored, changed, copied and lost wherever the bitmap is: in an image (qcow2 has no other place that QEMU and `qemu-img`
//! keep), in the state directory, or in memory. A copy of the image has the checkpoint that the image had.
//!
//! Whatever makes a bitmap lack changes since its checkpoint removes that, in the same
//! step.

use std::fmt;
use std::sync::Arc;

use block::DirtyBitmap;

use crate::token::random;

const PREFIX: &str = "ringdisk-checkpoint-";
/// 128 bits.
const DIGITS: usize = 32;
/// How much longer the name of the bitmap with the checkpoint is.
pub const NAME_EXTRA: usize = PREFIX.len() + DIGITS + 1;
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
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_one = text.len() == DIGITS && text.bytes().all(is_digit);
        is_one.then(|| Self(text.into()))
    }

    /// The name of the bitmap that says that `bitmap` has this checkpoint.
    pub fn name_for(&self, bitmap: &str) -> String {
        format!("{PREFIX}{self}-{bitmap}")
    }

    /// The checkpoint of a bitmap. `None` if it has none, or several, which another program has left.
    pub fn of(bitmap: &str, all: &[Arc<DirtyBitmap>]) -> Option<Self> {
        let usable = all.iter().filter(|other| !other.is_inconsistent());
        let mut found = usable.filter_map(|other| {
            let (checkpoint, of) = split(other.name())?;
            (of == bitmap).then_some(checkpoint)
        });
        found.next().filter(|_| found.next().is_none())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The bitmap whose checkpoint a bitmap with this name says. `None` if it is an ordinary one.
pub fn bitmap_of(name: &str) -> Option<&str> {
    split(name).map(|(_, bitmap)| bitmap)
}

fn split(name: &str) -> Option<(Checkpoint, &str)> {
    let (checkpoint, bitmap) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((Checkpoint::parse(checkpoint)?, bitmap))
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
        for bitmap in ["nightly", "", "a-b", "ä", "ringdisk-checkpoint-"] {
            let name = checkpoint.name_for(bitmap);
            assert_eq!(name.len(), bitmap.len() + NAME_EXTRA);
            assert_eq!(split(&name), Some((checkpoint.clone(), bitmap)));
        }
        let upper = format!("{PREFIX}{}-a", "A".repeat(DIGITS));
        for name in ["nightly", PREFIX, "ringdisk-checkpoint-12-a", &upper] {
            assert_eq!(bitmap_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_bitmap_with_two_checkpoints_has_none() {
        let bitmap = |name: String| {
            Arc::new(DirtyBitmap::new(name, GRANULARITY_BITS, 1 << 20, false, false).unwrap())
        };
        let [one, other] = [Checkpoint::new(), Checkpoint::new()];
        let mut all = vec![bitmap("a".into()), bitmap(one.name_for("a"))];
        assert_eq!(Checkpoint::of("a", &all), Some(one));
        assert_eq!(Checkpoint::of("b", &all), None);
        all.push(bitmap(other.name_for("a")));
        assert_eq!(Checkpoint::of("a", &all), None);
        all[1].set_inconsistent();
        assert_eq!(Checkpoint::of("a", &all), Some(other));
    }
}
