//! Lookups: where a range of the disk is. They use the L1 table and the cached slices of L2 tables, without locks. If a
//! slice is not in the cache, the lookup says so; [`load`](super::load) loads it, and the range is looked up again.

use std::hint::black_box;
use std::sync::atomic::Ordering::SeqCst;

use block::GuestOffset;

use super::cache::Found;
use super::entry::{Compressed, Entry, Kind, Standard, table_at};
use super::types::{GuestCluster, HostOffset, SliceIndex};
use super::{Pin, Qcow2};

/// Where a range that is to be read begins, and for how many bytes that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// In the file, or the data file if there is one.
    Data {
        at: HostOffset,
        len: u64,
    },
    Zero {
        len: u64,
    },
    Compressed {
        from: Compressed,
        skip: u64,
        len: u64,
    },
    /// In the backing file.
    Hole {
        len: u64,
    },
    /// Unknown until this is loaded.
    Load(Load),
    /// The entry is invalid.
    Damaged {
        len: u64,
    },
}

/// Where a range that is to be written begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteMapping {
    /// In the file, or the data file if there is one.
    InPlace {
        at: HostOffset,
        len: u64,
    },
    /// In clusters that must be allocated.
    Allocate {
        len: u64,
    },
    Load(Load),
    Damaged {
        len: u64,
    },
}

/// Steps of one lookup at most, which cover 2 MiB of disk or more. The rest is looked up after these bytes have
/// been moved, so that a long request does not delay others.
const STEPS_MAX: u32 = 4096;

/// What a thread that may block must do before a range can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    Slice(SliceIndex),
    /// Prepare the image for its first write.
    FirstWrite,
}

/// One step of a lookup.
enum Step {
    Run {
        kind: Kind,
        is_exclusive: bool,
        len: u64,
    },
    Load(SliceIndex),
    Damaged,
}

/// Looks up one step after the other, and remembers the current slice.
struct Lookup<'a> {
    image: &'a Qcow2,
    slice: Option<(SliceIndex, Found<'a>)>,
}

impl Qcow2 {
    /// Where the range that starts at `at`, inside the disk, is: the longest contiguous piece. `_pin` keeps
    /// its clusters from being reused.
    #[inline]
    pub(crate) fn map(&self, _pin: &Pin, at: GuestOffset, len: u64) -> Mapping {
        if let Some((host, _)) = self.data_in_one_cluster(at, len) {
            return Mapping::Data { at: host, len };
        }
        let mut lookup = Lookup {
            image: self,
            slice: None,
        };
        let (first, len) = match lookup.find_run(at, len, false) {
            Ok(first) => first,
            Err(Step::Load(slice)) => return Mapping::Load(Load::Slice(slice)),
            Err(_) => {
                return Mapping::Damaged {
                    len: self.len_in_cluster(at, len),
                };
            }
        };
        match first {
            // A cluster that was never written may be after the end of the file.
            Kind::Data(host) => match self.data_end() {
                end if end <= host => Mapping::Zero { len },
                end => Mapping::Data {
                    at: host,
                    len: len.min(end - host),
                },
            },
            Kind::Zero => Mapping::Zero { len },
            Kind::Hole => Mapping::Hole { len },
            Kind::Compressed(from) => Mapping::Compressed {
                from,
                skip: self.g.in_cluster(at),
                len,
            },
        }
    }

    /// Where a write that starts at `at`, inside the disk, goes. `_pin` keeps its clusters from being reused.
    #[inline]
    pub(crate) fn map_write(&self, _pin: &Pin, at: GuestOffset, len: u64) -> WriteMapping {
        if !self.has_begun_writing.load(SeqCst) {
            return WriteMapping::Load(Load::FirstWrite);
        }
        if let Some((host, true)) = self.data_in_one_cluster(at, len) {
            return WriteMapping::InPlace { at: host, len };
        }
        let mut lookup = Lookup {
            image: self,
            slice: None,
        };
        match lookup.find_run(at, len, true) {
            Ok((Kind::Data(host), len)) => match self.len_in_file(host, len) {
                // Preparing the write extends the file.
                0 => WriteMapping::Allocate { len },
                len => WriteMapping::InPlace { at: host, len },
            },
            Ok((_, len)) => WriteMapping::Allocate { len },
            Err(Step::Load(slice)) => WriteMapping::Load(Load::Slice(slice)),
            Err(_) => WriteMapping::Damaged {
                len: self.len_in_cluster(at, len),
            },
        }
    }

