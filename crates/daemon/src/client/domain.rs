//! Disks of a running libvirt domain: for `attach-device` and `detach-device`, libvirt runs no hook.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use roxmltree::Document;
use serde_json::{Value, json};

use super::{CommandLineError, CommandResult};
use crate::config::spec::DiskSpec;
use crate::server::connection_info::escape;

/// The namespace of ringdisk's disks in a domain's metadata.
pub const NAMESPACE: &str = "urn:ringdisk:libvirt:1";

/// How long a guest may take to let a disk go. libvirt has asked it, and does not wait that long.
const GUEST: Duration = Duration::from_secs(30);

/// Which domain a command is about.
#[derive(clap::Args)]
pub struct DomainArgs {
    /// Also attach the disk to this running libvirt domain, as its --target
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
    pub fn attach(&self, disk: &DiskSpec, served: &Value) -> CommandResult {
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
        let added = self.change_metadata(|disks| {
            disks.push(format!(
                "<disk target='{}'{attributes}/>",
                escape(self.target)
            ));
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
    pub fn detach(&self, client: &mut Client, disk: &str) -> CommandResult {
        virsh(
            &[&["detach-disk", self.name, self.target], &self.when()[..]].concat(),
            "",
        )?;
        if self.has_config {
            self.change_metadata(|_| ())?;
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

    /// Changes the disks in the domain's metadata, those of other targets.
    fn change_metadata(&self, change: impl FnOnce(&mut Vec<String>)) -> CommandResult {
        let read = ["metadata", self.name, NAMESPACE, "--config"];
        let before = match virsh(&read, "") {
            Ok(text) => text,
            // libvirt says so in the user's language.
            Err(_) => "<disks/>".to_owned(),
        };
        let problem =
            |e| CommandLineError::Refused(format!("the metadata of domain {}: {e}", self.name));
        let document = Document::parse(&before).map_err(problem)?;
        let others = document
            .root_element()
            .children()
            .filter(|node| node.is_element() && node.attribute("target") != Some(self.target));
        let mut disks: Vec<String> = others.map(|node| before[node.range()].to_owned()).collect();
        change(&mut disks);
        let text = format!("<disks>{}</disks>", disks.concat());
        let write = [
            "metadata", self.name, NAMESPACE, "--key", "ringdisk", "--set", &text, "--live",
            "--config",
        ];
        virsh(&write, "").map(drop)
    }
}

/// Runs virsh with this standard input, and returns what it prints.
fn virsh(arguments: &[&str], input: &str) -> Result<String, CommandLineError> {
    let cannot = |e| CommandLineError::Here("cannot run virsh (package libvirt-clients)", e);
    let mut child = (Command::new("virsh").args(arguments))
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

/// Detaches a disk that could not be attached to its domain.
pub fn undo(client: &mut Client, disk: &str) {
    let _ = client.call("x-ringdisk-detach", json!({ "id": disk }));
}
