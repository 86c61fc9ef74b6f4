//! What lies beneath the served disks: made once, used by every contestant in turn.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::plan::Backing;
use anyhow::Context;
use lab::client::noise;
use lab::storage::zram::Zram;

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
            Backing::Zram => Prepared::Zram(Zram::new(ZRAM_BYTES)?),
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
