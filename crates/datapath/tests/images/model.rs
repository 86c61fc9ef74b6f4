//! Long random sequences of everything that a guest and an operator do to a disk, from several queues on two threads at
//! once, against a plain array; the storage below cuts short, delays, reorders and fails. What fails is made smaller
//! until it is easy to read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{CacheMode, DetectZeroes, Discard, DiskFacts, GuestOffset};
use datapath::{Disk, IoThread, Options, Polling};
use image::Chain;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty};
use testkit::images::{ALL, Variant};
use testkit::qemu_img as qemu;

use super::backup::{Backup, SECTOR, digest};
use super::files::{Files, Memory, disk};
use crate::support::{FACTS, Served};

const QUEUES: u16 = 3;
const SLOTS: u16 = 8;
const THREADS: usize = 2;
/// Most sectors of a request.
const SECTORS_MAX: u32 = 256;
const OK: u8 = 0;
const UNSUPPORTED: u8 = 2;
/// Most bytes that a disk gets longer in one case, so that its files stay small.
const GROWTH_MAX: u64 = 1 << 20;

/// Bytes behind the end of an image that has room.
const ROOM: u64 = 2 << 20;

/// Stories of each kind of image.
const CASES: u32 = 4;

/// What is done next. Ranges are made to fit the disk.
#[derive(Clone, Debug)]
enum Step {
    Guest {
        queue: u16,
        what: What,
        range: Place,
    },
    Flush {
        queue: u16,
    },
    Grow {
        sectors: u32,
    },
    Reopen,
    /// A backup begins, or is read.
    Backup {
        range: Place,
        has_file: bool,
    },
    Trim {
        range: Place,
    },
    EndBackup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Read,
    Write,
    /// A write of nothing but zeroes.
    Nothing,
    Zeroes {
        unmap: bool,
    },
    Discard,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    at: u32,
    sectors: u32,
    /// The range begins at a multiple of so many sectors.
    align: u32,
}

/// One disk, and what happens to it.
#[derive(Clone, Debug)]
struct Story {
    seed: u64,
    /// Of 1000 operations below the data path, so many fail.
    fail: u32,
    tight: bool,
    options: Options,
    alignment: u32,
    /// Where in their pages the guest's buffers begin, in bytes.
    shift: u32,
    /// There are clusters that need no longer file.
    roomy: bool,
    steps: Vec<Step>,
}

fn steps() -> impl Strategy<Value = Step> {
    let what = prop_oneof![
        4 => Just(What::Read),
        6 => Just(What::Write),
        1 => Just(What::Nothing),
        1 => any::<bool>().prop_map(|unmap| What::Zeroes { unmap }),
        1 => Just(What::Discard),
    ];
    let sectors = prop_oneof![4 => 1..17_u32, 1 => 1..SECTORS_MAX + 1];
    let align = prop_oneof![Just(1), Just(8), Just(128)];
    let place = (any::<u32>(), sectors, align);
    let place = place.prop_map(|(at, sectors, align)| Place { at, sectors, align });
    let backup = (place.clone(), any::<bool>());
    let trim = place.clone();
    let guest = (0..QUEUES, what, place);
    let guest = guest.prop_map(|(queue, what, range)| Step::Guest { queue, what, range });
    prop_oneof![
        60 => guest,
        4 => (0..QUEUES).prop_map(|queue| Step::Flush { queue }),
        1 => (1..400_u32).prop_map(|sectors| Step::Grow { sectors }),
        1 => Just(Step::Reopen),
        4 => backup.prop_map(|(range, has_file)| Step::Backup { range, has_file }),
        1 => trim.prop_map(|range| Step::Trim { range }),
        1 => Just(Step::EndBackup),
    ]
}

