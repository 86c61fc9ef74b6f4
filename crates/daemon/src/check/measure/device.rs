//! A device that is going to be overwritten must not be, or contain, or be made of a VM's disk under another name.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The maximum number of layers of device-mapper and RAID.
const LAYERS_MAX: u32 = 8;

/// Checks that a device which is going to be overwritten is not in use and holds no disk of a VM.
///
/// # Errors
/// It is in use; the message says by what.
pub fn check_device(path: &Path, disks: &[String]) -> Result<(), String> {
    let fail = |why: String| format!("{} is not overwritten: {why}", path.display());
    let number = fs::metadata(path).map(|found| found.rdev());
    let folder = number.and_then(sysfs).map_err(|e| fail(e.to_string()))?;
    if let Some(disk) = disks.iter().find(|disk| reaches(&folder, disk)) {
        return Err(fail(format!(
            "it is, or has a part in common with, the VM's disk {}",
            advisor::text::printable(disk)
        )));
    }
    // The kernel refuses this for a device that is mounted, or part of another one.
    let exclusive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(path);
    exclusive
        .map(drop)
        .map_err(|e| fail(format!("{e}; it may be mounted, or part of LVM or RAID")))
}

/// Whether a device and a VM's disk have a part in common, as far as the kernel says. The disk's path may be a link.
fn reaches(device: &Path, disk: &str) -> bool {
    if rbd_image(device).is_some_and(|image| image == disk) {
        return true;
    }
    let Ok(found) = fs::metadata(disk) else {
        return false;
    };
    let file = (found.dev(), found.ino());
    if !found.file_type().is_block_device() {
        return file_below(device) == Some(file);
    }
    let Ok(disk) = sysfs(found.rdev()) else {
        return false;
    };
    // Two logical volumes may share a device, so that only what one of them consists of counts.
    is_within(device, &disk, LAYERS_MAX)
        || is_within(&disk, device, LAYERS_MAX)
        || (file_below(device).is_some() && file_below(device) == file_below(&disk))
        || (id(device).is_some() && id(device) == id(&disk))
}

/// Whether a device is another one, a partition of it or the reverse, or made of it by device-mapper or RAID.
fn is_within(folder: &Path, other: &Path, layers: u32) -> bool {
    folder.starts_with(other)
        || other.starts_with(folder)
        || layers > 0
            && below(folder)
                .iter()
                .any(|below| is_within(below, other, layers - 1))
}

/// The devices of which a device of device-mapper or RAID is made.
fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join("slaves"));
    let entries = entries.into_iter().flatten().flatten();
    entries
        .filter_map(|entry| fs::canonicalize(entry.path()).ok())
        .collect()
}

/// The file of a loop device, by device and inode.
fn file_below(folder: &Path) -> Option<(u64, u64)> {
    let whole = whole(folder);
    let file = fs::read_to_string(whole.join("loop/backing_file")).ok()?;
    let found = fs::metadata(file.trim_end_matches('\n')).ok()?;
    Some((found.dev(), found.ino()))
}

/// What identifies a disk on all of its paths.
fn id(folder: &Path) -> Option<String> {
    let whole = whole(folder);
    let mut texts = ["wwid", "device/wwid"]
        .into_iter()
        .filter_map(|name| fs::read_to_string(whole.join(name)).ok());
    texts.find(|text| !text.trim().is_empty())
}

/// `POOL/IMAGE` of a device of the kernel's RBD client.
fn rbd_image(folder: &Path) -> Option<String> {
    let client = whole(folder).parent()?.parent()?;
    let read = |name: &str| fs::read_to_string(client.join(name)).ok();
    let (pool, image) = (read("pool")?, read("name")?);
    Some(format!("{}/{}", pool.trim_end(), image.trim_end()))
}

/// The device itself, or the one of which it is a partition.
fn whole(folder: &Path) -> &Path {
    match folder.parent() {
        Some(parent) if folder.join("partition").exists() => parent,
        _ => folder,
    }
}

/// The folder of a block device in sysfs. That of a partition is in that of its disk.
pub fn sysfs(device: u64) -> std::io::Result<PathBuf> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
}

