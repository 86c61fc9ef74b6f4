//! Power cuts: every write and every flush is recorded, and a file is put together as a cut at any
//! moment may leave it. It must be sound but for leaks, hold what was flushed, and nothing foreign.

use crate::support;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::support::memory::{DataInMemory, Event, Memory, Replay, What};
use crate::support::{Disk, READ, WRITE};
use image::{AllowedDirectories, LayerFormat, ZeroMode, check};
use testkit::images as variants;
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

/// Moments for each kind of image and seed; at each, three things that may be left.
const CUTS: usize = 100;
/// Small, so that operations meet.
const DISK_BYTES: u64 = 192 << 10;
/// One in so many is shown to qemu-img as well.
const SAMPLE: u64 = 100;
/// Options of images on volumes that the disk just fits on.
const EXACT: &str = "cluster_size=4k";

/// What each sector may hold: a sector is filled with the number of the operation that wrote it.
#[derive(Clone)]
struct Sectors(Vec<BTreeSet<u16>>);

const ZERO: u16 = 0;
/// What the image had there before.
const OLD: u16 = 1;

impl Sectors {
    fn new(size: u64) -> Self {
        Self(vec![BTreeSet::from([OLD]); (size / 512) as usize])
    }

    /// This may be there, beside what may be there already, or only this.
    fn put(&mut self, at: u64, len: u64, to: u16, only: bool) {
        for sector in &mut self.0[(at / 512) as usize..((at + len) / 512) as usize] {
            if only {
                sector.clear();
            }
            sector.insert(to);
        }
    }
}

fn pattern(number: u16, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| number.to_be_bytes()[(i % 2) as usize])
        .collect()
}

/// What happened, by mark.
enum Step {
    /// An operation begins that puts this there.
    Begin {
        at: u64,
        len: u64,
        to: u16,
    },
    /// It has ended. What was there before may still be there after a discard, or a failure.
    End {
        at: u64,
        len: u64,
        to: u16,
        only: bool,
    },
    /// A flush has succeeded.
    Flushed,
    Grow {
        size: u64,
    },
    Grown,
}

/// What storage does besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// A write or flush fails now and then.
    Fails,
    /// The same, in a file of the page cache.
    Forgets,
    /// It is a block device that the disk just fits on.
    ExactDevice,
    /// It is a file on a file system that the disk just fits on.
    ExactSpace,
}

impl Trouble {
    fn arrange(self, memory: &Memory, bytes: u64) {
        match self {
            Self::Forgets => memory.forget(),
            Self::ExactDevice => memory.be_device(bytes),
            // What the image has already counts twice, which makes up for blocks that are used in part.
            Self::ExactSpace => memory.limit_space(full_size() / 4096),
            Self::None | Self::Fails => {}
        }
    }
}

/// The size of a volume that the disk just fits on.
fn full_size() -> u64 {
    qemu::fully_allocated_size(EXACT, DISK_BYTES)
}

struct Story {
    variant: &'static str,
    seed: u64,
    trouble: Trouble,
    /// It has a raw data file.
    is_raw: bool,
    /// The image, and its data file if it has one.
    start: Vec<Vec<u8>>,
    old: Vec<u8>,
    events: Vec<Event>,
    steps: Vec<Step>,
}

/// The image, and its data file if it has one.
fn open(memory: &[Memory], directory: &Path, how: support::How) -> Disk {
    let allowed = AllowedDirectories::of_image(&directory.join("x")).unwrap();
    let path = directory.join("disk.qcow2");
    let storage = Arc::new(memory[0].clone());
    let mut data = DataInMemory(memory.get(1));
    Disk::with_files(storage, &path, LayerFormat::Qcow2, &allowed, how, &mut data).unwrap()
}

