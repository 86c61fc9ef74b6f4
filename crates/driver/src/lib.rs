//! A virtio-blk driver over a vhost-user front-end, for the lab and for tests. It is written from the specifications and
//! not from the server, so that both sides do not share a mistake.

mod config;
mod device;
pub mod frontend;
pub mod memory;
mod queue;
pub mod ring;

pub use config::{DeviceConfig, RegionEntries};
pub use device::{DISK_FEATURES, Device, DiskConfig, lay_out};
pub use queue::{HANG, Op, Queue, segment};
