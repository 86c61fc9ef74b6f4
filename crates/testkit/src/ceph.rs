//! A real Ceph cluster on the loopback interface: a monitor and OSDs as ordinary processes in a folder of their own,
//! with cephx and newly made keys.
//!
//! The cluster needs neither systemd nor root. It has a manager only where a test needs to know how much is stored. It
//! starts quickly because the monitor does not wait to batch changes (`paxos propose interval`), and stays small
//! because its OSDs have small caches.

mod daemon;
mod release;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use daemon::{Daemon, Starter};
use rustix::process::{Pid, Signal, kill_process};

pub use release::{PRODUCT, Release, UNPACKED, WITH_LIBRARIES};

/// The programs that a cluster needs, and the Debian packages that contain them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("ceph-mon", "ceph-mon"),
    ("ceph-osd", "ceph-osd"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
    ("rados", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("monmaptool", "ceph-base"),
];

/// The pool that every cluster has from the start.
pub const POOL: &str = "rbd";

/// How long any operation of a cluster may take; a busy machine needs a tenth of it.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The kind of cluster to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The Ceph release.
    pub release: Release,
    /// The number of OSDs.
    pub osds: usize,
    /// The number of copies of each object, at most the number of OSDs.
    pub replicas: usize,
    /// Keep objects in the memory of the OSDs. This is faster, and an OSD that ends loses its objects.
    pub in_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            release: Release::default(),
            osds: 3,
            replicas: 3,
            in_memory: false,
        }
    }
}

/// A running cluster. Dropping it kills its processes and removes its files, unless [`keep`](Self::keep) was called.
pub struct Ceph {
    folder: PathBuf,
    mon: Daemon,
    mgr: Daemon,
    osds: Vec<Daemon>,
    release: Release,
    starter: Starter,
    kept: bool,
}

impl Ceph {
    /// Starts a cluster in `folder`, which must not exist.
    ///
    /// # Errors
    /// Ceph is not installed, or does not start; the error contains its output.
    pub fn start(folder: &Path, options: Options) -> Result<Self> {
        Self::start_with(folder, options, true)
    }

    /// As [`start`](Self::start), with processes that may outlive this one: for [`keep`](Self::keep).
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_to_keep(folder: &Path, options: Options) -> Result<Self> {
        Self::start_with(folder, options, false)
    }

    fn start_with(folder: &Path, options: Options, bound: bool) -> Result<Self> {
        fs::create_dir_all(folder.parent().unwrap_or(folder))?;
        fs::create_dir(folder)
            .with_context(|| format!("making {}; is a cluster left there?", folder.display()))?;
        let folder = folder.canonicalize()?;
        let mut ceph = Self {
            mon: Daemon::new("mon", "a"),
            mgr: Daemon::new("mgr", "a"),
            osds: (0..options.osds)
                .map(|i| Daemon::new("osd", &i.to_string()))
                .collect(),
            folder,
            release: options.release.clone(),
            starter: Starter::new(bound),
            kept: false,
        };
        let started = ceph.bring_up(&options);
        started.with_context(|| {
            // The error has the log of a daemon that has ended.
            let logs = match ceph.check_daemons() {
                Ok(()) => ceph.ends_of_logs(),
                Err(_) => String::new(),
            };
            format!("starting Ceph in {}\n{logs}", ceph.folder.display())
        })?;
        Ok(ceph)
    }

