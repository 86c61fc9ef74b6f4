//! `ringdisk lab`: what a storage configuration of a VM gains, with evidence.
//!
//! It looks at disks from outside: nothing here knows the data path. A [plan](plan::Plan) names configurations and
//! loads; a [schedule](schedule::Schedule) brings them into blocks; a [run](run::run) boots [guests](guest) and writes
//! what it measures into a [journal](journal::Journal), from which an [analysis](analysis::Analysis) with its
//! [statistics](stats) and a [report](report) are made, at any time.

pub mod analysis;
pub mod client;
pub mod commands;
pub mod compare;
pub mod drive;
pub mod fio;
pub mod guest;
pub mod host;
pub mod import;
pub mod journal;
pub mod measured;
pub mod plan;
pub mod recipes;
pub mod report;
pub mod run;
pub mod schedule;
pub mod stats;
pub mod storage;
pub mod vhost;
pub mod window;
