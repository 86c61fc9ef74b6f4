//! `ringdisk proxmox`: gives disks of a VM of Proxmox VE to ringdisk, and back.

mod backup;
mod vma;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use advisor::convert::Moved;
use advisor::served::{self, Changed, Request};
use clap::Subcommand;

use crate::check::moved;
use crate::client::{CommandLineError, CommandResult, Connection};
use crate::hook;
use crate::hook::host::Host;
use crate::log::complain;

/// The hookscript among the snippets of a storage.
const SNIPPET: &str = "#!/bin/sh
# Serves the disks of a VM that 'ringdisk proxmox enable' has given to ringdisk.
exec /usr/bin/ringdisk hook proxmox \"$@\"
";

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Let ringdisk serve disks of a stopped VM from its next start on
    Enable(Enable),
    /// Give the disks of a stopped VM back to Proxmox, as they were
    Disable(Disable),
    /// Make a backup that Proxmox restores
    Backup(backup::Backup),
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk proxmox enable 100 --dry-run
  ringdisk proxmox enable 100 --disk scsi0

The drive's line becomes a comment in the VM's notes, from which 'disable' restores it, and its volume an unused one. 'args:' has
ringdisk's device, and 'hookscript:' serves the disk. Proxmox' backups and snapshots do not contain the disk: see
docs/proxmox.md.")]
pub struct Enable {
    #[command(flatten)]
    which: Which,
    /// The storage of directories that has the hookscript among its snippets
    #[arg(long, value_name = "STORAGE", default_value = "local")]
    snippets: String,
    /// The VM's own hookscript calls 'ringdisk hook proxmox'
    #[arg(long, conflicts_with = "snippets")]
    own_hookscript: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Example:
  ringdisk proxmox disable 100")]
pub struct Disable {
    #[command(flatten)]
    which: Which,
    /// Control socket; default: control.qmp in /run/ringdisk
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Which {
    /// Number of the VM
    vm: String,
    /// Only this drive, as in scsi0; may be given several times
    #[arg(long, value_name = "DRIVE")]
    disk: Vec<String>,
    /// Print the change, and make none
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    host: Host,
}

/// Changes the configuration of a VM, or backs it up.
///
/// # Errors
/// Nothing has changed; or as the message says.
pub fn run(args: &Args) -> CommandResult {
    match &args.command {
        Command::Enable(args) => {
            let snippets = (!args.own_hookscript).then_some(args.snippets.as_str());
            let prepare = |_: &str, request: &Request<'_>| match request.snippets {
                Some(storage) => make_snippet(&args.which.host, storage, args.which.dry_run),
                None => Ok(()),
            };
            args.which.change(snippets, served::enable, prepare)
        }
        Command::Disable(args) => {
            let check = |text: &str, request: &Request<'_>| end(args, text, request);
            args.which.change(None, served::disable, check)
        }
        Command::Backup(args) => backup::run(args),
    }
}

impl Which {
    /// Changes the configuration, after a preparation that may refuse it.
    fn change(
        &self,
        snippets: Option<&str>,
        change: impl Fn(&str, &Request<'_>) -> Result<Changed, String>,
        prepare: impl Fn(&str, &Request<'_>) -> CommandResult,
    ) -> CommandResult {
        let Self { vm, host, .. } = self;
        let refused = |problem: String| {
            CommandLineError::Refused(format!("VM {vm}: {problem}; nothing has been changed"))
        };
        let path = host.config_path(vm);
        let here = host.config(vm)?;
        if here.is_none() {
            return Err(refused(format!(
                "{} does not exist: the VM is not on this host",
                path.display()
            )));
        }
        // From here on, it neither starts nor changes.
        let _lock = (!self.dry_run).then(|| host.lock(vm)).transpose()?;
        let before = host.config(vm)?.unwrap_or_default();
        let request = Request {
            drives: &self.disk,
            ..host.request(vm, snippets)
        };
        let Changed { text, messages } = change(&before, &request).map_err(refused)?;
        if !self.dry_run && host.qemu(vm).is_some() {
            return Err(refused("it runs: shut it down first".into()));
        }
        prepare(&before, &request)?;
        for message in messages {
            complain(&message);
        }
        let patch = served::patch(&path.display().to_string(), &before, &text);
        let mut out = std::io::stdout().lock();
        // The reader may have left.
        let _ = out.write_all(patch.as_bytes());
        if self.dry_run {
            return Ok(());
        }
        write(&path, &text).map_err(|e| CommandLineError::Target(path.clone(), e))
    }
}

/// Replaces a file of Proxmox' cluster file system as Proxmox does, which copies whole files to all hosts.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".tmp.{}", std::process::id()));
    let new = PathBuf::from(new);
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o640)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        drop(file);
        fs::rename(&new, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

/// Puts the hookscript among the snippets of a storage.
fn make_snippet(host: &Host, storage: &str, is_dry: bool) -> CommandResult {
    let storages = host.storages();
    let storages = storages
        .as_ref()
        .map_or("", |storages| storages.text.as_str());
    let directory = served::snippets(storages, storage)
        .map_err(|why| CommandLineError::Refused(format!("{why}; nothing has been changed")))?;
    let path = Path::new(&directory).join("ringdisk");
    let fail = |e| CommandLineError::Target(path.clone(), e);
    match fs::read_to_string(&path) {
        Ok(text) if text == SNIPPET => return Ok(()),
        Ok(_) => {
            return Err(CommandLineError::Refused(format!(
                "{}: is another script: move it away; nothing has been changed",
                path.display()
            )));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(fail(e)),
    }
    if is_dry {
        complain(&format!("{} would be made", path.display()));
        return Ok(());
    }
    fs::create_dir_all(&directory).map_err(fail)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&path)
        .map_err(fail)?;
    file.write_all(SNIPPET.as_bytes()).map_err(fail)
}

/// Ends what ringdisk still serves, unless a disk is on another file than its volume, which would lack what the VM has written
/// since.
fn end(args: &Disable, text: &str, request: &Request<'_>) -> CommandResult {
    let host = &args.which.host;
    let refused =
        |problem: String| CommandLineError::Refused(format!("VM {}: {problem}", request.vm));
    let mut served = served::served(text, request).map_err(refused)?;
    served.retain(|disk| request.drives.is_empty() || request.drives.contains(&disk.drive));
    let volumes: Vec<_> = served.iter().map(|disk| disk.volume.as_str()).collect();
    let paths = host.paths(&volumes)?;
    let moved: Vec<_> = (served.iter().zip(paths))
        .map(|(disk, file)| Moved {
            place: format!("VM {} {}", request.vm, disk.drive),
            socket: disk.socket.clone(),
            file,
        })
        .collect();
    let is_changed = !args.which.dry_run;
    let messages = moved::check(args.control.as_deref(), is_changed, &moved);
    for message in messages.map_err(refused)? {
        complain(&message);
    }
    let connection = Connection {
        control: args.control.clone(),
        json: false,
    };
    match connection.open() {
        // Two programs would have it.
        Ok(_) if is_changed => hook::proxmox::end(request.vm, host, &connection, &served),
        _ => Ok(()),
    }
}
