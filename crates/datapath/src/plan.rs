//! Stage 2: what a request needs. The image says where its range is.

use block::{Discard, FileOffset, Request};
use guest::blk::Status;
use image::{Extent, Image};

use crate::disk::Disk;

pub(crate) enum Plan {
    /// Nothing: answered with this status, and this many bytes written to the guest.
    Done(Status, u32),
    /// The disk's serial.
    Id,
    /// What the image's tables say, piece by piece.
    Pieces(Request),
    /// An operation on the file, from this offset on.
    Operation(Request, FileOffset),
}

#[inline]
pub(crate) fn plan(disk: &Disk, image: &Image, request: Request) -> Plan {
    let at = match request {
        Request::GetId => return Plan::Id,
        Request::Flush if !disk.flushes() => return Plan::Done(Status::Ok, 0),
        Request::Flush => return Plan::Operation(request, FileOffset(0)),
        Request::Read { at, .. }
        | Request::Write { at, .. }
        | Request::Discard { at, .. }
        | Request::WriteZeroes { at, .. } => at,
    };
    let request = match request {
        Request::WriteZeroes { at, len, unmap } => Request::WriteZeroes {
            at,
            len,
            unmap: unmap && disk.options.discard == Discard::Unmap,
        },
        request => request,
    };
    match (image.map(at), request) {
        (Extent::File(at), request) => Plan::Operation(request, at),
        (Extent::Mapped, request) => Plan::Pieces(request),
        (Extent::Nowhere, Request::Read { len, .. }) => Plan::Done(Status::Ok, len as u32),
        (Extent::Nowhere, _) => Plan::Done(Status::Ok, 0),
    }
}
