//! Applies the changes of a reload.

use std::collections::BTreeSet;

use block::ThrottleLimits;
use tracing::{error, warn};

use super::{Change, ConnectionInfo, DiskChange, has};
use crate::config::nbd::NbdExportSpec;
use crate::config::spec::DiskSpec;
use crate::config::{Config, ThreadSpec, sockets};
use crate::server::iothreads::IoThreadError;
use crate::server::{Claim, DISKS_MAX, Move, PreparedDisk, Removal, Server, ServerError};
use crate::socket::canonical_path;

/// A change that may wait for storage.
enum Last<'a> {
    Move(Move),
    Remove(&'a DiskSpec),
}

impl Last<'_> {
    fn disk(&self) -> &str {
        match self {
            Self::Move(moved) => moved.disk(),
            Self::Remove(disk) => &disk.name,
        }
    }
}

impl<'a> Change<'a> {
    /// Applies the changes, some of which may fail. What may wait for storage comes last, if nothing depends on it: by then, the
    /// other disks are free for commands.
    pub(super) fn carry_out(
        &self,
        server: &Server,
        mut claim: Claim<'_>,
        ready: ConnectionInfo<'a>,
    ) -> Failed<'a> {
        let mut failed = Failed::default();
        for disk in &self.absent {
            server.change_absent(disk.clone());
        }
        // If nothing else depends on them, removals and moves are last.
        let is_last = !self.is_entangled(server, &ready);
        let (moves, last_moves): (Vec<_>, Vec<_>) = ready.moves.into_iter().partition(|_| !is_last);
        let (removed, last_removed): (Vec<&DiskSpec>, Vec<&DiskSpec>) =
            self.removed.iter().partition(|_| !is_last);
        // Other disks of this reload need these files: no other command may open them, nor those below them.
        let stopped = self.changed.iter().map(|changed| &changed.then.name);
        let stopped = stopped.chain(removed.iter().map(|disk| &disk.name));
        let moved = moves.iter().map(|moved| moved.disk().to_owned());
        let reserved = server.reserve_files(&claim, stopped.cloned().collect(), moved.collect());
        let own_exports = self.exports_of_commands(server);
        let mut ended = Vec::new();
        for &disk in &removed {
            ended.extend(RemovedDisk::of(server, disk));
            self.remove(server, &claim, disk, &mut failed);
        }
        let restarted = self.changed.iter().map(|changed| &changed.then.name);
        let exports = restarted.flat_map(|disk| server.nbd_exports_of(disk));
        let exports = exports.filter(|export| self.old.exports.contains(export));
        let exports: Vec<NbdExportSpec> = exports.collect();
        // All of them before the first starts again: they may have exchanged files.
        let changed = self.changed.iter().zip(ready.changed);
        let stopped =
            changed.map(|(changed, prepared)| (changed, stop(server, &claim, changed), prepared));
        let stopped: Vec<_> = stopped.collect();
        for moved in moves {
            self.move_disk(server, &claim, moved, &mut failed);
        }
        for (changed, stopped, prepared) in stopped {
            let result = match stopped {
                Ok(()) => start(server, &claim, changed, prepared),
                Err(e) => {
                    server.forget(prepared);
                    Err(e)
                }
            };
            let DiskChange { before, then, .. } = changed;
            let remains = match server.is_absent(&then.name) {
                true => self.new.disks.iter().find(|disk| disk.name == then.name),
                false => server.is_there(&then.name).then_some(*before),
            };
            failed.disk("changing disk", before, result, remains);
        }
        for (&disk, prepared) in self.added.iter().zip(ready.added) {
            let served = server.serve(&claim, prepared).map(drop);
            if served.is_err()
                && let Some(found) = ended.iter().position(|ended| ended.is_replaced_by(disk))
            {
                ended
                    .swap_remove(found)
                    .restore(server, &claim, &mut failed);
            }
            failed.disk("serving disk", disk, served, None);
        }
        drop(reserved);
        add_again(server, &claim, exports, own_exports, &mut failed);
        self.apply_exports(server, &claim, &mut failed);
        for &disk in &self.throttled {
            self.limit(server, &claim, disk, &mut failed);
        }
        for (name, limits) in &self.new.groups {
            let before = self.old.groups.iter().find(|(other, _)| other == name);
            // One that was there already is as it is configured from now on.
            if before.is_none_or(|(_, before)| before != limits) {
                failed.note("changing group", name, server.change_group(name, limits));
            }
        }
        let moves = last_moves.into_iter().map(Last::Move);
        let removed = last_removed.into_iter().map(Last::Remove);
        let hung = server.hung_disks();
        let mut last: Vec<_> = moves.chain(removed).collect();
        last.sort_by_key(|last| hung.iter().any(|hung| hung == last.disk()));
        let mut names: BTreeSet<_> = last.iter().map(|last| last.disk().to_owned()).collect();
        for last in last {
            claim.keep(&names);
            names.remove(last.disk());
            match last {
                Last::Move(moved) => self.move_disk(server, &claim, moved, &mut failed),
                Last::Remove(disk) => self.remove(server, &claim, disk, &mut failed),
            }
        }
        drop(claim);
        self.remove_groups_and_threads(server, &mut failed);
        failed
    }

    /// Whether a disk starts or moves only once another has left its file, its socket or its name.
    fn is_entangled(&self, server: &Server, ready: &ConnectionInfo<'_>) -> bool {
        let its_exports = |disk: &&DiskSpec| server.nbd_exports_of(&disk.name);
        let ended: Vec<_> = self.removed.iter().flat_map(its_exports).collect();
        let mut opened = ready.changed.iter().chain(&ready.added);
        let mut removed = self.removed.iter();
        opened.any(|prepared| !prepared.is_open())
            || ready.moves.iter().any(|moved| moved.waits_for().is_some())
            || removed.any(|removed| {
                let path = |disk: &DiskSpec| canonical_path(&sockets::path(disk));
                let starts = self.changed.iter().map(|changed| &changed.then);
                let mut starts = starts.chain(self.added.iter().copied());
                let mut exports = self.new.exports.iter();
                starts.any(|disk| path(disk) == path(removed))
                    || exports.any(|export| {
                        let is_ended = |other: &NbdExportSpec| {
                            other.id == export.id || other.name == export.name
                        };
                        export.id == removed.name || ended.iter().any(is_ended)
                    })
            })
            || self.old.disks.len() + self.added.len() > DISKS_MAX
    }

    fn remove(
        &self,
        server: &Server,
        claim: &Claim<'_>,
        disk: &'a DiskSpec,
        failed: &mut Failed<'a>,
    ) {
        let result = server.detach(claim, &disk.name, Removal::Hard);
        let remains = server.node_of(&disk.name).map(|_| disk);
        failed.disk("removing disk", disk, result, remains);
    }

    /// Moves a disk, and then sets its limits.
    fn move_disk(&self, server: &Server, claim: &Claim<'_>, moved: Move, failed: &mut Failed<'a>) {
        let Some(&disk) = self.moved.iter().find(|disk| disk.name == moved.disk()) else {
            return server.release(moved);
        };
        let before = self.before(&disk.name);
        let result = server.carry_out(claim, moved);
        failed.disk("moving disk", disk, result, before);
        self.limit(server, claim, disk, failed);
    }

    fn limit(
        &self,
        server: &Server,
        claim: &Claim<'_>,
        disk: &'a DiskSpec,
        failed: &mut Failed<'a>,
    ) {
        let before = self.before(&disk.name);
        server.set_labels(claim, &disk.name, &disk.labels);
        if before.is_some_and(|before| before.has_limits_of(disk)) {
            return;
        }
        let group = disk.throttle_group.as_deref();
        let result = server.throttle(claim, &disk.name, &disk.limits, group);
        failed.disk("limiting disk", disk, result, before);
    }

    /// A disk as it was configured.
    fn before(&self, disk: &str) -> Option<&'a DiskSpec> {
        self.old.disks.iter().find(|other| other.name == disk)
    }

    fn remove_groups_and_threads(&self, server: &Server, failed: &mut Failed<'a>) {
        let gone = |(name, _): &&(String, _)| !has(&self.new.groups, name);
        for group in self.old.groups.iter().filter(gone) {
            let removed = match server.remove_group(&group.0) {
                // A command has removed it.
                Err(ServerError::NoGroup(_)) => Ok(()),
                removed => removed,
            };
            if failed.note("removing group", &group.0, removed) {
                failed.groups.push(group);
            }
        }
        let gone = |(id, _): &&(String, _)| !has(&self.new.threads, id);
        for thread in self.old.threads.iter().filter(gone) {
            let result = match server.threads.remove(&thread.0) {
                Err(IoThreadError::Unknown(..)) => Ok(()),
                removed => removed.map_err(ServerError::from),
            };
            if failed.note("removing I/O thread", &thread.0, result) {
                failed.threads.push(thread);
            }
        }
    }

    /// Adds and removes NBD exports whose configuration has changed, and adds those of disks that are new. One that a command
    /// has removed does not return.
    fn apply_exports(&self, server: &Server, claim: &Claim<'_>, failed: &mut Failed<'a>) {
        if server.nbd.address().is_none() {
            // 'nbd' needs a restart.
            return;
        }
        let gone = |export: &&NbdExportSpec| !self.new.exports.contains(export);
        for export in self.old.exports.iter().filter(gone) {
            let removed = server.remove_nbd_export(claim, &export.id, Removal::Hard);
            failed.note("removing export", &export.name, removed.map(drop));
        }
        let there = server.nbd.exports();
        let is_new = |export: &&NbdExportSpec| {
            let its_disk = |disk: &&DiskSpec| disk.name == export.node;
            let is_added = self.added.iter().any(its_disk);
            let is_there = there.iter().any(|other| other.id == export.id);
            (is_added || !self.old.exports.contains(export)) && !is_there
        };
        let waits = |export: &NbdExportSpec| self.waiting_exports.contains(&export);
        let new = self.new.exports.iter().filter(is_new);
        for export in new.filter(|export| !waits(export)) {
            if !server.export_when_there(export) {
                let result = server.add_nbd_export(claim, export.clone());
                if failed.note("exporting", &export.name, result) {
                    failed.exports.push(&export.name);
                }
            }
        }
    }
}

