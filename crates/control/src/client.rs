use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::{Value, json};
use thiserror::Error;

use crate::error::excerpt;
use crate::framing::{Framer, Limits};
use crate::session::line;
use crate::{Command, CommandError, ErrorClass, json};

/// The most events that are kept until they are fetched; after that, the oldest are dropped.
const EVENTS_MAX: usize = 1024;

/// A client of ringdisk's control socket, or of any QMP server.
pub struct Client {
    path: PathBuf,
    stream: UnixStream,
    framer: Framer,
    buffer: Box<[u8]>,
    /// The part of the buffer that has been received and not been parsed.
    unread: std::ops::Range<usize>,
    events: VecDeque<Value>,
    greeting: Value,
    next_id: u64,
    timeout: Duration,
}

/// Hangs up for a [`Client`] that waits in another thread.
pub struct HangUpHandle(UnixStream);

impl HangUpHandle {
    /// The server has lost its client from now on, and a call that waits fails.
    pub fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Why a command got no result.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The socket does not exist.
    #[error("there is no socket {path}; check that `ringdisk serve` runs with --control {path} (the service: \
        'systemctl start ringdisk'). If it does and the socket was removed, SIGHUP creates it again", path = .0.display())]
    NoSocket(PathBuf),
    /// No process listens on the socket.
    #[error(
        "no process listens on {path}; start the service ('systemctl start ringdisk'), or `ringdisk serve` with --control {path}",
        path = .0.display()
    )]
    NobodyListens(PathBuf),
    /// This user has no access to the socket.
    #[error("this user has no access to {path}; become the user that runs ringdisk, or ask for access", path = .0.display())]
    Denied(PathBuf),
    /// Another system call failed.
    #[error("{path}: {what}: {source}", path = .path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The server did not answer in time.
    #[error(
        "{path}: no answer within {seconds} s; the server is busy or stuck, its log may tell",
        path = .path.display(), seconds = .timeout.as_secs_f32()
    )]
    Timeout {
        path: PathBuf,
        /// The time waited.
        timeout: Duration,
    },
    /// The server has closed the connection.
    #[error(
        "{path}: the server has hung up; it has ended, or has as many clients as it takes",
        path = .0.display()
    )]
    HungUp(PathBuf),
    /// The server does not accept another client, and says why.
    #[error("{path}: the server cannot serve this client: {1}", path = .0.display())]
    NotServed(PathBuf, String),
    /// The other end does not speak QMP.
    #[error("{path} is not a QMP server: {problem}", path = .path.display())]
    Protocol {
        path: PathBuf,
        /// What was received instead.
        problem: String,
    },
    /// The result is not what the command returns.
    #[error(
        "{path}: {command} returns {result}, which this ringdisk does not understand; run the one of the server's version, \
         and check that the server is a ringdisk",
        path = .path.display()
    )]
    Unexpected {
        path: PathBuf,
        command: String,
        /// Its beginning.
        result: String,
    },
    /// The server has refused the command.
    #[error("{command}: {error}")]
    Refused {
        command: String,
        /// The server's error.
        error: CommandError,
    },
}

