//! A journal that is of another image, damaged, old or elsewhere does nothing.

use super::*;

#[test]
fn journal_does_not_match_image_written_by_others() {
    if !qemu::is_there("journal_does_not_match_image_written_by_others") {
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
fn journal_does_not_match_older_image_state() {
    if !qemu::is_there("journal_does_not_match_older_image_state") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let host = killed(directory.path());
    let copy = host.image.bytes();
    let disk = host.open(directory.path()).unwrap();
    for n in 0..4 {
        disk.write(n * 4096, &pattern(4, 4096)).unwrap();
        disk.zero(n * 4096, 4096, ZeroMode::Zeroes { unmap: true })
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

/// A backup that was made while the disk was in use and all was flushed, or a moment after something that was not, is put
/// back into the same file after a kill. Nothing that came after it may be done again there.
#[test]
fn journal_does_not_match_backup_made_meanwhile() {
    if !qemu::is_there("journal_does_not_match_backup_made_meanwhile") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (at, beside, len) = (100 << 10, 120 << 10, 16 << 10);
    for flushed in [true, false] {
        let host = killed(directory);
        let disk = host.open(directory).unwrap();
        disk.write(at, &pattern(4, len)).unwrap();
        if flushed {
            disk.flush().unwrap();
        }
        let backup = host.image.bytes();
        if !flushed {
            // Between two flushes, copies are told apart by the time that has passed.
            std::thread::sleep(std::time::Duration::from_millis(101));
        }
        disk.zero(at, len, ZeroMode::Zeroes { unmap: true })
            .unwrap();
        disk.write(beside, &pattern(5, 4096)).unwrap();
        drop(disk);
        let put_back = Host {
            image: Memory::new(backup.clone()),
            journal: Memory::new(host.journal.bytes()),
            ..Host::new(Vec::new())
        };
        put_back.life.live(i64::MAX);
        let disk = put_back.open(directory).unwrap();
        assert!(put_back.told("Outdated") && !put_back.told("Replayed"));
        let expected = if flushed { 4 } else { 0 };
        assert_eq!(Host::sector(&disk, at), pattern(expected, 512));
        assert_eq!(Host::sector(&disk, beside), [0; 512]);
        // In the file that it was written for, the same journal is done.
        let disk = host.open(directory).unwrap();
        assert_eq!(Host::sector(&disk, at), [0; 512]);
        assert_eq!(Host::sector(&disk, beside), pattern(5, 512));
    }
}

/// A last record that is not whole, and any byte of the file that is another one: nothing that it says
/// is done, or all of it.
#[test]
fn damaged_journal_is_replayed_up_to_the_damage() {
    if !qemu::is_there("damaged_journal_is_replayed_up_to_the_damage") {
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

/// What the image says of its journal, without the bit for what a flush has overtaken.
fn generation(host: &Host) -> u64 {
    u64::from_be_bytes(host.image.bytes()[88..96].try_into().unwrap())
}

/// Whether an image opens with a journal, or says that it cannot be read; nothing is written to it then.
fn opens(host: &Host, directory: &Path, journal: Vec<u8>) -> bool {
    let image = host.image.bytes();
    let host = Host {
        image: Memory::new(image.clone()),
        journal: Memory::new(journal),
        ..Host::new(Vec::new())
    };
    host.life.live(i64::MAX);
    let Err(e) = host.open(directory) else {
        return true;
    };
    let said = e.to_string();
    assert!(
        e.is_journal_error() && said.contains("leave it in place"),
        "{said}"
    );
    assert_eq!(host.image.bytes(), image);
    false
}

/// More than a last record is missing, which no kill leaves: what was acknowledged would be lost without a word.
#[test]
fn truncated_journal_prevents_opening() {
    if !qemu::is_there("truncated_journal_prevents_opening") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let disk = host.open(directory).unwrap();
    disk.write(0, &pattern(2, 512)).unwrap();
    disk.flush().unwrap();
    let mut lengths = Vec::new();
    // Stamps come with time.
    while lengths.len() < 6 {
        let before = generation(&host);
        // The clusters stay: to reclaim freed ones would take a flush, and begin the journal again.
        disk.zero(64 << 10, 4096, ZeroMode::Zeroes { unmap: false })
            .unwrap();
        disk.write(64 << 10, &pattern(3, 4096)).unwrap();
        if generation(&host) != before {
            lengths.push(host.journal.bytes().len());
        }
    }
    let journal = host.journal.bytes();
    assert!(opens(&host, directory, journal.clone()));
    // A last record that is not whole is what a kill leaves.
    assert!(opens(
        &host,
        directory,
        journal[..journal.len() - 1].to_vec()
    ));
    for &len in &lengths[..3] {
        assert!(!opens(&host, directory, journal[..len].to_vec()), "{len}");
        let mut damaged = journal.clone();
        damaged[len + 9] ^= 1;
        assert!(!opens(&host, directory, damaged), "{len}");
    }
    // Not even the first is there.
    assert!(!opens(&host, directory, journal[..4096].to_vec()));
}

/// What says where its records are cannot be read: they are there all the same.
#[test]
fn journal_without_valid_slot_prevents_opening() {
    if !qemu::is_there("journal_without_valid_slot_prevents_opening") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let mut journal = host.journal.bytes();
    journal[..4096].fill(0);
    assert!(!opens(&host, directory, journal.clone()));
    // Of an image that has none, it says nothing.
    let disk = host.open(directory).unwrap();
    disk.chain.close().unwrap();
    assert!(opens(&host, directory, journal));
}

/// An earlier process was killed when its journal had nothing. That is no answer to where a later one's is.
#[test]
fn empty_old_journal_does_not_replace_another() {
    if !qemu::is_there("empty_old_journal_does_not_replace_another") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let old = killed(directory);
    let disk = old.open(directory).unwrap();
    disk.write(0, &pattern(2, 4096)).unwrap();
    disk.flush().unwrap();
    disk.chain.flush_for_handover().unwrap();
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

/// Processes that continue with an image are killed one after the other, each a little later. Until the image has the
/// generation of the new journal, the old one belongs to it.
#[test]
fn a_kill_leaves_the_journal_that_belongs_to_the_image() {
    if !qemu::is_there("a_kill_leaves_the_journal_that_belongs_to_the_image") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for sector in [false, true] {
        let host = killed(directory);
        let mut lives = 0;
        let mut has_written = false;
        while !has_written {
            lives += 1;
            host.life.live(lives);
            if let Ok(disk) = host.open(directory) {
                // Also one that has a journal without changes.
                has_written = match sector {
                    true => disk.write(200 << 10, &pattern(4, 512)).is_ok(),
                    false => disk.flush().is_ok() && disk.write(64 << 10, &[1; 512]).is_ok(),
                };
            }
            host.life.live(i64::MAX);
            let disk = host.open(directory).unwrap();
            let lost = ["Missing", "Outdated"].map(|event| host.told(event));
            assert_eq!(lost, [false; 2], "{lives}");
            assert_eq!(Host::sector(&disk, 65 << 10), pattern(9, 512), "{lives}");
        }
        assert!(lives > 4, "{lives}");
        let disk = host.open(directory).unwrap();
        disk.chain.close().unwrap();
        assert_eq!(check(&host.image).unwrap().errors, 0);
    }
}

/// Each process leaves records when it is killed. The next one has applied them, and removes them.
#[test]
fn journals_do_not_grow_with_kills() {
    if !qemu::is_there("journals_do_not_grow_with_kills") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let size = || host.journal.size().unwrap() - 4096;
    let first = size();
    for life in 2..12 {
        let disk = host.open(directory).unwrap();
        disk.write(life * (64 << 10), &pattern(4, 512)).unwrap();
        assert!(size() <= 2 * first, "{life}: {} after {first}", size());
    }
}

/// The journal is not where it is looked for. Whoever is told, and looks where it is, has lost nothing.
#[test]
fn missing_journal_is_reported() {
    if !qemu::is_there("missing_journal_is_reported") {
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
    assert!(disk.chain.image().unwrap().lacks_journal());
    assert_eq!(Host::sector(&disk, 64 << 10), [0; 512]);
    disk.chain.close().unwrap();
    let disk = host.open(directory).unwrap();
    assert!(host.told("Replayed"));
    assert!(!disk.chain.image().unwrap().lacks_journal());
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
    // A guest has started without it.
    let host = killed(directory);
    let (elsewhere, again) = (
        Host {
            image: host.image.clone(),
            ..Host::new(Vec::new())
        },
        Host {
            image: host.image.clone(),
            ..Host::new(Vec::new())
        },
    );
    elsewhere.life.live(i64::MAX);
    let disk = elsewhere.open(directory).unwrap();
    let image = disk.chain.image().unwrap();
    image.forget_journal().unwrap();
    assert!(!image.lacks_journal());
    drop(disk);
    again.life.live(i64::MAX);
    let disk = again.open(directory).unwrap();
    assert!(!again.told("Missing") && !disk.chain.image().unwrap().lacks_journal());
    drop(disk);
    assert_eq!(check(&host.image).unwrap().errors, 0);
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

/// What another program leaves of the bits.
fn clear_bits(image: &Memory) {
    image.write_at(FileOffset(88), &[0; 8]).unwrap();
    let dirty = image.bytes()[79];
    image.write_at(FileOffset(79), &[dirty & !1]).unwrap();
}

fn lacks_journal(host: &Host, directory: &Path) -> bool {
    let disk = host.open(directory).unwrap();
    let image = disk.chain.image().unwrap();
    assert_eq!(image.lacks_journal(), image.refuses_guest(true));
    image.lacks_journal()
}

/// Whatever is written after a loss, and at whatever moment the process that writes it is killed: it stays known until a guest
/// starts, also if other programs remove what the image says.
#[test]
fn what_was_lost_stays_known_until_a_guest_starts() {
    if !qemu::is_there("what_was_lost_stays_known_until_a_guest_starts") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for is_elsewhere in [false, true] {
        let lost = || {
            let host = killed(directory);
            if is_elsewhere {
                host.journal.set_size(0).unwrap();
                assert!(lacks_journal(&host, directory));
            }
            clear_bits(&host.image);
            host
        };
        let (mut killed_in, mut is_closed) = (0, false);
        while !is_closed {
            killed_in += 1;
            let host = lost();
            host.life.live(killed_in);
            is_closed = host.open(directory).is_ok_and(|disk| {
                let written = disk.write(64 << 10, &pattern(2, 4096)).is_ok()
                    && disk.flush().is_ok()
                    && disk.write(96 << 10, &pattern(3, 4096)).is_ok();
                disk.chain.close().is_ok() && written
            });
            host.life.live(i64::MAX);
            for clear in [false, true] {
                if clear {
                    clear_bits(&host.image);
                }
                assert!(lacks_journal(&host, directory), "{killed_in}, {clear}");
                let disk = host.open(directory).unwrap();
                let refuses_all = disk.chain.image().unwrap().refuses_guest(false);
                assert_eq!(refuses_all, is_elsewhere, "{killed_in}, {clear}");
            }
        }
        assert!(killed_in > 15, "{killed_in}, {is_elsewhere}");
        for writes in [false, true] {
            for killed_in in 1.. {
                let host = lost();
                let disk = host.open(directory).unwrap();
                if writes {
                    disk.write(64 << 10, &pattern(2, 4096)).unwrap();
                }
                host.life.live(killed_in);
                let has_started = disk.chain.image().unwrap().forget_journal().is_ok();
                drop(disk);
                let is_alive = host.life.change().is_ok();
                host.life.live(i64::MAX);
                if has_started {
                    assert!(!lacks_journal(&host, directory), "{killed_in}, {writes}");
                    clear_bits(&host.image);
                    assert!(!lacks_journal(&host, directory), "{killed_in}, {writes}");
                }
                if is_alive {
                    assert!(has_started);
                    break;
                }
            }
        }
    }
}