/// Changes that failed. The next reload tries them again.
#[derive(Default)]
pub(super) struct Failed<'a> {
    pub(super) reasons: Vec<String>,
    /// Disks that are not as configured, and what they are instead.
    disks: Vec<(&'a str, Option<&'a DiskSpec>)>,
    groups: Vec<&'a (String, ThrottleLimits)>,
    threads: Vec<&'a (String, ThreadSpec)>,
    exports: Vec<&'a str>,
}

impl<'a> Failed<'a> {
    /// Counts and logs a failure. Returns whether there was one.
    fn note(&mut self, what: &str, name: &str, result: Result<(), ServerError>) -> bool {
        let Err(e) = result else {
            return false;
        };
        let reason = format!("{what} '{name}': {e}");
        error!("{reason}");
        self.reasons.push(reason);
        true
    }

    fn disk(
        &mut self,
        what: &str,
        disk: &'a DiskSpec,
        result: Result<(), ServerError>,
        remains: Option<&'a DiskSpec>,
    ) {
        if self.note(what, &disk.name, result) {
            self.disks.push((&disk.name, remains));
        }
    }

    /// What applies after `old` and `new`, without what failed, or needs a restart.
    pub(super) fn in_force(&self, old: &Config, new: &Config) -> Config {
        let mut config = Config {
            threads: new.threads.clone(),
            groups: new.groups.clone(),
            disks: new.disks.clone(),
            exports: new.exports.clone(),
            directory: new.directory.clone(),
            has_files: new.has_files,
            ..old.clone()
        };
        for (id, spec) in &mut config.threads {
            if let Some((_, before)) = old.threads.iter().find(|(other, _)| other == id) {
                *spec = before.clone();
            }
        }
        for &(name, remains) in &self.disks {
            config.disks.retain(|disk| disk.name != name);
            config.disks.extend(remains.cloned());
        }
        let failed = |export: &NbdExportSpec| self.exports.contains(&export.name.as_str());
        config.exports.retain(|export| !failed(export));
        config.groups.extend(self.groups.iter().copied().cloned());
        config.threads.extend(self.threads.iter().copied().cloned());
        config
    }
}

