//! The HTTP server of the metrics.
//!
//! One thread reads the requests of all clients, and each that is complete is answered by a thread of its own: clients that
//! say nothing, or read slowly, delay nobody. There are only so many of these threads, of which one at a time is busy with
//! its text: however many clients ask, the server's other threads get its locks and the CPUs.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use tracing::{error, warn};

use crate::socket::accept::Backoff;

/// Limits of a request. A scraper sends no body and few headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

/// Limit of clients that have not sent a complete request. The oldest is disconnected for the next one.
const ASKING_MAX: usize = 64;

/// Limit of clients that are being answered, each by a thread. The oldest is disconnected for the next one, which waits until
/// that thread has ended. One or two scrapers are common.
const ANSWERED_MAX: usize = 64;

/// Bytes in each chunk of a reply.
const CHUNK: usize = 32 << 10;

/// How long a client may take to send its request, and then to receive the reply.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How long a client may take to close its connection after the reply.
const CLOSING: Duration = Duration::from_secs(1);

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers requests until the process exits, with what `text` writes.
///
/// # Errors
/// No thread can be started.
pub fn serve(
    listener: TcpListener,
    text: impl Fn(&mut Body<'_>) -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    let (text, answered) = (Arc::new(text), Arc::new(Answered::default()));
    let turns = Arc::new(Mutex::new(()));
    let answer = move |stream: TcpStream, parsed: RequestPath| {
        let stream = answered.add(stream);
        let (text, its_answered, its_stream) = (text.clone(), answered.clone(), stream.clone());
        let turns = turns.clone();
        let work = move || {
            // The client may have gone.
            let _ = answer(&its_stream, &parsed, &turns, &*text);
            its_answered.remove(&its_stream);
        };
        let thread = thread::Builder::new().name("metrics".into());
        if thread.spawn(work).is_err() {
            // It is disconnected, and asks again.
            answered.remove(&stream);
        }
    };
    thread::Builder::new()
        .name("metrics".into())
        .spawn(move || listen(&listener, answer))?;
    Ok(())
}

/// Clients that are being answered, the oldest first.
#[derive(Default)]
struct Answered {
    all: Mutex<Vec<Client>>,
    ended: Condvar,
}

struct Client {
    stream: Arc<TcpStream>,
    /// It has been disconnected, which ends its thread.
    is_cut: bool,
}

impl Answered {
    fn lock(&self) -> MutexGuard<'_, Vec<Client>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a place for a client.
    fn add(&self, stream: TcpStream) -> Arc<TcpStream> {
        let stream = Arc::new(stream);
        let mut all = self.lock();
        while all.len() >= ANSWERED_MAX {
            if !all.iter().any(|client| client.is_cut) {
                let _ = all[0].stream.shutdown(Shutdown::Both);
                all[0].is_cut = true;
            }
            all = self.ended.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
        all.push(Client {
            stream: stream.clone(),
            is_cut: false,
        });
        stream
    }

    fn remove(&self, stream: &Arc<TcpStream>) {
        self.lock()
            .retain(|other| !Arc::ptr_eq(&other.stream, stream));
        self.ended.notify_one();
    }
}

/// A client whose request is not complete. Its socket does not block.
struct Asking {
    stream: TcpStream,
    deadline: Instant,
    request: Vec<u8>,
}

fn listen(listener: &TcpListener, answer: impl Fn(TcpStream, RequestPath)) {
    let mut accepting = Backoff::default();
    // In the order in which they came.
    let mut asking: Vec<Asking> = Vec::new();
    loop {
        let first = asking.first().map(|client| client.deadline);
        let timeout = first.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut ready = vec![PollFd::new(listener, PollFlags::IN)];
        let streams = asking.iter().map(|client| &client.stream);
        ready.extend(streams.map(|stream| PollFd::new(stream, PollFlags::IN)));
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return error!("metrics: cannot wait for clients: {e}"),
        }
        let has_client = !ready[0].revents().is_empty();
        if has_client {
            match accept(listener) {
                Ok(client) => {
                    accepting.succeeded();
                    asking.push(client);
                }
                Err(e) => accepting.failed(|left_out| {
                    let e = block::explain(&e, "ringdisk tries again");
                    warn!("metrics: cannot serve a client: {e}{left_out}");
                }),
            }
        }
        // Also the new one: most send the request at once.
        let mut left = Vec::with_capacity(asking.len());
        for mut client in asking {
            match client.receive() {
                Ok(RequestPath::Incomplete) => left.push(client),
                Ok(parsed) => {
                    if client.stream.set_nonblocking(false).is_ok() {
                        answer(client.stream, parsed);
                    }
                }
                Err(_) => {}
            }
        }
        asking = left;
        if asking.len() > ASKING_MAX {
            asking.remove(0);
        }
    }
}

fn accept(listener: &TcpListener) -> io::Result<Asking> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    Ok(Asking {
        stream,
        deadline: Instant::now() + TIMEOUT,
        request: Vec::new(),
    })
}

