//! What Proxmox VE has on its host: configurations, locks, storage.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use advisor::served::Request;
use advisor::text::Source;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::client::CommandLineError;

/// Limit of a configuration's size: far more than any has.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// How long to wait for Proxmox' lock of a VM's configuration: a backup holds it for minutes.
const LOCK: Duration = Duration::from_secs(600);

/// Proxmox has no command that activates volumes. What it prints on each line is a volume's path.
const STORAGE: &str = r#"
use strict; use warnings;
use PVE::Storage;
my $what = shift @ARGV;
my $cfg = PVE::Storage::config();
PVE::Storage::activate_volumes($cfg, [@ARGV]) if $what eq 'activate';
PVE::Storage::deactivate_volumes($cfg, [@ARGV]) if $what eq 'deactivate';
for my $volume (@ARGV) {
    my $path = PVE::Storage::path($cfg, $volume);
    print "$path\n";
}
"#;

/// Where Proxmox has its files.
#[derive(clap::Args)]
pub struct Host {
    /// Proxmox' configuration
    #[arg(long, value_name = "DIR", hide = true, default_value = "/etc/pve")]
    pve: PathBuf,
    /// Proxmox' process ids
    #[arg(
        long,
        value_name = "DIR",
        hide = true,
        default_value = "/run/qemu-server"
    )]
    run: PathBuf,
    /// Proxmox' locks
    #[arg(
        long,
        value_name = "DIR",
        hide = true,
        default_value = "/run/lock/qemu-server"
    )]
    locks: PathBuf,
    #[clap(skip)]
    storages: std::sync::OnceLock<Option<Source>>,
}

impl Host {
    /// The same places, for another process.
    pub fn arguments(&self) -> Vec<OsString> {
        let places = [
            ("--pve", &self.pve),
            ("--run", &self.run),
            ("--locks", &self.locks),
        ];
        places
            .into_iter()
            .flat_map(|(name, path)| [name.into(), path.into()])
            .collect()
    }

    pub fn config_path(&self, vm: &str) -> PathBuf {
        self.pve.join("qemu-server").join(format!("{vm}.conf"))
    }

