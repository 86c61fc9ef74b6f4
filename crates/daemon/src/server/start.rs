//! What is served first: the configuration, with the changes that were made at run time before.

use tracing::{error, info, warn};

use super::absent::StartPatience;
use super::{Server, ServerError};
use crate::config::ThreadSpec;
use crate::config::cpus::Cpus;
use crate::config::spec::DiskSpec;
use crate::server::connection_info::ConnectionInfo;
use crate::server::iothreads::full_id;
use crate::state::Overrides;
use crate::state::store::Configured;

impl Server {
    /// Serves what is configured, with the changes of `overrides`, and what these add. Disks that cannot be served are absent
    /// from then on. Returns also what else of the overrides could not be served.
    ///
    /// # Errors
    /// One of the `required` disks cannot be served, or one that was taken over.
    pub fn start(
        &self,
        configured: &Configured,
        overrides: &Overrides,
        required: &[DiskSpec],
    ) -> Result<(Vec<ConnectionInfo>, Overrides), ServerError> {
        let overrides = &overrides.clone().with_default_queues(&configured.disks);
        let disks = overrides.apply(&configured.disks);
        for name in &disks.outdated {
            let of = |disks: &[DiskSpec]| disks.iter().find(|disk| disk.name == *name).cloned();
            if let Some(disk) = of(&configured.disks) {
                let moved = of(&disks.disks).filter(|now| now.file != disk.file);
                let but =
                    moved.map(|now| format!("; it stays on {}, to which it was moved", now.file));
                info!(
                    "disk {name}: is served as it is configured now, not as it was changed at run time before{}",
                    but.unwrap_or_default()
                );
            } else {
                warn!(
                    "disk {name}: is not served: it was changed at run time, and is not configured any more; 'ringdisk attach' \
                     serves it"
                );
            }
        }
        let detached = |disk: &&DiskSpec| overrides.is_detached(&disk.name);
        for DiskSpec { name, file, .. } in disks.disks.iter().filter(detached) {
            warn!(
                "disk {name}: was detached at run time, and is served again, from {file}: its configuration has been changed \
                 since; 'ringdisk detach {name}' detaches it again"
            );
        }
        let mut absent = Overrides::default();
        self.start_threads_and_groups(configured, overrides, &mut absent);
        let optional = disks.disks.iter().chain(&disks.attached);
        let optional = optional.filter(|disk| required.iter().all(|it| it.name != disk.name));
        optional.for_each(|disk| self.start_missing_threads(&disk.name, &disk.iothreads));
        let exports = overrides.exports.iter().map(|it| &it.spec);
        exports.for_each(|spec| self.start_missing_threads(&spec.id, &spec.iothreads));
        self.remember_detached(overrides);
        self.remember_left(overrides);
        self.remember(configured, overrides, &disks);
        let patience = StartPatience::new();
        let mut ready = Vec::new();
        for spec in disks.disks.into_iter().chain(disks.attached) {
            // The way back from a file that a command has moved it to is a command.
            let is_same = |disk: &DiskSpec| disk.name == spec.name && disk.file == spec.file;
            let is_required = required.iter().any(is_same);
            ready.extend(self.start_disk(spec, is_required, &patience)?);
        }
        self.start_nodes(overrides, &mut absent)?;
        self.start_exports(overrides, &mut absent, &mut ready)?;
        self.open_ahead();
        Ok((ready, absent))
    }

    /// The disks are served without a configured service.
    pub fn add_unavailable(&self, reason: String) {
        self.state().unavailable.push(reason);
    }

    /// Configured services that could not be started, each with the reason.
    pub fn unavailable(&self) -> Vec<String> {
        self.state().unavailable.clone()
    }

    fn start_threads_and_groups(
        &self,
        configured: &Configured,
        overrides: &Overrides,
        absent: &mut Overrides,
    ) {
        for (id, thread) in &overrides.threads {
            if self.threads.check(std::slice::from_ref(id)).is_err()
                && let Err(e) = self.threads.add(id, thread.clone())
            {
                log_absent("I/O thread", id, &e.into());
                absent.threads.push((id.clone(), thread.clone()));
            }
        }
        for (name, limits) in &overrides.groups {
            if !configured.groups.iter().any(|(other, _)| other == name)
                && let Err(e) = self.add_group(name, limits)
            {
                log_absent("throttle group", name, &e);
                absent.groups.push((name.clone(), *limits));
            }
        }
    }

    /// Makes the I/O threads that a disk names and that are not there any more: `iothreads` may have been lowered. Without, its VM
    /// would have no disk.
    fn start_missing_threads(&self, disk: &str, wanted: &[String]) {
        for id in wanted.iter().map(|id| full_id(id)) {
            if self.threads.check(std::slice::from_ref(&id)).is_ok() {
                continue;
            }
            let thread = ThreadSpec {
                cpus: Cpus::default(),
                polling: self.threads.polling(),
            };
            match self.threads.add(&id, thread) {
                Ok(()) => warn!(
                    "disk {disk}: names I/O thread {id}, which is not configured any more: ringdisk has made one for it; configure \
                     the thread, or give the disk others (iothreads)"
                ),
                Err(e) => error!("disk {disk}: {e}"),
            }
        }
    }

    fn start_nodes(
        &self,
        overrides: &Overrides,
        absent: &mut Overrides,
    ) -> Result<(), ServerError> {
        // Each follows the node below it.
        for node in &overrides.nodes {
            let names = || vec![Some(&node.disk.name), node.child.as_ref()];
            let names = || names().into_iter().flatten().collect();
            let claim = self.claim("start", names)?;
            let added = match &node.child {
                None => self.add_node(&claim, node.disk.clone()),
                Some(child) => self.add_node_over(&claim, child, node.disk.clone()),
            };
            let Err(e) = added else { continue };
            if self.is_taken_over(&node.disk.name) {
                return Err(e);
            }
            log_absent("node", &node.disk.name, &e);
            absent.nodes.push(node.clone());
        }
        Ok(())
    }

    fn start_exports(
        &self,
        overrides: &Overrides,
        absent: &mut Overrides,
        ready: &mut Vec<ConnectionInfo>,
    ) -> Result<(), ServerError> {
        for export in &overrides.exports {
            let claim = self.claim("start", || vec![&export.node, &export.spec.id])?;
            match self.add_export(&claim, &export.node, &export.spec) {
                Ok(exported) => ready.push(exported),
                Err(e) if self.is_taken_over(&export.node) => return Err(e),
                Err(e) => {
                    log_absent("export", &export.spec.id, &e);
                    absent.exports.push(export.clone());
                }
            }
        }
        Ok(())
    }

    /// Whether a guest uses this disk already: then it is served, or the old process continues to serve it.
    fn is_taken_over(&self, name: &str) -> bool {
        self.context.inherited.has_disk(name)
    }
}

/// What is said of a configured disk while an attached one of another VM has its name.
pub(super) fn has_name_of_attached(disk: &DiskSpec, attached: &DiskSpec) -> String {
    format!(
        "disk {}: is not served as it is configured, from {}: a disk of another VM that was attached has this name, and keeps it, \
         from {}; give the configured one another name, and reload",
        disk.name, disk.file, attached.file
    )
}

fn log_absent(what: &str, name: &str, error: &ServerError) {
    error!("{what} {name}, which was added while the last process ran, cannot be added: {error}");
}
