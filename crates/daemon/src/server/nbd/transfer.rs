//! The transmission phase of a connection: moves requests from the socket to the client's queue, and replies back.
//!
//! Payload is read from the socket into the queue's memory, from which the I/O thread writes it to the disk, and back the
//! same way: nothing is copied in this process but what arrives in one piece with headers.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use guest::blk::Status;
use guest::{Buffer, Finished, LOCAL_ZEROES_MAX, LocalOp, LocalQueue};
use nbd::{Command, ErrorCode, Mode, Negotiated, ProtocolError, Refusal, Replies, RequestHeader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;
use tracing::{debug, warn};

use super::export::NbdExport;
use super::output::{Output, Part};
use super::status;

/// Bytes of headers, and of payload that arrives with them, that are read at once.
const INPUT: usize = 32 << 10;

/// Requests of one client at the same time; each has a slot of the queue.
const JOBS: usize = 64;

/// No request is read while so many bytes of replies wait for the client, not counting what was read from the disk.
const REPLY_BYTES_MAX: usize = 1 << 20;

/// Parts of replies that are sent at once.
const PARTS: usize = 64;

/// Bytes that are read ahead at once for NBD_CMD_CACHE.
const CACHE_BYTES: u64 = 1 << 20;

/// How long a connection that is ended waits for requests in flight, and for its client to take the replies.
const LAST_REPLIES: Duration = Duration::from_secs(1);

/// A connection that always has something to do looks at its descriptors after so many turns.
const TURNS_MAX: u32 = 16;

/// An idle connection gives memory back after this time.
const IDLE: Duration = Duration::from_secs(1);

const FAILED: Refusal = Refusal {
    code: ErrorCode::Io,
    message: "the storage failed; the log of ringdisk says more",
};
const FULL: Refusal = Refusal {
    code: ErrorCode::NoSpace,
    message: "there is no space left",
};
const UNSUPPORTED: Refusal = Refusal {
    code: ErrorCode::NotSupported,
    message: "the storage cannot do this",
};
const STOPPED: Refusal = Refusal {
    code: ErrorCode::Shutdown,
    message: "the export is removed, or ringdisk ends; only a part was done",
};
const NOT_FAST: Refusal = Refusal {
    code: ErrorCode::NotSupported,
    message: "zeroes would be written",
};

#[derive(Debug, Error)]
pub enum TransferError {
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
    socket: &'a OwnedFd,
    stop: BorrowedFd<'a>,
    queue: LocalQueue,
    export: &'a NbdExport,
    negotiated: Box<Negotiated>,
    replies: Replies,
    input: Input,
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    output: Output,
    reading: Reading,
    /// The socket may have something to be read.
    is_readable: bool,
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

/// Bytes that have arrived and were not used yet, and what comes next.
struct Input {
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
    /// The payload of a request that is answered with an error.
    Skip {
        left: usize,
        header: RequestHeader,
        refusal: Refusal,
    },
}

/// A request of the client.
struct Job {
    cookie: u64,
    /// Where the request begins.
    offset: u64,
    work: Work,
    /// What is left of a range that is done piece by piece.
    at: u64,
    left: u64,
    /// A flush comes last.
    fua: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Read,
    Write,
    Flush,
    Trim,
    Zeroes { unmap: bool },
    Cache,
}

impl<'a> Transfer<'a> {
    /// `early` are bytes that arrived with the handshake.
    pub fn new(
        socket: &'a OwnedFd,
        stop: BorrowedFd<'a>,
        queue: LocalQueue,
        export: &'a NbdExport,
        negotiated: Box<Negotiated>,
        early: Vec<u8>,
    ) -> Self {
        let mut bytes = vec![0; INPUT.max(early.len())].into_boxed_slice();
        bytes[..early.len()].copy_from_slice(&early);
        Self {
            socket,
            stop,
            queue,
            export,
            replies: Replies {
                mode: negotiated.mode,
            },
            negotiated,
            input: Input {
                bytes,
                start: 0,
                end: early.len(),
                next: NextInput::Header,
            },
            jobs: (0..JOBS).map(|_| None).collect(),
            free: (0..JOBS as u32).rev().collect(),
            output: Output::default(),
            reading: Reading::Yes,
            is_readable: true,
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
            let mut has_worked = self.take_finished();
            has_worked |= self.send()?;
            has_worked |= self.receive()?;
            self.queue.publish();
            if self.is_over() {
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
        let is_idle = self.free.len() == JOBS && self.output.parts.is_empty();
        match self.reading {
            Reading::Yes => false,
            Reading::Ended => is_idle,
            Reading::Stopped(until) => is_idle || Instant::now() >= until,
        }
    }

    /// Whether the next request may be read.
    fn has_room(&self) -> bool {
        self.reading == Reading::Yes && !self.free.is_empty() && self.output.bytes < REPLY_BYTES_MAX
    }

    /// Whether the socket may be read. The input is full if a request in it waits for a buffer.
    fn can_read(&self) -> bool {
        self.has_room() && !self.input.is_full()
    }

    /// Reads from the socket once, and starts what has arrived. Returns whether anything has.
    fn receive(&mut self) -> Result<bool, TransferError> {
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
        let space_len = space.len();
        let (read, direct) = match next {
            NextInput::Payload {
                buffer, arrived, ..
            } => {
                let rest = &mut self.queue.bytes_mut(buffer)[*arrived..];
                let direct = rest.len();
                let mut parts = [IoSliceMut::new(rest), space];
                (rustix::io::readv(self.socket, &mut parts), direct)
            }
            _ => (rustix::io::readv(self.socket, &mut [space]), 0),
        };
        match read {
            Ok(0) => self.reading = Reading::Ended,
            Ok(n) => {
                if let NextInput::Payload { arrived, .. } = next {
                    *arrived += n.min(direct);
                }
                *end += n.saturating_sub(direct);
                // Otherwise the next read would find nothing; if there is more, poll says so.
                self.is_readable = n == direct + space_len;
                self.parse()?;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                self.is_readable = false;
                return Ok(has_worked);
            }
            Err(e) => return Err(e.into()),
        }
        has_worked = true;
        Ok(has_worked)
    }

    /// Starts the requests in the input, as far as there is room.
    fn parse(&mut self) -> Result<(), TransferError> {
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
                    self.submit(job, Some(buffer));
                }
                NextInput::Skip {
                    left,
                    header,
                    refusal,
                } => {
                    let skipped = left.min(self.input.end - self.input.start);
                    self.input.start += skipped;
                    let left = left - skipped;
                    if left > 0 {
                        self.input.next = NextInput::Skip {
                            left,
                            header,
                            refusal,
                        };
                        return Ok(());
                    }
                    self.refuse(header.cookie, header.offset, refusal);
                }
            }
        }
        Ok(())
    }

    /// Starts the next request. Returns false if it is incomplete, or must wait for space.
    fn parse_header(&mut self) -> Result<bool, TransferError> {
        let mode = self.negotiated.mode;
        let bytes = &self.input.bytes[self.input.start..self.input.end];
        let Some(header) = RequestHeader::parse(bytes, mode)? else {
            return Ok(false);
        };
        let payload = header.payload(mode)? as usize;
        let has_contexts = !self.negotiated.contexts.is_empty();
        let command = header.command(mode, &self.negotiated.export, has_contexts);
        let command = command.and_then(|command| match command {
            Command::WriteZeroes {
                fast: true, unmap, ..
            } if !unmap || !self.export.zeroes_fast() => Err(NOT_FAST),
            command => Ok(command),
        });
        let buffer = match command {
            Ok(Command::Read { len, .. } | Command::Write { len, .. }) => {
                match self.queue.alloc(len as usize) {
                    Some(buffer) => Some(buffer),
                    None => return Ok(false),
                }
            }
            _ => None,
        };
        self.input.start += RequestHeader::bytes(mode);
        match command {
            Ok(command) => self.start(header, command, buffer),
            Err(refusal) => {
                self.input.next = NextInput::Skip {
                    left: payload,
                    header,
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
        };
        (job.work, job.at, job.left, job.fua) = match command {
            Command::Read { at, len } => (Work::Read, at, len.into(), false),
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
                return;
            }
            Command::BlockStatus { at, len, one } => {
                return self.block_status(&header, at, len, one);
            }
        };
        match (job.work, buffer) {
            (Work::Write, Some(buffer)) => {
                self.input.next = NextInput::Payload {
                    job,
                    buffer,
                    arrived: 0,
                };
            }
            (Work::Trim, _) if self.export.device.disk.facts.discard_granularity == 0 => {
                // It is a hint, and the space is not to be given back.
                (job.work, job.left) = (Work::Flush, 0);
                if job.fua {
                    self.submit(job, None);
                } else {
                    self.finish(&job, None);
                }
            }
            (_, buffer) => self.submit(job, buffer),
        }
    }

    /// Submits the next operation of a request.
    fn submit(&mut self, mut job: Job, buffer: Option<Buffer>) {
        let at = job.at;
        let piece = |max: u64| job.left.min(max);
        let (op, buffer, len) = match job.work {
            Work::Read => (LocalOp::Read { at }, buffer, job.left),
            Work::Write => (LocalOp::Write { at }, buffer, job.left),
            Work::Flush => (LocalOp::Flush, None, 0),
            Work::Trim => {
                let len = piece(LOCAL_ZEROES_MAX);
                (LocalOp::Discard { at, len }, None, len)
            }
            Work::Zeroes { unmap } => {
                let len = piece(LOCAL_ZEROES_MAX);
                (LocalOp::WriteZeroes { at, len, unmap }, None, len)
            }
            Work::Cache => {
                let len = piece(CACHE_BYTES);
                match self.queue.alloc(len as usize) {
                    Some(buffer) => (LocalOp::Read { at }, Some(buffer), len),
                    // It is a hint.
                    None => return self.finish(&job, None),
                }
            }
        };
        job.at += len;
        job.left -= len;
        let number = self.free.pop().expect("has_room was asked");
        self.jobs[number as usize] = Some(job);
        self.queue.submit(number, op, buffer);
    }

    /// Continues or answers the requests whose operations the disk has finished. Returns whether there were any.
    fn take_finished(&mut self) -> bool {
        let mut any = false;
        while let Some(Finished {
            tag,
            status,
            buffer,
        }) = self.queue.take()
        {
            any = true;
            let job = self.jobs[tag as usize].take().expect("it was submitted");
            self.free.push(tag);
            let refusal = match status {
                Status::Ok => None,
                Status::IoError => Some(FAILED),
                Status::NoSpace => Some(FULL),
                Status::Unsupported => Some(UNSUPPORTED),
            };
            match (refusal, buffer) {
                (Some(refusal), buffer) => {
                    buffer.into_iter().for_each(|b| self.queue.give_back(b));
                    self.refuse(job.cookie, job.offset, refusal);
                }
                (None, Some(buffer)) if job.work == Work::Read => self.finish(&job, Some(buffer)),
                (None, buffer) => {
                    buffer.into_iter().for_each(|b| self.queue.give_back(b));
                    self.advance(job);
                }
            }
        }
        any
    }

    /// Continues or answers a request whose last operation has succeeded.
    fn advance(&mut self, mut job: Job) {
        let has_more = job.left > 0;
        match self.reading {
            // The rest may take long.
            Reading::Stopped(_) if has_more => self.refuse(job.cookie, job.offset, STOPPED),
            // Nobody will read what would be read ahead.
            Reading::Ended if has_more && job.work == Work::Cache => self.finish(&job, None),
            _ if has_more => self.submit(job, None),
            _ if job.fua => {
                (job.work, job.fua) = (Work::Flush, false);
                self.submit(job, None);
            }
            _ => self.finish(&job, None),
        }
    }

    /// Answers a request that has succeeded, with the data that was read.
    fn finish(&mut self, job: &Job, data: Option<Buffer>) {
        let replies = self.replies;
        match data {
            None => self.output.add(|out| replies.done(job.cookie, out)),
            Some(buffer) => {
                let len = buffer.len() as u32;
                self.output
                    .add(|out| replies.data_header(job.cookie, job.offset, len, out));
                self.output.parts.push_back(Part::Data(buffer));
            }
        }
    }

    fn refuse(&mut self, cookie: u64, offset: u64, refusal: Refusal) {
        debug!("NBD: export '{}': {}", self.export.name, refusal.message);
        let replies = self.replies;
        self.output
            .add(|out| replies.error(cookie, refusal, offset, out));
    }

    /// Reads tables of the image in this thread, which delays only this client.
    fn block_status(&mut self, header: &RequestHeader, at: u64, len: u64, one: bool) {
        // What was submitted before does not wait for it.
        self.queue.publish();
        let Negotiated {
            contexts, export, ..
        } = &*self.negotiated;
        let (block, disk) = (u64::from(export.blocks.minimum), &self.export.device.disk);
        // Short headers have 32 bits for an extent.
        let len = match self.negotiated.mode {
            Mode::Extended => len,
            _ => len.min(u64::from(u32::MAX) / block * block),
        };
        let deadline = Instant::now() + status::TIME_MAX;
        let look_up = |at, len| disk.allocated(at, len);
        let states = match status::states(look_up, contexts, (at, len), one, block, deadline) {
            Ok(states) => states,
            Err(e) => {
                self.export.lines.log(|left_out| {
                    warn!(
                        "disk {}: its allocation cannot be read: {e}{left_out}",
                        disk.name
                    );
                });
                return self.refuse(header.cookie, header.offset, FAILED);
            }
        };
        let replies = self.replies;
        for (i, state) in states.iter().enumerate() {
            let is_last = i + 1 == states.len();
            self.output.add(|out| {
                let (context, extents) = (state.context, &state.extents);
                replies.block_status(header.cookie, header.offset, context, extents, is_last, out);
            });
        }
    }

    /// Sends replies, as far as the client takes them. Returns whether it took any.
    fn send(&mut self) -> Result<bool, TransferError> {
        let mut any = false;
        while !self.output.parts.is_empty() {
            let mut slices = Vec::with_capacity(PARTS.min(self.output.parts.len()));
            let mut offered = 0;
            for (i, part) in self.output.parts.iter().take(PARTS).enumerate() {
                let bytes = match part {
                    Part::Bytes(bytes) => &bytes[..],
                    Part::Data(buffer) => self.queue.bytes(buffer),
                };
                let skip = if i == 0 { self.output.sent } else { 0 };
                offered += bytes.len() - skip;
                slices.push(IoSlice::new(&bytes[skip..]));
            }
            let sent = match rustix::io::writev(self.socket, &slices) {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(any),
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
        Ok(any)
    }

    /// Looks for events; sleeps until there is one if `sleeps`.
    fn wait(&mut self, sleeps: bool) -> Result<(), TransferError> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.can_read());
        wanted.set(PollFlags::OUT, !self.output.parts.is_empty());
        let is_idle = self.queue.in_flight() == 0;
        let timeout = match self.reading {
            _ if !sleeps => Some(Duration::ZERO),
            Reading::Stopped(until) => Some(until.saturating_duration_since(Instant::now())),
            _ if is_idle && self.queue.can_shrink() => Some(IDLE),
            _ => None,
        };
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let is_stopped = matches!(self.reading, Reading::Stopped(_));
        let stop = if is_stopped {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let call = self.queue.call();
        let mut ready = [
            PollFd::new(self.socket, wanted),
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
        if sleeps && events == 0 && is_idle && self.output.parts.is_empty() {
            self.queue.shrink();
        }
        Ok(())
    }
}

impl Input {
    /// Whether nothing more can be read before something has been used.
    fn is_full(&self) -> bool {
        self.end - self.start == self.bytes.len()
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
