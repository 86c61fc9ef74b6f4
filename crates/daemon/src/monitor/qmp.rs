//! The control socket: QMP commands as changes of the [`Server`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use block::{Aio, Backing, CacheMode, DetectZeroes, Discard};

use control::{
    BlockDeviceInfo, BlockDeviceStats, BlockExportInfo, BlockExportOptions, BlockExportRemoveMode,
    BlockExportType, BlockNodeInfo, BlockStats, BlockdevCacheInfo, BlockdevDriver, BlockdevOptions,
    BlockdevOptionsRbd, BlockdevRef, Command, CommandError, EventHub, ExportKind, FilePath,
    Handler, ImageFormat, ImageInfo, IoThreadInfo, NULL_BYTES_DEFAULT, ObjectOptions, ObjectType,
    Qapi, RingdiskResized,
};
use datapath::{DiskStats, LogLimiter, Polling};
use image::Format;
use rbd::Location;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use tracing::{debug, error, warn};

use crate::config::ThreadSpec;
use crate::config::cpus::Cpus;
use crate::config::spec::{DiskSpec, FileSpec, SocketAccess};
use crate::monitor::explain;
use crate::monitor::stats;
use crate::server::connection_info;
use crate::server::export::ExportSpec;
use crate::server::handover::{HandoverInProgress, locked};
use crate::server::iothreads::IoThreadError;
use crate::server::reload::Reloader;
use crate::server::{DiskView, Removal, Server, ServerError};
use crate::socket::accept::{Acceptor, Backoff};
use crate::socket::{self, Socket};

/// Executes commands on a host.
pub struct Qmp {
    pub server: Arc<Server>,
    pub config: Option<Arc<Reloader>>,
}

type Reply = Result<Value, CommandError>;

impl Handler for Qmp {
    fn execute(&self, command: Command) -> Reply {
        debug!("control socket: {}", command.name());
        let asks = command.name().starts_with("query-");
        let _inhibitor = match asks {
            true => None,
            false => Some(self.server.handover.inhibit()?),
        };
        let answer = self.execute_now(command);
        if !asks {
            // Also if it failed: it may have failed half way.
            self.server.persist();
        }
        answer
    }
}

