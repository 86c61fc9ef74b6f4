//! qcow2 images, created with qemu-img.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::rbd::output;
use crate::plan::image::Image;

/// Creates an image with the content of a raw file, completely allocated.
///
/// # Errors
/// qemu-img fails.
pub fn convert(raw: &Path, path: &Path, image: &Image) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", "qcow2", "-S", "0", "-o"]);
    run(command.arg(image.options()).arg(raw).arg(path))
}

/// Creates an empty image of `size` bytes, with or without a backing file. Replaces the file at `path`.
///
/// # Errors
/// qemu-img fails.
pub fn create(path: &Path, size: u64, image: &Image, backing: Option<&Path>) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-o", &image.options()]);
    if let Some(backing) = backing {
        // A relative path would start at the folder of the image.
        let backing = std::path::absolute(backing)?;
        command.arg("-b").arg(backing).args(["-F", "qcow2"]);
    }
    run(command.arg(path).arg(size.to_string()))
}

fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}
