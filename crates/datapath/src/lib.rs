//! The path of one I/O, from the guest's ring to the host's file and back. [`path`] has one module for each stage, in the
//! order in which a request visits them, and the driver that calls them; [`control`] starts and stops queues, replaces
//! files, and handles storage that fails. Both work on the [state of a thread](worker).

mod control;
mod path;
mod worker;

mod command;
mod meeting;
mod thread;

mod queue;
mod request;
mod resources;
mod thread_disk;

mod disk;
mod report;
mod stats;
mod throttle;

mod clock;
mod polling;
mod wake;

pub use command::QueueId;
pub use control::cut::{CutDisk, Held, cut, end_cut};
pub use control::hold::{HeldDisks, HoldError, hold};
pub use control::replace::Replacement;
pub use disk::fleece::{FLEECE_MEMORY_MIN, Fleece, FleeceError, FleeceLimits, FleeceUse, GRANULE};
pub use disk::source::Storage;
pub use disk::{AllocatedExtent, AllocationCache, Disk, HANG, Measuring, Options};
pub use polling::Polling;
pub use report::{IoAction, IoEvent, IoFailure, IoResumed, LeftOut, LogLimiter};
pub use stats::activity::ThreadStats;
pub use stats::histogram::Histogram;
pub use stats::{DiskStats, Latency, RequestStats};
pub use thread::{IoThread, StoppingQueue};
pub use throttle::ThrottleGroup;
pub use throttle::admission::Admission;
