//! Which devices libvirt boots from, and in which order.
//!
//! `<boot dev='hd'/>` means the first disk in libvirt's own order: buses in the order of their appearance in the domain, and
//! on each bus by the letters of the name (libvirt, `virDomainDiskInsert`, `qemuProcessPrepareDeviceBootorder`). A disk that
//! changes its bus may come after another one. The fix then makes the old order explicit for each device.

use std::collections::HashMap;

use roxmltree::Node;

use super::{attribute, bus_of_name, child, span};
use crate::text::Span;

/// The devices in the boot order, with their positions.
pub type Order<'a, 'i> = Vec<(usize, Node<'a, 'i>)>;

/// The boot order by `<os><boot>` after the disks of `moves` have moved to the virtio bus under new names.
///
/// `None` if the devices have explicit positions.
pub fn order<'a, 'i>(domain: Node<'a, 'i>, moves: &HashMap<Span, String>) -> Option<Order<'a, 'i>> {
    let devices = child(domain, "devices")?;
    let has_own =
        |node: Node<'_, '_>| child(node, "boot").is_some_and(|boot| boot.has_attribute("order"));
    if devices.children().any(has_own) {
        return None;
    }
    let mut words: Vec<&str> = elements(domain)
        .into_iter()
        .filter_map(|node| node.attribute("dev"))
        .collect();
    if words.is_empty() {
        // libvirt's default.
        words.push("hd");
    }
    let disks = disks(devices, moves);
    let first = |kinds: &[&str]| {
        let is = |node: &&Node<'_, '_>| kinds.contains(&node.attribute("device").unwrap_or("disk"));
        disks.iter().find(is).copied()
    };
    let of_word = |(place, word): (usize, &&str)| {
        let device = match *word {
            "hd" => first(&["disk", "lun"]),
            "cdrom" => first(&["cdrom"]),
            "fd" => first(&["floppy"]),
            "network" => child(devices, "interface"),
            _ => None,
        };
        Some((place + 1, device?))
    };
    Some(words.iter().enumerate().filter_map(of_word).collect())
}

/// The elements that order kinds of devices.
pub fn elements<'a, 'i>(domain: Node<'a, 'i>) -> Vec<Node<'a, 'i>> {
    let os = child(domain, "os");
    os.into_iter()
        .flat_map(|os| os.children())
        .filter(|node| node.has_tag_name("boot"))
        .collect()
}

/// The disks in libvirt's order.
fn disks<'a, 'i>(devices: Node<'a, 'i>, moves: &HashMap<Span, String>) -> Vec<Node<'a, 'i>> {
    let mut buses: Vec<String> = Vec::new();
    let mut sorted = Vec::new();
    for disk in devices.children().filter(|node| node.has_tag_name("disk")) {
        let target = child(disk, "target");
        let name = attribute(target, "dev").map_or("", |(name, _)| name);
        let bus = attribute(target, "bus").map_or_else(|| bus_of_name(name), |(bus, _)| bus);
        let (name, bus) = match moves.get(&span(disk)) {
            Some(name) => (name.as_str(), "virtio"),
            None => (name, bus),
        };
        let place = buses.iter().position(|known| known == bus);
        let place = place.unwrap_or_else(|| {
            buses.push(bus.to_owned());
            buses.len() - 1
        });
        sorted.push((place, number(name), disk));
    }
    sorted.sort_by_key(|(bus, number, _)| (*bus, *number));
    sorted.into_iter().map(|(.., disk)| disk).collect()
}

/// The number of the letters in a name: `sda` is 0, `vdz` 25, `hdaa` 26.
fn number(name: &str) -> Option<u64> {
    let prefix = ["fd", "hd", "vd", "sd", "xvd", "ubd"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))?;
    let letters = prefix.trim_end_matches(|c: char| c.is_ascii_digit());
    let digit = |number: u64, c: u8| match c {
        b'a'..=b'z' => number.checked_mul(26)?.checked_add(u64::from(c - b'a') + 1),
        _ => None,
    };
    letters.bytes().try_fold(0, digit)?.checked_sub(1)
}
