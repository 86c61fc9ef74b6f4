//! Memory for the payload of requests: some for each connection, and more that all connections share.
//!
//! A client that asks for much and reads nothing keeps what it has got of the shared memory. The others then have less, but
//! never less than [`RESERVED`], and longer requests are done piece by piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest::{Buffer, LOCAL_KEPT_BYTES, LocalQueue};
use rustix::process::{Resource, getrlimit};

/// What each connection has in bytes. Requests up to this length are never done in pieces.
pub const RESERVED: usize = LOCAL_KEPT_BYTES;

/// What a connection has at most in bytes: for one of the longest requests, and some others.
const CONNECTION_MAX: usize = 36 << 20;

/// What the memory of a connection has in addition, at most.
const OVERHEAD: usize = 64 << 10;

/// What a new connection has at most in bytes. To the kernel, its memory is a file, and has no more bytes than the limit of
/// those (RLIMIT_FSIZE).
pub fn connection_max() -> usize {
    below(getrlimit(Resource::Fsize).current)
}

fn below(file_limit: Option<u64>) -> usize {
    let limit = file_limit.and_then(|limit| usize::try_from(limit).ok());
    let most = limit.unwrap_or(usize::MAX).saturating_sub(OVERHEAD);
    // With less, no request would be possible, and the error names the limit.
    CONNECTION_MAX.min(most).max(RESERVED)
}

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
    /// Other connections have it, perhaps for long, or nobody may have so much.
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
        if len > queue.capacity() {
            // Never, because this process may not have it.
            return Err(NoMemory::Shared);
        }
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

    /// A process with a limit for files serves clients as well: long requests are done piece by piece.
    #[test]
    fn limit_of_files_makes_connections_smaller() {
        assert_eq!(below(None), CONNECTION_MAX);
        assert_eq!(below(Some(1 << 40)), CONNECTION_MAX);
        assert_eq!(below(Some(0)), RESERVED);
        let bytes = below(Some(16 << 20));
        assert_eq!(bytes, (16 << 20) - OVERHEAD);
        let (mut queue, _) = LocalQueue::new(bytes).unwrap();
        assert!(queue.file_bytes() <= 16 << 20);
        let mut memory = ConnectionMemory::new(Arc::default());
        let long = memory.alloc(&mut queue, 32 * MIB);
        assert_eq!(
            long,
            Err(NoMemory::Shared),
            "it would be waited for without end"
        );
        assert!(memory.alloc(&mut queue, 8 * MIB).is_ok());
        assert_eq!(memory.alloc(&mut queue, 15 * MIB), Err(NoMemory::ForNow));
    }
}
