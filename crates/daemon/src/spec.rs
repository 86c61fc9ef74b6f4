//! A disk as the operator writes it: a path, or `key=value` pairs in QEMU's words.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use block::{Aio, CacheMode, DetectZeroes, Discard, parse_size};
use guest::{Virtqueue, blk};
use image::Format;
use thiserror::Error;

use crate::socket;

/// Most queues of a disk: what a PCI device has interrupt vectors for in QEMU, less one for
/// configuration changes, and far more than a guest has use for.
const QUEUES_MAX: u16 = 256;

/// Queues by default: one per CPU, up to this.
const QUEUES_DEFAULT_MAX: usize = 16;

const QUEUE_SIZE_DEFAULT: u16 = 256;
const QUEUE_SIZE_MIN: u16 = 16;

const KEYS: &str = "name, file, format, socket, cache, aio, queues, queue-size, readonly, serial, \
    discard, detect-zeroes, logical-block-size, physical-block-size, fixed-buffers, iothreads";

/// A disk to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    pub name: String,
    pub file: FileSpec,
    /// As given; otherwise it follows from the file.
    pub format: Option<Format>,
    /// As given; otherwise it follows from the name.
    pub socket: Option<PathBuf>,
    pub cache: CacheMode,
    pub aio: Aio,
    pub queues: u16,
    pub queue_size: u16,
    pub read_only: bool,
    pub serial: String,
    pub discard: Discard,
    pub detect_zeroes: DetectZeroes,
    /// In bytes, as given; otherwise it is the backing's.
    pub logical_block: Option<u32>,
    /// In bytes, as given; otherwise it is the backing's.
    pub physical_block: Option<u32>,
    pub fixed_buffers: bool,
    /// I/O threads by id or number, to which the queues go in turn; none for the next ones of the pool.
    pub iothreads: Vec<String>,
}

impl DiskSpec {
    /// Where its socket is.
    pub fn socket_path(&self) -> PathBuf {
        let default = || socket::default_path(&self.name);
        self.socket.clone().unwrap_or_else(default)
    }
}

/// What holds the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileSpec {
    Path(PathBuf),
    /// Nothing: requests complete at once. Bytes.
    Null(u64),
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpecError {
    #[error(
        "disk '{spec}': '{part}' is not key=value; a comma inside a value is doubled, as in a,,b.raw"
    )]
    NoValue { spec: String, part: String },
    #[error(
        "disk '{spec}': there is no option '{key}'; there are {KEYS} \
        (a path with '=' in it is written file=PATH)"
    )]
    UnknownKey { spec: String, key: String },
    #[error("disk '{spec}': {key} is given twice")]
    Twice { spec: String, key: &'static str },
    #[error("disk '{spec}': {key}: {problem}")]
    Value {
        spec: String,
        key: &'static str,
        problem: String,
    },
    #[error("disk '{spec}': no file; write its path, as in 'vm1.raw' or 'file=/dev/vg0/vm1'")]
    NoFile { spec: String },
}

impl FromStr for DiskSpec {
    type Err = SpecError;

    fn from_str(spec: &str) -> Result<Self, SpecError> {
        let mut given = Given {
            spec,
            pairs: Vec::new(),
        };
        for (i, part) in split(spec).into_iter().enumerate() {
            // As in iothreads=0,2: no key is a number.
            match given.pairs.last_mut() {
                Some(("iothreads", list)) if is_number(&part) => *list += &format!(",{part}"),
                _ => given.add(i == 0, part)?,
            }
        }
        let file = given.take("file", |text| match text.strip_prefix("null:") {
            Some(size) => null(size),
            None if text.is_empty() => Err("is empty".into()),
            None => Ok(FileSpec::Path(text.into())),
        })?;
        let file = file.ok_or_else(|| SpecError::NoFile { spec: spec.into() })?;
        let name = match given.take("name", name)? {
            Some(name) => name,
            None => default_name(&file),
        };
        Ok(Self {
            name,
            file,
            format: given.take("format", Format::from_str)?,
            socket: given.take("socket", socket)?,
            cache: given
                .take("cache", CacheMode::from_str)?
                .unwrap_or(CacheMode::None),
            aio: given.take("aio", Aio::from_str)?.unwrap_or(Aio::Auto),
            queues: given.take("queues", queues)?.unwrap_or_else(default_queues),
            queue_size: given
                .take("queue-size", queue_size)?
                .unwrap_or(QUEUE_SIZE_DEFAULT),
            read_only: given.take("readonly", on_off)?.unwrap_or(false),
            serial: given.take("serial", serial)?.unwrap_or_default(),
            discard: given
                .take("discard", Discard::from_str)?
                .unwrap_or(Discard::Unmap),
            detect_zeroes: given
                .take("detect-zeroes", DetectZeroes::from_str)?
                .unwrap_or(DetectZeroes::Off),
            logical_block: given.take("logical-block-size", block_size)?,
            physical_block: given.take("physical-block-size", block_size)?,
            fixed_buffers: given.take("fixed-buffers", on_off)?.unwrap_or(false),
            iothreads: given.take("iothreads", iothreads)?.unwrap_or_default(),
        })
    }
}

