//! What a VM's firmware boots, as far as the command line says.

use super::options::{Opt, Syntax};
use crate::text::Span;

/// What a VM's firmware boots.
pub enum Boot {
    /// The same disk, wherever the others are
    Fixed,
    /// Unknown
    Unclear,
    /// The first disk; all disks are on one controller
    OneController,
    /// This disk, with its rank, the rank of the next one, and whether it is the only one that may still move to virtio
    First {
        disk: Span,
        rank: Rank,
        second: Rank,
        last_to_move: bool,
    },
}

/// The rank of a device among those without a bootindex in SeaBIOS: by the kind of its controller (SeaBIOS, `DTYPE_`), then
/// in the order in which QEMU creates devices, then in that of the command line.
pub type Rank = (u8, Made, u32);

/// The order in which QEMU creates devices: those in `key=value` syntax, then those for drives, then those in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Made {
    /// With the machine, on its built-in IDE or SATA buses
    Machine,
    Pairs,
    Drive,
    Json,
}

impl Made {
    pub fn of(option: &Opt) -> Self {
        match (option.group.as_str(), &option.syntax) {
            ("device", Syntax::Json(_) | Syntax::Patchwork) => Self::Json,
            ("device", _) => Self::Pairs,
            _ => Self::Drive,
        }
    }
}
