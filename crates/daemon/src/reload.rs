//! What a configuration that was read anew changes: only what differs from the one before.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use block::ThrottleLimits;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::config::{Config, ConfigError, ThreadSpec};
use crate::host::{Host, HostError, Removal};
use crate::iothreads::IoThreadError;
use crate::keeper::Written;
use crate::spec::{DiskSpec, FileSpec};

/// A configuration file, and what of it is in force.
pub struct Reloader {
    path: PathBuf,
    /// Disks of the command line, which stay.
    disks: Vec<DiskSpec>,
    in_force: Mutex<Config>,
}

#[derive(Debug, Error)]
pub enum ReloadError {
    #[error("{0}; nothing has been changed")]
    Config(#[from] ConfigError),
    #[error("{0}; nothing has been changed")]
    Host(#[from] HostError),
    #[error("{0}; nothing has been changed")]
    IoThread(#[from] IoThreadError),
    #[error("{0} of the changes could not be made, the log says why; all others are in force")]
    Partly(usize),
}

impl Reloader {
    /// Takes what `config` says as in force.
    pub fn new(path: &Path, disks: Vec<DiskSpec>, config: Config) -> Self {
        Self {
            path: path.into(),
            disks,
            in_force: Mutex::new(config),
        }
    }

    /// Reads the file anew, and adds, removes and changes what differs. Disks that stay as they are notice
    /// nothing.
    ///
    /// # Errors
    /// There is a mistake in the file, or what it adds cannot be opened, and nothing was changed; or
    /// something failed later, which the log names.
    pub fn reload(&self, host: &Host) -> Result<(), ReloadError> {
        let mut old = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Config::read(&self.path)?;
        let change = Change::between(&old, &new, host);
        change.prepare(host)?;
        let failed = change.carry_out(host);
        change.tell_what_needs_a_restart(&old, &new);
        let path = self.path.display();
        info!("{path}: read anew: {}", change.summary());
        let (in_force, count) = (failed.in_force(&new), failed.count);
        *old = in_force;
        host.set_written(Written::new(&self.disks, &old));
        match count {
            0 => Ok(()),
            n => Err(ReloadError::Partly(n)),
        }
    }
}

struct Change<'a> {
    old: &'a Config,
    new: &'a Config,
    added: Vec<&'a DiskSpec>,
    removed: Vec<&'a DiskSpec>,
    /// As they are to be: as before but for their limits.
    throttled: Vec<&'a DiskSpec>,
    /// As they are to be: as before but for the file, and for their limits.
    moved: Vec<&'a DiskSpec>,
    /// As they were, and as they are to be.
    changed: Vec<(&'a DiskSpec, &'a DiskSpec)>,
}

impl<'a> Change<'a> {
    fn between(old: &'a Config, new: &'a Config, host: &Host) -> Self {
        let mut change = Self {
            old,
            new,
            added: Vec::new(),
            removed: Vec::new(),
            throttled: Vec::new(),
            moved: Vec::new(),
            changed: Vec::new(),
        };
        for disk in &new.disks {
            match old.disks.iter().find(|other| other.name == disk.name) {
                // Whoever attaches a disk, and then writes it down to have it the next time too, means
                // the one that there is.
                None if host.spec_of(&disk.name).as_ref() == Some(disk) => {}
                None => change.added.push(disk),
                Some(before) if before == disk => {}
                Some(before) if same_but_for_limits(before, disk) => change.throttled.push(disk),
                Some(before) if same_but_for_file(before, disk) => change.moved.push(disk),
                Some(before) => change.changed.push((before, disk)),
            }
        }
        // One that was detached by command needs no removal.
        let gone = |disk: &&DiskSpec| {
            let mut disks = new.disks.iter();
            !disks.any(|other| other.name == disk.name) && host.node_of(&disk.name).is_some()
        };
        change.removed.extend(old.disks.iter().filter(gone));
        change
    }

    /// Makes what is new, so far as that disturbs nobody: threads, groups, opened files. All or nothing.
    fn prepare(&self, host: &Host) -> Result<(), ReloadError> {
        let mut undo: Vec<Box<dyn Fn() + '_>> = Vec::new();
        let result = self.prepare_with(host, &mut undo);
        if result.is_err() {
            undo.iter().rev().for_each(|undo| undo());
        }
        result
    }

    fn prepare_with<'b>(
        &'b self,
        host: &'b Host,
        undo: &mut Vec<Box<dyn Fn() + 'b>>,
    ) -> Result<(), ReloadError> {
        for (id, spec) in self
            .new
            .threads
            .iter()
            .filter(|(id, _)| !has(&self.old.threads, id))
        {
            host.threads.add(id, spec.clone())?;
            undo.push(Box::new(|| drop(host.threads.remove(id))));
        }
        for (name, limits) in self
            .new
            .groups
            .iter()
            .filter(|(name, _)| !has(&self.old.groups, name))
        {
            host.add_group(name, limits)?;
            undo.push(Box::new(|| drop(host.remove_group(name))));
        }
        // Before a front-end is disconnected for a disk that cannot be served as it is to be.
        let changed = self.changed.iter().map(|(_, disk)| disk);
        for disk in self.added.iter().chain(changed) {
            host.threads.check(&disk.iothreads)?;
        }
        for disk in &self.added {
            match host.add_node((*disk).clone()) {
                // A disk that gets another name is opened when the old one is gone.
                Err(HostError::FileInUse(_, user)) if self.removes(&user) => continue,
                result => result?,
            }
            undo.push(Box::new(|| drop(host.remove_node(&disk.name))));
        }
        Ok(())
    }

    fn removes(&self, name: &str) -> bool {
        self.removed.iter().any(|disk| disk.name == name)
    }

    /// Does the rest, of which some may fail.
    fn carry_out(&self, host: &Host) -> Failed<'a> {
        let mut failed = Failed::default();
        for &disk in &self.removed {
            let result = host.detach(&disk.name, Removal::Hard);
            let remains = host.node_of(&disk.name).map(|_| disk);
            failed.disk("removing disk", disk, result, remains);
        }
        for &(before, disk) in &self.changed {
            let result = exchange(host, before, disk);
            let remains = host.spec_of(&disk.name).map(|_| before);
            failed.disk("changing disk", disk, result, remains);
        }
        for &disk in &self.added {
            let served = match host.node_of(&disk.name) {
                Some(_) => host.add_export(&disk.name, &disk.into()).inspect_err(|_| {
                    let _ = host.remove_node(&disk.name);
                }),
                None => host.attach(disk.clone()),
            };
            failed.disk("serving disk", disk, served.map(drop), None);
        }
        let before = |disk: &DiskSpec| self.old.disks.iter().find(|d| d.name == disk.name);
        for &disk in &self.moved {
            let result = host.follow(&disk.name, disk);
            failed.disk("moving disk", disk, result, before(disk));
        }
        for &disk in self.throttled.iter().chain(&self.moved) {
            let result = host.throttle(&disk.name, &disk.limits, disk.throttle_group.as_deref());
            failed.disk("limiting disk", disk, result, before(disk));
        }
        for (name, limits) in &self.new.groups {
            let before = self.old.groups.iter().find(|(other, _)| other == name);
            if before.is_some_and(|(_, before)| before != limits) {
                failed.note("changing group", name, host.change_group(name, limits));
            }
        }
        let gone = |(name, _): &&(String, _)| !has(&self.new.groups, name);
        for group in self.old.groups.iter().filter(gone) {
            if failed.note("removing group", &group.0, host.remove_group(&group.0)) {
                failed.groups.push(group);
            }
        }
        let gone = |(id, _): &&(String, _)| !has(&self.new.threads, id);
        for thread in self.old.threads.iter().filter(gone) {
            let result = host.threads.remove(&thread.0).map_err(HostError::from);
            if failed.note("removing I/O thread", &thread.0, result) {
                failed.threads.push(thread);
            }
        }
        failed
    }

