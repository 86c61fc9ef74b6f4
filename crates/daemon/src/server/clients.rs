//! The clients of a disk that are not its guest. They end before the disk is released, handed over or removed.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long clients that are told to end may take. Their last replies take a second, and a queue stops within 20 s, whether
/// or not its storage answers; but a client's thread may also be waiting for storage itself.
pub const END_TIMEOUT: Duration = Duration::from_secs(25);

/// A client with a queue in service.
pub struct Client {
    /// The number of its export.
    pub export: u64,
    /// Becomes readable when the client is to end.
    pub stop: Arc<OwnedFd>,
}

/// The clients of a disk.
#[derive(Default)]
pub struct Clients {
    running: Mutex<Vec<Arc<Client>>>,
    ended: Condvar,
    next: AtomicUsize,
    /// Queues that the disk's guest has in service.
    guest_queues: AtomicUsize,
}

impl Clients {
    /// Number of clients of an export, which is named by its number.
    pub fn count(&self, export: u64) -> usize {
        let running = self.lock();
        running.iter().filter(|c| c.export == export).count()
    }

    /// Numbers clients, so that they take turns with the disk's threads.
    pub fn number(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The guest has a queue in service.
    pub fn guest_queue_started(&self) {
        self.guest_queues.fetch_add(1, Ordering::Relaxed);
    }

    /// The guest has one queue less in service.
    pub fn guest_queue_stopped(&self) {
        self.guest_queues.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a guest uses the disk, too.
    pub fn have_guest(&self) -> bool {
        self.guest_queues.load(Ordering::Relaxed) > 0
    }

    pub fn add(&self, client: Arc<Client>) {
        self.lock().push(client);
    }

    /// The queue of a client has stopped.
    pub fn remove(&self, client: &Arc<Client>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, client));
        self.ended.notify_all();
    }

    /// Tells clients to end, and waits until their queues have stopped. Returns false if they have not at the deadline.
    #[must_use]
    pub fn end(&self, which: impl Fn(&Client) -> bool, deadline: Instant) -> bool {
        let mut running = self.lock();
        loop {
            let mut left = running.iter().filter(|client| which(client)).peekable();
            if left.peek().is_none() {
                return true;
            }
            for client in left {
                let _ = rustix::io::write(&client.stop, &1u64.to_ne_bytes());
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                return false;
            }
            let waited = self.ended.wait_timeout(running, time);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A client that waits for its storage keeps nobody waiting for ever.
    #[test]
    fn ending_clients_has_a_limit() {
        let clients = Clients::default();
        let stop = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let export = 1;
        let client = Arc::new(Client { export, stop });
        clients.add(client.clone());
        assert!(clients.end(|c| c.export == 2, Instant::now()));
        assert!(!clients.end(|_| true, Instant::now() + Duration::from_millis(10)));
        let mut told = [0; 8];
        rustix::io::read(&client.stop, &mut told).unwrap();
        clients.remove(&client);
        assert!(clients.end(|_| true, Instant::now()));
    }
}