impl Client {
    /// Connects and negotiates. `timeout` also bounds each `call`.
    ///
    /// # Errors
    /// No server answers on the socket, or it does not speak QMP.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let path = path.as_ref();
        let deadline = Instant::now() + timeout;
        let mut client = Self {
            path: path.into(),
            stream: connect_by(path, deadline, timeout)?,
            framer: Framer::new(Limits::REPLY),
            buffer: vec![0; 64 << 10].into(),
            unread: 0..0,
            events: VecDeque::new(),
            greeting: Value::Null,
            next_id: 0,
            timeout,
        };
        let mut greeting = client.receive(deadline)?;
        match greeting.get_mut("QMP").filter(|value| value.is_object()) {
            Some(value) => client.greeting = value.take(),
            None => {
                if let Some(why) = greeting["error"]["desc"].as_str() {
                    return Err(ClientError::NotServed(client.path, why.into()));
                }
                return Err(
                    client.protocol(format!("it greets with {}", excerpt(&greeting.to_string())))
                );
            }
        }
        client.call_by("qmp_capabilities", json!({}), deadline)?;
        Ok(client)
    }

    /// Returns a handle that ends a call from another thread.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn hang_up_handle(&self) -> Result<HangUpHandle, ClientError> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|source| ClientError::Io {
            path: self.path.clone(),
            what: "duplicating its descriptor",
            source,
        })?;
        Ok(HangUpHandle(stream))
    }

    /// The server's greeting: `version` and `capabilities`.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Sends a command, and returns its result.
    ///
    /// # Errors
    /// The server refuses the command, or does not reply. After any error but `Refused` the connection cannot be used
    /// any more.
    pub fn call(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.call_by(command, arguments, Instant::now() + self.timeout)
    }

    /// As `call`, for a result that is as `is_right` says.
    ///
    /// # Errors
    /// As `call`; or the result is another.
    pub fn call_for(
        &mut self,
        command: &str,
        arguments: Value,
        is_right: impl FnOnce(&Value) -> bool,
    ) -> Result<Value, ClientError> {
        let result = self.call(command, arguments)?;
        if is_right(&result) {
            return Ok(result);
        }
        Err(ClientError::Unexpected {
            path: self.path.clone(),
            command: command.into(),
            result: excerpt(&result.to_string()).into(),
        })
    }

    /// As `call`, for a command that this side has already checked.
    ///
    /// # Errors
    /// As `call`.
    pub fn execute(&mut self, command: &Command) -> Result<Value, ClientError> {
        self.call(command.name(), command.arguments())
    }

    /// Returns the next event; `None` if none arrives within `timeout`.
    ///
    /// # Errors
    /// The server has closed the connection, or has sent something other than an event.
    pub fn event(&mut self, timeout: Duration) -> Result<Option<Value>, ClientError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        match self.receive(Instant::now() + timeout) {
            Ok(message) if message.get("event").is_some() => Ok(Some(message)),
            Ok(message) => Err(self.protocol(format!(
                "unasked, it says {}",
                excerpt(&message.to_string())
            ))),
            Err(ClientError::Timeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn call_by(
        &mut self,
        command: &str,
        arguments: Value,
        deadline: Instant,
    ) -> Result<Value, ClientError> {
        let id = self.next_id;
        self.next_id += 1;
        let message = json!({ "execute": command, "arguments": arguments, "id": id });
        self.send(&line(&message), deadline)?;
        loop {
            let mut message = self.receive(deadline)?;
            if message.get("event").is_some() {
                if self.events.len() == EVENTS_MAX {
                    self.events.pop_front();
                }
                self.events.push_back(message);
                continue;
            }
            // The server's error for an unreadable message has no id; it belongs to the only command in flight.
            let is_answer = message.get("id").is_none_or(|got| *got == id);
            if let Some(value) = message.get_mut("return").filter(|_| is_answer) {
                return Ok(value.take());
            }
            let error = message.get("error").filter(|_| is_answer);
            let text = |name| error.and_then(|error| error[name].as_str());
            if let (Some(class), Some(desc)) = (text("class"), text("desc")) {
                let error = CommandError::new(ErrorClass::of_word(class), desc);
                let command = command.into();
                return Err(ClientError::Refused { command, error });
            }
            return Err(self.protocol(format!(
                "{command} is answered {}",
                excerpt(&message.to_string())
            )));
        }
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), ClientError> {
        let sent = self
            .left(deadline)
            .and_then(|left| self.stream.set_write_timeout(Some(left)))
            .and_then(|()| self.stream.write_all(bytes));
        sent.map_err(|error| self.failed("sending", error))
    }

    /// Returns the next message of any kind.
    fn receive(&mut self, deadline: Instant) -> Result<Value, ClientError> {
        loop {
            let mut input = &self.buffer[self.unread.clone()];
            let message = self.framer.next(&mut input);
            self.unread.start = self.unread.end - input.len();
            if let Some(message) = message {
                let text = message.map_err(|error| self.protocol(error.to_string()))?;
                return json::parse(&text).map_err(|problem| self.protocol(problem));
            }
            let received = self
                .left(deadline)
                .and_then(|left| self.stream.set_read_timeout(Some(left)))
                .and_then(|()| self.stream.read(&mut self.buffer));
            match received {
                Ok(0) => return Err(ClientError::HungUp(self.path.clone())),
                Ok(n) => self.unread = 0..n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed("receiving", error)),
            }
        }
    }

    /// The time left until the deadline. After the deadline, the error is the same as for a socket's own timeout.
    fn left(&self, deadline: Instant) -> io::Result<Duration> {
        match deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::WouldBlock.into()),
            left => Ok(left),
        }
    }

    fn failed(&self, what: &'static str, source: io::Error) -> ClientError {
        let path = self.path.clone();
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Timeout {
                path,
                timeout: self.timeout,
            },
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => ClientError::HungUp(path),
            _ => ClientError::Io { path, what, source },
        }
    }

    fn protocol(&self, problem: String) -> ClientError {
        let path = self.path.clone();
        ClientError::Protocol { path, problem }
    }
}

/// Connects. While the server's queue is full, the attempt is repeated until the deadline: the system has no timeout
/// for this.
fn connect_by(
    path: &Path,
    deadline: Instant,
    timeout: Duration,
) -> Result<UnixStream, ClientError> {
    let failed = |errno: Errno| ClientError::Io {
        path: path.into(),
        what: "connecting",
        source: errno.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(failed)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream
                    .set_nonblocking(false)
                    .map_err(|source| ClientError::Io {
                        path: path.into(),
                        what: "connecting",
                        source,
                    })?;
                return Ok(stream);
            }
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                sleep(Duration::from_millis(10));
            }
            Err(Errno::AGAIN) => {
                let path = path.into();
                return Err(ClientError::Timeout { path, timeout });
            }
            Err(Errno::NOENT) => return Err(ClientError::NoSocket(path.into())),
            Err(Errno::CONNREFUSED) => return Err(ClientError::NobodyListens(path.into())),
            Err(Errno::ACCESS | Errno::PERM) => return Err(ClientError::Denied(path.into())),
            Err(errno) => return Err(failed(errno)),
        }
    }
}
