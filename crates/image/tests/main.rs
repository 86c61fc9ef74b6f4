//! All tests of this crate that use it from outside, as one program: linked once.

mod any_bytes;
mod bitmaps;
mod changed_bitmaps;
mod checks;
mod crash;
mod free_clusters;
mod golden;
mod journal;
mod model;
mod opening;
mod recorded_bitmaps;
mod space;
mod support;
mod writes;
mod zeroes;
