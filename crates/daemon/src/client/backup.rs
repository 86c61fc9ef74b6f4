//! `ringdisk backup`: disks as they were at one moment.

mod copy;
pub mod progress;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use block::{format_size, parse_size};
use control::{Client, ClientError, CommandError};
use datapath::FLEECE_MEMORY_MIN;
use serde_json::{Value, json};

use super::export::uri;
use super::guest_agent::Frozen;
use super::interrupt::Interrupt;
use super::{CommandLineError, CommandResult, Connection, is_list, nbd_server, row, table};
use crate::config::nbd::id_of;
use crate::server::connection_info::quote;
use crate::server::handover::HandoverInProgress;
use crate::token::token;
use copy::CopyArgs;
pub use copy::address_of;

/// The key of a backup's checkpoint in replies.
pub const CHECKPOINT: &str = "x-ringdisk-checkpoint";

/// How long the server may take to accept the command that ends a backup which may have begun, and again to answer.
const UNDO: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk backup begin vm1 vm2                     both disks at one moment; prints a URI for each
  ringdisk backup begin vm1 --bitmap nightly        incremental, if there is a bitmap 'nightly'; full otherwise
  nbdcopy --connections=4 'nbd+unix:///vm1-backup?socket=/run/ringdisk/nbd.sock' vm1-copy.raw
  ringdisk backup end                               it was a success; prints its checkpoint
  ringdisk backup begin vm1 --bitmap nightly --since CHECKPOINT
  ringdisk backup end --failed                      it was not: the next one copies the same again

backup.md in /usr/share/doc/ringdisk has recipes for full and incremental backups, and for restoring them.")]
pub struct BackupArgs {
    #[command(subcommand)]
    action: Action,
}

/// How a backup begins.
#[derive(clap::Args)]
pub struct Opening {
    /// Limit of old data of each disk in memory, as in 256M; at least 4M
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Limit of bytes per second, of all clients of a disk together, as in 100M
    #[arg(long, value_name = "BYTES")]
    bps: Option<String>,
    /// Socket of QEMU's guest agent: the guest's file systems are frozen at the moment; can be repeated
    #[arg(long, value_name = "PATH")]
    pub guest_agent: Vec<PathBuf>,
}

impl Opening {
    /// The same with a guest agent.
    pub fn with_agent(&self, path: PathBuf) -> Self {
        Self {
            memory: self.memory.clone(),
            bps: self.bps.clone(),
            guest_agent: vec![path],
        }
    }
}

/// A backup that has begun.
pub struct Begun {
    /// As the server describes them.
    pub disks: Vec<Value>,
    /// Of this backup, and no other.
    pub token: String,
    text: String,
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
        /// Checkpoint of the last backup that you have, as 'ringdisk backup end' printed it: if the bitmap has another one, the
        /// disk or its bitmap was put back, and the backup is full
        #[arg(long, value_name = "CHECKPOINT", requires = "bitmap")]
        since: Option<String>,
        /// Copy everything, and let the bitmap begin again
        #[arg(long, requires = "bitmap", conflicts_with = "since")]
        full: bool,
        #[command(flatten)]
        opening: Opening,
        #[command(flatten)]
        connection: Connection,
    },
    /// Begin a backup, copy it to files, and end it
    #[command(after_help = "Examples:
  ringdisk backup copy vm1 --to vm1.raw --bitmap nightly                        full; prints its checkpoint
  ringdisk backup copy vm1 --to vm1.raw --bitmap nightly --since CHECKPOINT     updates vm1.raw
  ringdisk backup copy vm1 --to full.qcow2 --format qcow2 --bitmap nightly
  ringdisk backup copy vm1 --to 1.qcow2 --format qcow2 --bitmap nightly --since CHECKPOINT --base full.qcow2

Exit status: 0 if the backup has ended with success, and the files are durable; 1 if it has not been copied, and has ended as failed, \
or, with --open, stays open, as the message says; 2 after a mistake in the command; 3 if the files are complete and durable, and \
the backup may not have ended: what the message says must be done before the next one.")]
    Copy(CopyArgs),
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
            since,
            full,
            opening,
            connection,
        } => {
            let mode = match (bitmap, full) {
                (None, _) => "none",
                (Some(_), true) => "new",
                (Some(_), false) => "x-ringdisk-auto",
            };
            let devices = devices(disks, mode, bitmap.as_deref(), since.as_deref());
            begin(connection, id, devices, opening)
        }
        Action::Copy(args) => copy::copy(args),
        Action::End {
            id,
            failed,
            connection,
        } => {
            let mut client = connection.open()?;
            // If none is open at all, the command says nothing, as in QEMU.
            if *failed && !is_open(&mut client, id)? {
                return Err(CommandLineError::NoBackup(id.clone()));
            }
            let ended = end(&mut client, id, !failed)?;
            let mut text = format!("backup {id} is ended");
            if let Some(checkpoint) = ended[CHECKPOINT].as_str() {
                text += &format!("; its checkpoint, for --since of the next one:\n{checkpoint}");
            }
            connection.say(&ended, &text);
            Ok(())
        }
        Action::List { connection } => list(connection),
    }
}

