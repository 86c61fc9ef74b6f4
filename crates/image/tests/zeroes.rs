//! Zeroes written to parts of clusters: what is data afterwards, here and after the same in QEMU.

use std::fs;

use crate::support::{Disk, WRITE};
use image::ZeroMode;
use testkit::qemu_img as qemu;
use testkit::random::Random;

const SIZE: u64 = 4 << 20;

/// What is done to a disk, by QEMU and by us.
enum Step {
    Write(u64, u64),
    Zero(u64, u64, bool),
    Discard(u64, u64),
}

impl Step {
    fn command(&self) -> String {
        match *self {
            Step::Write(at, len) => format!("write -q -P 7 {at} {len}"),
            Step::Zero(at, len, false) => format!("write -q -z {at} {len}"),
            Step::Zero(at, len, true) => format!("write -q -z -u {at} {len}"),
            Step::Discard(at, len) => format!("discard -q {at} {len}"),
        }
    }

    fn run(&self, disk: &Disk) {
        let done = match *self {
            Step::Write(at, len) => disk.write(at, &vec![7; len as usize]),
            Step::Zero(at, len, unmap) => disk.zero(at, len, ZeroMode::Zeroes { unmap }),
            Step::Discard(at, len) => disk.zero(at, len, ZeroMode::Discard),
        };
        done.unwrap();
    }
}

/// Mostly zeroes, from and to anywhere, over ranges that others have touched.
fn steps(seed: u64) -> Vec<Step> {
    let mut random = Random(seed);
    let mut steps = Vec::new();
    for _ in 0..60 {
        let at = random.below(SIZE / 512) * 512;
        let longest = [4096, 40_960, 300_000][random.below(3) as usize];
        let len = (random.below(longest) + 512).next_multiple_of(512);
        let len = len.min(SIZE - at);
        steps.push(match random.below(10) {
            0 => Step::Write(at, len),
            // Of a part of a cluster, QEMU may keep what we give up.
            1 => Step::Discard(at & !0xffff, (len + 0xffff) & !0xffff),
            n => Step::Zero(at, len, n % 2 == 0),
        });
    }
    steps
}

/// The same steps by QEMU and by us: the same bytes, and the same of them data.
#[test]
fn zeroes_become_data_only_where_qemu_writes_data() {
    if !qemu::is_there("zeroes_become_data_only_where_qemu_writes_data") {
        return;
    }
    for (options, base) in [
        ("cluster_size=64k", None),
        ("cluster_size=4k", None),
        ("cluster_size=64k", Some("cluster_size=64k")),
        ("cluster_size=64k", Some("raw")),
        ("cluster_size=2M", Some("cluster_size=64k")),
        ("cluster_size=64k,extended_l2=on", None),
        ("cluster_size=64k,extended_l2=on", Some("cluster_size=64k")),
        ("cluster_size=16k,extended_l2=on", Some("raw")),
    ] {
        for seed in 1..5 {
            let directory = tempfile::tempdir().unwrap();
            let directory = directory.path();
            let what = format!("{options} on {base:?}, seed {seed}");
            let mut create = format!("create -q -f qcow2 -o {options}");
            if let Some(base) = base {
                // Its clusters are full of something, or not there: whether there are zeroes in one is a matter of
                // looking, and QEMU does not look.
                let (format, options) = match base {
                    "raw" => ("raw", String::new()),
                    options => ("qcow2", format!("-o {options}")),
                };
                // Shorter than the disk.
                let make = format!("create -q -f {format} {options} base {}", SIZE - (1 << 20));
                qemu::img(directory, &make);
                let writes = [
                    "write -q -P 5 0 64k",
                    "write -q -P 5 256k 512k",
                    "write -q -P 5 1792k 64k",
                ];
                let writes = writes.map(str::to_owned);
                qemu::io(directory, "base", &["-f", format], &writes);
                create += &format!(" -b base -F {format}");
            }
            qemu::img(directory, &format!("{create} ours.qcow2 {SIZE}"));
            let compressed = [
                "write -q -c -P 3 2M 64k".to_owned(),
                "write -q -P 4 1088k 64k".to_owned(),
            ];
            if options == "cluster_size=64k" {
                qemu::io(directory, "ours.qcow2", &["-f", "qcow2"], &compressed);
                qemu::img(directory, "snapshot -c kept ours.qcow2");
            }
            fs::copy(directory.join("ours.qcow2"), directory.join("theirs.qcow2")).unwrap();

            let steps = steps(seed);
            let commands: Vec<_> = steps.iter().map(Step::command).collect();
            let open = ["-f", "qcow2", "-d", "unmap"];
            qemu::io(directory, "theirs.qcow2", &open, &commands);
            let disk = Disk::open(&directory.join("ours.qcow2"), WRITE).unwrap();
            steps.iter().for_each(|step| step.run(&disk));
            disk.chain.close().unwrap();
            drop(disk);

            qemu::check(directory, "ours.qcow2", false);
            let content = |file| qemu::content(directory, file, "qcow2");
            assert!(content("ours.qcow2") == content("theirs.qcow2"), "{what}");
            let data = |file| qemu::data(directory, file);
            assert_eq!(data("ours.qcow2"), data("theirs.qcow2"), "{what}");
        }
    }
}
