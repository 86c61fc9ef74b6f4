//! Which configuration is in force when this process has taken over: guests find what they had, whatever has been edited
//! since. What is configured otherwise is a difference, which a reload applies or refuses.

use std::path::PathBuf;

use super::{Inherited, InheritedParts};
use crate::config::Config;
use crate::config::nbd::{NbdConfig, NbdExportSpec};
use crate::config::sockets;
use crate::config::spec::DiskSpec;

impl Inherited {
    /// What applies of `config`, the configuration that this process has read, until it is reloaded.
    ///
    /// - Disks are as [`carried`] says, under their names or, if they were renamed, at their sockets. One that what a command has
    ///   added is in the way of is [left to the reload](crate::state::Overrides::without_conflicts), which refuses it.
    /// - The NBD server and its exports are those of the old process.
    /// - Everything else is as it is configured now: the process is started with it.
    pub fn carry(&self, config: &Config) -> Config {
        let mut parts = self.parts();
        if !parts.uncommitted {
            return config.clone();
        }
        let room = match &parts.overrides {
            Some(all) => all.without_conflicts(config.clone()),
            None => config.clone(),
        };
        let disks = room.disks.iter().map(|disk| parts.carry(disk, &room));
        let left_out = config.disks.iter().filter(|it| !room.disks.contains(it));
        let as_before = left_out.filter_map(|disk| parts.configured_before(disk, &room));
        let disks = disks.chain(as_before.cloned()).collect();
        parts.rename_nodes_of_exports(&room);
        let nbd = parts.carry_nbd(&room);
        Config {
            disks,
            ..room.with_nbd(nbd)
        }
    }

    /// Checks that no disk of the old process ends with the upgrade whose file the configuration gives to another one: only a reload
    /// knows what its VM may have. Returns the two, if there is one.
    pub fn given_to_another(
        &self,
        config: &Config,
        in_force: &Config,
    ) -> Option<(DiskSpec, DiskSpec)> {
        let parts = self.parts();
        if !parts.uncommitted {
            return None;
        }
        let is_kept = |before: &DiskSpec| {
            let mut all = in_force.disks.iter();
            all.any(|it| it.has_file_of(before) && sockets::path(it) == sockets::path(before))
        };
        let ended = parts.disks.values().filter_map(|it| it.configured.as_ref());
        let mut ended = ended.filter(|before| !is_kept(before));
        ended.find_map(|before| {
            let mut all = config.disks.iter();
            let takes =
                |it: &&DiskSpec| it.name != before.name && it.has_file_of(before) && !it.read_only;
            let other = all.find(takes)?;
            Some((before.clone(), other.clone()))
        })
    }
}

impl InheritedParts {
    fn carry(&self, disk: &DiskSpec, config: &Config) -> DiskSpec {
        match self.before(disk, config) {
            Some(before) => self.carry_from(disk, before),
            // It is new, or was absent: no guest has it.
            None => disk.clone(),
        }
    }

