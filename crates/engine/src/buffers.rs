//! Guest memory registered with a ring. The kernel pins its pages, and an operation names a buffer, so that
//! the kernel need not look up the pages.

use std::io;
use std::ptr;

use block::Segment;
use io_uring::Submitter;

/// Entries in the ring's buffer table; this is the kernel's limit.
const BUFFERS_MAX: u32 = 1 << 14;

/// Largest buffer that the kernel accepts, in bytes.
const BUFFER_BYTES: usize = 1 << 30;

/// The registered buffers of a ring.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Sorted by address, without overlap.
    list: Vec<Buffer>,
    /// Free entries of the table; `None` until the table has been registered.
    free: Option<Vec<u16>>,
}

struct Buffer {
    memory: Segment,
    entry: u16,
    users: usize,
}

impl Buffers {
    /// Registers memory in pieces. Memory that is added several times is registered only once.
    ///
    /// # Safety
    /// As for `block::Engine::register`.
    #[expect(
        unsafe_code,
        reason = "the caller promises that the memory stays as it is"
    )]
    pub unsafe fn add(&mut self, ring: &Submitter<'_>, memory: &[Segment]) -> io::Result<()> {
        if self.free.is_none() {
            ring.register_buffers_sparse(BUFFERS_MAX)?;
            self.free = Some((0..BUFFERS_MAX as u16).rev().collect());
        }
        for (done, piece) in pieces(memory).enumerate() {
            // SAFETY: the caller's promise.
            if let Err(e) = unsafe { self.add_piece(ring, piece) } {
                pieces(memory)
                    .take(done)
                    .for_each(|p| self.remove_piece(ring, p));
                return Err(e);
            }
        }
        Ok(())
    }

    #[expect(
        unsafe_code,
        reason = "the caller promises that the memory stays as it is"
    )]
    unsafe fn add_piece(&mut self, ring: &Submitter<'_>, memory: Segment) -> io::Result<()> {
        let position = self.list.partition_point(|b| b.memory.addr < memory.addr);
        if let Some(there) = self.list.get_mut(position)
            && there.memory == memory
        {
            there.users += 1;
            return Ok(());
        }
        let full = || io::Error::other("the ring has no entry left for a buffer");
        let free = self.free.as_mut().ok_or_else(full)?;
        let entry = free.pop().ok_or_else(full)?;
        let iovec = libc::iovec {
            iov_base: memory.addr as *mut _,
            iov_len: memory.len,
        };
        // SAFETY: the caller promises that the memory stays mapped until it is removed.
        if let Err(e) = unsafe { ring.register_buffers_update(entry.into(), &[iovec], None) } {
            free.push(entry);
            return Err(e);
        }
        let buffer = Buffer {
            memory,
            entry,
            users: 1,
        };
        self.list.insert(position, buffer);
        Ok(())
    }

    pub fn remove(&mut self, ring: &Submitter<'_>, memory: &[Segment]) {
        pieces(memory).for_each(|piece| self.remove_piece(ring, piece));
    }

    fn remove_piece(&mut self, ring: &Submitter<'_>, memory: Segment) {
        let Some(position) = self.list.iter().position(|b| b.memory == memory) else {
            return;
        };
        self.list[position].users -= 1;
        if self.list[position].users == 0 {
            let entry = self.list.remove(position).entry;
            let none = libc::iovec {
                iov_base: ptr::null_mut(),
                iov_len: 0,
            };
            // SAFETY: an empty buffer frees the entry and names no memory.
            #[expect(unsafe_code, reason = "the call is the same as for a buffer")]
            let freed = unsafe { ring.register_buffers_update(entry.into(), &[none], None) };
            if let (Ok(()), Some(free)) = (freed, &mut self.free) {
                free.push(entry);
            }
        }
    }

    /// The table entry of the buffer that contains the whole `segment`.
    #[inline]
    pub fn find(&self, segment: Segment) -> Option<u16> {
        if self.list.is_empty() {
            return None;
        }
        let after = self.list.partition_point(|b| b.memory.addr <= segment.addr);
        let buffer = &self.list[after.checked_sub(1)?];
        let offset = segment.addr - buffer.memory.addr;
        (offset < buffer.memory.len && segment.len <= buffer.memory.len - offset)
            .then_some(buffer.entry)
    }
}

/// Splits memory into pieces that the kernel accepts as buffers.
fn pieces(memory: &[Segment]) -> impl Iterator<Item = Segment> + '_ {
    memory.iter().flat_map(|m| {
        (0..m.len).step_by(BUFFER_BYTES).map(move |offset| Segment {
            addr: m.addr + offset,
            len: BUFFER_BYTES.min(m.len - offset),
        })
    })
}
