//! Changes to single attributes and elements of a domain.

use std::collections::{HashMap, HashSet};

use roxmltree::{Document, Node, NodeId};

use super::boot;
use super::{Controllers, EMULATED_SCSI, at, attribute, child, parse, span};
use crate::setting::Setting;
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// A parsed text whose domains and disks are found by their spans.
pub struct Xml<'i> {
    text: &'i str,
    document: Document<'i>,
    elements: HashMap<Span, NodeId>,
    /// SCSI controllers by domain and index.
    controllers: HashMap<(Span, String), NodeId>,
    /// Domains with an NVDIMM that other processes cannot map
    private: HashSet<Span>,
}

impl<'i> Xml<'i> {
    /// `None` if the text is not XML.
    pub fn parse(text: &'i str) -> Option<Self> {
        let document = parse(text).ok()?;
        let elements = document.descendants().filter(|node| {
            matches!(node.tag_name().name(), "domain" | "disk") && node.is_element()
        });
        let elements = elements.map(|node| (span(node), node.id())).collect();
        let mut controllers = HashMap::new();
        let mut private = HashSet::new();
        let domains = document.descendants();
        for domain in domains.filter(|node| node.has_tag_name("domain")) {
            for (index, node) in Controllers::of(domain).0 {
                controllers.insert((span(domain), index.to_owned()), node.id());
            }
            let devices = child(domain, "devices").into_iter();
            let mut devices = devices.flat_map(|devices| devices.children());
            if devices.any(|node| {
                node.has_tag_name("memory")
                    && node.attribute("model") == Some("nvdimm")
                    && node.attribute("access") != Some("shared")
            }) {
                private.insert(span(domain));
            }
        }
        Some(Self {
            text,
            document,
            elements,
            controllers,
            private,
        })
    }

    /// The domain or the disk with this span.
    pub fn at(&self, place: Span) -> Option<Node<'_, 'i>> {
        self.document.get_node(*self.elements.get(&place)?)
    }

    /// The SCSI controller of a disk.
    fn controller(&self, domain: Span, disk: Node<'_, '_>) -> Option<Node<'_, 'i>> {
        let index = child(disk, "address").and_then(|node| node.attribute("controller"));
        let key = (domain, index.unwrap_or("0").to_owned());
        self.document.get_node(*self.controllers.get(&key)?)
    }

    /// Whether the domain has memory that other processes cannot map.
    pub fn has_private_memory(&self, domain: Span) -> bool {
        self.private.contains(&domain)
    }

    pub fn text(&self) -> &'i str {
        self.text
    }
}

/// A domain that changes.
pub struct Domain<'a, 'i> {
    text: &'i str,
    pub node: Node<'a, 'i>,
}

/// Sets the number of I/O threads.
///
/// # Errors
/// The domain has no place for it.
pub fn count_threads(target: &Target<'_>, xml: &Xml<'_>, count: u64) -> Edits {
    Domain::of(target, xml)?.count_threads(count)
}

/// The edits that preserve the boot order after disks have moved to virtio under new names.
///
/// # Errors
/// The domain is missing.
pub fn keep_boot_order(target: &Target<'_>, xml: &Xml<'_>, moves: &HashMap<Span, String>) -> Edits {
    Ok(Domain::of(target, xml)?.keep_boot_order(moves))
}

