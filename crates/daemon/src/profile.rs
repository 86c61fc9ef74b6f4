//! `ringdisk profile`: what limits a disk that is in use.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::lab::guest::Stop;
use ::lab::host::now_ms;
use ::lab::own_folder::OwnFolder;
use ::lab::profile::flame::Recording;
use ::lab::profile::interval::Interval;
use ::lab::profile::roles::{Program, Role};
use ::lab::profile::sampler::{Process, Readings, Sampler, Targets};
use ::lab::profile::{Profile, procfs, qemu, report};
use harness::qmp::Qmp;
use harness::text::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};
use thiserror::Error;

use crate::client::{CommandLineError, Connection, answer};

/// How often the ends of processes and disks are looked for.
const POLL: Duration = Duration::from_millis(50);

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk profile vm1                          a disk that ringdisk serves, for 10 seconds
  ringdisk profile vm1 --seconds 30 --flame vm1.svg
  ringdisk profile --pid $(pidof qemu-system-x86_64) --qmp /run/vm1.qmp
                                                a VM whose disks QEMU opens itself

The first line names the stage that limits, with the evidence. The table has one line for each thread:

ON CPU    running
RUNNABLE  ready to run, but waiting for a CPU
ASLEEP    waiting for anything else; IN D is the part that could not be interrupted, usually waiting for a device
VOL/S     context switches per second because the thread went to sleep
INVOL/S   context switches per second because the kernel ran another thread instead

The VM is not disturbed. Latencies are measured during this command and for two minutes afterwards. Some figures of
processes of other users need root. QEMU names its threads only with '-name NAME,debug-threads=on', which libvirt sets;
--qmp finds their roles otherwise.")]
pub struct Args {
    /// Name of a disk that ringdisk serves
    #[arg(required_unless_present = "pid")]
    disk: Option<String>,
    /// Process id of a QEMU or qemu-storage-daemon, instead of a disk of ringdisk
    #[arg(long, conflicts_with = "disk")]
    pid: Option<u32>,
    /// QEMU's monitor socket (QMP), for the roles of its threads and for the times of requests of its own disks
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// Length of the measurement in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Also record stacks with perf, and write a flame graph
    #[arg(long, value_name = "FILE.svg")]
    flame: Option<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, Error)]
pub enum ProfileError {
    #[error(transparent)]
    Command(#[from] CommandLineError),
    #[error("there is no process {0}; 'pgrep -a qemu' lists those of QEMU")]
    NoProcess(u32),
    #[error(
        "cannot read the threads of process {0}, which belongs to another user: run this command as root"
    )]
    Hidden(u32),
    #[error("--qmp {path}: {problem}; a monitor takes one client at a time, and libvirt's has libvirt: start QEMU with \
        a second '-qmp unix:PATH,server=on,wait=off', or omit --qmp", path = .path.display())]
    Qmp { path: PathBuf, problem: String },
    #[error("{path} is not the monitor of process {pid}{}: name the socket of a '-qmp' or '-mon' in its command line \
        ('ps -ww {pid}' shows it), or omit --qmp", listener.map_or_else(String::new, |its| format!(" (process {its} opened the socket)")),
        path = .path.display())]
    OtherMonitor {
        path: PathBuf,
        pid: u32,
        listener: Option<u32>,
    },
    #[error("{0}")]
    Flame(String),
    #[error("{}: {problem}", path.display())]
    Write { path: PathBuf, problem: String },
    #[error(
        "nothing was measured: the processes ended, the disk was detached, or the command was interrupted at once"
    )]
    Nothing,
}

impl ProfileError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Command(error) => error.exit_code(),
            _ => 1,
        }
    }
}

