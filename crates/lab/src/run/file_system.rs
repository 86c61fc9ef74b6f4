//! A file system on each disk of a guest, with a file for the load.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::effective::Effective;
use crate::fio::FIND_DISK;
use crate::guest::{Shell, Stop};
use crate::plan::Settings;
use crate::plan::words::FileSystem;

/// The slowest storage for which the file is filled, in bytes per second: a disk under emulation.
const FILL_PER_S: u64 = 1 << 20;

/// Makes and mounts the file systems. Returns the paths of the files, and what is mounted. Without a file system, returns
/// the disks.
///
/// # Errors
/// A file system cannot be made or mounted, or has no room for the file.
pub fn make(
    shell: &mut dyn Shell,
    settings: &Settings,
    disks: &[String],
    size: u64,
    stop: &Stop,
) -> Result<(Vec<String>, Effective)> {
    let mut effective = Effective::new();
    let Some(mkfs) = command(settings.file_system) else {
        return Ok((disks.to_vec(), effective));
    };
    let mut script = FIND_DISK.to_owned();
    let mut files = Vec::new();
    for (index, disk) in disks.iter().enumerate() {
        let folder = format!("/mnt/volume{index}");
        let file = format!("{folder}/data");
        let disk = disk.replace('\'', "'\\''");
        script += &format!("d=$(disk '{disk}') || exit 9\n");
        script += &format!(
            "{mkfs} \"$d\" >/dev/null && mkdir -p {folder} && mount -t {} \"$d\" {folder} || exit 9\n",
            settings.file_system
        );
        // A tenth stays free: both file systems become slow when they are full.
        script += &format!(
            "set -- $(stat -f -c '%a %S' {folder})\nb=$(($1 * $2 / 10 * 9 / 1048576 * 1048576))\n[ $b -gt 0 ] || exit 9\n"
        );
        script += &if settings.prefill {
            format!(
                "fio --name=fill --filename={file} --rw=write --bs=1M --direct=1 --size=$b --end_fsync=1 --thread >/tmp/fill 2>&1 \
                 || {{ cat /tmp/fill; exit 9; }}\n"
            )
        } else {
            format!("dd if=/dev/null of={file} bs=1 seek=$b 2>/dev/null || exit 9\n")
        };
        files.push(file);
    }
    script += "sync\n\
               while read -r d folder kind rest; do [ $folder != /mnt/volume0 ] || echo \"file-system=$kind\"; done </proc/mounts\n\
               echo \"file bytes=$(stat -c %s /mnt/volume0/data)\"\n";
    let fill_s = size / FILL_PER_S * disks.len() as u64;
    let limit = Duration::from_secs(300 + fill_s);
    let answer = shell.run(&script, limit, stop)?;
    ensure!(
        answer.status == 0,
        "the guest cannot make a file system of {}: {}",
        settings.file_system,
        answer.text().trim()
    );
    for line in answer.text().lines() {
        if let Some((key, value)) = line.split_once('=') {
            effective.insert(key.into(), value.into());
        }
    }
    Ok((files, effective))
}

/// `mkfs`, which neither discards a disk that was filled nor leaves work to be done while the load runs.
fn command(file_system: FileSystem) -> Option<&'static str> {
    match file_system {
        FileSystem::None => None,
        FileSystem::Ext4 => {
            Some("mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0")
        }
        FileSystem::Xfs => Some("mkfs.xfs -q -f -K"),
    }
}
