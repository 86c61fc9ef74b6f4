//! Disks of a running libvirt domain: for `attach-device` and `detach-device`, libvirt runs no hook.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use roxmltree::{Document, Node, ParsingOptions};
use serde_json::{Value, json};

use super::{CommandLineError, CommandResult, Connection};
use crate::config::spec::DiskSpec;
use crate::log::complain;
use crate::server::connection_info::escape;

/// The namespace of ringdisk's disks in a domain's metadata.
pub const NAMESPACE: &str = "urn:ringdisk:libvirt:1";

/// How long a guest may take to let a disk go. libvirt has asked it, and does not wait that long.
const GUEST: Duration = Duration::from_secs(30);

/// How long to wait for another command that changes metadata.
const LOCK: Duration = Duration::from_secs(30);

/// The metadata of a domain without disks.
const NO_DISKS: &str = "<disks/>";

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
    name: String,
    target: &'a str,
    has_config: bool,
}

impl DomainArgs {
    /// The domain, if one is given, which may be by its number or UUID.
    ///
    /// # Errors
    /// libvirt does not have it.
    pub fn domain(&self) -> Result<Option<Domain<'_>>, CommandLineError> {
        let (Some(given), Some(target)) = (&self.libvirt, &self.target) else {
            return Ok(None);
        };
        let domain = virsh(&["dumpxml", "--", given], "")?;
        let document = parse_domain(&domain)
            .map_err(|e| CommandLineError::Refused(format!("domain {given}: {e}")))?;
        // The hook gets the name.
        let name = child(document.root_element(), "name").and_then(|name| name.text());
        Ok(Some(Domain {
            name: name.unwrap_or(given).to_owned(),
            target,
            has_config: self.config,
        }))
    }
}

