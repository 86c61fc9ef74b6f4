//! The disks of a VM, as its manager's hook serves them and ends that.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use control::{Client, ClientError};
use serde_json::{Value, json};

use crate::client::{CommandLineError, CommandResult, Connection, answer, disk_now};
use crate::config::spec::{DiskSpec, FileSpec};
use crate::server::handover::HandoverInProgress;

/// How long to wait for a reply of ringdisk, which gives storage 20 s: the manager waits for the hook.
const REPLY: Duration = Duration::from_secs(30);

/// How many disks of a VM end at the same time: the server has a limit of clients.
const AT_ONCE: usize = 8;

/// How long the connection of a QEMU that has ended may stay.
const LEAVING: Duration = Duration::from_secs(5);

/// How long an upgrade of ringdisk may take.
const UPGRADE: Duration = Duration::from_secs(30);

/// Does what a hook is for, and again if another ringdisk takes over from this one at that moment: nobody else tries again. What
/// hooks do can be repeated.
///
/// # Errors
/// Those of the work, or of the connection.
pub fn through_upgrades(work: impl Fn() -> CommandResult) -> CommandResult {
    let deadline = Instant::now() + UPGRADE;
    loop {
        let done = work();
        match done {
            Err(e) if is_by_upgrade(&e) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(100));
            }
            done => return done,
        }
    }
}

fn is_by_upgrade(error: &CommandLineError) -> bool {
    matches!(error, CommandLineError::Client(ClientError::HungUp(_)))
        || error.to_string().contains(&HandoverInProgress.to_string())
}

/// Who starts the VM, for what the administrator is told.
#[derive(Clone, Copy)]
pub enum Manager {
    Libvirt,
    Proxmox,
}

impl Manager {
    /// What to do if a disk is on another file than the one that the manager names.
    fn if_moved(self, name: &str, file: &str) -> String {
        match self {
            Self::Libvirt => format!(
                "if the disk has moved there, put file='{file}' into the metadata (of a saved state: 'virsh managedsave-edit' or \
                 'save-image-edit'); if what was written there may be lost, 'ringdisk detach {name}'"
            ),
            Self::Proxmox => format!(
                "if the disk has moved there, 'ringdisk replace' or 'qemu-img convert' brings it back to a volume of Proxmox; if what \
                 was written there may be lost, 'ringdisk detach {name}'"
            ),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Libvirt => "the domain's metadata",
            Self::Proxmox => "the VM's configuration",
        }
    }
}

/// A disk that a VM has.
#[derive(Debug, PartialEq)]
pub struct VmDisk {
    pub spec: DiskSpec,
    /// Where QEMU connects; none if the VM has no such disk now.
    pub socket: Option<String>,
}

fn refused<T>(disk: &DiskSpec, problem: &str) -> Result<T, CommandLineError> {
    let problem = format!("disk {}: {problem}", disk.name);
    Err(CommandLineError::Refused(problem))
}

/// Serves all disks of a VM.
///
/// # Errors
/// One cannot be served. Then none is served that was not before.
pub fn prepare(connection: &Connection, manager: Manager, disks: &[VmDisk]) -> CommandResult {
    let client = &mut connection.open_for(REPLY)?;
    let mut new = Vec::new();
    let all = disks.iter().try_for_each(|disk| {
        if serve(client, manager, disk)? {
            new.push(&disk.spec.name);
        }
        Ok(())
    });
    if all.is_err() {
        for name in new {
            // The first error is the one to be seen.
            let _ = client.call("x-ringdisk-detach", json!({ "id": name }));
        }
    }
    all
}

/// Serves a disk, unless it is served from the file that the manager names: on an older one, the VM would lose what it has
/// written since. Returns whether the hook has attached it.
fn serve(client: &mut Client, manager: Manager, disk: &VmDisk) -> Result<bool, CommandLineError> {
    let VmDisk { spec, socket } = disk;
    let name = &spec.name;
    let Some(socket) = socket else {
        return refused(
            spec,
            "is named in the domain's metadata, but the domain has no <disk type='vhostuser'> with this target",
        );
    };
    if let FileSpec::Path(path) = &spec.file
        && path.is_relative()
    {
        // To what, nobody has said: ringdisk's working directory is not the manager's.
        let (path, whose) = (path.display(), manager.text());
        return refused(
            spec,
            &format!("'{path}' in {whose} is no absolute path; write it with its directory"),
        );
    }
    let now = when_disconnected(client, name)?;
    if now.as_ref().is_some_and(|now| now["connected"] == true) {
        return refused(
            spec,
            "a VM is connected to it already: another domain has it, or a process of this one is left ('ringdisk list')",
        );
    }
    let text = |key: &str| now.as_ref().and_then(|now| now[key].as_str());
    let problem = text("problem");
    if let Some(file) = text("file") {
        if !is_same_file(&spec.file, file) {
            let absent =
                problem.map_or_else(String::new, |why| format!(" (not at present: {why})"));
            let (wanted, whose) = (&spec.file, manager.text());
            let way_out = manager.if_moved(name, file);
            return refused(
                spec,
                &format!("is served from {file}{absent}, and {whose} says {wanted}; {way_out}"),
            );
        }
        if problem.is_none() {
            // Another file may have taken its name since it was opened.
            let is_same = client.call(
                "x-ringdisk-connect-info",
                json!({ "id": name, "file": file }),
            );
            with_name(spec, is_same)?;
        }
    }
    if let Some(its) = text("socket").filter(|_| problem.is_none()) {
        return match its == socket {
            true => Ok(false),
            false => refused(
                spec,
                &format!(
                    "is served at {its}, and the domain connects to {socket}; change the <source> of its <disk>, or detach it with \
                 'ringdisk detach {name}'"
                ),
            ),
        };
    }
    let arguments = json!({ "disk": spec.to_string(), "unless-left": true });
    with_name(spec, client.call("x-ringdisk-attach", arguments))?;
    // One that was absent was there already.
    Ok(now.is_none())
}