/// Whether there is such a backup.
///
/// # Errors
/// The server does not say.
pub fn is_open(client: &mut Client, id: &str) -> Result<bool, CommandLineError> {
    match open_disks(client, id) {
        Err(CommandLineError::NoBackup(_)) => Ok(false),
        found => found.map(|_| true),
    }
}

/// Ends a backup. Returns the reply.
///
/// # Errors
/// It has not ended, or not as a success.
pub fn end(client: &mut Client, id: &str, is_success: bool) -> Result<Value, CommandLineError> {
    let arguments = json!({ "target-id": id, "success": is_success });
    let ended = client.call("backup-access-teardown", arguments);
    ended.map_err(|e| match e {
        ClientError::HungUp(_) | ClientError::Timeout { .. } | ClientError::Io { .. }
            if is_success =>
        {
            CommandLineError::MayHaveSucceeded(e)
        }
        e => e.into(),
    })
}

/// Why a backup of a disk is full although an incremental one was wanted.
pub fn why_full(disk: &Value) -> Option<String> {
    let bitmap = disk["bitmap-name"].as_str()?;
    let why = match disk["x-ringdisk-full"].as_str()? {
        "missing" => "there is no such bitmap yet".into(),
        "inconsistent" => "the bitmap is inconsistent: it lacks changes".into(),
        "disabled" => "the bitmap is disabled: it lacks changes".into(),
        "no-checkpoint" => {
            "the bitmap has no checkpoint: it is an older one, or was changed by a command".into()
        }
        "other-checkpoint" => format!(
            "the bitmap has the checkpoint {}, and not that of --since: the disk or its bitmap was put back, or another \
             backup was made with it",
            disk[CHECKPOINT].as_str().unwrap_or_default()
        ),
        "other-disk" => "the bitmap is that of another disk of the backup of --since: that disk's image or file is in the \
             place of this one's, or the disk has another name now"
            .into(),
        _ => return None,
    };
    Some(format!("bitmap {bitmap}: {why}"))
}

/// The devices of a backup of these disks, for the server.
pub fn devices(
    disks: &[String],
    mode: &str,
    bitmap: Option<&str>,
    since: Option<&str>,
) -> Vec<Value> {
    let device = |disk: &String| {
        let mut device = json!({ "device": disk, "bitmap-mode": mode });
        if let Some(bitmap) = bitmap {
            device["bitmap-name"] = bitmap.into();
        }
        if let Some(since) = since {
            device["x-ringdisk-since"] = since.into();
        }
        device
    };
    disks.iter().map(device).collect()
}

/// The disks of an open backup, as [`Begun::disks`].
///
/// # Errors
/// There is no such backup.
pub fn open_disks(client: &mut Client, id: &str) -> Result<Vec<Value>, CommandLineError> {
    let open = open_backups(client)?;
    let mut open = open.as_array().into_iter().flatten();
    let found = open.find(|backup| backup["id"] == id);
    let found = found.ok_or_else(|| CommandLineError::NoBackup(id.into()))?;
    Ok(found["devices"].as_array().cloned().unwrap_or_default())
}

fn begin(
    connection: &Connection,
    id: &str,
    devices: Vec<Value>,
    opening: &Opening,
) -> CommandResult {
    let interrupt = Interrupt::register();
    let begun = open(connection, id, devices, opening, &interrupt)?;
    // From now on, signals end the process.
    interrupt.release();
    let said = connection.try_to_say(&begun.disks.into(), &begun.text);
    // Nobody knows where to read the backup.
    said.map_err(|e| {
        let error = CommandLineError::Output(e);
        undo(connection, id, Some(&begun.token), error)
    })
}

