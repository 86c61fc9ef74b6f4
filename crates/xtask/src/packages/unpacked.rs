//! Packages of other Debian releases, unpacked in the cache without being installed (see [`testkit::unpacked`]).
//!
//! They come from the mirror in the system's own apt sources. apt works on a private folder of the cache, with an empty
//! list of installed packages: it finds all libraries on which the packages depend, and checks signatures and hashes. It
//! changes neither the system's packages nor its sources, and does not need root.

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

/// The archives' lists are fetched again after this time.
const LISTS_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The packages to fetch from each release.
pub struct Product {
    /// Its name in the cache.
    pub name: &'static str,
    /// Unpacked together with their dependencies. The version of the first tells whether the archive has newer ones.
    pub packages: &'static [&'static str],
    /// Makes the folder `bin` with the programs that tests start, next to `root`, which has the unpacked packages. Returns
    /// their version.
    pub write_programs: fn(&Path) -> Result<String>,
}

/// A release of Debian to fetch from.
pub struct Source {
    /// Its name in the cache.
    pub name: &'static str,
    /// The release's name, as in /etc/os-release.
    pub codename: &'static str,
    /// The suites to take packages from. The last one is preferred, whatever the versions are.
    pub suites: &'static [&'static str],
}

/// Fetches a product if it is missing or, once a day, if the archives have a newer one.
///
/// # Errors
/// It is missing, and cannot be fetched.
pub fn ensure_unpacked(product: &Product, source: &Source) -> Result<()> {
    let (what, name) = (product.name, source.name);
    let found = Unpacked::find(what, name);
    let stamp = apt_folder().join(format!("{what}-{name}.checked"));
    let age = fs::metadata(&stamp).and_then(|stamp| stamp.modified());
    let age = age.ok().and_then(|checked| checked.elapsed().ok());
    if found.is_ok() && age.is_some_and(|age| age < LISTS_AGE_MAX) {
        return Ok(());
    }
    match (found, refresh(product, source)) {
        (_, Ok(())) => {
            File::create(&stamp).with_context(|| format!("making {}", stamp.display()))?;
            Ok(())
        }
        (Ok(release), Err(error)) => {
            println!("keeping {what} {} of {name}: {error:#}", release.package);
            Ok(())
        }
        (Err(_), Err(error)) => Err(error),
    }
}

/// Writes a script that starts an unpacked program with the libraries of its release, and returns the script's path.
/// `prepare` are lines of the script before that, where `$root` has the unpacked packages, and `arguments` come first.
pub fn write_program(folder: &Path, name: &str, prepare: &str, arguments: &str) -> Result<PathBuf> {
    let script = format!(
        "#!/bin/sh\n\
         root=${{0%/*}}/../root\n\
         for libraries in \"$root/usr/lib/x86_64-linux-gnu\" \"$root/lib/x86_64-linux-gnu\"; do\n\
         \x20   [ ! -e \"$libraries/ld-linux-x86-64.so.2\" ] || loader=$libraries/ld-linux-x86-64.so.2\n\
         done\n\
         {prepare}\
         exec \"$loader\" --argv0 {name} --library-path \\\n\
         \x20   \"$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu\" \\\n\
         \x20   \"$root/usr/bin/{name}\" {arguments} \"$@\"\n"
    );
    let program = folder.join("bin").join(name);
    fs::write(&program, script)?;
    fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    Ok(program)
}

/// The folder for apt's lists of the archives.
fn apt_folder() -> PathBuf {
    cache_dir().join("apt")
}

/// Fetches the archives' lists, and the packages if they are newer than what is unpacked.
fn refresh(product: &Product, source: &Source) -> Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "only packages for x86-64 are supported"
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
    let found = Unpacked::find(product.name, source.name);
    if found.is_ok_and(|release| release.package == candidate) {
        return Ok(());
    }

    println!(
        "fetching {} {candidate} of {} into the cache",
        product.name, source.name
    );
    let folder = folder(product.name, source.name);
    let cache = folder.parent().context("the cache has no parent folder")?;
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let temporary = tempfile::tempdir_in(cache).context("making a folder for packages")?;
    let archives = temporary.path().join("archives");
    fs::create_dir_all(archives.join("partial"))?;
    let into = format!("Dir::Cache::archives={}", archives.display());
    let options = ["-o", &into, "install", "--download-only", "--yes"];
    let all: Vec<&str> = options.into_iter().chain(target.as_deref()).collect();
    apt.get(&sources, &[&all[..], product.packages].concat())?;
    let root = temporary.path().join("root");
    for package in fs::read_dir(&archives)?.flatten() {
        if package.path().extension().is_some_and(|e| e == "deb") {
            let mut extract = Command::new("dpkg-deb");
            run(extract
                .arg("--extract")
                .args([package.path(), root.clone()]))?;
        }
    }
    for unused in [
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "var",
        "etc",
    ] {
        fs::remove_dir_all(root.join(unused)).ok(); // to save space; not all releases have all of them
    }
    fs::remove_dir_all(&archives).context("removing the packages")?;
    let version = (product.write_programs)(temporary.path())?;
    fs::write(
        temporary.path().join(VERSIONS),
        format!("{version} {candidate}"),
    )?;

    // Replace an old one as a whole.
    fs::set_permissions(temporary.path(), Permissions::from_mode(0o755))?;
    let old = tempfile::tempdir_in(cache).context("making a folder for the old packages")?;
    if folder.exists() {
        fs::rename(&folder, old.path().join("old")).context("moving the old packages away")?;
    }
    fs::rename(temporary.keep(), &folder).with_context(|| format!("making {}", folder.display()))
}

