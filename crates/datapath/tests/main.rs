//! All tests of this crate that use it from outside, as one program: linked once.

mod clients;
mod durable;
mod error_policy;
mod faults;
mod images;
mod log_limits;
mod neighbours;
mod no_allocation;
mod replace;
mod stats;
mod stopping;
mod support;
mod throttle;
