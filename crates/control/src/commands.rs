//! The commands, in one table: the parser, `query-commands` and `query-qmp-schema` are generated from it.

mod backup;
mod bitmap;
mod blockdev;
mod export;
mod object;
mod ringdisk;
mod throttle;

pub use backup::*;
pub use bitmap::*;
pub use blockdev::*;
pub use export::*;
pub use object::*;
pub use ringdisk::*;
pub use throttle::*;

use serde_json::{Map, Value, json};

use crate::error::excerpt;
use crate::qapi::{ArgumentPath, Qapi, Schema};
use crate::replies::{BlockDeviceInfo, BlockExportInfo, BlockStats, IoThreadInfo, VersionInfo};
use crate::{CommandError, ErrorClass};

record! {
    /// No arguments, or a reply that only reports success.
    Empty {}
}

/// One line for each command: `Name(arguments) -> reply = "name"`.
macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident($arguments:ty) -> $reply:ty = $word:literal,)+) => {
        /// A client's command, checked as far as possible without knowledge of the disks.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Command {
            $($(#[$doc])* $name($arguments),)+
        }

        impl Command {
            /// Parses a command.
            ///
            /// # Errors
            /// No command has this name, or its arguments are wrong.
            pub fn parse(name: &str, arguments: Map<String, Value>) -> Result<Self, CommandError> {
                match name {
                    $($word => <$arguments>::from_json(arguments.into(), &ArgumentPath::ARGUMENTS).map(Self::$name),)+
                    _ => Err(unknown(name)),
                }
            }

            /// The command's name in QMP.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $word,)+
                }
            }

            /// The command's arguments, in the form that `parse` reads.
            pub fn arguments(&self) -> Value {
                match self {
                    $(Self::$name(arguments) => arguments.to_json(),)+
                }
            }
        }

        const TABLE: &[Row] = &[$(Row {
            name: $word,
            arguments: <$arguments as Qapi>::describe,
            reply: <$reply as Qapi>::describe,
            check: |reply| <$reply as Qapi>::from_json(reply.clone(), &ArgumentPath::ARGUMENTS).map(drop),
        }),+];
    };
}

commands! {
    /// Exports what disks are at one moment, for a backup.
    BackupAccessSetup(BackupAccessSetup) -> Vec<BackupAccessInfo> = "backup-access-setup",
    /// Ends a backup.
    BackupAccessTeardown(BackupAccessTeardown) -> RingdiskBackupEnd = "backup-access-teardown",
    /// Creates a block node: opens a file.
    BlockdevAdd(BlockdevOptions) -> Empty = "blockdev-add",
    /// Closes a block node that is not in use.
    BlockdevDel(BlockdevDel) -> Empty = "blockdev-del",
    /// Adds a dirty bitmap to a disk.
    BlockDirtyBitmapAdd(BlockDirtyBitmapAdd) -> Empty = "block-dirty-bitmap-add",
    /// Removes the bits of a dirty bitmap.
    BlockDirtyBitmapClear(BlockDirtyBitmap) -> Empty = "block-dirty-bitmap-clear",
    /// Has a dirty bitmap record no changes.
    BlockDirtyBitmapDisable(BlockDirtyBitmap) -> Empty = "block-dirty-bitmap-disable",
    /// Has a dirty bitmap record changes.
    BlockDirtyBitmapEnable(BlockDirtyBitmap) -> Empty = "block-dirty-bitmap-enable",
    /// Sets the bits of several dirty bitmaps in one.
    BlockDirtyBitmapMerge(BlockDirtyBitmapMerge) -> Empty = "block-dirty-bitmap-merge",
    /// Removes a dirty bitmap.
    BlockDirtyBitmapRemove(BlockDirtyBitmap) -> Empty = "block-dirty-bitmap-remove",
    /// Exports a block node.
    BlockExportAdd(BlockExportOptions) -> Empty = "block-export-add",
    /// Removes an export; `BLOCK_EXPORT_DELETED` is sent when this is done.
    BlockExportDel(BlockExportDel) -> Empty = "block-export-del",
    /// Grows or shrinks a disk.
    BlockResize(BlockResize) -> Empty = "block_resize",
    /// Sets all I/O limits of a disk.
    BlockSetIoThrottle(BlockSetIoThrottle) -> Empty = "block_set_io_throttle",
    /// Listens for NBD clients; `block-export-add` says what they find.
    NbdServerStart(NbdServerStart) -> Empty = "nbd-server-start",
    /// Disconnects NBD clients, removes their exports and stops listening.
    NbdServerStop(Empty) -> Empty = "nbd-server-stop",
    /// Creates a throttle group or an I/O thread.
    ObjectAdd(ObjectOptions) -> Empty = "object-add",
    /// Removes an object that is not in use.
    ObjectDel(ObjectDel) -> Empty = "object-del",
    /// Lists the exports.
    QueryBlockExports(Empty) -> Vec<BlockExportInfo> = "query-block-exports",
    /// Returns the I/O statistics of each disk.
    QueryBlockstats(QueryBlockstats) -> Vec<BlockStats> = "query-blockstats",
    /// Lists the I/O threads.
    QueryIothreads(Empty) -> Vec<IoThreadInfo> = "query-iothreads",
    /// Lists the block nodes.
    QueryNamedBlockNodes(QueryNamedBlockNodes) -> Vec<BlockDeviceInfo> = "query-named-block-nodes",
    /// Lists what the open backups copy.
    QueryPbsBitmapInfo(Empty) -> Vec<PbsBitmapInfo> = "query-pbs-bitmap-info",
    /// Returns which commands of Proxmox' QEMU there are.
    QueryProxmoxSupport(Empty) -> ProxmoxSupportStatus = "query-proxmox-support",
    /// Ends the program as SIGTERM does.
    Quit(Empty) -> Empty = "quit",
    /// Returns the settings that decide the speed of each disk, and their sources.
    RingdiskExplain(Empty) -> Value = "x-ringdisk-explain",
    /// Opens and serves a disk, in the syntax of `ringdisk serve`. The reply says how to connect a front-end.
    RingdiskAttach(RingdiskAttach) -> Value = "x-ringdisk-attach",
    /// Checks that no disk has left a file, which would lack what its VM has written since.
    RingdiskCheckFile(RingdiskCheckFile) -> Empty = "x-ringdisk-check-file",
    /// Says how to connect a front-end to a disk that is served, as the reply to `x-ringdisk-attach` does.
    RingdiskConnectInfo(RingdiskConnectInfo) -> Value = "x-ringdisk-connect-info",
    /// Stops serving a disk, and closes it.
    RingdiskDetach(RingdiskDetach) -> Empty = "x-ringdisk-detach",
    /// Lists the open backups.
    RingdiskBackups(Empty) -> Vec<RingdiskBackup> = "x-ringdisk-backups",
    /// Reloads the configuration.
    RingdiskReload(Empty) -> Value = "x-ringdisk-reload",
    /// Returns where the NBD server listens, and its exports with the number of their clients.
    RingdiskNbd(Empty) -> Value = "x-ringdisk-nbd",
    /// Replaces the file of a disk while the guest runs.
    RingdiskReplace(RingdiskReplace) -> Empty = "x-ringdisk-replace",
    /// Grows a disk, or tells its guest that the disk has grown.
    RingdiskResize(RingdiskResize) -> RingdiskResized = "x-ringdisk-resize",
    /// Resumes requests that wait after an I/O error of the storage.
    RingdiskResume(RingdiskResume) -> Empty = "x-ringdisk-resume",
    /// Returns statistics of every disk, with histograms.
    RingdiskStats(Empty) -> Value = "x-ringdisk-stats",
    /// Does several actions at one moment: all of them or none.
    Transaction(Transaction) -> Empty = "transaction",
}