pub fn run(args: &Args) -> Result<(), ProfileError> {
    let mut subject = match (&args.disk, args.pid) {
        (_, Some(pid)) => Subject::of_process(pid)?,
        (Some(disk), None) => Subject::of_disk(disk, &args.connection)?,
        (None, None) => return Err(ProfileError::NoProcess(0)),
    };
    let mut monitor = match &args.qmp {
        Some(path) => Some(Monitor::open(path, &mut subject)?),
        None => None,
    };
    subject.check()?;
    let stop = Stop::default();
    // The first Ctrl-C ends the measurement, the second the process.
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let _ = signal_hook::flag::register_conditional_shutdown(signal, 130, stop.flag());
        let _ = signal_hook::flag::register(signal, stop.flag());
    }
    // perf's files; removed at the end.
    let folder = match &args.flame {
        Some(_) => Some(
            OwnFolder::new(&std::env::temp_dir())
                .map_err(|e| ProfileError::Flame(format!("{e:#}")))?,
        ),
        None => None,
    };
    let recording = match &folder {
        Some(folder) => Some(subject.record(args.seconds, folder.path())?),
        None => None,
    };
    let title = printable(&subject.title);
    eprintln!("measuring {title} for {} s", args.seconds);
    let mut interval = subject.measure(Duration::from_secs(args.seconds), &stop)?;
    interval.measurement.without_vm = subject.without_vm;
    interval
        .measurement
        .uncounted
        .clone_from(&subject.uncounted);
    if let Some(monitor) = &mut monitor {
        monitor.add_to(&mut interval, &mut subject.notes);
    }
    if let (Some(file), Some(recording)) = (&args.flame, recording) {
        let drawing = recording.finish(&format!("{}: on CPU", subject.title));
        let drawing = drawing.map_err(|e| ProfileError::Flame(format!("{e:#}")))?;
        fs::write(file, drawing).map_err(|e| ProfileError::Write {
            path: file.clone(),
            problem: e.to_string(),
        })?;
        subject
            .notes
            .push(format!("flame graph: {}", file.display()));
    }
    let profile = Profile::of(interval.measurement.clone());
    let json = json!({
        "name": subject.title,
        "profile": profile,
        "threads": interval.threads,
        "stalled": interval.stalled,
        "notes": subject.notes,
    });
    let text = report::text(&subject.title, &interval, &profile.verdict, &subject.notes);
    args.connection.say(&json, &text);
    Ok(())
}

/// What is measured.
struct Subject {
    title: String,
    targets: Targets,
    /// Whether no VM, and no other front-end, is connected to the disk.
    without_vm: bool,
    /// Files below which the kernel counts no requests, with their file systems.
    uncounted: Vec<String>,
    notes: Vec<String>,
}

impl Subject {
    /// A disk of ringdisk: the threads of ringdisk, and those of the front-end.
    fn of_disk(name: &str, connection: &Connection) -> Result<Self, ProfileError> {
        let reply = answer(&mut connection.open()?).map_err(CommandLineError::from)?;
        let disks = || reply["disks"].as_array().into_iter().flatten();
        let disk = disks().find(|disk| disk["name"] == name).ok_or_else(|| {
            let names: Vec<_> = disks().filter_map(|disk| disk["name"].as_str()).collect();
            let names = match names[..] {
                [] => "none".into(),
                _ => names.join(", "),
            };
            CommandLineError::NoDisk(name.into(), names)
        })?;
        let mut notes = Vec::new();
        let mut processes = Vec::new();
        let mut without_vm = false;
        let pid = |value: &Value| value.as_u64().and_then(|pid| u32::try_from(pid).ok());
        match pid(&reply["pid"]) {
            Some(pid) => processes.push(Process {
                program: Program::Ringdisk,
                ..Process::new(pid)
            }),
            None => notes.push(
                "this ringdisk does not tell its process id, so its threads are missing; 'ringdisk upgrade' to a newer one"
                    .to_owned(),
            ),
        }
        match pid(&disk["front-end-pid"]) {
            Some(pid) => {
                let process = Process::new(pid);
                // The lab's client, a test, or another program that drives the disk itself.
                let program = match process.program {
                    Program::Other | Program::Ringdisk => Program::Client,
                    program => program,
                };
                processes.push(Process { program, ..process });
            }
            None if disk["connected"] == true => notes.push(
                "the front-end is in another PID namespace, so its threads are missing; run this command in that of the host"
                    .to_owned(),
            ),
            None => without_vm = true,
        }
        let file = PathBuf::from(disk["file"].as_str().unwrap_or_default());
        let device = procfs::device_of(&file);
        let uncounted: Vec<String> = procfs::uncounted(&file).into_iter().collect();
        note_uncounted(&uncounted, &mut notes);
        Ok(Self {
            title: name.to_owned(),
            targets: Targets {
                processes,
                control: Some(connection.path()),
                disks: vec![name.to_owned()],
                devices: device.into_iter().collect(),
                ..Targets::default()
            },
            without_vm,
            uncounted,
            notes,
        })
    }

