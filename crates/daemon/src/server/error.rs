//! Errors of changes to the served disks.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use block::ThrottleError;
use image::Format;
use thiserror::Error;

use crate::config::conflicts::ConflictError;
use crate::config::nbd::NbdAddress;
use crate::config::spec::Problem;
use crate::node::NodeError;
use crate::sandbox::OutsideSandbox;
use crate::server::bitmap_plan::{BitmapError, ExportedBitmapError};
use crate::server::connection_info::quote;
use crate::server::iothreads::IoThreadError;
use crate::server::tls::TlsError;
use crate::socket::SocketError;

#[derive(Debug, Error)]
pub enum ServerError {
    #[error(transparent)]
    Conflict(#[from] ConflictError),
    #[error("there is no disk '{0}'; 'ringdisk list' shows those that are served")]
    NoNode(String),
    #[error("disk '{0}' is not served at present: {1}; ringdisk tries again")]
    Absent(String, String),
    #[error(
        "disk '{0}': stopped while it was being opened; nothing is lost, and the next start continues"
    )]
    Stopped(String),
    #[error("there is no export '{0}'")]
    NoExport(String),
    #[error("disk '{0}' is in use by '{1}'; remove that first")]
    NodeInUse(String, String),
    #[error(
        "{0}: in use by disk '{1}'; detach that first, or serve both with readonly=on (and if one builds on the other, name \
         their directory with --allow-backing)"
    )]
    FileInUse(PathBuf, String),
    #[error(
        "{0}: another process keeps it as it is: an image that is in use builds on it, or it is being copied. If the disk was moved \
         to an overlay ('ringdisk replace', a snapshot) where its VM comes from, name that file here (for libvirt, in the metadata: \
         'virsh metadata VM urn:ringdisk:libvirt:1 --live --config --key ringdisk --edit' there), and move the VM then"
    )]
    ReadElsewhere(String),
    #[error(
        "{0}: in use by this process: disk '{1}' used it and was detached, but its storage has not answered since; try \
         again when it answers"
    )]
    StillOpen(PathBuf, String),
    #[error("{0}; the disk is detached regardless")]
    Detached(Box<ServerError>),
    #[error("{}", with_disk(.0, .1))]
    Disk(String, Box<ServerError>),
    #[error(
        "the VM connected at {socket} uses another file than disk '{0}' has now; if another file has taken the place of {path}, \
         name the VM's own file with 'ringdisk replace {0} PATH'; if files or sockets in the configuration have changed, \
         run 'ringdisk reload' first", socket = .1.display(), path = .2
    )]
    OtherFile(String, PathBuf, String),
    #[error(
        "disk '{0}' already uses {1} with format={2}, and cannot be served with another format: its guest would overwrite \
         its data"
    )]
    SameFile(String, String, Format),
    #[error(
        "{path}: {problem}; is the path right, its file system mounted, and the copy complete? The file must contain what disk \
         '{disk}' contains: with an empty file, the VM would lose its data"
    )]
    FileMissing {
        disk: String,
        path: String,
        problem: &'static str,
    },
    #[error(
        "{0}: the disk's present image, {1}, builds on it, so it lacks what was written since; to go back to it nevertheless, \
         detach the disk first"
    )]
    Older(String, String),
    #[error("disk '{0}' stays served: it has moved from {1} to {2}")]
    HasMoved(String, String, String),
    /// The file, the disk, and its configured file.
    #[error(
        "{0}: no such file; disk '{1}' was moved there from {2}: mount its file system, or restore it. Only if {2} has everything that \
         it had ('qemu-img commit'), go back: 'ringdisk detach {1}', then 'ringdisk attach {2}' with the disk's settings"
    )]
    MovedFileMissing(String, String, String),
    /// The file and the disk.
    #[error(
        "{0}: no such file; a command has attached disk '{1}' with it: mount its file system, or restore it; 'ringdisk detach {1}' gives \
         it up"
    )]
    AttachedFileMissing(String, String),
    /// A file, and the one for which the disk has left it.
    #[error(
        "{0}: a disk was moved from it to {1}, and it has not changed since, so it lacks what its VM has written there; \
         configure {1}; or, to go back nevertheless, 'ringdisk detach' the disk, and 'ringdisk attach' it with {0}"
    )]
    LeftFile(String, String),
    /// An image, a file below it, and the one for which the disk has left that.
    #[error(
        "{0}: has nothing of its own, and builds on {1}, from which the disk was moved to {2}, so it lacks what the VM has \
         written there; configure {2}, or an image that builds on that; or, to go back nevertheless, 'ringdisk detach' the \
         disk, and 'ringdisk attach' it with {0}"
    )]
    AboveLeft(String, String, String),
    #[error("disk '{0}' was changed by another command at the same time; check it and try again")]
    ChangedMeanwhile(String),
    #[error(
        "{what} is in use by the command '{command}', which was begun {seconds} s ago and has not ended; nothing was changed; \
         try again when it has"
    )]
    Busy {
        what: String,
        command: &'static str,
        seconds: u64,
    },
    #[error("ringdisk is stopping; nothing was changed")]
    Stopping,
    #[error("the client has left")]
    Left,
    #[error(
        "a VM is connected to disk '{0}', which was not removed; shut the VM down first, or force the removal: the VM's disk \
         then stops answering"
    )]
    Connected(String),
    #[error(
        "disk '{0}' has temporary bitmaps ({1}), which end with it; remove them first ('ringdisk bitmap remove'), or force \
         the removal"
    )]
    TemporaryBitmaps(String, String),
    #[error("disk '{0}' is read-only; it can only be exported with writable=false")]
    ReadOnly(String),
    #[error("there are already {0}, which is the limit")]
    TooMany(String),
    #[error(
        "there is no throttle group '{0}'; [[throttle-group]] in the configuration, or the QMP command object-add, creates one"
    )]
    NoGroup(String),
    #[error("there is already a throttle group '{0}'")]
    SameGroup(String),
    #[error("throttle group '{0}' is in use by disk '{1}'; remove the disk from it first")]
    GroupInUse(String, String),
    #[error(transparent)]
    OutsideSandbox(#[from] OutsideSandbox),
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Bitmap(#[from] BitmapError),
    #[error(transparent)]
    Backup(#[from] BackupError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Nbd(#[from] NbdError),
    #[error(transparent)]
    IoThread(#[from] IoThreadError),
    #[error("disk {0}: {1}")]
    Unfit(String, Problem),
    #[error("disk {0}: cannot be resized: {1}")]
    Resize(String, String),
    #[error(
        "it is done, but a restart of ringdisk will lose it: {0}; then the next change saves it as well, and so does 'ringdisk \
         reload' of a ringdisk that has a configuration file"
    )]
    Unsaved(io::Error),
    #[error("disk {0}: its new location cannot be persisted: {1}")]
    Persist(String, io::Error),
    #[error("{0} could not be made durable; acknowledged writes may be lost: {1}")]
    Sync(String, io::Error),
    #[error(
        "{0}: its image cannot be closed: {1}; all acknowledged writes are in the journal {journal}, which does not survive a \
         crash of the host: free some space, and serve the image with ringdisk again before anything else uses it", journal = .2.display()
    )]
    InJournal(String, io::Error, PathBuf),
    #[error(
        "disk {0}: its storage does not answer; what the VM wrote and did not flush may be lost, and the \
         file stays locked until the kernel ends the requests"
    )]
    NotResponding(String),
    #[error("disk {0}: {1}")]
    Silent(String, String),
    #[error(
        "disk '{0}': its image keeps its data in {old}, and cannot use {new} instead while it is served; to use a copy of both, \
         name the copy of the image as well, or detach the disk first", old = .1.display(), new = .2.display()
    )]
    OtherDataFile(String, PathBuf, PathBuf),
    #[error(
        "disk '{0}': its file {1} has been deleted or replaced, and its data exists only as long as it is served; copy it first \
         ('ringdisk backup copy {0} --to FILE'), or force the removal, which gives the data up"
    )]
    FileDeleted(String, String),
    #[error("disk {0}: no thread can be started: {cause}", cause = block::explain_thread(.1))]
    Thread(String, io::Error),
    #[error(
        "disk {0}: its cluster does not answer, or another client has the image's lock ('rbd status', 'rbd lock ls'); \
         requests of its VM are unfinished, and data in the cache of cache=writeback may be lost"
    )]
    ClusterNotResponding(String),
}

