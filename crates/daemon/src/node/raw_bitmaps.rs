//! Persistent bitmaps of disks that are not in images: raw files and block devices.
//!
//! A *record* in the state directory says which bitmaps a disk has. While the disk is in use, their bits are in files that
//! are [mapped](MappedWords), next to the journals of images: on a tmpfs. The record is
//!
//! - *in use*: with the boot of the host, the file or device, and the names of the files with the bits; or
//! - *stored*: with the bits, and what the disk's file or device looked like then ([`Seen`]).
//!
//! The order:
//!
//! 1. When the disk is opened for writing: the files with the bits, and then the record, in use, durably. Nothing has been
//!    written to the disk.
//! 2. A request sets bits before its write is submitted.
//! 3. A command that changes bitmaps: new files for the bits of those that change, then the record, durably. No request is
//!    in flight. Then old files are removed.
//! 4. When nothing writes to the disk any more, and what was written is durable: the record, stored, durably. Then the files
//!    with the bits are removed.
//!
//! A kill leaves {in use} with files whose bits are exact or a superset, and the next process continues with them; so does
//! the successor in an upgrade, which writes nothing, so that the old process can continue if the upgrade fails. A crash of
//! the host leaves {stored, if it was not in use} or {in use, by another boot}: these bitmaps lack changes, and stay listed
//! as inconsistent until they are removed.
//!
//! A bitmap that was stored is continued only if the disk looks as it did then: another program that writes to a file changes
//! its times. The files with the bits have the time of the last write, so that such writes are noticed after a kill too, if
//! they come at least two seconds later.

mod record;
mod seen;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::{DirtyBitmap, DirtyBitmaps, SharedWords};
use engine::{DiskFile, MappedWords};
use image::{BITMAP_BYTES_MAX, UnusableBitmap};
use tracing::{error, info, warn};

use super::context::OpenContext;
use crate::config::spec::{DiskSpec, Lock};
use crate::inherited::Inherited;
use record::{BitmapRecord, Record, State, read_bits};
use seen::Seen;

const FOREIGN: &str = "another program has written to the disk meanwhile, or has changed or replaced the disk's file, or the host's clock was set";

/// The bitmaps of a disk that is not in an image.
pub struct RawBitmaps {
    disk: String,
    /// Where they are stored, or why they cannot be.
    place: Result<Place, &'static str>,
    bitmaps: Arc<DirtyBitmaps>,
    inner: Mutex<Inner>,
}

struct Place {
    file: Arc<DiskFile>,
    /// In the state directory.
    record: PathBuf,
    /// The disk's file, as the operator named it.
    path: String,
    /// The directory of files with bits, and how their names begin.
    bits: (PathBuf, String),
    /// What this process has inherited.
    inherited: Arc<Inherited>,
    /// The owner of new files, if this process will become another user.
    owner: Option<(u32, u32)>,
}

#[derive(Default)]
struct Inner {
    /// Bytes of the disk.
    size: u64,
    lost: Vec<UnusableBitmap>,
    /// The file with the bits of each bitmap, by its name; empty if they are only in the memory of this process.
    files: BTreeMap<String, String>,
    has_record: bool,
}

/// Bitmaps that take the place of the present ones.
pub struct Prepared {
    bitmaps: Vec<Arc<DirtyBitmap>>,
    lost: Vec<UnusableBitmap>,
    files: BTreeMap<String, String>,
}

impl RawBitmaps {
    /// For a disk whose bitmaps cannot be stored.
    pub fn temporary(disk: &str, size: u64, why: &'static str) -> Self {
        Self::new(disk, size, Err(why))
    }

    /// Loads the bitmaps of a disk that is locked for writing, and marks them as in use.
    ///
    /// # Errors
    /// They could not be marked, nor removed.
    pub fn load(
        spec: &DiskSpec,
        context: &OpenContext,
        path: &Path,
        file: &Arc<DiskFile>,
        size: u64,
    ) -> io::Result<Self> {
        let disk = &spec.name;
        let Some(state) = &context.state else {
            let why = "there is no state directory: start ringdisk with --state DIRECTORY";
            return Ok(Self::temporary(disk, size, why));
        };
        if spec.lock == Lock::Running {
            let why = "other hosts write to it while no VM runs on it here (lock=running)";
            return Ok(Self::temporary(disk, size, why));
        }
        let (path, journals) = (std::path::absolute(path)?, &context.journals);
        let key = key(&path);
        let place = Place {
            file: file.clone(),
            record: state.join(format!("{key}.bitmaps")),
            path: path.to_string_lossy().into_owned(),
            bits: (journals.directory.clone(), format!("{key}-")),
            inherited: context.inherited.clone(),
            owner: journals.owner(),
        };
        let this = Self::new(disk, size, Ok(place));
        this.load_record()?;
        Ok(this)
    }

