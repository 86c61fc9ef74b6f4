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
//! `release` stops serving those that were attached for this domain, when QEMU has gone: after a shutdown, a crash, a saved
//! state, and on the source of a migration. The hook does not call libvirt, which would wait for the hook.

use std::collections::BTreeSet;
use std::io::{self, Read};

use roxmltree::Node;

use super::disks::{Manager, VmDisk, prepare, release, through_upgrades};
use crate::client::domain::{NAMESPACE, driver_of, parse_domain, socket_of, targets_of};
use crate::client::{CommandLineError, CommandResult, Connection};
use crate::config::spec::DiskSpec;

/// Limit of a domain's size: far more than any has.
const DOMAIN_BYTES_MAX: u64 = 4 << 20;

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
    let disks = parse(&args.domain, &text).map_err(refused);
    if let ("prepare", _) = step {
        let disks = disks?;
        return through_upgrades(|| prepare(&args.connection, Manager::Libvirt, &disks));
    }
    // Those of the domain are known by its name as well.
    let disks = disks.unwrap_or_default();
    through_upgrades(|| release(&args.connection, Manager::Libvirt, &args.domain, &disks))
}

/// The disks in the metadata of a domain.
fn parse(domain: &str, text: &str) -> Result<Vec<VmDisk>, String> {
    let document = parse_domain(text)?;
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
    let mut disks: Vec<VmDisk> = Vec::new();
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
        pairs.push(("domain", domain.to_owned()));
        pairs.push(("target", target.to_owned()));
        // The guest has these queues already, whatever this host would choose.
        for (attribute, key) in [("queues", "queues"), ("queue_size", "queue-size")] {
            if let Some(value) = driver_of(root, target, attribute).filter(|_| !has(&pairs, key)) {
                pairs.push((key, value));
            }
        }
        let spec = DiskSpec::from_pairs(pairs);
        let spec = spec.map_err(|problem| format!("disk {target} in its metadata: {problem}"))?;
        disks.push(VmDisk { spec, socket });
    }
    // One that was detached may still be named. If the domain has another, its target may be a mistake.
    if targets_of(root).all(|target| targets.contains(target)) {
        disks.retain(|disk| disk.socket.is_some());
    }
    Ok(disks)
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
        let expected = "/srv/a,,b.raw,name=vm1-vda,socket=/run/ringdisk/one.sock,cache=none,iops=5000,domain=vm1,target=vda";
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
        // Detached, and still named.
        let text =
            disks("<r:disk target='vdb' file='/b.raw'/><r:disk target='vda' file='/a.raw'/>");
        let found = parse("vm1", &text).unwrap();
        assert_eq!((found.len(), found[0].spec.name.as_str()), (1, "vm1-vda"));
    }
}
