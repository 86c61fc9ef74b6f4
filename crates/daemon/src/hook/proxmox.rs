//! The hookscript of a VM of Proxmox VE (`qm(1)`), and the script of vzdump.
//!
//! `pre-start` serves the VM's disks before Proxmox activates volumes, also on the target of a migration; `post-stop` ends that.
//! No phase tells that a VM has gone to another host: from `post-start` on, a process waits until QEMU has ended. It and the
//! start of a VM exclude each other by Proxmox' lock of the VM's configuration.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use advisor::served::{self, ServedDisk};
use tracing::warn;

use super::disks::{Manager, VmDisk, prepare, release, through_upgrades};
use super::host::Host;
use crate::client::{CommandLineError, CommandResult, Connection};
use crate::config::spec::DiskSpec;

/// When disks are locked: on both hosts of a migration, while a VM runs on them; or always, for a backup of a VM that does not run.
const FOR_VM: &str = "running";
pub const FOR_BACKUP: &str = "always";

/// How long a VM's own stop may take to call `post-stop` after QEMU has ended.
const POST_STOP: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
#[command(
    after_help = "Example, as the snippet that 'hookscript:' of a VM names:
  #!/bin/sh
  exec ringdisk hook proxmox \"$@\"

The disks are in the VM's description, where 'ringdisk proxmox enable' writes them. VMs without are left alone."
)]
pub struct Args {
    /// Number of the VM
    vm: String,
    /// pre-start, post-start and post-stop do something, all others nothing
    phase: String,
    /// The process that is waited for
    #[arg(long, hide = true)]
    qemu: Option<i32>,
    #[command(flatten)]
    host: Host,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Example, in /etc/vzdump.conf:
  script: /usr/share/ringdisk/vzdump

The script calls: ringdisk hook vzdump \"$@\"")]
pub struct VzdumpArgs {
    /// vzdump's phase; only backup-start does something
    phase: String,
    /// vzdump's mode
    mode: Option<String>,
    /// Number of the VM
    vm: Option<String>,
    #[command(flatten)]
    host: Host,
}

/// Does what the phase asks for.
///
/// # Errors
/// A disk cannot be served: then none is served that was not before. Or one is still in use after the VM has ended.
pub fn run(args: &Args) -> CommandResult {
    match args.phase.as_str() {
        "pre-start" => start(args),
        "post-start" => watch(args),
        "post-stop" => {
            let disks = disks(args).unwrap_or_default();
            through_upgrades(|| end(&args.vm, &args.host, &args.connection, &disks))
        }
        "wait" => wait(args),
        _ => Ok(()),
    }
}

/// Makes a backup fail that would lack disks.
///
/// # Errors
/// It would.
pub fn vzdump(args: &VzdumpArgs) -> CommandResult {
    let (true, Some(vm)) = (args.phase == "backup-start", &args.vm) else {
        return Ok(());
    };
    // A container has no such configuration.
    let Some(text) = args.host.config(vm)? else {
        return Ok(());
    };
    let others = served::other_devices(&text);
    if !others.is_empty() {
        return Err(CommandLineError::Refused(format!(
            "VM {vm}: this backup would lack the disk at {}, which 'args:' has, and vzdump does not know: exclude the VM from this \
             job, and back the disk up with 'ringdisk backup copy'",
            others.join(", ")
        )));
    }
    let served = served::served(&text, &args.host.request(vm, None));
    let served =
        served.map_err(|problem| CommandLineError::Refused(format!("VM {vm}: {problem}")))?;
    let lacking: Vec<_> = served
        .iter()
        .filter(|disk| disk.is_backed_up)
        .map(|disk| disk.drive.as_str())
        .collect();
    if lacking.is_empty() {
        return Ok(());
    }
    Err(CommandLineError::Refused(format!(
        "VM {vm}: this backup would lack {}, which ringdisk serves and vzdump does not know: exclude the VM from this job, and \
         back it up with 'ringdisk proxmox backup {vm}'; or set backup=0 in the drive's line of its description",
        lacking.join(", ")
    )))
}

fn disks(args: &Args) -> Result<Vec<ServedDisk>, CommandLineError> {
    let text = args.host.config_anywhere(&args.vm)?.unwrap_or_default();
    let found = served::served(&text, &args.host.request(&args.vm, None));
    found.map_err(|problem| CommandLineError::Refused(format!("VM {}: {problem}", args.vm)))
}

/// The disks as ringdisk serves them, with the paths of their volumes.
fn with_paths(
    vm: &str,
    disks: &[ServedDisk],
    paths: &[String],
    lock: &str,
) -> Result<Vec<VmDisk>, CommandLineError> {
    let disks = disks.iter().zip(paths).map(|(disk, path)| {
        let spec = spec(vm, disk, path, lock).map_err(|problem| {
            CommandLineError::Refused(format!("VM {vm}: {}: {problem}", disk.drive))
        })?;
        let socket = Some(disk.socket.clone());
        Ok(VmDisk { spec, socket })
    });
    disks.collect()
}

