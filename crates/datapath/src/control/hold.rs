//! Holds disks at one moment: nothing is fetched from their queues, and no request is in flight.

use std::borrow::Borrow;
use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::replace::{answers, ask, ask_all};
use crate::command::Command;
use crate::disk::Disk;
use crate::thread::IoThread;

/// Disks to which no request is in flight. Nothing is fetched from their queues, and starts of queues wait, until this is
/// dropped. Queues can stop.
pub struct HeldDisks<'a, D: Borrow<IoThread>> {
    disks: &'a [(Arc<Disk>, Vec<D>)],
    _alone: Vec<MutexGuard<'a, ()>>,
}

/// A disk cannot be held.
pub struct HoldError {
    /// Its name.
    pub disk: String,
    /// Requests wait for its storage to work again, a thread has ended, or ([`io::ErrorKind::TimedOut`]) requests have not
    /// ended by the deadline.
    pub error: io::Error,
}

impl<'a, D: Borrow<IoThread>> HeldDisks<'a, D> {
    /// Holds these disks; each comes with all threads that serve it. Blocks until no request is in flight. A thread that has
    /// to start or stop queues meanwhile must not call it.
    ///
    /// # Errors
    /// A disk cannot be held, and none is.
    pub fn hold(
        disks: &'a [(Arc<Disk>, Vec<D>)],
        deadline: Option<Instant>,
    ) -> Result<Self, HoldError> {
        let mut sorted: Vec<_> = disks.iter().map(|(disk, _)| disk).collect();
        // In one order, so that two callers do not wait for each other.
        sorted.sort_by_key(|disk| Arc::as_ptr(disk));
        let alone = sorted.iter();
        let alone = alone.map(|disk| disk.replacing.lock().unwrap_or_else(|e| e.into_inner()));
        let held = Self {
            disks,
            _alone: alone.collect(),
        };
        // All at once: the guests wait for the slowest request of all, not for one after the other.
        let pauses: Vec<_> = disks
            .iter()
            .map(|(disk, threads)| {
                let pause = |reply| Command::Pause {
                    disk: disk.clone(),
                    reply,
                };
                (disk, ask(threads, pause))
            })
            .collect();
        for (disk, pause) in pauses {
            answers(&pause, deadline).map_err(|error| HoldError {
                disk: disk.name.clone(),
                error,
            })?;
        }
        Ok(held)
    }
}

impl<D: Borrow<IoThread>> Drop for HeldDisks<'_, D> {
    fn drop(&mut self) {
        for (disk, threads) in self.disks {
            // A thread that has ended serves nothing that could continue.
            let _ = ask_all(threads, |reply| Command::Unpause {
                disk: disk.clone(),
                replaced: false,
                reply,
            });
        }
    }
}

/// Does `change` at a moment at which no request to any of these disks is in flight. Queues then take over which bitmaps
/// record changes. Otherwise as [`HeldDisks::hold`].
///
/// # Errors
/// Requests of a disk wait for its storage to work again, or a thread has ended. Nothing was done.
pub fn hold<D: Borrow<IoThread>, T>(
    disks: &[(Arc<Disk>, Vec<D>)],
    change: impl FnOnce() -> T,
) -> io::Result<T> {
    let _held = HeldDisks::hold(disks, None).map_err(|e| e.error)?;
    Ok(change())
}
