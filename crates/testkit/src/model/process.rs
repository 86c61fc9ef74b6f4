//! The processes: ringdisk, whose log goes to a file, and QEMU's tools. Every wait is bounded.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::failure::{Failure, Outcome, hang};
use super::steps::Moment;

/// How long to wait for a line of the log, which may never appear.
const LINE_WAIT: Duration = Duration::from_millis(200);

/// The part of a case's log that is written after this was made.
pub struct Log {
    path: PathBuf,
    /// The initial length of the log in bytes.
    before: u64,
}

impl Log {
    /// Starts at the current end of the log.
    pub fn new(directory: &Path) -> Self {
        let path = directory.join("log");
        let before = fs::metadata(&path).map_or(0, |m| m.len());
        Self { path, before }
    }

    /// Waits until the moment has come, or until `ended` returns true.
    pub fn wait_for(&self, moment: Moment, mut ended: impl FnMut() -> bool) {
        let lines = match moment {
            Moment::Us(us) => return thread::sleep(Duration::from_micros(us)),
            Moment::Line(lines) => lines,
        };
        let start = Instant::now();
        while self.lines() < lines && !ended() && start.elapsed() < LINE_WAIT {
            thread::sleep(Duration::from_micros(50));
        }
    }

    fn lines(&self) -> u64 {
        let log = fs::read(&self.path).unwrap_or_default();
        let new = log.get(self.before as usize..).unwrap_or_default();
        new.iter().filter(|byte| **byte == b'\n').count() as u64
    }
}

/// A ringdisk that serves, and the processes that took over from it by upgrades.
pub struct Process {
    child: Child,
    /// A path that the command lines of these processes contain; and those of clients, which do not [serve](processes_with).
    control: PathBuf,
    /// The process that serves.
    pub pid: u32,
    upgraded: bool,
}

impl Process {
    /// Starts the process, without waiting for anything.
    pub fn spawn(mut command: Command, control: &Path, directory: &Path) -> io::Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(directory.join("log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(File::create(directory.join("ready"))?)
            .stderr(log)
            .spawn()?;
        Ok(Self {
            pid: child.id(),
            child,
            control: control.into(),
            upgraded: false,
        })
    }

    /// Waits until the process serves. Returns `None` if it has ended instead.
    pub fn ready(&mut self, directory: &Path) -> Outcome<Option<()>> {
        let start = Instant::now();
        loop {
            if fs::read_to_string(directory.join("ready"))?.ends_with('\n') {
                return Ok(Some(()));
            }
            if self.child.try_wait()?.is_some() {
                return Ok(None);
            }
            if start.elapsed() > hang() {
                let what = format!("ringdisk is not ready, {}", busy(self.pid));
                return Err(Failure::new("hang", what));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the process, and any that took over from it or was about to.
    pub fn kill(&mut self) -> Outcome<()> {
        let _ = self.child.kill();
        self.child.wait()?;
        // Only once: the next process has the same path in its command line.
        if std::mem::take(&mut self.upgraded) {
            self.kill_successors()?;
        }
        Ok(())
    }

    fn kill_successors(&self) -> Outcome<()> {
        let start = Instant::now();
        loop {
            let left = processes_with(&self.control);
            if left.is_empty() {
                return Ok(());
            }
            for pid in left {
                if let Some(pid) = Pid::from_raw(pid as i32) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            if start.elapsed() > hang() {
                return Err(Failure::new("hang", "a killed ringdisk does not end"));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn ask_to_end(&self) {
        if let Some(pid) = Pid::from_raw(self.pid as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Waits until the process has ended. Its exit status is known only if it is a child.
    pub fn ended(&mut self) -> Outcome<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() && !(self.upgraded && is_there(self.pid)) {
                return Ok(status.filter(|_| !self.upgraded));
            }
            if start.elapsed() > hang() {
                let what = format!("ringdisk does not end, {}", busy(self.pid));
                return Err(Failure::new("hang", what));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the process has ended already.
    pub fn has_ended(&mut self) -> bool {
        !self.upgraded && matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Records that `ringdisk upgrade` has been started: from now on, another process may serve.
    pub fn may_be_upgraded(&mut self) {
        self.upgraded = true;
    }

    /// Records that another process has taken over.
    pub fn was_upgraded(&mut self, reply: &str) -> Outcome<()> {
        let reply: Value = serde_json::from_str(reply)
            .map_err(|e| Failure::new("upgrade", format!("{e} in {reply:?}")))?;
        let pid = reply["pid"].as_u64();
        self.pid = pid.ok_or_else(|| Failure::new("upgrade", reply.to_string()))? as u32;
        // The old process has ended, or is about to.
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn is_there(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(')')
        .next()
        .and_then(|s| s.trim_start().chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// A description of what a hanging process is doing.
fn busy(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let states = threads
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|thread| {
            let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
            let name = fs::read_to_string(thread.path().join("comm")).ok()?;
            let state = stat.rsplit(')').next()?.trim_start().chars().next()?;
            Some(format!("{} {state}", name.trim()))
        });
    let states: Vec<_> = states.collect();
    format!("threads: {}", states.join(", "))
}

/// The processes that serve, and have a path in their command line. A client that makes a backup goes on when ringdisk is killed.
fn processes_with(path: &Path) -> Vec<u32> {
    let path = path.as_os_str().as_encoded_bytes();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let serves = line.split(|&byte| byte == 0).nth(1) == Some(b"serve");
        serves && is_there(pid) && line.windows(path.len()).any(|w| w == path)
    })
    .collect()
}

/// Runs a tool to its end. Returns its exit status and its output.
pub fn run(command: &mut Command, directory: &Path) -> Outcome<(Option<i32>, String)> {
    let out = directory.join("said");
    let said = File::create(&out)?;
    let mut child = command
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(said.try_clone()?)
        .stderr(said)
        .spawn()?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > hang() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Failure::new("hang", format!("{command:?} does not end")));
        }
        thread::sleep(Duration::from_millis(1));
    };
    let said = String::from_utf8_lossy(&fs::read(&out)?).into_owned();
    Ok((status.code(), said))
}
