//! The old process's side of an upgrade: see [`protocol`](crate::upgrade::protocol).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use datapath::{HeldDisks, HoldError};
use guest::SavedSession;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::config::limits;
use crate::config::nbd::{NbdConfig, NbdExportSpec, TlsSpec};
use crate::inherited::NbdService;
use crate::log;
use crate::node::Node;
use crate::sd_notify;
use crate::server::Server;
use crate::server::device::CarriedDisk;
use crate::server::export::Paused;
use crate::server::handover::{PendingPause, locked, socket_file};
use crate::socket::BoundPath;
use crate::socket::accept::Client;
use crate::upgrade::protocol::{
    BITMAP_UNIT, Channel, FirstMessage, Handover, HandoverBitmap, HandoverDisk, HandoverExport,
    HandoverNbd, HandoverNbdConfig, HandoverNbdExport, HandoverSession, HandoverTls, Launched,
    Outcome, PROTOCOL, Step, UpgradeReply, UpgradeRequest,
};

/// How long the new process may take for a step while guests are served.
const TIMEOUT: Duration = Duration::from_secs(15);

/// How long a client may take to send its request after it has connected. Others wait so long.
const REQUEST: Duration = Duration::from_secs(3);

/// How long storage may take to answer before guests wait.
const ANSWER: Duration = Duration::from_secs(3);

/// How long requests in flight may take to finish, and the new process to take over, while guests wait.
const PAUSE: Duration = Duration::from_secs(5);

/// Limit of rounds in which the metadata of images is written while guests are served. A round that takes less than
/// [`FLUSH_IS_SHORT`] is the last one: the next write, while guests wait, takes about as long.
const FLUSH_ROUNDS: usize = 8;
const FLUSH_IS_SHORT: Duration = Duration::from_millis(15);

#[derive(Debug, Error)]
enum UpgradeError {
    #[error(
        "'ringdisk upgrade' has not started a new process: {cause}",
        cause = block::explain(.0, "the log says more")
    )]
    Launch(io::Error),
    #[error("the new process failed to start: {}", reported(.0))]
    Start(io::Error),
    #[error("the new process uses version {0} of the handover protocol, and this one {PROTOCOL}")]
    Protocol(u32),
    #[error(
        "the new program is older, and does not read the directory of the configuration: its disks would be removed, and their \
         VMs would lose them; move them into the file beside it, reload, and upgrade again"
    )]
    NoDirectory,
    #[error("a command is running on the control socket; try again when it is done")]
    Busy,
    #[error("{0}")]
    Storage(String),
    #[error(
        "no descriptors left to hand over disk {0}: {cause}; then upgrade again",
        cause = block::explain(.1, "this process continues to serve")
    )]
    Descriptors(String, io::Error),
    #[error("requests in flight on disk {0} do not finish; does its storage hang?")]
    Stuck(String),
    #[error(
        "requests of disk {0} wait until its storage works again: it may be full, and the log says more; when it works, \
         'ringdisk resume {0}' retries them; then upgrade again"
    )]
    Stalled(String),
    #[error("disks could not be handed over: {cause}", cause = block::explain(.0, ""))]
    Send(io::Error),
    #[error("the new process cannot serve these disks: {}", reported(.0))]
    Prepare(io::Error),
    #[error("this process has been told to stop")]
    Stopping,
    #[error("the new process failed while it took over: {0}")]
    Commit(io::Error),
}

/// What the new process has reported, or where else to look.
fn reported(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it exited without a message; the log may say why".into(),
        io::ErrorKind::TimedOut => "it does not answer".into(),
        _ => error.to_string(),
    }
}