#[cfg(any(test, fuzzing))]
impl DiskSpec {
    /// Panics unless this is a disk that the rest of the program can take: for tests and fuzzing.
    pub fn assert_sound(&self) {
        assert!(name(&self.name).is_ok(), "{self:?}");
        assert!((1..=QUEUES_MAX).contains(&self.queues), "{self:?}");
        assert!(self.queue_size.is_power_of_two(), "{self:?}");
        assert!((QUEUE_SIZE_MIN..=Virtqueue::MAX_SIZE).contains(&self.queue_size));
        assert!(self.serial.len() <= blk::ID_BYTES && self.serial.is_ascii());
        match &self.file {
            FileSpec::Path(path) => assert!(!path.as_os_str().is_empty()),
            FileSpec::Null(size) => assert!(*size > 0 && size.is_multiple_of(512)),
        }
        for block in [self.logical_block, self.physical_block] {
            assert!([None, Some(512), Some(4096)].contains(&block), "{self:?}");
        }
        if let Some(socket) = &self.socket {
            assert!((1..108).contains(&socket.as_os_str().len()));
        }
    }
}

/// The pairs of a disk, each taken once.
struct Given<'a> {
    spec: &'a str,
    pairs: Vec<(&'static str, String)>,
}

impl Given<'_> {
    fn add(&mut self, first: bool, part: String) -> Result<(), SpecError> {
        let spec = || self.spec.to_owned();
        let (key, value) = match part.split_once('=') {
            Some((key, value)) if !first || is_word(key) => (key, value.to_owned()),
            // As in QEMU, the first part may leave out its key.
            _ if first => ("file", part.clone()),
            _ => return Err(SpecError::NoValue { spec: spec(), part }),
        };
        let Some(key) = KEYS.split(", ").find(|&k| k == key) else {
            return Err(SpecError::UnknownKey {
                spec: spec(),
                key: key.into(),
            });
        };
        if self.pairs.iter().any(|(k, _)| *k == key) {
            return Err(SpecError::Twice { spec: spec(), key });
        }
        self.pairs.push((key, value));
        Ok(())
    }

    fn take<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, SpecError> {
        let Some(place) = self.pairs.iter().position(|(k, _)| *k == key) else {
            return Ok(None);
        };
        let (_, value) = self.pairs.swap_remove(place);
        parse(&value).map(Some).map_err(|problem| SpecError::Value {
            spec: self.spec.into(),
            key,
            problem: problem.to_string(),
        })
    }
}

/// Splits at single commas; a doubled one is a comma in a value.
fn split(spec: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = spec.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            ',' if chars.next_if_eq(&',').is_none() => parts.push(String::new()),
            c => parts.last_mut().expect("there is one").push(c),
        }
    }
    parts
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c == '-' || c == '_')
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_digit())
}

fn null(size: &str) -> Result<FileSpec, String> {
    match parse_size(size)? {
        n if n == 0 || !n.is_multiple_of(512) => Err(format!("{n} bytes are no whole sectors")),
        n => Ok(FileSpec::Null(n)),
    }
}

/// QEMU's rule for ids, so that a name can be used as one.
fn name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    match text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(good)
        && text.len() <= 64
    {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{text}' is not a letter followed by letters, digits, '-', '.' or '_', 64 at most"
        )),
    }
}

/// The file's name without its suffix, with what a name cannot have replaced.
fn default_name(file: &FileSpec) -> String {
    let FileSpec::Path(path) = file else {
        return "null".into();
    };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut name: String = stem
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-._".contains(c) {
                c
            } else {
                '-'
            }
        })
        .take(60)
        .collect();
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        name.insert_str(0, "disk");
    }
    name
}

fn socket(text: &str) -> Result<PathBuf, String> {
    // `sockaddr_un` has room for 108 bytes, the last of which is a zero.
    match text.len() {
        0 => Err("is empty".into()),
        1..=107 => Ok(Path::new(text).into()),
        n => Err(format!(
            "has {n} bytes, and the path of a socket has at most 107"
        )),
    }
}

fn default_queues() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(QUEUES_DEFAULT_MAX) as u16)
}

fn queues(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(n @ 1..=QUEUES_MAX) => Ok(n),
        _ => Err(format!("'{text}' is not a number from 1 to {QUEUES_MAX}")),
    }
}

fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(n) if n.is_power_of_two() && (QUEUE_SIZE_MIN..=Virtqueue::MAX_SIZE).contains(&n) => {
            Ok(n)
        }
        _ => Err(format!(
            "'{text}' is not a power of two from {QUEUE_SIZE_MIN} to {}",
            Virtqueue::MAX_SIZE
        )),
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4k" | "4K" => Ok(4096),
        _ => Err(format!("'{text}' is neither 512 nor 4096")),
    }
}

