//! The QEMU of several Debian releases, each unpacked in the cache beside the system (see [`testkit::qemu`]).
//!
//! The packages come from the mirror that the system's own apt sources name. apt works on a private folder of the
//! cache, with an empty list of installed packages: it finds all libraries that QEMU depends on, checks signatures and
//! hashes, and neither the system's packages nor its sources change. No root is needed.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use testkit::qemu::{RELEASES, Release, VERSIONS, folder};
use testkit::vm::cache_dir;

use super::{codename, mirror, output, run};

/// What is unpacked of every release, with what it depends on.
const PACKAGES: [&str; 5] = [
    "qemu-system-x86",
    "qemu-utils",
    "qemu-block-extra",
    "seabios",
    "ovmf",
];

/// Which programs tests may start.
const PROGRAMS: [&str; 5] = [
    "qemu-system-x86_64",
    "qemu-img",
    "qemu-io",
    "qemu-nbd",
    "qemu-storage-daemon",
];

/// How old the archives' lists may be before they are fetched again.
const LISTS_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Where a QEMU comes from.
struct Source {
    /// What it is called in the cache.
    name: &'static str,
    /// Of the release, as in /etc/os-release.
    codename: &'static str,
    /// The suites that it is taken from. The last one is preferred, whatever the versions are.
    suites: &'static [&'static str],
}

/// A release's last entry is the newest QEMU that it offers.
const SOURCES: [Source; 5] = [
    Source {
        name: "debian-12",
        codename: "bookworm",
        suites: &["bookworm-updates", "bookworm-security", "bookworm"],
    },
    Source {
        name: "debian-12-backports",
        codename: "bookworm",
        suites: &["bookworm", "bookworm-backports"],
    },
    Source {
        name: "debian-13",
        codename: "trixie",
        suites: &["trixie-updates", "trixie-security", "trixie"],
    },
    Source {
        name: "debian-13-backports",
        codename: "trixie",
        suites: &["trixie", "trixie-backports"],
    },
    Source {
        name: "debian-unstable",
        codename: "sid",
        suites: &["sid"],
    },
];

/// Fetches what is missing of [`RELEASES`] and, once a day, what the archives have newer.
///
/// # Errors
/// One is missing still; the others are there.
pub fn ensure() -> Result<()> {
    let mut missing = Vec::new();
    for name in RELEASES {
        if let Err(error) = ensure_release(name) {
            missing.push(format!("QEMU of {name}: {error:#}"));
        }
    }
    ensure!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

/// The newest QEMU that the archives of this system's release offer, backports included.
///
/// # Errors
/// It cannot be fetched, or this is another system than those that [`SOURCES`] knows.
pub fn newest_of_system() -> Result<Release> {
    let codename = codename()?;
    let source = SOURCES.iter().rfind(|source| source.codename == codename);
    let source = source.with_context(|| format!("no QEMU is known of {codename}"))?;
    ensure_release(source.name)
}

/// Fetches a release if it is missing or, once a day, if the archives have a newer one.
fn ensure_release(name: &str) -> Result<Release> {
    let source = SOURCES.iter().find(|source| source.name == name);
    let source = source.with_context(|| format!("{name} is no release that is known"))?;
    let there = Release::find(name);
    let stamp = apt_folder().join(format!("{name}.checked"));
    let age = fs::metadata(&stamp).and_then(|stamp| stamp.modified());
    let age = age.ok().and_then(|checked| checked.elapsed().ok());
    if let (Ok(release), Some(age)) = (&there, age)
        && age < LISTS_AGE_MAX
    {
        return Ok(release.clone());
    }
    match (there, refresh(source)) {
        (_, Ok(())) => {
            File::create(&stamp).with_context(|| format!("making {}", stamp.display()))?;
            Release::find(name)
        }
        (Ok(release), Err(error)) => {
            println!(
                "using QEMU {} of {name} as it is: {error:#}",
                release.package
            );
            Ok(release)
        }
        (Err(_), Err(error)) => Err(error),
    }
}

/// Where apt keeps what it knows of the archives.
fn apt_folder() -> PathBuf {
    cache_dir().join("qemu/apt")
}

/// Fetches the archives' lists, and the packages if they are newer than what is unpacked.
fn refresh(source: &Source) -> Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "only packages for x86-64 are known"
    );
    let apt = Apt::open()?;
    let sources = apt.sources(source)?;
    apt.get(&sources, &["update"])?;
    let target = source
        .suites
        .iter()
        .find(|suite| suite.ends_with("-backports"));
    let target = target.map(|suite| format!("--target-release={suite}"));
    let candidate = apt.candidate(&sources, target.as_deref(), PACKAGES[0])?;
    if Release::find(source.name).is_ok_and(|release| release.package == candidate) {
        return Ok(());
    }

    println!(
        "fetching QEMU {candidate} of {} into the cache",
        source.name
    );
    let folder = folder(source.name);
    let cache = folder.parent().context("the cache is no folder")?;
    let made = tempfile::tempdir_in(cache).context("making a folder for QEMU")?;
    let archives = made.path().join("archives");
    fs::create_dir_all(archives.join("partial"))?;
    let into = format!("Dir::Cache::archives={}", archives.display());
    let options = ["-o", &into, "install", "--download-only", "--yes"];
    let all: Vec<&str> = options.into_iter().chain(target.as_deref()).collect();
    apt.get(&sources, &[&all[..], &PACKAGES].concat())?;
    let root = made.path().join("root");
    for package in fs::read_dir(&archives)?.flatten() {
        if package.path().extension().is_some_and(|e| e == "deb") {
            let mut extract = Command::new("dpkg-deb");
            run(extract
                .arg("--extract")
                .args([package.path(), root.clone()]))?;
        }
    }
    for unread in [
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "var",
        "etc",
    ] {
        fs::remove_dir_all(root.join(unread)).ok(); // to save space; not all releases have all of them
    }
    fs::remove_dir_all(&archives).context("removing the packages")?;
    let version = write_programs(made.path())?;
    fs::write(made.path().join(VERSIONS), format!("{version} {candidate}"))?;

    // An old one is replaced as a whole.
    fs::set_permissions(made.path(), Permissions::from_mode(0o755))?;
    let old = tempfile::tempdir_in(cache).context("making a folder for the old QEMU")?;
    if folder.exists() {
        fs::rename(&folder, old.path().join("old")).context("moving the old QEMU away")?;
    }
    fs::rename(made.keep(), &folder).with_context(|| format!("making {}", folder.display()))
}

