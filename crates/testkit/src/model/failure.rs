//! What goes wrong, as the tester tells it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the tester waits where nothing happens. This bounds hangs; it says nothing of speed. One that has been found
/// is looked for with less patience.
pub static HANG_S: AtomicU64 = AtomicU64::new(60);

pub fn hang() -> Duration {
    Duration::from_secs(HANG_S.load(Ordering::Relaxed))
}

/// The kind of what is no failure: QEMU has left an image that is not sound.
pub const RUINED: &str = "ruined";

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Of what kind; a smaller list of steps must fail in the same way.
    pub kind: &'static str,
    pub what: String,
    /// In which step; none in what comes before and after them.
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

    /// The same with more to say.
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

/// The tester itself cannot go on.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new("tester", error.to_string())
    }
}
