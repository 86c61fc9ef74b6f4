//! Snapshots of an image that ringdisk makes itself, and removes again.
//!
//! Their names say which client has made them. A snapshot whose client does not have the image open any more was left behind
//! by a crash.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::ptr;
use std::sync::Arc;

use block::CacheMode;

use crate::cluster::c_string;
use crate::error::RbdError;
use crate::image::{OpenOptions, RbdImage};
use crate::library::SnapshotInfo;

const PREFIX: &str = "ringdisk-backup-";

/// RBD_SNAP_CREATE_SKIP_QUIESCE of `rbd/librbd.h`: no other program is asked to stop writing before.
const SKIP_QUIESCE: u32 = 1 << 0;

/// Most snapshots that are listed. RBD's own limit for an image is lower.
const SNAPSHOTS_MAX: c_int = 1 << 16;

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
        extern "C" fn progress(_: u64, _: u64, _: *mut c_void) -> c_int {
            0
        }
        let name = name_of(self.connection().client(), token);
        let (library, text) = (self.library(), c_string(&name));
        // SAFETY: the image is open; the name ends with a zero byte; the progress callback needs no argument.
        let made = unsafe {
            match library.rbd_snap_create2 {
                Some(create) => {
                    let text = text.as_ptr();
                    create(self.handle(), text, SKIP_QUIESCE, progress, ptr::null_mut())
                }
                None => (library.rbd_snap_create)(self.handle(), text.as_ptr()),
            }
        };
        self.check(made)?;
        Ok(name)
    }

    /// Opens a snapshot of the image, read-only.
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
        Self::open(OpenOptions {
            location,
            cache,
            read_only: true,
        })
    }

    /// Removes a snapshot. It is no error if it is not there.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn remove_snapshot(&self, name: &str) -> io::Result<()> {
        let name = c_string(name);
        // SAFETY: the image is open; the name ends with a zero byte.
        let removed = unsafe { (self.library().rbd_snap_remove)(self.handle(), name.as_ptr()) };
        match removed {
            removed if removed == -libc::ENOENT => Ok(()),
            removed => self.check(removed),
        }
    }

    /// The snapshots that ringdisk has made and that nobody uses any more.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn abandoned_snapshots(&self) -> io::Result<Vec<String>> {
        let mut names = self.snapshots()?;
        names.retain(|name| client_of(name).is_some());
        if names.is_empty() {
            return Ok(names);
        }
        // Listed after the snapshots: who makes one has the image open.
        let clients = self.watchers()?;
        names.retain(|name| client_of(name).is_some_and(|client| !clients.contains(&client)));
        Ok(names)
    }

    /// Whether there is a snapshot of this name.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn has_snapshot(&self, name: &str) -> io::Result<bool> {
        Ok(self.snapshots()?.iter().any(|other| other == name))
    }

    fn snapshots(&self) -> io::Result<Vec<String>> {
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
            let name = |info: &SnapshotInfo| unsafe { text_at(info.name) };
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
