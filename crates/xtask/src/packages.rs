//! Installs what the tests, the demo and the bench need on a fresh Debian machine.
//!
//! The network is used only if something is missing. Without it, the error names what is missing: `cargo xtask test` then
//! skips the guests, and the demo fails.

pub mod browser;
pub mod ceph;
pub mod clean_root;
pub mod deb;
pub mod debian;
pub mod guestfish;
pub mod libnbd;
pub mod libvirt;
pub mod python;
pub mod qemu;
pub mod qtest;
pub mod sbom;
pub mod tcmalloc;
mod unpacked;

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use testkit::vm::{Kernel, find_program, kernel_cache};

/// Programs (or files, with their whole path) and the Debian packages that contain them.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-utils"),
    ("fio", "fio"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("nbd-client", "nbd-client"),
    ("openssl", "openssl"),
    ("busybox", "busybox-static"),
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("sfdisk", "fdisk"),
    ("grub-mkimage", "grub-common"),
    ("/usr/lib/grub/i386-pc/boot.img", "grub-pc-bin"),
    ("/usr/lib/grub/x86_64-efi/linux.mod", "grub-efi-amd64-bin"),
    ("mcopy", "mtools"),
    ("modprobe", "kmod"),
    ("sshd", "openssh-server"),
    ("virsh", "libvirt-clients"),
    ("libvirtd", "libvirt-daemon"),
    ("virt-qemu-run", "libvirt-daemon-driver-qemu"),
    ("apparmor_parser", "apparmor"),
    ("patch", "patch"),
    ("xmllint", "libxml2-utils"),
    ("xz", "xz-utils"),
    ("/usr/lib/u-boot/qemu-x86_64/u-boot.rom", "u-boot-qemu"),
];

/// A meta package that depends on the release's newest kernel.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Debian 12's own QEMU is 7.2, too old to be a fair rival. Its backports have 10.x.
const QEMU_MAJOR_MIN: u32 = 8;

type Ensure = fn() -> Result<()>;

/// Everything that the tests need, and the consequence if it is missing.
pub const ALL: [(Ensure, &str); 14] = [
    (ensure, "tests that need a guest are skipped"),
    (
        python::ensure_qmp,
        "tests with QEMU's QMP client are skipped",
    ),
    (
        python::ensure_imageio,
        "the test with oVirt's NBD client is skipped",
    ),
    (
        libnbd::ensure,
        "tests with the NBD clients of other releases are skipped",
    ),
    (guestfish::ensure, "the test with guestfish is skipped"),
    (deb::ensure, "the test of the Debian package is skipped"),
    (
        debian::ensure,
        "the test of the service in a real systemd is skipped",
    ),
    (qemu::ensure, "the matrix of tests lacks"),
    (
        qtest::ensure,
        "QEMU's own test of vhost-user-blk servers is skipped",
    ),
    (
        libvirt::ensure,
        "the tests with libvirt's own domains are skipped",
    ),
    (ceph::ensure, "tests on a Ceph cluster are skipped"),
    (
        ceph::ensure_newer,
        "tests on a cluster of a newer Ceph are skipped",
    ),
    (
        browser::ensure,
        "the tests of reports in a browser are skipped",
    ),
    (tcmalloc::ensure, "ringdisk is tested without tcmalloc"),
];

/// Installs what is missing. If nothing is missing, this is quick and does not run apt.
pub fn ensure() -> Result<()> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if qemu_is_old() {
        packages.extend(["qemu-system-x86", "qemu-utils"]);
    }
    packages.sort();
    packages.dedup();
    if packages.is_empty() && Kernel::cached().is_ok() {
        return Ok(());
    }
    ensure!(
        cfg!(target_arch = "x86_64") && find_program("apt-get").is_some(),
        "missing: {} and a guest kernel ({KERNEL}, unpacked in {}); this command can install them only on \
         Debian or Ubuntu on x86-64",
        packages.join(" "),
        kernel_cache().display()
    );
    if !packages.is_empty() {
        install(&packages)?;
        let missing: Vec<&str> = PROGRAMS
            .iter()
            .filter(|(program, _)| find_program(program).is_none())
            .map(|(program, _)| *program)
            .collect();
        ensure!(
            missing.is_empty(),
            "apt has installed {}, but {} can't be found",
            packages.join(" "),
            missing.join(", ")
        );
    }
    if Kernel::cached().is_err() {
        fetch_kernel()?;
    }
    Ok(())
}

