//! Events of a disk, and a limit for log lines that a guest can cause as often as it likes: at most one a second for
//! each disk, with a count of the suppressed ones.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use block::Request;

const PAUSE: Duration = Duration::from_secs(1);

/// An event of a disk's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEvent {
    /// A request failed.
    Failed(IoFailure),
    /// No request is stalled any more: the last one was served, or the guest was told of its error.
    Resumed(IoResumed),
}

/// What is done about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoAction {
    /// The guest is told of the error.
    Report,
    /// The request and all later ones wait until the operator resumes the disk.
    Stop,
    /// The request waits, and is tried again.
    Retry,
}

/// The end of an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoResumed {
    /// Since the first failure.
    pub lasted: Duration,
    /// Requests that ended with an error.
    pub given_up: u64,
}

/// A request that storage failed to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFailure {
    /// What the guest asked for.
    pub request: Request,
    /// What is done about it.
    pub action: IoAction,
    /// The error; 0 if the file ended before the disk does.
    pub errno: i32,
    /// Failures since the last event of one.
    pub left_out: u64,
}

/// Limits log lines of one kind about one disk.
#[derive(Default)]
pub struct LogLimiter(Mutex<LimiterState>);

#[derive(Default)]
struct LimiterState {
    last: Option<Instant>,
    left_out: u64,
}

/// How many lines were suppressed before a line, which ends with this.
#[derive(Clone, Copy, Debug)]
pub struct LeftOut(pub u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " ({n} more of these left out)"),
        }
    }
}

impl LogLimiter {
    /// Calls `log` with the number of lines suppressed since the last one, unless that was less than a second ago.
    pub fn log(&self, log: impl FnOnce(LeftOut)) {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if state.last.is_some_and(|last| last.elapsed() < PAUSE) {
            state.left_out += 1;
            return;
        }
        state.last = Some(Instant::now());
        let left_out = std::mem::take(&mut state.left_out);
        drop(state);
        log(LeftOut(left_out));
    }
}
