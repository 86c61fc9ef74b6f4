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
        let n_fds = fds.len();
        let mut fds = fds.into_iter();
        let need = |len: usize, n: usize| {
            if payload.len() != len {
                Err(MessageError::Length(request, payload.len()))
            } else if n_fds != n {
                Err(MessageError::Descriptors(request, n_fds))
            } else {
                Ok(Fields(payload))
            }
        };
        let mut one_fd = || fds.next().ok_or(MessageError::Descriptors(request, 0));
        let message = match request {
            1 => need(0, 0).map(|_| Self::GetFeatures)?,
            2 => Self::SetFeatures(need(8, 0)?.u64()),
            3 => need(0, 0).map(|_| Self::SetOwner)?,
            4 => need(0, 0).map(|_| Self::ResetOwner)?,
            5 => return mem_table(request, payload, fds.collect()),
            6 => {
                let mut fields = need(16, 1)?;
                let layout = LogLayout {
                    len: fields.u64(),
                    file_offset: fields.u64(),
                };
                Self::SetLogBase(layout, one_fd()?)
            }
            7 => need(0, 1).and_then(|_| one_fd().map(Self::SetLogFd))?,
            8 => {
                let (ring, size) = need(8, 0)?.u32_pair();
                Self::SetVringNum { ring, size }
            }
            9 => {
                let mut fields = need(40, 0)?;
                let ring = fields.u32();
                /// VHOST_VRING_F_LOG; other bits have no meaning.
                const LOG: u32 = 1;
                let flags = fields.u32();
                Self::SetVringAddr(VringAddr {
                    ring,
                    descriptors: fields.u64(),
                    used: fields.u64(),
                    available: fields.u64(),
                    log: (flags & LOG != 0).then(|| fields.u64()),
                })
            }
            10 => {
                let (ring, base) = need(8, 0)?.u32_pair();
                Self::SetVringBase { ring, base }
            }
            11 => {
                let (ring, _) = need(8, 0)?.u32_pair();
                Self::GetVringBase { ring }
            }
            12..=14 => {
                // The lowest byte is the ring; bit 8 says that the message has no descriptor.
                const NO_FD: u64 = 1 << 8;
                let word = Fields(payload)
                    .checked_u64()
                    .filter(|_| payload.len() == 8)
                    .ok_or(MessageError::Length(request, payload.len()))?;
                let fd = match word & NO_FD != 0 {
                    true => need(8, 0).map(|_| None)?,
                    false => need(8, 1).and_then(|_| one_fd().map(Some))?,
                };
                let ring = (word & 0xff) as u32;
                match request {
                    12 => Self::SetVringKick { ring, fd },
                    13 => Self::SetVringCall { ring, fd },
                    _ => Self::SetVringErr { ring, fd },
                }
            }
            15 => need(0, 0).map(|_| Self::GetProtocolFeatures)?,
            16 => Self::SetProtocolFeatures(need(8, 0)?.u64()),
            17 => need(0, 0).map(|_| Self::GetQueueNum)?,
            18 => {
                let (ring, on) = need(8, 0)?.u32_pair();
                match on {
                    0 | 1 => Self::SetVringEnable { ring, on: on == 1 },
                    _ => return Err(MessageError::Value(request, "neither 0 nor 1")),
                }
            }
            21 => need(0, 1).and_then(|_| one_fd().map(Self::SetBackendReqFd))?,
            24 => Self::GetConfig(config(request, payload, n_fds)?),
            25 => Self::SetConfig(config(request, payload, n_fds)?),
            31 => {
                let layout = inflight(need(INFLIGHT_BYTES, 0)?);
                Self::GetInflightFd {
                    queues: layout.queues,
                    queue_size: layout.queue_size,
                }
            }
            32 => Self::SetInflightFd(inflight(need(INFLIGHT_BYTES, 1)?), one_fd()?),
            34 => need(0, 0).map(|_| Self::ResetDevice)?,
            36 => need(0, 0).map(|_| Self::GetMaxMemSlots)?,
            37 => Self::AddMemReg(single_region(need(40, 1)?), one_fd()?),
            // QEMU also sends a descriptor here; it is not needed.
            38 => Self::RemMemReg(single_region(need(40, n_fds.min(1))?)),
            39 => Self::SetStatus(need(8, 0)?.u64()),
            40 => need(0, 0).map(|_| Self::GetStatus)?,
            _ => return Err(MessageError::Unknown(request)),
        };
        Ok(message)
    }
}

/// Whether a session would accept a message. For tests and fuzzing, which can reach the parser only through
/// this function.
#[doc(hidden)]
pub fn accepts_message(header: [u8; HEADER_BYTES], payload: &[u8], fds: Vec<OwnedFd>) -> bool {
    Header::parse(header).is_ok_and(|h| Message::parse(h.request, payload, fds).is_ok())
}

fn mem_table(request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Message, MessageError> {
    let length = MessageError::Length(request, payload.len());
    let (head, mut regions) = match payload.split_at_checked(8) {
        Some((head, rest)) => (Fields(head).u32() as usize, Fields(rest)),
        None => return Err(length),
    };
    if head > MAX_FDS || regions.0.len() != head * 32 {
        return Err(length);
    }
    if fds.len() != head {
        return Err(MessageError::Descriptors(request, fds.len()));
    }
    let table = fds.into_iter().map(|fd| (region(&mut regions), fd));
    Ok(Message::SetMemTable(table.collect()))
}

/// Length of an inflight description as front-ends send it, including the padding after its last field.
const INFLIGHT_BYTES: usize = 24;

fn inflight(mut fields: Fields<'_>) -> InflightLayout {
    let (len, file_offset) = (fields.u64(), fields.u64());
    let [queues, queue_size] = fields.u16_pair();
    InflightLayout {
        len,
        file_offset,
        queues,
        queue_size,
    }
}

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

fn single_region(mut fields: Fields<'_>) -> RegionLayout {
    let _padding = fields.u64();
    region(&mut fields)
}

fn region(fields: &mut Fields<'_>) -> RegionLayout {
    RegionLayout {
        guest: fields.u64(),
        len: fields.u64(),
        user: fields.u64(),
        file_offset: fields.u64(),
    }
}

fn config(request: u32, payload: &[u8], n_fds: usize) -> Result<Config, MessageError> {
    let length = MessageError::Length(request, payload.len());
    let Some((head, bytes)) = payload.split_at_checked(12) else {
        return Err(length);
    };
    let mut head = Fields(head);
    let (offset, len, flags) = (head.u32(), head.u32(), head.u32());
    // SPDK's initiator always sends 256 bytes, even if it writes fewer.
    let bytes = bytes.get(..len as usize).ok_or(length)?;
    if n_fds != 0 {
        return Err(MessageError::Descriptors(request, n_fds));
    }
    if bytes.len() > MAX_CONFIG || offset > CONFIG_END - len {
        return Err(MessageError::Value(
            request,
            "beyond the configuration space",
        ));
    }
    Ok(Config {
        offset,
        flags,
        bytes: bytes.to_vec(),
    })
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

    fn checked_u64(&self) -> Option<u64> {
        self.0.first_chunk().map(|head| u64::from_ne_bytes(*head))
    }

    fn u16_pair(&mut self) -> [u16; 2] {
        let [a, b, c, d] = self.u32().to_ne_bytes();
        [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
    }

    fn u32_pair(&mut self) -> (u32, u32) {
        (self.u32(), self.u32())
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
