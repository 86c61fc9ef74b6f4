use std::path::PathBuf;

use block::{Aio, CacheMode, DetectZeroes, Discard};
use serde_json::Value;

use crate::CommandError;
use crate::qapi::{ArgumentPath, Id, Qapi, Schema};

union! {
    /// `BlockdevOptions`: a block node to be created.
    BlockdevOptions {
        /// The node's name. Mandatory for the node that a command creates, optional for a node inside it.
        node_name: Option<Id> = "node-name",
        /// How the guest's discards are handled; `ignore` if absent.
        discard: Option<Discard> = "discard",
        /// The cache mode.
        cache: Option<BlockdevCacheOptions> = "cache",
        read_only: Option<bool> = "read-only",
        /// Whether the node may be opened read-only if it cannot be written.
        auto_read_only: Option<bool> = "auto-read-only",
        /// How writes of zeroes are handled; `off` if absent.
        detect_zeroes: Option<DetectZeroes> = "detect-zeroes",
    }
    /// The kind of node.
    driver: BlockdevDriver = "driver" {
        /// The raw format, on another node.
        Raw(BlockdevOptionsRaw) = "raw",
        /// A qcow2 image in a file. The image itself names its backing file.
        Qcow2(BlockdevOptionsQcow2) = "qcow2",
        /// A regular file.
        File(BlockdevOptionsFile) = "file",
        /// A block device.
        HostDevice(BlockdevOptionsFile) = "host_device",
        /// An image in a Ceph cluster.
        Rbd(BlockdevOptionsRbd) = "rbd",
        /// No storage: requests complete immediately.
        NullCo(BlockdevOptionsNull) = "null-co",
    }
}

record! {
    /// `BlockdevOptionsGenericFormat`
    BlockdevOptionsRaw {
        /// The node or file that contains the disk.
        file: BlockdevRef = "file",
    }
}

record! {
    /// `BlockdevOptionsQcow2`
    BlockdevOptionsQcow2 {
        /// The node or file that contains the image.
        file: BlockdevRef = "file",
        /// The memory for the image's L2 tables in bytes; if absent, enough for all of them, up to 1 GiB.
        l2_cache_size: Option<u64> = "l2-cache-size",
        /// The file that contains the data of an image with an external data file; the name in the image is not followed.
        data_file: Option<BlockdevRef> = "data-file",
    }
}

alternate! {
    /// `BlockdevRef`: an existing node, by its name, or a new one.
    BlockdevRef = "BlockdevRef" {
        /// The options of a new node, which is closed together with the node that uses it.
        Definition(Box<BlockdevOptions>) if is_object,
        /// The name of an existing node.
        Reference(String) if is_string,
    }
}

impl Qapi for Box<BlockdevOptions> {
    fn describe(schema: &mut Schema) -> String {
        BlockdevOptions::describe(schema)
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        BlockdevOptions::from_json(value, at).map(Box::new)
    }

    fn to_json(&self) -> Value {
        BlockdevOptions::to_json(self)
    }
}

record! {
    /// `BlockdevOptionsFile`
    BlockdevOptionsFile {
        /// The file's path.
        filename: FilePath = "filename",
        /// The AIO method; ringdisk chooses if absent.
        aio: Option<BlockdevAioOptions> = "aio",
        /// Whether other programs are locked out; `auto` if absent.
        locking: Option<OnOffAuto> = "locking",
    }
}

record! {
    /// `BlockdevOptionsRbd`, with members for what QEMU accepts only from Ceph's configuration file.
    BlockdevOptionsRbd {
        /// The pool that contains the image.
        pool: String = "pool",
        namespace: Option<String> = "namespace",
        image: String = "image",
        /// Ceph's configuration file.
        conf: Option<String> = "conf",
        /// The snapshot to open, read-only; the image itself if absent.
        snapshot: Option<String> = "snapshot",
        /// The user, without `client.`.
        user: Option<String> = "user",
        /// The file with the user's key.
        keyring: Option<String> = "x-ringdisk-keyring",
        /// The number of connections that disks with the same access share.
        connections: Option<u64> = "x-ringdisk-connections",
        /// Options of librados and librbd, each as `KEY=VALUE`.
        options: Option<Vec<String>> = "x-ringdisk-options",
    }
}

