//! Results of tests with each front-end: one file per front-end, version and test in the target folder's
//! `compatibility`. `docs/compatibility.md` is made from these files.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The content of a result file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Trial {
    /// The front-end's name, such as `QEMU`.
    pub front_end: String,
    /// The front-end's version, such as `10.0.13 (Debian 13)`.
    pub version: String,
    /// The steps that passed, in order.
    pub steps: Vec<String>,
    /// The step that failed, if any.
    pub failed: Option<String>,
    /// The start of the trial, in seconds since 1970.
    pub at_s: u64,
}

/// A trial in progress. Dropping it writes the result file; after a panic, the current step counts as failed.
#[derive(Debug)]
pub struct Record {
    trial: Trial,
    running: Option<String>,
}

impl Record {
    /// Starts a trial of this front-end.
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

    /// Runs a step, such as `live resize`. A panic in it is recorded as the failure of the step.
    pub fn step<T>(&mut self, what: &str, run: impl FnOnce() -> T) -> T {
        self.begin(what);
        let result = run();
        self.passed();
        result
    }

    /// Starts a step. It counts as failed if the record is dropped before [`passed`](Self::passed) is called.
    pub fn begin(&mut self, what: &str) {
        self.running = Some(what.to_owned());
    }

    /// The number of steps that passed.
    pub fn steps(&self) -> usize {
        self.trial.steps.len()
    }

    /// Forgets all steps after the first `steps`, and the current one, so that they can be tried again.
    pub fn forget_after(&mut self, steps: usize) {
        self.trial.steps.truncate(steps);
        self.running = None;
    }

    /// Records that the current step passed.
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

/// The folder of the result files: in the target folder that contains this program.
///
/// # Errors
/// This program is in no target folder.
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
    fn panicking_step_is_recorded_as_failed() {
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
