//! A disk as NBD clients see it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::ThrottleError;
use datapath::{Admission, LogLimiter};
use nbd::{BlockSizes, ExportInfo, PAYLOAD_BYTES_MAX, flags};

use crate::config::nbd::NbdExportSpec;
use crate::server::device::ServedDisk;

/// An export.
pub struct NbdExport {
    pub id: String,
    pub node: String,
    pub name: String,
    pub description: String,
    pub writable: bool,
    pub limits: Arc<Admission>,
    pub device: Arc<ServedDisk>,
    /// Limits lines of the log about its clients.
    pub lines: LogLimiter,
}

impl NbdExport {
    pub fn new(spec: NbdExportSpec, device: Arc<ServedDisk>) -> Result<Self, ThrottleError> {
        let limits = Arc::new(Admission::default());
        limits.set_limits(&spec.limits)?;
        Ok(Self {
            id: spec.id,
            node: spec.node,
            name: spec.name,
            description: spec.description,
            writable: spec.writable,
            limits,
            device,
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
            limits: self.limits.limits(),
        }
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
        bits |= if self.writable {
            flags::SEND_TRIM | flags::SEND_WRITE_ZEROES | flags::SEND_FAST_ZERO
        } else {
            flags::READ_ONLY
        };
        let minimum = disk.facts.logical_block;
        ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size: disk.size(),
            flags: bits,
            blocks: BlockSizes {
                minimum,
                preferred: disk.facts.physical_block.max(4096),
                maximum: PAYLOAD_BYTES_MAX,
            },
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
}

/// Exports by id.
#[derive(Default)]
pub struct Exports {
    pub by_id: BTreeMap<String, Arc<NbdExport>>,
    /// Number of reasons to accept no connection for now: the process is being replaced, or has just replaced another.
    pub pauses: usize,
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
