//! Runs work that waits for storage in threads of its own, so that storage that does not answer holds up nothing else; waits
//! for other commands.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::ServerError;

/// How long stopping one disk or all may take, including making writes durable. systemd kills after 90 s.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// How long storage may take to answer a query.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a command waits for another one that changes the same disk.
const PATIENCE: Duration = Duration::from_secs(1);

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

/// Tries again for a moment while another command changes a disk: most such changes take milliseconds.
pub(super) fn patiently<T>(attempt: impl Fn() -> Result<T, ServerError>) -> Result<T, ServerError> {
    let began = Instant::now();
    loop {
        match attempt() {
            Err(ServerError::Moving(_)) if began.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(2));
            }
            ended => return ended,
        }
    }
}
