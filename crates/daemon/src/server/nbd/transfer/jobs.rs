//! The requests of a client, from the queue to the reply.

use std::cell::RefCell;
use std::io;
use std::time::Instant;

use datapath::AllocationCache;
use guest::blk::Status;
use guest::{Buffer, Finished, LOCAL_ZEROES_MAX, LocalOp};
use nbd::{BASE_ALLOCATION, Context, ErrorCode, Mode, Negotiated, Refusal, RequestHeader};
use tracing::{debug, warn};

use super::{Reading, STOPPED, Transfer, TransferError};
use crate::server::nbd::output::OpenReply;
use crate::server::nbd::status::{self, BitmapLost, Source};
use crate::server::share::Entered;

/// Bytes that are read ahead at once for NBD_CMD_CACHE.
const CACHE_BYTES: u64 = 1 << 20;

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
/// A request of the client.
pub(super) struct Job {
    pub cookie: u64,
    /// Where the request begins.
    pub offset: u64,
    pub work: Work,
    /// What is left of a range that is done piece by piece.
    pub at: u64,
    pub left: u64,
    /// A flush comes last.
    pub fua: bool,
    /// The reply of a read, which lacks data.
    pub reply: Option<OpenReply>,
    /// No piece of it is longer.
    pub piece_max: u64,
    /// The operation that the disk works on, where it is counted.
    pub entered: Option<Entered>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Read,
    Write,
    Flush,
    Trim,
    Zeroes { unmap: bool },
    Cache,
}

