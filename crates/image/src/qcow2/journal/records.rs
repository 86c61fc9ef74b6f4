//! The format of a journal's file: two slots, of which the newer one says where the records begin, and the records
//! after them. All numbers are little-endian.
//!
//! | slot, 76 bytes | | record | |
//! |---|---|---|---|
//! | 0 | magic | 0 | bytes from offset 8 on |
//! | 8 | sequence: the slot with the higher one is newer | 4 | CRC-32 |
//! | 16 | session | 8 | generation of the image |
//! | 24 | generation of the image | 16 | changes of 25 bytes each |
//! | 32 | where the records begin | | |
//! | 40 | identity of the image's file | | |
//! | 72 | CRC-32 | | |
//!
//! A record's checksum also covers its position and the session, so a record of an earlier session at the same
//! position is invalid. The first invalid or incomplete record ends the journal.
//!
//! A process that continues with an image writes its first slot over the older one. Only when the image has its generation, it
//! writes the other slot, and then records over those of the process before it. So a kill in between leaves the journal that
//! belongs to the image.
//!
//! Versions 1 and 2 of the format are read but not written. Version 1 has no generation in its records. Only from
//! version 3 on is the image marked "dirty" as well. Slots of versions 4 to 6 are those of version 3 that also say
//! which [writes were lost](Slot::lost): 1 more for [`Lost::here`], 2 more for [`Lost::elsewhere`].

use std::cmp::Reverse;
use std::io;

use block::FileOffset;
use flate2::Crc;

use crate::qcow2::types::{BlockIndex, GuestCluster, HostCluster, HostOffset, L1Index, Run};
use crate::storage::{Storage, read_padded};

/// Bytes of records that are read at most. The last record may exceed the size at which a journal is flushed.
pub const READ_MAX: u64 = 64 << 20;

/// The offset of the first record.
pub const RECORDS_AT: FileOffset = FileOffset(4096);

const SLOT: u64 = 128;
const SLOT_BYTES: usize = 76;
/// The last byte is the version, as a digit.
const MAGIC: u64 = u64::from_be_bytes(*b"ringdkJ0");
const VERSION: u64 = 3;
/// The last, with both kinds of [`Lost`].
const VERSION_MAX: u64 = 6;

/// The length and checksum at the start of a record, in bytes.
const HEAD: usize = 8;
const GENERATION: usize = 8;
const CHANGE: usize = 25;

/// The length of the shortest record in bytes.
pub const RECORD_MIN: u64 = (HEAD + GENERATION + CHANGE) as u64;

/// A change to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The words of the L2 entry of a cluster of the disk.
    Entry {
        cluster: GuestCluster,
        words: [u64; 2],
    },
    /// An entry of the L1 table.
    Table { index: L1Index, word: u64 },
    /// The refcount of a contiguous run of clusters.
    Refcount { run: Run, refcount: u64 },
    /// A new refcount block, and where it is.
    Block { number: BlockIndex, at: HostOffset },
}

impl Change {
    /// Whether something differs with it. The first cluster, of the header, is always counted once: see
    /// [`Qcow2::outdate_copies`](crate::Qcow2).
    pub fn changes_anything(&self) -> bool {
        let header = Run::one(HostCluster::new(0));
        !matches!(self, Self::Refcount { run, .. } if *run == header)
    }
}

/// Changes that are not in the journal yet; collected only while `on`.
#[derive(Default)]
pub struct Changes {
    pub on: bool,
    changes: Vec<Change>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    pub fn clear(&mut self) {
        self.changes.clear();
    }

    pub fn push(&mut self, change: Change) {
        if !self.on {
            return;
        }
        if let Change::Refcount { run, refcount } = change
            && let Some(Change::Refcount {
                run: before,
                refcount: same,
            }) = self.changes.last_mut()
            && *same == refcount
            && before.end() == run.first
        {
            before.clusters += run.clusters;
            return;
        }
        self.changes.push(change);
    }

    /// Drops the changes about refcount blocks from `from` on, which count the clusters from `from_cluster` on.
    /// These blocks were made for a larger table that was never adopted, and the next larger table may have them
    /// elsewhere.
    pub fn forget_blocks(&mut self, from: BlockIndex, from_cluster: HostCluster) {
        self.changes.retain_mut(|change| match change {
            Change::Block { number, .. } => *number < from,
            Change::Refcount { run, .. } => {
                *run = Run::between(run.first, run.end().min(from_cluster).max(run.first));
                run.clusters > 0
            }
            Change::Entry { .. } | Change::Table { .. } => true,
        });
    }
}

/// Which acknowledged changes an image lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Those of the journal that was here: a guest that was served on this host and goes on relies on them.
    pub here: bool,
    /// Those of a journal that was not here: any guest that goes on may rely on them, unless the image was complete since.
    pub elsewhere: bool,
}

impl Lost {
    pub fn any(self) -> bool {
        self.here || self.elsewhere
    }
}

/// What is true of the journal as a whole.
pub struct Slot {
    pub sequence: u64,
    pub session: u64,
    pub generation: u64,
    /// Where the records that no flush has made unnecessary begin.
    pub start: FileOffset,
    pub identity: [u8; 32],
    version: u64,
}

impl Slot {
    pub fn new(
        sequence: u64,
        session: u64,
        generation: u64,
        start: FileOffset,
        identity: [u8; 32],
    ) -> Self {
        Self {
            sequence,
            session,
            generation,
            start,
            identity,
            version: VERSION,
        }
    }

    /// The one that takes its place: it is written over the other of the two.
    pub fn next(self) -> Self {
        Self {
            sequence: self.sequence.saturating_add(1),
            version: self.version.max(VERSION),
            ..self
        }
    }