/// Answers `ringdisk upgrade`. If another process takes over, exits.
pub fn upgrade(server: &Server, (socket, refused): Client, program: Option<&str>) {
    match socket_peercred(&socket).map(|peer| peer.uid) {
        Ok(user) if user == geteuid() || user.is_root() => {}
        _ => return warn!("upgrade: ignored a request of another user"),
    }
    let client = Channel::from(OwnedFd::from(socket));
    let deadline = Instant::now() + REQUEST;
    let unless = match client.receive::<UpgradeRequest>(deadline) {
        Ok((UpgradeRequest { unless_running }, _)) => unless_running,
        Err(e) => return warn!("{}", UpgradeError::Launch(e)),
    };
    let is_same = unless.is_some() && unless.as_deref() == program;
    if is_same && !server.needs_new_sandbox() {
        let _ = client.send(&UpgradeReply::SameProgram, &[], deadline);
        return;
    }
    let mut outcome = Outcome {
        error: None,
        pause_us: 0,
        disks: 0,
        connected: 0,
        failed_backups: Vec::new(),
    };
    let done = match refused {
        None => hand_over(server, &client, &mut outcome),
        Some(e) => Err(UpgradeError::Launch(e)),
    };
    let deadline = Instant::now() + TIMEOUT;
    match done {
        Ok(pid) => {
            sd_notify::tell(&format!("MAINPID={pid}"));
            let _ = client.send(&outcome, &[], deadline);
            log::finish();
            // Without destructors: everything belongs to the new process.
            process::exit(0);
        }
        Err(e) => {
            let mut problem = e.to_string();
            for name in server.hung_disks() {
                problem += &format!("; the storage of disk {name} hangs");
            }
            error!("upgrade: {problem}; this process continues to serve");
            outcome.error = Some(problem);
            let _ = client.send(&outcome, &[], deadline);
        }
    }
}

/// The new process.
struct Successor {
    channel: Channel,
    pid: u32,
}

/// Hands everything over. Returns the id of the new process, which serves from then on. After an error, this process
/// continues to serve.
fn hand_over(
    server: &Server,
    client: &Channel,
    outcome: &mut Outcome,
) -> Result<u32, UpgradeError> {
    let Successor { channel, pid } = start(server, client, Instant::now() + TIMEOUT)?;
    let Some(mut handed_over) = server.handover.begin(Instant::now() + PAUSE) else {
        return Err(UpgradeError::Busy);
    };
    check_none_waits(server)?;
    let asked = server.check_storage(Instant::now() + ANSWER);
    asked.map_err(UpgradeError::Storage)?;
    flush_while_served(server)?;
    check_not_stopping(server)?;

    // A backup depends on memory of this process.
    outcome.failed_backups = server.fail_backups(None, "ringdisk is upgraded; begin it again");
    // NBD clients connect again, to the new process or, if that fails, to this one.
    let nbd = server.nbd.pause();
    nbd.disconnect(Instant::now() + PAUSE)
        .map_err(UpgradeError::Stuck)?;
    let begin = Instant::now();
    check_none_waits(server)?;
    // Dropping a paused export resumes it, unless it was told to leave.
    let paused = pause(server, begin + PAUSE)?;
    check_not_stopping(server)?;
    outcome.disks = paused.len();
    outcome.connected = paused.iter().filter(|p| p.connection.is_some()).count();
    let finished = begin.elapsed();
    let flushed = server.flush_metadata(begin + PAUSE, Node::flush_for_successor);
    flushed.map_err(UpgradeError::Storage)?;
    let flushed_after = begin.elapsed();
    server.close_claims();
    let deadline = Instant::now() + PAUSE;
    send(server, &paused, &channel, deadline).map_err(UpgradeError::Send)?;
    expect(&channel, Step::Prepared, deadline).map_err(UpgradeError::Prepare)?;
    check_not_stopping(server)?;
    server.handover.set_leaving(true);
    if let Err(e) = commit(&channel) {
        server.handover.set_leaving(false);
        return Err(UpgradeError::Commit(e));
    }
    let all = begin.elapsed();
    outcome.pause_us = all.as_micros() as u64;
    info!(
        "process {pid} serves the disks from now on; guests waited {:.1} ms: {:.1} for requests in flight, {:.1} for \
         metadata of images, {:.1} for the new process",
        ms(all),
        ms(finished),
        ms(flushed_after - finished),
        ms(all - flushed_after)
    );
    *handed_over = true;
    // Clients that wait belong to the new process, until this one is gone.
    std::mem::forget(nbd);
    for export in paused {
        let _ = export.leave.send(());
    }
    Ok(pid)
}

