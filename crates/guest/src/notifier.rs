//! Signals front-ends by writing to descriptors that they sent. Such a write must not block the I/O thread.
//!
//! ringdisk makes a descriptor nonblocking when it receives it (vhost-user, `VHOST_USER_SET_VRING_CALL`). But
//! that flag belongs to the open file, which the front-end shares: the front-end can clear the flag and fill
//! the counter, so that the next write blocks forever, with all disks of the writing thread. To check for
//! room first would cost a system call per signal and prove nothing. Therefore one thread looks about every
//! second for threads that are in such a write, and interrupts a thread that stays in one. After a thread has
//! been blocked once, it can send [without blocking](Notifier::notify_by_aio).

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

use crate::aio_notifier::AioNotifier;

/// A signal that is ignored by default and rarely used.
const SIGNAL: i32 = libc::SIGURG;
/// Interval between two checks.
const TICK: Duration = Duration::from_secs(1);
/// A write that takes longer than this is blocked, or its thread is not running. An interruption does not
/// harm the latter.
const LONG: Duration = Duration::from_millis(10);

/// A front-end has blocked the thread for up to a second, which no well-behaved front-end does. The next
/// descriptor from that front-end would do so again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked;

/// Signals the event counters of front-ends, on behalf of one thread: the thread that created it.
pub struct Notifier {
    sender: Arc<Sender>,
    aio: AioNotifier,
}

struct Sender {
    thread: Pid,
    /// Odd while the thread is in a write.
    turn: AtomicUsize,
}

/// The threads that are monitored.
struct Senders {
    list: Vec<Arc<Sender>>,
    /// The monitoring thread runs; it ends when it finds the list empty.
    watched: bool,
}

static SENDERS: Mutex<Senders> = Mutex::new(Senders {
    list: Vec::new(),
    watched: false,
});

impl Notifier {
    /// Creates a sender for the calling thread.
    ///
    /// # Errors
    /// The system has no thread left for monitoring.
    pub fn new() -> std::io::Result<Self> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let sender = Arc::new(Sender {
            thread: rustix::thread::gettid(),
            turn: AtomicUsize::new(0),
        });
        let mut senders = senders();
        if !senders.watched {
            let watch = thread::Builder::new().name("notifier".to_owned());
            watch.spawn(monitor)?;
            senders.watched = true;
        }
        senders.list.push(sender.clone());
        let aio = AioNotifier::default();
        Ok(Self { sender, aio })
    }

    /// Adds one to an event counter. A full counter stays full, which has the same effect.
    ///
    /// # Errors
    /// The counter is full and blocks.
    #[inline]
    pub fn notify(&self, event: &OwnedFd) -> Result<(), Blocked> {
        let turn = &self.sender.turn;
        let now = turn.load(Ordering::Relaxed);
        turn.store(now.wrapping_add(1), Ordering::Relaxed);
        let written = rustix::io::write(event, &1u64.to_ne_bytes());
        turn.store(now.wrapping_add(2), Ordering::Relaxed);
        match written {
            Err(Errno::INTR) => Err(Blocked),
            _ => Ok(()),
        }
    }

    /// Like [`notify`](Self::notify), at about five times the cost, but never blocks.
    ///
    /// # Errors
    /// The descriptor is not an event counter, or the machine has no Linux AIO contexts left (fs.aio-max-nr).
    pub fn notify_by_aio(&self, event: &OwnedFd) -> std::io::Result<()> {
        self.aio.notify(event)
    }
}

impl Drop for Notifier {
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
        // SAFETY: the call takes three numbers. The thread belongs to this process and is alive: before it
        // ends, it removes itself from the list, which is locked here.
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

/// Monitors the senders; ends with the last one.
fn monitor() {
    // Senders that are in a write, with their turn.
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

/// Installs the handler without SA_RESTART, so that an interrupted write returns.
fn install() {
    // SAFETY: an all-zero `sigaction` is valid; the call gets a valid action with a handler that does
    // nothing.
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
    fn full_counter_does_not_block() {
        let full = |flags| {
            let event = eventfd(0, flags).unwrap();
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            event
        };
        let (blocking, other) = (full(EventfdFlags::empty()), full(EventfdFlags::NONBLOCK));
        let free = eventfd(0, EventfdFlags::empty()).unwrap();
        let (done, result) = mpsc::channel();
        thread::spawn(move || {
            let notifier = Notifier::new().unwrap();
            let sent = [&free, &other, &blocking, &free].map(|event| notifier.notify(event));
            let mut count = [0; 8];
            rustix::io::read(&free, &mut count).unwrap();
            done.send((sent, u64::from_ne_bytes(count))).unwrap();
        });
        let expected = ([Ok(()), Ok(()), Err(Blocked), Ok(())], 2);
        let hang = Duration::from_secs(60);
        assert_eq!(result.recv_timeout(hang).expect("it hangs"), expected);
    }
}
