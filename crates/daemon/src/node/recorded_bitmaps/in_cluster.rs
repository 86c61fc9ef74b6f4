//! Persistent bitmaps of images in a Ceph cluster, which are those of [the process that has the lock](super::medium).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rbd::RbdImage;

use super::medium::Medium;
use super::seen::LOCK_LOST;
use super::{NO_STATE, RecordedBitmaps};
use crate::config::spec::DiskSpec;
use crate::node::context::OpenContext;

impl RecordedBitmaps {
    /// Loads the bitmaps of a disk in an image in a Ceph cluster that is open for writing, and marks them as in use.
    ///
    /// # Errors
    /// They could not be marked, nor removed, or the cluster does not say what is needed.
    pub fn load_of_cluster(
        spec: &DiskSpec,
        context: &OpenContext,
        image: &Arc<RbdImage>,
        size: u64,
    ) -> io::Result<Arc<Self>> {
        if context.state.is_none() {
            return Ok(Self::temporary(&spec.name, size, NO_STATE));
        }
        let name = PathBuf::from(image.full_name()?);
        match medium_of(image)? {
            Ok(medium) => Self::load(spec, context, &name, medium, size),
            Err(why) => Self::without_place(spec, context, &name, None, size, &why),
        }
    }

    /// Acquires the lock of an image in a cluster, so that bitmaps record all changes from now on. They become inconsistent if
    /// another client has had it. Returns the lock's mark, which is a new one each time that this has happened. Only one thread
    /// at a time may call this, as commands that change bitmaps do.
    ///
    /// # Errors
    /// It cannot be acquired, or the cluster does not say which client has had it.
    pub fn own(&self) -> io::Result<Option<String>> {
        let Ok(place) = &self.place else {
            return Ok(None);
        };
        self.check_owner()?;
        place.medium.own()
    }

    /// Makes the bitmaps inconsistent if another client has had the lock of an image in a cluster. Returns whether one had.
    ///
    /// # Errors
    /// The cluster does not say.
    pub fn check_owner(&self) -> io::Result<bool> {
        let Ok(place) = &self.place else {
            return Ok(false);
        };
        let Some(lost) = place.medium.lost_mark()? else {
            return Ok(false);
        };
        let mut inner = self.inner();
        // The bitmaps that are prepared would stay consistent. The next check finds the same.
        if !inner.is_preparing && place.medium.forget(&lost) {
            self.make_inconsistent(&mut inner, LOCK_LOST, |_| true);
        }
        Ok(true)
    }
}

/// An image whose lock shows whether other clients have written to it, or why it does not.
fn medium_of(image: &Arc<RbdImage>) -> io::Result<Result<Medium, String>> {
    if !image.has_lock()? {
        return Ok(Err(format!(
            "nothing shows whether other clients write to its image: 'rbd feature enable {} exclusive-lock', and then attach \
             the disk again or restart ringdisk",
            image.location().image_spec()
        )));
    }
    match Medium::image(image) {
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            Ok(Err(format!("the lock of its image cannot be used: {e}")))
        }
        medium => medium.map(Ok),
    }
}
