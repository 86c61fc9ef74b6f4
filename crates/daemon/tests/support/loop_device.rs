//! A device that counts the flushes that reach it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device over a file: the kernel counts the flushes that reach it.
pub struct LoopDevice {
    pub device: PathBuf,
    pub dir: tempfile::TempDir,
}

impl LoopDevice {
    pub fn new() -> Option<Self> {
        Self::with_sectors(512)
    }

    pub fn with_sectors(bytes: u32) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = dir.path().join("backing");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(64 << 20)
            .unwrap();
        let sectors = bytes.to_string();
        let args = ["-f", "--show", "-b", &sectors].map(Path::new);
        match run("losetup", &[&args[..], &[&file]].concat()) {
            Ok(device) => Some(Self {
                device: device.trim().into(),
                dir,
            }),
            Err(why) => {
                println!("skipped: no loop device to count flushes on: {why}");
                None
            }
        }
    }

    /// Sets its size, as `lvextend` does that of a volume.
    pub fn resize(&self, bytes: u64) {
        let file = self.dir.path().join("backing");
        let file = std::fs::File::options().write(true).open(file);
        file.unwrap().set_len(bytes).unwrap();
        run("losetup", &["-c".as_ref(), &self.device]).unwrap();
    }

    /// Creates and mounts a file system on it, which is unmounted with the device.
    pub fn mount(&self) -> Option<PathBuf> {
        let mount = self.dir.path().join("mnt");
        std::fs::create_dir(&mount).unwrap();
        let made = run("mkfs.ext4", &["-q".as_ref(), &self.device]);
        match made.and_then(|_| run("mount", &[&self.device, &mount])) {
            Ok(_) => Some(mount),
            Err(why) => {
                println!("skipped: no file system to count flushes under: {why}");
                None
            }
        }
    }

    /// Unmounts its file system, checks it, and returns the content of a file in it.
    pub fn unmounted_file(&self, name: &str) -> String {
        run("umount", &[&self.device]).unwrap();
        run("e2fsck", &["-fn".as_ref(), &self.device]).unwrap();
        let show = format!("cat /{name}");
        let arguments = ["-R".as_ref(), Path::new(&show), &self.device];
        run("debugfs", &arguments).unwrap()
    }

    /// The flushes that reach the device while `work` runs.
    pub fn count(&self, work: impl FnOnce()) -> u64 {
        let flushes = || {
            let stat = Path::new("/sys/block")
                .join(self.device.file_name().unwrap())
                .join("stat");
            // Field 16 of Documentation/block/stat.rst, "flush I/Os".
            std::fs::read_to_string(stat)
                .unwrap()
                .split_whitespace()
                .nth(15)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        let before = flushes();
        work();
        flushes() - before
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run("umount", &["-q".as_ref(), &self.device]);
        let _ = run("losetup", &["-d".as_ref(), &self.device]);
    }
}

fn run(program: &str, args: &[&Path]) -> Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!(
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}