fn story(name: &'static str, grows: bool, seed: u64, directory: &Path, trouble: Trouble) -> Story {
    let read = |name| std::fs::read(directory.join(name));
    let mut image = read("disk.qcow2").unwrap();
    if trouble == Trouble::ExactDevice {
        image.resize(full_size() as usize, 0xd5);
    }
    let start = vec![image];
    let start: Vec<_> = start.into_iter().chain(read("data").ok()).collect();
    let files = Memory::several(start.clone());
    let memory = &files[0];
    let how = match trouble {
        Trouble::None | Trouble::ExactDevice | Trouble::ExactSpace => WRITE,
        // So small that changes are flushed for want of room.
        _ => support::How {
            l2_cache_bytes: Some(1),
            ..WRITE
        },
    };
    trouble.arrange(memory, start[0].len() as u64);
    let fails = matches!(trouble, Trouble::Fails | Trouble::Forgets);
    let disk = open(&files, directory, how);
    let old = disk.content().unwrap();
    memory.record();
    let mut random = Random(seed);
    let mut steps = Vec::new();
    let cluster = disk.chain.image().unwrap().cluster_bytes();
    // Without flushes, clusters that were freed must be reclaimed for want of space.
    let (operations, flush_every) = match trouble {
        Trouble::ExactDevice | Trouble::ExactSpace => (300, 30),
        _ => (120, 6),
    };
    for number in 0..operations {
        let mut mark = |step| {
            memory.mark(steps.len() as u64);
            steps.push(step);
        };
        if fails && random.one_in(6) {
            memory.fail_in(1 + random.below(8));
        }
        let ended = |result: Result<(), image::ImageError>| {
            assert!(fails || result.is_ok(), "{name}, seed {seed}: {result:?}");
            result.is_ok()
        };
        if number % 50 == 49 && grows {
            let size = disk.chain.size() + (40 << 10);
            mark(Step::Grow { size });
            if ended(disk.grow(size)) {
                mark(Step::Grown);
            }
        }
        if random.one_in(flush_every) {
            let lost = memory.has_forgotten();
            if ended(disk.flush()) {
                assert!(!lost, "{name}, seed {seed}: lost, and called durable");
                mark(Step::Flushed);
            }
            continue;
        }
        let (at, len) = random.range(disk.chain.size(), cluster);
        let kind = random.below(6);
        let to = if kind < 2 { ZERO } else { 2 + number };
        let discard = kind == 1;
        mark(Step::Begin { at, len, to });
        let done = match kind {
            0 => {
                let unmap = random.one_in(2);
                disk.zero(at, len, ZeroMode::Zeroes { unmap })
            }
            1 => disk.zero(at, len, ZeroMode::Discard),
            _ => disk.write(at, &pattern(to, len)),
        };
        let only = ended(done) && !discard;
        mark(Step::End { at, len, to, only });
    }
    memory.fail_in(0);
    let closed = disk.chain.close();
    if memory.has_forgotten() {
        assert!(closed.unwrap_err().is_permanent());
    } else {
        // What could not be written is written now, unless it had to be given up.
        assert!(closed.is_ok() || disk.chain.damage().is_some());
    }
    Story {
        variant: name,
        seed,
        trouble,
        is_raw: variants::ALL
            .iter()
            .any(|v| v.name == name && v.has_raw_data_file()),
        start,
        old,
        events: memory.take_events(),
        steps,
    }
}

impl Story {
    /// Cuts the power at random moments; returns how often.
    fn cut(&self, moments: usize, directory: &Path) -> usize {
        let mut random = Random(self.seed ^ 0xc0ffee);
        let moments: BTreeSet<usize> = (0..moments)
            .map(|_| random.below(self.events.len() as u64 + 1) as usize)
            .collect();
        let mut replay = Replay::new(self.start.clone());
        // What may be found, and what may be found after the next flush.
        let mut may = Sectors::new(self.old.len() as u64);
        let mut now = may.clone();
        // The disk is at least so long.
        let mut len = self.old.len();
        let mut cuts = 0;
        for (moment, event) in self.events.iter().enumerate() {
            if moments.contains(&moment) {
                for _ in 0..3 {
                    self.look(
                        &replay.crash(&mut random),
                        (len, &may),
                        moment,
                        directory,
                        &mut random,
                    );
                    cuts += 1;
                }
            }
            replay.event(event, &mut random);
            let What::Mark(step) = event.what else {
                continue;
            };
            match &self.steps[step as usize] {
                Step::Flushed => may = now.clone(),
                &Step::Grow { size } => {
                    let sectors = (size / 512) as usize;
                    // As soon as the disk is so long.
                    may.0.resize(sectors, BTreeSet::from([ZERO]));
                    now.0.resize(sectors, BTreeSet::from([ZERO]));
                }
                Step::Grown => len = may.0.len() * 512,
                &Step::Begin { at, len, to } => may.put(at, len, to, false),
                &Step::End { at, len, to, only } => now.put(at, len, to, only),
            }
        }
        cuts
    }

