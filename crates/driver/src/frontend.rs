//! A vhost-user front-end: the client side of the socket, written from the specification
//! (<https://qemu.readthedocs.io/en/latest/interop/vhost-user.html>), without code of the server.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use vmm_sys_util::eventfd::EventFd;

use crate::memory::Region;

/// The connection to a vhost-user back-end.
pub struct Frontend {
    socket: UnixStream,
    reply_ack: bool,
}

/// Message numbers, "Front-end message types".
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// Sent by the back-end.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// Protocol feature bits, "Protocol features".
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    /// All protocol features that this front-end supports.
    pub const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// `VHOST_USER_F_PROTOCOL_FEATURES`, a bit of the virtio features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// `VHOST_F_LOG_ALL`, a bit of the virtio features: the back-end marks all its writes to guest memory in the log.
pub const F_LOG_ALL: u64 = 1 << 26;

/// Header flags: version 1.
pub const VERSION: u32 = 1;
/// Header flag: this is a reply.
pub const REPLY: u32 = 1 << 2;
/// Header flag: the sender wants a reply even to a message without one.
pub const NEED_REPLY: u32 = 1 << 3;

/// The shared memory in which a back-end tracks requests in flight ("Inflight description").
pub struct Inflight {
    /// Size in bytes, offset in the file, number of queues, entries per queue.
    pub description: (u64, u64, u16, u16),
    /// The file that contains the region.
    pub file: OwnedFd,
}

