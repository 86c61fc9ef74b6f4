//! `cargo xtask ci`: checks the rules of this project, and runs the tests.

pub(crate) mod documents;
mod structure;

use crate::{cargo, compatibility, miri, root, test};
use anyhow::{Context, Result, bail, ensure};
use clap::builder::PossibleValuesParser;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The part to run
#[derive(clap::Args)]
pub struct Args {
    /// Run only the checks
    #[arg(long)]
    no_tests: bool,
    /// Run only this check
    #[arg(long, value_name = "CHECK", value_parser = PossibleValuesParser::new(CHECKS.iter().map(|(name, _)| *name)))]
    only: Option<String>,
}

type Check = fn() -> Result<()>;

const CHECKS: &[(&str, Check)] = &[
    ("Cargo.lock is up to date", lockfile),
    ("format", format),
    ("crate borders", borders),
    ("unsafe policy", unsafe_policy),
    ("clocks that jump", clocks),
    ("licences of all dependencies", licences),
    ("links between documents", documents::links),
    ("plain English in documents", documents::plain_english),
    ("structure", structure::check),
    ("table of front-ends", compatibility::is_generated),
    ("names that belong to one machine", machine_names),
    ("clippy", clippy),
    ("fuzz targets", fuzz_targets),
    ("Miri", miri::run),
];