record! {
    /// `BlockdevOptionsNull`
    BlockdevOptionsNull {
        /// The size in bytes; `NULL_BYTES_DEFAULT` if absent.
        size: Option<u64> = "size",
    }
}

/// The default size in bytes of a `null-co` node, as in QEMU.
pub const NULL_BYTES_DEFAULT: u64 = 1 << 30;

record! {
    /// `BlockdevCacheOptions`
    BlockdevCacheOptions {
        /// Whether I/O bypasses the page cache; false if absent.
        direct: Option<bool> = "direct",
        /// Whether the guest's flushes are ignored; false if absent.
        no_flush: Option<bool> = "no-flush",
    }
}

impl BlockdevOptions {
    /// The name of the node that a command creates.
    ///
    /// # Errors
    /// The options give no name.
    pub fn root_node_name(&self) -> Result<&Id, CommandError> {
        self.node_name
            .as_ref()
            .ok_or_else(|| CommandError::generic("'node-name' must be given, to name the node by"))
    }

    /// The cache mode for the node's cache options and `writethrough` of its export.
    ///
    /// # Errors
    /// ringdisk has no such mode.
    pub fn cache_mode(&self, writethrough: bool) -> Result<CacheMode, CommandError> {
        let cache = self.cache.as_ref();
        let direct = cache.and_then(|cache| cache.direct).unwrap_or(false);
        let no_flush = cache.and_then(|cache| cache.no_flush).unwrap_or(false);
        match (direct, no_flush, writethrough) {
            (false, false, false) => Ok(CacheMode::Writeback),
            (true, false, false) => Ok(CacheMode::None),
            (false, false, true) => Ok(CacheMode::Writethrough),
            (true, false, true) => Ok(CacheMode::Directsync),
            (false, true, false) => Ok(CacheMode::Unsafe),
            (true, true, _) => Err(CommandError::generic(
                "cache.no-flush with cache.direct is not served; leave one out",
            )),
            (false, true, true) => Err(CommandError::generic(
                "cache.no-flush of the node contradicts writethrough of the export; leave one out",
            )),
        }
    }
}

words! {
    /// `BlockdevAioOptions`
    BlockdevAioOptions {
        /// Synchronous calls on a thread pool.
        Threads = "threads",
        /// Linux AIO.
        Native = "native",
        /// io_uring.
        IoUring = "io_uring",
    }
}

impl From<BlockdevAioOptions> for Aio {
    fn from(option: BlockdevAioOptions) -> Self {
        match option {
            BlockdevAioOptions::Threads => Self::Threads,
            BlockdevAioOptions::Native => Self::Native,
            BlockdevAioOptions::IoUring => Self::IoUring,
        }
    }
}

words! {
    /// `OnOffAuto`
    OnOffAuto {
        /// On if it works here.
        Auto = "auto",
        /// Always.
        On = "on",
        /// Never.
        Off = "off",
    }
}

words_of! { Discard as BlockdevDiscardOptions { Ignore = "ignore", Unmap = "unmap", } }

words_of! { DetectZeroes as BlockdevDetectZeroesOptions { Off = "off", On = "on", Unmap = "unmap", } }

record! {
    /// Arguments of `blockdev-del`.
    BlockdevDel {
        node_name: String = "node-name",
    }
}

record! {
    /// Arguments of `block_resize`.
    BlockResize {
        /// The disk, by the id of its export. Either this or `node-name` is given.
        device: Option<String> = "device",
        /// The disk, by the name of its node. Either this or `device` is given.
        node_name: Option<String> = "node-name",
        /// The new size in bytes.
        size: u64 = "size",
    }
}

/// A path that the system accepts: not empty, and without a zero byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath(pub PathBuf);

impl FilePath {
    /// The longest path in bytes: Linux' PATH_MAX, less the terminating zero.
    pub const BYTES_MAX: usize = 4095;
}

impl Qapi for FilePath {
    fn describe(schema: &mut Schema) -> String {
        String::describe(schema)
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        let text = String::from_json(value, at)?;
        match text.len() {
            0 => Err(at.refused("is empty; a path is needed")),
            _ if text.contains('\0') => Err(at.refused("a path has no zero byte inside")),
            n if n > Self::BYTES_MAX => Err(at.refused(format!(
                "has {n} bytes, and a path has at most {}",
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
