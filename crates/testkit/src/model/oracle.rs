//! What a disk may contain: the set of contents that each sector may have.
//!
//! A content is identified by its digest. Several contents are allowed if requests overlap in time, if one has failed,
//! if one was in flight at a kill, and after a discard. The oracle also remembers what a power cut may bring back: each
//! content that was superseded after the last flush was sent. A kill may bring back only what was there before the content
//! of a request that has failed.

use std::collections::BTreeMap;
use std::ops::Range;

pub const SECTOR: usize = 512;

/// A request that has not been answered.
const UNDER_WAY: u64 = u64::MAX;

/// A content that a sector may have.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    digest: u64,
    /// The event at which the content was known to be there, or [`UNDER_WAY`].
    since: u64,
    /// The request that wrote it.
    request: u64,
    /// That has failed, and nothing has replaced its content since: it may be there only until a kill.
    has_failed: bool,
}

/// How a request that changes a range has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing is left of what was there when it was sent.
    Replaced,
    /// What was there stays, or not.
    Discarded,
    /// It may have been done in part.
    Failed,
}

/// A range of the disk that is used; the rest stays as it was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first sector on the disk.
    pub sector: u64,
    /// The index of the first sector in the oracle.
    pub first: usize,
    /// The number of sectors.
    pub sectors: usize,
}

/// The contents that a disk may have.
#[derive(Clone)]
pub struct Oracle {
    /// The size of the disk in bytes.
    pub size: u64,
    pub windows: Vec<Window>,
    sectors: Vec<Vec<Allowed>>,
    /// For each sector, the contents that a power cut may bring back, and the events that superseded them.
    past: BTreeMap<usize, Vec<(u64, u64)>>,
    /// For each sector whose content is that of a failed request, the contents that a kill may bring back, and the events at
    /// which that was seen.
    under_failed: BTreeMap<usize, Vec<(u64, u64)>>,
    /// For each sector of which a write may be there in part: the write, and how many bytes of it come first.
    torn: BTreeMap<usize, Vec<(u64, usize)>>,
    event: u64,
    /// There is no write cache: a write is durable when it has been answered.
    pub write_through: bool,
}

