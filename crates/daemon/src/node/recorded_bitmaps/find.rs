//! Which record in the state directory is about a disk.
//!
//! A record is found by the storage that the disk is on, and not by the name of its file or device: two names of one device
//! are one disk, and a file that was renamed keeps its bitmaps. The name of a record is `STORAGE-PATH.bitmaps`, two hashes:
//!
//! - STORAGE, which leads to the record: of a file, its inode and when that was made; of a device, the identity that no other
//!   device has (such as that of a logical volume), or else its number;
//! - PATH, which keeps records of storage apart that these do not distinguish, and shows that a file was replaced by another: the
//!   record at this path is then about the one before, and its bitmaps are shown as inconsistent.
//!
//! If several records may be meant, [`Seen::is_storage_of`] decides, and then that of the present path is the one. A record with
//! another STORAGE is not about storage that has a key of its own, whatever its path, inode and times are.
//!
//! Records of images in clusters have the name `PATH.bitmaps`, and so do those of [earlier versions](OldRecord), with which the
//! successor in an upgrade continues. Their content says which storage they are about.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::medium::Medium;
use super::record::{self, State};
use crate::node::context::{OldRecord, OldRecords};
use crate::token::hash;

/// The records that may be about a disk.
pub struct Found {
    /// The name that its record should have.
    pub own: PathBuf,
    /// The record, if there is one.
    pub record: Option<PathBuf>,
    /// The record of another file or device that had the path of the disk, if the disk has none.
    pub replaced: Option<PathBuf>,
}

/// The records that this version has not named.
fn old_records<'a>(state: &Path, known: &'a OldRecords) -> io::Result<&'a [OldRecord]> {
    if let Some(known) = known.get() {
        return Ok(known);
    }
    let mut all = Vec::new();
    for entry in fs::read_dir(state)? {
        let file = entry?.path();
        let is_record = file.extension().is_some_and(|end| end == "bitmaps");
        if is_record
            && named_storage(&file).is_none()
            && let Ok(Some(record)) = record::read(&file)
        {
            let (State::InUse(seen) | State::Stored(seen)) = record.state;
            let id = seen.unique_id().map(str::to_owned);
            let inode = seen.inode();
            all.push(OldRecord { file, inode, id });
        }
    }
    Ok(known.get_or_init(|| all))
}

/// The hash of the storage in the name of a record, if that has one.
fn named_storage(record: &Path) -> Option<&str> {
    let stem = record.file_stem()?.to_str()?;
    stem.split_once('-').map(|(storage, _)| storage)
}

/// Looks for the record of a disk, `path` being the absolute one of its file or device, or the full name of its image in a
/// cluster. `is_image` tells whether the record is that of a qcow2 image.
///
/// # Errors
/// The state directory cannot be read, or the kernel does not say what the storage is.
pub fn find(
    state: &Path,
    known: &OldRecords,
    path: &Path,
    medium: Option<&Medium>,
    is_image: bool,
) -> io::Result<Found> {
    let by_path = hash(path.as_os_str().as_encoded_bytes());
    let named = |stem: &str| state.join(format!("{stem}.bitmaps"));
    let old = named(&by_path);
    let key = medium.map(Medium::storage_key).transpose()?.flatten();
    let (Some(key), Some(medium)) = (key, medium) else {
        let there = record::read(&old);
        let is_other = matches!(&there, Ok(Some(there)) if there.path != path.to_string_lossy());
        let record = (!matches!(there, Ok(None)) && !is_other).then(|| old.clone());
        return Ok(Found {
            own: old,
            record,
            replaced: None,
        });
    };
    let storage = hash(key.text.as_bytes());
    let mut found = Found {
        own: named(&format!("{storage}-{by_path}")),
        record: None,
        replaced: None,
    };
    let now = medium.found()?;
    let id = now.unique_id();
    let may_be_its =
        |of: &&OldRecord| of.inode == now.inode() || id.is_some() && of.id.as_deref() == id;
    let of_before = old_records(state, known)?.iter();
    let of_before = of_before.filter(|of| of.file != old).filter(may_be_its);
    let of_before = of_before.map(|of| of.file.clone());
    let candidates = candidates(state, &storage, &by_path, &found.own)?;
    for file in candidates.into_iter().chain(of_before) {
        let read = record::read(&file);
        let Ok(Some(there)) = read else {
            // It is reported as damaged.
            let is_damaged = read.is_err() && (file == found.own || file == old);
            if is_damaged && found.record.is_none() {
                found.record = Some(file);
            }
            continue;
        };
        let is_same_path = there.path == path.to_string_lossy();
        let (State::InUse(then) | State::Stored(then)) = &there.state;
        let is_its = match named_storage(&file) {
            Some(named) if named == storage => {
                then.is_storage_of(&now, key.is_unique, is_same_path)
            }
            Some(_) if key.is_unique => false,
            Some(_) => then.is_storage_of(&now, false, is_same_path),
            None => then.is_storage_of(&now, false, is_same_path) && !is_younger(medium, &file),
        };
        if there.is_image == is_image && found.record.is_none() && is_its {
            found.record = Some(file);
        } else if is_same_path && !there.is_image {
            found.replaced.get_or_insert(file);
        }
    }
    if found.record.is_some() {
        found.replaced = None;
    }
    Ok(found)
}

/// Whether a file was made after the record was written. That shows it even if its inode is the same.
fn is_younger(medium: &Medium, record: &Path) -> bool {
    let written = fs::metadata(record).and_then(|record| record.modified());
    let (born, written) = (medium.born(), written.ok());
    born.zip(written)
        .is_some_and(|(born, written)| born > written)
}

/// The records whose names speak of the storage or of the path, that of both first.
fn candidates(state: &Path, storage: &str, by_path: &str, own: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(state)? {
        let name = entry?.file_name();
        let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(".bitmaps")) else {
            continue;
        };
        if stem.starts_with(storage) || stem.ends_with(by_path) {
            all.push(state.join(&name));
        }
    }
    let is_of_storage = |file: &Path| named_storage(file) == Some(storage);
    all.sort_by_key(|file| (file != own, !is_of_storage(file), file.clone()));
    Ok(all)
}

impl Found {
    /// Gives the record its own name, durably, unless the process that hands over may continue with it. Returns the name that
    /// it has from now on, or would have.
    ///
    /// # Errors
    /// It has either name.
    pub fn take(&self, is_uncommitted: bool) -> io::Result<PathBuf> {
        match &self.record {
            Some(record) if is_uncommitted => return Ok(record.clone()),
            Some(record) if *record != self.own => {
                let directory = File::open(record.parent().unwrap_or(Path::new(".")))?;
                fs::rename(record, &self.own)?;
                directory.sync_all()?;
            }
            _ => {}
        }
        Ok(self.own.clone())
    }
}
