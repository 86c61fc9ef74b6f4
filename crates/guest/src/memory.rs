//! The guest's memory: regions that the front-end shares, mapped into this process.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;

use block::Segment;
use rustix::mm::{MapFlags, ProtFlags};
use thiserror::Error;

use crate::sigbus::{SessionAbort, SigbusGuard};

/// Maximum number of bytes that one front-end may have mapped: an eighth of the 128 TiB address space of a
/// process on x86-64 (47 bits). Eight sessions with the largest guests fit, and no session can exhaust the
/// address space. Each region is one mapping, and a session has at most
/// [`MAX_MEM_SLOTS`](crate::MAX_MEM_SLOTS) regions; the kernel's limit of 65530 mappings (vm.max_map_count)
/// allows 127 sessions that use all their slots.
pub const MAX_MAPPED_BYTES: usize = 1 << 44;

/// Position of a region in the guest, in the front-end and in the file that holds it, in bytes (vhost-user:
/// "Memory region description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionLayout {
    /// Guest physical address of the first byte.
    pub guest: u64,
    /// Length of the region.
    pub len: u64,
    /// Address of the first byte in the front-end; the front-end uses such addresses to name rings.
    pub user: u64,
    /// Offset of the first byte in the file.
    pub file_offset: u64,
}

/// HUGETLBFS_MAGIC and FUSE_SUPER_MAGIC of `linux/magic.h`; a memfd with MFD_HUGETLB is also on hugetlbfs.
const HUGETLBFS: u32 = 0x9584_58f6;
const FUSE: u32 = 0x6573_5546;

/// Why a memory region was rejected.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The length is zero, or a range wraps around.
    #[error("memory region {0:x?} is empty or wraps around 64 bits")]
    Malformed(RegionLayout),
    /// Two regions share addresses.
    #[error("memory region {0:x?} overlaps another one in the guest or in the front-end")]
    Overlap(RegionLayout),
    /// The file ends before the region; an access beyond its end would raise SIGBUS.
    #[error("memory region {0:x?} reaches beyond its file of {1} bytes")]
    BeyondFile(RegionLayout, u64),
    /// All regions together exceed the limit of one front-end.
    #[error("with memory region {0:x?} more than {MAX_MAPPED_BYTES} bytes would be mapped")]
    TooMuch(RegionLayout),
    /// The file is on FUSE: a user-space process answers reads and writes, possibly never.
    #[error(
        "memory region {0:x?} is in a file of FUSE; share memory in a memfd, or in tmpfs or hugetlbfs"
    )]
    Fuse(RegionLayout),
    /// No region is at this address.
    #[error("no memory region is at guest address {0:#x}")]
    Unknown(u64),
    /// The kernel refused to map the region.
    #[error("cannot map memory region {0:x?}: {1}")]
    Map(RegionLayout, io::Error),
}

/// The map of a guest's memory. A change creates a new value; a ring keeps the map that it started with alive
/// until it has stopped.
#[derive(Clone, Default)]
pub struct GuestMemory {
    /// Sorted by guest address, without overlap.
    regions: Vec<Region>,
    /// Notified if the front-end truncates a file.
    abort: Option<SessionAbort>,
}

#[derive(Clone)]
struct Region {
    layout: RegionLayout,
    mapping: Arc<Mapping>,
    /// For another process that continues with the region.
    file: Arc<OwnedFd>,
}

/// The values for translating addresses of one region, small enough to cache with a ring.
#[derive(Clone, Copy, Default)]
pub(crate) struct Window {
    guest: u64,
    len: u64,
    host: usize,
}

impl GuestMemory {
    /// An empty map. `abort` is notified if the front-end truncates a file of a later region; the whole
    /// mapping then reads as zeroes.
    pub fn watched(abort: SessionAbort) -> Self {
        Self {
            regions: Vec::new(),
            abort: Some(abort),
        }
    }

