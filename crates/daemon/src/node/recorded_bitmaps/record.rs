//! The record of a disk's bitmaps: a line of JSON, and then, unless they are in use without notes, the bits of those that can be used, one
//! after the other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use block::DirtyBitmap;
use serde::{Deserialize, Serialize};

use super::seen::Seen;

/// Of records with notes. Programs that know only version 1 make none.
const VERSION: u32 = 2;
/// Of records of images, whose bitmaps are not in the record alone.
const VERSION_OF_IMAGES: u32 = 3;

/// Most bytes of the line: 256 bitmaps with names of 1023 bytes, six bytes for each in JSON, and what is said of them.
const LINE_MAX: u64 = 4 << 20;
/// Possible sizes of regions, as powers of two.
const REGION_BITS: std::ops::RangeInclusive<u32> = 9..=63;
/// Most bytes of bits. A disk has at most half of that, and 8 bytes for each bitmap.
const STORED_BYTES_MAX: u64 = 2 * image::BITMAP_BYTES_MAX;
/// Bits are written and read in such pieces.
const PIECE: u64 = 1 << 20;
/// The bits of each bitmap have a multiple of so many bytes.
const UNIT: u64 = 8;

#[derive(Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    /// The disk's file, as the operator named it.
    pub path: String,
    /// The disk is in an image, which has the bitmaps while it is not in use.
    #[serde(default)]
    pub is_image: bool,
    /// Bytes of the disk.
    pub size: u64,
    pub state: State,
    /// The notes of what has changed since the record was written, while the bitmaps are in use. The record then has their bits.
    #[serde(default)]
    pub intent: Option<IntentRecord>,
    pub bitmaps: Vec<BitmapRecord>,
}

/// The file with the notes, in the state directory.
#[derive(Serialize, Deserialize, Clone)]
#[serde(rename_all = "kebab-case")]
pub struct IntentRecord {
    pub file: String,
    /// The file has it too, so that notes of another time are not used.
    #[serde(default)]
    pub id: u64,
    /// The size of its regions, as a power of two.
    pub region_bits: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The disk may have been written to since.
    InUse(Seen),
    /// Nothing was written to the disk since, if it still looks like this.
    Stored(Seen),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapRecord {
    pub name: String,
    pub granularity_bits: u32,
    pub recording: bool,
    /// The file with its bits while it is in use.
    pub bits: Option<String>,
    /// Why it cannot be used.
    pub lost: Option<String>,
}

impl BitmapRecord {
    /// Bytes of its bits.
    pub fn bytes(&self, record: &Record) -> u64 {
        let granularity = 1_u64.checked_shl(self.granularity_bits).unwrap_or(u64::MAX);
        record.size.div_ceil(granularity).div_ceil(8)
    }

    /// Bytes of its bits in the record.
    pub fn stored_bytes(&self, record: &Record) -> u64 {
        let has_bits = matches!(record.state, State::Stored(_)) || record.intent.is_some();
        match &self.lost {
            None if has_bits => self.bytes(record).next_multiple_of(UNIT),
            _ => 0,
        }
    }
}

/// The version of a record with notes, or without, of a disk that is in an image, or not.
pub fn version(has_intent: bool, is_image: bool) -> u32 {
    match (has_intent, is_image) {
        (_, true) => VERSION_OF_IMAGES,
        (true, false) => VERSION,
        (false, false) => VERSION - 1,
    }
}

/// Reads a record. `None` if there is none.
///
/// # Errors
/// What is wrong with it.
pub fn read(path: &Path) -> Result<Option<Record>, String> {
    let file = match open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|e| e.to_string())?,
    };
    let (line, _) = read_line(file).map_err(|e| e.to_string())?;
    parse(&line).map(Some)
}

/// Parses the line of a record.
///
/// # Errors
/// What is wrong with it.
fn parse(line: &[u8]) -> Result<Record, String> {
    let record: Record = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    if record.version != version(record.intent.is_some(), record.is_image) {
        return Err(format!("version {} is not known", record.version));
    }
    let is_valid = |intent: &IntentRecord| REGION_BITS.contains(&intent.region_bits);
    if !record.intent.iter().all(is_valid) {
        return Err("the size of its regions is invalid".into());
    }
    let mut stored = record.bitmaps.iter().map(|b| b.stored_bytes(&record));
    let total = stored.try_fold(0, u64::checked_add);
    if total.is_none_or(|total| total > STORED_BYTES_MAX) {
        return Err("its bitmaps are larger than possible".into());
    }
    Ok(record)
}