fn spec(vm: &str, disk: &ServedDisk, path: &str, lock: &str) -> Result<DiskSpec, String> {
    let mut pairs = vec![
        ("file", path.to_owned()),
        ("name", disk.name.clone()),
        ("socket", disk.socket.clone()),
        ("domain", vm.to_owned()),
        ("target", disk.drive.clone()),
        ("lock", lock.to_owned()),
    ];
    pairs.extend(
        disk.keys
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone())),
    );
    DiskSpec::from_pairs(pairs).map_err(|e| e.to_string())
}

fn start(args: &Args) -> CommandResult {
    let refused = |problem: String| CommandLineError::Refused(format!("VM {}: {problem}", args.vm));
    let text = args.host.config_anywhere(&args.vm)?;
    let text = text.ok_or_else(|| refused("its configuration is on no host".into()))?;
    served::check_memory(&text, &args.host.request(&args.vm, None)).map_err(refused)?;
    let disks = disks(args)?;
    if disks.is_empty() {
        return Ok(());
    }
    through_upgrades(|| begin(&args.vm, &args.host, &args.connection, &disks, FOR_VM))
}

/// Activates the volumes of a VM that does not run, and serves them.
///
/// # Errors
/// One cannot be served. Then none is served that was not before.
pub fn begin(
    vm: &str,
    host: &Host,
    connection: &Connection,
    disks: &[ServedDisk],
    lock: &str,
) -> CommandResult {
    let volumes: Vec<_> = disks.iter().map(|disk| disk.volume.as_str()).collect();
    let paths = host.activate(&volumes)?;
    let disks = with_paths(vm, disks, &paths, lock)?;
    prepare(connection, Manager::Proxmox, &disks)
}

/// Ends the VM's disks, whatever its configuration says now, and deactivates the volumes, which Proxmox could not as long as
/// they were open.
///
/// # Errors
/// One is still in use, or was moved to another file.
pub fn end(vm: &str, host: &Host, connection: &Connection, disks: &[ServedDisk]) -> CommandResult {
    let volumes: Vec<_> = disks.iter().map(|disk| disk.volume.as_str()).collect();
    let paths = host.paths(&volumes)?;
    let named = with_paths(vm, disks, &paths, FOR_VM)?;
    release(connection, Manager::Proxmox, vm, &named)?;
    if !volumes.is_empty()
        && let Err(e) = host.deactivate(&volumes)
    {
        warn!("VM {vm}: its volumes stay active: {e}");
    }
    Ok(())
}

/// Starts a process that waits for the end of QEMU, outside this hook's control group.
fn watch(args: &Args) -> CommandResult {
    if disks(args)?.is_empty() {
        return Ok(());
    }
    let Some(qemu) = args.host.qemu(&args.vm) else {
        return Err(CommandLineError::Refused(format!(
            "VM {}: its QEMU is not found: after a migration to another host, 'ringdisk detach' ends its disks here",
            args.vm
        )));
    };
    let program = std::env::current_exe();
    let program = program.map_err(|e| CommandLineError::Here("cannot find this program", e))?;
    let mut words: Vec<std::ffi::OsString> = vec![program.into()];
    words.extend(
        [
            "hook",
            "proxmox",
            &args.vm,
            "wait",
            "--qemu",
            &qemu.to_string(),
        ]
        .map(Into::into),
    );
    words.extend(args.host.arguments());
    if let Some(control) = &args.connection.control {
        words.extend(["--control".into(), control.into()]);
    }
    let unit = format!("--unit=ringdisk-vm-{}-{qemu}", args.vm);
    let mut by_systemd = Command::new("systemd-run");
    by_systemd
        .args(["--quiet", "--collect", &unit, "--"])
        .args(&words);
    let is_started = by_systemd
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if is_started.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    let mut alone = Command::new(&words[0]);
    alone.args(&words[1..]).process_group(0);
    let started = alone
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    started
        .map(drop)
        .map_err(|e| CommandLineError::Here("cannot start a process that waits for QEMU", e))
}

/// Waits for the end of QEMU, and ends the disks that `post-stop` has not ended: the VM has gone to another host.
fn wait(args: &Args) -> CommandResult {
    // After a migration, the configuration is no longer here.
    let disks = disks(args)?;
    if let Some(qemu) = args.qemu {
        args.host.wait_for_end(qemu)?;
    }
    thread::sleep(POST_STOP);
    let _lock = args.host.lock(&args.vm)?;
    match args.host.qemu(&args.vm) {
        Some(_) => Ok(()),
        None => through_upgrades(|| end(&args.vm, &args.host, &args.connection, &disks)),
    }
}
