//! `ringdisk backup`: disks as they were at one moment.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::{format_size, parse_size};
use control::Client;
use serde_json::{Value, json};

use super::export::uri;
use super::{CommandLineError, CommandResult, Connection, row, table};
use crate::config::nbd::id_of;

/// How long a guest agent may take for a reply; a freeze waits for the guest's writes.
const AGENT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk backup begin vm1 vm2                     both disks at one moment; prints a URI for each
  ringdisk backup begin vm1 --bitmap nightly        incremental, if 'nightly' was part of a backup before
  nbdcopy --connections=4 'nbd+unix:///vm1-backup?socket=/run/ringdisk/nbd.sock' vm1-copy.raw
  ringdisk backup end                               it was a success
  ringdisk backup end --failed                      it was not: the next one copies the same again

backup.md in /usr/share/doc/ringdisk has recipes for full and incremental backups, and for restoring them.")]
pub struct BackupArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Export what disks are at one moment
    #[command(after_help = "Examples:
  ringdisk backup begin vm1 vm2
  ringdisk backup begin vm1 --bitmap nightly --bps 200M
  ringdisk backup begin vm1 --guest-agent /run/vm1-agent.sock

Old data that the VM overwrites meanwhile is kept in memory, and then in a file in the directory that 'ringdisk serve \
--fleece DIR' names. If there is no space for it, the backup fails; the VM goes on.")]
    Begin {
        /// Names of disks
        #[arg(required = true)]
        disks: Vec<String>,
        /// Id of the backup; exports are called DISK-ID
        #[arg(long, value_name = "ID", default_value = "backup")]
        id: String,
        /// Bitmap that says what has changed since the last backup; it is created by a full backup, if it cannot be used
        #[arg(long, value_name = "NAME")]
        bitmap: Option<String>,
        /// Copy everything, and let the bitmap begin again
        #[arg(long, requires = "bitmap")]
        full: bool,
        /// Limit of old data of each disk in memory, as in 256M
        #[arg(long, value_name = "SIZE")]
        memory: Option<String>,
        /// Limit of bytes per second, of all clients of a disk together, as in 100M
        #[arg(long, value_name = "BYTES")]
        bps: Option<String>,
        /// Socket of QEMU's guest agent: the guest's file systems are frozen at the moment; can be repeated
        #[arg(long, value_name = "PATH")]
        guest_agent: Vec<PathBuf>,
        #[command(flatten)]
        connection: Connection,
    },
    /// End a backup, and disconnect its clients
    #[command(after_help = "Examples:
  ringdisk backup end
  ringdisk backup end --id nightly --failed")]
    End {
        /// Id of the backup
        #[arg(long, value_name = "ID", default_value = "backup")]
        id: String,
        /// Not everything was copied: the next backup copies the same again
        #[arg(long)]
        failed: bool,
        #[command(flatten)]
        connection: Connection,
    },
    /// List the open backups
    #[command(after_help = "Example:\n  ringdisk backup list --json")]
    List {
        #[command(flatten)]
        connection: Connection,
    },
}

pub fn backup(args: &BackupArgs) -> CommandResult {
    match &args.action {
        Action::Begin {
            disks,
            id,
            bitmap,
            full,
            memory,
            bps,
            guest_agent,
            connection,
        } => {
            let size = |option: &str, text: &Option<String>| {
                let size = text.as_deref().map(parse_size).transpose();
                size.map_err(|e| CommandLineError::Value(option.into(), e))
            };
            let mode = match (bitmap, full) {
                (None, _) => "none",
                (Some(_), true) => "new",
                (Some(_), false) => "x-ringdisk-auto",
            };
            let devices: Vec<_> = disks
                .iter()
                .map(|disk| {
                    let mut device = json!({ "device": disk, "bitmap-mode": mode });
                    if let Some(bitmap) = bitmap {
                        device["bitmap-name"] = bitmap.as_str().into();
                    }
                    device
                })
                .collect();
            let mut arguments = json!({ "target-id": id, "devices": devices });
            if let Some(memory) = size("memory", memory)? {
                arguments["x-ringdisk-memory"] = memory.into();
            }
            let bps = size("bps", bps)?;
            begin(connection, id, arguments, bps, guest_agent)
        }
        Action::End {
            id,
            failed,
            connection,
        } => {
            let arguments = json!({ "target-id": id, "success": !failed });
            let done = format!("backup {id} is ended");
            connection.order("backup-access-teardown", arguments, &done)
        }
        Action::List { connection } => list(connection),
    }
}

fn begin(
    connection: &Connection,
    id: &str,
    arguments: Value,
    bps: Option<u64>,
    agents: &[PathBuf],
) -> CommandResult {
    let mut client = connection.open()?;
    let server = client.call("x-ringdisk-nbd", json!({}))?;
    if server["address"].is_null() {
        return Err(CommandLineError::NoNbd);
    }
    let frozen = Frozen::freeze(agents)?;
    let begun = client.call("backup-access-setup", arguments);
    drop(frozen);
    let begun = begun?;
    let exported = export(&mut client, &begun, bps, &server);
    let (reply, text) = match exported {
        Ok(exported) => exported,
        Err(e) => {
            let arguments = json!({ "target-id": id, "success": false });
            let _ = client.call("backup-access-teardown", arguments);
            return Err(e);
        }
    };
    connection.say(&reply, &text);
    Ok(())
}

