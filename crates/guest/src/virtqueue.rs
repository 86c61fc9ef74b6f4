//! A split virtqueue, seen from the device (virtio 1.3 §2.7).
//!
//! The walk over a descriptor chain is our own: it checks every address against a cached window of
//! guest memory and allocates nothing. All ring memory is read once, with volatile or atomic loads,
//! because the guest may change it at any time; what was read is what was checked.

#![expect(
    unsafe_code,
    reason = "rings live in memory that a guest shares with us"
)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use block::Segment;
use thiserror::Error;
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};

use crate::memory::{GuestMemory, Window};

/// Bytes of a virtio-blk request header, which opens every chain.
const HEADER_BYTES: usize = 16;
const DESCRIPTOR_BYTES: u64 = 16;

/// Where the front-end says that a ring is; addresses are the front-end's own
/// (vhost-user: "Vring address description").
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    /// Number of descriptors, a power of two.
    pub size: u16,
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
    /// Where the device goes on in the available ring.
    pub next_available: u16,
    /// VIRTIO_RING_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Most segments of data that the device told the driver a request may have (seg_max). It binds
    /// indirect tables, which drivers size by it and not by the ring.
    pub max_segments: u16,
}

/// What is wrong with a ring. The guest broke the protocol, so that nothing in the queue can be
/// trusted until the driver resets it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RingError {
    /// The size is zero, no power of two, or over the limit.
    #[error("queue size {0} is not a power of two from 1 to {max}", max = Virtqueue::MAX_SIZE)]
    Size(u16),
    /// A part of the ring is not in guest memory.
    #[error("the {0} at front-end address {1:#x} is not in guest memory or not aligned")]
    Address(&'static str, u64),
    /// More was made available than the ring can hold.
    #[error("available index {index} is {ahead} entries ahead in a ring of {size}")]
    AvailableIndex {
        /// The guest's index.
        index: u16,
        /// Entries between ours and the guest's.
        ahead: u16,
        /// Ring size.
        size: u16,
    },
    /// An index points beyond its table.
    #[error("descriptor index {0} is beyond a table of {1}")]
    DescriptorIndex(u16, u32),
    /// The chain is a loop, or has more descriptors than a chain may have.
    #[error("descriptor chain {head} has a loop or more than {limit} descriptors")]
    ChainLength {
        /// First descriptor.
        head: u16,
        /// Most descriptors that a chain may have.
        limit: u32,
    },
    /// A buffer is not in guest memory.
    #[error("guest address {0:#x} with {1} bytes is not in guest memory")]
    Buffer(u64, u32),
    /// An indirect table is nested, chained, empty or cut off.
    #[error("indirect descriptor with {len} bytes and flags {flags:#x} is not allowed here")]
    Indirect {
        /// Bytes of the table.
        len: u32,
        /// Flags of the descriptor.
        flags: u16,
    },
    /// A device-readable buffer comes after a device-writable one.
    #[error("a device-readable descriptor follows a device-writable one in chain {0}")]
    Order(u16),
    /// Fewer than 16 readable bytes.
    #[error("chain {0} has no complete request header")]
    Header(u16),
    /// No writable byte.
    #[error("chain {0} has no status byte")]
    Status(u16),
}

/// A request as it lies in guest memory: its header, copied, and where its buffers are.
///
/// The segments themselves are in the slice that [`Virtqueue::fetch`] filled: the device-readable
/// ones first, then the device-writable ones, without header and status.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// The guest's name for the request.
    pub head: u16,
    /// The virtio-blk header.
    pub header: [u8; HEADER_BYTES],
    /// Segments that the device reads.
    pub readable: u16,
    /// Bytes that the device reads, after the header.
    pub readable_len: u64,
    /// Segments that the device writes.
    pub writable: u16,
    /// Bytes that the device writes, before the status.
    pub writable_len: u64,
    /// Our address of the status byte.
    status: usize,
}

