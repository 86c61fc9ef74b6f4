//! The commands: one table, from which come the parser, `query-commands` and `query-qmp-schema`.

mod blockdev;
mod export;
mod object;
mod ringdisk;
mod throttle;

pub use blockdev::*;
pub use export::*;
pub use object::*;
pub use ringdisk::*;
pub use throttle::*;

use serde_json::{Map, Value, json};

use crate::error::excerpt;
use crate::qapi::{At, Qapi, Schema};
use crate::replies::{BlockDeviceInfo, BlockExportInfo, BlockStats, IoThreadInfo, VersionInfo};
use crate::{CommandError, ErrorClass};

record! {
    /// No arguments, or a reply that only says that it is done.
    Empty {}
}

/// One line for each command: `Name(arguments) -> reply = "name"`.
macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident($arguments:ty) -> $reply:ty = $word:literal,)+) => {
        /// What a client asks for, checked as far as that can be done without knowing the disks.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Command {
            $($(#[$doc])* $name($arguments),)+
        }

        impl Command {
            /// Reads a command.
            ///
            /// # Errors
            /// There is none of this name, or its arguments are wrong.
            pub fn parse(name: &str, arguments: Map<String, Value>) -> Result<Self, CommandError> {
                match name {
                    $($word => <$arguments>::from_json(arguments.into(), &At::ARGUMENTS).map(Self::$name),)+
                    _ => Err(unknown(name)),
                }
            }

            /// Its name in QMP.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $word,)+
                }
            }

            /// Its arguments, as `parse` takes them.
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
            check: |reply| <$reply as Qapi>::from_json(reply.clone(), &At::ARGUMENTS).map(drop),
        }),+];
    };
}

commands! {
    /// Makes a block node: opens a file.
    BlockdevAdd(BlockdevOptions) -> Empty = "blockdev-add",
    /// Closes a block node that nothing uses.
    BlockdevDel(BlockdevDel) -> Empty = "blockdev-del",
    /// Serves a block node.
    BlockExportAdd(BlockExportOptions) -> Empty = "block-export-add",
    /// Ends serving a block node; `BLOCK_EXPORT_DELETED` tells when it is done.
    BlockExportDel(BlockExportDel) -> Empty = "block-export-del",
    /// Grows or shrinks a disk.
    BlockResize(BlockResize) -> Empty = "block_resize",
    /// Sets all limits of a disk.
    BlockSetIoThrottle(BlockSetIoThrottle) -> Empty = "block_set_io_throttle",
    /// Makes a throttle group or an I/O thread.
    ObjectAdd(ObjectOptions) -> Empty = "object-add",
    /// Removes an object that nothing uses.
    ObjectDel(ObjectDel) -> Empty = "object-del",
    /// What is served.
    QueryBlockExports(Empty) -> Vec<BlockExportInfo> = "query-block-exports",
    /// What each disk has done.
    QueryBlockstats(QueryBlockstats) -> Vec<BlockStats> = "query-blockstats",
    /// The I/O threads.
    QueryIothreads(Empty) -> Vec<IoThreadInfo> = "query-iothreads",
    /// The block nodes.
    QueryNamedBlockNodes(QueryNamedBlockNodes) -> Vec<BlockDeviceInfo> = "query-named-block-nodes",
    /// Ends the program as SIGTERM does.
    Quit(Empty) -> Empty = "quit",
    /// What decides the speed of each disk, and who said so.
    RingdiskExplain(Empty) -> Value = "x-ringdisk-explain",
    /// Opens and serves a disk, written as for `ringdisk serve`. The reply says what to paste.
    RingdiskAttach(RingdiskAttach) -> Value = "x-ringdisk-attach",
    /// Ends serving a disk and closes it.
    RingdiskDetach(RingdiskDetach) -> Empty = "x-ringdisk-detach",
    /// Rereads the configuration.
    RingdiskReload(Empty) -> Value = "x-ringdisk-reload",
    /// Puts another file under a disk while the guest runs.
    RingdiskReplace(RingdiskReplace) -> Empty = "x-ringdisk-replace",
    /// Makes a disk longer, or tells its guest that it has become longer.
    RingdiskResize(RingdiskResize) -> RingdiskResized = "x-ringdisk-resize",
    /// Has requests go on that wait because storage failed to serve them.
    RingdiskResume(RingdiskResume) -> Empty = "x-ringdisk-resume",
    /// Every disk, with histograms.
    RingdiskStats(Empty) -> Value = "x-ringdisk-stats",
}

/// What the session answers by itself.
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
        // `[SchemaInfo]` in QEMU: a description of descriptions, of which clients make no use.
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

/// A command, for all who need not know which.
pub(crate) struct Row {
    pub name: &'static str,
    arguments: fn(&mut Schema) -> String,
    reply: fn(&mut Schema) -> String,
    check: fn(&Value) -> Result<(), CommandError>,
}

/// All commands, in the order of their names.
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

/// Whether a reply is what the schema promises of the command.
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
        /// Those of the greeting that the client wants.
        enable: Option<Vec<QmpCapability>> = "enable",
    }
}

words! {
    /// `QMPCapability`
    QmpCapability {
        /// Commands out of band; not offered.
        Oob = "oob",
    }
}

record! {
    /// An element of the reply to `query-commands`.
    CommandInfo {
        /// Its name.
        name: String = "name",
    }
}
