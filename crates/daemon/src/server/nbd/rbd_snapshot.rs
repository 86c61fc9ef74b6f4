//! What an image in a Ceph cluster was at the moment of a backup: a snapshot of it.
//!
//! librbd holds back writes while it makes a snapshot, so none is made at the moment itself. Old data is copied at first, as for
//! any disk, and the snapshot is made when the backup has begun. What was not copied until then was not written either: the
//! snapshot has it as it was at the moment. Then the fleece is [sealed](Fleece::seal), and guests pay nothing for the backup any
//! more. Its clients wait until the snapshot is there.
//!
//! Without a snapshot, the backup continues as for any disk.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use block::Remote;
use datapath::{Disk, Fleece};
use image::Image;
use rbd::RbdImage;
use tracing::{info, warn};

use crate::node::Node;
use crate::server::deadline::{ANSWER_TIMEOUT, with_deadline};
use crate::token::token;

/// How long clients wait for the snapshot.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long I/O threads may take to forget a snapshot that no client reads any more.
const DETACH: Duration = Duration::from_secs(1);

/// The snapshot of an image for a backup.
pub struct Snapshot {
    live: Arc<RbdImage>,
    /// The name of the disk.
    disk: String,
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
    /// Why it has not what it had.
    lost: Option<String>,
}

struct Made {
    name: String,
    image: Arc<RbdImage>,
    disk: Arc<Disk>,
}

impl Snapshot {
    /// For a disk that is in an image and can change. Clients wait until it is [made](Self::make). The image is locked, since
    /// librbd would do that for a snapshot, and bitmaps would take it for the work of another client.
    pub fn of(disk: &Disk, node: &Node) -> Option<Arc<Self>> {
        let live = node.rbd().filter(|_| !disk.facts.read_only)?.clone();
        let this = Self {
            live,
            disk: disk.name.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        // The lock is not taken from another client, which may be using the image.
        let image = this.live.clone();
        let is_foreign = move || Ok(image.lock() == Some(false) && image.header()?.is_locked());
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let owned = match with_deadline(&this.disk, deadline, move || Ok(is_foreign())) {
            Ok(Ok(false)) => node.own_image().map_err(|e| e.to_string()),
            Ok(Ok(true)) => Err("another client has its lock".into()),
            Ok(Err(e)) => Err(io::Error::to_string(&e)),
            Err(e) => Err(e.to_string()),
        };
        if let Err(e) = owned {
            this.give_up(&mut this.lock(), &e);
        }
        Some(Arc::new(this))
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
        let mut state = self.lock();
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
        for name in self.live.abandoned_snapshots()? {
            let removed = self.live.remove_snapshot(&name);
            let image = self.live.location().image_spec();
            match removed {
                Ok(()) => info!("{image}@{name}, which a crash had left, is removed"),
                Err(e) => warn!("{image}@{name}, which a crash has left, cannot be removed: {e}"),
            }
        }
        // What librbd's cache has is older than the moment, or was copied.
        self.live.sync()?;
        let name = self.live.make_snapshot(&token())?;
        let image = self.live.open_snapshot(&name).map_err(|e| {
            self.remove_by_name(&name);
            io::Error::other(e)
        })?;
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

    /// The name of the snapshot, if there is one, as in `pool/image@snapshot`.
    pub fn name(&self) -> Option<String> {
        let state = self.lock();
        let made = state.made.as_ref()?;
        Some(made.image.location().image_spec())
    }

    /// Notices that another client has removed it: what was read may be newer than the moment then.
    pub fn check(&self) {
        let Some(name) = self.lock().made.as_ref().map(|made| made.name.clone()) else {
            return;
        };
        let lost = match self.live.has_snapshot(&name) {
            Ok(true) => return,
            Ok(false) => "another client has removed it".into(),
            Err(e) => e.to_string(),
        };
        self.lock().lost = Some(format!("its snapshot {name} is lost: {lost}"));
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
        let Made { name, image, disk } = made;
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
                "disk {}: the snapshot of its backup cannot be removed: {e}; the next backup removes it, or 'rbd snap rm {image}@{name}'",
                self.disk
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
