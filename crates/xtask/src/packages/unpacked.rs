//! Packages of other Debian releases, unpacked in the cache beside the system (see [`testkit::unpacked`]).
//!
//! They come from the mirror that the system's own apt sources name. apt works on a private folder of the cache, with an
//! empty list of installed packages: it finds all libraries that they depend on, checks signatures and hashes, and
//! neither the system's packages nor its sources change. No root is needed.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use testkit::unpacked::{Unpacked, VERSIONS, folder};
use testkit::vm::cache_dir;

use super::{codename, mirror, run};

/// How old the archives' lists may be before they are fetched again.
const LISTS_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What is fetched of each release.
pub struct Product {
    /// What it is called in the cache.
    pub name: &'static str,
    /// Unpacked with what they depend on. The first one's version is what is looked at for a newer one.
    pub packages: &'static [&'static str],
    /// Makes the folder `bin` of programs that tests start, in the folder in which `root` is unpacked. Returns their
    /// version.
    pub write_programs: fn(&Path) -> Result<String>,
}

/// Where packages come from.
pub struct Source {
    /// What it is called in the cache.
    pub name: &'static str,
    /// Of the release, as in /etc/os-release.
    pub codename: &'static str,
    /// The suites that they are taken from. The last one is preferred, whatever the versions are.
    pub suites: &'static [&'static str],
}

/// Fetches a product if it is missing or, once a day, if the archives have a newer one.
///
/// # Errors
/// It is missing still.
pub fn ensure_unpacked(product: &Product, source: &Source) -> Result<()> {
    let (what, name) = (product.name, source.name);
    let there = Unpacked::find(what, name);
    let stamp = apt_folder().join(format!("{what}-{name}.checked"));
    let age = fs::metadata(&stamp).and_then(|stamp| stamp.modified());
    let age = age.ok().and_then(|checked| checked.elapsed().ok());
    if there.is_ok() && age.is_some_and(|age| age < LISTS_AGE_MAX) {
        return Ok(());
    }
    match (there, refresh(product, source)) {
        (_, Ok(())) => {
            File::create(&stamp).with_context(|| format!("making {}", stamp.display()))?;
            Ok(())
        }
        (Ok(release), Err(error)) => {
            println!(
                "using {what} {} of {name} as it is: {error:#}",
                release.package
            );
            Ok(())
        }
        (Err(_), Err(error)) => Err(error),
    }
}

/// Where apt keeps what it knows of the archives.
fn apt_folder() -> PathBuf {
    cache_dir().join("apt")
}

/// Fetches the archives' lists, and the packages if they are newer than what is unpacked.
fn refresh(product: &Product, source: &Source) -> Result<()> {
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
    let candidate = apt.candidate(&sources, target.as_deref(), product.packages[0])?;
    let there = Unpacked::find(product.name, source.name);
    if there.is_ok_and(|release| release.package == candidate) {
        return Ok(());
    }

    println!(
        "fetching {} {candidate} of {} into the cache",
        product.name, source.name
    );
    let folder = folder(product.name, source.name);
    let cache = folder.parent().context("the cache is no folder")?;
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let made = tempfile::tempdir_in(cache).context("making a folder for packages")?;
    let archives = made.path().join("archives");
    fs::create_dir_all(archives.join("partial"))?;
    let into = format!("Dir::Cache::archives={}", archives.display());
    let options = ["-o", &into, "install", "--download-only", "--yes"];
    let all: Vec<&str> = options.into_iter().chain(target.as_deref()).collect();
    apt.get(&sources, &[&all[..], product.packages].concat())?;
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
    let version = (product.write_programs)(made.path())?;
    fs::write(made.path().join(VERSIONS), format!("{version} {candidate}"))?;

    // An old one is replaced as a whole.
    fs::set_permissions(made.path(), Permissions::from_mode(0o755))?;
    let old = tempfile::tempdir_in(cache).context("making a folder for the old one")?;
    if folder.exists() {
        fs::rename(&folder, old.path().join("old")).context("moving the old one away")?;
    }
    fs::rename(made.keep(), &folder).with_context(|| format!("making {}", folder.display()))
}

/// apt on a folder of its own.
pub struct Apt {
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
    pub fn open() -> Result<Self> {
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
        fs::write(&sources, self.line("deb", release)?)?;
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
    fn line(&self, kind: &str, suite: &str) -> Result<String> {
        let mirror = match (suite.ends_with("-security"), &self.security) {
            (false, _) => &self.mirror,
            (true, Some(security)) => security,
            (true, None) => bail!("apt's sources name no mirror of security updates"),
        };
        Ok(format!(
            "{kind} [signed-by={}] {mirror} {suite} main\n",
            self.keyring.display()
        ))
    }

    /// The list of sources for a release.
    fn sources(&self, source: &Source) -> Result<PathBuf> {
        let lines: Result<String> = source
            .suites
            .iter()
            .map(|suite| self.line("deb", suite))
            .collect();
        let path = self.folder.join(format!("{}.list", source.name));
        fs::write(&path, lines?).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// The list of sources for the source packages of those suites that the system has a mirror of.
    pub fn source_packages(&self, suites: &[String]) -> Result<PathBuf> {
        let lines = suites.iter().flat_map(|suite| self.line("deb-src", suite));
        let path = self.folder.join("source-packages.list");
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    pub fn command(&self, program: &str, sources: &Path) -> Command {
        let mut command = Command::new(program);
        let configuration = self.folder.join("configuration");
        command.arg(format!("--config-file={}", configuration.display()));
        command.arg("-o");
        command.arg(format!("Dir::Etc::SourceList={}", sources.display()));
        command
    }

    pub fn get(&self, sources: &Path, arguments: &[&str]) -> Result<()> {
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
