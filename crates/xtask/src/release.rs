//! `cargo xtask release X.Y.Z`: everything between a green CI and what users download.
//!
//! The order: the version and the change log, in a commit; a package for each release of Debian, built in a clean root of it;
//! each is installed in another clean root, and serves a disk there; the upgrade from the package before, in a guest whose
//! disk is in use meanwhile; an SBOM and checksums; and at last a signed tag. Whatever fails before the tag can be repeated.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::packages::{self, clean_root};
use crate::{cargo, ci, root};

/// The releases of Debian for which a package is built, and what its version ends with. Ubuntu 24.04 takes the first.
const SUITES: [(&str, &str); 2] = [("bookworm", "deb12u1"), ("trixie", "deb13u1")];

/// The version, and what is to be left out
#[derive(clap::Args)]
pub struct Args {
    /// The new version, as in 0.2.0
    version: String,
    /// Package of the release before, from which the upgrade is tested; default: the newest in target/releases for this host
    #[arg(long, value_name = "FILE")]
    previous: Option<PathBuf>,
    /// Build and test everything from the work tree as it is; change no file, commit and tag nothing
    #[arg(long)]
    rehearsal: bool,
}

/// Makes a release.
pub fn run(args: &Args) -> Result<()> {
    let version = parse(&args.version)?;
    let metadata = ci::metadata()?;
    let target = PathBuf::from(ci::text(&metadata["target_directory"]));
    let releases = target.join(if args.rehearsal {
        "rehearsals"
    } else {
        "releases"
    });
    let output = releases.join(&args.version);
    if !args.rehearsal {
        prepare(&args.version, version)?;
    }
    fs::create_dir_all(&output).with_context(|| format!("making {}", output.display()))?;
    let previous = match &args.previous {
        Some(package) => Some(package.clone()),
        None => newest_before(&releases, version)?,
    };
    packages::deb::ensure()?;
    let manifest = fs::read_to_string(root().join("Cargo.toml")).context("reading Cargo.toml")?;
    let program = workspace_version(&manifest)?;
    let mut built = Vec::new();
    for (suite, suffix) in SUITES {
        let number = format!("{}-1~{suffix}", args.version);
        let package = clean_root::build(suite, &number, &output)?;
        clean_root::install(suite, &package, program)?;
        println!(
            "{}: built and installed in clean roots of {suite}",
            package.display()
        );
        built.push((suite, package));
    }
    let host = packages::codename()?;
    let of_host = built.iter().find(|(suite, _)| *suite == host);
    match (of_host, &previous) {
        (Some((_, new)), Some(old)) => test_upgrade(old, new)?,
        (None, _) => {
            println!("not tested: the upgrade: this host is neither of the releases, but {host}")
        }
        (_, None) => println!(
            "not tested: the upgrade: there is no package of a release before; --previous names one"
        ),
    }
    let bill = packages::sbom::write(&output, &args.version)?;
    println!("{}", bill.display());
    let sums = checksums(&output)?;
    println!("{}", sums.display());
    if args.rehearsal {
        println!("a rehearsal: nothing was committed or tagged");
        return Ok(());
    }
    let tag = format!("v{}", args.version);
    let message = format!("ringdisk {}", args.version);
    git(&["tag", "--sign", &tag, "--message", &message]).with_context(|| {
        format!("everything is built and tested, and only the tag is missing: 'git tag --sign {tag}' with your key")
    })?;
    println!(
        "{tag}: push it with 'git push origin main {tag}', and publish {}",
        output.display()
    );
    Ok(())
}

type Version = [u64; 3];

fn parse(text: &str) -> Result<Version> {
    let numbers: Option<Vec<u64>> = text.split('.').map(|part| part.parse().ok()).collect();
    let numbers = numbers.and_then(|numbers| Version::try_from(numbers).ok());
    numbers.with_context(|| format!("'{text}' is no version; as in 0.2.0"))
}

/// Sets the version, closes the section of the change log, and commits both; unless that has been done.
fn prepare(text: &str, version: Version) -> Result<()> {
    ensure!(
        git(&["status", "--porcelain"])?.is_empty(),
        "the work tree has changes: commit them first"
    );
    let manifest = root().join("Cargo.toml");
    let before = fs::read_to_string(&manifest).context("reading Cargo.toml")?;
    let now = workspace_version(&before)?;
    if now == text {
        println!("the version is {text} already");
        return Ok(());
    }
    ensure!(parse(now)? < version, "{text} is not newer than {now}");
    let log = root().join("CHANGELOG.md");
    let changes = fs::read_to_string(&log).context("reading CHANGELOG.md")?;
    let changes = close_section(&changes, text, &date()?)?;
    let after = before.replacen(
        &format!("version = \"{now}\""),
        &format!("version = \"{text}\""),
        1,
    );
    fs::write(&manifest, after).context("writing Cargo.toml")?;
    fs::write(&log, changes).context("writing CHANGELOG.md")?;
    for workspace in ["Cargo.toml", "fuzz/Cargo.toml"] {
        let mut update = cargo();
        update.args([
            "update",
            "--workspace",
            "--offline",
            "--manifest-path",
            workspace,
        ]);
        ensure!(
            update.status().context("starting cargo")?.success(),
            "cargo update failed"
        );
    }
    git(&[
        "commit",
        "--quiet",
        "--all",
        "--message",
        &format!("release: ringdisk {text}"),
    ])?;
    Ok(())
}

