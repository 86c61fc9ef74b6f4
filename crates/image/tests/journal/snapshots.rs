//! Images with internal snapshots. QEMU, when it is to repair an image that has autoclear features unknown to it, writes a
//! header that says that there are no snapshots. So these images must have no such features.

use super::*;

const AUTOCLEAR: std::ops::Range<usize> = 88..96;
const SNAPSHOTS: std::ops::Range<usize> = 60..64;

/// An image with a snapshot of what is there before the test; the disk reads as 1 everywhere.
fn with_snapshot(directory: &Path) -> Host {
    qemu::img(
        directory,
        &format!("create -q -f qcow2 -o cluster_size=4k disk.qcow2 {DISK_BYTES}"),
    );
    let write = format!("write -P 1 0 {DISK_BYTES}");
    qemu::io(directory, "disk.qcow2", &["-f", "qcow2"], &[write]);
    qemu::img(directory, "snapshot -c before disk.qcow2");
    let host = Host::new(std::fs::read(directory.join("disk.qcow2")).unwrap());
    host.life.live(i64::MAX);
    host
}

/// Repairs the image as QEMU does, and looks whether the snapshot is there and has what it had.
fn repair(directory: &Path, host: &Host) {
    std::fs::write(directory.join("after.qcow2"), host.image.bytes()).unwrap();
    qemu::img(directory, "check -q -r leaks after.qcow2");
    let after = std::fs::read(directory.join("after.qcow2")).unwrap();
    assert_eq!(after[SNAPSHOTS], [0, 0, 0, 1], "the snapshot is gone");
    qemu::img(directory, "snapshot -a before after.qcow2");
    let content = qemu::content(directory, "after.qcow2", "qcow2");
    assert!(content == vec![1; DISK_BYTES as usize]);
}

/// At every moment a kill leaves all that was acknowledged, and an image that QEMU may repair.
#[test]
fn kill_does_not_endanger_snapshots() {
    if !qemu::is_there("kill_does_not_endanger_snapshots") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let host = with_snapshot(directory);
    let disk = host.open(directory).unwrap();
    for n in 0..12_u16 {
        let at = u64::from(n) * 4096;
        if n % 4 == 3 {
            disk.zero(at, 4096, ZeroMode::Zeroes { unmap: true })
                .unwrap();
        } else {
            disk.write(at, &pattern(2 + n, 512)).unwrap();
        }
        let left = Host::new(host.image.bytes());
        left.life.live(i64::MAX);
        assert_eq!(host.image.bytes()[AUTOCLEAR], [0; 8]);
        let after = left.open(directory).unwrap();
        for m in 0..=n {
            let expected = if m % 4 == 3 { 0 } else { 2 + m };
            let found = Host::sector(&after, u64::from(m) * 4096);
            assert_eq!(found, pattern(expected, 512), "{m} of {n}");
        }
    }
    assert!(host.told("NotWithSnapshots"));
    drop(disk);
    repair(directory, &host);
}

/// What an earlier version left: an image with a snapshot, a journal, and the features that say so.
fn left_by_an_earlier_version(directory: &Path) -> Host {
    let host = with_snapshot(directory);
    let mut bytes = host.image.bytes();
    bytes[SNAPSHOTS].fill(0);
    // There is space, so nothing looks for clusters that no table refers to.
    bytes.resize(bytes.len() + (1 << 20), 0);
    let host = Host {
        image: Memory::new(bytes),
        ..host
    };
    let disk = host.open(directory).unwrap();
    disk.write(64 << 10, &pattern(9, 4096)).unwrap();
    drop(disk);
    let mut bytes = host.image.bytes();
    assert_ne!(bytes[AUTOCLEAR], [0; 8]);
    bytes[SNAPSHOTS].copy_from_slice(&[0, 0, 0, 1]);
    Host {
        image: Memory::new(bytes),
        ..host
    }
}

#[test]
fn journal_bits_of_earlier_version_are_removed() {
    if !qemu::is_there("journal_bits_of_earlier_version_are_removed") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    std::fs::create_dir(directory.join("other")).unwrap();
    for write in [false, true] {
        let host = left_by_an_earlier_version(directory);
        let disk = host.open(directory).unwrap();
        assert!(host.told("Replayed"));
        assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
        if write {
            // And then it is killed.
            disk.write(0, &pattern(8, 512)).unwrap();
            drop(disk);
        } else {
            disk.chain.close().unwrap();
        }
        assert_eq!(host.image.bytes()[AUTOCLEAR], [0; 8], "{write}");
        repair(directory, &host);

        // The journal is another one's: nothing of it is done.
        let host = left_by_an_earlier_version(directory);
        let other = Host {
            image: host.image,
            ..killed(&directory.join("other"))
        };
        let disk = other.open(directory).unwrap();
        assert!(other.told("Outdated"));
        assert_eq!(Host::sector(&disk, 64 << 10), pattern(0x0101, 512));
        disk.chain.close().unwrap();
        assert_eq!(other.image.bytes()[AUTOCLEAR], [0; 8]);
        repair(directory, &other);
    }

    // There is none here. It may still be found until something is written, and the message names the snapshots as well.
    let host = left_by_an_earlier_version(directory);
    let elsewhere = Host {
        image: host.image.clone(),
        ..Host::new(Vec::new())
    };
    elsewhere.life.live(i64::MAX);
    let disk = elsewhere.open(directory).unwrap();
    assert!(elsewhere.told("Missing { snapshots: true }"));
    disk.chain.close().unwrap();
    let disk = host.open(directory).unwrap();
    assert!(host.told("Replayed"));
    assert_eq!(Host::sector(&disk, 64 << 10), pattern(9, 512));
    disk.chain.close().unwrap();
    repair(directory, &host);
}
