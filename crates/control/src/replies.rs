//! What commands return, with QEMU's names.

use block::{DetectZeroes, ThrottleLimits};
use serde_json::{Map, Value};

use crate::CommandError;
use crate::commands::{COMMAND, limit_members, put_limits, take_limits};
use crate::qapi::{Fields, Member, Object, Record, Schema};

record! {
    /// `VersionInfo`
    VersionInfo {
        /// The QEMU whose commands these are.
        qemu: VersionTriple = "qemu",
        /// Which program this is.
        package: String = "package",
    }
}

record! {
    /// `VersionTriple`
    VersionTriple {
        /// 10 of 10.0.2
        major: u32 = "major",
        /// 0 of 10.0.2
        minor: u32 = "minor",
        /// 2 of 10.0.2
        micro: u32 = "micro",
    }
}

record! {
    /// `BlockExportInfo`
    BlockExportInfo {
        /// Its name.
        id: String = "id",
        /// `vhost-user-blk`
        kind: ExportKind = "type",
        /// The node that is served.
        node_name: String = "node-name",
        /// Whether it is on its way out.
        shutting_down: bool = "shutting-down",
    }
}

words! {
    /// `BlockExportType` in replies.
    ExportKind {
        /// vhost-user, with a virtio-blk device.
        VhostUserBlk = "vhost-user-blk",
    }
}

/// `BlockDeviceInfo`: a node, and the limits of the disk that it is.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockDeviceInfo {
    /// The node.
    pub node: BlockNodeInfo,
    /// The limits.
    pub limits: ThrottleLimits,
    /// The throttle group that it is in.
    pub group: Option<String>,
}

record! {
    /// The part of `BlockDeviceInfo` that is not about limits.
    BlockNodeInfo {
        /// Its path.
        file: String = "file",
        /// Its name.
        node_name: Option<String> = "node-name",
        /// Whether writes are refused.
        ro: bool = "ro",
        /// What kind of node it is: the `driver` of `blockdev-add`.
        drv: String = "drv",
        /// How many backing files are below it.
        backing_file_depth: u64 = "backing_file_depth",
        /// Whether it may be used; false only on the passive side of a migration.
        active: bool = "active",
        /// Always false.
        encrypted: bool = "encrypted",
        /// What becomes of writes of zeroes.
        detect_zeroes: DetectZeroes = "detect_zeroes",
        /// The image.
        image: ImageInfo = "image",
        /// How caches are used.
        cache: BlockdevCacheInfo = "cache",
        /// Always 0: no threshold.
        write_threshold: u64 = "write_threshold",
    }
}

impl Record for BlockDeviceInfo {
    const NAME: &'static str = "BlockDeviceInfo";

    fn object(schema: &mut Schema) -> Object {
        let mut object = BlockNodeInfo::object(schema);
        object.members.extend(limit_members(schema, COMMAND, true));
        object
            .members
            .push(schema.member::<Option<String>>("group"));
        object
    }

    fn take_members(fields: &mut Fields<'_>) -> Result<Self, CommandError> {
        Ok(Self {
            node: BlockNodeInfo::take_members(fields)?,
            limits: take_limits(fields, COMMAND, true)?.0,
            group: fields.take_optional("group")?,
        })
    }

    fn put_members(&self, map: &mut Map<String, Value>) {
        self.node.put_members(map);
        put_limits(&self.limits, COMMAND, map);
        Member::put(&self.group, "group", map);
    }
}

record! {
    /// `ImageInfo`
    ImageInfo {
        /// Its path.
        filename: String = "filename",
        /// `raw`
        format: String = "format",
        /// Bytes that the guest sees.
        virtual_size: u64 = "virtual-size",
        /// Bytes that it takes up.
        actual_size: Option<u64> = "actual-size",
    }
}

record! {
    /// `BlockdevCacheInfo`
    BlockdevCacheInfo {
        /// Whether a completed write may be lost until the next flush.
        writeback: bool = "writeback",
        /// Whether I/O goes past the page cache.
        direct: bool = "direct",
        /// Whether the guest's flushes are ignored.
        no_flush: bool = "no-flush",
    }
}

record! {
    /// `BlockStats`
    BlockStats {
        /// The id of the export.
        device: Option<String> = "device",
        /// The name of the node.
        node_name: Option<String> = "node-name",
        /// What has been done.
        stats: BlockDeviceStats = "stats",
    }
}