    fn bring_up(&mut self, options: &Options) -> Result<()> {
        let fsid = uuid()?;
        // If another process takes this port before the monitor does, the monitor fails to start and logs the reason.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = format!("[v2:127.0.0.1:{port}/0]");
        fs::write(
            self.conf(),
            configuration(&self.folder, &fsid, &address, options),
        )?;
        let all = "allow *";
        let admin = [("mon", all), ("osd", all), ("mgr", all)];
        self.make_key("mon.", "mon.keyring", &[("mon", all)])?;
        self.make_key("client.admin", "keyring", &admin)?;
        let vm = [("mon", "profile rbd"), ("osd", "profile rbd")];
        self.make_key("client.vm", "vm.keyring", &vm)?;
        self.take_key("keyring")?;
        self.take_key("vm.keyring")?;
        for i in 0..options.osds {
            fs::create_dir(self.folder.join(format!("osd.{i}")))?;
            let (name, keyring) = (format!("osd.{i}"), format!("osd.{i}/keyring"));
            let profile = [("mon", "allow profile osd"), ("osd", all)];
            self.make_key(&name, &keyring, &profile)?;
            self.take_key(&keyring)?;
        }
        let map = self.folder.join("monmap");
        self.run(
            Command::new(self.release.program("monmaptool"))
                .args(["--create", "--addv", "a", &address, "--fsid", &fsid])
                .arg(&map),
        )?;
        self.run(
            self.program("ceph-mon")
                .args(["--mkfs", "-i", "a", "--monmap"])
                .arg(&map)
                .arg("--keyring")
                .arg(self.folder.join("mon.keyring")),
        )?;
        self.mon.start(&self.folder, &self.release, &self.starter)?;
        for i in 0..options.osds {
            let id = uuid()?;
            let number = self.ceph(&["osd", "new", &id])?;
            ensure!(
                number.trim() == i.to_string(),
                "`ceph osd new` made {number}"
            );
            self.run(self.program("ceph-osd").args([
                "--mkfs",
                "-i",
                number.trim(),
                "--osd-uuid",
                &id,
            ]))?;
            self.osds[i].start(&self.folder, &self.release, &self.starter)?;
        }
        self.wait_for_osds()?;
        self.ceph(&["osd", "pool", "create", POOL, "16"])?;
        self.rbd(&["pool", "init", POOL]).map(drop)
    }

    /// The cluster's Ceph release.
    pub fn release(&self) -> &Release {
        &self.release
    }

    /// The path of the cluster's configuration file.
    pub fn conf(&self) -> PathBuf {
        self.folder.join("ceph.conf")
    }

    /// The keyring of the user `vm`, who has the capabilities that a hypervisor needs for images.
    pub fn vm_keyring(&self) -> PathBuf {
        self.folder.join("vm.keyring")
    }

    /// The options with which `ringdisk serve` opens an image as the user `vm`, each preceded by a comma.
    pub fn options(&self) -> String {
        format!(
            ",conf={},id=vm,keyring={}",
            self.conf().display(),
            self.vm_keyring().display()
        )
    }

    /// Runs `ceph ARGUMENTS` as the administrator, and returns its output.
    ///
    /// # Errors
    /// The command fails; the error contains its output.
    pub fn ceph(&self, arguments: &[&str]) -> Result<String> {
        let timeout = format!("--connect-timeout={}", TIMEOUT.as_secs());
        self.run(self.program("ceph").arg(timeout).args(arguments))
    }

    /// Runs `rbd ARGUMENTS` as the administrator, and returns its output.
    ///
    /// # Errors
    /// The command fails; the error contains its output.
    pub fn rbd(&self, arguments: &[&str]) -> Result<String> {
        self.run(self.program("rbd").args(arguments))
    }

    /// Runs `rados ARGUMENTS` as the administrator, and returns its output.
    ///
    /// # Errors
    /// The command fails; the error contains its output.
    pub fn rados(&self, arguments: &[&str]) -> Result<String> {
        self.run(self.program("rados").args(arguments))
    }

    /// Creates an image of `mib` MiB in the pool.
    ///
    /// # Errors
    /// The image cannot be created.
    pub fn create(&self, image: &str, mib: u64) -> Result<()> {
        let (size, image) = (format!("{mib}M"), format!("{POOL}/{image}"));
        self.rbd(&["create", "--size", &size, &image]).map(drop)
    }

    /// Kills an OSD (SIGKILL).
    ///
    /// # Errors
    /// The OSD does not run.
    pub fn kill_osd(&mut self, number: usize) -> Result<()> {
        self.osds[number].kill()
    }

    /// Starts an OSD that was killed.
    ///
    /// # Errors
    /// The OSD cannot be started.
    pub fn start_osd(&mut self, number: usize) -> Result<()> {
        self.osds[number].start(&self.folder, &self.release, &self.starter)
    }