    fn new(disk: &str, size: u64, place: Result<Place, &'static str>) -> Self {
        let inner = Inner {
            size,
            ..Inner::default()
        };
        Self {
            disk: disk.into(),
            place,
            bitmaps: Arc::default(),
            inner: Mutex::new(inner),
        }
    }

    /// All that can be used.
    pub fn bitmaps(&self) -> &Arc<DirtyBitmaps> {
        &self.bitmaps
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bitmaps that can only be removed.
    pub fn unusable(&self) -> Vec<UnusableBitmap> {
        self.inner().lost.clone()
    }

    /// Checks that a bitmap can be stored.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new(&self) -> Result<(), String> {
        self.place.as_ref().map(drop).map_err(|&why| why.to_owned())
    }

    fn load_record(&self) -> io::Result<()> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        let mut guard = self.inner();
        let inner = &mut *guard;
        let record = match record::read(&place.record) {
            Ok(None) => return Ok(()),
            Ok(Some(record)) if record.path == place.path => record,
            Ok(Some(_)) => {
                warn!(
                    "disk {}: {} is about another disk, and is replaced",
                    self.disk,
                    place.record.display()
                );
                return Ok(());
            }
            Err(why) => {
                inner.has_record = true;
                self.lose(
                    inner,
                    String::new(),
                    0,
                    &format!("{} is damaged: {why}", place.record.display()),
                );
                return Ok(());
            }
        };
        inner.has_record = true;
        let why = why_not(&record, &place.file, inner.size);
        let (mut is_changed, mut bits_at, mut left) = (false, 0, Vec::new());
        for bitmap in &record.bitmaps {
            let granularity = 1_u64.checked_shl(bitmap.granularity_bits).unwrap_or(0);
            let bytes = bitmap.stored_bytes(&record);
            let loaded = match (&bitmap.lost, &why) {
                (Some(why), _) => Err(why.clone()),
                (None, Some(why)) => Err(why.clone()),
                (None, None) => place
                    .load(&record, bitmap, bits_at)
                    .map_err(|e| e.to_string()),
            };
            bits_at += bytes;
            match loaded {
                Ok((loaded, name)) => {
                    // A kill may have left it when the bitmap was stored.
                    left.extend(
                        bitmap
                            .bits
                            .clone()
                            .filter(|old| *old != name && place.is_bits(old)),
                    );
                    is_changed |= bitmap.bits.as_ref() != Some(&name);
                    if name.is_empty() {
                        self.warn_unsafe(place, bitmap);
                    }
                    inner.files.insert(bitmap.name.clone(), name);
                    self.bitmaps.add(Arc::new(loaded));
                }
                Err(why) => {
                    is_changed |= bitmap.lost.is_none();
                    left.extend(bitmap.bits.clone().filter(|name| place.is_bits(name)));
                    self.lose(inner, bitmap.name.clone(), granularity, &why);
                }
            }
        }
        self.grow_all(inner);
        if !is_changed {
            if !inner.files.is_empty() {
                info!(
                    "disk {}: its bitmaps continue where the process before has left them",
                    self.disk
                );
            }
            return Ok(());
        }
        place
            .write_in_use(inner, &self.bitmaps.all())
            .or_else(|e| record::remove(&place.record).map_err(|_| e))?;
        place.remove_bits(left.into_iter());
        Ok(())
    }

    fn warn_unsafe(&self, place: &Place, bitmap: &BitmapRecord) {
        warn!(
            "disk {}: there is no space for the bits of bitmap '{}' in {}: a kill of ringdisk, or an upgrade, makes it inconsistent",
            self.disk,
            bitmap.name,
            place.bits.0.display()
        );
    }

    fn lose(&self, inner: &mut Inner, name: String, granularity: u64, why: &str) {
        warn!(
            "disk {}: bitmap '{name}' is not continued: {why}; an incremental backup that relies on it must be followed by a \
             full one; 'ringdisk bitmap remove' deletes it",
            self.disk
        );
        inner.lost.push(UnusableBitmap {
            name,
            granularity,
            why: why.into(),
        });
    }

    /// Makes `bitmaps` those of the next process too, without the unusable ones in `removed`, durably. No request is in
    /// flight.
    ///
    /// # Errors
    /// The present ones stay.
    pub fn prepare(
        &self,
        removed: &[&str],
        bitmaps: Vec<Arc<DirtyBitmap>>,
    ) -> io::Result<Prepared> {
        let inner = self.inner();
        let mut lost = inner.lost.clone();
        lost.retain(|bitmap| !removed.contains(&&*bitmap.name));
        let mut new = Prepared {
            bitmaps,
            lost,
            files: BTreeMap::new(),
        };
        let Ok(place) = &self.place else {
            return Ok(new);
        };
        let prepared = place.prepare(&inner, &mut new);
        drop(inner);
        if prepared.is_err() {
            self.give_up(&new);
        }
        prepared.map(|()| new)
    }

    /// The prepared bitmaps take the place of the present ones.
    pub fn replace(&self, new: Prepared) {
        let mut inner = self.inner();
        let old = std::mem::replace(&mut inner.files, new.files);
        inner.lost = new.lost;
        inner.has_record = !(inner.files.is_empty() && inner.lost.is_empty());
        self.bitmaps.set(new.bitmaps);
        // The disk may have grown since they were made.
        self.grow_all(&inner);
        if let Ok(place) = &self.place {
            place.remove_bits(old.into_values().filter(|file| !is_used(&inner, file)));
        }
    }

    /// The prepared bitmaps are not used: the next process continues the present ones.
    pub fn give_up(&self, new: &Prepared) {
        let Ok(place) = &self.place else { return };
        let inner = self.inner();
        if new.is_same(&inner) {
            return;
        }
        if let Err(e) = place.write_in_use(&inner, &self.bitmaps.all()) {
            error!(
                "disk {}: {} may be about bitmaps that a failed command made: {e}; if ringdisk is killed now, the disk's bitmaps \
                 may be inconsistent",
                self.disk,
                place.record.display()
            );
        }
        let files = new.files.values().filter(|file| !is_used(&inner, file));
        place.remove_bits(files.cloned());
    }

    /// The disk has this size from now on, and no request beyond the old end is accepted yet. What is new there counts as
    /// dirty: it may contain anything.
    pub fn grow(&self, size: u64) {
        let mut inner = self.inner();
        if size > inner.size {
            inner.size = size;
            self.grow_all(&inner);
        }
    }

    /// Lets them cover the whole disk.
    fn grow_all(&self, inner: &Inner) {
        let before: Vec<_> = (self.bitmaps.all().into_iter())
            .map(|bitmap| (bitmap.size(), bitmap))
            .collect();
        for bitmap in self.bitmaps.grow(inner.size, BITMAP_BYTES_MAX) {
            error!(
                "disk {}: bitmap '{}' is lost: there is no space for the bits of the larger disk",
                self.disk,
                bitmap.name()
            );
        }
        for (old, bitmap) in before {
            if bitmap.is_recording() && !bitmap.is_inconsistent() {
                bitmap.mark(old, inner.size.saturating_sub(old));
            }
        }
    }

    /// Stores the bitmaps. The disk is durable, and nothing writes to it any more.
    pub fn store(&self) {
        let Ok(place) = &self.place else { return };
        let mut inner = self.inner();
        // Until it has handed over, the old process continues with them.
        let is_other = place.inherited.is_uncommitted();
        if is_other || inner.files.is_empty() && !inner.has_record {
            return;
        }
        let (file, all) = (&place.file, self.bitmaps.all());
        let stored = file.size().and_then(|size| {
            // In whole blocks, as the disk. It may have grown unnoticed.
            let size = size - size % u64::from(file.facts().logical_block);
            let is_cut = size < inner.size;
            inner.size = size.max(inner.size);
            self.grow_all(&inner);
            let mut record = place.record_of(State::Stored(Seen::at_rest(file)?), &inner, &all);
            for bitmap in record.bitmaps.iter_mut().filter(|_| is_cut) {
                let why = || "the disk's file has become smaller".into();
                bitmap.lost.get_or_insert_with(why);
            }
            place.write(&record, &all)
        });
        match stored {
            Ok(()) => {
                let files = std::mem::take(&mut inner.files);
                place.remove_bits(files.into_values());
            }
            Err(e) => error!(
                "disk {}: its bitmaps could not be stored in {}: {e}; they are continued if ringdisk starts again before the host \
                 does",
                self.disk,
                place.record.display()
            ),
        }
    }

    /// Makes all of them inconsistent, durably: others may write to the disk, and nobody will know.
    ///
    /// # Errors
    /// They could not be marked.
    pub fn lose_all(&self, why: &str) -> io::Result<()> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        let mut inner = self.inner();
        let old = std::mem::take(&mut inner.files);
        for bitmap in self
            .bitmaps
            .all()
            .iter()
            .filter(|bitmap| bitmap.is_persistent())
        {
            self.lose(&mut inner, bitmap.name().into(), bitmap.granularity(), why);
        }
        if inner.has_record || !inner.lost.is_empty() {
            place.write_in_use(&inner, &[])?;
        }
        place.remove_bits(old.into_values());
        Ok(())
    }
}

