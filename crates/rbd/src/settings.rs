//! The settings that decide the speed of an image, their values and their sources.

use std::fmt;

/// The source of a setting. A later variant overrides the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The library's own default.
    Default,
    /// Ceph's configuration file.
    Conf,
    /// The monitors' configuration (`ceph config set`).
    Monitors,
    /// ringdisk, where only the library's default applied.
    Ringdisk,
    /// The disk's options.
    CommandLine,
    /// The pool's own settings (`rbd config pool set`).
    Pool,
    /// The image's own settings (`rbd config image set`).
    Image,
}

impl Origin {
    /// The name that lists show.
    pub fn word(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Conf => "ceph.conf",
            Self::Monitors => "monitors",
            Self::Ringdisk => "ringdisk",
            Self::CommandLine => "command line",
            Self::Pool => "pool",
            Self::Image => "image",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A setting that is in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Ceph's name for it, or ringdisk's.
    pub name: String,
    /// The value in effect.
    pub value: String,
    /// The source of the value.
    pub origin: Origin,
    /// Sources that gave another value, with that value; the one with the highest priority is last.
    pub overridden: Vec<(Origin, String)>,
    /// What the setting decides.
    pub about: &'static str,
}

impl Setting {
    /// Records a value from `origin`. It overrides the values of earlier calls.
    pub(crate) fn set(&mut self, origin: Origin, value: &str) {
        if value != self.value {
            let before = (
                self.origin,
                std::mem::replace(&mut self.value, value.into()),
            );
            // A library default that is overridden is not worth listing.
            if before.0 != Origin::Default {
                self.overridden.push(before);
            }
            self.origin = origin;
        }
    }
}

/// The settings of librados that decide the speed of an image, and what each decides. The library's version decides
/// which of them exist.
pub(crate) const OF_CLUSTER: &[(&str, &str)] = &[
    (
        "ms_client_mode",
        "wire: crc is checked, secure is encrypted; the first that both sides have",
    ),
    ("ms_crc_data", "checksums of data on the wire, in crc mode"),
    ("auth_client_required", "how the client proves who it is"),
    (
        "ms_async_op_threads",
        "messenger threads of a connection; each wakes others for every I/O",
    ),
    (
        "librados_thread_count",
        "threads of a connection that librbd runs on",
    ),
    (
        "objecter_inflight_ops",
        "operations on their way; the thread that starts one more waits; 0 is any number",
    ),
    ("objecter_inflight_op_bytes", "bytes on their way, likewise"),
    (
        "rados_osd_op_timeout",
        "seconds until an operation fails; 0 is never",
    ),
];

/// The same for librbd. A pool or an image may have its own values for these.
pub(crate) const IMAGE_SETTINGS: &[(&str, &str)] = &[
    (
        "rbd_cache",
        "librbd's cache in memory; cache=writeback asks for it",
    ),
    (
        "rbd_cache_policy",
        "what the cache keeps back, where there is one",
    ),
    (
        "rbd_cache_writethrough_until_flush",
        "the cache keeps nothing back before the guest's first flush",
    ),
    (
        "rbd_non_blocking_aio",
        "every I/O is handed to another thread first",
    ),
    ("rbd_io_scheduler", "whether small I/Os wait to be merged"),
    (
        "rbd_disable_zero_copy_writes",
        "writes are copied, so that a guest may change them under way",
    ),
    ("rbd_read_from_replica_policy", "which copy is read"),
    (
        "rbd_discard_granularity_bytes",
        "smaller discards are left out",
    ),
];

/// The values that ringdisk sets where neither the configuration file nor the disk's options give one.
///
/// - One messenger thread and one librados thread. With the library's defaults of three and two, each I/O wakes one
///   more thread, and 4k reads at depth 32 take 1.8 times as much CPU.
/// - No librados limit on operations in flight. At such a limit librados blocks the thread that starts one more, and
///   with it all disks of the thread. [The engine](crate::RbdEngine) has its own limits, at which only the disk concerned
///   waits.
/// - No librbd scheduler. It delays writes so that others may join them, and takes a quarter of the CPU of 4k writes.
///   Instead, [the engine](crate::RbdEngine) merges adjacent operations of a batch, and none is delayed.
/// - ringdisk gives up on a cluster that does not answer after half a minute instead of five minutes.
///
/// `rbd_non_blocking_aio`, which hands each I/O to another thread, keeps its default. Without it, 4k reads take the
/// same CPU, and the I/O thread may block inside librbd, and all of its disks with it.
pub(crate) const OURS: &[(&str, &str)] = &[
    ("ms_async_op_threads", "1"),
    ("librados_thread_count", "1"),
    ("rbd_io_scheduler", "none"),
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
    ("client_mount_timeout", "30"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_source_wins_and_others_are_listed() {
        let mut it = Setting {
            name: "rbd_cache".into(),
            value: "true".into(),
            origin: Origin::Default,
            overridden: Vec::new(),
            about: "",
        };
        it.set(Origin::Conf, "true");
        assert_eq!(it.origin, Origin::Default);
        it.set(Origin::CommandLine, "false");
        assert_eq!((&*it.value, it.origin), ("false", Origin::CommandLine));
        assert!(it.overridden.is_empty());
        it.set(Origin::Image, "true");
        assert_eq!((&*it.value, it.origin), ("true", Origin::Image));
        assert_eq!(it.overridden, [(Origin::CommandLine, "false".into())]);
    }
}