impl Qmp {
    fn execute_now(&self, command: Command) -> Reply {
        let server = &self.server;
        let done = |()| Value::Object(serde_json::Map::new());
        match command {
            Command::BlockdevAdd(options) => add_node(server, &options).map(done),
            Command::BlockdevDel(which) => Ok(server.remove_node(&which.node_name).map(done)?),
            Command::BlockExportAdd(options) => add_export(server, &options).map(done),
            Command::BlockExportDel(which) => {
                let removal = match which.mode {
                    Some(BlockExportRemoveMode::Hard) => Removal::Hard,
                    _ => Removal::Safe,
                };
                Ok(server.remove_export(&which.id, removal).map(done)?)
            }
            Command::BlockResize(wanted) => {
                let name = match (wanted.device, wanted.node_name) {
                    (Some(name), None) | (None, Some(name)) => name,
                    _ => {
                        let problem = "Need exactly one of 'device' and 'node-name'";
                        return Err(CommandError::generic(problem));
                    }
                };
                Ok(server
                    .resize(&node_of(server, &name)?, Some(wanted.size))
                    .map(|_| done(()))?)
            }
            Command::BlockSetIoThrottle(wanted) => {
                let name = wanted.id.or(wanted.device).unwrap_or_default();
                let (node, group) = (node_of(server, &name)?, wanted.group.as_deref());
                Ok(server.throttle(&node, &wanted.limits, group).map(done)?)
            }
            Command::ObjectAdd(options) => add_object(server, &options).map(done),
            Command::ObjectDel(which) => remove_object(server, &which.id).map(done),
            Command::QueryBlockExports(_) => Ok(exports(server).to_json()),
            Command::QueryBlockstats(wanted) => {
                let nodes = wanted.query_nodes.unwrap_or(false);
                Ok(block_stats(server, nodes).to_json())
            }
            Command::QueryIothreads(_) => Ok(iothreads(server).to_json()),
            Command::QueryNamedBlockNodes(_) => {
                server.refresh_sizes(true);
                let mut nodes = Vec::new();
                server.each_disk(|disk| nodes.push(node_info(&disk)));
                Ok(nodes.to_json())
            }
            Command::Quit(_) => {
                // As if the service manager had asked.
                kill_process(getpid(), Signal::TERM)
                    .map_err(|e| CommandError::generic(format!("cannot end: {e}")))?;
                Ok(done(()))
            }
            Command::RingdiskAttach(wanted) => {
                let spec: DiskSpec = wanted
                    .disk
                    .parse()
                    .map_err(|e| CommandError::generic(format!("{e}")))?;
                let ready = server.attach(relative_to(spec, wanted.directory))?;
                let mut reply = serde_json::to_value(&ready).unwrap_or_default();
                reply["paste"] = connection_info::text(&[ready]).into();
                Ok(reply)
            }
            Command::RingdiskDetach(which) => {
                let removal = match which.force {
                    Some(true) => Removal::Hard,
                    _ => Removal::Safe,
                };
                Ok(server
                    .detach(&node_of(server, &which.id)?, removal)
                    .map(done)?)
            }
            Command::RingdiskReload(_) => {
                let reloaded = self.config.as_ref().map(|config| config.reload(server));
                server.look_for_growth();
                let unreachable = server.recreate_sockets();
                let none =
                    "there is no configuration to be read anew; start ringdisk with --config FILE";
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
            Command::RingdiskResize(wanted) => {
                let size = server.resize(&node_of(server, &wanted.id)?, wanted.size)?;
                Ok(RingdiskResized { size }.to_json())
            }
            Command::RingdiskReplace(wanted) => {
                let path = wanted.file.0;
                let file = match path.to_str().and_then(|path| path.strip_prefix("rbd:")) {
                    Some(image) => FileSpec::Rbd(Box::new(rbd::Location::parse(image).map_err(
                        |problem| CommandError::generic(format!("'rbd:{image}' {problem}")),
                    )?)),
                    None => FileSpec::Path(path),
                };
                let format = wanted.format.map(|format| match format {
                    ImageFormat::Raw => Format::Raw,
                    ImageFormat::Qcow2 => Format::Qcow2,
                });
                let name = node_of(server, &wanted.id)?;
                Ok(server.replace(&name, file, format).map(done)?)
            }
            Command::RingdiskExplain(_) => Ok(explain::all(server)),
            Command::RingdiskResume(wanted) => {
                let report = wanted.report.unwrap_or(false);
                Ok(server
                    .resume(&node_of(server, &wanted.id)?, report)
                    .map(done)?)
            }
            Command::RingdiskStats(_) => {
                server.watch();
                server.refresh_sizes(false);
                let mut disks = Vec::new();
                server.each_disk(|disk| disks.push(stats::disk(&disk)));
                let threads = server.threads.running();
                let threads: Vec<_> = threads.iter().map(|(t, _)| stats::thread(t)).collect();
                Ok(json!({ "disks": disks, "iothreads": threads }))
            }
        }
    }
}

impl From<ServerError> for CommandError {
    fn from(error: ServerError) -> Self {
        match &error {
            ServerError::NoNode(_) => Self::device_not_found(error.to_string()),
            _ => Self::generic(error.to_string()),
        }
    }
}

impl From<IoThreadError> for CommandError {
    fn from(error: IoThreadError) -> Self {
        Self::generic(error.to_string())
    }
}

fn relative_to(mut disk: DiskSpec, directory: Option<FilePath>) -> DiskSpec {
    if let Some(FilePath(directory)) = directory {
        match &mut disk.file {
            FileSpec::Path(path) => *path = directory.join(&*path),
            FileSpec::Rbd(location) => {
                let access = &mut location.access;
                for path in [&mut access.conf, &mut access.keyring]
                    .into_iter()
                    .flatten()
                {
                    *path = directory.join(&*path);
                }
            }
            FileSpec::Null(_) => {}
        }
        disk.socket = disk.socket.map(|path| directory.join(path));
    }
    disk
}

fn node_of(server: &Server, name: &str) -> Result<String, CommandError> {
    let node = server.node_of(name);
    node.ok_or_else(|| ServerError::NoNode(name.into()).into())
}

fn add_node(server: &Server, options: &BlockdevOptions) -> Result<(), CommandError> {
    let name = options.root_node_name()?.to_string();
    // A raw format over a protocol adds nothing but a name. As in QEMU, what is discarded must be allowed
    // at every level, and what is read-only below is so above.
    let mut inner = options;
    let mut discard = Discard::Unmap;
    let mut read_only = false;
    let (mut format, mut l2_cache_bytes) = (Format::Raw, None);
    let (file, aio) = loop {
        discard = match inner.discard {
            Some(Discard::Unmap) => discard,
            _ => Discard::Ignore,
        };
        read_only |= inner.read_only.unwrap_or(false);
        let below = match &inner.driver {
            BlockdevDriver::File(file) | BlockdevDriver::HostDevice(file) => {
                let aio = file.aio.map_or(Aio::Auto, Aio::from);
                break (FileSpec::Path(file.filename.0.clone()), aio);
            }
            BlockdevDriver::Rbd(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "qcow2 on an image in a Ceph cluster is not served: the image has snapshots and clones itself \
                     ('rbd clone')",
                ));
            }
            BlockdevDriver::Rbd(image) => {
                let location = location_of(image).map_err(CommandError::generic)?;
                read_only |= location.snapshot.is_some();
                break (FileSpec::Rbd(Box::new(location)), Aio::Auto);
            }
            BlockdevDriver::NullCo(null) => match null.size.unwrap_or(NULL_BYTES_DEFAULT) {
                n if n > 0 && n.is_multiple_of(512) => break (FileSpec::Null(n), Aio::Auto),
                n => {
                    let problem = format!("size: {n} bytes are no whole sectors");
                    return Err(CommandError::generic(problem));
                }
            },
            BlockdevDriver::Raw(raw) => &raw.file,
            BlockdevDriver::Qcow2(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "a qcow2 image inside of another is not served",
                ));
            }
            BlockdevDriver::Qcow2(image) => {
                (format, l2_cache_bytes) = (Format::Qcow2, image.l2_cache_size);
                &image.file
            }
        };
        match below {
            BlockdevRef::Definition(file) if file.node_name.is_some() => {
                return Err(CommandError::generic(
                    "'node-name' of a nested node is not kept; leave it out, or add that node first and \
                     name it here",
                ));
            }
            BlockdevRef::Definition(file) => inner = file,
            BlockdevRef::Reference(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "the file of a qcow2 image is given in place, as in file={driver=file,filename=...}",
                ));
            }
            BlockdevRef::Reference(child) => {
                let below = spec_of(server, child)?;
                let spec = DiskSpec {
                    name,
                    discard: match below.discard {
                        Discard::Unmap => discard,
                        Discard::Ignore => Discard::Ignore,
                    },
                    detect_zeroes: options.detect_zeroes.unwrap_or(below.detect_zeroes),
                    read_only: read_only || below.read_only,
                    ..below
                };
                return Ok(server.add_node_over(child, spec)?);
            }
        }
    };
    // What the outer node says of caches goes; what it leaves out is the inner one's.
    let cache = options.cache.as_ref().map_or(inner, |_| options);
    let detect_zeroes = options.detect_zeroes.or(inner.detect_zeroes);
    Ok(server.add_node(DiskSpec {
        format: Some(format),
        l2_cache_bytes,
        cache: cache.cache_mode(false)?,
        aio,
        read_only,
        discard,
        detect_zeroes: detect_zeroes.unwrap_or(DetectZeroes::Off),
        ..DiskSpec::new(name, file)
    })?)
}

