//! The domains of libvirt's own tests, from Debian's source packages: those of the installed libvirt, and those of a newer
//! release, which has more. They are stored in the cache, never in the repository.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::vm::cache_dir;

use super::unpacked::Apt;
use super::{codename, output};

/// The name of the folder in tests/, which differs between releases.
const FOLDERS: [&str; 2] = ["qemuxml2argvdata", "qemuxmlconfdata"];

/// The newer release: its name in the cache, and its suite in the archive.
const NEWER: (&str, &str) = ("debian-13", "trixie");

/// Fetches the missing ones. If none is missing, this is quick and needs no network.
pub fn ensure() -> Result<()> {
    let query = ["--show", "--showformat=${Version}", "libvirt-clients"];
    let version = output("dpkg-query", &query).context("libvirt is not installed")?;
    let release = codename()?;
    let suites = ["", "-updates", "-security", "-backports"].map(|end| format!("{release}{end}"));
    fetch(&version, &format!("libvirt={version}"), &suites)?;
    let (name, suite) = NEWER;
    fetch(name, "libvirt", &[suite.to_owned()])
}

/// Fetches the domains of a source package from the first of these suites that has it.
fn fetch(name: &str, package: &str, suites: &[String]) -> Result<()> {
    let folder = cache_dir().join("libvirt").join(name);
    if folder.is_dir() {
        return Ok(());
    }
    println!("fetching the test domains of libvirt {name} into the cache");
    let apt = Apt::open()?;
    let sources = apt.source_packages(suites)?;
    apt.get(&sources, &["update"])?;
    let cache = folder.parent().context("the cache has no parent folder")?;
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let temporary = tempfile::tempdir_in(cache).context("making a folder for libvirt")?;
    let archive = apt.source_archive(&sources, package, temporary.path())?;
    let unpacked = temporary.path().join("unpacked");
    fs::create_dir(&unpacked)?;
    // A release has one of the two folders, and tar fails because the other is missing. So check the result instead.
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&archive);
    tar.arg("--directory").arg(&unpacked);
    tar.args(["--strip-components=1", "--no-same-owner", "--wildcards"]);
    tar.args(FOLDERS.map(|folder| format!("*/tests/{folder}")));
    tar.output().context("starting tar")?;
    let found = FOLDERS
        .iter()
        .any(|name| unpacked.join("tests").join(name).is_dir());
    ensure!(
        found,
        "the source of libvirt {name} has none of the known folders of test domains"
    );
    fs::set_permissions(&unpacked, Permissions::from_mode(0o755))?;
    // Renamed when complete: the cache never has a partial folder.
    fs::rename(&unpacked, &folder).with_context(|| format!("making {}", folder.display()))
}