/// The device's end of a split virtqueue.
pub struct Virtqueue {
    descriptors: *const Descriptor,
    available: *const AvailableHead,
    available_ring: *const u16,
    used: *mut UsedHead,
    used_ring: *mut UsedElement,
    size: u16,
    event_idx: bool,
    /// Most descriptors in a chain.
    chain_limit: u16,
    segments_max: usize,
    /// Index up to which available entries have been fetched.
    next_available: u16,
    /// The guest's index, as last read.
    seen_available: u16,
    /// Index up to which used entries have been written.
    next_used: u16,
    /// Index up to which used entries have been shown to the guest.
    published: u16,
    /// Nothing was published yet: the driver's event index says nothing about us.
    first: bool,
    /// The regions last looked at. A guest has its buffers in two as often as in one: below and
    /// above the hole for PCI.
    windows: [Window; 2],
    /// Keeps every address above mapped.
    memory: Arc<GuestMemory>,
}

// SAFETY: the pointers lead into shared memory that `memory` keeps mapped; nothing about them is
// bound to a thread, and only the owner of this value uses them.
unsafe impl Send for Virtqueue {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

#[repr(C)]
struct AvailableHead {
    flags: AtomicU16,
    index: AtomicU16,
}

#[repr(C)]
struct UsedHead {
    flags: AtomicU16,
    index: AtomicU16,
}

#[repr(C)]
struct UsedElement {
    id: u32,
    len: u32,
}

impl Virtqueue {
    /// The largest ring that QEMU builds (VIRTQUEUE_MAX_SIZE).
    pub const MAX_SIZE: u16 = 1024;

