//! Disks that a plan names. The lab fills thin ones, and with `create` also creates and removes them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use harness::paths::{find_program, is_block_device};
use harness::process::Stop;

use super::disk::{CHUNK, Disk, Fill, OwnDisk, fill};
use super::rbd::{Image, output};
use crate::plan::backing::Name;
use crate::plan::words::Format;
use crate::plan::{Backing, Plan, Settings};

/// The disks that a plan names. Dropping this removes those that it created.
#[derive(Debug)]
pub struct Named {
    /// Whether the lab creates them.
    create: bool,
    /// The size in bytes of disks that it creates
    size: u64,
    /// The folder for copies of Ceph's configuration file
    folder: PathBuf,
    /// The disks by cluster and name
    states: BTreeMap<Key, State>,
    /// Where disks are recorded before they are created
    log: Option<Box<dyn Log>>,
}

/// A durable record of the disks that the lab creates.
pub trait Log: std::fmt::Debug {
    /// A disk is about to be created.
    ///
    /// # Errors
    /// The record cannot be written.
    fn created(&mut self, disk: &OwnDisk) -> Result<()>;

    /// A disk was removed, or could not be created.
    ///
    /// # Errors
    /// The record cannot be written.
    fn removed(&mut self, disk: &OwnDisk) -> Result<()>;
}

/// The cluster's configuration file, or nothing, and the name in the plan.
type Key = (PathBuf, Name);

/// The state of a disk.
#[derive(Debug, Default)]
struct State {
    created: bool,
    /// Whether the journal says that the lab creates it
    recorded: bool,
    filled: bool,
    /// Whether a configuration has used it, and may have written to it
    used: bool,
    /// Its block device, if the kernel's client has mapped it
    mapped: Option<(Image, PathBuf)>,
    /// How to remove it
    image: Option<Image>,
}

/// Receives the progress of filling a disk: its name, the bytes that are written, and its size.
pub type Told<'a> = &'a mut dyn FnMut(&str, u64, u64);

impl Named {
    /// Disks of `size` bytes, if the lab creates them.
    pub fn new(create: bool, size: u64, folder: PathBuf) -> Named {
        Named {
            create,
            size,
            folder,
            states: BTreeMap::new(),
            log: None,
        }
    }

    /// Records the disks that are created.
    #[must_use]
    pub fn recorded_in(mut self, log: Box<dyn Log>) -> Named {
        self.log = Some(log);
        self
    }

    /// Removes the disks that an earlier part of the run created and left, because it was killed. Returns what to tell the
    /// user.
    ///
    /// # Errors
    /// A disk has another size than the one that was created, or cannot be removed.
    pub fn remove_left(&mut self, plan: &Plan, left: &[OwnDisk]) -> Result<Vec<String>> {
        let mut left = left.to_vec();
        let mut said = Vec::new();
        if left.is_empty() {
            return Ok(said);
        }
        let settings = plan.cases.iter().map(|case| &case.settings);
        for settings in settings.filter(|settings| settings.opens_disks()) {
            let Backing::Named(names) = &settings.backing else {
                continue;
            };
            let volumes = settings.volumes + u16::from(settings.neighbour.is_some());
            let volumes_of = |guest| (0..volumes).map(move |volume| (guest, volume));
            for (guest, volume) in (0..settings.guests).flat_map(volumes_of) {
                let name = names.of(guest, volume, settings.volumes);
                let key = key(settings, &name);
                let Some(at) = left
                    .iter()
                    .position(|own| *own == own_disk(&key, own.bytes))
                else {
                    continue;
                };
                let own = left.swap_remove(at);
                let disk = self.opened(settings, &name)?;
                if let Disk::Rbd(image) = &disk {
                    image.unmap_left();
                }
                if let Some(bytes) = size(&disk)? {
                    ensure!(
                        bytes == own.bytes
                            || matches!(&disk, Disk::Path(path) if logical_volume(path).is_some()),
                        "{name} has {bytes} bytes, and the one that this run created and left had {}: it is another; \
                         rename or remove it",
                        own.bytes
                    );
                    remove(&disk).with_context(|| format!("removing {name}"))?;
                    said.push(format!(
                        "removed {name}, which this run left when it was killed"
                    ));
                }
                log_removed(&mut self.log, &own)?;
            }
        }
        Ok(said)
    }

