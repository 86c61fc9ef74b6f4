//! Disks of a running libvirt domain: for `attach-device` and `detach-device`, libvirt runs no hook.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use roxmltree::Document;
use serde_json::{Value, json};

use super::{CommandLineError, CommandResult, Connection};
use crate::config::spec::DiskSpec;
use crate::server::connection_info::escape;

/// The namespace of ringdisk's disks in a domain's metadata.
pub const NAMESPACE: &str = "urn:ringdisk:libvirt:1";

/// How long a guest may take to let a disk go. libvirt has asked it, and does not wait that long.
const GUEST: Duration = Duration::from_secs(30);

/// Which domain a command is about.
#[derive(clap::Args)]
pub struct DomainArgs {
    /// Also do this in a running libvirt domain, whose --target the disk is
    #[arg(long, value_name = "DOMAIN", requires = "target")]
    pub libvirt: Option<String>,
    /// The disk in the domain, as in vdb
    #[arg(long, requires = "libvirt")]
    pub target: Option<String>,
    /// Change the domain's configuration as well, for its next start
    #[arg(long, requires = "libvirt")]
    pub config: bool,
}

/// A disk of a running domain.
pub struct Domain<'a> {
    name: &'a str,
    target: &'a str,
    has_config: bool,
}

impl DomainArgs {
    /// The domain, if one is given.
    pub fn domain(&self) -> Option<Domain<'_>> {
        Some(Domain {
            name: self.libvirt.as_deref()?,
            target: self.target.as_deref()?,
            has_config: self.config,
        })
    }
}

impl Domain<'_> {
    /// The name of a disk that has none.
    pub fn disk_name(&self) -> String {
        format!("{}-{}", self.name, self.target)
    }

    /// Attaches a disk that is served to the domain.
    ///
    /// # Errors
    /// The domain is as it was.
    pub fn attach(
        &self,
        connection: &Connection,
        disk: &DiskSpec,
        served: &Value,
    ) -> CommandResult {
        let xml = served["libvirt"]["disk"].as_str().unwrap_or_default();
        let xml = xml.replace("dev='vda'", &format!("dev='{}'", escape(self.target)));
        let when = self.when();
        let attach = [&["attach-device", self.name, "/dev/stdin"], &when[..]].concat();
        virsh(&attach, &xml)?;
        if !self.has_config {
            return Ok(());
        }
        let defaults = DiskSpec::new(String::new(), disk.file.clone());
        let defaults: Vec<_> = defaults.pairs().collect();
        let attributes: String = (disk.pairs())
            .filter(|pair| pair.0 == "file" || !defaults.contains(pair))
            .map(|(key, value)| format!(" {key}='{}'", escape(&value)))
            .collect();
        let element = format!("<disk target='{}'{attributes}/>", escape(self.target));
        let added = self.change_metadata(Some(&element));
        let added = added.and_then(|()| {
            let attached = Attached::of(self.name, connection);
            attached.change(|names| names.insert(disk.name.clone()))
        });
        added.inspect_err(|_| {
            let detach = [&["detach-device", self.name, "/dev/stdin"], &when[..]].concat();
            let _ = virsh(&detach, &xml);
        })
    }

    /// Detaches the disk from the domain, and waits until the guest has let it go.
    ///
    /// # Errors
    /// The domain or its guest keeps it.
    pub fn detach(
        &self,
        connection: &Connection,
        client: &mut Client,
        disk: &str,
    ) -> CommandResult {
        virsh(
            &[&["detach-disk", self.name, self.target], &self.when()[..]].concat(),
            "",
        )?;
        if self.has_config {
            self.change_metadata(None)?;
            let attached = Attached::of(self.name, connection);
            attached.change(|names| names.remove(disk))?;
        }
        let deadline = Instant::now() + GUEST;
        while super::disk_now(client, disk)?.is_some_and(|disk| disk["connected"] == true) {
            if Instant::now() > deadline {
                return Err(CommandLineError::Refused(format!(
                    "disk '{disk}' stays served: the guest of domain {} has not let it go within {} s; when it has, \
                     'ringdisk detach {disk}' ends it",
                    self.name,
                    GUEST.as_secs()
                )));
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn when(&self) -> Vec<&'static str> {
        let config = self.has_config.then_some("--config");
        ["--live"].into_iter().chain(config).collect()
    }

    /// Changes the disks in the metadata of the running domain and of its configuration; those of other targets stay.
    fn change_metadata(&self, disk: Option<&str>) -> CommandResult {
        for which in ["--live", "--config"] {
            let before = match virsh(&["metadata", self.name, NAMESPACE, which], "") {
                Err(CommandLineError::Refused(why)) if why.contains("metadata not found") => {
                    "<disks/>".to_owned()
                }
                read => read?,
            };
            let problem =
                |e| CommandLineError::Refused(format!("the metadata of domain {}: {e}", self.name));
            let document = Document::parse(&before).map_err(problem)?;
            let others = document.root_element().children();
            let others = others
                .filter(|node| node.is_element() && node.attribute("target") != Some(self.target))
                .map(|node| &before[node.range()]);
            let disks: String = others.chain(disk).collect();
            let text = format!("<disks>{disks}</disks>");
            let key = ["--key", "ringdisk", "--set", &text, which];
            virsh(
                &[&["metadata", self.name, NAMESPACE], &key[..]].concat(),
                "",
            )?;
        }
        Ok(())
    }
}

/// The disks that were attached for a domain: only those are detached when it ends. Names, one in a line, beside the
/// control socket, where a reboot forgets them. That directory may be the service's, and this program root: no link there is
/// followed.
pub struct Attached(PathBuf);

/// Limit of that file's size in bytes.
const ATTACHED_BYTES_MAX: u64 = 1 << 20;

impl Attached {
    pub fn of(domain: &str, connection: &Connection) -> Self {
        let name = format!("libvirt-{}", domain.replace('/', "-"));
        Self(connection.path().with_file_name(name))
    }

    pub fn names(&self) -> BTreeSet<String> {
        let mut options = OpenOptions::new();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = options.read(true).custom_flags(flags).open(&self.0);
        let mut text = String::new();
        if let Ok(file) = file {
            let _ = file.take(ATTACHED_BYTES_MAX).read_to_string(&mut text);
        }
        text.lines().map(str::to_owned).collect()
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let new = self.0.with_added_extension("new");
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&new, &self.0)
    }

    /// # Errors
    /// They could not be noted.
    pub fn change(&self, change: impl FnOnce(&mut BTreeSet<String>) -> bool) -> CommandResult {
        let mut names = self.names();
        change(&mut names);
        let lines: String = names.iter().map(|name| format!("{name}\n")).collect();
        let written = if lines.is_empty() {
            match fs::remove_file(&self.0) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            }
        } else {
            self.write(&lines)
        };
        written.map_err(|e| CommandLineError::Target(self.0.clone(), e))
    }
}

