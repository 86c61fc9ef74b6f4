//! Kills of the process: what was acknowledged is there afterwards, flushed or not, at whatever moment the
//! process ended; and a journal that does not belong to the image as it is does nothing.

mod belonging;
mod no_room;
mod replay;
mod snapshots;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::support::memory::Memory;
use crate::support::{Disk, HostFiles, How, WRITE};
use block::{FileOffset, GuestOffset};
use image::{
    Allocation, AllowedDirectories, ChainError, ImageError, JournalEvent, JournalFile, LayerFormat,
    Prepared, Storage, ZeroMode, check,
};
use testkit::images as variants;
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};

const DISK_BYTES: u64 = 192 << 10;

/// A process that will be killed: after so many more changes to its files, none has any effect.
#[derive(Clone, Default)]
struct Life(Arc<AtomicI64>);

impl Life {
    fn live(&self, changes: i64) {
        self.0.store(changes, SeqCst);
    }

    /// Whether a change is still made; -1 if it is the last, of which only a part may be.
    fn change(&self) -> io::Result<bool> {
        match self.0.fetch_sub(1, SeqCst) {
            ..=0 => Err(io::Error::other("killed")),
            n => Ok(n == 1),
        }
    }
}

struct Mortal {
    file: Memory,
    life: Life,
    /// A last write may be torn.
    torn: bool,
    /// No write succeeds.
    full: Arc<AtomicBool>,
    /// Nothing can be read.
    unreadable: Arc<AtomicBool>,
}

impl Storage for Mortal {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        if self.unreadable.load(SeqCst) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.file.read_at(at, to)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        if self.full.load(SeqCst) {
            return Err(io::Error::from_raw_os_error(28));
        }
        if self.life.change()? && self.torn {
            let part = from.len() / 2;
            self.file.write_at(at, &from[..part])?;
            return Err(io::Error::other("killed"));
        }
        self.file.write_at(at, from)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.flush()
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        self.file.loses_data_on_failed_flush()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.life.change()?;
        self.file.set_size(size)
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        self.life.change()?;
        self.file.punch(at, len)
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// An image, its journal, and what was told of it.
struct Host {
    image: Memory,
    journal: Memory,
    life: Life,
    /// There is no room for what is written to the image, or to the journal.
    full: [Arc<AtomicBool>; 2],
    unreadable: Arc<AtomicBool>,
    replayed: Arc<AtomicU64>,
    events: Arc<Mutex<Vec<String>>>,
}

impl Host {
    fn new(image: Vec<u8>) -> Self {
        Self {
            image: Memory::new(image),
            journal: Memory::new(Vec::new()),
            life: Life::default(),
            full: Default::default(),
            unreadable: Arc::default(),
            replayed: Arc::default(),
            events: Arc::default(),
        }
    }

    fn open(&self, directory: &Path) -> Result<Disk, ChainError> {
        self.open_as(directory, WRITE)
    }

    fn open_as(&self, directory: &Path, how: How) -> Result<Disk, ChainError> {
        let path = directory.join("disk.qcow2");
        let allowed = AllowedDirectories::of_image(&path).unwrap();
        let mortal = |file: &Memory, is_journal| Mortal {
            file: file.clone(),
            life: self.life.clone(),
            torn: is_journal,
            full: self.full[usize::from(is_journal)].clone(),
            unreadable: self.unreadable.clone(),
        };
        let (replayed, events) = (self.replayed.clone(), self.events.clone());
        let journal = JournalFile {
            storage: Arc::new(mortal(&self.journal, true)),
            identity: [7; 32],
            is_of_earlier_file: false,
            on_event: Box::new(move |event| {
                if let JournalEvent::Replayed(n) = event {
                    replayed.fetch_add(n, SeqCst);
                }
                events.lock().unwrap().push(format!("{event:?}"));
            }),
        };
        let storage = Arc::new(mortal(&self.image, false));
        let format = LayerFormat::Qcow2;
        Disk::with_journal(
            storage,
            &path,
            format,
            &allowed,
            how,
            (&mut HostFiles, Some(journal)),
        )
    }

    fn fill_up(&self, image: bool, journal: bool) {
        self.full[0].store(image, SeqCst);
        self.full[1].store(journal, SeqCst);
    }

    /// Takes clusters for a write that needs them, and has its data there.
    fn prepare(disk: &Disk, at: u64, bytes: &[u8]) -> Allocation {
        let prepared = disk
            .chain
            .prepare_write(GuestOffset(at), bytes.len() as u64);
        let Ok(Prepared::Allocated(allocation)) = prepared else {
            panic!("{prepared:?}");
        };
        assert!(allocation.len == bytes.len() as u64 && allocation.fills.is_empty());
        let file = &disk.chain.files()[usize::from(disk.chain.written_file().0)];
        file.write_at(allocation.to, bytes).unwrap();
        allocation
    }

