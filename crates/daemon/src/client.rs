//! The subcommands that talk to a running ringdisk over its control socket.

mod attach;
pub mod backup;
mod bitmap;
pub mod domain;
mod export;
mod guest_agent;
pub mod interrupt;
pub mod nbd_client;
mod rates;
mod stats;
mod top;

pub use attach::{AttachArgs, DetachArgs, attach, detach};
pub use backup::{BackupArgs, backup};
pub use bitmap::{BitmapArgs, bitmap};
pub use export::{ExportArgs, export};
use stats::check_present;
pub use stats::{StatsArgs, stats};
pub use top::{TopArgs, top};

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use block::{ThrottleLimits, format_size, parse_size};
use control::{Client, ClientError};
use harness::text::{escaped, printable, printable_json, printable_lines};
use image::Format;
use serde_json::{Value, json};
use thiserror::Error;

use crate::config::limits;
use crate::config::reference::limits_help;
use crate::config::spec::SpecError;
use crate::monitor::control_socket;
use crate::monitor::explain;

/// The longest time that a command may take. It may wait for another one about the same disk; attaching a disk may wait for a
/// lock, and detaching one for its I/O.
const TIMEOUT: Duration = Duration::from_secs(100);

/// The options of every command: where to connect, and how to print the reply.
#[derive(clap::Args)]
pub struct Connection {
    /// Control socket; default: control.qmp in /run/ringdisk (root), $XDG_RUNTIME_DIR/ringdisk, or the working directory
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk list
  ringdisk list --json | jq -r '.[].socket'
  ringdisk list --explain     the settings that decide the speed of each disk, and their sources")]
pub struct ListArgs {
    /// Show the settings that decide the speed of each disk, with their sources (default, ceph.conf, monitors, ringdisk,
    /// command line, pool, image) and with what they override
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk connect-info vm2
  ringdisk connect-info vm2 --json | jq -r .libvirt.disk

'ringdisk serve' and 'ringdisk attach' print the same when they begin to serve a disk.")]
pub struct ConnectInfoArgs {
    /// Name of the disk
    name: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk resize vm2 40G     grows the file and tells the VM
  ringdisk resize vm2         after lvextend: tells the VM the new size")]
pub struct ResizeArgs {
    /// Name of the disk
    name: String,
    /// New size, as in 40G, at least the current one, or by how much it grows, as in +1G; default: the size of the file or
    /// device
    size: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = format!("Examples:
  ringdisk throttle vm2 iops=5000 iops-max=20000 iops-max-length=30
  ringdisk throttle vm2 bps-wr=100M group=bronze
  ringdisk throttle vm2                             removes all limits

A limit that is not given is removed. Limits (bytes may have a unit, as in bps=100M):
{}", limits_help()))]
pub struct ThrottleArgs {
    /// Name of the disk
    name: String,
    /// Limit, or group=NAME to also share the limits of a group
    #[arg(value_name = "KEY=VALUE")]
    limits: Vec<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk replace vm2 /fast/vm2.raw
  ringdisk replace vm2 /fast/vm2.qcow2               a qcow2 image; the previous file may have another format
  ringdisk replace vm2 /dev/vg0/vm2 --format raw
  ringdisk replace vm2 rbd:vms/vm2:id=hypervisor     an image in a Ceph cluster

  qemu-img create -f qcow2 -b vm2.raw -F raw today.qcow2
  ringdisk replace vm2 today.qcow2                   a snapshot: vm2.raw no longer changes, new data goes to today.qcow2

The other file must hold the same bytes and be at least as long. The VM notices a short pause.")]
pub struct ReplaceArgs {
    /// Name of the disk
    name: String,
    /// New file, or rbd:POOL/IMAGE
    file: PathBuf,
    /// raw or qcow2; default: from the suffix of the file, otherwise raw if the previous file was configured as raw
    #[arg(long)]
    format: Option<Format>,
    /// External data file of the new image, if it has one
    #[arg(long, value_name = "PATH")]
    data_file: Option<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk resume vm2              the storage works again: retries the waiting requests at once
  ringdisk resume vm2 --report     the storage is lost: the VM gets an error for each waiting request

'ringdisk list' shows which disks have requests that wait for storage; rerror and werror of 'ringdisk serve' decide
which requests wait.")]
pub struct ResumeArgs {
    /// Name of the disk
    name: String,
    /// Report errors to the VM instead of retrying
    #[arg(long)]
    report: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Example:
  ringdisk reload

Reloads the configuration file, as SIGHUP does, and prints the first error in it.")]
pub struct ReloadArgs {
    /// If this program differs from the running one, replace that first, as 'ringdisk upgrade' does
    #[arg(long)]
    pub upgrade: bool,
    #[command(flatten)]
    pub connection: Connection,
}

#[derive(Debug, Error)]
pub enum CommandLineError {
    #[error(transparent)]
    Client(ClientError),
    /// The server's message, without the QMP command, which means nothing to the user.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("'{0}' is not key=value; as in iops=5000, bps-wr=100M or group=bronze")]
    Limit(String),
    #[error("{0}: {1}")]
    Value(String, String),
    #[error("there is no disk '{0}'; served are: {1}")]
    NoDisk(String, String),
    #[error("disk '{0}' is not served at present: {1}; ringdisk tries again")]
    Absent(String, String),
    #[error("the terminal: {0}; 'ringdisk stats' works without one")]
    Terminal(io::Error),
    #[error("{0}: {1}")]
    Here(&'static str, io::Error),
    #[error(
        "ringdisk does not listen for NBD clients: start it with --nbd, or export a disk with --listen"
    )]
    NoNbd,
    #[error("there is no NBD export '{0}'; 'ringdisk export' lists them")]
    NoExport(String),
    #[error("{path}: {1}", path = .0.display())]
    Target(PathBuf, io::Error),
    #[error("NBD export '{0}' could not be copied: {1}")]
    Copy(String, io::Error),
    #[error(
        "the NBD server at {0} wants TLS: copy the backup with nbdcopy, which has --tls-certificates, or let ringdisk listen at a \
         Unix socket"
    )]
    Tls(String),
    #[error("the copy is complete and durable, but: {0}")]
    CopyIsComplete(Box<Self>),
    #[error("there is no backup '{0}'; 'ringdisk backup list' shows those that are open")]
    NoBackup(String),
    #[error("guest agent {path}: {1}", path = .0.display())]
    Agent(PathBuf, io::Error),
    #[error("guest agent {path}: the guest has thawed before the moment of the backup; try again", path = .0.display())]
    ThawedBefore(PathBuf),
    #[error("interrupted")]
    Interrupted,
    #[error("the result could not be printed: {0}")]
    Output(io::Error),
    #[error(
        "ringdisk has not answered for {} s (its log may tell why), and the guests have thawed",
        .0.as_secs()
    )]
    NoAnswer(Duration),
    #[error("a guest has not confirmed that it has thawed")]
    Frozen,
    #[error("{0}; no backup is open")]
    NotOpen(Box<Self>),
    #[error("{0}; nothing was copied, and the backup stays open")]
    StaysOpen(Box<Self>),
    #[error(
        "{0}; if the backup was open, its bitmaps may be those of a success: keep the copy, or make the next backup with \
         --full"
    )]
    MayHaveSucceeded(ClientError),
    #[error(
        "{error}; the backup may be open, and could not be ended ({why}); to end it, run: {command}"
    )]
    MayBeOpen {
        error: Box<Self>,
        why: ClientError,
        command: String,
    },
}

