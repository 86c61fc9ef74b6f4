//! Signals to front-ends: writes to descriptors that came from there, where nobody may be held up.
//!
//! A descriptor is made not to block when it comes (vhost-user, `VHOST_USER_SET_VRING_CALL`). But that belongs to
//! what is open, which the front-end has open as well: it can take it back, fill the counter, and have whoever
//! writes next sleep for good, with all the disks that his thread serves. To look first whether there is room
//! costs a system call for each signal, and proves nothing. So one thread looks about every second for others
//! that are in such a write, and interrupts one that stays there. Whoever has been held up once can send
//! [with care](Signals::send_with_care) from then on.

#![expect(
    unsafe_code,
    reason = "a signal to one thread, and a handler that does nothing"
)]

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::Pid;

use crate::careful::Careful;

/// Ignored by all who do not ask for it, and seldom asked for.
const SIGNAL: i32 = libc::SIGURG;
/// How often to look.
const TICK: Duration = Duration::from_secs(1);
/// A write that takes longer than this is one that waits, or whose thread does not run. Being interrupted does not
/// harm the latter.
const LONG: Duration = Duration::from_millis(10);

/// A front-end has held up the thread, for up to a second: no honest one does. The next descriptor that comes from
/// there would do so again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldUp;

/// Sends the signals of one thread, the one that made it.
pub struct Signals {
    sender: Arc<Sender>,
    careful: Careful,
}

struct Sender {
    thread: Pid,
    /// Odd in a write.
    turn: AtomicUsize,
}

/// The threads that are looked after.
struct Senders {
    list: Vec<Arc<Sender>>,
    /// Somebody looks after them, or will find that there are none.
    watched: bool,
}

static SENDERS: Mutex<Senders> = Mutex::new(Senders {
    list: Vec::new(),
    watched: false,
});

impl Signals {
    /// For the calling thread.
    ///
    /// # Errors
    /// The system has no thread left to look after this one.
    pub fn new() -> std::io::Result<Self> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let sender = Arc::new(Sender {
            thread: rustix::thread::gettid(),
            turn: AtomicUsize::new(0),
        });
        let mut senders = senders();
        if !senders.watched {
            let watch = thread::Builder::new().name("signals".to_owned());
            watch.spawn(look_after)?;
            senders.watched = true;
        }
        senders.list.push(sender.clone());
        let careful = Careful::default();
        Ok(Self { sender, careful })
    }

    /// Adds one to an event counter. A counter that is full is as good as one that was written to.
    ///
    /// # Errors
    /// It is full, and blocks.
    #[inline]
    pub fn send(&self, event: &OwnedFd) -> Result<(), HeldUp> {
        let turn = &self.sender.turn;
        let now = turn.load(Ordering::Relaxed);
        turn.store(now.wrapping_add(1), Ordering::Relaxed);
        let written = rustix::io::write(event, &1u64.to_ne_bytes());
        turn.store(now.wrapping_add(2), Ordering::Relaxed);
        match written {
            Err(Errno::INTR) => Err(HeldUp),
            _ => Ok(()),
        }
    }

    /// The same, at about five times the cost, and never held up.
    ///
    /// # Errors
    /// It is no event counter, or the machine has no Linux AIO left (fs.aio-max-nr).
    pub fn send_with_care(&self, event: &OwnedFd) -> std::io::Result<()> {
        self.careful.send(event)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut senders = senders();
        senders
            .list
            .retain(|sender| !Arc::ptr_eq(sender, &self.sender));
    }
}

impl Sender {
    fn turn(&self) -> usize {
        self.turn.load(Ordering::Relaxed)
    }

    fn interrupt(&self) {
        // SAFETY: takes three numbers. The thread is one of this process, and lives: it takes itself out of the
        // list, which is locked, before it ends.
        unsafe {
            libc::syscall(
                libc::SYS_tgkill,
                libc::c_long::from(rustix::process::getpid().as_raw_pid()),
                libc::c_long::from(self.thread.as_raw_pid()),
                libc::c_long::from(SIGNAL),
            );
        }
    }
}

fn senders() -> MutexGuard<'static, Senders> {
    SENDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends with the last sender.
fn look_after() {
    // In a write, and at which.
    let mut writing: Vec<(Arc<Sender>, usize)> = Vec::new();
    loop {
        thread::sleep(TICK);
        {
            let mut senders = senders();
            if senders.list.is_empty() {
                senders.watched = false;
                return;
            }
            let all = senders
                .list
                .iter()
                .map(|sender| (sender.clone(), sender.turn()));
            writing.extend(all.filter(|(_, turn)| turn % 2 == 1));
        }
        if writing.is_empty() {
            continue;
        }
        thread::sleep(LONG);
        let senders = senders();
        for (sender, turn) in writing.drain(..) {
            if sender.turn() == turn && senders.list.iter().any(|s| Arc::ptr_eq(s, &sender)) {
                sender.interrupt();
            }
        }
    }
}

/// Without SA_RESTART, so that a write ends instead of going on.
fn install() {
    // SAFETY: all zeroes is a signal action; the call is given a valid one, with a handler that does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(SIGNAL, &raw const action, ptr::null_mut());
    }
}

extern "C" fn nothing(_signal: i32) {}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A full counter that blocks, a full one that does not, and one with room.
    #[test]
    fn a_full_counter_holds_nobody_up() {
        let full = |flags| {
            let event = eventfd(0, flags).unwrap();
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            event
        };
        let (blocking, other) = (full(EventfdFlags::empty()), full(EventfdFlags::NONBLOCK));
        let free = eventfd(0, EventfdFlags::empty()).unwrap();
        let (done, result) = mpsc::channel();
        thread::spawn(move || {
            let signals = Signals::new().unwrap();
            let sent = [&free, &other, &blocking, &free].map(|event| signals.send(event));
            let mut count = [0; 8];
            rustix::io::read(&free, &mut count).unwrap();
            done.send((sent, u64::from_ne_bytes(count))).unwrap();
        });
        let expected = ([Ok(()), Ok(()), Err(HeldUp), Ok(())], 2);
        let hang = Duration::from_secs(60);
        assert_eq!(result.recv_timeout(hang).expect("it hangs"), expected);
    }
}
