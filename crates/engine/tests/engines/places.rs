//! Where the files under test lie, and the engines that they are tried with.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use block::{Aio, CacheMode, Engine};
use engine::{DiskFile, MultiEngine, OpenError, Support, UringError};
use tempfile::TempDir;
use testkit::conformance::Subject;
use testkit::random::Random;

pub const BYTES: usize = 1 << 20;

/// An engine, with the word that a file is attached with.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub ring: bool,
    pub aio: Aio,
}

pub const WAYS: [Way; 7] = [
    way(true, Aio::Auto),
    way(true, Aio::IoUring),
    way(true, Aio::Native),
    way(true, Aio::Threads),
    way(false, Aio::Auto),
    way(false, Aio::Native),
    way(false, Aio::Threads),
];

const fn way(ring: bool, aio: Aio) -> Way {
    Way { ring, aio }
}

impl Way {
    pub fn engines(self) -> MultiEngine {
        MultiEngine::new(support(self.ring)).unwrap()
    }

    pub fn serves(self, cache: CacheMode) -> bool {
        self.aio != Aio::Native || cache.direct()
    }
}

/// What works here, or would if io_uring were switched off.
pub fn support(ring: bool) -> Arc<Support> {
    let mut support = Support::probe();
    if ring {
        assert!(
            support.io_uring.is_ok(),
            "these tests need io_uring: {support:?}"
        )
    } else {
        support.io_uring = Err(UringError::Disabled("2".into()))
    }
    Arc::new(support)
}

/// A file that a test may do anything with.
pub struct Place {
    pub name: &'static str,
    pub path: PathBuf,
    pub cache: CacheMode,
    _directory: TempDir,
    looped: bool,
}

impl Place {
    /// All that this machine and this user have.
    pub fn all() -> Vec<Self> {
        let real = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let memory = || tempfile::tempdir_in("/dev/shm");
        let mut places = vec![
            Self::file("file", real(), CacheMode::Writeback),
            Self::file("file with O_DIRECT", real(), CacheMode::None),
        ];
        if let (Ok(one), Ok(two)) = (memory(), memory()) {
            places.push(Self::file("tmpfs", one, CacheMode::Writeback));
            places.push(Self::file(
                "tmpfs with O_DIRECT",
                two,
                CacheMode::Directsync,
            ));
        }
        places.retain(|place| match place.open(false) {
            Ok(_) => true,
            // The file system has no O_DIRECT.
            Err(e) => {
                println!("skipped: {}: {e}", place.name);
                false
            }
        });
        match Self::device(real()) {
            Ok(device) => places.push(device),
            Err(why) => println!("skipped: loop device: {why}"),
        }
        places
    }

    fn file(name: &'static str, directory: TempDir, cache: CacheMode) -> Self {
        let path = directory.path().join("disk.raw");
        fill(&path);
        Self {
            name,
            path,
            cache,
            _directory: directory,
            looped: false,
        }
    }

    /// A block device, which only root can make.
    fn device(directory: TempDir) -> Result<Self, String> {
        let path = directory.path().join("disk.raw");
        fill(&path);
        let losetup = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(&path)
            .output()
            .map_err(|e| e.to_string())?;
        if !losetup.status.success() {
            return Err(String::from_utf8_lossy(&losetup.stderr).into_owned());
        }
        Ok(Self {
            name: "loop device with O_DIRECT",
            path: String::from_utf8_lossy(&losetup.stdout).trim().into(),
            cache: CacheMode::None,
            _directory: directory,
            looped: true,
        })
    }

    /// Opens it. The kernel takes down the ring that served it before when it finds the time, and the
    /// ring holds the file until then.
    pub fn open(&self, read_only: bool) -> Result<DiskFile, OpenError> {
        for _ in 0..100 {
            match DiskFile::open(&self.path, self.cache, read_only) {
                Err(OpenError::Locked(_) | OpenError::InUse(_)) => {}
                result => return result,
            }
        }
        panic!("{}: is never released", self.name)
    }

    /// The file, and what the engine and the model know of it.
    pub fn attach(&self, engines: &mut MultiEngine, aio: Aio) -> (DiskFile, Subject) {
        let file = self.open(false).unwrap();
        let id = engines
            .attach(file.descriptor(), file.backing(), aio)
            .unwrap();
        let facts = file.facts();
        let subject = Subject {
            file: id,
            model: std::fs::read(&self.path).unwrap(),
            unit: facts.length_alignment as usize,
            address_unit: facts.address_alignment as usize,
        };
        (file, subject)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.looped {
            let _ = Command::new("losetup")
                .arg("--detach")
                .arg(&self.path)
                .status();
        }
    }
}

fn fill(path: &Path) {
    let mut random = Random(1);
    let bytes: Vec<u8> = (0..BYTES).map(|_| random.any() as u8).collect();
    std::fs::write(path, bytes).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}
