//! Limits of disks, and the groups of disks that share limits.

use std::sync::Arc;

use block::ThrottleLimits;
use datapath::ThrottleGroup;

use super::{Claim, GROUPS_MAX, Server, ServerError, ServerState};
use crate::config::spec::Labels;

impl Server {
    /// Sets a disk's own limits, and the group whose limits it shares.
    pub fn throttle(
        &self,
        claim: &Claim<'_>,
        name: &str,
        limits: &ThrottleLimits,
        group: Option<&str>,
    ) -> Result<(), ServerError> {
        claim.covers(name);
        limits.check()?;
        let mut state = self.state();
        let shared = state.group(group)?;
        let name = state.top(name)?.node.name().to_owned();
        let Some(entry) = state.nodes.get_mut(&name) else {
            return Err(ServerError::NoNode(name));
        };
        (entry.limits, entry.group) = (*limits, group.map(str::to_owned));
        let node = entry.node.clone();
        let mut exports = state.exports.values();
        if let Some(export) = exports.find(|e| Arc::ptr_eq(&e.node, &node)) {
            export.disk.set_limits(limits)?;
            export.disk.set_throttle_group(shared);
        }
        Ok(())
    }

    /// Sets what statistics call a disk.
    pub(super) fn set_labels(&self, claim: &Claim<'_>, name: &str, labels: &Labels) {
        claim.covers(name);
        if let Some(entry) = self.state().nodes.get_mut(name) {
            entry.labels.clone_from(labels);
        }
    }

    /// Adds a group of disks with common limits.
    pub fn add_group(&self, name: &str, limits: &ThrottleLimits) -> Result<(), ServerError> {
        let mut state = self.state();
        if state.groups.contains_key(name) {
            return Err(ServerError::SameGroup(name.into()));
        }
        if state.groups.len() >= GROUPS_MAX {
            return Err(ServerError::TooMany(format!(
                "{GROUPS_MAX} throttle groups"
            )));
        }
        let group = ThrottleGroup::new(name.into(), limits)?;
        state.groups.insert(name.into(), Arc::new(group));
        Ok(())
    }

    /// Whether there is such a group.
    pub fn has_group(&self, name: &str) -> bool {
        self.state().groups.contains_key(name)
    }

    /// Changes the limits of a group.
    pub fn change_group(&self, name: &str, limits: &ThrottleLimits) -> Result<(), ServerError> {
        match self.state().group(Some(name))? {
            Some(group) => Ok(group.set_limits(limits)?),
            None => Ok(()),
        }
    }

    /// Removes a group that no disk is in.
    pub fn remove_group(&self, name: &str) -> Result<(), ServerError> {
        let mut state = self.state();
        let mut nodes = state.nodes.values();
        if let Some(user) = nodes.find(|entry| entry.group.as_deref() == Some(name)) {
            let user = user.node.name().to_owned();
            return Err(ServerError::GroupInUse(name.into(), user));
        }
        match state.groups.remove(name) {
            Some(_) => Ok(()),
            None => Err(ServerError::NoGroup(name.into())),
        }
    }
}

impl ServerState {
    pub(super) fn group(
        &self,
        name: Option<&str>,
    ) -> Result<Option<Arc<ThrottleGroup>>, ServerError> {
        let Some(name) = name else {
            return Ok(None);
        };
        let group = self.groups.get(name).cloned();
        group
            .map(Some)
            .ok_or_else(|| ServerError::NoGroup(name.into()))
    }
}
