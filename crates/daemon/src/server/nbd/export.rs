//! A disk as NBD clients see it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::DirtyBitmap;
use block::ThrottleError;
use datapath::{Admission, AllocatedExtent, Disk, Fleece, Histogram, LogLimiter};
use nbd::{BlockSizes, ExportInfo, PAYLOAD_BYTES_MAX, flags};

use super::rbd_snapshot::Snapshot;
use crate::config::nbd::NbdExportSpec;
use crate::server::bitmap_plan::ExportedBitmapError;
use crate::server::device::ServedDisk;
use crate::server::error::NbdError;
use crate::server::share::Share;

/// An export.
pub struct NbdExport {
    /// No other export of this process has or had it.
    pub number: u64,
    pub id: String,
    pub node: String,
    pub name: String,
    pub description: String,
    pub writable: bool,
    /// Names of the disk's bitmaps that clients may query.
    pub bitmaps: Vec<String>,
    pub limits: Arc<Admission>,
    /// What its clients may ask of the storage. Those of other exports may have other limits.
    share: Arc<Share>,
    pub device: Arc<ServedDisk>,
    /// What it shows, if it is not what the disk is now.
    pub moment: Option<Arc<Moment>>,
    /// Limits lines of the log about its clients.
    pub lines: LogLimiter,
}

impl NbdExport {
    pub fn new(
        number: u64,
        spec: NbdExportSpec,
        device: Arc<ServedDisk>,
        moment: Option<Arc<Moment>>,
    ) -> Result<Self, ThrottleError> {
        let limits = Arc::new(Admission::default());
        limits.set_limits(&spec.limits)?;
        // Connections that end late keep no disk.
        let disk = Arc::downgrade(&device.disk);
        let latencies = move || {
            disk.upgrade()
                .map_or_else(Histogram::default, |d| d.guest_latencies())
        };
        Ok(Self {
            number,
            id: spec.id,
            node: spec.node,
            name: spec.name,
            description: spec.description,
            writable: spec.writable,
            bitmaps: match &moment {
                Some(moment) => moment.bitmaps.iter().map(|b| b.name().into()).collect(),
                None => spec.bitmaps,
            },
            limits,
            share: Arc::new(Share::new(latencies)),
            device,
            moment,
            lines: LogLimiter::default(),
        })
    }

    /// How it was made, with the limits that it has now.
    pub fn spec(&self) -> NbdExportSpec {
        NbdExportSpec {
            id: self.id.clone(),
            node: self.node.clone(),
            name: self.name.clone(),
            description: self.description.clone(),
            writable: self.writable,
            bitmaps: self.bitmaps.clone(),
            limits: self.limits.limits(),
        }
    }

    /// What its clients share. It counts only where [others](Self::leaves_to_others) use the storage.
    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Whether its clients must leave something of the storage to others.
    pub fn leaves_to_others(&self) -> bool {
        self.moment.is_some() || self.device.clients.have_guest()
    }

    /// What clients read. Waits until a backup knows that.
    pub fn disk(&self) -> Arc<Disk> {
        let snapshot = self.moment.as_ref().and_then(|its| its.snapshot.as_ref());
        let disk = snapshot.and_then(|snapshot| snapshot.disk());
        disk.unwrap_or_else(|| self.device.disk.clone())
    }

    /// Whether WRITE_ZEROES that may deallocate is faster than a write.
    pub fn zeroes_fast(&self) -> bool {
        self.device.disk.facts.discard_granularity != 0
    }

    /// What a client is told.
    pub fn info(&self) -> ExportInfo {
        let disk = &self.device.disk;
        // A flush makes all completed writes of the disk durable, whatever connection they came from.
        let mut bits = flags::HAS_FLAGS
            | flags::SEND_FLUSH
            | flags::SEND_FUA
            | flags::SEND_CACHE
            | flags::CAN_MULTI_CONN;
        bits |= if self.moment.is_some() {
            // Clients trim what they have read.
            flags::SEND_TRIM
        } else if self.writable {
            flags::SEND_TRIM | flags::SEND_WRITE_ZEROES | flags::SEND_FAST_ZERO
        } else {
            flags::READ_ONLY
        };
        let minimum = disk.facts.logical_block;
        ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size: (self.moment.as_ref()).map_or_else(|| disk.size(), |m| m.fleece.size()),
            flags: bits,
            blocks: BlockSizes {
                minimum,
                preferred: disk.facts.physical_block.max(4096),
                maximum: PAYLOAD_BYTES_MAX,
            },
            bitmaps: self.bitmaps.clone(),
        }
    }
}

/// What a disk was at one moment.
pub struct Moment {
    pub fleece: Arc<Fleece>,
    /// Read instead of the disk, if it can be made.
    pub snapshot: Option<Arc<Snapshot>>,
    /// Bitmaps as they were then.
    pub bitmaps: Vec<Arc<DirtyBitmap>>,
}

impl Moment {
    /// Checks that an export names no other bitmaps.
    ///
    /// # Errors
    /// It names one that the backup does not have.
    pub fn check_bitmaps(&self, spec: &NbdExportSpec) -> Result<(), NbdError> {
        let is_there = |name: &String| self.bitmaps.iter().any(|b| b.name() == name);
        match spec.bitmaps.iter().find(|name| !is_there(name)) {
            Some(name) => Err(ExportedBitmapError::Missing(spec.node.clone(), name.clone()).into()),
            None => Ok(()),
        }
    }

    /// The state of the beginning of a range then, given what it is now.
    pub fn allocated(&self, at: u64, now: AllocatedExtent) -> AllocatedExtent {
        let (len, copied) = self.fleece.extent(at, now.len);
        match copied {
            None => AllocatedExtent { len, ..now },
            Some(is_data) => AllocatedExtent {
                len,
                depth: now.depth.max(1),
                is_hole: !is_data,
            },
        }
    }

    /// Forgets what a range was.
    pub fn trim(&self, at: u64, len: u64) {
        if let Err(e) = self.fleece.trim(at, len) {
            tracing::debug!("NBD: the fleece does not shrink: {e}");
        }
    }
}

impl Exports {
    /// The export of this name; the only export, if the name is empty.
    pub fn named(&self, name: &str) -> Option<&Arc<NbdExport>> {
        let mut all = self.by_id.values();
        if name.is_empty() && self.by_id.len() == 1 {
            return all.next();
        }
        all.find(|export| export.name == name)
    }

    /// Removes an export. Returns false if it is not there, even if another one has its id.
    pub fn remove(&mut self, export: &Arc<NbdExport>) -> bool {
        let same = self.by_id.get(&export.id);
        let is_there = same.is_some_and(|same| Arc::ptr_eq(same, export));
        if is_there {
            self.by_id.remove(&export.id);
        }
        is_there
    }
}

/// Exports by id.
#[derive(Default)]
pub struct Exports {
    pub by_id: BTreeMap<String, Arc<NbdExport>>,
    /// Number of exports that were ever there.
    pub made: u64,
    /// Number of reasons to accept no connection for now: the process is being replaced, or has just replaced another.
    pub pauses: usize,
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
