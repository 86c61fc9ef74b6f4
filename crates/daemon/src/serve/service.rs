//! From the arguments to a server, and from there to its end.

mod settings;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};

use self::settings::Settings;
use super::{Args, ServeError, probe};
use crate::config::conflicts::check_conflicts;
use crate::config::nbd::NbdExportSpec;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::config::{Config, sockets};
use crate::inherited::Inherited;
use crate::log;
use crate::monitor::control_socket::{self, ControlSocket};
use crate::monitor::qmp::Qmp;
use crate::monitor::{explain, metrics};
use crate::node::context::{AllowBacking, OpenContext};
use crate::node::journal::Journals;
use crate::node::own_files::OwnFiles;
use crate::resource_limits::warn_of_limits;
use crate::rights::Rights;
use crate::sandbox::Sandbox;
use crate::sd_notify;
use crate::server::connection_info::{self, ConnectionInfo};
use crate::server::iothreads::IoThreads;
use crate::server::nbd::ReadyNbd;
use crate::server::nbd::listener::BoundNbd;
use crate::server::reload::{ReloadError, Reloader, waits_for_detached};
use crate::server::{Server, ServerError, Waiting};
use crate::socket::Socket;
use crate::state::Overrides;
use crate::state::store::{Configured, StateStore};
use crate::upgrade::socket::UpgradeSocket;
use crate::upgrade::successor::{self, Predecessor};

/// Serves disks until the process is told to stop.
pub fn serve(args: &Args) -> Result<(), ServeError> {
    engine::ignore_signals();
    warn_of_limits();
    let disks = args.disks.iter().map(|text| text.parse());
    let command_line: Vec<DiskSpec> = disks.collect::<Result<_, _>>()?;
    let config = args.config.as_deref().map(Config::read).transpose()?;
    let config = config.unwrap_or_default();
    let specs = [&command_line[..], &config.disks].concat();
    check_conflicts(&specs)?;
    let hanging = report_hanging(&specs, &directories(args, &config));
    // Their paths would make the sandbox wait. Those of the command line are waited for.
    let specs = [&command_line[..], &without(&config.disks, &hanging)].concat();
    let settings = Settings::new(args, &config)?;
    settings.become_later(&specs, args.take_over)?;
    let journals = Journals::new(settings.user.as_ref());
    let own_upgrade_socket = settings.open_upgrade_socket(args.take_over);
    // While this is the only thread.
    let sandbox = settings.enter_sandbox(args, &config, &specs, &journals)?;
    // Until here, a signal ends the process at once, also while it waits for storage.
    let (signals, stop) = handle_signals()?;
    let rights = Arc::new(sandbox.assume_rights(&specs)?);
    log::start().map_err(|e| ServeError::System("cannot start a thread for the log", e))?;
    let threads = IoThreads::new(settings.iothreads, &settings.cpus, settings.polling);
    // A process that takes over does what takes time before guests begin to wait.
    let ready_threads = args.take_over.then(|| {
        engine::Support::here();
        threads.all()
    });
    let received = args.take_over.then(Predecessor::receive).transpose();
    let received = received.map_err(|e| ServeError::System("nothing was handed over", e))?;
    let (predecessor, inherited) = received.unzip();
    let inherited = Arc::new(inherited.unwrap_or_default());
    let upgrade_socket = settings.upgrade_socket(own_upgrade_socket, &inherited, args.take_over);
    let allow_backing = AllowBacking::new(&settings.backing);
    rights.as_operator(|| allow_backing.warn_missing());
    let context = OpenContext {
        allow_backing,
        journals,
        state: settings.state.clone(),
        old_records: Arc::default(),
        stop,
        inherited: inherited.clone(),
        rights: rights.clone(),
        ahead: Weak::new(),
        own_files: OwnFiles::default(),
        hanging,
    };
    let server = Server::new(threads, context, sandbox.clone());
    server.watch_hangs();
    if let Some(fleece) = &settings.fleece {
        server.backups.set_directory(fleece);
    }
    let open = |directory| rights.as_operator(|| StateStore::open(directory, inherited.lock()));
    let store = settings.state.as_deref().map(open).transpose()?;
    if let (Some((store, _)), Some(path)) = (&store, &args.config) {
        store.check_directory(&config, path)?;
    }
    // If the configuration has changed since, a reload applies that once guests are served.
    let state = store.as_ref().map(|(_, state)| state);
    let (config, reload) = in_force(config, args.config.as_deref(), &inherited, &rights, state)?;
    let configured = Configured::new(&command_line, &config);
    // The log has why not, if it cannot be persisted.
    let _ = server.set_configured(configured.clone());
    let (store, persisted) = store.unzip();
    let started = start_disks(
        &server,
        &config,
        &configured,
        &command_line,
        persisted,
        store.as_ref(),
    );
    drop(ready_threads);
    let path = args.config.as_deref();
    let reloader = path.map(|path| Arc::new(Reloader::new(path, command_line, config)));
    let service = Service {
        server,
        reloader,
        sandbox,
        inherited,
        upgrade_socket,
        take_over: args.take_over,
    };
    let published = started.and_then(|ready| {
        let (metrics, control) = service.publish(&settings, predecessor, store)?;
        Ok((ready, metrics, control))
    });
    let (ready, metrics, control) = match published {
        Ok(published) => published,
        Err(e) => return Err(service.abort(e)),
    };
    let explained = args.explain.then(|| explain::all(&service.server));
    announce(&ready, metrics, explained, args.json);
    service.server.tell_status();
    service.server.retry_absent();
    let reloads = service.run(signals, reload);
    service.stop(control, &reloads)
}