    /// The slot with another [`lost`](Self::lost).
    pub fn with_lost(self, Lost { here, elsewhere }: Lost) -> Self {
        let version = VERSION + u64::from(here) + 2 * u64::from(elsewhere);
        Self { version, ..self }
    }

    /// Which acknowledged changes were lost, whatever the image says.
    pub fn lost(&self) -> Lost {
        let flags = self.version.saturating_sub(VERSION);
        Lost {
            here: flags & 1 != 0,
            elsewhere: flags & 2 != 0,
        }
    }

    /// Writes the slot over the older one of the two.
    pub fn write(&self, journal: &dyn Storage) -> io::Result<()> {
        let mut slot = Vec::with_capacity(SLOT_BYTES);
        for word in [
            MAGIC + self.version,
            self.sequence,
            self.session,
            self.generation,
            self.start.0,
        ] {
            slot.extend(word.to_le_bytes());
        }
        slot.extend(self.identity);
        slot.extend(checksum(&[&slot]).to_le_bytes());
        journal.write_at(FileOffset(self.sequence % 2 * SLOT), &slot)
    }

    /// The valid ones of the two slots, the newer one first.
    pub fn read(journal: &dyn Storage) -> io::Result<Vec<Self>> {
        let mut slots = [0; 2 * SLOT as usize];
        read_padded(journal, FileOffset(0), &mut slots)?;
        let slots = slots.chunks_exact(SLOT as usize);
        let mut slots: Vec<_> = slots.filter_map(Self::parse).collect();
        slots.sort_by_key(|slot| Reverse(slot.sequence));
        Ok(slots)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (fields, sum) = bytes.get(..SLOT_BYTES)?.split_at(SLOT_BYTES - 4);
        let word = |i: usize| le64(fields, 8 * i);
        let version = word(0).wrapping_sub(MAGIC);
        let sound =
            (1..=VERSION_MAX).contains(&version) && sum == checksum(&[fields]).to_le_bytes();
        let slot = Self {
            sequence: word(1),
            session: word(2),
            generation: word(3),
            start: FileOffset(word(4)),
            identity: fields[40..72].try_into().ok()?,
            version,
        };
        (sound && slot.start >= RECORDS_AT).then_some(slot)
    }

    /// Whether an image that says that it has this journal is also dirty.
    pub fn image_is_dirty(&self) -> bool {
        self.version >= 3
    }

    /// The changes in the records before the first invalid one, the generation of the last of these records, and the bytes that
    /// they have.
    pub fn changes(&self, records: &[u8]) -> (Vec<Change>, u64, usize) {
        let mut changes = Vec::new();
        let mut generation = self.generation;
        let before = if self.version == 1 { 0 } else { GENERATION };
        let mut at = 0;
        while let Some(head) = records.get(at..at + HEAD) {
            let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let end = (at + HEAD).saturating_add(len);
            let Some(body) = records.get(at + HEAD..end) else {
                break;
            };
            let sum = record_checksum(head, body, self.start + at as u64, self.session);
            let these = body.get(before..).unwrap_or_default();
            let whole = !these.is_empty() && these.len().is_multiple_of(CHANGE);
            if !whole || head[4..] != sum.to_le_bytes() {
                break;
            }
            let these = these.chunks_exact(CHANGE).map(get);
            let Some(these) = these.collect::<Option<Vec<_>>>() else {
                break;
            };
            changes.extend(these);
            if before > 0 {
                generation = le64(body, 0);
            }
            at = end;
        }
        (changes, generation, at)
    }
}

/// Moves all changes from the lists into one record, for position `at` in the journal.
pub fn record(
    bytes: &mut Vec<u8>,
    lists: [&mut Changes; 2],
    generation: u64,
    at: FileOffset,
    session: u64,
) {
    bytes.clear();
    bytes.resize(HEAD, 0);
    bytes.extend(generation.to_le_bytes());
    for list in lists {
        for change in list.changes.drain(..) {
            put(bytes, change);
        }
    }
    let len = (bytes.len() - HEAD) as u32;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    let (head, body) = bytes.split_at(HEAD);
    let sum = record_checksum(head, body, at, session);
    bytes[4..HEAD].copy_from_slice(&sum.to_le_bytes());
}

fn record_checksum(head: &[u8], body: &[u8], at: FileOffset, session: u64) -> u32 {
    checksum(&[
        &head[..4],
        &at.0.to_le_bytes(),
        &session.to_le_bytes(),
        body,
    ])
}

fn checksum(parts: &[&[u8]]) -> u32 {
    let mut crc = Crc::new();
    parts.iter().for_each(|part| crc.update(part));
    crc.sum()
}

fn put(record: &mut Vec<u8>, change: Change) {
    let (kind, words) = match change {
        Change::Entry { cluster, words } => (1, [cluster.number(), words[0], words[1]]),
        Change::Table { index, word } => (2, [index.number(), word, 0]),
        Change::Refcount { run, refcount } => (3, [run.first.number(), run.clusters, refcount]),
        Change::Block { number, at } => (4, [number.number(), at.bytes(), 0]),
    };
    record.push(kind);
    words
        .iter()
        .for_each(|word| record.extend(word.to_le_bytes()));
}

fn get(bytes: &[u8]) -> Option<Change> {
    let [a, b, c] = [1, 9, 17].map(|at| le64(bytes, at));
    Some(match bytes.first()? {
        1 => Change::Entry {
            cluster: GuestCluster::new(a),
            words: [b, c],
        },
        2 => Change::Table {
            index: L1Index::new(a),
            word: b,
        },
        3 => Change::Refcount {
            run: Run {
                first: HostCluster::new(a),
                clusters: b,
            },
            refcount: c,
        },
        4 => Change::Block {
            number: BlockIndex::new(a),
            at: HostOffset::new(b),
        },
        _ => return None,
    })
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}
