//! A guest of the user's, over ssh.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::shell::answer_of;
use super::{Answer, Shell, Stop};

/// A login.
#[derive(Clone, Debug)]
pub struct Ssh {
    /// `USER@HOST`.
    pub target: String,
    /// TCP port.
    pub port: u16,
    /// A private key; `None` leaves the choice to ssh.
    pub key: Option<PathBuf>,
}

impl Shell for Ssh {
    fn run(&mut self, script: &str, limit: Duration, stop: &Stop) -> Result<Answer> {
        let mut command = Command::new("ssh");
        command.args([
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=10",
            "-o",
            "LogLevel=ERROR",
        ]);
        // A guest that the lab boots may have new host keys each time, and is reached over loopback.
        if self.target.ends_with("@127.0.0.1") {
            command.args([
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                "UserKnownHostsFile=/dev/null",
            ]);
        }
        if let Some(key) = &self.key {
            command.arg("-i").arg(key);
        }
        command.args(["-p", &self.port.to_string(), "--", &self.target, "sh", "-s"]);
        let answer = answer_of(command, Some(script), limit, stop)?;
        // 255 is ssh's own failure.
        ensure!(
            answer.status != 255,
            "ssh to {} port {}: {}",
            self.target,
            self.port,
            answer.text().trim()
        );
        Ok(answer)
    }
}
