//! Disks as text: a path, or `key=value` pairs with QEMU's names.

use std::fmt::{self, Display};
use std::path::Path;
use std::str::FromStr;

use super::disk_keys::{DISK_KEYS, DiskKey};
use super::limits;
use super::spec::{DiskSpec, FileSpec, Problem, SpecError};

impl FromStr for DiskSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        pairs(text)
            .and_then(Self::from_pairs)
            .map_err(|problem| SpecError {
                disk: text.into(),
                problem,
            })
    }
}

impl DiskSpec {
    /// A disk from its options.
    ///
    /// # Errors
    /// An option is unknown or given twice, or has an invalid value.
    pub fn from_pairs<K: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, String)>,
    ) -> Result<Self, Problem> {
        let mut given: Vec<(&'static str, String)> = Vec::new();
        for (text, value) in pairs {
            let key = key(text.as_ref())?;
            if given.iter().any(|(other, _)| *other == key) {
                return Err(Problem::Twice(key));
            }
            given.push((key, value));
        }
        let value_of = |key: &str| {
            let mut given = given.iter();
            given
                .find(|(given, _)| *given == key)
                .map(|(_, value)| value)
        };
        if value_of("file").is_none() {
            return Err(Problem::NoFile);
        }
        // `file` is the first key, and replaces file and name.
        let mut disk = Self::new(String::new(), FileSpec::Null(0));
        for key in DISK_KEYS {
            if let Some(value) = value_of(key.name()) {
                key.set(&mut disk, value)
                    .map_err(|problem| Problem::Value(key.name(), problem))?;
            }
        }
        limits::change(&mut disk.limits, |key| {
            let limit = value_of(key).map(|text| limits::parse(key, text));
            let limit = limit.transpose();
            limit.map_err(|problem| Problem::Value(key, problem))
        })?;
        disk.limits.check()?;
        disk.check_rbd()?;
        Ok(disk)
    }
}

/// As on the command line, with every choice that does not follow from others.
impl DiskSpec {
    /// Its options that differ from the defaults.
    pub fn pairs(&self) -> impl Iterator<Item = (&'static str, String)> {
        let keys = DISK_KEYS.iter();
        let keys = keys.filter_map(|key| Some((key.name(), key.show(self)?)));
        let limits = limits::pairs(&self.limits).into_iter();
        keys.chain(limits.map(|(key, value)| (key, value.to_string())))
    }

    /// The same disk, whose relative paths begin in this directory.
    pub fn in_directory(mut self, directory: &Path) -> Self {
        match &mut self.file {
            FileSpec::Path(path) => *path = directory.join(&*path),
            FileSpec::Rbd(location) => {
                let access = &mut location.access;
                for path in [&mut access.conf, &mut access.keyring]
                    .into_iter()
                    .flatten()
                {
                    *path = directory.join(&*path);
                }
            }
            FileSpec::Null(_) => {}
        }
        self.data_file = self.data_file.map(|path| directory.join(path));
        self.socket = self.socket.map(|path| directory.join(path));
        self
    }
}

impl Display for DiskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, value)) in self.pairs().enumerate() {
            let separator = if i > 0 { "," } else { "" };
            write!(f, "{separator}{key}={}", value.replace(',', ",,"))?;
        }
        Ok(())
    }
}

#[cfg(any(test, fuzzing))]
impl DiskSpec {
    /// Panics if a field has a value that parsing does not allow.
    pub fn assert_sound(&self) {
        use super::disk_keys::{QUEUE_SIZE_MIN, QUEUES_MAX};
        use super::spec::name;

        assert!(name(&self.name).is_ok(), "{self:?}");
        assert!(
            self.queues
                .is_none_or(|queues| (1..=QUEUES_MAX).contains(&queues)),
            "{self:?}"
        );
        assert!(self.queue_size.is_power_of_two(), "{self:?}");
        assert!((QUEUE_SIZE_MIN..=guest::Virtqueue::MAX_SIZE).contains(&self.queue_size));
        assert!(self.serial.len() <= guest::blk::ID_BYTES && self.serial.is_ascii());
        match &self.file {
            FileSpec::Path(path) => assert!(!path.as_os_str().is_empty()),
            FileSpec::Null(size) => assert!(*size > 0 && size.is_multiple_of(512)),
            FileSpec::Rbd(it) => assert!(!it.pool.is_empty() && !it.image.is_empty()),
        }
        for block in [self.logical_block, self.physical_block] {
            assert!([None, Some(512), Some(4096)].contains(&block), "{self:?}");
        }
        if let Some(socket) = &self.socket {
            assert!((1..108).contains(&socket.as_os_str().len()));
        }
    }
}

