//! A VM's configuration, line by line.

use crate::proxmox::description::{decoded, encoded};
use crate::proxmox::{disk_key, lines};

/// The start of a comment with a drive's line, as Proxmox encodes descriptions.
pub const RECORD: &str = "ringdisk: ";

/// The start of the ids of ringdisk's chardevs and objects.
pub const ID: &str = "ringdisk-";

/// The PCI addresses on Proxmox' second bridge that it never uses.
const ADDRESSES: std::ops::RangeInclusive<u32> = 0x19..=0x1f;

/// The highest number of an unused volume (`qm.conf(5)`).
const UNUSED_MAX: usize = 256;

/// The drives in the description, with their lines.
pub fn records(text: &str) -> Vec<(String, String)> {
    let (_, comments) = lines(text);
    let mut found: Vec<(String, String)> = Vec::new();
    for (comment, _) in comments {
        if let Some((drive, line)) = record(&comment)
            && !found.iter().any(|(other, _)| *other == drive)
        {
            found.push((drive, line));
        }
    }
    found
}

pub fn record(comment: &str) -> Option<(String, String)> {
    let text = decoded(comment.strip_prefix('#')?);
    let (drive, line) = text.trim().strip_prefix(RECORD)?.split_once(": ")?;
    (disk_key(drive) && !line.is_empty()).then(|| (drive.to_owned(), line.trim().to_owned()))
}

/// The volume of a drive's line.
pub fn volume(line: &str) -> Option<String> {
    let mut parts = line
        .split(',')
        .map(|part| part.split_once('=').unwrap_or(("", part)));
    let found = parts.find(|(key, _)| matches!(*key, "" | "file" | "volume"));
    found
        .map(|(_, value)| value.to_owned())
        .filter(|value| !value.is_empty())
}

/// The first section of a configuration, line by line, and the rest.
pub struct Config {
    lines: Vec<String>,
    rest: String,
    /// As Proxmox writes them: sorted, comments first.
    is_sorted: bool,
}

impl Config {
    pub fn new(text: &str) -> Self {
        let (mut lines, mut rest) = (Vec::new(), String::new());
        for line in text.split_inclusive('\n') {
            if !rest.is_empty() || line.starts_with('[') {
                rest.push_str(line);
            } else {
                lines.push(line.to_owned());
            }
        }
        let keys: Vec<_> = lines
            .iter()
            .filter(|line| !line.trim().is_empty())
            .map(|line| key_of(line))
            .collect();
        let is_sorted = keys.is_sorted();
        Self {
            lines,
            rest,
            is_sorted,
        }
    }

    pub fn text(&self) -> String {
        self.lines.concat() + &self.rest
    }

    fn at(&self, key: &str) -> Option<usize> {
        self.lines
            .iter()
            .rposition(|line| key_of(line) == Some(key))
    }

    pub fn value(&self, key: &str) -> Option<String> {
        let line = &self.lines[self.at(key)?];
        let value = line.split_once(':')?.1.trim();
        (self
            .lines
            .iter()
            .filter(|line| key_of(line) == Some(key))
            .count()
            == 1)
            .then(|| value.to_owned())
    }

