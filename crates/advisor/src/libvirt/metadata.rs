//! ringdisk's disks in the metadata of a domain, from which its hook serves them.

use roxmltree::Node;

use super::convert::escaped;
use super::edit::{Domain, Xml};
use super::{attribute, child, span};
use crate::model::Disk;
use crate::ringdisk;
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// The namespace of ringdisk's disks.
pub const NAMESPACE: &str = "urn:ringdisk:libvirt:1";

/// A disk's target in its domain, and its attributes: the keys of a disk in ringdisk's configuration, with their values.
pub type NamedDisk = (String, Vec<(String, String)>);

/// The edits that add disks to the metadata.
///
/// # Errors
/// One of them is there, or the domain has no place for metadata.
pub fn add(target: &Target<'_>, xml: &Xml<'_>, disks: &[NamedDisk]) -> Edits {
    let domain = Domain::of(target, xml)?;
    let metadata = child(domain.node, "metadata");
    let ours = metadata.and_then(ours);
    let last = ours.and_then(|ours| {
        ours.children()
            .rfind(|node| node.has_tag_name((NAMESPACE, "disk")))
    });
    // That of the others; what is empty is replaced as a whole.
    let prefix = last.map_or("ringdisk", |last| prefix(xml.text(), last));
    let mut elements = Vec::new();
    for (target, attributes) in disks {
        if ours.is_some_and(|ours| named(ours, target).next().is_some()) {
            return Err(format!(
                "the domain's metadata names {target} for ringdisk already"
            ));
        }
        let colon = if prefix.is_empty() { "" } else { ":" };
        let mut element = format!("<{prefix}{colon}disk target='{}'", escaped(target));
        for (key, value) in attributes {
            element.push_str(&format!(" {key}='{}'", escaped(value)));
        }
        element.push_str("/>");
        elements.push(element);
    }
    let parent = metadata.unwrap_or(domain.node);
    let lines = |depth: usize| {
        let indent = domain.indent(parent);
        match domain.newline(child(domain.node, "name").unwrap_or(parent)) {
            "" => String::new(),
            newline => format!("{newline}{indent}{}", "  ".repeat(depth)),
        }
    };
    if let Some(last) = last {
        let between = format!("{}{}", domain.newline(last), domain.indent(last));
        return Ok(vec![domain.add_after(last, &elements.join(&between))]);
    }
    // In a domain without metadata, its parent is one level above.
    let depth = if metadata.is_some() { 1 } else { 2 };
    let all: String = elements
        .iter()
        .map(|element| lines(depth + 1) + element)
        .collect();
    let all = format!(
        "<ringdisk:disks xmlns:ringdisk='{NAMESPACE}'>{all}{}</ringdisk:disks>",
        lines(depth)
    );
    if let Some(ours) = ours {
        return Ok(vec![Edit::replace(span(ours), all)]);
    }
    if let Some(metadata) = metadata {
        return Ok(domain.add_child(metadata, &all));
    }
    let before = ["description", "title", "genid", "uuid", "name"];
    let before = before.iter().find_map(|name| child(domain.node, name));
    let before = before.ok_or("the domain has no <name>")?;
    let all = format!("<metadata>{}{all}{}</metadata>", lines(2), lines(1));
    Ok(vec![domain.add_after(before, &all)])
}

/// The disk as the metadata describes it.
///
/// # Errors
/// It is there twice.
pub fn find(target: &Target<'_>, xml: &Xml<'_>) -> Result<Option<Disk>, String> {
    let Some(element) = element(target, xml)? else {
        return Ok(None);
    };
    let pairs = element
        .attributes()
        .filter(|attribute| attribute.name() != "target");
    Ok(Some(ringdisk::disk_of_attributes(pairs.map(|pair| {
        (pair.name(), pair.value().to_owned(), Span::default())
    }))))
}

/// The edits that remove the disk from the metadata, and what is empty then.
///
/// # Errors
/// It is not there once.
pub fn remove(target: &Target<'_>, xml: &Xml<'_>) -> Edits {
    let domain = Domain::of(target, xml)?;
    let element = element(target, xml)?.ok_or("the metadata does not name the disk")?;
    let is_alone = |node: &Node<'_, '_>| {
        let parent = node.parent_element();
        parent.is_some_and(|parent| parent.children().filter(Node::is_element).count() == 1)
    };
    let mut gone = element;
    while !gone.has_tag_name("metadata") && is_alone(&gone) {
        gone = gone.parent_element().ok_or("the disk has no parent")?;
    }
    Ok(vec![domain.remove(gone)])
}

fn element<'a, 'i>(target: &Target<'_>, xml: &'a Xml<'i>) -> Result<Option<Node<'a, 'i>>, String> {
    let disk = xml.at(target.disk()?.span).ok_or("the disk is missing")?;
    let domain = disk.ancestors().find(|node| node.has_tag_name("domain"));
    let metadata = domain.and_then(|domain| child(domain, "metadata"));
    let dev = attribute(child(disk, "target"), "dev");
    let (Some(ours), Some((dev, _))) = (metadata.and_then(ours), dev) else {
        return Ok(None);
    };
    let mut found = named(ours, dev);
    let first = found.next();
    match found.next() {
        Some(_) => Err(format!(
            "the domain's metadata names two disks of ringdisk for {dev}"
        )),
        None => Ok(first),
    }
}

/// ringdisk's part of the metadata.
fn ours<'a, 'i>(metadata: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    let mut children = metadata.children();
    children.find(|node| node.has_tag_name((NAMESPACE, "disks")))
}

fn named<'a, 'i>(ours: Node<'a, 'i>, target: &str) -> impl Iterator<Item = Node<'a, 'i>> {
    ours.children().filter(move |node| {
        node.has_tag_name((NAMESPACE, "disk")) && node.attribute("target") == Some(target)
    })
}

/// The prefix of an element's name.
fn prefix<'i>(text: &'i str, node: Node<'_, '_>) -> &'i str {
    let name = &text[node.range().start + 1..];
    let end = name.find(|c: char| c.is_whitespace() || "/>".contains(c));
    let name = &name[..end.unwrap_or(name.len())];
    name.split_once(':').map_or("", |(prefix, _)| prefix)
}
