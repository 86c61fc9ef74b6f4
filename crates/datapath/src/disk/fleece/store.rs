//! Where a fleece stores old data: in memory up to a limit, and then in a file.
//!
//! Granules are appended to chunks. A thread prepares the next chunk, and touches its memory. Otherwise each granule would
//! cost the guest's write a page fault. A full chunk goes to the file, oldest first, once half of the memory is in
//! use. Nothing is ever made durable: a fleece is of no use after a crash.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};

use super::{FLEECE_MEMORY_MIN, FleeceLimits, GRANULE};

/// Granules of a chunk.
const CHUNK: usize = 256;
const CHUNK_BYTES: u64 = CHUNK as u64 * GRANULE;

/// Where a granule is: the number of its chunk times [`CHUNK`], and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location(u64);

/// Whether there is room for more granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// They are reserved.
    Reserved,
    /// When a chunk has gone to the file.
    Later,
    /// Memory is full, and there is no file.
    Never,
}

pub(super) struct Store {
    /// Most granules in memory.
    memory_max: usize,
    file: Option<File>,
    state: Mutex<StoreState>,
    /// There is a chunk for the file, or a chunk is to be made ready, or the store is closed.
    work: Condvar,
    /// Somebody has found no room, or the store is closed.
    wanted: Condvar,
}

#[derive(Default)]
struct StoreState {
    chunks: Vec<Arc<Chunk>>,
    /// Memory for the next chunks.
    ready: Vec<Box<[u8]>>,
    /// Granules in the last chunk.
    used: usize,
    /// Granules for which there is memory: those of chunks in memory, and those that are reserved.
    in_memory: usize,
    reserved: usize,
    /// Chunks that are full and in memory, the oldest first.
    full: VecDeque<usize>,
    in_file: u64,
    /// Number of chunks that went to the file.
    moved: u64,
    /// Somebody has found no room since the last chunk went to the file.
    is_wanted: bool,
    is_closed: bool,
}

impl StoreState {
    /// The last chunk is full. If all of its granules were dropped before it was, its space is free now.
    fn drop_last_if_dead(&mut self) {
        let Some(last) = self.chunks.last().cloned() else {
            return;
        };
        let mut data = last.lock();
        if data.live == 0
            && let ChunkPlace::Memory(_) = data.place
        {
            data.place = ChunkPlace::Dropped;
            self.in_memory -= CHUNK;
            let number = self.chunks.len() - 1;
            self.full.retain(|&full| full != number);
        }
    }

    /// Somebody may go on: the file is not to blame.
    fn has_room(&mut self) {
        if self.is_wanted {
            self.is_wanted = false;
            self.moved += 1;
        }
    }
}

struct Chunk {
    data: Mutex<ChunkData>,
}

struct ChunkData {
    place: ChunkPlace,
    /// Granules that were not dropped.
    live: usize,
}

enum ChunkPlace {
    /// Shared while it is written to the file.
    Memory(Arc<Box<[u8]>>),
    File,
    Dropped,
}

