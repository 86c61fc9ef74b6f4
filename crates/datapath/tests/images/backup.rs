//! A backup of the disk, open while the guest and the operator go on: whatever is read of it is what the disk was at its
//! beginning, and the same each time.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use datapath::{
    Admission, CutDisk, Disk, Fleece, FleeceError, FleeceLimits, IoThread, QueueId, cut, end_cut,
};
use guest::blk::Status;
use guest::{LocalOp, LocalQueue};
use rustix::event::{PollFd, PollFlags, poll};
use testkit::driver::HANG;

pub const SECTOR: usize = 512;

/// Bytes that are read at once.
const READ: usize = 64 << 10;

pub struct Backup {
    disk: Arc<Disk>,
    threads: Arc<Vec<IoThread>>,
    fleece: Arc<Fleece>,
    queue: LocalQueue,
    id: Option<QueueId>,
    /// What each sector may have been; one value once it was read.
    was: Vec<BTreeSet<u64>>,
    /// Sectors that were trimmed in part or wholly.
    trimmed: Vec<bool>,
}

impl Backup {
    /// `was`: what each sector may be at the moment, given what is under way.
    pub fn begin(
        disk: &Arc<Disk>,
        threads: &Arc<Vec<IoThread>>,
        was: Vec<BTreeSet<u64>>,
        has_file: bool,
    ) -> Self {
        let file = has_file.then(|| tempfile::tempfile().unwrap());
        let fleece = Fleece::new(disk.size(), &FleeceLimits { memory: 0 }, file).unwrap();
        let disks = [CutDisk {
            disk: disk.clone(),
            fleece: fleece.clone(),
            threads: threads.iter().collect(),
        }];
        cut(&disks, || assert!(fleece.failure().is_none())).unwrap();
        assert!(fleece.wait_settled(HANG), "writes in flight do not end");
        let (queue, new) = LocalQueue::new(2 * READ).unwrap();
        let limits = Arc::new(Admission::default());
        let id = threads[0].start_client(disk.clone(), new, limits).unwrap();
        Self {
            trimmed: vec![false; was.len()],
            disk: disk.clone(),
            threads: threads.clone(),
            fleece,
            queue,
            id: Some(id),
            was,
        }
    }

    /// Reads sectors, and compares. Returns false if the backup has ended.
    pub fn read(&mut self, sectors: Range<usize>, may_fail: bool) -> bool {
        for start in sectors.clone().step_by(READ / SECTOR) {
            let end = (start + READ / SECTOR).min(sectors.end).min(self.was.len());
            if start >= end {
                break;
            }
            let Some(bytes) = self.read_disk(start..end, may_fail) else {
                continue;
            };
            let mut bytes = bytes;
            match self.fleece.overlay((start * SECTOR) as u64, &mut bytes) {
                Ok(()) => {}
                Err(FleeceError::Trimmed(at)) => {
                    assert!(self.trimmed[at as usize / SECTOR], "byte {at}");
                    continue;
                }
                Err(e) => {
                    assert!(may_fail || e.to_string().contains("memory is full"), "{e}");
                    return false;
                }
            }
            for (number, sector) in (start..).zip(bytes.chunks(SECTOR)) {
                let is = digest(sector);
                if self.trimmed[number] {
                    continue;
                }
                let was = &mut self.was[number];
                assert!(
                    was.contains(&is),
                    "sector {number} of the backup is not what it was"
                );
                *was = BTreeSet::from([is]);
            }
        }
        true
    }

    /// What the disk has now; `None` if it could not be read.
    fn read_disk(&mut self, sectors: Range<usize>, may_fail: bool) -> Option<Vec<u8>> {
        let buffer = self.queue.alloc(sectors.len() * SECTOR).unwrap();
        let at = (sectors.start * SECTOR) as u64;
        self.queue.submit(0, LocalOp::Read { at }, Some(buffer));
        self.queue.publish();
        let done = loop {
            if let Some(done) = self.queue.take() {
                break done;
            }
            if !self.queue.enable_calls() {
                let call = self.queue.call();
                poll(&mut [PollFd::new(&call, PollFlags::IN)], None).unwrap();
                self.queue.clear_call();
            }
        };
        let buffer = done.buffer.unwrap();
        let bytes = self.queue.bytes(&buffer).to_vec();
        self.queue.give_back(buffer);
        assert!(done.status == Status::Ok || may_fail);
        (done.status == Status::Ok).then_some(bytes)
    }

    pub fn trim(&mut self, sectors: Range<usize>) {
        let end = sectors.end.min(self.was.len());
        if sectors.start < end {
            self.trimmed[sectors.start..end].fill(true);
            let (at, len) = (sectors.start * SECTOR, (end - sectors.start) * SECTOR);
            self.fleece.trim(at as u64, len as u64).unwrap();
        }
    }

    /// Reads all of it once more, and ends it.
    pub fn end(mut self, may_fail: bool) {
        self.read(0..self.was.len(), may_fail);
        self.stop();
    }

    pub fn stop(&mut self) {
        if let Some(id) = self.id.take() {
            self.fleece.end("the test is over");
            end_cut(&self.disk, &self.threads);
            self.threads[0].begin_stop(id).wait().unwrap();
        }
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// What a sector holds, in short: 0 for zeroes.
pub fn digest(sector: &[u8]) -> u64 {
    let words = sector.chunks_exact(8);
    words.fold(0, |all, word| {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        (all ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    })
}
