//! The steps of a case. A step that does not apply does nothing, so any list of steps can be run.

use testkit::random::Random;

pub const DISKS: usize = 10;

/// Disks on a file system that can be filled.
pub const ON_SMALL: [usize; 2] = [6, 9];

/// One operation. Disks are numbers; files and sockets are numbered in order of creation.
#[derive(Clone, Debug)]
pub enum Step {
    /// `throttle` with this many operations per second or without a limit, and in the group or not.
    Throttle {
        disk: usize,
        iops: u32,
        group: bool,
    },
    /// Grow by this many MiB.
    Resize {
        disk: usize,
        mib: u64,
    },
    /// The front-end reconnects with everything in flight.
    Reconnect {
        disk: usize,
    },
    /// After the VM has stopped, or with `--force` while it runs.
    Detach {
        disk: usize,
        force: bool,
    },
    Attach {
        disk: usize,
    },
    /// Move to a copy.
    Replace {
        disk: usize,
        qcow2: bool,
    },
    /// Move to a new overlay.
    Snapshot {
        disk: usize,
    },
    /// Its file is renamed, and ringdisk is told; then another file may take the old name.
    Rename {
        disk: usize,
        decoy: bool,
    },
    /// The same with a hard link.
    Link {
        disk: usize,
        decoy: bool,
    },
    /// `reload` of a configuration with these changes.
    Reload {
        edits: Vec<(usize, Edit)>,
    },
    /// The same changes, with `kill -9` and a start instead of a reload.
    KillAndEdit {
        edits: Vec<(usize, Edit)>,
    },
    /// `reload` of an invalid configuration: nothing changes.
    BadReload {
        disk: usize,
        bad: Bad,
    },
    /// The sockets of a disk and of the control interface are removed, and SIGHUP recreates them.
    RemoveSockets {
        disk: usize,
    },
    Upgrade,
    /// An upgrade while the file of a disk is renamed: it is refused, or the disk continues.
    UpgradeWithout {
        disk: usize,
    },
    /// `kill -9`, and the same command again.
    Kill,
    /// SIGTERM, and the same command again.
    Stop,
    /// The file system is full for a while, during an operation on another disk.
    Full {
        disk: usize,
        then: Box<Step>,
    },
    /// A file size limit for a while, during an operation that may fail.
    FileSize {
        mib: u64,
        then: Box<Step>,
    },
    /// A limit of this many more descriptors for a while, during an operation that may fail.
    Descriptors {
        more: u64,
        then: Box<Step>,
    },
}

/// A change to a disk's configuration.
#[derive(Clone, Debug)]
pub enum Edit {
    Limit(u32),
    Group(bool),
    Serial(u32),
    /// Another socket path.
    Socket,
    /// Swap the sockets of two disks.
    SwapSockets(usize),
    /// Use a copy.
    File,
    /// The same file under another name.
    Rename,
    Remove,
    Add,
}

/// An error in a configuration.
#[derive(Clone, Debug)]
pub enum Bad {
    Key,
    /// A new disk without a file.
    MissingFile,
    /// A new disk with this disk's socket.
    SameSocket,
    /// A socket path for this disk at which something else exists.
    NoSocket,
    NoGroup,
}

/// The steps that follow from a seed.
pub fn generate(seed: u64) -> Vec<Step> {
    let mut random = Random(seed);
    let count = 15 + random.below(30);
    (0..count).map(|_| step(&mut random)).collect()
}

fn step(random: &mut Random) -> Step {
    match random.below(100) {
        0..8 => Step::Reload {
            edits: edits(random),
        },
        8..12 => Step::KillAndEdit {
            edits: edits(random),
        },
        12..17 => Step::BadReload {
            disk: disk(random),
            bad: match random.below(5) {
                0 => Bad::Key,
                1 => Bad::MissingFile,
                2 => Bad::SameSocket,
                3 => Bad::NoSocket,
                _ => Bad::NoGroup,
            },
        },
        17..23 => Step::Upgrade,
        23..25 => Step::UpgradeWithout { disk: disk(random) },
        25..27 => Step::RemoveSockets { disk: disk(random) },
        27..32 => Step::Kill,
        32..35 => Step::Stop,
        35..39 => Step::Full {
            disk: ON_SMALL[random.below(2) as usize],
            then: Box::new(operation_during_shortage(random)),
        },
        39..43 => Step::FileSize {
            mib: 1 + random.below(4),
            then: Box::new(operation_during_shortage(random)),
        },
        43..48 => Step::Descriptors {
            more: 2 + random.below(30),
            then: Box::new(operation_during_shortage(random)),
        },
        _ => disk_operation(random),
    }
}

/// An operation during a shortage.
fn operation_during_shortage(random: &mut Random) -> Step {
    match random.below(8) {
        0 => Step::Kill,
        1 => Step::Upgrade,
        2 => Step::Stop,
        _ => disk_operation(random),
    }
}

/// An operation on one disk.
fn disk_operation(random: &mut Random) -> Step {
    let disk = disk(random);
    match random.below(60) {
        0..8 => Step::Throttle {
            disk,
            iops: limit(random),
            group: random.one_in(3),
        },
        8..13 => Step::Resize {
            disk,
            mib: 1 + random.below(3),
        },
        13..17 => Step::Reconnect { disk },
        17..25 => Step::Detach {
            disk,
            force: random.one_in(3),
        },
        25..35 => Step::Attach { disk },
        35..42 => Step::Replace {
            disk,
            qcow2: random.one_in(2),
        },
        42..48 => Step::Snapshot { disk },
        48..54 => Step::Rename {
            disk,
            decoy: random.one_in(2),
        },
        _ => Step::Link {
            disk,
            decoy: random.one_in(2),
        },
    }
}

/// A few changes, mostly to disks that are configured initially.
fn edits(random: &mut Random) -> Vec<(usize, Edit)> {
    let count = 1 + random.below(4);
    let edits = (0..count).map(|_| {
        if random.one_in(6) {
            (disk(random), edit(random))
        } else {
            (3 + random.below(4) as usize, edit(random))
        }
    });
    edits.collect()
}

fn edit(random: &mut Random) -> Edit {
    match random.below(20) {
        0..4 => Edit::Limit(limit(random)),
        4..6 => Edit::Group(random.one_in(2)),
        6..8 => Edit::Serial(random.below(100) as u32),
        8..10 => Edit::Socket,
        10..12 => Edit::SwapSockets(3 + random.below(4) as usize),
        12..14 => Edit::File,
        14..16 => Edit::Rename,
        16..17 => Edit::Remove,
        _ => Edit::Add,
    }
}

fn disk(random: &mut Random) -> usize {
    random.below(DISKS as u64) as usize
}

fn limit(random: &mut Random) -> u32 {
    if random.one_in(2) {
        0
    } else {
        200 + random.below(20_000) as u32
    }
}
