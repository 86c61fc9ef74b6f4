//! Guest memory: memfd regions whose guest-physical, front-end user and local mapped addresses all differ, so that a
//! device which mixes them up reads nonsense or faults instead of working by luck.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The guest's memory, as a list of regions. Every region may be announced to the device or kept back.
pub struct Memory {
    regions: Vec<Region>,
}

/// One stretch of guest-physical addresses, backed by a memfd of its own.
pub struct Region {
    /// First guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub size: u64,
    /// What the front-end claims to be its own address of this region. Nothing is mapped there.
    pub user: u64,
    /// Where in the memfd the region starts; not 0 unless that is asked for, so that a device which ignores it is caught.
    pub mmap_offset: u64,
    /// The memfd.
    pub file: OwnedFd,
    mapped: *mut u8,
    allocated: AtomicU64,
}

// SAFETY: `mapped` is owned by the region until it drops, and all access to it goes through raw pointers or atomics.
unsafe impl Send for Region {}
// SAFETY: as above; the bytes are shared with the device anyway, so nothing assumes exclusive access to them.
unsafe impl Sync for Region {}

impl Memory {
    /// Maps one region per `(guest-physical address, size)`, both multiples of 4096.
    pub fn new(layout: &[(u64, u64)]) -> io::Result<Self> {
        Self::with_offsets(layout, 0x1_0000)
    }

    /// The same where the first region begins at `offset` in its file, the second at twice that, and so on.
    pub fn with_offsets(layout: &[(u64, u64)], offset: u64) -> io::Result<Self> {
        let regions = layout
            .iter()
            .zip(1..)
            .map(|(&(gpa, size), number)| Region::new(gpa, size, number, number * offset));
        Ok(Self {
            regions: regions.collect::<io::Result<_>>()?,
        })
    }

    /// The regions in the order of `new`.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The front-end user address of a guest-physical address.
    pub fn user(&self, gpa: u64) -> u64 {
        let region = self.region(gpa);
        region.user + (gpa - region.gpa)
    }

    /// Where `len` bytes at `gpa` are mapped here. They must lie in one region.
    pub fn ptr(&self, gpa: u64, len: usize) -> *mut u8 {
        let region = self.region(gpa);
        assert!(
            len as u64 <= region.end() - gpa,
            "{len} bytes at {gpa:#x} leave their region"
        );
        // SAFETY: the offset was just checked to lie inside the mapping.
        unsafe { region.mapped.add((gpa - region.gpa) as usize) }
    }

    /// Copies into guest memory, over region borders where regions are adjacent.
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        self.pieces(gpa, bytes.len(), |at, range| {
            let source = &bytes[range];
            // SAFETY: `pieces` yields ranges inside one mapping, and `source` is as long as the range.
            unsafe { ptr::copy_nonoverlapping(source.as_ptr(), at, source.len()) }
        });
    }

    /// Copies out of guest memory, over region borders where regions are adjacent.
    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pieces(gpa, len, |at, range| {
            let target = &mut bytes[range];
            // SAFETY: `pieces` yields ranges inside one mapping, and `target` is as long as the range.
            unsafe { ptr::copy_nonoverlapping(at, target.as_mut_ptr(), target.len()) }
        });
        bytes
    }

    fn pieces(&self, gpa: u64, len: usize, mut visit: impl FnMut(*mut u8, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = gpa + done as u64;
            let piece = (len - done).min((self.region(at).end() - at) as usize);
            visit(self.ptr(at, piece), done..done + piece);
            done += piece;
        }
    }

    fn region(&self, gpa: u64) -> &Region {
        let found = self
            .regions
            .iter()
            .find(|r| (r.gpa..r.end()).contains(&gpa));
        found.unwrap_or_else(|| panic!("{gpa:#x} is outside guest memory"))
    }
}

impl Region {
    fn new(gpa: u64, size: u64, number: u64, mmap_offset: u64) -> io::Result<Self> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, mmap_offset + size)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe {
            mmap(
                ptr::null_mut(),
                size as usize,
                protection,
                flags,
                &file,
                mmap_offset,
            )?
        };
        let user = 0x5500_0000_0000 + number * 0x100_0000_0000 + gpa;
        Ok(Self {
            gpa,
            size,
            user,
            mmap_offset,
            file,
            mapped: mapped.cast(),
            allocated: AtomicU64::new(0),
        })
    }

    /// One past the last guest-physical address.
    pub fn end(&self) -> u64 {
        self.gpa + self.size
    }

    /// Takes `len` bytes that nothing else uses, aligned to the power of two `align`; they are never given back.
    pub fn alloc(&self, len: u64, align: u64) -> u64 {
        let mut got = 0;
        let next = |used: u64| {
            got = (self.gpa + used).next_multiple_of(align);
            Some(got + len - self.gpa)
        };
        let _ = self
            .allocated
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        assert!(got + len <= self.end(), "region at {:#x} is full", self.gpa);
        got
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this size; nobody outlives the region with a pointer into it.
        let _ = unsafe { munmap(self.mapped.cast(), self.size as usize) };
    }
}

/// Huge pages of the default size, reserved for a test until dropped.
pub struct HugePages {
    /// Locked, so that no other test reserves meanwhile.
    count: File,
    before: u64,
    /// Bytes of one.
    pub page: u64,
}

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    /// Reserves huge pages for at least `bytes`, or says why it cannot be done here.
    ///
    /// # Errors
    /// This user may not, or memory has no such pages left.
    pub fn reserve(bytes: u64) -> Result<Self, String> {
        let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find_map(|l| l.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let page = field("Hugepagesize:").ok_or("the kernel has no huge pages")? << 10;
        let count = File::options().read(true).write(true).open(Self::COUNT);
        let count = count.map_err(|e| format!("{}: {e}", Self::COUNT))?;
        count.lock().map_err(|e| format!("{}: {e}", Self::COUNT))?;
        let mut pages = Self {
            before: 0,
            count,
            page,
        };
        pages.before = pages.now()?;
        let wanted = pages.before + bytes.div_ceil(page);
        pages.set(wanted)?;
        match pages.now()? {
            got if got < wanted => Err(format!("only {got} of {wanted} huge pages are to be had")),
            _ => Ok(pages),
        }
    }

    fn now(&self) -> Result<u64, String> {
        let text = fs::read_to_string(Self::COUNT).map_err(|e| e.to_string())?;
        text.trim()
            .parse()
            .map_err(|_| format!("{text:?} is no number"))
    }

    fn set(&self, pages: u64) -> Result<(), String> {
        // Only what is written to the beginning counts.
        self.count
            .write_all_at(pages.to_string().as_bytes(), 0)
            .map_err(|e| format!("{}: {e}", Self::COUNT))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = self.set(self.before);
    }
}
