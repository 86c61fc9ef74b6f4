//! Words of the plan: QEMU's and fio's where they have one.

/// An enum whose values are words, with the same spelling in plans, reports and messages.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// Every value, in the order in which they are shown.
            pub const ALL: &[Self] = &[$(Self::$value),+];

            /// The word for it.
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
    /// What the guest sees.
    Device {
        /// An emulated IDE disk: what QEMU gives to a plain `-drive`.
        Ide = "ide",
        /// virtio-blk in QEMU's process.
        VirtioBlk = "virtio-blk",
        /// A disk on a virtio-scsi controller of its own, in QEMU's process ("virtio-scsi-single").
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
        /// Through the host's page cache, and each write is durable when it is done.
        Writethrough = "writethrough",
        /// `O_DIRECT`, and each write is durable when it is done.
        Directsync = "directsync",
        /// Through the host's page cache, and flushes are ignored.
        Unsafe = "unsafe",
    }
}

words! {
    /// How bytes are moved on the host.
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
    /// How the disk is named on QEMU's command line.
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
    /// How fio's requests come when a rate is set.
    Arrival {
        /// One after the other, evenly.
        Linear = "linear",
        /// At random: an open loop, as independent users make it.
        Poisson = "poisson",
    }
}

words! {
    /// The driver in front of a vhost-user socket without a guest.
    Client {
        /// The virtio-blk driver of the blkio crate, asleep on its completion descriptor.
        Blkio = "blkio",
        /// A minimal driver, asleep on the call eventfd while it has nothing to do, as a guest is.
        Ring = "ring",
        /// The same driver, polling the used ring.
        RingPoll = "ring-poll",
    }
}

words! {
    /// Where the load runs.
    GuestKind {
        /// A Linux guest that is made on the spot.
        Linux = "linux",
        /// A guest of one's own, over ssh.
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
        /// Each configuration is booted once in a block, and runs all loads one after the other.
        Boots = "boots",
        /// Each load has boots of its own: the configurations take turns under one load, then under the next. Two samples
        /// that are compared are then close in time.
        Loads = "loads",
    }
}

words! {
    /// When a run ends.
    Until {
        /// When every comparison is decided: decided ones run no more.
        Decided = "decided",
        /// When all blocks of the plan have run: each sample is taken as often as every other.
        Blocks = "blocks",
    }
}

words! {
    /// What verdicts are about.
    Metric {
        /// Requests per second; at a fixed rate, the mean latency.
        Speed = "speed",
        /// CPU time of the server for each request.
        Cpu = "cpu",
    }
}

words! {
    /// Which configurations are compared with which.
    Against {
        /// Each with the first.
        First = "first",
        /// The last one with each of the others, of the same values of all axes.
        Last = "last",
        /// Each with the one before it: a ladder.
        Previous = "previous",
        /// Those that differ in one setting.
        OneFactor = "one-factor",
    }
}

words! {
    /// What a published figure says that happens.
    Expect {
        /// It gets better.
        Gain = "gain",
        /// It gets worse.
        Loss = "loss",
        /// Nothing happens.
        Equal = "equal",
    }
}

impl Rw {
    /// Whether anything is written.
    pub fn writes(self) -> bool {
        !matches!(self, Rw::RandRead | Rw::Read)
    }
}

impl Client {
    /// Whether it sleeps while it waits.
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

/// The message for a word that is not allowed: with the nearest that is.
pub fn not_one_of(text: &str, words: &[&str]) -> String {
    let all = words.join(", ");
    match nearest(text, words) {
        Some(near) => format!("'{text}' is not known; did you mean '{near}'? There are {all}"),
        None => format!("'{text}' is not known; there are {all}"),
    }
}

/// The allowed word that somebody may have meant.
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
        let said = "vhostuser-blk".parse::<Device>().unwrap_err();
        assert!(said.contains("did you mean 'vhost-user-blk'"), "{said}");
        let said = "iouring".parse::<Aio>().unwrap_err();
        assert!(said.contains("did you mean 'io_uring'"), "{said}");
        let said = "nvme".parse::<Device>().unwrap_err();
        assert!(!said.contains("did you mean"), "{said}");
        assert!(said.contains("ide, virtio-blk"), "{said}");
    }
}
