use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use thiserror::Error;

use super::Event;

/// Most sessions at a time: QEMU's tools need one or two, and each costs a thread.
const SESSIONS_MAX: usize = 16;

/// Most events that wait for a session. One that leaves so many lying is stuck, for what a guest can cause is limited
/// to one a second for each disk.
const WAITING_MAX: usize = 256;

/// Between two events of a kind that is limited.
const PERIOD: Duration = Duration::from_secs(1);

/// Most kinds that are limited at a time: disks times two operations. Events beyond are dropped.
const KINDS_MAX: usize = 4096;

/// Where events are thrown in, and every session gets them all, in the same order.
#[derive(Default)]
pub struct EventHub {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sessions: HashMap<u64, Mailbox>,
    next_session: u64,
    recent: HashMap<String, Recent>,
    closed: bool,
}

struct Mailbox {
    waiting: VecDeque<Arc<Value>>,
    overflown: bool,
    wake: Arc<OwnedFd>,
}

/// A kind of event that has been sent less than a period ago.
struct Recent {
    until: Instant,
    /// The latest since then, which goes out when the period ends.
    held: Option<Arc<Value>>,
}

/// A session's place at the hub, given up when dropped.
pub struct Subscription {
    hub: Arc<EventHub>,
    session: u64,
    wake: Arc<OwnedFd>,
}

/// Why a session has no place at the hub.
#[derive(Debug, Error)]
pub enum TooManySessions {
    /// The limit.
    #[error("there are {SESSIONS_MAX} sessions already; close one")]
    Limit,
    /// The hub is closed.
    #[error("ringdisk is shutting down")]
    Closed,
    /// No descriptor to wake the session with.
    #[error("no event descriptor for the session: {cause}", cause = block::explain(.0, ""))]
    Wake(io::Error),
}

/// What a session has to send.
#[derive(Debug, PartialEq)]
pub enum Pending {
    /// These, as messages; none if nothing has happened.
    Events(Vec<Arc<Value>>),
    /// More than wait for a session. It must end: a client that has missed an event without knowing would wait for it
    /// for ever, and one that connects again asks how things stand.
    Overflow,
    /// The program ends. Events that were waiting have been handed out.
    Closed,
}

impl EventHub {
    /// A hub without sessions.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sends an event to every session, stamped with the time of now. Never blocks on a client.
    pub fn emit(&self, event: &Event) {
        self.emit_at(event, Instant::now(), SystemTime::now());
    }

    fn emit_at(&self, event: &Event, now: Instant, time: SystemTime) {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let message = Arc::new(json!({
            "event": event.name(),
            "data": event.data(),
            "timestamp": {
                "seconds": since_epoch.as_secs(),
                "microseconds": since_epoch.subsec_micros(),
            },
        }));
        let mut state = self.lock();
        state.release(now);
        if let Some(kind) = event.rate_limited_by() {
            if let Some(recent) = state.recent.get_mut(&kind) {
                let first = recent.held.replace(message).is_none();
                if first {
                    state.wake_all(); // they wait no longer than until the period ends
                }
                return;
            }
            if state.recent.len() == KINDS_MAX {
                return;
            }
            let until = now + PERIOD;
            state.recent.insert(kind, Recent { until, held: None });
        }
        state.send(&message);
    }

    /// Makes room for a session.
    ///
    /// # Errors
    /// There is none.
    pub fn subscribe(self: &Arc<Self>) -> Result<Subscription, TooManySessions> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(|errno| TooManySessions::Wake(errno.into()))?;
        let wake = Arc::new(wake);
        let mut state = self.lock();
        if state.closed {
            return Err(TooManySessions::Closed);
        }
        if state.sessions.len() == SESSIONS_MAX {
            return Err(TooManySessions::Limit);
        }
        let session = state.next_session;
        state.next_session += 1;
        let mailbox = Mailbox {
            waiting: VecDeque::new(),
            overflown: false,
            wake: Arc::clone(&wake),
        };
        state.sessions.insert(session, mailbox);
        let hub = Arc::clone(self);
        Ok(Subscription { hub, session, wake })
    }

    /// Ends every session, once it has sent what was waiting.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.wake_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn send(&mut self, message: &Arc<Value>) {
        for mailbox in self.sessions.values_mut() {
            if mailbox.waiting.len() == WAITING_MAX {
                mailbox.overflown = true;
            } else {
                mailbox.waiting.push_back(Arc::clone(message));
            }
        }
        self.wake_all();
    }

    /// Sends what was held back until now.
    fn release(&mut self, now: Instant) {
        let mut due = Vec::new();
        self.recent.retain(|_, recent| {
            if recent.until > now {
                return true;
            }
            let held = recent.held.take();
            recent.until = now + PERIOD;
            let was_held = held.is_some();
            due.extend(held);
            was_held
        });
        for message in due {
            self.send(&message);
        }
    }

    fn wake_all(&self) {
        for mailbox in self.sessions.values() {
            // It fails only if the counter is full, and then the session is awake.
            let _ = rustix::io::write(&mailbox.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Subscription {
    /// What the session has to send now.
    pub fn pending(&self) -> Pending {
        self.pending_at(Instant::now())
    }

    fn pending_at(&self, now: Instant) -> Pending {
        let mut state = self.hub.lock();
        state.release(now);
        let closed = state.closed;
        let Some(mailbox) = state.sessions.get_mut(&self.session) else {
            return Pending::Closed;
        };
        if !closed {
            // Otherwise it stays readable: what comes after the last events is `Closed`, without another wake-up.
            let _ = rustix::io::read(&mailbox.wake, &mut [0; 8]);
        }
        match (mailbox.overflown, mailbox.waiting.is_empty()) {
            (true, _) => Pending::Overflow,
            (false, true) if closed => Pending::Closed,
            (false, _) => Pending::Events(mailbox.waiting.drain(..).collect()),
        }
    }

    /// How long the session may wait for [`Subscription::wake_fd`] before it asks again; `None` for any time.
    pub fn timeout(&self) -> Option<Duration> {
        let state = self.hub.lock();
        let held = state.recent.values().filter(|recent| recent.held.is_some());
        let next = held.map(|recent| recent.until).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Readable when there is something pending.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.lock().sessions.remove(&self.session);
    }
}

#[cfg(test)]
mod tests;