fn location_of(options: &BlockdevOptionsRbd) -> Result<Location, String> {
    let mut location = Location::new(
        &options.pool,
        options.namespace.as_deref(),
        &options.image,
        options.snapshot.as_deref(),
    )?;
    let access = [
        ("conf", &options.conf),
        ("id", &options.user),
        ("keyring", &options.keyring),
    ];
    for (key, value) in access {
        if let Some(value) = value {
            location.access.set(key, value)?;
        }
    }
    if let Some(n) = options.connections {
        location.access.set("connections", &n.to_string())?;
    }
    for option in options.options.iter().flatten() {
        match option.split_once('=') {
            Some((key, value)) => location.access.set(key, value)?,
            None => return Err(format!("x-ringdisk-options: '{option}' is not KEY=VALUE")),
        }
    }
    Ok(location)
}

impl From<HandoverInProgress> for CommandError {
    fn from(error: HandoverInProgress) -> Self {
        Self::generic(error.to_string())
    }
}

fn spec_of(server: &Server, node: &str) -> Result<DiskSpec, CommandError> {
    let mut found = None;
    server.each_disk(|disk| {
        if disk.node.name() == node {
            found = Some(disk.node.spec.clone());
        }
    });
    found.ok_or_else(|| ServerError::NoNode(node.into()).into())
}