/// Most disks of a backup, and most backups that are open.
pub const BACKUP_DISKS_MAX: usize = 256;

/// Most bytes of the id of a backup.
pub const BACKUP_ID_BYTES_MAX: usize = 128;

/// How long writes in flight may take to end when a backup begins.
pub const SETTLE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum BackupError {
    #[error("there is no backup '{0}'; 'ringdisk backup list' shows those that are open")]
    Missing(String),
    #[error("there is a backup '{0}' already; to end it: ringdisk backup end --id={id}", id = quote(.0))]
    Exists(String),
    #[error(
        "'{0}' is not the checkpoint of a backup, which has 32 hexadecimal digits, as 'ringdisk backup end' has printed it; \
         without --since, what the bitmap has is trusted, and --full copies everything"
    )]
    NoCheckpoint(String),
    #[error("a backup is of at least one disk, and of at most {BACKUP_DISKS_MAX}")]
    Disks,
    #[error("disk '{0}' is named twice; a backup is of different disks")]
    Twice(String),
    #[error("the id of a backup has {0} bytes; choose one of 1 to {BACKUP_ID_BYTES_MAX}")]
    LongId(usize),
    #[error(
        "the bitmap's name is too long: the backup needs a second, temporary bitmap backup-{0}-NAME; choose a name of at most \
         {1} bytes, or a shorter id"
    )]
    LongBitmapName(String, usize),
    #[error(
        "{0:?} cannot be the id of a backup: it has control characters or others that do not show, or '.' or '..' \
         as a part of a path"
    )]
    Id(String),
    #[error(
        "disk '{0}' is not served to a VM; only those that are can be backed up while they are in use"
    )]
    NotServed(String),
    #[error("disk '{0}' has an open backup, '{1}'; to end it: ringdisk backup end --id={id}", id = quote(.1))]
    Open(String, String),
    #[error(
        "Bitmap '{0}' is currently in use by another operation and cannot be used: backup '{1}' is open"
    )]
    Bitmap(String, String),
    #[error(
        "disk '{0}' may be in use on another host (lock=running): its VM is not connected, has not used it since it was started, \
         or was moved; try again when the VM uses it, or serve the disk of a VM that is off with lock=always"
    )]
    Released(String),
    #[error("the name '{0}' is taken by a disk; choose another id")]
    Name(String),
    #[error(
        "the name '{0}' is that of a disk in open backup '{1}'; choose another name, or wait for the end of the backup"
    )]
    Access(String, String),
    #[error(
        "Bitmap '{1}' of disk '{0}' is currently in use by another operation and cannot be used: an NBD export has it"
    )]
    BitmapExported(String, String),
    #[error("disk '{0}' has a bitmap '{1}'; choose another id")]
    BitmapName(String, String),
    #[error(transparent)]
    InvalidName(#[from] BitmapError),
    #[error(
        "disk '{0}' cannot have another bitmap, and one that records changes during the backup: it has too many, or they take \
         too much memory"
    )]
    TooManyBitmaps(String),
    #[error("disk '{0}' cannot have bitmaps: it is read-only or stores nothing")]
    NoBitmaps(String),
    #[error(
        "disk '{0}' was released when its VM stopped (lock=running), and cannot be locked for the backup: {1}"
    )]
    Acquire(String, String),
    #[error("disk '{0}': its bitmaps cannot be used: {1}")]
    Lock(String, io::Error),
    #[error("{path}: no file for old data can be created there: {1}", path = .0.display())]
    Fleece(PathBuf, io::Error),
    #[error("the backup could not begin: {0}")]
    Cut(io::Error),
    #[error("disk '{name}': writes in flight have not ended within {} s; its storage does not answer", SETTLE.as_secs(), name = .0)]
    Slow(String),
    #[error(
        "what has changed on disk '{0}' since its moment is not known: its bitmaps have become too large, or another client has had \
         its image"
    )]
    Changes(String),
    #[error(
        "disk '{0}': its image cannot be locked: {1}; another client may write to it during the backup: back it up where its VM \
         runs, or, if that client was killed, in half a minute"
    )]
    Foreign(String, io::Error),
    #[error("disk '{0}': its cluster does not answer; begin the backup when it does")]
    Silent(String),
    #[error(
        "requests of disk {0} wait until its storage works again: it may be full, and the log says more; when it works, \
         'ringdisk resume {0}' retries them; then begin the backup again"
    )]
    Stalled(String),
    #[error(
        "backup '{0}' is still open: it has all data, but its bitmaps could not advance: {1}; repair that, and repeat: ringdisk \
         backup end --id={id}", id = quote(.0)
    )]
    StillOpen(String, String),
    #[error(
        "backup '{0}' has failed and is ended; its bitmaps have all changes, as before it began, or cannot be used any more: {1}"
    )]
    Failed(String, String),
}