/// Asks `ringdisk upgrade` to start the new process, and waits until that is ready to receive.
fn start(server: &Server, client: &Channel, deadline: Instant) -> Result<Successor, UpgradeError> {
    let successor = launch(client, deadline).map_err(UpgradeError::Launch)?;
    let hello = match successor.channel.receive::<FirstMessage>(deadline) {
        Ok((FirstMessage::Hello(hello), _)) => hello,
        Ok((FirstMessage::Failed(step), _)) => return Err(UpgradeError::Start(unexpected(step))),
        Err(e) => return Err(UpgradeError::Start(e)),
    };
    if hello.protocol != PROTOCOL {
        return Err(UpgradeError::Protocol(hello.protocol));
    }
    if server.configured().directory.is_some() && !hello.reads_directory {
        return Err(UpgradeError::NoDirectory);
    }
    info!(
        "upgrade: handing over to process {}, version {}",
        successor.pid, hello.version
    );
    Ok(successor)
}

fn launch(client: &Channel, deadline: Instant) -> io::Result<Successor> {
    let (channel, other_end) = Channel::pair()?;
    let other_end = other_end.into_descriptor();
    let (out, errors) = (io::stdout(), io::stderr());
    let descriptors = [other_end.as_fd(), out.as_fd(), errors.as_fd()];
    client.send(&UpgradeReply::Start, &descriptors, deadline)?;
    drop(other_end);
    let (Launched { pid }, _) = client.receive(deadline)?;
    Ok(Successor { channel, pid })
}

/// Writes the metadata of images repeatedly, until little is left to write while guests wait.
fn flush_while_served(server: &Server) -> Result<(), UpgradeError> {
    let deadline = Instant::now() + TIMEOUT;
    for _ in 0..FLUSH_ROUNDS {
        check_not_stopping(server)?;
        let began = Instant::now();
        let flushed = server.flush_metadata(deadline, Node::flush_metadata);
        flushed.map_err(UpgradeError::Storage)?;
        let took = began.elapsed();
        // No round that would miss the deadline.
        if took < FLUSH_IS_SHORT || Instant::now() + took > deadline {
            break;
        }
    }
    Ok(())
}

/// Checks that no request waits until its storage works again. It must be neither lost nor reported as failed, and the new
/// process does not have it.
fn check_none_waits(server: &Server) -> Result<(), UpgradeError> {
    match server.stalled_disk() {
        Some(id) => Err(UpgradeError::Stalled(id)),
        None => Ok(()),
    }
}

fn cannot_hold(HoldError { disk, error }: HoldError) -> UpgradeError {
    match error.kind() {
        io::ErrorKind::TimedOut => UpgradeError::Stuck(disk),
        _ => UpgradeError::Stalled(disk),
    }
}

