//! The guest's kernel: the host's own if it is readable, otherwise a Debian cloud kernel from the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::paths::cache_dir;

/// A kernel to boot, with its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The `vmlinuz`.
    pub image: PathBuf,
    /// Its version.
    pub release: String,
    modules: PathBuf,
}

impl Kernel {
    /// A kernel that this user can read: the host's own, otherwise the newest one in the cache.
    ///
    /// # Errors
    /// There is none; the message contains the commands that fetch one.
    pub fn find() -> Result<Kernel> {
        let own = rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned();
        let image = Path::new("/boot").join(format!("vmlinuz-{own}"));
        let modules = Path::new("/lib/modules").join(&own).join("kernel");
        if fs::File::open(&image).is_ok() && modules.is_dir() {
            return Ok(Kernel {
                image,
                release: own,
                modules,
            });
        }
        Self::cached()
    }

    /// The newest kernel in the cache.
    ///
    /// # Errors
    /// There is none.
    pub fn cached() -> Result<Kernel> {
        let cache = kernel_cache();
        let mut packages: Vec<_> = fs::read_dir(&cache)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        packages.sort();
        for (_, package) in packages.into_iter().rev() {
            // Since Debian 13, packages install modules below /usr/lib.
            let modules = ["lib/modules", "usr/lib/modules"];
            if let (Some(image), Some(modules)) = (
                only_child(&package.join("boot"), "vmlinuz-"),
                modules
                    .iter()
                    .find_map(|at| only_child(&package.join(at), "")),
            ) {
                let release = modules
                    .file_name()
                    .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
                return Ok(Kernel {
                    image,
                    release,
                    modules: modules.join("kernel"),
                });
            }
        }
        bail!(
            "no kernel for guests: the host's cannot be read, and {0} has none. On Debian, as any user:\n    \
             mkdir -p {0} && cd {0} && apt-get download \"$(apt-cache depends linux-image-cloud-amd64 | \
             sed -n 's/.*Depends: //p')\" && for deb in *.deb; do dpkg-deb -x $deb ${{deb%.deb}}; done",
            cache.display()
        )
    }

    /// The folder of its modules, with the name of its version.
    pub fn modules_folder(&self) -> &Path {
        self.modules.parent().unwrap_or(&self.modules)
    }

    /// The modules `names` and their dependencies, decompressed, in the order in which to load them. A module without a
    /// file is skipped: it is built in, or the kernel lacks it.
    ///
    /// # Errors
    /// A module is unreadable, or the program that decompresses it is missing.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<Vec<u8>>> {
        let mut all = Vec::new();
        walk(&self.modules, &mut all)?;
        let (mut loaded, mut seen) = (Vec::new(), BTreeSet::new());
        for name in names {
            add_module(name, &all, &mut loaded, &mut seen)?;
        }
        Ok(loaded)
    }
}

fn add_module(
    name: &str,
    all: &[PathBuf],
    loaded: &mut Vec<Vec<u8>>,
    seen: &mut BTreeSet<String>,
) -> Result<()> {
    let canonical = |name: &str| name.replace('-', "_");
    if !seen.insert(canonical(name)) {
        return Ok(());
    }
    let is_it = |path: &&PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.split_once(".ko")
            .is_some_and(|(stem, _)| canonical(stem) == canonical(name))
    };
    let Some(file) = all.iter().find(is_it) else {
        return Ok(());
    };
    let bytes = read_module(file)?;
    for needed in depends(&bytes)
        .split(',')
        .filter(|needed| !needed.is_empty())
    {
        add_module(needed, all, loaded, seen)?;
    }
    loaded.push(bytes);
    Ok(())
}

/// Decompresses a module: busybox's insmod does not support the compression that distributions use.
fn read_module(file: &Path) -> Result<Vec<u8>> {
    let unpack = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(file).with_context(|| format!("reading {}", file.display())),
    };
    let output = Command::new(unpack)
        .arg("-dc")
        .arg(file)
        .stderr(Stdio::null())
        .output()
        .with_context(|| format!("{unpack} is needed for {}", file.display()))?;
    ensure!(
        output.status.success(),
        "{unpack} cannot read {}",
        file.display()
    );
    Ok(output.stdout)
}

/// The `depends=` entry of a module's `.modinfo`. `modules.dep` is missing from a package that was only unpacked.
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

/// The folder of unpacked kernel packages, one folder per package.
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
        } else if entry.file_name().to_string_lossy().contains(".ko") {
            files.push(entry.path());
        }
    }
    Ok(())
}
