use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::json;

use crate::events::{Pending, Subscription};
use crate::session::{Handler, Session, line};

/// The longest time that a client may leave a reply or an event unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one client, and returns when it disconnects or the hub is closed.
///
/// Commands are executed on this thread, one at a time; events are sent between them.
///
/// # Errors
/// The client has left data unread for 10 seconds or too many events pending, or the socket has failed.
pub fn serve_socket(
    socket: &UnixStream,
    events: &Subscription,
    handler: &dyn Handler,
) -> io::Result<()> {
    socket.set_write_timeout(Some(WRITE_TIMEOUT))?;
    match serve(&mut &*socket, events, handler) {
        Err(error) if has_left(&error) => Ok(()),
        result => result,
    }
}

/// The client has disconnected, and data for it was pending.
fn has_left(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// Sends the client the reason why it is not served, in place of the greeting.
///
/// # Errors
/// The message cannot be sent.
pub fn refuse(socket: &UnixStream, why: &str) -> io::Result<()> {
    socket.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let error = json!({ "class": "GenericError", "desc": why });
    (&*socket).write_all(&line(&json!({ "error": error })))
}

/// As [`serve_socket`], for any stream that can be polled. The stream decides whether a client that does not read is
/// disconnected.
///
/// # Errors
/// As [`serve_socket`].
pub fn serve<S: Read + Write + AsFd>(
    stream: &mut S,
    events: &Subscription,
    handler: &dyn Handler,
) -> io::Result<()> {
    let mut session = Session::new();
    let mut buffer = vec![0; 64 << 10];
    stream.write_all(&session.greeting())?;
    loop {
        if !send_events(stream, &session, events)? {
            return Ok(());
        }
        if !wait(stream, events)? {
            continue;
        }
        let n = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(error) if is_passing(&error) => continue,
            Err(error) => return Err(error),
        };
        let mut input = &buffer[..n];
        while let Some(reply) = session.receive(&mut input, handler) {
            stream.write_all(&reply)?;
            if !send_events(stream, &session, events)? {
                return Ok(());
            }
        }
    }
}

/// Sends the pending events. Returns false if the session is to end.
fn send_events<S: Write>(
    stream: &mut S,
    session: &Session,
    events: &Subscription,
) -> io::Result<bool> {
    match events.pending() {
        Pending::Events(messages) => {
            for message in messages.iter().filter_map(|message| session.event(message)) {
                stream.write_all(&message)?;
            }
            Ok(true)
        }
        Pending::Closed => Ok(false),
        Pending::Overflow => Err(io::Error::other(
            "the client left too many events unread; it is disconnected, and must query the state again",
        )),
    }
}

/// Waits for bytes from the client or for events. Returns true if there may be bytes to read.
fn wait<S: AsFd>(stream: &S, events: &Subscription) -> io::Result<bool> {
    let wake = events.wake_fd();
    let mut fds = [
        PollFd::new(stream, PollFlags::IN),
        PollFd::new(&wake, PollFlags::IN),
    ];
    let timeout = events.timeout().map(|timeout| Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => Ok(!fds[0].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
    )
}
