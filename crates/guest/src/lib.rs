//! Everything that reads bytes written by a guest or its front-end: the memory map, the vhost-user session,
//! virtqueues and virtio-blk requests.
//!
//! Such bytes are untrusted. They are copied once, checked and converted to types; code outside this crate
//! never reads them again.

#![warn(missing_docs)]

mod aio_notifier;
pub mod blk;
mod inflight;
mod local;
mod log;
mod memory;
mod message;
mod notifier;
mod ring;
mod saved;
mod session;
mod sigbus;
mod socket;
mod virtqueue;

pub use inflight::{Inflight, InflightError, InflightLayout, InflightQueue};
pub use local::{Buffer, Finished, LOCAL_KEPT_BYTES, LOCAL_ZEROES_MAX, LocalOp, LocalQueue};
pub use log::{DirtyLog, LogError, LogLayout};
pub use memory::{GuestMemory, MemoryError, RegionLayout};
#[doc(hidden)]
pub use message::accepts_message;
pub use message::{MAX_MEM_SLOTS, MessageError};
pub use notifier::{Blocked, Notifier};
pub use ring::{RING_SIZE_MAX, RingBase, RingError, RingLayout};
pub use saved::{InvalidSession, SavedSession};
pub use session::{Device, Driver, NewQueue, Pause, SessionEnd, StoppedRing, serve, serve_from};
pub use sigbus::SessionAbort;
pub use socket::{FrontendChannel, peer_pid};
pub use virtqueue::{Chain, DirtyMarks, Ticket, Virtqueue};
