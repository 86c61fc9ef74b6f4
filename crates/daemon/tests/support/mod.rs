//! Disks for tests, and servers for them.

pub mod loop_device;
pub mod small_fs;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use testkit::driver::HANG;
pub use testkit::load::content;
use testkit::server::Server;

/// A raw file in a directory of its own, filled with [`content`].
pub struct Disk {
    pub file: PathBuf,
    pub socket: PathBuf,
    _dir: TempDir,
}

/// Length of the disk's file.
pub const DISK_BYTES: u64 = 16 << 20;

impl Disk {
    pub fn new() -> Self {
        // Not in /tmp, which may be a tmpfs: the tests need O_DIRECT and holes of a real file system.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // A disk's default name is that of its file, and two disks of one name cannot be served together.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = dir.path().join(format!("disk-{number}.raw"));
        let socket = dir.path().join("disk.sock");
        std::fs::write(&file, content(0, DISK_BYTES as usize)).unwrap();
        Self {
            file,
            socket,
            _dir: dir,
        }
    }

    /// The disk as an argument of `ringdisk serve`; `options` are further `key=value` pairs.
    pub fn argument(&self, options: &str) -> String {
        let comma = if options.is_empty() { "" } else { "," };
        format!(
            "file={},socket={}{comma}{options}",
            self.file.display(),
            self.socket.display()
        )
    }

    /// A range of the file, as the host sees it.
    pub fn bytes(&self, sector: u64, len: usize) -> Vec<u8> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; len];
        std::fs::File::open(&self.file)
            .unwrap()
            .read_exact_at(&mut bytes, sector * 512)
            .unwrap();
        bytes
    }
}

/// Serves one new disk.
pub fn serve(options: &str) -> (Server, Disk) {
    let disk = Disk::new();
    (serve_all(&[disk.argument(options)]), disk)
}

/// Serves disks, given as arguments.
pub fn serve_all(disks: &[String]) -> Server {
    Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), disks).unwrap()
}

/// Starts a server after another was killed: the kernel may still be completing writes and hold the lock, on a busy
/// disk for longer than a server waits.
pub fn successor(binary: &str, arguments: &[String]) -> Server {
    let start = Instant::now();
    loop {
        match Server::ringdisk(binary, arguments) {
            Ok(server) => return server,
            Err(e) => assert!(
                e.to_string().contains("in use") && start.elapsed() < HANG,
                "{e}"
            ),
        }
    }
}

/// What ringdisk logs when it stops serving a queue whose ring is broken, cannot set up a queue, or disconnects a
/// front-end that does not follow the protocol. Tests of hostile guests, of shared eventfds and of exhausted descriptors
/// check that it does log them.
pub const QUEUE_RETIRED: &str = "is given up at";
pub const QUEUE_UNUSABLE: &str = "cannot be served as the guest set it up";
pub const FRONT_END_CUT_OFF: &str = "front-end cut off";

/// Asserts that, according to its log, ringdisk has served all queues.
#[track_caller]
pub fn assert_queues_served(log: &str) {
    for refusal in [QUEUE_RETIRED, QUEUE_UNUSABLE] {
        assert!(!log.contains(refusal), "{refusal}: {log}");
    }
}

/// Asserts that, according to its log, ringdisk has served all queues and front-ends.
#[track_caller]
pub fn assert_all_served(log: &str) {
    assert_queues_served(log);
    assert!(!log.contains(FRONT_END_CUT_OFF), "{log}");
}

/// A seed for random tests, printed so that a failure can be repeated.
pub fn seed() -> u64 {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    seed
}

/// Copies ringdisk to `to`, to be run there. `cp` does it in a process of its own: if this process wrote the copy, a
/// program started by another test could inherit the descriptor, and running the copy would fail with ETXTBSY.
pub fn copy_ringdisk(to: &std::path::Path) {
    let mut cp = std::process::Command::new("cp");
    let status = cp.arg(env!("CARGO_BIN_EXE_ringdisk")).arg(to).status();
    assert!(status.unwrap().success());
}

/// Waits until a condition holds for which there is no event; fails after [`HANG`].
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what} does not come");
        thread::sleep(Duration::from_millis(5));
    }
}
