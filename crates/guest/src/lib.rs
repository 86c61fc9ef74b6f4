//! Everything that reads bytes written by a guest or its front-end: the memory map, the vhost-user session,
//! virtqueues and virtio-blk requests.
//!
//! Such bytes are untrusted. They are copied once, checked and converted to types; code outside this crate
//! never reads them again.

pub mod blk;
mod careful;
mod inflight;
mod log;
mod lost;
mod memory;
mod message;
mod saved;
mod session;
mod signals;
mod socket;
mod virtqueue;

pub use inflight::{Inflight, InflightError, InflightLayout, InflightQueue};
pub use log::{DirtyLog, LogError, LogLayout};
pub use lost::Lost;
pub use memory::{GuestMemory, MemoryError, RegionLayout};
#[doc(hidden)]
pub use message::accepts_message;
pub use message::{MAX_MEM_SLOTS, MessageError};
pub use saved::{NotASession, Saved};
pub use session::{Device, End, NewQueue, Stopped, serve, serve_from};
pub use signals::{HeldUp, Signals};
pub use socket::FrontendChannel;
pub use virtqueue::{Chain, DirtyMarks, RingBase, RingError, RingLayout, Ticket, Virtqueue};
