//! The storage of a configuration's disks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::words::not_one_of;

/// The values of `backing`, for messages.
const WORDS: [&str; 7] = [
    "file",
    "ram",
    "zram",
    "null",
    "/DIRECTORY/",
    "/PATH",
    "rbd:POOL/IMAGE",
];
/// The maximum number of disks of a configuration: as many as 256 guests with 200 volumes each have.
const DISKS_MAX: usize = 256 * 200;
/// The longest name of a disk in Ceph or the kernel.
const NAME_MAX: usize = 1024;

/// The storage of a configuration's disks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Backing {
    /// Files that the lab creates.
    File,
    /// Files in memory that the lab creates.
    Ram,
    /// Compressed RAM block devices that the lab creates; needs root.
    Zram,
    /// No storage: each request succeeds immediately.
    Null,
    /// Files that the lab creates in this directory, such as that of an NFS mount.
    Directory(PathBuf),
    /// Disks that the plan names.
    Named(Names),
}

/// Names of disks: one for each volume of each guest, or one that contains `{guest}` and `{volume}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Names(Vec<String>);

/// A disk that the plan names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    /// A file or block device.
    Path(PathBuf),
    /// An image in a Ceph cluster.
    Rbd {
        /// Its pool.
        pool: String,
        /// Its name.
        image: String,
    },
}

impl Backing {
    /// Whether the lab creates the disks even without the plan's `create`.
    pub fn is_own(&self) -> bool {
        !matches!(self, Self::Named(_))
    }

    /// The first disk, where only one can be shown; `None` for disks that the lab creates.
    pub fn first(&self) -> Option<Name> {
        match self {
            Self::Named(names) => Some(names.of(0, 0, 1)),
            _ => None,
        }
    }

    /// Whether the disks are images in a Ceph cluster.
    pub fn is_rbd(&self) -> bool {
        matches!(self.first(), Some(Name::Rbd { .. }))
    }
}

impl Names {
    /// The name of a volume, of `volumes` in each guest; all are counted from 0.
    pub fn of(&self, guest: u16, volume: u16, volumes: u16) -> Name {
        let index = usize::from(guest) * usize::from(volumes) + usize::from(volume);
        // A single name is a pattern; otherwise, `check` has verified their number.
        let pattern = &self.0[index.min(self.0.len() - 1)];
        let text = pattern
            .replace("{guest}", &guest.to_string())
            .replace("{volume}", &volume.to_string());
        match text.strip_prefix("rbd:").and_then(|it| it.split_once('/')) {
            Some((pool, image)) => Name::Rbd {
                pool: pool.into(),
                image: image.into(),
            },
            None => Name::Path(text.into()),
        }
    }

    /// The names of all volumes, in order.
    pub fn all(&self, guests: u16, volumes: u16) -> Vec<Name> {
        let of_guest = |guest| (0..volumes).map(move |volume| self.of(guest, volume, volumes));
        (0..guests).flat_map(of_guest).collect()
    }

    /// Checks that each volume of each guest has its own disk.
    ///
    /// # Errors
    /// Volumes share disks; the message says what to write instead.
    pub fn check(&self, guests: u16, volumes: u16) -> Result<(), String> {
        let wanted = usize::from(guests) * usize::from(volumes);
        if wanted > DISKS_MAX {
            return Err(format!(
                "{guests} guests with {volumes} volumes each need {wanted} disks, and a configuration has at most {DISKS_MAX}"
            ));
        }
        let mut names = self.all(guests, volumes);
        names.sort();
        names.dedup();
        let listed = self.0.len();
        if listed > 1 && listed != wanted {
            return Err(format!(
                "backing lists {listed} disks, and {guests} guests with {volumes} volumes each need {wanted}"
            ));
        }
        if names.len() == wanted {
            return Ok(());
        }
        Err(format!(
            "{wanted} disks are needed and backing names {}: several guests or volumes need disks of their own. Write \
             {{guest}} and {{volume}} into the name, as in rbd:bench/vm-{{guest}}-{{volume}}, or list them with commas",
            names.len()
        ))
    }
}