impl Domain<'_> {
    /// The name of a disk that has none.
    pub fn disk_name(&self) -> String {
        format!("{}-{}", self.name, self.target)
    }

    /// Labels a disk with the domain and its target.
    pub fn set_labels(&self, disk: &mut DiskSpec) {
        disk.labels.domain = Some(self.name.clone());
        disk.labels.target = Some(self.target.to_owned());
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
        let device = ["--", &self.name, "/dev/stdin"];
        let attach = [&["attach-device"], &when[..], &device].concat();
        // From here on, no other command changes the domain's disks: what it has is put back if libvirt refuses this one.
        let lock = lock(connection)?;
        self.check_free()?;
        // First: what the metadata names and the domain does not have is served to nobody. The other way round, the next start
        // would wait for a socket that nobody makes.
        let before = self.change_metadata(&lock, &self.when(), Some(&self.element(disk)))?;
        let attached = virsh(&attach, &xml);
        attached.map(drop).inspect_err(|_| self.restore(&before))
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
        self.check_target(client, disk)?;
        let what = ["--", &self.name, self.target];
        let detach = [&["detach-disk"], &self.when()[..], &what].concat();
        virsh(&detach, "")?;
        // After the domain, for the same reason as in `attach`.
        if self.has_config {
            self.change_metadata(&lock(connection)?, &["--config"], None)?;
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
        // Until here, a saved state of the domain has the disk, which the hook then serves.
        self.change_metadata(&lock(connection)?, &["--live"], None)?;
        Ok(())
    }

    /// The disk in the domain's metadata, without what is there by default, or in the domain itself.
    fn element(&self, disk: &DiskSpec) -> String {
        let mut defaults = DiskSpec::new(self.disk_name(), disk.file.clone());
        self.set_labels(&mut defaults);
        let defaults: Vec<_> = defaults.pairs().collect();
        let is_needed = |(key, value): &(&str, String)| match *key {
            "file" => true,
            "socket" => false,
            key => !defaults.contains(&(key, value.clone())),
        };
        let attributes: String = (disk.pairs())
            .filter(is_needed)
            .map(|(key, value)| format!(" {key}='{}'", escape(&value)))
            .collect();
        format!("<disk target='{}'{attributes}/>", escape(self.target))
    }

    /// Checks that the domain has no disk with this target.
    fn check_free(&self) -> CommandResult {
        let config = self.has_config.then_some("--inactive");
        for which in [None].into_iter().chain(config.map(Some)) {
            let show: Vec<_> = ["dumpxml"]
                .into_iter()
                .chain(which)
                .chain(["--", &self.name])
                .collect();
            let domain = virsh(&show, "")?;
            let document = parse_domain(&domain)
                .map_err(|e| CommandLineError::Refused(format!("domain {}: {e}", self.name)))?;
            if has_target(document.root_element(), self.target) {
                return Err(CommandLineError::Refused(format!(
                    "domain {} has a disk {} already; nothing was changed",
                    self.name, self.target
                )));
            }
        }
        Ok(())
    }

    /// Checks that the domain has this disk as its target.
    fn check_target(&self, client: &mut Client, disk: &str) -> CommandResult {
        let now = super::disk_now(client, disk)?;
        let its = now.as_ref().and_then(|now| now["socket"].as_str());
        let domain = virsh(&["dumpxml", "--", &self.name], "")?;
        let document = parse_domain(&domain)
            .map_err(|e| CommandLineError::Refused(format!("domain {}: {e}", self.name)))?;
        let there = socket_of(document.root_element(), self.target);
        match (its, there) {
            (Some(its), Some(there)) if its == there => Ok(()),
            (_, there) => Err(CommandLineError::Refused(format!(
                "disk '{disk}' is not {} of domain {}, which has {} there; nothing was changed",
                self.target,
                self.name,
                there.as_deref().unwrap_or("no vhost-user disk")
            ))),
        }
    }

    fn when(&self) -> Vec<&'static str> {
        let config = self.has_config.then_some("--config");
        ["--live"].into_iter().chain(config).collect()
    }

    /// Changes the disks in the metadata of the running domain, from which the hook knows that it has some, and of its
    /// configuration; those of other targets stay. Returns what was there.
    fn change_metadata(
        &self,
        _lock: &File,
        which: &[&'static str],
        disk: Option<&str>,
    ) -> Result<Vec<(&'static str, String)>, CommandLineError> {
        let mut all = Vec::new();
        for &which in which {
            // With a disk that goes, the domain may have ended: then only its configuration is left.
            let has_ended = |e: &CommandLineError| {
                disk.is_none() && which == "--live" && e.to_string().contains("is not running")
            };
            let before = match virsh(&["metadata", which, "--", &self.name, NAMESPACE], "") {
                Err(e) if has_ended(&e) => continue,
                Err(CommandLineError::Refused(why)) if why.contains("metadata not found") => {
                    NO_DISKS.to_owned()
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
            match self.set_metadata(which, &text) {
                Err(e) if has_ended(&e) => continue,
                set => set?,
            }
            all.push((which, before));
        }
        Ok(all)
    }

    fn restore(&self, before: &[(&'static str, String)]) {
        for (which, disks) in before {
            let _ = self.set_metadata(which, disks);
        }
    }

    fn set_metadata(&self, which: &str, disks: &str) -> CommandResult {
        let set = match disks {
            NO_DISKS => vec!["metadata", which, "--remove"],
            disks => vec!["metadata", which, "--key", "ringdisk", "--set", disks],
        };
        virsh(&[&set[..], &["--", &self.name, NAMESPACE]].concat(), "").map(drop)
    }
}

/// Parses a domain.
///
/// # Errors
/// It is not XML, or far larger than a domain.
pub fn parse_domain(text: &str) -> Result<Document<'_>, String> {
    let options = ParsingOptions {
        nodes_limit: 1 << 20,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text, options);
    document.map_err(|e| format!("is not XML: {e}"))
}

/// The socket of the domain's vhost-user disk with this target.
pub fn socket_of(root: Node<'_, '_>, target: &str) -> Option<String> {
    let source = child(disk_of(root, target)?, "source")?;
    source.attribute("path").map(str::to_owned)
}

/// An attribute of the driver of the domain's vhost-user disk with this target.
pub fn driver_of(root: Node<'_, '_>, target: &str, attribute: &str) -> Option<String> {
    let driver = child(disk_of(root, target)?, "driver")?;
    driver.attribute(attribute).map(str::to_owned)
}

/// The targets of the domain's vhost-user disks.
pub fn targets_of<'a>(root: Node<'a, '_>) -> impl Iterator<Item = &'a str> {
    let disks = child(root, "devices")
        .into_iter()
        .flat_map(|devices| devices.children());
    let disks = disks
        .filter(|disk| disk.has_tag_name("disk") && disk.attribute("type") == Some("vhostuser"));
    disks.filter_map(|disk| child(disk, "target")?.attribute("dev"))
}

fn has_target(root: Node<'_, '_>, target: &str) -> bool {
    let mut devices = child(root, "devices")
        .into_iter()
        .flat_map(|devices| devices.children());
    let is_it = |target_of: Node<'_, '_>| target_of.attribute("dev") == Some(target);
    devices.any(|device| device.has_tag_name("disk") && child(device, "target").is_some_and(is_it))
}

fn disk_of<'a, 'b>(root: Node<'a, 'b>, target: &str) -> Option<Node<'a, 'b>> {
    let is_meant = |disk: &Node<'_, '_>| {
        let its = child(*disk, "target").and_then(|target| target.attribute("dev"));
        let kind = disk.attribute("type");
        disk.has_tag_name("disk") && kind == Some("vhostuser") && its == Some(target)
    };
    child(root, "devices")?.children().find(is_meant)
}

fn child<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Option<Node<'a, 'b>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Keeps other commands from changing metadata at the same time. The file is beside the control socket; that directory may be
/// the service's, and this program root: no link there is followed.
fn lock(connection: &Connection) -> Result<File, CommandLineError> {
    let path = connection.path().with_file_name("libvirt.lock");
    let fail = |e| CommandLineError::Target(path.clone(), e);
    let mut options = OpenOptions::new();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let options = options.write(true).create(true).truncate(false);
    let file = options.mode(0o600).custom_flags(flags).open(&path);
    let file = file.map_err(fail)?;
    let deadline = Instant::now() + LOCK;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(fail(e)),
            Err(TryLockError::WouldBlock) if Instant::now() > deadline => {
                let text = "another command changes the disks of a domain";
                return Err(fail(io::Error::other(text)));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(50)),
        }
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
            complain(&format!(
                "disk {disk} stays served: {}",
                CommandLineError::from(e)
            ));
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
}
