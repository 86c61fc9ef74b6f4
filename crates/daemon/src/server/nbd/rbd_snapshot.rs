//! What an image in a Ceph cluster was at the moment of a backup: a snapshot of it.
//!
//! librbd holds back writes while it makes a snapshot, so none is made at the moment itself. Old data is copied at first, as for
//! any disk, and the snapshot is made when the backup has begun. What was not copied until then was not written either: the
//! snapshot has it as it was at the moment. Then the fleece is [sealed](Fleece::seal), and nothing is copied for the backup any
//! more. Its clients wait until the snapshot is there.
//!
//! The fleece is also what makes this safe with versions of Ceph before June 2023 (issue 61616): writes that librbd holds back
//! for the snapshot end up in it, and its object map does not know of them. They were submitted before the seal, so what they
//! replaced was copied.
//!
//! Nothing tells the reader of a snapshot that it was removed: it gets zeroes. So its presence is asked of the cluster
//! [at the end](Snapshot::check).
//!
//! Without a snapshot, the backup continues as for any disk.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use block::Remote;
use datapath::{Disk, Fleece};
use image::Image;
use rbd::{RbdError, RbdImage};
use tracing::{info, warn};

use crate::node::Node;
use crate::server::deadline::{ANSWER_TIMEOUT, with_deadline};
use crate::server::error::BackupError;
use crate::token::token;

/// How long clients wait for the snapshot.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long I/O threads may take to forget a snapshot that no client reads any more.
const DETACH: Duration = Duration::from_secs(1);

const FOREIGN: &str = "another client has had the lock of its image, and may have written to it";

/// The snapshot of an image for a backup.
pub struct Snapshot {
    live: Arc<RbdImage>,
    /// The name of the disk.
    disk: String,
    /// The mark of the image's lock at the moment. Another one means that another client may have written since.
    mark: Option<String>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// A thread makes it.
    is_running: bool,
    /// It is not used any more, or never will be.
    is_over: bool,
    made: Option<Made>,
    /// Why clients may have read something else than what it had.
    lost: Option<String>,
}

struct Made {
    name: String,
    image: Arc<RbdImage>,
    /// Bytes that the snapshot shared with an image that it was cloned from.
    overlap: u64,
    disk: Arc<Disk>,
}

impl Snapshot {
    /// For a disk that is in an image and can change. Clients wait until it is [made](Self::make). The image is locked, since
    /// librbd would do that for a snapshot, and bitmaps would take it for the work of another client.
    ///
    /// # Errors
    /// The cluster does not answer, or another client has the lock: it may write at any time, and nobody would preserve what it
    /// replaces.
    pub fn of(disk: &Disk, node: &Node) -> Result<Option<Arc<Self>>, BackupError> {
        let Some(live) = node.rbd().filter(|_| !disk.facts.read_only).cloned() else {
            return Ok(None);
        };
        let name = disk.name.clone();
        // The lock is not taken from another client, which may be using the image.
        let image = live.clone();
        let is_foreign = move || Ok(image.lock() == Some(false) && image.has_other_owner()?);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let is_foreign = with_deadline(&name, deadline, move || Ok(is_foreign()))
            .map_err(|_| BackupError::Silent(name.clone()))?;
        let owned = is_foreign.and_then(|is_foreign| match is_foreign {
            true => Err(io::Error::other("another client has it")),
            false => node.own_image(),
        });
        Ok(Some(Arc::new(Self {
            live,
            mark: owned.map_err(|e| BackupError::Foreign(name.clone(), e))?,
            disk: name,
            state: Mutex::default(),
            changed: Condvar::new(),
        })))
    }

    /// Makes it, in a thread of its own. No write is in flight that was so at the moment.
    pub fn make(self: &Arc<Self>, live: Arc<Disk>, fleece: Arc<Fleece>) {
        let mut state = self.lock();
        if state.is_over {
            return;
        }
        let this = self.clone();
        let thread = thread::Builder::new().name("rbd-snapshot".into());
        match thread.spawn(move || this.run(&live, &fleece)) {
            Ok(_) => state.is_running = true,
            Err(e) => self.give_up(&mut state, &e.to_string()),
        }
    }

    /// There will be none.
    fn give_up(&self, state: &mut State, why: &str) {
        if !state.is_over {
            state.is_over = true;
            warn!(
                "disk {}: its backup copies old data, because there is no snapshot of {}: {why}",
                self.disk,
                self.live.location().image_spec()
            );
        }
        self.changed.notify_all();
    }

