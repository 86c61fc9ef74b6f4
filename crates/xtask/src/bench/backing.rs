//! What lies beneath the served disks: made once, used by every contestant in turn.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{Advice, fadvise};

use super::plan::Backing;
use super::setting::Cache;
use lab::client::noise;

/// Size of the null disk, the page-cache file and the zram device.
pub const NULL_BYTES: u64 = 64 << 30;
const CACHE_BYTES: u64 = 1 << 30;
const ZRAM_BYTES: u64 = 1 << 30;
const CHUNK: usize = 1 << 20;

/// A prepared backing; dropping it gives back what cannot be kept.
pub enum Prepared {
    Null,
    Cache(PathBuf),
    Zram(Zram),
    Disk(PathBuf),
}

impl Prepared {
    /// Makes `backing`, or reuses what an earlier run left in `dir`. An error is the reason why it cannot be measured here.
    pub fn new(backing: Backing, dir: &Path, disk_bytes: u64) -> anyhow::Result<Prepared> {
        Ok(match backing {
            Backing::Null => Prepared::Null,
            Backing::Cache => Prepared::Cache(written_file(dir, "cache", CACHE_BYTES)?),
            Backing::Zram => Prepared::Zram(Zram::new()?),
            Backing::Disk => Prepared::Disk(written_file(dir, "disk", disk_bytes)?),
        })
    }

    /// None for the null disk.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Prepared::Null => None,
            Prepared::Cache(path) | Prepared::Disk(path) => Some(path),
            Prepared::Zram(zram) => Some(zram.device()),
        }
    }

    pub fn kind(&self) -> Backing {
        match self {
            Prepared::Null => Backing::Null,
            Prepared::Cache(_) => Backing::Cache,
            Prepared::Zram(_) => Backing::Zram,
            Prepared::Disk(_) => Backing::Disk,
        }
    }

    /// Brings it into the state in which every sample of a cache mode starts.
    pub fn settle(&self, cache: Cache) -> anyhow::Result<()> {
        match self {
            Prepared::Null => {}
            Prepared::Zram(_) if cache.direct() => {}
            // As large as the disk's file is, it may not fit.
            Prepared::Disk(path) if !cache.direct() => File::open(path)?.sync_data()?,
            // Clean and resident: no sample pays for the writeback of the one before, none reads from the disk.
            Prepared::Cache(path) | Prepared::Zram(Zram { device: path, .. }) => {
                let mut file = File::open(path)?;
                file.sync_data()?;
                io::copy(&mut file, &mut io::sink())?;
            }
            // No page in the cache: O_DIRECT would first have to look for it.
            Prepared::Disk(path) => {
                let file = File::open(path)?;
                file.sync_data()?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
            }
        }
        Ok(())
    }
}

/// A file whose every block was written: an allocated but unwritten extent reads as zeros without touching the disk.
pub fn written_file(dir: &Path, name: &str, bytes: u64) -> anyhow::Result<PathBuf> {
    // The size is in the name, and the name appears last: a file that exists is whole.
    let path = dir.join(format!("{name}-{}M.raw", bytes >> 20));
    if !path.exists() {
        eprintln!(
            "writing {} ({} MiB of random data) ...",
            path.display(),
            bytes >> 20
        );
        let unfinished = path.with_extension("unfinished");
        let mut file = File::create(&unfinished)
            .with_context(|| format!("creating {}", unfinished.display()))?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("allocating {} MiB for {}", bytes >> 20, path.display()))?;
        for chunk in 0..bytes / CHUNK as u64 {
            file.write_all(&noise(CHUNK, chunk * CHUNK as u64))
                .with_context(|| format!("writing {}", path.display()))?;
        }
        file.sync_all()?;
        fs::rename(&unfinished, &path)?;
    }
    Ok(path)
}

/// A zram device of our own, filled with data that does not compress.
pub struct Zram {
    number: u32,
    device: PathBuf,
}

impl Zram {
    fn new() -> anyhow::Result<Zram> {
        let control = Path::new("/sys/class/zram-control/hot_add");
        if !control.exists() {
            // Fails where zram is built in or not there at all; the next read tells.
            let _ = std::process::Command::new("modprobe").arg("zram").status();
        }
        let number = fs::read_to_string(control).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => anyhow::anyhow!("this kernel has no zram"),
            io::ErrorKind::PermissionDenied => anyhow::anyhow!("setting up zram needs root"),
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
        fs::write(zram.attribute("disksize"), ZRAM_BYTES.to_string())
            .context("setting zram's disksize")?;
        if !zram.device.exists() {
            bail!(
                "the kernel made zram{number}, but {} did not appear",
                zram.device.display()
            );
        }
        let mut file = File::options().write(true).open(&zram.device)?;
        for chunk in 0..ZRAM_BYTES / CHUNK as u64 {
            file.write_all(&noise(CHUNK, chunk * CHUNK as u64))?;
        }
        file.sync_all().context("filling the zram device")?;
        Ok(zram)
    }

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
