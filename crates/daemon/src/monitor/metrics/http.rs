//! The HTTP server of the metrics: one thread, whose sockets do not block, so that no client delays another.
//!
//! Clients that ask at the same time get the same text. Few texts exist at a time: clients that have not read the oldest one
//! are disconnected for the next.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{error, warn};

use crate::socket::accept::Backoff;

/// Limits of a request. A scraper sends no body and few headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

/// Limit of clients in each state. The oldest is disconnected for the next one. One or two scrapers are common.
const CLIENTS_MAX: usize = 64;

/// Limit of texts that clients have not read completely.
const TEXTS_MAX: usize = 4;

/// How long a client may take to send its request, and then to receive the reply.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How long a client may take to close its connection after the reply.
const CLOSING: Duration = Duration::from_secs(1);

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers requests until the process exits, with what `text` returns.
///
/// # Errors
/// The thread cannot be started.
pub fn serve(listener: TcpListener, text: impl Fn() -> Vec<u8> + Send + 'static) -> io::Result<()> {
    // In an upgrade, two processes may accept for a moment.
    listener.set_nonblocking(true)?;
    thread::Builder::new()
        .name("metrics".into())
        .spawn(move || run(&listener, text))?;
    Ok(())
}

fn run(listener: &TcpListener, text: impl Fn() -> Vec<u8>) {
    let mut accepting = Backoff::default();
    let mut clients = Clients::default();
    loop {
        match clients.wait(listener) {
            Ok(false) | Err(Errno::INTR) => {}
            Ok(true) => match accept(listener) {
                Ok(client) => {
                    accepting.succeeded();
                    clients.asking.push(client);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => accepting.failed(|left_out| {
                    let e = block::explain(&e, "ringdisk tries again");
                    warn!("metrics: cannot serve a client: {e}{left_out}");
                }),
            },
            Err(e) => return error!("metrics: cannot wait for clients: {e}"),
        }
        // Also from the new one: most send the request at once.
        let asked = clients.receive();
        clients.answer(asked, &text);
        clients.send();
        clients.close();
    }
}

fn accept(listener: &TcpListener) -> io::Result<Client<Vec<u8>>> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    Ok(Client::new(stream, TIMEOUT, Vec::new()))
}

/// A client, whose socket does not block.
struct Client<T> {
    stream: TcpStream,
    deadline: Instant,
    state: T,
}

impl<T> Client<T> {
    fn new(stream: TcpStream, time: Duration, state: T) -> Self {
        let deadline = Instant::now() + time;
        Self {
            stream,
            deadline,
            state,
        }
    }

    fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }
}

/// The clients by state, the oldest first.
#[derive(Default)]
struct Clients {
    /// Their requests are not complete.
    asking: Vec<Client<Vec<u8>>>,
    /// They have not read their replies.
    reading: Vec<Client<Reply>>,
    /// They have their replies, and have not closed their connections.
    closing: Vec<Client<()>>,
    /// The texts of replies.
    texts: Vec<Weak<Vec<u8>>>,
}

impl Clients {
    /// Waits until a client can be served or is late. Returns whether there is a new one.
    fn wait(&self, listener: &TcpListener) -> Result<bool, Errno> {
        let asking = self
            .asking
            .iter()
            .map(|c| (&c.stream, PollFlags::IN, c.deadline));
        let reading = self
            .reading
            .iter()
            .map(|c| (&c.stream, PollFlags::OUT, c.deadline));
        let closing = self
            .closing
            .iter()
            .map(|c| (&c.stream, PollFlags::IN, c.deadline));
        let mut ready = vec![PollFd::new(listener, PollFlags::IN)];
        let mut first: Option<Instant> = None;
        for (stream, flags, deadline) in asking.chain(reading).chain(closing) {
            ready.push(PollFd::new(stream, flags));
            first = Some(first.map_or(deadline, |first| first.min(deadline)));
        }
        let timeout = first.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        poll(&mut ready, timeout.as_ref())?;
        Ok(!ready[0].revents().is_empty())
    }

