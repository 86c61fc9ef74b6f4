//! Operations of QEMU's tools on an image while it is not served.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::config::Serve;
use super::failure::{Failure, Outcome, RUINED, hang};
use super::guest::{Guest, placed};
use super::oracle::{Oracle, SECTOR, digest};
use super::process::run;
use super::steps::{Kind, Request, Tool};
use super::world::World;

impl World {
    pub fn tool(&mut self, tool: &Tool) -> Outcome<()> {
        let snapshots = self.state.snapshots.len() as u64;
        match tool {
            Tool::Check => self.check(),
            Tool::Repair { all } => self.repair(*all),
            Tool::SnapshotCreate => self.create_snapshot(),
            Tool::SnapshotApply(number) if snapshots > 0 => {
                self.apply_snapshot((number % snapshots) as usize)
            }
            Tool::SnapshotDelete(number) if snapshots > 0 => {
                let (name, _) = self.state.snapshots[(number % snapshots) as usize].clone();
                self.opened_by_qemu()?;
                self.qemu_img(&["snapshot", "-d", &name])?;
                self.state.snapshots.retain(|(other, _)| *other != name);
                Ok(())
            }
            Tool::SnapshotApply(_) | Tool::SnapshotDelete(_) => Ok(()),
            Tool::Write(requests) => self.write_with_qemu(requests),
            Tool::CommitInto(requests) => self.commit_into(requests),
            Tool::Crash { requests, after_us } => self.crash_qemu(requests, *after_us),
            Tool::Daemon { requests, kill } => self.serve_with_qemu(requests, *kill),
            Tool::Resize(sectors) => {
                let size = self.state.oracle.size.next_multiple_of(SECTOR as u64) + sectors * 512;
                let words = size.to_string();
                if self.tool_may_refuse(&["resize", "-q", "-f", self.files.format()], &[&words])? {
                    self.grown(size);
                }
                Ok(())
            }
            Tool::Amend(option) if self.files.qcow2 => self
                .tool_may_refuse(&["amend", "-f", "qcow2", "-o", option], &[])
                .map(drop),
            Tool::BitmapAdd if self.files.qcow2 => self
                .tool_may_refuse(&["bitmap", "--add", "-f", "qcow2"], &["b1"])
                .map(drop),
            Tool::BitmapRemove if self.files.qcow2 => self
                .tool_may_refuse(&["bitmap", "--remove", "-f", "qcow2"], &["b1"])
                .map(drop),
            Tool::Amend(_) | Tool::BitmapAdd | Tool::BitmapRemove => Ok(()),
            Tool::Convert => self.convert(),
            Tool::Rebase => self.rebase(),
            Tool::Commit => self.commit(),
            Tool::Compare => self.compare(),
        }
    }

    /// Records that QEMU opens the image for writing: QEMU ignores the journal, and clears the bit that announces it.
    fn opened_by_qemu(&mut self) -> Outcome<()> {
        if self.state.killed {
            self.counts.add("images written by QEMU after a kill", 1);
        }
        self.state = self.as_flushed();
        if self.files.is_dirty() {
            return self.repair(true);
        }
        Ok(())
    }

    fn qemu_img(&self, arguments: &[&str]) -> Outcome<String> {
        let mut command = Command::new("qemu-img");
        self.files
            .expect(command.args(arguments).arg(&self.files.image))
    }

    /// Runs a tool that refuses some images; returns whether it succeeded. The image's path comes between the
    /// arguments.
    pub fn tool_may_refuse(&mut self, before: &[&str], after: &[&str]) -> Outcome<bool> {
        self.opened_by_qemu()?;
        let mut command = Command::new("qemu-img");
        command.args(before).arg(&self.files.image).args(after);
        let (code, said) = run(&mut command, &self.files.directory)?;
        if code.is_none() {
            return Err(Failure::new("tool", format!("{command:?}: {said}")));
        }
        // A tool that refuses an image may have allocated clusters before.
        self.state.leaks |= code != Some(0);
        Ok(code == Some(0))
    }

