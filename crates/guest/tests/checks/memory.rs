//! Guest memory to check against, and the walk over a descriptor chain as the specification describes it: slow, without
//! a cache, one descriptor and one region at a time, and sharing nothing with the code under test.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::Segment;
use guest::{GuestMemory, RegionLayout, RingBase, RingLayout};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

/// Guest memory in three regions: two that meet in the guest but nowhere else, and one behind a hole.
pub struct TestMemory {
    file: OwnedFd,
    pub guest: Arc<GuestMemory>,
    /// Where the regions are mapped, in the order of `REGIONS`.
    hosts: Vec<usize>,
}

/// Guest address, length and place in the file of each region, by guest address.
pub const REGIONS: [(u64, u64, u64); 3] = [
    (0, 0x4000, 0x1000),
    (0x4000, 0x1000, 0x8000),
    (0x8000, 0x1000, 0x6000),
];

const FILE_BYTES: u64 = 0x9000;

impl TestMemory {
    pub fn new() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, FILE_BYTES).expect("memory");
        let mut guest = GuestMemory::default();
        for (start, len, file_offset) in REGIONS {
            let layout = RegionLayout {
                guest: start,
                len,
                user: Self::user(start),
                file_offset,
            };
            let file = file.try_clone().expect("a descriptor");
            guest = guest.with_region(layout, file).expect("a good region");
        }
        let place = |(m, (_, len, _)): (Segment, (u64, u64, u64))| {
            assert_eq!(m.len as u64, len);
            m.addr
        };
        let hosts = guest.mappings().zip(REGIONS).map(place).collect();
        Self {
            file,
            guest: Arc::new(guest),
            hosts,
        }
    }

    /// The front-end's address of a guest address. Regions that meet in the guest do not meet here.
    pub fn user(guest: u64) -> u64 {
        let region = REGIONS.iter().rposition(|r| r.0 <= guest).unwrap_or(0);
        0x7000_0000_0000 + region as u64 * 0x1_0000_0000 + guest
    }

    /// Fills all memory with zeroes.
    pub fn clear(&self) {
        pwrite(&self.file, &[0; FILE_BYTES as usize], 0).expect("memory");
    }

    /// The parts of a guest range, as index of the region, offset in it, and length; `None` unless all of it is memory.
    pub fn parts(mut at: u64, mut len: u64) -> Option<Vec<(usize, u64, u64)>> {
        let mut parts = Vec::new();
        while len > 0 {
            let region = REGIONS
                .iter()
                .position(|r| (r.0..r.0 + r.1).contains(&at))?;
            let offset = at - REGIONS[region].0;
            let n = len.min(REGIONS[region].1 - offset);
            parts.push((region, offset, n));
            (at, len) = (at + n, len - n);
        }
        Some(parts)
    }

    /// Whether a range is aligned and in one region.
    pub fn fits(at: u64, len: u64, align: u64) -> bool {
        let parts = Self::parts(at, len);
        at.is_multiple_of(align) && parts.is_some_and(|p| p.len() == 1)
    }

    /// Reads a guest range.
    pub fn read(&self, at: u64, len: u64) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (region, offset, n) in Self::parts(at, len)? {
            let mut part = vec![0; n as usize];
            assert_eq!(
                pread(&self.file, &mut part, REGIONS[region].2 + offset),
                Ok(part.len())
            );
            bytes.extend(part);
        }
        Some(bytes)
    }

    /// Reads a 16-bit number.
    pub fn read_u16(&self, at: u64) -> Option<u16> {
        self.read(at, 2).map(|b| u16::from_le_bytes([b[0], b[1]]))
    }

    /// Writes to a guest range, all of which must be memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let mut done = 0;
        for (region, offset, n) in Self::parts(at, bytes.len() as u64).expect("guest memory") {
            let part = &bytes[done..done + n as usize];
            assert_eq!(
                pwrite(&self.file, part, REGIONS[region].2 + offset),
                Ok(part.len())
            );
            done += part.len();
        }
    }

    /// Where guest ranges are in this process, with what touches joined.
    pub fn hosts(&self, ranges: &[(u64, u64)]) -> Option<Vec<Segment>> {
        let mut list = Vec::new();
        for &(at, len) in ranges {
            for (region, offset, n) in Self::parts(at, len)? {
                list.push(Segment {
                    addr: self.hosts[region] + offset as usize,
                    len: n as usize,
                });
            }
        }
        Some(joined(&list))
    }

    /// Whether a segment lies inside the regions' mappings, which may touch.
    pub fn holds(&self, s: &Segment) -> bool {
        let mut at = s.addr;
        while at < s.addr + s.len {
            let mappings = self.hosts.iter().zip(REGIONS);
            let mut mappings = mappings.map(|(&host, (_, len, _))| host..host + len as usize);
            match mappings.find(|mapping| mapping.contains(&at)) {
                Some(mapping) => at = mapping.end,
                None => return false,
            }
        }
        s.len > 0
    }
}

