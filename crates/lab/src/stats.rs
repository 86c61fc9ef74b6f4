//! Statistics that hold, and nothing else: no clock, no files.
//!
//! One boot and one run in it are one sample. Samples of two configurations from the same block are a pair, and a gain
//! is the logarithm of a pair's ratio. Pairs of the same two are what a [`Judge`] decides on, after each block.

pub mod judge;
pub mod median;
pub mod sequential;
pub mod steady;
pub mod student;
pub mod welch;

pub use judge::{Contrast, Judge, Verdict};
pub use median::{Interval, median, median_interval};
pub use sequential::Sequential;
