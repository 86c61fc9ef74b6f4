//! libvirt's own test domains, from Debian's source packages: those of the libvirt that is installed, and those of a newer
//! one, which has more of them. They are in the cache, and never in the repository.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::vm::cache_dir;

use super::unpacked::Apt;
use super::{codename, output, run};

/// What tests/ is called from release to release.
const FOLDERS: [&str; 2] = ["qemuxml2argvdata", "qemuxmlconfdata"];

/// The newer release: its name in the cache, and its suite.
const NEWER: (&str, &str) = ("debian-13", "trixie");

/// Fetches them if they are missing; quick, and without network, when they are there.
pub fn ensure() -> Result<()> {
    let query = ["--show", "--showformat=${Version}", "libvirt-clients"];
    let version = output("dpkg-query", &query).context("libvirt is not installed")?;
    let release = codename()?;
    let suites = ["", "-updates", "-security", "-backports"].map(|end| format!("{release}{end}"));
    fetch(&version, &format!("libvirt={version}"), &suites)?;
    let (name, suite) = NEWER;
    fetch(name, "libvirt", &[suite.to_owned()])
}

/// Fetches those of a source package of these suites.
fn fetch(name: &str, package: &str, suites: &[String]) -> Result<()> {
    let folder = cache_dir().join("libvirt").join(name);
    if folder.is_dir() {
        return Ok(());
    }
    println!("fetching the test domains of libvirt {name} into the cache");
    let apt = Apt::open()?;
    let sources = apt.source_packages(suites)?;
    apt.get(&sources, &["update"])?;
    let cache = folder.parent().context("the cache is no folder")?;
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let made = tempfile::tempdir_in(cache).context("making a folder for libvirt")?;
    // apt checks the signature of the archive, and with it the file.
    let mut source = apt.command("apt-get", &sources);
    source.args([
        "--quiet=2",
        "source",
        "--download-only",
        "--tar-only",
        package,
    ]);
    run(source.current_dir(made.path()))?;
    let files = fs::read_dir(made.path())?.flatten().map(|file| file.path());
    let archive = files
        .filter(|path| path.to_string_lossy().contains(".orig.tar."))
        .find(|path| path.extension().is_some_and(|suffix| suffix != "asc"));
    let archive = archive.context("the source package has no archive")?;
    let unpacked = made.path().join("unpacked");
    fs::create_dir(&unpacked)?;
    // A release has one of the two folders, and tar fails for want of the other: what counts is what is there.
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&archive);
    tar.arg("--directory").arg(&unpacked);
    tar.args(["--strip-components=1", "--no-same-owner", "--wildcards"]);
    tar.args(FOLDERS.map(|folder| format!("*/tests/{folder}")));
    tar.output().context("starting tar")?;
    let found = FOLDERS
        .iter()
        .any(|name| unpacked.join("tests").join(name).is_dir());
    ensure!(found, "libvirt {name} has no test domains where they were");
    fs::set_permissions(&unpacked, Permissions::from_mode(0o755))?;
    // Renamed in one go: what is in the cache is whole.
    fs::rename(&unpacked, &folder).with_context(|| format!("making {}", folder.display()))
}
