//! A ring whose guest is being migrated to another machine: all writes to guest memory are marked in the
//! [dirty log](crate::log).
//!
//! - The writable buffers of a request and its status are marked when the request is returned. By then all of
//!   them have been written, by this process or by the kernel, and the guest cannot see the request before
//!   [`publish`](Logged::publish).
//! - The parts of the ring that the device writes are marked after each operation that may have written them.

use std::sync::Arc;

use block::Segment;

use super::walk::View;
use super::{Chain, Ring, Ticket};
use crate::log::{DirtyLog, LogError};
use crate::memory::GuestMemory;
use crate::ring::{RingError, RingLayout};

/// The log of a ring's writes.
#[derive(Clone)]
pub struct DirtyMarks {
    /// The dirty log.
    pub log: Arc<DirtyLog>,
    /// Guest address with which the used ring is marked, if the front-end sent one.
    pub used: Option<u64>,
}

pub(super) struct Logged {
    pub ring: Ring,
    marks: DirtyMarks,
    /// Something was marked since the last [`take_marked`](Logged::take_marked).
    marked: bool,
    /// A request was completed and not published yet.
    completed: bool,
    memory: Arc<GuestMemory>,
    /// Guest addresses and lengths of the parts of the ring that the device writes.
    parts: [(u64, u64); 2],
    /// The segments that each request in flight may write, by the guest's id of the request.
    writes: Box<[Vec<Segment>]>,
}

impl Logged {
    /// # Errors
    /// Memory that may be written is not covered by the log.
    pub fn new(
        ring: Ring,
        view: &View,
        layout: &RingLayout,
        marks: DirtyMarks,
    ) -> Result<Self, LogError> {
        let memory = view.memory.clone();
        let n = u64::from(layout.size);
        let ring_bytes = if layout.packed {
            // Used elements overwrite available ones.
            [(layout.descriptors, 16 * n), (layout.used, 4)]
        } else {
            [(0, 0), (layout.used, 6 + 8 * n)]
        };
        let mut parts = ring_bytes.map(|(user, len)| {
            let guest = memory.guest_of_user(user, len);
            guest.map_or((0, 0), |guest| (guest, len))
        });
        if let Some(used) = marks.used {
            parts[1].0 = used;
        }
        marks.log.check_covers(memory.end())?;
        for (guest, len) in parts {
            marks.log.check_covers(guest.saturating_add(len))?;
        }
        let mut logged = Self {
            ring,
            marks,
            marked: false,
            completed: false,
            memory,
            parts,
            writes: vec![Vec::new(); usize::from(layout.size)].into(),
        };
        // Opening the ring may have changed it.
        logged.mark_ring();
        Ok(logged)
    }

    // Not inlined, here and below: inlining would slow down the rings that mark nothing.
    #[inline(never)]
    pub fn available(&mut self) -> Result<u16, RingError> {
        self.ring.available()
    }

    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        let chain = self.ring.fetch(view, segments)?;
        let (first, count) = (usize::from(chain.readable), usize::from(chain.writable));
        // An id is less than the ring's size. Two requests with one id are a driver error; the marks of the
        // first are then lost.
        if let Some(writes) = self.writes.get_mut(usize::from(chain.head)) {
            writes.clear();
            writes.extend_from_slice(&segments[first..first + count]);
        }
        Ok(chain)
    }

    /// Marks everything that a request could write.
    pub fn mark(&mut self, ticket: &Ticket) {
        let status = Segment {
            addr: ticket.status,
            len: 1,
        };
        let writes = self.writes.get(usize::from(ticket.head));
        for &segment in writes.into_iter().flatten().chain([&status]) {
            for (guest, len) in self.memory.guest_ranges(segment) {
                self.marks.log.mark(guest, len);
            }
        }
        self.marked = true;
    }

    pub fn take_marked(&mut self) -> bool {
        std::mem::take(&mut self.marked)
    }

    /// Completes a request in the underlying ring; its status has been written.
    #[inline(never)]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        self.mark(ticket);
        self.ring.complete(ticket, written);
        self.completed = true;
    }

    #[inline(never)]
    pub fn publish(&mut self) -> bool {
        let wants_call = self.ring.publish();
        if std::mem::take(&mut self.completed) {
            self.mark_ring();
        }
        wants_call
    }

    #[inline(never)]
    pub fn enable_kicks(&mut self) -> bool {
        let more = self.ring.enable_kicks();
        self.mark_ring();
        more
    }

    #[inline(never)]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks();
        self.mark_ring();
    }

    fn mark_ring(&mut self) {
        for (guest, len) in self.parts {
            self.marks.log.mark(guest, len);
        }
        self.marked = true;
    }
}
