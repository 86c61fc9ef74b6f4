//! What requests to mapped images have the blocking pool do.

use std::sync::Arc;

use block::{FileOffset, GuestOffset};
use image::{Allocation, Awaited, Chain, ImageError, Prepared, Reclaimed, ZeroMode};

use crate::disk::Disk;
use crate::resources::blocking_pool::{Job, JobResult};
use crate::resources::cow::CowWrite;

/// A job whose errors are logged, and fail the request.
pub(crate) fn blocking(
    disk: &Arc<Disk>,
    job: impl FnOnce() -> Result<JobResult, ImageError> + Send + 'static,
) -> Job {
    let disk = disk.clone();
    Box::new(move || {
        job().unwrap_or_else(|e| {
            disk.image_failed(&e);
            JobResult::Failed {
                errno: e.errno(),
                is_permanent: e.is_permanent(),
            }
        })
    })
}

/// The same for a job that may need clusters: freed ones are reclaimed before it fails for lack of space. The request holds
/// no pin meanwhile.
pub(crate) fn changing(
    disk: &Arc<Disk>,
    chain: &Arc<Chain>,
    job: impl FnOnce(&Chain) -> Result<JobResult, ImageError> + Send + 'static,
) -> Job {
    let chain = chain.clone();
    blocking(disk, move || {
        let reclaimed = chain.reclaimed();
        match job(&chain) {
            Err(e) if e.is_no_space() => reclaim(&chain, reclaimed)?.ok_or(e),
            result => result,
        }
    })
}

/// A write found no space, with this errno: gives its clusters back, and reclaims freed ones.
pub(crate) fn make_space(
    chain: &Chain,
    allocation: Option<Allocation>,
    errno: i32,
) -> Result<JobResult, ImageError> {
    let reclaimed = match allocation {
        Some(allocation) => {
            let reclaimed = allocation.reclaimed_before();
            chain.abort(allocation);
            reclaimed
        }
        None => chain.reclaimed(),
    };
    Ok(reclaim(chain, reclaimed)?.unwrap_or(JobResult::Failed {
        errno,
        is_permanent: false,
    }))
}

/// Reclaims freed clusters; `None` if there are none.
fn reclaim(chain: &Chain, since: u64) -> Result<Option<JobResult>, ImageError> {
    Ok(match chain.reclaim(since)? {
        Reclaimed::Some => Some(JobResult::LookUpAgain),
        Reclaimed::InUse => Some(JobResult::WaitFor(Awaited::FreedClusters)),
        Reclaimed::None => None,
    })
}

/// Has the tables of an image lead to clusters that were written.
pub(crate) fn commit(chain: &Chain, disk: &Disk, allocation: Allocation) -> JobResult {
    let Err((e, allocation)) = chain.commit_or_keep(allocation) else {
        return JobResult::Committed;
    };
    disk.image_failed(&e);
    if e.is_permanent() {
        chain.abort(allocation);
        JobResult::Failed {
            errno: e.errno(),
            is_permanent: true,
        }
    } else {
        JobResult::NotCommitted(allocation, e.errno())
    }
}

/// Makes an image durable, with its changed tables.
pub(crate) fn flush(chain: &Chain, disk: &Disk) -> JobResult {
    let Err(e) = chain.flush() else {
        return JobResult::Flushed {
            errno: 0,
            lost: false,
        };
    };
    disk.image_failed(&e);
    JobResult::Flushed {
        errno: e.errno(),
        lost: matches!(e, ImageError::Lost { .. }),
    }
}

/// How many of these bytes the engine can read; or, as an error, how many it cannot read alone: those of one block of the
/// file, where a raw file ends or the piece begins in the middle of one.
pub(crate) fn whole_blocks(at: FileOffset, len: u64, block: u32) -> Result<u64, u64> {
    let block = u64::from(block);
    match (at.0 % block, len - len % block) {
        (0, 0) => Err(len),
        (0, whole) => Ok(whole),
        (skip, _) => Err(len.min(block - skip)),
    }
}

/// Reads bytes that the engine cannot read alone.
pub(crate) fn part_of_block(
    chain: &Chain,
    at: GuestOffset,
    len: u64,
) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; len as usize];
    let pin = chain.pins().pin(0);
    let read = chain.read(&pin, at, &mut bytes);
    chain.pins().unpin(pin);
    read.map(|()| bytes)
}

/// Takes clusters for a write, and fills what the guest does not write of them.
pub(crate) fn prepare(chain: &Chain, at: GuestOffset, len: u64) -> Result<JobResult, ImageError> {
    Ok(match chain.prepare_write(at, len)? {
        Prepared::Mapped => JobResult::LookUpAgain,
        Prepared::Wait(waiting) => JobResult::WaitFor(waiting),
        Prepared::Allocated(allocation) => fill(chain, allocation)?,
    })
}

/// Fills what the guest does not write of new clusters: in a buffer for one write of all, or on the disk.
pub(crate) fn fill(chain: &Chain, allocation: Allocation) -> Result<JobResult, ImageError> {
    if allocation.fills.is_empty() {
        return Ok(JobResult::Prepared(allocation));
    }
    match CowWrite::read(chain, &allocation) {
        Ok(Some(write)) => Ok(JobResult::PreparedCow(allocation, write)),
        Ok(None) => chain.fill(allocation).map(JobResult::Prepared),
        Err(e) => {
            chain.abort(allocation);
            Err(e)
        }
    }
}

/// Gives a range up, as far as that is possible without waiting for other requests.
pub(crate) fn zero(
    chain: &Chain,
    at: GuestOffset,
    len: u64,
    why: ZeroMode,
) -> Result<JobResult, ImageError> {
    Ok(match chain.zero(at, len, why)? {
        (0, Some(waiting)) => JobResult::WaitFor(waiting),
        // The rest is looked up again.
        (done, _) => JobResult::Zeroed { done },
    })
}
