use std::io;

use thiserror::Error;

use crate::library::LibraryError;

/// An image cannot be served or changed. Each says what to do next.
#[derive(Debug, Error)]
pub enum RbdError {
    /// There is no librbd.
    #[error("{0}: {1}")]
    Library(String, LibraryError),
    /// The configuration file cannot be read.
    #[error(
        "{image}: Ceph's configuration {file} cannot be read: {error}; conf=PATH names another"
    )]
    Conf {
        /// The image.
        image: String,
        /// The file.
        file: String,
        /// Why.
        error: io::Error,
    },
    /// The library does not take an option.
    #[error("{image}: librados refuses {key}={value}: {error}")]
    Option {
        /// The image.
        image: String,
        /// The option's name.
        key: String,
        /// What it was to be.
        value: String,
        /// Why.
        error: io::Error,
    },
    /// The cluster lets nobody in of this name, or does not answer.
    #[error("{image}: cannot connect to the cluster as client.{id}: {error}; {hint}")]
    Connect {
        /// The image.
        image: String,
        /// The user.
        id: String,
        /// Why.
        error: io::Error,
        /// What to look at.
        hint: &'static str,
    },
    /// There is no such pool.
    #[error(
        "{0}: there is no pool '{1}', or this user may not see it; `ceph osd lspools` lists them"
    )]
    Pool(String, String),
    /// There is no such image or snapshot.
    #[error(
        "{0}: there is no such image or snapshot; `rbd ls` and `rbd snap ls` list them, and `rbd create` makes one"
    )]
    Missing(String),
    /// It may not be opened.
    #[error(
        "{0}: this user may not open it; it needs the capabilities \"mon 'profile rbd' osd 'profile rbd'\", \
        or 'profile rbd-read-only' and readonly=on"
    )]
    Permission(String),
    /// It has a size that no disk has.
    #[error(
        "{0}: its size, {1} bytes, is not a multiple of 512, or nothing; `rbd resize` makes it longer"
    )]
    Size(String, u64),
    /// The image's own settings switch the cache on, where each write must be durable.
    #[error(
        "{image}: {origin} switches rbd_cache on, which goes before what ringdisk says, and with cache={cache} each \
         write must be durable when it is done; `rbd config image rm {image} rbd_cache` (or `rbd config pool rm`) \
         removes it, or use cache=writeback"
    )]
    Cached {
        /// The image.
        image: String,
        /// Where it says so.
        origin: String,
        /// The disk's cache mode.
        cache: String,
    },
    /// Anything else.
    #[error("{0}: cannot {1}: {2}")]
    Io(String, &'static str, io::Error),
}

/// The error that a negative return value of the libraries stands for.
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

/// The errno of an error that [`error_of`] made.
pub(crate) fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(BLOCKLISTED)
}

/// Ceph's EBLOCKLISTED.
pub(crate) const BLOCKLISTED: i32 = libc::ESHUTDOWN;
