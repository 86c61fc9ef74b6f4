//! A file in memory that remembers every write, and what a crash may leave of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use block::FileOffset;
use image::{DataFile, FileRole, OpenFiles, Storage};

use testkit::random::Random;

use super::HostFiles;

/// What a crash leaves whole.
const SECTOR: usize = 512;
/// Bytes of a block of the file system.
const BLOCK: u64 = 4096;

#[derive(Clone, Debug)]
pub enum What {
    Write {
        at: u64,
        bytes: Vec<u8>,
    },
    SetSize(u64),
    Punch {
        at: u64,
        len: u64,
    },
    /// All before it in this file is on stable storage.
    Flushed,
    /// What was written to this file since it was last flushed is lost, or not.
    Forgotten,
    /// A test's own mark.
    Mark(u64),
}

/// To which file something happened.
#[derive(Clone, Debug)]
pub struct Event {
    file: usize,
    pub what: What,
}

#[derive(Default)]
struct ImageState {
    files: Vec<Vec<u8>>,
    events: Vec<Event>,
    record: bool,
    /// Operations until one fails; 0 for never.
    fail_in: u64,
    /// The space of the file system, if it is limited.
    space: Option<Space>,
    /// They are block devices: others set their sizes.
    is_device: bool,
    /// A flush that fails forgets what was written.
    forgets: bool,
    forgotten: bool,
}

/// Blocks of a file system.
struct Space {
    free: u64,
    /// Those in use, by file.
    used: BTreeSet<(usize, u64)>,
    /// A write to a block that is not in use makes all of so many be in use, from a multiple of that in the file.
    together: u64,
}

/// A file in memory. Clones are the same file.
#[derive(Clone)]
pub struct Memory {
    state: Arc<Mutex<ImageState>>,
    file: usize,
}

impl Memory {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self::several(vec![bytes]).remove(0)
    }

    /// Files whose events are remembered in one order.
    pub fn several(files: Vec<Vec<u8>>) -> Vec<Self> {
        let numbers = 0..files.len();
        let state = ImageState {
            files,
            ..ImageState::default()
        };
        let state = Arc::new(Mutex::new(state));
        let memory = |file| Self {
            state: state.clone(),
            file,
        };
        numbers.map(memory).collect()
    }

    fn state(&self) -> MutexGuard<'_, ImageState> {
        self.state.lock().unwrap()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.state().files[self.file].clone()
    }

    /// From now on, every change is remembered.
    pub fn record(&self) {
        self.state().record = true;
    }

    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    pub fn mark(&self, number: u64) {
        self.state().event(self.file, What::Mark(number));
    }

    /// The n-th write or flush from now on fails; 0 lets all succeed.
    pub fn fail_in(&self, n: u64) {
        self.state().fail_in = n;
    }

    /// From now on, it is a file on a file system that has this many blocks left. What is added to it are holes.
    pub fn limit_space(&self, blocks: u64) {
        let mut state = self.state();
        let used = (0..).zip(&state.files).flat_map(|(file, bytes)| {
            let blocks = 0..(bytes.len() as u64).div_ceil(BLOCK);
            blocks.map(move |block| (file, block))
        });
        let used = used.collect();
        state.space = Some(Space {
            free: blocks,
            used,
            together: 1,
        });
    }

    /// The same, where the file has holes instead of blocks of zeroes.
    pub fn limit_space_with_holes(&self, blocks: u64) {
        self.limit_space(blocks);
        let mut state = self.state();
        let state = &mut *state;
        let is_hole = |block: &u64| {
            let bytes = &state.files[self.file];
            let (from, to) = (block * BLOCK, (block + 1) * BLOCK);
            let to = bytes.len().min(to as usize);
            bytes[from as usize..to].iter().all(|&byte| byte == 0)
        };
        if let Some(space) = &mut state.space {
            (space.used).retain(|(file, block)| *file != self.file || !is_hole(block));
        }
    }

    /// From now on, the file system whose space is limited uses so many blocks together, as XFS does by an extent size hint.
    pub fn use_together(&self, blocks: u64) {
        self.state().space.as_mut().expect("it is limited").together = blocks;
    }

    /// Leaves this many free blocks on a file system whose space is limited.
    pub fn leave_space(&self, blocks: u64) {
        self.state().space.as_mut().expect("it is limited").free = blocks;
    }

    /// From now on, it is a block device of this size; what is added has other data than zeroes.
    pub fn be_device(&self, bytes: u64) {
        let mut state = self.state();
        state.is_device = true;
        state.files[self.file].resize(bytes as usize, 0xd5);
    }

    /// From now on, it is a file in the page cache: what a failed flush did not write is lost.
    pub fn forget(&self) {
        self.state().forgets = true;
    }

    /// Whether something was lost by that.
    pub fn has_forgotten(&self) -> bool {
        self.state().forgotten
    }
}

