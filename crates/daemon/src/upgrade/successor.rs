//! The new process's side of an upgrade: see [`protocol`](crate::upgrade::protocol).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{DirtyBitmap, ThrottleLimits};
use engine::Identity;
use guest::SavedSession;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use crate::config::limits;
use crate::config::nbd::{NbdConfig, NbdExportSpec, TlsSpec};
use crate::credentials;
use crate::inherited::{
    self, Gate, Inherited, InheritedDisk, InheritedExport, InheritedParts, NbdService,
};
use crate::state::Overrides;
use crate::upgrade::protocol::{
    BITMAP_UNIT, Channel, Handover, HandoverBitmap, HandoverExport, HandoverNbd, HandoverNbdConfig,
    HandoverNbdExport, HandoverTls, Hello, PROTOCOL, Step,
};

/// How long the old process may take to pause all disks. It gives up sooner.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The old process, at the other end of standard input.
pub struct Predecessor(Channel);

impl Predecessor {
    /// Receives everything that the old process serves.
    ///
    /// # Errors
    /// There is no old process, or it hands nothing over.
    pub fn receive() -> io::Result<(Self, Inherited)> {
        let channel = Channel::from(io::stdin().as_fd().try_clone_to_owned()?);
        let deadline = Instant::now() + TIMEOUT;
        let hello = Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            reads_directory: true,
        };
        channel.send(&hello, &[], deadline)?;
        let (handover, descriptors) = channel.receive::<Handover>(deadline)?;
        let parts = parts(handover, Descriptors(descriptors))?;
        Ok((Self(channel), Inherited::new(parts)))
    }

    /// Takes over: when this returns, this process serves and the old one does not. All disks have been opened before.
    ///
    /// # Errors
    /// The old process continues to serve. This process must not serve anything.
    pub fn commit(self, inherited: &Inherited) -> io::Result<()> {
        inherited.begin_commit();
        let Self(channel) = self;
        let deadline = Instant::now() + TIMEOUT;
        channel.send(&Step::Prepared, &[], deadline)?;
        let (step, _) = channel.receive::<Step>(deadline)?;
        if step != Step::Commit {
            return Err(io::Error::other(format!(
                "expected Commit, received {step:?}"
            )));
        }
        // If this arrives, this process serves, and otherwise the old one.
        channel.send(&Step::Serving, &[], deadline)?;
        inherited.finish_commit();
        Ok(())
    }
}

/// Checks that the old process is of the user that this one becomes, to whom state, journals and sockets belong.
///
/// # Errors
/// It is another user's.
pub fn check_user(later: Option<u32>) -> io::Result<()> {
    let later = later.unwrap_or_else(|| geteuid().as_raw());
    let before = socket_peercred(io::stdin())?.uid.as_raw();
    if before == later {
        return Ok(());
    }
    let [before, later] = [before, later].map(credentials::user_name);
    Err(io::Error::other(format!(
        "it runs as {before}, and its successor would as {later}: only a restart changes the user"
    )))
}

/// Tells the old process why this one does not take over. The old process continues to serve in any case.
pub fn report_failure(why: &str) {
    if let Ok(end) = io::stdin().as_fd().try_clone_to_owned() {
        let soon = Instant::now() + Duration::from_secs(1);
        let _ = Channel::from(end).send(&Step::Failed(why.into()), &[], soon);
    }
}

struct Descriptors(VecDeque<OwnedFd>);

impl Descriptors {
    fn next(&mut self) -> io::Result<OwnedFd> {
        let next = self.0.pop_front();
        next.ok_or_else(|| io::Error::other("received fewer descriptors than announced"))
    }

    fn next_if<T: From<OwnedFd>>(&mut self, announced: bool) -> io::Result<Option<T>> {
        let next = announced.then(|| self.next()).transpose()?;
        Ok(next.map(T::from))
    }

