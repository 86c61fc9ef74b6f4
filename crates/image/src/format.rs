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
}

/// The format of a file is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownFormat {
    /// Neither the name nor the kind of the file says what it is.
    Unsaid,
    /// The name says that it is qcow2, which cannot be served.
    Qcow2,
}

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
        match path.extension().and_then(|e| e.to_str()) {
            Some("raw" | "img") => Ok(Self::Raw),
            Some("qcow2") => Err(UnknownFormat::Qcow2),
            _ if backing == Backing::BlockDevice => Ok(Self::Raw),
            _ => Err(UnknownFormat::Unsaid),
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "raw" => Ok(Self::Raw),
            "qcow2" => Err("qcow2 is not served yet; \
                'qemu-img convert -O raw' makes a raw disk of it"
                .into()),
            _ => Err(format!("'{text}' is not a format; raw is")),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
        })
    }
}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unsaid => {
                "its name does not say what format it has, and the content is not to be trusted; \
                 add format=raw if every byte of it is the disk's"
            }
            Self::Qcow2 => {
                "qcow2 is not served yet; 'qemu-img convert -O raw' makes a raw disk of it \
                 (or add format=raw if it is a raw disk in spite of its name)"
            }
        })
    }
}

impl Error for UnknownFormat {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_or_the_kind_of_file_says_what_it_is() {
        let of = |name: &str, backing| Format::of(Path::new(name), backing);
        assert_eq!(of("a.raw", Backing::File), Ok(Format::Raw));
        assert_eq!(of("a.b.img", Backing::File), Ok(Format::Raw));
        assert_eq!(of("vm1", Backing::BlockDevice), Ok(Format::Raw));
        assert_eq!(of("vm1", Backing::File), Err(UnknownFormat::Unsaid));
        assert_eq!(of("vm1.vmdk", Backing::File), Err(UnknownFormat::Unsaid));
        assert_eq!(of("vm1.qcow2", Backing::File), Err(UnknownFormat::Qcow2));
        assert_eq!(
            of("lv.qcow2", Backing::BlockDevice),
            Err(UnknownFormat::Qcow2)
        );
    }
}
