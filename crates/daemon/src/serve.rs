//! `ringdisk serve`: serves disks until it is told to stop.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::config::conflicts::{ConflictError, check_conflicts};
use crate::config::cpus::Cpus;
use crate::config::spec::{DiskSpec, SpecError};
use crate::config::{self, Config, ConfigError, POLL_CPU, POLL_MAX_US_MAX, SandboxMode};
use crate::credentials::{self, UserAccount};
use crate::inherited::Inherited;
use crate::log;
use crate::monitor::control_socket::{self, ControlSocket};
use crate::monitor::explain;
use crate::monitor::metrics;
use crate::monitor::qmp::Qmp;
use crate::node::context::{AllowBacking, OpenContext};
use crate::node::journal::Journals;
use crate::resource_limits::warn_of_limits;
use crate::sandbox::{Sandbox, SandboxError, SandboxOptions};
use crate::sd_notify;
use crate::server::connection_info::{self, ConnectionInfo};
use crate::server::iothreads::IoThreads;
use crate::server::reload::Reloader;
use crate::server::{Server, ServerError};
use crate::socket::{Socket, SocketError};
use crate::state::Overrides;
use crate::state::store::{Configured, StateError, StateStore};
use crate::upgrade::socket::UpgradeSocket;
use crate::upgrade::successor::{self, Predecessor};

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
    Keep(#[from] StateError),
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
    let served = serve(args);
    if let Err(e) = &served
        && args.take_over
    {
        successor::report_failure(&e.to_string());
    }
    served
}

