//! A split ring that returns requests in the order in which they were fetched. It is used if there is no
//! region to record its requests.
//!
//! The used index then describes the state completely: it counts the requests that were returned, and
//! requests made available after those are in flight. A successor of a killed process starts there and
//! executes each of them once, whatever base the front-end sends. Requests that were finished and waited for
//! an older one are executed again; the guest has not been told of them.

use block::Segment;

use super::Split;
use crate::ring::{RingBase, RingError, RingLayout};
use crate::virtqueue::walk::View;
use crate::virtqueue::{Chain, Ticket};

pub struct InOrderSplit {
    ring: Split,
    /// The fetched requests, by their place in the available ring.
    fetched: Box<[Fetched]>,
    /// The place of each request, by its head.
    places: Box<[u16]>,
}

#[derive(Clone, Copy, Default)]
struct Fetched {
    head: u16,
    /// The number of bytes written, if the request is finished.
    done: Option<u32>,
}

impl InOrderSplit {
    /// Continues where the used ring ends.
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

    /// The position of the oldest request that was not returned.
    pub fn base(&self) -> RingBase {
        RingBase::split(self.ring.next_used)
    }

    #[inline(never)]
    pub fn available(&mut self) -> Result<u16, RingError> {
        let waiting = self.ring.available()?;
        // A finished request that waits keeps its place until it is returned.
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

    /// The place of the entry with this index in the available ring.
    fn place(&self, index: u16) -> usize {
        usize::from(index & (self.ring.size - 1))
    }
}
