//! Where the time goes: what the threads between a guest and its storage do, and which stage limits.
//!
//! A [sampler] reads the kernel's counters of the threads and ringdisk's own stages at intervals. An [interval] between two
//! readings is a [measurement], from which the [verdict] names the stage that limits.

pub mod disk;
pub mod flame;
pub mod interval;
pub mod measurement;
pub mod procfs;
pub mod qemu;
pub mod report;
pub mod roles;
pub mod sampler;
pub mod verdict;

use serde::{Deserialize, Serialize};

use measurement::Measurement;
use verdict::Verdict;

/// A measurement with its verdict, as a journal stores it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// What was measured.
    #[serde(flatten)]
    pub measurement: Measurement,
    /// What it means.
    pub verdict: Verdict,
}

impl Profile {
    /// Judges a measurement.
    pub fn of(measurement: Measurement) -> Profile {
        Profile {
            verdict: verdict::judge(&measurement),
            measurement,
        }
    }

    /// Whether all figures are possible. Code that draws them relies on it.
    pub fn is_sound(&self) -> bool {
        self.measurement.is_sound() && (0.0..1e3).contains(&self.verdict.share)
    }
}
