//! Images of every kind that qemu-img makes: read as qemu-img reads them, and after we have written
//! to them, sound and right in its eyes.

use std::path::Path;

use crate::support::{Disk, READ, WRITE};
use image::ZeroMode;
use testkit::images as variants;
use testkit::qemu_img as qemu;
use testkit::random::Random;

fn for_all(test: &str, mut check: impl FnMut(&variants::Variant, &Path)) {
    if !qemu::is_there(test) {
        return;
    }
    for variant in variants::ALL {
        println!("{test}: {}", variant.name);
        let directory = tempfile::tempdir().unwrap();
        variant.make(directory.path(), 1);
        check(variant, directory.path());
    }
}

fn assert_same(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(at) = (0..want.len()).find(|&at| got[at] != want[at]) {
        panic!(
            "{what}: byte {at} is {} and should be {}",
            got[at], want[at]
        );
    }
}

#[test]
fn golden_images_read_as_in_qemu_img() {
    for_all("golden_images_read_as_in_qemu_img", |variant, directory| {
        let before = std::fs::read(directory.join("disk.qcow2")).unwrap();
        let want = qemu::content(directory, "disk.qcow2", "qcow2");
        let disk = Disk::open(&directory.join("disk.qcow2"), READ).unwrap();
        assert_same(&disk.content().unwrap(), &want, variant.name);
        let after = std::fs::read(directory.join("disk.qcow2")).unwrap();
        assert!(before == after, "{}: reading has changed it", variant.name);
    });
}

#[test]
fn golden_images_are_consistent_after_writes() {
    for_all(
        "golden_images_are_consistent_after_writes",
        |variant, directory| {
            let file = directory.join("disk.qcow2");
            let mut want = qemu::content(directory, "disk.qcow2", "qcow2");
            let mut random = Random(2);
            for round in 0..3 {
                let disk = Disk::open(&file, WRITE).unwrap();
                for number in 0..150_u64 {
                    let size = want.len() as u64;
                    let (at, len) = random.range(size, disk.chain.image().unwrap().cluster_bytes());
                    let range = at as usize..(at + len) as usize;
                    match random.below(8) {
                        0 => {
                            let unmap = random.one_in(2);
                            disk.zero(at, len, ZeroMode::Zeroes { unmap }).unwrap();
                            want[range].fill(0);
                        }
                        1 => {
                            disk.zero(at, len, ZeroMode::Discard).unwrap();
                            // Zeroes or as before.
                            disk.read(at, &mut want[range]).unwrap();
                        }
                        2 => disk.flush().unwrap(),
                        _ => {
                            let data: Vec<u8> =
                                (0..len).map(|i| (i / 512 + number) as u8).collect();
                            disk.write(at, &data).unwrap();
                            want[range].copy_from_slice(&data);
                        }
                    }
                }
                assert_same(&disk.content().unwrap(), &want, variant.name);
                if round == 1 && variant.grows() {
                    let size = want.len() + (300 << 10);
                    disk.grow(size as u64).unwrap();
                    want.resize(size, 0);
                    assert_same(&disk.content().unwrap(), &want, variant.name);
                }
                disk.chain.close().unwrap();
                qemu::check(directory, "disk.qcow2", false);
                let got = qemu::content(directory, "disk.qcow2", "qcow2");
                assert_same(&got, &want, variant.name);
                if variant.has_raw_data_file() {
                    // The data file is the disk, byte for byte, whoever reads it.
                    let data = std::fs::read(directory.join("data")).unwrap();
                    assert_same(&data, &want, variant.name);
                }
            }
        },
    );
}

#[test]
fn snapshots_keep_what_they_had() {
    if !qemu::is_there("snapshots_keep_what_they_had") {
        return;
    }
    for variant in variants::ALL.iter().filter(|v| v.has_snapshots()) {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        variant.make(directory, 3);
        let all = || {
            ["one", "two", "three"].map(|name| {
                qemu::img(
                    directory,
                    &format!("convert -l {name} -O raw disk.qcow2 {name}.out"),
                );
                std::fs::read(directory.join(format!("{name}.out"))).unwrap()
            })
        };
        let before = all();
        let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
        let size = disk.chain.size();
        let mut random = Random(4);
        for _ in 0..200 {
            let (at, len) = random.range(size, 4096);
            match random.below(3) {
                0 => disk.zero(at, len, ZeroMode::Discard).unwrap(),
                _ => disk.write(at, &vec![0xee; len as usize]).unwrap(),
            }
        }
        disk.chain.close().unwrap();
        qemu::check(directory, "disk.qcow2", false);
        assert!(all() == before, "{}", variant.name);
        // And they can be gone back to, and taken away.
        qemu::img(directory, "snapshot -a two disk.qcow2");
        qemu::img(directory, "snapshot -d one disk.qcow2");
        let disk = Disk::open(&directory.join("disk.qcow2"), WRITE).unwrap();
        assert!(disk.content().unwrap() == before[1], "{}", variant.name);
        disk.write(0, &[1; 512]).unwrap();
        disk.chain.close().unwrap();
        qemu::check(directory, "disk.qcow2", false);
    }
}
