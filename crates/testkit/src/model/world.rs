//! Executes the steps of a case in order, and checks the results.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use super::config::Serve;
use super::failure::{Failure, Outcome, RUINED};
use super::files::{Files, windows};
use super::guest::Guest;
use super::image_state::{Backup, BackupClient, ImageState};
use super::neighbour::Neighbour;
use super::oracle::{Oracle, SECTOR};
use super::process::{Log, Process};
use super::steps::{Case, Kind, Moment, Request, Step};

/// Statistics of a case.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub numbers: BTreeMap<&'static str, u64>,
    pub configurations: BTreeSet<String>,
}

impl Counts {
    pub fn add(&mut self, what: &'static str, count: u64) {
        *self.numbers.entry(what).or_default() += count;
    }

    pub fn merge(&mut self, other: Self) {
        for (what, count) in other.numbers {
            self.add(what, count);
        }
        self.configurations.extend(other.configurations);
    }
}

pub struct World {
    pub files: Files,
    pub state: ImageState,
    pub backups: Vec<Backup>,
    pub counts: Counts,
    pub binary: PathBuf,
    pub serve: Option<Serve>,
    pub process: Option<Process>,
    pub guest: Option<Guest>,
    neighbour: Option<Neighbour>,
    pub client: BackupClient,
    /// Backups are made, and whether ringdisk has a state directory.
    backup_options: Option<bool>,
    /// The image has had no space since ringdisk was started.
    pub full: bool,
    /// The image is on a device with the space of the disk, and was filled at last.
    pub is_filled: bool,
    marks: u64,
}

/// Runs a case in an empty directory.
pub fn run_case(binary: &Path, directory: &Path, case: &Case) -> (Counts, Outcome<()>) {
    let made = Files::make(directory, &case.image).and_then(|files| {
        let options = case.image.neighbour.as_ref();
        let neighbour = options.map(|options| Neighbour::make(directory, options));
        Ok((files, neighbour.transpose()?))
    });
    let (files, neighbour) = match made {
        Ok(made) => made,
        Err(e) => return (Counts::default(), Err(e)),
    };
    let mut world = World {
        files,
        state: ImageState {
            oracle: Oracle::new(case.image.size, &case.image.windows),
            snapshots: Vec::new(),
            killed: false,
            leaks: false,
            volatile: false,
            tables_lost: false,
        },
        backups: Vec::new(),
        counts: Counts::default(),
        binary: binary.into(),
        serve: None,
        process: None,
        guest: None,
        neighbour,
        client: BackupClient::default(),
        backup_options: case.image.backups.then_some(case.image.state),
        full: false,
        is_filled: false,
        marks: 1 << 32,
    };
    let kind = case.image.kind();
    world.counts.configurations.insert(kind);
    world.counts.add("cases", 1);
    let outcome = match world.run(case) {
        Err(e) if e.kind == RUINED => {
            world.counts.add("images that QEMU ruined", 1);
            Ok(())
        }
        outcome => outcome,
    };
    world.guests_ended();
    (world.counts, outcome)
}

impl World {
    fn run(&mut self, case: &Case) -> Outcome<()> {
        self.adopt()?;
        for number in 0..case.image.snapshots {
            self.create_snapshot()?;
            let mark = (1 << 40) + u64::from(number);
            let request = Request {
                kind: Kind::Write,
                queue: 0,
                mark,
                at: mark.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                align: 1,
                sectors: 64,
            };
            self.write_with_qemu(&[request])?;
        }
        if case.image.bitmaps {
            self.tool_may_refuse(&["bitmap", "--add", "-g", "4k", "-f", "qcow2"], &["b0"])?;
        }
        for (number, step) in case.steps.iter().enumerate() {
            let result = self.step(step);
            result.map_err(|e| {
                let mut words = format!("{step:?}");
                words.truncate(words.floor_char_boundary(300));
                let e = e.told(|what| format!("step {number}, {words}: {what}"));
                Failure {
                    step: Some(number),
                    ..e
                }
            })?;
        }
        self.finish()
            .map_err(|e| e.told(|what| format!("at the end: {what}")))
    }

