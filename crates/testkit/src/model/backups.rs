//! A client that copies what has changed since its last backup, whatever has happened to the disk meanwhile. The copy must have
//! what the disk has.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::failure::{Failure, Outcome};
use super::files::windows;
use super::image_state::BackupClient;
use super::oracle::SECTOR;
use super::steps::{Step, Tool};
use super::world::World;

const BITMAP: &str = "changes";

impl World {
    fn saved(&self) -> PathBuf {
        self.files.directory.join("saved.raw")
    }

    /// Notes what a step does to a disk that is not served.
    pub fn note_foreign(&mut self, step: &Step) {
        let client = &mut self.client;
        match step {
            Step::Restore { .. } | Step::CopyOver => client.needs_checkpoint = true,
            // It changes the disk back, with its bitmaps.
            Step::Tool(Tool::SnapshotApply(_)) => client.needs_checkpoint = true,
            Step::Tool(Tool::Check | Tool::Compare) => return,
            Step::Tool(_) => {}
            _ => return,
        }
        // The times of a file show only what is written two seconds after a kill, and those of the testkit's file system nothing.
        if !self.files.qcow2 && (self.state.killed || self.files.storage.is_some()) {
            client.needs_full = true;
        }
    }

    /// Makes the next backup, and compares the client's copy with the disk. `names_checkpoint`: the client names its last one.
    pub fn copy_changes(&mut self, names_checkpoint: bool) -> Outcome<()> {
        if !self.has_backups() || self.full {
            return Ok(());
        }
        self.drain()?;
        let saved = self.saved().display().to_string();
        let copy = ["backup", "copy", "disk", "--json", "--to", &saved];
        let since = self.since();
        let by_name = !names_checkpoint && self.client.trusts_the_name();
        let (code, said) = if by_name {
            let bitmap = format!("--bitmap={BITMAP}");
            let begin = ["backup", "begin", "disk", &bitmap, "--json"];
            if self.ringdisk_must(&begin)?.contains("x-ringdisk-full") {
                // It is not replaced by a backup that was begun before.
                fs::remove_file(&saved)?;
            }
            self.ringdisk(&[&copy[..], &["--open"]].concat())?
        } else {
            if since.is_none() {
                // Only a file with the backup of a checkpoint is replaced.
                let _ = fs::remove_file(&saved);
            }
            let mut arguments = [&copy[..], &["--bitmap", BITMAP]].concat();
            arguments.extend(since.as_deref());
            self.ringdisk(&arguments)?
        };
        match code {
            Some(0) => {
                let mode = self.succeeded(&said)?;
                self.counts.add(mode, 1);
                self.compare_copy(mode, &said)
            }
            Some(3) if said.contains("is still open") => self.end_again(&said),
            code => {
                let what = format!("copy: {code:?}, {said}");
                Err(Failure::new("backup", what))
            }
        }
    }

    /// There was no space for the bitmaps when a backup ended.
    fn end_again(&mut self, said: &str) -> Outcome<()> {
        self.files.free_journals();
        let end = ["backup", "end", "--json"];
        match self.ringdisk(&end)? {
            (Some(0), ended) => {
                self.counts.add("backups ended again", 1);
                let ended: Value = serde_json::from_str(&ended)
                    .map_err(|e| Failure::new("backup", format!("{e} in {ended:?}")))?;
                self.has_checkpoint(&ended)?;
                fs::remove_file(self.files.directory.join("saved.raw.updating"))?;
                self.compare_copy("ended again", said)
            }
            // The file system of the journals is too small, or there is no place for bits at all.
            (_, said) if said.contains("has no space for its bits") => {
                self.ringdisk_must(&["backup", "end", "--failed"]).map(drop)
            }
            (code, said) => {
                let what = format!("end: {code:?}, {said}");
                Err(Failure::new("backup", what))
            }
        }
    }

    /// Kills ringdisk while the client makes a backup.
    pub fn copy_changes_killed(&mut self, after_us: u64) -> Outcome<()> {
        if !self.has_backups() || self.full {
            return Ok(());
        }
        self.drain()?;
        let since = self.since();
        if since.is_none() {
            let _ = fs::remove_file(self.saved());
        }
        let mut command = Command::new(&self.binary);
        let bitmap = format!("--bitmap={BITMAP}");
        command.args(["backup", "copy", "disk", "--json", &bitmap, "--to"]);
        command.arg(self.saved()).args(since);
        command.arg("--control").arg(self.control());
        let out = fs::File::create(self.files.directory.join("said"))?;
        command.stdin(Stdio::null());
        command.stdout(out.try_clone()?).stderr(out);
        let mut client = command.spawn()?;
        thread::sleep(Duration::from_micros(after_us));
        self.kill()?;
        let code = client.wait()?.code();
        self.counts.add("kills in backups", 1);
        self.client.needs_checkpoint = true;
        match code {
            Some(0) => {
                let said = fs::read_to_string(self.files.directory.join("said"))?;
                self.succeeded(&said).map(drop)
            }
            // The copy is complete, and has perhaps no checkpoint: this client does not use it.
            Some(3) => {
                let _ = fs::remove_file(self.files.directory.join("saved.raw.partial"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn since(&self) -> Option<String> {
        let client = &self.client;
        let checkpoint = client.checkpoint.as_ref().filter(|_| !client.needs_full);
        checkpoint.map(|checkpoint| format!("--since={checkpoint}"))
    }

    /// Takes the new checkpoint from what the client has printed. Returns the mode of the copy.
    fn succeeded(&mut self, said: &str) -> Outcome<&'static str> {
        let invalid = || Failure::new("backup", format!("it prints {said:?}"));
        let line = said.lines().rfind(|line| line.starts_with("{\"disks"));
        let reply: Value = serde_json::from_str(line.unwrap_or_default()).map_err(|_| invalid())?;
        self.has_checkpoint(&reply)?;
        match reply["disks"][0]["mode"].as_str() {
            Some("full") => Ok("full backups"),
            Some("incremental") => Ok("incremental backups"),
            _ => Err(invalid()),
        }
    }

    fn has_checkpoint(&mut self, reply: &Value) -> Outcome<()> {
        let missing = || Failure::new("backup", format!("no checkpoint in {reply}"));
        let checkpoint = reply["x-ringdisk-checkpoint"].as_str();
        self.client = BackupClient {
            checkpoint: Some(checkpoint.ok_or_else(missing)?.to_owned()),
            ..BackupClient::default()
        };
        Ok(())
    }

    fn compare_copy(&mut self, mode: &str, said: &str) -> Outcome<()> {
        let (saved, oracle) = (self.saved(), &mut self.state.oracle);
        let wrong =
            |what: String| Failure::new("backup", format!("{mode}: {what}; it says {said}"));
        let len = fs::metadata(&saved)?.len();
        if len != oracle.size {
            return Err(wrong(format!("{len} bytes of {}", oracle.size)));
        }
        let bytes = windows(&saved, oracle)?;
        let all = 0..bytes.len() / SECTOR;
        oracle.saw(all, &bytes).map_err(wrong)
    }
}
