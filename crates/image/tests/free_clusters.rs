//! The space that free clusters occupy, on a volume where it is missed.

use image::{ZeroMode, check};
use testkit::qemu_img as qemu;

use crate::space::open;
use crate::support::memory::Memory;

/// A file system makes more space than a write needs, and so free clusters occupy some: it is found when it is missing, not only
/// once after an image is opened, but not again and again while nothing changes.
#[test]
fn space_around_new_clusters_is_found() {
    if !qemu::is_there("space_around_new_clusters_is_found") {
        return;
    }
    // And the blocks that are made together.
    for (options, together) in [
        ("cluster_size=4k", 16),
        ("cluster_size=16k,extended_l2=on", 32),
        ("cluster_size=64k", 64),
    ] {
        let disk_bytes = 1 << 20;
        let directory = tempfile::tempdir().unwrap();
        let create = format!("create -q -f qcow2 -o {options} disk.qcow2 {disk_bytes}");
        qemu::img(directory.path(), &create);
        let mut file = std::fs::read(directory.path().join("disk.qcow2")).unwrap();
        // It has more clusters than the disk needs, as after each step of its growth.
        file.resize(4 << 20, 0);
        let memory = Memory::new(file);
        memory.limit_space_with_holes(1 << 20);
        let disk = open(&memory);
        let mut model = vec![1; disk_bytes as usize];
        disk.write(0, &model[..4096]).unwrap();
        memory.leave_space(0);
        memory.use_together(together);
        // This searches all of the image.
        let error = disk.write(disk_bytes / 2, &model[..4096]).unwrap_err();
        assert!(error.is_no_space(), "{options}: {error}");
        memory.leave_space(1 << 20);
        disk.write(0, &model).unwrap();
        let low = (4 * together * 4096).min(disk_bytes / 2);
        disk.zero(0, low, ZeroMode::Discard).unwrap();
        disk.flush().unwrap();
        model[..low as usize].fill(0);
        // What is made together behind the last cluster in use is what is missing behind the tables.
        memory.leave_space(0);
        disk.write(0, &[2; 4096]).unwrap();
        model[..4096].fill(2);
        // What the first write made for its neighbours is used, and then there is nothing more to be found.
        let mut at = 4096;
        while disk.write(at as u64, &[3; 4096]).is_ok() {
            model[at..at + 4096].fill(3);
            at += 4096;
        }
        memory.record();
        for _ in 0..3 {
            let error = disk.write(at as u64, &[4; 4096]).unwrap_err();
            assert!(error.is_no_space(), "{options}: {error}");
            // What was written, given back, and what is around it.
            assert!(memory.take_events().len() <= 4, "{options}");
        }
        assert!(disk.content().unwrap() == model, "{options}");
        memory.leave_space(1 << 20);
        disk.write(at as u64, &[4; 4096]).unwrap();
        disk.chain.close().unwrap();
        assert_eq!(check(&memory).unwrap().errors, 0);
    }
}

/// A table refers to a cluster that is not counted. Its data is not taken for what a free cluster occupies.
#[test]
fn space_of_uncounted_data_is_kept() {
    if !qemu::is_there("space_of_uncounted_data_is_kept") {
        return;
    }
    const CLUSTER: usize = 65536;
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 1M");
    let memory = Memory::new(std::fs::read(directory.path().join("disk.qcow2")).unwrap());
    let disk = open(&memory);
    disk.write(0, &[1; 8 * CLUSTER]).unwrap();
    let discarded = 3 * CLUSTER as u64;
    disk.zero(0, discarded, ZeroMode::Discard).unwrap();
    disk.chain.close().unwrap();
    drop(disk);
    // The only refcount block is in the third cluster; the last cluster in use has the end of the data.
    let mut file = memory.bytes();
    let refcounts = &mut file[2 * CLUSTER..3 * CLUSTER];
    let last = refcounts.iter().rposition(|&byte| byte != 0).unwrap();
    refcounts[last] = 0;
    let memory = Memory::new(file);
    memory.limit_space_with_holes(0);
    let disk = open(&memory);
    let no_space = |at: usize| {
        let error = disk.write(at as u64, &[2; CLUSTER]).unwrap_err();
        assert!(error.is_no_space(), "{error}");
    };
    no_space(0);
    memory.leave_space(16);
    disk.write(0, &[2; CLUSTER]).unwrap();
    no_space(CLUSTER);
    let mut found = vec![0; CLUSTER];
    disk.read(7 * CLUSTER as u64, &mut found).unwrap();
    assert!(found == [1; CLUSTER]);
}