    /// A disk as programs open it, unless the kernel's client maps it.
    fn opened(&self, settings: &Settings, name: &Name) -> Result<Disk> {
        Ok(match name {
            Name::Path(path) => Disk::Path(path.clone()),
            Name::Rbd { pool, image } => {
                let (pool, image) = (pool.clone(), image.clone());
                Disk::Rbd(Image::new(&settings.ceph, pool, image, &self.folder)?)
            }
        })
    }

    /// The disk with this name as a configuration opens it, filled or empty.
    ///
    /// # Errors
    /// The disk cannot be created or filled, or the user stops the run.
    pub fn disk(
        &mut self,
        settings: &Settings,
        name: &Name,
        stop: &Stop,
        told: Told,
    ) -> Result<(Disk, Option<Fill>)> {
        let disk = self.opened(settings, name)?;
        let key = key(settings, name);
        let own = own_disk(&key, self.size);
        let state = self.states.entry(key).or_default();
        if self.create && state.created && !settings.prefill && (state.filled || state.used) {
            state.unmap()?;
            remove(&disk)?;
            *state = State {
                recorded: state.recorded,
                ..State::default()
            };
        }
        if self.create && !state.created {
            if !state.recorded {
                ensure!(
                    size(&disk)?.is_none(),
                    "{name} exists, and 'create' makes new disks only: choose another name. If a run that was killed \
                     left it, '--resume' with the folder of that run removes it"
                );
                // A run that is killed from here on removes it when it is resumed.
                if let Some(log) = &mut self.log {
                    log.created(&own)?;
                }
                state.recorded = true;
            }
            if let Err(error) = create(&disk, self.size) {
                state.recorded = false;
                log_removed(&mut self.log, &own)?;
                return Err(error.context(format!("creating {name}")));
            }
            state.created = true;
            if let Disk::Rbd(image) = &disk {
                state.image = Some(image.clone());
            }
        }
        let mut filling = None;
        // Random data in place of a qcow2 image's header would destroy the image.
        if settings.prefill && settings.format == Format::Raw && !state.filled {
            if state.created || is_thin(&disk)? {
                // An image that the kernel's client has mapped is filled through librbd.
                state.unmap()?;
                let since = Instant::now();
                let bytes = fill_disk(&disk, stop, told)?;
                filling = Some(Fill {
                    disk: name.to_string(),
                    bytes,
                    took_s: since.elapsed().as_secs_f64(),
                });
            }
            state.filled = true;
        }
        state.used = true;
        let disk = match disk {
            Disk::Rbd(image) if settings.krbd => Disk::Path(state.map(image)?),
            other => {
                state.unmap()?;
                other
            }
        };
        Ok((disk, filling))
    }
}

impl State {
    fn map(&mut self, image: Image) -> Result<PathBuf> {
        if let Some((_, device)) = self.mapped.as_ref().filter(|(mapped, _)| *mapped == image) {
            return Ok(device.clone());
        }
        self.unmap()?;
        let device = image.map()?;
        self.mapped = Some((image, device.clone()));
        Ok(device)
    }

