//! A disk as programs open it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use harness::process::Stop;
use harness::random::Rng;
use serde::{Deserialize, Serialize};

use super::rbd::Image;

/// A disk as QEMU, a server or fio opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A null disk.
    Null,
    /// A file or block device.
    Path(PathBuf),
    /// An image that the lab created, and its backing files, from the top down.
    Chain(Vec<PathBuf>),
    /// An image in a Ceph cluster, through librbd.
    Rbd(Image),
}

impl Disk {
    /// Its path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        self.files().first().map(PathBuf::as_path)
    }

    /// Its files, from the top image down.
    pub fn files(&self) -> &[PathBuf] {
        match self {
            Self::Path(path) => std::slice::from_ref(path),
            Self::Chain(files) => files,
            Self::Null | Self::Rbd(_) => &[],
        }
    }
}

/// A thin disk that was filled before the first sample. Otherwise reads would hit holes, and writes would allocate space.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fill {
    /// Its name in the plan.
    pub disk: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Seconds that it took.
    pub took_s: f64,
}

/// A disk that the lab creates for a run, and removes at its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnDisk {
    /// Its name in the plan.
    pub disk: String,
    /// The configuration file of its cluster; empty for a path.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cluster: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// Bytes that are written between two checks whether the user stops the run.
pub const CHUNK: u64 = 64 << 20;

/// Fills a file with random data, which is another for each `seed`.
///
/// # Errors
/// It cannot be written, or the user stops the run.
pub fn fill_file(file: &File, bytes: u64, seed: u64, stop: &Stop) -> anyhow::Result<()> {
    for offset in (0..bytes).step_by(CHUNK as usize) {
        ensure!(!stop.is_wanted(), "stopped");
        let seed = offset.rotate_left(32) ^ seed;
        fill(file, offset, CHUNK.min(bytes - offset), seed)?;
    }
    Ok(())
}

/// Fills a part of a file with random data, which no storage can compress.
///
/// # Errors
/// It cannot be written.
pub fn fill(file: &File, offset: u64, bytes: u64, seed: u64) -> std::io::Result<()> {
    let mut rng = Rng::new(seed);
    let mut chunk = vec![0_u8; 1 << 20];
    let mut done = 0;
    while done < bytes {
        for word in chunk.chunks_exact_mut(8) {
            word.copy_from_slice(&rng.bits().to_ne_bytes());
        }
        let now = (bytes - done).min(chunk.len() as u64);
        file.write_all_at(&chunk[..now as usize], offset + done)?;
        done += now;
    }
    Ok(())
}