    pub fn check(&mut self) -> Outcome<()> {
        if !self.files.qcow2 {
            return Ok(());
        }
        let mut command = Command::new("qemu-img");
        command
            .args(["check", "-f", "qcow2"])
            .arg(&self.files.image);
        let (code, said) = run(&mut command, &self.files.directory)?;
        match code {
            Some(0) => Ok(()),
            Some(3) if self.state.leaks => self.has_no_leaks_on_exact_device(&said),
            // QEMU was killed before it wrote the lazy refcounts.
            _ if self.files.is_dirty() => Ok(()),
            _ => {
                let what = format!("qemu-img check: {code:?}, {}", in_short(&said));
                Err(Failure::new("check", what))
            }
        }
    }

    /// Once a device with the space of the disk is filled, only what the device has more can be leaked.
    fn has_no_leaks_on_exact_device(&self, said: &str) -> Outcome<()> {
        if !self.is_filled || !self.files.is_on_exact_device() {
            return Ok(());
        }
        let leaked = said
            .lines()
            .find_map(|line| line.split_once(" leaked clusters were found"));
        let leaked: u64 = leaked.and_then(|(n, _)| n.trim().parse().ok()).unwrap_or(0);
        if leaked > 8 {
            let what = format!("{leaked} clusters are leaked on a device that was filled");
            return Err(Failure::new("leak", what));
        }
        Ok(())
    }

    pub fn repair(&mut self, all: bool) -> Outcome<()> {
        if !self.files.qcow2 {
            return Ok(());
        }
        if self.files.is_dirty() && !all {
            return Ok(());
        }
        if self.files.has_bitmaps() && !self.state.snapshots.is_empty() {
            // If an image has both, QEMU's repair removes the snapshots; ringdisk is not involved.
            return match all {
                true => Err(Failure::new(RUINED, "bitmaps and snapshots")),
                false => Ok(()),
            };
        }
        let dirty = self.files.is_dirty();
        self.state = self.as_flushed();
        let mode = if all { "all" } else { "leaks" };
        let mut command = Command::new("qemu-img");
        command
            .args(["check", "-f", "qcow2", "-r", mode])
            .arg(&self.files.image);
        let (code, said) = run(&mut command, &self.files.directory)?;
        let errors = said.lines().any(|line| line.starts_with("ERROR"));
        if code != Some(0) || errors && !dirty {
            let what = format!("qemu-img check -r {mode}: {code:?}, {}", in_short(&said));
            return Err(Failure::new("check", what));
        }
        self.state.leaks = false;
        self.look_for_snapshots("check -r")
    }

    /// Checks that all snapshots exist.
    fn look_for_snapshots(&self, after: &str) -> Outcome<()> {
        if self.state.snapshots.is_empty() {
            return Ok(());
        }
        let list = self.qemu_img(&["snapshot", "-l"])?;
        for (name, _) in &self.state.snapshots {
            let there = list
                .lines()
                .any(|l| l.split_whitespace().nth(1) == Some(name));
            if !there {
                let what = format!("after {after}, the snapshot {name} is gone: {list:?}");
                return Err(Failure::new("snapshot", what));
            }
        }
        Ok(())
    }

    /// Checks that the image, as QEMU reads it, contains what the oracle allows.
    pub fn compare(&mut self) -> Outcome<()> {
        let converted = self.files.converted(None, self.state.oracle.size)?;
        let bytes = converted.windows(&self.state.oracle)?;
        drop(converted);
        let all = 0..bytes.len() / SECTOR;
        let saw = match self.state.killed {
            // Replaying the journal will still change the content.
            true => self.as_flushed().oracle.saw(all, &bytes),
            // The same applies to a copy that was made just before a kill.
            false if self.files.has_journal() => self.state.oracle.clone().saw(all, &bytes),
            false => self.state.oracle.saw(all, &bytes),
        };
        self.counts.add("comparisons", 1);
        saw.map_err(|e| Failure::new("content", format!("qemu-img convert: {e}")))
    }

