//! Small Debians without anything of this host, in which packages are built and installed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use testkit::vm::{cache_dir, find_program};

use super::{as_root, codename, install as install_packages, mirror, output, tcmalloc};
use crate::root;

/// What building needs, beside Rust: as the README says.
const TO_BUILD: &str = "ca-certificates,dpkg-dev,gcc,git,libc6-dev";

/// Builds the package of this work tree with `cargo xtask deb`, in a root with nothing but a compiler and this host's Rust.
///
/// # Errors
/// It fails; what it prints tells why.
pub fn build(suite: &str, version: &str, to: &Path) -> Result<PathBuf> {
    let tcmalloc = match suite {
        "bookworm" => tcmalloc::PACKAGE.to_owned(),
        // Since times have 64 bits everywhere.
        _ => format!("{}t64", tcmalloc::PACKAGE),
    };
    let packages = format!("{TO_BUILD},{tcmalloc}");
    let toolchain = output("rustc", &["--print", "sysroot"])?;
    let cargo_home = std::env::var("CARGO_HOME").map(PathBuf::from);
    let cargo_home =
        cargo_home.or_else(|_| std::env::var("HOME").map(|home| Path::new(&home).join(".cargo")));
    let cargo_home = cargo_home.context("neither CARGO_HOME nor HOME is set")?;
    let target = cache_dir().join("release").join(format!("target-{suite}"));
    for directory in [&target, &to.to_owned()] {
        fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    }
    let paths = [
        toolchain.trim().into(),
        cargo_home,
        root(),
        target,
        to.to_owned(),
        cache_dir(),
    ];
    run(suite, "build", &packages, version, &paths)?;
    let name = format!("ringdisk_{version}_amd64.deb");
    let package = to.join(&name);
    ensure!(
        package.is_file(),
        "there is no {} in {}",
        name,
        to.display()
    );
    Ok(package)
}

/// Installs a package with apt in a root with nothing that it needs, and serves a disk with it.
///
/// # Errors
/// It cannot be installed, or does not serve.
pub fn install(suite: &str, package: &Path, version: &str) -> Result<()> {
    run(
        suite,
        "install",
        "ca-certificates",
        version,
        &[package.to_owned()],
    )
}

fn run(suite: &str, step: &str, packages: &str, version: &str, paths: &[PathBuf]) -> Result<()> {
    if find_program("debootstrap").is_none() {
        install_packages(&["debootstrap"])?;
    }
    let host = codename()?;
    let mirror =
        mirror(&host)?.with_context(|| format!("apt has no mirror of {host} in its sources"))?;
    let roots = cache_dir().join("release");
    fs::create_dir_all(&roots).with_context(|| format!("making {}", roots.display()))?;
    let at = roots.join(format!("{step}-{suite}"));
    let absolute: Vec<String> = (paths.iter())
        .map(|path| fs::canonicalize(path).map(|path| path.display().to_string()))
        .collect::<Result<_, _>>()
        .context("a path of the build")?;
    let at = at.display().to_string();
    let script = root().join("crates/xtask/src/packages/clean_root.sh");
    let script = script.display().to_string();
    let mut arguments = vec!["--mount", "sh", "-eu", &script];
    arguments.extend([step, suite, &at, &mirror, packages, version]);
    arguments.extend(absolute.iter().map(String::as_str));
    as_root("unshare", &arguments).with_context(|| format!("{step} in a clean root of {suite}"))
}
