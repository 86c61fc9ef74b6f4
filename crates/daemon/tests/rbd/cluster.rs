//! The cluster that all tests of this program share, one after another.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use testkit::ceph::{self, Ceph, Options, POOL};
use testkit::server::Server;

static CLUSTER: Mutex<Option<Ceph>> = Mutex::new(None);

/// Tests that have the cluster or wait for it.
static USERS: AtomicUsize = AtomicUsize::new(0);

/// The cluster, for one test. The last of the tests that wait for it ends it.
pub struct Cluster {
    guard: MutexGuard<'static, Option<Ceph>>,
    pub folder: tempfile::TempDir,
}

impl Cluster {
    /// `None` where there is no Ceph, which is said.
    pub fn get(test: &str) -> Option<Self> {
        if let Err(why) = ceph::available() {
            println!("skipped: {test}: {why}");
            return None;
        }
        USERS.fetch_add(1, Ordering::SeqCst);
        let mut guard = CLUSTER.lock().unwrap_or_else(|e| e.into_inner());
        if guard.is_none() {
            // Those of failed tests leave their logs.
            static NUMBER: AtomicUsize = AtomicUsize::new(0);
            let number = NUMBER.fetch_add(1, Ordering::SeqCst);
            let folder = format!("ceph-{}-{number}", std::process::id());
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
            *guard = Some(Ceph::start(&folder, Options::default()).unwrap());
        }
        let folder = tempfile::tempdir().unwrap();
        Some(Self { guard, folder })
    }

    pub fn ceph(&mut self) -> &mut Ceph {
        self.guard.as_mut().unwrap()
    }

    /// Makes an image, and returns it as `ringdisk serve` wants it, with a socket; `options` are further `key=value` pairs.
    pub fn image(&mut self, name: &str, mib: u64, options: &str) -> String {
        self.ceph().create(name, mib).unwrap();
        self.disk(name, options)
    }

    /// The same of one that is there.
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
        let mut arguments = vec!["--control".to_owned(), self.control().display().to_string()];
        arguments.extend(disks.iter().map(|&disk| disk.to_owned()));
        Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap()
    }

    /// Serves one that is to be refused, and returns what is said.
    pub fn refused(&mut self, name: &str, options: &str) -> String {
        let disk = &self.disk(name, options);
        let control = self.control().display().to_string();
        let arguments = ["serve", "--control", &control, disk];
        let output = ringdisk(&arguments);
        assert!(!output.status.success(), "{disk} is served");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// What an image holds, read by Ceph's own program.
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
        // After a failure the next test gets a cluster of its own.
        if USERS.fetch_sub(1, Ordering::SeqCst) == 1 || std::thread::panicking() {
            *self.guard = None;
        }
    }
}