    /// Fast path for the usual case: a range within one cluster, all of it data inside the file. Returns where it
    /// is, and whether the cluster is not shared. `None` means that [`Lookup`] must decide.
    #[inline]
    fn data_in_one_cluster(&self, at: GuestOffset, len: u64) -> Option<(HostOffset, bool)> {
        let g = &self.g;
        let offset = g.in_cluster(at);
        if len == 0 || len > g.cluster() - offset {
            return None;
        }
        let (slice, entry) = GuestCluster::of(at, g).slice(g);
        let found = self.cache.find(slice)?;
        let (word, bitmap) = found.words(g, entry);
        if !found.is_valid() {
            return None;
        }
        let Ok(Entry::Standard(Standard {
            host: Some(host),
            is_exclusive,
            data,
            ..
        })) = Entry::decode(g, word, bitmap)
        else {
            return None;
        };
        let touched = g.touched(offset, offset + len);
        let is_in_file = data & touched == touched && host + (offset + len) <= self.data_end();
        is_in_file.then_some((host + offset, is_exclusive))
    }

    /// Prefetches the L2 entry for `at` into the processor's cache; false if its slice is not in memory.
    #[inline]
    pub(crate) fn prefetch(&self, at: GuestOffset) -> bool {
        let (slice, entry) = GuestCluster::of(at, &self.g).slice(&self.g);
        let found = self.cache.find(slice);
        found.is_some_and(|found| {
            black_box(found.words(&self.g, entry));
            true
        })
    }

    /// How many bytes of a run are inside the file: all of them, or whole clusters.
    #[inline]
    fn len_in_file(&self, host: HostOffset, len: u64) -> u64 {
        let end = self.data_end();
        if host + len <= end {
            return len;
        }
        end.cluster(&self.g).start(&self.g).distance_from(host)
    }

    #[inline]
    fn data_end(&self) -> HostOffset {
        self.data.as_ref().unwrap_or(&self.file).get()
    }

    /// The bytes from `at` to the end of its cluster, at most `len`.
    pub(super) fn len_in_cluster(&self, at: GuestOffset, len: u64) -> u64 {
        len.min(self.g.cluster() - self.g.in_cluster(at))
    }
}

impl<'a> Lookup<'a> {
    /// The kind of data at `at`, and the length of the contiguous run of that kind, as far as the lookup went. For a
    /// write, everything that cannot be written in place counts as a hole.
    fn find_run(
        &mut self,
        at: GuestOffset,
        len: u64,
        for_write: bool,
    ) -> Result<(Kind, u64), Step> {
        let mut found: Option<(Kind, u64)> = None;
        let mut done = 0;
        for _ in 0..STEPS_MAX {
            if done >= len {
                break;
            }
            let (kind, run) = match self.step(at + done) {
                Step::Run {
                    kind,
                    is_exclusive,
                    len: run,
                } => {
                    let in_place = is_exclusive && matches!(kind, Kind::Data(_));
                    let kind = if for_write && !in_place {
                        Kind::Hole
                    } else {
                        kind
                    };
                    (kind, run.min(len - done))
                }
                stop => match found {
                    Some(found) => return Ok(found),
                    None => return Err(stop),
                },
            };
            let continues = match (found, kind) {
                (None, _) => true,
                (Some((Kind::Data(first), len)), Kind::Data(next)) => next == first + len,
                (Some((first, _)), next) => {
                    first == next && matches!(next, Kind::Zero | Kind::Hole)
                }
            };
            if !continues {
                break;
            }
            done += run;
            found = Some((found.map_or(kind, |(first, _)| first), done));
        }
        Ok(found.unwrap_or((Kind::Zero, 0)))
    }

    #[inline]
    fn step(&mut self, at: GuestOffset) -> Step {
        let image = self.image;
        let g = &image.g;
        let (slice, entry) = GuestCluster::of(at, g).slice(g);
        let found = match self.slice {
            Some((number, found)) if number == slice => found,
            _ => match image.cache.find(slice) {
                Some(found) => found,
                None => return self.step_without_slice(at, slice),
            },
        };
        let (word, bitmap) = found.words(g, entry);
        if !found.is_valid() {
            return Step::Load(slice);
        }
        self.slice = Some((slice, found));
        let offset = g.in_cluster(at);
        match Entry::decode(g, word, bitmap) {
            Ok(entry) => {
                let is_exclusive = matches!(entry, Entry::Standard(s) if s.is_exclusive);
                let (kind, len) = entry.at(g, offset);
                Step::Run {
                    kind,
                    is_exclusive,
                    len,
                }
            }
            Err(_) => Step::Damaged,
        }
    }

    #[inline]
    fn step_without_slice(&self, at: GuestOffset, slice: SliceIndex) -> Step {
        let g = &self.image.g;
        let (table, _) = slice.table(g);
        match table_at(g, self.image.l1.get(table)) {
            Ok(None) => Step::Run {
                kind: Kind::Hole,
                is_exclusive: false,
                len: (table + 1).start(g) - at,
            },
            Ok(Some(_)) => Step::Load(slice),
            Err(_) => Step::Damaged,
        }
    }
}
