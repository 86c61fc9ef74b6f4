//! Power cuts at every step of notes and checkpoints: what is left must show each block that may be on the disk. Of an image, it
//! must also be known that nothing else has written to it.

use std::collections::{BTreeSet, VecDeque};

use block::{DirtyBitmap, noted_ranges};
use testkit::random::{Random, seeds};

use super::*;

const BLOCK_BITS: u32 = 16;
const REGION_BITS: u32 = 20;
/// 24 regions of 16 blocks.
const SIZE: u64 = 24 << REGION_BITS;
const BLOCKS: u64 = SIZE >> BLOCK_BITS;
const CRASH_POINTS_MIN: u64 = 10_000;

type Bytes = [u8; NOTE_BYTES];

/// What a disk is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Raw,
    Image,
}

/// The generations of an image, as its header has them.
struct Header {
    /// That of the header that is durable, if it has one.
    durable: Option<u64>,
    /// Those of headers that were written since the last flush.
    unsynced: Vec<u64>,
    /// The process has given it its own.
    is_begun: bool,
    first: u64,
    present: u64,
    next: u64,
    /// `next` was noted since it was chosen.
    is_next_noted: bool,
    /// A flush after a failure of the journal has written `next`, and has not ended.
    is_renewing: bool,
}

const NONE: u64 = u64::MAX;

impl Header {
    fn new(random: &mut Random) -> Self {
        Self {
            durable: None,
            unsynced: Vec::new(),
            is_begun: false,
            first: NONE,
            present: NONE,
            next: random.below(1 << 38),
            is_next_noted: false,
            is_renewing: false,
        }
    }

    fn last(&self) -> Option<u64> {
        self.unsynced.last().copied().or(self.durable)
    }

    /// A process opens the image after a kill or an upgrade, and makes durable what it finds.
    fn open(&mut self, random: &mut Random) {
        self.flush();
        let found = self.last().unwrap_or(NONE);
        (self.first, self.present, self.is_begun) = (found, found, false);
        (self.next, self.is_next_noted, self.is_renewing) = (random.below(1 << 38), false, false);
    }

    fn flush(&mut self) {
        self.durable = self.last();
        self.unsynced.clear();
    }

    /// The image has the generation that was chosen before.
    fn renew(&mut self, random: &mut Random) {
        self.flush();
        (self.first, self.present) = (self.next, self.next);
        (self.next, self.is_next_noted) = (random.below(1 << 38), false);
        self.is_renewing = false;
    }

    /// What comes with a write: the first one begins, and others may allocate, or come with a flush after a failure of the
    /// journal.
    fn write(&mut self, random: &mut Random) {
        if !self.is_begun {
            self.unsynced.push(self.next);
            self.renew(random);
            self.is_begun = true;
        } else if self.is_renewing {
            self.renew(random);
        } else if random.below(100) == 0 && self.is_next_noted {
            self.unsynced.push(self.next);
            self.is_renewing = true;
            return;
        } else if random.below(2) == 0 {
            self.present = (self.present + 1) % (1 << 38);
            self.unsynced.push(self.present);
        }
        if random.below(20) == 0 {
            self.flush();
        }
    }

    fn tag(&mut self) -> Tag {
        let mut tag = Tag::default();
        let words = [self.first, self.present, self.next];
        for (to, word) in tag.chunks_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        self.is_next_noted = true;
        tag
    }

    /// Each generation that the image may have after a power cut is known.
    fn check(&self, tag: &Tag) {
        let known = Generations::from_bytes(tag);
        for &found in self.durable.iter().chain(&self.unsynced) {
            assert!(known.include(found), "{found} is not one of {known:?}");
        }
    }
}

/// What a power cut leaves, and what may be on the disk then.
struct Storage {
    random: Random,
    header: Option<Header>,
    notes: Bytes,
    /// Notes that were written since the last sync.
    unsynced: Option<Bytes>,
    /// The bits in the record.
    checkpoint: Vec<u8>,
    submitted: BTreeSet<u64>,
    fails_at: Option<u64>,
    writes: u64,
    crash_points: u64,
    /// Blocks that a restart would call dirty, of all crash points.
    dirty: u64,
}

impl Storage {
    /// Cuts the power, and looks at what would be there.
    fn crash(&mut self) {
        if self.fails_at.is_some_and(|at| self.writes >= at) {
            // The notes are invalid from then on, and not used after a crash.
            return;
        }
        let unsynced = self.unsynced.unwrap_or(self.notes);
        let random = &mut self.random;
        let mut outcomes = vec![self.notes, unsynced];
        for _ in 0..2 {
            let pairs = self.notes.iter().zip(&unsynced);
            let mixture: Vec<_> = pairs
                .map(|(&old, &new)| if random.below(2) == 0 { old } else { new })
                .collect();
            let mut mixture: Bytes = mixture.try_into().unwrap();
            // A sector is written whole.
            let tail = if random.below(2) == 0 {
                &self.notes
            } else {
                &unsynced
            };
            mixture[TIME_AT..].copy_from_slice(&tail[TIME_AT..]);
            outcomes.push(mixture);
        }
        for notes in outcomes {
            let Note { regions, tag, .. } = read(&Fixed(notes)).unwrap();
            self.header.iter().for_each(|header| header.check(&tag));
            let bitmap = bitmap();
            bitmap.merge_bytes(0, &self.checkpoint);
            for (at, len) in noted_ranges(&regions, REGION_BITS, SIZE) {
                bitmap.mark(at, len);
            }
            let dirty = dirty(&bitmap);
            let missing: Vec<_> = self.submitted.difference(&dirty).collect();
            assert!(missing.is_empty(), "blocks {missing:?} are missing");
            self.dirty += dirty.len() as u64;
            self.crash_points += 1;
        }
    }
}

