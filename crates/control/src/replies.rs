//! The replies to commands, with QEMU's names.

use block::{DetectZeroes, ThrottleLimits};
use serde_json::{Map, Value};

use crate::CommandError;
use crate::limits::{COMMAND, limit_members, put_limits, take_limits};
use crate::qapi::{Fields, Member, Object, Record, Schema};

record! {
    /// `VersionInfo`
    VersionInfo {
        /// The version of QEMU whose commands are implemented.
        qemu: VersionTriple = "qemu",
        /// The name and version of this program.
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
        id: String = "id",
        /// `vhost-user-blk`
        kind: ExportKind = "type",
        /// The exported node.
        node_name: String = "node-name",
        /// Whether the export is being removed.
        shutting_down: bool = "shutting-down",
    }
}

words! {
    /// `BlockExportType` in replies.
    ExportKind {
        /// vhost-user, with a virtio-blk device.
        VhostUserBlk = "vhost-user-blk",
        /// NBD.
        Nbd = "nbd",
    }
}

/// `BlockDeviceInfo`: a node, and the I/O limits of its disk.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockDeviceInfo {
    /// The members about the node.
    pub node: BlockNodeInfo,
    /// The I/O limits.
    pub limits: ThrottleLimits,
    /// The throttle group that the disk is a member of.
    pub group: Option<String>,
}