fn add_export(server: &Server, options: &BlockExportOptions) -> Result<(), CommandError> {
    let BlockExportType::VhostUserBlk(device) = &options.kind;
    let node = spec_of(server, &options.node_name)?;
    let cache = match (options.writethrough, node.cache) {
        (Some(true), CacheMode::Writeback) => CacheMode::Writethrough,
        (Some(true), CacheMode::None) => CacheMode::Directsync,
        (Some(true), CacheMode::Unsafe) => {
            return Err(CommandError::generic(
                "cache.no-flush of the node contradicts writethrough of the export; leave one out",
            ));
        }
        (_, cache) => cache,
    };
    let logical_block = match device.logical_block_size {
        None => None,
        Some(512) => Some(512),
        Some(4096) => Some(4096),
        Some(n) => {
            return Err(CommandError::generic(format!(
                "logical-block-size: {n} is neither 512 nor 4096"
            )));
        }
    };
    let spec = ExportSpec {
        id: options.id.to_string(),
        socket: device.addr.path().clone(),
        socket_access: SocketAccess::default(),
        queues: device.num_queues.unwrap_or(1),
        queue_size: node.queue_size,
        iothreads: options
            .iothread
            .as_ref()
            .map_or(Vec::new(), |threads| threads.ids().to_vec()),
        read_only: !options.writable.unwrap_or(false),
        cache,
        logical_block,
    };
    if !(1..=crate::config::spec::QUEUES_MAX).contains(&spec.queues) {
        let problem = format!(
            "num-queues: is not from 1 to {}",
            crate::config::spec::QUEUES_MAX
        );
        return Err(CommandError::generic(problem));
    }
    Ok(server.add_export(&options.node_name, &spec).map(drop)?)
}

fn add_object(server: &Server, options: &ObjectOptions) -> Result<(), CommandError> {
    let id = options.id.to_string();
    match &options.kind {
        ObjectType::ThrottleGroup(group) => Ok(server.add_group(&id, &group.limits)?),
        ObjectType::Iothread(thread) => {
            let spec = ThreadSpec {
                cpus: Cpus::default(),
                polling: Polling {
                    max: match thread.poll_max_ns {
                        Some(ns) => Duration::from_nanos(ns).min(Duration::from_millis(10)),
                        None => server.threads.polling().max,
                    },
                    ..server.threads.polling()
                },
            };
            Ok(server.threads.add(&id, spec)?)
        }
    }
}

fn remove_object(server: &Server, id: &str) -> Result<(), CommandError> {
    match server.remove_group(id) {
        Err(ServerError::NoGroup(_)) => Ok(server.threads.remove(id)?),
        result => Ok(result?),
    }
}

fn exports(server: &Server) -> Vec<BlockExportInfo> {
    let mut exports = Vec::new();
    server.each_disk(|disk| {
        exports.extend(disk.export.map(|export| BlockExportInfo {
            id: export.id.clone(),
            kind: ExportKind::VhostUserBlk,
            node_name: disk.node.name().to_owned(),
            shutting_down: false,
        }));
    });
    exports
}

