//! Programs that run in the background: they write to a log, and do not outlive the program that started them.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::paths::find_program;

/// A request to stop, such as Ctrl-C. Code that waits checks it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// The flag itself, for a signal handler.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Whether a stop was requested.
    pub fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A command for `program` that the kernel kills when the caller dies, if `setpriv` is installed.
pub fn guarded(program: &Path) -> Command {
    match find_program("setpriv") {
        None => Command::new(program),
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL"]).arg(program);
            command
        }
    }
}

/// A program in the background. Dropping this kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    grace: Duration,
}

impl Process {
    /// Starts `command` with its output in the file `log`. Ctrl-C does not reach the program. Errors call it `name`.
    ///
    /// # Errors
    /// The program does not start, or the log is not writable.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("making {}", log.display()))?;
        let child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {name}; is it installed?"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
            grace: Duration::ZERO,
        })
    }

    /// Dropping this sends SIGTERM, and kills the program only if it has not ended within `grace`.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status if the program has ended.
    ///
    /// # Errors
    /// The system call fails.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait();
        ended.with_context(|| format!("waiting for {}", self.name))
    }

    /// Succeeds while the program runs.
    ///
    /// # Errors
    /// The program has ended; the message contains the last lines of its log.
    pub fn check(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}); it said:\n{}", self.name, self.said()),
        }
    }

    /// Waits until the program is `ready`.
    ///
    /// # Errors
    /// The program ends, is not ready within `limit`, or a stop is requested.
    pub fn wait_until(
        &mut self,
        limit: Duration,
        stop: &Stop,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !ready() {
            self.check()?;
            ensure!(!stop.is_wanted(), "stopped");
            ensure!(
                Instant::now() < deadline,
                "{} is not ready after {} s; it said:\n{}",
                self.name,
                limit.as_secs(),
                self.said()
            );
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn said(&self) -> String {
        tail(&self.log, 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.grace.is_zero() {
            // Fails only if the program has ended.
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let deadline = Instant::now() + self.grace;
            while Instant::now() < deadline {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                sleep(Duration::from_millis(2));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The last lines of a log file, for an error message; empty if there is no such file.
pub fn tail(log: &Path, lines: usize) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    last_lines(&String::from_utf8_lossy(&bytes), lines)
}

/// The last lines of a text, without empty ones.
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str, log: &Path) -> Process {
        let mut command = guarded(Path::new("/bin/sh"));
        Process::start("the script", command.args(["-c", script]), log).unwrap()
    }

    #[test]
    fn an_end_is_reported_with_the_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut process = start("echo one; echo two >&2; exit 3", &log);
        let limit = Duration::from_secs(60);
        let error = process
            .wait_until(limit, &Stop::default(), || false)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("one\ntwo"),
            "{error}"
        );

        let stop = Stop::default();
        stop.flag().store(true, Ordering::Relaxed);
        let mut process = start("exec sleep 1000", &log);
        let stopped = process.wait_until(limit, &stop, || false).unwrap_err();
        assert_eq!(stopped.to_string(), "stopped");
    }

    #[test]
    fn a_dropped_program_may_clean_up_and_then_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let (log, cleaned) = (folder.path().join("log"), folder.path().join("cleaned"));
        let script = format!(
            "trap 'touch {}; exit' TERM; echo ready; while :; do sleep 0.01; done",
            cleaned.display()
        );
        let mut polite = start(&script, &log).with_grace(Duration::from_secs(60));
        let ready = || tail(&log, 1) == "ready";
        polite
            .wait_until(Duration::from_secs(60), &Stop::default(), ready)
            .unwrap();
        let pid = polite.pid();
        drop(polite);
        assert!(cleaned.exists() && !Path::new(&format!("/proc/{pid}")).exists());
    }
}