fn qemu_is_old() -> bool {
    let Ok(output) = Command::new("qemu-system-x86_64").arg("--version").output() else {
        return false;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let major = text
        .split_once("version ")
        .and_then(|(_, rest)| rest.split_once('.'));
    major
        .and_then(|(major, _)| major.parse::<u32>().ok())
        .is_some_and(|major| major < QEMU_MAJOR_MIN)
}

fn install(packages: &[&str]) -> Result<()> {
    ensure!(
        is_root()? || sudo_works(),
        "installing packages needs root, and sudo is missing or asks for a password; run this, and then the command again:\n    \
         sudo apt-get update && sudo apt-get install --no-install-recommends {}\nOn Debian 12, take QEMU from \
         bookworm-backports: its own is too old for a comparison.",
        packages.join(" ")
    );
    println!("installing {}", packages.join(" "));
    let (qemu, others): (Vec<&str>, Vec<&str>) = packages
        .iter()
        .partition(|package| package.starts_with("qemu"));
    apt(&["update"])?;
    let backports = if qemu.is_empty() { None } else { backports()? };
    if let Some(Backports {
        source: Some(text), ..
    }) = &backports
    {
        add_source(text)?;
        apt(&["update"])?;
    }
    if !others.is_empty() {
        apt(&[
            &["install", "--yes", "--no-install-recommends"],
            &others[..],
        ]
        .concat())?;
    }
    if !qemu.is_empty() {
        let release = backports.map(|backports| format!("--target-release={}", backports.release));
        let options: Vec<&str> = ["install", "--yes", "--no-install-recommends"]
            .into_iter()
            .chain(release.as_deref())
            .collect();
        apt(&[&options[..], &qemu].concat())?;
    }
    Ok(())
}

struct Backports {
    release: String,
    /// The sources file to add, if apt does not know this release's backports yet.
    source: Option<String>,
}

const SOURCE_FILE: &str = "/etc/apt/sources.list.d/ringdisk-backports.sources";

/// The backports of Debian 12, which have a recent QEMU, from the same mirror as the release.
fn backports() -> Result<Option<Backports>> {
    let os = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    if !os.lines().any(|line| line == "VERSION_CODENAME=bookworm") {
        return Ok(None); // the QEMU of later releases is new enough
    }
    let release = "bookworm-backports".to_owned();
    if mirror(&release)?.is_some() || Path::new(SOURCE_FILE).exists() {
        return Ok(Some(Backports {
            release,
            source: None,
        }));
    }
    let uri = mirror("bookworm")?.context("apt has no mirror of Debian 12 in its sources")?;
    let source = format!(
        "Types: deb\nURIs: {uri}\nSuites: {release}\nComponents: main\n\
         Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    );
    Ok(Some(Backports {
        release,
        source: Some(source),
    }))
}

/// The name of the release that this host runs, such as `bookworm`.
pub fn codename() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    let mut lines = release.lines();
    let name = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name.context("this is not Debian")?.to_owned())
}

/// The mirror of a release in apt's sources.
fn mirror(codename: &str) -> Result<Option<String>> {
    let indexes = output(
        "apt-get",
        &[
            "indextargets",
            "--format",
            "$(CREATED_BY) $(CODENAME) $(REPO_URI)",
        ],
    )?;
    let uri =
        indexes.lines().find_map(
            |line| match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["Packages", name, uri] if name == codename => Some(uri.to_owned()),
                _ => None,
            },
        );
    Ok(uri)
}

fn add_source(text: &str) -> Result<()> {
    println!("adding {SOURCE_FILE}");
    let file = tempfile::NamedTempFile::new().context("making a temporary file")?;
    fs::write(file.path(), text).context("writing the sources file")?;
    let path = file.path().to_string_lossy();
    as_root("install", &["--mode=644", &path, SOURCE_FILE])
}

/// Fetches the kernel package on which `linux-image-cloud-amd64` depends, and unpacks it in the cache. Installing it
/// would need root and change the host's /boot.
fn fetch_kernel() -> Result<()> {
    let depends = || output("apt-cache", &["depends", KERNEL]);
    let package_in = |text: &str| {
        text.split_once("Depends: ")
            .map(|(_, rest)| rest.lines().next().unwrap_or("").to_owned())
    };
    let package = match package_in(&depends().unwrap_or_default()) {
        Some(package) => package,
        None => {
            apt(&["update"])?;
            package_in(&depends()?).with_context(|| format!("apt knows no {KERNEL}"))?
        }
    };
    println!(
        "fetching {package} for the guests into {}",
        kernel_cache().display()
    );
    fs::create_dir_all(kernel_cache())
        .with_context(|| format!("making {}", kernel_cache().display()))?;
    let folder = tempfile::tempdir_in(kernel_cache()).context("making a folder for the kernel")?;
    let download = || {
        run(Command::new("apt-get")
            .args(["-o", "APT::Sandbox::User=root", "download", &package])
            .current_dir(folder.path()))
    };
    if download().is_err() {
        apt(&["update"])?; // the list may name a version that the mirror has replaced
        download()?;
    }
    let deb = fs::read_dir(folder.path())?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("`apt-get download {package}` left no .deb"))?;
    let unpacked = folder.path().join("unpacked");
    run(Command::new("dpkg-deb")
        .arg("--extract")
        .args([&deb, &unpacked]))?;
    // Rename it when it is complete: the cache never has a partial kernel.
    let target = kernel_cache().join(deb.file_stem().context("a .deb without a name")?);
    if let Err(error) = fs::rename(&unpacked, &target) {
        ensure!(
            target.exists(),
            "renaming {} to {}: {error}",
            unpacked.display(),
            target.display()
        );
    }
    Kernel::cached().map(drop)
}

fn apt(arguments: &[&str]) -> Result<()> {
    let options = [
        "-o",
        "DPkg::Lock::Timeout=300",
        "-o",
        "Dpkg::Use-Pty=0",
        "--quiet=2",
    ];
    as_root("apt-get", &[&options[..], arguments].concat())
        .context("apt-get failed; it needs a network with a Debian mirror")
}

fn as_root(program: &str, arguments: &[&str]) -> Result<()> {
    let environment = ["env", "DEBIAN_FRONTEND=noninteractive"];
    let mut command = if is_root()? {
        Command::new(environment[0])
    } else {
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", environment[0]]);
        sudo
    };
    run(command.arg(environment[1]).arg(program).args(arguments))
}

fn is_root() -> Result<bool> {
    Ok(output("id", &["-u"])?.trim() == "0")
}

fn sudo_works() -> bool {
    Command::new("sudo")
        .args(["-n", "true"])
        .output()
        .is_ok_and(|output| output.status.success())
}

fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed ({status})");
    Ok(())
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("starting {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
