//! A disk that the firmware boots from: GRUB, and behind it a partition that holds the rest, the kernel included.

use anyhow::{Context, Result, ensure};
use initramfs::{Kernel, find_program};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use super::COMMAND_LINE;
use super::system::{self, Start};

/// The first sector, as GRUB has it: it loads what begins in the next one.
const BOOT_IMAGE: &str = "/usr/lib/grub/i386-pc/boot.img";

/// Its code ends before the disk's signature and the table of partitions.
const BOOT_CODE: usize = 440;

const SECTOR: u64 = 512;
/// Where the partition begins.
const PARTITION_AT: u64 = 1 << 20;

/// What is missing for [`install_loader`], if anything is.
pub fn missing_loader() -> Option<String> {
    let there = find_program("grub-mkimage").is_some() && Path::new(BOOT_IMAGE).is_file();
    (!there).then(|| "GRUB is missing; 'apt-get install grub-pc-bin' installs it".into())
}

/// Makes a file of `bytes` from which a machine boots by itself: a boot loader, a kernel, and a system with fio, which
/// runs `script`. It is to be the disk with this serial.
///
/// # Errors
/// A program is missing, or there is no room.
pub fn install_loader(target: &Path, bytes: u64, serial: &str, script: &str) -> Result<()> {
    let kernel = Kernel::cached()?;
    let mut files = system::system(true)?;
    files.file("/script", script.as_bytes(), false);
    let tree = tempfile::tempdir().context("making a folder for the system")?;
    files.unpack(tree.path())?;
    let boot = tree.path().join("boot");
    fs::create_dir(&boot)?;
    fs::copy(&kernel.image, boot.join("vmlinuz")).context("copying the kernel")?;
    let initrd = boot.join("initrd");
    system::write(&initrd, &kernel, false, Start::Disk(serial))?;

    let disk = File::create(target).with_context(|| format!("making {}", target.display()))?;
    disk.set_len(bytes)?;
    let mut mkfs = Command::new(find_program("mkfs.ext4").context("mkfs.ext4 is missing")?);
    // Nothing that GRUB cannot read.
    mkfs.args(["-q", "-O", "none,has_journal,extent,filetype,sparse_super"])
        .args(["-E", &format!("offset={PARTITION_AT}"), "-d"])
        .arg(tree.path())
        .arg(target)
        .arg(format!("{}k", (bytes - PARTITION_AT) / 1024));
    run(&mut mkfs)?;

    let (config, core) = (tree.path().join("grub.cfg"), tree.path().join("core.img"));
    let commands = format!(
        "set root=(hd0,msdos1)\nlinux /boot/vmlinuz {COMMAND_LINE}\ninitrd /boot/initrd\nboot\n"
    );
    fs::write(&config, commands)?;
    let mut mkimage = Command::new(find_program("grub-mkimage").context("GRUB is missing")?);
    mkimage.args(["-O", "i386-pc", "-p", "/boot", "-c"]);
    mkimage.arg(&config).arg("-o").arg(&core);
    run(mkimage.args(["biosdisk", "part_msdos", "ext2", "linux"]))?;
    let core = fs::read(core)?;
    ensure!(
        core.len() as u64 <= PARTITION_AT - SECTOR,
        "GRUB is too large"
    );

    let mut first = [0; SECTOR as usize];
    let code = fs::read(BOOT_IMAGE).with_context(|| format!("reading {BOOT_IMAGE}"))?;
    let code = code
        .get(..BOOT_CODE)
        .context("GRUB's first sector is too short")?;
    first[..BOOT_CODE].copy_from_slice(code);
    // One partition, active, for Linux.
    let (at, sectors) = (PARTITION_AT / SECTOR, (bytes - PARTITION_AT) / SECTOR);
    (first[446], first[450]) = (0x80, 0x83);
    first[454..458].copy_from_slice(&u32::try_from(at)?.to_le_bytes());
    first[458..462].copy_from_slice(&u32::try_from(sectors)?.to_le_bytes());
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all_at(&first, 0)?;
    disk.write_all_at(&core, SECTOR)?;
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("starting {name}"))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{name}: {}", text.trim());
    Ok(())
}
