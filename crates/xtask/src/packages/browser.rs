//! A browser for the tests that look at reports, and for the demo's picture of one.

use anyhow::{Context, Result};
use std::path::PathBuf;
use testkit::vm::find_program;

use super::install;

/// Installs Chromium with a font if there is no browser of its kind, and what reads the paper that it prints.
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

/// The browser.
pub fn find() -> Option<PathBuf> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find_map(find_program)
}
