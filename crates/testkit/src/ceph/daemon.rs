//! The daemons of a cluster, as child processes.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::Release;

/// The number of lines of a log that an error shows.
const LOG_LINES: usize = 15;

pub(super) struct Daemon {
    name: String,
    pub(super) child: Option<Child>,
}

impl Daemon {
    pub(super) fn new(kind: &str, id: &str) -> Self {
        Self {
            name: format!("{kind}.{id}"),
            child: None,
        }
    }

    pub(super) fn start(
        &mut self,
        folder: &Path,
        release: &Release,
        starter: &Starter,
    ) -> Result<()> {
        let (kind, id) = self.name.split_once('.').context("a name without a dot")?;
        let mut command = starter.program(&release.program(&format!("ceph-{kind}")));
        command
            .arg("--conf")
            .arg(folder.join("ceph.conf"))
            .args(["-i", id, "-f"]);
        self.start_command(folder, starter, command)
    }

    /// Starts the daemon with this command; a file in `folder` takes its output.
    pub(super) fn start_command(
        &mut self,
        folder: &Path,
        starter: &Starter,
        mut command: Command,
    ) -> Result<()> {
        let output = File::create(folder.join(format!("{}.out", self.name)))?;
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = starter.start(command);
        self.child = Some(child.with_context(|| format!("starting {}", self.name))?);
        Ok(())
    }

    /// Fails if the daemon was started and has ended by itself.
    pub(super) fn check(&self, folder: &Path) -> Result<()> {
        let Some(child) = &self.child else {
            return Ok(());
        };
        // The status stays there for `kill`.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(status) = waitid(WaitId::Pid(Pid::from_child(child)), options)? else {
            return Ok(());
        };
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => format!("exit status: {status}"),
            (_, signal) => format!("signal: {}", signal.unwrap_or_default()),
        };
        let logs = self.end_of_logs(folder);
        bail!("{} has ended ({how})\n{logs}", self.name)
    }

    /// The last lines that the daemon printed, and that it logged.
    pub(super) fn end_of_logs(&self, folder: &Path) -> String {
        let mut end = String::new();
        for file in ["out", "log"].map(|ending| format!("{}.{ending}", self.name)) {
            let bytes = fs::read(folder.join(&file)).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                end.push_str(&format!("{file}: {line}\n"));
            }
        }
        end
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else {
            bail!("{} does not run", self.name);
        };
        child.kill()?;
        child.wait()?;
        Ok(())
    }
}

/// Starts processes that must die with this one. The kernel kills them when the thread that started them ends, so a
/// dedicated thread starts them and stays as long as they do.
pub(super) struct Starter {
    bound: bool,
    commands: Sender<(Command, Sender<std::io::Result<Child>>)>,
}

impl Starter {
    /// `bound`: the processes die with this one.
    pub(super) fn new(bound: bool) -> Self {
        let (commands, queue) = mpsc::channel::<(Command, Sender<std::io::Result<Child>>)>();
        thread::spawn(move || {
            for (mut command, reply) in queue {
                let _ = reply.send(command.spawn());
            }
        });
        Self { bound, commands }
    }

    pub(super) fn program(&self, name: &Path) -> Command {
        if !self.bound {
            return Command::new(name);
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(name);
        command
    }

    pub(super) fn start(&self, command: Command) -> Result<Child> {
        let (reply, child) = mpsc::channel();
        self.commands.send((command, reply))?;
        Ok(child.recv()??)
    }
}
