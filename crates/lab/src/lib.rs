//! `ringdisk lab`: what a storage configuration of a VM gains, with evidence.
//!
//! It looks at disks from outside: nothing here knows the data path. A [plan](plan::Plan) names configurations and
//! loads.

pub mod plan;
pub mod schedule;
pub mod stats;
