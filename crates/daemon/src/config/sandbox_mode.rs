//! The setting `sandbox`.

use std::str::FromStr;

/// How much of the sandbox is required.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// As much as works on this host; the log says how much.
    #[default]
    Auto,
    /// All of it; otherwise ringdisk does not start.
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
            _ => Err(format!("'{text}' is not one of auto, on, off")),
        }
    }
}
