//! Converts the descriptors of a chain to a request; both ring types use this.

use std::ptr;
use std::sync::Arc;

use block::Segment;
use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;

use super::{Chain, HEADER_BYTES};
use crate::memory::{GuestMemory, Window};
use crate::ring::RingError;

/// The guest's memory with one queue's cache of regions.
pub(super) struct View {
    /// The regions used last. Two are kept because a guest's buffers are often both below and above the PCI
    /// hole.
    windows: [Window; 2],
    /// Keeps every address that was returned mapped.
    pub memory: Arc<GuestMemory>,
}

impl View {
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self {
            windows: [Window::default(); 2],
            memory,
        }
    }

    /// Translates a guest range to an address in this process, if one region contains the whole range.
    #[inline]
    pub fn locate(&mut self, guest: u64, len: u64) -> Option<usize> {
        self.known(guest, len)
            .or_else(|| self.locate_again(guest, len))
    }

    /// Like [`locate`](Self::locate), but looks only in the regions used last.
    #[inline]
    pub fn known(&self, guest: u64, len: u64) -> Option<usize> {
        self.windows[0]
            .at(guest, len)
            .or_else(|| self.windows[1].at(guest, len))
    }

    #[cold]
    fn locate_again(&mut self, guest: u64, len: u64) -> Option<usize> {
        let window = self.memory.window(guest)?;
        self.windows = [window, self.windows[0]];
        window.at(guest, len)
    }

    /// Appends a buffer to the list. It is merged with the last segment if they are adjacent and that segment
    /// is not before `from`. Returns `None` if part of the buffer is not in guest memory.
    #[inline]
    fn append(&mut self, guest: u64, len: u32, list: &mut List<'_>, from: usize) -> Option<()> {
        if len == 0 {
            return Some(());
        }
        if let Some(addr) = self.locate(guest, u64::from(len)) {
            list.push(addr, len as usize, from);
            return Some(());
        }
        self.append_scattered(guest, len, list, from)
    }

    #[cold]
    fn append_scattered(
        &self,
        mut guest: u64,
        len: u32,
        list: &mut List<'_>,
        from: usize,
    ) -> Option<()> {
        let mut rest = u64::from(len);
        while rest > 0 {
            let part = self.memory.window(guest)?.head(guest, rest)?;
            list.push(part.addr, part.len, from);
            rest -= part.len as u64;
            guest = guest.checked_add(part.len as u64)?;
        }
        Some(())
    }

    #[inline(always)]
    pub fn read(&mut self, guest: u64, to: &mut [u8]) -> Result<(), RingError> {
        let outside = RingError::Buffer(guest, to.len() as u32);
        if let Some(addr) = self.locate(guest, to.len() as u64) {
            // SAFETY: `locate` found the whole range mapped; `to` is memory of this process.
            unsafe { ptr::copy_nonoverlapping(addr as *const u8, to.as_mut_ptr(), to.len()) };
            return Ok(());
        }
        self.read_scattered(guest, to).ok_or(outside)
    }

    #[cold]
    fn read_scattered(&self, guest: u64, to: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < to.len() {
            let at = guest.wrapping_add(done as u64);
            let rest = (to.len() - done) as u64;
            let part = self.memory.window(at)?.head(at, rest)?;
            // SAFETY: `head` found this part mapped, and it fits into the rest of `to`.
            unsafe {
                ptr::copy_nonoverlapping(
                    part.addr as *const u8,
                    to.as_mut_ptr().add(done),
                    part.len,
                );
            }
            done += part.len;
        }
        Some(())
    }
}

/// A request under construction: each buffer of its chain is added in turn.
pub(super) struct Walk<'a> {
    /// First descriptor of the chain, which identifies it in errors.
    start: u16,
    /// Maximum number of descriptors in the chain.
    limit: u32,
    steps: u32,
    header: [u8; HEADER_BYTES],
    header_len: usize,
    list: List<'a>,
    /// Number of segments that the device reads; set when the first writable buffer is added.
    readable: Option<usize>,
    readable_len: u64,
    writable_len: u64,
}

