//! libvirt's hook for QEMU: `/etc/libvirt/hooks/qemu.d/ringdisk`
//! ([arguments and standard input](https://libvirt.org/hooks.html)).
//!
//! The disks of a domain are in its metadata, with the keys of a disk's configuration:
//!
//! ```xml
//! <metadata>
//!   <ringdisk:disks xmlns:ringdisk='urn:ringdisk:libvirt:1'>
//!     <ringdisk:disk target='vda' file='/srv/vm1.qcow2' cache='none' iops='5000'/>
//!   </ringdisk:disks>
//! </metadata>
//! ```
//!
//! `prepare` serves them, before QEMU is started and on the target of a migration; what is served already stays as it is.
//! `release` stops serving them when QEMU has gone: after a shutdown, a crash, a saved state, and on the source of a migration.
//! The hook does not call libvirt, which would wait for the hook.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use roxmltree::{Document, Node, ParsingOptions};
use serde_json::{Value, json};

use crate::client::domain::NAMESPACE;
use crate::client::{CommandLineError, CommandResult, Connection};
use crate::config::spec::{DiskSpec, FileSpec};

/// Limit of a domain's size: far more than any has.
const DOMAIN_BYTES_MAX: u64 = 4 << 20;

/// How long the connection of a QEMU that has ended may stay.
const LEAVING: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
#[command(after_help = "Example, as /etc/libvirt/hooks/qemu.d/ringdisk:
  #!/bin/sh
  exec ringdisk hook libvirt \"$@\"

The domain is on standard input. It names its disks in <metadata>, with the keys of a disk's configuration:
  <ringdisk:disks xmlns:ringdisk='urn:ringdisk:libvirt:1'>
    <ringdisk:disk target='vda' file='/srv/vm1.qcow2' cache='none' iops='5000'/>
  </ringdisk:disks>
