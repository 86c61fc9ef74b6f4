//! The guest's kernel: a Debian cloud kernel unpacked in a cache folder, not installed on the host.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A kernel to boot and its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The `vmlinuz`.
    pub image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// The newest kernel in the cache.
    ///
    /// # Errors
    /// If there is none; `cargo xtask install` puts one there.
    pub fn newest() -> Result<Kernel> {
        let mut packages: Vec<(u64, PathBuf)> = fs::read_dir(kernel_cache())
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .filter_map(|(time, path)| {
                Some((
                    time.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs(),
                    path,
                ))
            })
            .collect();
        packages.sort();
        for (_, package) in packages.into_iter().rev() {
            if let (Some(image), Some(modules)) = (
                only_child(&package.join("boot"), "vmlinuz-"),
                only_child(&package.join("lib/modules"), ""),
            ) {
                return Ok(Kernel {
                    image,
                    modules: modules.join("kernel"),
                });
            }
        }
        bail!(
            "no guest kernel in {}; `cargo xtask install` fetches one",
            kernel_cache().display()
        )
    }

    /// The files of the modules `names` and of those that they need, in the order in which to load them.
    ///
    /// # Errors
    /// If a module can't be read.
    pub(super) fn module_files(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        walk(&self.modules, &mut all)?;
        let (mut files, mut seen) = (Vec::new(), BTreeSet::new());
        for name in names {
            add_module(name, &all, &mut files, &mut seen)?;
        }
        Ok(files)
    }
}

/// Adds what the module needs and then the module. One that has no file is built into the kernel.
fn add_module(
    name: &str,
    all: &[PathBuf],
    files: &mut Vec<PathBuf>,
    seen: &mut BTreeSet<String>,
) -> Result<()> {
    let canonical = |name: &str| name.replace('-', "_");
    if !seen.insert(canonical(name)) {
        return Ok(());
    }
    let is_it = |path: &&PathBuf| {
        path.file_stem()
            .is_some_and(|stem| canonical(&stem.to_string_lossy()) == canonical(name))
    };
    let Some(file) = all.iter().find(is_it) else {
        return Ok(());
    };
    let bytes = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    for needed in depends(&bytes)
        .split(',')
        .filter(|needed| !needed.is_empty())
    {
        add_module(needed, all, files, seen)?;
    }
    files.push(file.clone());
    Ok(())
}

/// The `depends=` entry of a module's `.modinfo`. The package has no modules.dep: that is made by `depmod` when it's
/// installed, which this one never is.
fn depends(module: &[u8]) -> String {
    let key = b"\0depends=";
    let Some(start) = module.windows(key.len()).position(|window| window == key) else {
        return String::new();
    };
    let value = module[start + key.len()..]
        .split(|&byte| byte == 0)
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(value).into_owned()
}

/// Where ringdisk's developer tools keep what is costly to fetch or to find out: `$XDG_CACHE_HOME/ringdisk`.
pub fn cache_dir() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(home);
    cache.unwrap_or_else(std::env::temp_dir).join("ringdisk")
}

/// Where unpacked kernel packages lie, a folder each.
pub fn kernel_cache() -> PathBuf {
    cache_dir().join("kernels")
}

fn only_child(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let mut children = fs::read_dir(folder).ok()?.flatten();
    children
        .find(|child| child.file_name().to_string_lossy().starts_with(prefix))
        .map(|child| child.path())
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), files)?;
        } else if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "ko")
        {
            files.push(entry.path());
        }
    }
    Ok(())
}
