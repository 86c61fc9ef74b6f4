//! Sets the I/O scheduler and the read-ahead of the host's block devices below disks, and restores them.
//!
//! The scheduler is that of the devices at the bottom, such as the disks of an array. The read-ahead is that of the device
//! which is opened, or on which the file system is: the page cache reads ahead before device-mapper or md sees a request.
//!
//! A run that is killed cannot restore anything. The values from before are therefore in a file that lives as long as the
//! kernel's settings do: until the next boot. The next run restores them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use harness::paths::is_block_device;
use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::plan::host_queue::HostQueue;
use crate::plan::units::size_text;
use crate::plan::words::Scheduler;

/// The values from before. Only root can write here.
const RECORD: &str = "/run/ringdisk-lab-queues.json";
/// How deep device-mapper and md devices may lie above each other.
const DEPTH_MAX: u32 = 16;
const SCHEDULER: &str = "scheduler";
const READ_AHEAD: &str = "read_ahead_kb";

/// A value from before the lab changed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Original {
    /// The device's name in `/sys/block`
    device: String,
    attribute: String,
    value: String,
    /// What the lab has set
    set: String,
    /// The kernel's number of the device, which no other gets until the next boot; `None` before Linux 5.15
    diskseq: Option<u64>,
}

/// Changed queues. Dropping this restores them.
#[derive(Debug)]
pub struct ChangedQueues {
    record: Record,
    originals: Vec<Original>,
}

/// Sets the queues below these disks; `None` if nothing has to change.
///
/// # Errors
/// A disk has no block device, the device does not support a value, or another run has changed queues.
pub fn set(wanted: &HostQueue, disks: &[PathBuf]) -> Result<Option<ChangedQueues>> {
    // Disks that need not have a device: in memory, on network file systems, in a Ceph cluster.
    if *wanted == HostQueue::default() {
        return Ok(None);
    }
    let mut changes: Vec<(String, &str, String)> = Vec::new();
    for top in devices(disks)? {
        if let Some(bytes) = wanted.read_ahead {
            changes.push((top.clone(), READ_AHEAD, (bytes >> 10).to_string()));
        }
        if wanted.scheduler != Scheduler::Default {
            for bottom in at_bottom(&top, DEPTH_MAX)? {
                changes.push((bottom, SCHEDULER, wanted.scheduler.to_string()));
            }
        }
    }
    changes.retain(|(device, attribute, value)| {
        read(device, attribute).is_none_or(|now| now != *value)
    });
    if changes.is_empty() {
        return Ok(None);
    }
    let record = Record::open(Path::new(RECORD))?.with_context(|| {
        format!("another run of 'ringdisk lab' has changed queues of this host ({RECORD}); wait for its end")
    })?;
    // From here on, an error restores what was changed before it.
    let mut changed = ChangedQueues {
        record,
        originals: Vec::new(),
    };
    for (device, attribute, value) in changes {
        let before = read(&device, attribute)
            .with_context(|| format!("{device} has no queue/{attribute}"))?;
        changed.originals.push(Original {
            device: device.clone(),
            attribute: attribute.into(),
            value: before,
            set: value.clone(),
            diskseq: diskseq(&device),
        });
        // Before the change: a run may be killed between the two.
        changed.record.write(&changed.originals)?;
        write(&device, attribute, &value)?;
    }
    Ok(Some(changed))
}

