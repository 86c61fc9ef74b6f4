//! Parses vhost-user messages from bytes and file descriptors (QEMU's `docs/interop/vhost-user.rst`).

use std::os::fd::OwnedFd;

use thiserror::Error;

use crate::inflight::InflightLayout;
use crate::log::LogLayout;
use crate::memory::RegionLayout;

/// Maximum number of memory regions of a front-end: the most that QEMU uses (512 slots of RAM). Each needs
/// one descriptor and one mapping in this process.
pub const MAX_MEM_SLOTS: usize = 512;

/// Maximum number of regions in one SET_MEM_TABLE message, and of descriptors in any message. QEMU sends at
/// most 8 (VHOST_MEMORY_BASELINE_NREGIONS); rust-vmm's front-ends and crosvm send at most 32
/// (MAX_ATTACHED_FD_ENTRIES).
pub(crate) const MAX_FDS: usize = 32;

/// Maximum payload: SET_MEM_TABLE has 8 + 32 × 32 bytes, GET_CONFIG 12 + 256.
pub(crate) const MAX_PAYLOAD: usize = 8 + MAX_FDS * 32;

/// Maximum length of a configuration-space access in one message.
const MAX_CONFIG: usize = 256;

/// Offset of a device's configuration space in virtio-mmio. Cloud Hypervisor up to version 50 reads the space
/// from this offset (VHOST_USER_CONFIG_OFFSET of rust-vmm); its writes use real offsets.
const CONFIG_OFFSET: u32 = 0x100;

/// End of the largest configuration space that rust-vmm and crosvm support (VHOST_USER_CONFIG_SIZE).
const CONFIG_END: u32 = 0x1000;

pub(crate) const HEADER_BYTES: usize = 12;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 4;
const FLAG_NEED_REPLY: u32 = 8;

/// Why a message is invalid; ringdisk closes the connection of the front-end that sent it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    /// The version is not 1, or a reply came instead of a request.
    #[error("message {0} has flags {1:#x}, not those of a request of protocol version 1")]
    Flags(u32, u32),
    /// The payload is longer than any message's.
    #[error("message {0} has {1} bytes of payload, more than {MAX_PAYLOAD}")]
    TooLong(u32, u32),
    /// The payload has the wrong length.
    #[error("message {0} has {1} bytes of payload, which does not match its type")]
    Length(u32, usize),
    /// The message has the wrong number of descriptors.
    #[error("message {0} has {1} file descriptors, which does not match its type")]
    Descriptors(u32, usize),
    /// The message has more descriptors than any message needs.
    #[error("a message has more than {MAX_FDS} file descriptors, the maximum of any type")]
    TooManyDescriptors,
    /// A field has an invalid value.
    #[error("message {0}: {1}")]
    Value(u32, &'static str),
    /// This back-end did not offer to support the message.
    #[error("message {0} is not one that was negotiated")]
    Unknown(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub request: u32,
    pub payload_len: usize,
    pub need_reply: bool,
}

impl Header {
    pub(crate) fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let mut fields = Fields(&bytes);
        let (request, flags, len) = (fields.u32(), fields.u32(), fields.u32());
        if flags & VERSION_MASK != VERSION || flags & FLAG_REPLY != 0 {
            return Err(MessageError::Flags(request, flags));
        }
        if len as usize > MAX_PAYLOAD {
            return Err(MessageError::TooLong(request, len));
        }
        Ok(Self {
            request,
            payload_len: len as usize,
            need_reply: flags & FLAG_NEED_REPLY != 0,
        })
    }
}

/// Encodes a reply to `request`.
pub(crate) fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u32;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for word in [request, VERSION | FLAG_REPLY, len] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// Encodes the message that tells the front-end of a configuration change
/// (VHOST_USER_BACKEND_CONFIG_CHANGE_MSG).
pub(crate) fn config_change() -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..4].copy_from_slice(&2u32.to_ne_bytes());
    bytes[4..8].copy_from_slice(&VERSION.to_ne_bytes());
    bytes
}

/// An access to part of the configuration space.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// The offset as the front-end sent it; the reply repeats it.
    pub offset: u32,
    pub flags: u32,
    pub bytes: Vec<u8>,
}

impl Config {
    /// The real offset in the configuration space.
    fn start(&self) -> usize {
        match self.offset {
            at if at < CONFIG_OFFSET => at as usize,
            at => (at - CONFIG_OFFSET) as usize,
        }
    }

    /// Fills the buffer from `space`; bytes beyond its end are zero.
    pub(crate) fn read(&mut self, space: &[u8]) {
        for (at, byte) in (self.start()..).zip(&mut self.bytes) {
            *byte = space.get(at).copied().unwrap_or(0);
        }
    }

