//! A zram device, filled with incompressible data.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::client::noise;

const CHUNK: usize = 1 << 20;

/// A zram device; removed when dropped.
#[derive(Debug)]
pub struct Zram {
    number: u32,
    device: PathBuf,
}

impl Zram {
    /// Adds a device of this size.
    ///
    /// # Errors
    /// This kernel has no zram, or the caller is not root.
    pub fn new(bytes: u64) -> Result<Zram> {
        let control = Path::new("/sys/class/zram-control/hot_add");
        if !control.exists() {
            // This fails if zram is built in or absent; the next read shows which.
            let _ = Command::new("modprobe").arg("zram").status();
        }
        let number = fs::read_to_string(control).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => anyhow!("this kernel has no zram"),
            io::ErrorKind::PermissionDenied => anyhow!("setting up zram needs root"),
            _ => anyhow::Error::new(e).context("adding a zram device"),
        })?;
        let number = number
            .trim()
            .parse()
            .context("hot_add did not return a number")?;
        let zram = Zram {
            number,
            device: format!("/dev/zram{number}").into(),
        };
        fs::write(zram.attribute("disksize"), bytes.to_string())
            .context("setting zram's disksize")?;
        if !zram.device.exists() {
            bail!(
                "the kernel made zram{number}, but {} did not appear",
                zram.device.display()
            );
        }
        let mut file = fs::File::options().write(true).open(&zram.device)?;
        for chunk in 0..bytes / CHUNK as u64 {
            file.write_all(&noise(CHUNK, chunk * CHUNK as u64))?;
        }
        file.sync_all().context("filling the zram device")?;
        Ok(zram)
    }

    /// Its device node.
    pub fn device(&self) -> &Path {
        &self.device
    }

    fn attribute(&self, name: &str) -> String {
        format!("/sys/block/zram{}/{name}", self.number)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let reset = fs::write(self.attribute("reset"), "1");
        let removed = fs::write(
            "/sys/class/zram-control/hot_remove",
            self.number.to_string(),
        );
        if let Err(error) = reset.and(removed) {
            eprintln!("zram{} is left behind: {error}", self.number);
        }
    }
}