/// Runs every check and then the tests. Fails at the end if one has failed.
pub fn run(args: &Args) -> Result<()> {
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        if args.only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        println!("check: {name}");
        let started = Instant::now();
        if let Err(error) = check() {
            println!("check: {name}: FAILED: {error:#}");
            failed.push(*name);
        } else if started.elapsed().as_secs() > 0 {
            println!("check: {name}: ok after {} s", started.elapsed().as_secs());
        }
    }
    if !args.no_tests && args.only.is_none() {
        let tested = test::run(&test::Args::default());
        if let Err(error) = tested.and_then(|()| compatibility::is_up_to_date()) {
            println!("tests: FAILED: {error:#}");
            failed.push("tests");
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn lockfile() -> Result<()> {
    metadata()
        .map(drop)
        .context("`cargo metadata --locked`; commit the Cargo.lock that a build writes")
}

fn format() -> Result<()> {
    succeeds(cargo().args(["fmt", "--all", "--check"]))
}

fn clippy() -> Result<()> {
    succeeds(cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))
}

/// The fuzz targets are a separate workspace, which only fuzzing builds. Nothing is linked, so neither the fuzzer's library
/// nor its compiler is needed.
fn fuzz_targets() -> Result<()> {
    let mut clippy = cargo();
    clippy.env("RUSTFLAGS", "--cfg fuzzing");
    clippy.env("CUSTOM_LIBFUZZER_PATH", "/nowhere/libfuzzer.a");
    clippy.args(["clippy", "--manifest-path", "fuzz/Cargo.toml", "--locked"]);
    succeeds(clippy.args(["--bins", "--", "-D", "warnings"]))
}

/// The crates of this workspace on which each crate may depend. Dependencies of tests are not restricted.
const BORDERS: &[(&str, &[&str])] = &[
    ("advisor", &["harness"]),
    ("block", &[]),
    ("guest", &["block"]),
    ("image", &["block"]),
    ("engine", &["block"]),
    ("rbd", &["block"]),
    ("control", &["block"]),
    ("nbd", &[]),
    ("driver", &[]),
    ("harness", &[]),
    ("lab", &["driver", "harness"]),
    ("datapath", &["guest", "image", "block"]),
    (
        "ringdisk",
        &[
            "advisor", "block", "guest", "image", "engine", "rbd", "datapath", "control",
            "harness", "lab", "nbd",
        ],
    ),
    ("testkit", &["block", "driver", "harness"]),
    ("xtask", &["harness", "lab", "testkit"]),
];

fn borders() -> Result<()> {
    let mut wrong = Vec::new();
    for package in ours(&metadata()?) {
        let name = text(&package["name"]);
        let Some((_, allowed)) = BORDERS.iter().find(|(crate_name, _)| *crate_name == name) else {
            wrong.push(format!("{name} is not in BORDERS"));
            continue;
        };
        for dependency in list(&package["dependencies"]) {
            let needed = text(&dependency["name"]);
            let is_ours = dependency["path"].is_string();
            if is_ours && dependency["kind"] != "dev" && !allowed.contains(&needed) {
                wrong.push(format!("{name} must not depend on {needed}"));
            }
        }
    }
    none(wrong)
}

/// The crates with code that a compiler can't check: guest memory, rings, Ceph's libraries, and the driver of the lab and
/// the tests.
const UNSAFE_CRATES: &[&str] = &["driver", "guest", "engine", "rbd", "testkit"];

/// Single blocks in other crates: the contract of `Engine`, the two places that call it, and the lab, which takes
/// uninitialised completions from the blkio crate.
const UNSAFE_FILES: &[&str] = &[
    "crates/block/src/engine.rs",
    "crates/datapath/src/path/submit.rs",
    "crates/datapath/src/control/queues.rs",
    "crates/lab/src/vhost.rs",
];

/// The workspace's lints deny unsafe code. Only these crates may have other lints, and only these files may lift that one.
fn unsafe_policy() -> Result<()> {
    let mut wrong = Vec::new();
    for package in ours(&metadata()?) {
        let name = text(&package["name"]);
        let may = UNSAFE_CRATES.contains(&name);
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let lints = fs::read_to_string(&manifest)
            .with_context(|| format!("reading {}", manifest.display()))?;
        let inherits = lints.replace(' ', "").contains("[lints]\nworkspace=true");
        let documents = lints.contains("undocumented_unsafe_blocks = \"deny\"");
        if !(inherits || may && documents) {
            wrong.push(format!(
                "{} must inherit the lints of the workspace",
                manifest.display()
            ));
        }
    }
    for file in files("rs")? {
        let mut parts = file.iter().map(|part| part.to_string_lossy());
        let may = UNSAFE_FILES
            .iter()
            .any(|allowed| file == Path::new(allowed))
            || parts.any(|part| {
                UNSAFE_CRATES.contains(&&*part) || part == "tests" || part == "tests.rs"
            });
        if !may && read(&file)?.contains(concat!("unsafe", "_code")) {
            wrong.push(format!(
                "{} must not lift the lint against unsafe code",
                file.display()
            ));
        }
    }
    none(wrong)
}

/// The crates on the path of an I/O. Their waits must not depend on the system clock, which jumps.
const PATH: &[&str] = &["block", "guest", "image", "engine", "rbd", "datapath"];

fn clocks() -> Result<()> {
    let mut wrong = Vec::new();
    for file in files("rs")? {
        let mut parts = file.iter();
        let crates = parts.next().is_some_and(|part| part == "crates");
        let on_path = parts
            .next()
            .is_some_and(|name| PATH.iter().any(|p| name == *p));
        let ships = parts.next().is_some_and(|part| part == "src");
        let source = if crates && on_path && ships {
            read(&file)?
        } else {
            continue;
        };
        let words = [
            "SystemTime",
            "ClockId::Realtime",
            "CLOCK_REALTIME",
            "TimerfdClockId::Realtime",
        ];
        if let Some(word) = words.iter().find(|word| source.contains(**word)) {
            wrong.push(format!(
                "{} uses {word}; on the path of an I/O, only the monotonic clock is allowed",
                file.display()
            ));
        }
    }
    none(wrong)
}

const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

fn licences() -> Result<()> {
    let metadata = metadata()?;
    let packages = list(&metadata["packages"]).iter();
    let wrong = packages
        .filter(|package| !is_allowed(text(&package["license"])))
        .map(|package| {
            format!(
                "{} has the licence {}, which is not in LICENCES",
                text(&package["name"]),
                package["license"]
            )
        });
    none(wrong.collect())
}

/// Evaluates an SPDX expression; the old `MIT/Apache-2.0` means "or".
fn is_allowed(expression: &str) -> bool {
    // Replace the innermost parentheses with an allowed licence, or with one that is not.
    if let Some(end) = expression.find(')') {
        let Some(start) = expression[..end].rfind('(') else {
            return false;
        };
        let inner = if is_allowed(&expression[start + 1..end]) {
            LICENCES[0]
        } else {
            "none"
        };
        return is_allowed(&format!(
            "{}{inner}{}",
            &expression[..start],
            &expression[end + 1..]
        ));
    }
    let expression = expression.replace('/', " OR ");
    let mut alternatives = expression.split(" OR ");
    alternatives.any(|all| {
        all.split(" AND ")
            .all(|licence| LICENCES.contains(&licence.trim()))
    })
}

/// Names that differ between machines: mirrors of package registries, and home directories.
const MACHINE_NAMES: &[&str] = &[
    concat!("deb.", "debian.org"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("files.", "pythonhosted.org"),
    concat!("registry.", "npmjs.org"),
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
];

fn machine_names() -> Result<()> {
    let mut wrong = Vec::new();
    for file in files("")? {
        let Ok(content) = read(&file) else { continue }; // a picture
        for name in MACHINE_NAMES.iter().filter(|name| content.contains(**name)) {
            wrong.push(format!("{} names {name}", file.display()));
        }
    }
    none(wrong)
}

/// The project's files with this extension ("" for all), relative to the root.
fn files(extension: &str) -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root()).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let output = git.output().context("starting git")?;
    ensure!(
        output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let files = names
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from);
    let wanted = |file: &PathBuf| {
        extension.is_empty() || file.extension().is_some_and(|found| found == extension)
    };
    Ok(files
        .filter(wanted)
        .filter(|file| root().join(file).is_file())
        .collect())
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(root().join(file)).with_context(|| format!("reading {}", file.display()))
}

/// The output of `cargo metadata`.
pub fn metadata() -> Result<Value> {
    let output = cargo()
        .args(["metadata", "--format-version=1", "--locked"])
        .output()
        .context("starting cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("reading cargo metadata")
}

/// The packages of this workspace. Packages from elsewhere have a source.
fn ours(metadata: &Value) -> impl Iterator<Item = &Value> {
    list(&metadata["packages"])
        .iter()
        .filter(|package| package["source"].is_null())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The string, or an empty one if the value is not a string.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn succeeds(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{status}");
    Ok(())
}

fn none(wrong: Vec<String>) -> Result<()> {
    if !wrong.is_empty() {
        bail!("\n    {}", wrong.join("\n    "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn licence_expressions() {
        for allowed in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-2.0 OR MIT",
            "(MIT OR GPL-2.0) AND Unicode-3.0",
        ] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for denied in [
            "",
            "GPL-2.0",
            "MIT AND GPL-2.0",
            "(GPL-2.0 OR LGPL-2.1) AND MIT",
            "MIT)",
        ] {
            assert!(!is_allowed(denied), "{denied}");
        }
    }
}
