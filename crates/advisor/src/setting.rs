//! The settings that rules name as fixes.

use std::str::FromStr;

/// A change that a rule asks for, independent of a front-end's syntax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Move the disk to a virtio bus.
    Virtio,
    /// Set this cache mode.
    Cache(&'static str),
    /// Set the equally durable cache mode with O_DIRECT.
    CacheDirect,
    /// Set `aio`.
    Aio(&'static str),
    /// Give the disk its own I/O thread: an unused one, or a new one.
    OwnThread,
    /// Define the I/O thread that the disk names.
    DefineThread,
    /// Remove unused I/O threads.
    TrimThreads,
    /// Give every disk its own SCSI controller.
    SingleController,
    /// Set the number of queues to the number of vCPUs.
    QueuesAsVcpus,
    /// Assign queues to threads in turn.
    EvenMapping,
    /// Pass discards to the storage.
    Discard,
    /// Remove `ioeventfd`, `x-data-plane`, `scsi` or `iothread`.
    Remove(&'static str),
    /// Let other processes map the guest's memory.
    SharedMemory,
    /// Let QEMU reconnect to the disk's server.
    Reconnect,
    /// Make the cache large enough for all tables of a qcow2 image.
    L2Cache,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "bus=virtio" => Self::Virtio,
            "cache=none" => Self::Cache("none"),
            "cache=writeback" => Self::Cache("writeback"),
            "cache=direct" => Self::CacheDirect,
            "aio=native" => Self::Aio("native"),
            "aio=threads" => Self::Aio("threads"),
            "aio=io_uring" => Self::Aio("io_uring"),
            "iothread=own" => Self::OwnThread,
            "define-thread" => Self::DefineThread,
            "trim-threads" => Self::TrimThreads,
            "controller=single" => Self::SingleController,
            "queues=vcpus" => Self::QueuesAsVcpus,
            "mapping=even" => Self::EvenMapping,
            "discard=unmap" => Self::Discard,
            "remove=ioeventfd" => Self::Remove("ioeventfd"),
            "remove=x-data-plane" => Self::Remove("x-data-plane"),
            "remove=scsi" => Self::Remove("scsi"),
            "remove=iothread" => Self::Remove("iothread"),
            "memory=shared" => Self::SharedMemory,
            "reconnect" => Self::Reconnect,
            "l2-cache=needed" => Self::L2Cache,
            _ => return Err(format!("there is no setting '{text}'")),
        })
    }
}
