//! The statistics, without clocks and files.
//!
//! One boot with one run in it is one sample. Two samples of different configurations from the same block are a pair, and
//! the logarithm of their ratio is a gain. After each block, a [`Judge`] decides on each comparison from its pairs.

pub mod judge;
pub mod median;
pub mod sequential;
pub mod steady;
pub mod student;
pub mod welch;

pub use judge::{Contrast, Judge, Verdict};
pub use median::{Interval, median, median_interval};
pub use sequential::Sequential;