impl Inflight {
    /// Parses the reply to GET_INFLIGHT_FD.
    ///
    /// # Errors
    /// The reply is malformed.
    pub fn from_reply(reply: &[u8], mut fds: Vec<OwnedFd>) -> io::Result<Self> {
        let word = |at: usize| {
            let bytes = reply.get(at..at + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
        };
        match (word(0), word(8), word(16), fds.pop()) {
            (Some(size), Some(offset), Some(numbers), Some(file)) => Ok(Self {
                description: (size, offset, numbers as u16, (numbers >> 16) as u16),
                file,
            }),
            _ => Err(invalid(format!("GET_INFLIGHT_FD answered {reply:x?}"))),
        }
    }

    /// A region that the front-end makes itself, as the specification describes.
    pub fn made(queues: u16, queue_size: u16, packed: bool) -> io::Result<Self> {
        let bytes = if packed { 32 } else { 16 };
        let queue = (bytes * (1 + u64::from(queue_size))).next_multiple_of(64);
        let size = u64::from(queues) * queue;
        let file = memfd_create("region", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size)?;
        Ok(Self {
            description: (size, 0, queues, queue_size),
            file,
        })
    }

    /// The description in the form in which it is sent.
    pub fn payload(description: (u64, u64, u16, u16)) -> Vec<u8> {
        let (size, offset, queues, queue_size) = description;
        let numbers = u64::from(queues) | u64::from(queue_size) << 16;
        let words = [size, offset, numbers];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

/// The addresses of the three parts of a split ring, as front-end user addresses.
#[derive(Clone, Copy, Debug)]
pub struct RingAddresses {
    /// Descriptor table.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
}

impl Frontend {
    /// Connects to a back-end's socket. Every later wait for a reply is bounded, so that a hang becomes an error.
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        Ok(Self {
            socket,
            reply_ack: false,
        })
    }

    /// The virtio features that the device offers.
    pub fn features(&mut self) -> io::Result<u64> {
        self.query_u64(message::GET_FEATURES)
    }

    /// Accepts virtio features.
    pub fn set_features(&mut self, features: u64) -> io::Result<()> {
        self.command(message::SET_FEATURES, &features.to_ne_bytes(), &[])
    }

    /// The protocol features that the back-end offers.
    pub fn protocol_features(&mut self) -> io::Result<u64> {
        self.query_u64(message::GET_PROTOCOL_FEATURES)
    }

    /// Accepts protocol features. With REPLY_ACK among them, every later command waits for its acknowledgement.
    pub fn set_protocol_features(&mut self, features: u64) -> io::Result<()> {
        self.command(message::SET_PROTOCOL_FEATURES, &features.to_ne_bytes(), &[])?;
        self.reply_ack = features & protocol::REPLY_ACK != 0;
        Ok(())
    }

    /// Takes ownership of the session.
    pub fn set_owner(&mut self) -> io::Result<()> {
        self.command(message::SET_OWNER, &[], &[])
    }

    /// The number of queues that the device supports.
    pub fn queue_num(&mut self) -> io::Result<u64> {
        self.query_u64(message::GET_QUEUE_NUM)
    }

    /// Replaces the memory map.
    pub fn set_mem_table(&mut self, regions: &[&Region]) -> io::Result<()> {
        let mut payload = u64::to_ne_bytes(regions.len() as u64).to_vec();
        regions.iter().for_each(|r| payload.extend(region_bytes(r)));
        let fds: Vec<_> = regions.iter().map(|r| r.file.as_fd()).collect();
        self.command(message::SET_MEM_TABLE, &payload, &fds)
    }

    /// Sends the dirty log (all of `log`) and the eventfd that signals new marks.
    pub fn set_log(&mut self, log: &Region, event: BorrowedFd) -> io::Result<()> {
        let payload = [log.size, log.mmap_offset].map(u64::to_ne_bytes).concat();
        let (request, len) = (message::SET_LOG_BASE, payload.len() as u32);
        self.send_raw(request, VERSION, len, &payload, &[log.file.as_fd()])?;
        self.reply(request)?;
        self.command(message::SET_LOG_FD, &[], &[event])
    }

    /// The number of regions that the back-end can map.
    pub fn max_mem_slots(&mut self) -> io::Result<u64> {
        self.query_u64(message::GET_MAX_MEM_SLOTS)
    }

    /// Adds one region to the memory map.
    pub fn add_mem_reg(&mut self, region: &Region) -> io::Result<()> {
        let payload = [vec![0; 8], region_bytes(region)].concat();
        self.command(message::ADD_MEM_REG, &payload, &[region.file.as_fd()])
    }

    /// Removes one region from the memory map.
    pub fn rem_mem_reg(&mut self, region: &Region) -> io::Result<()> {
        let payload = [vec![0; 8], region_bytes(region)].concat();
        self.command(message::REM_MEM_REG, &payload, &[])
    }

    /// Sets the size of a ring.
    pub fn set_vring_num(&mut self, queue: u16, size: u16) -> io::Result<()> {
        self.command(
            message::SET_VRING_NUM,
            &vring_state(queue, u32::from(size)),
            &[],
        )
    }

    /// Sets the addresses of a ring.
    pub fn set_vring_addr(&mut self, queue: u16, ring: RingAddresses) -> io::Result<()> {
        let mut payload = vring_state(queue, 0);
        [ring.desc, ring.used, ring.avail, 0]
            .iter()
            .for_each(|a| payload.extend(a.to_ne_bytes()));
        self.command(message::SET_VRING_ADDR, &payload, &[])
    }

    /// Sets where the device continues: the next available index, or both positions of a packed ring.
    pub fn set_vring_base(&mut self, queue: u16, base: u32) -> io::Result<()> {
        self.command(message::SET_VRING_BASE, &vring_state(queue, base), &[])
    }

    /// Stops a ring, and returns where the device would have continued.
    pub fn vring_base(&mut self, queue: u16) -> io::Result<u32> {
        let reply = self.query(message::GET_VRING_BASE, &vring_state(queue, 0))?;
        let word = |at: usize| {
            reply
                .get(at..at + 4)
                .map(|b| u32::from_ne_bytes(b.try_into().expect("4 bytes")))
        };
        match (reply.len(), word(0), word(4)) {
            (8, Some(index), Some(base)) if index == u32::from(queue) => Ok(base),
            _ => Err(invalid(format!(
                "GET_VRING_BASE of queue {queue} answered {reply:x?}"
            ))),
        }
    }

    /// Sends the eventfd that signals new buffers to the device.
    pub fn set_vring_kick(&mut self, queue: u16, fd: BorrowedFd) -> io::Result<()> {
        self.command(
            message::SET_VRING_KICK,
            &u64::from(queue).to_ne_bytes(),
            &[fd],
        )
    }

    /// Sends the eventfd that signals used buffers to the driver.
    pub fn set_vring_call(&mut self, queue: u16, fd: BorrowedFd) -> io::Result<()> {
        self.command(
            message::SET_VRING_CALL,
            &u64::from(queue).to_ne_bytes(),
            &[fd],
        )
    }

    /// Sends the eventfd that signals a broken ring.
    pub fn set_vring_err(&mut self, queue: u16, fd: BorrowedFd) -> io::Result<()> {
        self.command(
            message::SET_VRING_ERR,
            &u64::from(queue).to_ne_bytes(),
            &[fd],
        )
    }

    /// Enables or disables a ring.
    pub fn set_vring_enable(&mut self, queue: u16, on: bool) -> io::Result<()> {
        self.command(
            message::SET_VRING_ENABLE,
            &vring_state(queue, u32::from(on)),
            &[],
        )
    }

    /// Reads `len` bytes of the device's config space.
    pub fn config(&mut self, offset: u32, len: u32) -> io::Result<Vec<u8>> {
        let mut payload = config_header(offset, len, 0);
        payload.resize(12 + len as usize, 0);
        let reply = self.query(message::GET_CONFIG, &payload)?;
        let header = reply.get(..12).map(<[u8]>::to_vec);
        // According to the specification, a back-end reports an error with an empty payload.
        if header != Some(payload[..12].to_vec()) || reply.len() != payload.len() {
            return Err(invalid(format!(
                "GET_CONFIG of {len} bytes at {offset} answered {reply:x?}"
            )));
        }
        Ok(reply[12..].to_vec())
    }

    /// Writes to the device's config space.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let payload = [config_header(offset, bytes.len() as u32, 0), bytes.to_vec()].concat();
        self.command(message::SET_CONFIG, &payload, &[])
    }

    /// Reads the device status from the back-end.
    pub fn status(&mut self) -> io::Result<u64> {
        self.query_u64(message::GET_STATUS)
    }

    /// Sets the device status in the back-end.
    pub fn set_status(&mut self, status: u64) -> io::Result<()> {
        self.command(message::SET_STATUS, &status.to_ne_bytes(), &[])
    }

    /// Resets the device; all rings are disabled.
    pub fn reset_device(&mut self) -> io::Result<()> {
        self.command(message::RESET_DEVICE, &[], &[])
    }

    /// Requests shared memory in which the back-end tracks requests in flight.
    pub fn inflight(&mut self, queues: u16, queue_size: u16) -> io::Result<Inflight> {
        let payload = Inflight::payload((0, 0, queues, queue_size));
        let (request, len) = (message::GET_INFLIGHT_FD, payload.len() as u32);
        self.send_raw(request, VERSION, len, &payload, &[])?;
        let (reply, fds) = self.reply_with_fds(request)?;
        Inflight::from_reply(&reply, fds)
    }

    /// Sends this memory to the back-end.
    pub fn set_inflight(&mut self, inflight: &Inflight) -> io::Result<()> {
        let payload = Inflight::payload(inflight.description);
        self.command(message::SET_INFLIGHT_FD, &payload, &[inflight.file.as_fd()])
    }

    /// Sends the back-end a channel for its own requests.
    pub fn open_backend_channel(&mut self) -> io::Result<BackendChannel> {
        let (ours, theirs) = UnixStream::pair()?;
        self.command(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
        Ok(BackendChannel { socket: ours })
    }

    /// Sends a message that has no reply of its own, and waits for its acknowledgement if that was negotiated.
    pub fn command(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd]) -> io::Result<()> {
        let flags = VERSION | if self.reply_ack { NEED_REPLY } else { 0 };
        self.send_raw(request, flags, payload.len() as u32, payload, fds)?;
        if !self.reply_ack {
            return Ok(());
        }
        let reply = self.reply(request)?;
        match reply.as_slice() {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            other => Err(io::Error::other(format!(
                "message {request} was refused: {other:x?}"
            ))),
        }
    }

    /// Sends a message, and returns the payload of its reply.
    pub fn query(&mut self, request: u32, payload: &[u8]) -> io::Result<Vec<u8>> {
        self.send_raw(request, VERSION, payload.len() as u32, payload, &[])?;
        self.reply(request)
    }

    /// Sends a header and bytes exactly as given, valid or not.
    pub fn send_raw(
        &self,
        request: u32,
        flags: u32,
        size: u32,
        bytes: &[u8],
        fds: &[BorrowedFd],
    ) -> io::Result<()> {
        let header = header(request, flags, size);
        let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(
                ancillary.push(SendAncillaryMessage::ScmRights(fds)),
                "at most 64 file descriptors"
            );
        }
        let sent = sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
        (&self.socket).write_all(&bytes[sent - header.len()..])
    }

