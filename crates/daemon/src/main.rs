//! `ringdisk`: virtual disks for QEMU/KVM at the speed of the hardware beneath them.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringdisk::main()
}
