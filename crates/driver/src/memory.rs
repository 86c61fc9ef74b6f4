//! Guest memory: memfd regions whose guest-physical, front-end user and local mapped addresses all differ. A device
//! that confuses them reads garbage or faults, and cannot work by luck.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The guest's memory: a list of regions. A test may announce a region to the device or not.
pub struct Memory {
    regions: Vec<Region>,
}

/// A range of guest-physical addresses, backed by its own memfd.
pub struct Region {
    /// The first guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub size: u64,
    /// The front-end's user address of the region, as the device is told. Nothing is mapped there.
    pub user: u64,
    /// The offset of the region in the memfd. It is 0 only if a test asks for that, so that a device that ignores it is
    /// caught.
    pub mmap_offset: u64,
    /// The memfd.
    pub file: OwnedFd,
    mapped: *mut u8,
    allocated: AtomicU64,
}

// SAFETY: the region owns `mapped` until it drops, and all access to it uses raw pointers or atomics.
unsafe impl Send for Region {}
// SAFETY: as above; the device shares the bytes anyway, so nothing assumes exclusive access to them.
unsafe impl Sync for Region {}

impl Memory {
    /// Maps one region per `(guest-physical address, size)`, both multiples of 4096.
    pub fn new(layout: &[(u64, u64)]) -> io::Result<Self> {
        Self::with_offsets(layout, 0x1_0000)
    }

    /// As `new`; the first region begins at `offset` in its file, the second at twice that, and so on.
    pub fn with_offsets(layout: &[(u64, u64)], offset: u64) -> io::Result<Self> {
        let regions = layout
            .iter()
            .zip(1..)
            .map(|(&(gpa, size), number)| Region::new(gpa, size, number, number * offset));
        Ok(Self {
            regions: regions.collect::<io::Result<_>>()?,
        })
    }

    /// The regions, in the order of `new`.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The front-end user address of a guest-physical address.
    pub fn user(&self, gpa: u64) -> u64 {
        let region = self.region(gpa);
        region.user + (gpa - region.gpa)
    }

    /// The local address of `len` bytes at `gpa`, which must be in one region.
    pub fn ptr(&self, gpa: u64, len: usize) -> *mut u8 {
        let region = self.region(gpa);
        assert!(
            len as u64 <= region.end() - gpa,
            "{len} bytes at {gpa:#x} leave their region"
        );
        // SAFETY: the offset is inside the mapping, as just checked.
        unsafe { region.mapped.add((gpa - region.gpa) as usize) }
    }

    /// Copies to guest memory, across the border of adjacent regions if necessary.
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        self.pieces(gpa, bytes.len(), |at, range| {
            let source = &bytes[range];
            // SAFETY: `pieces` yields ranges inside one mapping, and `source` is as long as the range.
            unsafe { ptr::copy_nonoverlapping(source.as_ptr(), at, source.len()) }
        });
    }

    /// Copies from guest memory, across the border of adjacent regions if necessary.
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
        // SAFETY: a new mapping at an address that the kernel chooses does not overlap an existing one.
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

    /// The guest-physical address after the last byte.
    pub fn end(&self) -> u64 {
        self.gpa + self.size
    }

    /// Allocates `len` unused bytes, aligned to the power of two `align`. They are never freed.
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
        // SAFETY: `new` made the mapping with this size; no pointer into the region is used after its drop.
        let _ = unsafe { munmap(self.mapped.cast(), self.size as usize) };
    }
}

/// Huge pages of the default size, reserved for a test until this is dropped.
pub struct HugePages {
    /// The kernel's setting, locked so that no other test changes it meanwhile.
    count: File,
    before: u64,
    /// The size of a huge page in bytes.
    pub page: u64,
}

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    /// Reserves huge pages for at least `bytes`.
    ///
    /// # Errors
    /// A sentence that says why not: this user may not, or memory has no such pages left.
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
        // The kernel only accepts writes at the beginning.
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