fn stories() -> impl Strategy<Value = Story> {
    let cache = prop_oneof![
        3 => Just(CacheMode::None),
        1 => Just(CacheMode::Directsync),
        1 => Just(CacheMode::Unsafe),
        1 => Just(CacheMode::Writeback),
    ];
    let discard = prop_oneof![Just(Discard::Unmap), Just(Discard::Ignore)];
    let detect = prop_oneof![
        Just(DetectZeroes::Off),
        Just(DetectZeroes::On),
        Just(DetectZeroes::Unmap)
    ];
    let options = (cache, discard, detect).prop_map(|(cache, discard, detect_zeroes)| Options {
        cache,
        discard,
        detect_zeroes,
        ..Options::default()
    });
    (
        any::<u64>(),
        prop_oneof![Just(0), Just(0), Just(10)],
        any::<bool>(),
        options,
        prop_oneof![Just((1, 0)), Just((512, 0)), Just((512, 8))],
        any::<bool>(),
        prop::collection::vec(steps(), 1..250),
    )
        .prop_map(
            |(seed, fail, tight, options, (alignment, shift), roomy, steps)| Story {
                seed,
                fail,
                tight,
                options,
                alignment,
                shift,
                roomy,
                steps,
            },
        )
}

/// What each sector may hold.
struct Model(Vec<BTreeSet<u64>>);

impl Model {
    fn new(content: &[u8]) -> Self {
        let mut content = content.to_vec();
        content.resize(content.len().next_multiple_of(SECTOR), 0);
        let sectors = content.chunks(SECTOR);
        Self(sectors.map(|s| BTreeSet::from([digest(s)])).collect())
    }

    /// These bytes are what is there; it must be what may be there.
    fn saw(&mut self, first: usize, bytes: &[u8]) {
        for (i, sector) in bytes.chunks(SECTOR).enumerate() {
            let (may, is) = (&mut self.0[first + i], digest(sector));
            assert!(
                may.contains(&is),
                "sector {} holds what nobody wrote there: {:x?}...",
                first + i,
                &sector[..16]
            );
            *may = BTreeSet::from([is]);
        }
    }
}

/// A request under way.
struct Request {
    what: What,
    sectors: Range<usize>,
    /// By sector.
    becomes: Vec<u64>,
}

/// A disk in service.
struct Service {
    chain: Arc<Chain>,
    disk: Arc<Disk>,
    device: Device,
    under_way: Vec<Vec<Option<Request>>>,
    threads: Arc<Vec<IoThread>>,
    _served: Served,
}

/// Granularity and dirty bits by name.
type Bitmaps = BTreeMap<String, (u64, BTreeSet<u64>)>;

struct Run<'a> {
    story: &'a Story,
    files: Files,
    path: &'a Path,
    model: Model,
    /// The dirty bits of each bitmap that is stored in the image.
    bitmaps: Option<Bitmaps>,
    service: Option<Service>,
    backup: Option<Backup>,
    /// Files that engines of earlier services worked on.
    engines: Vec<Arc<Memory>>,
    marks: u64,
    grown: u64,
}

impl<'a> Run<'a> {
    fn service(&mut self) -> &mut Service {
        self.service.as_mut().expect("a disk in service")
    }

    fn open(&mut self) {
        let Story {
            seed,
            fail,
            alignment,
            shift,
            ..
        } = *self.story;
        let cache = self.story.tight.then_some(1);
        let (chain, files) = self.files.chain(self.path, cache);
        let chain = Arc::new(chain);
        self.look_at_bitmaps(&chain);
        let threads = (0..THREADS as u64).map(|number| {
            let disks: Vec<_> = files.iter().map(|f| f.disk.clone()).collect();
            let faults = Faults {
                short: 100,
                again: 20,
                fail,
                late: 12,
                room: 16,
                address_alignment: alignment,
                length_alignment: SECTOR as u32,
            };
            let make = move || Faulty::over(disks, faults, seed ^ number);
            IoThread::spawn(
                format!("io-{number}"),
                Polling::up_to(Duration::from_micros(50)),
                make,
            )
            .unwrap()
        });
        let facts = DiskFacts {
            address_alignment: alignment,
            length_alignment: SECTOR as u32,
            ..FACTS
        };
        let disk = disk(chain.clone(), files.len(), facts, self.story.options);
        let threads: Arc<Vec<_>> = Arc::new(threads.collect());
        let served = Served::new(disk.clone(), threads.clone(), QUEUES, 64);
        let config = DeviceConfig {
            queues: QUEUES,
            queue_size: 64,
            slots: SLOTS,
            buffer_len: SECTORS_MAX * SECTOR as u32,
            buffer_offset: shift,
            ..DeviceConfig::default()
        };
        let device = Device::connect(served.socket(), &config).unwrap();
        let none = || (0..SLOTS).map(|_| None).collect();
        self.files.trouble.set(fail, seed);
        self.engines = files;
        self.service = Some(Service {
            chain,
            disk,
            device,
            under_way: (0..QUEUES).map(|_| none()).collect(),
            threads,
            _served: served,
        });
    }

