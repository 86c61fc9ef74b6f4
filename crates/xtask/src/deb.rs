//! `cargo xtask deb`: a Debian package of the program, its service and its manual.

mod documents;

use crate::{cargo, ci, packages, root};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the package goes, and what it is called
#[derive(clap::Args, Default)]
pub struct Args {
    /// Version of the package; default: that of the program, and -1
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// Directory for the package; default: debian in the target directory
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Builds and packages the program.
pub fn run(args: &Args) -> Result<()> {
    packages::deb::ensure()?;
    packages::tcmalloc::ensure()?;
    let mut build = cargo();
    build.args(["build", "--release", "--package=ringdisk", "--locked"]);
    build.arg(packages::tcmalloc::FEATURE);
    succeeds(&mut build)?;
    let metadata = ci::metadata()?;
    let target = Path::new(ci::text(&metadata["target_directory"]));
    let output = args.output.clone();
    let output = output.unwrap_or_else(|| target.join("debian"));
    let version = args.version.iter().map(|it| format!("--deb-version={it}"));
    let version: Vec<_> = version.collect();
    // The symbols go into a separate package, for profiling.
    let options = std::iter::once("--dbgsym").chain(version.iter().map(String::as_str));
    let options: Vec<_> = options.collect();
    let package = pack(&target.join("release"), "release", &output, &options)?;
    println!("{}", package.display());
    Ok(())
}

/// Packages the program in `built`, the target directory of `profile`, into `output`. Returns the path of the package.
fn pack(built: &Path, profile: &str, output: &Path, options: &[&str]) -> Result<PathBuf> {
    let manual = built.join("package");
    fs::create_dir_all(&manual).with_context(|| format!("making {}", manual.display()))?;
    succeeds(
        Command::new(built.join("ringdisk"))
            .arg("manual")
            .arg(&manual),
    )?;
    // Debian's manual pages are compressed, without a time stamp for reproducible packages.
    let pages = fs::read_dir(&manual).with_context(|| format!("reading {}", manual.display()))?;
    let pages = pages.flatten().map(|page| page.path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "1"));
    succeeds(Command::new("gzip").arg("-9nf").args(pages))?;
    documents::write(&root(), &manual.join("docs"))?;
    let mut pack = Command::new(packages::deb::program()?);
    pack.current_dir(root())
        .args(["--package=ringdisk", "--no-build", "--locked", "--quiet"])
        .arg(format!("--profile={profile}"))
        .arg("--output")
        .arg(output)
        .args(options);
    let result = pack.output().context("starting cargo-deb")?;
    ensure!(
        result.status.success(),
        "cargo-deb failed ({}): {}",
        result.status,
        String::from_utf8_lossy(&result.stderr).trim()
    );
    // It prints the path of each package.
    let printed = String::from_utf8_lossy(&result.stdout).into_owned();
    let package = printed.lines().find(|line| line.ends_with(".deb"));
    Ok(PathBuf::from(package.with_context(|| {
        format!("cargo-deb names no package: {printed}")
    })?))
}

fn succeeds(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed ({status})");
    Ok(())
}

#[cfg(test)]
mod tests;
