//! What a killed process had acknowledged is done again: all of it or nothing, with any cache, and as often as it takes.

use super::*;

/// Bytes of disk that one L2 table maps, with clusters of 512 bytes.
const REACH: u64 = 64 * 512;
/// L2 tables of the disk.
const TABLES: u64 = 128;

/// One slice of a table has 512 bytes, and there is room for four.
const SMALL_CACHE: How = How {
    l2_cache_bytes: Some(1024),
    ..WRITE
};

/// A disk with one write to each of so many L2 tables that was acknowledged, and is only in the journal.
fn killed_with_tables(directory: &Path, tables: u64) -> Host {
    let size = TABLES * REACH;
    let create = format!("create -q -f qcow2 -o cluster_size=512 disk.qcow2 {size}");
    qemu::img(directory, &create);
    let host = Host::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    host.life.live(i64::MAX);
    let disk = host.open(directory).unwrap();
    for table in 0..tables {
        write_one(&disk, table, 0);
    }
    host
}

/// Writes the sector of a table that has this number.
fn write_one(disk: &Disk, table: u64, sector: u64) {
    let bytes = pattern(table as u16 + 1, 512);
    disk.write(table * REACH + 512 * sector, &bytes).unwrap();
}

fn look(host: &Host, disk: &Disk, tables: u64, sectors: u64) {
    for table in 0..tables {
        for sector in 0..sectors {
            let found = Host::sector(disk, table * REACH + 512 * sector);
            let expected = pattern(table as u16 + 1, 512);
            assert!(found == expected, "table {table} of {tables}, {sector}");
        }
    }
    assert_eq!(check(&host.image).unwrap().errors, 0);
}

/// A flush in the midst of a replay counted all changes as durable, and the rest was never written, though the log said
/// that all was done again and the guest's flushes succeeded. With more tables, the replay never ended.
#[test]
fn replay_works_without_cache() {
    if !qemu::is_there("replay_works_without_cache") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for tables in [1, 4, 5, 8, TABLES] {
        let host = killed_with_tables(directory, tables);
        let disk = host.open_as(directory, SMALL_CACHE).unwrap();
        assert!(host.told("Replayed"));
        look(&host, &disk, tables, 1);
        disk.flush().unwrap();
        drop(disk);
        // The host crashes: the journal is gone, and with it what was not flushed.
        let after = Host::new(host.image.bytes());
        after.life.live(i64::MAX);
        let disk = after.open_as(directory, SMALL_CACHE).unwrap();
        look(&after, &disk, tables, 1);
    }
}

/// A replay is killed at every write that it makes, twice, and once more at the next one.
#[test]
fn kill_during_replay_loses_nothing() {
    if !qemu::is_there("kill_during_replay_loses_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let before = killed_with_tables(directory, 20);
    let mut kills = 0;
    for changes in 1.. {
        let host = Host {
            image: Memory::new(before.image.bytes()),
            journal: Memory::new(before.journal.bytes()),
            ..Host::new(Vec::new())
        };
        let mut replayed = false;
        for life in [changes, changes, changes + 1] {
            host.life.live(life);
            replayed = host.open_as(directory, SMALL_CACHE).is_ok();
            assert_eq!(check(&host.image).unwrap().errors, 0);
            kills += u32::from(!replayed);
        }
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        look(&host, &disk, 20, 1);
        // What others get is not what was in use before.
        for table in 0..TABLES {
            write_one(&disk, table, 1);
        }
        look(&host, &disk, 20, 2);
        disk.chain.close().unwrap();
        assert_eq!(check(&host.image).unwrap().errors, 0);
        if replayed {
            break;
        }
    }
    assert!(kills > 20, "{kills}");
}

/// Nothing is lost for want of space while a journal is done again: nobody is told to go on without it.
#[test]
fn replay_without_space_keeps_journal() {
    if !qemu::is_there("replay_without_space_keeps_journal") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed(directory);
    host.fill_up(true, false);
    let error = host.open(directory).err().unwrap().to_string();
    println!("{error}");
    assert!(error.contains("leave the journal in place"), "{error}");
    assert!(
        !error.contains("remove") && !error.contains("moving the journal away"),
        "{error}"
    );
    host.fill_up(false, false);
    let disk = host.open(directory).unwrap();
    assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
}

/// A process that is told to end does not wait for a replay. The next start goes on with it.
#[test]
fn replay_can_be_stopped() {
    if !qemu::is_there("replay_can_be_stopped") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = killed_with_tables(directory, TABLES);
    let disk = host.open(directory).unwrap();
    for table in 0..TABLES {
        for sector in 1..20 {
            write_one(&disk, table, sector);
        }
    }
    drop(disk);
    let stopped = How {
        stopped: true,
        ..SMALL_CACHE
    };
    let error = host.open_as(directory, stopped).err().unwrap();
    assert!(error.to_string().contains("stopped"), "{error}");
    assert_eq!(check(&host.image).unwrap().errors, 0);
    let disk = host.open_as(directory, SMALL_CACHE).unwrap();
    look(&host, &disk, TABLES, 20);
}

/// A kill at any moment of the end that follows a replay leaves an image that lacks nothing: the journal has no changes any more.
#[test]
fn kill_at_the_end_after_a_replay_leaves_nothing_missing() {
    if !qemu::is_there("kill_at_the_end_after_a_replay_leaves_nothing_missing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for changes in 1.. {
        let host = killed(directory);
        let disk = host.open(directory).unwrap();
        assert!(host.told("Replayed"));
        host.life.live(changes);
        let is_closed = disk.chain.close().is_ok() && changes > 8;
        drop(disk);
        host.life.live(i64::MAX);
        let disk = host.open(directory).unwrap();
        assert!(!disk.chain.image().unwrap().lacks_journal(), "{changes}");
        assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
        if is_closed {
            break;
        }
    }
}