    fn tell_what_needs_a_restart(&self, old: &Config, new: &Config) {
        let changed_thread = new.threads.iter().any(|(id, spec)| {
            let before = old.threads.iter().find(|(other, _)| other == id);
            before.is_some_and(|(_, before)| before != spec)
        });
        for (key, differs) in [
            ("iothreads", old.iothreads != new.iothreads),
            ("cpus", old.cpus != new.cpus),
            ("poll-max-us", old.poll_max != new.poll_max),
            ("control", old.control != new.control),
            ("state", old.state != new.state),
            ("metrics", old.metrics != new.metrics),
            ("allow-backing", old.allow_backing != new.allow_backing),
            ("sandbox", old.sandbox != new.sandbox),
            ("allow-dir", old.allow != new.allow),
            ("user", old.user != new.user),
            ("an [[iothread]]", changed_thread),
        ] {
            if differs {
                warn!("{key} has changed, which takes effect when ringdisk is started anew");
            }
        }
    }

    fn summary(&self) -> String {
        let changed = self.changed.len() + self.throttled.len() + self.moved.len();
        format!(
            "{} disks added, {} removed, {changed} changed",
            self.added.len(),
            self.removed.len()
        )
    }
}

/// Changes that could not be made. The next reload is to try them again.
#[derive(Default)]
struct Failed<'a> {
    count: usize,
    /// Names of disks that are not as they should be, and what they are instead.
    disks: Vec<(&'a str, Option<&'a DiskSpec>)>,
    groups: Vec<&'a (String, ThrottleLimits)>,
    threads: Vec<&'a (String, ThreadSpec)>,
}

