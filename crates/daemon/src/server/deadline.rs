//! Runs work that waits for storage in threads of its own, so that storage that does not answer holds up nothing else.

use std::sync::mpsc::{self, SendError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use super::{Server, ServerError};
use crate::config::spec::FileSpec;

/// How long stopping one disk or all may take, including making writes durable. systemd kills after 90 s.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// How long storage may take to answer a query.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a command waits for what it has done with the storage of a disk.
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// What a thread does for a command.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Work {
    disk: String,
    /// Its storage, which may hang. Another file of that name may be on storage that works.
    file: Option<FileSpec>,
    began: Instant,
}

pub(super) type Task<T> = mpsc::Receiver<Result<T, ServerError>>;

/// Runs work that may wait for storage in a thread of its own.
pub(super) fn begin<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, ServerError> + Send + 'static,
) -> Result<Task<T>, ServerError> {
    let (done, result) = mpsc::channel();
    let thread = thread::Builder::new().name("closing".into());
    thread
        .spawn(move || drop(done.send(work())))
        .map_err(|e| ServerError::Sync(name.into(), e))?;
    Ok(result)
}

/// Waits for the work until the deadline. The thread stays until its storage answers.
pub(super) fn end<T>(name: &str, deadline: Instant, task: &Task<T>) -> Result<T, ServerError> {
    // Work that is already done counts, even after the deadline.
    let left = deadline.saturating_duration_since(Instant::now());
    let left = left.max(Duration::from_millis(100));
    match task.recv_timeout(left) {
        Ok(result) => result,
        Err(_) => Err(ServerError::NotResponding(name.into())),
    }
}

/// Runs work that may wait for storage in a thread of its own, and waits for it until the deadline.
pub(super) fn with_deadline<T: Send + 'static>(
    name: &str,
    deadline: Instant,
    work: impl FnOnce() -> Result<T, ServerError> + Send + 'static,
) -> Result<T, ServerError> {
    end(name, deadline, &begin(name, work)?)
}

impl Server {
    /// Has something done for a command that may wait for the storage of a disk, which is on `file`, and waits for it, but not longer than
    /// [`COMMAND_TIMEOUT`]. After that, the thread goes on; `late` gets what it returns when the storage answers. Meanwhile
    /// other commands that wait for the same disk on the same file fail at once.
    ///
    /// # Errors
    /// [`ServerError::NotResponding`] if the storage has not answered; otherwise that of the work.
    pub(super) fn in_time<T: Send + 'static>(
        &self,
        name: &str,
        file: Option<&FileSpec>,
        work: impl FnOnce(&Self) -> Result<T, ServerError> + Send + 'static,
        late: impl FnOnce(&Self, T) + Send + 'static,
    ) -> Result<T, ServerError> {
        let Some(me) = self.me.upgrade() else {
            return work(self);
        };
        let this = Work {
            disk: name.into(),
            file: file.cloned(),
            began: Instant::now(),
        };
        {
            let mut state = self.state();
            let hangs = |other: &Work| {
                let is_same = other.disk == this.disk && other.file == this.file;
                is_same && other.began.elapsed() >= COMMAND_TIMEOUT
            };
            if state.under_way.iter().any(hangs) {
                return Err(ServerError::NotResponding(name.into()));
            }
            state.under_way.push(this.clone());
        }
        // Either the command receives the result, or the thread keeps it.
        let (done, result) = mpsc::sync_channel(0);
        let (its_name, its_work) = (name.to_owned(), this.clone());
        let run = move || {
            let result = work(&me);
            me.end_work(&its_work);
            match done.send(result).err() {
                Some(SendError(Ok(value))) => late(&me, value),
                Some(SendError(Err(e))) => warn!("disk {its_name}: {e}"),
                None => {}
            }
        };
        let thread = thread::Builder::new().name("command".into()).spawn(run);
        if let Err(e) = thread {
            self.end_work(&this);
            return Err(ServerError::Thread(name.into(), e));
        }
        result
            .recv_timeout(COMMAND_TIMEOUT)
            .unwrap_or_else(|_| Err(ServerError::NotResponding(name.into())))
    }

    fn end_work(&self, work: &Work) {
        let mut state = self.state();
        let ended = (state.under_way.iter()).position(|other| other == work);
        ended.map(|ended| state.under_way.swap_remove(ended));
    }
}
