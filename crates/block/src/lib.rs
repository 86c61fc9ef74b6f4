//! Types that all of ringdisk shares: units, requests, disk properties and the interface of I/O engines.
//!
//! Nothing here does I/O. Every other crate uses these types.

#![warn(missing_docs)]

mod bitmap;
mod engine;
mod facts;
mod intent;
mod limits;
mod options;
mod request;
mod throttle;
mod units;

pub use bitmap::{
    CannotGrow, DirtyBitmap, DirtyBitmaps, RecordingBitmaps, SharedWords, TimeNoted, TooLarge,
};
pub use engine::{Completion, DataExtents, Engine, FileId, Op, Remote, Segment, Token};
pub use facts::{Backing, BlockSizeError, DiskFacts};
pub use intent::{NoteStore, REGIONS_MAX, WriteIntent, noted_ranges, region_bits};
pub use limits::{explain, explain_thread, is_no_space, is_out_of_descriptors};
pub use options::{Aio, CacheMode, DetectZeroes, Discard, OnError};
pub use request::Request;
pub use throttle::{Rate, ThrottleError, ThrottleLimits};
pub use units::{FileOffset, GuestOffset, SECTOR_BYTES, Sector, format_size, parse_size};