    fn look(
        &self,
        files: &[Vec<u8>],
        (len, may): (usize, &Sectors),
        moment: usize,
        directory: &Path,
        random: &mut Random,
    ) {
        let place = format!("{}, seed {}, event {moment}", self.variant, self.seed);
        let bytes = &files[0];
        let memory = Memory::several(files.to_vec());
        let report = check(&memory[0]).unwrap();
        let fail = |what: String| -> ! {
            let kept = std::env::temp_dir().join("ringdisk-crash.qcow2");
            std::fs::write(&kept, bytes).unwrap();
            panic!("{place}: {what}; the file is {}", kept.display());
        };
        if report.errors > 0 {
            fail(format!("{report:?}"));
        }
        let disk = open(&memory, directory, READ);
        let content = disk.content().unwrap();
        if content.len() < len || content.len() > may.0.len() * 512 {
            fail(format!("the disk has {} bytes", content.len()));
        }
        // A raw data file is the disk at every moment; the file may be longer while the disk grows.
        let raw = files.get(1).filter(|_| self.is_raw);
        if raw.is_some_and(|raw| {
            (0..content.len()).any(|at| raw.get(at).copied().unwrap_or(0) != content[at])
        }) {
            fail("the raw data file is not what guests read".into());
        }
        for (sector, found) in content.chunks(512).enumerate() {
            let fits = |&to: &u16| match to {
                OLD => found == &self.old[sector * 512..][..found.len()],
                ZERO => found.iter().all(|&byte| byte == 0),
                to => found == pattern(to, found.len() as u64),
            };
            if !may.0[sector].iter().any(fits) {
                let found = &found[..4];
                fail(format!(
                    "sector {sector} has {found:?}, not one of {:?}",
                    may.0[sector]
                ));
            }
        }
        self.fill(&memory, directory).unwrap_or_else(|e| fail(e));
        if random.one_in(SAMPLE) {
            let file = directory.join("cut.qcow2");
            std::fs::write(&file, bytes).unwrap();
            let code = qemu::check_code(directory, "cut.qcow2");
            let leaks = if report.leaks > 0 { 3 } else { 0 };
            if code != Some(leaks) {
                fail(format!(
                    "qemu-img check ends with {code:?}, and we say {report:?}"
                ));
            }
        }
    }
}

impl Story {
    /// Whatever a cut has leaked, the disk still fits on its volume.
    fn fill(&self, files: &[Memory], directory: &Path) -> Result<(), String> {
        match self.trouble {
            Trouble::ExactDevice => files[0].be_device(full_size()),
            Trouble::ExactSpace => {
                let used = files[0].bytes().len() as u64 / 4096;
                // Blocks that an image has twice, as in the story.
                files[0].limit_space((full_size() / 4096 + 60).saturating_sub(used));
            }
            Trouble::None | Trouble::Fails | Trouble::Forgets => return Ok(()),
        }
        let disk = open(files, directory, WRITE);
        for number in [3, 4] {
            let bytes = pattern(number, disk.chain.size());
            disk.write(0, &bytes).map_err(|e| e.to_string())?;
            disk.zero(0, disk.chain.size(), ZeroMode::Discard)
                .map_err(|e| e.to_string())?;
        }
        disk.chain.close().map_err(|e| e.to_string())?;
        let report = check(&files[0]).unwrap();
        if report.errors > 0 {
            return Err(format!("when it was filled again: {report:?}"));
        }
        Ok(())
    }
}

