//! `ringdisk serve`: opens disks, starts I/O threads, and serves front-ends until it is told to
//! stop.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use block::{BlockSizeError, DiskFacts, format_size};
use datapath::{Disk, IoThread, Options};
use engine::{DiskFile, OpenError, Uring, UringError};
use guest::End;
use image::{Format, Image, UnknownFormat};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::device::{BlockDevice, ServedDisk};
use crate::paste::{self, Ready};
use crate::socket::{self, Socket, SocketError};
use crate::spec::{DiskSpec, FileSpec, SpecError};

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
  aio=auto|io_uring    default: auto
  queues=N             default: the number of CPUs, up to 16
  queue-size=N         a power of two from 16 to 1024, default 256
  readonly=on|off      default: off
  serial=TEXT          up to 20 characters, seen in the guest
  discard=unmap|ignore default: unmap; ignore keeps the space that the guest gives back
  detect-zeroes=off|on|unmap
                       default: off; on zeroes ranges instead of writing zeroes, unmap gives them back
  logical-block-size=512|4096, physical-block-size=512|4096
                       what the guest sees; default: the backing's
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
    #[error("two disks are named '{0}'; give one of them another name with name=")]
    SameName(String),
    #[error("disks '{0}' and '{1}' have the same socket, {2}")]
    SameSocket(String, String, PathBuf),
    #[error("{0}: {1}")]
    Format(PathBuf, UnknownFormat),
    #[error("{0}: {1}")]
    Blocks(String, BlockSizeError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Uring(#[from] UringError),
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
    #[error("{0} could not be made durable, acknowledged writes may be lost: {1}")]
    Sync(String, io::Error),
}

impl ServeError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec(_) | Self::SameName(_) | Self::SameSocket(..) => 2,
            _ => 1,
        }
    }
}

/// A disk with all that serving it needs.
struct Served {
    spec: DiskSpec,
    device: ServedDisk,
    file: Option<Arc<DiskFile>>,
    socket: Socket,
    ready: Ready,
}

pub fn run(args: &Args) -> Result<(), ServeError> {
    let specs = parse(&args.disks)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|e| ServeError::System("cannot handle signals", e))?;
    let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| ServeError::System("cannot make an event descriptor", e.into()))?;

    let threads = start_threads(args, &specs)?;
    let mut first_thread = 0;
    let mut disks = Vec::new();
    for spec in specs {
        let queues = usize::from(spec.queues);
        disks.push(open(spec, first_thread)?);
        first_thread += queues;
    }

    thread::scope(|scope| {
        for disk in &disks {
            let (threads, stop) = (&threads, &stop);
            thread::Builder::new()
                .name(format!("vhost-{}", disk.spec.name))
                .spawn_scoped(scope, move || listen(disk, threads, stop.as_fd()))
                .map_err(|e| ServeError::System("cannot start a thread", e))?;
        }
        announce(&disks, args.json);
        for signal in signals.forever() {
            match signal {
                SIGHUP => disks.iter().for_each(look_for_growth),
                _ => break,
            }
        }
        info!("stopping: finishing what is under way");
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
        let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
        Ok(())
    })
    .inspect_err(|_: &ServeError| {
        let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
    })?;
    drop(threads);

    // Guests' requests are done by now, but what they did not flush is only in the write cache.
    let mut result = Ok(());
    for disk in &disks {
        if let Some(file) = &disk.file
            && !disk.spec.read_only
            && disk.spec.cache.flushes()
            && let Err(e) = file.sync()
        {
            let failed = ServeError::Sync(disk.spec.name.clone(), e);
            error!("{failed}");
            result = Err(failed);
        }
    }
    result
}

