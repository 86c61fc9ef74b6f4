//! Whether there is a sandbox.

use std::str::FromStr;

/// Whether there is a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// As much of it as works here, and a line in the log that says how much.
    #[default]
    Auto,
    /// All of it, or ringdisk does not start.
    On,
    /// None.
    Off,
}

impl FromStr for SandboxMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(format!("'{text}' is none of auto, on and off")),
        }
    }
}
