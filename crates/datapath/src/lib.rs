//! The path of one I/O. The modules stand in the order in which a request visits them; the function
//! that leads it through is [`Worker::turn`](worker::Worker), and all that each stage knows of a
//! request under way is its [slot](slot).

mod wait;

mod fetch;

mod admit;

mod plan;

mod submit;

mod complete;

mod settle;

mod notify;

mod bounce;
mod clock;
mod disk;
mod local;
mod queue;
mod replace;
mod report;
mod slot;
mod source;
mod syncs;
mod thread;
mod throttle;
mod timer;
mod worker;
mod zeroes;

pub use disk::{Disk, Options};
pub use replace::Replacement;
pub use thread::{IoThread, QueueId};
pub use throttle::ThrottleGroup;