    /// A process with its disks.
    fn of_process(pid: u32) -> Result<Self, ProfileError> {
        if !Path::new(&format!("/proc/{pid}")).exists() {
            return Err(ProfileError::NoProcess(pid));
        }
        let process = Process::new(pid);
        let mut notes = Vec::new();
        let disks = match procfs::open_disks(pid) {
            Ok(disks) => disks,
            Err(e) => {
                notes.push(format!(
                    "the disks of process {pid} cannot be listed ({e}); run this command as root"
                ));
                Vec::new()
            }
        };
        let mut devices: Vec<_> = disks
            .iter()
            .filter_map(|disk| procfs::device_of(disk))
            .collect();
        devices.sort();
        devices.dedup();
        let uncounted = disks.iter().filter_map(|disk| procfs::uncounted(disk));
        let uncounted: Vec<String> = uncounted.collect();
        note_uncounted(&uncounted, &mut notes);
        Ok(Self {
            title: format!("process {pid}"),
            targets: Targets {
                processes: vec![process],
                devices,
                ..Targets::default()
            },
            without_vm: false,
            uncounted,
            notes,
        })
    }

    /// Whether the threads can be read, and have names.
    fn check(&mut self) -> Result<(), ProfileError> {
        for process in &self.targets.processes {
            let pid = process.pid;
            let threads = threads_of(pid)?;
            if process.program == Program::Other {
                self.notes.push(format!(
                    "process {pid} is neither QEMU nor ringdisk, so the roles of its threads are unknown"
                ));
            }
            if process.program != Program::Qemu || !process.roles.is_empty() {
                continue;
            }
            let stats = threads
                .into_iter()
                .filter_map(|tid| procfs::Stat::of(pid, tid));
            let has_vcpu = stats.into_iter().any(|stat| {
                ::lab::profile::roles::role(Program::Qemu, &stat.name, false) == Role::Vcpu
            });
            if !has_vcpu {
                self.notes.push(format!(
                    "the threads of QEMU (process {pid}) have no names, so its vCPUs are not known; start it with '-name \
                     NAME,debug-threads=on', or use --qmp"
                ));
            }
        }
        Ok(())
    }

    fn measure(&mut self, time: Duration, stop: &Stop) -> Result<Interval, ProfileError> {
        let watched = self.targets.processes.iter().filter_map(|process| {
            let pid = Pid::from_raw(i32::try_from(process.pid).ok()?)?;
            let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            Some((process.pid, descriptor))
        });
        let watched: Vec<(u32, OwnedFd)> = watched.collect();
        let sampler = Sampler::start(self.targets.clone());
        let begun = Instant::now();
        let mut ended = None;
        while begun.elapsed() < time && !stop.is_wanted() && ended.is_none() {
            let rest = time.saturating_sub(begun.elapsed());
            ended = wait_for_end(&watched, rest.min(POLL));
            if ended.is_none() && sampler.disks_ended() {
                // A process that ends closes its sockets first.
                ended = wait_for_end(&watched, POLL);
                break;
            }
        }
        let ended_s = begun.elapsed().as_secs_f64();
        self.interval(&sampler.finish(), ended, ended_s)
    }

    /// What was measured until the processes, or the counters of the disk, ended.
    fn interval(
        &mut self,
        readings: &Readings,
        ended: Option<u32>,
        ended_s: f64,
    ) -> Result<Interval, ProfileError> {
        self.notes.extend(readings.problems.iter().cloned());
        let devices = self.targets.devices.iter();
        let devices: Vec<String> = devices.map(|(_, name)| name.clone()).collect();
        let disks = &self.targets.disks;
        let (what, interval) = match (ended, readings.end_of_disks(disks)) {
            (Some(pid), _) => (
                format!("process {pid} ended"),
                readings.until_end_of(pid, &devices),
            ),
            (None, Some(end)) => {
                let what = if end.is_detached {
                    format!("{} was detached", disks.join(", "))
                } else {
                    "ringdisk ceased to report requests".to_owned()
                };
                (what, readings.until_end_of_disks(disks, &devices))
            }
            (None, None) => (String::new(), readings.all(&devices)),
        };
        if !what.is_empty() {
            self.notes.push(format!(
                "{what} after {ended_s:.1} s, and the figures are of the time before"
            ));
        }
        if readings.threads_left_out > 0 {
            self.notes.push(format!(
                "{} threads are left out",
                readings.threads_left_out
            ));
        }
        interval.ok_or(ProfileError::Nothing)
    }