    /// Kills the monitor (SIGKILL), and starts it again.
    ///
    /// # Errors
    /// The monitor did not run, or cannot be started.
    pub fn restart_mon(&mut self) -> Result<()> {
        self.mon.kill()?;
        self.mon.start(&self.folder, &self.release, &self.starter)
    }

    /// Waits until the cluster has marked a killed OSD as down, so that the others serve without it.
    ///
    /// # Errors
    /// The OSD is not marked as down in time.
    pub fn wait_for_down(&self, number: usize) -> Result<()> {
        self.wait(&format!("osd.{number} down"), || {
            let tree = self.ceph(&["osd", "dump", "--format=json"])?;
            let tree: serde_json::Value = serde_json::from_str(&tree)?;
            Ok(tree["osds"][number]["up"] == 0)
        })
    }

    /// Waits until all OSDs are up.
    ///
    /// # Errors
    /// They are not up in time.
    pub fn wait_for_osds(&self) -> Result<()> {
        self.wait("all OSDs up", || {
            let stat = self.ceph(&["osd", "stat", "--format=json"])?;
            let stat: serde_json::Value = serde_json::from_str(&stat)?;
            Ok(stat["num_up_osds"].as_u64() == Some(self.osds.len() as u64))
        })
    }

    /// Makes the pool full or no longer full, through the OSDs' full ratios. Something must be stored already.
    ///
    /// # Errors
    /// The pool does not change its state in time.
    pub fn fill_up(&self, full: bool) -> Result<()> {
        let ratios = match full {
            true => [
                ("nearfull", "0.000001"),
                ("backfillfull", "0.000002"),
                ("full", "0.000003"),
            ],
            false => [
                ("full", "0.95"),
                ("backfillfull", "0.9"),
                ("nearfull", "0.85"),
            ],
        };
        for (name, ratio) in ratios {
            self.ceph(&["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        self.wait_for_full(full)
    }

    /// Sets the pool's quota (0 removes it), and waits until the pool is full, or no longer full, because of it. The
    /// manager counts what is stored; it is started if it does not run.
    ///
    /// # Errors
    /// The manager does not start, or the pool does not change its state in time.
    pub fn limit(&mut self, bytes: u64, full: bool) -> Result<()> {
        if self.mgr.child.is_none() {
            fs::create_dir_all(self.folder.join("mgr.a"))?;
            let (all, file) = ("allow *", self.folder.join("mgr.a/keyring"));
            let caps = [("mon", "allow profile mgr"), ("osd", all)];
            self.make_key("mgr.a", "mgr.a/keyring", &caps)?;
            self.ceph(&["auth", "add", "mgr.a", "-i", &file.display().to_string()])?;
            self.mgr.start(&self.folder, &self.release, &self.starter)?;
        }
        let bytes = bytes.to_string();
        self.ceph(&["osd", "pool", "set-quota", POOL, "max_bytes", &bytes])?;
        self.wait_for_full(full)
    }

    fn wait_for_full(&self, full: bool) -> Result<()> {
        self.wait("the pool full, or not", || {
            let dump = self.ceph(&["osd", "dump", "--format=json"])?;
            let dump: serde_json::Value = serde_json::from_str(&dump)?;
            let flags = dump["pools"][0]["flags_names"].as_str().unwrap_or_default();
            Ok(flags.split(',').any(|flag| flag == "full") == full)
        })
    }

    fn wait(&self, what: &str, done: impl Fn() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while !done()? {
            self.check_daemons()?;
            ensure!(start.elapsed() < TIMEOUT, "waited in vain for: {what}");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// The process ids of the running OSDs.
    pub fn osd_pids(&self) -> Vec<u32> {
        let children = self.osds.iter().filter_map(|osd| osd.child.as_ref());
        children.map(Child::id).collect()
    }

    /// The number of client operations in all OSDs, from one of their counters, such as `op_w`.
    ///
    /// # Errors
    /// An OSD does not answer.
    pub fn operations(&self, counter: &str) -> Result<u64> {
        let mut all = 0;
        for osd in 0..self.osds.len() {
            // `ceph tell` needs a manager.
            let socket = self.folder.join(format!("osd.{osd}.asok"));
            let socket = socket.display().to_string();
            let told = self.ceph(&["--admin-daemon", &socket, "perf", "dump"])?;
            let told: serde_json::Value = serde_json::from_str(&told)?;
            let count = told["osd"][counter].as_u64();
            all += count.with_context(|| format!("osd.{osd} does not count {counter}"))?;
        }
        Ok(all)
    }

    /// Leaves the cluster running; [`shut_down`] ends it.
    ///
    /// # Errors
    /// The process ids cannot be written to a file.
    pub fn keep(mut self) -> Result<()> {
        let pids: Vec<String> = [&self.mon, &self.mgr]
            .into_iter()
            .chain(&self.osds)
            .filter_map(|daemon| Some(daemon.child.as_ref()?.id().to_string()))
            .collect();
        fs::write(self.folder.join(PIDS), pids.join("\n"))?;
        self.kept = true;
        Ok(())
    }

    /// The daemons that should run: a killed one is not among them until it is started again.
    fn daemons(&self) -> impl Iterator<Item = &Daemon> {
        [&self.mon, &self.mgr].into_iter().chain(&self.osds)
    }

    /// Fails if a daemon has ended although no test killed it: nothing that needs it would ever be done.
    fn check_daemons(&self) -> Result<()> {
        self.daemons()
            .try_for_each(|daemon| daemon.check(&self.folder))
    }

    /// The last lines that each daemon printed and logged.
    fn ends_of_logs(&self) -> String {
        self.daemons()
            .map(|daemon| daemon.end_of_logs(&self.folder))
            .collect()
    }

    /// Runs a command to its end, and returns its output.
    ///
    /// # Errors
    /// The command fails, takes too long, or a daemon ends meanwhile.
    fn run(&self, command: &mut Command) -> Result<String> {
        run(command, TIMEOUT, || self.check_daemons())
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.release.program(name));
        command.arg("--conf").arg(self.conf());
        command
    }

    fn make_key(&self, name: &str, file: &str, caps: &[(&str, &str)]) -> Result<()> {
        let mut make = Command::new(self.release.program("ceph-authtool"));
        make.arg("--create-keyring").arg(self.folder.join(file));
        make.args(["--gen-key", "--name", name]);
        for (of, cap) in caps {
            make.args(["--cap", of, cap]);
        }
        self.run(&mut make).map(drop)
    }

    /// Adds a key to the keyring that the monitor starts with.
    fn take_key(&self, file: &str) -> Result<()> {
        self.run(
            Command::new(self.release.program("ceph-authtool"))
                .arg(self.folder.join("mon.keyring"))
                .arg("--import-keyring")
                .arg(self.folder.join(file)),
        )
        .map(drop)
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for daemon in self.osds.iter_mut().chain([&mut self.mgr, &mut self.mon]) {
            let _ = daemon.kill();
        }
        match thread::panicking() {
            true => eprintln!("Ceph's logs are left in {}", self.folder.display()),
            false => drop(fs::remove_dir_all(&self.folder)),
        }
    }
}

/// The file with the process ids of a kept cluster.
const PIDS: &str = "pids";

/// Ends a kept cluster, and removes its files.
///
/// # Errors
/// The folder contains no cluster, or it cannot be ended.
pub fn shut_down(folder: &Path) -> Result<()> {
    let pids = fs::read_to_string(folder.join(PIDS))
        .with_context(|| format!("there is no cluster in {}", folder.display()))?;
    let folder = folder.canonicalize()?;
    let mut left = Vec::new();
    for pid in pids.lines().filter_map(|line| line.parse::<i32>().ok()) {
        // The process id may have been reused.
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if !String::from_utf8_lossy(&command).contains(&*folder.to_string_lossy()) {
            continue;
        }
        if let Some(pid) = Pid::from_raw(pid) {
            kill_process(pid, Signal::KILL).with_context(|| format!("killing {pid:?}"))?;
            left.push(pid);
        }
    }
    let start = Instant::now();
    while left
        .iter()
        .any(|&pid| rustix::process::test_kill_process(pid).is_ok())
        && start.elapsed() < TIMEOUT
    {
        thread::sleep(Duration::from_millis(20));
    }
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))
}

/// Ceph's configuration file. Sizes are in bytes, times in seconds.
fn configuration(folder: &Path, fsid: &str, mon: &str, options: &Options) -> String {
    let folder = folder.display();
    let (replicas, places) = (options.replicas, options.release.places());
    let store = match options.in_memory {
        true => {
            "osd objectstore = memstore\nmemstore device bytes = 8589934592\nmemstore page set = true"
        }
        false => {
            "bluestore block size = 8589934592\nbluestore cache autotune = false\n\
             bluestore cache size = 33554432"
        }
    };
    format!(
        "[global]
fsid = {fsid}
mon initial members = a
mon host = {mon}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
run dir = {folder}
log file = {folder}/$name.log
admin socket =
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
paxos propose interval = 0.05
paxos min wait = 0.01
mon tick interval = 1
mon mgr digest period = 1
mgr tick period = 1
mgr stats period = 1
mon data avail warn = 1
mon data avail crit = 1
mon osd min down reporters = 1
mon osd adjust heartbeat grace = false
mon allow pool delete = true
osd heartbeat interval = 1
osd heartbeat grace = 4
osd pool default size = {replicas}
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush initial weight = 1
osd memory target = 939524096
osd min pg log entries = 100
osd max pg log entries = 100
# Those who die without a word are forgotten sooner than after 30 s.
osd client watch timeout = 5
{store}
{places}[client]
log file =
[client.admin]
keyring = {folder}/keyring
[client.vm]
keyring = {folder}/vm.keyring
[mon]
mon data = {folder}/mon.$id
[mgr]
mgr data = {folder}/mgr.$id
keyring = {folder}/mgr.$id/keyring
[osd]
osd data = {folder}/osd.$id
keyring = {folder}/osd.$id/keyring
admin socket = {folder}/osd.$id.asok
"
    )
}

fn uuid() -> Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid").context("making a UUID")?;
    Ok(text.trim().to_owned())
}

/// Runs a command to its end. Every 100 ms, `check` decides whether waiting is still of use.
fn run(command: &mut Command, limit: Duration, check: impl Fn() -> Result<()>) -> Result<String> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {command:?}"))?;
    let pid = Pid::from_child(&child);
    let (ended, end) = mpsc::channel();
    thread::spawn(move || ended.send(child.wait_with_output()));
    let start = Instant::now();
    let output = loop {
        match end.recv_timeout(Duration::from_millis(100)) {
            Ok(output) => break output?,
            Err(_) => {
                let useful = check().and_then(|()| {
                    ensure!(start.elapsed() < limit, "it takes more than {limit:?}");
                    Ok(())
                });
                if let Err(error) = useful {
                    // It may have just ended.
                    let _ = kill_process(pid, Signal::KILL);
                    return Err(error.context(format!("{command:?} was killed")));
                }
            }
        }
    };
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_start_shows_the_log_of_the_daemon_that_ended() {
        let folder = tempfile::tempdir().expect("making a folder");
        let starter = Starter::new(true);
        let mut daemon = Daemon::new("mon", "a");
        let mut command = starter.program(Path::new("sh"));
        command.args(["-c", "echo 'no space is left'; exit 3"]);
        daemon
            .start_command(folder.path(), &starter, command)
            .expect("starting a shell");
        let told = run(
            Command::new("sleep").arg("1000"),
            Duration::from_secs(1000),
            || daemon.check(folder.path()),
        );
        let told = format!("{:#}", told.expect_err("the daemon has ended"));
        for part in ["sleep", "mon.a", "exit status: 3", "no space is left"] {
            assert!(told.contains(part), "{told}");
        }
        // A daemon that a test killed is no failure.
        daemon.kill().expect("killing the daemon");
        daemon.check(folder.path()).expect("it was killed");
    }

    #[test]
    fn command_that_does_not_end_is_killed() {
        let mut sleep = Command::new("sleep");
        let told = run(sleep.arg("1000"), Duration::ZERO, || Ok(()));
        let told = format!("{:#}", told.expect_err("it sleeps"));
        assert!(
            told.contains("sleep") && told.contains("more than"),
            "{told}"
        );
    }
}
