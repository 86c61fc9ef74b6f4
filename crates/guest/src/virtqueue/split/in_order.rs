//! A split ring that gives requests back in the order in which they were fetched, for want of a region in which they
//! could be written down.
//!
//! The used index then says it all: as many were given back, and what was made available after these is in flight. A
//! successor of a process that was killed begins there and does each of them once, whatever the front-end says of the
//! base. Some that were done, and waited for an older one, are done again; their guest has not heard of them.

use block::Segment;

use super::Split;
use crate::virtqueue::walk::View;
use crate::virtqueue::{Chain, RingBase, RingError, RingLayout, Ticket};

pub struct InOrderSplit {
    ring: Split,
    /// The requests that were fetched, by place in the available ring.
    fetched: Box<[Fetched]>,
    /// The place of each, by its head.
    places: Box<[u16]>,
}

#[derive(Clone, Copy, Default)]
struct Fetched {
    head: u16,
    /// Once it is done, with how many bytes were written.
    done: Option<u32>,
}

impl InOrderSplit {
    /// Goes on where the used ring ends.
    pub fn new(view: &View, layout: &RingLayout, chain_limit: u16) -> Result<Self, RingError> {
        let mut ring = Split::new(view, layout, chain_limit)?;
        ring.next_available = ring.next_used;
        ring.seen_available = ring.next_used;
        let size = usize::from(layout.size);
        Ok(Self {
            ring,
            fetched: vec![Fetched::default(); size].into(),
            places: vec![0; size].into(),
        })
    }

    pub fn address(&self) -> usize {
        self.ring.address()
    }

    /// The oldest request that was not given back.
    pub fn base(&self) -> RingBase {
        RingBase::split(self.ring.next_used)
    }

    #[inline(never)]
    pub fn waiting(&mut self) -> Result<u16, RingError> {
        let waiting = self.ring.waiting()?;
        // What is done and waits has its place until it is given back.
        let (index, size) = (self.ring.seen_available, self.ring.size);
        match index.wrapping_sub(self.ring.next_used) {
            ahead if ahead > size => Err(RingError::AvailableIndex { index, ahead, size }),
            _ => Ok(waiting),
        }
    }

    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        let place = self.place(self.ring.next_available);
        let chain = self.ring.fetch(view, segments)?;
        self.fetched[place] = Fetched {
            head: chain.head,
            done: None,
        };
        self.places[usize::from(chain.head)] = place as u16;
        Ok(chain)
    }

    #[inline(never)]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        let place = self.places[usize::from(ticket.head)];
        self.fetched[usize::from(place)].done = Some(written);
        while self.ring.next_used != self.ring.next_available {
            let place = self.place(self.ring.next_used);
            let Fetched { head, done } = self.fetched[place];
            let Some(written) = done else {
                return;
            };
            self.ring.give_back(head, written);
        }
    }

    #[inline(never)]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    #[inline(never)]
    pub fn enable_kicks(&mut self) -> bool {
        self.ring.enable_kicks()
    }

    #[inline(never)]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks();
    }

    /// Where the available ring has its entry of this index.
    fn place(&self, index: u16) -> usize {
        usize::from(index & (self.ring.size - 1))
    }
}