    fn take(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// Assigns the descriptors to what the message describes, in the order that [`Handover`] defines.
fn parts(handover: Handover, mut descriptors: Descriptors) -> io::Result<InheritedParts> {
    let invalid = |what, e: String| io::Error::other(format!("received an invalid {what}: {e}"));
    let gate = Arc::new(Gate::default());
    let mut parts = InheritedParts {
        files: descriptors.take(handover.files)?,
        lock: descriptors.next_if(handover.lock)?,
        control: descriptors.next_if(handover.control)?,
        upgrade: descriptors.next_if(handover.upgrade)?,
        metrics: descriptors.next_if(handover.metrics)?,
        released: handover.away,
        absent: handover.absent,
        sockets: handover.sockets,
        gate: Some(gate.clone()),
        ..InheritedParts::default()
    };
    for export in handover.exports {
        let socket = export.socket.clone();
        let made = inherited::made_at(&parts.sockets, &socket);
        let export = inherited_export(export, made, &mut descriptors, gate.clone())?;
        parts.exports.push((socket, export));
    }
    if let Some(nbd) = handover.nbd {
        parts.nbd = Some(inherited_nbd(nbd, descriptors.next()?)?);
    }
    let tls = handover.tls.into_iter();
    parts.tls = tls.map(|(id, tls)| (id, tls.into())).collect();
    if let Some(bits) = descriptors.next_if(!handover.bitmaps.is_empty())? {
        parts.bitmaps = bitmaps(&handover.bitmaps, &bits)?;
    }
    for disk in &handover.disks {
        let disk = InheritedDisk::try_from(disk).map_err(|e| invalid("disk", e.to_string()))?;
        parts.disks.insert(disk.spec.name.clone(), disk);
    }
    let overrides = handover
        .changed
        .map(|text| Overrides::parse(text.as_bytes()));
    parts.overrides = overrides
        .transpose()
        .map_err(|e| invalid("list of changes made at run time", e.to_string()))?;
    if let (Some(overrides), Some(queues)) = (&mut parts.overrides, handover.queues) {
        parts.knows_default_queues = true;
        let added = overrides.add_queues(queues);
        added.map_err(|e| invalid("number of queues", e))?;
    }
    if let Some(overrides) = &mut parts.overrides {
        overrides.add_sockets(handover.remembered_at);
        if !handover.guests.is_empty() {
            let set = overrides.set_guests(handover.guests);
            set.map_err(|e| invalid("guest", e))?;
        }
        overrides.left = handover.left;
    }
    parts.has_directory = handover.has_directory;
    parts.nbd_config = handover.nbd_config.map(nbd_config).transpose()?;
    Ok(parts)
}

/// The temporary bitmaps, each with its disk.
fn bitmaps(all: &[HandoverBitmap], bits: &File) -> io::Result<Vec<(String, DirtyBitmap)>> {
    let mut at = 0;
    let mut bitmaps = Vec::new();
    for bitmap in all {
        let HandoverBitmap {
            disk,
            name,
            granularity_bits,
            size,
            recording,
        } = bitmap;
        let new = DirtyBitmap::new(name.clone(), *granularity_bits, *size, *recording, false);
        let new = new.map_err(|_| io::Error::other("received a bitmap that is too large"))?;
        let bytes = new.bytes().next_multiple_of(BITMAP_UNIT);
        let mut buffer = vec![0; 1 << 20];
        for from in (0..bytes).step_by(buffer.len()) {
            let len = usize::try_from(bytes - from).unwrap_or(usize::MAX);
            let part = &mut buffer[..len.min(1 << 20)];
            bits.read_exact_at(part, at + from)?;
            new.merge_bytes(from, part);
        }
        at += bytes;
        bitmaps.push((disk.clone(), new));
    }
    Ok(bitmaps)
}

fn inherited_export(
    export: HandoverExport,
    made: Option<Identity>,
    descriptors: &mut Descriptors,
    gate: Arc<Gate>,
) -> io::Result<InheritedExport> {
    let listener = descriptors.next()?.into();
    let session = match export.session {
        None => None,
        Some(session) => {
            let connection = descriptors.next()?.into();
            let session_descriptors = descriptors.take(session.descriptors)?;
            let saved = SavedSession::parse(&session.words, session_descriptors)
                .map_err(|_| io::Error::other("received an invalid vhost-user session"))?;
            Some((connection, saved))
        }
    };
    Ok(InheritedExport {
        listener,
        made,
        file: export.file,
        session,
        write_cache: export.write_cache,
        capacity_read: export.capacity_read,
        size: export.size,
        gate,
    })
}

impl From<HandoverTls> for TlsSpec {
    fn from(tls: HandoverTls) -> Self {
        Self {
            dir: tls.dir,
            verify_peer: tls.verify_peer,
        }
    }
}

fn inherited_nbd(nbd: HandoverNbd, listener: OwnedFd) -> io::Result<NbdService> {
    let exports = nbd.exports.into_iter().map(nbd_export);
    Ok(NbdService {
        address: nbd.address.parse().map_err(io::Error::other)?,
        listener,
        tls: nbd.tls.map(TlsSpec::from),
        exports: exports.collect::<io::Result<_>>()?,
    })
}

fn nbd_config(nbd: HandoverNbdConfig) -> io::Result<NbdConfig> {
    let HandoverNbdConfig {
        address,
        tls,
        tls_any_peer,
        exports,
    } = nbd;
    let address = address.map(|address| address.parse()).transpose();
    let exports = exports.into_iter().map(nbd_export);
    Ok(NbdConfig {
        address: address.map_err(io::Error::other)?,
        tls,
        tls_any_peer,
        exports: exports.collect::<io::Result<_>>()?,
    })
}

fn nbd_export(export: HandoverNbdExport) -> io::Result<NbdExportSpec> {
    let HandoverNbdExport {
        id,
        node,
        name,
        description,
        writable,
        bitmaps,
        limits: given,
    } = export;
    let mut limits = ThrottleLimits::NONE;
    let value = |key| Ok(given.iter().find(|(k, _)| k == key).map(|(_, n)| *n));
    limits::change::<io::Error>(&mut limits, value)?;
    Ok(NbdExportSpec {
        id,
        node,
        name,
        description,
        writable,
        bitmaps,
        limits,
    })
}