impl<'a> Walk<'a> {
    #[inline(always)]
    pub fn new(start: u16, limit: u32, segments: &'a mut [Segment]) -> Self {
        Self {
            start,
            limit,
            steps: 0,
            header: [0; HEADER_BYTES],
            header_len: 0,
            list: List { segments, len: 0 },
            readable: None,
            readable_len: 0,
            writable_len: 0,
        }
    }

    #[inline(always)]
    pub fn add(
        &mut self,
        view: &mut View,
        guest: u64,
        guest_len: u32,
        flags: u32,
    ) -> Result<(), RingError> {
        self.steps += 1;
        if self.steps > self.limit {
            return Err(self.too_long());
        }
        if flags & VRING_DESC_F_WRITE != 0 {
            if self.readable.is_none() {
                self.readable = Some(self.list.len);
            }
            self.writable_len += u64::from(guest_len);
            view.append(guest, guest_len, &mut self.list, self.readable.unwrap_or(0))
        } else {
            if self.readable.is_some() {
                return Err(RingError::Order(self.start));
            }
            let (mut addr, mut len) = (guest, guest_len);
            if self.header_len == 0 && len as usize == HEADER_BYTES {
                // The usual case: a separate descriptor for the header.
                view.read(addr, &mut self.header)?;
                self.header_len = HEADER_BYTES;
                len = 0;
            } else if self.header_len < HEADER_BYTES {
                let take = (HEADER_BYTES - self.header_len).min(len as usize);
                let part = self.header_len..self.header_len + take;
                view.read(addr, &mut self.header[part])?;
                self.header_len += take;
                // An end of 2^64 wraps to 0. This matters only if bytes remain, and those are looked up
                // again.
                addr = addr.wrapping_add(take as u64);
                len -= take as u32;
            }
            self.readable_len += u64::from(len);
            view.append(addr, len, &mut self.list, 0)
        }
        .ok_or(RingError::Buffer(guest, guest_len))?;
        if self.list.len > self.list.segments.len() {
            return Err(self.too_long());
        }
        Ok(())
    }

    pub fn too_long(&self) -> RingError {
        RingError::ChainLength {
            head: self.start,
            limit: self.limit,
        }
    }

    /// Builds the request. Its chain occupies `descriptors` of a packed ring, and `head` is the guest's id.
    #[inline(always)]
    pub fn finish(mut self, head: u16, descriptors: u16) -> Result<Chain, RingError> {
        if self.header_len < HEADER_BYTES {
            return Err(RingError::Header(self.start));
        }
        let readable = self.readable.unwrap_or(self.list.len);
        // The status is the last writable byte, wherever it is (virtio 1.3 §5.2.6).
        if self.list.len == readable {
            return Err(RingError::Status(self.start));
        }
        let last = &mut self.list.segments[self.list.len - 1];
        last.len -= 1;
        let status = last.addr + last.len;
        if last.len == 0 {
            self.list.len -= 1;
        }
        Ok(Chain {
            head,
            header: self.header,
            readable: readable as u16,
            readable_len: self.readable_len,
            writable: (self.list.len - readable) as u16,
            writable_len: self.writable_len - 1,
            descriptors,
            status,
        })
    }
}

struct List<'a> {
    segments: &'a mut [Segment],
    /// May be one more than fits; the walk then rejects the chain.
    len: usize,
}

impl List<'_> {
    #[inline]
    fn push(&mut self, addr: usize, len: usize, from: usize) {
        if self.len > self.segments.len() {
            return;
        }
        if self.len > from {
            let last = &mut self.segments[self.len - 1];
            if last.addr + last.len == addr {
                last.len += len;
                return;
            }
        }
        match self.segments.get_mut(self.len) {
            Some(segment) => {
                *segment = Segment { addr, len };
                self.len += 1;
            }
            None => self.len = self.segments.len() + 1,
        }
    }
}

/// Prefetches a cache line; the address need not be valid.
#[inline]
pub(super) fn prefetch(addr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and never faults, at any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(addr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}
