//! The transmission phase of a connection: moves requests from the socket to the client's queue, and replies back.
//!
//! Payload is read from the socket into the queue's memory, from which the I/O thread writes it to the disk, and back the
//! same way: nothing is copied in this process but what arrives in one piece with headers.

mod input;
mod jobs;

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::DirtyBitmap;
use guest::LocalQueue;
use nbd::{ErrorCode, Negotiated, ProtocolError, Refusal, Replies};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;

use super::export::NbdExport;
use super::memory::ConnectionMemory;
use super::output::{Output, Part};
use super::places::Places;
use super::stream::Stream;
use crate::server::share::{Entered, Share, Unfinished};
use input::Input;
use jobs::Job;

/// Requests of one client at the same time; each has a slot of the queue.
const JOBS: usize = 64;

/// No request is read while so many bytes of replies wait for the client, not counting what was read from the disk.
const REPLY_BYTES_MAX: usize = 512 << 10;

/// Parts of replies that are sent at once.
const PARTS: usize = 64;

/// How long a connection that is ended waits for requests in flight, and for its client to take the replies.
const LAST_REPLIES: Duration = Duration::from_secs(1);

/// A connection that always has something to do looks at its descriptors after so many turns.
const TURNS_MAX: u32 = 16;

/// An idle connection gives memory back after this time.
const IDLE: Duration = Duration::from_secs(1);

const STOPPED: Refusal = Refusal {
    code: ErrorCode::Shutdown,
    message: "the export is removed, or ringdisk ends; only a part was done",
};

#[derive(Debug, Error)]
pub enum TransferError {
    #[error(
        "a read failed after a part of its reply had been sent; simple replies cannot tell that"
    )]
    CutShort,
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

impl From<Errno> for TransferError {
    fn from(e: Errno) -> Self {
        Self::Socket(e.into())
    }
}

/// A connection in the transmission phase.
pub struct Transfer<'a> {
    stream: Stream<'a>,
    stop: BorrowedFd<'a>,
    /// Where others may wait for the place of this client.
    places: &'a Places,
    queue: LocalQueue,
    memory: &'a mut ConnectionMemory,
    export: &'a NbdExport,
    negotiated: Box<Negotiated>,
    bitmaps: Vec<Option<Arc<DirtyBitmap>>>,
    replies: Replies,
    input: Input,
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    output: Output,
    reading: Reading,
    /// The socket may have something to be read.
    is_readable: bool,
    /// Wakes this thread when it may ask the storage for more.
    waiter: Arc<OwnedFd>,
    /// Operations in flight at the end.
    unfinished: &'a mut Unfinished,
}

/// What the client of a connection uses.
pub struct Offered<'a> {
    pub export: &'a NbdExport,
    pub negotiated: Box<Negotiated>,
    /// The bitmaps of the export, in the order of their contexts; `None` if the disk does not have it any more.
    pub bitmaps: Vec<Option<Arc<DirtyBitmap>>>,
}

/// Whether requests are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Yes,
    /// The client sends no more, or has said that it is done.
    Ended,
    /// This process ends the connection, at this time at the latest.
    Stopped(Instant),
}

impl<'a> Transfer<'a> {
    /// `early` are bytes that arrived with the handshake.
    pub fn new(
        stream: Stream<'a>,
        (stop, places): (BorrowedFd<'a>, &'a Places),
        (queue, memory, unfinished): (LocalQueue, &'a mut ConnectionMemory, &'a mut Unfinished),
        offered: Offered<'a>,
        early: &[u8],
    ) -> io::Result<Self> {
        let Offered {
            export,
            negotiated,
            bitmaps,
        } = offered;
        // Whatever wakes it, the thread looks at everything.
        let waiter = Arc::new(queue.call().try_clone_to_owned()?);
        Ok(Self {
            stream,
            stop,
            places,
            queue,
            memory,
            export,
            replies: Replies {
                mode: negotiated.mode,
            },
            negotiated,
            bitmaps,
            input: Input::new(early),
            jobs: (0..JOBS).map(|_| None).collect(),
            free: (0..JOBS as u32).rev().collect(),
            output: Output::default(),
            reading: Reading::Yes,
            is_readable: true,
            waiter,
            unfinished,
        })
    }

