//! A journal that cannot be written, and images that cannot: slower, and nothing is lost.

use super::*;

/// No room for the journal: it goes on slowly, and loses nothing. Then the image needs no journal for a guest to go on.
#[test]
fn full_tmpfs_makes_changes_flush() {
    if !qemu::is_there("full_tmpfs_makes_changes_flush") {
        return;
    }
    let mut useless = 0;
    for all_fail in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let host = killed(directory.path());
        let disk = host.open(directory.path()).unwrap();
        disk.write(0, &pattern(2, 512)).unwrap();
        for n in 0..20_u16 {
            let at = (68 << 10) + u64::from(n) * 2048;
            match all_fail {
                true => host.full[1].store((3..12).contains(&n), SeqCst),
                false if n % 2 == 0 => host.journal.fail_in(1),
                false => {}
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
            useless += u32::from(left.told("Outdated") || left.told("Missing"));
            assert!(!after.chain.image().unwrap().lacks_journal(), "{n}");
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
    assert!(useless > 0);
}

/// Where there was no room once, there is none until what a flush has made unnecessary is given back.
#[test]
fn full_journal_frees_its_space() {
    if !qemu::is_there("full_journal_frees_its_space") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let host = killed(directory.path());
    let disk = host.open(directory.path()).unwrap();
    for n in 0..8_u16 {
        let at = (68 << 10) + u64::from(n) * 2048;
        disk.write(at, &pattern(n, 2048)).unwrap();
    }
    let before = host.journal.bytes().len();
    host.journal.fail_in(1);
    disk.write(100 << 10, &pattern(9, 2048)).unwrap();
    disk.flush().unwrap();
    let after = host.journal.bytes().len();
    assert!(before > 4096 && after == 4096, "{before} {after}");
}

/// Neither the journal nor a flush can be written: the disk has what was committed all the same, and its clusters
/// belong to nobody else.
#[test]
fn failed_commit_keeps_recorded_clusters() {
    if !qemu::is_there("failed_commit_keeps_recorded_clusters") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (a, b, c) = (64 << 10, 72 << 10, 80 << 10);
    for given_up in [false, true] {
        let host = killed(directory);
        let disk = host.open(directory).unwrap();
        let cluster = disk.chain.image().unwrap().cluster_bytes();
        disk.zero(a, 64 << 10, ZeroMode::Zeroes { unmap: true })
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
            disk.zero(a, cluster, ZeroMode::Zeroes { unmap: true })
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
fn full_journal_undoes_nothing() {
    if !qemu::is_there("full_journal_undoes_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    let disk = host.open(directory).unwrap();
    let at = 64 << 10;
    disk.write(at, &pattern(6, 64 << 10)).unwrap();
    disk.flush().unwrap();
    disk.zero(at, 64 << 10, ZeroMode::Zeroes { unmap: true })
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
/// part of that. What the journal has of clusters that were free then takes none from those that use it now. The image lacks nothing,
/// also if the journal could not be emptied after its last write.
#[test]
fn kill_during_overtaking_flush_loses_nothing() {
    if !qemu::is_there("kill_during_overtaking_flush_loses_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let at = 64 << 10;
    let (mut acknowledged, mut outdated) = (false, 0);
    for changes in 1.. {
        let (host, disk, cluster) = with_free_clusters(directory, at);
        disk.write(at, &pattern(7, cluster)).unwrap();
        host.events.lock().unwrap().clear();
        host.fill_up(false, true);
        host.life.live(changes);
        acknowledged = disk.write(at + cluster, &pattern(8, cluster)).is_ok();
        drop(disk);
        host.fill_up(false, false);
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        assert!(!disk.chain.image().unwrap().lacks_journal(), "{changes}");
        outdated += u32::from(host.told("Outdated"));
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
    assert!(acknowledged && outdated > 0);
}

/// Refcounts cannot be read for a while: what could not be freed then is freed later.
#[test]
fn failed_free_is_retried() {
    if !qemu::is_there("failed_free_is_retried") {
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
    let discarded = disk.zero(0, 64 << 10, ZeroMode::Discard);
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
fn failed_table_growth_is_not_recorded() {
    const COVERED: usize = 2 << 20;
    if !qemu::is_there("failed_table_growth_is_not_recorded") {
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
