//! The queue of the host's block device below a disk.

use super::units::{default_or, size, size_text};
use super::words::Scheduler;

/// The keys, in the order of messages.
pub const KEYS: [&str; 2] = ["host-scheduler", "host-read-ahead"];

/// The largest read-ahead, and its unit: the kernel counts in pages.
const READ_AHEAD_MAX: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// Settings of the queue, in force while a configuration runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostQueue {
    /// The I/O scheduler.
    pub scheduler: Scheduler,
    /// The read-ahead in bytes; `None` leaves it as it is.
    pub read_ahead: Option<u64>,
}

impl Default for HostQueue {
    fn default() -> Self {
        Self {
            scheduler: Scheduler::Default,
            read_ahead: None,
        }
    }
}

impl HostQueue {
    /// Sets the value of `key`, one of [`KEYS`].
    ///
    /// # Errors
    /// The value is invalid; the message says what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "host-scheduler" => self.scheduler = value.parse()?,
            _ => self.read_ahead = default_or(value, read_ahead)?,
        }
        Ok(())
    }

    /// The value of `key`, one of [`KEYS`], as a plan writes it.
    pub fn value(&self, key: &str) -> String {
        match key {
            "host-scheduler" => self.scheduler.to_string(),
            _ => self.read_ahead.map_or_else(|| "default".into(), size_text),
        }
    }
}

fn read_ahead(text: &str) -> Result<u64, String> {
    let bytes = if text == "0" { 0 } else { size(text)? };
    if bytes <= READ_AHEAD_MAX && bytes.is_multiple_of(PAGE) {
        Ok(bytes)
    } else {
        Err(format!("'{text}' is not 0 or a multiple of 4k up to 1G"))
    }
}
