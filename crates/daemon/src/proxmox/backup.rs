//! `ringdisk proxmox backup`: a backup that Proxmox restores, of a VM whose disks ringdisk serves.
//!
//! All disks are read as they were at one moment, through NBD. The order: the disks are served, if the VM does not run; the small
//! volumes that QEMU has itself are copied; the moment; all data, durably; the end of ringdisk's backup; and the disks are not
//! served any more, if the VM does not run. Proxmox' lock keeps the VM from starting and from moving meanwhile; if this program is
//! killed, it stays, as vzdump's does.

mod archive;
mod repository;
mod small;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use advisor::served;
use rustix::process::geteuid;
use serde_json::Value;

use crate::client::backup::{self, Opening};
use crate::client::interrupt::Interrupt;
use crate::client::nbd_client::Stop;
use crate::client::{CommandLineError, CommandResult, Connection, nbd_server};
use crate::hook;
use crate::hook::disks::through_upgrades;
use crate::hook::host::Host;
use crate::log::complain;
use crate::token::token;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk proxmox backup 100 --repository backup@pbs@pbs.example:store
  ringdisk proxmox backup 100 --repository backup@pbs@pbs.example:store -- --ns vms --keyfile /etc/pve/priv/key.json
  ringdisk proxmox backup 100 --dir /var/lib/vz/dump

Proxmox Backup Server: its client reads everything, and sends what the server lacks; PBS_PASSWORD and PBS_FINGERPRINT are as for \
proxmox-backup-client. A directory gets an archive as vzdump makes it; that of a storage ('dump' in it) is listed there. Both can be \
restored in the GUI, to a VM of Proxmox' own. Meanwhile, the VM is locked (backup), as by vzdump: one that does not run cannot be started.

