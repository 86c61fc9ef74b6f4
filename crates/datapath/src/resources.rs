//! What the requests of a thread share: buffers, threads for what blocks, and the timer.

pub(crate) mod blocking_pool;
pub(crate) mod bounce;
pub(crate) mod cow;
pub(crate) mod timer;

/// The buffers of a thread.
#[derive(Default)]
pub(crate) struct Buffers {
    pub bounce: bounce::BouncePool,
    pub cow: cow::CowBuffers,
}
