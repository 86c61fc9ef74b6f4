//! The files of a configuration: the one that the operator names, and those in the directory beside it.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::ConfigError;

/// The directory with more files, beside the file of a host's service.
const DIRECTORY: &str = "disks.d";

/// The name of that file.
const NAME: &str = "ringdisk.toml";

/// Reads a file of at most `left` bytes.
pub(super) fn read_text(path: &Path, left: &mut u64) -> Result<String, ConfigError> {
    let fail = |e| ConfigError::Read(path.into(), e);
    let mut text = String::new();
    let file = fs::File::open(path).map_err(fail)?;
    file.take(*left + 1)
        .read_to_string(&mut text)
        .map_err(fail)?;
    match left.checked_sub(text.len() as u64) {
        Some(rest) => *left = rest,
        None => return Err(ConfigError::TooLarge(path.into())),
    }
    Ok(text)
}

/// The directory with more files: `disks.d` beside `ringdisk.toml`, and `NAME.d` beside any other `NAME.toml`, so that each of
/// several files has its own.
pub fn directory_of(path: &Path) -> PathBuf {
    let directory = if path.file_name().is_some_and(|name| name == NAME) {
        path.with_file_name(DIRECTORY)
    } else {
        path.with_extension("d")
    };
    std::path::absolute(&directory).unwrap_or(directory)
}

/// The directories that must be readable to read a configuration again: links lead out of its own.
pub fn read_directories(path: &Path) -> Vec<PathBuf> {
    let parent = |path: &Path| path.parent().map(Path::to_owned);
    let directory = directory_of(path);
    let mut files = vec![path.to_owned()];
    files.extend(beside(path).ok().flatten().unwrap_or_default());
    let mut all = vec![parent(path).unwrap_or_else(|| path.to_owned())];
    all.extend(fs::canonicalize(directory));
    all.extend(
        files
            .iter()
            .filter_map(|file| parent(&fs::canonicalize(file).ok()?)),
    );
    all.sort();
    all.dedup();
    all
}

/// The files in the directory beside a file, sorted; `None` if there is no such directory. Names that do not end in `.toml` are
/// those of editors and package managers.
pub(super) fn beside(path: &Path) -> Result<Option<Vec<PathBuf>>, ConfigError> {
    let directory = directory_of(path);
    let fail = |e| ConfigError::Read(directory.clone(), e);
    let entries = match fs::read_dir(&directory) {
        // A file of that name may be anything, as a configuration called NAME.d.
        Err(e) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&e.kind()) => {
            return Ok(None);
        }
        entries => entries.map_err(fail)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(fail)?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if name.ends_with(b".toml") && !name.starts_with(b".") {
            files.push(path);
        }
    }
    files.sort();
    Ok(Some(files))
}