Exit status: 0 if the backup is complete and durable; 1 if there is none; 2 after a mistake in the command; 3 if it is complete and durable, \
and the message says what has not ended.")]
pub struct Backup {
    /// Number of the VM
    vm: String,
    /// Repository of Proxmox Backup Server, as in user@realm@host:datastore
    #[arg(long, required_unless_present = "dir", conflicts_with = "dir")]
    repository: Option<String>,
    /// Directory for an archive
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Do not compress the archive with zstd
    #[arg(long, requires = "dir")]
    uncompressed: bool,
    /// More arguments for proxmox-backup-client
    #[arg(last = true, value_name = "ARGUMENTS", requires = "repository")]
    client: Vec<OsString>,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    host: Host,
    /// Control socket; default: control.qmp in /run/ringdisk
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Data of a backup.
pub struct Part {
    /// As in `scsi0`.
    pub drive: String,
    /// As in `drive-scsi0`.
    pub name: String,
    pub bytes: u64,
    pub data: Data,
}

pub enum Data {
    Export { name: String, uri: String },
    File(PathBuf),
}

/// What a backup has, when it is read.
pub struct Contents {
    /// Names as Proxmox Backup Server and as an archive have them, and text.
    pub configs: Vec<(&'static str, &'static str, String)>,
    pub parts: Vec<Part>,
}

/// # Errors
/// There is no backup, or the message says that something has not ended.
pub fn run(args: &Backup) -> CommandResult {
    let (vm, host) = (args.vm.as_str(), &args.host);
    let refused = |problem: String| CommandLineError::Refused(format!("VM {vm}: {problem}"));
    if let Some(missing) = missing_program(args) {
        return Err(refused(missing));
    }
    let connection = Connection {
        control: args.control.clone(),
        json: false,
    };
    // From here on, a signal does not end the process before it has cleaned up.
    let interrupt = Interrupt::register();
    let (plan, runs) = begin(vm, host, &connection)?;
    let made = make(args, &plan, runs, &connection, &interrupt);
    let ended = end(vm, host, &connection, &plan);
    match (made, ended) {
        (Ok(()), ended) => ended.map_err(|e| CommandLineError::CopyIsComplete(Box::new(e))),
        (made, Ok(())) => made,
        (made, Err(e)) => {
            complain(&e.to_string());
            made
        }
    }
}

/// Locks the VM as vzdump does, so that it neither starts nor moves to another host, and serves the disks of one that does not run.
/// Returns whether it runs.
fn begin(
    vm: &str,
    host: &Host,
    connection: &Connection,
) -> Result<(served::Backup, bool), CommandLineError> {
    let refused = |problem: String| CommandLineError::Refused(format!("VM {vm}: {problem}"));
    let _lock = host.lock(vm)?;
    let text = host.config(vm)?;
    let text = text.ok_or_else(|| refused("it is not on this host".into()))?;
    let locked = served::lock_for_backup(&text).map_err(refused)?;
    let plan = served::backup(&text, &host.request(vm, None)).map_err(refused)?;
    let runs = host.qemu(vm).is_some();
    if !runs {
        let small: Vec<_> = (plan.devices.iter())
            .filter(|device| device.disk.is_none())
            .map(|device| device.volume.as_str())
            .collect();
        host.activate(&small)?;
        let lock = hook::proxmox::FOR_BACKUP;
        through_upgrades(|| hook::proxmox::begin(vm, host, connection, &plan.served, lock))?;
    }
    let path = host.config_path(vm);
    if let Err(e) = super::write(&path, &locked) {
        if !runs {
            through_upgrades(|| hook::proxmox::end(vm, host, connection, &plan.served))?;
        }
        return Err(CommandLineError::Target(path, e));
    }
    Ok((plan, runs))
}

/// Unlocks the VM, and ends its disks if it does not run.
fn end(vm: &str, host: &Host, connection: &Connection, plan: &served::Backup) -> CommandResult {
    let _lock = host.lock(vm)?;
    if let Some(text) = host.config(vm)? {
        let path = host.config_path(vm);
        super::write(&path, &served::unlock_after_backup(&text)).map_err(|e| {
            CommandLineError::Refused(format!(
                "VM {vm} stays locked, until 'qm unlock {vm}': {}: {e}",
                path.display()
            ))
        })?;
    }
    if host.qemu(vm).is_some() {
        return Ok(());
    }
    through_upgrades(|| hook::proxmox::end(vm, host, connection, &plan.served))
}

fn missing_program(args: &Backup) -> Option<String> {
    let is_missing = |program: &&str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        !std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
    };
    let needed: &[&str] = match &args.repository {
        Some(_) => &["proxmox-backup-client", "nbdfuse", "setpriv"],
        None if args.uncompressed => &[],
        None => &["zstd"],
    };
    let program = needed.iter().copied().find(is_missing)?;
    Some(match program {
        "zstd" => "zstd is not installed: 'apt install zstd', or give --uncompressed".into(),
        "nbdfuse" => "nbdfuse is not installed: 'apt install libnbd-bin'".into(),
        program => format!("{program} is not installed: 'apt install {program}'"),
    })
}

fn make(
    args: &Backup,
    plan: &served::Backup,
    runs: bool,
    connection: &Connection,
    interrupt: &Interrupt,
) -> CommandResult {
    let (vm, host) = (args.vm.as_str(), &args.host);
    for drive in &plan.left_out {
        complain(&format!("VM {vm}: {drive} is left out: it has backup=0"));
    }
    let directory = Directory::new(vm)?;
    let mut parts = small::copy(host, &plan.devices, directory.path())?;

    let id = format!("proxmox-{vm}");
    let disks: Vec<_> = (plan.devices.iter())
        .filter_map(|device| device.disk.clone())
        .collect();
    let begun = open(args, runs, plan, connection, &id, &disks, interrupt)?;
    let token = Some(begun.token.as_str());
    let stop = Stop::default();
    let work = || {
        for device in plan.devices.iter().filter(|device| device.disk.is_some()) {
            parts.push(part(device, &begun.disks)?);
        }
        parts.sort_by_key(|part| plan.devices.iter().position(|it| it.drive == part.drive));
        let contents = Contents {
            configs: configs(vm, host, plan.config.clone())?,
            parts,
        };
        match (&args.repository, &args.dir) {
            (Some(repository), _) => {
                repository::send(vm, repository, &args.client, &contents, &directory, &stop)
            }
            (None, Some(dir)) => {
                let address = backup::address_of(&nbd_server(&mut connection.open()?)?)?;
                let form = archive::Form {
                    dir,
                    is_compressed: !args.uncompressed,
                };
                archive::write(vm, &form, &contents, &address, &stop)
            }
            (None, None) => Ok(String::new()),
        }
    };
    let (made, watched) = interrupt.watch(None, work, || stop.set());
    let text = match watched.and(made) {
        Ok(text) => text,
        Err(e) => return Err(backup::undo(connection, &id, token, e)),
    };
    let ended = backup::end(&mut connection.open()?, &id, true);
    connection.say(&Value::Null, &text);
    ended
        .map(drop)
        .map_err(|e| CommandLineError::CopyIsComplete(Box::new(e)))
}