record! {
    /// `BlockDeviceStats`: since the disk was first served. Times are sums over requests, while they are measured:
    /// for two minutes after each question, or always where metrics are served.
    #[derive(Default)]
    BlockDeviceStats {
        /// Bytes read.
        rd_bytes: u64 = "rd_bytes",
        /// Bytes written.
        wr_bytes: u64 = "wr_bytes",
        /// Always 0: there are no zoned disks.
        zone_append_bytes: u64 = "zone_append_bytes",
        /// Bytes discarded.
        unmap_bytes: u64 = "unmap_bytes",
        /// Reads done.
        rd_operations: u64 = "rd_operations",
        /// Writes done.
        wr_operations: u64 = "wr_operations",
        /// Always 0.
        zone_append_operations: u64 = "zone_append_operations",
        /// Flushes done.
        flush_operations: u64 = "flush_operations",
        /// Discards done.
        unmap_operations: u64 = "unmap_operations",
        /// Time in reads, in nanoseconds.
        rd_total_time_ns: u64 = "rd_total_time_ns",
        /// Time in writes, in nanoseconds.
        wr_total_time_ns: u64 = "wr_total_time_ns",
        /// Always 0.
        zone_append_total_time_ns: u64 = "zone_append_total_time_ns",
        /// Time in flushes, in nanoseconds.
        flush_total_time_ns: u64 = "flush_total_time_ns",
        /// Time in discards, in nanoseconds.
        unmap_total_time_ns: u64 = "unmap_total_time_ns",
        /// Always 0: not known.
        wr_highest_offset: u64 = "wr_highest_offset",
        /// Always 0: none are merged.
        rd_merged: u64 = "rd_merged",
        /// Always 0.
        wr_merged: u64 = "wr_merged",
        /// Always 0.
        zone_append_merged: u64 = "zone_append_merged",
        /// Always 0.
        unmap_merged: u64 = "unmap_merged",
        /// Always absent: not known.
        idle_time_ns: Option<u64> = "idle_time_ns",
        /// Reads that failed.
        failed_rd_operations: u64 = "failed_rd_operations",
        /// Writes that failed.
        failed_wr_operations: u64 = "failed_wr_operations",
        /// Always 0.
        failed_zone_append_operations: u64 = "failed_zone_append_operations",
        /// Flushes that failed.
        failed_flush_operations: u64 = "failed_flush_operations",
        /// Discards that failed.
        failed_unmap_operations: u64 = "failed_unmap_operations",
        /// Always 0: what was no request is counted in `x-ringdisk-stats`, for all kinds together.
        invalid_rd_operations: u64 = "invalid_rd_operations",
        /// Always 0.
        invalid_wr_operations: u64 = "invalid_wr_operations",
        /// Always 0.
        invalid_zone_append_operations: u64 = "invalid_zone_append_operations",
        /// Always 0.
        invalid_flush_operations: u64 = "invalid_flush_operations",
        /// Always 0.
        invalid_unmap_operations: u64 = "invalid_unmap_operations",
        /// Whether the idle time counts from invalid requests too.
        account_invalid: bool = "account_invalid",
        /// Whether times and the idle time count failed requests too.
        account_failed: bool = "account_failed",
        /// Always empty: `x-ringdisk-stats` has histograms.
        timed_stats: Vec<BlockDeviceTimedStats> = "timed_stats",
        /// Always absent, as the next two: `x-ringdisk-stats` has them.
        rd_latency_histogram: Option<BlockLatencyHistogramInfo> = "rd_latency_histogram",
        /// How long writes took; absent.
        wr_latency_histogram: Option<BlockLatencyHistogramInfo> = "wr_latency_histogram",
        /// How long flushes took; absent.
        flush_latency_histogram: Option<BlockLatencyHistogramInfo> = "flush_latency_histogram",
    }
}

record! {
    /// `BlockDeviceTimedStats`; there are none.
    BlockDeviceTimedStats {}
}

record! {
    /// `BlockLatencyHistogramInfo`: bin i counts what took from boundary i-1 up to less than boundary i.
    BlockLatencyHistogramInfo {
        /// Nanoseconds, ascending; one fewer than bins.
        boundaries: Vec<u64> = "boundaries",
        /// Requests in each.
        bins: Vec<u64> = "bins",
    }
}

record! {
    /// `IOThreadInfo`
    IoThreadInfo {
        /// Its name.
        id: String = "id",
        /// The kernel's id of the thread.
        thread_id: u32 = "thread-id",
        /// Longest look-out for the guest before the thread sleeps, in nanoseconds; 0: none.
        poll_max_ns: u64 = "poll-max-ns",
        /// 0: ringdisk measures how long to look out, and does not grow it step by step.
        poll_grow: u64 = "poll-grow",
        /// 0
        poll_shrink: u64 = "poll-shrink",
        /// Most requests that are handed to the kernel at once; 0: as the engine likes.
        aio_max_batch: u64 = "aio-max-batch",
    }
}
