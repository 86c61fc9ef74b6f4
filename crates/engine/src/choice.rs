//! Selects the I/O method for a file and gives the reason.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use block::{Aio, Backing};
use rustix::fs::{OFlags, fcntl_getfl, fstat, fstatfs, major, minor};
use thiserror::Error;

use crate::file::DiskFile;
use crate::inline::Inline;
use crate::linux_aio::{LinuxAio, LinuxAioError};
use crate::uring::{Uring, UringError};

/// The I/O methods that work in this process.
#[derive(Debug)]
pub struct Support {
    /// Success, or why io_uring is not available.
    pub io_uring: Result<(), UringError>,
    /// Success, or why Linux AIO is not available.
    pub linux_aio: Result<(), LinuxAioError>,
}

impl Support {
    /// The I/O methods that work in this process. They are tested once, and again if the test failed for lack
    /// of file descriptors.
    pub fn here() -> Arc<Self> {
        static HERE: Mutex<Option<Arc<Support>>> = Mutex::new(None);
        let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(here) = &*here {
            return here.clone();
        }
        let found = Arc::new(Self::probe());
        let no_ring = found.io_uring.as_ref().is_err_and(UringError::is_limit);
        let no_linux_aio = found.linux_aio.as_ref().is_err_and(LinuxAioError::is_limit);
        if !no_ring && !no_linux_aio {
            *here = Some(found.clone());
        }
        found
    }

    /// Tests every method.
    pub fn probe() -> Self {
        Self {
            io_uring: Uring::new().map(drop),
            linux_aio: LinuxAio::new().map(drop),
        }
    }
}

/// The I/O method of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The method; never `Auto`.
    pub aio: Aio,
    /// Why it was chosen; messages show it after the name of `aio`: "O_DIRECT file on ext4".
    pub reason: String,
}

/// Why a file cannot be served with the requested method. Each message says what to do next.
#[derive(Debug, Error)]
pub enum ChoiceError {
    /// io_uring is not available.
    #[error("aio=io_uring: {0}; or use aio=auto, which does not need it")]
    IoUring(String),
    /// The test failed for lack of file descriptors.
    #[error("{0}")]
    Limit(String),
    /// Linux AIO is not available.
    #[error("aio=native: {0}; or use aio=auto, which does not need it")]
    Native(String),
    /// Linux AIO is not asynchronous through the page cache.
    #[error(
        "aio=native needs cache=none or cache=directsync: through the page cache, io_submit blocks the I/O \
        thread and all its disks until the data has arrived; use one of these, or \
        aio=io_uring or aio=threads"
    )]
    Buffered,
    /// The kernel does not report the file's flags.
    #[error("cannot read the flags of the open file: {cause}", cause = block::explain(.0, ""))]
    File(#[from] io::Error),
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.aio, self.reason)
    }
}

/// Selects the I/O method for a file: the one that the operator `wanted`, or with `auto` the one that suits
/// the file best. Threads, if submitting to the file could block the I/O thread, or what its files share.
///
/// # Errors
/// The requested method does not work for this file.
pub fn choose(file: &DiskFile, wanted: Aio, support: &Support) -> Result<Choice, ChoiceError> {
    let choice = choose_local(file.as_fd(), file.backing(), wanted, support)?;
    if file.method(wanted) == wanted {
        return Ok(choice);
    }
    let what = describe(file.as_fd(), file.backing(), !file.is_cached());
    let reason = match wanted {
        Aio::IoUring | Aio::Native => format!(
            "aio={wanted} was asked for, but would block the I/O thread and all its disks while the file's \
             server does not answer; {what}"
        ),
        _ => format!("{what}, whose server may not answer: only this disk waits for it"),
    };
    let aio = Aio::Threads;
    Ok(Choice { aio, reason })
}

