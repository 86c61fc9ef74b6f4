//! Memory for the payload of requests: some for each connection, and more that all connections share.
//!
//! A client that asks for much and reads nothing keeps what it has got of the shared memory. The others then have less, but
//! never less than [`RESERVED`], and longer requests are done piece by piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest::{Buffer, LOCAL_KEPT_BYTES, LocalQueue};

/// What each connection has in bytes. Requests up to this length are never done in pieces.
pub const RESERVED: usize = LOCAL_KEPT_BYTES;

/// What a connection has at most in bytes: for one of the longest requests, and some others.
pub const CONNECTION_MAX: usize = 36 << 20;

/// What connections share in bytes.
const SHARED: usize = 256 << 20;

/// What connections share.
pub struct SharedMemory {
    /// Bytes that no connection has.
    left: AtomicUsize,
}

impl Default for SharedMemory {
    fn default() -> Self {
        let left = AtomicUsize::new(SHARED);
        Self { left }
    }
}

impl SharedMemory {
    fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        let taken = (self.left).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        taken.is_ok()
    }
}

/// There is no memory for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoMemory {
    /// Until other requests of the same connection end.
    ForNow,
    /// Other connections have it, perhaps for long.
    Shared,
}

/// What one connection has.
pub struct ConnectionMemory {
    shared: Arc<SharedMemory>,
    /// Bytes of the shared memory.
    taken: usize,
}

impl ConnectionMemory {
    pub fn new(shared: Arc<SharedMemory>) -> Self {
        Self { shared, taken: 0 }
    }

    /// A buffer of the connection's queue.
    ///
    /// # Errors
    /// There is no memory.
    pub fn alloc(&mut self, queue: &mut LocalQueue, len: usize) -> Result<Buffer, NoMemory> {
        let used = queue.bytes_used_with(len).ok_or(NoMemory::ForNow)?;
        let more = used.saturating_sub(RESERVED + self.taken);
        if !self.shared.take(more) {
            return Err(NoMemory::Shared);
        }
        self.taken += more;
        queue.alloc(len).ok_or(NoMemory::ForNow)
    }

    /// Whether other connections may need what this one has.
    pub fn is_wanted(&self) -> bool {
        self.taken > 0 && self.shared.left.load(Ordering::Relaxed) < SHARED / 4
    }

    /// Gives shared memory back, if no buffer of the queue is in use.
    pub fn shrink(&mut self, queue: &mut LocalQueue) {
        if queue.shrink() {
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        let taken = std::mem::take(&mut self.taken);
        self.shared.left.fetch_add(taken, Ordering::Relaxed);
    }
}

/// The queue must have stopped: until then, its memory is in use.
impl Drop for ConnectionMemory {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn connection(shared: &Arc<SharedMemory>) -> (ConnectionMemory, LocalQueue) {
        let (queue, _) = LocalQueue::new(CONNECTION_MAX).unwrap();
        (ConnectionMemory::new(shared.clone()), queue)
    }

    /// Some connections take everything: all others have what is reserved for them, and no more until these end.
    #[test]
    fn connections_share_what_is_not_reserved() {
        let shared = Arc::new(SharedMemory::default());
        let mut greedy: Vec<_> = (0..8).map(|_| connection(&shared)).collect();
        for (memory, queue) in &mut greedy {
            while memory.alloc(queue, MIB).is_ok() {}
        }
        let taken: usize = greedy.iter().map(|(memory, _)| memory.taken).sum();
        assert_eq!(taken, SHARED);
        let (mut memory, mut queue) = connection(&shared);
        assert_eq!(memory.alloc(&mut queue, 2 * MIB), Err(NoMemory::Shared));
        let all = memory.alloc(&mut queue, RESERVED).unwrap();
        assert_eq!(memory.alloc(&mut queue, 4096), Err(NoMemory::Shared));
        drop(greedy.remove(0));
        assert!(!memory.is_wanted());
        let more = memory.alloc(&mut queue, 32 * MIB).unwrap();
        assert_eq!(memory.alloc(&mut queue, 32 * MIB), Err(NoMemory::ForNow));
        // What is in use is not given back.
        memory.shrink(&mut queue);
        assert!(memory.is_wanted());
        queue.give_back(all);
        queue.give_back(more);
        memory.shrink(&mut queue);
        assert_eq!(memory.taken, 0);
        drop(greedy);
        assert_eq!(shared.left.load(Ordering::Relaxed), SHARED);
    }
}
