//! Waits without io_uring: one epoll instance for kicks, wake-ups, and completions of Linux AIO and the
//! thread pool.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use block::{Completion, Token};
use rustix::event::{Timespec, epoll};

/// Maximum number of events per call; the next call returns the remaining ones.
const EVENTS: usize = 64;

/// Marks an event that only says that there are completions to collect.
const INTERNAL: u64 = u64::MAX;

/// Every this many opportunities, events are checked without sleeping. The check costs a system call, so
/// kicks that arrive while the thread is busy may wait for a few batches.
const CHECK_INTERVAL: u32 = 8;

pub(crate) struct Poller {
    epoll: OwnedFd,
    /// Duplicates of the descriptors, owned here: if the owner closed the only descriptor, the file would
    /// stay in the epoll set without a way to remove it.
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

    /// Ends a sleep when `event` is written; reports no token.
    pub fn watch_internal(&self, event: BorrowedFd<'_>) -> io::Result<()> {
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
        if let Some(index) = self.watches.iter().position(|w| w.0 == token) {
            let (_, fd) = self.watches.swap_remove(index);
            epoll::delete(&self.epoll, fd.as_fd())?;
        }
        Ok(())
    }

    fn add(&self, fd: BorrowedFd<'_>, data: u64) -> io::Result<()> {
        // Each write to the descriptor is an edge, even if the descriptor is never read.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(data),
            flags,
        )?)
    }

    /// Checks for events without sleeping, at one in `CHECK_INTERVAL` calls.
    pub fn check_sometimes(&mut self) -> io::Result<()> {
        self.opportunities = self.opportunities.wrapping_add(1);
        if self.opportunities.is_multiple_of(CHECK_INTERVAL) {
            self.fetch_events(false)
        } else {
            Ok(())
        }
    }

    /// Fetches events; if `sleep` is set, sleeps until there is one.
    pub fn fetch_events(&mut self, sleep: bool) -> io::Result<()> {
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

    /// Whether there are events that have not been reaped.
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
