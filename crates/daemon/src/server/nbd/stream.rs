//! A client's socket, with or without TLS.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustls::{ServerConfig, ServerConnection};

/// Limit of what is encrypted and waits for the client in bytes.
const ENCRYPTED_MAX: usize = 128 << 10;

/// Limit of the client's part of the handshake of TLS in bytes. A chain of certificates has some thousand.
const TLS_HANDSHAKE_MAX: usize = 128 << 10;

/// A connection, whose socket does not block.
pub struct Stream<'a> {
    socket: Socket<'a>,
    tls: Option<Box<ServerConnection>>,
    /// Bytes of the handshake of TLS that have arrived.
    shaken: usize,
}

/// What was read.
pub struct Received {
    /// Number of bytes; 0 at the end.
    pub bytes: usize,
    /// There may be more; otherwise poll says so.
    pub has_more: bool,
}

impl<'a> Stream<'a> {
    pub fn new(socket: &'a OwnedFd) -> Self {
        let socket = Socket(socket);
        Self {
            socket,
            tls: None,
            shaken: 0,
        }
    }

    pub fn socket(&self) -> &'a OwnedFd {
        self.socket.0
    }

    /// From now on, everything is encrypted.
    ///
    /// # Errors
    /// The configuration is not of a server.
    pub fn start_tls(&mut self, config: Arc<ServerConfig>) -> io::Result<()> {
        let mut tls = ServerConnection::new(config).map_err(explain)?;
        tls.set_buffer_limit(Some(ENCRYPTED_MAX));
        self.tls = Some(Box::new(tls));
        Ok(())
    }

    /// Continues the handshake of TLS with what has arrived, until it is over: the client has shown the certificate that it must
    /// have.
    ///
    /// # Errors
    /// Nothing has arrived (`WouldBlock`), the client is gone, or what it sends is not accepted.
    pub fn shake_hands(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.is_handshaking() {
            match tls.read_tls(&mut self.socket)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                bytes => self.shaken += bytes,
            }
            if self.shaken > TLS_HANDSHAKE_MAX {
                let text = format!("TLS: the handshake has more than {TLS_HANDSHAKE_MAX} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, text));
            }
            let processed = tls.process_new_packets();
            // What the client is to know of an error, and the server's part of the handshake.
            let flushed = flush(tls, &mut self.socket);
            processed.map_err(explain)?;
            flushed?;
        }
        Ok(())
    }

    /// # Errors
    /// Nothing has arrived (`WouldBlock`), or the connection is broken.
    pub fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        let Some(tls) = &mut self.tls else {
            let space: usize = parts.iter().map(|part| part.len()).sum();
            let bytes = rustix::io::readv(self.socket.0, parts)?;
            let has_more = bytes == space;
            return Ok(Received { bytes, has_more });
        };
        loop {
            let mut bytes = 0;
            for part in parts.iter_mut() {
                match tls.reader().read(part) {
                    // The client has said that it sends no more.
                    Ok(0) if !part.is_empty() => {
                        let has_more = bytes > 0;
                        return Ok(Received { bytes, has_more });
                    }
                    Ok(n) => bytes += n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    // The client has closed the socket, and did not say so before.
                    Err(e) if e.kind() == ErrorKind::UnexpectedEof => break,
                    Err(e) => return Err(e),
                }
            }
            if bytes > 0 {
                let has_more = true;
                return Ok(Received { bytes, has_more });
            }
            if tls.read_tls(&mut self.socket)? == 0 {
                let has_more = false;
                return Ok(Received { bytes, has_more });
            }
            let processed = tls.process_new_packets();
            // What the client is to know of an error, and the server's part of the handshake.
            let flushed = flush(tls, &mut self.socket);
            processed.map_err(explain)?;
            flushed?;
        }
    }

    /// Returns the number of bytes that were taken; [`flush`](Self::flush) sends them.
    ///
    /// # Errors
    /// The client takes nothing (`WouldBlock`), or the connection is broken.
    pub fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return Ok(rustix::io::writev(self.socket.0, parts)?);
        };
        let mut taken = 0;
        for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let n = tls.writer().write(rest)?;
                rest = &rest[n..];
                taken += n;
                if n == 0 && !flush(tls, &mut self.socket)? {
                    return match taken {
                        0 => Err(ErrorKind::WouldBlock.into()),
                        taken => Ok(taken),
                    };
                }
            }
        }
        Ok(taken)
    }

    /// Sends what was taken. Returns whether all of it was sent.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn flush(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            Some(tls) => flush(tls, &mut self.socket),
            None => Ok(true),
        }
    }

    /// Whether something was taken and not sent.
    pub fn is_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Tells the client that nothing follows, if it takes that now.
    pub fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            let _ = flush(tls, &mut self.socket);
        }
    }
}

fn flush(tls: &mut ServerConnection, socket: &mut Socket<'_>) -> io::Result<bool> {
    while tls.wants_write() {
        match tls.write_tls(socket) {
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

fn explain(e: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("TLS: {e}"))
}

/// The socket as rustls uses it.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, bytes)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(self.0, parts)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