/// The disk, once the VM that has ended is disconnected, which ringdisk may not have seen yet.
fn when_disconnected(client: &mut Client, name: &str) -> Result<Option<Value>, CommandLineError> {
    let deadline = Instant::now() + LEAVING;
    loop {
        let now = disk_now(client, name)?;
        let is_connected = now.as_ref().is_some_and(|now| now["connected"] == true);
        if !is_connected || Instant::now() > deadline {
            return Ok(now);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// The reply, or the error with the name of the disk.
fn with_name(
    spec: &DiskSpec,
    reply: Result<Value, control::ClientError>,
) -> Result<Value, CommandLineError> {
    reply.or_else(|e| match CommandLineError::from(e) {
        CommandLineError::Refused(problem) => refused(spec, &problem),
        e => Err(e),
    })
}

/// Ends all disks that were attached for a VM, whether its manager still names them or not. `label` is what they have as
/// `domain`.
///
/// # Errors
/// One is still in use, or has moved. The others have ended.
pub fn release(
    connection: &Connection,
    manager: Manager,
    label: &str,
    disks: &[VmDisk],
) -> CommandResult {
    let mut all = answer(&mut connection.open_for(REPLY)?)?;
    let all = all["disks"].as_array_mut().map(std::mem::take);
    let all = all.unwrap_or_default();
    let text = |now: &Value, key: &str| now[key].as_str().map(str::to_owned);
    let is_its =
        |now: &&Value| text(now, "domain").as_deref() == Some(label) && now["configured"] != true;
    let of_vm: Vec<_> = (all.iter().filter(is_its))
        .filter_map(|now| Some((text(now, "name")?, text(now, "file")?)))
        .collect();
    let mut result = Ok(());
    // Together: the storage of several may hang, and the manager waits.
    for some in of_vm.chunks(AT_ONCE) {
        let ended = thread::scope(|scope| {
            let end = |(name, file): &(String, String)| {
                let named = disks.iter().find(|disk| disk.spec.name == *name);
                let (name, file) = (name.clone(), file.clone());
                scope.spawn(move || {
                    let mut client = connection.open_for(REPLY)?;
                    let_go(&mut client, manager, &name, &file, named)
                })
            };
            let ending: Vec<_> = some.iter().map(end).collect();
            let ended = ending.into_iter().map(|end| end.join());
            ended
                .map(|end| end.unwrap_or_else(|p| std::panic::resume_unwind(p)))
                .fold(Ok(()), Result::and)
        });
        result = result.and(ended);
    }
    result
}

/// Stops serving a disk. One that was moved to another file meanwhile stays: the manager names the previous one, on which the
/// VM must not be started again.
fn let_go(
    client: &mut Client,
    manager: Manager,
    name: &str,
    file: &str,
    named: Option<&VmDisk>,
) -> CommandResult {
    if let Some(VmDisk { spec, .. }) = named
        && !is_same_file(&spec.file, file)
    {
        let way_out = match manager {
            Manager::Libvirt => format!("put file='{file}' into the domain's metadata"),
            Manager::Proxmox => manager.if_moved(name, file),
        };
        return refused(
            spec,
            &format!("stays served, since it has moved to {file}: {way_out}"),
        );
    }
    let deadline = Instant::now() + LEAVING;
    loop {
        // It may be moving at this moment.
        let ended = client.call("x-ringdisk-detach", json!({ "id": name, "file": file }));
        let Err(e) = ended.map_err(CommandLineError::from) else {
            return Ok(());
        };
        // QEMU has ended, and ringdisk may not have seen it.
        let is_connected = e.to_string().contains("a VM is connected");
        if !is_connected || Instant::now() > deadline {
            return Err(e);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

pub(super) fn is_same_file(configured: &FileSpec, now: &str) -> bool {
    if configured.to_string() == now {
        return true;
    }
    match configured {
        FileSpec::Path(path) => {
            let both = [path.canonicalize(), Path::new(now).canonicalize()];
            matches!(both, [Ok(configured), Ok(now)] if configured == now)
        }
        _ => match (
            configured,
            format!("file={}", now.replace(',', ",,")).parse(),
        ) {
            (
                FileSpec::Rbd(image),
                Ok(DiskSpec {
                    file: FileSpec::Rbd(other),
                    ..
                }),
            ) => image.is_same_image(&other),
            (configured, Ok(DiskSpec { file, .. })) => *configured == file,
            _ => false,
        },
    }
}
