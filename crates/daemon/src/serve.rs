//! `ringdisk serve`: serves disks until it is told to stop.

mod service;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::conflicts::ConflictError;
use crate::config::cpus::Cpus;
use crate::config::spec::SpecError;
use crate::config::{self, ConfigError, POLL_CPU, POLL_MAX_US_MAX, SandboxMode};
use crate::sandbox::SandboxError;
use crate::server::ServerError;
use crate::socket::SocketError;
use crate::state::store::StateError;
use crate::upgrade::successor;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk serve vm1.raw
  ringdisk serve file=/dev/vg0/vm1,cache=none,queues=4,socket=/run/ringdisk/vm1.sock
  ringdisk serve rbd:vms/vm1,id=vms      an image in a Ceph cluster
  ringdisk serve null:64G                measures the path alone, stores nothing

Options of a disk (a comma in a value is doubled):
  file=PATH            file or block device; null:SIZE stores nothing;
                       rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:KEY=VALUE...] is an image in a Ceph cluster,
                       with options of librbd by their names
  conf=PATH, id=USER, keyring=PATH, cluster=NAME, connections=N
                       how the cluster of an image is reached; default: /etc/ceph/ceph.conf, admin
  name=NAME            default: from the file
  format=raw|qcow2     default: from .raw, .img or .qcow2, raw for a block device; never from the content
  l2-cache-size=SIZE   memory for the tables of a qcow2 image; default: all of them, 1M for 8G of disk
  socket=PATH          default: NAME.sock in $RUNTIME_DIRECTORY (systemd), /run/ringdisk (root),
                       $XDG_RUNTIME_DIR/ringdisk, or here
  socket-mode=MODE, socket-group=GROUP, socket-owner=USER
                       who may connect, as in socket-mode=0660,socket-group=kvm; default: as any file made here
  cache=MODE           as in QEMU. none (default): O_DIRECT; writeback: through the host's page cache
                       (of an image in a Ceph cluster: librbd's);
                       directsync, writethrough: the same, and each write is durable when it is done;
                       unsafe: as writeback, and flushes are IGNORED
  aio=auto|io_uring|native|threads
                       default: auto, which suits the file and works here; the log says which and why
  queues=N             default: the number of CPUs, up to 16
  queue-size=N         a power of two from 16 to 1024, default 256
  readonly=on|off      default: off
  serial=TEXT          up to 20 characters, seen in the guest
  discard=unmap|ignore default: unmap; ignore keeps the space that the guest gives back
  detect-zeroes=off|on|unmap
                       default: off; on zeroes ranges instead of writing zeroes, unmap gives them back
  rerror=report|stop|retry, werror=enospc|report|stop|retry
                       what is done when storage fails. report (default of rerror): the guest gets an
                       error; enospc (default of werror): a write waits for space, all else is
                       reported; retry: it waits and is tried again; stop: it waits, and what follows,
                       until 'ringdisk resume'
  logical-block-size=512|4096, physical-block-size=512|4096
                       what the guest sees; default: the backing's
  iothreads=ID,...     I/O threads for its queues, in turn, by number or name; default: the next ones
  lock=always|running  default: always, as long as it is served; running: only while a VM runs on it, for
                       the host that a VM is to be migrated to
  fixed-buffers=on|off default: off; on pins all guest memory, which costs less CPU per I/O. NEVER
                       with a balloon, free page reporting or virtio-mem: data would be corrupted

SIGHUP reads the configuration anew, looks for disks that have grown and tells their guests. SIGTERM finishes what is under way,
makes it durable and ends. SIGKILL loses nothing that a guest was told is written.")]
pub struct Args {
    /// Disks: paths, or key=value pairs separated by commas
    #[arg(required_unless_present_any = ["config", "control"], value_name = "DISK")]
    disks: Vec<String>,

    /// Disks, groups and I/O threads, in TOML; operating/configuration.md in /usr/share/doc/ringdisk describes
    /// each key, and what SIGHUP, which reloads the file, does with a change
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Where QMP is spoken, and the other subcommands connect; default: control.qmp beside the disks'
    /// default sockets
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Where Prometheus finds metrics, as in 127.0.0.1:9747; they are not protected, and name your disks
    #[arg(long, value_name = "ADDR", value_parser = config::address)]
    metrics: Option<SocketAddr>,

    /// Directory where backing files and data files may be that images name, or below; repeatable; none for no
    /// such file at all; default: each image's own directory
    #[arg(long, value_name = "DIR")]
    allow_backing: Vec<PathBuf>,

    /// What this process may do once it serves: auto (default) is as much of a sandbox as works here, and the log says
    /// how much; on is all of it, or nothing is served; off is none
    #[arg(long, value_name = "MODE")]
    sandbox: Option<SandboxMode>,

    /// Directory where disks and sockets may be that come later, besides those of the disks that are named at the
    /// start; repeatable
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,

    /// The user that ringdisk becomes once all is open, and whose rights count from then on; for root
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// Directory in which is kept what must be there after a restart: what was changed while disks were served;
    /// default: $STATE_DIRECTORY (systemd), or nowhere
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,

    /// I/O threads, which the queues of all disks go to in turn; default: one per CPU, up to 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    iothreads: Option<u16>,

    /// CPUs for the I/O threads, as in 2,4-7: the first thread runs on the first, and so on in turn
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,

    /// How long an I/O thread polls before it sleeps, at most, in microseconds, for a guest that waits for
    /// each request before it sends the next; 0 is never; default: 100
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(0..=POLL_MAX_US_MAX))]
    poll_max_us: Option<u64>,

    /// What polling may cost beyond the sleeps that it saves, in percent of a core for each I/O thread;
    /// default: 80
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(*POLL_CPU.start() as i64..=*POLL_CPU.end() as i64))]
    poll_cpu: Option<u8>,

    /// Print what decides the speed of each disk, who said so, and what is overridden
    #[arg(long)]
    explain: bool,

    /// Take over from the process at the other end of standard input
    #[arg(long, hide = true)]
    take_over: bool,

    /// Print what to paste, and that all is ready, as one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Conflict(#[from] ConflictError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(
        "metrics cannot be served at {0}: {cause}",
        cause = block::explain(.1, "--metrics takes an address of this machine and a free port")
    )]
    Metrics(SocketAddr, io::Error),
    #[error("{0}: {cause}", cause = block::explain(.1, ""))]
    System(&'static str, io::Error),
}

impl ServeError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec(_) | Self::Config(ConfigError::Line { .. }) | Self::Conflict(_) => 2,
            _ => 1,
        }
    }
}

pub fn run(args: &Args) -> Result<(), ServeError> {
    let served = service::serve(args);
    if let Err(e) = &served
        && args.take_over
    {
        successor::report_failure(&e.to_string());
    }
    served
}