/// Parses any bytes, for the fuzz target. A record that is accepted reads back as it is written, and its bits are bounded.
#[cfg(any(test, fuzzing))]
pub fn check(line: &[u8]) {
    let Ok(record) = parse(line) else { return };
    let stored = record.bitmaps.iter().map(|b| b.stored_bytes(&record));
    assert!(stored.sum::<u64>() <= STORED_BYTES_MAX);
    let written = serde_json::to_vec(&record).expect("it was read");
    let again = parse(&written).expect("it was written");
    assert_eq!(serde_json::to_vec(&again).expect("it was read"), written);
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

/// The line, and where the bits begin.
fn read_line(file: File) -> io::Result<(Vec<u8>, u64)> {
    let mut line = Vec::new();
    BufReader::new(file.take(LINE_MAX)).read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let bits = line.len() as u64 + 1;
    Ok((line, bits))
}

/// Sets the bits that are in a record, `at` bytes after the first.
///
/// # Errors
/// They could not be read.
pub fn read_bits(path: &Path, at: u64, bitmap: &DirtyBitmap) -> io::Result<()> {
    let file = open(path)?;
    let (_, begin) = read_line(file.try_clone()?)?;
    each_piece(bitmap.bytes(), |from, piece| {
        file.read_exact_at(piece, begin + at + from)?;
        bitmap.merge_bytes(from, piece);
        Ok(())
    })
}

fn each_piece(bytes: u64, mut f: impl FnMut(u64, &mut [u8]) -> io::Result<()>) -> io::Result<()> {
    let bytes = bytes.next_multiple_of(UNIT);
    let mut buffer = vec![0; bytes.min(PIECE) as usize];
    for from in (0..bytes).step_by(PIECE as usize) {
        let len = (bytes - from).min(PIECE) as usize;
        f(from, &mut buffer[..len])?;
    }
    Ok(())
}

/// Replaces a record durably: a crash leaves the old one or the new one. It gets the bits of those of
/// `bitmaps` that can be used, unless they are in use without notes. `give` makes the new file another user's.
///
/// # Errors
/// It could not be written. Either is in place.
pub fn write(
    path: &Path,
    record: &Record,
    bitmaps: &[Arc<DirtyBitmap>],
    give: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    // Before anything changes, because descriptors may have run out.
    let directory = File::open(path.parent().unwrap_or(Path::new(".")))?;
    let new = path.with_extension("new");
    // Somebody else's is not followed or written to.
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(&new)?;
    give(&file)?;
    let written = write_to(&file, record, bitmaps);
    if let Err(e) = written.and_then(|()| fs::rename(&new, path)) {
        let _ = fs::remove_file(&new);
        return Err(e);
    }
    directory.sync_all()
}

fn write_to(file: &File, record: &Record, bitmaps: &[Arc<DirtyBitmap>]) -> io::Result<()> {
    let mut to = BufWriter::new(file);
    serde_json::to_writer(&mut to, record)?;
    to.write_all(b"\n")?;
    let is_stored = |bitmap: &&BitmapRecord| bitmap.stored_bytes(record) > 0;
    for stored in record.bitmaps.iter().filter(is_stored) {
        let bitmap = bitmaps.iter().find(|bitmap| bitmap.name() == stored.name);
        let bitmap = bitmap.ok_or(io::ErrorKind::NotFound)?;
        // The disk may have grown since the record was made.
        each_piece(stored.bytes(record), |from, piece| {
            bitmap.copy_to(from, piece);
            to.write_all(piece)
        })?;
    }
    to.flush()?;
    file.sync_all()
}

/// Removes a record durably, if there is one.
///
/// # Errors
/// It may still be there.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => {
            removed?;
            File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seeds of fuzzing, which include its findings.
    #[test]
    fn fuzzing_seeds_are_valid() {
        let seeds = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/seeds/bitmap_record"
        );
        let mut accepted = 0;
        for file in fs::read_dir(seeds).unwrap() {
            let bytes = fs::read(file.unwrap().path()).unwrap();
            check(&bytes);
            accepted += usize::from(parse(&bytes).is_ok());
        }
        assert_eq!(accepted, 3);
    }
}