/// Why the bitmaps of a record cannot be used, if so.
fn why_not(record: &Record, file: &DiskFile, size: u64) -> Option<String> {
    let lost = match (&record.state, Seen::found(file)) {
        (_, Err(e)) => format!("the disk's file cannot be examined: {e}"),
        (State::InUse(then), Ok(now)) if !then.is_same_boot(&now) => {
            "it was in use when the host crashed, and lacks changes since".into()
        }
        (State::InUse(then), Ok(now)) if !then.is_same_disk(&now) => {
            "it is that of another disk, which had this path".into()
        }
        (State::InUse(_), Ok(_)) if size < record.size => {
            "the disk has become smaller since".into()
        }
        (State::Stored(then), Ok(now)) if size < record.size || !then.is_unchanged(&now) => {
            FOREIGN.into()
        }
        _ => return None,
    };
    Some(lost)
}

fn is_used(inner: &Inner, file: &String) -> bool {
    inner.files.values().any(|used| used == file)
}

impl Prepared {
    /// Whether the record would be the same.
    fn is_same(&self, inner: &Inner) -> bool {
        self.files == inner.files && self.lost.len() == inner.lost.len()
    }
}

impl Place {
    /// Makes the files that new bitmaps need, and writes the record.
    fn prepare(&self, inner: &Inner, new: &mut Prepared) -> io::Result<()> {
        for bitmap in new
            .bitmaps
            .iter_mut()
            .filter(|bitmap| bitmap.is_persistent())
        {
            let name = bitmap.name().to_owned();
            // One that has not changed is where it was.
            let name_of_file = match inner.files.get(&name).filter(|_| bitmap.is_shared()) {
                Some(file) => file.clone(),
                None => {
                    let (shared, file) = self.share(bitmap)?;
                    *bitmap = Arc::new(shared);
                    file
                }
            };
            new.files.insert(name, name_of_file);
        }
        if new.is_same(inner) {
            return Ok(());
        }
        let next = Inner {
            size: inner.size,
            lost: new.lost.clone(),
            files: new.files.clone(),
            has_record: inner.has_record,
        };
        self.write_in_use(&next, &new.bitmaps)
    }