    fn told(&self, what: &str) -> bool {
        let events = self.events.lock().unwrap();
        events.iter().any(|event| event.contains(what))
    }

    /// As much of a disk as there is from `at` on.
    fn sector(disk: &Disk, at: u64) -> Vec<u8> {
        let mut found = vec![0; 512];
        disk.read(at, &mut found).unwrap();
        found
    }
}

fn pattern(number: u16, len: u64) -> Vec<u8> {
    let bytes = number.to_be_bytes();
    (0..len).map(|i| bytes[(i % 2) as usize]).collect()
}

/// One operation; what it leaves, and whether it must.
fn operate(
    disk: &Disk,
    random: &mut Random,
    number: u16,
    at: u64,
    len: u64,
) -> (Option<Vec<u8>>, Result<(), ImageError>) {
    match random.below(6) {
        0 => {
            let unmap = random.one_in(2);
            let done = disk.zero(at, len, ZeroMode::Zeroes { unmap });
            (Some(vec![0; len as usize]), done)
        }
        1 => (None, disk.zero(at, len, ZeroMode::Discard)),
        _ => {
            let bytes = pattern(number, len);
            let done = disk.write(at, &bytes);
            (Some(bytes), done)
        }
    }
}

/// Lives one after the other on one image; returns how many changes were done again.
fn lives(variant: &variants::Variant, seed: u64, rounds: u32) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    variant.make_sized(directory.path(), seed, DISK_BYTES);
    let bytes = std::fs::read(directory.path().join("disk.qcow2")).unwrap();
    let host = Host::new(bytes);
    let mut random = Random(seed);
    let mut expected: Option<Vec<u8>> = None;
    let mut number = 2_u16;
    let name = variant.name;
    for round in 0..rounds {
        // Also while it does again what its predecessor had done.
        host.life.live(1 + random.below(400) as i64);
        let disk = match host.open(directory.path()) {
            Ok(disk) => disk,
            Err(e) => {
                assert!(e.to_string().contains("killed"), "{name} {seed}: {e}");
                continue;
            }
        };
        let found = disk.content().unwrap();
        let mut content = expected.take().unwrap_or_else(|| found.clone());
        if let Some(at) = (0..found.len()).find(|&at| found[at] != content[at]) {
            let (is, was) = (&found[at..at + 4], &content[at..at + 4]);
            let events = host.events.lock().unwrap();
            panic!(
                "{name}, seed {seed}, life {round}: byte {at} is {is:?} and was {was:?}; {events:?}"
            );
        }
        let cluster = disk.chain.image().unwrap().cluster_bytes();
        // The operation at which the process is killed may have been done or not, sector by sector.
        let undecided = loop {
            if random.one_in(8) && disk.flush().is_err() {
                break None;
            }
            number += 1;
            let (at, len) = random.range(disk.chain.size(), cluster);
            let (to, done) = operate(&disk, &mut random, number, at, len);
            let range = at as usize..(at + len) as usize;
            if done.is_err() {
                break Some(range);
            }
            match to {
                Some(to) => content[range].copy_from_slice(&to),
                // What a discard leaves stays.
                None => disk.read(at, &mut content[range]).unwrap(),
            }
        };
        drop(disk);
        let report = check(&host.image).unwrap();
        assert_eq!(report.errors, 0, "{name}, seed {seed}, life {round}");
        if let Some(range) = undecided {
            // Whoever comes next decides.
            host.life.live(i64::MAX);
            let disk = host.open(directory.path()).unwrap();
            let report = check(&host.image).unwrap();
            assert_eq!(report.errors, 0, "{name}, seed {seed}, life {round}");
            let at = range.start as u64;
            disk.read(at, &mut content[range]).unwrap();
        }
        expected = Some(content);
    }
    host.life.live(i64::MAX);
    let disk = host.open(directory.path()).unwrap();
    assert!(
        disk.content().unwrap() == expected.unwrap(),
        "{name} {seed}"
    );
    disk.write(0, &pattern(1, 512)).unwrap();
    disk.chain.close().unwrap();
    assert!(host.journal.bytes().is_empty(), "it has ended");
    let report = check(&host.image).unwrap();
    assert_eq!(report.errors, 0);
    let file = directory.path().join("after.qcow2");
    std::fs::write(file, host.image.bytes()).unwrap();
    let code = qemu::check_code(directory.path(), "after.qcow2");
    assert!([Some(0), Some(3)].contains(&code), "{name}: {code:?}");
    assert!(!host.told("Outdated"));
    host.replayed.load(SeqCst)
}

