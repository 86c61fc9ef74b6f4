//! QMP commands as changes of the [`Server`].

mod backups;
mod bitmaps;
mod objects;
mod queries;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use control::{
    BlockExportDel, BlockExportRemoveMode, BlockResize, Command, CommandError, FilePath, Handler,
    ImageFormat, Qapi, RingdiskAttach, RingdiskReplace, RingdiskResized,
};
use harness::text::escaped;
use image::Format;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use tracing::debug;

use crate::config::spec::{DiskSpec, FileSpec};
use crate::monitor::{explain, stats};
use crate::server::connection_info::{self, ConnectionInfo};
use crate::server::handover::HandoverInProgress;
use crate::server::iothreads::IoThreadError;
use crate::server::reload::Reloader;
use crate::server::{Claim, Removal, Server, ServerError, Waiting};

/// Executes commands on a server.
pub struct Qmp {
    pub server: Arc<Server>,
    pub config: Option<Arc<Reloader>>,
}

/// A client of the control socket.
pub struct QmpClient<'a> {
    pub qmp: &'a Qmp,
    pub stream: &'a UnixStream,
}

/// A command that a client waits for.
struct Run<'a> {
    server: &'a Server,
    client: &'a QmpClient<'a>,
    /// As users know it.
    name: &'static str,
}

impl<'a> Run<'a> {
    /// Claims disks, nodes and exports for the command.
    ///
    /// # Errors
    /// Another command does not end, or the client has left meanwhile: it does not expect that the command begins later.
    fn claim<N: AsRef<str>>(&self, names: impl Fn() -> Vec<N>) -> Result<Claim<'a>, CommandError> {
        self.claim_within(Duration::MAX, names)
    }

    /// The same, but does not wait for longer than `time`.
    fn claim_within<N: AsRef<str>>(
        &self,
        time: Duration,
        names: impl Fn() -> Vec<N>,
    ) -> Result<Claim<'a>, CommandError> {
        let has_left = || self.client.has_left();
        let waiting = Waiting::of_client(&has_left).at_most(time);
        Ok(self.server.claim_as(&waiting, self.name, names)?)
    }
}

type Reply = Result<Value, CommandError>;

impl Handler for QmpClient<'_> {
    fn execute(&self, command: Command) -> Reply {
        debug!("control socket: {}", command.name());
        let server = &self.qmp.server;
        let asks = command.name().starts_with("query-");
        let _inhibitor = if asks {
            None
        } else {
            Some(server.handover.inhibit()?)
        };
        let unsaved = server.unsaved_changes();
        let mut answer = self.qmp.execute_now(command, self);
        if !asks {
            // Also if it failed: it may have failed half way.
            let saved = server.persist_change(unsaved);
            answer = answer.and_then(|reply| Ok(saved.map(|()| reply)?));
        }
        // Users read it, and it may quote names that others have chosen.
        answer.map_err(|e| CommandError::new(e.class, escaped(&e.desc)))
    }
}

impl QmpClient<'_> {
    /// Whether the client has closed its socket, and will not read a reply.
    fn has_left(&self) -> bool {
        let mut sockets = [PollFd::new(self.stream, PollFlags::empty())];
        let _ = poll(&mut sockets, Some(&Timespec::default()));
        sockets[0].revents().contains(PollFlags::HUP)
    }
}

