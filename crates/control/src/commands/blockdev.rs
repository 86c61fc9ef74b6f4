use std::path::PathBuf;

use block::{Aio, CacheMode, DetectZeroes, Discard};
use serde_json::Value;

use crate::CommandError;
use crate::qapi::{At, Id, Qapi, Schema};

union! {
    /// `BlockdevOptions`: a block node to be.
    BlockdevOptions {
        /// Its name. The node that a command makes must have one; one inside it may.
        node_name: Option<Id> = "node-name",
        /// What becomes of the guest's discards; `ignore` if absent.
        discard: Option<Discard> = "discard",
        /// How caches are used.
        cache: Option<BlockdevCacheOptions> = "cache",
        /// Whether writes are refused.
        read_only: Option<bool> = "read-only",
        /// Whether it may be opened read-only if it can't be written.
        auto_read_only: Option<bool> = "auto-read-only",
        /// What becomes of writes of zeroes; `off` if absent.
        detect_zeroes: Option<DetectZeroes> = "detect-zeroes",
    }
    /// What kind of node it is.
    driver: BlockdevDriver = "driver" {
        /// The raw format, on another node.
        Raw(BlockdevOptionsRaw) = "raw",
        /// A qcow2 image, on a file. What it builds on, it names itself.
        Qcow2(BlockdevOptionsQcow2) = "qcow2",
        /// A regular file.
        File(BlockdevOptionsFile) = "file",
        /// A block device.
        HostDevice(BlockdevOptionsFile) = "host_device",
        /// An image in a Ceph cluster.
        Rbd(BlockdevOptionsRbd) = "rbd",
        /// Nothing: requests complete at once.
        NullCo(BlockdevOptionsNull) = "null-co",
    }
}

record! {
    /// `BlockdevOptionsGenericFormat`
    BlockdevOptionsRaw {
        /// What the disk lies on.
        file: BlockdevRef = "file",
    }
}

record! {
    /// `BlockdevOptionsQcow2`
    BlockdevOptionsQcow2 {
        /// The file that it is in.
        file: BlockdevRef = "file",
        /// Memory for its L2 tables in bytes; enough for all of them, up to 1 GiB, if absent.
        l2_cache_size: Option<u64> = "l2-cache-size",
    }
}

alternate! {
    /// `BlockdevRef`: a node that there is, by its name, or one to be made.
    BlockdevRef = "BlockdevRef" {
        /// To be made, and to go with the node that it is for.
        Definition(Box<BlockdevOptions>) if is_object,
        /// The name of one that there is.
        Reference(String) if is_string,
    }
}

impl Qapi for Box<BlockdevOptions> {
    fn describe(schema: &mut Schema) -> String {
        BlockdevOptions::describe(schema)
    }

    fn from_json(value: Value, at: &At<'_>) -> Result<Self, CommandError> {
        BlockdevOptions::from_json(value, at).map(Box::new)
    }

    fn to_json(&self) -> Value {
        BlockdevOptions::to_json(self)
    }
}

record! {
    /// `BlockdevOptionsFile`
    BlockdevOptionsFile {
        /// Its path.
        filename: FilePath = "filename",
        /// How bytes are moved; ringdisk chooses if absent.
        aio: Option<BlockdevAioOptions> = "aio",
        /// Whether other programs are locked out; `auto` if absent.
        locking: Option<OnOffAuto> = "locking",
    }
}

record! {
    /// `BlockdevOptionsRbd`, with what QEMU takes only from Ceph's configuration file.
    BlockdevOptionsRbd {
        /// The pool that it is in.
        pool: String = "pool",
        /// The pool's namespace.
        namespace: Option<String> = "namespace",
        /// Its name.
        image: String = "image",
        /// Ceph's configuration file.
        conf: Option<String> = "conf",
        /// Which of its snapshots, which is read-only.
        snapshot: Option<String> = "snapshot",
        /// The user, without `client.`.
        user: Option<String> = "user",
        /// Where the user's key is.
        keyring: Option<String> = "x-ringdisk-keyring",
        /// Connections that disks with the same access share.
        connections: Option<u64> = "x-ringdisk-connections",
        /// Options of librados and librbd, each `KEY=VALUE`.
        options: Option<Vec<String>> = "x-ringdisk-options",
    }
}

record! {
    /// `BlockdevOptionsNull`
    BlockdevOptionsNull {
        /// Bytes; `NULL_BYTES_DEFAULT` if absent.
        size: Option<u64> = "size",
    }
}

/// Size of a `null-co` node of which none is given, as in QEMU.
pub const NULL_BYTES_DEFAULT: u64 = 1 << 30;

record! {
    /// `BlockdevCacheOptions`
    BlockdevCacheOptions {
        /// Whether I/O goes past the page cache; false if absent.
        direct: Option<bool> = "direct",
        /// Whether the guest's flushes are ignored; false if absent.
        no_flush: Option<bool> = "no-flush",
    }
}

impl BlockdevOptions {
    /// The name of the node that a command makes.
    ///
    /// # Errors
    /// There is none.
    pub fn root_node_name(&self) -> Result<&Id, CommandError> {
        self.node_name
            .as_ref()
            .ok_or_else(|| CommandError::generic("'node-name' must be given, to name the node by"))
    }

    /// The mode that the cache options of the node make together with `writethrough` of its export.
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
        /// Plain calls on a pool of threads.
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
        /// If it works here.
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
        /// Which.
        node_name: String = "node-name",
    }
}

record! {
    /// Arguments of `block_resize`.
    BlockResize {
        /// The disk, by the id of its export; this or `node-name`.
        device: Option<String> = "device",
        /// The disk, by its node; this or `device`.
        node_name: Option<String> = "node-name",
        /// Bytes.
        size: u64 = "size",
    }
}

/// A path that the system takes: neither empty nor with a zero inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath(pub PathBuf);

impl FilePath {
    /// Longest, in bytes: Linux' PATH_MAX, less its closing zero.
    pub const BYTES_MAX: usize = 4095;
}

impl Qapi for FilePath {
    fn describe(schema: &mut Schema) -> String {
        String::describe(schema)
    }

    fn from_json(value: Value, at: &At<'_>) -> Result<Self, CommandError> {
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
        // It was a string once.
        self.0.to_string_lossy().into()
    }
}
