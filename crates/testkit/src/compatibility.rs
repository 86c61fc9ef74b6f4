//! What was tried with which front-end: one file per front-end, version and test in the target folder's `compatibility`,
//! of which `docs/compatibility.md` is made.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The content of a file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Trial {
    /// Such as `QEMU`.
    pub front_end: String,
    /// Such as `10.0.13 (Debian 13)`.
    pub version: String,
    /// What was run and worked, in this order.
    pub steps: Vec<String>,
    /// What was run and failed, if anything did.
    pub failed: Option<String>,
    /// When, in seconds since 1970.
    pub at_s: u64,
}

/// A trial that is under way. It is written down when it ends, as failed if that is by a panic.
#[derive(Debug)]
pub struct Record {
    trial: Trial,
    running: Option<String>,
}

impl Record {
    /// Begins a trial of this front-end.
    pub fn new(front_end: &str, version: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            trial: Trial {
                front_end: front_end.to_owned(),
                version: version.to_owned(),
                steps: Vec::new(),
                failed: None,
                at_s: now.unwrap_or_default().as_secs(),
            },
            running: None,
        }
    }

    /// Runs a step, such as `live resize`. A panic in it is written down as its failure.
    pub fn step<T>(&mut self, what: &str, run: impl FnOnce() -> T) -> T {
        self.begin(what);
        let result = run();
        self.passed();
        result
    }

    /// A step begins. It counts as failed if the record is dropped before it has [`passed`](Self::passed).
    pub fn begin(&mut self, what: &str) {
        self.running = Some(what.to_owned());
    }

    /// How many steps have worked.
    pub fn steps(&self) -> usize {
        self.trial.steps.len()
    }

    /// Forgets the steps after the first `steps`, and the one that has begun: they are tried again.
    pub fn forget_after(&mut self, steps: usize) {
        self.trial.steps.truncate(steps);
        self.running = None;
    }

    /// The step that has begun worked.
    pub fn passed(&mut self) {
        self.trial.steps.extend(self.running.take());
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.trial.failed = self.running.take();
        if let Err(error) = write(&self.trial) {
            println!("the trial is not written down: {error:#}");
        }
    }
}

fn write(trial: &Trial) -> Result<()> {
    let folder = folder()?;
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' {
            c
        } else {
            '-'
        }
    };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test");
    let name = format!("{} {} {test}.json", trial.front_end, trial.version).to_lowercase();
    let path = folder.join(name.chars().map(plain).collect::<String>());
    let text = serde_json::to_string_pretty(trial)? + "\n";
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

/// Where the files are: in the target folder in which this very program lies.
///
/// # Errors
/// It lies in none.
pub fn folder() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let profiles = ["debug", "release"];
    let target = program
        .ancestors()
        .find(|folder| {
            folder
                .file_name()
                .is_some_and(|n| profiles.iter().any(|p| n == *p))
        })
        .and_then(|profile| profile.parent());
    let target = target.with_context(|| format!("{} is in no target folder", program.display()))?;
    Ok(target.join("compatibility"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_panics_is_written_down_as_failed() {
        let trial = std::thread::spawn(|| {
            let mut record = Record::new("Test", "1.0 (here)");
            record.step("works", || ());
            record.step("fails", || panic!("as it must"));
        });
        trial.join().unwrap_err();
        let path = folder().unwrap().join("test-1.0--here--test.json");
        let written: Trial = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        fs::remove_file(path).unwrap();
        assert_eq!(
            (&*written.front_end, &*written.version),
            ("Test", "1.0 (here)")
        );
        assert_eq!(
            (written.steps, written.failed),
            (vec!["works".into()], Some("fails".into()))
        );
    }
}