impl Qmp {
    fn execute_now(&self, command: Command, client: &QmpClient<'_>) -> Reply {
        let server = &self.server;
        let run = &Run {
            server,
            client,
            name: command.name().trim_start_matches("x-ringdisk-"),
        };
        match command {
            Command::BackupAccessSetup(wanted) => backups::begin(run, wanted),
            Command::BackupAccessTeardown(which) => backups::end(run, &which),
            Command::RingdiskBackups(_) => backups::list(server),
            Command::BlockdevAdd(options) => done(objects::add_node(run, &options)),
            Command::BlockdevDel(which) => {
                let claim = run.claim(|| vec![&which.node_name])?;
                done(server.remove_node(&claim, &which.node_name))
            }
            Command::BlockDirtyBitmapAdd(wanted) => bitmaps::add(run, wanted),
            Command::BlockDirtyBitmapClear(which) => bitmaps::clear(run, which),
            Command::BlockDirtyBitmapDisable(which) => bitmaps::disable(run, which),
            Command::BlockDirtyBitmapEnable(which) => bitmaps::enable(run, which),
            Command::BlockDirtyBitmapMerge(wanted) => bitmaps::merge(run, wanted),
            Command::BlockDirtyBitmapRemove(which) => bitmaps::remove(run, which),
            Command::Transaction(wanted) => bitmaps::transaction(run, wanted),
            Command::BlockExportAdd(options) => done(objects::add_export(run, &options)),
            Command::BlockExportDel(which) => remove_export(run, &which),
            Command::BlockResize(wanted) => block_resize(run, wanted),
            Command::BlockSetIoThrottle(wanted) => {
                let name = wanted.id.or(wanted.device).unwrap_or_default();
                let claim = run.claim(|| vec![&name])?;
                let (node, group) = (node_of(server, &name)?, wanted.group.as_deref());
                done(server.throttle(&claim, &node, &wanted.limits, group))
            }
            Command::NbdServerStart(wanted) => done(objects::start_nbd(run, &wanted)),
            Command::NbdServerStop(_) => done(server.stop_nbd()),
            Command::ObjectAdd(options) => done(objects::add_object(server, &options)),
            Command::ObjectDel(which) => done(objects::remove_object(run, &which.id)),
            Command::QueryBlockExports(_) => Ok(queries::exports(server).to_json()),
            Command::QueryBlockstats(wanted) => {
                let nodes = wanted.query_nodes.unwrap_or(false);
                Ok(queries::block_stats(server, nodes).to_json())
            }
            Command::QueryIothreads(_) => Ok(queries::iothreads(server).to_json()),
            Command::QueryNamedBlockNodes(_) => {
                server.refresh_sizes(true);
                let mut nodes = Vec::new();
                server.each_disk(|disk| nodes.push(queries::node_info(server, &disk)));
                Ok(nodes.to_json())
            }
            Command::QueryPbsBitmapInfo(_) => backups::bitmaps(server),
            Command::QueryProxmoxSupport(_) => Ok(backups::proxmox_support().to_json()),
            Command::Quit(_) => {
                // As if the service manager had asked.
                let killed = kill_process(getpid(), Signal::TERM);
                done(killed.map_err(|e| CommandError::generic(format!("cannot end: {e}"))))
            }
            Command::RingdiskAttach(wanted) => attach(run, wanted),
            Command::RingdiskDetach(which) => {
                let removal = match which.force {
                    Some(true) => Removal::Hard,
                    _ => Removal::Safe,
                };
                let claim = run.claim(|| vec![&which.id])?;
                let node = match server.is_absent(&which.id) {
                    true => which.id,
                    false => node_of(server, &which.id)?,
                };
                if let Some(file) = which.file {
                    server.check_file_is(&node, &file)?;
                }
                done(server.detach(&claim, &node, removal))
            }
            Command::RingdiskNbd(_) => Ok(queries::nbd(server)),
            Command::RingdiskReload(_) => self.reload(client),
            Command::RingdiskResize(wanted) => {
                let size = resize(run, &wanted.id, wanted.size)?;
                Ok(RingdiskResized { size }.to_json())
            }
            Command::RingdiskReplace(wanted) => replace(run, wanted),
            Command::RingdiskCheckFile(wanted) => {
                let disk = wanted.disk.parse::<DiskSpec>();
                let disk = disk.map_err(|e| CommandError::generic(e.to_string()))?;
                done(server.check_file_in_time(disk))
            }
            Command::RingdiskConnectInfo(wanted) => {
                if let Some(file) = &wanted.file {
                    server.check_is_at(&node_of(server, &wanted.id)?, file)?;
                }
                connect_info(server.connect_info(&wanted.id)?)
            }
            Command::RingdiskExplain(_) => Ok(explain::all(server)),
            Command::RingdiskResume(wanted) => {
                let report = wanted.report.unwrap_or(false);
                done(server.resume(&node_of(server, &wanted.id)?, report))
            }
            Command::RingdiskStats(_) => Ok(self.stats()),
        }
    }

    fn stats(&self) -> Value {
        let server = &self.server;
        server.watch();
        server.refresh_sizes(false);
        let mut disks = Vec::new();
        server.each_disk(|disk| disks.push(stats::disk(&disk)));
        let configured = server.configured().disks;
        disks.extend(server.absent().iter().map(|absent| {
            let is_configured = configured.iter().any(|disk| disk.name == absent.0.name);
            stats::absent(absent, is_configured)
        }));
        let threads = server.threads.running();
        let threads: Vec<_> = threads.iter().map(|(t, _)| stats::thread(t)).collect();
        json!({ "pid": std::process::id(), "disks": disks, "iothreads": threads })
    }

