use std::io;

use thiserror::Error;

use crate::library::LibraryError;

/// Why an image cannot be served or changed. Each message says what to do next.
#[derive(Debug, Error)]
pub enum RbdError {
    /// librbd cannot be loaded.
    #[error("{0}: {1}")]
    Library(String, LibraryError),
    /// The configuration file cannot be read.
    #[error(
        "{image}: cannot read Ceph's configuration {file}: {error}; conf=PATH selects another file"
    )]
    Conf {
        image: String,
        file: String,
        error: io::Error,
    },
    /// The library does not accept an option.
    #[error("{image}: librados refuses {key}={value}: {error}")]
    Option {
        image: String,
        key: String,
        value: String,
        error: io::Error,
    },
    /// The cluster does not admit this user, or does not answer.
    #[error("{image}: cannot connect to the cluster as client.{id}: {error}; {hint}")]
    Connect {
        image: String,
        /// The user, without `client.`.
        id: String,
        error: io::Error,
        /// What to check next.
        hint: &'static str,
    },
    /// The pool does not exist, or this user may not see it.
    #[error(
        "{0}: there is no pool '{1}', or this user may not see it; `ceph osd lspools` lists them"
    )]
    Pool(String, String),
    /// The image or snapshot does not exist.
    #[error(
        "{0}: there is no such image or snapshot; `rbd ls` and `rbd snap ls` list them, and `rbd create` \
            creates an image"
    )]
    Missing(String),
    /// This user may not open the image.
    #[error(
        "{0}: this user may not open it; it needs the capabilities \"mon 'profile rbd' osd 'profile rbd'\", \
        or 'profile rbd-read-only' and readonly=on"
    )]
    Permission(String),
    /// The image's size is zero or not a multiple of 512 bytes.
    #[error("{0}: its size of {1} bytes is zero or not a multiple of 512; `rbd resize` extends it")]
    Size(String, u64),
    /// The image's own settings enable the cache, although each write must be durable.
    #[error(
        "{image}: {origin} enables rbd_cache and overrides ringdisk, but with cache={cache} each write must be \
         durable on completion; `rbd config image rm {image} rbd_cache` (or `rbd config pool rm`) \
         removes it, or use cache=writeback"
    )]
    Cached {
        image: String,
        /// Where the cache is enabled.
        origin: String,
        cache: String,
    },
    /// Any other operation failed: the image, the operation and the error.
    #[error("{0}: cannot {1}: {2}")]
    Io(String, &'static str, io::Error),
}

/// Converts a negative return value of the libraries to an error.
pub(crate) fn error_of(result: impl Into<i64>) -> io::Error {
    let errno = i32::try_from(-result.into()).unwrap_or(libc::EIO);
    match errno {
        BLOCKLISTED => io::Error::other(
            "this client is on the cluster's blocklist (`ceph osd blocklist ls`), because another one took its lock \
             over, or an administrator put it there",
        ),
        _ => io::Error::from_raw_os_error(errno),
    }
}

/// The errno from which [`error_of`] made an error.
pub(crate) fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(BLOCKLISTED)
}

/// Ceph's EBLOCKLISTED.
pub(crate) const BLOCKLISTED: i32 = libc::ESHUTDOWN;
