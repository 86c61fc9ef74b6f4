//! What must hold for any bytes in an image: no panic, no endless loop, bounded memory; and whatever is
//! written to an image that was accepted, is there afterwards. The fuzz targets call these, and so does
//! `../any_bytes.rs`.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use block::{DirtyBitmap, FileOffset, GuestOffset};
use image::{
    AllowedDirectories, Chain, ChainOptions, DataFile, FileRole, JournalEvent, JournalFile,
    LayerFormat, OpenFiles, Prepared, ReadLocation, Storage, TopFile, WriteLocation, ZeroMode,
    ZeroStep, check,
};

/// Inputs worth starting from, by name.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Largest file that is made of an input, in bytes; what is behind its end is zeroes.
const FILE_MAX: u64 = 32 << 20;

struct Bytes(Mutex<Vec<u8>>);

impl Storage for Bytes {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        let bytes = self.0.lock().unwrap();
        let from = usize::try_from(at.0).unwrap_or(usize::MAX).min(bytes.len());
        let n = to.len().min(bytes.len() - from);
        to[..n].copy_from_slice(&bytes[from..from + n]);
        Ok(n)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        let mut bytes = self.0.lock().unwrap();
        let end = at.0.checked_add(from.len() as u64);
        let Some(end) = end.filter(|&end| end <= FILE_MAX) else {
            return Err(io::Error::from_raw_os_error(27));
        };
        if (bytes.len() as u64) < end {
            bytes.resize(end as usize, 0);
        }
        bytes[at.0 as usize..end as usize].copy_from_slice(from);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        false
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if size > FILE_MAX {
            return Err(io::Error::from_raw_os_error(27));
        }
        self.0.lock().unwrap().resize(size as usize, 0);
        Ok(())
    }

    fn punch(&self, _: FileOffset, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// Lets nothing be opened: names in an image must not even be looked at, with no allowed directories.
struct NoFiles;

impl OpenFiles for NoFiles {
    fn open(&mut self, _: OwnedFd, path: &Path, _: FileRole) -> io::Result<Arc<dyn Storage>> {
        panic!("{} was opened", path.display());
    }

    fn data_file(&mut self, _: &Path, _: Option<&str>, _: bool) -> io::Result<DataFile> {
        Err(io::Error::other("the operator has named none"))
    }
}

/// The input is a file; its last bytes say what is done with it.
pub fn image(data: &[u8]) {
    let file = Arc::new(Bytes(Mutex::new(data.to_vec())));
    let _ = check(&*file);
    for read_only in [true, false] {
        if let Some(chain) = open(file.clone(), read_only, None) {
            use_it(&chain, &file, data, read_only);
            check_bitmaps(&chain, &file);
        }
    }
    if let Some(chain) = open(file.clone(), false, None) {
        continue_bitmaps(&chain);
        use_it(&chain, &file, data, false);
        check_bitmaps(&chain, &file);
    }
}

/// Continues small bitmaps that were in use, as if their bits were known.
fn continue_bitmaps(chain: &Chain) {
    const BITS_MAX: u64 = 1 << 20;
    let Some(image) = chain.image() else { return };
    let unusable = image.unusable_bitmaps().into_iter().take(8);
    let small = unusable.filter(|bitmap| {
        (512..=1 << 31).contains(&bitmap.granularity)
            && image.size() / bitmap.granularity < BITS_MAX
    });
    let bitmaps = small.map(|bitmap| {
        let granularity = bitmap.granularity.ilog2();
        let new = DirtyBitmap::new(bitmap.name, granularity, image.size(), true, true);
        Arc::new(new.unwrap())
    });
    let _ = image.continue_bitmaps(bitmaps.collect());
}

/// Bitmaps of an image that was closed are read again as they were.
fn check_bitmaps(chain: &Chain, file: &Arc<Bytes>) {
    let bits = |bitmap: &DirtyBitmap| {
        let mut bits = vec![0; bitmap.bytes() as usize];
        bitmap.copy_to(0, &mut bits);
        bits
    };
    let Some(known) = chain.image().map(|image| image.bitmaps()) else {
        return;
    };
    let again = open(file.clone(), false, None);
    for bitmap in again
        .iter()
        .flat_map(|again| again.image().unwrap().bitmaps().all())
    {
        if let Some(known) = known.find(bitmap.name()) {
            assert!(bits(&bitmap) == bits(&known), "{bitmap:?} has changed");
        }
    }
}

/// The input is a journal of a sound image: if its first byte is odd, the file itself, or else the changes in it, each of
/// 25 bytes; if it is 2 more than a multiple of 4, in version 1 of the format. Returns how many were done again.
pub fn journal(data: &[u8]) -> u64 {
    let Some((kind, rest)) = data.split_first() else {
        return 0;
    };
    let bytes = match kind % 4 {
        0 => journal_owner(b"ringdkJ2", rest),
        2 => journal_owner(b"ringdkJ1", rest),
        _ => rest.to_vec(),
    };
    let mut image = Made::new();
    // "autoclear_features": a journal, with this number.
    image.word(88, (1 << 63) | (GENERATION << 24));
    // "incompatible_features": dirty, as from version 3 of the journal on.
    let version = bytes.get(SLOT_AT);
    image.word(72, u64::from(version.is_some_and(|&digit| digit > b'2')));
    let file = Arc::new(Bytes(Mutex::new(image.0)));
    let done = Arc::new(AtomicU64::new(0));
    let told = done.clone();
    let place = JournalFile {
        storage: Arc::new(Bytes(Mutex::new(bytes))),
        identity: IDENTITY,
        is_of_earlier_file: false,
        on_event: Box::new(move |event| {
            if let JournalEvent::Replayed(n) = event {
                told.fetch_add(n, Relaxed);
            }
        }),
    };
    if let Some(chain) = open(file.clone(), false, Some(place)) {
        use_it(&chain, &file, data, false);
    }
    // Whatever the journal said, what is in the file then can be looked at.
    let _ = check(&*file);
    done.load(Relaxed)
}

/// What the journal of these checks names.
const IDENTITY: [u8; 32] = [7; 32];
const GENERATION: u64 = 5;
const SLOT_AT: usize = 128;

/// A journal with one record, as it would be written.
fn journal_owner(version: &[u8; 8], changes: &[u8]) -> Vec<u8> {
    const RECORDS_AT: u64 = 4096;
    let session = 9_u64;
    let sequence = 1_u64;
    let magic = u64::from_be_bytes(*version);
    let said = [magic, sequence, session, GENERATION, RECORDS_AT];
    let mut slot: Vec<u8> = said.iter().flat_map(|word| word.to_le_bytes()).collect();
    slot.extend(IDENTITY);
    slot.extend(crc32(&slot).to_le_bytes());
    let mut body = changes[..changes.len() / 25 * 25].to_vec();
    if version != b"ringdkJ1" {
        body.splice(..0, GENERATION.to_le_bytes());
    }
    let len = (body.len() as u32).to_le_bytes();
    let place = [RECORDS_AT.to_le_bytes(), session.to_le_bytes()].concat();
    let mut file = vec![0; RECORDS_AT as usize];
    file[SLOT_AT..SLOT_AT + slot.len()].copy_from_slice(&slot);
    file.extend(len);
    file.extend(crc32(&[&len[..], &place, &body].concat()).to_le_bytes());
    file.extend(body);
    file
}

/// The checksum of Ethernet and gzip.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| match crc & 1 {
            0 => crc >> 1,
            _ => (crc >> 1) ^ 0xedb8_8320,
        })
    })
}

