//! Requests in the transmission phase.

use thiserror::Error;

use crate::Mode;
use crate::fields::Fields;
use crate::handshake::{ExportInfo, flags};

/// Limit of the payload of one request or reply in bytes, as in QEMU and libnbd.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

const FUA: u16 = 1 << 0;
const NO_HOLE: u16 = 1 << 1;
const DF: u16 = 1 << 2;
const REQ_ONE: u16 = 1 << 3;
const FAST_ZERO: u16 = 1 << 4;
const PAYLOAD_LEN: u16 = 1 << 5;

/// An error as the protocol numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    /// The export is read-only.
    NotPermitted = 1,
    /// The storage failed.
    Io = 5,
    /// The request is not valid.
    Invalid = 22,
    /// There is no space left, or a write goes beyond the end.
    NoSpace = 28,
    /// A reply in one piece would be too long.
    Overflow = 75,
    /// The request cannot be done, or not fast enough.
    NotSupported = 95,
    /// The server ends the connection.
    Shutdown = 108,
}

/// Why a request is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What the client is told.
    pub code: ErrorCode,
    /// The same for people; clients show it if replies are structured.
    pub message: &'static str,
}

/// The client broke the protocol, and the position in the stream is unknown.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProtocolError {
    /// A request does not begin as requests do.
    #[error("a request begins with {0:#010x}, which is not the magic number of one")]
    Magic(u32),
    /// A request has more payload than is accepted.
    #[error("a request has {0} bytes of payload; the limit is {PAYLOAD_BYTES_MAX}")]
    Payload(u64),
}

/// The header of a request, as the client sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    flags: u16,
    kind: u16,
    /// The client's number of the request, which replies repeat.
    pub cookie: u64,
    /// First byte on the export.
    pub offset: u64,
    length: u64,
}

/// A request that was checked against its export. Ranges are not empty and inside the export, and aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Return the bytes of a range.
    Read {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// The reply must have all bytes in one chunk.
        whole: bool,
    },
    /// Write the payload.
    Write {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Complete when the bytes are on stable storage.
        fua: bool,
    },
    /// Make all completed writes of all connections stable.
    Flush,
    /// The range is not needed any more.
    Trim {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Complete when the change is on stable storage.
        fua: bool,
    },
    /// The range reads as zeroes from now on.
    WriteZeroes {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Complete when the change is on stable storage.
        fua: bool,
        /// The space may be deallocated.
        unmap: bool,
        /// Fail unless this is faster than a write.
        fast: bool,
    },
    /// Read the range ahead.
    Cache {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Say where the range has data.
    BlockStatus {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// One extent is enough.
        one: bool,
    },
    /// End the connection, without a reply.
    Disconnect,
}

impl RequestHeader {
    /// Length of a header in bytes.
    pub const fn bytes(mode: Mode) -> usize {
        match mode {
            Mode::Simple | Mode::Structured => 28,
            Mode::Extended => 32,
        }
    }

    /// Parses the header at the beginning of `bytes`; `None` if not all of it is there.
    ///
    /// # Errors
    /// This is no request.
    pub fn parse(bytes: &[u8], mode: Mode) -> Result<Option<Self>, ProtocolError> {
        let mut fields = Fields::new(bytes);
        let Some(magic) = fields.u32() else {
            return Ok(None);
        };
        let expected = match mode {
            Mode::Simple | Mode::Structured => REQUEST_MAGIC,
            Mode::Extended => EXTENDED_REQUEST_MAGIC,
        };
        if magic != expected {
            return Err(ProtocolError::Magic(magic));
        }
        let mut rest = || {
            Some(Self {
                flags: fields.u16()?,
                kind: fields.u16()?,
                cookie: fields.u64()?,
                offset: fields.u64()?,
                length: match mode {
                    Mode::Simple | Mode::Structured => fields.u32()?.into(),
                    Mode::Extended => fields.u64()?,
                },
            })
        };
        Ok(rest())
    }