/// Exports what has begun. Returns what is printed, as JSON and as text.
fn export(
    client: &mut Client,
    begun: &Value,
    bps: Option<u64>,
    server: &Value,
) -> Result<(Value, String), CommandLineError> {
    let mut rows = vec![row(["DISK", "SIZE", "BACKUP", "URI"])];
    let mut all = Vec::new();
    for disk in begun.as_array().cloned().unwrap_or_default() {
        let mut disk = disk;
        let name = disk["node-name"].as_str().unwrap_or_default().to_owned();
        let mut arguments = json!({
            "type": "nbd",
            "id": id_of(&name),
            "node-name": name,
            "name": name,
            "description": format!("disk {} at one moment", disk["device"].as_str().unwrap_or_default()),
        });
        if let Some(bps) = bps {
            arguments["x-ringdisk-bps"] = bps.into();
        }
        client.call("block-export-add", arguments)?;
        let uri = uri(server, &name);
        rows.push(vec![
            disk["device"].as_str().unwrap_or_default().into(),
            format_size(disk["size"].as_u64().unwrap_or(0)),
            match disk["bitmap-name"].as_str() {
                Some(bitmap) => format!("incremental ({bitmap})"),
                None => "full".into(),
            },
            uri.clone(),
        ]);
        disk["uri"] = uri.into();
        all.push(disk);
    }
    Ok((all.into(), table(&rows)))
}

fn list(connection: &Connection) -> CommandResult {
    let open = connection.open()?.call("x-ringdisk-backups", json!({}))?;
    let heading = ["ID", "DISKS", "IN MEMORY", "IN FILE", "HELD", "STATE"];
    let mut rows = vec![row(heading)];
    for backup in open.as_array().into_iter().flatten() {
        let devices = backup["devices"].as_array().cloned().unwrap_or_default();
        let disks = devices.iter().filter_map(|disk| disk["device"].as_str());
        let size = |key: &str| format_size(backup[key].as_u64().unwrap_or(0));
        rows.push(vec![
            backup["id"].as_str().unwrap_or_default().into(),
            disks.collect::<Vec<_>>().join(", "),
            size("memory"),
            size("file"),
            format!("{} us", backup["held-us"]),
            backup["error"].as_str().unwrap_or("open").into(),
        ]);
    }
    let text = if rows.len() > 1 {
        table(&rows)
    } else {
        "no backup is open; 'ringdisk backup begin DISK' begins one".into()
    };
    connection.say(&open, &text);
    Ok(())
}

/// Guests whose file systems are frozen. They thaw when this is dropped.
struct Frozen<'a>(Vec<(&'a Path, Agent)>);

impl<'a> Frozen<'a> {
    fn freeze(agents: &'a [PathBuf]) -> Result<Self, CommandLineError> {
        let mut frozen = Self(Vec::new());
        for path in agents {
            let failed = |e| CommandLineError::Agent(path.clone(), e);
            let mut agent = Agent::connect(path).map_err(failed)?;
            // It thaws even if the reply is lost.
            let reply = agent.call("guest-fsfreeze-freeze");
            frozen.0.push((path, agent));
            reply.map_err(failed)?;
        }
        Ok(frozen)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        for (path, agent) in &mut self.0 {
            if let Err(e) = agent.call("guest-fsfreeze-thaw") {
                let path = path.display();
                eprintln!(
                    "ringdisk: guest agent {path}: the file systems may still be frozen: {e}; run guest-fsfreeze-thaw"
                );
            }
        }
    }
}

/// A connection to QEMU's guest agent.
struct Agent(BufReader<UnixStream>);

impl Agent {
    fn connect(path: &Path) -> std::io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(AGENT))?;
        socket.set_write_timeout(Some(AGENT))?;
        let mut agent = Self(BufReader::new(socket));
        // What an earlier client has left behind comes first.
        let id = std::process::id();
        agent.send(&json!({ "execute": "guest-sync", "arguments": { "id": id } }))?;
        while agent.receive()?["return"] != id {}
        Ok(agent)
    }

    fn call(&mut self, command: &str) -> std::io::Result<Value> {
        self.send(&json!({ "execute": command }))?;
        let reply = self.receive()?;
        match reply["error"]["desc"].as_str() {
            Some(problem) => Err(std::io::Error::other(problem.to_owned())),
            None => Ok(reply["return"].clone()),
        }
    }

    fn send(&mut self, command: &Value) -> std::io::Result<()> {
        writeln!(self.0.get_mut(), "{command}")
    }

    fn receive(&mut self) -> std::io::Result<Value> {
        let mut line = String::new();
        // A reply is short; an agent belongs to the guest, and may send anything.
        let mut limited = std::io::Read::take(&mut self.0, 1 << 20);
        if limited.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(line.trim_start_matches('\u{ff}')).unwrap_or_default())
    }
}
