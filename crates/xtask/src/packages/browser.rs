//! A browser for the tests of reports, and for the demo's picture of a report.

use anyhow::{Context, Result};
use std::path::PathBuf;
use testkit::vm::find_program;

use super::install;

/// Installs Chromium and a font if no such browser is installed, and pdftotext, which reads what it prints.
pub fn ensure() -> Result<()> {
    let mut packages = Vec::new();
    if find().is_none() {
        packages.extend(["chromium", "fonts-dejavu-core"]);
    }
    if find_program("pdftotext").is_none() {
        packages.push("poppler-utils");
    }
    if packages.is_empty() {
        return Ok(());
    }
    install(&packages)?;
    find()
        .map(drop)
        .context("apt has installed chromium, but it can't be found")
}

/// The path of the browser.
pub fn find() -> Option<PathBuf> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find_map(find_program)
}