    /// Number of payload bytes that follow the header, whether the request is valid or not.
    ///
    /// # Errors
    /// There are more than a server accepts.
    pub fn payload(&self, mode: Mode) -> Result<u32, ProtocolError> {
        // QEMU's client does not set the flag for a write, although it must; QEMU's server accepts that, too.
        let has_payload =
            self.kind == WRITE || mode == Mode::Extended && self.flags & PAYLOAD_LEN != 0;
        match u32::try_from(self.length) {
            _ if !has_payload => Ok(0),
            Ok(len) if len <= PAYLOAD_BYTES_MAX => Ok(len),
            _ => Err(ProtocolError::Payload(self.length)),
        }
    }

    /// Checks the request against its export.
    ///
    /// # Errors
    /// What to answer. The payload is still in the stream.
    pub fn command(
        &self,
        mode: Mode,
        export: &ExportInfo,
        has_contexts: bool,
    ) -> Result<Command, Refusal> {
        self.check_flags(mode, export)?;
        let (at, len, fua) = (self.offset, self.length, self.flags & FUA != 0);
        match self.kind {
            DISCONNECT => return Ok(Command::Disconnect),
            FLUSH if at == 0 && len == 0 => return Ok(Command::Flush),
            FLUSH => return Err(invalid("a flush has no range")),
            READ | WRITE | TRIM | CACHE | WRITE_ZEROES | BLOCK_STATUS => {}
            _ => return Err(invalid("this command is not known")),
        }
        let changes = matches!(self.kind, WRITE | TRIM | WRITE_ZEROES);
        if changes && export.is_read_only() {
            return Err(refuse(ErrorCode::NotPermitted, "the export is read-only"));
        }
        if len == 0 {
            return Err(invalid("the range is empty"));
        }
        if at.checked_add(len).is_none_or(|end| end > export.size) {
            let code = match self.kind {
                WRITE | WRITE_ZEROES => ErrorCode::NoSpace,
                _ => ErrorCode::Invalid,
            };
            return Err(refuse(code, "the range goes beyond the end of the export"));
        }
        let is_aligned = (at | len).is_multiple_of(u64::from(export.blocks.minimum));
        if !is_aligned && self.kind != BLOCK_STATUS {
            return Err(invalid(
                "the range is not aligned to the minimum block size",
            ));
        }
        let short = || match u32::try_from(len) {
            Ok(len) if len <= PAYLOAD_BYTES_MAX => Ok(len),
            _ if self.flags & DF != 0 => {
                Err(refuse(ErrorCode::Overflow, "the reply would be too long"))
            }
            _ => Err(invalid("the range is longer than 32 MiB")),
        };
        Ok(match self.kind {
            READ => Command::Read {
                at,
                len: short()?,
                whole: self.flags & DF != 0,
            },
            WRITE => {
                let len = short()?;
                Command::Write { at, len, fua }
            }
            TRIM => Command::Trim { at, len, fua },
            CACHE => Command::Cache { at, len },
            WRITE_ZEROES => Command::WriteZeroes {
                at,
                len,
                fua,
                unmap: self.flags & NO_HOLE == 0,
                fast: self.flags & FAST_ZERO != 0,
            },
            _ if !has_contexts => {
                return Err(invalid("no metadata context was negotiated"));
            }
            _ => Command::BlockStatus {
                at,
                len,
                one: self.flags & REQ_ONE != 0,
            },
        })
    }

    fn check_flags(&self, mode: Mode, export: &ExportInfo) -> Result<(), Refusal> {
        let own = match self.kind {
            READ if mode >= Mode::Structured => DF,
            WRITE if mode == Mode::Extended => PAYLOAD_LEN,
            WRITE_ZEROES if export.flags & flags::SEND_FAST_ZERO != 0 => NO_HOLE | FAST_ZERO,
            WRITE_ZEROES => NO_HOLE,
            BLOCK_STATUS => REQ_ONE,
            _ => 0,
        };
        if self.flags & !(own | FUA) != 0 {
            return Err(invalid("a flag does not belong to this command"));
        }
        Ok(())
    }
}

fn refuse(code: ErrorCode, message: &'static str) -> Refusal {
    Refusal { code, message }
}

fn invalid(message: &'static str) -> Refusal {
    refuse(ErrorCode::Invalid, message)
}
