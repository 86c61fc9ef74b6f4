//! One moment for several disks, without waiting for requests in flight.
//!
//! 1. Every thread that serves one of the disks notes which writes are in flight, and waits: it fetches nothing.
//! 2. When all of them wait, the moment is there: the caller switches what it has to.
//! 3. All go on. Requests that they fetch from now on are later than the moment.
//!
//! A write that depends on another one is sent when that has completed. So if it was fetched before the moment, the other
//! one was too: what the disks are at the moment is what a crash of the guest's host would leave, if the writes in flight had
//! all reached the disks.
//!
//! A thread may be busy. The others do not wait for it longer than [`HELD_MAX`](crate::meeting::HELD_MAX): they go on, and all try again.

use std::borrow::Borrow;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use block::{Engine, Request};

use crate::command::Command;
use crate::disk::Disk;
use crate::disk::fleece::Fleece;
use crate::meeting::{HELD_MAX, Meeting, TIMEOUT};
use crate::queue::slot::RequestState;
use crate::request::RequestId;
use crate::thread::IoThread;
use crate::worker::{Preceding, Worker};

/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(2);

/// A disk, its fleece, and all threads that serve it.
pub struct CutDisk<D: Borrow<IoThread>> {
    pub disk: Arc<Disk>,
    pub fleece: Arc<Fleece>,
    pub threads: Vec<D>,
}

/// How long guests were held.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// For how long no request was fetched.
    pub time: Duration,
    /// How often it was tried.
    pub tries: u32,
}

/// Begins to preserve what these disks are at one moment, each in its fleece. `switch` is called at that moment. Queues then
/// take over which bitmaps record changes. Blocks, but does not wait for requests in flight: see
/// [`Fleece::wait_settled`].
///
/// # Errors
/// One of the disks has a fleece already, or a thread was too busy to stop. Nothing was done.
pub fn cut<D: Borrow<IoThread>>(disks: &[CutDisk<D>], switch: impl Fn()) -> io::Result<Held> {
    let mut sorted: Vec<_> = disks.iter().map(|disk| &disk.disk).collect();
    // In one order, so that two callers do not wait for each other.
    sorted.sort_by_key(|disk| Arc::as_ptr(disk));
    let _alone: Vec<_> = sorted
        .iter()
        .map(|disk| disk.replacing.lock().unwrap_or_else(|e| e.into_inner()))
        .collect();
    if let Some(disk) = sorted.iter().find(|disk| disk.fleece().is_some()) {
        let name = &disk.name;
        return Err(io::Error::other(format!(
            "disk {name}: a backup of it is open"
        )));
    }
    let mut threads: Vec<&IoThread> = disks
        .iter()
        .flat_map(|disk| disk.threads.iter().map(Borrow::borrow))
        .collect();
    threads.sort_by_key(|thread| thread.thread_id());
    threads.dedup_by_key(|thread| thread.thread_id());
    let pairs: Vec<_> = disks
        .iter()
        .map(|disk| (disk.disk.clone(), disk.fleece.clone()))
        .collect();
    let deadline = Instant::now() + TIMEOUT;
    for tries in 1.. {
        if let Some(time) = try_cut(&threads, &pairs, &switch) {
            return Ok(Held { time, tries });
        }
        if Instant::now() >= deadline {
            break;
        }
        thread::sleep(PAUSE);
    }
    Err(io::Error::other(format!(
        "an I/O thread did not stop within {} ms, for {} s",
        HELD_MAX.as_millis(),
        TIMEOUT.as_secs()
    )))
}

fn try_cut(
    threads: &[&IoThread],
    disks: &[(Arc<Disk>, Arc<Fleece>)],
    switch: &impl Fn(),
) -> Option<Duration> {
    let meeting = Arc::new(Meeting::default());
    for thread in threads {
        thread.send(Command::Cut {
            disks: disks.to_vec(),
            meeting: meeting.clone(),
        });
    }
    meeting.decide(threads.len(), |is_reached| {
        for (disk, fleece) in disks {
            if is_reached {
                disk.set_fleece(Some(fleece.clone()));
            } else {
                fleece.clear_preceding();
            }
        }
        if is_reached {
            switch();
        }
    })
}

/// Stops preserving what a disk was. Its fleece has ended.
pub fn end_cut(disk: &Arc<Disk>, threads: &[impl Borrow<IoThread>]) {
    disk.set_fleece(None);
    for thread in threads {
        thread.borrow().send(Command::EndCut { disk: disk.clone() });
    }
}

impl<E: Engine> Worker<E> {
    /// Takes part in a cut.
    pub fn cut(&mut self, disks: &[(Arc<Disk>, Arc<Fleece>)], meeting: &Meeting) {
        let mut all: Vec<_> = disks
            .iter()
            .map(|(disk, fleece)| Preceding {
                fleece: fleece.clone(),
                writes: self.writes_in_flight(disk),
            })
            .collect();
        let is_reached = meeting.arrive(|| {
            for preceding in &all {
                let ranges: Vec<_> = preceding.writes.iter().map(|&(_, range)| range).collect();
                preceding.fleece.add_preceding(&ranges);
            }
        });
        if !is_reached {
            return;
        }
        for (disk, fleece) in disks {
            for number in self.queues.of_disk(disk) {
                let queue = self.queues.get(number);
                queue.set_fleece(Some(fleece.clone()));
                queue.update_bitmaps();
            }
        }
        all.retain(|preceding| !preceding.writes.is_empty());
        self.control.preceding.append(&mut all);
    }

    /// The writes of a disk that are past the [plan](crate::path::plan) stage, each with its range.
    fn writes_in_flight(&mut self, disk: &Arc<Disk>) -> Vec<(RequestId, (u64, u64))> {
        let mut writes = Vec::new();
        for number in self.queues.of_disk(disk) {
            for (slot, s) in self.queues.get(number).slots.iter_mut() {
                let is_planned = !matches!(
                    s.state,
                    RequestState::Held | RequestState::Preserving | RequestState::Done
                );
                if let Request::Write { at, len }
                | Request::Discard { at, len }
                | Request::WriteZeroes { at, len, .. } = s.request
                    && is_planned
                {
                    s.precedes_cut = true;
                    writes.push((RequestId::new(number, slot), (at.0, len)));
                }
            }
        }
        writes
    }

    /// Tells fleeces of writes that have ended.
    #[cold]
    pub fn check_preceding(&mut self) {
        let queues = &mut self.queues;
        self.control.preceding.retain_mut(|preceding| {
            preceding.writes.retain(|&(id, range)| {
                // Its queue stays as long as it is in flight.
                let slot = queues.find(id.queue).and_then(|q| q.slots.find(id.slot));
                let is_in_flight =
                    slot.is_some_and(|s| s.precedes_cut && s.state != RequestState::Done);
                if !is_in_flight {
                    preceding.fleece.preceding_ended(range);
                }
                is_in_flight
            });
            !preceding.writes.is_empty()
        });
    }

    /// What a disk was is not preserved any more.
    pub fn end_cut(&mut self, disk: &Arc<Disk>) {
        for number in self.queues.of_disk(disk) {
            let queue = self.queues.get(number);
            // Another one may have begun.
            queue.set_fleece(disk.fleece());
        }
    }
}
