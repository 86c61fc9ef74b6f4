//! `ringdisk serve`: serves disks until it is told to stop.

use std::io::{self, Write};
use std::time::Duration;

use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;
use tracing::info;

use crate::cpus::Cpus;
use crate::host::{Host, HostError, check_together};
use crate::iothreads::IoThreads;
use crate::paste::{self, Ready};
use crate::spec::{DiskSpec, SpecError};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk serve vm1.raw
  ringdisk serve file=/dev/vg0/vm1,cache=none,queues=4,socket=/run/ringdisk/vm1.sock
  ringdisk serve null:64G                measures the path alone, stores nothing

Options of a disk (a comma in a value is doubled):
  file=PATH            file or block device; null:SIZE stores nothing
  name=NAME            default: from the file
  format=raw           default: from .raw or .img, raw for a block device; never from the content
  socket=PATH          default: NAME.sock in /run/ringdisk (root), $XDG_RUNTIME_DIR/ringdisk, or here
  cache=MODE           as in QEMU. none (default): O_DIRECT; writeback: through the host's page cache;
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
  logical-block-size=512|4096, physical-block-size=512|4096
                       what the guest sees; default: the backing's
  iothreads=ID,...     I/O threads for its queues, in turn, by number or name; default: the next ones
  fixed-buffers=on|off default: off; on pins all guest memory, which costs less CPU per I/O. NEVER
                       with a balloon, free page reporting or virtio-mem: data would be corrupted

SIGHUP looks for disks that have grown and tells their guests. SIGTERM finishes what is under way,
makes it durable and ends. SIGKILL loses nothing that a guest has flushed.")]
pub struct Args {
    /// Disks: paths, or key=value pairs separated by commas
    #[arg(required = true, value_name = "DISK")]
    disks: Vec<String>,

    /// I/O threads, which all disks share; queue i of a disk goes to thread i in turn
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    iothreads: Option<u16>,

    /// CPUs for the I/O threads, as in 2,4-7: the first thread runs on the first, and so on in turn
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,

    /// How long a thread with little to do looks out for its guests, or for a lone operation, before it
    /// sleeps, at most, in microseconds; it adapts to what pays; 0 is never
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    poll_max_us: u64,

    /// Print what to paste, and that all is ready, as one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

impl ServeError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec(_) | Self::Host(HostError::SameName(_) | HostError::SameSocket(..)) => 2,
            _ => 1,
        }
    }
}

pub fn run(args: &Args) -> Result<(), ServeError> {
    let specs: Vec<DiskSpec> = args
        .disks
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    check_together(&specs)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|e| ServeError::System("cannot handle signals", e))?;
    let threads = args.iothreads.map(usize::from);
    let poll_max = Duration::from_micros(args.poll_max_us);
    let host = Host::new(IoThreads::new(
        threads,
        &args.cpus.clone().unwrap_or_default(),
        poll_max,
    ));

    let attached = specs.into_iter().map(|spec| host.attach(spec));
    let ready: Result<Vec<Ready>, HostError> = attached.collect();
    let ready = match ready {
        Ok(ready) => ready,
        Err(e) => {
            let _ = host.shut_down();
            return Err(e.into());
        }
    };
    announce(&ready, args.json);
    for signal in signals.forever() {
        match signal {
            SIGHUP => host.look_for_growth(),
            _ => break,
        }
    }
    info!("stopping: finishing what is under way");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    Ok(host.shut_down()?)
}

fn announce(ready: &[Ready], json: bool) {
    let text = match json {
        true => serde_json::json!({ "ready": true, "disks": ready }).to_string(),
        false => paste::text(ready) + "ready",
    };
    let mut out = io::stdout().lock();
    // Nobody may be listening any more; the disks are served all the same.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    let _ = sd_notify::notify(&[NotifyState::Ready]);
}
