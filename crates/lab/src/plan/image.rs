//! The layout of the qcow2 images that the lab creates.

use super::units::{default_or, number, on_off, size, size_text, switch};

/// The keys, in the order of messages.
pub const KEYS: [&str; 3] = ["cluster-size", "extended-l2", "backing-files"];

/// The maximum number of backing files.
const BACKING_FILES_MAX: u8 = 16;

/// The layout of a qcow2 image that the lab creates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Image {
    /// The size of a cluster in bytes; `None` is qemu-img's default.
    pub cluster_size: Option<u64>,
    /// Whether clusters have subclusters.
    pub extended_l2: bool,
    /// The number of backing files. All data is in the lowest; the others are created again for each start.
    pub backing_files: u8,
}

impl Image {
    /// Sets the value of `key`, one of [`KEYS`].
    ///
    /// # Errors
    /// The value is invalid; the message says what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "cluster-size" => self.cluster_size = default_or(value, cluster_size)?,
            "extended-l2" => self.extended_l2 = switch(value)?,
            _ => self.backing_files = number(value, 0, BACKING_FILES_MAX)?,
        }
        Ok(())
    }

    /// The value of `key`, one of [`KEYS`], as a plan writes it.
    pub fn value(&self, key: &str) -> String {
        match key {
            "cluster-size" => self
                .cluster_size
                .map_or_else(|| "default".into(), size_text),
            "extended-l2" => on_off(self.extended_l2),
            _ => self.backing_files.to_string(),
        }
    }

    /// Checks whether qemu-img can create such an image.
    ///
    /// # Errors
    /// It cannot; the message says what to set instead.
    pub fn check(&self) -> Result<(), String> {
        if self.extended_l2 && self.cluster_size.is_some_and(|size| size < 16 << 10) {
            return Err("extended-l2 needs a cluster-size of 16k or more".into());
        }
        Ok(())
    }

    /// The value of qemu-img's `-o`.
    pub fn options(&self) -> String {
        let size = self
            .cluster_size
            .map(|bytes| format!(",cluster_size={bytes}"));
        let extended = on_off(self.extended_l2);
        format!("extended_l2={extended}{}", size.unwrap_or_default())
    }
}

fn cluster_size(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    match bytes.is_power_of_two() && (512..=2 << 20).contains(&bytes) {
        true => Ok(bytes),
        false => Err(format!("'{text}' is not a power of two from 512 to 2M")),
    }
}
