//! Failures, as the tester reports them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How many seconds the tester waits without any progress. This bounds hangs and says nothing about speed. While a hang
/// is being shortened, the limit is lower.
pub static HANG_S: AtomicU64 = AtomicU64::new(60);

pub fn hang() -> Duration {
    Duration::from_secs(HANG_S.load(Ordering::Relaxed))
}

/// The kind of a case that ends without a failure of ringdisk: QEMU has left an inconsistent image.
pub const RUINED: &str = "ruined";

/// A violation that the tester found.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The kind of failure; a shortened list of steps must fail with the same kind.
    pub kind: &'static str,
    pub what: String,
    /// The step that failed; none if it happened before or after the steps.
    pub step: Option<usize>,
}

pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub fn new(kind: &'static str, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            step: None,
        }
    }

    /// The same failure, with `what` replaced by the result of `tell`.
    pub fn told(self, tell: impl FnOnce(String) -> String) -> Self {
        Self {
            what: tell(self.what),
            ..self
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.what)
    }
}

/// An error of the tester itself, which cannot continue.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new("tester", error.to_string())
    }
}