/// A disk that was removed, as it was.
struct RemovedDisk<'a> {
    configured: &'a DiskSpec,
    now: DiskSpec,
    exports: Vec<NbdExportSpec>,
}

impl<'a> RemovedDisk<'a> {
    /// `None` if it was not served.
    fn of(server: &Server, configured: &'a DiskSpec) -> Option<Self> {
        Some(Self {
            configured,
            now: server.spec_of(&configured.name)?,
            exports: server.nbd_exports_of(&configured.name),
        })
    }

    /// Whether another disk was to have its file or its socket.
    fn is_replaced_by(&self, other: &DiskSpec) -> bool {
        let socket = |disk| canonical_path(&sockets::path(disk));
        self.now.file == other.file || socket(&self.now) == socket(other)
    }

    /// Serves it again, because the disk that was to replace it cannot be served.
    fn restore(self, server: &Server, claim: &Claim<'_>, failed: &mut Failed<'a>) {
        let name = &self.configured.name;
        if server.spec_of(name).is_some() {
            return;
        }
        failed.disks.push((name, Some(self.configured)));
        match server.attach(claim, self.now.clone()) {
            Ok(_) => {
                warn!(
                    "disk {name}: is served again, because the disk that was to replace it is not"
                );
            }
            Err(e) => server.becomes_absent(self.now, &e),
        }
        for export in self.exports {
            if !server.export_when_there(&export) {
                let name = export.name.clone();
                let result = server.add_nbd_export(claim, export);
                failed.note("exporting", &name, result);
            }
        }
    }
}

