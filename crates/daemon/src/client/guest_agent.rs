//! QEMU's guest agents, which freeze the file systems of guests for a moment.
//!
//! An agent belongs to its guest, and may send anything or nothing. None of them keeps another guest frozen: all must answer
//! before the first guest is frozen, all is over after a time, and [signals](super::interrupt) end it, too.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::{Value, json};

use super::CommandLineError;
use super::interrupt::Interrupt;
use crate::log;

/// How long agents may take to answer before anything is frozen, and again to thaw.
const ANSWER: Duration = Duration::from_secs(20);

/// How long guests may take to freeze: their writes must have reached the disk.
const FREEZE: Duration = Duration::from_secs(30);

/// How long guests may stay frozen until the server has answered.
const FROZEN: Duration = Duration::from_secs(20);

/// How long each agent may take at least to answer that its guest has thawed, whatever the others do; and at most after a
/// signal.
const THAW: Duration = Duration::from_secs(2);

/// How often signals are looked at while an agent does not answer.
const LOOK: Duration = Duration::from_millis(100);

/// Most bytes of a reply.
const REPLY_MAX: usize = 1 << 20;

/// Guests whose file systems are frozen. They thaw at the latest when this is dropped.
pub struct Frozen<'a> {
    agents: Vec<Agent<'a>>,
    interrupt: &'a Interrupt,
}

impl<'a> Frozen<'a> {
    /// Freezes the file systems of all guests.
    ///
    /// # Errors
    /// An agent cannot do that, or does not answer. The others have thawed.
    pub fn freeze(
        paths: &'a [PathBuf],
        interrupt: &'a Interrupt,
    ) -> Result<Self, CommandLineError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |e| CommandLineError::Agent(path, e)
        };
        let wait = Wait::new(interrupt, ANSWER);
        let mut agents = Vec::new();
        for path in paths {
            agents.push(Agent::connect(path, &wait).map_err(failed(path))?);
        }
        // From now on, each of them thaws, also if its reply is lost.
        let mut frozen = Self { agents, interrupt };
        let wait = Wait::new(interrupt, FREEZE);
        for agent in &mut frozen.agents {
            let sent = agent.send(&json!({ "execute": "guest-fsfreeze-freeze" }), wait.by);
            sent.map_err(failed(agent.path))?;
        }
        for agent in &mut frozen.agents {
            let reply = agent.reply(&wait);
            agent.frozen = reply.map_err(failed(agent.path))?;
        }
        Ok(frozen)
    }

    /// Does `work`, and then thaws them. If it takes too long or a signal arrives, they thaw before, and then `stop` is called,
    /// which has the work end soon.
    ///
    /// # Errors
    /// Why `stop` was called, or a guest may still be frozen.
    pub fn during<T: Send>(
        self,
        work: impl FnOnce() -> T + Send,
        stop: impl FnOnce(),
    ) -> (T, Result<(), CommandLineError>) {
        let limit = Some(FROZEN).filter(|_| !self.agents.is_empty());
        let (interrupt, mut frozen) = (self.interrupt, Some(self));
        let (done, watched) = interrupt.watch(limit, work, || {
            drop(frozen.take());
            stop();
        });
        let thawed = frozen.map_or(Ok(()), |mut frozen| frozen.thaw());
        (done, watched.and(thawed))
    }

    /// Has the guests thaw that have not. Says which have perhaps not.
    ///
    /// # Errors
    /// One has perhaps not, or had thawed before.
    fn thaw(&mut self) -> Result<(), CommandLineError> {
        let mut agents = std::mem::take(&mut self.agents);
        let by = Instant::now() + ANSWER;
        let thaw = json!({ "execute": "guest-fsfreeze-thaw" });
        let sent: Vec<_> = (agents.iter_mut())
            .map(|agent| agent.send(&thaw, by))
            .collect();
        let mut all = Ok(());
        for (agent, sent) in agents.iter_mut().zip(sent) {
            let wait = Wait::for_thaw(self.interrupt, by);
            let thawed = sent.and_then(|()| agent.replies_to_thaw(&wait));
            if agent.frozen > 0 && matches!(thawed, Ok(0)) && all.is_ok() {
                all = Err(CommandLineError::ThawedBefore(agent.path.into()));
            }
            if let Err(e) = thawed {
                let text = format!(
                    "guest agent {}: the file systems may still be frozen: {e}; run guest-fsfreeze-thaw",
                    agent.path.display()
                );
                log::complain(&text);
                all = Err(CommandLineError::Frozen);
            }
        }
        all
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // What failed is the user's concern, and said.
        let _ = self.thaw();
    }
}

/// How long to wait for an agent.
struct Wait<'a> {
    interrupt: &'a Interrupt,
    began: Instant,
    by: Instant,
    /// How long to wait after a signal.
    after_signal: Duration,
}