fn workspace_version(manifest: &str) -> Result<&str> {
    let section = manifest.split("[workspace.package]").nth(1);
    let line =
        section.and_then(|section| section.lines().find(|line| line.starts_with("version = ")));
    let version = line.and_then(|line| line.split('"').nth(1));
    version.context("Cargo.toml has no version of the workspace")
}

/// The change log in which what was unreleased belongs to a version.
fn close_section(changes: &str, version: &str, date: &str) -> Result<String> {
    const UNRELEASED: &str = "## Unreleased\n";
    let (before, after) = changes
        .split_once(UNRELEASED)
        .context("CHANGELOG.md has no section 'Unreleased'")?;
    let section = after.split("\n## ").next().unwrap_or_default();
    ensure!(
        !section.trim().is_empty(),
        "CHANGELOG.md says nothing of what is unreleased"
    );
    Ok(format!(
        "{before}{UNRELEASED}\n## {version} - {date}\n{after}"
    ))
}

fn date() -> Result<String> {
    let date = Command::new("date").args(["--utc", "+%F"]).output();
    let date = date.context("starting date")?;
    Ok(String::from_utf8_lossy(&date.stdout).trim().to_owned())
}

/// The package of the newest release before this one, for this host.
fn newest_before(releases: &Path, version: Version) -> Result<Option<PathBuf>> {
    let host = packages::codename()?;
    let suffix = SUITES.iter().find(|(suite, _)| *suite == host);
    let Some((_, suffix)) = suffix else {
        return Ok(None);
    };
    let mut found = None;
    for entry in fs::read_dir(releases).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(other) = parse(&name) else { continue };
        let package = entry
            .path()
            .join(format!("ringdisk_{name}-1~{suffix}_amd64.deb"));
        let is_newer = found.as_ref().is_none_or(|(best, _)| *best < other);
        if other < version && package.is_file() && is_newer {
            found = Some((other, package));
        }
    }
    Ok(found.map(|(_, package)| package))
}

/// Installs both packages one after the other in a guest whose disk is in use.
fn test_upgrade(old: &Path, new: &Path) -> Result<()> {
    const TEST: &str = "deb::tests::released_packages_follow_each_other";
    let mut test = cargo();
    test.args([
        "test",
        "--workspace",
        "--bins",
        "--examples",
        "--locked",
        "--no-run",
    ]);
    ensure!(
        test.status().context("starting cargo")?.success(),
        "the tests cannot be built"
    );
    let mut test = cargo();
    test.args([
        "test",
        "--package=xtask",
        "--locked",
        "--",
        "--exact",
        "--nocapture",
        TEST,
    ]);
    test.env("RINGDISK_OLD_PACKAGE", old)
        .env("RINGDISK_NEW_PACKAGE", new);
    let output = test.output().context("starting cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    if !output.status.success() || text.contains("skipped: ") || !text.contains("1 passed") {
        bail!(
            "the upgrade from {} failed, or was not tested",
            old.display()
        );
    }
    Ok(())
}

/// The sums of all files of a release, as `sha256sum --check` reads them.
fn checksums(output: &Path) -> Result<PathBuf> {
    const SUMS: &str = "SHA256SUMS";
    let mut names = Vec::new();
    for entry in fs::read_dir(output).context("reading the release's directory")? {
        let name = entry
            .context("reading the release's directory")?
            .file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.retain(|name| name != SUMS);
    names.sort();
    let sums = Command::new("sha256sum")
        .current_dir(output)
        .args(&names)
        .output();
    let sums = sums.context("starting sha256sum")?;
    ensure!(sums.status.success(), "sha256sum failed");
    let path = output.join(SUMS);
    fs::write(&path, sums.stdout).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .current_dir(root())
        .args(arguments)
        .output();
    let output = output.context("starting git")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_closed_once() {
        let log =
            "# Change log\n\n## Unreleased\n\n### Added\n\n- A.\n\n## 0.1.0 - 2026-01-01\n\n- B.\n";
        let closed = close_section(log, "0.2.0", "2026-02-02").unwrap();
        let expected = "# Change log\n\n## Unreleased\n\n## 0.2.0 - 2026-02-02\n\n### Added\n\n- A.\n\n## 0.1.0 - 2026-01-01\n\n- B.\n";
        assert_eq!(closed, expected);
        assert!(close_section(&closed, "0.3.0", "2026-03-03").is_err());
        assert!(close_section("# Change log\n", "0.2.0", "2026-02-02").is_err());
    }

    #[test]
    fn versions_are_three_numbers() {
        assert_eq!(parse("0.10.2").unwrap(), [0, 10, 2]);
        for wrong in ["0.2", "v0.2.0", "0.2.0-rc1", "0.2.0.1", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(parse("0.9.9").unwrap() < parse("0.10.0").unwrap());
        let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
        assert_eq!(
            workspace_version(&manifest).unwrap(),
            env!("CARGO_PKG_VERSION")
        );
    }
}