/// The scheduler and the read-ahead in force below the first of these disks, as a plan writes them.
pub fn in_force(disks: &[PathBuf]) -> Option<[(&'static str, String); 2]> {
    let top = device_of(disks.first()?).ok()?;
    let bottom = at_bottom(&top, DEPTH_MAX).ok()?.into_iter().next()?;
    let kib: u64 = read(&top, READ_AHEAD)?.parse().ok()?;
    let read_ahead = if kib == 0 {
        "0".into()
    } else {
        size_text(kib << 10)
    };
    Some([
        ("host-scheduler", read(&bottom, SCHEDULER)?),
        ("host-read-ahead", read_ahead),
    ])
}

/// Why the queues below a disk cannot be set.
pub fn missing(wanted: &HostQueue, disk: &Path) -> Option<String> {
    let checked = || -> Result<()> {
        let top = device_of(disk)?;
        let bottom = at_bottom(&top, DEPTH_MAX)?;
        let bottom = if wanted.scheduler == Scheduler::Default {
            Vec::new()
        } else {
            bottom
        };
        for device in bottom {
            ensure_choice(&device, &wanted.scheduler.to_string())?;
        }
        Ok(())
    };
    checked().err().map(|error| format!("{error:#}"))
}

/// Restores what a killed run has changed. Returns a sentence for each value.
pub fn restore_after_kill() -> Vec<String> {
    if !Path::new(RECORD).exists() {
        return Vec::new();
    }
    let restored = || -> Result<Vec<String>> {
        let Some(mut record) = Record::open(Path::new(RECORD))? else {
            return Ok(Vec::new()); // the run goes on
        };
        // Without a text, the run was killed before the first change.
        let originals: Vec<Original> = record.read()?.unwrap_or_default();
        let said = originals.iter().rev().map(Original::restore_left);
        let said = said.collect();
        record.remove();
        Ok(said)
    };
    restored().unwrap_or_else(|error| {
        vec![format!(
            "an earlier run has changed queues of this host, which only root can restore: {error:#}"
        )]
    })
}

impl ChangedQueues {
    /// The values from before, as in `sda scheduler mq-deadline`.
    pub fn before(&self) -> String {
        let words: Vec<String> = self.originals.iter().map(ToString::to_string).collect();
        words.join(", ")
    }
}

impl Drop for ChangedQueues {
    fn drop(&mut self) {
        let mut failed = Vec::new();
        for original in self.originals.iter().rev() {
            if let Err(error) = original.restore() {
                eprintln!("{original} is not restored: {error:#}");
                failed.push(original.clone());
            }
        }
        if failed.is_empty() || self.record.write(&failed).is_err() {
            self.record.remove();
        }
    }
}

impl Original {
    fn restore(&self) -> Result<()> {
        self.check_names()?;
        write(&self.device, &self.attribute, &self.value)
    }

    fn check_names(&self) -> Result<()> {
        let known = [SCHEDULER, READ_AHEAD].contains(&self.attribute.as_str());
        let name = !self.device.is_empty() && !self.device.contains('/') && self.device != "..";
        ensure!(known && name, "{RECORD} is damaged");
        Ok(())
    }

    /// Restores a value that a killed run has left, unless somebody else has changed it since. Returns what to tell the user.
    fn restore_left(&self) -> String {
        let restored = || -> Result<String> {
            self.check_names()?;
            let now = read(&self.device, &self.attribute);
            let is_own = now.as_ref() == Some(&self.set) && diskseq(&self.device) == self.diskseq;
            // The run may have been killed before it set the value.
            if !is_own && now.as_ref() != Some(&self.value) {
                let Self {
                    device, attribute, ..
                } = self;
                return Ok(match now {
                    Some(now) => format!(
                        "{device} {attribute} stays {now}, which the run had not set; it was {} before",
                        self.value
                    ),
                    None => format!("there is no {device} any more"),
                });
            }
            self.restore()?;
            Ok(format!("{self} is restored"))
        };
        match restored() {
            Ok(said) => format!("an earlier run was killed: {said}"),
            Err(error) => {
                format!("an earlier run was killed, and {self} is not restored: {error:#}")
            }
        }
    }
}

fn diskseq(device: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/block/{device}/diskseq")).ok()?;
    text.trim().parse().ok()
}

impl std::fmt::Display for Original {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}={}", self.device, self.attribute, self.value)
    }
}

/// The names of the devices on which these disks are.
fn devices(disks: &[PathBuf]) -> Result<BTreeSet<String>> {
    disks.iter().map(|disk| device_of(disk)).collect()
}

