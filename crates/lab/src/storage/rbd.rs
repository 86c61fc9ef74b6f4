//! Images in a Ceph cluster, with the usual programs: `rbd`, and fio to fill them.

use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::plan::ceph::Ceph;

/// An image, and how programs open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub name: String,
    /// The configuration file.
    pub conf: PathBuf,
    /// The user, without `client.`.
    pub user: String,
}

/// Attempts to remove an image, and the pause between them: the cluster waits 30 s for a client that was killed.
const REMOVALS: u32 = 8;
const REMOVAL_PAUSE: Duration = Duration::from_secs(5);
/// The time after which the user is told what is waited for.
const PATIENCE: Duration = Duration::from_secs(3);

impl Image {
    /// The image of a configuration. Options and the keyring go into a copy of the configuration file in `folder`, which all
    /// programs read.
    ///
    /// # Errors
    /// The configuration file cannot be read or copied.
    pub fn new(ceph: &Ceph, pool: String, name: String, folder: &Path) -> Result<Image> {
        let user = ceph.user();
        let mut conf = ceph.conf();
        if let Some(added) = added_section(ceph, &user) {
            let text =
                fs::read_to_string(&conf).with_context(|| format!("reading {}", conf.display()))?;
            fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
            // Each configuration has its own file, which is written once, because programs may read it at any time.
            let text = format!("{}\n{added}", text.trim_end());
            conf = (0..)
                .map(|number: u32| folder.join(format!("ceph{number}.conf")))
                .find(|path| fs::read_to_string(path).map_or(true, |there| there == text))
                .context("a folder has room for another file")?;
            if !conf.exists() {
                fs::write(&conf, text).with_context(|| format!("writing {}", conf.display()))?;
            }
        }
        Ok(Image {
            pool,
            name,
            conf,
            user,
        })
    }

    /// `POOL/IMAGE`.
    pub fn path(&self) -> String {
        format!("{}/{}", self.pool, self.name)
    }

    /// Its size; `None` if there is no such image.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn size(&self) -> Result<Option<u64>> {
        let mut command = self.rbd();
        command.args(["info", "--format", "json", &self.path()]);
        match output(&mut command) {
            Ok(text) => {
                let json: Value = serde_json::from_str(&text).context("what 'rbd info' printed")?;
                json["size"]
                    .as_u64()
                    .map(Some)
                    .context("'rbd info' printed no size")
            }
            Err(error) if error.to_string().contains("No such file or directory") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates the image.
    ///
    /// # Errors
    /// It exists, or the cluster refuses.
    pub fn create(&self, bytes: u64) -> Result<()> {
        let mut command = self.rbd();
        command.args(["create", "--size", &format!("{bytes}B"), &self.path()]);
        output(&mut command).map(drop)
    }

    /// Removes the image, and waits if a client still has it open.
    ///
    /// # Errors
    /// A client keeps it open, or the cluster refuses.
    pub fn remove(&self) -> Result<()> {
        let say = || {
            eprintln!(
                "ringdisk: waiting for the cluster to remove {self}: it does not answer, or a client has the image open; Ctrl-C \
                 again leaves the image there"
            );
        };
        saying_if_slow(PATIENCE, say, || self.try_to_remove())
    }

    fn try_to_remove(&self) -> Result<()> {
        let mut tries = 0;
        loop {
            let mut command = self.rbd();
            command.args(["rm", "--no-progress", &self.path()]);
            tries += 1;
            match output(&mut command) {
                Ok(_) => return Ok(()),
                Err(error) if tries == REMOVALS => return Err(error),
                Err(_) => thread::sleep(REMOVAL_PAUSE),
            }
        }
    }

    /// Its size, and its allocated bytes.
    ///
    /// # Errors
    /// It does not exist, or the cluster does not answer.
    pub fn usage(&self) -> Result<(u64, u64)> {
        let mut command = self.rbd();
        command.args(["du", "--format", "json", &self.path()]);
        let text = output(&mut command)?;
        let json: Value = serde_json::from_str(&text).context("what 'rbd du' printed")?;
        let images = json["images"].as_array();
        // A snapshot has its own entry, with this key.
        let mut own = images
            .into_iter()
            .flatten()
            .filter(|it| it["snapshot"].is_null());
        let own = own.next().context("'rbd du' printed no image")?;
        let field = |key: &str| {
            let bytes = own[key].as_u64();
            bytes.with_context(|| format!("'rbd du' printed no {key}"))
        };
        Ok((field("provisioned_size")?, field("used_size")?))
    }

    /// Writes incompressible data to a part of the image.
    ///
    /// # Errors
    /// fio is missing, or fails; the message contains its output.
    pub fn fill(&self, offset: u64, bytes: u64, seed: u64) -> Result<()> {
        let mut command = Command::new("fio");
        command
            .env("CEPH_CONF", &self.conf)
            .args(["--name=fill", "--ioengine=rbd", "--rw=write", "--bs=4M"])
            .args(["--iodepth=8", "--refill_buffers", "--output-format=terse"])
            .arg(format!("--clientname={}", self.user))
            .arg(format!("--pool={}", self.pool))
            .arg(format!("--rbdname={}", self.name))
            .arg(format!("--offset={offset}"))
            .arg(format!("--size={bytes}"))
            .arg(format!("--randseed={}", seed.wrapping_add(offset) >> 1));
        output(&mut command).map(drop)
    }

    /// Maps the image to a block device with the kernel's client.
    ///
    /// # Errors
    /// The kernel has no client, or does not support a feature of the image.
    pub fn map(&self) -> Result<PathBuf> {
        let mut command = self.rbd();
        command.args(["device", "map", &self.path()]);
        let device = PathBuf::from(output(&mut command)?.trim());
        ensure!(
            device.starts_with("/dev"),
            "'rbd device map' printed {device:?}"
        );
        Ok(device)
    }

    /// Removes the block device.
    ///
    /// # Errors
    /// It is in use.
    pub fn unmap(&self, device: &Path) -> Result<()> {
        let mut command = self.rbd();
        command.args(["device", "unmap"]).arg(device);
        output(&mut command).map(drop)
    }

    /// Removes the block device that a run which was killed has left, if there is one.
    pub fn unmap_left(&self) {
        if Path::new("/sys/bus/rbd").exists() {
            let mut command = self.rbd();
            command.args(["device", "unmap", &self.path()]);
            let _ = output(&mut command);
        }
    }

    /// QEMU's `-blockdev` for it.
    pub fn blockdev(&self, cache: Value) -> Value {
        serde_json::json!({
            "driver": "rbd", "pool": self.pool, "image": self.name, "conf": self.conf, "user": self.user, "cache": cache,
        })
    }

    /// Its name for QEMU's `-drive`.
    pub fn drive(&self) -> String {
        let conf = self.conf.display().to_string();
        let conf = conf.replace('\\', "\\\\").replace(':', "\\:");
        format!("{self}:conf={conf}:id={}", self.user)
    }

    fn rbd(&self) -> Command {
        let mut command = Command::new("rbd");
        command.arg("--conf").arg(&self.conf);
        command.args(["--id", &self.user]);
        command
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}", self.path())
    }
}