/// Segments with those joined that touch.
pub fn joined(segments: &[Segment]) -> Vec<Segment> {
    let mut list: Vec<Segment> = Vec::new();
    for s in segments {
        match list.last_mut() {
            Some(last) if last.addr + last.len == s.addr => last.len += s.len,
            _ => list.push(*s),
        }
    }
    list
}

/// A ring by guest addresses.
#[derive(Clone, Copy, Debug)]
pub struct RefRing {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub next_available: u16,
    pub event_idx: bool,
    pub max_segments: u16,
}

/// A request as the reference walk finds it, by guest addresses.
#[derive(Debug)]
pub struct RefChain {
    pub header: Vec<u8>,
    pub readable: Vec<(u64, u64)>,
    pub writable: Vec<(u64, u64)>,
    pub status: u64,
}

impl RefRing {
    /// The ring as the code under test is told of it.
    pub fn layout(&self) -> RingLayout {
        RingLayout {
            number: 0,
            packed: false,
            size: self.size,
            descriptors: TestMemory::user(self.descriptors),
            available: TestMemory::user(self.available),
            used: TestMemory::user(self.used),
            base: RingBase::split(self.next_available),
            event_idx: self.event_idx,
            max_segments: self.max_segments,
        }
    }

    /// Whether there can be such a ring: each part aligned and in one region.
    pub fn is_legal(&self) -> bool {
        let n = u64::from(self.size);
        let fits = TestMemory::fits;
        self.size.is_power_of_two()
            && self.size <= 1024
            && fits(self.descriptors, 16 * n, 16)
            && fits(self.available, 6 + 2 * n, 2)
            && fits(self.used, 6 + 8 * n, 4)
    }

    /// The chain that starts at descriptor `head`; `None` if it breaks a rule (virtio 1.3 §2.7.4, §2.7.5, §5.2.6).
    pub fn walk(&self, memory: &TestMemory, head: u16) -> Option<RefChain> {
        let limit = u32::from(self.size).max(u32::from(self.max_segments) + 2);
        let (mut table, mut table_len, mut indirect) =
            (self.descriptors, u32::from(self.size), false);
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let (mut index, mut count) = (head, 0);
        loop {
            if u32::from(index) >= table_len {
                return None;
            }
            let d = memory.read(table.checked_add(16 * u64::from(index))?, 16)?;
            let addr = u64::from_le_bytes(d[..8].try_into().expect("8 bytes"));
            let len = u32::from_le_bytes(d[8..12].try_into().expect("4 bytes"));
            let (flags, next) = (
                u16::from_le_bytes([d[12], d[13]]),
                u16::from_le_bytes([d[14], d[15]]),
            );
            let (has_next, is_write, is_table) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
            if is_table {
                if indirect || has_next || len == 0 || len % 16 != 0 {
                    return None;
                }
                (table, table_len, indirect, index) = (addr, len / 16, true, 0);
                continue;
            }
            count += 1;
            if count > limit || !is_write && !writable.is_empty() {
                return None;
            }
            TestMemory::parts(addr, u64::from(len))?;
            if is_write {
                writable.push((addr, u64::from(len)))
            } else {
                readable.push((addr, u64::from(len)))
            }
            if !has_next {
                break;
            }
            index = next;
        }
        request(memory, &readable, &writable)
    }
}

/// The request in a chain: a header of 16 bytes first, a status of one last.
pub fn request(
    memory: &TestMemory,
    readable: &[(u64, u64)],
    writable: &[(u64, u64)],
) -> Option<RefChain> {
    let (header, readable) = split(readable, 16)?;
    let writable_len: u64 = writable.iter().map(|r| r.1).sum();
    let (writable, status) = split(writable, writable_len.checked_sub(1)?)?;
    let mut bytes = Vec::new();
    for (at, len) in header {
        bytes.extend(memory.read(at, len)?);
    }
    Some(RefChain {
        header: bytes,
        readable,
        writable,
        status: status[0].0,
    })
}

type Ranges = Vec<(u64, u64)>;

/// Cuts a list of ranges after `at` bytes; what is empty is left out.
fn split(ranges: &[(u64, u64)], mut at: u64) -> Option<(Ranges, Ranges)> {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for &(start, len) in ranges {
        let n = len.min(at);
        at -= n;
        before.push((start, n));
        after.push((start.wrapping_add(n), len - n));
    }
    before.retain(|r| r.1 > 0);
    after.retain(|r| r.1 > 0);
    (at == 0).then_some((before, after))
}

/// Whether the other side asked to be told, by its event index (virtio 1.3 §2.7.7.2, `vring_need_event`).
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
