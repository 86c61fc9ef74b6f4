//! Stage 3: what a request needs. The image says where its range is.
//!
//! Every request passes this stage before anything is submitted for it, also one that a killed process left in flight: the
//! next process fetches it again. So this is where the bits of dirty bitmaps are set.

use block::{FileOffset, RecordingBitmaps, Request, TimeNoted};
use guest::blk::Status;
use image::{Extent, Image};

use crate::disk::Disk;

pub(crate) enum Plan {
    /// No I/O: the answer is this status, with this many bytes written to the guest.
    Done(Status, u32),
    /// The disk's serial.
    Id,
    /// The image's tables are looked up, piece by piece.
    Map,
    /// Its range is noted first as being written to.
    Note,
    /// An operation on the file, from this offset on.
    Operation(FileOffset),
    /// A flush: an fdatasync, which it may share with others.
    Sync,
}

#[inline]
pub(crate) fn plan(
    disk: &Disk,
    image: &Image,
    bitmaps: &RecordingBitmaps,
    request: Request,
    noted: &mut TimeNoted,
) -> Plan {
    let at = match request {
        Request::GetId => return Plan::Id,
        Request::Flush if disk.flushes() => return Plan::Sync,
        Request::Flush => return Plan::Done(Status::Ok, 0),
        Request::Read { at, .. } => at,
        Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. } => {
            if !bitmaps.mark(at.0, len, noted) {
                return Plan::Note;
            }
            at
        }
    };
    match (image.map(at), request) {
        (Extent::File(at), _) => Plan::Operation(at),
        (Extent::Mapped, _) => Plan::Map,
        (Extent::Nowhere, Request::Read { len, .. }) => Plan::Done(Status::Ok, len as u32),
        (Extent::Nowhere, _) => Plan::Done(Status::Ok, 0),
    }
}