    /// The size of the disk in sectors, if the access read it.
    pub(crate) fn capacity(&self) -> Option<u64> {
        let bytes = self.bytes.first_chunk().filter(|_| self.start() == 0)?;
        Some(u64::from_le_bytes(*bytes))
    }

    pub(crate) fn payload(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(12 + self.bytes.len());
        for word in [self.offset, self.bytes.len() as u32, self.flags] {
            payload.extend_from_slice(&word.to_ne_bytes());
        }
        payload.extend_from_slice(&self.bytes);
        payload
    }
}

/// A request of the front-end. Ring indices are not checked here: the session checks them against its number
/// of queues.
#[derive(Debug)]
pub(crate) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(RegionLayout, OwnedFd)>),
    SetLogBase(LogLayout, OwnedFd),
    SetLogFd(OwnedFd),
    SetVringNum { ring: u32, size: u32 },
    SetVringAddr(VringAddr),
    SetVringBase { ring: u32, base: u32 },
    GetVringBase { ring: u32 },
    SetVringKick { ring: u32, fd: Option<OwnedFd> },
    SetVringCall { ring: u32, fd: Option<OwnedFd> },
    SetVringErr { ring: u32, fd: Option<OwnedFd> },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { ring: u32, on: bool },
    SetBackendReqFd(OwnedFd),
    GetConfig(Config),
    SetConfig(Config),
    GetInflightFd { queues: u16, queue_size: u16 },
    SetInflightFd(InflightLayout, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(RegionLayout, OwnedFd),
    RemMemReg(RegionLayout),
    SetStatus(u64),
    GetStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringAddr {
    pub ring: u32,
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
    /// Guest address of the used ring, if writes to it must be marked in the dirty log.
    pub log: Option<u64>,
}

impl Message {
    /// Parses a payload, whose length the caller has matched with the header, and the descriptors that came
    /// with it. Unexpected descriptors are rejected, except where QEMU sends one.
    pub(crate) fn parse(
        request: u32,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Self, MessageError> {
        let body = Body {
            request,
            payload,
            fds,
        };
        Ok(match request {
            1 => body.empty(Self::GetFeatures)?,
            2 => Self::SetFeatures(body.u64()?),
            3 => body.empty(Self::SetOwner)?,
            4 => body.empty(Self::ResetOwner)?,
            5 => Self::SetMemTable(body.mem_table()?),
            6 => {
                let (mut fields, fd) = body.with_fd(16)?;
                Self::SetLogBase(fields.log(), fd)
            }
            7 => Self::SetLogFd(body.with_fd(0)?.1),
            8 => {
                let (ring, size) = body.u32_pair()?;
                Self::SetVringNum { ring, size }
            }
            9 => Self::SetVringAddr(body.fields(40, 0)?.vring_addr()),
            10 => {
                let (ring, base) = body.u32_pair()?;
                Self::SetVringBase { ring, base }
            }
            11 => {
                let (ring, _) = body.u32_pair()?;
                Self::GetVringBase { ring }
            }
            12 => {
                let (ring, fd) = body.ring_event()?;
                Self::SetVringKick { ring, fd }
            }
            13 => {
                let (ring, fd) = body.ring_event()?;
                Self::SetVringCall { ring, fd }
            }
            14 => {
                let (ring, fd) = body.ring_event()?;
                Self::SetVringErr { ring, fd }
            }
            15 => body.empty(Self::GetProtocolFeatures)?,
            16 => Self::SetProtocolFeatures(body.u64()?),
            17 => body.empty(Self::GetQueueNum)?,
            18 => match body.u32_pair()? {
                (ring, on @ (0 | 1)) => Self::SetVringEnable { ring, on: on == 1 },
                _ => return Err(MessageError::Value(request, "neither 0 nor 1")),
            },
            21 => Self::SetBackendReqFd(body.with_fd(0)?.1),
            24 => Self::GetConfig(body.config()?),
            25 => Self::SetConfig(body.config()?),
            31 => {
                let layout = body.fields(INFLIGHT_BYTES, 0)?.inflight();
                Self::GetInflightFd {
                    queues: layout.queues,
                    queue_size: layout.queue_size,
                }
            }
            32 => {
                let (mut fields, fd) = body.with_fd(INFLIGHT_BYTES)?;
                Self::SetInflightFd(fields.inflight(), fd)
            }
            34 => body.empty(Self::ResetDevice)?,
            36 => body.empty(Self::GetMaxMemSlots)?,
            37 => {
                let (mut fields, fd) = body.with_fd(SINGLE_REGION_BYTES)?;
                Self::AddMemReg(fields.single_region(), fd)
            }
            38 => {
                // QEMU also sends a descriptor here; it is not needed.
                let n_fds = body.fds.len().min(1);
                Self::RemMemReg(body.fields(SINGLE_REGION_BYTES, n_fds)?.single_region())
            }
            39 => Self::SetStatus(body.u64()?),
            40 => body.empty(Self::GetStatus)?,
            _ => return Err(MessageError::Unknown(request)),
        })
    }
}

/// A message that is handled after storage has answered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deferred {
    VringBase { ring: u32 },
    Reset,
}

impl From<Deferred> for Message {
    fn from(deferred: Deferred) -> Self {
        match deferred {
            Deferred::VringBase { ring } => Self::GetVringBase { ring },
            Deferred::Reset => Self::SetStatus(0),
        }
    }
}

/// Whether a session would accept a message. For tests and fuzzing, which can reach the parser only through
/// this function.
#[doc(hidden)]
pub fn accepts_message(header: [u8; HEADER_BYTES], payload: &[u8], fds: Vec<OwnedFd>) -> bool {
    Header::parse(header).is_ok_and(|h| Message::parse(h.request, payload, fds).is_ok())
}

/// Length of an inflight description as front-ends send it, including the padding after its last field.
const INFLIGHT_BYTES: usize = 24;

/// Length of a memory region in a message of its own, including the padding before it.
const SINGLE_REGION_BYTES: usize = 40;

/// The payload of the reply to GET_INFLIGHT_FD.
pub(crate) fn inflight_payload(layout: &InflightLayout) -> Vec<u8> {
    let mut payload = Vec::with_capacity(INFLIGHT_BYTES);
    for word in [layout.len, layout.file_offset] {
        payload.extend_from_slice(&word.to_ne_bytes());
    }
    for word in [layout.queues, layout.queue_size, 0, 0] {
        payload.extend_from_slice(&word.to_ne_bytes());
    }
    payload
}

/// The payload of the reply to SET_LOG_BASE.
pub(crate) fn log_payload(layout: LogLayout) -> Vec<u8> {
    [layout.len.to_ne_bytes(), layout.file_offset.to_ne_bytes()].concat()
}

/// The payload and the descriptors of a request.
struct Body<'a> {
    request: u32,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl<'a> Body<'a> {
    /// The payload, which has this length, with so many descriptors.
    fn fields(&self, len: usize, n_fds: usize) -> Result<Fields<'a>, MessageError> {
        if self.payload.len() != len {
            Err(self.wrong_length())
        } else if self.fds.len() != n_fds {
            Err(self.wrong_descriptors())
        } else {
            Ok(Fields(self.payload))
        }
    }

    /// The payload, which has this length, and its only descriptor.
    fn with_fd(mut self, len: usize) -> Result<(Fields<'a>, OwnedFd), MessageError> {
        let fields = self.fields(len, 1)?;
        let fd = self.fds.pop().ok_or_else(|| self.wrong_descriptors())?;
        Ok((fields, fd))
    }

    fn empty(self, message: Message) -> Result<Message, MessageError> {
        self.fields(0, 0).map(|_| message)
    }

    fn u64(self) -> Result<u64, MessageError> {
        Ok(self.fields(8, 0)?.u64())
    }

    fn u32_pair(self) -> Result<(u32, u32), MessageError> {
        Ok(self.fields(8, 0)?.u32_pair())
    }

    /// A ring, and the descriptor that it is given, if any.
    fn ring_event(self) -> Result<(u32, Option<OwnedFd>), MessageError> {
        // The lowest byte is the ring; bit 8 says that the message has no descriptor.
        const NO_FD: u64 = 1 << 8;
        let word = self.fields(8, self.fds.len())?.u64();
        let ring = (word & 0xff) as u32;
        if word & NO_FD != 0 {
            return self.fields(8, 0).map(|_| (ring, None));
        }
        let (_, fd) = self.with_fd(8)?;
        Ok((ring, Some(fd)))
    }

    fn mem_table(self) -> Result<Vec<(RegionLayout, OwnedFd)>, MessageError> {
        let (n, mut regions) = match self.payload.split_at_checked(8) {
            Some((head, rest)) => (Fields(head).u32() as usize, Fields(rest)),
            None => return Err(self.wrong_length()),
        };
        if n > MAX_FDS || regions.0.len() != n * 32 {
            return Err(self.wrong_length());
        }
        if self.fds.len() != n {
            return Err(self.wrong_descriptors());
        }
        let table = self.fds.into_iter().map(|fd| (regions.region(), fd));
        Ok(table.collect())
    }

    fn config(self) -> Result<Config, MessageError> {
        let Some((head, bytes)) = self.payload.split_at_checked(12) else {
            return Err(self.wrong_length());
        };
        let mut head = Fields(head);
        let (offset, len, flags) = (head.u32(), head.u32(), head.u32());
        // SPDK's initiator always sends 256 bytes, even if it writes fewer.
        let bytes = bytes
            .get(..len as usize)
            .ok_or_else(|| self.wrong_length())?;
        if !self.fds.is_empty() {
            return Err(self.wrong_descriptors());
        }
        if bytes.len() > MAX_CONFIG || offset > CONFIG_END - len {
            let problem = "beyond the configuration space";
            return Err(MessageError::Value(self.request, problem));
        }
        Ok(Config {
            offset,
            flags,
            bytes: bytes.to_vec(),
        })
    }

    fn wrong_length(&self) -> MessageError {
        MessageError::Length(self.request, self.payload.len())
    }

    fn wrong_descriptors(&self) -> MessageError {
        MessageError::Descriptors(self.request, self.fds.len())
    }
}

