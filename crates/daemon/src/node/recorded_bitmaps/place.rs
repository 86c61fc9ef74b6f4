//! The files with the bitmaps of a disk: the record, the notes of regions, and the bits while they are in use.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use block::{DirtyBitmap, SharedWords, WriteIntent, noted_ranges, region_bits};
use engine::MappedWords;
use image::{BITMAP_BYTES_MAX, Chain, Generations, Qcow2, UnusableBitmap};

use super::find::find;
use super::intent::{self, Checkpoints, IntentLog, Note, Notes, Regions, Tag};
use super::medium::Medium;
use super::record::{self, BitmapRecord, IntentRecord, Record, State, read_bits};
use super::seen::{self, LOCK_LOST, Seen};
use crate::inherited::Inherited;
use crate::node::context::OpenContext;
use crate::token::{random, token};

pub const FOREIGN: &str = "another program has written to the disk meanwhile, or has changed or replaced the disk's file, or the host's clock was set";

/// Where the bitmaps of a disk are stored.
pub struct Place {
    pub medium: Medium,
    /// The disk's image, which has the bitmaps while it is not in use.
    pub chain: Option<Arc<Chain>>,
    /// In the state directory.
    pub record: PathBuf,
    /// The record of another file or device that had the path of the disk.
    pub replaced: Option<PathBuf>,
    /// The disk's file, as the operator named it.
    pub path: String,
    /// The directory of files with bits, and how their names begin.
    pub bits: (PathBuf, String),
    /// What this process has inherited.
    pub inherited: Arc<Inherited>,
    /// The owner of new files, if this process will become another user.
    pub owner: Option<(u32, u32)>,
}

/// The bitmaps of a disk, as they are stored.
#[derive(Clone, Default)]
pub struct Inner {
    /// Bytes of the disk.
    pub size: u64,
    pub lost: Vec<UnusableBitmap>,
    /// The file with the bits of each bitmap, by its name; empty if they are only in the memory of this process.
    pub files: BTreeMap<String, String>,
    pub has_record: bool,
    /// Other bitmaps are prepared, and the record is theirs.
    pub is_preparing: bool,
    pub intent: Option<Intent>,
    /// Why bitmaps are recorded as inconsistent, by their names.
    pub failures: BTreeMap<String, String>,
    /// The disk's file was cut off, while other bitmaps were prepared.
    pub is_cut: bool,
    /// Why changes could not be noted, while other bitmaps were prepared.
    pub not_noted: Option<String>,
    /// The record of an earlier process, if bitmaps cannot be stored.
    pub leftover: Option<PathBuf>,
}

impl Inner {
    /// Why a bitmap is recorded as inconsistent. That comes before it is inconsistent for others.
    fn why_lost(&self, bitmap: &DirtyBitmap) -> Option<String> {
        let known = self.failures.get(bitmap.name()).cloned();
        known.or_else(|| bitmap.is_inconsistent().then(|| "it lacks changes".into()))
    }

    /// These bitmaps took the place of others, which may have had the same names.
    pub fn keep_failures_of(&mut self, bitmaps: &[Arc<DirtyBitmap>]) {
        self.failures.retain(|name, _| {
            let mut named = bitmaps.iter().filter(|bitmap| bitmap.name() == name);
            named.any(|bitmap| bitmap.is_inconsistent())
        });
    }
}

/// The notes of a disk in use.
#[derive(Clone)]
pub struct Intent {
    pub record: IntentRecord,
    pub log: Arc<IntentLog>,
    pub regions: Arc<WriteIntent>,
}

/// Bitmaps that take the place of the present ones.
pub struct Prepared {
    pub bitmaps: Vec<Arc<DirtyBitmap>>,
    pub lost: Vec<UnusableBitmap>,
    pub files: BTreeMap<String, String>,
    /// The notes, if they are new.
    pub intent: Option<Intent>,
}

impl Prepared {
    /// Whether the record would be the same.
    pub fn is_same(&self, inner: &Inner) -> bool {
        self.files == inner.files && self.lost.len() == inner.lost.len()
    }
}

const SMALLER: &str = "the disk has become smaller since";