impl From<ClientError> for CommandLineError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused { error, .. } => Self::Refused(error.to_string()),
            error => Self::Client(error),
        }
    }
}

impl CommandLineError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec(_) | Self::Limit(_) | Self::Value(..) => 2,
            Self::CopyIsComplete(_) => 3,
            Self::StaysOpen(error) => error.exit_code(),
            _ => 1,
        }
    }
}

pub type CommandResult = Result<(), CommandLineError>;

impl Connection {
    pub fn open(&self) -> Result<Client, CommandLineError> {
        self.open_for(TIMEOUT)
    }

    /// The same for a caller who cannot wait that long for each reply.
    ///
    /// # Errors
    /// As above.
    pub fn open_for(&self, timeout: Duration) -> Result<Client, CommandLineError> {
        let path = self.path();
        let connected = Client::connect(&path, timeout);
        if let (None, Err(ClientError::NoSocket(_))) = (&self.control, &connected)
            && control_socket::is_service_elsewhere(&path)
        {
            return Err(ClientError::Denied(control_socket::of_service()).into());
        }
        Ok(connected?)
    }

    /// The control socket.
    pub fn path(&self) -> PathBuf {
        self.control
            .clone()
            .unwrap_or_else(control_socket::default_path)
    }

    /// Sends a command that returns nothing.
    fn order(&self, command: &str, arguments: Value, done: &str) -> CommandResult {
        let reply = self.open()?.call(command, arguments)?;
        self.say(&reply, done);
        Ok(())
    }

