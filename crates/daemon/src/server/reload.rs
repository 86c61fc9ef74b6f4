//! Reloads the configuration: applies only what differs from the previous one.

mod apply;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use thiserror::Error;
use tracing::{info, warn};

use crate::config::disk_keys::{self, ReloadEffect, effect_of_reload};
use crate::config::file_keys::TOP_KEYS;
use crate::config::nbd::NbdExportSpec;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::config::{Config, ConfigError, sockets};
use crate::server::connection_info::quote;
use crate::server::iothreads::IoThreadError;
use crate::server::resources;
use crate::server::start::has_name_of_attached;
use crate::server::{Move, PreparedDisk, Server, ServerError, TargetState, Waiting};
use crate::state::store::Configured;

/// A configuration file, and which of its settings apply.
pub struct Reloader {
    path: PathBuf,
    /// Disks of the command line, which do not change.
    disks: Vec<DiskSpec>,
    in_force: Mutex<Config>,
}

/// Whether a reload restarts disks, which disconnects their VMs for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restarts {
    Now,
    /// With the next reload.
    Later,
}

#[derive(Debug, Error)]
pub enum ReloadError {
    #[error("{0}; nothing has been changed")]
    Config(#[from] ConfigError),
    #[error(
        "disks '{0}' and '{1}' cannot exchange files while they are served; detach one of them first, or give them other \
         sockets as well; nothing has been changed"
    )]
    Circle(String, String),
    #[error(
        "disk '{0}' cannot move to the file of disk '{1}', which this reload ends or restarts, while it is served: its VM would go on \
         with the data of another; detach it first, or give it another socket as well; nothing has been changed"
    )]
    OfAnother(String, String),
    #[error(
        "disk '{0}' has temporary bitmaps ({1}), which a restart of the disk with its new settings would lose; remove them \
         ('ringdisk bitmap remove'), or leave the disk as it is configured; nothing has been changed"
    )]
    Bitmaps(String, String),
    #[error("{0}; nothing has been changed")]
    Server(#[from] ServerError),
    #[error("{0}; nothing has been changed")]
    IoThread(#[from] IoThreadError),
    #[error("{} of the changes could not be made, all others are in effect: {}", .0.len(), reasons(.0))]
    Partly(Vec<String>),
    #[error(
        "the configuration is in effect, but a restart of ringdisk will lose what was changed by commands: {0}; then reload again"
    )]
    Unsaved(io::Error),
}

/// The first names, as many as fit into a line.
fn reasons(all: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut shown = all[..all.len().min(SHOWN)].join("; ");
    if all.len() > SHOWN {
        shown += &format!("; and {} more, which the log has", all.len() - SHOWN);
    }
    shown
}

impl Reloader {
    /// `in_force` applies at present, whatever the file says now.
    pub fn new(path: &Path, disks: Vec<DiskSpec>, in_force: Config) -> Self {
        Self {
            path: path.into(),
            disks,
            in_force: Mutex::new(in_force),
        }
    }

    /// Like [`reload`](Self::reload), without restarting disks: what that would apply stays a difference, which the log
    /// names. For a process that has taken over: no VM loses its disk by an upgrade.
    ///
    /// # Errors
    /// As above.
    pub fn reload_without_restarts(
        &self,
        server: &Server,
        waiting: &Waiting<'_>,
    ) -> Result<Vec<String>, ReloadError> {
        self.apply(server, waiting, Restarts::Later)
    }

    /// Reads the file again, and adds, removes and changes what differs. Unchanged disks are not disturbed. The changes
    /// are checked together, against the target state. Returns what was left out, a sentence for each disk.
    ///
    /// # Errors
    /// The file has a mistake or cannot be served, and nothing was changed; or something failed later, and everything
    /// else applies.
    pub fn reload(
        &self,
        server: &Server,
        waiting: &Waiting<'_>,
    ) -> Result<Vec<String>, ReloadError> {
        self.apply(server, waiting, Restarts::Now)
    }