/// What can be done with the bitmaps of a record.
pub enum Usable {
    /// They are as they were stored, or as the process before has left them.
    AsTheyAre,
    /// The host crashed: these regions count as dirty.
    With(Box<Regions>),
}

impl Place {
    /// Where the bitmaps of a disk are stored. `state` is the state directory, and `path` the absolute one of the disk's file, or the full
    /// name of its image in a cluster. The disk is locked for writing.
    ///
    /// # Errors
    /// It is not known which record is about the disk.
    pub fn new(
        state: &Path,
        context: &OpenContext,
        path: &Path,
        medium: Medium,
        chain: Option<Arc<Chain>>,
    ) -> io::Result<Self> {
        let journals = &context.journals;
        let found = find(
            state,
            &context.old_records,
            path,
            Some(&medium),
            chain.is_some(),
        )?;
        let stem = found.own.file_stem().unwrap_or_default().to_string_lossy();
        let bits = (journals.directory.clone(), format!("{stem}-"));
        let record = found.take(context.inherited.is_uncommitted())?;
        Ok(Self {
            medium,
            chain,
            record,
            replaced: found.replaced,
            path: path.to_string_lossy().into_owned(),
            bits,
            inherited: context.inherited.clone(),
            owner: journals.owner(),
        })
    }

    /// What can be done with the bitmaps of a record.
    ///
    /// # Errors
    /// Why nothing can.
    pub fn usable(&self, record: &Record, size: u64) -> Result<Usable, String> {
        let now = self.medium.found();
        let now = now.map_err(|e| format!("the disk's file cannot be examined: {e}"))?;
        let (then, is_stored) = match &record.state {
            State::InUse(then) => (then, false),
            State::Stored(then) => (then, true),
        };
        self.medium.check(then, is_stored)?;
        match &record.state {
            State::InUse(then) if !then.is_same_boot(&now) => {
                self.after_crash(record, then, &now, size)
            }
            State::InUse(then) if !then.is_same_disk(&now) => {
                Err("it is that of another disk, which had this path".into())
            }
            State::InUse(_) if size < record.size => Err(SMALLER.into()),
            State::InUse(_) => {
                let checked = self.image().map(|image| {
                    let note = self.note_of(record).map_err(|e| e.to_string())?;
                    check_continued(image, &note.tag, true)
                });
                checked.unwrap_or(Ok(()))?;
                Ok(Usable::AsTheyAre)
            }
            State::Stored(then) if size < record.size || !then.is_unchanged(&now) => {
                Err(FOREIGN.into())
            }
            State::Stored(_) => Ok(Usable::AsTheyAre),
        }
    }

    /// The disk's image, which has the bitmaps while it is not in use.
    pub fn image(&self) -> Option<&Qcow2> {
        self.chain.as_ref()?.image()
    }

    /// What is noted with the regions now.
    pub fn tag(&self) -> Tag {
        let generations = self.image().and_then(Qcow2::generations);
        generations.map_or_else(Tag::default, Generations::to_bytes)
    }