/// The pairs of a disk of the command line.
///
/// # Errors
/// A part is not `key=value`.
pub fn pairs(text: &str) -> Result<Vec<(String, String)>, Problem> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for (i, part) in split(text).into_iter().enumerate() {
        match (part.split_once('='), pairs.last_mut()) {
            (Some((key, value)), _) if i > 0 || is_word(key) => {
                pairs.push((key.into(), value.into()));
            }
            // As in QEMU, the first part may leave out its key.
            _ if i == 0 => pairs.push(("file".into(), part)),
            // As in iothreads=0,2.
            (None, Some((key, list))) if key == "iothreads" && is_number(&part) => {
                *list += &format!(",{part}");
            }
            _ => return Err(Problem::NoValue(part)),
        }
    }
    Ok(pairs)
}

/// All keys of a disk. In those of limits, `-` and `_` are interchangeable.
fn keys() -> impl Iterator<Item = &'static str> {
    let keys = DISK_KEYS.iter().map(DiskKey::name);
    keys.chain(limits::keys())
}

/// The key that `text` names.
fn key(text: &str) -> Result<&'static str, Problem> {
    let mut disk_keys = DISK_KEYS.iter().map(DiskKey::name);
    let key = disk_keys.find(|key| *key == text);
    key.or_else(|| limits::key(text))
        .ok_or_else(|| Problem::UnknownKey(text.into(), keys().collect()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use block::{CacheMode, DetectZeroes, Discard};
    use proptest::prelude::*;

    fn parse(spec: &str) -> Result<DiskSpec, SpecError> {
        spec.parse()
    }

    #[test]
    fn path_alone_is_a_disk() {
        let disk = parse("/vms/vm1.raw").unwrap();
        assert_eq!(disk.name, "vm1");
        assert_eq!(disk.file, FileSpec::Path("/vms/vm1.raw".into()));
        assert_eq!((disk.cache, disk.queue_size), (CacheMode::None, 256));
        assert!(disk.queues.is_none() && !disk.read_only);
        assert_eq!(parse("/dev/vg0/5 % full").unwrap().name, "disk5---full");
    }

    #[test]
    fn pairs_set_the_other_keys() {
        let disk = parse(
            "file=/a,,b.img,name=x,cache=writeback,queues=3,queue-size=1024,readonly=on,\
             serial=S 1,socket=/run/x.sock,aio=native,format=raw",
        )
        .unwrap();
        assert_eq!(disk.file, FileSpec::Path("/a,b.img".into()));
        assert_eq!(disk.name, "x");
        assert_eq!(disk.cache, CacheMode::Writeback);
        assert_eq!((disk.queues, disk.queue_size), (Some(3), 1024));
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
        let disk = parse("a,iothreads=0,2,iops=100,iops-max=200,throttle-group=bronze").unwrap();
        assert_eq!(disk.iothreads, ["0", "2"]);
        assert_eq!(disk.limits.iops_total.max, 200);
        assert_eq!(disk.throttle_group.as_deref(), Some("bronze"));
        assert_eq!(parse("null:64G").unwrap().file, FileSpec::Null(64 << 30));
        assert_eq!(parse("vm1.raw,queues=2").unwrap().queues, Some(2));
        assert_eq!(
            parse("/x/A=b.raw").unwrap().file,
            FileSpec::Path("/x/A=b.raw".into())
        );
    }

    #[test]
    fn mistakes_name_their_key() {
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
            ("file=a,discard=on", "neither unmap nor ignore"),
            ("file=a,detect-zeroes=yes", "off, on, unmap"),
            ("file=a,logical-block-size=1024", "neither 512 nor 4096"),
            ("file=a,readonly=yes", "neither on nor off"),
            ("file=a,name=9", "not a letter"),
            ("file=a,serial=123456789012345678901", "20 ASCII"),
            ("null:1000", "positive multiple of 512"),
            ("null:", "no size"),
            ("a,iops=1,iops_rd=1", "exclude each other"),
            ("a,iops-max=5", "': iops: a burst (max) needs a limit"),
            ("a,queues=2,3", "'3' is not key=value"),
            ("file=a,aio=epoll", "auto, io_uring, native, threads"),
            ("file=a,format=vmdk", "neither raw nor qcow2"),
        ] {
            let error = parse(spec).unwrap_err().to_string();
            assert!(error.contains(says), "{spec}: {error}");
        }
    }

    /// The seeds of fuzzing, which include its findings.
    #[test]
    fn fuzzing_seeds_are_valid() {
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
                prop_assert_eq!(parse(&disk.to_string()), Ok(disk));
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
