//! A zram device, filled with incompressible data.
//!
//! A run that is killed cannot remove its devices. Each device is therefore [noted](Note) before it is used, and the next
//! run removes it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::client::noise;
use crate::plan::units::size_text;

const CHUNK: usize = 1 << 20;
const HOT_ADD: &str = "/sys/class/zram-control/hot_add";
const HOT_REMOVE: &str = "/sys/class/zram-control/hot_remove";
/// The folder of the notes. Only root can write here.
const NOTES: &str = "/run";
/// The name of a note, around the device's number.
const NOTE: (&str, &str) = ("ringdisk-lab-zram", ".json");

/// A zram device; removed when dropped.
#[derive(Debug)]
pub struct Zram {
    number: u32,
    device: PathBuf,
    record: Option<Record>,
}

/// What tells a device that a run added from all others, which may get its number later.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    number: u32,
    /// The kernel's number for this device, which no other gets until the next boot
    diskseq: u64,
    /// The kernel's id of this boot
    boot: String,
    /// The size that the run sets
    bytes: u64,
}

/// Removes the devices of runs that were killed. Returns a sentence for each.
pub fn remove_after_kill() -> Vec<String> {
    remove_left(Path::new(NOTES))
}

fn remove_left(notes: &Path) -> Vec<String> {
    let entries = fs::read_dir(notes).into_iter().flatten().flatten();
    let is_note = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(NOTE.0) && name.ends_with(NOTE.1))
    };
    let paths = entries.map(|entry| entry.path()).filter(is_note);
    let removed = paths.filter_map(|path| {
        // Another run has the device, or this user may not know.
        let mut record = Record::open(&path).ok()??;
        let note = record.read::<Note>();
        let removed = match note {
            Ok(Some(note)) => note.remove_device(),
            // The run was killed before it wrote the note.
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        match removed {
            Ok(said) => {
                record.remove();
                said
            }
            Err(error) => Some(format!(
                "an earlier run was killed, and its zram device is not removed: {error:#}"
            )),
        }
    });
    removed.collect()
}

impl Note {
    /// A note for a device that was just added.
    fn of(number: u32, bytes: u64) -> Result<Note> {
        Ok(Note {
            number,
            diskseq: read_number(number, "diskseq")?,
            boot: boot()?,
            bytes,
        })
    }

    /// Removes the device, if it still is the one that was noted.
    ///
    /// # Errors
    /// It is in use, or the kernel refuses.
    fn remove_device(&self) -> Result<Option<String>> {
        let Self { number, bytes, .. } = *self;
        let is_same = self.boot == boot()?
            && read_number(number, "diskseq").is_ok_and(|diskseq| diskseq == self.diskseq);
        // The run may have been killed before it set the size. Any other size was set by somebody else.
        let size = read_number(number, "disksize").unwrap_or(0);
        if !is_same || !(size == 0 || size == bytes) {
            return Ok(None);
        }
        // The kernel refuses to remove a device that is open or mounted.
        fs::write(HOT_REMOVE, number.to_string()).map_err(|e| match e.kind() {
            io::ErrorKind::ResourceBusy => anyhow!("zram{number} is in use"),
            _ => anyhow::Error::new(e).context(format!("removing zram{number}")),
        })?;
        Ok(Some(format!(
            "an earlier run was killed: zram{number} of {} is removed",
            size_text(bytes)
        )))
    }
}

/// A number among a device's attributes.
fn read_number(number: u32, attribute: &str) -> Result<u64> {
    let path = attribute_path(number, attribute);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    text.trim().parse().with_context(|| path)
}

fn attribute_path(number: u32, attribute: &str) -> String {
    format!("/sys/block/zram{number}/{attribute}")
}

fn boot() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    Ok(id.trim().to_owned())
}

impl Zram {
    /// Adds a device of this size.
    ///
    /// # Errors
    /// This kernel has no zram, or the caller is not root.
    pub fn new(bytes: u64) -> Result<Zram> {
        Zram::noted_in(Path::new(NOTES), bytes)
    }