/// The lines of a configuration for the file, in the section of the user, which overrides all others.
fn added_section(ceph: &Ceph, user: &str) -> Option<String> {
    let keyring = ceph.keyring.as_ref().map(|path| {
        let path = String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned();
        ("keyring".to_owned(), path)
    });
    let lines: Vec<String> = keyring
        .into_iter()
        .chain(ceph.options.iter().cloned())
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect();
    (!lines.is_empty()).then(|| format!("[client.{user}]\n{}", lines.concat()))
}

/// Runs a function, and another one if the first takes longer than this.
fn saying_if_slow<T>(patience: Duration, say: impl FnOnce() + Send, run: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (running, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            if ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                say();
            }
        });
        let result = run();
        drop(running);
        result
    })
}

/// Runs a program and returns its output.
///
/// # Errors
/// It is missing, or fails; the message contains its output.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("starting {name}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(
        output.status.success(),
        "{name} failed ({}): {} {}",
        output.status,
        text(&output.stderr),
        text(&output.stdout)
    );
    Ok(text(&output.stdout))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ceph::options;

    /// A program that waits for the cluster says so; one that is answered says nothing.
    #[test]
    fn a_silent_cluster_is_mentioned() {
        let (said, hears) = mpsc::channel();
        let answered = saying_if_slow(
            Duration::from_millis(1),
            move || said.send(()).unwrap(),
            || hears.recv(),
        );
        assert_eq!(answered, Ok(()));
        let at_once = saying_if_slow(Duration::MAX, || panic!("it was not slow"), || 3);
        assert_eq!(at_once, 3);
    }

    #[test]
    fn configurations_have_files_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base.conf");
        fs::write(&base, "[global]\nfsid = x\n").unwrap();
        let image = |text: Option<&str>| {
            let ceph = Ceph {
                conf: Some(base.clone()),
                user: Some("vm".into()),
                options: text.map_or_else(Vec::new, |text| options(text).unwrap()),
                ..Ceph::default()
            };
            Image::new(&ceph, "p".into(), "i".into(), folder.path()).unwrap()
        };
        assert_eq!(image(None).conf, base);
        let (crc, secure) = (
            image(Some("ms_client_mode=crc")),
            image(Some("ms_client_mode=secure")),
        );
        assert_ne!(crc.conf, secure.conf);
        assert_eq!(crc, image(Some("ms_client_mode=crc")));
        let text = fs::read_to_string(&secure.conf).unwrap();
        assert_eq!(
            text,
            "[global]\nfsid = x\n[client.vm]\nms_client_mode = secure\n"
        );
    }
}
