//! The elements and attributes of a domain that may change the speed of its disks, for comparisons of domains.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::xml::parse;
use super::{span, value_span};
use crate::input::{Input, Kind};
use crate::model::Vm;
use crate::qemu::{Options, Pair};
use crate::text::Span;

/// The elements of a domain that are compared, beside its disks and their controllers.
const COMPARED: &[&str] = &[
    "blkiotune",
    "clock",
    "commandline",
    "cpu",
    "cputune",
    "defaultiothread",
    "features",
    "iothreadids",
    "launchSecurity",
    "memoryBacking",
    "memtune",
    "numatune",
    "override",
    "throttlegroups",
    "vcpu",
];

/// Elements of disks with names and places, which change nothing, and the storage, which is compared as a property.
const NOT_COMPARED: &[&str] = &[
    "address",
    "alias",
    "auth",
    "backingStore",
    "boot",
    "config",
    "cookies",
    "host",
    "identity",
    "mirror",
    "privateData",
    "product",
    "readonly",
    "reservations",
    "seclabel",
    "serial",
    "shareable",
    "snapshot",
    "target",
    "vendor",
    "wwn",
];

/// The options of a VM's disks, controllers, I/O threads and CPUs; none unless it is a domain.
pub fn options_of_disks(input: &Input, vm: &Vm) -> Options {
    let mut options = Options::new();
    let text = match (input.kind, input.sources.first()) {
        (Kind::Libvirt, Some(source)) => &source.text,
        _ => return options,
    };
    let Ok(document) = parse(text) else {
        return options;
    };
    let mut domains = document.descendants();
    let Some(domain) = domains.find(|node| node.is_element() && span(*node) == vm.span) else {
        return options;
    };
    let own = domain.children().filter(|node| is_one_of(*node, COMPARED));
    let mut pairs = BTreeMap::new();
    add_all(own, "", &mut pairs);
    options.insert("domain".into(), pairs);
    let devices = domain
        .children()
        .filter(|node| node.has_tag_name("devices"))
        .flat_map(|node| node.children());
    for node in devices {
        let name = match node.tag_name().name() {
            "disk" => {
                let mut disks = vm.disks.iter();
                disks
                    .find(|disk| disk.span == span(node))
                    .map(|disk| format!("disk {}", disk.name))
            }
            "controller" if node.attribute("type") == Some("scsi") => {
                let index = node.attribute("index").unwrap_or("0");
                Some(format!("scsi controller {index}"))
            }
            _ => None,
        };
        if let Some(name) = name {
            let mut pairs = BTreeMap::new();
            add(node, "", &mut pairs);
            options.insert(name, pairs);
        }
    }
    options
}

fn is_one_of(node: Node<'_, '_>, names: &[&str]) -> bool {
    node.is_element() && names.contains(&node.tag_name().name())
}

/// Adds the attributes and the text of an element, and of those inside it. Keys are paths, as in `driver.event_idx`.
fn add(node: Node<'_, '_>, path: &str, pairs: &mut BTreeMap<String, Pair>) {
    let mut insert = |name: &str, value: &str, value_span: Span| {
        let key = [path, name].into_iter().filter(|part| !part.is_empty());
        let key = key.collect::<Vec<_>>().join(".");
        let pair = Pair {
            key: key.clone(),
            value: value.to_owned(),
            span: span(node),
            value_span,
            unknown: false,
        };
        pairs.insert(key, pair);
    };
    for attribute in node.attributes() {
        if is_compared(node, attribute.name()) {
            insert(attribute.name(), attribute.value(), value_span(attribute));
        }
    }
    let text = node.text().unwrap_or_default().trim();
    let has_elements = node.children().any(|child| child.is_element());
    if !text.is_empty() || !has_elements && node.attributes().len() == 0 {
        let text = if text.is_empty() { "set" } else { text };
        if is_compared(node, "") {
            insert("", text, span(node));
        }
    }
    let is_left_out = |child: &Node<'_, '_>| path.is_empty() && is_one_of(*child, NOT_COMPARED);
    let is_in_source = node.has_tag_name("source");
    let children = node.children().filter(|child| {
        child.is_element()
            && !is_left_out(child)
            && !(is_in_source && is_one_of(*child, NOT_COMPARED))
    });
    add_all(children, path, pairs);
}

/// The attribute that tells elements of a name apart.
fn key_of(element: &str) -> Option<&'static str> {
    match element {
        "feature" | "timer" => Some("name"),
        "vcpupin" => Some("vcpu"),
        "iothreadpin" => Some("iothread"),
        "cell" | "iothread" => Some("id"),
        _ => None,
    }
}

/// Adds elements beside each other, each with what tells it apart, as in `vcpupin 2`, or with its number.
fn add_all<'a, 'i: 'a>(
    nodes: impl Iterator<Item = Node<'a, 'i>>,
    path: &str,
    pairs: &mut BTreeMap<String, Pair>,
) {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for node in nodes {
        let name = node.tag_name().name();
        let number = numbers.entry(name).or_default();
        *number += 1;
        let own_name = key_of(name).and_then(|key| node.attribute(key));
        let name = match (own_name, *number) {
            (Some(own_name), _) => format!("{name} {own_name}"),
            (None, 1) => name.to_owned(),
            (None, number) => format!("{name} {number}"),
        };
        let path = match path {
            "" => name,
            path => format!("{path}.{name}"),
        };
        add(node, &path, pairs);
    }
}

/// Whether an attribute, or the text of an element without a name, is neither a name nor compared as a property.
fn is_compared(node: Node<'_, '_>, attribute: &str) -> bool {
    let is_storage = |node: Node<'_, '_>| {
        let above = node.parent();
        above.is_some_and(|above| above.has_tag_name("disk"))
    };
    match (node.tag_name().name(), attribute) {
        // The storage, and what a change of it changes too.
        ("source", _) if is_storage(node) => false,
        ("disk", "type" | "device" | "snapshot" | "sgio" | "rawio") => false,
        ("controller", "type" | "index" | "model") => false,
        ("cpu", "check") => false,
        (name, key) if key_of(name) == Some(key) => false,
        ("driver", "name" | "error_policy" | "rerror_policy") => false,
        ("poll", "max") => false,
        ("blockio", "logical_block_size" | "physical_block_size") => false,
        ("vcpu", "") => false,
        _ => true,
    }
}