/// apt with a private folder for its state.
pub struct Apt {
    folder: PathBuf,
    /// The mirror of the system's release.
    mirror: String,
    /// The mirror of its security updates, if the system has one.
    security: Option<String>,
    keyring: PathBuf,
    /// Held while apt is used
    _lock: File,
}

/// apt reads this after the system's own configuration, whose proxies still apply.
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
        for name in ["lists/partial", "archives/partial"] {
            let path = folder.join(name);
            fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        }
        let lock = File::create(folder.join("lock")).context("making a lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("waiting for the lock")?;
        fs::write(folder.join("status"), "").context("writing an empty list of packages")?;
        let path = folder.display();
        let folders = format!(
            "Dir::State \"{path}\";\nDir::State::Lists \"{path}/lists\";\nDir::State::status \"{path}/status\";\n\
             Dir::Cache \"{path}\";\n"
        );
        fs::write(
            folder.join("configuration"),
            CONFIGURATION.to_owned() + &folders,
        )?;

        let release = codename()?;
        let main = match mirror(&release)? {
            None => {
                super::apt(&["update"])?; // apt has no lists before the first update
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

    /// Takes the keys of later releases, which an old installation lacks, from the newest keyring package of the system's
    /// own release. That package is signed with keys that the system trusts.
    fn newer_keyring(&mut self, release: &str) -> Result<()> {
        let sources = self.folder.join("keyring.list");
        fs::write(&sources, self.line("deb", release)?)?;
        self.get(&sources, &["update"])?;
        let temporary = tempfile::tempdir_in(&self.folder).context("making a folder for keys")?;
        let mut download = self.command("apt-get", &sources);
        download.args(["--quiet=2", "download", "debian-archive-keyring"]);
        run(download.current_dir(temporary.path()))?;
        let package = fs::read_dir(temporary.path())?.flatten().next();
        let package = package.context("apt-get has downloaded no keyring")?.path();
        let keys = self.folder.join("keys");
        run(Command::new("dpkg-deb")
            .arg("--extract")
            .args([&package, &keys]))?;
        self.keyring = keys.join("usr/share/keyrings/debian-archive-keyring.gpg");
        Ok(())
    }

    /// The line for a suite in a list of sources.
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

    /// The list of sources for the source packages of these suites, without suites for which the system has no mirror.
    pub fn source_packages(&self, suites: &[String]) -> Result<PathBuf> {
        let lines = suites.iter().flat_map(|suite| self.line("deb-src", suite));
        let path = self.folder.join("source-packages.list");
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Fetches the upstream archive of a source package into a folder, and returns its path. apt checks the archive's
    /// signature, and with it the file.
    pub fn source_archive(&self, sources: &Path, package: &str, folder: &Path) -> Result<PathBuf> {
        let mut source = self.command("apt-get", sources);
        source.args(["--quiet=2", "source", "--download-only", "--tar-only"]);
        run(source.arg(package).current_dir(folder))?;
        let mut files = fs::read_dir(folder)?.flatten().map(|file| file.path());
        let archive = files.find(|path| {
            path.to_string_lossy().contains(".orig.tar.")
                && path.extension().is_some_and(|suffix| suffix != "asc")
        });
        archive.with_context(|| format!("the source package {package} has no archive"))
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
        let errors = String::from_utf8_lossy(&output.stderr);
        // For apt, an update that fetched nothing is only a warning.
        ensure!(
            output.status.success() && !errors.contains("Failed to fetch"),
            "apt-get {}: {}",
            arguments.join(" "),
            errors.trim()
        );
        Ok(())
    }

    /// The version that apt would install.
    fn candidate(&self, sources: &Path, target: Option<&str>, package: &str) -> Result<String> {
        let mut policy = self.command("apt-cache", sources);
        policy.args(target).args(["policy", package]);
        let output = policy.output().context("starting apt-cache")?;
        let policy = String::from_utf8_lossy(&output.stdout).into_owned();
        let candidate = policy
            .lines()
            .find_map(|l| l.trim().strip_prefix("Candidate: "));
        let candidate = candidate.with_context(|| format!("apt knows no {package}: {policy}"))?;
        Ok(candidate.to_owned())
    }
}
