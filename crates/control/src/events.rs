//! Events: what happens without having been asked for, and how it reaches every session.

mod hub;

pub use hub::{EventHub, Pending, Subscription, TooManySessions};

use serde_json::{Value, json};

use crate::qapi::{Qapi, Schema};

/// One line for each event: `Name(data) = "NAME"`.
macro_rules! events {
    ($($(#[$doc:meta])* $name:ident($data:ty) = $word:literal,)+) => {
        /// What has happened.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Event {
            $($(#[$doc])* $name($data),)+
        }

        impl Event {
            /// Its name in QMP.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $word,)+
                }
            }

            /// What is told of it.
            pub fn data(&self) -> Value {
                match self {
                    $(Self::$name(data) => data.to_json(),)+
                }
            }
        }

        /// Adds the events to the schema.
        pub(crate) fn describe(schema: &mut Schema) {
            $(schema.define($word, |schema| {
                json!({ "meta-type": "event", "arg-type": <$data as Qapi>::describe(schema) })
            });)+
        }
    };
}

events! {
    /// An export is gone, and its node may be deleted.
    BlockExportDeleted(BlockExportDeleted) = "BLOCK_EXPORT_DELETED",
    /// A request of a guest has failed. Of each disk and operation at most one a second is sent, and if there were
    /// more, the last of them.
    BlockIoError(BlockIoError) = "BLOCK_IO_ERROR",
    /// Nothing waits any more for the storage of a disk to work again.
    BlockIoResumed(BlockIoResumed) = "BLOCK_IO_RESUMED",
    /// An image contradicts itself, and nothing more is written to it.
    BlockImageCorrupted(BlockImageCorrupted) = "BLOCK_IMAGE_CORRUPTED",
}

impl Event {
    /// For events that a guest can cause at will: what they are counted by, one of each a second.
    fn rate_limited_by(&self) -> Option<String> {
        match self {
            Self::BlockExportDeleted(_) | Self::BlockImageCorrupted(_) => None,
            Self::BlockIoResumed(resumed) => Some(format!("{} {}", self.name(), resumed.device)),
            Self::BlockIoError(error) => {
                let node = error.node_name.as_deref().unwrap_or_default();
                Some(format!(
                    "{} {} {node} {:?}",
                    self.name(),
                    error.device,
                    error.operation
                ))
            }
        }
    }
}

record! {
    /// Data of `BLOCK_EXPORT_DELETED`.
    BlockExportDeleted {
        /// The name of the export.
        id: String = "id",
    }
}

record! {
    /// Data of `BLOCK_IO_ERROR`.
    BlockIoError {
        /// The path of the device in QEMU's tree, which has none here; there for clients that look at it.
        qom_path: Option<String> = "qom-path",
        /// The id of the export.
        device: String = "device",
        /// The node.
        node_name: Option<String> = "node-name",
        /// What the guest wanted.
        operation: IoOperationType = "operation",
        /// What was done about it.
        action: BlockErrorAction = "action",
        /// Whether there was no space left.
        nospace: Option<bool> = "nospace",
        /// For people.
        reason: String = "reason",
    }
}

record! {
    /// Data of `BLOCK_IO_RESUMED`.
    BlockIoResumed {
        /// The id of the export.
        device: String = "device",
        /// The node.
        node_name: Option<String> = "node-name",
    }
}

record! {
    /// Data of `BLOCK_IMAGE_CORRUPTED`.
    BlockImageCorrupted {
        /// The id of the export; empty if it is not served.
        device: String = "device",
        /// The node.
        node_name: Option<String> = "node-name",
        /// For people.
        msg: String = "msg",
        /// Where, in bytes.
        offset: Option<u64> = "offset",
        /// Bytes concerned.
        size: Option<u64> = "size",
        /// Whether nothing more is written.
        fatal: bool = "fatal",
    }
}

words! {
    /// `IoOperationType`
    IoOperationType {
        /// A read.
        Read = "read",
        /// Anything else: write, flush, discard.
        Write = "write",
    }
}

words! {
    /// `BlockErrorAction`
    BlockErrorAction {
        /// The guest was told of success.
        Ignore = "ignore",
        /// The guest was told of the error.
        Report = "report",
        /// The guest waits.
        Stop = "stop",
    }
}