    fn apply(
        &self,
        server: &Server,
        waiting: &Waiting<'_>,
        restarts: Restarts,
    ) -> Result<Vec<String>, ReloadError> {
        let _turn = server.reload_turn(waiting)?;
        let mut old = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let new = old.read_again(&self.path)?;
        // While no command waits: storage may not answer.
        let change = Change::between(&old, &new, server, restarts);
        change.check_answers(server)?;
        let exports = change.exports(server);
        let new = Config {
            exports,
            ..new.clone()
        };
        let claim = server.claim_as(waiting, "reload", || {
            let change = Change::between(&old, &new, server, restarts);
            let mut names = disks_that_differ(&old, &new);
            names.extend(change.resources(server));
            names
        })?;
        // Commands may have changed disks before. What they change from now on is not what the reload is about.
        let change = Change::between(&old, &new, server, restarts);
        // A disk may build on what was the configured file of another: of itself, if it has another name now.
        let disks = |config: &Config| Configured::new(&self.disks, config).disks;
        server.aim_at(&disks(&new));
        let prepared = change.prepare(server);
        let prepared = prepared.inspect_err(|_| server.aim_at(&disks(&old)))?;
        let ended = change.what_ends(server);
        let failed = change.carry_out(server, claim, prepared);
        let after_restart = change.what_needs_a_restart(server, &old, &new);
        let path = self.path.display();
        info!("{path}: reloaded: {}", change.summary());
        let in_force = change.without_postponed(failed.in_force(&old, &new));
        let reasons = failed.reasons;
        let mut left_out: Vec<String> = (change.detached.iter())
            .map(|disk| left_out(server, disk))
            .collect();
        left_out.extend(change.postponed.iter().map(postponed));
        let exports = change.waiting_exports.iter();
        left_out.extend(exports.map(|export| waits_for_detached(export)));
        left_out.extend(ended);
        let hidden = |disk: &DiskSpec| {
            let other = server.hidden_by(disk)?;
            Some(has_name_of_attached(disk, &other))
        };
        left_out.extend(in_force.disks.iter().filter_map(hidden));
        left_out.extend(after_restart);
        left_out.extend(server.unavailable());
        left_out.iter().for_each(|sentence| warn!("{sentence}"));
        // At once: the operator may have repaired the reason.
        server.retry_as_asked();
        server.retry_absent();
        let absent = server.absent().into_iter();
        left_out.extend(absent.map(|(disk, reason)| {
            format!(
                "disk {}: is not served, and tried again: {reason}",
                disk.name
            )
        }));
        *old = in_force;
        let saved = server.set_configured(Configured::new(&self.disks, &old));
        if reasons.is_empty() {
            saved.map_err(ReloadError::Unsaved).map(|()| left_out)
        } else {
            Err(ReloadError::Partly(reasons))
        }
    }
}

struct Change<'a> {
    old: &'a Config,
    new: &'a Config,
    added: Vec<&'a DiskSpec>,
    removed: Vec<&'a DiskSpec>,
    /// Disks of which only the limits change.
    throttled: Vec<&'a DiskSpec>,
    /// Disks of which only the file and the limits change.
    moved: Vec<&'a DiskSpec>,
    changed: Vec<DiskChange<'a>>,
    /// Disks that would have to be restarted, as they are configured before and now.
    postponed: Vec<(&'a DiskSpec, &'a DiskSpec)>,
    /// Disks that cannot be served, in their new form.
    absent: Vec<DiskSpec>,
    /// Disks whose configuration has changed, and that stay detached since a command has detached them.
    detached: Vec<&'a DiskSpec>,
    /// New exports of detached disks. They are added with their disks.
    waiting_exports: Vec<&'a NbdExportSpec>,
}

/// A disk that has to be restarted, which its front-end sees as a lost connection.
struct DiskChange<'a> {
    /// The previous configuration.
    before: &'a DiskSpec,
    /// As it is served, which may differ.
    now: DiskSpec,
    /// The new form. Changes made at run time are kept, unless the configuration of that setting has changed.
    then: DiskSpec,
}

impl<'a> DiskChange<'a> {
    fn new(before: &'a DiskSpec, disk: &DiskSpec, server: &Server) -> Self {
        let now = server.spec_of(&disk.name);
        let now = now.unwrap_or_else(|| before.clone());
        let then = disk.with_overrides(before, &now);
        Self { before, now, then }
    }
}

/// What was prepared before the first disk is disturbed.
#[derive(Default)]
struct ConnectionInfo<'a> {
    threads: Vec<&'a str>,
    groups: Vec<&'a str>,
    /// In an order in which each finds its file free.
    moves: Vec<Move>,
    changed: Vec<PreparedDisk>,
    added: Vec<PreparedDisk>,
}

