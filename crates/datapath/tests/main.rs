//! All tests of this crate that use it from outside, as one program: linked once.

mod durable;
mod error_policy;
mod fast_lane;
mod faults;
mod images;
mod neighbours;
mod replace;
mod stats;
mod support;
mod throttle;
