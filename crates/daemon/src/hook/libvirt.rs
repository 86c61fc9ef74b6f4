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
//! `release` stops serving what `prepare` has attached when QEMU has gone: after a shutdown, a crash, a saved state, and on the source of a migration.
//! The hook does not call libvirt, which would wait for the hook.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use roxmltree::{Document, Node, ParsingOptions};
use serde_json::json;

use crate::client::domain::{Attached, NAMESPACE};
use crate::client::{CommandLineError, CommandResult, Connection, disk_now};
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
    #[arg(allow_hyphen_values = true)]
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
    let attached = Attached::of(&args.domain, &args.connection);
    match step {
        ("prepare", _) => prepare(&mut client, &disks, &attached),
        _ => release(&mut client, &disks, &attached),
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
        if has(&pairs, "socket") {
            return Err(format!(
                "disk {target}: its socket is that of its <source>; leave it out"
            ));
        }
        if let Some(socket) = socket.clone() {
            pairs.push(("socket", socket));
        }
        // The guest has these queues already, whatever this host would choose.
        for (attribute, key) in [("queues", "queues"), ("queue_size", "queue-size")] {
            if let Some(value) = driver_of(root, target, attribute).filter(|_| !has(&pairs, key)) {
                pairs.push((key, value));
            }
        }
        let spec = DiskSpec::from_pairs(pairs);
        let spec = spec.map_err(|problem| format!("disk {target} in its metadata: {problem}"))?;
        disks.push(DomainDisk { spec, socket });
    }
    Ok(disks)
}

/// The socket of the domain's vhost-user disk with this target.
fn socket_of(root: Node<'_, '_>, target: &str) -> Option<String> {
    let source = child(disk_of(root, target)?, "source")?;
    source.attribute("path").map(str::to_owned)
}

/// An attribute of the driver of the domain's vhost-user disk with this target.
fn driver_of(root: Node<'_, '_>, target: &str, attribute: &str) -> Option<String> {
    let driver = child(disk_of(root, target)?, "driver")?;
    driver.attribute(attribute).map(str::to_owned)
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

fn refused<T>(disk: &DiskSpec, problem: &str) -> Result<T, CommandLineError> {
    let problem = format!("disk {}: {problem}", disk.name);
    Err(CommandLineError::Refused(problem))
}

fn prepare(client: &mut Client, disks: &[DomainDisk], attached: &Attached) -> CommandResult {
    let mut new = Vec::new();
    let all = disks.iter().try_for_each(|disk| {
        if serve(client, disk, attached)? {
            new.push(&disk.spec.name);
        }
        Ok(())
    });
    if all.is_err() {
        for name in new {
            // The first error is the one to be seen.
            let ended = client.call("x-ringdisk-detach", json!({ "id": name }));
            if ended.is_ok() {
                let _ = attached.change(|names| names.remove(name));
            }
        }
    }
    all
}

/// Serves a disk, unless it is served from the file that the domain names: on an older one, the VM would lose what it has
/// written since. Returns whether the hook has attached it.
fn serve(
    client: &mut Client,
    disk: &DomainDisk,
    attached: &Attached,
) -> Result<bool, CommandLineError> {
    let DomainDisk { spec, socket } = disk;
    let Some(socket) = socket else {
        return refused(
            spec,
            "is named in the domain's metadata, but the domain has no <disk type='vhostuser'> with this target",
        );
    };
    let now = disk_now(client, &spec.name)?;
    let text = |key: &str| now.as_ref().and_then(|now| now[key].as_str());
    if let Some(file) = text("file")
        && !is_same_file(&spec.file, file)
    {
        let problem =
            text("problem").map_or_else(String::new, |why| format!(" (not at present: {why})"));
        let (name, wanted) = (&spec.name, &spec.file);
        return refused(
            spec,
            &format!(
                "is served from {file}{problem}, and the domain's metadata says {wanted}; if the disk has moved there, put \
             file='{file}' into the metadata, otherwise 'ringdisk detach {name}'"
            ),
        );
    }
    if let Some(its) = text("socket").filter(|_| text("problem").is_none()) {
        return match its == socket {
            true => Ok(false),
            false => refused(
                spec,
                &format!(
                    "is served at {its}, and the domain connects to {socket}; change the <source> of its <disk>, or detach it with \
                 'ringdisk detach {}'",
                    spec.name
                ),
            ),
        };
    }
    // One that is absent is there already, for somebody else.
    let is_new = now.is_none();
    if is_new {
        attached.change(|names| names.insert(spec.name.clone()))?;
    }
    let arguments = json!({ "disk": spec.to_string() });
    let served = client.call("x-ringdisk-attach", arguments);
    match served.map_err(CommandLineError::from) {
        Ok(_) => Ok(is_new),
        Err(e) => {
            if is_new {
                attached.change(|names| names.remove(&spec.name))?;
            }
            match e {
                CommandLineError::Refused(problem) => refused(spec, &problem),
                e => Err(e),
            }
        }
    }
}

fn release(client: &mut Client, disks: &[DomainDisk], attached: &Attached) -> CommandResult {
    let ours = attached.names();
    let mut result = Ok(());
    for disk in disks.iter().filter(|disk| ours.contains(&disk.spec.name)) {
        let let_go = let_go(client, disk, attached);
        result = result.and(let_go);
    }
    result
}

/// Stops serving a disk. One that was moved to another file meanwhile stays: the domain names the previous one, on which its VM
/// must not be started again.
fn let_go(client: &mut Client, disk: &DomainDisk, attached: &Attached) -> CommandResult {
    let name = &disk.spec.name;
    let forget = || attached.change(|names| names.remove(name));
    let Some(now) = disk_now(client, name)? else {
        return forget();
    };
    let file = now["file"].as_str().unwrap_or_default();
    if !is_same_file(&disk.spec.file, file) {
        return refused(
            &disk.spec,
            &format!(
                "stays served, since it has moved to {file}: put file='{file}' into the domain's metadata"
            ),
        );
    }
    let deadline = Instant::now() + LEAVING;
    loop {
        let ended = client.call("x-ringdisk-detach", json!({ "id": name }));
        let Err(e) = ended.map_err(CommandLineError::from) else {
            return forget();
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
    match configured {
        FileSpec::Path(path) => {
            let both = [path.canonicalize(), Path::new(now).canonicalize()];
            matches!(both, [Ok(configured), Ok(now)] if configured == now)
        }
        FileSpec::Rbd(image) => match format!("file={}", now.replace(',', ",,")).parse() {
            Ok(DiskSpec {
                file: FileSpec::Rbd(other),
                ..
            }) => image.is_same_image(&other),
            _ => false,
        },
        FileSpec::Null(_) => false,
    }
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