impl ConnectionInfo<'_> {
    fn undo(self, server: &Server) {
        for prepared in self.changed.into_iter().chain(self.added) {
            server.forget(prepared);
        }
        self.moves
            .into_iter()
            .for_each(|moved| server.release(moved));
        for name in self.groups {
            let _ = server.remove_group(name);
        }
        for id in self.threads {
            let _ = server.threads.remove(id);
        }
    }
}

impl<'a> Change<'a> {
    fn between(old: &'a Config, new: &'a Config, server: &Server, restarts: Restarts) -> Self {
        let mut change = Self {
            old,
            new,
            added: Vec::new(),
            removed: Vec::new(),
            throttled: Vec::new(),
            moved: Vec::new(),
            changed: Vec::new(),
            postponed: Vec::new(),
            absent: Vec::new(),
            detached: Vec::new(),
            waiting_exports: Vec::new(),
        };
        for disk in &new.disks {
            let before = old.disks.iter().find(|other| other.name == disk.name);
            if server.is_hidden(before.unwrap_or(disk)) {
                let is_settled =
                    before == Some(disk) || server.spec_of(&disk.name).as_ref() == Some(disk);
                // Refused, as long as the other is there.
                change.added.extend((!is_settled).then_some(disk));
                continue;
            }
            match before {
                // A disk that was attached at run time and later configured identically is kept.
                None if server.spec_of(&disk.name).as_ref() == Some(disk) => {}
                // A command has attached it.
                None if server
                    .absent_spec(&disk.name)
                    .is_some_and(|it| it.file == disk.file) =>
                {
                    change.absent.push(disk.clone());
                }
                None if change.is_detached_under_another_name(server, disk) => {
                    change.detached.push(disk);
                }
                None => change.added.push(disk),
                Some(before) if before == disk => {}
                Some(before) if server.node_of(&disk.name).is_none() => {
                    match server.absent_spec(&disk.name) {
                        Some(now) => change.absent.push(disk.with_overrides(before, &now)),
                        // The name of a detached disk was given to another one.
                        None if sockets::are_of_two_vms(before, disk) => change.added.push(disk),
                        None => change.detached.push(disk),
                    }
                }
                // The default, written down, is no change for the guest.
                Some(before) => match effect_of_reload(&server.with_queues(before, disk), disk) {
                    None => {}
                    Some(ReloadEffect::Throttle) => change.throttled.push(disk),
                    Some(ReloadEffect::Move) if is_path(before) && is_path(disk) => {
                        match server.is_for_others(&disk.name) {
                            // Nobody is disconnected.
                            true => change.changed.push(DiskChange::new(before, disk, server)),
                            false => change.moved.push(disk),
                        }
                    }
                    _ if restarts == Restarts::Later => change.postponed.push((before, disk)),
                    _ => change.changed.push(DiskChange::new(before, disk, server)),
                },
            }
        }
        // A disk that a command has detached needs no removal.
        let gone = |disk: &&DiskSpec| {
            let mut disks = new.disks.iter();
            let is_configured = disks.any(|other| other.name == disk.name);
            !is_configured && server.is_there(&disk.name) && !server.is_hidden(disk)
        };
        change.removed.extend(old.disks.iter().filter(gone));
        let waits = |export: &&NbdExportSpec| {
            let name = &export.node;
            let mut both = [&old.disks, &new.disks].into_iter();
            let stays = both.all(|disks| disks.iter().any(|disk| disk.name == *name));
            (stays || change.detached.iter().any(|disk| disk.name == *name))
                && server.node_of(name).is_none()
                && server.absent_spec(name).is_none()
                && !old.exports.contains(export)
        };
        let waiting = new.exports.iter().filter(waits).collect();
        change.waiting_exports = waiting;
        change
    }

    /// Whether a command has detached a disk that has only another name now.
    fn is_detached_under_another_name(&self, server: &Server, disk: &DiskSpec) -> bool {
        let mut before = self.old.disks.iter();
        before.any(|before| {
            let is_gone = self.new.disks.iter().all(|it| it.name != before.name);
            is_gone && !server.is_there(&before.name) && sockets::is_renamed(before, disk)
        })
    }