    /// Accepts the current content of the image as correct.
    pub fn adopt(&mut self) -> Outcome<()> {
        let converted = self.files.converted(None, self.state.oracle.size)?;
        let bytes = converted.windows(&self.state.oracle)?;
        let digests: Vec<u64> = bytes.chunks(SECTOR).map(super::oracle::digest).collect();
        self.state.oracle.set(0..digests.len(), &digests);
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Outcome<()> {
        let served = self.guest.is_some();
        let starts = matches!(step, Step::Start(_) | Step::StartKilled { .. });
        if !served && !starts {
            self.files.wait_until_free()?;
        }
        if !served {
            self.note_foreign(step);
        }
        match step {
            Step::Start(serve) if !served => self.start(serve),
            Step::StartKilled { serve, when } if !served => self.start_killed(serve, *when),
            Step::FillJournal { leave_kib } => {
                Ok(self.files.fill_journals(*leave_kib).map(drop)?)
            }
            Step::FreeJournal => {
                self.files.free_journals();
                Ok(())
            }
            Step::FillImage { leave_kib } => {
                if self.files.fill_images(*leave_kib)? {
                    self.full = true;
                    self.leave();
                }
                Ok(())
            }
            Step::FreeImage => {
                self.files.free_images();
                Ok(())
            }
            Step::Backup if !served => self.back_up(),
            Step::Restore { number, in_place } if !served => self.restore(*number, *in_place),
            Step::Rename if !served => self.rename(),
            Step::HardLink if !served => self.link(),
            Step::CopyOver if !served => self.copy_over(),
            Step::Tool(tool) if !served => {
                self.files.free_images();
                self.counts.add("QEMU runs", 1);
                self.tool(tool)
            }
            _ if served => self.step_served(step),
            _ => Ok(()),
        }
    }

    fn step_served(&mut self, step: &Step) -> Outcome<()> {
        match step {
            Step::Requests { list, until } => {
                if let Some(neighbour) = &mut self.neighbour {
                    neighbour.run(list)?;
                }
                let guest = self.guest.as_mut().expect("it is served");
                guest.run(&mut self.state.oracle, list, *until)
            }
            Step::Verify => self.verify(),
            Step::Flush => self.flush(),
            Step::WriteCache { on } => self.switch_write_cache(*on),
            Step::CopyChanges { names_checkpoint } => self.copy_changes(*names_checkpoint),
            Step::CopyChangesKilled { after_us } => self.copy_changes_killed(*after_us),
            Step::OtherName => self.other_name(),
            Step::Resize(sectors) => self.resize(*sectors),
            Step::Snapshot { options, drain } => self.snapshot(options, *drain),
            Step::Replace { qcow2 } => self.replace(*qcow2),
            Step::Reconnect => self.reconnect(),
            Step::Upgrade => self.upgrade(),
            Step::CopyServed { flush } => self.copy_served(*flush),
            Step::Kill { after_us } => {
                thread::sleep(Duration::from_micros(*after_us));
                self.kill()
            }
            Step::KillAndReconnect { l2_cache } => self.kill_and_reconnect(*l2_cache),
            Step::Terminate => self.terminate(),
            Step::TerminateKilled { when } => self.terminate_killed(*when),
            Step::UpgradeKilled { when } => self.upgrade_killed(*when),
            Step::PowerCut { seed } => self.cut_power(*seed),
            _ => Ok(()),
        }
    }

    fn socket(&self) -> PathBuf {
        self.files.directory.join("disk.sock")
    }

    pub(super) fn state_directory(&self) -> PathBuf {
        self.files.directory.join("state")
    }

    pub fn has_backups(&self) -> bool {
        self.backup_options.is_some()
    }

    pub fn control(&self) -> PathBuf {
        self.files.directory.join("control.qmp")
    }

    fn command(&self, serve: &Serve) -> Command {
        let mut disk = format!(
            "file={},name=disk,format={},socket={},queues={},queue-size=64,cache={},aio={},discard={},\
             detect-zeroes={},werror={}",
            self.files.image.display(),
            self.files.format(),
            self.socket().display(),
            serve.queues,
            serve.cache,
            serve.aio,
            serve.discard,
            serve.detect_zeroes,
            serve.werror,
        );
        if let Some(size) = serve.l2_cache.filter(|_| self.files.qcow2) {
            disk += &format!(",l2-cache-size={size}");
        }
        if let Some(data) = &self.files.data {
            disk += &format!(",data-file={}", data.display());
        }
        // An image with a data file, in itself or in its backing files, cannot be shared with another host.
        if serve.lock == "running" && !self.files.has_data_file {
            disk += ",lock=running";
        }
        let mut command = Command::new(&self.binary);
        command.args(["serve", "--json"]).arg(disk);
        if let Some(neighbour) = &self.neighbour {
            command.arg(neighbour.disk(serve));
        }
        command.arg(format!("--iothreads={}", serve.iothreads));
        command.arg(format!("--control={}", self.control().display()));
        command.arg(format!(
            "--allow-backing={}",
            self.files.directory.display()
        ));
        command.arg(format!("--allow-dir={}", self.files.directory.display()));
        if let Some(has_state) = self.backup_options {
            let nbd = self.files.directory.join("nbd.sock");
            command.arg("--nbd").arg(nbd);
            if has_state {
                command.arg("--state").arg(self.state_directory());
            }
        }
        command.env("RUNTIME_DIRECTORY", &self.files.runtime);
        command
    }

    fn spawn(&mut self, serve: &Serve) -> Outcome<Process> {
        let _ = fs::remove_file(self.socket());
        // The image is at the place that the command line names.
        let _ = fs::remove_file(self.state_directory().join("state.json"));
        self.counts.add("starts", 1);
        let configuration = format!(
            "served {} {} {} {} l2={:?} queues={} packed={}",
            serve.cache,
            serve.aio,
            serve.discard,
            serve.detect_zeroes,
            serve.l2_cache,
            serve.queues,
            serve.packed
        );
        self.counts.configurations.insert(configuration);
        let command = self.command(serve);
        Ok(Process::spawn(
            command,
            &self.control(),
            &self.files.directory,
        )?)
    }

    /// Starts ringdisk, and waits until it serves. By then, it has replayed what a killed process left.
    fn served(&mut self, serve: &Serve) -> Outcome<Process> {
        let mut process = self.spawn(serve)?;
        if process.ready(&self.files.directory)?.is_some() {
            self.state.killed = false;
            return Ok(process);
        }
        if self.full {
            // There may be no space for the replay; with space it must succeed.
            self.files.free_images();
            self.full = false;
            let mut process = self.spawn(serve)?;
            if process.ready(&self.files.directory)?.is_some() {
                self.state.killed = false;
                return Ok(process);
            }
        }
        let what = format!("ringdisk does not start: {}", self.log_end(3));
        Err(Failure::new("start", what))
    }

    /// The last lines of the log.
    pub fn log_end(&self, lines: usize) -> String {
        let log = fs::read_to_string(self.files.directory.join("log")).unwrap_or_default();
        let all: Vec<_> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join(" | ")
    }

    fn prepare(&mut self) -> Outcome<()> {
        // A QEMU that was killed before it wrote its lazy refcounts leaves them to a repair.
        if self.files.is_dirty() {
            self.repair(true)?;
        }
        Ok(())
    }

    fn start(&mut self, serve: &Serve) -> Outcome<()> {
        self.prepare()?;
        let process = self.served(serve)?;
        self.state.oracle.write_through = serve.is_write_through();
        self.guest = Some(Guest::connect(&self.socket(), serve)?);
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.connect(serve)?;
        }
        self.process = Some(process);
        self.serve = Some(serve.clone());
        self.leave();
        Ok(())
    }