/// A digest of a sector's content; 0 for zeroes.
pub fn digest(sector: &[u8]) -> u64 {
    let words = sector.chunks_exact(8);
    words.fold(0, |all, word| {
        let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        (all ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    })
}

/// The content that a write puts into a sector. It differs from every other write and every other sector.
pub fn content(mark: u64, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match i {
            0 => mark,
            1 => sector,
            _ => (mark ^ sector << 32 ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A description of the content of a sector that was read.
fn described(bytes: &[u8]) -> String {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let (mark, sector) = (word(0), word(8));
    match () {
        () if bytes.iter().all(|b| *b == 0) => "zeroes".into(),
        () if bytes[..SECTOR] == content(mark, sector) => {
            format!("write {mark:#x} of sector {sector}")
        }
        () if bytes.iter().all(|b| *b == bytes[0]) => format!("the byte {:#x}", bytes[0]),
        () => {
            let words: Vec<String> = (0..SECTOR)
                .step_by(8)
                .map(|at| format!("{:x}", word(at)))
                .collect();
            format!("these words: {}", words.join(" "))
        }
    }
}

impl Oracle {
    /// An oracle with these windows of sectors `(first on the disk, count)`, all zeroes.
    pub fn new(size: u64, windows: &[(u64, usize)]) -> Self {
        let mut oracle = Self {
            size,
            windows: Vec::new(),
            sectors: Vec::new(),
            past: BTreeMap::new(),
            under_failed: BTreeMap::new(),
            torn: BTreeMap::new(),
            event: 1,
            write_through: false,
        };
        for &(sector, sectors) in windows {
            oracle.add_window(sector, sectors);
        }
        oracle
    }

    pub fn add_window(&mut self, sector: u64, sectors: usize) {
        self.windows.push(Window {
            sector,
            first: self.sectors.len(),
            sectors,
        });
        let zeroes = Allowed {
            digest: 0,
            since: 0,
            request: 0,
            has_failed: false,
        };
        let end = self.sectors.len() + sectors;
        self.sectors.resize(end, vec![zeroes]);
    }

    fn sector_at(&self, index: usize) -> u64 {
        let found = self
            .windows
            .iter()
            .find(|w| (w.first..w.first + w.sectors).contains(&index));
        found.map_or(0, |w| w.sector + (index - w.first) as u64)
    }

    fn next(&mut self) -> u64 {
        self.event += 1;
        self.event
    }

    /// The latest event: requests that are sent now come after it.
    pub fn now(&self) -> u64 {
        self.event
    }

    /// Records that a request is sent which will change a range to these digests.
    pub fn sent(&mut self, range: Range<usize>, request: u64, digests: &[u64]) -> u64 {
        for (allowed, &digest) in self.sectors[range].iter_mut().zip(digests) {
            allowed.push(Allowed {
                digest,
                since: UNDER_WAY,
                request,
                has_failed: false,
            });
        }
        self.next()
    }

    /// Records the answer to a request. If it has replaced everything that was there when it was sent, no older content is
    /// allowed any more.
    pub fn answered(&mut self, range: Range<usize>, request: u64, sent: u64, ending: Ending) {
        let now = self.next();
        for index in range {
            let allowed = &mut self.sectors[index];
            for one in allowed.iter_mut().filter(|a| a.request == request) {
                one.has_failed = ending == Ending::Failed;
                if one.since == UNDER_WAY {
                    one.since = now;
                }
            }
            if ending == Ending::Replaced {
                self.under_failed.remove(&index);
                self.torn.remove(&index);
                let older = allowed.extract_if(.., |a| a.since < sent);
                let older: Vec<u64> = older.map(|a| a.digest).collect();
                if !self.write_through && !older.is_empty() {
                    let past = self.past.entry(index).or_default();
                    past.extend(older.into_iter().map(|digest| (digest, now)));
                }
            }
            unite(allowed);
        }
    }

    /// Records the successful answer to a flush.
    pub fn flushed(&mut self, sent: u64) {
        for before in [&mut self.past, &mut self.under_failed] {
            before.retain(|_, contents| {
                contents.retain(|(_, superseded)| *superseded > sent);
                !contents.is_empty()
            });
        }
    }

    /// Records that the current content is durable.
    pub fn durable(&mut self) {
        self.past.clear();
        self.under_failed.clear();
    }

    /// Records that a kill may have ended a write in the middle of a sector, after this many bytes of the sector.
    pub fn may_be_torn(&mut self, index: usize, request: u64, bytes: usize) {
        self.torn.entry(index).or_default().push((request, bytes));
    }

    /// Whether a sector has the beginning of a write that a kill may have ended there, and after it what it may have otherwise.
    fn is_torn(&self, index: usize, found: &[u8]) -> bool {
        let sector = self.sector_at(index);
        let torn = self.torn.get(&index).into_iter().flatten();
        let mut allowed = torn.flat_map(|torn| self.sectors[index].iter().map(move |a| (torn, a)));
        allowed.any(|(&(request, bytes), under)| {
            let rest = &found[bytes..];
            found[..bytes] == content(request, sector)[..bytes]
                && match (under.digest, under.request) {
                    (0, _) => rest.iter().all(|byte| *byte == 0),
                    // Only its digest is known.
                    (_, 0) => true,
                    (_, request) => rest == &content(request, sector)[bytes..],
                }
        })
    }

    /// Records a kill: in each sector, a request in flight is done or not, and so is one that has failed.
    pub fn killed(&mut self) {
        let now = self.next();
        for (index, before) in std::mem::take(&mut self.under_failed) {
            let before = before.into_iter().map(|(digest, _)| Allowed {
                digest,
                since: now,
                request: 0,
                has_failed: false,
            });
            self.sectors[index].extend(before);
        }
        for allowed in &mut self.sectors {
            // What is seen from now on is in the file.
            allowed.iter_mut().for_each(|one| one.has_failed = false);
            for one in allowed.iter_mut().filter(|a| a.since == UNDER_WAY) {
                one.since = now;
            }
            unite(allowed);
        }
    }

    /// Records a power cut: in each sector, data that was not flushed is also there or not.
    pub fn power_cut(&mut self) {
        self.killed();
        let now = self.next();
        for (index, past) in std::mem::take(&mut self.past) {
            let allowed = &mut self.sectors[index];
            allowed.extend(past.into_iter().map(|(digest, _)| Allowed {
                digest,
                since: now,
                request: 0,
                has_failed: false,
            }));
            unite(allowed);
        }
    }

    /// The oracle for a copy that is made now, with nothing in flight. If the data is not `flushed`, each sector of the
    /// copy may contain what a power cut would leave.
    pub fn copied(&self, flushed: bool) -> Self {
        let mut copy = self.clone();
        if flushed {
            copy.durable();
        }
        copy.power_cut();
        copy
    }

    /// Records that another program has written a range, durably.
    pub fn set(&mut self, range: Range<usize>, digests: &[u64]) {
        let now = self.next();
        for (index, &digest) in range.zip(digests) {
            self.past.remove(&index);
            self.under_failed.remove(&index);
            self.torn.remove(&index);
            self.sectors[index] = vec![Allowed {
                digest,
                since: now,
                request: 0,
                has_failed: false,
            }];
        }
    }

    /// Checks a range that was read while no request was in flight on it. From then on, only the content that was seen
    /// is allowed.
    ///
    /// # Errors
    /// A description of what was found, and of what is allowed.
    pub fn saw(&mut self, range: Range<usize>, bytes: &[u8]) -> Result<(), String> {
        let now = self.next();
        let mut wrong = Vec::new();
        for (index, found) in range.zip(bytes.chunks(SECTOR)) {
            let is = digest(found);
            let is_torn = self.is_torn(index, found);
            let allowed = &mut self.sectors[index];
            if is_torn {
                allowed.push(Allowed {
                    digest: is,
                    since: now,
                    request: 0,
                    has_failed: false,
                });
            }
            if !allowed.iter().any(|a| a.digest == is) {
                wrong.push((index, found));
                continue;
            }
            self.torn.remove(&index);
            let others = allowed.extract_if(.., |a| a.digest != is);
            let others: Vec<_> = others.map(|a| (a.digest, now)).collect();
            if others.is_empty() {
                continue;
            }
            if allowed.iter().all(|a| a.has_failed) {
                let before = self.under_failed.entry(index).or_default();
                before.extend(&others);
            }
            if !self.write_through {
                self.past.entry(index).or_default().extend(others);
            }
        }
        let Some(&(index, found)) = wrong.first() else {
            return Ok(());
        };
        let (sector, bytes) = (self.sector_at(index), found);
        let all: Vec<_> = self.sectors[index].clone();
        let may: Vec<_> = all
            .iter()
            .map(|a| match (a.digest, a.request) {
                (0, _) => "zeroes".to_owned(),
                (_, 0) => format!("what was there ({:x})", a.digest),
                (_, request) => format!("write {request:#x}"),
            })
            .collect();
        Err(format!(
            "{} sectors are wrong, the first of them sector {sector}: it holds {}, and may hold {}",
            wrong.len(),
            described(bytes),
            may.join(" or ")
        ))
    }
}

/// Keeps each content once, with its latest event.
fn unite(allowed: &mut Vec<Allowed>) {
    if allowed.len() < 2 {
        return;
    }
    // A content in flight is distinct from the same content that is there: the write may still happen.
    allowed.sort_by_key(|a| (a.since == UNDER_WAY, a.digest, std::cmp::Reverse(a.since)));
    allowed.dedup_by(|b, a| a.digest == b.digest && b.since != UNDER_WAY && a.since != UNDER_WAY);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oracle() -> Oracle {
        Oracle::new(4096, &[(0, 8)])
    }

    fn write(oracle: &mut Oracle, mark: u64) {
        let digests = [digest(&content(mark, 0))];
        let sent = oracle.sent(0..1, mark, &digests);
        oracle.answered(0..1, mark, sent, Ending::Replaced);
    }

    fn may_be(oracle: &Oracle, mark: u64) -> bool {
        oracle.clone().saw(0..1, &content(mark, 0)).is_ok()
    }

    #[test]
    fn what_a_failed_request_has_left_is_there_until_a_kill() {
        let failed = || {
            let mut oracle = oracle();
            write(&mut oracle, 1);
            let sent = oracle.sent(0..1, 2, &[digest(&content(2, 0))]);
            oracle.answered(0..1, 2, sent, Ending::Failed);
            oracle.saw(0..1, &content(2, 0)).unwrap();
            oracle
        };
        let mut oracle = failed();
        assert!(may_be(&oracle, 2) && !may_be(&oracle, 1));
        oracle.killed();
        assert!(may_be(&oracle, 2) && may_be(&oracle, 1));
        // What is seen then stays.
        oracle.saw(0..1, &content(1, 0)).unwrap();
        oracle.killed();
        assert!(may_be(&oracle, 1) && !may_be(&oracle, 2));
        // A flush keeps it, and so does the answer to a later request.
        let mut oracle = failed();
        let sent = oracle.now();
        oracle.flushed(sent);
        oracle.killed();
        assert!(may_be(&oracle, 2) && !may_be(&oracle, 1));
        let mut oracle = failed();
        write(&mut oracle, 3);
        oracle.killed();
        assert!(may_be(&oracle, 3) && !may_be(&oracle, 1) && !may_be(&oracle, 2));
    }

    #[test]
    fn kill_loses_nothing_and_power_cut_only_unflushed_writes() {
        let mut oracle = oracle();
        write(&mut oracle, 1);
        let sent = oracle.now();
        oracle.flushed(sent);
        write(&mut oracle, 2);
        write(&mut oracle, 3);
        oracle.killed();
        assert!(may_be(&oracle, 3) && !may_be(&oracle, 2) && !may_be(&oracle, 1));
        oracle.power_cut();
        assert!(may_be(&oracle, 3) && may_be(&oracle, 2) && may_be(&oracle, 1));
        assert!(oracle.saw(0..1, &[0; SECTOR]).is_err());
    }

    #[test]
    fn concurrent_writes_leave_either() {
        let mut oracle = oracle();
        let sent = [1, 2].map(|mark| oracle.sent(0..1, mark, &[digest(&content(mark, 0))]));
        oracle.answered(0..1, 1, sent[0], Ending::Replaced);
        oracle.answered(0..1, 2, sent[1], Ending::Replaced);
        assert!(may_be(&oracle, 1) && may_be(&oracle, 2));
        assert!(oracle.saw(0..1, &content(1, 0)).is_ok());
        assert!(!may_be(&oracle, 2));
        write(&mut oracle, 3);
        assert!(!may_be(&oracle, 1));
    }

    #[test]
    fn write_in_flight_may_be_torn_only_where_that_was_recorded() {
        let mut oracle = oracle();
        write(&mut oracle, 1);
        oracle.sent(0..1, 2, &[digest(&content(2, 0))]);
        oracle.killed();
        let torn = |at: usize| [&content(2, 0)[..at], &content(1, 0)[at..]].concat();
        let sees = |oracle: &Oracle, bytes: &[u8]| oracle.clone().saw(0..1, bytes).is_ok();
        assert!(!sees(&oracle, &torn(504)));
        oracle.may_be_torn(0, 2, 504);
        assert!(sees(&oracle, &torn(504)) && !sees(&oracle, &torn(8)));
        assert!(may_be(&oracle, 1) && may_be(&oracle, 2) && !may_be(&oracle, 3));
        oracle.saw(0..1, &torn(504)).unwrap();
        assert!(!may_be(&oracle, 1) && !may_be(&oracle, 2));
        // The next write replaces it.
        write(&mut oracle, 4);
        assert!(may_be(&oracle, 4) && !sees(&oracle, &torn(504)));
    }

    #[test]
    fn write_in_flight_may_or_may_not_be_stored() {
        let mut oracle = oracle();
        write(&mut oracle, 1);
        oracle.sent(0..1, 2, &[digest(&content(2, 0))]);
        oracle.killed();
        assert!(may_be(&oracle, 1) && may_be(&oracle, 2));
    }
}