/// The edits for a setting.
///
/// # Errors
/// The reason why the setting cannot be made.
pub fn edits(target: &Target<'_>, xml: &Xml<'_>, setting: Setting) -> Edits {
    let domain = Domain::of(target, xml)?;
    let vm = target.vm()?;
    match setting {
        Setting::SharedMemory => return domain.share_memory(),
        Setting::TrimThreads => return domain.trim_threads(target),
        _ => {}
    }
    let disk = target.disk()?;
    let node = xml.at(disk.span).ok_or("the disk is missing")?;
    let scsi = disk.table.word("disk.bus") == Some("virtio-scsi");
    let scsi_controller = match disk.table.word("disk.bus") {
        Some("virtio-scsi" | "scsi-emulated") => xml.controller(vm.span, node),
        _ => None,
    };
    // The element with the queues and threads.
    let carrier = if scsi {
        scsi_controller.ok_or("the domain has no element for the SCSI controller")?
    } else {
        node
    };
    match setting {
        Setting::Virtio => domain.virtio(target, node, scsi_controller),
        Setting::Cache(mode) => domain.driver(node, "cache", mode),
        Setting::CacheDirect => {
            let mode = match disk.table.word("disk.cache") {
                Some("writethrough") => "directsync",
                _ => "none",
            };
            domain.driver(node, "cache", mode)
        }
        // libvirt requires an explicit cache mode, although the default of a shareable disk would be enough.
        Setting::Aio("native") => {
            let cache = disk.table.word("disk.cache").unwrap_or("none");
            domain.attributes(node, &[("cache", cache), ("io", "native")])
        }
        Setting::Aio(word) => domain.driver(node, "io", word),
        Setting::Discard => domain.driver(node, "discard", "unmap"),
        Setting::QueuesAsVcpus => {
            let vcpus = vm.table.number("vm.vcpus").unwrap_or(1);
            domain.driver(carrier, "queues", &vcpus.to_string())
        }
        Setting::OwnThread => {
            if let Some(id) = target.round.unused_thread(target.vm) {
                return domain.driver(carrier, "iothread", &id);
            }
            let defined = || vm.threads.iter().map(|thread| thread.id.clone()).collect();
            let id = target
                .round
                .name(target.vm, "thread", defined, |n| (n + 1).to_string());
            let least = match child(domain.node, "iothreadids") {
                Some(_) => 0,
                None => id.parse().unwrap_or(0),
            };
            domain.want_threads(target, 1, least)?;
            domain.driver(carrier, "iothread", &id)
        }
        Setting::DefineThread => {
            let id = disk
                .table
                .word("disk.thread-missing")
                .and_then(|id| id.parse::<u64>().ok());
            let id = id
                .filter(|id| (1..=64).contains(id))
                .ok_or("I/O threads of libvirt have numbers from 1")?;
            if child(domain.node, "iothreadids").is_some() {
                return Err("<iothreadids> lists the I/O threads; add the id manually".into());
            }
            domain.want_threads(target, 0, id)?;
            Ok(Vec::new())
        }
        Setting::Remove("iothread") => domain.without(child(carrier, "driver"), "iothread"),
        Setting::Remove("ioeventfd") => domain.without(child(carrier, "driver"), "ioeventfd"),
        Setting::EvenMapping => even_mapping(carrier),
        Setting::Reconnect => domain.reconnect(node),
        Setting::L2Cache => {
            let needed = disk
                .table
                .number("backing.qcow2-l2-needed")
                .ok_or("the size of its tables is unknown")?;
            domain.l2_cache(node, needed)
        }
        _ => Err("libvirt has no such setting".into()),
    }
}

/// Removes the queues from a mapping: they are then assigned in turn.
fn even_mapping(carrier: Node<'_, '_>) -> Edits {
    let mapping = child(carrier, "driver")
        .and_then(|driver| child(driver, "iothreads"))
        .ok_or("the disk has no queue mapping")?;
    let threads = mapping
        .children()
        .filter(|node| node.has_tag_name("iothread") && node.has_children());
    let edits = threads.filter_map(|thread| {
        let element = format!("<iothread id='{}'/>", thread.attribute("id")?);
        Some(Edit::replace(span(thread), element))
    });
    Ok(edits.collect())
}

impl<'a, 'i> Domain<'a, 'i> {
    pub fn of(target: &Target<'_>, xml: &'a Xml<'i>) -> Result<Domain<'a, 'i>, String> {
        let node = xml.at(target.vm()?.span).ok_or("the domain is missing")?;
        Ok(Domain {
            text: xml.text(),
            node,
        })
    }

    /// Reserves I/O threads. The round writes their number once for all disks.
    fn want_threads(&self, target: &Target<'_>, more: u64, least: u64) -> Result<(), String> {
        let now = target.vm()?.threads.len() as u64;
        let count = target.round.want_threads(target.vm, now, more, least);
        self.count_threads(count).map(drop)
    }

