//! A disk that the firmware can boot: SeaBIOS by its first sectors, UEFI by a partition of its own. Both start GRUB,
//! which loads the kernel and everything else from another partition.

use anyhow::{Context, Result, ensure};
use harness::initramfs::Kernel;
use harness::paths::find_program;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use super::COMMAND_LINE;
use super::system::{self, Software, Start};

/// GRUB's first sector; it loads the code that begins in the next sector.
const BOOT_IMAGE: &str = "/usr/lib/grub/i386-pc/boot.img";

/// The boot code ends before the disk's signature and the partition table.
const BOOT_CODE: usize = 440;

/// A module of GRUB for UEFI.
const EFI_MODULES: &str = "/usr/lib/grub/x86_64-efi/linux.mod";

const SECTOR: u64 = 512;
/// The offset of the system's partition in bytes.
const PARTITION_AT: u64 = 1 << 20;
/// The size in bytes of the UEFI partition, which is the last one.
const EFI_BYTES: u64 = 8 << 20;

/// What is missing for [`install_loader`]; `None` if nothing is.
pub fn missing_loader() -> Option<String> {
    let programs =
        ["grub-mkimage", "mformat", "mmd", "mcopy"].map(|name| find_program(name).is_some());
    let files = [BOOT_IMAGE, EFI_MODULES].map(|file| Path::new(file).is_file());
    let there = programs.iter().chain(&files).all(|there| *there);
    (!there).then(|| "GRUB or mtools is missing; `cargo xtask install` installs them".into())
}

/// Makes a file of `bytes` bytes from which a machine can boot without help: a boot loader, a kernel, and a system with
/// fio that runs `script`. The file must be used as the disk with this serial.
///
/// # Errors
/// A program is missing, or there is not enough space.
pub fn install_loader(target: &Path, bytes: u64, serial: &str, script: &str) -> Result<()> {
    let efi_at = bytes - EFI_BYTES;
    let kernel = Kernel::cached()?;
    let mut files = system::system(Software::FIO)?;
    files.file("/script", script.as_bytes(), false);
    let tree = tempfile::tempdir().context("making a folder for the system")?;
    files.unpack(tree.path())?;
    let boot = tree.path().join("boot");
    fs::create_dir(&boot)?;
    fs::copy(&kernel.image, boot.join("vmlinuz")).context("copying the kernel")?;
    let initrd = boot.join("initrd");
    system::write(&initrd, &kernel, Software::NONE, Start::Disk(serial))?;

    let disk = File::create(target).with_context(|| format!("making {}", target.display()))?;
    disk.set_len(bytes)?;
    let mut mkfs = Command::new(find_program("mkfs.ext4").context("mkfs.ext4 is missing")?);
    // Only features that GRUB can read.
    mkfs.args(["-q", "-O", "none,has_journal,extent,filetype,sparse_super"])
        .args(["-E", &format!("offset={PARTITION_AT}"), "-d"])
        .arg(tree.path())
        .arg(target)
        .arg(format!("{}k", (efi_at - PARTITION_AT) / 1024));
    run(&mut mkfs)?;

    let (config, core) = (tree.path().join("grub.cfg"), tree.path().join("core.img"));
    let commands = format!(
        "search --set=root --file /boot/initrd\nlinux /boot/vmlinuz {COMMAND_LINE}\ninitrd /boot/initrd\nboot\n"
    );
    fs::write(&config, commands)?;
    let mut mkimage = Command::new(find_program("grub-mkimage").context("GRUB is missing")?);
    mkimage.args(["-O", "i386-pc", "-p", "/boot", "-c"]);
    mkimage.arg(&config).arg("-o").arg(&core);
    mkimage.args(["biosdisk", "part_msdos", "ext2", "search", "linux"]);
    run(&mut mkimage)?;
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
    // The first is active and for Linux, the second for UEFI.
    let partitions = [
        (0x80, 0x83, PARTITION_AT, efi_at - PARTITION_AT),
        (0, 0xef, efi_at, EFI_BYTES),
    ];
    for (entry, (active, kind, at, length)) in first[446..].chunks_mut(16).zip(partitions) {
        (entry[0], entry[4]) = (active, kind);
        entry[8..12].copy_from_slice(&u32::try_from(at / SECTOR)?.to_le_bytes());
        entry[12..16].copy_from_slice(&u32::try_from(length / SECTOR)?.to_le_bytes());
    }
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all_at(&first, 0)?;
    disk.write_all_at(&core, SECTOR)?;
    install_efi(target, efi_at, &config)
}

/// Makes the UEFI partition, with a GRUB that reads `config`.
fn install_efi(target: &Path, at: u64, config: &Path) -> Result<()> {
    let grub = config.with_file_name("grub.efi");
    let mut mkimage = Command::new(find_program("grub-mkimage").context("GRUB is missing")?);
    mkimage.args(["-O", "x86_64-efi", "-p", "/boot", "-c"]);
    mkimage.arg(config).arg("-o").arg(&grub);
    mkimage.args(["part_msdos", "fat", "ext2", "search", "linux"]);
    run(&mut mkimage)?;
    let mtool = |name: &str, arguments: &[&str]| {
        let mut mtool = Command::new(find_program(name).context("mtools are missing")?);
        mtool.arg("-i").arg(format!("{}@@{at}", target.display()));
        run(mtool.args(arguments))
    };
    let sectors = (EFI_BYTES / SECTOR).to_string();
    mtool("mformat", &["-T", &sectors, "-h", "16", "-s", "63", "::"])?;
    mtool("mmd", &["::EFI", "::EFI/BOOT"])?;
    let grub = grub.to_string_lossy();
    mtool("mcopy", &[&grub, "::EFI/BOOT/BOOTX64.EFI"])
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