/// Whether a device is this one, a part of it, or made of it by device-mapper or RAID.
pub fn consists_of(folder: &Path, device: &str) -> bool {
    let has = |folder: &Path| folder.iter().any(|part| part == device);
    let mut all = vec![folder.to_owned()];
    for _ in 0..LAYERS_MAX {
        if all.iter().any(|folder| has(folder)) {
            return true;
        }
        all = all.iter().flat_map(|folder| below(folder)).collect();
    }
    all.iter().any(|folder| has(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of sysfs: devices, of which some are made of others.
    struct Devices(tempfile::TempDir);

    impl Devices {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn add(&self, name: &str, below: &[&str]) -> PathBuf {
            let folder = self.0.path().join(name);
            fs::create_dir_all(folder.join("slaves")).unwrap();
            for name in below {
                let link = folder.join("slaves").join(name.replace('/', "-"));
                std::os::unix::fs::symlink(self.0.path().join(name), link).unwrap();
            }
            folder
        }
    }

    #[test]
    fn a_device_is_within_what_it_is_made_of() {
        let devices = Devices::new();
        let disk = devices.add("sda", &[]);
        let (one, two) = (devices.add("sda/sda1", &[]), devices.add("sda/sda2", &[]));
        let path = devices.add("dm-0", &["sda"]);
        let volume = devices.add("dm-1", &["sda/sda2"]);
        let other = devices.add("dm-2", &["sda/sda2"]);
        let within = |a: &Path, b: &Path| is_within(a, b, LAYERS_MAX);
        // A path of multipath, and the disk that its user sees.
        assert!(within(&path, &disk) && within(&volume, &two) && within(&volume, &disk));
        assert!(within(&disk, &one) && within(&one, &disk));
        assert!(!within(&one, &two) && !within(&volume, &one) && !within(&volume, &other));
        assert!(consists_of(&volume, "sda") && !consists_of(&volume, "sda1"));
    }

    #[test]
    fn paths_of_a_disk_and_mapped_images_are_told() {
        let devices = Devices::new();
        let (a, b) = (devices.add("sda", &[]), devices.add("sdb", &[]));
        assert_eq!(id(&a), None);
        for folder in [&a, &b] {
            fs::create_dir(folder.join("device")).unwrap();
            fs::write(folder.join("device/wwid"), "naa.6001\n").unwrap();
        }
        assert!(id(&a).is_some() && id(&a) == id(&b));
        let mapped = devices.add("rbd/0/block/rbd0", &[]);
        let part = devices.add("rbd/0/block/rbd0/rbd0p1", &[]);
        fs::write(part.join("partition"), "1\n").unwrap();
        let client = devices.0.path().join("rbd/0");
        fs::write(client.join("pool"), "vms\n").unwrap();
        fs::write(client.join("name"), "vm-1\n").unwrap();
        for folder in [mapped, part] {
            assert!(reaches(&folder, "vms/vm-1") && !reaches(&folder, "vms/vm-2"));
        }
    }

    /// A loop device over a file; detached when dropped.
    struct Loop(PathBuf);

    impl Loop {
        fn of(file: &Path) -> Option<Self> {
            let mut losetup = std::process::Command::new("losetup");
            match losetup.args(["-f", "--show"]).arg(file).output() {
                Ok(made) if made.status.success() => {
                    Some(Self(String::from_utf8(made.stdout).unwrap().trim().into()))
                }
                _ => {
                    println!("skipped: a loop device over a VM's disk: it needs root");
                    None
                }
            }
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let mut losetup = std::process::Command::new("losetup");
            let _ = losetup.arg("-d").arg(&self.0).status();
        }
    }

    #[test]
    fn a_loop_device_over_a_vms_disk_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["a.raw", "b.raw"] {
            let file = fs::File::create(path(name)).unwrap();
            file.set_len(1 << 20).unwrap();
        }
        let (Some(one), Some(two)) = (Loop::of(&path("a.raw")), Loop::of(&path("a.raw"))) else {
            return;
        };
        std::os::unix::fs::symlink(&two.0, path("link")).unwrap();
        let check = |disk: &Path| check_device(&one.0, &[disk.display().to_string()]);
        // The file below it, another device over this file, also by a link outside of /dev, and itself.
        for disk in [&path("a.raw"), &two.0, &path("link"), &one.0] {
            let refused = check(disk).unwrap_err();
            assert!(refused.contains("the VM's disk"), "{refused}");
        }
        assert_eq!(check(&path("b.raw")), Ok(()));
        assert_eq!(check(&path("nonexistent")), Ok(()));
    }
}