#[test]
fn power_cut_keeps_image_consistent_and_flushed_data() {
    let test = "power_cut_keeps_image_consistent_and_flushed_data";
    if !qemu::is_there(test) {
        return;
    }
    let mut cuts = 0;
    let (small, none) = (|v: &&variants::Variant| v.is_small(), Trouble::None);
    for variant in variants::ALL.iter().filter(small) {
        for seed in seeds(100, 2) {
            let directory = tempfile::tempdir().unwrap();
            variant.make_sized(directory.path(), seed, DISK_BYTES);
            let story = story(variant.name, variant.grows(), seed, directory.path(), none);
            cuts += story.cut(CUTS, directory.path());
        }
    }
    println!("{cuts} power cuts");
    let least = if std::env::var_os("RINGDISK_TEST_SEED").is_some() {
        1
    } else {
        10_000
    };
    assert!(cuts >= least, "only {cuts}");
}

/// Writes and flushes fail, those included that the image does by itself for want of room: what was said to
/// be durable is, and once the page cache has lost something, nothing is.
#[test]
fn failed_flush_is_not_forgotten() {
    if !qemu::is_there("failed_flush_is_not_forgotten") {
        return;
    }
    let mut lost = 0;
    for variant in variants::ALL.iter().filter(|v| v.is_small()) {
        for (seed, trouble) in seeds(300, 2)
            .into_iter()
            .zip([Trouble::Fails, Trouble::Forgets])
        {
            let directory = tempfile::tempdir().unwrap();
            variant.make_sized(directory.path(), seed, DISK_BYTES);
            let (name, grows) = (variant.name, variant.grows());
            let story = story(name, grows, seed, directory.path(), trouble);
            let forgotten = |event: &Event| matches!(event.what, What::Forgotten);
            lost += u32::from(story.events.iter().any(forgotten));
            assert!(story.cut(CUTS / 4, directory.path()) > 0);
        }
    }
    assert!(lost > 10, "{lost}");
}

/// The disk is written to again and again, and the volume has no more space than one copy of it needs.
#[test]
fn power_cut_on_a_full_volume() {
    if !qemu::is_there("power_cut_on_a_full_volume") {
        return;
    }
    for trouble in [Trouble::ExactDevice, Trouble::ExactSpace] {
        for seed in seeds(400, 4) {
            let directory = tempfile::tempdir().unwrap();
            let directory = directory.path();
            let create = format!("create -q -f qcow2 -o {EXACT} disk.qcow2 {DISK_BYTES}");
            qemu::img(directory, &create);
            let story = story("full volume", false, seed, directory, trouble);
            assert!(story.cut(CUTS, directory) > 0);
        }
    }
}

/// A file that is nearly as long as its refcount table can say.
#[test]
fn power_cut_during_refcount_table_growth() {
    let test = "power_cut_during_refcount_table_growth";
    if !qemu::is_there(test) {
        return;
    }
    for seed in seeds(200, 2) {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let create = "create -q -f qcow2 -o cluster_size=512,refcount_bits=64 disk.qcow2 2500k";
        qemu::img(directory, create);
        let full = ["write -P 9 0 1800k".to_owned()];
        qemu::io(directory, "disk.qcow2", &["-f", "qcow2"], &full);
        // So that whatever is written takes new clusters.
        qemu::img(directory, "snapshot -c all disk.qcow2");
        let story = story("refcount_table", true, seed, directory, Trouble::None);
        let moved = story.events.iter().filter(|event| {
            let What::Write { at: 0, bytes } = &event.what else {
                return false;
            };
            bytes[48..56] != story.start[0][48..56]
        });
        assert!(moved.count() > 0, "the refcount table has not moved");
        assert!(story.cut(CUTS, directory) > 0);
    }
}
