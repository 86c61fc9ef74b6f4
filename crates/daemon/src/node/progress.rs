//! Progress of a long operation: one line that is overwritten on a terminal, otherwise lines in the log.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use tracing::info;

/// Time between two updates.
const ON_TERMINAL: Duration = Duration::from_millis(200);
const IN_LOG: Duration = Duration::from_secs(5);

/// Operations that are shorter report nothing.
const SHORT: Duration = Duration::from_secs(1);

/// Characters of the bar.
const WIDTH: usize = 30;

/// Reports until it is dropped.
pub struct Progress {
    /// The operation and its object.
    what: String,
    begun: Instant,
    last_report: Instant,
    on_terminal: bool,
    /// Something is in the terminal's last line.
    shown: bool,
}

impl Progress {
    pub fn new(what: String) -> Self {
        let now = Instant::now();
        Self {
            what,
            begun: now,
            last_report: now,
            on_terminal: stderr().is_terminal(),
            shown: false,
        }
    }

    /// Reports that `done` of `all` is done.
    pub fn at(&mut self, done: u64, all: u64) {
        let pause = if self.on_terminal {
            ON_TERMINAL
        } else {
            IN_LOG
        };
        let took = self.begun.elapsed();
        if took < SHORT || self.last_report.elapsed() < pause {
            return;
        }
        self.last_report = Instant::now();
        let (what, how_far) = (&self.what, how_far(done, all, took));
        if self.on_terminal {
            let full = u128::from(done.min(all)) * WIDTH as u128 / u128::from(all.max(1));
            let bar = format!("{:WIDTH$}", "#".repeat(full as usize));
            // Failure is harmless.
            let _ = write!(stderr(), "\r\x1b[K{what} [{bar}] {how_far}");
            let _ = stderr().flush();
            self.shown = true;
        } else {
            info!("{what}: {how_far}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

fn how_far(done: u64, all: u64, took: Duration) -> String {
    let done = done.min(all);
    let percent = u128::from(done) * 100 / u128::from(all.max(1));
    match done {
        0 => format!("{percent} %"),
        done => {
            let left = took.as_secs_f64() * (all - done) as f64 / done as f64;
            let left = left.round().min(1e9) as u64;
            let (hours, minutes, seconds) = (left / 3600, left / 60 % 60, left % 60);
            match hours {
                0 => format!("{percent} %, {minutes}:{seconds:02} left"),
                _ => format!("{percent} %, {hours}:{minutes:02}:{seconds:02} left"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_shows_percentage_and_remaining_time() {
        let ten = Duration::from_secs(10);
        assert_eq!(how_far(0, 100, ten), "0 %");
        assert_eq!(how_far(25, 100, ten), "25 %, 0:30 left");
        assert_eq!(how_far(1, 1000, ten), "0 %, 2:46:30 left");
        assert_eq!(how_far(100, 100, ten), "100 %, 0:00 left");
        // What counts on may have been longer than was thought.
        assert_eq!(how_far(120, 100, ten), "100 %, 0:00 left");
        assert_eq!(how_far(u64::MAX, 0, ten), "0 %");
        assert_eq!(how_far(1, u64::MAX, ten), "0 %, 277777:46:40 left");
    }
}
