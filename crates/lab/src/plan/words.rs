//! The words of a plan. Where QEMU or fio have a word, it is the same.

/// An enum whose values are words, with the same spelling in plans, reports and messages.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// All values, in the order of messages.
            pub const ALL: &[Self] = &[$(Self::$value),+];

            /// The word of a value.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|value| value.word() == text);
                found.copied().ok_or_else(|| {
                    let words: Vec<_> = Self::ALL.iter().map(|value| value.word()).collect();
                    $crate::plan::words::not_one_of(text, &words)
                })
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = <String as serde::Deserialize>::deserialize(deserializer)?;
                word.parse().map_err(serde::de::Error::custom)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// The guest's device.
    Device {
        /// An emulated IDE disk: what QEMU gives to a plain `-drive`.
        Ide = "ide",
        /// virtio-blk in QEMU's process.
        VirtioBlk = "virtio-blk",
        /// A disk with its own virtio-scsi controller in QEMU's process ("virtio-scsi-single").
        VirtioScsi = "virtio-scsi",
        /// virtio-blk served by another process.
        VhostUserBlk = "vhost-user-blk",
        /// No guest: fio on the host.
        Host = "host",
    }
}

words! {
    /// QEMU's cache modes.
    Cache {
        /// `O_DIRECT`.
        None = "none",
        /// Through the host's page cache.
        Writeback = "writeback",
        /// Through the host's page cache; a completed write is durable.
        Writethrough = "writethrough",
        /// `O_DIRECT`; a completed write is durable.
        Directsync = "directsync",
        /// Through the host's page cache; flushes are ignored.
        Unsafe = "unsafe",
    }
}

words! {
    /// The host's I/O interface.
    Aio {
        /// A pool of threads.
        Threads = "threads",
        /// Linux AIO.
        Native = "native",
        /// io_uring.
        IoUring = "io_uring",
    }
}

words! {
    /// The image's format.
    Format {
        /// No format.
        Raw = "raw",
        /// QEMU's own.
        Qcow2 = "qcow2",
    }
}

words! {
    /// QEMU's machine types.
    Machine {
        /// PCI Express.
        Q35 = "q35",
        /// i440FX, with the IDE controller that guests find without AHCI.
        Pc = "pc",
    }
}

words! {
    /// The guest's I/O scheduler.
    Scheduler {
        /// What the guest's kernel chooses.
        Default = "default",
        /// None.
        None = "none",
        /// mq-deadline.
        Deadline = "mq-deadline",
        /// kyber.
        Kyber = "kyber",
        /// bfq.
        Bfq = "bfq",
    }
}

words! {
    /// A file system in the guest.
    FileSystem {
        /// None: the load uses the disk itself.
        None = "none",
        /// ext4.
        Ext4 = "ext4",
        /// XFS.
        Xfs = "xfs",
    }
}

words! {
    /// The option that describes the disk on QEMU's command line.
    Syntax {
        /// `-blockdev`.
        Blockdev = "blockdev",
        /// `-drive`.
        Drive = "drive",
    }
}

words! {
    /// fio's directions.
    Rw {
        /// Random reads.
        RandRead = "randread",
        /// Random writes.
        RandWrite = "randwrite",
        /// Sequential reads.
        Read = "read",
        /// Sequential writes.
        Write = "write",
        /// Random reads and writes, mixed.
        RandRw = "randrw",
        /// Sequential reads and writes, mixed.
        ReadWrite = "rw",
    }
}

words! {
    /// The distances between requests of a rate.
    Arrival {
        /// Equal distances.
        Linear = "linear",
        /// Random distances, as between the requests of independent users.
        Poisson = "poisson",
    }
}

words! {
    /// The driver in front of a vhost-user socket without a guest.
    Client {
        /// The virtio-blk driver of the blkio crate; it sleeps on its completion descriptor.
        Blkio = "blkio",
        /// A minimal driver; it sleeps on the call eventfd while it waits, as a guest does.
        Ring = "ring",
        /// The same driver, polling the used ring.
        RingPoll = "ring-poll",
    }
}

words! {
    /// Where the load runs.
    GuestKind {
        /// A Linux guest that the lab makes.
        Linux = "linux",
        /// A guest of the user's, over ssh.
        Ssh = "ssh",
        /// No guest: fio on the host.
        None = "none",
    }
}