    fn leave(&mut self) {
        if let (Some(guest), Some(serve)) = (&mut self.guest, &self.serve) {
            guest.leave.fail = self.full && serve.werror == "report";
            if self.full && serve.werror == "enospc" {
                // Writes wait for space, which becomes available soon.
                self.files.free_images();
                self.full = false;
            }
        }
    }

    fn start_killed(&mut self, serve: &Serve, when: Moment) -> Outcome<()> {
        self.prepare()?;
        let log = self.log();
        let mut process = self.spawn(serve)?;
        log.wait_for(when, || process.has_ended());
        process.kill()?;
        self.counts.add("kills at the start", 1);
        // Even if there was nothing to replay.
        self.mark_killed();
        Ok(())
    }

    fn mark_killed(&mut self) {
        self.state.killed = true;
        self.state.leaks = true;
        self.full = false;
        self.state.oracle.killed();
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.killed = true;
        }
    }

    pub fn kill(&mut self) -> Outcome<()> {
        let mut process = self.process.take().expect("it is served");
        process.kill()?;
        self.counts.add("kills", 1);
        self.abandon();
        self.mark_killed();
        Ok(())
    }

    fn guests_ended(&mut self) {
        if let Some(guest) = self.guest.take() {
            self.counts.add("operations", guest.completed);
            self.counts
                .add("in flight at kills", guest.in_flight() as u64);
        }
        if let Some(neighbour) = &mut self.neighbour {
            let completed = neighbour.ended();
            self.counts.add("operations beside", completed);
        }
    }

    /// Records that the guests are gone, with their requests in flight.
    fn abandon(&mut self) {
        if let Some(guest) = &self.guest {
            guest.killed(&mut self.state.oracle);
        }
        self.guests_ended();
        if self
            .serve
            .take()
            .is_some_and(|serve| serve.cache == "unsafe")
        {
            self.state.volatile = true;
        }
    }

    fn kill_and_reconnect(&mut self, l2_cache: Option<&'static str>) -> Outcome<()> {
        if self.full {
            return Ok(());
        }
        let mut process = self.process.take().expect("it is served");
        process.kill()?;
        self.counts.add("kills", 1);
        let mut serve = self.serve.clone().expect("it is served");
        serve.l2_cache = l2_cache;
        self.state.leaks = true;
        self.process = Some(self.served(&serve)?);
        // The new process does not know the guest's switch of the write cache.
        self.state.oracle.write_through = serve.is_write_through();
        self.reconnect()
    }

    /// Reconnects the guests, with all requests in flight.
    fn reconnect(&mut self) -> Outcome<()> {
        let socket = self.socket();
        let guest = self.guest.as_mut().expect("it is served");
        guest.reconnect(&socket)?;
        self.neighbour.as_mut().map_or(Ok(()), Neighbour::reconnect)
    }

    fn cut_power(&mut self, seed: u64) -> Outcome<()> {
        let volatile = self.serve.as_ref().is_some_and(|s| s.cache == "unsafe");
        self.kill()?;
        if volatile || self.state.volatile || !self.files.cut_power(seed)? {
            return Ok(());
        }
        self.counts.add("power cuts", 1);
        self.state.oracle.power_cut();
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.power_cut();
        }
        self.state.killed = false;
        Ok(())
    }

    pub fn drain(&mut self) -> Outcome<()> {
        let guest = self.guest.as_mut().expect("it is served");
        guest.drain(&mut self.state.oracle)
    }

    /// The part of the log that is written from now on.
    fn log(&self) -> Log {
        Log::new(&self.files.directory)
    }

    fn terminate(&mut self) -> Outcome<()> {
        self.drain()?;
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.drain()?;
        }
        let mut process = self.process.take().expect("it is served");
        process.ask_to_end();
        let status = process.ended()?;
        self.counts.add("orderly ends", 1);
        self.ended(status.filter(|status| !status.success()))
    }

    /// Records an orderly end of ringdisk: all data is in the image, and durable.
    fn ended(&mut self, error: Option<ExitStatus>) -> Outcome<()> {
        let volatile = self.serve.as_ref().is_some_and(|s| s.cache == "unsafe");
        let full = std::mem::take(&mut self.full);
        self.abandon();
        self.files.free_images();
        if let Some(error) = error {
            if full {
                self.mark_killed();
                return Ok(());
            }
            let what = format!("ringdisk ended with {error}: {}", self.log_end(3));
            return Err(Failure::new("end", what));
        }
        self.state.volatile = volatile;
        self.state.oracle.killed();
        if !volatile {
            self.state.oracle.durable();
            if let Some(neighbour) = &mut self.neighbour {
                neighbour.durable();
            }
        }
        if full {
            self.state.leaks = true;
        }
        Ok(())
    }

    fn terminate_killed(&mut self, when: Moment) -> Outcome<()> {
        let mut process = self.process.take().expect("it is served");
        let log = self.log();
        process.ask_to_end();
        log.wait_for(when, || process.has_ended());
        if process.has_ended() {
            // Requests in flight may have been refused, which an orderly end does not do.
            self.abandon();
            self.state.oracle.killed();
            self.full = false;
            self.state.leaks = true;
            return Ok(());
        }
        process.kill()?;
        self.counts.add("kills at the end", 1);
        self.abandon();
        self.mark_killed();
        Ok(())
    }

    fn upgrade_killed(&mut self, when: Moment) -> Outcome<()> {
        let mut command = Command::new(&self.binary);
        command
            .args(["upgrade", "--json", "--control"])
            .arg(self.control());
        command.env("RUNTIME_DIRECTORY", &self.files.runtime);
        let out = fs::File::create(self.files.directory.join("said"))?;
        command.stdout(out.try_clone()?).stderr(out);
        let process = self.process.as_mut().expect("it is served");
        process.may_be_upgraded();
        let log = Log::new(&self.files.directory);
        let mut client = command.spawn()?;
        log.wait_for(when, || matches!(client.try_wait(), Ok(Some(_))));
        process.kill()?;
        let _ = client.kill();
        client.wait()?;
        self.counts.add("kills in upgrades", 1);
        self.process = None;
        self.abandon();
        self.mark_killed();
        Ok(())
    }

    fn verify(&mut self) -> Outcome<()> {
        self.drain()?;
        let list = self.requests_for_all(Kind::Read);
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.verify()?;
        }
        let guest = self.guest.as_mut().expect("it is served");
        guest.run(&mut self.state.oracle, &list, None)
    }

    /// Fills a device that just has the space of the disk: whatever happened to it, there is no other use of that space.
    fn fill(&mut self) -> Outcome<()> {
        let mut random = crate::random::Random(self.state.oracle.now());
        self.start(&Serve::draw(&mut random))?;
        let list = self.requests_for_all(Kind::Write);
        let guest = self.guest.as_mut().expect("it is served");
        guest.run(&mut self.state.oracle, &list, None)?;
        self.terminate()?;
        self.is_filled = true;
        Ok(())
    }

    /// Requests for the whole disk.
    fn requests_for_all(&mut self, kind: Kind) -> Vec<Request> {
        let mut list = Vec::new();
        for (window, queue) in self.state.oracle.windows.iter().zip(0..) {
            let mut at = 0;
            while at < window.sectors {
                let sectors = (window.sectors - at).min(128);
                self.marks += 1;
                list.push(Request {
                    kind,
                    queue: queue + (at / 128) as u16,
                    mark: self.marks,
                    at: (window.first + at) as u64,
                    align: 1,
                    sectors: sectors as u32,
                });
                at += sectors;
            }
        }
        list
    }

    pub fn flush(&mut self) -> Outcome<()> {
        self.marks += 1;
        let flush = Request {
            kind: Kind::Flush,
            queue: self.marks as u16,
            mark: self.marks,
            at: 0,
            align: 1,
            sectors: 0,
        };
        let guest = self.guest.as_mut().expect("it is served");
        guest.run(&mut self.state.oracle, &[flush], None)
    }

    /// Ends ringdisk, and checks everything: through the server, with QEMU, and in the snapshots.
    fn finish(&mut self) -> Outcome<()> {
        self.files.free_images();
        self.files.free_journals();
        if self.guest.is_some() {
            self.terminate()?;
        }
        let neighbour_killed = self.neighbour.as_ref().is_some_and(|n| n.killed);
        if self.state.killed || neighbour_killed {
            let mut random = crate::random::Random(self.state.oracle.now());
            self.start(&Serve::draw(&mut random))?;
            if random.one_in(2) {
                self.verify()?;
            }
            self.terminate()?;
        }
        if self.files.has_just_its_space() {
            self.files.wait_until_free()?;
            self.fill()?;
        }
        self.files.wait_until_free()?;
        self.prepare()?;
        self.check()?;
        self.compare()?;
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.compare()?;
        }
        if let Some(data) = &self.files.data
            && !self.state.tables_lost
            && self.has_raw_data_file()?
        {
            let bytes = windows(data, &self.state.oracle)?;
            let all = 0..bytes.len() / SECTOR;
            let saw = self.state.oracle.saw(all, &bytes);
            saw.map_err(|e| Failure::new("content", format!("the data file: {e}")))?;
        }
        for (name, oracle) in self.state.snapshots.clone() {
            self.compare_snapshot(&name, oracle)?;
        }
        Ok(())
    }

    /// Whether the data file is a raw image of the disk.
    fn has_raw_data_file(&self) -> Outcome<bool> {
        let header = fs::read(&self.files.image)?;
        Ok(header.get(95).is_some_and(|bits| bits & 2 != 0))
    }
}