    /// The indentation of an element.
    pub fn indent(&self, node: Node<'_, '_>) -> &'i str {
        let before = &self.text[..node.range().start];
        let line = before.rfind('\n').map_or(0, |newline| newline + 1);
        let indent = &before[line..];
        if indent.chars().all(char::is_whitespace) {
            indent
        } else {
            ""
        }
    }

    pub fn newline(&self, node: Node<'_, '_>) -> &'static str {
        // Elements on one line stay on one line.
        if self.text[..node.range().start].ends_with('>') {
            ""
        } else {
            "\n"
        }
    }

    fn set(&self, node: Node<'_, '_>, name: &str, value: &str) -> Vec<Edit> {
        if let Some((_, at)) = attribute(Some(node), name) {
            return vec![Edit::replace(at, value)];
        }
        let start = node.range().start;
        let last = node
            .attributes()
            .map(|attribute| attribute.range().end)
            .max();
        let end = last.unwrap_or(start + 1 + node.tag_name().name().len());
        let quote = self.text[..end]
            .chars()
            .next_back()
            .filter(|c| *c == '"')
            .unwrap_or('\'');
        vec![Edit::replace(
            Span::new(0, end, end),
            format!(" {name}={quote}{value}{quote}"),
        )]
    }

    /// Removes an attribute and the white space before it.
    fn without(&self, node: Option<Node<'_, '_>>, name: &str) -> Edits {
        let attribute = node
            .and_then(|node| node.attribute_node(name))
            .ok_or("it is not set")?;
        let range = attribute.range();
        let start = self.text[..range.start].trim_end().len();
        Ok(vec![Edit::replace(Span::new(0, start, range.end), "")])
    }

    /// Removes an element and the white space before it.
    pub fn remove(&self, node: Node<'_, '_>) -> Edit {
        let range = node.range();
        let start = self.text[..range.start].trim_end_matches([' ', '\t']).len();
        let line = self.text[..start].strip_suffix('\n');
        let start = line.map_or(start, |line| line.strip_suffix('\r').unwrap_or(line).len());
        Edit::replace(Span::new(0, start, range.end), "")
    }

    pub fn add_after(&self, node: Node<'_, '_>, xml: &str) -> Edit {
        let text = format!("{}{}{xml}", self.newline(node), self.indent(node));
        Edit::replace(span(node).after(), text)
    }

    fn add_before(&self, node: Node<'_, '_>, xml: &str) -> Edit {
        let text = format!("{xml}{}{}", self.newline(node), self.indent(node));
        Edit::replace(span(node).before(), text)
    }

    pub fn add_child(&self, node: Node<'_, '_>, xml: &str) -> Vec<Edit> {
        let last = node.children().rfind(Node::is_element);
        if let Some(last) = last {
            return vec![self.add_after(last, xml)];
        }
        let range = node.range();
        let name = node.tag_name().name();
        let indent = self.indent(node);
        let newline = self.newline(node);
        let inner = if newline.is_empty() {
            String::new()
        } else {
            format!("{indent}  ")
        };
        let body = format!("{newline}{inner}{xml}{newline}{indent}");
        let edit = match self.text[range.clone()].strip_suffix("/>") {
            Some(head) => {
                let start = range.start + head.trim_end().len();
                Edit::replace(Span::new(0, start, range.end), format!(">{body}</{name}>"))
            }
            None => {
                let start = range.start + self.text[range.clone()].rfind("</").unwrap_or(0);
                Edit::replace(Span::new(0, start, start), body)
            }
        };
        vec![edit]
    }

    /// Sets an attribute of `<driver>`, and creates the element if it is missing.
    fn driver(&self, node: Node<'_, '_>, name: &str, value: &str) -> Edits {
        self.attributes(node, &[(name, value)])
    }

    /// Sets several attributes of `<driver>`.
    fn attributes(&self, node: Node<'_, '_>, values: &[(&str, &str)]) -> Edits {
        if let Some(driver) = child(node, "driver") {
            let set = values
                .iter()
                .filter(|(name, value)| driver.attribute(*name) != Some(*value));
            return Ok(set
                .flat_map(|(name, value)| self.set(driver, name, value))
                .collect());
        }
        let values: String = values
            .iter()
            .map(|(name, value)| format!(" {name}='{value}'"))
            .collect();
        if node.has_tag_name("controller") {
            return Ok(self.add_child(node, &format!("<driver{values}/>")));
        }
        let first = node
            .children()
            .find(Node::is_element)
            .ok_or("the disk has no elements")?;
        let xml = format!("<driver name='qemu' type='raw'{values}/>");
        Ok(vec![self.add_before(first, &xml)])
    }

    fn virtio(&self, target: &Target<'_>, disk: Node<'_, '_>, scsi: Option<Node<'_, '_>>) -> Edits {
        if target.disk()?.table.word("disk.bus") == Some("scsi-emulated")
            && let Some(controller) = scsi
        {
            let model = controller.attribute("model");
            let address = child(controller, "address").and_then(|node| node.attribute("type"));
            let is_emulated =
                model.is_none_or(|model| model == "auto" || EMULATED_SCSI.contains(&model));
            if !is_emulated || address.is_some_and(|kind| kind != "pci") {
                return Err("its controller is not on a PCI bus".into());
            }
            return Ok(self.set(controller, "model", "virtio-scsi"));
        }
        let element = child(disk, "target").ok_or("the disk has no <target>")?;
        if let Some(foreign) = foreign_to_virtio(disk, element) {
            return Err(format!(
                "virtio-blk has no {foreign}, by which the guest may identify the disk"
            ));
        }
        let used = || -> HashSet<String> {
            let targets = self
                .node
                .descendants()
                .filter(|node| node.has_tag_name("target"));
            let names = targets.filter_map(|node| node.attribute("dev"));
            names.map(str::to_owned).collect()
        };
        let free = target.round.name(target.vm, "target", used, |number| {
            format!("vd{}", letters(number))
        });
        target.round.moves(target.vm, span(disk), &free);
        let mut edits = self.set(element, "dev", &free);
        edits.extend(self.set(element, "bus", "virtio"));
        for name in ["rotation_rate", "removable"] {
            if element.has_attribute(name) {
                edits.extend(self.without(Some(element), name)?);
            }
        }
        // The address on the old bus is invalid on the new one; libvirt assigns another.
        edits.extend(child(disk, "address").map(|address| self.remove(address)));
        Ok(edits)
    }

    /// Makes the boot order explicit, if disks that move to another bus and name would change it.
    fn keep_boot_order(&self, moves: &HashMap<Span, String>) -> Vec<Edit> {
        let before = boot::order(self.node, &HashMap::new());
        let after = boot::order(self.node, moves);
        let Some(devices) = before.filter(|before| Some(before) != after.as_ref()) else {
            return Vec::new();
        };
        let mut edits: Vec<Edit> = boot::elements(self.node)
            .into_iter()
            .map(|node| self.remove(node))
            .collect();
        for (place, device) in devices {
            let element = format!("<boot order='{place}'/>");
            match child(device, "target").filter(|_| device.has_tag_name("disk")) {
                Some(target) => edits.push(self.add_after(target, &element)),
                None => edits.extend(self.add_child(device, &element)),
            }
        }
        edits
    }

    fn count_threads(&self, count: u64) -> Edits {
        if let Some(node) = child(self.node, "iothreads") {
            return Ok(vec![Edit::replace(
                span(node),
                format!("<iothreads>{count}</iothreads>"),
            )]);
        }
        let xml = format!("<iothreads>{count}</iothreads>");
        let before = ["vcpu", "currentMemory", "memory", "name"];
        let node = before
            .iter()
            .find_map(|name| child(self.node, name))
            .ok_or("the domain has no <vcpu>")?;
        Ok(vec![self.add_after(node, &xml)])
    }

    fn trim_threads(&self, target: &Target<'_>) -> Edits {
        let vm = target.vm()?;
        let pinned = child(self.node, "cputune").is_some_and(|tune| {
            tune.children()
                .any(|node| node.tag_name().name().starts_with("iothread"))
        });
        if pinned {
            return Err("its I/O threads are pinned in <cputune>".into());
        }
        let ids = child(self.node, "iothreadids");
        let count = child(self.node, "iothreads");
        let used = vm.threads_used();
        let needed: HashSet<&str> = vm
            .threads
            .iter()
            .map(|thread| thread.id.as_str())
            .filter(|id| used.contains(id))
            .collect();
        if needed.is_empty() {
            return Ok(ids
                .into_iter()
                .chain(count)
                .map(|node| self.remove(node))
                .collect());
        }
        let in_order = (1..=needed.len()).all(|id| needed.contains(id.to_string().as_str()));
        match (ids, in_order) {
            (None, true) => self.count_threads(needed.len() as u64),
            _ => Err("the ids are not consecutive from 1: remove the I/O threads manually".into()),
        }
    }

    fn reconnect(&self, disk: Node<'_, '_>) -> Edits {
        let source = child(disk, "source").ok_or("the disk has no source")?;
        let Some(reconnect) = child(source, "reconnect") else {
            return Ok(self.add_child(source, "<reconnect enabled='yes' timeout='1'/>"));
        };
        let mut edits = self.set(reconnect, "enabled", "yes");
        if !reconnect.has_attribute("timeout") {
            edits.extend(self.set(reconnect, "timeout", "1"));
        }
        Ok(edits)
    }

    fn l2_cache(&self, disk: Node<'_, '_>, bytes: u64) -> Edits {
        let driver = child(disk, "driver").ok_or("the disk has no <driver>")?;
        let size = format!("<max_size unit='bytes'>{bytes}</max_size>");
        if let Some(found) = at(driver, &["metadata_cache", "max_size"]) {
            return Ok(vec![Edit::replace(span(found), size)]);
        }
        let element = format!("<metadata_cache>{size}</metadata_cache>");
        Ok(self.add_child(driver, &element))
    }

    fn share_memory(&self) -> Edits {
        if let Some(backing) = child(self.node, "memoryBacking") {
            if let Some(access) = child(backing, "access") {
                return Ok(self.set(access, "mode", "shared"));
            }
            let xml = match child(backing, "hugepages").or(child(backing, "source")) {
                Some(_) => "<access mode='shared'/>".to_owned(),
                None => {
                    let last = backing.children().rfind(Node::is_element);
                    let indent = last.map_or_else(
                        || format!("{}  ", self.indent(backing)),
                        |last| self.indent(last).to_owned(),
                    );
                    let newline = self.newline(last.unwrap_or(backing));
                    let indent = if newline.is_empty() { "" } else { &indent };
                    format!("<source type='memfd'/>{newline}{indent}<access mode='shared'/>")
                }
            };
            return Ok(self.add_child(backing, &xml));
        }
        let before = ["currentMemory", "memory", "name"];
        let node = before
            .iter()
            .find_map(|name| child(self.node, name))
            .ok_or("the domain has no <memory>")?;
        let (newline, indent) = (self.newline(node), self.indent(node));
        let inner = match newline {
            "" => String::new(),
            newline => format!("{newline}{indent}  "),
        };
        let xml = format!(
            "<memoryBacking>{inner}<source type='memfd'/>{inner}<access mode='shared'/>{newline}{indent}</memoryBacking>"
        );
        Ok(vec![self.add_after(node, &xml)])
    }
}

