//! A client of NBD servers, for copies: one request at a time, and structured replies. The server may be another program, and
//! nothing that it sends is trusted.

#[cfg(any(fuzzing, test))]
pub mod check;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::set_tcp_nodelay;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};

/// Most bytes of a request with data.
pub const TRANSFER_MAX: u64 = 32 << 20;
/// Most bytes that a reply other than data has.
const REPLY_MAX: u32 = 4 << 20;

const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;

const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;

const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISCONNECT: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_WRITE_ZEROES: u16 = 6;
const CMD_BLOCK_STATUS: u16 = 7;

const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Address {
    Unix(String),
    Tcp(SocketAddr),
}

/// Ends all connections, even those that wait for the server.
#[derive(Default)]
pub struct Stop {
    is_set: AtomicBool,
    sockets: Mutex<Vec<OwnedFd>>,
}

impl Stop {
    pub fn set(&self) {
        self.is_set.store(true, Relaxed);
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in sockets.iter() {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }

    fn add(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.push(socket.try_clone()?);
        drop(sockets);
        self.check()
    }

    /// # Errors
    /// It is set.
    pub fn check(&self) -> io::Result<()> {
        if self.is_set.load(Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(())
    }
}

/// How often a server is asked whose queue of connections is full.
const ASK_AGAIN: Duration = Duration::from_millis(10);

impl Address {
    fn connect(&self, stop: &Stop) -> io::Result<OwnedFd> {
        let new = |family, flags| {
            let flags = flags | SocketFlags::CLOEXEC;
            socket_with(family, SocketType::STREAM, flags, None)
        };
        match self {
            Self::Unix(path) => {
                let address = SocketAddrUnix::new(&**path)?;
                // To shut it down does not end a wait for room in the server's queue.
                let socket = new(AddressFamily::UNIX, SocketFlags::NONBLOCK)?;
                loop {
                    stop.check()?;
                    match connect(&socket, &address) {
                        Ok(()) => break,
                        Err(Errno::AGAIN | Errno::INTR) => thread::sleep(ASK_AGAIN),
                        Err(e) => return Err(e.into()),
                    }
                }
                rustix::io::ioctl_fionbio(&socket, false)?;
                stop.add(&socket)?;
                Ok(socket)
            }
            Self::Tcp(address) => {
                let family = match address {
                    SocketAddr::V4(_) => AddressFamily::INET,
                    SocketAddr::V6(_) => AddressFamily::INET6,
                };
                let socket = new(family, SocketFlags::empty())?;
                stop.add(&socket)?;
                connect(&socket, address)?;
                stop.check()?;
                set_tcp_nodelay(&socket, true)?;
                Ok(socket)
            }
        }
    }
}

/// A connection to an export.
pub struct NbdClient {
    stream: File,
    /// Bytes of the export.
    pub size: u64,
    /// Ids of the contexts that were asked for.
    contexts: Vec<Option<u32>>,
    cookie: u64,
}

/// Bytes, and the flags of a context there.
pub type Extent = (u64, u32);

/// The ranges of a read that have arrived.
#[derive(Default)]
struct Received(BTreeMap<u64, u64>);

impl Received {
    /// Most ranges with gaps between them. A server may send a read in any order, but none sends it in crumbs.
    const MAX: usize = 4096;

    /// # Errors
    /// A part of it has arrived before, which would hide that another part is missing; or the ranges are too many.
    fn add(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Err(broken("a chunk of a read is empty"));
        }
        let (mut from, mut end) = (at, at + bytes);
        if let Some((&before, &its_end)) = self.0.range(..end).next_back() {
            if its_end > at {
                return Err(broken("data of a read arrives twice"));
            }
            if its_end == at {
                from = before;
            }
        }
        if let Some(its_end) = self.0.remove(&end) {
            end = its_end;
        }
        self.0.insert(from, end);
        if self.0.len() > Self::MAX {
            return Err(broken("a read arrives in too many parts"));
        }
        Ok(())
    }

    fn is_all_of(&self, bytes: u64) -> bool {
        bytes == 0 || self.0.iter().eq([(&0, &bytes)])
    }
}

fn broken(what: &str) -> io::Error {
    let text = format!("the server breaks the NBD protocol: {what}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl NbdClient {
    /// Connects, and asks for `contexts`, all of which the server must have. The server may let it wait for an answer; `stop`
    /// ends that, too.
    ///
    /// # Errors
    /// There is no such server, export or context; or `stop` is set.
    pub fn connect(
        address: &Address,
        export: &str,
        contexts: &[String],
        stop: &Stop,
    ) -> io::Result<Self> {
        Self::over(address.connect(stop)?.into(), export, contexts)
    }

    /// A client at the other end of whose socket a server has just accepted it.
    fn over(stream: File, export: &str, contexts: &[String]) -> io::Result<Self> {
        let mut client = Self {
            stream,
            size: 0,
            contexts: vec![None; contexts.len()],
            cookie: 0,
        };
        client.handshake(export, contexts)?;
        Ok(client)
    }

    fn handshake(&mut self, export: &str, contexts: &[String]) -> io::Result<()> {
        let greeting: [u8; 18] = self.bytes()?;
        if greeting[..16] != *b"NBDMAGICIHAVEOPT" || greeting[17] & 1 == 0 {
            return Err(broken("its greeting is not that of a current server"));
        }
        // NBD_FLAG_C_FIXED_NEWSTYLE
        self.stream.write_all(&1_u32.to_be_bytes())?;
        self.option(OPT_STRUCTURED_REPLY, &[], |_, _| Ok(()))?;
        let with_length = |text: &str| {
            let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
            [&length.to_be_bytes()[..], text.as_bytes()].concat()
        };
        if !contexts.is_empty() {
            let count = u32::try_from(contexts.len()).unwrap_or(u32::MAX);
            let mut data = [with_length(export), count.to_be_bytes().to_vec()].concat();
            contexts
                .iter()
                .for_each(|context| data.extend(with_length(context)));
            let mut ids = vec![None; contexts.len()];
            self.option(OPT_SET_META_CONTEXT, &data, |kind, reply| {
                if kind == REP_META_CONTEXT
                    && let Some((id, name)) = reply.split_first_chunk()
                    && let Some(at) = contexts.iter().position(|of| of.as_bytes() == name)
                {
                    ids[at] = Some(u32::from_be_bytes(*id));
                }
                Ok(())
            })?;
            if let Some(missing) = ids.iter().position(Option::is_none) {
                let text = format!("the export has no context {}", contexts[missing]);
                return Err(io::Error::new(io::ErrorKind::NotFound, text));
            }
            self.contexts = ids;
        }
        let mut size = None;
        let data = [with_length(export), vec![0, 0]].concat();
        self.option(OPT_GO, &data, |kind, reply| {
            // NBD_INFO_EXPORT
            if kind == REP_INFO && reply.len() == 12 && reply[..2] == [0, 0] {
                size = reply[2..]
                    .first_chunk()
                    .map(|size| u64::from_be_bytes(*size));
            }
            Ok(())
        })?;
        self.size = size.ok_or_else(|| broken("it does not say the size of the export"))?;
        Ok(())
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        mut reply: impl FnMut(u32, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend(length.to_be_bytes());
        message.extend(data);
        self.stream.write_all(&message)?;
        loop {
            let magic = u64::from_be_bytes(self.bytes()?);
            let of = u32::from_be_bytes(self.bytes()?);
            let kind = u32::from_be_bytes(self.bytes()?);
            let body = self.body()?;
            match kind {
                _ if magic != OPTION_REPLY_MAGIC || of != option => {
                    return Err(broken("a reply is not to the option that was sent"));
                }
                REP_ACK => return Ok(()),
                kind if kind & REP_ERROR != 0 => {
                    let text = String::from_utf8_lossy(&body).into_owned();
                    let text = format!("the server refuses the export: {text} (error {kind:#x})");
                    return Err(io::Error::new(io::ErrorKind::NotFound, text));
                }
                kind => reply(kind, &body)?,
            }
        }
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Its length, and what follows.
    fn body(&mut self) -> io::Result<Vec<u8>> {
        let length = u32::from_be_bytes(self.bytes()?);
        self.rest(length)
    }

    fn rest(&mut self, length: u32) -> io::Result<Vec<u8>> {
        if length > REPLY_MAX {
            return Err(broken("a reply is too long"));
        }
        let mut body = vec![0; length as usize];
        self.stream.read_exact(&mut body)?;
        Ok(body)
    }

    fn request(&mut self, command: u16, offset: u64, length: u64) -> io::Result<()> {
        self.cookie += 1;
        let length = u32::try_from(length).map_err(io::Error::other)?;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        self.stream.write_all(&request)
    }

    /// Takes the chunks of a reply. `chunk` gets those without an error: their type and length, and reads what follows.
    fn reply(
        &mut self,
        mut chunk: impl FnMut(&mut Self, u16, u32) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut failure = None;
        loop {
            let magic = u32::from_be_bytes(self.bytes()?);
            if magic == SIMPLE_MAGIC {
                let error = u32::from_be_bytes(self.bytes()?);
                self.check_cookie()?;
                return match error {
                    0 => Ok(()),
                    error => Err(io::Error::from_raw_os_error(error.cast_signed())),
                };
            }
            if magic != STRUCTURED_MAGIC {
                return Err(broken("a reply begins with something else"));
            }
            let flags = u16::from_be_bytes(self.bytes()?);
            let kind = u16::from_be_bytes(self.bytes()?);
            self.check_cookie()?;
            let length = u32::from_be_bytes(self.bytes()?);
            if kind & CHUNK_ERROR != 0 {
                let body = self.rest(length)?;
                let error = body
                    .first_chunk()
                    .map_or(5, |error| u32::from_be_bytes(*error));
                failure = Some(io::Error::from_raw_os_error(error.cast_signed()));
            } else if kind == CHUNK_NONE && length == 0 {
            } else {
                chunk(self, kind, length)?;
            }
            // NBD_REPLY_FLAG_DONE
            if flags & 1 != 0 {
                return failure.map_or(Ok(()), Err);
            }
        }
    }

    fn check_cookie(&mut self) -> io::Result<()> {
        let cookie = u64::from_be_bytes(self.bytes()?);
        if cookie == self.cookie {
            return Ok(());
        }
        Err(broken("a reply is to another request"))
    }

    /// Reads from `offset`, at most [`TRANSFER_MAX`].
    ///
    /// # Errors
    /// Not all of it was read.
    pub fn read(&mut self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.request(CMD_READ, offset, to.len() as u64)?;
        let mut received = Received::default();
        self.reply(|client, kind, length| {
            let at = u64::from_be_bytes(client.bytes()?);
            let bytes = match kind {
                CHUNK_DATA if length > 8 => length - 8,
                CHUNK_HOLE if length == 12 => u32::from_be_bytes(client.bytes()?),
                _ => return Err(broken("a chunk of a read is none of its types")),
            };
            let from = at
                .checked_sub(offset)
                .and_then(|from| usize::try_from(from).ok());
            let part = from.and_then(|from| to.get_mut(from..from.checked_add(bytes as usize)?));
            let part = part.ok_or_else(|| broken("data is outside of what was read"))?;
            if kind == CHUNK_DATA {
                client.stream.read_exact(part)?;
            } else {
                part.fill(0);
            }
            received.add(at - offset, u64::from(bytes))
        })?;
        if received.is_all_of(to.len() as u64) {
            return Ok(());
        }
        Err(broken("a read has returned less than was asked for"))
    }

    /// The extents from `offset` on, for each context that was asked for: at least one, and at most `length` bytes.
    ///
    /// # Errors
    /// The server does not say.
    pub fn status(&mut self, offset: u64, length: u64) -> io::Result<Vec<Vec<Extent>>> {
        self.request(CMD_BLOCK_STATUS, offset, length)?;
        let mut all = vec![Vec::new(); self.contexts.len()];
        self.reply(|client, kind, bytes| {
            let body = client.rest(bytes)?;
            let (id, extents) = (body.split_first_chunk())
                .filter(|(_, extents)| kind == CHUNK_STATUS && extents.len().is_multiple_of(8))
                .ok_or_else(|| broken("a chunk of a status is none"))?;
            let id = Some(u32::from_be_bytes(*id));
            let at = client.contexts.iter().position(|of| *of == id);
            let of = &mut all[at.ok_or_else(|| broken("a context was not asked for"))?];
            if !of.is_empty() {
                return Err(broken("a status says a context twice"));
            }
            let word = |bytes: &[u8]| {
                bytes
                    .first_chunk()
                    .map_or(0, |word| u32::from_be_bytes(*word))
            };
            let extents = extents.chunks(8);
            of.extend(extents.map(|extent| (u64::from(word(extent)), word(&extent[4..]))));
            match of.iter().any(|(bytes, _)| *bytes == 0) {
                true => Err(broken("a status has a part without bytes")),
                false => Ok(()),
            }
        })?;
        for extents in &mut all {
            let mut left = length;
            for (bytes, _) in extents.iter_mut() {
                *bytes = (*bytes).min(left);
                left -= *bytes;
            }
            extents.retain(|(bytes, _)| *bytes > 0);
            if extents.is_empty() {
                return Err(broken("a status says nothing"));
            }
        }
        Ok(all)
    }

    /// Writes at most [`TRANSFER_MAX`] bytes.
    ///
    /// # Errors
    /// They may not be written.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.request(CMD_WRITE, offset, bytes.len() as u64)?;
        self.stream.write_all(bytes)?;
        self.done()
    }

    /// Writes zeroes, less than 4 GiB.
    ///
    /// # Errors
    /// They may not be written.
    pub fn zero(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.request(CMD_WRITE_ZEROES, offset, length)?;
        self.done()
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// It may not be.
    pub fn flush(&mut self) -> io::Result<()> {
        self.request(CMD_FLUSH, 0, 0)?;
        self.done()
    }

    fn done(&mut self) -> io::Result<()> {
        self.reply(|_, _, _| Err(broken("a reply has data that nobody asked for")))
    }
}

impl Drop for NbdClient {
    fn drop(&mut self) {
        // The server waits for nothing else.
        let _ = self.request(CMD_DISCONNECT, 0, 0);
    }
}