    fn newline(&self) -> &'static str {
        if self.lines.iter().any(|line| line.ends_with("\r\n")) {
            "\r\n"
        } else {
            "\n"
        }
    }

    fn line(&self, key: &str, value: &str) -> String {
        format!("{key}: {value}{}", self.newline())
    }

    /// Sets a value, where Proxmox would write it.
    pub fn set(&mut self, key: &str, value: &str) {
        let line = self.line(key, value);
        match self.at(key) {
            Some(at) => self.lines[at] = line,
            None => self.insert(key, line),
        }
    }

    fn insert(&mut self, key: &str, line: String) {
        let end = self
            .lines
            .iter()
            .rposition(|line| !line.trim().is_empty())
            .map_or(0, |at| at + 1);
        let later = |line: &String| key_of(line) > Some(key) && !line.trim().is_empty();
        let at = self.lines.iter().position(later).filter(|_| self.is_sorted);
        let at = at.unwrap_or(end);
        if let Some(before) = at.checked_sub(1).map(|before| &mut self.lines[before])
            && !before.ends_with('\n')
        {
            before.push('\n');
        }
        self.lines.insert(at, line);
    }

    pub fn remove(&mut self, key: &str) {
        self.lines.retain(|line| key_of(line) != Some(key));
    }

    /// Another line in place of one: where the file is not as Proxmox writes it, its order shows where the drive was.
    pub fn replace(&mut self, key: &str, new: &str, value: &str) {
        let line = self.line(new, value);
        match self.at(key) {
            Some(at) if !self.is_sorted => self.lines[at] = line,
            _ => {
                self.remove(key);
                self.insert(new, line);
            }
        }
    }

    /// # Errors
    /// The volume is no unused one, or the drive is there.
    pub fn restore(&mut self, drive: &str, line: &str) -> Result<(), String> {
        if self.at(drive).is_some() {
            return Err(format!(
                "the VM has a drive {drive} again, which is also in its description ('{RECORD}{drive}'): remove one of them"
            ));
        }
        let volume = volume(line).unwrap_or_default();
        let unused = |line: &&String| {
            let key = key_of(line).unwrap_or_default();
            key.starts_with("unused")
                && line
                    .split_once(':')
                    .is_some_and(|(_, value)| value.trim() == volume)
        };
        let unused = self
            .lines
            .iter()
            .find(unused)
            .and_then(|line| key_of(line))
            .map(str::to_owned);
        let unused = unused.ok_or_else(|| {
            format!("no 'unusedN: {volume}' is left of {drive}: the volume was removed, moved or attached elsewhere")
        })?;
        self.replace(&unused, drive, line);
        self.lines
            .retain(|line| record(line.trim_end()).is_none_or(|(other, _)| other != drive));
        Ok(())
    }

    pub fn add_record(&mut self, drive: &str, line: &str) {
        let line = format!(
            "#{}{}",
            encoded(&format!("{RECORD}{drive}: {line}")),
            self.newline()
        );
        let last = self.lines.iter().rposition(|line| line.starts_with('#'));
        self.lines.insert(last.map_or(0, |at| at + 1), line);
    }

    pub fn free_unused(&self) -> Result<String, String> {
        let names = (0..UNUSED_MAX).map(|number| format!("unused{number}"));
        names
            .into_iter()
            .find(|name| self.at(name).is_none())
            .ok_or_else(|| "there is no free unusedN".into())
    }

    pub fn free_address(&self, more: &str) -> Result<u32, String> {
        let args = self.value("args").unwrap_or_default();
        let is_used = |address: &u32| {
            let address = format!("{address:#x}");
            let parts = args.split([' ', ',']).chain(more.split([' ', ',']));
            parts
                .filter_map(|part| part.strip_prefix("addr="))
                .any(|used| used == address)
        };
        let mut all = ADDRESSES;
        all.find(|address| !is_used(address))
            .ok_or_else(|| "a VM can have seven disks of ringdisk".into())
    }

    /// Removes ringdisk's options for these drives, and those for the memory.
    pub fn clear_args(&mut self, is_removed: impl Fn(&str) -> bool, all: bool) {
        let Some(args) = self.value("args") else {
            return;
        };
        let words: Vec<&str> = args.split(' ').collect();
        let id = |part: &str| {
            let (_, value) = part.split_once('=')?;
            let id = value.strip_prefix(ID)?;
            Some(id.strip_prefix("dev-").unwrap_or(id).to_owned())
        };
        let is_ours = |value: &str| {
            let mut ids = value.split(',').filter_map(id);
            ids.any(|id| if id == "memory" { all } else { is_removed(&id) })
        };
        let mut kept = Vec::new();
        let mut at = 0;
        while at < words.len() {
            match words.get(at + 1) {
                Some(value) if words[at].starts_with('-') && is_ours(value) => at += 2,
                _ => {
                    kept.push(words[at]);
                    at += 1;
                }
            }
        }
        match kept.as_slice() {
            [] => self.remove("args"),
            kept => self.set("args", &kept.join(" ")),
        }
    }
}

/// The key of a line; `None` for comments and empty lines.
fn key_of(line: &str) -> Option<&str> {
    let (key, _) = line.split_once(':').filter(|_| !line.starts_with('#'))?;
    Some(key)
}