    /// Reads requests. Returns those that are complete, or refused.
    fn receive(&mut self) -> Vec<(TcpStream, RequestPath)> {
        let mut asked = Vec::new();
        for mut client in std::mem::take(&mut self.asking) {
            match client.receive() {
                Ok(RequestPath::Incomplete) => self.asking.push(client),
                Ok(parsed) => asked.push((client.stream, parsed)),
                Err(_) => {}
            }
        }
        limit(&mut self.asking);
        asked
    }

    fn answer(&mut self, asked: Vec<(TcpStream, RequestPath)>, text: impl Fn() -> Vec<u8>) {
        let mut shared = None;
        for (stream, parsed) in asked {
            let reply = match parsed {
                RequestPath::Incomplete => continue,
                RequestPath::Found { chunked } => {
                    let text = shared.get_or_insert_with(|| self.new_text(&text));
                    Reply::new("200 OK", text.clone(), chunked)
                }
                RequestPath::Refused(status, why) => {
                    Reply::new(status, Arc::new(why.into()), false)
                }
            };
            self.reading.push(Client::new(stream, TIMEOUT, reply));
        }
        limit(&mut self.reading);
    }

    fn new_text(&mut self, text: impl Fn() -> Vec<u8>) -> Arc<Vec<u8>> {
        self.texts.retain(|text| text.strong_count() > 0);
        while self.texts.len() >= TEXTS_MAX {
            let oldest = self.texts.remove(0);
            let has_it =
                |client: &Client<Reply>| Arc::as_ptr(&client.state.text) == oldest.as_ptr();
            self.reading.retain(|client| !has_it(client));
        }
        let text = Arc::new(text());
        self.texts.push(Arc::downgrade(&text));
        text
    }

    fn send(&mut self) {
        for mut client in std::mem::take(&mut self.reading) {
            match client.send() {
                Ok(true) => self.closing.push(Client::new(client.stream, CLOSING, ())),
                Ok(false) if !client.is_late() => self.reading.push(client),
                Ok(false) | Err(_) => {}
            }
        }
        limit(&mut self.closing);
    }

    /// Waits a moment for clients to close their connections: closing one that has unread data would reset it, and the client
    /// would lose the reply.
    fn close(&mut self) {
        self.closing.retain_mut(|client| {
            let is_open = match client.stream.read(&mut [0; 4096]) {
                Ok(n) => n > 0,
                Err(e) => is_passing(&e),
            };
            is_open && !client.is_late()
        });
    }
}

/// Disconnects the oldest clients if there are too many.
fn limit<T>(clients: &mut Vec<Client<T>>) {
    let too_many = clients.len().saturating_sub(CLIENTS_MAX);
    clients.drain(..too_many);
}

fn is_passing(error: &io::Error) -> bool {
    [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind())
}

impl Client<Vec<u8>> {
    /// Reads what has arrived.
    ///
    /// # Errors
    /// The client is gone, or has been told that its request took too long.
    fn receive(&mut self) -> io::Result<RequestPath> {
        let mut part = [0; 1024];
        loop {
            let n = match self.stream.read(&mut part) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if !self.is_late() {
                        return Ok(RequestPath::Incomplete);
                    }
                    let late = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n";
                    let _ = self.stream.write(late.as_bytes());
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(e) => return Err(e),
            };
            let request = &mut self.state;
            request.extend_from_slice(&part[..n]);
            match path(request) {
                RequestPath::Incomplete if n == 0 || request.len() > REQUEST_BYTES_MAX => {
                    let why = "not a complete HTTP request\n";
                    return Ok(RequestPath::Refused("400 Bad Request", why));
                }
                RequestPath::Incomplete => {}
                parsed => return Ok(parsed),
            }
        }
    }
}

/// What a client is to receive. The text is one chunk (RFC 9112, 7.1), so that a client detects a truncated reply. With
/// HTTP/1.0, it ends with the connection.
struct Reply {
    head: String,
    text: Arc<Vec<u8>>,
    tail: &'static str,
    /// Bytes of these that were sent.
    sent: usize,
}