record! {
    /// The part of `BlockDeviceInfo` that does not concern limits.
    BlockNodeInfo {
        /// The path of the node's file.
        file: String = "file",
        node_name: Option<String> = "node-name",
        ro: bool = "ro",
        /// The kind of node: the `driver` of `blockdev-add`.
        drv: String = "drv",
        /// The number of backing files below the node.
        backing_file_depth: u64 = "backing_file_depth",
        /// Whether the node is active; false only on the destination of a migration.
        active: bool = "active",
        /// Always false.
        encrypted: bool = "encrypted",
        /// How writes of zeroes are handled.
        detect_zeroes: DetectZeroes = "detect_zeroes",
        /// The node's image.
        image: ImageInfo = "image",
        /// The disk's dirty bitmaps, if there are any.
        dirty_bitmaps: Option<Vec<BlockDirtyInfo>> = "dirty-bitmaps",
        /// The node's cache mode.
        cache: BlockdevCacheInfo = "cache",
        /// Always 0: no threshold is set.
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
    /// `BlockDirtyInfo`
    BlockDirtyInfo {
        name: Option<String> = "name",
        /// Dirty bytes.
        count: u64 = "count",
        /// Bytes of the disk for each bit.
        granularity: u32 = "granularity",
        /// Whether changes of the disk are recorded.
        recording: bool = "recording",
        /// Always false: no operation uses it exclusively.
        busy: bool = "busy",
        /// Whether it is stored when the disk is no longer in use.
        persistent: bool = "persistent",
        /// Whether it lacks changes, and can only be removed. Absent if not.
        inconsistent: Option<bool> = "inconsistent",
        /// The last backup with it that succeeded. Absent if there was none, or it may lack changes since.
        checkpoint: Option<String> = "x-ringdisk-checkpoint",
    }
}

record! {
    /// `ImageInfo`
    ImageInfo {
        /// The image's path.
        filename: String = "filename",
        /// `raw`
        format: String = "format",
        /// The size in bytes that the guest sees.
        virtual_size: u64 = "virtual-size",
        /// The bytes allocated on the host.
        actual_size: Option<u64> = "actual-size",
    }
}

record! {
    /// `BlockdevCacheInfo`
    BlockdevCacheInfo {
        /// Whether a completed write may be lost until the next flush.
        writeback: bool = "writeback",
        /// Whether I/O bypasses the page cache.
        direct: bool = "direct",
        /// Whether the guest's flushes are ignored.
        no_flush: bool = "no-flush",
    }
}

record! {
    /// `BlockStats`
    BlockStats {
        device: Option<String> = "device",
        node_name: Option<String> = "node-name",
        /// The node's I/O statistics.
        stats: BlockDeviceStats = "stats",
    }
}

record! {
    /// `BlockDeviceStats`, counted since the disk was first served. Times are sums over the requests that were made
    /// while times were measured: for two minutes after each query, or always if metrics are served.
    #[derive(Default)]
    BlockDeviceStats {
        /// Bytes read.
        rd_bytes: u64 = "rd_bytes",
        /// Bytes written.
        wr_bytes: u64 = "wr_bytes",
        /// Always 0: ringdisk has no zoned disks.
        zone_append_bytes: u64 = "zone_append_bytes",
        /// Bytes discarded.
        unmap_bytes: u64 = "unmap_bytes",
        /// Completed reads.
        rd_operations: u64 = "rd_operations",
        /// Completed writes.
        wr_operations: u64 = "wr_operations",
        /// Always 0.
        zone_append_operations: u64 = "zone_append_operations",
        /// Completed flushes.
        flush_operations: u64 = "flush_operations",
        /// Completed discards.
        unmap_operations: u64 = "unmap_operations",
        /// The total time of reads, in nanoseconds.
        rd_total_time_ns: u64 = "rd_total_time_ns",
        /// The total time of writes, in nanoseconds.
        wr_total_time_ns: u64 = "wr_total_time_ns",
        /// Always 0.
        zone_append_total_time_ns: u64 = "zone_append_total_time_ns",
        /// The total time of flushes, in nanoseconds.
        flush_total_time_ns: u64 = "flush_total_time_ns",
        /// The total time of discards, in nanoseconds.
        unmap_total_time_ns: u64 = "unmap_total_time_ns",
        /// Always 0: not measured.
        wr_highest_offset: u64 = "wr_highest_offset",
        /// Always 0: requests are not merged.
        rd_merged: u64 = "rd_merged",
        /// Always 0.
        wr_merged: u64 = "wr_merged",
        /// Always 0.
        zone_append_merged: u64 = "zone_append_merged",
        /// Always 0.
        unmap_merged: u64 = "unmap_merged",
        /// Always absent: not measured.
        idle_time_ns: Option<u64> = "idle_time_ns",
        /// Failed reads.
        failed_rd_operations: u64 = "failed_rd_operations",
        /// Failed writes.
        failed_wr_operations: u64 = "failed_wr_operations",
        /// Always 0.
        failed_zone_append_operations: u64 = "failed_zone_append_operations",
        /// Failed flushes.
        failed_flush_operations: u64 = "failed_flush_operations",
        /// Failed discards.
        failed_unmap_operations: u64 = "failed_unmap_operations",
        /// Always 0: `x-ringdisk-stats` counts invalid requests, for all kinds together.
        invalid_rd_operations: u64 = "invalid_rd_operations",
        /// Always 0.
        invalid_wr_operations: u64 = "invalid_wr_operations",
        /// Always 0.
        invalid_zone_append_operations: u64 = "invalid_zone_append_operations",
        /// Always 0.
        invalid_flush_operations: u64 = "invalid_flush_operations",
        /// Always 0.
        invalid_unmap_operations: u64 = "invalid_unmap_operations",
        /// Whether the idle time is also counted from invalid requests.
        account_invalid: bool = "account_invalid",
        /// Whether times and the idle time include failed requests.
        account_failed: bool = "account_failed",
        /// Always empty: `x-ringdisk-stats` has histograms.
        timed_stats: Vec<BlockDeviceTimedStats> = "timed_stats",
        /// Always absent, as are the next two: `x-ringdisk-stats` has the histograms.
        rd_latency_histogram: Option<BlockLatencyHistogramInfo> = "rd_latency_histogram",
        /// The latency of writes; always absent.
        wr_latency_histogram: Option<BlockLatencyHistogramInfo> = "wr_latency_histogram",
        /// The latency of flushes; always absent.
        flush_latency_histogram: Option<BlockLatencyHistogramInfo> = "flush_latency_histogram",
    }
}

record! {
    /// `BlockDeviceTimedStats`; no such statistics exist.
    BlockDeviceTimedStats {}
}

record! {
    /// `BlockLatencyHistogramInfo`: bin i counts the requests whose latency is at least boundary i-1 and less than
    /// boundary i.
    BlockLatencyHistogramInfo {
        /// The boundaries in nanoseconds, ascending; one fewer than the bins.
        boundaries: Vec<u64> = "boundaries",
        /// The number of requests in each bin.
        bins: Vec<u64> = "bins",
    }
}

record! {
    /// `IOThreadInfo`
    IoThreadInfo {
        /// The thread's id.
        id: String = "id",
        /// The kernel's thread id.
        thread_id: u32 = "thread-id",
        /// The longest time that the thread polls for guest requests before it sleeps, in nanoseconds; 0 disables
        /// polling.
        poll_max_ns: u64 = "poll-max-ns",
        /// Always 0: ringdisk measures how long to poll instead of increasing the time step by step.
        poll_grow: u64 = "poll-grow",
        /// Always 0.
        poll_shrink: u64 = "poll-shrink",
        /// The most requests that are submitted to the kernel at once; 0: the engine decides.
        aio_max_batch: u64 = "aio-max-batch",
    }
}
