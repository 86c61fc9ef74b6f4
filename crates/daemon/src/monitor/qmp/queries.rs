//! What QMP's query commands return.

use std::sync::Arc;

use block::Backing;
use control::{
    BlockDeviceInfo, BlockDeviceStats, BlockExportInfo, BlockNodeInfo, BlockStats,
    BlockdevCacheInfo, ExportKind, ImageInfo, IoThreadInfo,
};
use datapath::DiskStats;
use image::Format;
use serde_json::{Value, json};

use crate::config::{ThreadSpec, limits};
use crate::server::iothreads::NamedThread;
use crate::server::{DiskView, Server};

pub(super) fn exports(server: &Server) -> Vec<BlockExportInfo> {
    let mut exports = Vec::new();
    server.each_disk(|disk| {
        exports.extend(disk.export.map(|export| BlockExportInfo {
            id: export.id.clone(),
            kind: ExportKind::VhostUserBlk,
            node_name: disk.node.name().to_owned(),
            shutting_down: false,
        }));
    });
    exports.extend(server.nbd.exports().iter().map(|export| BlockExportInfo {
        id: export.id.clone(),
        kind: ExportKind::Nbd,
        node_name: export.node.clone(),
        shutting_down: false,
    }));
    exports
}

pub(super) fn nbd(server: &Server) -> Value {
    let waiting = server.waiting_exports().into_iter();
    let waiting = waiting.map(|export| {
        json!({
            "id": export.id,
            "disk": export.node,
            "name": export.name,
            "description": export.description,
            "writable": export.writable,
            "bitmaps": export.bitmaps,
            "waiting": true,
        })
    });
    let exports = server.nbd.exports();
    let exports = exports.iter().map(|export| {
        json!({
            "id": export.id,
            "disk": export.device.disk.name,
            "name": export.name,
            "description": export.description,
            "writable": export.writable,
            "bitmaps": export.bitmaps,
            "size": export.device.disk.size(),
            "limits": limits::pairs(&export.limits.limits())
                .into_iter()
                .map(|(key, n)| (key.to_owned(), n.into()))
                .collect::<serde_json::Map<_, _>>(),
            "clients": export.device.clients.count(export.number),
        })
    });
    let address = server.nbd.address().map(|address| address.to_string());
    json!({ "address": address, "tls": server.nbd.has_tls(), "exports": exports.chain(waiting).collect::<Vec<_>>() })
}

pub(super) fn block_stats(server: &Arc<Server>, nodes: bool) -> Vec<BlockStats> {
    server.watch();
    let mut all = Vec::new();
    server.each_disk(|disk| {
        let export = disk.export;
        if export.is_some() || nodes {
            all.push(BlockStats {
                device: export.filter(|_| !nodes).map(|export| export.id.clone()),
                node_name: Some(disk.node.name().to_owned()),
                stats: export.map_or_else(Default::default, |export| {
                    block_device_stats(&export.disk.stats())
                }),
            });
        }
    });
    all
}

fn block_device_stats(stats: &DiskStats) -> BlockDeviceStats {
    let DiskStats {
        read,
        write,
        flush,
        discard,
        write_zeroes,
        ..
    } = stats;
    // As in QEMU, where a write of zeroes is a write.
    BlockDeviceStats {
        rd_bytes: read.bytes,
        wr_bytes: write.bytes + write_zeroes.bytes,
        unmap_bytes: discard.bytes,
        rd_operations: read.operations,
        wr_operations: write.operations + write_zeroes.operations,
        flush_operations: flush.operations,
        unmap_operations: discard.operations,
        rd_total_time_ns: read.latency.total.sum_ns(),
        wr_total_time_ns: write.latency.total.sum_ns() + write_zeroes.latency.total.sum_ns(),
        flush_total_time_ns: flush.latency.total.sum_ns(),
        unmap_total_time_ns: discard.latency.total.sum_ns(),
        failed_rd_operations: read.errors,
        failed_wr_operations: write.errors + write_zeroes.errors,
        failed_flush_operations: flush.errors,
        failed_unmap_operations: discard.errors,
        account_failed: true,
        ..BlockDeviceStats::default()
    }
}

pub(super) fn iothreads(server: &Server) -> Vec<IoThreadInfo> {
    let info = |(thread, spec): (NamedThread, ThreadSpec)| IoThreadInfo {
        id: thread.id,
        thread_id: thread.thread.thread_id(),
        poll_max_ns: spec.polling.max.as_nanos() as u64,
        // Adaptive polling follows an average; it neither grows nor shrinks in steps.
        poll_grow: 0,
        poll_shrink: 0,
        aio_max_batch: 0,
    };
    server.threads.running().into_iter().map(info).collect()
}

pub(super) fn node_info(server: &Server, disk: &DiskView<'_>) -> BlockDeviceInfo {
    let node = disk.node;
    let exported = disk
        .export
        .map(|export| server.nbd.bitmaps_of(&export.device));
    let exported = exported.unwrap_or_default();
    let cache = disk.cache();
    BlockDeviceInfo {
        node: BlockNodeInfo {
            file: node.filename.clone(),
            node_name: Some(node.name().to_owned()),
            ro: node.spec.read_only,
            drv: match (node.format, node.backing()) {
                (Format::Qcow2, _) => "qcow2",
                (Format::Raw, None) => "null-co",
                (Format::Raw, Some(Backing::File)) => "file",
                (Format::Raw, Some(Backing::BlockDevice)) => "host_device",
            }
            .into(),
            backing_file_depth: node.depth() as u64,
            active: true,
            encrypted: false,
            detect_zeroes: node.spec.detect_zeroes,
            image: ImageInfo {
                filename: node.filename.clone(),
                format: node.format.to_string(),
                virtual_size: disk.size(),
                actual_size: node.allocated(),
            },
            dirty_bitmaps: super::bitmaps::info(node, &exported),
            cache: BlockdevCacheInfo {
                writeback: match disk.export {
                    Some(export) => export.disk.write_cache(),
                    None => cache.write_cache(),
                },
                direct: cache.direct(),
                no_flush: !cache.flushes(),
            },
            write_threshold: 0,
        },
        limits: *disk.limits,
        group: disk.group.map(str::to_owned),
    }
}