impl Store {
    pub fn new(limits: &FleeceLimits, file: Option<File>) -> Self {
        let granules = usize::try_from(limits.memory / GRANULE).unwrap_or(usize::MAX);
        Self {
            // One chunk is being filled while another one goes to the file.
            memory_max: granules.max((FLEECE_MEMORY_MIN / GRANULE) as usize),
            file,
            state: Mutex::default(),
            work: Condvar::new(),
            wanted: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in memory, and in the file.
    pub fn bytes(&self) -> (u64, u64) {
        let state = self.lock();
        (state.in_memory as u64 * GRANULE, state.in_file)
    }

    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Reserves memory for so many granules.
    pub fn reserve(&self, granules: usize) -> Room {
        let mut state = self.lock();
        if state.in_memory + state.reserved + granules > self.memory_max {
            return match self.file {
                Some(_) => {
                    state.is_wanted = true;
                    self.wanted.notify_all();
                    Room::Later
                }
                None => Room::Never,
            };
        }
        state.reserved += granules;
        state.has_room();
        Room::Reserved
    }

    /// Gives back what was reserved and not used.
    pub fn unreserve(&self, granules: usize) {
        let mut state = self.lock();
        state.reserved = state.reserved.saturating_sub(granules);
        state.has_room();
    }

    /// Stores a granule for which memory was reserved; forgets it if the store is closed.
    pub fn put(&self, granule: &[u8]) -> Location {
        let mut state = self.lock();
        if state.is_closed {
            return Location(u64::MAX);
        }
        if state.chunks.is_empty() || state.used == CHUNK {
            state.drop_last_if_dead();
            let bytes = state.ready.pop();
            let bytes = bytes.unwrap_or_else(|| vec![0; CHUNK_BYTES as usize].into());
            let data = ChunkData {
                place: ChunkPlace::Memory(Arc::new(bytes)),
                live: 0,
            };
            let data = Mutex::new(data);
            state.chunks.push(Arc::new(Chunk { data }));
            state.used = 0;
            if self.wants_ready(&state) {
                self.work.notify_one();
            }
        }
        state.reserved -= 1;
        state.in_memory += 1;
        let (number, place) = (state.chunks.len() - 1, state.used);
        state.used += 1;
        let chunk = state.chunks[number].clone();
        let mut data = chunk.lock();
        if state.used == CHUNK {
            state.full.push_back(number);
            if self.wants_spill(&state) {
                self.work.notify_one();
            }
        }
        drop(state);
        data.live += 1;
        // It is not full, so that nobody else has it.
        if let ChunkPlace::Memory(bytes) = &mut data.place
            && let Some(bytes) = Arc::get_mut(bytes)
        {
            bytes[place * GRANULE as usize..][..granule.len()].copy_from_slice(granule);
        }
        Location((number * CHUNK + place) as u64)
    }

    /// Copies a granule from its byte `skip` on.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, Location(location): Location, skip: u64, to: &mut [u8]) -> io::Result<()> {
        let (number, place) = (location as usize / CHUNK, location % CHUNK as u64);
        let chunk = self.lock().chunks.get(number).cloned();
        let chunk = chunk.ok_or_else(|| io::Error::other("the backup has ended"))?;
        let at = place * GRANULE + skip;
        let data = chunk.lock();
        match (&data.place, &self.file) {
            (ChunkPlace::Memory(bytes), _) => {
                to.copy_from_slice(&bytes[at as usize..][..to.len()]);
                Ok(())
            }
            (ChunkPlace::File, Some(file)) => {
                drop(data);
                file.read_exact_at(to, number as u64 * CHUNK_BYTES + at)
            }
            _ => Err(io::Error::other("it was dropped")),
        }
    }

    /// Forgets a granule. Its chunk gives its space back when all of its granules were dropped.
    ///
    /// # Errors
    /// The space in the file could not be given back; nothing else is wrong.
    pub fn drop_granule(&self, Location(location): Location) -> io::Result<()> {
        let number = location as usize / CHUNK;
        let mut state = self.lock();
        let Some(chunk) = state.chunks.get(number).cloned() else {
            return Ok(());
        };
        let mut data = chunk.lock();
        data.live -= 1;
        let is_open = number + 1 == state.chunks.len();
        if data.live > 0 || is_open {
            return Ok(());
        }
        match std::mem::replace(&mut data.place, ChunkPlace::Dropped) {
            ChunkPlace::Memory(_) => {
                state.in_memory -= CHUNK;
                state.has_room();
                state.full.retain(|&full| full != number);
                Ok(())
            }
            ChunkPlace::File => {
                state.in_file -= CHUNK_BYTES;
                drop((state, data));
                self.punch(number)
            }
            ChunkPlace::Dropped => Ok(()),
        }
    }

    /// Gives the space of a chunk in the file back.
    fn punch(&self, number: usize) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = number as u64 * CHUNK_BYTES;
        Ok(fallocate(file, hole, at, CHUNK_BYTES)?)
    }

