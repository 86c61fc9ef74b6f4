//! Snapshots of an image that ringdisk makes itself, and removes again.
//!
//! Their names say which client has made them. A snapshot that nobody uses any more was left behind by a crash, or by a removal
//! that has failed: its client does not have the image open, or is this one, and does not know it.
//!
//! librbd removes a snapshot in steps. At first it is moved to the trash, where it has another name.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::ptr;
use std::sync::{Arc, MutexGuard, PoisonError};

use block::CacheMode;

use crate::cluster::{c_string, text_of};
use crate::error::RbdError;
use crate::image::{OpenOptions, RbdImage};
use crate::library::SnapshotInfo;

const PREFIX: &str = "ringdisk-backup-";

/// RBD_SNAP_CREATE_SKIP_QUIESCE of `rbd/librbd.h`: no other program is asked to stop writing before.
const SKIP_QUIESCE: u32 = 1 << 0;

/// Most snapshots that are listed. RBD's own limit for an image is lower.
const SNAPSHOTS_MAX: c_int = 1 << 16;

/// A snapshot that ringdisk has made and that nobody uses any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbandonedSnapshot {
    /// The name that it was made with.
    pub name: String,
    id: u64,
    is_in_trash: bool,
}

/// The name of a snapshot of this client.
fn name_of(client: u64, token: &str) -> String {
    format!("{PREFIX}{client}-{token}")
}