fn block_stats(server: &Arc<Server>, nodes: bool) -> Vec<BlockStats> {
    server.watch();
    let mut all = Vec::new();
    server.each_disk(|disk| {
        let export = disk.export;
        if export.is_some() || nodes {
            all.push(BlockStats {
                device: export.filter(|_| !nodes).map(|export| export.id.clone()),
                node_name: Some(disk.node.name().to_owned()),
                stats: export.map_or_else(Default::default, |export| {
                    block_device_stats(&export.disk.stats())
                }),
            });
        }
    });
    all
}

fn block_device_stats(stats: &DiskStats) -> BlockDeviceStats {
    let DiskStats {
        read,
        write,
        flush,
        discard,
        write_zeroes,
        ..
    } = stats;
    // As in QEMU, where a write of zeroes is a write.
    BlockDeviceStats {
        rd_bytes: read.bytes,
        wr_bytes: write.bytes + write_zeroes.bytes,
        unmap_bytes: discard.bytes,
        rd_operations: read.operations,
        wr_operations: write.operations + write_zeroes.operations,
        flush_operations: flush.operations,
        unmap_operations: discard.operations,
        rd_total_time_ns: read.latency.total.sum_ns(),
        wr_total_time_ns: write.latency.total.sum_ns() + write_zeroes.latency.total.sum_ns(),
        flush_total_time_ns: flush.latency.total.sum_ns(),
        unmap_total_time_ns: discard.latency.total.sum_ns(),
        failed_rd_operations: read.errors,
        failed_wr_operations: write.errors + write_zeroes.errors,
        failed_flush_operations: flush.errors,
        failed_unmap_operations: discard.errors,
        account_failed: true,
        ..BlockDeviceStats::default()
    }
}

fn iothreads(server: &Server) -> Vec<IoThreadInfo> {
    let info = |(thread, spec): (crate::server::iothreads::NamedThread, ThreadSpec)| IoThreadInfo {
        id: thread.id,
        thread_id: thread.thread.thread_id(),
        poll_max_ns: spec.polling.max.as_nanos() as u64,
        // The look-out follows an average, and is not grown and shrunk in steps.
        poll_grow: 0,
        poll_shrink: 0,
        aio_max_batch: 0,
    };
    server.threads.running().into_iter().map(info).collect()
}

fn node_info(disk: &DiskView<'_>) -> BlockDeviceInfo {
    let node = disk.node;
    let cache = disk.cache();
    BlockDeviceInfo {
        node: BlockNodeInfo {
            file: node.filename.clone(),
            node_name: Some(node.name().to_owned()),
            ro: node.spec.read_only,
            drv: match (node.format, node.backing()) {
                (Format::Qcow2, _) => "qcow2",
                (Format::Raw, None) => "null-co",
                (Format::Raw, Some(Backing::File)) => "file",
                (Format::Raw, Some(Backing::BlockDevice)) => "host_device",
            }
            .into(),
            backing_file_depth: node.depth() as u64,
            active: true,
            encrypted: false,
            detect_zeroes: node.spec.detect_zeroes,
            image: ImageInfo {
                filename: node.filename.clone(),
                format: node.format.to_string(),
                virtual_size: disk.size(),
                actual_size: node.allocated(),
            },
            cache: BlockdevCacheInfo {
                writeback: match disk.export {
                    Some(export) => export.disk.write_cache(),
                    None => cache.write_cache(),
                },
                direct: cache.direct(),
                no_flush: !cache.flushes(),
            },
            write_threshold: 0,
        },
        limits: *disk.limits,
        group: disk.group.map(str::to_owned),
    }
}

/// The control socket. Dropping it ends all conversations, once the commands under way are done and answered:
/// a disk that one of them removes is not to be left half removed.
pub struct ControlSocket {
    hub: Arc<EventHub>,
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Serves a control socket, from threads of its own.
    ///
    /// # Errors
    /// There is no thread or event descriptor to be had.
    pub fn start(socket: Socket, qmp: Qmp) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags)?);
        let hub = qmp.server.events.clone();
        let handover = &qmp.server.handover;
        *locked(&handover.control) = Some(socket.listener.as_fd().try_clone_to_owned()?);
        let wakers = [stop.clone(), handover.socket_watch(socket.place())?];
        let listener = thread::Builder::new()
            .name("control".into())
            .spawn(move || listen(socket, &Arc::new(qmp), &wakers))?;
        Ok(Self {
            hub,
            stop,
            listener: Some(listener),
        })
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.hub.close();
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let Some(listener) = self.listener.take() else {
            return;
        };
        let deadline = Instant::now() + AT_END;
        while !listener.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if !listener.is_finished() {
            warn!(
                "control socket: a command waits for storage that does not answer; it is left alone"
            );
        }
    }
}