/// The directories that the command line and the configuration name.
fn directories(args: &Args, config: &Config) -> Vec<PathBuf> {
    let lists = [
        &args.allow_dir[..],
        &config.allow,
        &args.allow_backing,
        &config.allow_backing,
    ];
    let single = [&args.fleece, &config.fleece, &args.state, &config.state];
    let single = single.into_iter().flatten().cloned();
    lists.concat().into_iter().chain(single).collect()
}

/// The disks without those of these names.
fn without(disks: &[DiskSpec], names: &[String]) -> Vec<DiskSpec> {
    let others = disks.iter().filter(|disk| !names.contains(&disk.name));
    others.cloned().collect()
}

/// The configuration that is in force from now on, and whether that differs from the one that was read.
///
/// # Errors
/// Disks of the old process would be removed because their files are away, or as others have got these.
fn in_force(
    config: Config,
    path: Option<&Path>,
    inherited: &Inherited,
    rights: &Rights,
    state: Option<&Overrides>,
) -> Result<(Config, bool), ServeError> {
    if let Some(path) = path {
        config.check_directory(path, inherited.has_directory())?;
    }
    if let Some(state) = state.filter(|_| !inherited.is_uncommitted()) {
        return Ok((state.without_conflicts(config), false));
    }
    // The identity of data files that the configuration names counts.
    let in_force = rights.as_operator(|| inherited.carry(&config));
    if let Some((before, other)) = inherited.given_to_another(&config, &in_force) {
        let (name, file) = (before.name, before.file.to_string());
        return Err(ServeError::GivenToAnother(name, file, other.name));
    }
    let differs = in_force != config;
    Ok((in_force, differs))
}

/// Reports directories that do not answer, and disks whose storage does not, and returns the names of these.
fn report_hanging(disks: &[DiskSpec], directories: &[PathBuf]) -> Vec<String> {
    let path = |disk: &DiskSpec| match &disk.file {
        FileSpec::Path(path) => Some(path.clone()),
        FileSpec::Rbd(_) | FileSpec::Null(_) => None,
    };
    let asked = disks.iter().filter_map(path);
    let hanging = probe::hanging(asked.chain(directories.iter().cloned()).collect());
    // The log is not written before the sandbox is entered, which waits for these and for the paths of the command line.
    let level = if log::is_journal() { "<3>" } else { "" };
    let report = |what: String| {
        let _ = writeln!(io::stderr(), "{level}ringdisk: {what}");
    };
    for directory in directories.iter().filter(|path| hanging.contains(path)) {
        report(format!(
            "{}: this directory does not answer, and the start waits for it",
            directory.display()
        ));
    }
    let is_hanging = |disk: &&DiskSpec| path(disk).is_some_and(|path| hanging.contains(&path));
    let hanging = disks.iter().filter(is_hanging);
    for DiskSpec { name, file, .. } in hanging.clone() {
        report(format!("disk {name}: {file}: its storage does not answer"));
    }
    hanging.map(|disk| disk.name.clone()).collect()
}