/// Commands that the session answers itself.
pub(crate) const SESSION_TABLE: &[Row] = &[
    Row {
        name: "qmp_capabilities",
        arguments: <QmpCapabilities as Qapi>::describe,
        reply: <Empty as Qapi>::describe,
        check: |_| Ok(()),
    },
    Row {
        name: "query-commands",
        arguments: <Empty as Qapi>::describe,
        reply: <Vec<CommandInfo> as Qapi>::describe,
        check: |_| Ok(()),
    },
    Row {
        name: "query-qmp-schema",
        arguments: <Empty as Qapi>::describe,
        // In QEMU the reply is `[SchemaInfo]`: a description of descriptions, which clients do not use.
        reply: <Vec<Value> as Qapi>::describe,
        check: |_| Ok(()),
    },
    Row {
        name: "query-version",
        arguments: <Empty as Qapi>::describe,
        reply: <VersionInfo as Qapi>::describe,
        check: |_| Ok(()),
    },
];

/// A command's row in the table, without its Rust types.
pub(crate) struct Row {
    pub name: &'static str,
    arguments: fn(&mut Schema) -> String,
    reply: fn(&mut Schema) -> String,
    check: fn(&Value) -> Result<(), CommandError>,
}

/// All commands, sorted by name.
pub(crate) fn rows() -> Vec<&'static Row> {
    let mut rows: Vec<_> = SESSION_TABLE.iter().chain(TABLE).collect();
    rows.sort_by_key(|row| row.name);
    rows
}

pub(crate) fn describe(schema: &mut Schema) {
    for row in rows() {
        schema.define(row.name, |schema| {
            let (arguments, reply) = ((row.arguments)(schema), (row.reply)(schema));
            json!({ "meta-type": "command", "arg-type": arguments, "ret-type": reply })
        });
    }
}

/// Checks that a reply conforms to the schema of its command.
pub(crate) fn check_reply(name: &str, reply: &Value) -> Result<(), CommandError> {
    let row = TABLE.iter().find(|row| row.name == name);
    row.map_or(Ok(()), |row| (row.check)(reply))
}

pub(crate) fn unknown(name: &str) -> CommandError {
    CommandError::new(
        ErrorClass::CommandNotFound,
        format!(
            "The command {} has not been found; query-commands lists those that there are",
            excerpt(name)
        ),
    )
}

record! {
    /// Arguments of `qmp_capabilities`.
    QmpCapabilities {
        /// The capabilities from the greeting that the client wants.
        enable: Option<Vec<QmpCapability>> = "enable",
    }
}

words! {
    /// `QMPCapability`
    QmpCapability {
        /// Out-of-band commands; ringdisk does not offer them.
        Oob = "oob",
    }
}

record! {
    /// An element of the reply to `query-commands`.
    CommandInfo {
        name: String = "name",
    }
}