    fn run(&self, live: &Disk, fleece: &Fleece) {
        let made = self.try_make(live);
        let is_foreign = made.is_ok() && !self.is_ours().unwrap_or(false);
        let mut state = self.lock();
        if is_foreign {
            // It may have newer data, and so may the disk.
            state.is_over = true;
            fleece.fail(FOREIGN);
        }
        match made {
            Err(e) => self.give_up(&mut state, &e.to_string()),
            Ok(made) if state.is_over => {
                drop(state);
                self.remove(made);
                state = self.lock();
            }
            Ok(made) => {
                fleece.seal();
                info!(
                    "disk {}: its backup reads {}",
                    self.disk,
                    made.image.location().image_spec()
                );
                state.made = Some(made);
            }
        }
        state.is_running = false;
        self.changed.notify_all();
    }

    fn try_make(&self, live: &Disk) -> io::Result<Made> {
        for left in self.live.abandoned_snapshots()? {
            let removed = self.live.remove_abandoned(&left);
            let (image, name) = (self.live.location().image_spec(), left.name);
            match removed {
                Ok(()) => info!("{image}@{name}, which an earlier backup had left, is removed"),
                Err(e) => {
                    warn!(
                        "{image}@{name}, which an earlier backup has left, cannot be removed: {e}"
                    );
                }
            }
        }
        // What librbd's cache has is older than the moment, or was copied.
        self.live.sync()?;
        let name = self.live.make_snapshot(&token())?;
        let opened = self.live.open_snapshot(&name).map_err(io::Error::other);
        let opened = opened.and_then(|image| Ok((image.overlap()?, image)));
        let (overlap, image) = opened.inspect_err(|_| self.remove_by_name(&name))?;
        let mut facts = live.facts;
        facts.read_only = true;
        let disk = Disk::remote(
            format!("{}@{name}", self.disk),
            Image::raw(),
            image.clone(),
            facts,
            live.size(),
            "",
            datapath::Options::default(),
        );
        Ok(Made {
            name,
            image,
            overlap,
            disk: Arc::new(disk),
        })
    }

    /// What is read instead of the disk, if there is a snapshot. Waits until that is known.
    pub fn disk(&self) -> Option<Arc<Disk>> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.lock();
        while state.made.is_none() && !state.is_over {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.give_up(&mut state, "the cluster does not answer");
            } else {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.made.as_ref().map(|made| made.disk.clone())
    }

    /// Whether no other client has had the image's lock since the moment, as far as a lock tells.
    fn is_ours(&self) -> io::Result<bool> {
        let mark = self.mark.as_deref();
        mark.map_or(Ok(true), |mark| self.live.has_mark(mark))
    }

    /// The name of the snapshot, if there is one, as in `pool/image@snapshot`.
    pub fn name(&self) -> Option<String> {
        let state = self.lock();
        let made = state.made.as_ref()?;
        Some(made.image.location().image_spec())
    }

    /// Notices that another client has removed it, or what it was cloned from: what was read may not have been there then. It is
    /// opened again, because librbd answers from memory otherwise, also if the cluster does not listen to this client any more.
    pub fn check(&self) {
        let made = |made: &Made| (made.name.clone(), made.overlap);
        let made = self.lock().made.as_ref().map(made);
        let Some((name, overlap)) = made else {
            return match self.is_ours() {
                Ok(true) => {}
                Ok(false) => self.lose(FOREIGN),
                Err(e) => self.lose(&e.to_string()),
            };
        };
        let again = self.live.open_snapshot(&name);
        match again.map(|again| again.overlap().map(|now| now == overlap)) {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => self.lose("another client has flattened the image"),
            Ok(Err(e)) => self.lose(&e.to_string()),
            Err(RbdError::Missing(_)) => {
                self.lose("another client has removed it, or renamed the image");
            }
            Err(e) => self.lose(&e.to_string()),
        }
    }

    /// What clients have read may be wrong.
    pub fn lose(&self, why: &str) {
        let mut state = self.lock();
        state.lost = Some(match &state.made {
            Some(made) => format!("its snapshot {} is lost: {why}", made.name),
            None => why.into(),
        });
    }

    /// Why the backup is not of its moment.
    pub fn failure(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Removes it, waiting for the cluster. No client reads it any more.
    pub fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        self.changed.notify_all();
        while state.is_running {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        let made = state.made.take();
        drop(state);
        made.into_iter().for_each(|made| self.remove(made));
    }

    fn remove(&self, made: Made) {
        let Made {
            name, image, disk, ..
        } = made;
        drop(disk);
        // An I/O thread must not be the one that closes it.
        let begun = Instant::now();
        while Arc::strong_count(&image) > 1 && begun.elapsed() < DETACH {
            thread::sleep(Duration::from_millis(1));
        }
        drop(image);
        self.remove_by_name(&name);
    }

    fn remove_by_name(&self, name: &str) {
        if let Err(e) = self.live.remove_snapshot(name) {
            let image = self.live.location().image_spec();
            warn!(
                "disk {}: {image}@{name} cannot be removed: {e}; a later backup of the disk removes it, or 'rbd snap rm'",
                self.disk
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