    /// Returns this map with one more region, mapped from `file`. Opens no descriptor, so that a session can
    /// continue in a process that has none left.
    ///
    /// # Errors
    /// The region is malformed, overlaps another, extends beyond its file, or cannot be mapped.
    pub fn with_region(
        &self,
        layout: RegionLayout,
        file: impl Into<Arc<OwnedFd>>,
    ) -> Result<Self, MemoryError> {
        let file = file.into();
        let fits = |start: u64| layout.len > 0 && start.checked_add(layout.len).is_some();
        if !fits(layout.guest) || !fits(layout.user) || !fits(layout.file_offset) {
            return Err(MemoryError::Malformed(layout));
        }
        let meet = |a: u64, b: u64, b_len: u64| a < b + b_len && b < a + layout.len;
        if self.regions.iter().any(|r| {
            meet(layout.guest, r.layout.guest, r.layout.len)
                || meet(layout.user, r.layout.user, r.layout.len)
        }) {
            return Err(MemoryError::Overlap(layout));
        }
        let mapped = self.regions.iter().map(|r| r.mapping.len).sum::<usize>();
        let mapping = Arc::new(Mapping::new(
            layout,
            &file,
            MAX_MAPPED_BYTES - mapped,
            self.abort.clone(),
        )?);
        let mut regions = self.regions.clone();
        let index = regions.partition_point(|r| r.layout.guest < layout.guest);
        let region = Region {
            layout,
            mapping,
            file,
        };
        regions.insert(index, region);
        let abort = self.abort.clone();
        Ok(Self { regions, abort })
    }

    /// Returns this map without the region that has `layout`'s guest address, front-end address and length.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without_region(&self, layout: RegionLayout) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        let index = regions
            .iter()
            .position(|r| {
                (r.layout.guest, r.layout.user, r.layout.len)
                    == (layout.guest, layout.user, layout.len)
            })
            .ok_or(MemoryError::Unknown(layout.guest))?;
        regions.remove(index);
        let abort = self.abort.clone();
        Ok(Self { regions, abort })
    }

    /// The layouts of the regions, and their files.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (RegionLayout, Arc<OwnedFd>)> + '_ {
        self.regions.iter().map(|r| (r.layout, r.file.clone()))
    }

    /// Number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether the map has no regions.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The mappings of all regions in this process, for an engine that can register them.
    pub fn mappings(&self) -> impl Iterator<Item = Segment> + '_ {
        self.regions.iter().map(|r| Segment {
            addr: r.host(),
            len: r.layout.len as usize,
        })
    }

    /// Translates a front-end address to an address in this process; the range must be in one region.
    pub(crate) fn at_user(&self, user: u64, len: u64) -> Option<usize> {
        self.regions.iter().find_map(|r| {
            let offset = user.checked_sub(r.layout.user)?;
            (offset < r.layout.len && len <= r.layout.len - offset)
                .then(|| r.host() + offset as usize)
        })
    }

    /// The guest address after the last byte.
    pub(crate) fn end(&self) -> u64 {
        let last = self.regions.last().map(|r| r.layout);
        last.map_or(0, |layout| layout.guest + layout.len)
    }

    /// Translates a front-end address to a guest address; the range must be in one region.
    pub(crate) fn guest_of_user(&self, user: u64, len: u64) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = user.checked_sub(r.layout.user)?;
            (offset < r.layout.len && len <= r.layout.len - offset).then(|| r.layout.guest + offset)
        })
    }

    /// The guest ranges (address and length) that a range of this process maps. Regions that are adjacent in
    /// this process need not be adjacent in the guest.
    pub(crate) fn guest_ranges(&self, ours: Segment) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = ours.addr + ours.len;
        self.regions.iter().filter_map(move |r| {
            let (host, len) = (r.host(), r.layout.len as usize);
            let (from, to) = (ours.addr.max(host), end.min(host + len));
            (from < to).then(|| (r.layout.guest + (from - host) as u64, (to - from) as u64))
        })
    }

    /// The window of the region that contains `guest`.
    pub(crate) fn window(&self, guest: u64) -> Option<Window> {
        let after = self.regions.partition_point(|r| r.layout.guest <= guest);
        let region = &self.regions[after.checked_sub(1)?];
        (guest - region.layout.guest < region.layout.len).then(|| Window {
            guest: region.layout.guest,
            len: region.layout.len,
            host: region.host(),
        })
    }
}