    /// Every bitmap is as it was stored before, with the bits of all changes since.
    fn look_at_bitmaps(&mut self, chain: &Chain) {
        let mut found = Bitmaps::new();
        for bitmap in chain.image().map_or_else(Vec::new, |i| i.bitmaps().all()) {
            let (granularity, mut at, mut bits) = (bitmap.granularity(), 0, BTreeSet::new());
            while let Some((is_dirty, len)) = bitmap.extent(at) {
                if is_dirty {
                    bits.extend(at / granularity..=(at + len - 1) / granularity);
                }
                at += len;
            }
            found.insert(bitmap.name().into(), (granularity, bits));
        }
        match &self.bitmaps {
            // One whose size could not be written may be lost.
            Some(known) if self.failed() => {
                for (name, bits) in &found {
                    assert_eq!(bits, &known[name], "bitmap {name}");
                }
            }
            Some(known) => assert_eq!(&found, known),
            None => {}
        }
        self.bitmaps = Some(found);
    }

    fn mark(&mut self, sectors: &Range<usize>) {
        let (start, end) = (sectors.start * SECTOR, sectors.end * SECTOR);
        let bitmaps = self.bitmaps.iter_mut().flatten();
        for (_, (granularity, bits)) in bitmaps.filter(|(name, _)| *name != "disabled") {
            bits.extend(start as u64 / *granularity..=(end as u64 - 1) / *granularity);
        }
    }

    /// Lets all end that is under way, and closes the image. It is sound by then. Returns whether all is
    /// there: not if its header could not be written, which ends all writing.
    #[must_use]
    fn close(&mut self) -> bool {
        self.wait_for(|_, _| true);
        self.end_backup();
        self.files.trouble.set(0, 0);
        let service = self.service.take().expect("a disk in service");
        let chain = service.chain.clone();
        drop(service);
        let damage = chain.damage().map(ToString::to_string);
        match &damage {
            Some(damage) => assert!(self.failed() && damage.contains("header"), "{damage}"),
            None => chain.close().unwrap(),
        }
        let mistakes = self
            .engines
            .iter()
            .map(|f| f.disk.lock().unwrap().mistakes.clone());
        assert_eq!(mistakes.flatten().collect::<Vec<_>>(), [""; 0]);
        damage.is_none()
    }

    /// Whether anything was made to fail.
    fn failed(&self) -> bool {
        let mut engines = self.engines.iter();
        self.files.trouble.struck.load(Ordering::Relaxed) > 0
            || engines.any(|f| f.disk.lock().unwrap().struck[2] > 0)
    }

    /// Until no request is under way of which this is true.
    fn wait_for(&mut self, which: impl Fn(u16, &Request) -> bool) {
        loop {
            let under_way = (0..).zip(&self.service().under_way);
            let mut all =
                under_way.flat_map(|(q, slots)| slots.iter().flatten().map(move |r| (q, r)));
            let Some(queue) = all.find(|(q, r)| which(*q, r)).map(|(q, _)| q) else {
                return;
            };
            let ring = &mut self.service().device.queues[usize::from(queue)].ring;
            assert!(ring.wait_timeout(HANG), "queue {queue} hangs");
            self.take_done(queue);
        }
    }

    fn take_done(&mut self, number: u16) {
        let mut done = Vec::new();
        let queue = &mut self.service().device.queues[usize::from(number)];
        queue.poll(|slot, status| done.push((slot, status)));
        let failed = self.failed();
        let refused = self.story.options.discard == Discard::Ignore;
        let Service {
            device, under_way, ..
        } = self.service.as_mut().expect("a disk in service");
        let queue = &mut device.queues[usize::from(number)];
        for (slot, status) in done {
            let request = under_way[usize::from(number)][usize::from(slot)].take();
            let Request {
                what,
                sectors,
                becomes,
            } = request.expect("a request under way");
            let range = sectors.clone();
            if what == What::Discard && refused {
                assert_eq!(status, UNSUPPORTED);
                continue;
            }
            assert!(
                status == OK || failed,
                "{what:?} of sectors {range:?}: status {status}, and nothing has failed"
            );
            if status == OK && what == What::Read {
                let bytes = queue.read_buffer(slot, sectors.len() * SECTOR);
                self.model.saw(sectors.start, &bytes);
                continue;
            }
            for (may, becomes) in self.model.0[range].iter_mut().zip(becomes) {
                // What failed is done in part; what is given up is as it was, or zeroes.
                if status == OK && what != What::Discard {
                    may.clear();
                }
                may.insert(becomes);
            }
        }
    }

