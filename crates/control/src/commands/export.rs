use std::path::PathBuf;

use serde_json::Value;

use crate::CommandError;
use crate::qapi::{At, Id, Qapi, Schema};

union! {
    /// `BlockExportOptions`: how to serve a block node.
    BlockExportOptions {
        /// Its name.
        id: Id = "id",
        /// The node to be served.
        node_name: String = "node-name",
        /// Whether the guest may write; false if absent.
        writable: Option<bool> = "writable",
        /// Whether a completed write is on stable storage; false if absent.
        writethrough: Option<bool> = "writethrough",
        /// The I/O threads to serve it with; ringdisk chooses if absent.
        iothread: Option<BlockExportIothreads> = "iothread",
        /// Whether it must stay on these I/O threads; it always does.
        fixed_iothread: Option<bool> = "fixed-iothread",
    }
    /// `BlockExportType`: the protocol.
    kind: BlockExportType = "type" {
        /// vhost-user, with a virtio-blk device.
        VhostUserBlk(BlockExportOptionsVhostUserBlk) = "vhost-user-blk",
    }
}

record! {
    /// `BlockExportOptionsVhostUserBlk`
    BlockExportOptionsVhostUserBlk {
        /// Where to listen.
        addr: SocketAddress = "addr",
        /// Bytes; 512 if absent.
        logical_block_size: Option<u64> = "logical-block-size",
        /// Virtqueues at most; 1 if absent.
        num_queues: Option<u16> = "num-queues",
    }
}

alternate! {
    /// `BlockExportIothreads`
    BlockExportIothreads = "BlockExportIothreads" {
        /// For all virtqueues.
        Single(String) if is_string,
        /// The virtqueues spread over these.
        Multi(Vec<String>) if is_array,
    }
}

impl BlockExportIothreads {
    /// Their ids.
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
        /// A socket with a path.
        Unix(UnixSocketAddress) = "unix",
    }
}

impl SocketAddress {
    /// Where to listen.
    pub fn path(&self) -> &PathBuf {
        let SocketAddressType::Unix(address) = &self.kind;
        &address.path.0
    }
}

record! {
    /// `UnixSocketAddress`
    UnixSocketAddress {
        /// Where.
        path: SocketPath = "path",
    }
}

/// A path that a socket can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPath(pub PathBuf);

impl SocketPath {
    /// Longest, in bytes: `sockaddr_un` has room for 108, the last of which is a zero.
    pub const BYTES_MAX: usize = 107;
}

impl Qapi for SocketPath {
    fn describe(schema: &mut Schema) -> String {
        String::describe(schema)
    }

    fn from_json(value: Value, at: &At<'_>) -> Result<Self, CommandError> {
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
        // It was a string once.
        self.0.to_string_lossy().into()
    }
}

record! {
    /// Arguments of `block-export-del`.
    BlockExportDel {
        /// Which.
        id: String = "id",
        /// Whether a front-end may be cut off; `safe` if absent.
        mode: Option<BlockExportRemoveMode> = "mode",
    }
}

words! {
    /// `BlockExportRemoveMode`
    BlockExportRemoveMode {
        /// Only if no front-end is connected.
        Safe = "safe",
        /// Front-ends are disconnected.
        Hard = "hard",
    }
}

record! {
    /// Arguments of `query-blockstats`.
    QueryBlockstats {
        /// Every node by its name, rather than what is served; false if absent.
        query_nodes: Option<bool> = "query-nodes",
    }
}

record! {
    /// Arguments of `query-named-block-nodes`.
    QueryNamedBlockNodes {
        /// Whether the images below a node are left out of it; ringdisk always does.
        flat: Option<bool> = "flat",
    }
}