/// Also returns a flag that SIGTERM and SIGINT set: disks that are being opened look at it.
fn handle_signals() -> Result<(Signals, Arc<AtomicBool>), ServeError> {
    let fail = |e| ServeError::System("cannot handle signals", e);
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(fail)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, stop.clone()).map_err(fail)?;
    }
    Ok((signals, stop))
}

fn start_disks(
    server: &Server,
    config: &Config,
    configured: &Configured,
    required: &[DiskSpec],
    persisted: Option<Overrides>,
    store: Option<&StateStore>,
) -> Result<Vec<ConnectionInfo>, ServeError> {
    for (id, spec) in &config.threads {
        let mut spec = spec.clone();
        if !server.context.inherited.is_uncommitted() {
            spec.cpus = spec.cpus.usable(&format!("[[iothread]] {id}"));
        }
        server.threads.add(id, spec).map_err(ServerError::from)?;
    }
    for (name, limits) in &config.groups {
        server.add_group(name, limits)?;
    }
    // The old process knows better than a file that may not have been written.
    let (ready, absent) = match server.context.inherited.overrides() {
        Some(overrides) => {
            let overrides = overrides.with_left(persisted);
            let (configured, overrides) = taken_over(configured, overrides);
            server.start(&configured, &overrides, required)?
        }
        None => {
            store.inspect(|store| server.set_state_directory(store.directory()));
            server.start(configured, &persisted.unwrap_or_default(), required)?
        }
    };
    if let Some(store) = store {
        store.set_absent(absent);
    }
    Ok(ready)
}

/// A disk that was detached at run time does not return with an upgrade, even if its configuration has changed, or if it has another
/// name, unless another disk has its name now. It keeps its number of queues.
fn taken_over(configured: &Configured, overrides: Overrides) -> (Configured, Overrides) {
    let overrides = overrides.with_default_queues(&configured.disks);
    let all = &configured.disks;
    let mut configured = configured.clone();
    let gone = |disk: &DiskSpec| overrides.detached.iter().find(|it| it.name == disk.name);
    let is_configured = |name: &str| all.iter().any(|disk| disk.name == name);
    let is_renamed = |disk: &DiskSpec| {
        let mut gone = overrides
            .detached
            .iter()
            .filter(|it| !is_configured(&it.name));
        gone.any(|it| sockets::is_renamed(it, disk))
    };
    let is_kept = |disk: &DiskSpec| match gone(disk) {
        Some(it) => sockets::are_of_two_vms(it, disk),
        None => !is_renamed(disk),
    };
    configured.disks.retain(is_kept);
    (configured, overrides)
}

/// A server whose disks have been started.
struct Service {
    server: Arc<Server>,
    reloader: Option<Arc<Reloader>>,
    sandbox: Arc<Sandbox>,
    inherited: Arc<Inherited>,
    upgrade_socket: Option<UpgradeSocket>,
    take_over: bool,
}

impl Service {
    /// Opens the sockets, and serves; takes over when everything is ready. Returns the address of metrics.
    fn publish(
        &self,
        settings: &Settings,
        predecessor: Option<Predecessor>,
        store: Option<StateStore>,
    ) -> Result<(Option<SocketAddr>, Option<ControlSocket>), ServeError> {
        let start = |address| {
            let listener = self.inherited.metrics(address);
            let started = metrics::start(address, listener, self.server.clone());
            started.map_err(|e| ServeError::Metrics(address, e))
        };
        let metrics = settings.metrics.map(start).transpose();
        let metrics = self.or_without(settings.on_command_line.metrics, metrics)?;
        let rights = &self.server.context.rights;
        let socket = rights.as_operator(|| bind_control(settings, &self.inherited))?;
        let nbd = self.open_nbd(settings);
        let nbd = self.or_without(settings.on_command_line.nbd, nbd)?;
        self.sandbox.seal()?;
        if let Some(predecessor) = predecessor {
            let committed = predecessor.commit(&self.inherited);
            committed.map_err(|e| ServeError::System("the old process continues to serve", e))?;
        }
        // Before another upgrade can hand it over.
        if let Some((nbd, exports)) = nbd {
            self.serve_nbd(nbd, exports);
        }
        if let Some(upgrade_socket) = &self.upgrade_socket {
            upgrade_socket.own();
            let served = upgrade_socket.serve(&self.server);
            served.unwrap_or_else(|e| warn!("live upgrade disabled: {e}"));
        }
        self.server.watch_files();
        if self.take_over {
            // Commands find them. Guests are served meanwhile.
            self.server.start_new();
        }
        let control = socket.map(|socket| self.serve_control(socket)).transpose();
        let control = match control {
            // Disks that were taken over are served without it.
            Err(e) if self.take_over => {
                error!("{e}");
                None
            }
            control => control?,
        };
        if let Some(store) = store {
            self.server.set_store(store);
        }
        Ok((metrics, control))
    }

