//! What a client sends: requests, and the payload of writes.

use std::io::{ErrorKind, IoSliceMut};

use guest::Buffer;
use nbd::{Command, ErrorCode, Refusal, RequestHeader};

use super::jobs::{Job, Work};
use super::{Reading, Transfer, TransferError};
use crate::server::nbd::memory::{NoMemory, RESERVED};
use crate::server::nbd::stream::Received;
use crate::server::share::Entered;

/// Bytes of headers, and of payload that arrives with them, that are read at once.
const INPUT: usize = 32 << 10;

/// Length of the pieces in which a request is done that does not get enough memory, in bytes.
const PIECE: u64 = 512 << 10;

const NOT_WRITABLE: Refusal = Refusal {
    code: ErrorCode::NotPermitted,
    message: "the export is of a moment that is past: it can be read and trimmed",
};
const NOT_FAST: Refusal = Refusal {
    code: ErrorCode::NotSupported,
    message: "zeroes would be written",
};
const NOT_IN_ONE_PIECE: Refusal = Refusal {
    code: ErrorCode::Overflow,
    message: "other clients use the memory for a reply of this length in one piece",
};

/// Others use the storage.
struct MustWait;

/// Bytes that have arrived and were not used yet, and what comes next.
pub(super) struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    next: NextInput,
}

enum NextInput {
    Header,
    /// The payload of a write, of which so many bytes have arrived.
    Payload {
        job: Job,
        buffer: Buffer,
        arrived: usize,
    },
    /// A read or write, or a piece of it, that has all it needs but its share of the storage.
    Ready {
        job: Job,
        buffer: Buffer,
    },
    /// The payload of a request that is answered with an error.
    Skip {
        left: u64,
        cookie: u64,
        offset: u64,
        refusal: Refusal,
    },
    /// The next piece of a request that is done in pieces. Nothing else is started meanwhile.
    Piece(Job),
    /// The disk works on a piece, and there are more.
    InPieces,
}