    /// A free slot of a queue.
    fn slot(&mut self, queue: u16) -> u16 {
        loop {
            let slots = &self.service().under_way[usize::from(queue)];
            if let Some(slot) = slots.iter().position(Option::is_none) {
                return slot as u16;
            }
            let ring = &mut self.service().device.queues[usize::from(queue)].ring;
            assert!(ring.wait_timeout(HANG), "queue {queue} hangs");
            self.take_done(queue);
        }
    }

    fn submit(&mut self, number: u16, what: What, place: Place) {
        let sectors = self.sectors(place);
        // No two that are under way touch the same sector, unless both read; the same cluster they do.
        let theirs = sectors.clone();
        self.wait_for(|_, other| {
            (what != What::Read || other.what != What::Read)
                && other.sectors.start < theirs.end
                && theirs.start < other.sectors.end
        });
        let is_refused = what == What::Discard && self.story.options.discard == Discard::Ignore;
        if what != What::Read && !is_refused {
            self.mark(&sectors);
        }
        let slot = self.slot(number);
        let mut bytes = vec![0; sectors.len() * SECTOR];
        if what == What::Write {
            for sector in bytes.chunks_mut(SECTOR) {
                self.marks += 1;
                let mark = self.marks.to_le_bytes();
                sector
                    .chunks_mut(8)
                    .for_each(|word| word.copy_from_slice(&mark));
            }
        }
        let becomes = match what {
            What::Read => Vec::new(),
            _ => bytes.chunks(SECTOR).map(digest).collect(),
        };
        let Service {
            device, under_way, ..
        } = self.service();
        let queue = &mut device.queues[usize::from(number)];
        let op = match what {
            What::Read => Op::Read,
            What::Write | What::Nothing => Op::Write,
            What::Zeroes { unmap } => Op::WriteZeroes { unmap },
            What::Discard => Op::Discard,
        };
        if what == What::Read {
            bytes.fill(0xa5);
        }
        queue.write_buffer(slot, &bytes);
        queue.prepare(slot, op, sectors.start as u64, bytes.len() as u32);
        under_way[usize::from(number)][usize::from(slot)] = Some(Request {
            what,
            sectors,
            becomes,
        });
        queue.submit(&[slot]);
    }

    /// Sectors of the disk.
    fn sectors(&self, place: Place) -> Range<usize> {
        let end = self.model.0.len();
        let start = place.at as usize % end;
        let start = start - start % place.align as usize;
        start..(start + place.sectors as usize).min(end)
    }

    /// Begins a backup, or reads from the one that is open.
    fn back_up(&mut self, range: Place, has_file: bool) {
        let (sectors, may_fail) = (self.sectors(range), self.failed() || self.story.fail > 0);
        if let Some(backup) = &mut self.backup {
            if !backup.read(sectors, may_fail) {
                self.backup = None;
            }
            return;
        }
        let mut was = self.model.0.clone();
        let service = self.service();
        // What is under way may be fetched before or after the moment.
        for request in service.under_way.iter().flatten().flatten() {
            let may = was[request.sectors.clone()].iter_mut();
            for (may, becomes) in may.zip(&request.becomes) {
                may.insert(*becomes);
            }
        }
        let backup = Backup::begin(&service.disk, &service.threads, was, has_file);
        self.backup = Some(backup);
    }

    fn end_backup(&mut self) {
        let may_fail = self.failed() || self.story.fail > 0;
        if let Some(backup) = self.backup.take() {
            backup.end(may_fail);
        }
    }