struct Fixed(Bytes);

impl NotesFile for Fixed {
    fn write(&self, _: &[u8]) -> io::Result<()> {
        unreachable!("nothing is written after a crash")
    }

    fn sync(&self) -> io::Result<()> {
        unreachable!("nothing is written after a crash")
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0[..bytes.len()]);
        Ok(())
    }
}

#[derive(Clone)]
struct Simulated(Arc<Mutex<Storage>>);

impl Simulated {
    fn lock(&self) -> MutexGuard<'_, Storage> {
        self.0.lock().unwrap()
    }
}

impl NotesFile for Simulated {
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut storage = self.lock();
        storage.writes += 1;
        if storage.fails_at.is_some_and(|at| storage.writes >= at) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        storage.unsynced = Some(bytes.try_into().unwrap());
        storage.crash();
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut storage = self.lock();
        if let Some(bytes) = storage.unsynced.take() {
            storage.notes = bytes;
        }
        storage.crash();
        Ok(())
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.lock().notes[..bytes.len()]);
        Ok(())
    }
}

fn bitmap() -> DirtyBitmap {
    DirtyBitmap::new("b".into(), BLOCK_BITS, SIZE, true, true).unwrap()
}

fn dirty(bitmap: &DirtyBitmap) -> BTreeSet<u64> {
    let mut bits = vec![0; bitmap.bytes().next_multiple_of(8) as usize];
    bitmap.copy_to(0, &mut bits);
    let is_set = |bit: &u64| bits[(bit / 8) as usize] >> (bit % 8) & 1 != 0;
    (0..BLOCKS).filter(is_set).collect()
}

type Process = (Arc<IntentLog<Simulated>>, Arc<WriteIntent>);

/// A process that serves a disk.
struct World {
    storage: Simulated,
    bitmap: DirtyBitmap,
    /// Where most writes go now.
    around: Mutex<u64>,
    /// Requests that may be submitted, and are later.
    delayed: Mutex<VecDeque<u64>>,
    process: Mutex<Option<Process>>,
}

struct SimulatedNotes(Arc<IntentLog<Simulated>>);

impl NoteStore for SimulatedNotes {
    fn note(&self, intent: &WriteIntent) {
        self.0.note(intent);
    }
}

impl Checkpoints for World {
    fn was_slow(&self, _: Duration) {}

    fn checkpoint(&self) -> io::Result<()> {
        let (before, between) = {
            let random = &mut self.storage.lock().random;
            if random.below(8) == 0 || self.bitmap.is_inconsistent() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            (random.below(3), random.below(3))
        };
        (0..before).for_each(|_| self.write());
        let mut bits = vec![0; self.bitmap.bytes().next_multiple_of(8) as usize];
        self.bitmap.copy_to(0, &mut bits);
        (0..between).for_each(|_| self.write());
        let mut storage = self.storage.lock();
        storage.crash();
        storage.checkpoint = bits;
        storage.crash();
        drop(storage);
        (0..between).for_each(|_| self.write());
        Ok(())
    }

    fn failed(&self, _: &io::Error) {
        self.bitmap.set_inconsistent();
    }

    fn tag(&self) -> Tag {
        let header = &mut self.storage.lock().header;
        header.as_mut().map(Header::tag).unwrap_or_default()
    }
}

impl World {
    fn new(seed: u64, kind: Kind) -> Arc<Self> {
        let mut random = Random(seed);
        let mut header = (kind == Kind::Image).then(|| Header::new(&mut random));
        let tag = header.as_mut().map(Header::tag).unwrap_or_default();
        let storage = Storage {
            random,
            header,
            notes: encode(&[0; BITS_BYTES], tag),
            unsynced: None,
            checkpoint: vec![0; (BLOCKS / 8).next_multiple_of(8) as usize],
            submitted: BTreeSet::new(),
            fails_at: None,
            writes: 0,
            crash_points: 0,
            dirty: 0,
        };
        let this = Arc::new(Self {
            storage: Simulated(Arc::new(Mutex::new(storage))),
            bitmap: bitmap(),
            around: Mutex::new(0),
            delayed: Mutex::default(),
            process: Mutex::default(),
        });
        this.start();
        this
    }

