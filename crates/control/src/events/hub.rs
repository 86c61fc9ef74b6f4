use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use thiserror::Error;

use super::Event;

/// The most sessions at a time: QEMU's tools need one or two, and each costs a thread.
const SESSIONS_MAX: usize = 16;

/// The most events that may be pending for a session. A session that reaches this is stuck, because the events that a
/// guest can cause are limited to one per second for each disk.
const WAITING_MAX: usize = 256;

/// The least time between two events with the same rate-limiting key.
const PERIOD: Duration = Duration::from_secs(1);

/// The most rate-limiting keys at a time: disks times two operations. Events with a further key are dropped.
const KINDS_MAX: usize = 4096;

/// Distributes events to all sessions, in the same order.
#[derive(Default)]
pub struct EventHub {
    state: Mutex<HubState>,
}

#[derive(Default)]
struct HubState {
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

/// An event key that was sent less than a period ago.
struct Recent {
    until: Instant,
    /// The latest event since then; it is sent when the period ends.
    held: Option<Arc<Value>>,
}

/// A session's registration at the hub; dropping it ends the registration.
pub struct Subscription {
    hub: Arc<EventHub>,
    session: u64,
    wake: Arc<OwnedFd>,
}

/// Why a session cannot be registered.
#[derive(Debug, Error)]
pub enum TooManySessions {
    /// `SESSIONS_MAX` sessions are registered already.
    #[error("there are {SESSIONS_MAX} sessions already; close one")]
    Limit,
    /// The hub is closed.
    #[error("ringdisk is shutting down")]
    Closed,
    /// The system cannot create the event descriptor that wakes the session.
    #[error("no event descriptor for the session: {cause}", cause = block::explain(.0, ""))]
    Wake(io::Error),
}

/// What a session has to do next.
#[derive(Debug, PartialEq)]
pub enum Pending {
    /// Send these messages; there are none if no event is pending.
    Events(Vec<Arc<Value>>),
    /// More events came than may be pending; the session must end. A client that missed an event unawares would wait
    /// for it for ever; one that connects again queries the current state.
    Overflow,
    /// The program ends. All pending events have been returned before.
    Closed,
}

impl EventHub {
    /// A hub without sessions.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sends an event to every session, with the current time as its timestamp. Never blocks on a client.
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
                    state.wake_all(); // so that each waits no longer than until the period ends
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

    /// Registers a session.
    ///
    /// # Errors
    /// The hub is full or closed, or the system has no event descriptor.
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

    /// Ends every session, once it has sent its pending events.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.wake_all();
    }

    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HubState {
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

    /// Sends the held events whose period has ended.
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
            // A write fails only if the counter is full, and then the session has been woken already.
            let _ = rustix::io::write(&mailbox.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Subscription {
    /// Returns what the session has to do now.
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
            // After `close`, the descriptor stays readable, so that the session finds `Closed` after the last events
            // without another wake-up.
            let _ = rustix::io::read(&mailbox.wake, &mut [0; 8]);
        }
        match (mailbox.overflown, mailbox.waiting.is_empty()) {
            (true, _) => Pending::Overflow,
            (false, true) if closed => Pending::Closed,
            (false, _) => Pending::Events(mailbox.waiting.drain(..).collect()),
        }
    }

    /// How long the session may wait for [`Subscription::wake_fd`] before it calls `pending` again; `None` for no
    /// limit.
    pub fn timeout(&self) -> Option<Duration> {
        let state = self.hub.lock();
        let held = state.recent.values().filter(|recent| recent.held.is_some());
        let next = held.map(|recent| recent.until).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// A descriptor that is readable when something is pending.
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
