use std::error::Error;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use block::Backing;

/// The format of a disk image, with QEMU's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The file is the disk.
    Raw,
    /// qcow2, of version 2 or 3.
    Qcow2,
}

/// The format of a file is not known: neither its name nor its kind says what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownFormat;

impl Format {
    /// The format of a file for which none was given.
    ///
    /// It follows from the name, and for a block device it is raw. It is never guessed from the
    /// content: a guest that can write to a raw disk can write a header of any format there, and
    /// would then choose which files of the host are opened.
    ///
    /// # Errors
    /// Nothing says what the format is.
    pub fn of(path: &Path, backing: Backing) -> Result<Self, UnknownFormat> {
        match Self::of_name(path) {
            Some(format) => Ok(format),
            None if backing == Backing::BlockDevice => Ok(Self::Raw),
            None => Err(UnknownFormat),
        }
    }

    /// What the name alone says, if anything.
    pub fn of_name(path: &Path) -> Option<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("raw" | "img") => Some(Self::Raw),
            Some("qcow2") => Some(Self::Qcow2),
            _ => None,
        }
    }
}

/// What the first bytes of an image file say, by format. A LUKS header is not among them: guests encrypt whole disks.
const SIGNATURES: &[(&str, usize, &[u8])] = &[
    ("qcow2", 0, b"QFI\xfb"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"COWD"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("VDI", 64, &[0x7f, 0x10, 0xda, 0xbe]),
    ("QED", 0, b"QED\0"),
    ("Parallels", 0, b"WithoutFreeSpace"),
    ("Parallels", 0, b"WithouFreSpacExt"),
];

/// The bytes at the start of a file that [`foreign_format`] looks at.
pub const FORMAT_BYTES: usize = 128;

/// The format of which the first bytes of a file look like an image. A raw disk can look like one as well, because its
/// guest writes what it wants: this is a reason to ask the operator, never to open the file in that format.
pub fn foreign_format(first: &[u8]) -> Option<&'static str> {
    let mut all = SIGNATURES.iter();
    let is = |&&(_, at, bytes): &&(_, usize, &[u8])| {
        first.get(at..).is_some_and(|f| f.starts_with(bytes))
    };
    all.find(is).map(|(name, ..)| *name)
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(format!(
                "'{text}' is not a supported format; use raw or qcow2"
            )),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "its name does not say what format it has, and the content is not to be trusted; add \
            format=qcow2, or format=raw if every byte of it is the disk's",
        )
    }
}

impl Error for UnknownFormat {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_other_formats_are_recognised() {
        let mut vdi = [0; FORMAT_BYTES];
        vdi[64..68].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
        assert_eq!(foreign_format(&vdi), Some("VDI"));
        assert_eq!(foreign_format(b"QFI\xfb\0\0\0\x03"), Some("qcow2"));
        for first in [&b"QFI"[..], b"", &[0; FORMAT_BYTES], b"LUKS\xba\xbe"] {
            assert_eq!(foreign_format(first), None);
        }
    }

    #[test]
    fn format_follows_from_name_or_kind() {
        let of = |name: &str, backing| Format::of(Path::new(name), backing);
        assert_eq!(of("a.raw", Backing::File), Ok(Format::Raw));
        assert_eq!(of("a.b.img", Backing::File), Ok(Format::Raw));
        assert_eq!(of("vm1", Backing::BlockDevice), Ok(Format::Raw));
        assert_eq!(of("vm1", Backing::File), Err(UnknownFormat));
        assert_eq!(of("vm1.vmdk", Backing::File), Err(UnknownFormat));
        assert_eq!(of("vm1.qcow2", Backing::File), Ok(Format::Qcow2));
        assert_eq!(of("lv.qcow2", Backing::BlockDevice), Ok(Format::Qcow2));
    }
}