    fn unmap(&mut self) -> Result<()> {
        match self.mapped.take() {
            Some((image, device)) => image.unmap(&device),
            None => Ok(()),
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        for (key, state) in &mut self.states {
            let name = &key.1;
            let unmapped = state.unmap();
            let removed = match (state.created, name, &state.image) {
                (false, ..) => Ok(()),
                (true, Name::Path(path), _) => remove(&Disk::Path(path.clone())),
                (true, Name::Rbd { .. }, Some(image)) => remove(&Disk::Rbd(image.clone())),
                (true, Name::Rbd { .. }, None) => Ok(()),
            };
            let mut done = unmapped.and(removed);
            if state.created && done.is_ok() {
                let own = own_disk(key, self.size);
                done = log_removed(&mut self.log, &own);
            }
            if let Err(error) = done {
                eprintln!("{name} was created for this run and could not be removed: {error:#}");
            }
        }
    }
}

fn key(settings: &Settings, name: &Name) -> Key {
    let cluster = match name {
        Name::Rbd { .. } => settings.ceph.conf(),
        Name::Path(_) => PathBuf::new(),
    };
    (cluster, name.clone())
}

fn own_disk((cluster, name): &Key, bytes: u64) -> OwnDisk {
    OwnDisk {
        disk: name.to_string(),
        cluster: cluster.display().to_string(),
        bytes,
    }
}

fn log_removed(log: &mut Option<Box<dyn Log>>, disk: &OwnDisk) -> Result<()> {
    log.as_mut().map_or(Ok(()), |log| log.removed(disk))
}

/// The size of a disk in bytes; `None` if it does not exist.
fn size(disk: &Disk) -> Result<Option<u64>> {
    let path = match disk {
        Disk::Null | Disk::Chain(_) => return Ok(None),
        Disk::Rbd(image) => return image.size(),
        Disk::Path(path) => path,
    };
    let what = || format!("looking at {}", path.display());
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
        Ok(_) => {
            let mut file = File::open(path).with_context(what)?;
            let end = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0));
            end.map(Some).with_context(what)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(what),
    }
}

/// Whether the first write to a part of the disk allocates storage.
///
/// # Errors
/// The disk does not exist, or its cluster does not answer.
pub fn is_thin(disk: &Disk) -> Result<bool> {
    match disk {
        Disk::Null | Disk::Chain(_) => Ok(false),
        Disk::Rbd(image) => image.usage().map(|(bytes, used)| used < bytes),
        Disk::Path(path) if is_block_device(path) => Ok(is_thin_volume(path)),
        Disk::Path(path) => {
            let metadata = fs::metadata(path).with_context(|| path.display().to_string())?;
            Ok(metadata.blocks() * 512 < metadata.len())
        }
    }
}

/// Whether the device is a thin LVM volume that is not full. There is no way to find out for other devices.
fn is_thin_volume(path: &Path) -> bool {
    let Some(lvs) = find_program("lvs") else {
        return false;
    };
    let mut command = Command::new(lvs);
    command
        .args(["--noheadings", "-o", "segtype,data_percent"])
        .arg(path);
    output(&mut command).is_ok_and(|text| says_thin(&text))
}

fn says_thin(text: &str) -> bool {
    let mut words = text.split_whitespace();
    let percent = |word: &str| word.replace(',', ".").parse::<f64>().ok();
    words.next() == Some("thin")
        && words
            .next()
            .and_then(percent)
            .is_none_or(|used| used < 100.0)
}

/// `VG/LV` of a path `/dev/VG/LV`.
fn logical_volume(path: &Path) -> Option<(&str, &str)> {
    let (group, volume) = path.to_str()?.strip_prefix("/dev/")?.split_once('/')?;
    let is_word = |word: &str| !word.is_empty() && !word.contains('/') && !word.starts_with('-');
    let is_kernels = ["mapper", "disk", "zvol", "shm", "pts"].contains(&group);
    (is_word(group) && is_word(volume) && !is_kernels).then_some((group, volume))
}

fn create(disk: &Disk, size: u64) -> Result<()> {
    match disk {
        Disk::Null | Disk::Chain(_) => Ok(()),
        Disk::Rbd(image) => image.create(size),
        Disk::Path(path) => match logical_volume(path) {
            Some((group, volume)) => {
                ensure!(!path.exists(), "{} exists already", path.display());
                let mut command = Command::new(program("lvcreate")?);
                command.args(["--yes", "--wipesignatures", "y", "--size"]);
                command.args([&format!("{size}B"), "--name", volume, group]);
                output(&mut command).map(drop)
            }
            None if path.starts_with("/dev") => bail!(
                "{}: create = true makes RBD images, logical volumes (/dev/GROUP/VOLUME) and files",
                path.display()
            ),
            None => {
                let what = || format!("making {}", path.display());
                let file = File::create_new(path).with_context(what)?;
                file.set_len(size).with_context(what)
            }
        },
    }
}