/// Journals that do something, and others that say what cannot be.
pub fn journal_seeds() -> Seeds {
    let change = |kind: u8, words: [u64; 3]| {
        let mut bytes = vec![kind];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    };
    let entry = |cluster, word| change(1, [cluster, word, 0]);
    let table = |index, word| change(2, [index, word, 0]);
    let refcount = |first, clusters, count| change(3, [first, clusters, count]);
    let block = |number, at| change(4, [number, at, 0]);
    let all = |changes: &[Vec<u8>]| [&[0][..], &changes.concat()].concat();
    let file = |version| journal_owner(version, &refcount(7, 1, 1));
    let copied = 1 << 63;
    vec![
        (
            "sound",
            all(&[refcount(7, 1, 1), entry(3, copied | (7 * 512))]),
        ),
        ("given_up", all(&[entry(0, 0), refcount(5, 1, 0)])),
        (
            "new_table",
            all(&[refcount(7, 1, 1), table(1, copied | (7 * 512))]),
        ),
        ("new_block", all(&[refcount(7, 1, 1), block(1, 7 * 512)])),
        ("header", all(&[entry(0, copied)])),
        ("metadata", all(&[entry(0, copied | (3 * 512))])),
        ("free", all(&[entry(0, copied | (7 * 512))])),
        ("beyond", all(&[entry(u64::MAX, copied | (6 * 512))])),
        ("compressed", all(&[entry(0, (1 << 62) | (6 * 512))])),
        ("many", all(&[refcount(0, u64::MAX, 1)])),
        ("wraps", all(&[refcount(u64::MAX, 2, 1)])),
        ("count", all(&[refcount(6, 1, u64::MAX)])),
        ("table_beyond", all(&[table(u64::MAX, copied | (4 * 512))])),
        ("block_elsewhere", all(&[block(0, 6 * 512)])),
        ("block_far", all(&[block(u64::MAX, 1 << 55)])),
        ("unknown", all(&[change(9, [0; 3])])),
        ("none", all(&[])),
        ("file", [&[1][..], &file(b"ringdkJ2")].concat()),
        ("cut_off", [&[1][..], &file(b"ringdkJ2")[..4110]].concat()),
        ("file_version_1", [&[1][..], &file(b"ringdkJ1")].concat()),
        ("file_version_3", [&[1][..], &file(b"ringdkJ3")].concat()),
        ("lost_here", [&[1][..], &file(b"ringdkJ4")].concat()),
        ("lost_elsewhere", [&[1][..], &file(b"ringdkJ5")].concat()),
        ("lost_both", [&[1][..], &file(b"ringdkJ6")].concat()),
        (
            "version_1",
            [&[2][..], &refcount(7, 1, 1), &entry(3, copied | (7 * 512))].concat(),
        ),
    ]
}

