//! The path of one I/O. The modules stand in the order in which a request visits them; the function
//! that leads it through is [`Worker::turn`](worker::Worker), and all that each stage knows of a
//! request under way is its [slot](slot).

mod polling;
mod wait;

mod fetch;

mod admit;

mod mapped;
mod plan;

mod submit;

mod complete;

mod error_policy;

mod sync;

mod cow;
mod notify;

mod activity;
mod blocking_pool;
mod bounce;
mod clock;
mod disk;
mod flush_coalescer;
mod histogram;
mod queue;
mod replace;
mod report;
mod slot;
mod source;
mod stats;
mod thread;
mod thread_disk;
mod throttle;
mod timer;
mod worker;
mod zeroes;

pub use activity::ThreadStats;
pub use disk::{Disk, Options};
pub use histogram::Histogram;
pub use polling::Polling;
pub use replace::Replacement;
pub use report::{IoAction, IoEvent, IoFailure, IoResumed, LeftOut, LogLimiter};
pub use source::Storage;
pub use stats::{DiskStats, Latency, Measuring, RequestStats};
pub use thread::{IoThread, QueueId};
pub use throttle::ThrottleGroup;