    /// Prints a reply, as JSON if the user asked for that.
    pub fn say(&self, reply: &Value, text: &str) {
        // The reader may have closed the pipe.
        let _ = self.try_to_say(reply, text);
    }

    /// As [`say`](Self::say).
    ///
    /// # Errors
    /// It could not be printed.
    pub fn try_to_say(&self, reply: &Value, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", self.shown(reply, text))?;
        out.flush()
    }

    /// Names of disks, threads and files in it, which others choose, do not control the terminal.
    fn shown(&self, reply: &Value, text: &str) -> String {
        if self.json {
            printable_json(&reply.to_string())
        } else {
            printable_lines(text.trim_end())
        }
    }
}

pub fn list(args: &ListArgs) -> CommandResult {
    if args.explain {
        let mut client = args.connection.open()?;
        let disks = client.call_for("x-ringdisk-explain", json!({}), is_list)?;
        args.connection.say(&disks, &explain::text(&disks));
        return Ok(());
    }
    let mut disks = match answer(&mut args.connection.open()?)?["disks"].take() {
        Value::Array(disks) => disks,
        _ => Vec::new(),
    };
    for disk in &mut disks {
        if let Value::Object(members) = disk {
            members.remove("stats");
        }
    }
    let mut rows = vec![row([
        "NAME", "SIZE", "VM", "STORAGE", "CACHE", "LIMITS", "FILE", "SOCKET",
    ])];
    for disk in &disks {
        let text = |key: &str| disk[key].as_str().unwrap_or("-").to_owned();
        rows.push(vec![
            text("name"),
            disk["size"].as_u64().map_or("-".into(), format_size),
            match disk["connected"].as_bool() {
                Some(true) => "connected".into(),
                Some(false) => "-".into(),
                None => "not served".into(),
            },
            text("storage"),
            text("cache"),
            limits_text(disk),
            text("file"),
            text("socket"),
        ]);
    }
    let nothing = "no disk is served; 'ringdisk attach FILE' serves one";
    let mut text = if disks.is_empty() {
        nothing.to_owned()
    } else {
        table(&rows)
    };
    for disk in &disks {
        if let (Some(name), Some(problem)) = (disk["name"].as_str(), disk["problem"].as_str()) {
            text += &format!("\ndisk {name} is not served, and tried again: {problem}");
        }
    }
    args.connection.say(&disks.into(), &text);
    Ok(())
}

pub fn connect_info(args: &ConnectInfoArgs) -> CommandResult {
    let arguments = json!({ "id": args.name });
    let mut client = args.connection.open()?;
    let mut reply = client.call("x-ringdisk-connect-info", arguments)?;
    let text = reply["paste"].take();
    if let Value::Object(members) = &mut reply {
        members.remove("paste");
    }
    let text = text.as_str().unwrap_or_default().trim_end();
    args.connection.say(&reply, text);
    Ok(())
}