fn open(file: Arc<Bytes>, read_only: bool, journal: Option<JournalFile>) -> Option<Chain> {
    let top = TopFile {
        storage: file,
        path: Path::new("/image"),
        format: LayerFormat::Qcow2,
    };
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let options = ChainOptions {
        read_only,
        allow_corrupt: true,
        l2_cache_bytes: Some(1 << 16),
        punch: true,
        journal,
        flush_changes: false,
        progress: &mut |progress| {
            if progress.done > 1000 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    };
    let opened = Chain::open(top, &allowed, &mut NoFiles, options);
    opened
        .inspect_err(|error| assert!(error.to_string().len() > 10))
        .ok()
}

fn use_it(chain: &Chain, file: &Bytes, data: &[u8], read_only: bool) {
    let size = chain.size();
    let choices = data.rchunks(4).take(24);
    for (number, choice) in choices.enumerate() {
        let mut word = [0; 4];
        word[..choice.len()].copy_from_slice(choice);
        let word = u64::from(u32::from_le_bytes(word));
        let Some(most) = size.checked_sub(512) else {
            return;
        };
        // All over the disk, and mostly where a small image has something.
        let at = if word & 1 == 0 {
            word * 512
        } else {
            word << 24
        } % (most + 1)
            / 512
            * 512;
        let len = (1 + (word >> 8) % 200) * 512;
        let len = len.min(size - at);
        match number % 6 {
            _ if read_only => read(chain, at, len),
            0 | 1 => write(chain, file, at, len),
            2 => zero(chain, at, len, ZeroMode::Discard),
            3 => zero(
                chain,
                at,
                len,
                ZeroMode::Zeroes {
                    unmap: word & 2 == 0,
                },
            ),
            4 => drop(chain.flush()),
            _ => read(chain, at, len),
        }
    }
    if !read_only {
        let _ = chain.grow(size.saturating_add(4096) / 512 * 512);
        let _ = chain.close();
    }
}

fn read(chain: &Chain, at: u64, len: u64) {
    let pin = chain.pins().pin(0);
    let mut done = 0;
    let mut loads = 0;
    while done < len {
        match chain.map(&pin, GuestOffset(at + done), len - done) {
            ReadLocation::Load(missing) => {
                loads += 1;
                assert!(loads < 10_000, "the same is loaded again and again");
                if chain.load(missing).is_err() {
                    break;
                }
            }
            ReadLocation::Compressed(c) => {
                assert!(c.bytes <= 2 * c.cluster_bytes.max(512) && c.len > 0);
                assert!(c.skip + c.len <= c.cluster_bytes);
                let mut bytes = vec![0; c.bytes as usize];
                let file = &chain.files()[usize::from(c.file.0)];
                let n = file.read_at(c.at, &mut bytes).unwrap();
                let mut cluster = vec![0; c.cluster_bytes as usize];
                let _ = c.compression.inflate(&bytes[..n], &mut cluster);
                done += c.len;
            }
            ReadLocation::Data { len, .. }
            | ReadLocation::Zero { len }
            | ReadLocation::Damaged { len } => {
                assert!(len > 0);
                done += len;
            }
        }
    }
    chain.pins().unpin(pin);
}

/// Writes what allocates; what is there is overwritten in the file.
fn write(chain: &Chain, file: &Bytes, at: u64, len: u64) {
    mark(chain, at, len);
    let mut pin = chain.pins().pin(0);
    let mut done = 0;
    for _ in 0..10_000 {
        if done >= len {
            break;
        }
        match chain.map_write(&pin, GuestOffset(at + done), len - done) {
            WriteLocation::Load(missing) => {
                if chain.load(missing).is_err() {
                    break;
                }
            }
            WriteLocation::InPlace { at, len, .. } => {
                assert!(len > 0);
                assert!(at.0 >= 512, "guest data over the header");
                let _ = file.write_at(at, &vec![0xda; len as usize]);
                done += len;
            }
            WriteLocation::Allocate { len } => {
                // It may wait for others, and is none of them.
                chain.pins().unpin(pin);
                let prepared = chain.prepare_write(GuestOffset(at + done), len);
                pin = chain.pins().pin(0);
                match prepared {
                    Ok(Prepared::Allocated(allocation)) => {
                        assert!(allocation.len > 0 && allocation.len <= len);
                        done += allocation.len;
                        if allocation.len % 1024 == 0 {
                            let _ = chain.commit(allocation);
                        } else {
                            chain.abort(allocation);
                        }
                    }
                    Ok(Prepared::Mapped) => {}
                    Ok(Prepared::Wait(_)) => panic!("nobody is there to be waited for"),
                    Err(_) => break,
                }
            }
            WriteLocation::Damaged { len } => {
                assert!(len > 0);
                done += len;
            }
        }
    }
    chain.pins().unpin(pin);
}

fn mark(chain: &Chain, at: u64, len: u64) {
    if let Some(image) = chain.image() {
        assert!(
            image
                .bitmaps()
                .recording()
                .mark(at, len, &mut block::TimeNoted::default())
        );
    }
}

fn zero(chain: &Chain, at: u64, len: u64, why: ZeroMode) {
    mark(chain, at, len);
    let mut done = 0;
    // A disk of which nothing is there is done in steps of what a table maps.
    for _ in 0..10_000 {
        if done >= len {
            break;
        }
        match chain.zero_step(GuestOffset(at + done), len - done, why) {
            Ok(ZeroStep::Done(n) | ZeroStep::Write(n) | ZeroStep::File(n)) => {
                assert!(n > 0 && n <= len - done);
                done += n;
            }
            Ok(ZeroStep::Wait(_)) => panic!("nobody is there to be waited for"),
            Err(_) => break,
        }
    }
}

/// An image of 512-byte clusters: header, refcount table and block, L1, L2, and two clusters of data.
struct Made(Vec<u8>);

impl Made {
    fn new() -> Self {
        let mut made = Self(vec![0; 8 * 512]);
        made.word(0, 0x5146_49fb_0000_0003);
        made.half(20, 9)
            .word(24, 64 << 10)
            .half(36, 2)
            .word(40, 3 * 512);
        made.word(48, 512).half(56, 1).half(96, 4).half(100, 104);
        made.word(512, 2 * 512);
        for cluster in 0..7 {
            made.0[2 * 512 + 2 * cluster + 1] = 1;
        }
        made.word(3 * 512, (1 << 63) | (4 * 512));
        made.word(4 * 512, (1 << 63) | (5 * 512))
            .word(4 * 512 + 8, (1 << 63) | (6 * 512));
        made
    }

    fn word(&mut self, at: usize, value: u64) -> &mut Self {
        self.0[at..at + 8].copy_from_slice(&value.to_be_bytes());
        self
    }

    fn half(&mut self, at: usize, value: u32) -> &mut Self {
        self.0[at..at + 4].copy_from_slice(&value.to_be_bytes());
        self
    }
}

/// Images as they were used against QEMU, and others that lead where they must not.
pub fn seeds() -> Seeds {
    let mut seeds = header_seeds();
    seeds.extend(table_seeds());
    seeds.extend(bitmap_seeds());
    seeds
}

fn made(change: fn(&mut Made) -> &mut Made) -> Vec<u8> {
    let mut made = Made::new();
    change(&mut made);
    made.0
}

fn header_seeds() -> Seeds {
    let name = |made: &mut Made, kind: u32, text: &str| {
        made.half(104, kind).half(108, text.len() as u32);
        made.0[112..112 + text.len()].copy_from_slice(text.as_bytes());
    };
    let mut json = Made::new();
    name(
        &mut json,
        0x4441_5441,
        "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}",
    );
    json.word(72, 4);
    let mut backing = Made::new();
    name(&mut backing, 0xe279_2aca, "raw");
    backing.word(8, 200).half(16, 11);
    backing.0[200..211].copy_from_slice(b"/etc/passwd");
    vec![
        ("sound", made(|m| m)),
        ("dirty", made(|m| m.word(72, 1))),
        ("corrupt", made(|m| m.word(72, 2))),
        ("version_2", made(|m| m.half(4, 2))),
        ("json_data_file", json.0),
        ("backing_outside", backing.0),
        ("l1_size_overflow", made(|m| m.half(36, 0x2000_0001))),
        ("l1_offset_overflow", made(|m| m.word(40, u64::MAX - 511))),
        ("refcount_table_huge", made(|m| m.half(56, u32::MAX))),
        ("refcount_table_end", made(|m| m.word(48, 1 << 55))),
        ("refcount_order", made(|m| m.half(96, 63))),
        (
            "snapshots_many",
            made(|m| m.half(60, u32::MAX).word(64, 5 * 512)),
        ),
        (
            "snapshots_overflow",
            made(|m| m.half(60, 65536).word(64, 5 * 512)),
        ),
        (
            "snapshot_l1_huge",
            made(|m| {
                m.half(60, 1)
                    .word(64, 5 * 512)
                    .word(5 * 512, 512)
                    .half(5 * 512 + 8, u32::MAX)
            }),
        ),
        ("header_length", made(|m| m.half(100, u32::MAX - 7))),
        (
            "extension_length",
            made(|m| m.half(104, 0xe279_2aca).half(108, u32::MAX)),
        ),
        ("size_huge", made(|m| m.word(24, u64::MAX - 511))),
        ("cluster_bits", made(|m| m.half(20, 31))),
        ("feature_unknown", made(|m| m.word(72, 1 << 40))),
        ("encrypted", made(|m| m.half(32, 2))),
        ("empty", Vec::new()),
    ]
}

fn table_seeds() -> Seeds {
    vec![
        ("block_is_table", made(|m| m.word(512, 512))),
        ("block_is_l1", made(|m| m.word(512, 3 * 512))),
        ("block_unaligned", made(|m| m.word(512, 2 * 512 + 8))),
        (
            "refcounts_zero",
            made(|m| {
                m.0[2 * 512..3 * 512].fill(0);
                m
            }),
        ),
        ("l2_is_l1", made(|m| m.word(3 * 512, (1 << 63) | (3 * 512)))),
        ("l2_is_header", made(|m| m.word(3 * 512, 1 << 63))),
        (
            "l2_behind_end",
            made(|m| m.word(3 * 512, (1 << 63) | (1 << 40))),
        ),
        ("data_is_header", made(|m| m.word(4 * 512, 1 << 63))),
        (
            "data_is_l1",
            made(|m| m.word(4 * 512, (1 << 63) | (3 * 512))),
        ),
        (
            "data_is_refcounts",
            made(|m| m.word(4 * 512, (1 << 63) | (2 * 512))),
        ),
        (
            "data_is_l2",
            made(|m| m.word(4 * 512, (1 << 63) | (4 * 512))),
        ),
        (
            "data_behind_end",
            made(|m| m.word(4 * 512, (1 << 63) | (1 << 54))),
        ),
        ("data_twice", made(|m| m.word(4 * 512, 6 * 512))),
        ("compressed_is_header", made(|m| m.word(4 * 512, 1 << 62))),
        (
            "compressed_behind_end",
            made(|m| m.word(4 * 512, (1 << 62) | (1 << 50))),
        ),
        (
            "compressed_garbage",
            made(|m| m.word(4 * 512, (1 << 62) | (1 << 61) | (5 * 512))),
        ),
        (
            "bitmaps_huge",
            made(|m| {
                m.word(88, 1).half(104, 0x2385_2875).half(108, 24);
                m.half(112, 1).word(120, u64::MAX).word(128, 5 * 512)
            }),
        ),
    ]
}

/// Images with a bitmap directory in cluster 7, a bitmap table in cluster 8, and bits in cluster 9.
fn bitmap_seeds() -> Seeds {
    const DIRECTORY: usize = 7 * 512;
    const TABLE: usize = 8 * 512;
    let with = |change: fn(&mut Made) -> &mut Made| {
        let mut made = Made::new();
        made.0.resize(10 * 512, 0);
        for cluster in 7..10 {
            made.0[2 * 512 + 2 * cluster + 1] = 1;
        }
        made.word(88, 1).half(104, 0x2385_2875).half(108, 24);
        made.half(112, 1).word(120, 32).word(128, DIRECTORY as u64);
        // One entry of the table, flags: auto, type 1, granularity 512, a name of 1 byte.
        made.word(DIRECTORY, TABLE as u64).half(DIRECTORY + 8, 1);
        made.half(DIRECTORY + 12, 2)
            .half(DIRECTORY + 16, 0x0109_0001);
        made.half(DIRECTORY + 24, 0x6200_0000);
        made.word(TABLE, 9 * 512).word(9 * 512, 0x0102_0304);
        change(&mut made);
        made.0
    };
    vec![
        ("bitmap", with(|m| m)),
        ("bitmap_all_ones", with(|m| m.word(TABLE, 1))),
        ("bitmap_all_zeroes", with(|m| m.word(TABLE, 0))),
        ("bitmap_in_use", with(|m| m.half(DIRECTORY + 12, 3))),
        ("bitmap_disabled", with(|m| m.half(DIRECTORY + 12, 0))),
        ("bitmap_flag_unknown", with(|m| m.half(DIRECTORY + 12, 10))),
        (
            "bitmap_type_unknown",
            with(|m| m.half(DIRECTORY + 16, 0x0209_0001)),
        ),
        (
            "bitmap_granularity",
            with(|m| m.half(DIRECTORY + 16, 0x01ff_0001)),
        ),
        (
            "bitmap_name_long",
            with(|m| m.half(DIRECTORY + 16, 0x0109_ffff)),
        ),
        (
            "bitmap_extra_data",
            with(|m| m.half(DIRECTORY + 20, u32::MAX)),
        ),
        (
            "bitmap_table_large",
            with(|m| m.half(DIRECTORY + 8, u32::MAX)),
        ),
        ("bitmap_table_is_header", with(|m| m.word(DIRECTORY, 0))),
        ("bitmap_table_is_l1", with(|m| m.word(DIRECTORY, 3 * 512))),
        ("bitmap_table_is_data", with(|m| m.word(DIRECTORY, 5 * 512))),
        (
            "bitmap_table_behind_end",
            with(|m| m.word(DIRECTORY, 1 << 50)),
        ),
        ("bitmap_bits_are_header", with(|m| m.word(TABLE, 1 << 60))),
        (
            "bitmap_bits_are_table",
            with(|m| m.word(TABLE, TABLE as u64)),
        ),
        ("bitmap_bits_are_l2", with(|m| m.word(TABLE, 4 * 512))),
        ("bitmap_bits_are_data", with(|m| m.word(TABLE, 5 * 512))),
        ("bitmap_bits_behind_end", with(|m| m.word(TABLE, 1 << 50))),
        ("bitmap_directory_is_data", with(|m| m.word(128, 5 * 512))),
        (
            "bitmap_directory_behind_end",
            with(|m| m.word(120, 60 << 20)),
        ),
        ("bitmaps_many", with(|m| m.half(112, u32::MAX))),
    ]
}