fn check_not_stopping(server: &Server) -> Result<(), UpgradeError> {
    if server.handover.is_stopping() {
        return Err(UpgradeError::Stopping);
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Tells the new process to serve. When this returns, exactly one of the two processes serves: see
/// [`protocol`](crate::upgrade::protocol).
///
/// # Errors
/// The new process does not serve, and never will.
fn commit(channel: &Channel) -> io::Result<()> {
    let deadline = Instant::now() + PAUSE;
    let answer = channel
        .send(&Step::Commit, &[], deadline)
        .and_then(|()| expect(channel, Step::Serving, deadline));
    let Err(e) = answer else { return Ok(()) };
    channel.close_for_receiving();
    // An answer that arrived before the socket was closed counts, even after the deadline.
    match expect(channel, Step::Serving, Instant::now() + PAUSE) {
        Ok(()) => Ok(()),
        Err(_) => Err(e),
    }
}

struct PausedExport {
    socket: Arc<BoundPath>,
    carried: CarriedDisk,
    listener: OwnedFd,
    connection: Option<(OwnedFd, SavedSession)>,
    leave: Sender<()>,
}

/// Pauses all disks, once their requests in flight have finished. If that fails, no queue has stopped, or all start again.
fn pause(server: &Server, deadline: Instant) -> Result<Vec<PausedExport>, UpgradeError> {
    let pending = server.pause();
    // First, front-ends start and stop no queues any more: a start would wait for disks that are held.
    for pending in &pending {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = pending.asked.ready.recv_timeout(left);
        ready.map_err(|_| failed_pause(pending))?;
    }
    // A queue whose front-end keeps no record of requests in flight would report those as failed for which storage has no
    // space when it stops. None is in flight when it stops.
    let disks = server.disks_with_threads();
    let _held = HeldDisks::hold(&disks, Some(deadline)).map_err(cannot_hold)?;
    for pending in &pending {
        // An export that has ended does not answer below.
        let _ = pending.asked.begin.send(());
    }
    let pending = pending.into_iter();
    pending
        .map(|pending| wait_for_pause(pending, deadline))
        .collect()
}

fn failed_pause(pending: &PendingPause) -> UpgradeError {
    let id = pending.id.clone();
    if pending.has_stalled {
        UpgradeError::Stalled(id)
    } else {
        UpgradeError::Stuck(id)
    }
}

fn wait_for_pause(pending: PendingPause, deadline: Instant) -> Result<PausedExport, UpgradeError> {
    let unfinished = |paused: &Paused| {
        let session = paused.connection.as_ref();
        pending.device.disk.is_abandoned()
            || session.is_some_and(|(_, saved)| saved.is_unfinished())
    };
    let left = deadline.saturating_duration_since(Instant::now());
    match pending.asked.paused.recv_timeout(left) {
        Ok(Err(e)) => Err(UpgradeError::Descriptors(pending.id, e)),
        Ok(Ok(paused)) if unfinished(&paused) => Err(failed_pause(&pending)),
        Ok(Ok(paused)) => Ok(PausedExport {
            socket: pending.socket,
            // As the last front-end has left it.
            carried: pending.device.carried(&pending.node),
            listener: paused.listener,
            connection: paused.connection,
            leave: paused.leave,
        }),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            Err(failed_pause(&pending))
        }
    }
}

fn send(
    server: &Server,
    paused: &[PausedExport],
    channel: &Channel,
    deadline: Instant,
) -> io::Result<()> {
    let files = server.descriptors()?;
    let lock = server.state_lock()?;
    let mut nbd = server.nbd.handover()?;
    if let Some(nbd) = &mut nbd {
        nbd.exports.extend(server.waiting_exports());
    }
    let (bitmaps, bits) = temporary_bitmaps(server)?;
    let state = &server.handover;
    let (control, upgrade) = (locked(&state.control), locked(&state.upgrade));
    let (control, upgrade, metrics) = (control.as_ref(), upgrade.as_ref(), state.metrics.get());
    let mut sockets = state.socket_files();
    sockets.extend(paused.iter().filter_map(|p| socket_file(&p.socket)));
    let overrides = server.overrides();
    let configured = server.configured();
    let mut handover = Handover {
        files: files.len(),
        lock: lock.is_some(),
        control: control.is_some(),
        upgrade: upgrade.is_some(),
        metrics: metrics.is_some(),
        disks: server
            .handover_disks()
            .iter()
            .map(HandoverDisk::from)
            .collect(),
        changed: Some(overrides.text()),
        absent: server
            .absent()
            .into_iter()
            .map(|(disk, _)| disk.name)
            .collect(),
        away: server.released(),
        sockets,
        exports: Vec::new(),
        nbd: nbd.as_ref().map(handover_nbd),
        nbd_config: Some(handover_nbd_config(&configured.nbd)),
        has_directory: configured.directory.is_some(),
        queues: Some(overrides.queues()),
        remembered_at: overrides.sockets(),
        guests: overrides.guests(),
        left: overrides.left.clone(),
        tls: (server.nbd.tls().iter())
            .map(|(id, spec)| (id.clone(), handover_tls(spec)))
            .collect(),
        bitmaps,
    };
    let singles = lock.iter().chain(control).chain(upgrade).chain(metrics);
    let mut descriptors: Vec<BorrowedFd<'_>> =
        files.iter().chain(singles).map(AsFd::as_fd).collect();
    for export in paused {
        descriptors.push(export.listener.as_fd());
        let session = export.connection.as_ref().map(|(connection, saved)| {
            let saved_descriptors = saved.descriptors();
            let session = HandoverSession {
                words: saved.words(),
                descriptors: saved_descriptors.len(),
            };
            descriptors.push(connection.as_fd());
            descriptors.extend(saved_descriptors);
            session
        });
        let CarriedDisk {
            file,
            size,
            write_cache,
            capacity_read,
        } = export.carried;
        handover.exports.push(HandoverExport {
            socket: export.socket.path().into(),
            file,
            write_cache,
            capacity_read,
            size: Some(size),
            session,
        });
    }
    descriptors.extend(nbd.iter().map(|nbd| nbd.listener.as_fd()));
    descriptors.extend(bits.iter().map(AsFd::as_fd));
    channel.send(&handover, &descriptors, deadline)
}

fn handover_tls(spec: &TlsSpec) -> HandoverTls {
    HandoverTls {
        dir: spec.dir.clone(),
        verify_peer: spec.verify_peer,
    }
}

fn handover_nbd(nbd: &NbdService) -> HandoverNbd {
    HandoverNbd {
        address: nbd.address.to_string(),
        tls: nbd.tls.as_ref().map(handover_tls),
        exports: nbd.exports.iter().map(handover_nbd_export).collect(),
    }
}

fn handover_nbd_config(nbd: &NbdConfig) -> HandoverNbdConfig {
    let NbdConfig {
        address,
        tls,
        tls_any_peer,
        exports,
    } = nbd;
    HandoverNbdConfig {
        address: address.as_ref().map(ToString::to_string),
        tls: tls.clone(),
        tls_any_peer: *tls_any_peer,
        exports: exports.iter().map(handover_nbd_export).collect(),
    }
}

fn handover_nbd_export(export: &NbdExportSpec) -> HandoverNbdExport {
    let NbdExportSpec {
        id,
        node,
        name,
        description,
        writable,
        bitmaps,
        limits,
    } = export.clone();
    HandoverNbdExport {
        id,
        node,
        name,
        description,
        writable,
        bitmaps,
        limits: limits::pairs(&limits)
            .into_iter()
            .map(|(key, n)| (key.to_owned(), n))
            .collect(),
    }
}

/// The temporary bitmaps, and a file with their bits, if there are any.
fn temporary_bitmaps(server: &Server) -> io::Result<(Vec<HandoverBitmap>, Option<OwnedFd>)> {
    let all = server.temporary_bitmaps();
    if all.is_empty() {
        return Ok((Vec::new(), None));
    }
    let mut file = File::from(memfd_create(c"bitmaps", MemfdFlags::CLOEXEC)?);
    let mut described = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    for (disk, bitmap) in all {
        let bytes = bitmap.bytes().next_multiple_of(BITMAP_UNIT);
        for at in (0..bytes).step_by(buffer.len()) {
            let part = &mut buffer[..usize::try_from(bytes - at)
                .unwrap_or(usize::MAX)
                .min(1 << 20)];
            bitmap.copy_to(at, part);
            file.write_all(part)?;
        }
        described.push(HandoverBitmap {
            disk,
            name: bitmap.name().to_owned(),
            granularity_bits: bitmap.granularity_bits(),
            size: bitmap.size(),
            recording: bitmap.is_recording(),
        });
    }
    Ok((described, Some(file.into())))
}

fn expect(channel: &Channel, step: Step, deadline: Instant) -> io::Result<()> {
    let (received, _) = channel.receive::<Step>(deadline)?;
    if received == step {
        return Ok(());
    }
    Err(unexpected(received))
}

fn unexpected(step: Step) -> io::Error {
    match step {
        Step::Failed(why) => io::Error::other(why),
        step => io::Error::other(format!("received an unexpected {step:?}")),
    }
}