fn serve(args: &Args) -> Result<(), ServeError> {
    engine::ignore_signals();
    warn_of_limits();
    let mut specs: Vec<DiskSpec> = args
        .disks
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    let mut config = match &args.config {
        Some(path) => Config::read(path)?,
        None => Config::default(),
    };
    let command_line = specs.clone();
    specs.extend(config.disks.iter().cloned());
    check_conflicts(&specs)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|e| ServeError::System("cannot handle signals", e))?;
    // Heard while disks are opened, too.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|e| ServeError::System("cannot handle signals", e))?;
    }

    // What is said on the command line goes before what the file says.
    let iothreads = args.iothreads.map(usize::from).or(config.iothreads);
    let cpus = args.cpus.clone().or(config.cpus.clone());
    let mut polling = config.polling();
    polling.max = args.poll_max_us.map_or(polling.max, Duration::from_micros);
    polling.cpu = args.poll_cpu.unwrap_or(polling.cpu);
    let control = args.control.clone().or(config.control.clone());
    let metrics = args.metrics.or(config.metrics);
    let backing = match &args.allow_backing[..] {
        [] => &config.allow_backing,
        given => given,
    };
    let state = args.state.clone().or(config.state.clone());
    let state = state.or_else(state_directory);
    let user = args.user.clone().or(config.user.clone());
    let user = user.as_deref().map(UserAccount::find).transpose();
    let user = user.map_err(SandboxError::User)?;
    let journals = Journals::new(user.as_ref());
    let mut kept = vec![journals.directory.clone()];
    if let Some(state) = &state {
        credentials::make_directory(state, user.as_ref())
            .map_err(|e| StateError::Directory(state.clone(), e))?;
        kept.push(state.clone());
    }
    let control_path = control.clone().unwrap_or_else(control_socket::default_path);
    let mut upgrade_socket = match args.take_over {
        true => None,
        // Where nobody said so, it may well be another's that goes on.
        false => UpgradeSocket::open(
            &control_path,
            control
                .as_ref()
                .map_or(Duration::ZERO, |_| Duration::from_secs(3)),
        ),
    };
    // While this is the only thread.
    let sandbox = Sandbox::enter(
        &SandboxOptions {
            mode: args.sandbox.or(config.sandbox).unwrap_or_default(),
            allow: [&args.allow_dir[..], &config.allow].concat(),
            user,
        },
        &config,
        args.config.as_deref(),
        &specs,
        control.as_deref(),
        backing,
        &kept,
    )?;
    let sandbox = Arc::new(sandbox);
    log::start().map_err(|e| ServeError::System("cannot start a thread for the log", e))?;
    let threads = IoThreads::new(iothreads, &cpus.unwrap_or_default(), polling);
    // What takes time is done before guests begin to wait.
    let ready_threads = args.take_over.then(|| {
        engine::Support::here();
        threads.all()
    });
    let received = args.take_over.then(Predecessor::receive).transpose();
    let received = received.map_err(|e| ServeError::System("nothing was handed over", e))?;
    let (predecessor, inherited) = received.unzip();
    let inherited = inherited.unwrap_or_default();
    let inherited = Arc::new(inherited);
    upgrade_socket = upgrade_socket.or_else(|| UpgradeSocket::adopt(&inherited, &control_path));
    if args.take_over && upgrade_socket.is_none() {
        warn!(
            "no upgrade without a restart from now on: the process that served has handed over nothing for it at {}",
            control_path.display()
        );
    }
    let allow_backing = AllowBacking::new(backing);
    allow_backing.warn_missing();
    let server = Server::new(
        threads,
        OpenContext {
            allow_backing,
            journals,
            stop,
            inherited: inherited.clone(),
        },
        sandbox.clone(),
    );

    let store = match &state {
        Some(directory) => Some(StateStore::open(directory, inherited.lock())?),
        None => None,
    };
    // What has changed meanwhile is put into force as by any reload, once guests are served.
    let reload = inherited.keep_files(&mut config);
    let written = Configured::new(&command_line, &config);
    server.set_configured(written.clone());
    let (store, kept) = store.unzip();
    let result = start(&server, &config, &written, kept, store.as_ref());
    drop(ready_threads);
    let config = args
        .config
        .as_deref()
        .map(|path| Reloader::new(path, command_line, config));
    let config = config.map(Arc::new);
    let started = result.and_then(|ready| {
        let qmp = Qmp {
            server: server.clone(),
            config: config.clone(),
        };
        let start = |address| {
            let started = metrics::start(address, inherited.metrics(address), server.clone());
            started.map_err(|e| ServeError::Metrics(address, e))
        };
        let metrics = metrics.map(start).transpose()?;
        let socket = bind_control(control.as_deref(), &inherited)?;
        sandbox.seal()?;
        if let Some(predecessor) = predecessor {
            predecessor
                .commit(&inherited)
                .map_err(|e| ServeError::System("the old process continues to serve", e))?;
        }
        if let Some(upgrade_socket) = &mut upgrade_socket {
            upgrade_socket.own();
            let asked = upgrade_socket.serve(&server);
            asked.unwrap_or_else(|e| warn!("no upgrade without a restart: {e}"));
        }
        let control = socket.map(|mut socket| {
            socket.own();
            ControlSocket::start(socket, qmp)
        });
        let control = control
            .transpose()
            .map_err(|e| ServeError::System("cannot serve the control socket", e));
        let control = match control {
            // Disks that were taken over are served all the same.
            Err(e) if args.take_over => {
                error!("{e}");
                None
            }
            control => control?,
        };
        if let Some(store) = store {
            server.set_store(store);
        }
        Ok((ready, metrics, control))
    });
    let (ready, metrics, control) = match started {
        Ok(started) => started,
        Err(e) if args.take_over => {
            // Nothing is this process's yet, to be put in order or removed.
            successor::report_failure(&e.to_string());
            log::finish();
            eprintln!("ringdisk: {e}");
            std::process::exit(i32::from(e.exit_code()));
        }
        Err(e) => {
            if let Ok(inhibitor) = server.handover.wait_and_inhibit() {
                let _ = server.shut_down(inhibitor);
            }
            return Err(e);
        }
    };
    let explained = args.explain.then(|| explain::all(&server));
    announce(&ready, metrics, explained, args.json);
    let first = reload.then_some(SIGHUP);
    let mut rereading: Vec<JoinHandle<()>> = Vec::new();
    for signal in first.into_iter().chain(signals.forever()) {
        if signal != SIGHUP {
            break;
        }
        // Storage of a disk may not answer, which is no reason not to be stopped.
        let (server, config) = (server.clone(), config.clone());
        let thread = thread::Builder::new().name("reload".to_owned());
        let reread = thread.spawn(move || reread(&server, config.as_deref()));
        rereading.retain(|thread| !thread.is_finished());
        match reread {
            Ok(thread) => rereading.push(thread),
            Err(e) => error!("nothing is read anew, for want of a thread: {e}"),
        }
    }
    let Ok(inhibitor) = server.handover.stop() else {
        // The one that has taken over needs a signal of its own; all that is here belongs to it.
        warn!("told to stop after another process had taken over, which goes on");
        loop {
            // Whoever has handed over ends this process.
            thread::park();
        }
    };
    info!("stopping: finishing what is under way");
    sd_notify::tell(sd_notify::STOPPING);
    let deadline = Instant::now() + control_socket::AT_END;
    drop(control);
    while rereading.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(server.shut_down(inhibitor)?)
}

