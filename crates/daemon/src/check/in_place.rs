//! Changes files for `--in-place`. New texts are first written next to the old files, and replace them only after all have
//! been written.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

/// Files with their new texts, not yet committed.
#[derive(Default)]
pub struct InPlace {
    staged: Vec<Staged>,
}

struct Staged {
    /// As the user named it.
    name: String,
    /// With symbolic links resolved.
    path: PathBuf,
    change: Change,
}

enum Change {
    /// A file in the same directory, with the new text, takes its place.
    Replace(PathBuf),
    /// The same, if it does not exist yet.
    Create(PathBuf),
    Remove,
}

impl InPlace {
    /// Stages the change of a file, which must still have the text `before`. The file keeps its owner and mode, and symbolic
    /// links continue to point to it. A file with several hard links is refused: the new file replaces only this link, and
    /// the others would keep the old text.
    ///
    /// # Errors
    /// The file cannot be written. Nothing has changed.
    pub fn change(&mut self, name: &str, before: &str, text: &str) -> Result<(), String> {
        let fail = |e: io::Error| format!("{name}: cannot be changed: {e}; no file was changed");
        let path = fs::canonicalize(name).map_err(fail)?;
        if fs::read(&path).map_err(fail)? != before.as_bytes() {
            return Err(format!(
                "{name}: another program changed the file; no file was changed, run this command again"
            ));
        }
        let metadata = fs::metadata(&path).map_err(fail)?;
        if metadata.nlink() > 1 {
            return Err(format!(
                "{name}: has {} hard links, of which only this one would change; no file was changed, copy the file to \
                 a separate one, or apply the output of --fix manually",
                metadata.nlink()
            ));
        }
        let new = self.stage(name, path, Change::Replace);
        let file = create(&new, metadata.mode()).map_err(fail)?;
        if metadata.uid() != file.metadata().map_err(fail)?.uid()
            || metadata.gid() != file.metadata().map_err(fail)?.gid()
        {
            fchown(&file, Some(metadata.uid()), Some(metadata.gid())).map_err(fail)?;
        }
        // Changing the owner clears bits of the mode.
        file.set_permissions(metadata.permissions()).map_err(fail)?;
        fill(file, text).map_err(fail)
    }

    /// Stages a file that must not exist yet, or be empty.
    ///
    /// # Errors
    /// The file exists, or cannot be written. Nothing has changed.
    pub fn create(&mut self, path: &Path, text: &str) -> Result<(), String> {
        let name = path.display().to_string();
        if path.symlink_metadata().is_ok() {
            let before = fs::read_to_string(path).unwrap_or_else(|_| "-".into());
            if before.trim().is_empty() {
                return self.change(&name, &before, text);
            }
            return Err(format!(
                "{name}: the file already exists; no file was changed, name a new file in ringdisk's disks.d with --config"
            ));
        }
        let fail = |e: io::Error| format!("{name}: cannot be created: {e}; no file was changed");
        let new = self.stage(&name, path.to_owned(), Change::Create);
        let file = create(&new, 0o644).map_err(fail)?;
        fill(file, text).map_err(fail)
    }

    /// Stages the removal of a file.
    pub fn remove(&mut self, path: &Path) {
        self.staged.push(Staged {
            name: path.display().to_string(),
            path: path.to_owned(),
            change: Change::Remove,
        });
    }

    fn stage(&mut self, name: &str, path: PathBuf, change: fn(PathBuf) -> Change) -> PathBuf {
        let mut file_name = path.file_name().unwrap_or_default().to_owned();
        file_name.push(format!(".ringdisk-{}", std::process::id()));
        let new = path.with_file_name(file_name);
        self.staged.push(Staged {
            name: name.to_owned(),
            path,
            change: change(new.clone()),
        });
        new
    }

    /// Commits all files in the order of staging, and returns their names.
    ///
    /// # Errors
    /// A file could not be replaced. The error names those that were.
    pub fn commit(&mut self) -> Result<Vec<String>, String> {
        let mut done: Vec<String> = Vec::new();
        for staged in &self.staged {
            let moved = match &staged.change {
                // Unlike a rename, this does not replace a file that another program has created.
                Change::Create(new) => fs::hard_link(new, &staged.path),
                Change::Replace(new) => fs::rename(new, &staged.path),
                Change::Remove => fs::remove_file(&staged.path),
            };
            let synced = moved.and_then(|()| {
                let folder = staged.path.parent().filter(|path| *path != Path::new(""));
                File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
            });
            if let Err(e) = synced {
                let before = match done.as_slice() {
                    [] => "no file was changed".to_owned(),
                    done => format!("only {} changed", done.join(", ")),
                };
                return Err(format!("{}: cannot be changed: {e}; {before}", staged.name));
            }
            done.push(staged.name.clone());
        }
        Ok(done)
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        for staged in &self.staged {
            if let Change::Create(new) | Change::Replace(new) = &staged.change {
                // Renamed files no longer exist under this name.
                let _ = fs::remove_file(new);
            }
        }
    }
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
}

fn fill(mut file: File, text: &str) -> io::Result<()> {
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