    /// Takes up a ring where its layout says.
    ///
    /// # Errors
    /// The size is not allowed, or a part lies outside `memory` or is not aligned.
    pub fn new(memory: Arc<GuestMemory>, layout: RingLayout) -> Result<Self, RingError> {
        let size = layout.size;
        if !size.is_power_of_two() || size > Self::MAX_SIZE {
            return Err(RingError::Size(size));
        }
        let n = u64::from(size);
        let place = |name, user: u64, len, align: usize| {
            memory
                .at_user(user, len)
                .filter(|addr| addr.is_multiple_of(align))
                .ok_or(RingError::Address(name, user))
        };
        // Data, header and status.
        let chain_limit = size.max(layout.max_segments.saturating_add(2));
        // Each ring ends with a 16-bit event index (virtio 1.3 §2.7.6, §2.7.8).
        let descriptors = place("descriptor table", layout.descriptors, n * 16, 16)?;
        let available = place("available ring", layout.available, 6 + 2 * n, 2)?;
        let used = place("used ring", layout.used, 6 + 8 * n, 4)?;
        let used_head = used as *mut UsedHead;
        // SAFETY: the used ring is mapped and aligned, as `place` found out.
        let next_used = unsafe { (*used_head).index.load(Ordering::Acquire) };
        Ok(Self {
            descriptors: descriptors as *const Descriptor,
            available: available as *const AvailableHead,
            available_ring: (available + 4) as *const u16,
            used: used_head,
            used_ring: (used + 4) as *mut UsedElement,
            size,
            event_idx: layout.event_idx,
            chain_limit,
            segments_max: usize::from(chain_limit) + memory.len(),
            next_available: layout.next_available,
            seen_available: layout.next_available,
            next_used,
            published: next_used,
            first: true,
            windows: [Window::default(); 2],
            memory,
        })
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where a successor would go on in the available ring.
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The guest's memory as it is mapped here.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Most segments that one chain can need: one for each descriptor, and one more for each border
    /// between regions that a buffer can lie across. Longer ones are refused.
    pub fn max_segments(&self) -> usize {
        self.segments_max
    }

    /// What [`max_segments`](Self::max_segments) is at most.
    pub const MAX_SEGMENTS: usize = Self::MAX_SIZE as usize + 2 + crate::MAX_MEM_SLOTS;

    /// Number of requests that wait to be fetched.
    ///
    /// # Errors
    /// The guest's index is impossible.
    #[inline]
    pub fn waiting(&mut self) -> Result<u16, RingError> {
        if self.seen_available == self.next_available {
            // SAFETY: `available` was checked and is kept mapped.
            self.seen_available = unsafe { (*self.available).index.load(Ordering::Acquire) };
        }
        let ahead = self.seen_available.wrapping_sub(self.next_available);
        if ahead > self.size {
            return Err(RingError::AvailableIndex {
                index: self.seen_available,
                ahead,
                size: self.size,
            });
        }
        Ok(ahead)
    }

    /// Takes the next request that [`waiting`](Self::waiting) counted, and writes to `segments`
    /// where its buffers are. A chain with more segments than fit is refused.
    ///
    /// # Errors
    /// The chain breaks the protocol.
    #[inline]
    pub fn fetch(&mut self, segments: &mut [Segment]) -> Result<Chain, RingError> {
        debug_assert_ne!(self.seen_available, self.next_available);
        self.prefetch();
        let head = self.head(0);
        self.next_available = self.next_available.wrapping_add(1);
        self.walk(head, segments)
    }

    /// The head of the chain that is `ahead` of the next one.
    #[inline]
    fn head(&self, ahead: u16) -> u16 {
        let entry = usize::from(self.next_available.wrapping_add(ahead) & (self.size - 1));
        // SAFETY: `entry` is below the ring's size.
        unsafe { ptr::read_volatile(self.available_ring.add(entry)) }
    }

    /// Starts to bring the next chains into this core's cache. The guest has just written them on
    /// another core; one after the other, each of the three steps from ring to header would wait for
    /// that core.
    #[inline]
    fn prefetch(&self) {
        let left = self.seen_available.wrapping_sub(self.next_available);
        let first = |ahead: u16| -> Option<Descriptor> {
            let head = self.head(ahead);
            // SAFETY: `head` is below the ring's size.
            (head < self.size)
                .then(|| unsafe { ptr::read_volatile(self.descriptors.add(usize::from(head))) })
        };
        let table = |d: Descriptor| {
            let indirect = u32::from(d.flags) & VRING_DESC_F_INDIRECT != 0;
            indirect
                .then(|| {
                    self.windows
                        .iter()
                        .find_map(|w| w.at(d.addr, DESCRIPTOR_BYTES))
                })
                .flatten()
        };
        if left > 6 {
            prefetch(
                self.descriptors
                    .wrapping_add(usize::from(self.head(6)))
                    .cast(),
            );
        }
        if left > 4
            && let Some(addr) = first(4).and_then(table)
        {
            prefetch(addr as *const u8);
        }
        if left > 2
            && let Some(d) = first(2)
        {
            let header = match table(d) {
                // SAFETY: `at` found 16 bytes mapped; they need not be aligned.
                Some(addr) => unsafe { ptr::read_unaligned(addr as *const Descriptor) }.addr,
                None => d.addr,
            };
            if let Some(addr) = self.windows.iter().find_map(|w| w.at(header, 1)) {
                prefetch(addr as *const u8);
            }
        }
    }

    fn walk(&mut self, head: u16, segments: &mut [Segment]) -> Result<Chain, RingError> {
        let mut table = Table::Ring;
        let mut table_len = u32::from(self.size);
        let mut index = head;
        let mut steps = 0;
        let limit = u32::from(self.chain_limit);

        let mut header = [0u8; HEADER_BYTES];
        let mut header_len = 0;
        // Segments so far; those that the device reads end at `readable` once one that it writes
        // has been seen.
        let mut list = List { segments, len: 0 };
        let mut readable = None;
        let mut readable_len = 0u64;
        let mut writable_len = 0u64;

        loop {
            if u32::from(index) >= table_len {
                return Err(RingError::DescriptorIndex(index, table_len));
            }
            let d = self.descriptor(table, index)?;
            let flags = u32::from(d.flags);

            if flags & VRING_DESC_F_INDIRECT != 0 {
                // virtio 1.3 §2.7.5.3.1: not nested, not chained; its own write flag is ignored.
                let nested = !matches!(table, Table::Ring);
                let bytes = u64::from(d.len);
                if nested
                    || flags & VRING_DESC_F_NEXT != 0
                    || bytes == 0
                    || !bytes.is_multiple_of(DESCRIPTOR_BYTES)
                {
                    return Err(RingError::Indirect {
                        len: d.len,
                        flags: d.flags,
                    });
                }
                table = match self.locate(d.addr, bytes) {
                    Some(addr) => Table::Indirect(addr as *const u8),
                    None => Table::Scattered(d.addr),
                };
                table_len = d.len / DESCRIPTOR_BYTES as u32;
                index = 0;
                continue;
            }

            steps += 1;
            if steps > limit {
                return Err(RingError::ChainLength { head, limit });
            }

            if flags & VRING_DESC_F_WRITE != 0 {
                if readable.is_none() {
                    readable = Some(list.len);
                }
                writable_len += u64::from(d.len);
                self.append(d.addr, d.len, &mut list, readable.unwrap_or(0))
            } else {
                if readable.is_some() {
                    return Err(RingError::Order(head));
                }
                let (mut addr, mut len) = (d.addr, d.len);
                if header_len == 0 && len as usize == HEADER_BYTES {
                    // As every driver does it: a descriptor for the header alone.
                    self.read(addr, &mut header)?;
                    header_len = HEADER_BYTES;
                    len = 0;
                } else if header_len < HEADER_BYTES {
                    let take = (HEADER_BYTES - header_len).min(len as usize);
                    self.read(addr, &mut header[header_len..header_len + take])?;
                    header_len += take;
                    // An end of 2^64 wraps to 0, which matters only if bytes remain, and those
                    // are looked up anew.
                    addr = addr.wrapping_add(take as u64);
                    len -= take as u32;
                }
                readable_len += u64::from(len);
                self.append(addr, len, &mut list, 0)
            }
            .ok_or(RingError::Buffer(d.addr, d.len))?;
            if list.len > list.segments.len() {
                return Err(RingError::ChainLength { head, limit });
            }

            if flags & VRING_DESC_F_NEXT == 0 {
                break;
            }
            index = d.next;
        }

        if header_len < HEADER_BYTES {
            return Err(RingError::Header(head));
        }
        let readable = readable.unwrap_or(list.len);
        // The status is the last writable byte, wherever it lies (virtio 1.3 §5.2.6).
        if list.len == readable {
            return Err(RingError::Status(head));
        }
        let last = &mut list.segments[list.len - 1];
        last.len -= 1;
        let status = last.addr + last.len;
        if last.len == 0 {
            list.len -= 1;
        }
        Ok(Chain {
            head,
            header,
            readable: readable as u16,
            readable_len,
            writable: (list.len - readable) as u16,
            writable_len: writable_len - 1,
            status,
        })
    }

    #[inline]
    fn descriptor(&mut self, table: Table, index: u16) -> Result<Descriptor, RingError> {
        let index = usize::from(index);
        match table {
            // SAFETY: `index` is below the ring's size, and the table is mapped and aligned.
            Table::Ring => Ok(unsafe { ptr::read_volatile(self.descriptors.add(index)) }),
            Table::Indirect(start) => {
                // SAFETY: `index` is below the number of descriptors that `locate` found mapped;
                // the guest may place the table at any address, so that the read is unaligned.
                Ok(unsafe { ptr::read_unaligned(start.cast::<Descriptor>().add(index)) })
            }
            Table::Scattered(start) => {
                let mut bytes = [0; DESCRIPTOR_BYTES as usize];
                self.read(
                    start.wrapping_add(index as u64 * DESCRIPTOR_BYTES),
                    &mut bytes,
                )?;
                // SAFETY: any 16 bytes are a descriptor.
                Ok(unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
            }
        }
    }

    /// Our address of a guest range, if one region holds it all.
    #[inline]
    fn locate(&mut self, guest: u64, len: u64) -> Option<usize> {
        self.windows[0]
            .at(guest, len)
            .or_else(|| self.windows[1].at(guest, len))
            .or_else(|| self.locate_anew(guest, len))
    }

    #[cold]
    fn locate_anew(&mut self, guest: u64, len: u64) -> Option<usize> {
        let window = self.memory.window(guest)?;
        self.windows = [window, self.windows[0]];
        window.at(guest, len)
    }

    /// Adds a buffer to the list, joined to the last segment where both touch and that one is not
    /// before `from`. `None` if a byte of it is not in guest memory.
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
    fn read(&mut self, guest: u64, to: &mut [u8]) -> Result<(), RingError> {
        let outside = RingError::Buffer(guest, to.len() as u32);
        if let Some(addr) = self.locate(guest, to.len() as u64) {
            // SAFETY: `locate` found the whole range mapped; `to` is our own memory.
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

    /// Gives a request back to the guest: its status, and how many bytes were written to its
    /// buffers. The guest sees it after [`publish`](Self::publish).
    #[inline]
    pub fn complete(&mut self, ticket: &Ticket, status: u8, written: u32) {
        let entry = usize::from(self.next_used & (self.size - 1));
        // SAFETY: the status byte was found mapped when the chain was fetched from this queue, and
        // `entry` is below the ring's size.
        unsafe {
            ptr::write_volatile(ticket.status as *mut u8, status);
            ptr::write_volatile(
                self.used_ring.add(entry),
                UsedElement {
                    id: u32::from(ticket.head),
                    len: written,
                },
            );
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Shows all that was completed to the guest, and tells whether it wants an interrupt for it
    /// (virtio 1.3 §2.7.7).
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        self.published = new;
        // SAFETY: both rings are mapped, and the event index lies behind the available ring.
        unsafe {
            (*self.used).index.store(new, Ordering::Release);
            // The guest writes its event index and then reads ours; one of us must see the other.
            fence(Ordering::SeqCst);
            let first = std::mem::replace(&mut self.first, false);
            if self.event_idx {
                let event = ptr::read_volatile(self.available_ring.add(usize::from(self.size)));
                // virtio 1.3 §2.7.10: was `event` passed on the way from `old` to `new`?
                first || new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            } else {
                let flags = (*self.available).flags.load(Ordering::Relaxed);
                u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
            }
        }
    }

    /// Asks the guest for a kick at the next request, and tells whether one has come meanwhile.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        // SAFETY: both rings are mapped, and the event index lies behind the used ring.
        unsafe {
            if self.event_idx {
                let event = self.used_ring.add(usize::from(self.size)).cast::<u16>();
                ptr::write_volatile(event, self.next_available);
            } else {
                (*self.used).flags.store(0, Ordering::Relaxed);
            }
            // The guest writes its index and then reads what we just wrote.
            fence(Ordering::SeqCst);
            (*self.available).index.load(Ordering::Acquire) != self.next_available
        }
    }

    /// Tells the guest that kicks are not needed.
    #[inline]
    pub fn disable_kicks(&mut self) {
        // With event indices nothing needs to be done: ours falls behind by itself, and the guest
        // kicks only when it passes it.
        if !self.event_idx {
            // SAFETY: the used ring is mapped.
            unsafe {
                (*self.used)
                    .flags
                    .store(VRING_USED_F_NO_NOTIFY as u16, Ordering::Relaxed);
            }
        }
    }

    /// Copies bytes from the segments of a chain of this queue; returns how many there were.
    pub fn copy_from(&self, segments: &[Segment], to: &mut [u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(to.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `to` has room for `len`.
            unsafe {
                ptr::copy_nonoverlapping(segment.addr as *const u8, to.as_mut_ptr().add(done), len);
            }
            done += len;
        }
        done
    }

    /// Copies bytes to the segments of a chain of this queue; returns how many there was room for.
    pub fn copy_to(&self, segments: &[Segment], from: &[u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(from.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `from` has `len` more.
            unsafe {
                ptr::copy_nonoverlapping(from.as_ptr().add(done), segment.addr as *mut u8, len);
            }
            done += len;
        }
        done
    }
}

/// What is left of a chain while its request is under way: enough to give it back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ticket {
    head: u16,
    status: usize,
}

impl Chain {
    /// What [`Virtqueue::complete`] needs.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket {
            head: self.head,
            status: self.status,
        }
    }
}

/// Asks for a line of memory, which need not exist.
#[inline]
fn prefetch(addr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and never faults, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(addr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}

#[derive(Clone, Copy)]
enum Table {
    Ring,
    Indirect(*const u8),
    /// An indirect table that spans regions, by guest address.
    Scattered(u64),
}

struct List<'a> {
    segments: &'a mut [Segment],
    /// May be one more than fits, which the walk refuses.
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
