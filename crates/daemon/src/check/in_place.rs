//! Changes files for `--in-place`. New texts are first written next to the old files, and replace them only after all have
//! been written.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
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
    /// A file in the same directory with the new text.
    new: PathBuf,
    /// Whether the file must not exist yet.
    is_new: bool,
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
        let new = self.stage(name, path, false);
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

    /// Stages a file that must not exist yet.
    ///
    /// # Errors
    /// The file exists, or cannot be written. Nothing has changed.
    pub fn create(&mut self, path: &Path, text: &str) -> Result<(), String> {
        let name = path.display().to_string();
        if path.symlink_metadata().is_ok() {
            return Err(format!(
                "{name}: the file already exists; no file was changed, name a new file, as in /etc/ringdisk/disks.d/VM.toml"
            ));
        }
        let fail = |e: io::Error| format!("{name}: cannot be created: {e}; no file was changed");
        let new = self.stage(&name, path.to_owned(), true);
        let file = create(&new, 0o644).map_err(fail)?;
        // The service, which has a user of its own, reads it whatever this user's umask is.
        file.set_permissions(Permissions::from_mode(0o644))
            .map_err(fail)?;
        fill(file, text).map_err(fail)
    }

    fn stage(&mut self, name: &str, path: PathBuf, is_new: bool) -> PathBuf {
        let mut file_name = path.file_name().unwrap_or_default().to_owned();
        file_name.push(format!(".ringdisk-{}", std::process::id()));
        let new = path.with_file_name(file_name);
        self.staged.push(Staged {
            name: name.to_owned(),
            path,
            new: new.clone(),
            is_new,
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
            let moved = if staged.is_new {
                // Unlike a rename, this does not replace a file that another program has created.
                fs::hard_link(&staged.new, &staged.path)
            } else {
                fs::rename(&staged.new, &staged.path)
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
            // Renamed files no longer exist under this name.
            let _ = fs::remove_file(&staged.new);
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