words! {
    /// The kind of virtqueue.
    RingKind {
        /// Descriptor table, available ring, used ring.
        Split = "split",
        /// One ring (virtio 1.1).
        Packed = "packed",
    }
}

words! {
    /// What a block repeats for each configuration.
    Interleave {
        /// Each configuration boots once in a block, and runs all loads one after the other.
        Boots = "boots",
        /// Each load has its own boots: all configurations run one load, and then the next. Samples that are compared are
        /// therefore close in time.
        Loads = "loads",
    }
}

words! {
    /// When a run ends.
    Until {
        /// When every comparison is decided. Decided ones do not run again.
        Decided = "decided",
        /// When all blocks of the plan have run. All cells have the same number of samples.
        Blocks = "blocks",
    }
}

words! {
    /// The figure of the verdicts.
    Metric {
        /// Requests per second; at a fixed rate, the mean latency.
        Speed = "speed",
        /// The server's CPU time per request.
        Cpu = "cpu",
    }
}

words! {
    /// The rule for comparisons.
    Against {
        /// Each with the first.
        First = "first",
        /// The last one with each of the others that has the same values of all axes.
        Last = "last",
        /// Each with the one before it: a ladder.
        Previous = "previous",
        /// Configurations that differ in one setting.
        OneFactor = "one-factor",
        /// Each with the first, and those that differ in one setting.
        FirstAndOneFactor = "first-and-one-factor",
    }
}

words! {
    /// The result that a published figure predicts.
    Expect {
        /// A gain.
        Gain = "gain",
        /// A loss.
        Loss = "loss",
        /// No difference.
        Equal = "equal",
    }
}

words! {
    /// The storage that a published figure is about.
    StorageKind {
        /// Files on a local or network file system.
        File = "file",
        /// Images in a Ceph cluster.
        Rbd = "rbd",
        /// Block devices.
        Device = "device",
    }
}

impl Rw {
    /// Whether it writes.
    pub fn writes(self) -> bool {
        !matches!(self, Rw::RandRead | Rw::Read)
    }
}

impl FileSystem {
    /// The smallest disk in bytes that has room for it and for a file to measure; `None` without a file system.
    pub fn disk_min(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Ext4 => Some(64 << 20),
            // mkfs.xfs refuses less than 300 MiB.
            Self::Xfs => Some(512 << 20),
        }
    }
}

impl Client {
    /// Whether the client sleeps while it waits.
    pub fn sleeps(self) -> bool {
        self != Self::RingPoll
    }
}

impl Cache {
    /// Whether the page cache is bypassed.
    pub fn direct(self) -> bool {
        matches!(self, Cache::None | Cache::Directsync)
    }
}

/// The message for an unknown word, with the nearest known one.
pub fn not_one_of(text: &str, words: &[&str]) -> String {
    let all = words.join(", ");
    match nearest(text, words) {
        Some(near) => format!("'{text}' is not known; did you mean '{near}'? There are {all}"),
        None => format!("'{text}' is not known; there are {all}"),
    }
}

/// The nearest known word, if it is near enough for a typing error.
fn nearest<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    let lower = text.to_lowercase().replace('_', "-");
    let distance = |word: &str| {
        let word = word.replace('_', "-");
        match word.starts_with(&lower) || lower.starts_with(&word) {
            true if !lower.is_empty() => 1,
            _ => strsim::damerau_levenshtein(&lower, &word),
        }
    };
    let near = words.iter().map(|word| (distance(word), *word)).min()?;
    (near.0 <= 1 + lower.len() / 3).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_offered_only_if_it_is_near() {
        let error = "vhostuser-blk".parse::<Device>().unwrap_err();
        assert!(error.contains("did you mean 'vhost-user-blk'"), "{error}");
        let error = "iouring".parse::<Aio>().unwrap_err();
        assert!(error.contains("did you mean 'io_uring'"), "{error}");
        let error = "nvme".parse::<Device>().unwrap_err();
        assert!(!error.contains("did you mean"), "{error}");
        assert!(error.contains("ide, virtio-blk"), "{error}");
    }
}