    /// What is noted in the file that a record names.
    fn note_of(&self, record: &Record) -> io::Result<Note> {
        let of = record.intent.as_ref();
        let name = of.map(|of| &*of.file).unwrap_or_default();
        let read = || match of {
            Some(of) => intent::read(&self.open_intent(of)?),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        read().map_err(|e| {
            io::Error::new(e.kind(), format!("the notes '{name}' cannot be read: {e}"))
        })
    }

    fn after_crash(
        &self,
        record: &Record,
        then: &Seen,
        now: &Seen,
        size: u64,
    ) -> Result<Usable, String> {
        const LACKS: &str = "it was in use when the host crashed, and lacks changes since";
        if record.intent.is_none() {
            return Err(LACKS.into());
        }
        let note = self.note_of(record).map_err(|e| format!("{LACKS}: {e}"))?;
        if size < record.size {
            return Err(SMALLER.into());
        }
        let last = note.time.saturating_add(intent::TIME_SLACK);
        if !then.is_same_after_crash(now, last, seen::boot_time()) {
            return Err(FOREIGN.into());
        }
        if let Some(image) = self.image() {
            check_continued(image, &note.tag, false)?;
        }
        Ok(Usable::With(Box::new(note.regions)))
    }

    /// The file with the notes of a record.
    fn open_intent(&self, of: &IntentRecord) -> io::Result<File> {
        if !is_intent(&of.file) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = (OpenOptions::new().read(true).write(true))
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(self.record.with_file_name(&of.file))?;
        if intent::id_of(&file)? != of.id {
            return Err(io::Error::other("they are of another time"));
        }
        Ok(file)
    }

    /// Two, so that there is another one for a new file.
    fn intent_names(&self) -> [String; 2] {
        ["a", "b"].map(|which| format!("{}{which}.intent", self.bits.1))
    }

    /// The notes that a process before has left.
    ///
    /// # Errors
    /// They cannot be opened.
    pub fn continued_intent(
        &self,
        of: &IntentRecord,
        owner: Weak<dyn Checkpoints>,
    ) -> io::Result<Intent> {
        let file = self.open_intent(of)?;
        Ok(Intent::new(of.clone(), file, owner))
    }

    /// A new file for notes, durable, in which there is none. `old` is the name of the present one.
    ///
    /// # Errors
    /// It could not be made.
    pub fn new_intent(
        &self,
        size: u64,
        old: Option<&str>,
        owner: Weak<dyn Checkpoints>,
    ) -> io::Result<Intent> {
        let [a, b] = self.intent_names();
        let name = if old == Some(&*a) { b } else { a };
        let path = self.record.with_file_name(&name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        self.give(&file)?;
        let id = random();
        file.write_all(&intent::fresh(self.tag(), id))?;
        file.sync_all()?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
        let record = IntentRecord {
            file: name,
            id,
            region_bits: region_bits(size),
        };
        Ok(Intent::new(record, file, owner))
    }

    /// Removes a file with notes that no record names any more.
    pub fn remove_intent(&self, of: &IntentRecord) {
        if is_intent(&of.file) {
            let _ = fs::remove_file(self.record.with_file_name(&of.file));
        }
    }

    /// Empties the notes: after a crash, the bitmaps are inconsistent.
    pub fn invalidate(&self, of: &IntentRecord) -> io::Result<()> {
        let file = self.open_intent(of)?;
        file.set_len(0)?;
        file.sync_all()
    }

    /// Makes the files that new bitmaps need, and writes the record.
    ///
    /// # Errors
    /// The record may be that of the new ones.
    pub fn prepare(
        &self,
        inner: &Inner,
        new: &mut Prepared,
        owner: Weak<dyn Checkpoints>,
    ) -> io::Result<()> {
        let continued =
            |bitmap: &&mut Arc<DirtyBitmap>| bitmap.is_persistent() && !bitmap.is_inconsistent();
        for bitmap in new.bitmaps.iter_mut().filter(continued) {
            let name = bitmap.name().to_owned();
            // An image lets them grow itself.
            if self.chain.is_none() {
                grow_copy(bitmap, inner.size)?;
            }
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
        if !new.files.is_empty() && !self.medium.is_owned() {
            return Err(io::Error::other(LOCK_LOST));
        }
        if new.is_same(inner) {
            return Ok(());
        }
        // Those that could not be written are not used again.
        let usable = inner.intent.as_ref();
        if usable.is_none_or(|intent| intent.regions.is_given_up()) && !new.files.is_empty() {
            let old = usable.map(|intent| &*intent.record.file);
            new.intent = Some(self.new_intent(inner.size, old, owner)?);
        }
        let mut next = Inner {
            size: inner.size,
            lost: new.lost.clone(),
            files: new.files.clone(),
            has_record: inner.has_record,
            is_preparing: true,
            intent: new.intent.clone().or_else(|| inner.intent.clone()),
            failures: inner.failures.clone(),
            ..Inner::default()
        };
        next.keep_failures_of(&new.bitmaps);
        self.write_in_use(&next, &new.bitmaps)
    }

    /// What to record.
    pub fn record_of(&self, state: State, inner: &Inner, bitmaps: &[Arc<DirtyBitmap>]) -> Record {
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
            lost: inner.why_lost(bitmap),
        });
        let intent = match &state {
            State::InUse(_) => inner.intent.as_ref().map(|intent| intent.record.clone()),
            State::Stored(_) => None,
        };
        // An image may have grown a moment ago, with its bitmaps.
        let size = self.image().map_or(inner.size, Qcow2::size);
        let is_image = self.chain.is_some();
        Record {
            version: record::version(intent.is_some(), is_image),
            path: self.path.clone(),
            is_image,
            size,
            intent,
            state,
            bitmaps: lost.chain(usable).collect(),
        }
    }

    /// Writes the record of bitmaps in use, with their bits as they are now, durably.
    ///
    /// # Errors
    /// Either record is in place.
    pub fn write_in_use(&self, inner: &Inner, bitmaps: &[Arc<DirtyBitmap>]) -> io::Result<()> {
        let record = self.record_of(State::InUse(self.medium.found()?), inner, bitmaps);
        if record.bitmaps.is_empty() {
            return record::remove(&self.record);
        }
        self.write(&record, bitmaps)
    }

    /// Writes a record of bitmaps that the next process cannot use, durably. It removes the files with their bits.
    ///
    /// # Errors
    /// Either record is in place.
    pub fn write_lost(
        &self,
        inner: &Inner,
        bitmaps: &[Arc<DirtyBitmap>],
        why: &str,
    ) -> io::Result<()> {
        let state = State::InUse(self.medium.found()?);
        let mut record = self.record_of(state, inner, bitmaps);
        for bitmap in &mut record.bitmaps {
            bitmap.lost.get_or_insert_with(|| why.into());
        }
        self.write(&record, &[])
    }

    /// Replaces the record, durably.
    ///
    /// # Errors
    /// Either record is in place.
    pub fn write(&self, record: &Record, bitmaps: &[Arc<DirtyBitmap>]) -> io::Result<()> {
        record::write(&self.record, record, bitmaps, |file| self.give(file))
    }

    /// A bitmap of a record, and the name of the file with its bits, which is empty if there is no space for one. `size` are
    /// the bytes of the disk now.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn load(
        &self,
        record: &Record,
        bitmap: &BitmapRecord,
        bits_at: u64,
        usable: &Usable,
        size: u64,
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
        match (&record.state, usable) {
            (State::InUse(_), Usable::AsTheyAre) => {
                let name = bitmap.bits.as_deref().unwrap_or_default();
                let lacks = |e: io::Error| {
                    io::Error::new(
                        e.kind(),
                        format!("the process before has left no bits of it: {e}"),
                    )
                };
                if !is_bits(name) {
                    return Err(lacks(io::ErrorKind::NotFound.into()));
                }
                let words = self.open_bits(name, false).map_err(lacks)?;
                let needed = record.size.div_ceil(1 << granularity_bits).div_ceil(64);
                if (words.words().len() as u64) < needed {
                    return Err(lacks(io::Error::other("their file is too short")));
                }
                let offset = words.label().load(Relaxed);
                let found = self.medium.found()?;
                // Of an image, the generation is known, and a flush changes it long after the last write.
                if self.chain.is_none()
                    && *recording
                    && found.is_changed_after(words.noted_time(), offset)
                {
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
            (_, usable) => {
                let grown = empty.grow(record.size);
                grown.map_err(|_| io::Error::other("it is too large"))?;
                read_bits(&self.record, bits_at, &empty)?;
                // What a raw disk has grown by counts as dirty anyway.
                let covered = if self.chain.is_some() {
                    size
                } else {
                    record.size
                };
                let grown = empty.grow(covered);
                grown.map_err(|_| io::Error::other("it is too large"))?;
                if let (Usable::With(regions), Some(of), true) =
                    (usable, &record.intent, *recording)
                {
                    for (at, len) in noted_ranges(regions, of.region_bits, covered) {
                        empty.mark(at, len);
                    }
                }
                Ok(self.share(&empty).unwrap_or((empty, String::new())))
            }
        }
    }

    /// A copy of a bitmap with its bits in a new file, and the name of that.
    ///
    /// # Errors
    /// There is no space for it.
    pub fn share(&self, bitmap: &DirtyBitmap) -> io::Result<(DirtyBitmap, String)> {
        let name = format!("{}{}.bits", self.bits.1, token());
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
        give(file, self.owner)
    }

    /// Removes files with bits that are not used any more.
    pub fn remove_bits(&self, files: impl Iterator<Item = String>) {
        for file in files {
            // Failure wastes memory until the host starts again.
            let _ = self.withdraw_bits(&file);
        }
    }

    /// Removes the file with the bits of a bitmap: no process continues it after a kill of this one. Needs no space.
    ///
    /// # Errors
    /// It may still be there.
    pub fn withdraw_bits(&self, file: &str) -> io::Result<()> {
        if file.is_empty() {
            return Ok(());
        }
        match fs::remove_file(self.bits.0.join(file)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

impl Intent {
    fn new(record: IntentRecord, file: File, owner: Weak<dyn Checkpoints>) -> Self {
        let log = Arc::new(IntentLog::new(file, owner));
        let notes = log.clone();
        let regions = Arc::new_cyclic(|regions: &Weak<WriteIntent>| {
            let store = Box::new(Notes(notes, regions.clone()));
            WriteIntent::new(record.region_bits, store)
        });
        Self {
            record,
            log,
            regions,
        }
    }
}

/// Checks that nothing has written to an image since a process noted this.
fn check_continued(image: &Qcow2, tag: &Tag, was_killed: bool) -> Result<(), String> {
    if image.is_continued(&Generations::from_bytes(tag), was_killed) {
        return Ok(());
    }
    let why = if was_killed {
        "another program has opened the image for writing since, or the image was replaced, or its journal is not there"
    } else {
        "another program has opened the image for writing since, or the image was replaced"
    };
    Err(why.into())
}

/// Lets a bitmap cover the disk, which may have grown since it was copied. What is new counts as dirty.
fn grow_copy(bitmap: &DirtyBitmap, size: u64) -> io::Result<()> {
    let old = bitmap.size();
    if old >= size || bitmap.is_inconsistent() {
        return Ok(());
    }
    let grown = bitmap.grow(size);
    grown.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))?;
    if bitmap.is_recording() {
        bitmap.mark(old, size - old);
    }
    Ok(())
}

/// Makes a new file that of `owner`, if this process will become another user.
///
/// # Errors
/// It cannot.
pub fn give(file: &File, owner: Option<(u32, u32)>) -> io::Result<()> {
    match owner.filter(|_| rustix::process::geteuid().is_root()) {
        Some(owner) => crate::credentials::give(file, owner),
        None => Ok(()),
    }
}

/// Whether a file with bits may have this name.
pub fn is_bits(name: &str) -> bool {
    name.ends_with(".bits") && !name.contains('/')
}

/// Whether a file with notes may have this name.
fn is_intent(name: &str) -> bool {
    name.ends_with(".intent") && !name.contains('/')
}

/// Removes the files with bits that a record names.
pub fn remove_bits_of(directory: &Path, files: Vec<String>) {
    for file in files.iter().filter(|file| is_bits(file)) {
        // Failure wastes memory until the host starts again.
        let _ = fs::remove_file(directory.join(file));
    }
}

/// Notes the time, and what turns it into the time of a file.
fn note_time(words: &MappedWords) {
    words.label().store(seen::clock_offset(), Relaxed);
    words.note_time();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_bitmaps_grow_with_the_disk_and_are_dirty_there() {
        let sizes = [(true, 1), (false, 0)];
        for (is_recording, dirty) in sizes {
            let bitmap = DirtyBitmap::new("b".into(), 16, 8 << 16, is_recording, true).unwrap();
            grow_copy(&bitmap, 9 << 16).unwrap();
            assert_eq!(bitmap.size(), 9 << 16);
            let mut bits = [0; 8];
            bitmap.copy_to(0, &mut bits);
            assert_eq!(bits, [0, dirty, 0, 0, 0, 0, 0, 0]);
            grow_copy(&bitmap, 1 << 16).unwrap();
            assert_eq!(bitmap.size(), 9 << 16);
        }
    }
}