    /// What to record.
    fn record_of(&self, state: State, inner: &Inner, bitmaps: &[Arc<DirtyBitmap>]) -> Record {
        let lost = inner.lost.iter().map(|bitmap| BitmapRecord {
            name: bitmap.name.clone(),
            granularity_bits: bitmap.granularity.checked_ilog2().unwrap_or(0),
            recording: false,
            bits: None,
            lost: Some(bitmap.why.clone()),
        });
        let usable = bitmaps.iter().filter(|bitmap| bitmap.is_persistent());
        let usable = usable.map(|bitmap| BitmapRecord {
            name: bitmap.name().into(),
            granularity_bits: bitmap.granularity_bits(),
            recording: bitmap.is_recording(),
            bits: inner.files.get(bitmap.name()).cloned(),
            lost: (bitmap.is_inconsistent())
                .then(|| "there was no space for the bits of the larger disk".into()),
        });
        Record {
            version: record::VERSION,
            path: self.path.clone(),
            size: inner.size,
            state,
            bitmaps: lost.chain(usable).collect(),
        }
    }

    fn write_in_use(&self, inner: &Inner, bitmaps: &[Arc<DirtyBitmap>]) -> io::Result<()> {
        let record = self.record_of(State::InUse(Seen::found(&self.file)?), inner, bitmaps);
        if record.bitmaps.is_empty() {
            return record::remove(&self.record);
        }
        self.write(&record, &[])
    }

    /// Replaces the record, durably. One that is stored gets the bits of its bitmaps.
    fn write(&self, record: &Record, bitmaps: &[Arc<DirtyBitmap>]) -> io::Result<()> {
        record::write(&self.record, record, bitmaps, |file| self.give(file))
    }

