//! `cargo xtask demo --lab`: a small comparison by `ringdisk lab`, and a picture of its report.

use crate::{packages, root};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

const PLAN: &str = include_str!("lab.toml");

/// Runs the plan with this ringdisk, and writes the result into `folder`. `picture` also replaces docs/lab.png with a
/// picture of the report.
pub fn run(ringdisk: &Path, folder: &Path, picture: bool) -> Result<()> {
    let result = folder.join("lab");
    if result.exists() {
        fs::remove_dir_all(&result).with_context(|| format!("removing {}", result.display()))?;
    }
    let plan = folder.join("demo.toml");
    fs::write(&plan, PLAN).with_context(|| format!("writing {}", plan.display()))?;
    let mut lab = Command::new(ringdisk);
    lab.args(["lab", "run"])
        .arg(&plan)
        .arg("--output")
        .arg(&result);
    let status = lab.status().context("starting ringdisk lab")?;
    ensure!(status.success(), "ringdisk lab failed ({status})");
    if picture {
        draw(&result.join("report.html"), &root().join("docs/lab.png"))?;
    }
    Ok(())
}

fn draw(page: &Path, picture: &Path) -> Result<()> {
    packages::browser::ensure()?;
    let browser = packages::browser::find().context("there is no browser")?;
    let profile = tempfile::tempdir().context("making a folder for the browser")?;
    let status = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .args(["--disable-dev-shm-usage", "--window-size=1120,1180"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .context("starting the browser")?
        .status;
    ensure!(status.success(), "the browser failed ({status})");
    println!("picture: {}", picture.display());
    Ok(())
}
