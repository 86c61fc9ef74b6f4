//! The small volumes that QEMU has itself: EFI variables and the state of a TPM.
//!
//! QEMU may write to one while it is read. Each is read until two readings are the same, the second of which began after the
//! first had ended: then it was so at a moment between them.

use std::fs;
use std::path::Path;
use std::process::Command;

use advisor::served::BackupDevice;

use super::{Data, Part, run_to_end};
use crate::client::CommandLineError;
use crate::hook::host::Host;

/// How often one is read.
const READINGS: usize = 20;

/// Most bytes of one: Proxmox makes them with 4 MiB.
const BYTES_MAX: u64 = 64 << 20;

/// Copies them to files in a directory.
///
/// # Errors
/// One cannot be read, or changes all the time.
pub fn copy(
    host: &Host,
    devices: &[BackupDevice],
    directory: &Path,
) -> Result<Vec<Part>, CommandLineError> {
    let mut parts = Vec::new();
    for device in devices.iter().filter(|device| device.disk.is_none()) {
        let volume = [device.volume.as_str()];
        let paths = host.paths(&volume)?;
        let target = directory.join(format!("{}.raw", device.name));
        let data = settled(&device.drive, &paths[0], &target)?;
        parts.push(Part {
            drive: device.drive.clone(),
            name: device.name.clone(),
            bytes: data,
            data: Data::File(target),
        });
    }
    Ok(parts)
}

/// Reads a volume until it does not change. Returns its size.
fn settled(drive: &str, path: &str, target: &Path) -> Result<u64, CommandLineError> {
    let mut before: Option<Vec<u8>> = None;
    for _ in 0..READINGS {
        read(path, target)?;
        let of_target = |e| CommandLineError::Target(target.to_owned(), e);
        let bytes = fs::metadata(target).map_err(of_target)?.len();
        if bytes > BYTES_MAX {
            return Err(CommandLineError::Refused(format!(
                "{drive} has {bytes} bytes, more than EFI variables or a TPM have"
            )));
        }
        let now = fs::read(target).map_err(of_target)?;
        if before.as_ref() == Some(&now) {
            return Ok(bytes);
        }
        before = Some(now);
    }
    Err(CommandLineError::Refused(format!(
        "{drive} changes all the time; try again"
    )))
}

fn read(path: &str, target: &Path) -> Result<(), CommandLineError> {
    let format = match path.rsplit_once('.') {
        Some((_, format @ ("qcow2" | "vmdk"))) => format,
        _ => "raw",
    };
    let mut convert = Command::new("qemu-img");
    // QEMU has locked it.
    convert.args(["convert", "-U", "-f", format, "-O", "raw", "--", path]);
    run_to_end(convert.arg(target), "qemu-img cannot copy a volume")
}