impl ImageState {
    fn event(&mut self, file: usize, what: What) {
        if self.record {
            self.events.push(Event { file, what });
        }
    }

    fn use_space(&mut self, file: usize, at: u64, len: u64) -> io::Result<()> {
        let no_space = || io::Error::from_raw_os_error(28);
        if self.is_device && at + len > self.files[file].len() as u64 {
            return Err(no_space());
        }
        let Some(space) = &mut self.space else {
            return Ok(());
        };
        let blocks = at / BLOCK..(at + len).div_ceil(BLOCK);
        let is_new = |block: &u64| !space.used.contains(&(file, *block));
        let (together, end) = (
            space.together,
            (self.files[file].len() as u64).div_ceil(BLOCK),
        );
        let around = |block: u64| {
            let first = block / together * together;
            first..(first + together).min(end.max(block + 1))
        };
        let new = blocks.filter(is_new).flat_map(around).filter(is_new);
        let new: BTreeSet<_> = new.map(|block| (file, block)).collect();
        let left = space.free.checked_sub(new.len() as u64);
        space.free = left.ok_or_else(no_space)?;
        space.used.extend(new);
        Ok(())
    }

    /// Gives back the blocks that are in this range as a whole.
    fn free_space(&mut self, file: usize, at: u64, len: u64) {
        if let Some(space) = &mut self.space {
            let blocks = at.div_ceil(BLOCK)..(at + len) / BLOCK;
            let freed = blocks.filter(|&block| space.used.remove(&(file, block)));
            space.free += freed.count() as u64;
        }
    }

    fn may_fail(&mut self) -> io::Result<()> {
        match self.fail_in {
            0 => Ok(()),
            1 => {
                self.fail_in = 0;
                Err(io::Error::from_raw_os_error(5))
            }
            _ => {
                self.fail_in -= 1;
                Ok(())
            }
        }
    }
}

impl Storage for Memory {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        let state = self.state();
        let bytes = &state.files[self.file];
        let from = usize::try_from(at.0).unwrap_or(usize::MAX).min(bytes.len());
        let n = to.len().min(bytes.len() - from);
        to[..n].copy_from_slice(&bytes[from..from + n]);
        Ok(n)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        state.may_fail()?;
        // As a file system does: a write ends where there is no space any more, and the next one fails.
        let (mut done, end) = (0, from.len() as u64);
        while done < end {
            let next = (at.0 + done + 1).next_multiple_of(BLOCK) - at.0;
            if let Err(error) = state.use_space(self.file, at.0 + done, next.min(end) - done) {
                let part = &from[..done as usize];
                write(&mut state.files[self.file], at.0, part);
                let bytes = part.to_vec();
                state.event(self.file, What::Write { at: at.0, bytes });
                return Err(error);
            }
            done = next.min(end);
        }
        write(&mut state.files[self.file], at.0, from);
        state.event(
            self.file,
            What::Write {
                at: at.0,
                bytes: from.to_vec(),
            },
        );
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        if let Err(e) = state.may_fail() {
            if state.forgets {
                state.forgotten = true;
                state.event(self.file, What::Forgotten);
            }
            return Err(e);
        }
        state.event(self.file, What::Flushed);
        Ok(())
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        self.state().forgets
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.state().files[self.file].len() as u64)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        let mut state = self.state();
        if state.is_device {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // As a file system with little room: files grow by no more than they need.
        if size > 8 << 20 {
            return Err(io::Error::from_raw_os_error(27));
        }
        state.files[self.file].resize(size as usize, 0);
        state.event(self.file, What::SetSize(size));
        Ok(())
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        let mut state = self.state();
        // As a block device, which accepts no part beyond its end.
        if at.0 + len > state.files[self.file].len() as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        punch(&mut state.files[self.file], at.0, len);
        state.free_space(self.file, at.0, len);
        state.event(self.file, What::Punch { at: at.0, len });
        Ok(())
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// Opens all but the data file as it is.
pub struct DataInMemory<'a>(pub Option<&'a Memory>);

