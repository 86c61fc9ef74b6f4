use std::path::PathBuf;

use serde_json::Value;

use super::BlockDirtyBitmapOrStr;
use crate::CommandError;
use crate::qapi::{ArgumentPath, Id, Qapi, Schema};

union! {
    /// `BlockExportOptions`: how to export a block node.
    BlockExportOptions {
        id: Id = "id",
        /// The node to export.
        node_name: String = "node-name",
        /// Whether the guest may write; false if absent.
        writable: Option<bool> = "writable",
        /// Whether a completed write is on stable storage; false if absent.
        writethrough: Option<bool> = "writethrough",
        /// The I/O threads that serve the export; ringdisk chooses if absent.
        iothread: Option<BlockExportIothreads> = "iothread",
        /// Whether the export must stay on these I/O threads; it always does.
        fixed_iothread: Option<bool> = "fixed-iothread",
    }
    /// `BlockExportType`: the protocol.
    kind: BlockExportType = "type" {
        /// vhost-user, with a virtio-blk device.
        VhostUserBlk(BlockExportOptionsVhostUserBlk) = "vhost-user-blk",
        /// NBD, at the address of `nbd-server-start`.
        Nbd(BlockExportOptionsNbd) = "nbd",
    }
}

record! {
    /// `BlockExportOptionsVhostUserBlk`
    BlockExportOptionsVhostUserBlk {
        /// The address to listen on.
        addr: SocketAddress = "addr",
        /// The logical block size in bytes; 512 if absent.
        logical_block_size: Option<u64> = "logical-block-size",
        /// The largest number of virtqueues; 1 if absent.
        num_queues: Option<u16> = "num-queues",
    }
}

record! {
    /// `BlockExportOptionsNbd`
    BlockExportOptionsNbd {
        /// The name that clients use; the name of the node if absent.
        name: Option<String> = "name",
        /// A description for people.
        description: Option<String> = "description",
        /// Dirty bitmaps of the disk, each of which clients see as `qemu:dirty-bitmap:NAME`.
        bitmaps: Option<Vec<BlockDirtyBitmapOrStr>> = "bitmaps",
        /// Limit of bytes per second, of all clients of the export together.
        bps: Option<u64> = "x-ringdisk-bps",
        /// Limit of operations per second, of all clients of the export together.
        iops: Option<u64> = "x-ringdisk-iops",
    }
}

record! {
    /// Arguments of `nbd-server-start`.
    NbdServerStart {
        /// The address to listen on.
        addr: SocketAddressLegacy = "addr",
        /// The id of a `tls-creds-x509`: clients must use TLS with its certificates.
        tls_creds: Option<String> = "tls-creds",
        /// The limit of connections. ringdisk has one of its own, and takes no other.
        max_connections: Option<u32> = "max-connections",
    }
}

union! {
    /// `SocketAddressLegacy`
    SocketAddressLegacy {}
    /// `SocketAddressLegacyType`
    kind: SocketAddressLegacyType = "type" {
        /// A Unix socket.
        Unix(UnixSocketAddressWrapper) = "unix",
        /// TCP.
        Inet(InetSocketAddressWrapper) = "inet",
    }
}

record! {
    /// `UnixSocketAddressWrapper`
    UnixSocketAddressWrapper {
        data: UnixSocketAddress = "data",
    }
}

record! {
    /// `InetSocketAddressWrapper`
    InetSocketAddressWrapper {
        data: InetSocketAddress = "data",
    }
}

record! {
    /// `InetSocketAddress`
    InetSocketAddress {
        /// An IP address.
        host: String = "host",
        /// A port number.
        port: String = "port",
    }
}

alternate! {
    /// `BlockExportIothreads`
    BlockExportIothreads = "BlockExportIothreads" {
        /// One I/O thread for all virtqueues.
        Single(String) if is_string,
        /// Several I/O threads; the virtqueues are distributed over them.
        Multi(Vec<String>) if is_array,
    }
}

impl BlockExportIothreads {
    /// The ids of the I/O threads.
    pub fn ids(&self) -> &[String] {
        match self {
            Self::Single(id) => std::slice::from_ref(id),
            Self::Multi(ids) => ids,
        }
    }
}

union! {
    /// `SocketAddress`
    SocketAddress {}
    /// `SocketAddressType`
    kind: SocketAddressType = "type" {
        /// A Unix socket.
        Unix(UnixSocketAddress) = "unix",
    }
}

impl SocketAddress {
    /// The path of the socket to listen on.
    pub fn path(&self) -> &PathBuf {
        let SocketAddressType::Unix(address) = &self.kind;
        &address.path.0
    }
}

record! {
    /// `UnixSocketAddress`
    UnixSocketAddress {
        /// The path of the socket.
        path: SocketPath = "path",
    }
}

/// A path that is valid for a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPath(pub PathBuf);

impl SocketPath {
    /// The longest path in bytes: `sockaddr_un` has 108 bytes, the last of which is a zero.
    pub const BYTES_MAX: usize = 107;
}

impl Qapi for SocketPath {
    fn describe(schema: &mut Schema) -> String {
        String::describe(schema)
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        let text = String::from_json(value, at)?;
        match text.len() {
            0 => Err(at.refused("is empty; the path of a socket is needed")),
            _ if text.contains('\0') => Err(at.refused("a path has no zero byte inside")),
            n if n > Self::BYTES_MAX => Err(at.refused(format!(
                "has {n} bytes, and the path of a socket has at most {}",
                Self::BYTES_MAX
            ))),
            _ => Ok(Self(text.into())),
        }
    }

    fn to_json(&self) -> Value {
        // The path was made from a string, so nothing is lost.
        self.0.to_string_lossy().into()
    }
}

record! {
    /// Arguments of `block-export-del`.
    BlockExportDel {
        id: String = "id",
        /// Whether a connected front-end may be disconnected; `safe` if absent.
        mode: Option<BlockExportRemoveMode> = "mode",
    }
}

words! {
    /// `BlockExportRemoveMode`
    BlockExportRemoveMode {
        /// Remove the export only if no front-end is connected.
        Safe = "safe",
        /// Disconnect the front-ends.
        Hard = "hard",
    }
}

record! {
    /// Arguments of `query-blockstats`.
    QueryBlockstats {
        /// Whether to list every node by its name instead of the exports; false if absent.
        query_nodes: Option<bool> = "query-nodes",
    }
}

record! {
    /// Arguments of `query-named-block-nodes`.
    QueryNamedBlockNodes {
        /// Whether to leave out the images below a node; ringdisk always does.
        flat: Option<bool> = "flat",
    }
}