    /// The disks that end or start again, as they were configured.
    fn ended(&self) -> impl Iterator<Item = &'a DiskSpec> {
        let changed = self.changed.iter().map(|changed| changed.before);
        self.removed.iter().copied().chain(changed)
    }

    /// What is served afterwards instead of a disk that ends or starts again: under another name if its file and its VM have that,
    /// and nothing if another VM's disk has its name.
    fn successor<'b>(&'b self, server: &Server, before: &DiskSpec) -> Option<&'b DiskSpec> {
        let now = server.spec_of(&before.name)?;
        let changed = || self.changed.iter().map(|changed| &changed.then);
        let mut started = changed().chain(self.added.iter().copied());
        let renamed = started.find(|disk| sockets::is_renamed(&now, disk));
        renamed.or_else(|| {
            let mut same = changed().filter(|disk| disk.name == before.name);
            same.find(|disk| !sockets::are_of_two_vms(&now, disk))
        })
    }

    /// The NBD exports that commands have added to disks that end or start again, each with the disk that it is to show afterwards.
    fn exports_of_commands(&self, server: &Server) -> Vec<(NbdExportSpec, DiskSpec)> {
        let its = |before: &'a DiskSpec| {
            let successor = self.successor(server, before).cloned();
            let exports = server.nbd_exports_of(&before.name).into_iter();
            let exports = exports.filter(|export| !self.old.exports.contains(export));
            exports.filter_map(move |export| {
                let disk = successor.clone()?;
                let node = disk.name.clone();
                Some((NbdExportSpec { node, ..export }, disk))
            })
        };
        self.ended().flat_map(its).collect()
    }

    /// What the disks need that are started, moved or restarted, as it is claimed.
    fn resources(&self, server: &Server) -> Vec<String> {
        let restarted = self
            .changed
            .iter()
            .flat_map(|changed| [&changed.now, &changed.then]);
        let opened = self.added.iter().chain(&self.moved).copied();
        let mut names = Vec::new();
        for disk in restarted.chain(opened) {
            names.extend(server.own_resources(disk));
            names.extend(resources::shared(disk));
        }
        let exports = self.changed.iter();
        let exports = exports.flat_map(|changed| server.nbd_exports_of(&changed.then.name));
        let own = self.exports_of_commands(server).into_iter();
        let exports = exports.chain(own.map(|(export, _)| export));
        names.extend(exports.map(|export| resources::nbd_name(&export.name)));
        names
    }

    /// Checks that the storage of disks answers that are started or moved.
    fn check_answers(&self, server: &Server) -> Result<(), ServerError> {
        let changed = self.changed.iter().map(|changed| &changed.then);
        let opened = changed.chain(self.added.iter().copied());
        let mut opened = opened.chain(self.moved.iter().copied());
        opened.try_for_each(|disk| server.check_answers(disk))
    }

    /// Prepares threads, groups, sockets and files without disturbing disks. All or nothing.
    fn prepare(&self, server: &Server) -> Result<ConnectionInfo<'a>, ReloadError> {
        let mut ready = ConnectionInfo::default();
        match self.prepare_in(server, &mut ready) {
            Ok(()) => Ok(ready),
            Err(e) => {
                ready.undo(server);
                Err(e)
            }
        }
    }

    fn prepare_in(
        &self,
        server: &Server,
        ready: &mut ConnectionInfo<'a>,
    ) -> Result<(), ReloadError> {
        let threads = self.new.threads.iter();
        for (id, spec) in threads.filter(|(id, _)| !has(&self.old.threads, id)) {
            // It may be there already, for a disk that a command has given it.
            if !has(&server.threads.added(), id) {
                server.threads.add(id, spec.clone())?;
                ready.threads.push(id);
            }
        }
        let groups = self.new.groups.iter();
        for (name, limits) in groups.filter(|(name, _)| !has(&self.old.groups, name)) {
            if !server.has_group(name) {
                server.add_group(name, limits)?;
                ready.groups.push(name);
            }
        }
        let changed = self.changed.iter().map(|changed| &changed.then);
        let ends = self.removed.iter().copied().chain(changed.clone());
        let end = TargetState {
            ends: ends.map(|disk| disk.name.as_str()).collect(),
            starts: changed.chain(self.added.iter().copied()).collect(),
            moves: self.moved.clone(),
            absent: self.absent.iter().collect(),
        };
        for disk in &end.ends {
            server.backups.check_none(disk).map_err(ServerError::from)?;
        }
        server.check_target_state(&end)?;
        for DiskChange { then, .. } in &self.changed {
            let bitmaps = server.temporary_bitmaps_of(&then.name);
            if !bitmaps.is_empty() {
                return Err(ReloadError::Bitmaps(then.name.clone(), bitmaps.join(", ")));
            }
        }
        let leaves = |disk: &str| end.leaves(disk);
        for &disk in &self.moved {
            let moved = server.prepare_to_follow(disk, &leaves);
            ready.moves.push(of(disk, moved)?);
        }
        in_order(&mut ready.moves)?;
        let is_moved = |disk: &str| self.moved.iter().any(|moved| moved.name == disk);
        for moved in &ready.moves {
            if let Some(user) = moved.waits_for().filter(|user| !is_moved(user)) {
                let (disk, user) = (moved.disk().to_owned(), user.to_owned());
                return Err(ReloadError::OfAnother(disk, user));
            }
        }
        for DiskChange { then, .. } in &self.changed {
            let prepared = server.prepare(then.clone(), &leaves);
            ready.changed.push(of(then, prepared)?);
        }
        for &disk in &self.added {
            let prepared = server.prepare(disk.clone(), &leaves);
            ready.added.push(of(disk, prepared)?);
        }
        Ok(())
    }

    /// What ends with the disks that are removed or become others, a sentence for each disk.
    fn what_ends(&self, server: &Server) -> Vec<String> {
        let sentence = |disk: &'a DiskSpec| {
            let name = &disk.name;
            let successor = self.successor(server, disk);
            let now = server.spec_of(name).filter(|_| successor.is_none());
            let now = now.filter(|now| !now.has_file_of(disk));
            let last =
                now.map(|now| format!("; its VM used {} last, and not {}", now.file, disk.file));
            let exports = server.nbd_exports_of(name).into_iter();
            let is_configured = |export: &NbdExportSpec| self.new.exports.contains(export);
            let exports = exports.filter(|it| successor.is_none() && !is_configured(it));
            let exports = exports.map(|export| format!("NBD export '{}'", export.name));
            let bitmaps = server.temporary_bitmaps_of(name).into_iter();
            let bitmaps = bitmaps.map(|bitmap| format!("temporary bitmap '{bitmap}'"));
            let ended: Vec<_> = exports.chain(bitmaps).collect();
            let ended =
                (!ended.is_empty()).then(|| format!(", and with it ended: {}", ended.join(", ")));
            if last.is_none() && ended.is_none() {
                return None;
            }
            let is_another = self.new.disks.iter().any(|disk| disk.name == *name);
            let what = match successor {
                Some(now) => format!("is disk {} now", now.name),
                None if is_another => "is another disk now".into(),
                None => "is no longer configured, nor served".into(),
            };
            Some(format!(
                "disk {name}: {what}{}{}",
                ended.unwrap_or_default(),
                last.unwrap_or_default()
            ))
        };
        self.ended().filter_map(sentence).collect()
    }

    /// A sentence for each key whose change is not in effect.
    fn what_needs_a_restart(&self, server: &Server, old: &Config, new: &Config) -> Vec<String> {
        let running = server.threads.added();
        let changed_thread = new.threads.iter().any(|(id, spec)| {
            let mut before = old.threads.iter().chain(&running);
            let before = before.find(|(other, _)| other == id);
            before.is_some_and(|(_, before)| before != spec)
        });
        let changed = TOP_KEYS.iter().filter(|top| (top.differs)(old, new));
        let changed = changed.map(|top| top.key.name);
        let changed = changed.chain(changed_thread.then_some("an [[iothread]]"));
        let sentence = |key: &str| {
            let when = match key.starts_with("nbd") {
                true => "restarted",
                false => "restarted, or with 'ringdisk upgrade'",
            };
            format!("{key} has changed, which is tried and takes effect when ringdisk is {when}")
        };
        changed.map(sentence).collect()
    }

    /// The NBD exports that can be as they are configured now. Those of a disk that is another one until a reload restarts it, or
    /// whose name another has that was attached, stay as they were: each has the data of its own disk.
    fn exports(&self, server: &Server) -> Vec<NbdExportSpec> {
        let other_file = |(before, disk): &&(&DiskSpec, &DiskSpec)| before.file != disk.file;
        let postponed = self.postponed.iter().filter(other_file);
        let before = |disk: &DiskSpec| self.old.disks.iter().find(|it| it.name == disk.name);
        let hidden = self.new.disks.iter();
        let hidden = hidden.filter(|disk| server.is_hidden(before(disk).unwrap_or(disk)));
        let kept = postponed.map(|(_, disk)| *disk).chain(hidden);
        let kept: Vec<_> = kept.map(|disk| &disk.name).collect();
        let is_kept = |export: &&NbdExportSpec| kept.contains(&&export.node);
        let before: Vec<_> = self.old.exports.iter().filter(is_kept).cloned().collect();
        let is_there = |export: &NbdExportSpec| {
            let same = |other: &NbdExportSpec| other.id == export.id || other.name == export.name;
            before.iter().any(same)
        };
        let new = self.new.exports.iter().filter(|export| !is_kept(export));
        let new = new.filter(|export| !is_there(export)).cloned();
        new.chain(before.clone()).collect()
    }

    fn without_postponed(&self, mut config: Config) -> Config {
        for (before, disk) in &self.postponed {
            let mut disks = config.disks.iter_mut();
            if let Some(there) = disks.find(|other| other.name == disk.name) {
                *there = DiskSpec::clone(before);
            }
        }
        config
    }

    fn summary(&self) -> String {
        let changed = self.changed.len() + self.throttled.len() + self.moved.len();
        let changed = changed + self.absent.len();
        format!(
            "{} disks added, {} removed, {changed} changed",
            self.added.len(),
            self.removed.len()
        )
    }
}