    /// Waits for a message of any kind from the back-end, and returns its payload.
    pub fn any_reply(&self) -> io::Result<Vec<u8>> {
        receive(&self.socket).map(|(_, _, payload, _)| payload)
    }

    fn query_u64(&mut self, request: u32) -> io::Result<u64> {
        let reply = self.query(request, &[])?;
        let bytes = reply.as_slice().try_into();
        Ok(u64::from_ne_bytes(bytes.map_err(|_| {
            invalid(format!("message {request} answered {reply:x?}"))
        })?))
    }

    /// Waits for the reply to a message, and returns its payload.
    ///
    /// # Errors
    /// The message that arrives is not the reply, or none arrives.
    pub fn reply(&self, request: u32) -> io::Result<Vec<u8>> {
        self.reply_with_fds(request).map(|(payload, _)| payload)
    }

    /// As [`reply`](Self::reply), with the descriptors that arrived with the reply.
    ///
    /// # Errors
    /// The message that arrives is not the reply, or none arrives.
    pub fn reply_with_fds(&self, request: u32) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (got, flags, payload, fds) = receive(&self.socket)?;
        // SPDK accepts exactly these flags.
        if got != request || flags != REPLY | VERSION {
            return Err(invalid(format!(
                "message {request} was answered by message {got} with flags {flags:#x}"
            )));
        }
        Ok((payload, fds))
    }
}