impl<'a> Wait<'a> {
    /// Until this time has passed, or a signal arrives.
    fn new(interrupt: &'a Interrupt, time: Duration) -> Self {
        let began = Instant::now();
        Self {
            interrupt,
            began,
            by: began + time,
            after_signal: Duration::ZERO,
        }
    }

    fn for_thaw(interrupt: &'a Interrupt, by: Instant) -> Self {
        let began = Instant::now();
        Self {
            interrupt,
            began,
            by: by.max(began + THAW),
            after_signal: THAW,
        }
    }

    fn is_interrupted(&self) -> bool {
        let arrived = self.interrupt.arrived();
        arrived.is_some_and(|at| Instant::now() >= at.max(self.began) + self.after_signal)
    }

    /// # Errors
    /// It is over.
    fn check(&self) -> io::Result<()> {
        if self.is_interrupted() {
            return Err(io::Error::other("interrupted before it answered"));
        }
        if Instant::now() >= self.by {
            return Err(io::Error::other(
                "it does not answer; does the guest run it?",
            ));
        }
        Ok(())
    }
}

/// A connection to an agent.
struct Agent<'a> {
    path: &'a Path,
    socket: BufReader<UnixStream>,
    /// Number of commands without a reply so far.
    owed: usize,
    /// Number of file systems that the guest has frozen.
    frozen: u64,
}

impl<'a> Agent<'a> {
    fn connect(path: &'a Path, wait: &Wait<'_>) -> io::Result<Self> {
        let socket = connected(path, wait)?;
        socket.set_read_timeout(Some(LOOK))?;
        let socket = BufReader::new(socket);
        let mut agent = Self {
            path,
            socket,
            owed: 0,
            frozen: 0,
        };
        // What an earlier client has left behind comes first.
        let id = std::process::id();
        agent.send(
            &json!({ "execute": "guest-sync", "arguments": { "id": id } }),
            wait.by,
        )?;
        while agent
            .receive(wait)?
            .is_none_or(|reply| reply["return"] != id)
        {}
        agent.owed = 0;
        Ok(agent)
    }

    fn send(&mut self, command: &Value, by: Instant) -> io::Result<()> {
        let left = by.saturating_duration_since(Instant::now()).max(LOOK);
        self.socket.get_mut().set_write_timeout(Some(left))?;
        writeln!(self.socket.get_mut(), "{command}")?;
        self.owed += 1;
        Ok(())
    }

    /// The reply to the only command that is sent: a number of file systems.
    fn reply(&mut self, wait: &Wait<'_>) -> io::Result<u64> {
        let reply = self.receive(wait)?;
        self.owed = self.owed.saturating_sub(1);
        match reply {
            Some(reply) if reply.get("return").is_some() => {
                Ok(reply["return"].as_u64().unwrap_or_default())
            }
            Some(reply) => {
                let why = reply["error"]["desc"].as_str();
                let why = why.unwrap_or("its reply is neither a result nor an error");
                Err(io::Error::other(why.to_owned()))
            }
            None => Err(io::Error::other("its reply is not JSON")),
        }
    }

    /// That to a thaw, which may come after that to a freeze.
    fn replies_to_thaw(&mut self, wait: &Wait<'_>) -> io::Result<u64> {
        while self.owed > 1 {
            // Whatever became of the freeze.
            let _ = self.receive(wait)?;
            self.owed -= 1;
        }
        self.reply(wait)
    }

    /// The next line; `None` if it is not JSON.
    fn receive(&mut self, wait: &Wait<'_>) -> io::Result<Option<Value>> {
        let mut line = Vec::new();
        loop {
            wait.check()?;
            let mut byte = [0];
            match self.socket.read(&mut byte) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) if byte == *b"\n" => break,
                Ok(_) if line.len() == REPLY_MAX => {
                    return Err(io::Error::other("its reply is longer than 1 MiB"));
                }
                Ok(_) => line.push(byte[0]),
                Err(e) => match e.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    _ => return Err(e),
                },
            }
        }
        // It marks the beginning of a reply with 0xff, if it is asked to.
        let json = line.strip_prefix(&[0xff]).unwrap_or(&line);
        Ok(serde_json::from_slice(json).ok())
    }
}

/// Connects, and waits while the agent's socket has too many clients that wait.
fn connected(path: &Path, wait: &Wait<'_>) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN) if wait.is_interrupted() || Instant::now() >= wait.by => {
                let why = "other clients use it (QEMU serves one at a time)";
                return Err(io::Error::other(why));
            }
            Err(Errno::AGAIN | Errno::INTR) => thread::sleep(LOOK),
            Err(e) => return Err(e.into()),
        }
    }
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}
