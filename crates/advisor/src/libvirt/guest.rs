//! The guest's operating system, if the domain reveals it.

use roxmltree::Node;

use super::{at, attribute, child, span};
use crate::model::Vm;

/// Vendors of Linux in libosinfo's ids.
const LINUX: &[&str] = &[
    "almalinux.org",
    "alpinelinux.org",
    "altlinux.org",
    "amazon.com",
    "archlinux.org",
    "centos.org",
    "circle-linux.org",
    "debian.org",
    "endlessos.com",
    "euro-linux.com",
    "fedoraproject.org",
    "gentoo.org",
    "guix.gnu.org",
    "kali.org",
    "libosinfo.org",
    "mageia.org",
    "mandriva.com",
    "manjaro.org",
    "miraclelinux.com",
    "nixos.org",
    "opensuse.org",
    "oracle.com",
    "pop-os.org",
    "redhat.com",
    "rockylinux.org",
    "scientificlinux.org",
    "slackware.com",
    "suse.com",
    "ubuntu.com",
    "voidlinux.org",
];

/// Reads libosinfo's metadata, or infers Windows from Hyper-V's enlightenments.
pub fn system(node: Node<'_, '_>, vm: &mut Vm) {
    let os = child(node, "metadata")
        .into_iter()
        .flat_map(|metadata| metadata.descendants())
        .find(|node| node.tag_name().name() == "os" && node.has_attribute("id"));
    if let Some((id, at)) = attribute(os, "id") {
        let system = match id.split('/').nth(2).unwrap_or(id) {
            "microsoft.com" => "windows",
            _ if id.contains("solaris") => "other",
            vendor if LINUX.contains(&vendor) => "linux",
            _ => "other",
        };
        vm.table.give("vm.os", system, at);
    } else if let Some(hyperv) = at(node, &["features", "hyperv"]) {
        vm.table.give("vm.os", "windows", span(hyperv));
    }
}