fn parse(disks: &[String]) -> Result<Vec<DiskSpec>, ServeError> {
    let mut specs: Vec<DiskSpec> = Vec::new();
    let mut sockets: HashMap<PathBuf, String> = HashMap::new();
    for text in disks {
        let mut spec: DiskSpec = text.parse()?;
        if specs.iter().any(|other| other.name == spec.name) {
            return Err(ServeError::SameName(spec.name));
        }
        let path = spec
            .socket
            .take()
            .unwrap_or_else(|| socket::default_path(&spec.name));
        if let Some(other) = sockets.insert(path.clone(), spec.name.clone()) {
            return Err(ServeError::SameSocket(other, spec.name, path));
        }
        spec.socket = Some(path);
        specs.push(spec);
    }
    Ok(specs)
}

fn start_threads(args: &Args, specs: &[DiskSpec]) -> Result<Vec<IoThread>, ServeError> {
    let cpus = thread::available_parallelism().map_or(1, |n| n.get());
    let queues: usize = specs.iter().map(|s| usize::from(s.queues)).sum();
    let n = args.iothreads.map_or(cpus.min(16), usize::from).min(queues);
    let poll_max = Duration::from_micros(args.poll_max_us);
    (0..n)
        .map(|i| {
            IoThread::spawn(format!("io-{i}"), poll_max, || {
                Uring::new().map_err(Made::from)
            })
        })
        .collect::<Result<_, _>>()
        .map_err(|made| match made {
            Made::Engine(e) => e.into(),
            Made::Thread(e) => ServeError::System("cannot start an I/O thread", e),
        })
}

/// Why there is no I/O thread.
#[derive(Debug)]
enum Made {
    Engine(UringError),
    Thread(io::Error),
}

impl From<UringError> for Made {
    fn from(e: UringError) -> Self {
        Self::Engine(e)
    }
}

impl From<io::Error> for Made {
    fn from(e: io::Error) -> Self {
        Self::Thread(e)
    }
}

fn open(spec: DiskSpec, first_thread: usize) -> Result<Served, ServeError> {
    let socket_path = spec.socket.clone().unwrap_or_default();
    let (image, file, facts, size, shown) = match &spec.file {
        FileSpec::Null(size) => {
            warn!(
                "disk {}: null:{} STORES NOTHING: writes are thrown away and reads leave memory as \
                 it is; it is there to measure with",
                spec.name,
                format_size(*size)
            );
            let shown = format!("null:{}", format_size(*size));
            (Image::Null, None, null_facts(spec.read_only), *size, shown)
        }
        FileSpec::Path(path) => {
            let file = DiskFile::open(path, spec.cache, spec.read_only)?;
            let format = match spec.format {
                Some(format) => format,
                None => Format::of(path, file.backing())
                    .map_err(|e| ServeError::Format(path.clone(), e))?,
            };
            let image = match format {
                Format::Raw => Image::Raw,
            };
            let size = file
                .size()
                .map_err(|e| OpenError::Io(path.display().to_string(), "find out its size", e))?;
            let facts = file.facts();
            (image, Some(file), facts, size, path.display().to_string())
        }
    };
    let facts = facts
        .with_blocks(spec.logical_block, spec.physical_block, size)
        .map_err(|e| ServeError::Blocks(shown.clone(), e))?;
    if file.is_some() && !spec.cache.flushes() {
        warn!(
            "disk {}: cache=unsafe IGNORES FLUSHES: a crash or power cut of this host loses data that \
             the guest made durable, and may ruin its file systems; for disks that can be thrown away",
            spec.name
        );
    }
    let descriptor = match &file {
        Some(file) => Some((duplicate(file)?, file.backing(), spec.aio)),
        None => None,
    };
    let socket = Socket::bind(&socket_path)?;
    let disk = Disk::new(
        spec.name.clone(),
        image,
        descriptor,
        facts,
        size,
        &spec.serial,
        Options {
            cache: spec.cache,
            discard: spec.discard,
            detect_zeroes: spec.detect_zeroes,
            fixed_buffers: spec.fixed_buffers,
        },
    );
    let text = socket_path.display().to_string();
    let ready = Ready {
        name: spec.name.clone(),
        file: shown,
        format: Format::Raw.to_string(),
        size,
        qemu: paste::qemu(&spec.name, &text, spec.queues, spec.queue_size),
        libvirt: paste::libvirt(&text, spec.queues, spec.queue_size, spec.fixed_buffers),
        socket: socket_path,
        queues: spec.queues,
        queue_size: spec.queue_size,
        readonly: spec.read_only,
    };
    let device = ServedDisk::new(Arc::new(disk), spec.queues, spec.queue_size, first_thread);
    Ok(Served {
        spec,
        device,
        file: file.map(Arc::new),
        socket,
        ready,
    })
}