impl OpenFiles for DataInMemory<'_> {
    fn open(&mut self, file: OwnedFd, path: &Path, role: FileRole) -> io::Result<Arc<dyn Storage>> {
        HostFiles.open(file, path, role)
    }

    fn data_file(
        &mut self,
        image: &Path,
        named: Option<&str>,
        write: bool,
    ) -> io::Result<DataFile> {
        let data = HostFiles.data_file(image, named, write)?;
        let Some(memory) = self.0 else {
            return Ok(data);
        };
        Ok(DataFile {
            storage: Arc::new(memory.clone()),
            ..data
        })
    }
}

fn write(bytes: &mut Vec<u8>, at: u64, from: &[u8]) {
    let at = at as usize;
    if bytes.len() < at + from.len() {
        bytes.resize(at + from.len(), 0);
    }
    bytes[at..at + from.len()].copy_from_slice(from);
}

fn punch(bytes: &mut [u8], at: u64, len: u64) {
    let end = bytes.len().min((at + len) as usize);
    bytes[(at as usize).min(end)..end].fill(0);
}

/// What was written, event by event, and what crashes leave.
pub struct Replay {
    /// All that is durable.
    durable: Vec<Vec<u8>>,
    /// What came since, in order.
    loose: Vec<Event>,
}

impl Replay {
    pub fn new(start: Vec<Vec<u8>>) -> Self {
        Self {
            durable: start,
            loose: Vec::new(),
        }
    }

    pub fn event(&mut self, event: &Event, random: &mut Random) {
        match event.what {
            What::Mark(_) => {}
            What::Forgotten => {
                for event in self.loose.extract_if(.., |loose| loose.file == event.file) {
                    apply(&mut self.durable, &event, |_| random.one_in(2));
                }
            }
            What::Flushed => {
                for event in self.loose.extract_if(.., |loose| loose.file == event.file) {
                    apply(&mut self.durable, &event, |_| true);
                }
            }
            _ => self.loose.push(event.clone()),
        }
    }

    /// The files as a crash now may leave them: of each sector, any state that it has had since the last
    /// flush. (A sector may be older than one that was written before it.)
    pub fn crash(&self, random: &mut Random) -> Vec<Vec<u8>> {
        let mut bytes = self.durable.clone();
        // Which of its states each sector stays at: that of all, none, or the n-th write.
        let style = random.below(4);
        let whole = random.below(self.loose.len() as u64 + 1);
        let mut last: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for (number, event) in (0_u64..).zip(&self.loose) {
            let mut keeps = |sector: u64| match style {
                // A prefix of all writes.
                0 => number < whole,
                // Each write as a whole, or not at all.
                1 => last.entry((0, number)).or_insert_with(|| random.below(2)) == &0,
                // All but one in eight sectors.
                2 => !random.one_in(8),
                // Each sector stops at some time.
                _ => {
                    let events = self.loose.len() as u64;
                    let stop = last
                        .entry((event.file, sector))
                        .or_insert_with(|| random.below(events + 1));
                    number < *stop
                }
            };
            apply(&mut bytes, event, &mut keeps);
        }
        bytes
    }
}

fn apply(files: &mut [Vec<u8>], event: &Event, mut keeps: impl FnMut(u64) -> bool) {
    let bytes = &mut files[event.file];
    match &event.what {
        What::Write { at, bytes: from } => {
            let mut done = 0;
            while done < from.len() {
                let at = at + done as u64;
                let n = (SECTOR - at as usize % SECTOR).min(from.len() - done);
                if keeps(at / SECTOR as u64) {
                    write(bytes, at, &from[done..done + n]);
                }
                done += n;
            }
        }
        What::SetSize(size) => {
            // The size goes with what was written behind it, or by itself.
            if keeps(u64::MAX) {
                bytes.resize(*size as usize, 0);
            }
        }
        What::Punch { at, len } => {
            for sector in (*at..at + len).step_by(SECTOR) {
                if keeps(sector / SECTOR as u64) {
                    punch(bytes, sector, SECTOR as u64);
                }
            }
        }
        What::Flushed | What::Forgotten | What::Mark(_) => {}
    }
}