fn remove(disk: &Disk) -> Result<()> {
    match disk {
        Disk::Null | Disk::Chain(_) => Ok(()),
        Disk::Rbd(image) => image.remove(),
        Disk::Path(path) => match logical_volume(path) {
            Some((group, volume)) => {
                let mut command = Command::new(program("lvremove")?);
                command.args(["--yes", &format!("{group}/{volume}")]);
                output(&mut command).map(drop)
            }
            None => fs::remove_file(path).with_context(|| format!("removing {}", path.display())),
        },
    }
}

fn program(name: &str) -> Result<PathBuf> {
    find_program(name).with_context(|| format!("{name} is missing; on Debian, 'apt install lvm2'"))
}

/// Fills a disk, and returns its size.
fn fill_disk(disk: &Disk, stop: &Stop, told: Told) -> Result<u64> {
    let (name, bytes) = match disk {
        Disk::Null | Disk::Chain(_) => return Ok(0),
        Disk::Rbd(image) => (image.to_string(), image.usage()?.0),
        Disk::Path(path) => {
            let what = || format!("looking at {}", path.display());
            let mut file = File::open(path).with_context(what)?;
            let end = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0));
            (path.display().to_string(), end.with_context(what)?)
        }
    };
    for offset in (0..bytes).step_by(CHUNK as usize) {
        ensure!(!stop.is_wanted(), "stopped");
        told(&name, offset, bytes);
        let now = CHUNK.min(bytes - offset);
        match disk {
            Disk::Null | Disk::Chain(_) => {}
            Disk::Rbd(image) => image.fill(offset, now, bytes)?,
            Disk::Path(path) => {
                let what = || format!("filling {}", path.display());
                let file = OpenOptions::new()
                    .write(true)
                    .open(path)
                    .with_context(what)?;
                fill(&file, offset, now, offset).with_context(what)?;
                file.sync_data().with_context(what)?;
            }
        }
    }
    told(&name, bytes, bytes);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// The disks that are there.
    #[derive(Debug, Default, Clone)]
    struct Memory(Rc<RefCell<Vec<OwnDisk>>>);

    impl Log for Memory {
        fn created(&mut self, disk: &OwnDisk) -> Result<()> {
            ensure!(
                !Path::new(&disk.disk).exists(),
                "it is recorded before it is created"
            );
            self.0.borrow_mut().push(disk.clone());
            Ok(())
        }

        fn removed(&mut self, disk: &OwnDisk) -> Result<()> {
            self.0.borrow_mut().retain(|it| it != disk);
            Ok(())
        }
    }

    fn settings(prefill: bool) -> Settings {
        Settings {
            prefill,
            ..Settings::default()
        }
    }

    fn disk(named: &mut Named, settings: &Settings, path: &Path) -> (PathBuf, Option<u64>) {
        let name = Name::Path(path.to_owned());
        let mut told = |_: &str, _: u64, _: u64| {};
        let found = named.disk(settings, &name, &Stop::default(), &mut told);
        match found.unwrap() {
            (Disk::Path(path), fill) => (path, fill.map(|fill| fill.bytes)),
            (other, _) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_thin_file_is_filled_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let mut named = Named::new(false, 0, folder.path().to_owned());
        assert!(is_thin(&Disk::Path(path.clone())).unwrap());
        assert_eq!(disk(&mut named, &settings(false), &path).1, None);
        assert!(is_thin(&Disk::Path(path.clone())).unwrap(), "as it was");
        assert_eq!(disk(&mut named, &settings(true), &path).1, Some(1 << 20));
        assert!(!is_thin(&Disk::Path(path.clone())).unwrap());
        assert_eq!(disk(&mut named, &settings(true), &path).1, None);
        drop(named);
        assert!(path.exists());
    }

    #[test]
    fn what_is_created_is_empty_for_each_boot_that_wants_it_so_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let mut named = Named::new(true, 1 << 20, folder.path().to_owned());
        let allocated = || fs::metadata(&path).unwrap().blocks();
        disk(&mut named, &settings(true), &path);
        assert_eq!(allocated(), 2048);
        disk(&mut named, &settings(false), &path);
        assert_eq!(allocated(), 0);
        fs::write(&path, [1; 4096]).unwrap();
        disk(&mut named, &settings(false), &path);
        assert_eq!(
            (allocated(), fs::metadata(&path).unwrap().len()),
            (0, 1 << 20)
        );
        drop(named);
        assert!(!path.exists());
    }

    #[test]
    fn a_qcow2_image_is_never_filled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.qcow2");
        fs::write(&path, "QFI").unwrap();
        OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(1 << 20))
            .unwrap();
        let mut named = Named::new(false, 0, folder.path().to_owned());
        let settings = Settings {
            format: Format::Qcow2,
            ..settings(true)
        };
        assert_eq!(disk(&mut named, &settings, &path).1, None);
        assert!(fs::read(&path).unwrap().starts_with(b"QFI"));
    }

    #[test]
    fn what_exists_is_neither_created_nor_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        fs::write(&path, "mine").unwrap();
        let mut named = Named::new(true, 1 << 20, folder.path().to_owned());
        let name = Name::Path(path.clone());
        let mut told = |_: &str, _: u64, _: u64| {};
        let found = named.disk(&settings(true), &name, &Stop::default(), &mut told);
        assert!(format!("{:#}", found.unwrap_err()).contains("exists"));
        drop(named);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn a_run_that_was_killed_has_recorded_what_it_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let text = format!(
            "guest = \"none\"\n[storage]\ncreate = true\nsize = \"16M\"\n[config]\ndevice = \"host\"\n\
             backing = \"{}\"\ncache = [\"none\", \"writeback\"]\n",
            path.display()
        );
        let plan = Plan::parse(Path::new("p.toml"), &text).unwrap();
        let log = Memory::default();
        let named = || {
            let named = Named::new(true, 16 << 20, folder.path().to_owned());
            named.recorded_in(Box::new(log.clone()))
        };
        let left = || log.0.borrow().clone();
        // A disk of the user's is not recorded, so that it is never removed.
        fs::write(&path, "mine").unwrap();
        let mut first = named();
        let name = Name::Path(path.clone());
        let mut told = |_: &str, _: u64, _: u64| {};
        let refused = first.disk(&settings(true), &name, &Stop::default(), &mut told);
        assert!(format!("{:#}", refused.unwrap_err()).contains("exists"));
        assert_eq!(left(), []);
        fs::remove_file(&path).unwrap();
        disk(&mut first, &settings(true), &path);
        assert_eq!(left()[0].disk, path.display().to_string());
        // As after SIGKILL, nothing is removed.
        std::mem::forget(first);
        let mut second = named();
        fs::write(&path, "another").unwrap();
        let refused = second.remove_left(&plan, &left());
        assert!(format!("{:#}", refused.unwrap_err()).contains("another"));
        File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let said = second.remove_left(&plan, &left()).unwrap();
        assert!(said.len() == 1 && !path.exists(), "{said:?}");
        assert_eq!(left(), []);
        disk(&mut second, &settings(false), &path);
        disk(&mut second, &settings(false), &path);
        assert_eq!(left().len(), 1);
        drop(second);
        assert!(left().is_empty() && !path.exists());
    }

    #[test]
    fn volumes_are_told_by_their_paths_and_by_lvm() {
        let volume = |path: &'static str| logical_volume(Path::new(path));
        assert_eq!(volume("/dev/vg0/test-1-2"), Some(("vg0", "test-1-2")));
        for other in [
            "/dev/sdb",
            "/dev/mapper/vg0-x",
            "/mnt/vg0/x",
            "/dev/disk/by-id/x",
        ] {
            assert_eq!(volume(other), None, "{other}");
        }
        assert!(says_thin("  thin  42,10\n") && says_thin("thin 99.99"));
        assert!(!says_thin("  linear      \n") && !says_thin("thin 100.00") && !says_thin(""));
    }
}