pub fn resize(args: &ResizeArgs) -> CommandResult {
    let mut client = args.connection.open()?;
    let size = match &args.size {
        None => None,
        Some(text) => {
            let (is_growth, text) = match text.strip_prefix('+') {
                Some(growth) => (true, growth),
                None => (false, text.as_str()),
            };
            let problem = |e| CommandLineError::Value("size".into(), e);
            let size = parse_size(text).map_err(problem)?;
            if is_growth {
                let too_large = || problem("is too large".into());
                let now = size_now(&mut client, &args.name)?;
                Some(now.checked_add(size).ok_or_else(too_large)?)
            } else {
                Some(size)
            }
        }
    };
    let arguments = match size {
        Some(size) => json!({ "id": args.name, "size": size }),
        None => json!({ "id": args.name }),
    };
    let reply = client.call_for("x-ringdisk-resize", arguments, |reply| {
        reply["size"].is_u64()
    })?;
    let size = format_size(reply["size"].as_u64().unwrap_or(0));
    let text = format!("disk {} has {size} now", args.name);
    args.connection.say(&reply, &text);
    Ok(())
}

/// A disk as it is now, if there is one with this name, served or not.
///
/// # Errors
/// The server does not answer.
pub fn disk_now(client: &mut Client, name: &str) -> Result<Option<Value>, CommandLineError> {
    Ok(find_disk(answer(client)?, name))
}

fn find_disk(mut answer: Value, name: &str) -> Option<Value> {
    let disks = answer["disks"].as_array_mut().map(std::mem::take);
    let its = |disk: &Value| disk["name"] == name || disk["export"] == name;
    disks.unwrap_or_default().into_iter().find(its)
}

/// The size of a disk in bytes.
fn size_now(client: &mut Client, name: &str) -> Result<u64, CommandLineError> {
    let all = answer(client)?;
    check_present(&all, name)?;
    let size = find_disk(all, name).and_then(|disk| disk["size"].as_u64());
    size.ok_or_else(|| {
        CommandLineError::Refused(format!("no disk '{name}'; 'ringdisk list' shows all"))
    })
}

pub fn throttle(args: &ThrottleArgs) -> CommandResult {
    let (mut given, mut group) = (Vec::new(), None);
    for pair in &args.limits {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(CommandLineError::Limit(pair.clone()));
        };
        match limits::key(key) {
            _ if key == "group" && group.is_none() => group = Some(value),
            Some(known) if given.iter().all(|(other, _)| *other != known) => {
                let value = limits::parse(known, value);
                let problem = |e| CommandLineError::Value(key.into(), e);
                given.push((known, value.map_err(problem)?));
            }
            known if known.is_some() || key == "group" => {
                let problem = "is given twice; which of the values is meant?".into();
                return Err(CommandLineError::Value(key.into(), problem));
            }
            _ => {
                let all: Vec<_> = limits::keys().collect();
                let problem = format!("is no limit; there are group, {}", all.join(", "));
                return Err(CommandLineError::Value(key.into(), problem));
            }
        }
    }
    let mut limits = ThrottleLimits::NONE;
    let value = |key| Ok(given.iter().find(|(k, _)| *k == key).map(|(_, n)| *n));
    limits::change::<CommandLineError>(&mut limits, value)?;
    limits
        .check()
        .map_err(|e| CommandLineError::Value("limits".into(), e.to_string()))?;
    let command = control::Command::BlockSetIoThrottle(control::BlockSetIoThrottle {
        device: None,
        id: Some(args.name.clone()),
        limits,
        group: group.map(str::to_owned),
    });
    let reply = args.connection.open()?.execute(&command)?;
    let text = match (limits.is_limited(), group) {
        (false, None) => format!("disk {} has no limits", args.name),
        (_, None) => format!("disk {} is limited", args.name),
        (_, Some(group)) => format!("disk {} is in group {group}", args.name),
    };
    args.connection.say(&reply, &text);
    Ok(())
}

pub fn replace(args: &ReplaceArgs) -> CommandResult {
    let file = if args
        .file
        .to_str()
        .is_some_and(|file| file.starts_with("rbd:"))
    {
        args.file.clone()
    } else {
        std::path::absolute(&args.file)
            .map_err(|e| CommandLineError::Here("cannot find the current directory", e))?
    };
    let mut arguments = json!({ "id": args.name, "file": file.to_string_lossy() });
    if let Some(format) = args.format {
        arguments["format"] = format.to_string().into();
    }
    if let Some(path) = &args.data_file {
        let path = std::path::absolute(path)
            .map_err(|e| CommandLineError::Here("cannot find the current directory", e))?;
        arguments["data-file"] = path.to_string_lossy().into();
    }
    let done = format!("disk {} is on {} now", args.name, file.display());
    args.connection
        .order("x-ringdisk-replace", arguments, &done)
}