impl ServerError {
    /// The error for a disk in a Ceph cluster.
    pub(super) fn in_cluster(self) -> Self {
        match self {
            Self::NotResponding(name) => Self::ClusterNotResponding(name),
            error => error,
        }
    }
}

impl ServerError {
    /// Whether another process has the file.
    pub(super) fn is_locked(&self) -> bool {
        matches!(self, Self::Node(error) if error.locked().is_some())
    }

    /// Whether only a command can decide what becomes of the disk.
    pub(super) fn needs_command(&self) -> bool {
        matches!(self, Self::LeftFile(..) | Self::AboveLeft(..))
    }

    /// Whether this user may not make the disk's socket.
    pub(super) fn is_socket_refused(&self) -> bool {
        let Self::Export(ExportError::Socket(error)) = self else {
            return false;
        };
        match error {
            SocketError::Bind(_, e) | SocketError::Directory(_, e) | SocketError::Access(_, e) => {
                e.kind() == io::ErrorKind::PermissionDenied
            }
            SocketError::InUse(_) | SocketError::NotASocket(_) => false,
        }
    }

    /// Adds the name of the disk.
    pub fn of_disk(self, disk: &str) -> Self {
        Self::Disk(disk.to_owned(), Box::new(self))
    }
}

fn with_disk(disk: &str, problem: &ServerError) -> String {
    let text = problem.to_string();
    if text.starts_with(&format!("disk {disk}: ")) || text.contains(&format!("disk '{disk}'")) {
        return text;
    }
    format!("disk '{disk}': {text}")
}