/// Begins a backup, and has it exported.
///
/// # Errors
/// No backup is open, or the message says that one may be.
pub fn open(
    connection: &Connection,
    id: &str,
    devices: Vec<Value>,
    opening: &Opening,
    interrupt: &Interrupt,
) -> Result<Begun, CommandLineError> {
    let size = |option: &str, text: &Option<String>| {
        let size = text.as_deref().map(parse_size).transpose();
        size.map_err(|e| CommandLineError::Value(option.into(), e))
    };
    let mut arguments = json!({ "target-id": id, "devices": devices });
    if let Some(memory) = size("memory", &opening.memory)? {
        if memory < FLEECE_MEMORY_MIN {
            let problem = format!("is less than {}", format_size(FLEECE_MEMORY_MIN));
            return Err(CommandLineError::Value("memory".into(), problem));
        }
        arguments["x-ringdisk-memory"] = memory.into();
    }
    let bps = size("bps", &opening.bps)?;
    let mut client = connection.open()?;
    let server = nbd_server(&mut client)?;
    if server["address"].is_null() {
        return Err(CommandLineError::NoNbd);
    }
    let token = token();
    arguments["x-ringdisk-token"] = token.as_str().into();
    let caller = client.hang_up_handle()?;
    let frozen = Frozen::freeze(&opening.guest_agent, interrupt)?;
    let setup = || client.call_for("backup-access-setup", arguments, is_list);
    let (begun, watched) = frozen.during(setup, || caller.hang_up());
    let begun = begun.map_err(CommandLineError::from);
    if let Err(CommandLineError::Refused(why)) = begun {
        return Err(CommandLineError::Refused(why));
    }
    let exported = watched.and(begun).and_then(|begun| {
        let work = || export(&mut client, &begun, bps, &server);
        let (exported, watched) = interrupt.watch(None, work, || caller.hang_up());
        watched.and(exported)
    });
    match exported {
        Ok((disks, text)) => Ok(Begun { disks, token, text }),
        Err(e) => {
            caller.hang_up();
            Err(undo(connection, id, Some(&token), e))
        }
    }
}

/// Ends a backup that may have begun, after the client has hung up. If it is about to begin, the server ends it, because the
/// client has left. Returns the error for the user.
pub fn undo(
    connection: &Connection,
    id: &str,
    token: Option<&str>,
    error: CommandLineError,
) -> CommandLineError {
    let mut arguments = json!({ "target-id": id, "success": false });
    if let Some(token) = token {
        arguments["x-ringdisk-token"] = token.into();
    }
    let deadline = Instant::now() + UNDO;
    let ended = loop {
        let ended = Client::connect(connection.path(), UNDO)
            .and_then(|mut client| client.call("backup-access-teardown", arguments.clone()));
        match ended {
            // An upgrade is under way, which may fail before it has ended the backup.
            Err(ClientError::Refused { error, .. })
                if is_upgrading(&error) && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(100));
            }
            ended => break ended,
        }
    };
    let error = Box::new(error);
    match ended {
        // It had not begun; or its process has ended, and the backup with it.
        Ok(_) | Err(ClientError::NobodyListens(_)) => CommandLineError::NotOpen(error),
        Err(ClientError::Refused { error: refusal, .. }) if !is_upgrading(&refusal) => {
            CommandLineError::NotOpen(error)
        }
        Err(why) => {
            let mut command = format!("ringdisk backup end --id={} --failed", quote(id));
            if let Some(path) = &connection.control {
                command += &format!(" --control={}", quote(&path.to_string_lossy()));
            }
            CommandLineError::MayBeOpen {
                error,
                why,
                command,
            }
        }
    }
}

fn is_upgrading(refusal: &CommandError) -> bool {
    refusal.desc == HandoverInProgress.to_string()
}

/// Exports what has begun. Returns what is printed, as JSON for each disk, and as text.
fn export(
    client: &mut Client,
    begun: &Value,
    bps: Option<u64>,
    server: &Value,
) -> Result<(Vec<Value>, String), CommandLineError> {
    let mut rows = vec![row(["DISK", "SIZE", "BACKUP", "URI"])];
    let (mut all, mut notes) = (Vec::new(), Vec::new());
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
                Some(bitmap) if disk["bitmap-action"] == "used" => {
                    format!("incremental ({bitmap})")
                }
                _ => "full".into(),
            },
            uri.clone(),
        ]);
        if let Some(why) = why_full(&disk) {
            let name = disk["device"].as_str().unwrap_or_default();
            notes.push(format!("disk {name} is copied in full: {why}\n"));
        }
        disk["uri"] = uri.into();
        all.push(disk);
    }
    Ok((all, table(&rows) + "\n" + &notes.concat()))
}

/// The open backups, each with its devices.
fn open_backups(client: &mut Client) -> Result<Value, ClientError> {
    client.call_for("x-ringdisk-backups", json!({}), |reply| {
        let mut all = reply.as_array().into_iter().flatten();
        is_list(reply) && all.all(|backup| is_list(&backup["devices"]))
    })
}

fn list(connection: &Connection) -> CommandResult {
    let open = open_backups(&mut connection.open()?)?;
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