/// The letters in the kernel's name for a disk: a to z, aa, ab and so on.
fn letters(number: u64) -> String {
    let last = char::from(b'a' + (number % 26) as u8);
    match number / 26 {
        0 => last.to_string(),
        more => letters(more - 1) + &last.to_string(),
    }
}

/// A property of an IDE, SATA or USB disk that a virtio disk does not have.
fn foreign_to_virtio(disk: Node<'_, '_>, target: Node<'_, '_>) -> Option<String> {
    let shared = [
        "address",
        "alias",
        "auth",
        "backingStore",
        "blockio",
        "boot",
        "driver",
        "encryption",
        "geometry",
        "iotune",
        "mirror",
        "readonly",
        "serial",
        "shareable",
        "source",
        "target",
        "throttlefilters",
        "transient",
    ];
    let element = disk
        .children()
        .filter(Node::is_element)
        .find(|node| !shared.contains(&node.tag_name().name()));
    if let Some(element) = element {
        return Some(format!("<{}>", element.tag_name().name()));
    }
    if child(disk, "geometry").is_some_and(|node| node.has_attribute("trans")) {
        return Some("translated geometry".into());
    }
    let known = ["dev", "bus", "rotation_rate"];
    let attribute = target.attributes().find(|attribute| {
        let is_off = attribute.name() == "removable" && attribute.value() == "off";
        !known.contains(&attribute.name()) && !is_off
    });
    attribute.map(|attribute| format!("{}='{}'", attribute.name(), attribute.value()))
}