/// Time between two looks whether the new process has taken over.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);

/// How long the end waits for commands under way.
pub const AT_END: Duration = Duration::from_secs(10);

/// `wakers` become readable at the end, and when the socket is to be looked at.
fn listen(mut socket: Socket, qmp: &Arc<Qmp>, wakers: &[Arc<OwnedFd>; 2]) {
    let mut clients = Vec::new();
    accept_clients(&mut socket, qmp, wakers, &mut clients);
    for client in clients {
        let _ = client.join();
    }
}

fn accept_clients(
    socket: &mut Socket,
    qmp: &Arc<Qmp>,
    [stop, socket_watch]: &[Arc<OwnedFd>; 2],
    clients: &mut Vec<JoinHandle<()>>,
) {
    let (mut acceptor, mut accepting) = (Acceptor::new(), Backoff::default());
    let refusals = LogLimiter::default();
    loop {
        let mut ready = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(socket_watch, PollFlags::IN),
            PollFd::new(&socket.listener, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return error!("control socket: cannot wait for clients: {e}"),
            Ok(_) if !ready[0].revents().is_empty() => return,
            Ok(_) if !ready[1].revents().is_empty() => {
                let _ = rustix::io::read(socket_watch, &mut [0; 8]);
                if let Err(e) = make_again(socket, &qmp.server) {
                    error!("control socket: was removed, and cannot be made again: {e}");
                }
                continue;
            }
            Ok(_) => {}
        }
        if qmp.server.handover.is_leaving() {
            // It waits in the socket's queue for the new process, or for this one if that fails.
            thread::sleep(LEAVING_PAUSE);
            continue;
        }
        clients.retain(|client| !client.is_finished());
        match acceptor.accept(&socket.listener) {
            Ok((stream, refused)) => {
                accepting.succeeded();
                let stream = Arc::new(stream);
                let started = match refused {
                    None => start_client(&stream, qmp),
                    Some(e) => Err(block::explain(&e, "")),
                };
                match started {
                    Ok(client) => clients.push(client),
                    Err(why) => {
                        refusals.log(|left_out| {
                            warn!("control socket: cannot serve a client: {why}{left_out}");
                        });
                        let _ = control::refuse(&stream, &why);
                    }
                }
            }
            Err(e) => accepting.failed(|left_out| {
                let e = block::explain(&e, "it is tried again");
                warn!("control socket: cannot accept a client, which waits: {e}{left_out}");
            }),
        }
    }
}

/// Serves a client from a thread of its own; or says why not.
fn start_client(stream: &Arc<UnixStream>, qmp: &Arc<Qmp>) -> Result<JoinHandle<()>, String> {
    let events = qmp.server.events.subscribe().map_err(|e| e.to_string())?;
    let (stream, qmp) = (stream.clone(), qmp.clone());
    let serve = move || {
        if let Err(e) = control::serve_socket(&stream, &events, &*qmp) {
            debug!("control socket: a client was cut off: {e}");
        }
    };
    let thread = thread::Builder::new().name("control-client".into());
    thread.spawn(serve).map_err(|e| block::explain_thread(&e))
}

/// Makes the socket again if somebody has removed it.
fn make_again(socket: &mut Socket, server: &Server) -> io::Result<()> {
    if socket.is_removed() {
        let new = Socket::bind_private(socket.path()).map_err(io::Error::other)?;
        *locked(&server.handover.control) = Some(new.listener.as_fd().try_clone_to_owned()?);
        warn!(
            "{} had been removed, and is there again",
            new.path().display()
        );
        socket.renew(new);
    }
    Ok(())
}

/// Where the control socket is if the operator does not say. Disks' sockets end in `.sock`, so that none
/// is named like this.
pub fn default_path() -> PathBuf {
    socket::directory().join("control.qmp")
}
