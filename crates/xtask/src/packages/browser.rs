//! A browser for the tests that look at reports, and for the demo's picture of one.

use anyhow::{Context, Result};
use std::path::PathBuf;
use testkit::vm::find_program;

use super::install;

/// Installs Chromium with a font if there is no browser of its kind.
pub fn ensure() -> Result<()> {
    match find() {
        Some(_) => Ok(()),
        None => {
            install(&["chromium", "fonts-dejavu-core", "poppler-utils"])?;
            find()
                .map(drop)
                .context("apt has installed chromium, but it can't be found")
        }
    }
}

/// The browser.
pub fn find() -> Option<PathBuf> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find_map(find_program)
}