/// Begins ringdisk's backup. As vzdump does, it freezes the file systems of a guest whose configuration has an agent, and goes on if
/// that does not answer.
fn open(
    args: &Backup,
    runs: bool,
    plan: &served::Backup,
    connection: &Connection,
    id: &str,
    disks: &[String],
    interrupt: &Interrupt,
) -> Result<backup::Begun, CommandLineError> {
    let begin = |opening: &Opening| {
        let devices = backup::devices(disks, "none", None, None);
        backup::open(connection, id, devices, opening, interrupt)
    };
    let agent = args.host.guest_agent(&args.vm);
    if !runs || !plan.has_agent || !args.opening.guest_agent.is_empty() || !agent.exists() {
        return begin(&args.opening);
    }
    match begin(&args.opening.with_agent(agent)) {
        Err(CommandLineError::Agent(path, why)) => {
            complain(&format!(
                "VM {}: the guest's file systems are not frozen: guest agent {}: {why}",
                args.vm,
                path.display()
            ));
            begin(&args.opening)
        }
        begun => begun,
    }
}

fn part(device: &served::BackupDevice, begun: &[Value]) -> Result<Part, CommandLineError> {
    let disk = begun
        .iter()
        .find(|disk| disk["device"].as_str() == device.disk.as_deref());
    let text = |key: &str| Some(disk?[key].as_str()?.to_owned());
    let (Some(name), Some(uri), Some(bytes)) = (
        text("node-name"),
        text("uri"),
        disk.and_then(|disk| disk["size"].as_u64()),
    ) else {
        return Err(CommandLineError::Refused(format!(
            "ringdisk's backup does not have {}",
            device.drive
        )));
    };
    Ok(Part {
        drive: device.drive.clone(),
        name: device.name.clone(),
        bytes,
        data: Data::Export { name, uri },
    })
}

fn configs(
    vm: &str,
    host: &Host,
    config: String,
) -> Result<Vec<(&'static str, &'static str, String)>, CommandLineError> {
    let mut all = vec![("qemu-server.conf", "qemu-server.conf", config)];
    if let Some(rules) = host.firewall(vm)? {
        all.push(("fw.conf", "qemu-server.fw", rules));
    }
    Ok(all)
}

/// A directory for what only this program reads. It is removed at the end.
pub struct Directory(PathBuf);

impl Directory {
    /// The VM is locked: those of others are of commands that were killed.
    fn new(vm: &str) -> Result<Self, CommandLineError> {
        let (parent, start) = (std::env::temp_dir(), format!("ringdisk-backup-{vm}-"));
        let entries = fs::read_dir(&parent).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start))
        {
            let is_own = |there: Metadata| there.is_dir() && there.uid() == geteuid().as_raw();
            if entry.metadata().is_ok_and(is_own) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let path = parent.join(start + &token());
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|e| CommandLineError::Target(path.clone(), e))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command that has no input, and waits for it.
///
/// # Errors
/// It cannot be started, or has failed.
fn run_to_end(command: &mut Command, what: &'static str) -> Result<(), CommandLineError> {
    let output = command.stdin(std::process::Stdio::null()).output();
    let output = output.map_err(|e| CommandLineError::Here(what, e))?;
    if output.status.success() {
        return Ok(());
    }
    let problem = String::from_utf8_lossy(&output.stderr);
    Err(CommandLineError::Refused(format!(
        "{what}: {} ({})",
        problem.trim(),
        output.status
    )))
}