impl Transfer<'_> {
    /// Submits the next operation of a request.
    pub(super) fn submit(&mut self, mut job: Job, buffer: Option<Buffer>) {
        let at = job.at;
        let piece = |max: u64| job.left.min(max);
        let bytes = buffer.as_ref().map_or(0, Buffer::len) as u64;
        let (op, buffer, len) = match job.work {
            Work::Read => (LocalOp::Read { at }, buffer, bytes),
            Work::Write => (LocalOp::Write { at }, buffer, bytes),
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
                if let Some(share) = self.share() {
                    job.entered = share.enter(len, &self.waiter);
                    // It is a hint: nobody waits for its turn.
                    if job.entered.is_none() {
                        share.leave_queue(&self.waiter);
                        return self.done(&job);
                    }
                }
                match self.memory.alloc(&mut self.queue, len as usize) {
                    Ok(buffer) => (LocalOp::Read { at }, Some(buffer), len),
                    Err(_) => {
                        self.forget(job.entered.take());
                        return self.done(&job);
                    }
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
    ///
    /// # Errors
    /// The client must be disconnected.
    pub(super) fn take_finished(&mut self) -> Result<bool, TransferError> {
        let mut any = false;
        while let Some(Finished {
            tag,
            status,
            buffer,
        }) = self.queue.take()
        {
            any = true;
            let mut job = self.jobs[tag as usize].take().expect("it was submitted");
            self.leave(job.entered.take());
            self.free.push(tag);
            let refusal = match status {
                Status::Ok => None,
                Status::IoError => Some(FAILED),
                Status::NoSpace => Some(FULL),
                Status::Unsupported => Some(UNSUPPORTED),
            };
            match (refusal, buffer) {
                (None, Some(mut buffer)) if job.work == Work::Read => {
                    if let Some(refusal) = self.overlay(&job, &mut buffer) {
                        self.queue.give_back(buffer);
                        self.fail(&job, refusal)?;
                        continue;
                    }
                    self.reply_data(&mut job, buffer);
                    if job.left > 0 {
                        self.advance(job)?;
                    }
                }
                (refusal, buffer) => {
                    buffer.into_iter().for_each(|b| self.queue.give_back(b));
                    match refusal {
                        Some(refusal) => self.fail(&job, refusal)?,
                        None => self.advance(job)?,
                    }
                }
            }
        }
        Ok(any)
    }

    /// Makes what was read from the disk what it was at the moment of the export. Returns why not.
    fn overlay(&mut self, job: &Job, buffer: &mut Buffer) -> Option<Refusal> {
        let moment = self.export.moment.as_ref()?;
        let at = job.at - buffer.len() as u64;
        let read = moment.fleece.overlay(at, self.queue.bytes_mut(buffer));
        let e = read.err()?;
        self.export.lines.log(|left_out| {
            warn!(
                "NBD: export '{}': a read fails: {e}{left_out}",
                self.export.name
            );
        });
        Some(FAILED)
    }

    /// Continues or answers a request whose last operation has succeeded.
    fn advance(&mut self, mut job: Job) -> Result<(), TransferError> {
        let has_more = job.left > 0;
        match (self.reading, job.work) {
            // The rest may take long.
            (Reading::Stopped(_), _) if has_more => self.fail(&job, STOPPED)?,
            (_, Work::Read | Work::Write) if has_more => self.continue_in_pieces(job),
            // Nobody will read what would be read ahead.
            (Reading::Ended, Work::Cache) if has_more => self.done(&job),
            _ if has_more => self.submit(job, None),
            _ if job.fua => {
                (job.work, job.fua) = (Work::Flush, false);
                self.submit(job, None);
            }
            _ => self.done(&job),
        }
        Ok(())
    }

    /// Answers a request that has no data to return.
    pub(super) fn done(&mut self, job: &Job) {
        let replies = self.replies;
        self.output
            .add(|out| replies.done(job.cookie, job.offset, out));
    }

    /// Answers a read with data, which may be a piece of it. Simple replies have one header for all pieces.
    fn reply_data(&mut self, job: &mut Job, data: Buffer) {
        let (replies, len) = (self.replies, data.len() as u32);
        let (at, is_last) = (job.at - u64::from(len), job.left == 0);
        let header = |out: &mut Vec<u8>| {
            replies.data_header(job.cookie, (job.offset, at), len, is_last, out);
        };
        let is_simple = replies.mode == Mode::Simple;
        let reply = match job.reply.take() {
            Some(reply) => reply,
            None if is_simple && !is_last => self.output.begin(u64::from(len) + job.left, header),
            None => return self.output.add_with_data(data, header),
        };
        job.piece_max = len.into();
        job.reply = self.output.push(reply, data);
    }

    /// Answers a request with an error, although a part of it may be done.
    fn fail(&mut self, job: &Job, refusal: Refusal) -> Result<(), TransferError> {
        if job.reply.is_some() {
            return Err(TransferError::CutShort);
        }
        let has_more = job.left > 0;
        match job.work {
            // The client sends the payload of the rest.
            Work::Write if has_more && !matches!(self.reading, Reading::Stopped(_)) => {
                self.skip_payload(job, refusal);
                return Ok(());
            }
            Work::Read | Work::Write if has_more => self.end_pieces(),
            _ => {}
        }
        self.refuse(job.cookie, job.offset, refusal);
        Ok(())
    }

    pub(super) fn refuse(&mut self, cookie: u64, offset: u64, refusal: Refusal) {
        debug!("NBD: export '{}': {}", self.export.name, refusal.message);
        let replies = self.replies;
        self.output
            .add(|out| replies.error(cookie, refusal, offset, out));
    }

    /// Reads tables of the image in this thread, which delays only this client.
    pub(super) fn block_status(&mut self, header: &RequestHeader, at: u64, len: u64, one: bool) {
        // What was submitted before does not wait for it.
        self.queue.publish();
        let Negotiated {
            contexts, export, ..
        } = &*self.negotiated;
        let block = u64::from(export.blocks.minimum);
        let (disk, moment) = (self.export.disk(), &self.export.moment);
        // Short headers have 32 bits for an extent.
        let len = match self.negotiated.mode {
            Mode::Extended => len,
            _ => len.min(u64::from(u32::MAX) / block * block),
        };
        let deadline = Instant::now() + status::TIME_MAX;
        let cache = RefCell::<AllocationCache>::default();
        let look_up = |at, len| {
            let now = disk.allocated(at, len, &mut cache.borrow_mut())?;
            Ok(match moment {
                Some(moment) => moment.allocated(at, now),
                None => now,
            })
        };
        let source = |&context: &Context| -> io::Result<_> {
            let source = match context.bitmap() {
                Some(index) => {
                    let bitmap = self.bitmaps.get(index).and_then(Option::as_deref);
                    Source::Bitmap(bitmap.ok_or(BitmapLost)?)
                }
                None if context == BASE_ALLOCATION => Source::Allocation(&look_up),
                None => Source::Depth(&look_up),
            };
            Ok((context, source))
        };
        let sources: io::Result<Vec<_>> = contexts.iter().map(source).collect();
        let states =
            sources.and_then(|sources| status::states(&sources, (at, len), one, block, deadline));
        let states = match states {
            Ok(states) => states,
            Err(e) => {
                self.export.lines.log(|left_out| {
                    warn!(
                        "disk {}: the state of its blocks cannot be read: {e}{left_out}",
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
}
