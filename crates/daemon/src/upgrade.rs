//! `ringdisk upgrade`: another program takes over from the one that serves, and guests wait for a moment only.

pub mod client;
pub mod donor;
pub mod launcher;
pub mod protocol;
pub mod socket;
pub mod successor;