    /// How the old process has a disk configured; one that a command has attached, as it is.
    fn before<'a>(&'a self, disk: &DiskSpec, config: &Config) -> Option<&'a DiskSpec> {
        if let Some(inherited) = self.disks.get(&disk.name) {
            return Some(inherited.configured.as_ref().unwrap_or(&inherited.spec));
        }
        let mut detached = self.overrides.iter().flat_map(|all| &all.detached);
        let is_it =
            |before: &&DiskSpec| before.name == disk.name && !sockets::are_of_two_vms(before, disk);
        if let Some(before) = detached.find(is_it) {
            return Some(before);
        }
        let is_configured = |name: &str| config.disks.iter().any(|disk| disk.name == name);
        let configured = self.disks.values().filter_map(|it| it.configured.as_ref());
        let mut renamed = configured.filter(|before| !is_configured(&before.name));
        let at = sockets::path(disk);
        renamed.find(|before| sockets::path(before) == at && before.has_file_of(disk))
    }

    /// How a disk was configured that is not to be served as it is configured now: its VM keeps it.
    fn configured_before(&self, disk: &DiskSpec, config: &Config) -> Option<&DiskSpec> {
        let is_free = |it: &&DiskSpec| config.disks.iter().all(|other| other.name != it.name);
        let old = self.disks.values().filter_map(|it| it.configured.as_ref());
        let old: Vec<_> = old.filter(is_free).collect();
        let same_name = old.iter().find(|it| it.name == disk.name);
        let found = same_name.or_else(|| old.iter().find(|it| it.file == disk.file));
        found.copied()
    }

    fn carry_from(&self, disk: &DiskSpec, before: &DiskSpec) -> DiskSpec {
        let mut disk_now = carried(disk, before);
        if sockets::are_of_two_vms(before, disk) {
            // The name was given to another disk: this one does not go to the VM of that.
            disk_now.socket = before.socket.clone();
            disk_now.socket_access = before.socket_access;
        }
        disk_now.data_file = self.with_file_of(disk, before).data_file;
        if !self.knows_default_queues && disk.queues.is_none() {
            // The old process has written its default, which stays: see `queues`.
            disk_now.queues = None;
        }
        disk_now
    }

    /// Exports of a disk that has another name now follow it.
    fn rename_nodes_of_exports(&mut self, config: &Config) {
        let renamed = config.disks.iter().filter_map(|disk| {
            let before = self.before(disk, config)?;
            (before.name != disk.name).then(|| (before.name.clone(), disk.name.clone()))
        });
        let renamed: Vec<_> = renamed.collect();
        let served = self.nbd.iter_mut().flat_map(|nbd| &mut nbd.exports);
        let in_force = self.nbd_config.iter_mut().flat_map(|nbd| &mut nbd.exports);
        for export in served.chain(in_force) {
            if let Some((_, now)) = renamed.iter().find(|(before, _)| *before == export.node) {
                export.node.clone_from(now);
            }
        }
    }

    fn carry_nbd(&self, config: &Config) -> NbdConfig {
        let new = config.nbd_config();
        let Some(served) = &self.nbd else {
            // This process listens where it is configured now.
            return new;
        };
        if let Some(before) = &self.nbd_config {
            return before.clone();
        }
        // Of an older version, only what it serves is known.
        let same = |export: &NbdExportSpec| {
            let mut all = served.exports.iter();
            all.find(|other| other.id == export.id).cloned()
        };
        let exports = new.exports.iter().filter_map(same).collect();
        if new.address.is_none() {
            // Commands, or options of the command line, have started the server.
            return NbdConfig { exports, ..new };
        }
        let absolute = |dir: &PathBuf| std::path::absolute(dir).ok();
        let served_dir = served.tls.as_ref().map(|tls| tls.dir.clone());
        let is_same = new.tls.as_ref().and_then(absolute) == served_dir.as_ref().and_then(absolute);
        NbdConfig {
            address: Some(served.address.clone()),
            tls: if is_same { new.tls } else { served_dir },
            tls_any_peer: (served.tls.as_ref()).map_or(new.tls_any_peer, |tls| !tls.verify_peer),
            exports,
        }
    }
}

/// A disk, as it is configured now, for a guest that has it as `before`: what the guest or its front-end would
/// notice stays. The rest, and another path of the socket, take effect at once.
fn carried(disk: &DiskSpec, before: &DiskSpec) -> DiskSpec {
    let DiskSpec {
        name: _,
        file,
        format,
        data_file,
        socket: _,
        socket_access,
        cache,
        aio,
        queues,
        queue_size,
        read_only,
        serial,
        labels: _,
        discard,
        detect_zeroes,
        rerror,
        werror,
        l2_cache_bytes,
        logical_block,
        physical_block,
        fixed_buffers,
        lock,
        iothreads: _,
        limits: _,
        throttle_group: _,
    } = before.clone();
    // Nobody can stay connected at another path.
    let same_socket = sockets::path(disk) == sockets::path(before);
    DiskSpec {
        name: disk.name.clone(),
        file,
        format,
        data_file,
        socket: disk.socket.clone(),
        socket_access: if same_socket {
            socket_access
        } else {
            disk.socket_access
        },
        cache,
        aio,
        queues,
        queue_size,
        read_only,
        serial,
        labels: disk.labels.clone(),
        discard,
        detect_zeroes,
        rerror,
        werror,
        l2_cache_bytes,
        logical_block,
        physical_block,
        fixed_buffers,
        lock,
        iothreads: disk.iothreads.clone(),
        limits: disk.limits,
        throttle_group: disk.throttle_group.clone(),
    }
}

#[cfg(test)]
mod tests;
