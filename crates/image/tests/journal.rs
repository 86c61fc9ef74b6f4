//! Kills of the process: what was acknowledged is there afterwards, flushed or not, at whatever moment the
//! process ended; and a journal that does not belong to the image as it is does nothing.

mod support;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use block::FileOffset;
use image::{
    Allocation, ChainError, Gate, ImageError, JournalEvent, JournalPlace, LayerFormat, Prepared,
    Storage, Zeroing, check,
};
use support::memory::Memory;
use support::{Disk, HostFiles, WRITE};
use testkit::faulty::{Random, seeds};
use testkit::images as variants;
use testkit::qemu_img as qemu;

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

    fn forgets(&self) -> bool {
        self.file.forgets()
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

    fn block(&self) -> u32 {
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
        let path = directory.join("disk.qcow2");
        let gate = Gate::beside(&path).unwrap();
        let mortal = |file: &Memory, is_journal| Mortal {
            file: file.clone(),
            life: self.life.clone(),
            torn: is_journal,
            full: self.full[usize::from(is_journal)].clone(),
            unreadable: self.unreadable.clone(),
        };
        let (replayed, events) = (self.replayed.clone(), self.events.clone());
        let journal = JournalPlace {
            storage: Arc::new(mortal(&self.journal, true)),
            identity: [7; 32],
            tell: Box::new(move |event| {
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
            &gate,
            WRITE,
            (&mut HostFiles, Some(journal)),
        )
    }

    fn fill_up(&self, image: bool, journal: bool) {
        self.full[0].store(image, SeqCst);
        self.full[1].store(journal, SeqCst);
    }

    /// Takes clusters for a write that needs them, and has its data there.
    fn prepare(disk: &Disk, at: u64, bytes: &[u8]) -> Allocation {
        let prepared = disk.chain.prepare_write(at, bytes.len() as u64);
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
            let done = disk.zero(at, len, Zeroing::Zeroes { unmap });
            (Some(vec![0; len as usize]), done)
        }
        1 => (None, disk.zero(at, len, Zeroing::Discard)),
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
fn what_was_acknowledged_survives_kills() {
    if !qemu::is_there("what_was_acknowledged_survives_kills") {
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
fn a_kill_while_the_disk_grows() {
    if !qemu::is_there("a_kill_while_the_disk_grows") {
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
    disk.zero(64 << 10, 64 << 10, Zeroing::Zeroes { unmap: true })
        .unwrap();
    disk.flush().unwrap();
    disk.write(64 << 10, &pattern(9, 4096)).unwrap();
    host
}

#[test]
fn a_journal_is_of_no_image_that_was_written_elsewhere() {
    if !qemu::is_there("a_journal_is_of_no_image_that_was_written_elsewhere") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.qcow2");
    let before = {
        let host = killed(directory.path());
        host.image.bytes()
    };
    // As it was left: the write is there.
    let host = killed(directory.path());
    let disk = host.open(directory.path()).unwrap();
    assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
    assert!(host.told("Replayed"));
    drop(disk);

    // QEMU has written to it: what it did stands.
    let host = killed(directory.path());
    std::fs::write(&file, host.image.bytes()).unwrap();
    qemu::io(
        directory.path(),
        "disk.qcow2",
        &["-f", "qcow2"],
        &["write -P 5 80k 8k".into()],
    );
    let host = Host {
        image: Memory::new(std::fs::read(&file).unwrap()),
        ..host
    };
    let disk = host.open(directory.path()).unwrap();
    assert!(host.told("Outdated") && !host.told("Replayed"));
    assert_eq!(Host::sector(&disk, 80 << 10), [5; 512]);
    assert_eq!(Host::sector(&disk, 64 << 10), [0; 512]);
    disk.write(64 << 10, &pattern(3, 512)).unwrap();
    disk.chain.close().unwrap();
    assert_eq!(check(&host.image).unwrap().errors, 0);

    // It was put back from a copy: of before, or of another life.
    let other_life = before;
    let host = killed(directory.path());
    let host = Host {
        image: Memory::new(other_life),
        ..host
    };
    let disk = host.open(directory.path()).unwrap();
    assert!(host.told("Outdated") && !host.told("Replayed"));
    assert_eq!(Host::sector(&disk, 64 << 10), [0; 512]);
}

/// A copy that was made earlier in the same life: two flushes are between.
#[test]
fn a_journal_is_of_no_older_state_of_its_image() {
    if !qemu::is_there("a_journal_is_of_no_older_state_of_its_image") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let host = killed(directory.path());
    let copy = host.image.bytes();
    let disk = host.open(directory.path()).unwrap();
    for n in 0..4 {
        disk.write(n * 4096, &pattern(4, 4096)).unwrap();
        disk.zero(n * 4096, 4096, Zeroing::Zeroes { unmap: true })
            .unwrap();
        disk.flush().unwrap();
    }
    disk.write(100 << 10, &pattern(9, 4096)).unwrap();
    drop(disk);
    host.events.lock().unwrap().clear();
    let host = Host {
        image: Memory::new(copy),
        ..host
    };
    let disk = host.open(directory.path()).unwrap();
    assert!(host.told("Outdated") && !host.told("Replayed"));
    assert_eq!(Host::sector(&disk, 100 << 10), [0; 512]);
}

/// A last record that is not whole, and any byte of the file that is another one: nothing that it says
/// is done, or all of it.
#[test]
fn a_damaged_journal_is_cut_off() {
    if !qemu::is_there("a_damaged_journal_is_cut_off") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let whole = killed(directory.path());
    let (image, journal) = (whole.image.bytes(), whole.journal.bytes());
    assert!(
        journal.len() > 4096 && journal.len() < 8192,
        "{}",
        journal.len()
    );
    let look = |journal: Vec<u8>| {
        let host = Host {
            journal: Memory::new(journal),
            ..Host::new(image.clone())
        };
        host.life.live(i64::MAX);
        let disk = host.open(directory.path()).unwrap();
        let found = Host::sector(&disk, 64 << 10);
        assert!(found == pattern(9, 512) || found == [0; 512]);
        assert_eq!(check(&host.image).unwrap().errors, 0);
        found == pattern(9, 512)
    };
    assert!(look(journal.clone()));
    // What counts begins where the newer of the two slots says.
    let word = |at: usize| u64::from_le_bytes(journal[at..at + 8].try_into().unwrap());
    let slot = if word(8) > word(136) { 0 } else { 128 };
    let start = word(slot + 32) as usize;
    assert!(start > 4096 && start < journal.len());
    for len in start..journal.len() {
        assert!(!look(journal[..len].to_vec()), "{len}");
    }
    for at in (0..256).chain(4096..journal.len()) {
        let mut damaged = journal.clone();
        damaged[at] ^= 0x10;
        let counts = (slot..slot + 76).contains(&at) || at >= start;
        // Without the newer slot, the older one counts: what it has besides was flushed.
        assert!(look(damaged) != counts || at < 256, "{at}");
    }
}

/// No room for the journal: it goes on slowly, and loses nothing.
#[test]
fn without_room_for_a_journal_changes_are_flushed() {
    if !qemu::is_there("without_room_for_a_journal_changes_are_flushed") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let host = killed(directory.path());
    let disk = host.open(directory.path()).unwrap();
    disk.write(0, &pattern(2, 512)).unwrap();
    for n in 0..20_u16 {
        let at = (68 << 10) + u64::from(n) * 2048;
        if n % 2 == 0 {
            host.journal.fail_in(1);
        }
        disk.write(at, &pattern(100 + n, 2048)).unwrap();
        // Every moment is one at which it may be killed.
        let left = Host {
            image: Memory::new(host.image.bytes()),
            journal: Memory::new(host.journal.bytes()),
            ..Host::new(Vec::new())
        };
        left.life.live(i64::MAX);
        let after = left.open(directory.path()).unwrap();
        for m in 0..=n {
            let at = (68 << 10) + u64::from(m) * 2048;
            assert_eq!(
                Host::sector(&after, at),
                pattern(100 + m, 512),
                "{m} of {n}"
            );
        }
        assert_eq!(check(&left.image).unwrap().errors, 0);
    }
    assert!(host.told("Failed"));
    disk.chain.close().unwrap();
    assert_eq!(check(&host.image).unwrap().errors, 0);
}

/// Neither the journal nor a flush can be written: the disk has what was committed all the same, and its clusters
/// belong to nobody else.
#[test]
fn what_was_committed_and_not_kept_is_not_given_back() {
    if !qemu::is_there("what_was_committed_and_not_kept_is_not_given_back") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (a, b, c) = (64 << 10, 72 << 10, 80 << 10);
    for given_up in [false, true] {
        let host = killed(directory);
        let disk = host.open(directory).unwrap();
        let cluster = disk.chain.image().unwrap().cluster_bytes();
        disk.zero(a, 64 << 10, Zeroing::Zeroes { unmap: true })
            .unwrap();
        disk.flush().unwrap();
        disk.flush().unwrap();
        let allocation = Host::prepare(&disk, a, &pattern(7, cluster));
        host.fill_up(true, true);
        let (_, allocation) = disk.chain.commit_or_keep(allocation).unwrap_err();
        assert_eq!(Host::sector(&disk, a), pattern(7, 512));
        let (_, allocation) = disk.chain.commit_or_keep(allocation).unwrap_err();
        host.fill_up(false, false);
        if given_up {
            // Its cluster is another one's by the time that it is tried again.
            disk.zero(a, cluster, Zeroing::Zeroes { unmap: true })
                .unwrap();
            disk.flush().unwrap();
            disk.flush().unwrap();
            disk.write(b, &pattern(8, cluster)).unwrap();
            disk.chain.commit_or_keep(allocation).unwrap();
            assert_eq!(Host::sector(&disk, a), [0; 512]);
        } else {
            disk.chain.abort(allocation);
            disk.write(b, &pattern(8, cluster)).unwrap();
            assert_eq!(Host::sector(&disk, a), pattern(7, 512));
        }
        disk.write(c, &pattern(9, cluster)).unwrap();
        disk.write(a, &pattern(10, cluster)).unwrap();
        for (at, number) in [(a, 10), (b, 8), (c, 9)] {
            assert_eq!(Host::sector(&disk, at), pattern(number, 512), "{given_up}");
        }
        disk.chain.close().unwrap();
        assert_eq!(check(&host.image).unwrap().errors, 0, "{given_up}");
    }
}

/// What the journal had no room for is in the image, and newer than what the journal has.
#[test]
fn a_journal_without_room_undoes_nothing() {
    if !qemu::is_there("a_journal_without_room_undoes_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let disk = host.open(directory).unwrap();
    let at = 64 << 10;
    disk.write(at, &pattern(6, 64 << 10)).unwrap();
    disk.flush().unwrap();
    disk.zero(at, 64 << 10, Zeroing::Zeroes { unmap: true })
        .unwrap();
    host.fill_up(false, true);
    disk.write(at, &pattern(7, 64 << 10)).unwrap();
    disk.flush().unwrap();
    assert!(host.told("Failed"));
    drop(disk);
    host.fill_up(false, false);
    host.events.lock().unwrap().clear();
    let disk = host.open(directory).unwrap();
    assert!(!host.told("Replayed"));
    assert_eq!(Host::sector(&disk, at), pattern(7, 512));
    assert_eq!(check(&host.image).unwrap().errors, 0);
}

/// A kill in the midst of the flush of what the journal had no room for: the file is newer than the journal by any
/// part of that. What the journal has of clusters that were free then takes none from whoever has it now.
#[test]
fn a_kill_while_a_flush_overtakes_the_journal_costs_nothing() {
    if !qemu::is_there("a_kill_while_a_flush_overtakes_the_journal_costs_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let at = 64 << 10;
    let mut acknowledged = false;
    for changes in 1.. {
        let (host, disk, cluster) = with_free_clusters(directory, at);
        disk.write(at, &pattern(7, cluster)).unwrap();
        host.fill_up(false, true);
        host.life.live(changes);
        acknowledged = disk.write(at + cluster, &pattern(8, cluster)).is_ok();
        drop(disk);
        host.fill_up(false, false);
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        assert_eq!(Host::sector(&disk, at), pattern(7, 512), "{changes}");
        if acknowledged {
            assert_eq!(Host::sector(&disk, at + cluster), pattern(8, 512));
        }
        assert_eq!(check(&host.image).unwrap().errors, 0, "{changes}");
        // The guest does it again; what is taken by others then is not what it has.
        disk.write(at + cluster, &pattern(8, cluster)).unwrap();
        let others = (0..4).map(|n| (100 << 10) + n * cluster);
        for other in others {
            disk.write(other, &pattern(9, cluster)).unwrap();
        }
        assert_eq!(Host::sector(&disk, at + cluster), pattern(8, 512));
        disk.chain.close().unwrap();
        assert_eq!(check(&host.image).unwrap().errors, 0, "{changes}");
        if acknowledged {
            break;
        }
    }
    assert!(acknowledged);
}

/// A larger L1 table is where the journal says that nothing is.
#[test]
fn a_kill_while_a_disk_grows_leaves_its_l1_table_counted() {
    if !qemu::is_there("a_kill_while_a_disk_grows_leaves_its_l1_table_counted") {
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
    disk.zero(at, 8 * cluster, Zeroing::Zeroes { unmap: true })
        .unwrap();
    disk.flush().unwrap();
    (host, disk, cluster)
}

/// An earlier process was killed when its journal had nothing. That is no answer to where a later one's is.
#[test]
fn an_old_journal_with_nothing_in_it_does_not_stand_for_another() {
    if !qemu::is_there("an_old_journal_with_nothing_in_it_does_not_stand_for_another") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let old = killed(directory);
    let disk = old.open(directory).unwrap();
    disk.write(0, &pattern(2, 4096)).unwrap();
    disk.flush().unwrap();
    disk.chain.settle().unwrap();
    drop(disk);
    let new = Host {
        image: old.image.clone(),
        ..Host::new(Vec::new())
    };
    new.life.live(i64::MAX);
    let disk = new.open(directory).unwrap();
    disk.write(100 << 10, &pattern(5, 4096)).unwrap();
    drop(disk);
    let disk = old.open(directory).unwrap();
    assert!(old.told("Missing"));
    disk.chain.close().unwrap();
    let disk = new.open(directory).unwrap();
    assert!(new.told("Replayed"));
    assert_eq!(Host::sector(&disk, 100 << 10), pattern(5, 512));
}

/// The journal is not where it is looked for. Whoever is told, and looks where it is, has lost nothing.
#[test]
fn a_journal_that_is_elsewhere_is_missed() {
    if !qemu::is_there("a_journal_that_is_elsewhere_is_missed") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    assert!(!host.told("Missing"), "it has said so of no other image");
    let elsewhere = Host {
        image: host.image.clone(),
        ..Host::new(Vec::new())
    };
    elsewhere.life.live(i64::MAX);
    let disk = elsewhere.open(directory).unwrap();
    assert!(elsewhere.told("Missing") && !elsewhere.told("Outdated"));
    assert_eq!(Host::sector(&disk, 64 << 10), [0; 512]);
    disk.chain.close().unwrap();
    let disk = host.open(directory).unwrap();
    assert!(host.told("Replayed"));
    assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
    // Closed in order, though nothing was written: then none is missed.
    disk.chain.close().unwrap();
    let after = Host {
        image: host.image.clone(),
        ..Host::new(Vec::new())
    };
    after.life.live(i64::MAX);
    let disk = after.open(directory).unwrap();
    assert!(!after.told("Missing"));
    assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
    // And one that has been missed for good is not missed again.
    let host = killed(directory);
    let elsewhere = Host {
        image: host.image.clone(),
        ..Host::new(Vec::new())
    };
    elsewhere.life.live(i64::MAX);
    let disk = elsewhere.open(directory).unwrap();
    disk.write(0, &pattern(3, 512)).unwrap();
    disk.chain.close().unwrap();
    let disk = host.open(directory).unwrap();
    assert!(host.told("Outdated") && !host.told("Replayed") && !host.told("Missing"));
    assert_eq!(Host::sector(&disk, 64 << 10), [0; 512]);
}

/// Refcounts cannot be read for a while: what could not be freed then is freed later.
#[test]
fn what_cannot_be_freed_is_freed_later() {
    if !qemu::is_there("what_cannot_be_freed_is_freed_later") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let disk = host.open(directory).unwrap();
    disk.write(0, &pattern(3, DISK_BYTES)).unwrap();
    disk.chain.close().unwrap();
    let disk = host.open(directory).unwrap();
    // Its tables are read, and its refcounts are not.
    assert_eq!(Host::sector(&disk, 0), pattern(3, 512));
    let discarded = disk.zero(0, 64 << 10, Zeroing::Discard);
    discarded.unwrap();
    host.unreadable.store(true, SeqCst);
    disk.flush().unwrap();
    disk.flush().unwrap();
    host.unreadable.store(false, SeqCst);
    assert_eq!(check(&host.image).unwrap().leaks, 16);
    disk.chain.close().unwrap();
    let report = check(&host.image).unwrap();
    assert_eq!((report.errors, report.leaks), (0, 0));
}

/// The refcount table could not grow, and then could, with its new blocks elsewhere. A kill after that costs nothing.
#[test]
fn a_table_that_did_not_grow_is_not_in_the_journal() {
    const COVERED: usize = 2 << 20;
    if !qemu::is_there("a_table_that_did_not_grow_is_not_in_the_journal") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let options = "-o cluster_size=512,refcount_bits=64";
    let create = format!("create -q -f qcow2 {options} disk.qcow2 3M");
    qemu::img(directory, &create);
    let host = Host::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    host.life.live(i64::MAX);
    let disk = host.open(directory).unwrap();
    let mut at = 0;
    while host.image.bytes().len() < COVERED - 20 * 512 {
        disk.write(at, &pattern(2, 512)).unwrap();
        at += 512;
    }
    disk.chain.close().unwrap();
    let full = host.image.bytes();
    assert!(full.len() < COVERED);
    for before in (0..20).step_by(4) {
        let host = Host::new(full.clone());
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        let mut end = at;
        let mut write = |clusters| {
            for _ in 0..clusters {
                disk.write(end, &pattern(3, 512)).unwrap();
                end += 512;
            }
        };
        write(before);
        // An L1 table of 32 clusters has no room without a larger refcount table.
        host.fill_up(true, false);
        disk.grow(67 << 20).unwrap_err();
        host.fill_up(false, false);
        write(100);
        assert!(host.image.bytes().len() > COVERED);
        drop(disk);
        let disk = host.open(directory).unwrap();
        assert!(host.told("Replayed"));
        for (from, to, number) in [(0, at, 2), (at, end, 3)] {
            let mut found = vec![0; (to - from) as usize];
            disk.read(from, &mut found).unwrap();
            assert!(found == pattern(number, to - from), "{before}");
        }
        assert_eq!(check(&host.image).unwrap().errors, 0);
    }
}