    pub fn compare_snapshot(&mut self, name: &str, mut oracle: Oracle) -> Outcome<()> {
        let converted = self.files.converted(Some(name), oracle.size)?;
        let bytes = converted.windows(&oracle)?;
        let all = 0..bytes.len() / SECTOR;
        oracle
            .saw(all, &bytes)
            .map_err(|e| Failure::new("snapshot", format!("snapshot {name}: {e}")))
    }

    pub fn create_snapshot(&mut self) -> Outcome<()> {
        let few = self.state.snapshots.len() < 3;
        if !self.files.qcow2 || self.files.data.is_some() || !few {
            return Ok(());
        }
        self.opened_by_qemu()?;
        // The content that the snapshot will keep must be known.
        self.compare()?;
        // QEMU takes back what a snapshot has counted that fails, and not always rightly (seen with refcounts of 2 bits).
        let was_sound = self.check().is_ok();
        self.counts.add("names", 1);
        let name = format!("s{}", self.counts.numbers["names"]);
        let mut command = Command::new("qemu-img");
        command
            .args(["snapshot", "-c", &name])
            .arg(&self.files.image);
        let (code, said) = run(&mut command, &self.files.directory)?;
        if code != Some(0) {
            // For example, 1-bit refcounts cannot count a second user of a cluster.
            self.state.leaks = true;
            let known = ["overflow", "not supported", "Invalid argument", "Numerical"];
            return match known.iter().any(|part| said.contains(part)) {
                true if was_sound => self.check().map_err(|e| Failure::new(RUINED, e.what)),
                true => Ok(()),
                false => Err(Failure::new(
                    "tool",
                    format!("snapshot -c: {code:?}, {said}"),
                )),
            };
        }
        self.state
            .snapshots
            .push((name, self.state.oracle.copied(true)));
        self.look_for_snapshots("snapshot -c")
    }

    fn apply_snapshot(&mut self, number: usize) -> Outcome<()> {
        let (name, oracle) = self.state.snapshots[number].clone();
        self.opened_by_qemu()?;
        if oracle.size != self.state.oracle.size {
            return Ok(());
        }
        // QEMU refuses an image with a bitmap that is being recorded.
        if self.tool_may_refuse(&["snapshot", "-a", &name], &[])? {
            self.state.oracle = oracle;
        }
        self.look_for_snapshots("snapshot -a")
    }

    /// The commands for qemu-io, and the range and digests of each. Flushes and reads are omitted.
    fn commands(&self, requests: &[Request]) -> Vec<(String, std::ops::Range<usize>, Vec<u64>)> {
        let oracle = &self.state.oracle;
        let mut all = Vec::new();
        for request in requests {
            let (sector, range) = placed(oracle, request);
            let (at, len) = (sector * 512, range.len() * SECTOR);
            let pattern = 1 + request.mark % 255;
            let (words, byte) = match request.kind {
                Kind::Read | Kind::Flush | Kind::Discard => continue,
                Kind::Write => (format!("write -q -P {pattern} {at} {len}"), pattern as u8),
                Kind::WriteNothing => (format!("write -q -P 0 {at} {len}"), 0),
                Kind::WriteZeroes { unmap: true } => (format!("write -q -z -u {at} {len}"), 0),
                Kind::WriteZeroes { unmap: false } => (format!("write -q -z {at} {len}"), 0),
            };
            // qemu-io does not support the partial sector at the end.
            if at + len as u64 > oracle.size {
                continue;
            }
            let digests = vec![digest(&[byte; SECTOR]); range.len()];
            all.push((words, range, digests));
        }
        all
    }

    pub fn write_with_qemu(&mut self, requests: &[Request]) -> Outcome<()> {
        self.opened_by_qemu()?;
        let commands = self.commands(requests);
        let mut command = Command::new("qemu-io");
        command.args(["-t", "writeback", "-d", "unmap", "-f", self.files.format()]);
        for (words, range, digests) in commands {
            command.args(["-c", &words]);
            self.state.oracle.set(range, &digests);
        }
        self.files.expect(command.arg(&self.files.image))?;
        self.look_for_snapshots("qemu-io")
    }