    fn flush(&mut self, number: u16) {
        let slot = self.slot(number);
        let Service {
            device, under_way, ..
        } = self.service();
        let queue = &mut device.queues[usize::from(number)];
        queue.prepare(slot, Op::Flush, 0, 0);
        under_way[usize::from(number)][usize::from(slot)] = Some(Request {
            what: What::Nothing,
            sectors: 0..0,
            becomes: Vec::new(),
        });
        queue.submit(&[slot]);
    }

    /// Makes the disk longer, while it is used.
    fn grow(&mut self, sectors: u32) {
        self.grown += u64::from(sectors) * SECTOR as u64;
        if self.grown > GROWTH_MAX {
            return;
        }
        let size = (self.model.0.len() + sectors as usize) * SECTOR;
        // What fails in here is a matter of the image.
        self.files.trouble.set(0, 0);
        let Service { chain, disk, .. } = self.service();
        match chain.grow(size as u64) {
            Ok(()) => {
                disk.grow(size as u64);
                self.model.0.resize(size / SECTOR, BTreeSet::from([0]));
            }
            Err(e) => assert!(chain.damage().is_some(), "{e}"),
        }
        self.files.trouble.set(self.story.fail, self.marks);
    }

    fn whole(&mut self) {
        let service = self.service();
        let pin = service.chain.pins().pin(1);
        let mut content = vec![0; service.disk.size() as usize];
        let read = service.chain.read(&pin, GuestOffset(0), &mut content);
        service.chain.pins().unpin(pin);
        read.unwrap();
        self.model.saw(0, &content);
    }
}

fn tell(variant: &Variant, template: &Path, start: &[u8], story: &Story) {
    let path = template.join("disk.qcow2");
    let mut run = Run {
        story,
        files: Files::with_room(if story.roomy { ROOM } else { 0 }),
        path: &path,
        model: Model::new(start),
        bitmaps: None,
        service: None,
        backup: None,
        engines: Vec::new(),
        marks: 0,
        grown: 0,
    };
    run.open();
    for step in &story.steps {
        match *step {
            Step::Guest { queue, what, range } => run.submit(queue, what, range),
            Step::Flush { queue } => run.flush(queue),
            Step::Grow { sectors } if variant.grows() => run.grow(sectors),
            Step::Grow { .. } => {}
            Step::Backup { range, has_file } => run.back_up(range, has_file),
            Step::Trim { range } => {
                let sectors = run.sectors(range);
                if let Some(backup) = &mut run.backup {
                    backup.trim(sectors);
                }
            }
            Step::EndBackup => run.end_backup(),
            Step::Reopen => {
                if !run.close() {
                    return;
                }
                run.open();
            }
        }
    }
    if !run.close() {
        return;
    }
    run.open();
    run.files.trouble.set(0, 0);
    run.whole();
    let failed = run.failed();
    assert!(run.close());
    let directory = tempfile::tempdir().unwrap();
    run.files.save(directory.path());
    qemu::check(directory.path(), "disk.qcow2", failed);
    let content = qemu::content(directory.path(), "disk.qcow2", "qcow2");
    run.model.saw(0, &content);
}

fn runner(cases: u32) -> TestRunner {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// So many stories of each kind of image.
fn all_kinds(test: &str, part: Range<usize>) {
    if !qemu::is_there(test) {
        return;
    }
    for variant in &ALL[part] {
        println!("{test}: {}", variant.name);
        let directory = tempfile::tempdir().unwrap();
        variant.make(directory.path(), 5);
        if !variant.name.starts_with("v2") {
            qemu::img(directory.path(), "bitmap --add -g 1k disk.qcow2 fine");
        }
        let start = qemu::content(directory.path(), "disk.qcow2", "qcow2");
        let result = runner(CASES).run(&stories(), |story| {
            tell(variant, directory.path(), &start, &story);
            Ok(())
        });
        if let Err(e) = result {
            panic!("{}: {e}", variant.name);
        }
    }
}

#[test]
fn the_first_half_of_all_kinds_of_images() {
    all_kinds("the_first_half_of_all_kinds_of_images", 0..ALL.len() / 2);
}

#[test]
fn the_second_half_of_all_kinds_of_images() {
    let test = "the_second_half_of_all_kinds_of_images";
    all_kinds(test, ALL.len() / 2..ALL.len());
}