fn iothreads(text: &str) -> Result<Vec<String>, String> {
    let each = text.split(',').map(|id| match is_number(id) {
        true => Ok(id.to_owned()),
        false => name(id),
    });
    let ids: Vec<_> = each.collect::<Result<_, _>>()?;
    match ids.len() <= usize::from(QUEUES_MAX) {
        true => Ok(ids),
        false => Err(format!("more than {QUEUES_MAX} threads")),
    }
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("'{text}' is neither on nor off")),
    }
}

fn serial(text: &str) -> Result<String, String> {
    match text.len() <= blk::ID_BYTES && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{text}' is not up to {} ASCII characters",
            blk::ID_BYTES
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(spec: &str) -> Result<DiskSpec, SpecError> {
        spec.parse()
    }

    #[test]
    fn a_path_alone_is_a_disk() {
        let disk = parse("/vms/vm1.raw").unwrap();
        assert_eq!(disk.name, "vm1");
        assert_eq!(disk.file, FileSpec::Path("/vms/vm1.raw".into()));
        assert_eq!((disk.cache, disk.queue_size), (CacheMode::None, 256));
        assert!(disk.queues >= 1 && !disk.read_only);
        assert_eq!(parse("/dev/vg0/5 % full").unwrap().name, "disk5---full");
    }

    #[test]
    fn pairs_say_the_rest() {
        let disk = parse(
            "file=/a,,b.img,name=x,cache=writeback,queues=3,queue-size=1024,readonly=on,\
             serial=S 1,socket=/run/x.sock,aio=native,format=raw",
        )
        .unwrap();
        assert_eq!(disk.file, FileSpec::Path("/a,b.img".into()));
        assert_eq!(disk.name, "x");
        assert_eq!(disk.cache, CacheMode::Writeback);
        assert_eq!((disk.queues, disk.queue_size), (3, 1024));
        assert_eq!((disk.read_only, disk.serial.as_str()), (true, "S 1"));
        assert_eq!(disk.socket, Some("/run/x.sock".into()));
        let disk = parse(
            "a.raw,cache=unsafe,discard=ignore,detect-zeroes=unmap,logical-block-size=4096,\
             physical-block-size=4k",
        )
        .unwrap();
        assert_eq!(disk.cache, CacheMode::Unsafe);
        assert_eq!(disk.discard, Discard::Ignore);
        assert_eq!(disk.detect_zeroes, DetectZeroes::Unmap);
        let blocks = (disk.logical_block, disk.physical_block);
        assert_eq!(blocks, (Some(4096), Some(4096)));
        assert_eq!(parse("null:64G").unwrap().file, FileSpec::Null(64 << 30));
        assert_eq!(parse("vm1.raw,queues=2").unwrap().queues, 2);
        assert_eq!(
            parse("/x/A=b.raw").unwrap().file,
            FileSpec::Path("/x/A=b.raw".into())
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (spec, says) in [
            ("", "is empty"),
            ("name=x", "no file"),
            ("file=a,cach=none", "no option 'cach'"),
            ("file=a,queues", "'queues' is not key=value"),
            ("file=a,queues=0", "1 to 256"),
            ("file=a,queue-size=100", "power of two"),
            ("file=a,queue-size=2048", "power of two"),
            ("file=a,file=b", "given twice"),
            ("file=a,cache=fast", "none, writeback"),
            ("file=a,discard=on", "unmap, ignore"),
            ("file=a,detect-zeroes=yes", "off, on, unmap"),
            ("file=a,logical-block-size=1024", "neither 512 nor 4096"),
            ("file=a,readonly=yes", "neither on nor off"),
            ("file=a,name=9", "not a letter"),
            ("file=a,serial=123456789012345678901", "20 ASCII"),
            ("null:1000", "no whole sectors"),
            ("null:", "no size"),
            ("file=a,aio=epoll", "auto, io_uring, native, threads"),
            ("file=a,format=vmdk", "not a format"),
        ] {
            let error = parse(spec).unwrap_err().to_string();
            assert!(error.contains(says), "{spec}: {error}");
        }
    }

    /// What fuzzing starts from, and what it has found.
    #[test]
    fn fuzzing_seeds_are_sound() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/disk_spec");
        let mut sound = 0;
        for file in std::fs::read_dir(seeds).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            if let Ok(disk) = parse(&String::from_utf8_lossy(&bytes)) {
                disk.assert_sound();
                sound += 1;
            }
        }
        assert!(sound >= 3);
    }

    proptest! {
        #[test]
        fn no_text_panics(spec in "([a-z-]{1,10}=)?.{0,80}(,[a-z-]{1,10}=.{0,20}){0,3}") {
            if let Ok(disk) = parse(&spec) {
                disk.assert_sound();
            }
        }

        #[test]
        fn any_path_can_be_written(path in "[^\0]{1,60}") {
            let spec = format!("file={},format=raw", path.replace(',', ",,"));
            prop_assume!(!path.starts_with("null:"));
            prop_assert_eq!(parse(&spec).unwrap().file, FileSpec::Path(path.into()));
        }
    }
}
