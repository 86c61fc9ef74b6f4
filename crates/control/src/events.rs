//! Events: asynchronous messages, and their distribution to every session.

mod hub;

pub use hub::{EventHub, Pending, Subscription, TooManySessions};

use serde_json::{Value, json};

use crate::qapi::{Qapi, Schema};

/// One line for each event: `Name(data) = "NAME"`.
macro_rules! events {
    ($($(#[$doc:meta])* $name:ident($data:ty) = $word:literal,)+) => {
        /// An event to be sent to the clients.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Event {
            $($(#[$doc])* $name($data),)+
        }

        impl Event {
            /// The event's name in QMP.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $word,)+
                }
            }

            /// The event's `data` member.
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
    /// An export has been removed, so its node may be deleted.
    BlockExportDeleted(BlockExportDeleted) = "BLOCK_EXPORT_DELETED",
    /// A guest's request has failed. At most one event per second is sent for each disk and operation; if more requests
    /// fail, the last failure is sent.
    BlockIoError(BlockIoError) = "BLOCK_IO_ERROR",
    /// No request waits for the disk's storage to recover any more.
    BlockIoResumed(BlockIoResumed) = "BLOCK_IO_RESUMED",
    /// An image is inconsistent, and ringdisk no longer writes to it.
    BlockImageCorrupted(BlockImageCorrupted) = "BLOCK_IMAGE_CORRUPTED",
}

impl Event {
    /// The key by which an event is rate-limited to one per second; `None` for events that a guest cannot cause at
    /// will.
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
        /// The device's path in QEMU's object tree. ringdisk has no such tree; the member exists for clients that read
        /// it.
        qom_path: Option<String> = "qom-path",
        device: String = "device",
        node_name: Option<String> = "node-name",
        operation: IoOperationType = "operation",
        /// What was done about the error.
        action: BlockErrorAction = "action",
        /// Whether the error was that no space was left.
        nospace: Option<bool> = "nospace",
        /// The error message, for users.
        reason: String = "reason",
    }
}

record! {
    /// Data of `BLOCK_IO_RESUMED`.
    BlockIoResumed {
        device: String = "device",
        node_name: Option<String> = "node-name",
    }
}

record! {
    /// Data of `BLOCK_IMAGE_CORRUPTED`.
    BlockImageCorrupted {
        /// The id of the export; empty if the image is not exported.
        device: String = "device",
        node_name: Option<String> = "node-name",
        /// The message, for users.
        msg: String = "msg",
        /// The offset of the inconsistency, in bytes.
        offset: Option<u64> = "offset",
        /// The bytes concerned.
        size: Option<u64> = "size",
        /// Whether ringdisk has stopped writing to the image.
        fatal: bool = "fatal",
    }
}

words! {
    /// `IoOperationType`
    IoOperationType {
        /// A read.
        Read = "read",
        /// Any other operation: write, flush or discard.
        Write = "write",
    }
}

words! {
    /// `BlockErrorAction`
    BlockErrorAction {
        /// The guest was told that the request succeeded.
        Ignore = "ignore",
        /// The guest was told of the error.
        Report = "report",
        /// The request waits, and the guest with it.
        Stop = "stop",
    }
}