    fn record(&self, seconds: u64, folder: &Path) -> Result<Recording, ProfileError> {
        let pids: Vec<u32> = self.targets.processes.iter().map(|its| its.pid).collect();
        let recording = Recording::start(&pids, seconds as f64, folder);
        recording.map_err(|e| ProfileError::Flame(format!("{e:#}")))
    }
}

fn note_uncounted(files: &[String], notes: &mut Vec<String>) {
    let note = |file: &String| format!("the kernel does not count requests below {file}");
    notes.extend(files.iter().map(note));
}

/// Waits until a process ends, and returns its id. One that nobody has waited for yet has ended too.
fn wait_for_end(watched: &[(u32, OwnedFd)], time: Duration) -> Option<u32> {
    let mut descriptors: Vec<PollFd<'_>> = watched
        .iter()
        .map(|(_, descriptor)| PollFd::new(descriptor, PollFlags::IN))
        .collect();
    // An interruption is seen by the caller.
    let _ = poll(&mut descriptors, Timespec::try_from(time).ok().as_ref());
    let ended = descriptors.iter().position(|its| !its.revents().is_empty());
    ended.map(|at| watched[at].0)
}

fn threads_of(pid: u32) -> Result<Vec<i32>, ProfileError> {
    harness::cpu::threads(pid).map_err(|_| {
        if Path::new(&format!("/proc/{pid}")).exists() {
            ProfileError::Hidden(pid)
        } else {
            ProfileError::NoProcess(pid)
        }
    })
}

/// The threads of a process: by their ids in its own PID namespace, those in this one.
fn thread_ids(pid: u32) -> Result<BTreeMap<i32, i32>, ProfileError> {
    let ids = threads_of(pid)?.into_iter().filter_map(|tid| {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
        Some((procfs::innermost_id(&status).unwrap_or(tid), tid))
    });
    Ok(ids.collect())
}

/// QEMU's monitor.
struct Monitor {
    qmp: Qmp,
    begun_ms: u64,
    before: ::lab::profile::disk::DiskCounters,
}

impl Monitor {
    /// Opens the monitor of one of the processes, and adds the roles of its threads. Its program is QEMU, whatever the name
    /// of the executable is: QEMU may be started by a loader or a wrapper.
    fn open(path: &Path, subject: &mut Subject) -> Result<Self, ProfileError> {
        let problem = |problem| ProfileError::Qmp {
            path: path.to_owned(),
            problem,
        };
        let mut qmp = Qmp::connect(path).map_err(|e| problem(format!("{e:#}")))?;
        let roles = qemu::thread_roles(&mut qmp).map_err(|e| problem(format!("{e:#}")))?;
        let listener = qmp.listener();
        let mut is_known = subject.targets.processes.is_empty();
        for process in &mut subject.targets.processes {
            let ids = thread_ids(process.pid)?;
            if let Some(roles) = qemu::roles_in(&roles, &ids, listener == Some(process.pid)) {
                (process.program, process.roles) = (Program::Qemu, roles);
                is_known = true;
            }
        }
        if !is_known {
            let last = subject.targets.processes.last();
            return Err(ProfileError::OtherMonitor {
                path: path.to_owned(),
                pid: last.map_or(0, |process| process.pid),
                listener,
            });
        }
        let begun_ms = now_ms();
        let before = qemu::disks(&mut qmp, begun_ms * 1_000_000);
        let before = before.map_err(|e| problem(format!("{e:#}")))?;
        Ok(Self {
            qmp,
            begun_ms,
            before,
        })
    }

    /// Adds the requests of QEMU's own disks. Those of ringdisk are known better.
    fn add_to(&mut self, interval: &mut Interval, notes: &mut Vec<String>) {
        let now = now_ms().max(self.begun_ms + 1);
        if interval.measurement.requests.is_none()
            && let Ok(after) = qemu::disks(&mut self.qmp, now * 1_000_000)
        {
            interval.measurement.requests = after.since(&self.before);
            interval.measurement.limit = after.limit(Some(&self.before));
            let gone = self.before.disks.keys();
            let gone = gone.filter(|name| !after.disks.contains_key(*name));
            notes.extend(gone.map(|name| {
                format!("QEMU's disk '{name}' was removed meanwhile, so its requests are unknown")
            }));
        }
    }
}