impl<'a> Failed<'a> {
    /// Counts and logs what failed; says whether it did.
    fn note(&mut self, what: &str, name: &str, result: Result<(), HostError>) -> bool {
        let Err(e) = result else {
            return false;
        };
        error!("{what} '{name}': {e}");
        self.count += 1;
        true
    }

    fn disk(
        &mut self,
        what: &str,
        disk: &'a DiskSpec,
        result: Result<(), HostError>,
        remains: Option<&'a DiskSpec>,
    ) {
        if self.note(what, &disk.name, result) {
            self.disks.push((&disk.name, remains));
        }
    }

    /// What is in force if `new` is so far as it could be.
    fn in_force(&self, new: &Config) -> Config {
        let mut config = new.clone();
        for &(name, remains) in &self.disks {
            config.disks.retain(|disk| disk.name != name);
            config.disks.extend(remains.cloned());
        }
        config.groups.extend(self.groups.iter().copied().cloned());
        config.threads.extend(self.threads.iter().copied().cloned());
        config
    }
}

/// Serves a disk otherwise than before, which its front-end sees as a lost connection; if that cannot be,
/// goes on as before. It stays on what it was put on by command, unless another file is written down.
fn exchange(host: &Host, before: &DiskSpec, disk: &DiskSpec) -> Result<(), HostError> {
    warn!(
        "disk {}: its front-end is disconnected, and may connect again, for what has changed",
        disk.name
    );
    let now = host.spec_of(&disk.name);
    let now = now.unwrap_or_else(|| before.clone());
    let disk = match before.is_written_on_file_of(disk) {
        true => disk.on_file_of(&now),
        false => disk.clone(),
    };
    match host.detach(&disk.name, Removal::Hard) {
        // It is gone all the same, and its VM must not be left without it.
        Err(e @ HostError::Sync(..)) => error!("{e}"),
        // Somebody has detached it, and the configuration says that it is to be served.
        Err(HostError::NoNode(_)) => {}
        result => result?,
    }
    let name = disk.name.clone();
    match host.attach(disk) {
        Ok(_) => Ok(()),
        Err(e) => {
            if let Err(e) = host.attach(now) {
                error!("disk {name}: cannot go on as before: {e}");
            }
            Err(e)
        }
    }
}

fn same_but_for_limits(a: &DiskSpec, b: &DiskSpec) -> bool {
    let as_b = DiskSpec {
        limits: b.limits,
        throttle_group: b.throttle_group.clone(),
        ..a.clone()
    };
    as_b == *b
}

/// And for the format of that. Both on files, that is, and not on nothing.
fn same_but_for_file(a: &DiskSpec, b: &DiskSpec) -> bool {
    let as_b = DiskSpec {
        file: b.file.clone(),
        format: b.format,
        ..a.clone()
    };
    let is_path = |disk: &DiskSpec| matches!(disk.file, FileSpec::Path(_));
    is_path(a) && is_path(b) && same_but_for_limits(&as_b, b)
}

fn has<T>(named: &[(String, T)], name: &str) -> bool {
    named.iter().any(|(other, _)| other == name)
}