/// Reads the configuration anew, and looks for disks that have grown.
fn reread(server: &Server, config: Option<&Reloader>) {
    let Ok(_inhibitor) = server.handover.wait_and_inhibit() else {
        return;
    };
    sd_notify::tell(&sd_notify::reloading());
    if let Some(config) = config
        && let Err(e) = config.reload(server)
    {
        error!("{e}");
    }
    server.look_for_growth();
    let _ = server.recreate_sockets();
    sd_notify::tell(sd_notify::READY);
}

/// Where a service manager has made a directory for what must be there after a restart (systemd.exec(5)).
fn state_directory() -> Option<PathBuf> {
    let all = std::env::var_os("STATE_DIRECTORY")?;
    let first = std::env::split_paths(&all).next();
    first.filter(|first| first.is_absolute())
}

fn start(
    server: &Server,
    config: &Config,
    written: &Configured,
    kept: Option<Overrides>,
    store: Option<&StateStore>,
) -> Result<Vec<ConnectionInfo>, ServeError> {
    for (id, spec) in &config.threads {
        server
            .threads
            .add(id, spec.clone())
            .map_err(ServerError::from)?;
    }
    for (name, limits) in &config.groups {
        server.add_group(name, limits)?;
    }
    // Who serves knows better than a file that may not have been written.
    let (ready, absent) = match (server.context.inherited.overrides(), kept) {
        (Some(changed), _) => {
            let written = without_detached(written, &changed);
            server.start(&written, &changed)?
        }
        (None, kept) => server.start(written, &kept.unwrap_or_default())?,
    };
    if let Some(store) = store {
        store.set_absent(absent);
    }
    Ok(ready)
}

/// What was detached by command does not come back by itself with another program, whatever is said of it by now.
fn without_detached(written: &Configured, changed: &Overrides) -> Configured {
    let mut written = written.clone();
    let is_gone = |disk: &DiskSpec| changed.gone.iter().any(|gone| gone.name == disk.name);
    written.disks.retain(|disk| !is_gone(disk));
    written
}

/// Without a path of the operator's choice, there is no control socket where another ringdisk has it.
fn bind_control(path: Option<&Path>, inherited: &Inherited) -> Result<Option<Socket>, ServeError> {
    let default = control_socket::default_path();
    if let Some(listener) = inherited.control(path.unwrap_or(&default)) {
        let path = path.unwrap_or(&default);
        return Ok(Some(Socket::adopt(listener, path, inherited.made(path))));
    }
    match path {
        Some(path) => Ok(Some(Socket::bind_private(path)?)),
        None => Ok(Socket::bind_private(&default)
            .inspect_err(|e| warn!("no control socket: {e}; --control PATH puts one elsewhere"))
            .ok()),
    }
}

fn announce(
    ready: &[ConnectionInfo],
    metrics: Option<SocketAddr>,
    explained: Option<Value>,
    json: bool,
) {
    let text = match json {
        true => {
            let metrics = metrics.map(|address| format!("http://{address}/metrics"));
            let mut said = json!({ "ready": true, "disks": ready, "metrics": metrics });
            if let Some(explained) = explained {
                said["explain"] = explained;
            }
            said.to_string()
        }
        false => {
            let explained = explained.map(|disks| explain::text(&disks) + "\n");
            connection_info::text(ready) + &explained.unwrap_or_default() + "ready"
        }
    };
    let mut out = io::stdout().lock();
    // Nobody may be listening any more; the disks are served all the same.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    sd_notify::tell(sd_notify::READY);
}