impl Transfer<'_> {
    /// Reads from the socket once, and starts what has arrived. Returns whether anything has.
    pub(super) fn receive(&mut self) -> Result<bool, TransferError> {
        if !self.has_room() {
            return Ok(false);
        }
        // What is left of the input waits for a buffer, or is the beginning of a header.
        let before = (self.input.start, self.free.len());
        self.parse()?;
        let mut has_worked = before != (self.input.start, self.free.len());
        if !self.is_readable || !self.can_read() {
            return Ok(has_worked);
        }
        self.input.make_space();
        let Input {
            bytes, end, next, ..
        } = &mut self.input;
        let space = IoSliceMut::new(&mut bytes[*end..]);
        let (read, direct) = match next {
            NextInput::Payload {
                buffer, arrived, ..
            } => {
                let rest = &mut self.queue.bytes_mut(buffer)[*arrived..];
                let direct = rest.len();
                let mut parts = [IoSliceMut::new(rest), space];
                (self.stream.read(&mut parts), direct)
            }
            _ => (self.stream.read(&mut [space]), 0),
        };
        match read {
            Ok(Received { bytes: 0, .. }) => self.reading = Reading::Ended,
            Ok(Received { bytes: n, has_more }) => {
                if let NextInput::Payload { arrived, .. } = next {
                    *arrived += n.min(direct);
                }
                *end += n.saturating_sub(direct);
                self.is_readable = has_more;
                self.parse()?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.is_readable = false;
                return Ok(has_worked);
            }
            Err(e) => return Err(e.into()),
        }
        has_worked = true;
        Ok(has_worked)
    }

    /// Starts the requests in the input, as far as there is room.
    pub(super) fn parse(&mut self) -> Result<(), TransferError> {
        while self.has_room() {
            match std::mem::replace(&mut self.input.next, NextInput::Header) {
                NextInput::Header => {
                    if !self.parse_header()? {
                        return Ok(());
                    }
                }
                NextInput::Payload {
                    job,
                    mut buffer,
                    mut arrived,
                } => {
                    let rest = &mut self.queue.bytes_mut(&mut buffer)[arrived..];
                    arrived += self.input.take(rest);
                    if arrived < buffer.len() {
                        self.input.next = NextInput::Payload {
                            job,
                            buffer,
                            arrived,
                        };
                        return Ok(());
                    }
                    self.input.next = NextInput::Ready { job, buffer };
                }
                NextInput::Ready { job, buffer } => {
                    let Ok(entered) = self.enter(buffer.len() as u64) else {
                        self.input.next = NextInput::Ready { job, buffer };
                        return Ok(());
                    };
                    self.submit_payload(Job { entered, ..job }, buffer);
                }
                NextInput::Skip {
                    left,
                    cookie,
                    offset,
                    refusal,
                } => {
                    let skipped = left.min((self.input.end - self.input.start) as u64);
                    self.input.start += skipped as usize;
                    let left = left - skipped;
                    if left > 0 {
                        self.input.next = NextInput::Skip {
                            left,
                            cookie,
                            offset,
                            refusal,
                        };
                        return Ok(());
                    }
                    self.refuse(cookie, offset, refusal);
                }
                NextInput::Piece(job) => {
                    let len = job.left.min(job.piece_max);
                    let len = self.share().map_or(len, |share| share.piece(len)) as usize;
                    match (self.memory.alloc(&mut self.queue, len), job.work) {
                        (Err(_), _) => {
                            self.input.next = NextInput::Piece(job);
                            return Ok(());
                        }
                        (Ok(buffer), Work::Write) => self.expect_payload(job, buffer),
                        (Ok(buffer), _) => self.input.next = NextInput::Ready { job, buffer },
                    }
                }
                NextInput::InPieces => {
                    self.input.next = NextInput::InPieces;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn expect_payload(&mut self, job: Job, buffer: Buffer) {
        self.input.next = NextInput::Payload {
            job,
            buffer,
            arrived: 0,
        };
    }

    /// Counts the next operation of a request. Otherwise this thread is woken when it may begin.
    fn enter(&self, len: u64) -> Result<Option<Entered>, MustWait> {
        let Some(share) = self.share() else {
            return Ok(None);
        };
        let entered = share.enter(len, &self.waiter);
        entered.map(Some).ok_or(MustWait)
    }

    /// Submits all of a read or write, or a piece of it.
    fn submit_payload(&mut self, job: Job, buffer: Buffer) {
        if (buffer.len() as u64) < job.left {
            self.input.next = NextInput::InPieces;
        }
        self.submit(job, Some(buffer));
    }

    /// The disk has finished a piece of this request, and there are more.
    pub(super) fn continue_in_pieces(&mut self, job: Job) {
        self.input.next = NextInput::Piece(job);
    }

    /// The disk has failed at a piece of this write. The answer comes after the payload of the rest.
    pub(super) fn skip_payload(&mut self, job: &Job, refusal: Refusal) {
        self.input.next = NextInput::Skip {
            left: job.left,
            cookie: job.cookie,
            offset: job.offset,
            refusal,
        };
    }

    /// The request that was done in pieces has ended before its last one.
    pub(super) fn end_pieces(&mut self) {
        self.input.next = NextInput::Header;
    }

    /// Starts the next request. Returns false if it is incomplete, or must wait for space.
    fn parse_header(&mut self) -> Result<bool, TransferError> {
        let mode = self.negotiated.mode;
        let bytes = &self.input.bytes[self.input.start..self.input.end];
        let Some(header) = RequestHeader::parse(bytes, mode)? else {
            return Ok(false);
        };
        let payload = header.payload(mode)?;
        let has_contexts = !self.negotiated.contexts.is_empty();
        let command = header.command(mode, &self.negotiated.export, has_contexts);
        let command = command.and_then(|command| match command {
            Command::WriteZeroes {
                fast: true, unmap, ..
            } if !unmap || !self.export.zeroes_fast() => Err(NOT_FAST),
            Command::Write { .. } | Command::WriteZeroes { .. } if self.export.moment.is_some() => {
                Err(NOT_WRITABLE)
            }
            command => Ok(command),
        });
        let in_pieces = |len: u32| {
            let share = self.share();
            share.is_some_and(|share| share.piece(len.into()) < len.into())
        };
        let (command, buffer) = match command {
            Ok(
                Command::Read {
                    len, whole: false, ..
                }
                | Command::Write { len, .. },
            ) if in_pieces(len) => (command, None),
            Ok(Command::Read { len, .. } | Command::Write { len, .. }) => {
                let len = len as usize;
                match (self.memory.alloc(&mut self.queue, len), command) {
                    (Ok(buffer), command) => (command, Some(buffer)),
                    (Err(NoMemory::ForNow), _) => return Ok(false),
                    (Err(NoMemory::Shared), _) if len <= RESERVED => return Ok(false),
                    (Err(NoMemory::Shared), Ok(Command::Read { whole: true, .. })) => {
                        (Err(NOT_IN_ONE_PIECE), None)
                    }
                    (Err(NoMemory::Shared), command) => (command, None),
                }
            }
            command => (command, None),
        };
        self.input.start += RequestHeader::bytes(mode);
        match command {
            Ok(command) => self.start(header, command, buffer),
            Err(refusal) => {
                self.input.next = NextInput::Skip {
                    left: payload.into(),
                    cookie: header.cookie,
                    offset: header.offset,
                    refusal,
                };
            }
        }
        Ok(true)
    }

    fn start(&mut self, header: RequestHeader, command: Command, buffer: Option<Buffer>) {
        let mut job = Job {
            cookie: header.cookie,
            offset: header.offset,
            work: Work::Flush,
            at: 0,
            left: 0,
            fua: false,
            reply: None,
            piece_max: PIECE,
            entered: None,
        };
        (job.work, job.at, job.left, job.fua) = match command {
            Command::Read { at, len, .. } => (Work::Read, at, len.into(), false),
            Command::Write { at, len, fua } => (Work::Write, at, len.into(), fua),
            Command::Flush => (Work::Flush, 0, 0, false),
            Command::Trim { at, len, fua } => (Work::Trim, at, len, fua),
            Command::WriteZeroes {
                at,
                len,
                fua,
                unmap,
                ..
            } => (Work::Zeroes { unmap }, at, len, fua),
            Command::Cache { at, len } => (Work::Cache, at, len, false),
            Command::Disconnect => {
                self.reading = Reading::Ended;
                self.input.start = self.input.end;
                return;
            }
            Command::BlockStatus { at, len, one } => {
                return self.block_status(&header, at, len, one);
            }
        };
        if let (Work::Trim | Work::Flush, Some(moment)) = (job.work, &self.export.moment) {
            moment.trim(job.at, job.left);
            return self.done(&job);
        }
        match (job.work, buffer) {
            (Work::Write, Some(buffer)) => self.expect_payload(job, buffer),
            (Work::Read, Some(buffer)) => self.input.next = NextInput::Ready { job, buffer },
            (Work::Read | Work::Write, None) => self.continue_in_pieces(job),
            (Work::Trim, _) if self.export.device.disk.facts.discard_granularity == 0 => {
                // It is a hint, and the space is not to be given back.
                (job.work, job.left) = (Work::Flush, 0);
                if std::mem::take(&mut job.fua) {
                    self.submit(job, None);
                } else {
                    self.done(&job);
                }
            }
            _ => self.submit(job, None),
        }
    }
}

impl Input {
    /// `early` are bytes that have arrived already.
    pub fn new(early: &[u8]) -> Self {
        let mut bytes = vec![0; INPUT.max(early.len())].into_boxed_slice();
        bytes[..early.len()].copy_from_slice(early);
        Self {
            bytes,
            start: 0,
            end: early.len(),
            next: NextInput::Header,
        }
    }

    /// Whether nothing more can be read before something has been used.
    pub fn is_full(&self) -> bool {
        self.end - self.start == self.bytes.len()
    }

    /// Whether a request in it waits for others, and needs nothing more from the client.
    pub fn is_waiting(&self) -> bool {
        match &self.next {
            NextInput::Ready { .. } => true,
            NextInput::Piece(job) => job.work == Work::Read,
            _ => false,
        }
    }

    /// Whether the next request waits for nothing but its share of the storage.
    pub fn is_ready(&self) -> bool {
        matches!(self.next, NextInput::Ready { .. })
    }

    /// Moves what is there to the beginning, if the space after it is short.
    fn make_space(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// Moves bytes to `to`, as many as there are.
    fn take(&mut self, to: &mut [u8]) -> usize {
        let n = to.len().min(self.end - self.start);
        to[..n].copy_from_slice(&self.bytes[self.start..self.start + n]);
        self.start += n;
        n
    }
}