    fn reload(&self, client: &QmpClient<'_>) -> Reply {
        let server = &self.server;
        let has_left = || client.has_left();
        let waiting = Waiting::of_client(&has_left);
        let reloaded = (self.config.as_ref()).map(|config| config.reload(server, &waiting));
        server.look_for_growth();
        let unreachable = server.recreate_sockets();
        let none = "there is no configuration to reload; start ringdisk with --config FILE";
        let left_out = reloaded
            .ok_or_else(|| CommandError::generic(none))?
            .map_err(|e| CommandError::generic(e.to_string()))?;
        let mut reply = json!({});
        for (key, sentences) in [("left-out", left_out), ("unreachable", unreachable)] {
            if !sentences.is_empty() {
                reply[key] = sentences.into();
            }
        }
        Ok(reply)
    }
}

/// The reply to a command that returns nothing.
fn done<E: Into<CommandError>>(result: Result<(), E>) -> Reply {
    match result {
        Ok(()) => Ok(json!({})),
        Err(e) => Err(e.into()),
    }
}

fn remove_export(run: &Run<'_>, which: &BlockExportDel) -> Reply {
    let removal = match which.mode {
        Some(BlockExportRemoveMode::Hard) => Removal::Hard,
        _ => Removal::Safe,
    };
    let (server, id) = (run.server, &which.id);
    let claim = run.claim(|| vec![id])?;
    match server.remove_nbd_export(&claim, id, removal)? {
        true => Ok(json!({})),
        false => done(server.remove_export(&claim, id, removal)),
    }
}

fn resize(run: &Run<'_>, name: &str, size: Option<u64>) -> Result<u64, CommandError> {
    let claim = run.claim(|| vec![name])?;
    let node = node_of(run.server, name)?;
    Ok(run.server.resize(&claim, &node, size)?)
}

fn block_resize(run: &Run<'_>, wanted: BlockResize) -> Reply {
    let name = match (wanted.device, wanted.node_name) {
        (Some(name), None) | (None, Some(name)) => name,
        _ => {
            let problem = "Need exactly one of 'device' and 'node-name'";
            return Err(CommandError::generic(problem));
        }
    };
    resize(run, &name, Some(wanted.size)).map(|_| json!({}))
}

fn attach(run: &Run<'_>, wanted: RingdiskAttach) -> Reply {
    let spec: Result<DiskSpec, _> = wanted.disk.parse();
    let spec = spec.map_err(|e| CommandError::generic(e.to_string()))?;
    let spec = match wanted.directory {
        Some(FilePath(directory)) => spec.in_directory(&directory),
        None => spec,
    };
    let mut names = run.server.own_resources(&spec);
    names.push(spec.name.clone());
    let claim = run.claim(|| names.clone())?;
    run.server.check_absent_is_same(&spec)?;
    let attached = match wanted.unless_left {
        Some(true) => run.server.attach_current(&claim, spec)?,
        _ => run.server.attach(&claim, spec)?,
    };
    (run.server).add_configured_exports(&claim, &attached.name);
    connect_info(attached)
}

/// How to connect a VM, also as text.
fn connect_info(disk: ConnectionInfo) -> Reply {
    let mut reply = serde_json::to_value(&disk).unwrap_or_default();
    reply["paste"] = connection_info::text(&[disk]).into();
    Ok(reply)
}

fn replace(run: &Run<'_>, wanted: RingdiskReplace) -> Reply {
    let path = wanted.file.0;
    let file = match path.to_str().and_then(|path| path.strip_prefix("rbd:")) {
        Some(image) => {
            let location = rbd::Location::parse(image);
            FileSpec::Rbd(Box::new(location.map_err(|problem| {
                CommandError::generic(format!("'rbd:{image}' {problem}"))
            })?))
        }
        None => FileSpec::Path(path),
    };
    let format = wanted.format.map(|format| match format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2,
    });
    let mut names = run.server.file_resources(&wanted.id, &file);
    names.push(wanted.id.clone());
    let claim = run.claim(|| names.clone())?;
    let name = node_of(run.server, &wanted.id)?;
    let data_file = wanted.data_file.map(|path| path.0);
    let server = run.server;
    done(server.replace(&claim, &name, file, format, data_file))
}

impl From<ServerError> for CommandError {
    fn from(error: ServerError) -> Self {
        match &error {
            ServerError::NoNode(_) | ServerError::Absent(..) => {
                Self::device_not_found(error.to_string())
            }
            _ => Self::generic(error.to_string()),
        }
    }
}

impl From<IoThreadError> for CommandError {
    fn from(error: IoThreadError) -> Self {
        Self::generic(error.to_string())
    }
}

fn node_of(server: &Server, name: &str) -> Result<String, CommandError> {
    let node = server.node_of(name);
    node.ok_or_else(|| server.not_there(name).into())
}

impl From<HandoverInProgress> for CommandError {
    fn from(error: HandoverInProgress) -> Self {
        Self::generic(error.to_string())
    }
}