impl Reply {
    fn new(status: &str, text: Arc<Vec<u8>>, chunked: bool) -> Self {
        let (encoding, size, tail) = match chunked {
            true => (
                "Transfer-Encoding: chunked\r\n",
                format!("{:x}\r\n", text.len()),
                "\r\n0\r\n\r\n",
            ),
            false => ("", String::new(), ""),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\n{encoding}Connection: close\r\n\r\n{size}"
        );
        Self {
            head,
            text,
            tail,
            sent: 0,
        }
    }
}

impl Client<Reply> {
    /// Sends what the client can take. Returns whether that was the rest.
    ///
    /// # Errors
    /// The client is gone.
    fn send(&mut self) -> io::Result<bool> {
        loop {
            let reply = &mut self.state;
            let mut skip = reply.sent;
            let parts = [reply.head.as_bytes(), &reply.text, reply.tail.as_bytes()].map(|part| {
                let from = skip.min(part.len());
                skip -= from;
                IoSlice::new(&part[from..])
            });
            if parts.iter().all(|part| part.is_empty()) {
                self.stream.shutdown(Shutdown::Write)?;
                return Ok(true);
            }
            match self.stream.write_vectored(&parts) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => reply.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }
}

#[derive(Debug, PartialEq)]
enum RequestPath {
    Incomplete,
    /// The path exists. Chunks are allowed, except for HTTP/1.0.
    Found {
        chunked: bool,
    },
    Refused(&'static str, &'static str),
}

fn path(request: &[u8]) -> RequestPath {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) => return RequestPath::Incomplete,
        Ok(httparse::Status::Complete(_)) => {}
        Err(_) => return RequestPath::Refused("400 Bad Request", "not an HTTP request\n"),
    }
    let path = parsed.path.unwrap_or_default();
    match (parsed.method, path.split('?').next()) {
        (Some("GET"), Some("/metrics")) => RequestPath::Found {
            chunked: parsed.version == Some(1),
        },
        (Some("GET"), _) => RequestPath::Refused("404 Not Found", "only /metrics exists\n"),
        _ => RequestPath::Refused("405 Method Not Allowed", "only GET is allowed\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that ask and read nothing keep no scraper away, and few texts are kept for them.
    #[test]
    fn clients_that_read_nothing_keep_few_texts() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // More than the sockets take.
        let bytes = 16 << 20;
        serve(listener, move || vec![b'x'; bytes]).unwrap();
        let ask = || {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            client
        };
        let mut silent = Vec::new();
        for _ in 0..4 * CLIENTS_MAX {
            let mut client = ask();
            // It has its own text.
            client.read_exact(&mut [0; 16]).unwrap();
            silent.push(client);
        }
        let mut reply = Vec::new();
        ask().read_to_end(&mut reply).unwrap();
        assert!(reply.ends_with(b"\r\n0\r\n\r\n") && reply.len() > bytes);
        // All but the last have been disconnected: what they can still read is not the whole.
        let read = |mut client: TcpStream| {
            let mut rest = Vec::new();
            let _ = client.read_to_end(&mut rest);
            rest.len()
        };
        let whole = silent.into_iter().map(read).filter(|&read| read > bytes);
        assert!(whole.count() < TEXTS_MAX);
    }

    #[test]
    fn http_requests_are_parsed_or_refused() {
        assert_eq!(path(b"GET /met"), RequestPath::Incomplete);
        let whole = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n";
        assert_eq!(path(whole), RequestPath::Found { chunked: true });
        let query = b"GET /metrics?a=b HTTP/1.0\r\n\r\n";
        assert_eq!(path(query), RequestPath::Found { chunked: false });
        let refused = |request: &[u8], start: &str| match path(request) {
            RequestPath::Refused(status, _) => assert!(status.starts_with(start), "{status}"),
            other => panic!("{other:?}"),
        };
        refused(b"GET / HTTP/1.1\r\n\r\n", "404");
        refused(b"POST /metrics HTTP/1.1\r\n\r\n", "405");
        refused(b"\0\0\0\0\r\n\r\n", "400");
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
        refused(many.as_bytes(), "400");
    }
}