impl Window {
    /// Address in this process of a guest range that lies entirely in this window.
    #[inline]
    pub(crate) fn at(&self, guest: u64, len: u64) -> Option<usize> {
        let offset = guest.wrapping_sub(self.guest);
        (offset < self.len && len <= self.len - offset).then(|| self.host + offset as usize)
    }

    /// The part of a guest range, from its start, that lies in this window; `None` if its start does not.
    pub(crate) fn head(&self, guest: u64, len: u64) -> Option<Segment> {
        let offset = guest.wrapping_sub(self.guest);
        (offset < self.len).then(|| Segment {
            addr: self.host + offset as usize,
            len: len.min(self.len - offset) as usize,
        })
    }
}

impl Region {
    fn host(&self) -> usize {
        self.mapping.at(self.layout.file_offset)
    }
}

/// The mapping of the whole pages of a file that hold a region.
pub(crate) struct Mapping {
    base: usize,
    len: usize,
    file_offset: u64,
    /// Present until the mapping is unmapped.
    guard: Option<SigbusGuard>,
}

impl Mapping {
    /// Address of the byte at this file offset, which must be inside the region.
    pub fn at(&self, file_offset: u64) -> usize {
        self.base + (file_offset - self.file_offset) as usize
    }

    #[expect(unsafe_code, reason = "mmap, madvise")]
    pub fn new(
        layout: RegionLayout,
        file: &OwnedFd,
        len_max: usize,
        abort: Option<SessionAbort>,
    ) -> Result<Self, MemoryError> {
        let fail = |e: rustix::io::Errno| MemoryError::Map(layout, e.into());
        let end = layout
            .file_offset
            .checked_add(layout.len)
            .ok_or(MemoryError::Malformed(layout))?;
        let stat = rustix::fs::fstat(file).map_err(fail)?;
        if (stat.st_size as u64) < end {
            return Err(MemoryError::BeyondFile(layout, stat.st_size as u64));
        }
        // Mappings start and end on page boundaries. For huge pages, munmap requires an aligned length,
        // although mmap rounds it up.
        let system = rustix::fs::fstatfs(file).map_err(fail)?;
        if system.f_type as u32 == FUSE {
            return Err(MemoryError::Fuse(layout));
        }
        let page = page_bytes(&system);
        let file_offset = layout.file_offset / page * page;
        let len = (end - file_offset)
            .checked_next_multiple_of(page)
            .and_then(|len| usize::try_from(len).ok())
            .ok_or(MemoryError::Malformed(layout))?;
        if len > len_max {
            return Err(MemoryError::TooMuch(layout));
        }
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                file_offset,
            )
        }
        .map_err(fail)?;
        // Memory of a guest or front-end does not belong in a core dump.
        // SAFETY: the mapping was just created, and the call changes only whether it is dumped.
        let _ = unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::LinuxDontDump) };
        Ok(Self {
            base: base as usize,
            len,
            file_offset,
            guard: Some(SigbusGuard::new(base as usize, len, abort)),
        })
    }
}

/// The page size with which a file is mapped.
fn page_bytes(system: &rustix::fs::StatFs) -> u64 {
    match system.f_type as u32 {
        // At least the base page size, and a power of two.
        HUGETLBFS => (system.f_bsize as u64).next_power_of_two(),
        _ => rustix::param::page_size() as u64,
    }
}

