//! Live upgrade: a new process takes over from the running one, and guests only see a short pause.

pub mod client;
pub mod donor;
pub mod launch_record;
mod process_settings;
pub mod protocol;
pub mod socket;
pub mod successor;
