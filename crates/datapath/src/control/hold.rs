//! Holds disks at one moment: nothing is fetched from their queues, and no request is in flight.

use std::borrow::Borrow;
use std::io;
use std::sync::Arc;

use super::replace::{answers, ask, ask_all};
use crate::command::Command;
use crate::disk::Disk;
use crate::thread::IoThread;

/// Does `change` at a moment at which no request to any of these disks is in flight; each comes with all threads that serve
/// it. Queues then take over which bitmaps record changes. Blocks. A thread that has to start or stop queues meanwhile must
/// not call it.
///
/// # Errors
/// Requests of a disk wait for its storage to work again, or a thread has ended. Nothing was done.
pub fn hold<D: Borrow<IoThread>, T>(
    disks: &[(Arc<Disk>, Vec<D>)],
    change: impl FnOnce() -> T,
) -> io::Result<T> {
    let mut sorted: Vec<_> = disks.iter().map(|(disk, _)| disk).collect();
    // In one order, so that two callers do not wait for each other.
    sorted.sort_by_key(|disk| Arc::as_ptr(disk));
    let _alone: Vec<_> = sorted
        .iter()
        .map(|disk| disk.replacing.lock().unwrap_or_else(|e| e.into_inner()))
        .collect();
    // All at once: the guests wait for the slowest request of all, not for one after the other.
    let pauses: Vec<_> = disks
        .iter()
        .map(|(disk, threads)| {
            ask(threads, |reply| Command::Pause {
                disk: disk.clone(),
                reply,
            })
        })
        .collect();
    let held: Vec<_> = pauses.iter().map(|pause| answers(pause)).collect();
    let held: io::Result<Vec<()>> = held.into_iter().collect();
    let result = held.map(|_| change());
    for (disk, threads) in disks {
        // A thread that has ended serves nothing that could continue.
        let _ = ask_all(threads, |reply| Command::Unpause {
            disk: disk.clone(),
            replaced: false,
            reply,
        });
    }
    result
}