#[derive(Debug, Error)]
pub enum ExportError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("disk {0}: cannot {1}: {cause}", cause = block::explain(.2, ""))]
    System(String, &'static str, io::Error),
    #[error("disk {0}: cannot start a thread: {cause}", cause = block::explain_thread(.1))]
    Thread(String, io::Error),
}

/// Why the NBD server does not do what was asked.
#[derive(Debug, Error)]
pub enum NbdError {
    #[error("the NBD server listens at {0} already; the QMP command nbd-server-stop ends it")]
    Running(NbdAddress),
    #[error(
        "NBD server not running; 'ringdisk export --listen ADDRESS' and the QMP command nbd-server-start start it, and \
        'ringdisk serve --nbd ADDRESS' at the start"
    )]
    NotRunning,
    #[error("the NBD server cannot listen at {0}: {cause}", cause = block::explain(.1, "name an address of this machine and a free port"))]
    Listen(NbdAddress, io::Error),
    #[error(
        "the sandbox allows no new TCP sockets: start ringdisk with --nbd {0}, or use a Unix socket"
    )]
    Sandboxed(NbdAddress),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("there is an NBD export with the id '{0}' already; choose another id")]
    SameId(String),
    #[error(
        "there is a disk '{0}' already, and its export to the VM has this id; choose another id"
    )]
    IdOfDisk(String),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("there is no tls-creds-x509 '{0}'; the QMP command object-add adds it")]
    NoTls(String),
    #[error("there is a tls-creds-x509 '{0}' already; choose another id")]
    SameTls(String),
    #[error("the NBD server uses '{0}'; the QMP command nbd-server-stop ends that")]
    TlsInUse(String),
    #[error("there is an NBD export named '{0}' already; choose another name")]
    SameName(String),
    #[error("'{0}' is {1} bytes long; names of NBD exports have at most {max}", max = nbd::NAME_BYTES_MAX)]
    LongName(String, usize),
    #[error("NBD export '{0}': its description has {1} bytes, and clients take at most {max}", max = nbd::NAME_BYTES_MAX)]
    LongDescription(String, usize),
    #[error("disk {0} is read-only; export it without writable (--writable)")]
    ReadOnly(String),
    #[error(
        "node '{0}' is not served to a VM; NBD exports are of served disks (add a vhost-user-blk export first)"
    )]
    NotServed(String),
    #[error(
        "NBD clients are connected to export '{0}'; disconnect them, or remove it with mode=hard (--force)"
    )]
    Connected(String),
    #[error("NBD export '{0}' uses the disk; remove that first (ringdisk export {name} --remove)", name = quote(.0))]
    InUse(String),
    #[error(transparent)]
    Bitmap(#[from] ExportedBitmapError),
}
