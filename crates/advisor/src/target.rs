//! What a setting applies to, and what the changes of a round have reserved there.

use crate::input::Input;
use crate::model::{Disk, Vm};
use crate::round::Round;
use crate::text::Edit;

/// The VM or disk to which a setting applies.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub input: &'a Input,
    pub round: &'a Round<'a>,
    /// Index into the input's VMs.
    pub vm: usize,
    /// Index into the VM's disks.
    pub disk: Option<usize>,
}

/// The edits for a setting, or why it cannot be made.
pub type Edits = Result<Vec<Edit>, String>;

impl<'a> Target<'a> {
    pub fn new(round: &'a Round<'a>, vm: usize, disk: Option<usize>) -> Self {
        Self {
            input: round.input,
            round,
            vm,
            disk,
        }
    }

    pub fn vm(&self) -> Result<&'a Vm, String> {
        self.input
            .vms
            .get(self.vm)
            .ok_or_else(|| "there is no such VM".into())
    }

    pub fn disk(&self) -> Result<&'a Disk, String> {
        let disk = self.disk.and_then(|disk| self.vm().ok()?.disks.get(disk));
        disk.ok_or_else(|| "the setting does not concern a single disk".into())
    }
}