pub fn resume(args: &ResumeArgs) -> CommandResult {
    let arguments = json!({ "id": args.name, "report": args.report });
    let mut client = args.connection.open()?;
    let reply = client.call("x-ringdisk-resume", arguments)?;
    let mut done = if args.report {
        format!(
            "disk {}: the VM gets errors for the requests that storage had failed to serve",
            args.name
        )
    } else {
        format!("disk {}: retrying the requests that waited", args.name)
    };
    if disk_now(&mut client, &args.name)?.is_some_and(|disk| disk["storage"] == "hangs") {
        done += "; its storage hangs, and requests that it has not answered wait until it does";
    }
    args.connection.say(&reply, &done);
    Ok(())
}

pub fn reload(args: &ReloadArgs) -> CommandResult {
    let mut client = args.connection.open()?;
    let reply = client.call_for("x-ringdisk-reload", json!({}), Value::is_object)?;
    let sentences = ["left-out", "unreachable"].map(|key| reply[key].as_array());
    let sentences = sentences.into_iter().flatten().flatten();
    let sentences = sentences.filter_map(Value::as_str).map(escaped);
    let mut lines: Vec<_> = sentences.collect();
    let done = "the configuration was reloaded and is in effect";
    let note = if lines.is_empty() { "" } else { "; note:" };
    lines.insert(0, format!("{done}{note}"));
    args.connection.say(&reply, &lines.join("\n"));
    Ok(())
}

/// All disks and I/O threads with their statistics.
pub fn answer(client: &mut Client) -> Result<Value, ClientError> {
    client.call_for("x-ringdisk-stats", json!({}), |reply| {
        is_list(&reply["disks"])
    })
}

/// The NBD server and its exports.
pub fn nbd_server(client: &mut Client) -> Result<Value, ClientError> {
    client.call_for("x-ringdisk-nbd", json!({}), |reply| {
        is_list(&reply["exports"])
    })
}

/// Whether a reply is a list of objects.
fn is_list(reply: &Value) -> bool {
    let all = reply.as_array();
    all.is_some_and(|all| all.iter().all(Value::is_object))
}

fn limits_text(disk: &Value) -> String {
    let mut words = Vec::new();
    if let Some(limits) = disk["limits"].as_object() {
        words.extend(limits.iter().map(|(key, value)| match value.as_u64() {
            Some(n) if key.starts_with("bps") && !key.ends_with("length") => {
                format!("{key}={}", format_size(n))
            }
            _ => format!("{key}={value}"),
        }));
    }
    if let Some(group) = disk["throttle-group"].as_str() {
        words.push(format!("group={group}"));
    }
    if words.is_empty() {
        "-".into()
    } else {
        words.join(",")
    }
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// Rows with their columns aligned. Names of others stay in their cells.
fn table(rows: &[Vec<String>]) -> String {
    let printable_row = |row: &Vec<String>| row.iter().map(|cell| printable(cell)).collect();
    let rows: Vec<Vec<_>> = rows.iter().map(printable_row).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths);
        let line: String = cells
            .map(|(cell, width)| format!("{cell:<width$}  "))
            .collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_others_do_not_control_the_terminal() {
        let reply = json!({ "thread": "a\u{202e}b\u{9b}" });
        let shown = |json| {
            let connection = Connection {
                control: None,
                json,
            };
            connection.shown(&reply, "a\u{202e}b\u{9b}\nc\n")
        };
        assert_eq!(shown(false), "a?b?\nc");
        let rows = [row(["a\nb", "c"]), row(["d\te", ""])];
        assert_eq!(table(&rows), "a?b  c\nd?e\n");
        assert_eq!(shown(true), r#"{"thread":"a\u202eb\u009b"}"#);
    }
}
