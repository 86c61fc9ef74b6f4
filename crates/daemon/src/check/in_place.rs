//! Files that `--in-place` changes: all are written beside the old ones first, and take their places only when none has failed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

/// Files with their new texts, not yet in force.
#[derive(Default)]
pub struct InPlace {
    staged: Vec<Staged>,
}

struct Staged {
    /// As it was named.
    name: String,
    /// What it is after symbolic links.
    path: PathBuf,
    /// Its new text, in a file beside it.
    new: PathBuf,
    /// Whether it must not be there yet.
    is_new: bool,
}

impl InPlace {
    /// Stages the change of a file, which must still have the text `before`. It keeps its owner and mode; a symbolic link
    /// keeps pointing to it. A file with several hard links is refused: a new file takes the place of the old one, which the
    /// other links would keep.
    ///
    /// # Errors
    /// It cannot be written; nothing has changed.
    pub fn change(&mut self, name: &str, before: &str, text: &str) -> Result<(), String> {
        let fail = |e: io::Error| format!("{name}: cannot be changed: {e}; no file was changed");
        let path = fs::canonicalize(name).map_err(fail)?;
        if fs::read(&path).map_err(fail)? != before.as_bytes() {
            return Err(format!(
                "{name}: was changed by somebody else meanwhile; no file was changed, run this again"
            ));
        }
        let metadata = fs::metadata(&path).map_err(fail)?;
        if metadata.nlink() > 1 {
            return Err(format!(
                "{name}: has {} hard links, of which only this one would change; no file was changed, make it a file of \
                 its own, or apply what --fix prints by hand",
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
        // A change of the owner takes bits of the mode away.
        file.set_permissions(metadata.permissions()).map_err(fail)?;
        fill(file, text).map_err(fail)
    }

    /// Stages a file that must not be there yet.
    ///
    /// # Errors
    /// It is there, or cannot be written; nothing has changed.
    pub fn create(&mut self, path: &Path, text: &str) -> Result<(), String> {
        let name = path.display().to_string();
        if path.symlink_metadata().is_ok() {
            return Err(format!(
                "{name}: is there already; no file was changed, name a new one and join them by hand"
            ));
        }
        let fail = |e: io::Error| format!("{name}: cannot be made: {e}; no file was changed");
        let new = self.stage(&name, path.to_owned(), true);
        let file = create(&new, 0o644).map_err(fail)?;
        fill(file, text).map_err(fail)
    }

    fn stage(&mut self, name: &str, path: PathBuf, is_new: bool) -> PathBuf {
        let mut beside = path.file_name().unwrap_or_default().to_owned();
        beside.push(format!(".ringdisk-{}", std::process::id()));
        let new = path.with_file_name(beside);
        self.staged.push(Staged {
            name: name.to_owned(),
            path,
            new: new.clone(),
            is_new,
        });
        new
    }

    /// Puts all into force, those first that were staged first; their names.
    ///
    /// # Errors
    /// One could not take its place; the error says which ones had.
    pub fn commit(&mut self) -> Result<Vec<String>, String> {
        let mut done: Vec<String> = Vec::new();
        for staged in &self.staged {
            let moved = match staged.is_new {
                // Unlike a rename, it does not replace what somebody has made meanwhile.
                true => fs::hard_link(&staged.new, &staged.path),
                false => fs::rename(&staged.new, &staged.path),
            };
            let synced = moved.and_then(|()| {
                let folder = staged.path.parent().filter(|path| *path != Path::new(""));
                File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
            });
            if let Err(e) = synced {
                let before = match done.as_slice() {
                    [] => "no file was changed".to_owned(),
                    done => format!("changed were only {}", done.join(", ")),
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
            // Those that took their places are not there any more.
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