    /// A bitmap of a record, and the name of the file with its bits, which is empty if there is no space for one.
    fn load(
        &self,
        record: &Record,
        bitmap: &BitmapRecord,
        bits_at: u64,
    ) -> io::Result<(DirtyBitmap, String)> {
        let BitmapRecord {
            name,
            granularity_bits,
            recording,
            ..
        } = bitmap;
        let is_valid = (1..=1023).contains(&name.len()) && (9..=31).contains(granularity_bits);
        if !is_valid || bitmap.bytes(record) > BITMAP_BYTES_MAX {
            return Err(io::Error::other("its name, granularity or size is invalid"));
        }
        let empty = DirtyBitmap::new(name.clone(), *granularity_bits, 0, *recording, true);
        let empty = empty.map_err(|_| io::Error::other("it is too large"))?;
        match &record.state {
            State::InUse(_) => {
                let name = bitmap.bits.as_deref().unwrap_or_default();
                let lacks = |e: io::Error| {
                    io::Error::new(
                        e.kind(),
                        format!("the process before has left no bits of it: {e}"),
                    )
                };
                if !self.is_bits(name) {
                    return Err(lacks(io::ErrorKind::NotFound.into()));
                }
                let words = self.open_bits(name, false).map_err(lacks)?;
                let offset = words.label().load(Relaxed);
                let found = Seen::found(&self.file)?;
                if *recording && found.is_changed_after(words.noted_time(), offset) {
                    return Err(io::Error::other(FOREIGN));
                }
                note_time(&words);
                let shared = empty.in_shared(Arc::new(words));
                let shared =
                    shared.map_err(|_| io::Error::other("there is no space for its bits"))?;
                let grown = shared.grow(record.size);
                grown.map_err(|_| io::Error::other("there is no space for its bits"))?;
                Ok((shared, name.to_owned()))
            }
            State::Stored(_) => {
                let grown = empty.grow(record.size);
                grown.map_err(|_| io::Error::other("it is too large"))?;
                read_bits(&self.record, bits_at, &empty)?;
                Ok(self.share(&empty).unwrap_or((empty, String::new())))
            }
        }
    }

    /// A copy of a bitmap with its bits in a new file, and the name of that.
    fn share(&self, bitmap: &DirtyBitmap) -> io::Result<(DirtyBitmap, String)> {
        let name = format!("{}{:016x}.bits", self.bits.1, record::random());
        let full = |e: io::Error| {
            let _ = fs::remove_file(self.bits.0.join(&name));
            let text = format!("{} has no space for its bits: {e}", self.bits.0.display());
            io::Error::new(e.kind(), text)
        };
        let words = self.open_bits(&name, true).map_err(full)?;
        // The file was opened for writing, which may have changed its times.
        note_time(&words);
        let shared = bitmap.in_shared(Arc::new(words));
        let no_space = |_| full(io::ErrorKind::StorageFull.into());
        Ok((shared.map_err(no_space)?, name))
    }

    fn open_bits(&self, name: &str, is_new: bool) -> io::Result<MappedWords> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(is_new)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(self.bits.0.join(name))?;
        self.give(&file)?;
        MappedWords::new(file, BITMAP_BYTES_MAX)
    }

    fn give(&self, file: &File) -> io::Result<()> {
        match self.owner.filter(|_| rustix::process::geteuid().is_root()) {
            Some(owner) => crate::credentials::give(file, owner),
            None => Ok(()),
        }
    }

    /// Whether a file with bits of this disk may have this name.
    fn is_bits(&self, name: &str) -> bool {
        name.starts_with(&self.bits.1) && !name.contains('/')
    }

    fn remove_bits(&self, files: impl Iterator<Item = String>) {
        for file in files.filter(|file| !file.is_empty()) {
            // Failure wastes memory until the host starts again.
            let _ = fs::remove_file(self.bits.0.join(file));
        }
    }
}

/// Notes the time, and what turns it into the time of a file.
fn note_time(words: &MappedWords) {
    words.label().store(seen::clock_offset(), Relaxed);
    words.note_time();
}

/// Begins the names of a disk's files: a hash of its path (FNV-1a, 64 bits). The record has the whole path.
fn key(path: &Path) -> String {
    let hash = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let path = path.as_os_str().as_encoded_bytes();
    format!("{:016x}", path.iter().fold(0xcbf2_9ce4_8422_2325, hash))
}