#[test]
fn acknowledged_writes_survive_kills() {
    if !qemu::is_there("acknowledged_writes_survive_kills") {
        return;
    }
    let mut replayed = 0;
    let kinds = variants::ALL.iter();
    for variant in kinds.filter(|v| v.is_one_file() && v.is_small() && !v.name.starts_with("v2")) {
        for seed in seeds(1, 3) {
            replayed += lives(variant, seed, 12);
        }
    }
    println!("{replayed} changes were done again");
    assert!(replayed > 1000);
}

/// The new part of a disk is zeroed before the disk is so long: that, too, is done again. Its backing file
/// has something there, which must never show.
#[test]
fn kill_during_growth_keeps_data() {
    if !qemu::is_there("kill_during_growth_keeps_data") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    std::fs::write(directory.join("base"), pattern(0x0808, 1 << 20)).unwrap();
    let options = "-o cluster_size=4k -b base -F raw";
    let create = format!("create -q -f qcow2 {options} disk.qcow2 {DISK_BYTES}");
    qemu::img(directory, &create);
    let bytes = std::fs::read(directory.join("disk.qcow2")).unwrap();
    let (old, new) = (DISK_BYTES as usize, DISK_BYTES as usize + (42 << 10));
    let (mut kills, mut replayed) = (0, 0);
    for changes in 1.. {
        let host = Host::new(bytes.clone());
        host.life.live(changes);
        let grown = host.open(directory).map(|disk| {
            disk.write(4096, &pattern(7, 512))
                .and_then(|()| disk.grow(new as u64))
                .is_ok()
        });
        let grown = grown.is_ok_and(|grown| grown);
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        let content = disk.content().unwrap();
        assert!(content.len() == new || content.len() == old && !grown);
        assert!(content[old..].iter().all(|&byte| byte == 0), "{changes}");
        assert_eq!(check(&host.image).unwrap().errors, 0);
        replayed += u64::from(host.told("Replayed"));
        if grown {
            break;
        }
        // It is tried again.
        kills += 1;
        disk.grow(new as u64).unwrap();
        let content = disk.content().unwrap();
        assert!(content.len() == new && content[old..].iter().all(|&byte| byte == 0));
    }
    assert!(replayed > 3, "{replayed} of {kills}");
}

/// A disk with one write that was acknowledged and is only in the journal, 64 KiB from the start.
fn killed(directory: &Path) -> Host {
    let variant = variants::ALL.iter().find(|v| v.name == "refcount_8");
    variant.unwrap().make_sized(directory, 1, DISK_BYTES);
    let host = Host::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    host.life.live(i64::MAX);
    let disk = host.open(directory).unwrap();
    disk.zero(64 << 10, 64 << 10, ZeroMode::Zeroes { unmap: true })
        .unwrap();
    disk.flush().unwrap();
    disk.write(64 << 10, &pattern(9, 4096)).unwrap();
    host
}

/// A larger L1 table is where the journal says that nothing is.
#[test]
fn kill_during_growth_keeps_l1_table_counted() {
    if !qemu::is_there("kill_during_growth_keeps_l1_table_counted") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let at = 64 << 10;
    for full in [false, true] {
        let mut grown = false;
        for changes in 1.. {
            let (host, disk, cluster) = with_free_clusters(directory, at);
            disk.write(at, &pattern(7, cluster)).unwrap();
            host.fill_up(false, full);
            host.life.live(changes);
            grown = disk.grow(64 << 20).is_ok();
            drop(disk);
            host.fill_up(false, false);
            host.life.live(i64::MAX);
            let disk = host.open(directory).unwrap();
            assert_eq!(Host::sector(&disk, at), pattern(7, 512), "{full} {changes}");
            assert_eq!(check(&host.image).unwrap().errors, 0, "{full} {changes}");
            disk.write(at + cluster, &pattern(8, 4 * cluster)).unwrap();
            disk.chain.close().unwrap();
            assert_eq!(check(&host.image).unwrap().errors, 0, "{full} {changes}");
            if grown {
                break;
            }
        }
        assert!(grown);
    }
}

/// A disk that has given clusters up, which its journal will say with the next change; and the size of one.
fn with_free_clusters(directory: &Path, at: u64) -> (Host, Disk, u64) {
    let host = killed(directory);
    let disk = host.open(directory).unwrap();
    let cluster = disk.chain.image().unwrap().cluster_bytes();
    disk.write(at, &pattern(6, 8 * cluster)).unwrap();
    disk.flush().unwrap();
    disk.zero(at, 8 * cluster, ZeroMode::Zeroes { unmap: true })
        .unwrap();
    disk.flush().unwrap();
    (host, disk, cluster)
}