    /// What the clients of the export share, where others use the storage.
    fn share(&self) -> Option<&'a Share> {
        let export = self.export;
        export.leaves_to_others().then_some(export.share())
    }

    /// The storage has done what was counted.
    fn leave(&self, entered: Option<Entered>) {
        if let Some(entered) = entered {
            self.export.share().leave(entered);
        }
    }

    /// Serves requests until the client disconnects, or `stop` becomes readable.
    ///
    /// # Errors
    /// The client was disconnected. Its requests in flight still end.
    pub fn run(mut self) -> Result<(), TransferError> {
        self.parse()?;
        let mut turns = 0;
        loop {
            let mut has_worked = self.take_finished()?;
            has_worked |= self.send()?;
            if has_worked {
                self.places.progressed();
            }
            has_worked |= self.receive()?;
            self.queue.publish();
            if self.is_over() {
                self.stream.close();
                return Ok(());
            }
            turns += 1;
            // Among other things, this sees `stop`.
            if turns >= TURNS_MAX || !has_worked {
                let sleeps = !has_worked && !self.queue.enable_calls();
                self.wait(sleeps)?;
                turns = 0;
            }
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = self.free.len() == JOBS && !self.has_output();
        match self.reading {
            Reading::Yes => false,
            Reading::Ended => is_idle && !self.input.is_waiting(),
            Reading::Stopped(until) => is_idle || Instant::now() >= until,
        }
    }

    /// Whether replies wait for the client.
    fn has_output(&self) -> bool {
        !self.output.is_empty() || self.stream.is_unsent()
    }

    /// Whether the next request that has arrived may be started.
    fn has_room(&self) -> bool {
        let is_stopped = matches!(self.reading, Reading::Stopped(_));
        !is_stopped && !self.free.is_empty() && self.output.bytes() < REPLY_BYTES_MAX
    }

    /// Whether the socket may be read. The input is full if a request in it waits for a buffer.
    fn can_read(&self) -> bool {
        self.reading == Reading::Yes && self.has_room() && !self.input.is_full()
    }

    /// Sends replies, as far as the client takes them. Returns whether it took any.
    fn send(&mut self) -> Result<bool, TransferError> {
        let mut any = false;
        while !self.output.is_empty() {
            let parts = self.output.parts().take(PARTS);
            let mut slices = Vec::with_capacity(parts.len());
            let mut offered = 0;
            for (i, part) in parts.enumerate() {
                let bytes = match part {
                    Part::Bytes(bytes) => &bytes[..],
                    Part::Data(buffer) => self.queue.bytes(buffer),
                };
                let skip = if i == 0 { self.output.sent() } else { 0 };
                offered += bytes.len() - skip;
                slices.push(IoSlice::new(&bytes[skip..]));
            }
            let sent = match self.stream.write(&slices) {
                Ok(sent) => sent,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(any),
                Err(e) => return Err(e.into()),
            };
            any = true;
            for buffer in self.output.advance(sent) {
                self.queue.give_back(buffer);
            }
            if sent < offered {
                return Ok(any);
            }
        }
        self.stream.flush()?;
        Ok(any)
    }

    /// What was counted has not begun.
    fn forget(&self, entered: Option<Entered>) {
        if let Some(entered) = entered {
            self.export.share().forget(entered);
        }
    }

    /// Looks for events; sleeps until there is one if `sleeps`.
    fn wait(&mut self, sleeps: bool) -> Result<(), TransferError> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.can_read());
        wanted.set(PollFlags::OUT, self.has_output());
        let is_idle = self.queue.in_flight() == 0;
        let timeout = match self.reading {
            _ if !sleeps => Some(Duration::ZERO),
            Reading::Stopped(until) => Some(until.saturating_duration_since(Instant::now())),
            _ if is_idle && self.queue.can_shrink() => Some(IDLE),
            _ => None,
        };
        // Otherwise nothing asks again in this turn, and the time may be past.
        let share = self
            .share()
            .filter(|_| self.has_room() && self.input.is_ready());
        let ask_again = share.and_then(Share::ask_again_at);
        let ask_again = ask_again.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = ask_again.min(timeout).or(ask_again).or(timeout);
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let is_stopped = matches!(self.reading, Reading::Stopped(_));
        let stop = if is_stopped {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        if sleeps && is_idle && self.memory.is_wanted() {
            self.memory.shrink(&mut self.queue);
        }
        let call = self.queue.call();
        let mut ready = [
            PollFd::new(self.stream.socket(), wanted),
            PollFd::new(&call, PollFlags::IN),
            PollFd::new(&self.stop, stop),
        ];
        let events = match poll(&mut ready, timeout.as_ref()) {
            Ok(events) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let [socket, call, stop] = ready.map(|fd| fd.revents());
        if !call.is_empty() {
            self.queue.clear_call();
        }
        if !stop.is_empty() && !is_stopped {
            self.reading = Reading::Stopped(Instant::now() + LAST_REPLIES);
        }
        self.is_readable |= socket.intersects(PollFlags::IN | PollFlags::HUP);
        // The client is gone, whether or not there is anything to read or to send.
        if socket.intersects(PollFlags::ERR | PollFlags::NVAL) {
            return Err(Errno::CONNRESET.into());
        }
        if socket.contains(PollFlags::HUP) && !wanted.contains(PollFlags::IN) {
            return Err(Errno::CONNRESET.into());
        }
        if sleeps && events == 0 && is_idle && self.output.is_empty() {
            self.memory.shrink(&mut self.queue);
        }
        Ok(())
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.export.share().leave_queue(&self.waiter);
        let left = self.jobs.iter().flatten();
        self.unfinished
            .operations
            .extend(left.filter_map(|job| job.entered));
    }
}
