//! `ringdisk serve`: serves disks until it is told to stop.

pub mod probe;

mod service;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::conflicts::ConflictError;
use crate::config::cpus::Cpus;
use crate::config::file_keys::help;
use crate::config::nbd::NbdAddress;
use crate::config::reference::disk_help;
use crate::config::spec::SpecError;
use crate::config::{self, ConfigError, POLL_CPU, POLL_MAX_US_MAX, SandboxMode, THREADS_MAX};
use crate::sandbox::SandboxError;
use crate::server::ServerError;
use crate::socket::SocketError;
use crate::state::store::StateError;
use crate::upgrade::successor;

#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// Disk: a path, or key=value pairs separated by commas
    #[arg(required_unless_present_any = ["config", "control"], value_name = "DISK")]
    disks: Vec<String>,

    /// Configuration file with disks, groups of disks and I/O threads, in TOML. Options of the command line override it,
    /// and SIGHUP reloads it; operating/configuration.md in /usr/share/doc/ringdisk describes its keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    #[arg(long, value_name = "PATH", help = help("control"))]
    control: Option<PathBuf>,

    #[arg(long, value_name = "ADDRESS", value_parser = config::address, help = help("metrics"))]
    metrics: Option<SocketAddr>,

    #[arg(long, value_name = "ADDRESS", help = help("nbd"))]
    nbd: Option<NbdAddress>,

    #[arg(long, value_name = "DIR", help = help("nbd-tls"))]
    nbd_tls: Option<PathBuf>,

    #[arg(long, value_name = "DIR", help = help("allow-backing"))]
    allow_backing: Vec<PathBuf>,

    #[arg(long, value_name = "MODE", help = help("sandbox"))]
    sandbox: Option<SandboxMode>,

    #[arg(long, value_name = "DIR", help = help("allow-dir"))]
    allow_dir: Vec<PathBuf>,

    #[arg(long, value_name = "NAME", help = help("user"))]
    user: Option<String>,

    #[arg(long, value_name = "DIR", help = help("fleece"))]
    fleece: Option<PathBuf>,

    #[arg(long, value_name = "DIR", help = help("state"))]
    state: Option<PathBuf>,

    #[arg(long, value_name = "N", help = help("iothreads"),
        value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    iothreads: Option<u16>,

    #[arg(long, value_name = "LIST", help = help("cpus"))]
    cpus: Option<Cpus>,

    #[arg(long, value_name = "US", help = help("poll-max-us"),
        value_parser = clap::value_parser!(u64).range(0..=POLL_MAX_US_MAX))]
    poll_max_us: Option<u64>,

    #[arg(long, value_name = "PERCENT", help = help("poll-cpu"),
        value_parser = clap::value_parser!(u8).range(*POLL_CPU.start() as i64..=*POLL_CPU.end() as i64))]
    poll_cpu: Option<u8>,

    /// Print the settings that decide the speed of each disk, with their sources and with what they override
    #[arg(long)]
    explain: bool,

    /// Take over the disks of the process at the other end of standard input
    #[arg(long, hide = true)]
    take_over: bool,

    /// Print how to connect VMs to the disks as one line of JSON, when all disks are ready
    #[arg(long)]
    json: bool,
}

/// The examples and the keys of a disk.
fn after_help() -> String {
    format!(
        "Examples:
  ringdisk serve vm1.raw
  ringdisk serve file=/dev/vg0/vm1,cache=none,queues=4,socket=/run/ringdisk/vm1.sock
  ringdisk serve rbd:vms/vm1,id=vms      an image in a Ceph cluster
  ringdisk serve null:64G                stores nothing, for measurements
  ringdisk serve --config /etc/ringdisk/ringdisk.toml

Options of a disk (a comma in a value is doubled):
{}
SIGHUP reloads the configuration, looks for disks that have grown and tells their guests. SIGTERM finishes the
requests in flight, makes their data durable and ends ringdisk. SIGKILL loses nothing that a guest was told is written.",
        disk_help()
    )
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "nbd-tls protects the address of 'nbd', which is not set: name it (--nbd ADDRESS, or 'nbd' in the configuration)"
    )]
    TlsAlone,
    /// The disk, its file, and the other disk.
    #[error(
        "disk '{0}' would end, and its file {1} is configured for disk '{2}' now; 'ringdisk reload' first, which does that or says why \
         not"
    )]
    GivenToAnother(String, String, String),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(
        "{0}: cannot be used for the old data of backups: {cause}",
        cause = block::explain(.1, "--fleece, or 'fleece' in the configuration, names a directory of this user's own")
    )]
    Fleece(PathBuf, io::Error),
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
            Self::Spec(_)
            | Self::Config(ConfigError::Line { .. })
            | Self::Conflict(_)
            | Self::Sandbox(SandboxError::User(_) | SandboxError::Directory(..)) => 2,
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
