//! The clusters that all tests share, one per version of Ceph; tests use them one at a time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

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
static CLUSTERS: [Mutex<Option<Ceph>>; 2] = [const { Mutex::new(None) }; 2];

/// Tests that use the cluster or wait for it.
static USERS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// The cluster, for one test. The last test that waits for it shuts it down.
pub struct Cluster {
    version: CephVersion,
    release: Release,
    guard: MutexGuard<'static, Option<Ceph>>,
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
        USERS[version as usize].fetch_add(1, Ordering::SeqCst);
        let cluster = &CLUSTERS[version as usize];
        let mut guard = cluster.lock().unwrap_or_else(|e| e.into_inner());
        if guard.is_none() {
            // Failed tests keep their logs.
            static NUMBER: AtomicUsize = AtomicUsize::new(0);
            let number = NUMBER.fetch_add(1, Ordering::SeqCst);
            let folder = format!("ceph-{}-{number}", std::process::id());
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
            let options = Options {
                release: release.clone(),
                ..Options::default()
            };
            *guard = Some(Ceph::start(&folder, options).unwrap());
        }
        let folder = tempfile::tempdir().unwrap();
        Some(Self {
            version,
            release,
            guard,
            folder,
        })
    }

    pub fn ceph(&mut self) -> &mut Ceph {
        self.guard.as_mut().unwrap()
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

pub fn ringdisk(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.args(arguments).output().unwrap()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // After a failure, the next test gets a new cluster.
        if USERS[self.version as usize].fetch_sub(1, Ordering::SeqCst) == 1
            || std::thread::panicking()
        {
            *self.guard = None;
        }
    }
}