impl Asking {
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
                    if Instant::now() < self.deadline {
                        return Ok(RequestPath::Incomplete);
                    }
                    let late = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n";
                    let _ = self.stream.write(late.as_bytes());
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(e) => return Err(e),
            };
            self.request.extend_from_slice(&part[..n]);
            match path(&self.request) {
                RequestPath::Incomplete if n == 0 || self.request.len() > REQUEST_BYTES_MAX => {
                    let why = "not a complete HTTP request\n";
                    return Ok(RequestPath::Refused("400 Bad Request", why));
                }
                RequestPath::Incomplete => {}
                parsed => return Ok(parsed),
            }
        }
    }
}

fn answer(
    stream: &TcpStream,
    parsed: &RequestPath,
    turns: &Mutex<()>,
    text: impl Fn(&mut Body<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let (status, chunked) = match parsed {
        RequestPath::Found { chunked } => ("200 OK", *chunked),
        RequestPath::Refused(status, _) => (*status, false),
        RequestPath::Incomplete => return Ok(()),
    };
    let mut body = Body {
        stream,
        deadline: Instant::now() + TIMEOUT,
        chunked,
        chunk: Vec::new(),
        turns,
        turn: None,
    };
    let encoding = if chunked {
        "Transfer-Encoding: chunked\r\n"
    } else {
        ""
    };
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\n{encoding}Connection: close\r\n\r\n");
    body.send(head.as_bytes())?;
    match parsed {
        RequestPath::Refused(_, why) => body.write_all(why.as_bytes())?,
        _ => {
            body.take_turn();
            text(&mut body)?;
        }
    }
    body.end()?;
    // Closing with unread data would reset the connection and lose the reply.
    stream.shutdown(Shutdown::Write)?;
    let closes = Instant::now() + CLOSING;
    let (mut stream, mut rest) = (stream, [0; 1024]);
    loop {
        let left = closes.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        stream.set_read_timeout(Some(left))?;
        if stream.read(&mut rest)? == 0 {
            return Ok(());
        }
    }
}

/// The body of a reply, sent in chunks (RFC 9112, 7.1), so that a client detects a truncated reply. With HTTP/1.0, it
/// ends with the connection.
pub struct Body<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
    chunked: bool,
    chunk: Vec<u8>,
    /// Held by the thread that is busy with its text, and not while it waits for the client: few are under way at a time.
    turns: &'a Mutex<()>,
    turn: Option<MutexGuard<'a, ()>>,
}

impl Write for Body<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.chunk.extend_from_slice(bytes);
        if self.chunk.len() >= CHUNK {
            self.flush()?;
            self.take_turn();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = std::mem::take(&mut self.chunk);
        if self.chunked {
            self.send(format!("{:x}\r\n", chunk.len()).as_bytes())?;
        }
        self.send(&chunk)?;
        if self.chunked {
            self.send(b"\r\n")?;
        }
        self.chunk = chunk;
        self.chunk.clear();
        Ok(())
    }
}

impl Body<'_> {
    fn take_turn(&mut self) {
        if self.turn.is_none() {
            self.turn = Some(self.turns.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn end(&mut self) -> io::Result<()> {
        self.flush()?;
        if self.chunked {
            self.send(b"0\r\n\r\n")?;
        }
        self.turn = None;
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = match send(self.stream, bytes, flags) {
                Err(Errno::AGAIN) => {
                    self.turn = None;
                    self.stream.set_write_timeout(Some(left))?;
                    self.stream.write(bytes)
                }
                sent => sent.map_err(io::Error::from),
            };
            match sent {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
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
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    /// Clients that ask and read nothing get a limited number of threads, of which one is busy, and keep no scraper away.
    #[test]
    fn any_number_of_clients_gets_a_limited_number_of_threads() {
        static BUSY: AtomicUsize = AtomicUsize::new(0);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let part = "x".repeat(CHUNK - 1);
        serve(listener, move |body| {
            for _ in 0..256 {
                assert_eq!(BUSY.fetch_add(1, SeqCst), 0, "two at a time");
                thread::yield_now();
                BUSY.fetch_sub(1, SeqCst);
                body.write_all(part.as_bytes())?;
            }
            Ok(())
        })
        .unwrap();
        let threads = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let names = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("comm")));
            names.filter(|name| name.trim() == "metrics").count()
        };
        let ask = || {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            client
        };
        let mut silent = Vec::new();
        for _ in 0..4 * ANSWERED_MAX {
            silent.push(ask());
            // Some have given up their place and are about to end.
            assert!(threads() <= 2 * ANSWERED_MAX);
        }
        let mut reply = Vec::new();
        ask().read_to_end(&mut reply).unwrap();
        assert!(reply.ends_with(b"0\r\n\r\n"), "{} bytes", reply.len());
        assert!(reply.len() > 256 * (CHUNK - 1));
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
