//! Waiting without io_uring: one epoll instance for kicks, for wake-ups and for what Linux AIO and the
//! pool of threads have done.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use block::{Completion, Token};
use rustix::event::{Timespec, epoll};

/// Events taken at once; more are taken the next time.
const EVENTS: usize = 64;

/// Marks an event that only says that there is something to collect.
const INTERNAL: u64 = u64::MAX;

/// A look without sleep is taken at every so many opportunities: it costs a system call, and kicks
/// that arrive while the thread is busy may wait for as long as a few batches take.
const LOOK_EACH: u32 = 8;

pub(crate) struct Poller {
    epoll: OwnedFd,
    /// With descriptors of our own: one that somebody else closes would stay in the set, without a name.
    watches: Vec<(Token, OwnedFd)>,
    woken: Vec<Token>,
    opportunities: u32,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            watches: Vec::new(),
            woken: Vec::with_capacity(EVENTS),
            opportunities: 0,
        })
    }

    /// Ends a sleep when `event` is written to.
    pub fn watch_quietly(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.add(event, INTERNAL)
    }

    pub fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.add(fd.as_fd(), token.0)?;
        self.watches.push((token, fd));
        Ok(())
    }

    pub fn unwatch(&mut self, token: Token) -> io::Result<()> {
        self.woken.retain(|woken| *woken != token);
        if let Some(place) = self.watches.iter().position(|w| w.0 == token) {
            let (_, fd) = self.watches.swap_remove(place);
            epoll::delete(&self.epoll, fd.as_fd())?;
        }
        Ok(())
    }

    fn add(&self, fd: BorrowedFd<'_>, data: u64) -> io::Result<()> {
        // Each write to the descriptor is an edge, whether it is read or not.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(data),
            flags,
        )?)
    }

    /// Looks for events, now and then.
    pub fn glance(&mut self) -> io::Result<()> {
        self.opportunities = self.opportunities.wrapping_add(1);
        match self.opportunities.is_multiple_of(LOOK_EACH) {
            true => self.look(false),
            false => Ok(()),
        }
    }

    /// Takes what woke up, after sleeping until something does if `sleep`.
    pub fn look(&mut self, sleep: bool) -> io::Result<()> {
        if !self.woken.is_empty() {
            return Ok(());
        }
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; EVENTS];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let timeout = if sleep { None } else { Some(&now) };
        let n = match epoll::wait(&self.epoll, &mut events[..], timeout) {
            Err(rustix::io::Errno::INTR) => 0,
            n => n?,
        };
        let tokens = events[..n].iter().map(|e| e.data.u64());
        self.woken
            .extend(tokens.filter(|&t| t != INTERNAL).map(Token));
        Ok(())
    }

    /// Whether something woke up that has not been reaped.
    #[inline]
    pub fn ready(&self) -> bool {
        !self.woken.is_empty()
    }

    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Completion>) {
        while out.len() < out.capacity()
            && let Some(token) = self.woken.pop()
        {
            out.push(Completion { token, result: 0 });
        }
    }
}