fn left_out(server: &Server, disk: &DiskSpec) -> String {
    let name = &disk.name;
    let last = server.detached_from(name).or_else(|| {
        let now = server.left_for(disk)?;
        Some(DiskSpec {
            file: FileSpec::Path(now.into()),
            format: None,
            ..disk.clone()
        })
    });
    let (last, where_it_was) = match &last {
        Some(last) if last.file != disk.file => (last, " Its VM used another file last."),
        _ => (disk, ""),
    };
    format!(
        "disk {name}: was detached by command, and stays so; what has changed of it is left out.{where_it_was} To serve it again: \
         ringdisk attach {spec}",
        spec = quote(&last.to_string())
    )
}

/// Of an export whose disk a command has detached.
pub fn waits_for_detached(export: &NbdExportSpec) -> String {
    format!(
        "NBD: '{}' is not exported: its disk '{}' was detached by command; 'ringdisk attach' of the disk exports it as well",
        export.name, export.node
    )
}

fn postponed((before, disk): &(&DiskSpec, &DiskSpec)) -> String {
    format!(
        "disk {}: {} changed in the configuration, which is not in effect: 'ringdisk reload' applies it, and disconnects the VM \
         for a moment",
        disk.name,
        disk_keys::changed(before, disk).join(", ")
    )
}