Without a name, such a disk is called DOMAIN-TARGET. Domains without this are left alone.")]
pub struct Args {
    /// Name of the domain
    domain: String,
    /// prepare and release do something, all others nothing
    operation: String,
    /// begin or end
    step: String,
    /// libvirt's last argument, which has no use
    #[arg(hide = true, allow_hyphen_values = true)]
    extra: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// A disk that a domain has.
#[derive(Debug, PartialEq)]
struct DomainDisk {
    spec: DiskSpec,
    /// Where QEMU connects; none if the domain has no such disk now.
    socket: Option<String>,
}

/// Serves the disks of the domain on standard input, or ends that.
///
/// # Errors
/// A disk cannot be served: then none is served that was not before. Or one is still in use after the domain has ended.
pub fn run(args: &Args) -> CommandResult {
    let mut text = Vec::new();
    let limit = DOMAIN_BYTES_MAX + 1;
    let read = io::stdin().lock().take(limit).read_to_end(&mut text);
    read.map_err(|e| CommandLineError::Here("cannot read the domain from standard input", e))?;
    let is_too_long = text.len() as u64 > DOMAIN_BYTES_MAX;
    let text = String::from_utf8_lossy(&text);
    let refused = |problem| CommandLineError::Refused(format!("domain {}: {problem}", args.domain));
    let step = (args.operation.as_str(), args.step.as_str());
    // Whatever is wrong with the domains of others, they start.
    let is_ours = text.contains(NAMESPACE);
    if !is_ours || !matches!(step, ("prepare", "begin") | ("release", "end")) {
        return Ok(());
    }
    if is_too_long {
        return Err(refused(format!("has more than {DOMAIN_BYTES_MAX} bytes")));
    }
    let disks = parse(&args.domain, &text).map_err(refused)?;
    if disks.is_empty() {
        return Ok(());
    }
    let mut client = args.connection.open()?;
    match step {
        ("prepare", _) => prepare(&mut client, &disks),
        _ => release(&mut client, &disks),
    }
}

/// The disks in the metadata of a domain.
fn parse(domain: &str, text: &str) -> Result<Vec<DomainDisk>, String> {
    let options = ParsingOptions {
        nodes_limit: 1 << 20,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text, options);
    let document = document.map_err(|e| format!("is not XML: {e}"))?;
    let root = document.root_element();
    let ours = |node: &Node<'_, '_>, name: &str| node.has_tag_name((NAMESPACE, name));
    let named = root
        .children()
        .filter(|node| node.has_tag_name("metadata"))
        .flat_map(|metadata| metadata.children())
        .filter(|node| ours(node, "disks"))
        .flat_map(|disks| disks.children())
        .filter(|node| ours(node, "disk"));
    let mut targets = BTreeSet::new();
    let mut disks = Vec::new();
    for disk in named {
        let target = disk.attribute("target");
        let target = target.ok_or("a <ringdisk:disk> has no target; add the one of its <disk>")?;
        if !targets.insert(target) {
            return Err(format!("names two disks for {target}"));
        }
        let socket = socket_of(root, target);
        let mut pairs: Vec<(&str, String)> = (disk.attributes())
            .filter(|attribute| attribute.name() != "target")
            .map(|attribute| (attribute.name(), attribute.value().to_owned()))
            .collect();
        let has =
            |pairs: &[(&str, String)], key: &str| pairs.iter().any(|(other, _)| *other == key);
        if !has(&pairs, "name") {
            pairs.push(("name", format!("{domain}-{target}")));
        }
        if let Some(socket) = socket.clone().filter(|_| !has(&pairs, "socket")) {
            pairs.push(("socket", socket));
        }
        let spec = DiskSpec::from_pairs(pairs);
        let spec = spec.map_err(|problem| format!("disk {target} in its metadata: {problem}"))?;
        disks.push(DomainDisk { spec, socket });
    }
    Ok(disks)
}

/// The socket of the domain's vhost-user disk with this target.
fn socket_of(root: Node<'_, '_>, target: &str) -> Option<String> {
    let is_meant = |disk: &Node<'_, '_>| {
        let its = child(*disk, "target").and_then(|target| target.attribute("dev"));
        let kind = disk.attribute("type");
        disk.has_tag_name("disk") && kind == Some("vhostuser") && its == Some(target)
    };
    let disk = child(root, "devices")?.children().find(is_meant)?;
    child(disk, "source")?.attribute("path").map(str::to_owned)
}

fn child<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Option<Node<'a, 'b>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// How a disk is served now. `None` if it is not.
fn served(client: &mut Client, name: &str) -> Result<Option<Value>, CommandLineError> {
    let reply = client.call("x-ringdisk-connect-info", json!({ "id": name }));
    match reply.map_err(CommandLineError::from) {
        Ok(disk) => Ok(Some(disk)),
        Err(CommandLineError::Refused(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

fn prepare(client: &mut Client, disks: &[DomainDisk]) -> CommandResult {
    let mut attached = Vec::new();
    let all = disks.iter().try_for_each(|disk| {
        if serve(client, disk)? {
            attached.push(&disk.spec.name);
        }
        Ok(())
    });
    if all.is_err() {
        for name in attached {
            // The first error is the one to be seen.
            let _ = client.call("x-ringdisk-detach", json!({ "id": name }));
        }
    }
    all
}

/// Serves a disk, unless it is served. Returns whether it was not.
fn serve(client: &mut Client, disk: &DomainDisk) -> Result<bool, CommandLineError> {
    let name = &disk.spec.name;
    let refused =
        |problem: String| Err(CommandLineError::Refused(format!("disk {name}: {problem}")));
    let Some(socket) = &disk.socket else {
        return refused(
            "is named in the domain's metadata, but the domain has no <disk type='vhostuser'> with this target".into(),
        );
    };
    if let Some(now) = served(client, name)? {
        let its = now["socket"].as_str().unwrap_or_default();
        return match its == socket {
            true => Ok(false),
            false => refused(format!(
                "is served at {its}, and the domain connects to {socket}; change the <source> of its <disk>, or detach it with \
                 'ringdisk detach {name}'"
            )),
        };
    }
    let arguments = json!({ "disk": disk.spec.to_string() });
    match client
        .call("x-ringdisk-attach", arguments)
        .map_err(CommandLineError::from)
    {
        Ok(_) => Ok(true),
        Err(CommandLineError::Refused(problem)) => refused(problem),
        Err(e) => Err(e),
    }
}

fn release(client: &mut Client, disks: &[DomainDisk]) -> CommandResult {
    let mut result = Ok(());
    for disk in disks {
        let let_go = let_go(client, disk);
        result = result.and(let_go);
    }
    result
}

/// Stops serving a disk. One that was moved to another file meanwhile stays: the domain names the previous one, on which its VM
/// must not be started again.
fn let_go(client: &mut Client, disk: &DomainDisk) -> CommandResult {
    let name = &disk.spec.name;
    let Some(now) = served(client, name)? else {
        return Ok(());
    };
    let file = now["file"].as_str().unwrap_or_default();
    if !is_same_file(&disk.spec.file, file) {
        eprintln!(
            "ringdisk: disk {name} stays served, since it has moved to {file}: put file='{file}' into the domain's metadata"
        );
        return Ok(());
    }
    let deadline = Instant::now() + LEAVING;
    loop {
        let ended = client.call("x-ringdisk-detach", json!({ "id": name }));
        let Err(e) = ended.map_err(CommandLineError::from) else {
            return Ok(());
        };
        // QEMU has ended, and ringdisk may not have seen it.
        let is_connected = e.to_string().contains("a VM is connected");
        if !is_connected || Instant::now() > deadline {
            return Err(e);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn is_same_file(configured: &FileSpec, now: &str) -> bool {
    if configured.to_string() == now {
        return true;
    }
    let FileSpec::Path(path) = configured else {
        return false;
    };
    let both = [path.canonicalize(), Path::new(now).canonicalize()];
    matches!(both, [Ok(configured), Ok(now)] if configured == now)
}

/// Reads a domain. Panics if a disk does not reach the server as it was read, which would be another one.
#[cfg(any(test, fuzzing))]
pub fn check(text: &str) {
    for disk in parse("vm1", text).unwrap_or_default() {
        assert_eq!(disk.spec.to_string().parse(), Ok(disk.spec));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The value of an attribute may be anything that XML can have.
        #[test]
        fn values_of_attributes_are_values_and_nothing_else(value in "[^\\x00-\\x1f]{0,40}", key in "file|name|serial|cache") {
            let value = crate::server::connection_info::escape(&value);
            let file = if key == "file" { "" } else { "file='/a.raw'" };
            let text = disks(&format!("<r:disk target='vda' {file} {key}='{value}'/>"));
            check(&text);
            if let Ok(found) = parse("vm1", &text) {
                prop_assert_eq!(found.len(), 1);
            }
        }
    }

    #[test]
    fn seeds_are_read() {
        let seeds = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/seeds/libvirt_domain"
        );
        let mut disks = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            let text = fs::read_to_string(seed.unwrap().path()).unwrap();
            check(&text);
            disks += parse("vm1", &text).map_or(0, |disks| disks.len());
        }
        assert!(disks > 0);
    }

    fn domain(metadata: &str) -> String {
        format!(
            "<domain type='kvm'>
               <name>vm1</name>
               <metadata>
                 <other:thing xmlns:other='urn:other'><disk target='vda'/></other:thing>
                 {metadata}
               </metadata>
               <devices>
                 <disk type='file' device='disk'><source file='/other.raw'/><target dev='vdb'/></disk>
                 <disk type='vhostuser' device='disk'>
                   <source type='unix' path='/run/ringdisk/one.sock'/><target dev='vda' bus='virtio'/>
                 </disk>
               </devices>
             </domain>"
        )
    }

    fn disks(inner: &str) -> String {
        domain(&format!(
            "<r:disks xmlns:r='urn:ringdisk:libvirt:1'>{inner}</r:disks>"
        ))
    }

    #[test]
    fn domain_without_metadata_has_no_disks() {
        assert_eq!(parse("vm1", &domain("")), Ok(Vec::new()));
    }

    #[test]
    fn attributes_are_the_keys_of_a_disk() {
        let text = disks("<r:disk target='vda' file='/srv/a,b.raw' cache='none' iops='5000'/>");
        let found = parse("vm1", &text).unwrap();
        assert_eq!(found.len(), 1);
        let socket = Some("/run/ringdisk/one.sock".to_owned());
        assert_eq!(found[0].socket, socket);
        let expected =
            "/srv/a,,b.raw,name=vm1-vda,socket=/run/ringdisk/one.sock,cache=none,iops=5000";
        assert_eq!(found[0].spec, expected.parse().unwrap());
        // As the server reads it.
        assert_eq!(
            found[0].spec.to_string().parse().as_ref(),
            Ok(&found[0].spec)
        );
    }

    #[test]
    fn mistakes_in_metadata_are_named() {
        for (inner, word) in [
            ("<r:disk file='/a.raw'/>", "no target"),
            ("<r:disk target='vda'/>", "file"),
            (
                "<r:disk target='vda' file='/a.raw' colour='red'/>",
                "colour",
            ),
            ("<r:disk target='vda' file='/a.raw' iops='many'/>", "iops"),
            (
                "<r:disk target='vda' file='/a.raw'/><r:disk target='vda' file='/b.raw'/>",
                "two disks",
            ),
        ] {
            let problem = parse("vm1", &disks(inner)).unwrap_err();
            assert!(problem.contains(word), "{problem}");
        }
        assert!(parse("vm1", "<domain>").unwrap_err().contains("not XML"));
    }

    #[test]
    fn disk_that_the_domain_does_not_have_has_no_socket() {
        let text = disks("<r:disk target='vdb' file='/b.raw'/>");
        assert_eq!(parse("vm1", &text).unwrap()[0].socket, None);
    }
}