    /// The disks are served without a service that the configuration describes and that cannot be started.
    fn or_without<T>(
        &self,
        on_command_line: bool,
        opened: Result<Option<T>, ServeError>,
    ) -> Result<Option<T>, ServeError> {
        match opened {
            Err(e) if !on_command_line && !self.take_over => {
                let reason = format!(
                    "{e}; the disks are served without it: correct it, then 'ringdisk upgrade'"
                );
                error!("{reason}");
                self.server.add_unavailable(reason);
                Ok(None)
            }
            opened => opened,
        }
    }

    /// The socket for NBD clients, and what they find: that of the old process, or the configured one.
    fn open_nbd(
        &self,
        settings: &Settings,
    ) -> Result<Option<(ReadyNbd, Vec<NbdExportSpec>)>, ServeError> {
        for (id, tls) in self.inherited.tls() {
            self.server.add_tls(&id, tls)?;
        }
        let (bound, tls, exports) = match (self.inherited.nbd(), &settings.nbd) {
            (Some(nbd), _) => {
                let bound = BoundNbd::adopt(nbd.address, nbd.listener);
                (bound, nbd.tls, nbd.exports)
            }
            (None, Some(address)) => {
                let (tls, exports) = (settings.tls.clone(), self.server.configured_exports());
                let rights = &self.server.context.rights;
                (
                    rights.as_operator(|| BoundNbd::bind(address))?,
                    tls,
                    exports,
                )
            }
            (None, None) => return Ok(None),
        };
        let ready = self.server.ready_nbd(bound, tls, settings.tls.as_ref())?;
        Ok(Some((ready, exports)))
    }

    /// Disks are served whether or not their NBD exports are.
    fn serve_nbd(&self, ready: ReadyNbd, exports: Vec<NbdExportSpec>) {
        let server = &self.server;
        // A client that connects already finds all exports.
        let _paused = server.nbd.pause();
        if let Err(e) = server.adopt_nbd(ready) {
            return error!("{e}");
        }
        for export in exports {
            let name = export.name.clone();
            if server.export_when_there(&export) {
                continue;
            }
            let mut configured = server.configured().disks.into_iter();
            let is_detached = server.node_of(&export.node).is_none()
                && configured.any(|disk| disk.name == export.node);
            if is_detached {
                info!("{}", waits_for_detached(&export));
                continue;
            }
            let claim = server.claim("start", || vec![&export.node]);
            let added = claim.and_then(|claim| server.add_nbd_export(&claim, export.clone()));
            if let Err(e) = added {
                error!("NBD: '{name}' is not exported: {e}");
            }
        }
    }

    fn serve_control(&self, mut socket: Socket) -> Result<ControlSocket, ServeError> {
        socket.own();
        let qmp = Qmp {
            server: self.server.clone(),
            config: self.reloader.clone(),
        };
        ControlSocket::start(socket, qmp)
            .map_err(|e| ServeError::System("cannot serve the control socket", e))
    }

    /// Closes what was opened, after an error. A process that was to take over exits here.
    fn abort(self, error: ServeError) -> ServeError {
        if self.take_over {
            // Without destructors: files and sockets belong to the old process.
            successor::report_failure(&error.to_string());
            log::finish();
            log::complain(&error.to_string());
            std::process::exit(i32::from(error.exit_code()));
        }
        if let Ok(inhibitor) = self.server.handover.wait_and_inhibit() {
            let _ = self.server.shut_down(inhibitor);
        }
        error
    }

