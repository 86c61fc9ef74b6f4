//! Files that tell the next run what a killed run has left on this host.
//!
//! They are in `/run`, where only root can write, and which is empty after a boot, as what they tell of is gone then.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest record that is read.
const BYTES_MAX: u64 = 1 << 20;

/// A record. The run that writes it holds its lock, which ends with the process.
#[derive(Debug)]
pub struct Record {
    file: File,
    path: PathBuf,
}

impl Record {
    /// Opens a record, or makes it; `None` if another process holds it.
    pub fn open(path: &Path) -> Result<Option<Record>> {
        loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
                .with_context(|| format!("opening {}", path.display()))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                other => other.with_context(|| format!("locking {}", path.display()))?,
            }
            // Its last owner may have removed it in between.
            let same = fs::metadata(path)
                .is_ok_and(|now| file.metadata().is_ok_and(|own| own.ino() == now.ino()));
            if same {
                let path = path.to_owned();
                return Ok(Some(Record { file, path }));
            }
        }
    }

    /// What was written last; `None` if nothing was.
    pub fn read<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut text = String::new();
        self.file.rewind()?;
        (&self.file).take(BYTES_MAX).read_to_string(&mut text)?;
        // A line without its end was cut off, and the one before it holds.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        let Some(last) = complete.lines().next_back() else {
            return Ok(None);
        };
        let found = serde_json::from_str(last);
        found.with_context(|| format!("reading {}", self.path.display()))
    }

    /// Writes a value that replaces the earlier ones. These stay in the file: a process that is killed while it empties and
    /// writes a file leaves neither.
    pub fn write(&mut self, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_string(value)?;
        text.push('\n');
        let written = self
            .file
            .seek(SeekFrom::End(0))
            .and_then(|_| self.file.write_all(text.as_bytes()));
        written.with_context(|| format!("writing {}", self.path.display()))
    }

    /// Removes the file.
    pub fn remove(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_cut_anywhere_has_the_value_from_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let mut record = Record::open(&path).unwrap().unwrap();
        assert_eq!(record.read::<Vec<String>>().unwrap(), None);
        record.write(&["one"]).unwrap();
        let first = fs::metadata(&path).unwrap().len();
        record.write(&["one", "two"]).unwrap();
        let whole = fs::metadata(&path).unwrap().len();
        let mut read = || record.read::<Vec<String>>().unwrap().unwrap();
        assert_eq!(read(), ["one", "two"]);
        for end in (first..whole).rev() {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(end).unwrap();
            assert_eq!(read(), ["one"], "cut at {end}");
        }
    }
}