/// The name of the whole device that a disk is, or on which its file system is.
fn device_of(disk: &Path) -> Result<String> {
    let metadata = fs::metadata(disk).with_context(|| format!("opening {}", disk.display()))?;
    let number = if is_block_device(disk) {
        metadata.rdev()
    } else if rustix::fs::major(metadata.dev()) > 0 {
        metadata.dev()
    } else {
        // btrfs has device numbers of its own.
        below_mount(disk)?
    };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
        .with_context(|| format!("looking for the block device of {}", disk.display()))?;
    whole_device(&folder)
}

/// The number of the device that is mounted where the disk's file is.
fn below_mount(disk: &Path) -> Result<u64> {
    let disk = fs::canonicalize(disk)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading mountinfo")?;
    let mount = |line: &str| {
        let (fields, source) = line.split_once(" - ")?;
        let point = PathBuf::from(fields.split(' ').nth(4)?.replace("\\040", " "));
        let source = PathBuf::from(source.split(' ').nth(1)?);
        disk.starts_with(&point).then_some((point, source))
    };
    // The last one of the longest path is on top.
    let found = mounts
        .lines()
        .filter_map(mount)
        .max_by_key(|(point, _)| point.as_os_str().len());
    match found {
        Some((_, source)) if is_block_device(&source) => Ok(fs::metadata(source)?.rdev()),
        Some((point, source)) => bail!(
            "{} is on {} ({}), which has no block device on this host",
            disk.display(),
            point.display(),
            source.display()
        ),
        None => bail!("{} is on no mounted file system", disk.display()),
    }
}

/// The name of the device itself, or that of the one of which it is a partition.
fn whole_device(folder: &Path) -> Result<String> {
    let whole = if folder.join("partition").exists() {
        folder.parent()
    } else {
        Some(folder)
    };
    let name = whole.and_then(|whole| whole.file_name()?.to_str());
    Ok(name
        .with_context(|| format!("{} has no name", folder.display()))?
        .into())
}

/// The devices below a device-mapper or md device, down to those that have none below; otherwise the device itself.
fn at_bottom(device: &str, depth: u32) -> Result<Vec<String>> {
    ensure!(depth > 0, "{device} lies above too many devices");
    let slaves = fs::read_dir(format!("/sys/block/{device}/slaves"));
    let mut bottom = BTreeSet::new();
    for slave in slaves.into_iter().flatten().flatten() {
        let folder = fs::canonicalize(slave.path())?;
        bottom.extend(at_bottom(&whole_device(&folder)?, depth - 1)?);
    }
    if bottom.is_empty() {
        bottom.insert(device.to_owned());
    }
    Ok(bottom.into_iter().collect())
}

fn attribute_path(device: &str, attribute: &str) -> String {
    format!("/sys/block/{device}/queue/{attribute}")
}

/// The value of an attribute; of a choice, the chosen one.
fn read(device: &str, attribute: &str) -> Option<String> {
    let text = fs::read_to_string(attribute_path(device, attribute)).ok()?;
    Some(bracketed(&text))
}

/// Sets an attribute, and reads it back.
fn write(device: &str, attribute: &str, value: &str) -> Result<()> {
    let path = attribute_path(device, attribute);
    if let Err(error) = fs::write(&path, value) {
        if attribute == SCHEDULER {
            ensure_choice(device, value)?;
        }
        return Err(error).with_context(|| format!("writing {value} to {path}"));
    }
    let now = read(device, attribute);
    ensure!(
        now.as_deref() == Some(value),
        "{path} was set to {value}, and is {}",
        now.unwrap_or_default()
    );
    Ok(())
}

fn ensure_choice(device: &str, scheduler: &str) -> Result<()> {
    let path = attribute_path(device, SCHEDULER);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let plain = text.replace(['[', ']'], "");
    ensure!(
        plain.split_whitespace().any(|choice| choice == scheduler),
        "{device} has no scheduler {scheduler}; it has {}. 'modprobe' loads more, such as bfq or kyber-iosched",
        plain.trim()
    );
    Ok(())
}

#[cfg(test)]
#[path = "host_queue_tests.rs"]
mod tests;
/// The choice of a file such as `none [mq-deadline] kyber`.
pub fn bracketed(text: &str) -> String {
    text.split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or_else(|| text.trim().to_owned(), |(word, _)| word.to_owned())
}