    fn commit_into(&mut self, requests: &[Request]) -> Outcome<()> {
        self.opened_by_qemu()?;
        let above = self.files.directory.join("above");
        let mut create = Command::new("qemu-img");
        create.args([
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            self.files.format(),
            "-b",
        ]);
        self.files
            .expect(create.arg(&self.files.image).arg(&above))?;
        let mut write = Command::new("qemu-io");
        write.args(["-t", "writeback", "-d", "unmap", "-f", "qcow2"]);
        for (words, range, digests) in self.commands(requests) {
            write.args(["-c", &words]);
            self.state.oracle.set(range, &digests);
        }
        self.files.expect(write.arg(&above))?;
        let mut commit = Command::new("qemu-img");
        commit.args(["commit", "-q", "-f", "qcow2"]);
        self.files.expect(commit.arg(&above))?;
        fs::remove_file(above)?;
        self.counts.add("commits into it", 1);
        self.look_for_snapshots("commit")
    }

    fn crash_qemu(&mut self, requests: &[Request], after_us: u64) -> Outcome<()> {
        // The process to be killed may be killed before it opens the image, whose journal would then remain. Open the
        // image once before.
        self.write_with_qemu(&[])?;
        self.compare()?;
        let mut input = String::new();
        for (words, _, _) in self.commands(requests) {
            input += &words;
            input.push('\n');
        }
        let mut child = Command::new("qemu-io")
            .args(["-t", "writeback", "-d", "unmap", "-f", self.files.format()])
            .arg(&self.files.image)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mut stdin = child.stdin.take().expect("it is piped");
        // The process may have ended.
        let _ = stdin.write_all(input.as_bytes());
        thread::sleep(Duration::from_micros(after_us));
        child.kill()?;
        child.wait()?;
        self.take_up_after_a_crash()
    }

    /// Handles a QEMU that was killed while it wrote. QEMU reuses freed clusters before the tables in the file say so,
    /// so any content is possible now. If the image is inconsistent, the case ends, and ringdisk is not at fault.
    fn take_up_after_a_crash(&mut self) -> Outcome<()> {
        self.counts.add("crashes of QEMU", 1);
        self.state.leaks = true;
        self.state.volatile = true;
        self.state.tables_lost = true;
        self.files.wait_until_free()?;
        match self.check() {
            Err(e) if e.kind == "check" => return Err(Failure::new(RUINED, e.what)),
            result => result?,
        }
        self.look_for_snapshots("a crash of QEMU")?;
        self.adopt()
    }