/// Writes a script for every program, and tries them. They tell QEMU's version.
fn write_programs(folder: &Path) -> Result<String> {
    let programs = folder.join("bin");
    fs::create_dir(&programs).context("making the folder of programs")?;
    let mut said = String::new();
    for name in PROGRAMS {
        // Firmware is looked for beside the program that runs, which is the loader: so the folders are named.
        let firmware = match name {
            "qemu-system-x86_64" => "-L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\"",
            _ => "",
        };
        let script = format!(
            "#!/bin/sh\n\
             root=${{0%/*}}/../root\n\
             for libraries in \"$root/usr/lib/x86_64-linux-gnu\" \"$root/lib/x86_64-linux-gnu\"; do\n\
             \x20   [ ! -e \"$libraries/ld-linux-x86-64.so.2\" ] || loader=$libraries/ld-linux-x86-64.so.2\n\
             done\n\
             export QEMU_MODULE_DIR=\"$root/usr/lib/x86_64-linux-gnu/qemu\"\n\
             exec \"$loader\" --argv0 {name} --library-path \\\n\
             \x20   \"$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu\" \\\n\
             \x20   \"$root/usr/bin/{name}\" {firmware} \"$@\"\n"
        );
        let program = programs.join(name);
        fs::write(&program, script)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        said = output(&program.to_string_lossy(), &["--version"])?;
    }
    let version = said.split_once("version ").map(|(_, rest)| rest);
    let version = version.and_then(|rest| rest.split_whitespace().next());
    Ok(version
        .with_context(|| format!("no version in {said}"))?
        .to_owned())
}

/// apt on a folder of its own.
struct Apt {
    folder: PathBuf,
    /// The mirror of the system's release, and the one of its security updates if there is one.
    mirror: String,
    security: Option<String>,
    keyring: PathBuf,
    /// Held as long as apt is used.
    _lock: File,
}

/// Read after the system's own configuration of apt, of which proxies are kept.
const CONFIGURATION: &str = r#"
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::Contents-deb;
#clear APT::Default-Release;
Acquire::GzipIndexes "true";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Get::List-Cleanup "false";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dpkg::Use-Pty "false";
"#;

