//! The path of one I/O. The modules stand in the order in which a request visits them; the function
//! that leads it through is [`Worker::turn`](worker::Worker), and all that each stage knows of a
//! request under way is its [slot](slot).

mod polling;
mod wait;

mod fetch;

mod admit;

mod pieces;
mod plan;

mod submit;

mod complete;

mod outage;

mod settle;

mod merge;
mod notify;

mod activity;
mod bounce;
mod clock;
mod disk;
mod histogram;
mod local;
mod queue;
mod replace;
mod report;
mod slot;
mod slow;
mod source;
mod stats;
mod syncs;
mod thread;
mod throttle;
mod timer;
mod worker;
mod zeroes;

pub use activity::ThreadStats;
pub use disk::{Disk, Options};
pub use histogram::Histogram;
pub use polling::Polling;
pub use replace::Replacement;
pub use report::{IoAction, IoEvent, IoFailure, IoResumed, LeftOut, Limiter};
pub use source::Place;
pub use stats::{DiskStats, Latency, Measuring, RequestStats};
pub use thread::{IoThread, QueueId};
pub use throttle::ThrottleGroup;
