//! A ring of any kind while its guest is being moved to another machine: whatever is written to guest memory is
//! marked in the [dirty log](crate::log).
//!
//! - The buffers that a request may write, and its status, are marked when it is given back: all of it has been
//!   written by then, whoever wrote it, and the guest cannot see it before [`publish`](Logged::publish).
//! - What of the ring itself is ours to write is marked after each time that some of it may have been.

use std::sync::Arc;

use block::Segment;

use super::walk::View;
use super::{Chain, Ring, RingError, RingLayout, Ticket};
use crate::log::{DirtyLog, LogError};
use crate::memory::GuestMemory;

/// Where a ring marks what it writes.
#[derive(Clone)]
pub struct DirtyMarks {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// Guest address by which the used ring is marked, if the front-end named one.
    pub used: Option<u64>,
}

pub(super) struct Logged {
    pub ring: Ring,
    marks: DirtyMarks,
    /// Something was marked.
    marked: bool,
    /// Something was completed and not published yet.
    completed: bool,
    memory: Arc<GuestMemory>,
    /// Guest addresses and lengths of what we write of the ring.
    parts: [(u64, u64); 2],
    /// What a request under way may write, by the guest's name for it.
    writes: Box<[Vec<Segment>]>,
}

impl Logged {
    /// # Errors
    /// Something that may be written could not be marked.
    pub fn new(
        ring: Ring,
        view: &View,
        layout: &RingLayout,
        marks: DirtyMarks,
    ) -> Result<Self, LogError> {
        let memory = view.memory.clone();
        let n = u64::from(layout.size);
        let ring_bytes = match layout.packed {
            // Used elements take the place of available ones.
            true => [(layout.descriptors, 16 * n), (layout.used, 4)],
            false => [(0, 0), (layout.used, 6 + 8 * n)],
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
        // A ring that is taken up may have been tidied.
        logged.mark_ring();
        Ok(logged)
    }

    // Not inlined, here and below: it would cost the rings that mark nothing.
    #[inline(never)]
    pub fn waiting(&mut self) -> Result<u16, RingError> {
        self.ring.waiting()
    }

    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        let chain = self.ring.fetch(view, segments)?;
        let (first, count) = (usize::from(chain.readable), usize::from(chain.writable));
        // A name is below the ring's size. Two requests of one name are a driver's mistake, which costs it
        // the marks of the first.
        if let Some(writes) = self.writes.get_mut(usize::from(chain.head)) {
            writes.clear();
            writes.extend_from_slice(&segments[first..first + count]);
        }
        Ok(chain)
    }

    /// Marks what a request has written, which is all that it could.
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

    /// As of the ring below; the status has been written.
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