impl Apt {
    fn open() -> Result<Self> {
        let folder = apt_folder();
        for made in ["lists/partial", "archives/partial"] {
            let made = folder.join(made);
            fs::create_dir_all(&made).with_context(|| format!("making {}", made.display()))?;
        }
        let lock = File::create(folder.join("lock")).context("making a lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("waiting for the lock")?;
        fs::write(folder.join("status"), "").context("writing an empty list of packages")?;
        let place = folder.display();
        let folders = format!(
            "Dir::State \"{place}\";\nDir::State::Lists \"{place}/lists\";\nDir::State::status \"{place}/status\";\n\
             Dir::Cache \"{place}\";\n"
        );
        fs::write(
            folder.join("configuration"),
            CONFIGURATION.to_owned() + &folders,
        )?;

        let release = codename()?;
        let main = match mirror(&release)? {
            None => {
                super::apt(&["update"])?; // of a system on which nothing has been installed yet
                mirror(&release)?
            }
            main => main,
        };
        let mut apt = Self {
            keyring: PathBuf::from("/usr/share/keyrings/debian-archive-keyring.gpg"),
            mirror: main.with_context(|| format!("apt's sources name no mirror of {release}"))?,
            security: mirror(&format!("{release}-security"))?,
            folder,
            _lock: lock,
        };
        apt.newer_keyring(&release)?;
        Ok(apt)
    }

    /// Takes the keys from the newest package of the system's own release, signed by those that the system trusts: it has
    /// keys of later releases, which an old installation lacks.
    fn newer_keyring(&mut self, release: &str) -> Result<()> {
        let sources = self.folder.join("keyring.list");
        fs::write(&sources, self.line(release)?)?;
        self.get(&sources, &["update"])?;
        let place = tempfile::tempdir_in(&self.folder).context("making a folder for keys")?;
        let mut download = self.command("apt-get", &sources);
        download.args(["--quiet=2", "download", "debian-archive-keyring"]);
        run(download.current_dir(place.path()))?;
        let package = fs::read_dir(place.path())?.flatten().next();
        let package = package.context("apt-get has downloaded no keyring")?.path();
        let keys = self.folder.join("keys");
        run(Command::new("dpkg-deb")
            .arg("--extract")
            .args([&package, &keys]))?;
        self.keyring = keys.join("usr/share/keyrings/debian-archive-keyring.gpg");
        Ok(())
    }

    /// The line of a list of sources for a suite.
    fn line(&self, suite: &str) -> Result<String> {
        let mirror = match (suite.ends_with("-security"), &self.security) {
            (false, _) => &self.mirror,
            (true, Some(security)) => security,
            (true, None) => bail!("apt's sources name no mirror of security updates"),
        };
        Ok(format!(
            "deb [signed-by={}] {mirror} {suite} main\n",
            self.keyring.display()
        ))
    }

    /// The list of sources for a QEMU.
    fn sources(&self, source: &Source) -> Result<PathBuf> {
        let lines: Result<String> = source.suites.iter().map(|suite| self.line(suite)).collect();
        let path = self.folder.join(format!("{}.list", source.name));
        fs::write(&path, lines?).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    fn command(&self, program: &str, sources: &Path) -> Command {
        let mut command = Command::new(program);
        let configuration = self.folder.join("configuration");
        command.arg(format!("--config-file={}", configuration.display()));
        command.arg("-o");
        command.arg(format!("Dir::Etc::SourceList={}", sources.display()));
        command
    }

    fn get(&self, sources: &Path, arguments: &[&str]) -> Result<()> {
        let mut apt = self.command("apt-get", sources);
        apt.arg("--quiet=2").args(arguments);
        let output = apt.output().context("starting apt-get")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // An update that fetched nothing is a warning for apt.
        ensure!(
            output.status.success() && !said.contains("Failed to fetch"),
            "apt-get {}: {}",
            arguments.join(" "),
            said.trim()
        );
        Ok(())
    }

    /// The version of a package that would be installed.
    fn candidate(&self, sources: &Path, target: Option<&str>, package: &str) -> Result<String> {
        let mut policy = self.command("apt-cache", sources);
        policy.args(target).args(["policy", package]);
        let output = policy.output().context("starting apt-cache")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let candidate = said
            .lines()
            .find_map(|l| l.trim().strip_prefix("Candidate: "));
        let candidate = candidate.with_context(|| format!("apt knows no {package}: {said}"))?;
        Ok(candidate.to_owned())
    }
}
