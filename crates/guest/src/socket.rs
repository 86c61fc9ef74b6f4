//! The socket between front-end and back-end: sends and receives whole messages with their file descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};

use crate::message::{self, HEADER_BYTES, Header, MAX_FDS, MessageError};

/// A message as received from the socket.
pub(crate) struct Incoming {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Why a wait ended without a message.
pub(crate) enum NoMessage {
    /// The front-end closed the connection between two messages.
    Closed,
    /// `stop` became readable; `torn` says that part of a message had been received.
    Stopped {
        torn: bool,
    },
    /// `abort` became readable.
    Aborted,
    Socket(io::Error),
    Malformed(MessageError),
}

impl From<io::Error> for NoMessage {
    fn from(e: io::Error) -> Self {
        Self::Socket(e)
    }
}

impl From<MessageError> for NoMessage {
    fn from(e: MessageError) -> Self {
        Self::Malformed(e)
    }
}

/// The process at the other end of a socket; `None` if it is in a PID namespace that this process does not see.
#[expect(
    unsafe_code,
    reason = "SO_PEERCRED: rustix's type has no room for pid 0, which means that it is not visible"
)]
pub fn peer_pid(socket: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `len` are writable, and `len` is the size of `peer`.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (done == 0 && peer.pid > 0).then_some(peer.pid)
}

/// Waits for a whole message, or until `stop` or `abort` becomes readable, even in the middle of a message: a
/// front-end that sends half a message delays only itself.
pub(crate) fn receive(
    socket: &UnixStream,
    stop: BorrowedFd<'_>,
    abort: BorrowedFd<'_>,
) -> Result<Incoming, NoMessage> {
    let mut fds = Vec::new();
    let mut header = [0; HEADER_BYTES];
    fill(socket, [stop, abort], &mut header, &mut fds, false)?;
    let header = Header::parse(header)?;
    let mut payload = vec![0; header.payload_len];
    fill(socket, [stop, abort], &mut payload, &mut fds, true).map_err(|end| match end {
        NoMessage::Closed => NoMessage::Socket(io::ErrorKind::UnexpectedEof.into()),
        end => end,
    })?;
    Ok(Incoming {
        header,
        payload,
        fds,
    })
}

/// Waits for `time`, or until the front-end disconnects, or `stop` or `abort` becomes readable. Messages from
/// the front-end stay in the socket.
pub(crate) fn pause(
    socket: &UnixStream,
    stop: BorrowedFd<'_>,
    abort: BorrowedFd<'_>,
    time: Duration,
) -> Result<(), NoMessage> {
    let mut ready = [
        PollFd::new(&stop, PollFlags::IN),
        PollFd::new(&abort, PollFlags::IN),
        PollFd::new(socket, PollFlags::RDHUP),
    ];
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    match poll(&mut ready, Some(&time)) {
        Err(rustix::io::Errno::INTR) => {}
        result => drop(result.map_err(io::Error::from)?),
    }
    match ready.map(|fd| !fd.revents().is_empty()) {
        [true, ..] => Err(NoMessage::Stopped { torn: false }),
        [_, true, _] => Err(NoMessage::Aborted),
        [.., true] => Err(NoMessage::Closed),
        _ => Ok(()),
    }
}

fn fill(
    socket: &UnixStream,
    [stop, abort]: [BorrowedFd<'_>; 2],
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    begun: bool,
) -> Result<(), NoMessage> {
    let mut done = 0;
    while done < bytes.len() {
        let mut ready = [
            PollFd::new(&stop, PollFlags::IN),
            PollFd::new(&abort, PollFlags::IN),
            PollFd::new(socket, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.map_err(io::Error::from)?,
        };
        // If a message has begun, the bytes that have arrived are read first.
        let torn = begun || done > 0;
        let more = torn && ready[2].revents().contains(PollFlags::IN);
        if !ready[0].revents().is_empty() && !more {
            return Err(NoMessage::Stopped { torn });
        }
        if !ready[1].revents().is_empty() {
            return Err(NoMessage::Aborted);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes[done..])],
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        let received = match result {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            result => result.map_err(io::Error::from)?,
        };
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = part {
                fds.extend(list);
            }
        }
        if fds.len() > MAX_FDS {
            return Err(MessageError::TooManyDescriptors.into());
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // The buffer holds as many descriptors as a message may have: either the front-end sent more, or
            // this process may not open more.
            return Err(if fds.len() == MAX_FDS {
                MessageError::TooManyDescriptors.into()
            } else {
                io::Error::from(rustix::io::Errno::MFILE).into()
            });
        }
        match received.bytes {
            0 if done == 0 => return Err(NoMessage::Closed),
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            n => done += n,
        }
    }
    Ok(())
}

/// Sends a whole reply. If the front-end does not read its replies, its connection ends: replies are much
/// smaller than a socket buffer, and only one is due at a time.
pub(crate) fn send_reply(socket: &UnixStream, request: u32, payload: &[u8]) -> io::Result<()> {
    send_whole(socket.as_fd(), &message::reply(request, payload))
}

/// Sends a whole reply with a descriptor.
pub(crate) fn send_reply_with(
    socket: &UnixStream,
    request: u32,
    payload: &[u8],
    fd: BorrowedFd<'_>,
) -> io::Result<()> {
    let bytes = message::reply(request, payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    // The buffer has space for one descriptor.
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

fn send_whole(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// The channel on which the back-end sends messages to the front-end (vhost-user: "Back-end communication").
pub struct FrontendChannel(Arc<OwnedFd>);

impl FrontendChannel {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self(socket)
    }

    /// Tells the front-end to read the configuration space again.
    ///
    /// # Errors
    /// The front-end does not read from the channel, or it has disconnected.
    pub fn config_changed(&self) -> io::Result<()> {
        send_whole(self.0.as_fd(), &message::config_change())
    }
}