/// The channel on which the back-end sends its own requests.
pub struct BackendChannel {
    socket: UnixStream,
}

impl BackendChannel {
    /// Waits for the next request, acknowledges it if requested, and returns its number and payload.
    pub fn next(&mut self, timeout: Duration) -> io::Result<(u32, Vec<u8>)> {
        self.socket.set_read_timeout(Some(timeout))?;
        let (request, flags, payload, _) = receive(&self.socket)?;
        if flags & NEED_REPLY != 0 {
            let ack = [header(request, VERSION | REPLY, 8).to_vec(), vec![0; 8]].concat();
            self.socket.write_all(&ack)?;
        }
        Ok((request, payload))
    }
}

fn receive(socket: &UnixStream) -> io::Result<(u32, u32, Vec<u8>, Vec<OwnedFd>)> {
    let mut header = [0; 12];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(&mut header)];
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            // With a receive timeout, stopping and continuing this process interrupts the call (signal(7)).
            Err(rustix::io::Errno::INTR) => continue,
            result => break result?.bytes,
        }
    };
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = part {
            fds.extend(list);
        }
    }
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut stream = socket;
    stream.read_exact(&mut header[got..])?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("4 bytes"));
    let mut payload = vec![0; word(8).min(1 << 20) as usize];
    stream.read_exact(&mut payload)?;
    Ok((word(0), word(4), payload, fds))
}

fn header(request: u32, flags: u32, size: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip([request, flags, size]) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

fn vring_state(queue: u16, value: u32) -> Vec<u8> {
    [u32::from(queue).to_ne_bytes(), value.to_ne_bytes()].concat()
}

fn config_header(offset: u32, len: u32, flags: u32) -> Vec<u8> {
    [offset.to_ne_bytes(), len.to_ne_bytes(), flags.to_ne_bytes()].concat()
}

fn region_bytes(region: &Region) -> Vec<u8> {
    let fields = [region.gpa, region.size, region.user, region.mmap_offset];
    fields.iter().flat_map(|f| f.to_ne_bytes()).collect()
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Converts an eventfd to the type of rust-vmm's crates, with a duplicate of its descriptor.
pub fn rust_vmm_eventfd(fd: &OwnedFd) -> io::Result<EventFd> {
    let copy = fd.try_clone()?.into_raw_fd();
    // SAFETY: the duplicate is open, and nothing else owns it.
    Ok(unsafe { EventFd::from_raw_fd(copy) })
}

/// Makes an eventfd as QEMU does: it starts at 0 and is non-blocking.
pub fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(
        0,
        EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC,
    )?)
}

/// Waits until an eventfd is signalled and resets it; returns false after `timeout`.
pub fn eventfd_wait(fd: &OwnedFd, timeout: Option<Duration>) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = timeout.map(|t| Timespec {
        tv_sec: t.as_secs() as i64,
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    if poll(&mut [PollFd::new(fd, PollFlags::IN)], timeout.as_ref())? == 0 {
        return Ok(false);
    }
    rustix::io::read(fd, &mut [0; 8])?;
    Ok(true)
}

/// Waits for one of several eventfds, and resets those that were signalled.
pub fn eventfd_wait_any(fds: &[&OwnedFd]) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut polled: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::new(*fd, PollFlags::IN))
        .collect();
    poll(&mut polled, None)?;
    for (fd, polled) in fds.iter().zip(&polled) {
        if polled.revents().contains(PollFlags::IN) {
            rustix::io::read(fd, &mut [0; 8])?;
        }
    }
    Ok(())
}