    /// Lets qemu-storage-daemon serve the image to the same guest.
    fn serve_with_qemu(&mut self, requests: &[Request], kill: Option<u32>) -> Outcome<()> {
        self.opened_by_qemu()?;
        self.compare()?;
        let directory = self.files.directory.clone();
        let (socket, pidfile) = (directory.join("qsd.sock"), directory.join("qsd.pid"));
        let _ = fs::remove_file(&pidfile);
        let file = format!("driver=file,filename={}", self.files.image.display());
        let node = match self.files.qcow2 {
            true => format!("driver=qcow2,discard=unmap,node-name=disk,file.{file}")
                .replace(",filename", ",file.filename"),
            false => format!("{file},discard=unmap,node-name=disk"),
        };
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=2",
            socket.display()
        );
        let mut child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &node, "--export", &export, "--pidfile"])
            .arg(&pidfile)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(directory.join("said"))?)
            .spawn()?;
        let start = Instant::now();
        while !pidfile.exists() {
            if child.try_wait()?.is_some() || start.elapsed() > hang() {
                let _ = child.kill();
                let said = fs::read_to_string(directory.join("said"))?;
                return Err(Failure::new("tool", format!("qemu-storage-daemon: {said}")));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let mut serve = Serve::draw(&mut crate::random::Random(requests.len() as u64));
        (serve.queues, serve.packed, serve.without_flush) = (2, false, false);
        let oracle = &mut self.state.oracle;
        oracle.write_through = false;
        // QEMU frees a cluster even while a write to it is in flight; the write then hits the cluster's next user. And
        // it forgets zeroes of a subcluster if a write to the same cluster is in flight that copies it.
        let qcow2 = self.files.qcow2;
        let refused = |r: &&Request| match r.kind {
            Kind::Discard | Kind::WriteZeroes { unmap: true } => true,
            Kind::WriteZeroes { unmap: false } => qcow2,
            _ => false,
        };
        let requests: Vec<Request> = requests.iter().filter(|r| !refused(r)).copied().collect();
        let guest = Guest::connect(&socket, &serve)
            .and_then(|mut guest| guest.run(oracle, &requests, kill).map(|()| guest));
        let guest = match guest {
            Ok(guest) => guest,
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(e.told(|what| format!("in qemu-storage-daemon: {what}")));
            }
        };
        self.counts.add("operations in QEMU", guest.completed);
        match kill {
            Some(_) => {
                child.kill()?;
                child.wait()?;
                guest.killed(&mut self.state.oracle);
                self.state.oracle.killed();
                self.take_up_after_a_crash()
            }
            None => {
                drop(guest);
                let pid = rustix::process::Pid::from_child(&child);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                let start = Instant::now();
                let status = loop {
                    if let Some(status) = child.try_wait()? {
                        break status;
                    }
                    if start.elapsed() > hang() {
                        let _ = child.kill();
                        return Err(Failure::new("tool", "qemu-storage-daemon does not end"));
                    }
                    thread::sleep(Duration::from_millis(1));
                };
                if !status.success() {
                    let said = fs::read_to_string(directory.join("said"))?;
                    let what = format!("qemu-storage-daemon: {status}, {said}");
                    return Err(Failure::new(RUINED, what));
                }
                self.state.oracle.killed();
                self.state.oracle.durable();
                self.look_for_snapshots("qemu-storage-daemon")
            }
        }
    }

    fn convert(&mut self) -> Outcome<()> {
        if self.files.storage.is_some() {
            return Ok(());
        }
        self.state = self.as_flushed();
        self.compare()?;
        let other = self.files.fresh();
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", self.files.format(), "-O", "qcow2"]);
        self.files
            .expect(command.arg(&self.files.image).arg(&other))?;
        self.files.backing = None;
        self.moved_to(other, true);
        self.state.volatile = true;
        Ok(())
    }

    /// Makes the image independent of its backing files.
    fn rebase(&mut self) -> Outcome<()> {
        if self.files.backing.is_none() || !self.files.qcow2 || !self.state.snapshots.is_empty() {
            return Ok(());
        }
        if self.tool_may_refuse(&["rebase", "-f", "qcow2", "-b", ""], &[])? {
            self.files.backing = None;
            // Copies of the image still use the backing file, which still exists.
        }
        Ok(())
    }

    /// Commits the image to its backing file, which empties the image.
    fn commit(&mut self) -> Outcome<()> {
        if self.files.backing.is_none() || !self.files.qcow2 || !self.state.snapshots.is_empty() {
            return Ok(());
        }
        // Copies of the image no longer match the backing file.
        self.backups.clear();
        self.compare_quietly()?;
        self.tool_may_refuse(&["commit", "-q", "-f", "qcow2"], &[])?;
        Ok(())
    }

    fn compare_quietly(&mut self) -> Outcome<()> {
        self.opened_by_qemu()?;
        self.compare()
    }
}

/// The output of `qemu-img check`, without the many leaks that one error causes.
fn in_short(said: &str) -> String {
    let (leaks, rest): (Vec<_>, Vec<_>) = said.lines().partition(|l| l.starts_with("Leaked"));
    let first: Vec<_> = rest.into_iter().take(4).collect();
    format!("{}; {} leaks", first.join("; "), leaks.len())
}