    /// Another process continues.
    fn start(self: &Arc<Self>) {
        let mut storage = self.storage.lock();
        let Storage { header, random, .. } = &mut *storage;
        if let Some(header) = header {
            header.open(random);
        }
        drop(storage);
        let owner: Arc<dyn Checkpoints> = self.clone();
        let owner = Arc::downgrade(&owner);
        let log = Arc::new(IntentLog::new(self.storage.clone(), owner));
        let store = Box::new(SimulatedNotes(log.clone()));
        let intent = Arc::new(WriteIntent::new(REGION_BITS, store));
        *self.process.lock().unwrap() = Some((log, intent));
    }

    fn process(&self) -> (Arc<IntentLog<Simulated>>, Arc<WriteIntent>) {
        self.process.lock().unwrap().clone().unwrap()
    }

    /// A request of a guest.
    fn write(&self) {
        let (block, is_delayed) = {
            let random = &mut self.storage.lock().random;
            let near = *self.around.lock().unwrap() + random.below(40);
            let block = if random.below(10) == 0 {
                random.below(BLOCKS)
            } else {
                near % BLOCKS
            };
            (block, random.below(4) == 0)
        };
        let (_, intent) = self.process();
        self.bitmap.mark(block << BLOCK_BITS, 1 << BLOCK_BITS);
        if !intent.is_noted(block << BLOCK_BITS, 1 << BLOCK_BITS) {
            intent.note(block << BLOCK_BITS, 1 << BLOCK_BITS);
        }
        if is_delayed {
            self.delayed.lock().unwrap().push_back(block);
        } else {
            self.submit(block);
        }
    }

    fn submit(&self, block: u64) {
        let mut storage = self.storage.lock();
        let Storage { header, random, .. } = &mut *storage;
        if let Some(header) = header {
            header.write(random);
        }
        storage.submitted.insert(block);
        storage.crash();
    }

    /// Some time in which no region that has a delayed request is looked at twice: a request takes less than a tick.
    fn step(self: &Arc<Self>) {
        let what = self.storage.lock().random.below(40);
        match what {
            0..30 => self.write(),
            30..36 => {
                let delayed = self.delayed.lock().unwrap().pop_front();
                delayed.into_iter().for_each(|block| self.submit(block));
            }
            36 => {
                *self.around.lock().unwrap() = self.storage.lock().random.below(BLOCKS);
            }
            37 | 38 => {
                let (log, intent) = self.process();
                log.tick(&intent);
            }
            _ => {
                // An upgrade, or a kill: the bits and the notes stay. Requests that were not submitted are fetched again.
                self.delayed.lock().unwrap().clear();
                let (log, intent) = self.process();
                if self.storage.lock().random.below(2) == 0 {
                    log.suspend(&intent);
                }
                self.start();
            }
        }
    }
}

#[test]
fn power_cuts_leave_a_superset_of_what_may_be_on_the_disk() {
    for kind in [Kind::Raw, Kind::Image] {
        power_cuts(kind);
    }
}

fn power_cuts(kind: Kind) {
    let (mut points, mut dirty, mut seen) = (0, 0, 0);
    for seed in seeds(5353, 4) {
        let world = World::new(seed, kind);
        for _ in 0..1500 {
            world.step();
        }
        let storage = world.storage.lock();
        println!(
            "{kind:?}, seed {seed}: {} crash points",
            storage.crash_points
        );
        points += storage.crash_points;
        dirty += storage.dirty;
        seen += 1;
        assert!(!world.bitmap.is_inconsistent());
    }
    assert!(points >= CRASH_POINTS_MIN * seen / 4, "{points}");
    // It is not simply all of the disk.
    assert!(dirty < points * BLOCKS, "{dirty} of {}", points * BLOCKS);
}

#[test]
fn regions_that_are_not_written_to_leave_the_notes() {
    let world = World::new(1, Kind::Raw);
    let (log, intent) = world.process();
    intent.note(0, 1);
    assert_eq!(read(&world.storage).unwrap().regions[0], 1);
    // The simulated checkpoint writes to more, or fails, from time to time.
    let is_left = (0..100).any(|_| {
        log.tick(&intent);
        read(&world.storage).unwrap().regions[0] & 1 == 0
    });
    assert!(is_left);
}

/// The state directory is full, or broken: guests continue, and the bitmap is inconsistent.
#[test]
fn failed_notes_cost_the_bitmap_and_no_write() {
    for seed in seeds(77, 10) {
        let world = World::new(seed, Kind::Raw);
        world.storage.lock().fails_at = Some(1 + seed % 20);
        for _ in 0..200 {
            world.step();
        }
        let (log, intent) = world.process();
        intent.note(SIZE - 1, 1);
        log.note(&intent);
        assert!(world.bitmap.is_inconsistent() && intent.is_given_up());
        // Storage that works again gets no notes, which would be valid.
        let writes = world.storage.lock().writes;
        world.storage.lock().fails_at = None;
        log.note(&intent);
        log.tick(&intent);
        assert_eq!(world.storage.lock().writes, writes);
        assert!(intent.is_noted(5 << REGION_BITS, 1));
    }
}
