//! What other threads ask of an I/O thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use guest::{NewQueue, StoppedRing};

use crate::disk::fleece::Fleece;
use crate::disk::source::Source;
use crate::disk::{Content, Disk};
use crate::meeting::Meeting;
use crate::throttle::admission::Admission;

/// A queue in service: its number on its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueId(pub(crate) usize);

pub(crate) enum Command {
    Start(QueueStart),
    Stop {
        queue: QueueId,
        reply: Sender<StoppedRing>,
    },
    SetEventFds {
        queue: QueueId,
        call: Option<Arc<OwnedFd>>,
        error: Option<Arc<OwnedFd>>,
        reply: Sender<()>,
    },
    /// Serve nothing of a disk for now. The reply comes when no request of it is in flight.
    Pause {
        disk: Arc<Disk>,
        reply: Sender<io::Result<()>>,
    },
    /// Make the disk's next file known to the engine.
    AttachNext {
        disk: Arc<Disk>,
        content: Content,
        source: Arc<Source>,
        reply: Sender<io::Result<()>>,
    },
    /// Stop at one moment for several disks: from then on, what each was is preserved in its fleece.
    Cut {
        disks: Vec<(Arc<Disk>, Arc<Fleece>)>,
        meeting: Arc<Meeting>,
    },
    /// What the disk was is not preserved any more.
    EndCut {
        disk: Arc<Disk>,
    },
    /// Serve the disk again.
    Unpause {
        disk: Arc<Disk>,
        replaced: bool,
        reply: Sender<io::Result<()>>,
    },
    /// Stalled requests continue.
    Resume {
        disk: Arc<Disk>,
        report: bool,
    },
    /// Find out how long storage has not answered operations.
    CheckAges,
    Quit,
}

/// The start of a queue, and where the reply goes.
pub(crate) struct QueueStart {
    pub disk: Arc<Disk>,
    pub queue: NewQueue,
    /// The limits of a client's queue; `None` for a queue of the disk's guest.
    pub client: Option<Arc<Admission>>,
    pub reply: Sender<io::Result<QueueId>>,
}

/// Waits for the reply to a command.
pub(crate) fn answer<T>(result: &Receiver<T>) -> io::Result<T> {
    result.recv().map_err(|_| gone())
}

/// The thread that would have replied has ended.
pub(crate) fn gone() -> io::Error {
    io::Error::other("the I/O thread has ended")
}
