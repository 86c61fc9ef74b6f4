//! Replies in the transmission phase. Each function appends a reply, or the header of one, to `out`.

use crate::request::Refusal;
use crate::{Context, Mode};

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

const DONE: u16 = 1;

const NONE: u16 = 0;
const OFFSET_DATA: u16 = 1;
const BLOCK_STATUS: u16 = 5;
const BLOCK_STATUS_EXTENDED: u16 = 6;
const ERROR: u16 = (1 << 15) + 1;

/// `base:allocation`: the range has no space of its own.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the range reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// Limit of the extents of one reply to NBD_CMD_BLOCK_STATUS. With 16 bytes for each, 512 KiB.
pub const EXTENTS_MAX: usize = 32 << 10;

/// The state of the beginning of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length in bytes.
    pub len: u64,
    /// What the flags mean depends on the context.
    pub flags: u32,
}

/// Writes the replies of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Replies {
    /// The negotiated form.
    pub mode: Mode,
}

impl Replies {
    /// The request has succeeded, and has no data to return. Extended headers repeat its offset.
    pub fn done(&self, cookie: u64, offset: u64, out: &mut Vec<u8>) {
        match self.mode {
            Mode::Simple => simple(cookie, 0, out),
            _ => self.chunk(NONE, cookie, offset, 0, out),
        }
    }

    /// The request has failed, or was refused.
    pub fn error(&self, cookie: u64, refusal: Refusal, offset: u64, out: &mut Vec<u8>) {
        let (code, message) = (refusal.code as u32, refusal.message.as_bytes());
        if self.mode == Mode::Simple {
            return simple(cookie, code, out);
        }
        self.chunk(ERROR, cookie, offset, 6 + message.len() as u64, out);
        out.extend_from_slice(&code.to_be_bytes());
        out.extend_from_slice(&(message.len() as u16).to_be_bytes());
        out.extend_from_slice(message);
    }

    /// Everything before the bytes that were read, which are sent next. `is_last` if there are no others. Simple replies have
    /// one header for all bytes; extended ones repeat the `offset` of the request, whatever part of it comes `at`.
    pub fn data_header(
        &self,
        cookie: u64,
        (offset, at): (u64, u64),
        len: u32,
        is_last: bool,
        out: &mut Vec<u8>,
    ) {
        if self.mode == Mode::Simple {
            return simple(cookie, 0, out);
        }
        let (flags, len) = (if is_last { DONE } else { 0 }, u64::from(len) + 8);
        self.chunk_with(flags, OFFSET_DATA, cookie, offset, len, out);
        out.extend_from_slice(&at.to_be_bytes());
    }

    /// The states of a range from `offset` on, in one context. `is_last` if the request has no further context.
    pub fn block_status(
        &self,
        cookie: u64,
        offset: u64,
        context: Context,
        extents: &[BlockStatus],
        is_last: bool,
        out: &mut Vec<u8>,
    ) {
        let (count, is_extended) = (extents.len() as u64, self.mode == Mode::Extended);
        let (kind, len) = if is_extended {
            (BLOCK_STATUS_EXTENDED, 8 + 16 * count)
        } else {
            (BLOCK_STATUS, 4 + 8 * count)
        };
        let flags = if is_last { DONE } else { 0 };
        self.chunk_with(flags, kind, cookie, offset, len, out);
        out.extend_from_slice(&context.0.to_be_bytes());
        if is_extended {
            out.extend_from_slice(&(count as u32).to_be_bytes());
        }
        for extent in extents {
            if is_extended {
                out.extend_from_slice(&extent.len.to_be_bytes());
                out.extend_from_slice(&u64::from(extent.flags).to_be_bytes());
            } else {
                out.extend_from_slice(&(extent.len as u32).to_be_bytes());
                out.extend_from_slice(&extent.flags.to_be_bytes());
            }
        }
    }

    fn chunk(&self, kind: u16, cookie: u64, offset: u64, len: u64, out: &mut Vec<u8>) {
        self.chunk_with(DONE, kind, cookie, offset, len, out);
    }

    fn chunk_with(
        &self,
        flags: u16,
        kind: u16,
        cookie: u64,
        offset: u64,
        len: u64,
        out: &mut Vec<u8>,
    ) {
        let is_extended = self.mode == Mode::Extended;
        let magic = if is_extended {
            EXTENDED_MAGIC
        } else {
            STRUCTURED_MAGIC
        };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&cookie.to_be_bytes());
        if is_extended {
            out.extend_from_slice(&offset.to_be_bytes());
            out.extend_from_slice(&len.to_be_bytes());
        } else {
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

fn simple(cookie: u64, error: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&SIMPLE_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorCode;

    /// A client counts on it: the codes are those of the specification, not this host's.
    #[test]
    fn errors_have_the_numbers_of_the_protocol() {
        let mut out = Vec::new();
        let refusal = Refusal {
            code: ErrorCode::NotSupported,
            message: "slow",
        };
        let replies = Replies {
            mode: Mode::Structured,
        };
        replies.error(7, refusal, 0, &mut out);
        assert_eq!(out.len(), 20 + 6 + 4);
        assert_eq!(out[20..24], 95u32.to_be_bytes());
        assert_eq!(&out[26..], b"slow");
    }
}
