//! What a configuration that was read anew changes: only what differs from the one before.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use thiserror::Error;
use tracing::{error, info, warn};

use crate::config::{Config, ConfigError};
use crate::host::{Host, HostError, Removal};
use crate::iothreads::IoThreadError;
use crate::spec::{DiskSpec, FileSpec};

/// A configuration file, and what of it is in force.
pub struct Reloader {
    path: PathBuf,
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
    pub fn new(path: &Path, config: Config) -> Self {
        Self {
            path: path.into(),
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
        let change = Change::between(&old, &new);
        change.prepare(host)?;
        let failed = change.carry_out(host);
        change.tell_what_needs_a_restart(&old, &new);
        let path = self.path.display();
        info!("{path}: read anew: {}", change.summary());
        drop(change);
        *old = new;
        match failed {
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
    fn between(old: &'a Config, new: &'a Config) -> Self {
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
                None => change.added.push(disk),
                Some(before) if before == disk => {}
                Some(before) if same_but_for_limits(before, disk) => change.throttled.push(disk),
                Some(before) if same_but_for_file(before, disk) => change.moved.push(disk),
                Some(before) => change.changed.push((before, disk)),
            }
        }
        let gone = |disk: &&DiskSpec| !new.disks.iter().any(|other| other.name == disk.name);
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
        for disk in &self.added {
            host.add_node((*disk).clone())?;
            undo.push(Box::new(|| drop(host.remove_node(&disk.name))));
        }
        Ok(())
    }

    /// Does the rest, of which some may fail. Returns how many have.
    fn carry_out(&self, host: &Host) -> usize {
        let mut failed = 0;
        let mut attempt = |what: &str, name: &str, result: Result<(), HostError>| {
            if let Err(e) = result {
                error!("{what} '{name}': {e}");
                failed += 1;
            }
        };
        for disk in &self.removed {
            let result = host.detach(&disk.name, Removal::Hard);
            attempt("removing disk", &disk.name, result);
        }
        for (before, disk) in &self.changed {
            attempt("changing disk", &disk.name, exchange(host, before, disk));
        }
        for disk in &self.added {
            let served = host.add_export(&disk.name, &(*disk).into());
            if served.is_err() {
                let _ = host.remove_node(&disk.name);
            }
            attempt("serving disk", &disk.name, served.map(drop));
        }
        for disk in &self.moved {
            let result = host.replace(&disk.name, disk.file.clone());
            attempt("moving disk", &disk.name, result);
        }
        for disk in self.throttled.iter().chain(&self.moved) {
            let result = host.throttle(&disk.name, &disk.limits, disk.throttle_group.as_deref());
            attempt("limiting disk", &disk.name, result);
        }
        for (name, limits) in &self.new.groups {
            let before = self.old.groups.iter().find(|(other, _)| other == name);
            if before.is_some_and(|(_, before)| before != limits) {
                attempt("changing group", name, host.change_group(name, limits));
            }
        }
        for (name, _) in self
            .old
            .groups
            .iter()
            .filter(|(name, _)| !has(&self.new.groups, name))
        {
            attempt("removing group", name, host.remove_group(name));
        }
        for (id, _) in self
            .old
            .threads
            .iter()
            .filter(|(id, _)| !has(&self.new.threads, id))
        {
            let result = host.threads.remove(id).map_err(HostError::from);
            attempt("removing I/O thread", id, result);
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
            ("metrics", old.metrics != new.metrics),
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

/// Serves a disk otherwise than before, which its front-end sees as a lost connection; if that cannot be,
/// goes on as before.
fn exchange(host: &Host, before: &DiskSpec, disk: &DiskSpec) -> Result<(), HostError> {
    warn!(
        "disk {}: its front-end is disconnected, and may connect again, for what has changed",
        disk.name
    );
    host.detach(&disk.name, Removal::Hard)?;
    match host.attach(disk.clone()) {
        Ok(_) => Ok(()),
        Err(e) => {
            if let Err(e) = host.attach(before.clone()) {
                error!("disk {}: cannot go on as before: {e}", disk.name);
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

/// Both on files, that is, and not on nothing.
fn same_but_for_file(a: &DiskSpec, b: &DiskSpec) -> bool {
    let as_b = DiskSpec {
        file: b.file.clone(),
        ..a.clone()
    };
    let is_path = |disk: &DiskSpec| matches!(disk.file, FileSpec::Path(_));
    is_path(a) && is_path(b) && same_but_for_limits(&as_b, b)
}

fn has<T>(named: &[(String, T)], name: &str) -> bool {
    named.iter().any(|(other, _)| other == name)
}