/// Adds NBD exports of disks that have been restarted, and those of commands with the disks that they are to show.
fn add_again(
    server: &Server,
    claim: &Claim<'_>,
    configured: Vec<NbdExportSpec>,
    own: Vec<(NbdExportSpec, DiskSpec)>,
    failed: &mut Failed<'_>,
) {
    // If the disk could not be changed, its former one may have the name.
    let is_right = |(export, disk): &(NbdExportSpec, DiskSpec)| {
        let there = server.spec_of(&export.node);
        let there = there.or_else(|| server.absent_spec(&export.node));
        there.is_some_and(|there| there.has_file_of(disk))
    };
    let own = own.into_iter().filter(is_right).map(|(export, _)| export);
    for export in configured.into_iter().chain(own) {
        if !server.export_when_there(&export) {
            let name = export.name.clone();
            let result = server.add_nbd_export(claim, export);
            failed.note("exporting", &name, result);
        }
    }
}

/// Stops a disk that is to be restarted.
fn stop(server: &Server, claim: &Claim<'_>, changed: &DiskChange<'_>) -> Result<(), ServerError> {
    let name = &changed.then.name;
    warn!("disk {name}: its front-end is disconnected to apply the changes, and may connect again");
    match server.detach(claim, name, Removal::Hard) {
        // It is stopped regardless, and must be started again for its VM.
        Err(e @ ServerError::Detached(_)) => {
            error!("{e}");
            Ok(())
        }
        result => result,
    }
}

/// Starts it again; with its previous settings if the new ones fail.
fn start(
    server: &Server,
    claim: &Claim<'_>,
    changed: &DiskChange<'_>,
    prepared: PreparedDisk,
) -> Result<(), ServerError> {
    let Err(e) = server.serve(claim, prepared) else {
        return Ok(());
    };
    if let Err(before) = server.attach(claim, changed.now.clone()) {
        error!("disk {}: cannot be restored: {before}", changed.now.name);
        // As after a start with the new settings.
        server.becomes_absent(changed.then.clone(), &e);
    }
    Err(e)
}