/// The error, with the name of the disk.
fn of<T>(disk: &DiskSpec, result: Result<T, ServerError>) -> Result<T, ServerError> {
    result.map_err(|e| e.of_disk(&disk.name))
}

/// Sorts moves so that each disk finds its file free.
fn in_order(moves: &mut Vec<Move>) -> Result<(), ReloadError> {
    let mut left = std::mem::take(moves);
    while !left.is_empty() {
        let waits: Vec<String> = left.iter().map(|moved| moved.disk().to_owned()).collect();
        let is_stuck = |moved: &Move| {
            let user = moved.waits_for();
            user.is_some_and(|user| waits.iter().any(|waits| waits == user))
        };
        let (stuck, free): (Vec<_>, Vec<_>) = left.into_iter().partition(is_stuck);
        if free.is_empty() {
            let last = &stuck[0];
            let (disk, user) = (last.disk().to_owned(), last.waits_for().unwrap_or_default());
            let circle = ReloadError::Circle(disk, user.to_owned());
            // A circle, which the caller reports.
            moves.extend(stuck);
            return Err(circle);
        }
        moves.extend(free);
        left = stuck;
    }
    Ok(())
}

/// The disks that a reload may change: their configuration differs, or that of an NBD export.
fn disks_that_differ(old: &Config, new: &Config) -> Vec<String> {
    let disks = [(old, new), (new, old)]
        .into_iter()
        .flat_map(|(one, other)| {
            let disks = one.disks.iter();
            let disks = disks.filter(|disk| !other.disks.contains(disk));
            let exports = one.exports.iter();
            let exports = exports.filter(|export| !other.exports.contains(export));
            let disks = disks.map(|disk| disk.name.clone());
            // A command may have given the id to another disk.
            let exports = exports.flat_map(|export| {
                let name = resources::nbd_name(&export.name);
                [export.id.clone(), export.node.clone(), name]
            });
            disks.chain(exports)
        });
    disks.collect()
}

fn is_path(disk: &DiskSpec) -> bool {
    matches!(disk.file, FileSpec::Path(_))
}

fn has<T>(named: &[(String, T)], name: &str) -> bool {
    named.iter().any(|(other, _)| other == name)
}