    /// Gives all space in the file back. The store is closed.
    pub fn truncate(&self) {
        if let Some(file) = &self.file {
            // It has no name, and goes with the last descriptor in any case.
            let _ = file.set_len(0);
        }
    }

    fn wants_spill(&self, state: &StoreState) -> bool {
        self.file.is_some() && state.in_memory * 2 > self.memory_max && !state.full.is_empty()
    }

    fn wants_ready(&self, state: &StoreState) -> bool {
        state.ready.is_empty() && state.in_memory < self.memory_max
    }

    /// Has the next chunk ready, and moves full chunks to the file, until the store is closed. Calls `moved` after each that
    /// was moved. It has a thread of its own.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn run(&self, moved: impl Fn()) -> io::Result<()> {
        loop {
            let mut state = self.lock();
            let is_idle = |state: &mut StoreState| {
                !state.is_closed && !self.wants_ready(state) && !self.wants_spill(state)
            };
            let waited = self.work.wait_while(state, is_idle);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.is_closed {
                return Ok(());
            }
            if self.wants_ready(&state) {
                drop(state);
                self.make_ready();
            } else if let Some(number) = state.full.pop_front() {
                drop(state);
                self.spill(number)?;
                moved();
            }
        }
    }

    /// Touches each page of a new chunk.
    fn make_ready(&self) {
        let mut bytes = vec![0; CHUNK_BYTES as usize].into_boxed_slice();
        for byte in bytes.iter_mut().step_by(GRANULE as usize) {
            *byte = std::hint::black_box(0);
        }
        let mut state = self.lock();
        if !state.is_closed {
            state.ready.push(bytes);
        }
    }

    /// Moves a chunk to the file.
    fn spill(&self, number: usize) -> io::Result<()> {
        let (Some(file), Some(chunk)) = (&self.file, self.lock().chunks.get(number).cloned())
        else {
            return Ok(());
        };
        let bytes = match &chunk.lock().place {
            ChunkPlace::Memory(bytes) => bytes.clone(),
            _ => return Ok(()),
        };
        file.write_all_at(&bytes, number as u64 * CHUNK_BYTES)?;
        let mut state = self.lock();
        let mut data = chunk.lock();
        // Otherwise it was dropped meanwhile.
        if let ChunkPlace::Memory(_) = data.place {
            data.place = ChunkPlace::File;
            state.in_memory = state.in_memory.saturating_sub(CHUNK);
            state.in_file += CHUNK_BYTES;
        }
        state.is_wanted = false;
        state.moved += 1;
        if let Ok(bytes) = Arc::try_unwrap(bytes)
            && state.ready.is_empty()
            && !state.is_closed
        {
            state.ready.push(bytes);
        }
        drop(state);
        let was_dropped = matches!(data.place, ChunkPlace::Dropped);
        drop(data);
        if was_dropped {
            self.punch(number)
        } else {
            Ok(())
        }
    }

    /// Ends [`run`](Self::run), and gives the memory back.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        (state.chunks, state.in_memory, state.in_file) = (Vec::new(), 0, 0);
        state.ready.clear();
        state.full.clear();
        self.work.notify_all();
        self.wanted.notify_all();
    }

    /// Waits until somebody has wanted room for this long, and no chunk went to the file meanwhile. Returns false if the
    /// store is closed before.
    pub fn wait_for_hang(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        let mut since: Option<(Instant, u64)> = None;
        while !state.is_closed {
            if !state.is_wanted {
                since = None;
                let waited = self.wanted.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let moved = state.moved;
            let (began, _) = match since {
                Some(since) if since.1 == moved => since,
                _ => *since.insert((Instant::now(), moved)),
            };
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return true;
            }
            let waited = self.wanted.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        false
    }
}

impl Chunk {
    fn lock(&self) -> MutexGuard<'_, ChunkData> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