    fn noted_in(notes: &Path, bytes: u64) -> Result<Zram> {
        if !Path::new(HOT_ADD).exists() {
            // This fails if zram is built in or absent; the next read shows which.
            let _ = Command::new("modprobe").arg("zram").status();
        }
        let number = fs::read_to_string(HOT_ADD).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => anyhow!("this kernel has no zram"),
            io::ErrorKind::PermissionDenied => anyhow!("setting up zram needs root"),
            _ => anyhow::Error::new(e).context("adding a zram device"),
        })?;
        let number = number
            .trim()
            .parse()
            .context("hot_add did not return a number")?;
        let mut zram = Zram {
            number,
            device: format!("/dev/zram{number}").into(),
            record: None,
        };
        // A run that is killed before the note leaves a device without a size, which takes no memory.
        let path = notes.join(format!("{}{number}{}", NOTE.0, NOTE.1));
        let record = Record::open(&path)?;
        let record = record.with_context(|| format!("{} is locked", path.display()))?;
        zram.record
            .insert(record)
            .write(&Note::of(number, bytes)?)?;
        fs::write(zram.attribute("disksize"), bytes.to_string())
            .context("setting zram's disksize")?;
        if !zram.device.exists() {
            bail!(
                "the kernel made zram{number}, but {} did not appear",
                zram.device.display()
            );
        }
        let mut file = fs::File::options().write(true).open(&zram.device)?;
        for chunk in 0..bytes / CHUNK as u64 {
            file.write_all(&noise(CHUNK, chunk * CHUNK as u64))?;
        }
        file.sync_all().context("filling the zram device")?;
        Ok(zram)
    }

    /// Its device node.
    pub fn device(&self) -> &Path {
        &self.device
    }

    fn attribute(&self, name: &str) -> String {
        attribute_path(self.number, name)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let reset = fs::write(self.attribute("reset"), "1");
        let removed = fs::write(HOT_REMOVE, self.number.to_string());
        match reset.and(removed) {
            Ok(()) => {
                if let Some(record) = &mut self.record {
                    record.remove();
                }
            }
            Err(error) => eprintln!(
                "zram{} is left behind, and the next run tries again to remove it: {error}",
                self.number
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    const BYTES: u64 = 2 << 20;

    /// A device whose run was killed, its number and its note; `None` where zram needs another user or kernel.
    fn killed(notes: &Path) -> Option<(u32, PathBuf)> {
        let mut zram = match Zram::noted_in(notes, BYTES) {
            Ok(zram) => zram,
            Err(error) => {
                println!("skipped: zram devices of killed runs: {error:#}");
                return None;
            }
        };
        // The kernel ends the lock, and nothing is dropped.
        drop(zram.record.take());
        let number = zram.number;
        std::mem::forget(zram);
        Some((
            number,
            notes.join(format!("ringdisk-lab-zram{number}.json")),
        ))
    }

    fn exists(number: u32) -> bool {
        Path::new(&format!("/sys/block/zram{number}")).exists()
    }

    /// The tests, one after another: the kernel gives the number of a removed device to the next one.
    static ONE: Mutex<()> = Mutex::new(());

    #[test]
    fn the_device_of_a_killed_run_is_removed() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let notes = tempfile::tempdir().unwrap();
        let Some((number, note)) = killed(notes.path()) else {
            return;
        };
        let alive = Zram::noted_in(notes.path(), BYTES).unwrap();
        let open = fs::File::open(format!("/dev/zram{number}")).unwrap();
        let said = remove_left(notes.path());
        assert!(
            said[0].contains(&format!("zram{number} is in use")),
            "{said:?}"
        );
        assert!(said.len() == 1 && exists(number) && note.exists());
        drop(open);
        let said = remove_left(notes.path());
        assert!(
            said.len() == 1 && said[0].contains(&format!("zram{number} of 2M is removed")),
            "{said:?}"
        );
        assert!(!exists(number) && !note.exists());
        // A run that lives keeps its device.
        assert!(exists(alive.number));
        let number = alive.number;
        drop(alive);
        assert!(!exists(number));
        assert_eq!(fs::read_dir(notes.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_device_that_is_another_one_is_not_removed() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let notes = tempfile::tempdir().unwrap();
        let Some((number, note)) = killed(notes.path()) else {
            return;
        };
        let own = fs::read_to_string(&note).unwrap();
        let of = |change: fn(&mut Note)| {
            let mut changed: Note = serde_json::from_str(&own).unwrap();
            change(&mut changed);
            fs::write(&note, serde_json::to_string(&changed).unwrap() + "\n").unwrap();
            (remove_left(notes.path()), exists(number), note.exists())
        };
        let kept = (Vec::new(), true, false);
        assert_eq!(of(|note| note.diskseq -= 1), kept);
        assert_eq!(of(|note| note.boot = "another".into()), kept);
        assert_eq!(of(|note| note.bytes += 1 << 20), kept);
        assert_eq!(of(|note| note.number = u32::MAX), kept);
        fs::write(&note, "").unwrap();
        assert_eq!(remove_left(notes.path()), [""; 0]);
        fs::write(&note, "{\n").unwrap();
        assert!(remove_left(notes.path())[0].contains("not removed"));
        assert!(exists(number));
        let (said, exists, is_noted) = of(|_| ());
        assert_eq!((said.len(), exists, is_noted), (1, false, false));
    }
}