/// The client that has made a snapshot, if it was a ringdisk.
fn client_of(name: &str) -> Option<u64> {
    let (client, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
    client.parse().ok()
}

impl RbdImage {
    /// Makes a snapshot of the image. librbd holds back writes meanwhile. No other snapshot may have the token in its name.
    /// Returns the snapshot's name.
    ///
    /// # Errors
    /// The cluster refuses: the user may have no permission, or the image has as many snapshots as it may have.
    pub fn make_snapshot(&self, token: &str) -> io::Result<String> {
        let name = name_of(self.connection().client(), token);
        self.used().insert(name.clone());
        let made = self.try_make_snapshot(&name);
        if made.is_err() {
            self.used().remove(&name);
        }
        made.map(|()| name)
    }

    fn try_make_snapshot(&self, name: &str) -> io::Result<()> {
        extern "C" fn progress(_: u64, _: u64, _: *mut c_void) -> c_int {
            0
        }
        let (library, text) = (self.library(), c_string(name));
        if let Some(create) = library.rbd_snap_create2 {
            let text = text.as_ptr();
            // SAFETY: the image is open; the name ends with a zero byte; the progress callback needs no argument.
            let made =
                unsafe { create(self.handle(), text, SKIP_QUIESCE, progress, ptr::null_mut()) };
            self.check(made)?;
            // librbd 16 reports success with this flag even if the cluster has refused.
            if self.snapshots()?.iter().any(|(_, other)| other == name) {
                return Ok(());
            }
        }
        // SAFETY: as above.
        self.check(unsafe { (library.rbd_snap_create)(self.handle(), text.as_ptr()) })
    }

    /// Opens a snapshot of the image, read-only and for the same client: a cluster that refuses the requests of this one
    /// refuses those for the snapshot, too.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_snapshot(&self, name: &str) -> Result<Arc<Self>, RbdError> {
        let mut location = self.location().clone();
        location.snapshot = Some(name.into());
        // As the image, since the user's configuration may allow no other.
        let cache = match self.is_cached() {
            true => CacheMode::Writeback,
            false => CacheMode::None,
        };
        let options = OpenOptions {
            location,
            cache,
            read_only: true,
        };
        Self::open_on(self.shared_connection(), &options, self.is_cached())
    }

    /// Removes a snapshot of this client. It is no error if it is not there.
    ///
    /// # Errors
    /// The cluster refuses. [`abandoned_snapshots`](Self::abandoned_snapshots) has it then.
    pub fn remove_snapshot(&self, name: &str) -> io::Result<()> {
        self.used().remove(name);
        let name = c_string(name);
        // SAFETY: the image is open; the name ends with a zero byte.
        let removed = unsafe { (self.library().rbd_snap_remove)(self.handle(), name.as_ptr()) };
        self.check_removed(removed)
    }

    /// Removes a snapshot that nobody uses. It is no error if it is not there.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn remove_abandoned(&self, snapshot: &AbandonedSnapshot) -> io::Result<()> {
        match self.library().rbd_snap_remove_by_id {
            Some(remove) if snapshot.is_in_trash => {
                // SAFETY: the image is open.
                self.check_removed(unsafe { remove(self.handle(), snapshot.id) })
            }
            _ => self.remove_snapshot(&snapshot.name),
        }
    }

    fn check_removed(&self, removed: c_int) -> io::Result<()> {
        match removed {
            removed if removed == -libc::ENOENT => Ok(()),
            removed => self.check(removed),
        }
    }

    /// The snapshots that ringdisk has made and that nobody uses any more.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn abandoned_snapshots(&self) -> io::Result<Vec<AbandonedSnapshot>> {
        let all = self.snapshots()?.into_iter().map(|(id, name)| {
            let original = self.name_in_trash(id);
            AbandonedSnapshot {
                is_in_trash: original.is_some(),
                name: original.unwrap_or(name),
                id,
            }
        });
        let mut ours: Vec<_> = all.filter(|one| client_of(&one.name).is_some()).collect();
        if ours.is_empty() {
            return Ok(ours);
        }
        // Listed after the snapshots: who makes one has the image open.
        let (clients, this) = (self.watchers()?, self.connection().client());
        let used = self.used();
        ours.retain(|one| match client_of(&one.name) {
            Some(client) if client == this => !used.contains(&one.name),
            Some(client) => !clients.contains(&client),
            None => false,
        });
        Ok(ours)
    }

    /// The name that a snapshot in the trash had before.
    fn name_in_trash(&self, id: u64) -> Option<String> {
        let get = self.library().rbd_snap_get_trash_namespace?;
        let mut buffer = [0u8; 256];
        // SAFETY: the image is open; the buffer has the length that is given.
        let got = unsafe { get(self.handle(), id, buffer.as_mut_ptr().cast(), buffer.len()) };
        (got >= 0).then(|| text_of(&buffer))
    }

    fn used(&self) -> MutexGuard<'_, HashSet<String>> {
        let used = self.connection().snapshots.lock();
        used.unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids and names of all snapshots, as librbd knows them.
    fn snapshots(&self) -> io::Result<Vec<(u64, String)>> {
        let library = self.library();
        let mut room: c_int = 32;
        loop {
            let mut all = vec![SnapshotInfo::NONE; room as usize];
            // SAFETY: the image is open; there is space for as many as `room` says.
            let got =
                unsafe { (library.rbd_snap_list)(self.handle(), all.as_mut_ptr(), &mut room) };
            if got == -libc::ERANGE
                && (1..=SNAPSHOTS_MAX).contains(&room)
                && room as usize > all.len()
            {
                continue;
            }
            self.check(got.min(0))?;
            // SAFETY: librbd has filled so many, with names that end with a zero byte.
            let name = |info: &SnapshotInfo| (info.id, unsafe { text_at(info.name) });
            let names = all[..got as usize].iter().map(name).collect();
            // SAFETY: librbd frees the names that it has made, up to the first null.
            unsafe { (library.rbd_snap_list_end)(all.as_mut_ptr()) };
            return Ok(names);
        }
    }
}

/// # Safety
/// `text` must end with a zero byte.
unsafe fn text_at(text: *const c_char) -> String {
    // SAFETY: the caller guarantees it.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_who_has_made_a_snapshot() {
        assert_eq!(client_of(&name_of(4123, "0f")), Some(4123));
        for other in [
            "",
            "daily",
            "ringdisk-backup-",
            "ringdisk-backup-12",
            "ringdisk-backup--1",
            "ringdisk-backup-x-1",
            "ringdisk-backup-99999999999999999999-1",
            "my-ringdisk-backup-1-2",
        ] {
            assert_eq!(client_of(other), None, "{other}");
        }
    }
}