/// Checks a name in a plan: QEMU, librbd and ringdisk must not read an option from it.
fn checked(text: &str) -> Result<String, String> {
    if text.len() > NAME_MAX {
        return Err(format!("a name must not have more than {NAME_MAX} bytes"));
    }
    if text.contains(char::is_control) {
        return Err(format!("{text:?} contains control characters"));
    }
    let mut plain = text.replace("{guest}", "").replace("{volume}", "");
    if plain.contains(['{', '}']) {
        return Err(format!(
            "'{text}': only {{guest}} and {{volume}} are filled in"
        ));
    }
    if text.starts_with('/') {
        return Ok(text.into());
    }
    let Some(image) = text.strip_prefix("rbd:") else {
        return Err(not_one_of(text, &WORDS));
    };
    plain.drain(.."rbd:".len());
    let word = |part: &str| {
        // Programs would read a leading '-' as an option.
        !part.is_empty()
            && !part.starts_with('-')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-{}".contains(c))
    };
    match image.split_once('/') {
        Some((pool, name)) if word(pool) && word(name) => Ok(text.into()),
        _ => Err(format!(
            "'{text}' is not rbd:POOL/IMAGE of letters, digits, '.', '_' and '-'"
        )),
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "file" => return Ok(Self::File),
            "ram" => return Ok(Self::Ram),
            "zram" => return Ok(Self::Zram),
            "null" => return Ok(Self::Null),
            _ if text.starts_with('/') && text.ends_with('/') && !text.contains(',') => {
                return Ok(Self::Directory(text.into()));
            }
            _ => {}
        }
        let names: Vec<String> = text
            .split(',')
            .map(|name| checked(name.trim()))
            .collect::<Result<_, _>>()?;
        let kinds = names.iter().filter(|name| name.starts_with("rbd:")).count();
        if kinds != 0 && kinds != names.len() {
            return Err(format!("'{text}' mixes RBD images with others"));
        }
        Ok(Self::Named(Names(names)))
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
            Self::Ram => f.write_str("ram"),
            Self::Zram => f.write_str("zram"),
            Self::Null => f.write_str("null"),
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Named(names) => f.write_str(&names.0.join(",")),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Rbd { pool, image } => write!(f, "rbd:{pool}/{image}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Names {
        match text.parse().unwrap() {
            Backing::Named(names) => names,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn what_is_read_is_written_again() {
        for text in [
            "file",
            "ram",
            "zram",
            "null",
            "/mnt/nfs/",
            "/dev/vg0/test-{guest}-{volume}",
            "/dev/sdb,/dev/sdc",
            "rbd:bench/vm-{guest}",
        ] {
            assert_eq!(text.parse::<Backing>().unwrap().to_string(), text);
        }
        let first = names("rbd:bench/vm-{guest}-{volume}").of(2, 41, 42);
        assert_eq!(first.to_string(), "rbd:bench/vm-2-41");
    }

    #[test]
    fn what_is_no_backing_is_refused_with_what_is() {
        for (text, word) in [
            ("nul", "'null'"),
            ("rbd:pool", "rbd:POOL/IMAGE"),
            ("rbd:a/b:conf=x", "rbd:POOL/IMAGE"),
            ("rbd:a/b@snap", "rbd:POOL/IMAGE"),
            ("rbd:-p/b", "rbd:POOL/IMAGE"),
            ("/dev/a\nb", "control"),
            ("rbd:a/b/c", "rbd:POOL/IMAGE"),
            ("/dev/{disk}", "{guest}"),
            ("/dev/sdb,rbd:a/b", "mixes"),
        ] {
            let problem = text.parse::<Backing>().unwrap_err();
            assert!(problem.contains(word), "{text}: {problem}");
        }
    }

    #[test]
    fn each_volume_needs_a_disk_of_its_own() {
        assert_eq!(names("/dev/sdb").check(1, 1), Ok(()));
        assert_eq!(names("/dev/sd{volume}").check(1, 42), Ok(()));
        assert_eq!(names("rbd:p/{guest}-{volume}").check(4, 2), Ok(()));
        assert_eq!(names("/dev/sdb,/dev/sdc").check(2, 1), Ok(()));
        for (text, guests, volumes, word) in [
            ("/dev/sdb", 1, 2, "{volume}"),
            ("/dev/sd{volume}", 2, 2, "{guest}"),
            // vm-1 and volume 11 would be vm-11 and volume 1.
            ("/dev/vm{guest}{volume}", 12, 12, "need disks of their own"),
            ("/dev/sdb,/dev/sdb", 2, 1, "need disks of their own"),
            ("/dev/sdb,/dev/sdc", 1, 3, "need 3"),
            ("/dev/{guest}-{volume}", 256, 4096, "at most 51200"),
        ] {
            let problem = names(text).check(guests, volumes).unwrap_err();
            assert!(problem.contains(word), "{text}: {problem}");
        }
    }
}