    /// Waits until the process is told to stop, and reloads on SIGHUP; first of all, after an upgrade, what can be without
    /// restarting disks, if `reload` says so. Returns the threads of reloads that may still run.
    fn run(&self, mut signals: Signals, reload: bool) -> Vec<JoinHandle<()>> {
        let mut reloads = Vec::new();
        if reload {
            self.start_reload(&mut reloads, Reloader::reload_without_restarts);
        }
        for signal in signals.forever() {
            if signal != SIGHUP {
                break;
            }
            self.start_reload(&mut reloads, Reloader::reload);
        }
        reloads
    }

    /// In a thread: a reload may wait for storage, and must not keep the process from stopping.
    fn start_reload(&self, reloads: &mut Vec<JoinHandle<()>>, reload: Reload) {
        let (server, reloader) = (self.server.clone(), self.reloader.clone());
        let thread = thread::Builder::new().name("reload".to_owned());
        let spawned = thread.spawn(move || run_reload(&server, reloader.as_deref(), reload));
        reloads.retain(|thread| !thread.is_finished());
        match spawned {
            Ok(thread) => reloads.push(thread),
            Err(e) => error!("reload skipped: no thread available: {e}"),
        }
    }

    fn stop(
        self,
        control: Option<ControlSocket>,
        reloads: &[JoinHandle<()>],
    ) -> Result<(), ServeError> {
        let Ok(inhibitor) = self.server.handover.stop() else {
            // The process that has taken over needs a signal of its own.
            warn!("told to stop after a handover: the new process continues to serve");
            loop {
                // The upgrade's thread is about to exit this process.
                thread::park();
            }
        };
        info!("stopping: finishing requests in flight");
        sd_notify::tell(sd_notify::STOPPING);
        self.server.end_commands();
        let deadline = Instant::now() + control_socket::STOP_TIMEOUT;
        drop(control);
        while reloads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(self.server.shut_down(inhibitor)?)
    }
}

type Reload = fn(&Reloader, &Server, &Waiting<'_>) -> Result<Vec<String>, ReloadError>;

/// Reloads the configuration, and checks disks for growth and sockets for removal.
fn run_reload(server: &Server, reloader: Option<&Reloader>, reload: Reload) {
    let Ok(_inhibitor) = server.handover.wait_and_inhibit() else {
        return;
    };
    sd_notify::tell(&sd_notify::reloading());
    if let Some(reloader) = reloader
        && let Err(e) = reload(reloader, server, &Waiting::of_process())
    {
        error!("{e}");
    }
    server.look_for_growth();
    let _ = server.recreate_sockets();
    sd_notify::tell(sd_notify::READY);
}

/// At the default path, the socket may be in use by another ringdisk: then this one has none.
fn bind_control(settings: &Settings, inherited: &Inherited) -> Result<Option<Socket>, ServeError> {
    let path = &settings.control_path;
    if let Some(listener) = inherited.control(path) {
        return Ok(Some(Socket::adopt(listener, path, inherited.made(path))));
    }
    if settings.control.is_some() {
        return Ok(Some(Socket::bind_private(path)?));
    }
    Ok(Socket::bind_private(path)
        .inspect_err(|e| warn!("no control socket: {e}; --control PATH puts one elsewhere"))
        .ok())
}

/// Prints how VMs connect to the disks, and tells the service manager that they can.
fn announce(
    ready: &[ConnectionInfo],
    metrics: Option<SocketAddr>,
    explained: Option<Value>,
    json: bool,
) {
    let text = if json {
        let metrics = metrics.map(|address| format!("http://{address}/metrics"));
        let mut message = json!({ "ready": true, "disks": ready, "metrics": metrics });
        if let Some(explained) = explained {
            message["explain"] = explained;
        }
        message.to_string()
    } else {
        let explained = explained.map(|disks| explain::text(&disks) + "\n");
        connection_info::text(ready) + &explained.unwrap_or_default() + "ready"
    };
    // In a thread: a reader that has gone, or that does not read a pipe which is full, must keep this process neither from
    // serving nor from stopping.
    let write = move || {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    };
    let writes = thread::Builder::new().name("announce".to_owned());
    if let Err(e) = writes.spawn(write) {
        error!("the disks are served, but how to connect to them is not printed: {e}");
    }
    sd_notify::tell(sd_notify::READY);
}

#[cfg(test)]
mod tests;
