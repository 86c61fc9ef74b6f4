//! What a disk may hold: for every sector, each content that is allowed.
//!
//! A content is known by its digest. Several are allowed where requests overlap in time, where one has failed, where one
//! was under way at a kill, and for what was discarded. The oracle also remembers what a power cut may bring
//! back: each content that was superseded after the last flush was sent.

use std::collections::BTreeMap;
use std::ops::Range;

pub const SECTOR: usize = 512;

/// A request that has not been answered.
const UNDER_WAY: u64 = u64::MAX;

/// A content that a sector may have.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    digest: u64,
    /// The event by which this was there, or [`UNDER_WAY`].
    since: u64,
    /// The request that wrote it.
    request: u64,
}

/// A stretch of the disk that is used; all else stays as it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its first sector on the disk.
    pub sector: u64,
    /// Its first sector in the oracle.
    pub first: usize,
    /// How many.
    pub sectors: usize,
}

/// The contents that a disk may have.
#[derive(Clone)]
pub struct Oracle {
    /// Bytes of the disk.
    pub size: u64,
    pub windows: Vec<Window>,
    sectors: Vec<Vec<Allowed>>,
    /// By sector: what a power cut may bring back, and the event that superseded it.
    past: BTreeMap<usize, Vec<(u64, u64)>>,
    event: u64,
    /// There is no write cache: what has been answered is durable.
    pub write_through: bool,
}

/// What a sector holds, in short: 0 for zeroes.
pub fn digest(sector: &[u8]) -> u64 {
    let words = sector.chunks_exact(8);
    words.fold(0, |all, word| {
        let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        (all ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    })
}

/// What a write puts into a sector: nothing that any other write, or this one in another sector, does.
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

/// In words, what a sector that was read holds.
fn described(bytes: &[u8]) -> String {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let (mark, sector) = (word(0), word(8));
    match () {
        () if bytes.iter().all(|b| *b == 0) => "zeroes".into(),
        () if bytes[..SECTOR] == content(mark, sector) => {
            format!("write {mark:#x} of sector {sector}")
        }
        () if bytes.iter().all(|b| *b == bytes[0]) => format!("the byte {:#x}", bytes[0]),
        () => format!("{:02x?}...", &bytes[..16]),
    }
}

impl Oracle {
    /// With windows of sectors `(first on the disk, how many)`, all zeroes.
    pub fn new(size: u64, windows: &[(u64, usize)]) -> Self {
        let mut oracle = Self {
            size,
            windows: Vec::new(),
            sectors: Vec::new(),
            past: BTreeMap::new(),
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

    /// The event that happened last: requests that are sent now come after it.
    pub fn now(&self) -> u64 {
        self.event
    }

    /// A request is sent that is to change a range to these digests.
    pub fn sent(&mut self, range: Range<usize>, request: u64, digests: &[u64]) -> u64 {
        for (allowed, &digest) in self.sectors[range].iter_mut().zip(digests) {
            allowed.push(Allowed {
                digest,
                since: UNDER_WAY,
                request,
            });
        }
        self.next()
    }

    /// A request has been answered. If it has `replaced` all that was there when it was sent, nothing older is allowed.
    pub fn answered(&mut self, range: Range<usize>, request: u64, sent: u64, replaced: bool) {
        let now = self.next();
        for index in range {
            let allowed = &mut self.sectors[index];
            for one in allowed.iter_mut().filter(|a| a.request == request) {
                if one.since == UNDER_WAY {
                    one.since = now;
                }
            }
            if replaced {
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

    /// A flush has been answered with success.
    pub fn flushed(&mut self, sent: u64) {
        self.past.retain(|_, past| {
            past.retain(|(_, superseded)| *superseded > sent);
            !past.is_empty()
        });
    }

    /// All that is there is durable.
    pub fn durable(&mut self) {
        self.past.clear();
    }

    /// What was under way is done or not, sector by sector.
    pub fn killed(&mut self) {
        let now = self.next();
        for allowed in &mut self.sectors {
            for one in allowed.iter_mut().filter(|a| a.since == UNDER_WAY) {
                one.since = now;
            }
            unite(allowed);
        }
    }

    /// Also what was not flushed is there or not, sector by sector.
    pub fn power_cut(&mut self) {
        self.killed();
        let now = self.next();
        for (index, past) in std::mem::take(&mut self.past) {
            let allowed = &mut self.sectors[index];
            allowed.extend(past.into_iter().map(|(digest, _)| Allowed {
                digest,
                since: now,
                request: 0,
            }));
            unite(allowed);
        }
    }

    /// The same contents, for a copy that is made now and of which nothing is under way. One of what is not `flushed`
    /// has, in any sector, what a power cut would leave.
    pub fn copied(&self, flushed: bool) -> Self {
        let mut copy = self.clone();
        if flushed {
            copy.durable();
        }
        copy.power_cut();
        copy
    }

    /// Something else writes a range, durably.
    pub fn set(&mut self, range: Range<usize>, digests: &[u64]) {
        let now = self.next();
        for (index, &digest) in range.zip(digests) {
            self.past.remove(&index);
            self.sectors[index] = vec![Allowed {
                digest,
                since: now,
                request: 0,
            }];
        }
    }

    /// A range has been seen, with nothing under way on it: it must be what it may be, and is nothing else from now on.
    ///
    /// # Errors
    /// What is there instead, and what may be.
    pub fn saw(&mut self, range: Range<usize>, bytes: &[u8]) -> Result<(), String> {
        let now = self.next();
        let mut wrong = Vec::new();
        for (index, found) in range.zip(bytes.chunks(SECTOR)) {
            let is = digest(found);
            let allowed = &mut self.sectors[index];
            if !allowed.iter().any(|a| a.digest == is) {
                wrong.push((index, found));
                continue;
            }
            let others = allowed.extract_if(.., |a| a.digest != is);
            let others: Vec<u64> = others.map(|a| a.digest).collect();
            if !others.is_empty() && !self.write_through {
                let past = self.past.entry(index).or_default();
                past.extend(others.into_iter().map(|digest| (digest, now)));
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

/// Each content once, as of the latest event.
fn unite(allowed: &mut Vec<Allowed>) {
    if allowed.len() < 2 {
        return;
    }
    // One under way is another than one that is there: it may come yet.
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
        oracle.answered(0..1, mark, sent, true);
    }

    fn may_be(oracle: &Oracle, mark: u64) -> bool {
        oracle.clone().saw(0..1, &content(mark, 0)).is_ok()
    }

    #[test]
    fn a_kill_takes_nothing_back_and_a_power_cut_only_what_was_not_flushed() {
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
    fn of_two_at_once_either_is_there() {
        let mut oracle = oracle();
        let sent = [1, 2].map(|mark| oracle.sent(0..1, mark, &[digest(&content(mark, 0))]));
        oracle.answered(0..1, 1, sent[0], true);
        oracle.answered(0..1, 2, sent[1], true);
        assert!(may_be(&oracle, 1) && may_be(&oracle, 2));
        assert!(oracle.saw(0..1, &content(1, 0)).is_ok());
        assert!(!may_be(&oracle, 2));
        write(&mut oracle, 3);
        assert!(!may_be(&oracle, 1));
    }

    #[test]
    fn what_is_under_way_may_come_or_not() {
        let mut oracle = oracle();
        write(&mut oracle, 1);
        oracle.sent(0..1, 2, &[digest(&content(2, 0))]);
        oracle.killed();
        assert!(may_be(&oracle, 1) && may_be(&oracle, 2));
    }
}
