//! The clusters that all tests share, one per version of Ceph; tests use them one at a time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use testkit::ceph::{Ceph, Options, POOL, Release};
use testkit::server::Server;

/// The version of Ceph that a test runs on.
#[derive(Clone, Copy, Debug)]
pub enum CephVersion {
    /// The distribution's.
    System,
    /// The newer one, unpacked in the cache.
    Newer,
}

/// A cluster of each version.
static CLUSTERS: [Mutex<ClusterState>; 2] = [const { Mutex::new(ClusterState::Stopped) }; 2];

enum ClusterState {
    Stopped,
    Running(Box<Ceph>),
    /// It did not start. It is not tried again: each attempt could take minutes.
    Failed,
}

/// Tests that use a cluster or wait for one.
static USERS: AtomicUsize = AtomicUsize::new(0);

/// The cluster, for one test. The last test that uses any cluster shuts all of them down.
pub struct Cluster {
    version: CephVersion,
    release: Release,
    guard: MutexGuard<'static, ClusterState>,
    pub folder: tempfile::TempDir,
}

impl Cluster {
    /// Prints a message and returns `None` where there is no Ceph.
    pub fn get(version: CephVersion, test: &str) -> Option<Self> {
        let release = match version {
            CephVersion::System => Release::system(),
            CephVersion::Newer => Release::newer(),
        };
        let release = match release {
            Ok(release) => release,
            Err(why) => {
                println!("skipped: {test} on the {version:?} Ceph: {why}");
                return None;
            }
        };
        USERS.fetch_add(1, Ordering::SeqCst);
        let guard = CLUSTERS[version as usize].lock();
        let mut cluster = Self {
            version,
            release,
            guard: guard.unwrap_or_else(|e| e.into_inner()),
            folder: tempfile::tempdir().unwrap(),
        };
        cluster.start_once();
        Some(cluster)
    }

    /// Starts the cluster if it does not run.
    fn start_once(&mut self) {
        match *self.guard {
            ClusterState::Running(_) => {}
            ClusterState::Stopped => {
                // Until it runs.
                *self.guard = ClusterState::Failed;
                let started = start(self.release.clone()).unwrap();
                *self.guard = ClusterState::Running(Box::new(started));
            }
            ClusterState::Failed => panic!(
                "the {:?} Ceph did not start; the first test that needed it shows the cause",
                self.version
            ),
        }
    }

    pub fn ceph(&mut self) -> &mut Ceph {
        match &mut *self.guard {
            ClusterState::Running(ceph) => ceph,
            _ => unreachable!("a test gets only a running cluster"),
        }
    }

    /// Creates an image, and returns its disk argument for `ringdisk serve`, with a socket; `options` are more
    /// `key=value` pairs.
    pub fn image(&mut self, name: &str, mib: u64, options: &str) -> String {
        self.ceph().create(name, mib).unwrap();
        self.disk(name, options)
    }

    /// The same for an existing image.
    pub fn disk(&mut self, name: &str, options: &str) -> String {
        let socket = self.socket(name);
        let access = self.ceph().options();
        let comma = if options.is_empty() { "" } else { "," };
        let socket = socket.display();
        format!("file=rbd:{POOL}/{name},socket={socket}{access}{comma}{options}")
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.sock"))
    }

    pub fn control(&self) -> PathBuf {
        self.folder.path().join("control.qmp")
    }

    /// Serves disks, with a control socket.
    pub fn serve(&self, disks: &[&str]) -> Server {
        let control = self.control().display().to_string();
        self.start(&[&["--control", &control], disks].concat())
    }

    /// Runs `ringdisk serve` with these arguments.
    pub fn start(&self, arguments: &[&str]) -> Server {
        let mut command = self.release.command(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["serve", "--json"]).args(arguments);
        Server::ringdisk_command(command).unwrap()
    }

    /// The release whose libraries ringdisk uses.
    pub fn release(&self) -> &Release {
        &self.release
    }

    /// Serves a disk that must be refused, and returns the error.
    pub fn refused(&mut self, name: &str, options: &str) -> String {
        let disk = self.disk(name, options);
        self.refused_as(&disk)
    }

    /// The same with a complete disk argument.
    pub fn refused_as(&self, disk: &str) -> String {
        let control = self.control().display().to_string();
        let mut command = self.release.command(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["serve", "--control", &control, disk]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{disk} is served");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// The content of an image, read by Ceph's own tool.
    pub fn content(&mut self, image: &str) -> Vec<u8> {
        let file = self.folder.path().join("exported");
        let (image, path) = (format!("{POOL}/{image}"), file.display().to_string());
        self.ceph()
            .rbd(&["export", "--no-progress", &image, &path])
            .unwrap();
        let bytes = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        bytes
    }
}

fn start(release: Release) -> anyhow::Result<Ceph> {
    // Failed tests keep their logs.
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    let folder = format!("ceph-{}-{number}", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    let options = Options {
        release,
        ..Options::default()
    };
    Ceph::start(&folder, options)
}

pub fn ringdisk(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.args(arguments).output().unwrap()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The next test gets a new cluster.
            self.guard.stop();
        }
        if USERS.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        self.guard.stop();
        // If a test has the other cluster again, that test will stop it.
        match CLUSTERS[1 - self.version as usize].try_lock() {
            Ok(mut other) => other.stop(),
            Err(TryLockError::Poisoned(other)) => other.into_inner().stop(),
            Err(TryLockError::WouldBlock) => {}
        }
    }
}

impl ClusterState {
    fn stop(&mut self) {
        if let ClusterState::Running(_) = self {
            *self = ClusterState::Stopped;
        }
    }
}