/// Runs virsh with this standard input, and returns what it prints.
fn virsh(arguments: &[&str], input: &str) -> Result<String, CommandLineError> {
    let cannot = |e| CommandLineError::Here("cannot run virsh (package libvirt-clients)", e);
    let mut child = (Command::new("virsh").args(arguments))
        // Its messages are read.
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    if let Some(mut stdin) = child.stdin.take() {
        // If it has ended, its error says why.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(cannot)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<_> = said.lines().filter(|line| !line.is_empty()).collect();
    let said = said.join("; ").replace("error: ", "");
    Err(CommandLineError::Refused(format!(
        "virsh {}: {said}",
        arguments[0]
    )))
}

/// Detaches a disk that could not be attached to its domain, which may have to let it go first.
pub fn undo(client: &mut Client, disk: &str) {
    let deadline = Instant::now() + GUEST;
    while let Err(e) = client.call("x-ringdisk-detach", json!({ "id": disk })) {
        let is_connected = e.to_string().contains("a VM is connected");
        if !is_connected || Instant::now() > deadline {
            eprintln!(
                "ringdisk: disk {disk} stays served: {}",
                CommandLineError::from(e)
            );
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_beside_the_control_socket_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let [other, path] = ["other", "libvirt-vm1"].map(|name| dir.path().join(name));
        fs::write(&other, "secret\n").unwrap();
        symlink(&other, &path).unwrap();
        symlink(&other, dir.path().join("libvirt-vm1.new")).unwrap();
        let attached = Attached(path.clone());
        assert_eq!(attached.names(), BTreeSet::new());
        attached
            .change(|names| names.insert("vm1-vda".into()))
            .unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "secret\n");
        assert_eq!(attached.names(), BTreeSet::from(["vm1-vda".to_owned()]));
        attached.change(|names| names.remove("vm1-vda")).unwrap();
        assert!(!path.exists() && other.exists());
    }
}