impl Drop for Mapping {
    #[expect(unsafe_code, reason = "munmap")]
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: this value owns the mapping. Every address in it was obtained from a `GuestMemory`, which
        // keeps this value alive until the last ring that uses it has stopped.
        let result = unsafe { rustix::mm::munmap(self.base as *mut _, self.len) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn file(len: u64) -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    fn layout(guest: u64, len: u64) -> RegionLayout {
        RegionLayout {
            guest,
            len,
            user: guest + 0x7000_0000_0000,
            file_offset: 0,
        }
    }

    #[test]
    fn ranges_are_found_only_in_memory() {
        let file = file(0x4000);
        let memory = GuestMemory::default()
            .with_region(layout(0x1000, 0x2000), file.try_clone().unwrap())
            .unwrap()
            .with_region(layout(0x10000, 0x4000), file.try_clone().unwrap())
            .unwrap();
        let at = |guest, len| memory.window(guest).and_then(|w| w.at(guest, len));
        assert!(at(0x1000, 0x2000).is_some());
        assert!(at(0x1000, 0x2001).is_none());
        assert!(at(0x0fff, 1).is_none());
        assert!(at(0x3000, 1).is_none());
        assert!(at(0x13fff, 1).is_some());
        assert!(at(0x13fff, u64::MAX).is_none());
        assert!(at(u64::MAX, 2).is_none());
        assert!(memory.at_user(0x7000_0000_1000, 0x2000).is_some());
        assert!(memory.at_user(0x7000_0000_1000, 0x2001).is_none());
    }

    #[test]
    fn mapped_memory_of_a_session_is_limited() {
        const TIB: u64 = 1 << 40;
        // No page of the file is touched, so it uses no memory.
        let file = file(9 * TIB);
        let memory = GuestMemory::default()
            .with_region(layout(0, 8 * TIB), file.try_clone().unwrap())
            .unwrap();
        let second = layout(100 * TIB, 8 * TIB);
        let over = RegionLayout {
            file_offset: 1,
            ..second
        };
        let refused = |l| {
            memory
                .with_region(l, file.try_clone().unwrap())
                .err()
                .unwrap()
        };
        assert!(matches!(refused(over), MemoryError::TooMuch(_)));
        let full = memory
            .with_region(second, file.try_clone().unwrap())
            .unwrap();
        let more = full.with_region(layout(200 * TIB, 1), file.try_clone().unwrap());
        assert!(matches!(more, Err(MemoryError::TooMuch(_))));
        // Removing a region frees its share of the limit.
        let less = full.without_region(second).unwrap();
        assert!(
            less.with_region(layout(200 * TIB, 1), file.try_clone().unwrap())
                .is_ok()
        );
    }

    /// Only the pages that hold a region are mapped, and the region may start anywhere in them.
    #[test]
    fn regions_start_anywhere_in_a_file() {
        let file = file(0x5000);
        rustix::io::pwrite(&file, b"here", 0x3ffe).unwrap();
        let memory = GuestMemory::default()
            .with_region(
                RegionLayout {
                    file_offset: 0x3ffe,
                    ..layout(0x1000, 4)
                },
                file.try_clone().unwrap(),
            )
            .unwrap();
        assert_eq!(memory.regions[0].mapping.len, 0x2000);
        let at = memory.window(0x1000).and_then(|w| w.at(0x1000, 4)).unwrap();
        // SAFETY: the window contains these four bytes.
        #[expect(unsafe_code, reason = "to look at mapped memory")]
        let found = unsafe { *(at as *const [u8; 4]) };
        assert_eq!(&found, b"here");
    }

    #[test]
    fn invalid_regions_are_refused() {
        let file = file(0x4000);
        let memory = GuestMemory::default()
            .with_region(layout(0x1000, 0x2000), file.try_clone().unwrap())
            .unwrap();
        let refused = |l| {
            memory
                .with_region(l, file.try_clone().unwrap())
                .err()
                .unwrap()
        };
        assert!(matches!(
            refused(layout(0x2fff, 0x1000)),
            MemoryError::Overlap(_)
        ));
        assert!(matches!(
            refused(layout(0x8000, 0)),
            MemoryError::Malformed(_)
        ));
        assert!(matches!(
            refused(layout(0x8000, 0x4001)),
            MemoryError::BeyondFile(..)
        ));
        let mut wraps = layout(0x8000, 0x1000);
        wraps.guest = u64::MAX - 5;
        assert!(matches!(refused(wraps), MemoryError::Malformed(_)));
        wraps = layout(0x8000, 0x1000);
        wraps.file_offset = u64::MAX - 5;
        assert!(matches!(refused(wraps), MemoryError::Malformed(_)));
        assert!(memory.without_region(layout(0x1000, 0x1000)).is_err());
        assert!(
            memory
                .without_region(layout(0x1000, 0x2000))
                .unwrap()
                .is_empty()
        );
    }
}