fn duplicate(file: &DiskFile) -> Result<OwnedFd, ServeError> {
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|e| ServeError::System("cannot duplicate a file descriptor", e))
}

fn null_facts(read_only: bool) -> DiskFacts {
    DiskFacts {
        logical_block: 512,
        physical_block: 4096,
        optimal_io: 0,
        address_alignment: 1,
        length_alignment: 1,
        discard_granularity: 512,
        read_only,
    }
}

fn announce(disks: &[Served], json: bool) {
    let ready: Vec<&Ready> = disks.iter().map(|d| &d.ready).collect();
    let text = match json {
        true => serde_json::json!({ "ready": true, "disks": ready }).to_string(),
        false => {
            disks
                .iter()
                .map(|d| paste::text(std::slice::from_ref(&d.ready)))
                .collect::<String>()
                + "ready"
        }
    };
    let mut out = io::stdout().lock();
    // Nobody may be listening any more; the disks are served all the same.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    let _ = sd_notify::notify(&[NotifyState::Ready]);
}

/// Accepts front-ends, one at a time, until `stop` becomes readable. A second one waits until the
/// first has gone.
fn listen(disk: &Served, threads: &[IoThread], stop: BorrowedFd<'_>) {
    let name = &disk.spec.name;
    loop {
        let mut ready = [
            PollFd::new(&stop, PollFlags::IN),
            PollFd::new(&disk.socket.listener, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return error!("disk {name}: cannot wait for front-ends: {e}"),
            Ok(_) if !ready[0].revents().is_empty() => return,
            Ok(_) => {}
        }
        let socket = match disk.socket.listener.accept() {
            Ok((socket, _)) => socket,
            Err(e) => {
                // Out of descriptors, most likely: those in service go on, this one waits.
                warn!("disk {name}: cannot accept a front-end: {e}; trying again in a second");
                thread::sleep(Duration::from_secs(1));
                continue;
            }
        };
        info!("disk {name}: front-end connected");
        let mut device = BlockDevice::new(&disk.device, threads);
        match guest::serve(&socket, &mut device, stop) {
            End::Disconnected => info!("disk {name}: front-end disconnected"),
            End::Stopped => return,
            End::Failed(e) => warn!("disk {name}: front-end cut off: {e}"),
        }
    }
}

/// Tells the guest if its disk has become longer.
fn look_for_growth(disk: &Served) {
    let Some(file) = &disk.file else {
        return;
    };
    let name = &disk.spec.name;
    let block = u64::from(disk.device.disk.facts.logical_block);
    let old = disk.device.disk.size();
    match file.size().map(|size| size - size % block) {
        Ok(size) if size > old => {
            disk.device.disk.grow(size);
            info!(
                "disk {name}: grown from {} to {}",
                format_size(old),
                format_size(size)
            );
        }
        Ok(size) if size < old => warn!(
            "disk {name}: its file has shrunk from {} to {}; requests beyond will fail",
            format_size(old),
            format_size(size)
        ),
        Ok(_) => {}
        Err(e) => warn!("disk {name}: cannot find out its size: {e}"),
    }
    // Also if it grew earlier: the front-end may have been away then.
    disk.device.tell_size();
}