/// The same for a file of which it is known that submission does not block.
pub(crate) fn choose_local(
    file: BorrowedFd<'_>,
    backing: Backing,
    wanted: Aio,
    support: &Support,
) -> Result<Choice, ChoiceError> {
    let direct = fcntl_getfl(file)
        .map_err(io::Error::from)?
        .contains(OFlags::DIRECT);
    let what = || describe(file, backing, direct);
    let what_in = |in_memory| {
        if in_memory {
            what() + ", read and written by plain calls while they are quick"
        } else {
            what()
        }
    };
    let choice = |aio, reason| Ok(Choice { aio, reason });
    match wanted {
        Aio::IoUring => match &support.io_uring {
            Ok(()) => choice(wanted, format!("asked for; {}", what())),
            Err(e) => Err(ChoiceError::IoUring(e.to_string())),
        },
        Aio::Native if !direct => Err(ChoiceError::Buffered),
        Aio::Native => match &support.linux_aio {
            Ok(()) => {
                let what = what_in(in_memory(file, backing));
                choice(wanted, format!("asked for; {what}"))
            }
            Err(e) => Err(ChoiceError::Native(e.to_string())),
        },
        Aio::Threads => choice(wanted, format!("asked for; {}", what())),
        Aio::Auto => {
            let in_memory = in_memory(file, backing);
            let what = what_in(in_memory);
            let Err(no_ring) = &support.io_uring else {
                return choice(Aio::IoUring, what);
            };
            // Another method is no alternative here: the disk would use it until it is detached.
            if no_ring.is_limit() {
                return Err(ChoiceError::Limit(no_ring.to_string()));
            }
            let no_ring = no_ring.cause();
            match &support.linux_aio {
                _ if in_memory => choice(Aio::Threads, format!("{what}; {no_ring}")),
                Ok(()) if direct => choice(Aio::Native, format!("{what}; {no_ring}")),
                Err(e) if direct => choice(Aio::Threads, format!("{what}; {no_ring}, and {e}")),
                _ => choice(Aio::Threads, format!("{what}; {no_ring}")),
            }
        }
    }
}

/// Whether the I/O thread itself should perform the file's operations, by plain system calls.
fn in_memory(file: BorrowedFd<'_>, backing: Backing) -> bool {
    !matches!(Inline::probe(file, backing), Inline::Off)
}

/// Describes a file, for example "O_DIRECT file on ext4".
fn describe(file: BorrowedFd<'_>, backing: Backing, direct: bool) -> String {
    let how = if direct { "O_DIRECT" } else { "buffered" };
    match backing {
        Backing::File => format!("{how} file on {}", file_system(file)),
        Backing::BlockDevice => format!("{how} block device {}", device(file)),
    }
}

/// The kernel's name for a block device, as in /sys/block.
fn device(file: BorrowedFd<'_>) -> String {
    let Ok(stat) = fstat(file) else {
        return format!("(descriptor {})", file.as_raw_fd());
    };
    let number = format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let link = std::fs::read_link(format!("/sys/dev/block/{number}"));
    match link.as_deref().map(|path| path.file_name()) {
        Ok(Some(name)) => name.to_string_lossy().into_owned(),
        _ => number,
    }
}

/// The name of the file system that holds a file, found by its magic number (`linux/magic.h`).
fn file_system(file: BorrowedFd<'_>) -> String {
    let Ok(stat) = fstatfs(file.as_fd()) else {
        return "an unknown file system".into();
    };
    let name = match stat.f_type as u32 {
        0xef53 => "ext4",
        0x5846_5342 => "XFS",
        0x9123_683e => "Btrfs",
        0x0102_1994 => "tmpfs",
        0x6969 => "NFS",
        0xf2f5_2010 => "F2FS",
        0x2fc1_2fc1 => "ZFS",
        0xca45_1a4e => "bcachefs",
        0x00c3_6400 => "CephFS",
        0x794c_7630 => "overlayfs",
        0x6573_5546 => "FUSE",
        0x0102_1997 => "9p",
        0x0bd0_0bd0 => "Lustre",
        0x4750_4653 => "GPFS",
        0xfe53_4d42 => "SMB",
        0x0116_1970 => "GFS2",
        other => return format!("file system {other:#x}"),
    };
    name.into()
}
