//! How a request in flight is named, how it ends, and how it is tried again.

use guest::blk::Status;

/// A request in flight: its queue's number on the thread, and its slot in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestId {
    pub queue: usize,
    pub slot: u16,
}

impl RequestId {
    pub const fn new(queue: usize, slot: u16) -> Self {
        Self { queue, slot }
    }
}

/// How a request ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending {
    /// What the guest is told.
    pub status: Status,
    /// Why, as the engine reports it: 0, a negative errno, or a number of bytes.
    pub result: i32,
}

impl Ending {
    pub const OK: Self = Self {
        status: Status::Ok,
        result: 0,
    };

    /// The guest is told of an I/O error. Errno 0 means that the file has ended.
    pub fn io_error(errno: i32) -> Self {
        Self {
            status: Status::IoError,
            result: -errno,
        }
    }

    /// The guest, or a client of the disk, gets an I/O error.
    pub fn error(errno: i32, is_client: bool) -> Self {
        if is_client {
            Self::client_error(errno)
        } else {
            Self::io_error(errno)
        }
    }

    /// The same for a client of the disk, which can be told that there is no space.
    pub fn client_error(errno: i32) -> Self {
        Self {
            status: if block::is_no_space(errno) {
                Status::NoSpace
            } else {
                Status::IoError
            },
            result: -errno,
        }
    }
}

/// How a request continues that storage failed to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// With the operation that failed.
    Operation,
    /// With the read of what a copy-on-write needs beside the guest's bytes.
    Fill,
    /// With another fdatasync.
    Sync,
    /// With its next piece.
    Piece,
    /// With what comes after its piece was moved: the image's tables are to lead to it.
    Commit,
}