    /// The configuration of a VM; `None` if this host does not have the VM.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn config(&self, vm: &str) -> Result<Option<String>, CommandLineError> {
        check_number(vm)?;
        read(self.config_path(vm))
    }

    /// The configuration of a VM, which is with the source until the end of a migration; `None` if no host has it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn config_anywhere(&self, vm: &str) -> Result<Option<String>, CommandLineError> {
        if let Some(here) = self.config(vm)? {
            return Ok(Some(here));
        }
        let nodes = fs::read_dir(self.pve.join("nodes"));
        for node in nodes.into_iter().flatten().flatten() {
            let path = node.path().join("qemu-server").join(format!("{vm}.conf"));
            if let Some(there) = read(path)? {
                return Ok(Some(there));
            }
        }
        Ok(None)
    }

    /// The firewall's rules of a VM; `None` if it has none.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn firewall(&self, vm: &str) -> Result<Option<String>, CommandLineError> {
        check_number(vm)?;
        read(self.pve.join("firewall").join(format!("{vm}.fw")))
    }

    /// The socket of a VM's guest agent.
    pub fn guest_agent(&self, vm: &str) -> PathBuf {
        self.run.join(format!("{vm}.qga"))
    }

    /// Proxmox' storages.
    pub fn storages(&self) -> Option<&Source> {
        let read = || {
            let path = self.pve.join("storage.cfg");
            let text = read(path.clone()).ok()??;
            Some(Source::new(path.display().to_string(), text))
        };
        self.storages.get_or_init(read).as_ref()
    }

    /// What is asked about a VM.
    pub fn request<'a>(&'a self, vm: &'a str, snippets: Option<&'a str>) -> Request<'a> {
        Request {
            vm,
            drives: &[],
            snippets,
            storages: self.storages(),
        }
    }

    /// Takes Proxmox' lock of a VM's configuration, which it holds while it starts, changes or migrates the VM.
    ///
    /// # Errors
    /// Another one holds it.
    pub fn lock(&self, vm: &str) -> Result<File, CommandLineError> {
        let path = self.locks.join(format!("lock-{vm}.conf"));
        let fail = |e| CommandLineError::Target(path.clone(), e);
        fs::create_dir_all(&self.locks).map_err(fail)?;
        let file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(fail)?;
        let deadline = Instant::now() + LOCK;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(fs::TryLockError::WouldBlock) => {
                    return Err(CommandLineError::Refused(format!(
                        "VM {vm}: Proxmox is busy with it ({}); try again when its task has ended",
                        path.display()
                    )));
                }
                Err(fs::TryLockError::Error(e)) => return Err(fail(e)),
            }
        }
    }

    /// The process of a VM that runs here.
    pub fn qemu(&self, vm: &str) -> Option<i32> {
        let text = fs::read_to_string(self.run.join(format!("{vm}.pid"))).ok()?;
        let pid = text.trim().parse().ok()?;
        PathBuf::from(format!("/proc/{pid}"))
            .exists()
            .then_some(pid)
    }

    /// Waits until a process has ended.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn wait_for_end(&self, pid: i32) -> Result<(), CommandLineError> {
        let fail = |e: rustix::io::Errno| CommandLineError::Here("cannot wait for QEMU", e.into());
        let Some(pid) = Pid::from_raw(pid) else {
            return Ok(());
        };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            Err(e) => return Err(fail(e)),
        };
        loop {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(fail(e)),
            }
        }
    }

    /// Activates volumes, and returns their paths.
    ///
    /// # Errors
    /// Proxmox' message.
    pub fn activate(&self, volumes: &[&str]) -> Result<Vec<String>, CommandLineError> {
        storage("activate", volumes)
    }

    /// # Errors
    /// Proxmox' message.
    pub fn deactivate(&self, volumes: &[&str]) -> Result<(), CommandLineError> {
        storage("deactivate", volumes).map(drop)
    }

    /// # Errors
    /// Proxmox' message.
    pub fn paths(&self, volumes: &[&str]) -> Result<Vec<String>, CommandLineError> {
        storage("path", volumes)
    }
}

/// # Errors
/// It is no number of a VM, which becomes a part of paths.
pub fn check_number(vm: &str) -> Result<(), CommandLineError> {
    match vm.len() <= 9 && !vm.is_empty() && vm.bytes().all(|byte| byte.is_ascii_digit()) {
        true => Ok(()),
        false => Err(CommandLineError::Refused(format!(
            "'{vm}' is no number of a VM; as in 100"
        ))),
    }
}

fn read(path: PathBuf) -> Result<Option<String>, CommandLineError> {
    let too_long = || io::Error::other(format!("has more than {CONFIG_BYTES_MAX} bytes"));
    let text = fs::metadata(&path).and_then(|metadata| match metadata.len() > CONFIG_BYTES_MAX {
        true => Err(too_long()),
        false => fs::read_to_string(&path),
    });
    match text {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(CommandLineError::Target(path, e)),
    }
}

fn storage(what: &str, volumes: &[&str]) -> Result<Vec<String>, CommandLineError> {
    if volumes.is_empty() {
        return Ok(Vec::new());
    }
    let mut perl = Command::new("perl");
    perl.args(["-e", STORAGE, "--", what])
        .args(volumes)
        .stdin(Stdio::null());
    let output = perl
        .output()
        .map_err(|e| CommandLineError::Here("cannot run perl, in which Proxmox is written", e))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let paths: Vec<String> = text.lines().map(str::to_owned).collect();
    if output.status.success() && paths.len() == volumes.len() {
        return Ok(paths);
    }
    let problem = String::from_utf8_lossy(&output.stderr);
    let problem = problem.trim();
    let problem = if problem.is_empty() {
        "it printed something else than a path for each"
    } else {
        problem
    };
    Err(CommandLineError::Refused(format!(
        "Proxmox cannot {what} {}: {problem}",
        volumes.join(", ")
    )))
}
