//! What a stage says comes next for a request.

use crate::request::{Ending, Retry};
use crate::resources::blocking_pool::Job;

pub(crate) enum Next {
    /// Nothing for now: an operation, a job, or the end of another request takes it further.
    InProgress,
    /// The next piece of the old data that it changes is copied.
    Preserve,
    /// A read of old data has ended, with so many bytes or a negative errno.
    OldDataRead(i32),
    /// It waits for copies of others, or for space.
    WaitForCopy,
    /// The image says what it needs.
    Plan,
    /// Its next piece in a mapped image is looked up, or its first.
    Map,
    /// Its operation is submitted.
    Submit,
    /// It waits for a bounce buffer, or for room in the engine, and is then submitted.
    WaitForBuffer,
    /// It continues with zeroes, after others had their turn.
    WaitForTurn,
    /// The blocking pool does this for it.
    StartJob(Job),
    /// The operation of a piece of a mapped image has moved all its bytes.
    PieceMoved,
    /// All its bytes were moved.
    Moved,
    /// It waits for an fdatasync.
    Sync,
    /// The operation that makes its disk durable has ended, for this request and others.
    Synced(SyncResult),
    /// Storage failed to serve it, with this errno, or 0 if its file has ended.
    Fail { errno: i32, retry: Retry },
    /// The guest is told of its end.
    Finish(Ending),
    /// It is left for the next server of the ring.
    Leave,
}

/// The result of an operation that makes a disk durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SyncResult {
    /// Of an fdatasync: 0 or an errno.
    File(i32),
    /// Of an image's flush: 0 or an errno, and whether writes are lost for good.
    Image { errno: i32, lost: bool },
}