/// Reads fields from the front; the caller has checked the length.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> u32 {
        let (head, rest) = self.0.split_first_chunk().expect("length was checked");
        self.0 = rest;
        u32::from_ne_bytes(*head)
    }

    fn u64(&mut self) -> u64 {
        let (head, rest) = self.0.split_first_chunk().expect("length was checked");
        self.0 = rest;
        u64::from_ne_bytes(*head)
    }

    fn u16_pair(&mut self) -> [u16; 2] {
        let [a, b, c, d] = self.u32().to_ne_bytes();
        [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
    }

    fn u32_pair(&mut self) -> (u32, u32) {
        (self.u32(), self.u32())
    }

    fn log(&mut self) -> LogLayout {
        LogLayout {
            len: self.u64(),
            file_offset: self.u64(),
        }
    }

    fn vring_addr(&mut self) -> VringAddr {
        /// VHOST_VRING_F_LOG; other bits have no meaning.
        const LOG: u32 = 1;
        let (ring, flags) = self.u32_pair();
        VringAddr {
            ring,
            descriptors: self.u64(),
            used: self.u64(),
            available: self.u64(),
            log: (flags & LOG != 0).then(|| self.u64()),
        }
    }

    fn inflight(&mut self) -> InflightLayout {
        let (len, file_offset) = (self.u64(), self.u64());
        let [queues, queue_size] = self.u16_pair();
        InflightLayout {
            len,
            file_offset,
            queues,
            queue_size,
        }
    }

    fn single_region(&mut self) -> RegionLayout {
        let _padding = self.u64();
        self.region()
    }

    fn region(&mut self) -> RegionLayout {
        RegionLayout {
            guest: self.u64(),
            len: self.u64(),
            user: self.u64(),
            file_offset: self.u64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    fn fd() -> OwnedFd {
        memfd_create("x", MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn non_request_headers_are_refused() {
        let header = |flags: u32, len: u32| {
            let mut bytes = [0; 12];
            bytes[0] = 1;
            bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
            bytes[8..].copy_from_slice(&len.to_ne_bytes());
            Header::parse(bytes)
        };
        assert!(header(1, 0).is_ok());
        assert!(header(9, 8).unwrap().need_reply);
        assert!(matches!(header(0, 0), Err(MessageError::Flags(1, 0))));
        assert!(matches!(header(5, 0), Err(MessageError::Flags(1, 5))));
        assert!(matches!(
            header(1, 4096),
            Err(MessageError::TooLong(1, 4096))
        ));
    }

    /// Every request, with every payload length and up to nine descriptors, gets a result without a panic.
    #[test]
    fn any_length_and_descriptor_count_is_answered() {
        for request in 0..=64 {
            for len in 0..=MAX_PAYLOAD {
                for byte in [0u8, 1, 0xff] {
                    let _ = Message::parse(request, &vec![byte; len], Vec::new());
                }
            }
            for n in 1..=9 {
                for len in [0, 8, 40, 8 + 32 * n] {
                    let mut payload = vec![0u8; len];
                    if len > 0 {
                        payload[0] = n as u8;
                    }
                    let _ = Message::parse(request, &payload, (0..n).map(|_| fd()).collect());
                }
            }
        }
    }

    #[test]
    fn kick_without_descriptor_needs_flag() {
        let parse = |word: u64, fds| Message::parse(12, &word.to_ne_bytes(), fds);
        assert!(matches!(
            parse(0x102, vec![]),
            Ok(Message::SetVringKick { ring: 2, fd: None })
        ));
        assert!(parse(2, vec![]).is_err());
        assert!(parse(0x102, vec![fd()]).is_err());
        assert!(matches!(
            parse(3, vec![fd()]),
            Ok(Message::SetVringKick {
                ring: 3,
                fd: Some(_)
            })
        ));
    }
}
