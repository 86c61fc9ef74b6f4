//! The files of a configuration: the one that the operator names, and those in the directory beside it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat, fstat, open, openat, statat};
use rustix::io::Errno;

use super::{BYTES_MAX, ConfigError};

/// How often files that change are read, and the time between that.
const TRIES: usize = 40;
const PAUSE: Duration = Duration::from_millis(50);

/// How long nothing is to be added to or removed from a directory before it is read.
const MOMENT: Duration = Duration::from_millis(200);

/// The directory with more files, beside the file of a host's service.
const DIRECTORY: &str = "disks.d";

/// The name of that file.
const NAME: &str = "ringdisk.toml";

/// A file with its text.
pub(super) type TextFile = (PathBuf, String);

/// Reads the file of a configuration, and those beside it in the order of their names: all as they were at one time. Tools as
/// git remove a file before they write it again: the directory has to be at [rest](Beside::is_at_rest). `is_start`: a file beside it
/// may be empty, since that keeps no other disk from being served.
///
/// # Errors
/// One of them cannot be read; or they change again and again.
pub(super) fn read(
    path: &Path,
    is_start: bool,
) -> Result<(Option<Beside>, Vec<TextFile>), ConfigError> {
    for _ in 0..TRIES {
        let beside = Beside::of(path)?;
        let files = read_all(path, beside.as_ref(), is_start);
        let is_same = Beside::of(path)? == beside && beside.as_ref().is_none_or(Beside::is_at_rest);
        match files {
            Ok(Some(files)) if is_same => return Ok((beside, files)),
            Err(e) if is_same => return Err(e),
            _ => thread::sleep(PAUSE),
        }
    }
    Err(ConfigError::Changing(directory_of(path)))
}

/// `None` if one of the files beside it has gone meanwhile.
fn read_all(
    path: &Path,
    beside: Option<&Beside>,
    is_start: bool,
) -> Result<Option<Vec<TextFile>>, ConfigError> {
    let mut left = BYTES_MAX;
    let file = fs::File::open(path).map_err(|e| ConfigError::Read(path.into(), e))?;
    let mut files = vec![(path.to_owned(), read_text(path, file, &mut left)?)];
    for (path, (name, _)) in beside.iter().flat_map(|it| it.paths().zip(&it.files)) {
        let Some(file) = beside.and_then(|it| it.open(&path, name).transpose()) else {
            return Ok(None);
        };
        let text = read_text(&path, file?, &mut left)?;
        if text.trim().is_empty() && !is_start {
            return Err(ConfigError::Empty(path));
        }
        files.push((path, text));
    }
    Ok(Some(files))
}

/// Reads a file of at most `left` bytes.
fn read_text(path: &Path, file: fs::File, left: &mut u64) -> Result<String, ConfigError> {
    let fail = |e| ConfigError::Read(path.into(), e);
    let mut text = String::new();
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
    let beside = Beside::of(path).ok().flatten();
    files.extend(beside.iter().flat_map(Beside::paths));
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

/// The directory beside a file, and its files, sorted. Names that do not end in `.toml` are those of editors and package
/// managers. Open: its files are found also if it is moved, or another one takes its place.
pub(super) struct Beside {
    path: PathBuf,
    directory: OwnedFd,
    state: FileState,
    /// `None` for a link that leads nowhere.
    files: Vec<(OsString, Option<FileState>)>,
}

/// What changes with a file: device, inode, length, and the times of the last changes of its content and of itself.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileState([u64; 3], [(i64, u64); 2]);

impl From<Stat> for FileState {
    fn from(found: Stat) -> Self {
        let which = [found.st_dev, found.st_ino, found.st_size as u64];
        let content = (found.st_mtime, found.st_mtime_nsec);
        Self(which, [content, (found.st_ctime, found.st_ctime_nsec)])
    }
}

impl PartialEq for Beside {
    fn eq(&self, other: &Self) -> bool {
        (self.state, &self.files) == (other.state, &other.files)
    }
}

impl Beside {
    /// `None` if there is no such directory.
    fn of(path: &Path) -> Result<Option<Self>, ConfigError> {
        let path = directory_of(path);
        let fail = |e: Errno| ConfigError::Read(path.clone(), e.into());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match open(&path, flags, Mode::empty()) {
            // A file of that name may be anything, as a configuration called NAME.d.
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            opened => opened.map_err(fail)?,
        };
        let state = fstat(&directory).map_err(fail)?.into();
        let mut files = Vec::new();
        for entry in Dir::read_from(&directory).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_bytes();
            if name.ends_with(b".toml") && !name.starts_with(b".") {
                let state = statat(&directory, entry.file_name(), AtFlags::empty());
                let state = state.ok().map(FileState::from);
                files.push((OsString::from_vec(name.to_owned()), state));
            }
        }
        files.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(Some(Self {
            path,
            directory,
            state,
            files,
        }))
    }

    pub(super) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Whether no file was added or removed in the last moment.
    fn is_at_rest(&self) -> bool {
        let FileState(_, [(seconds, nanoseconds), _]) = self.state;
        let seconds = Duration::from_secs(seconds.try_into().unwrap_or(0));
        let changed = UNIX_EPOCH + seconds + Duration::from_nanos(nanoseconds);
        // A time to come is that of another clock.
        changed.elapsed().map_or(true, |since| since > MOMENT)
    }

    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.files.iter().map(|(name, _)| self.path.join(name))
    }

    /// `None` if it was removed since the directory was read.
    fn open(&self, path: &Path, name: &OsStr) -> Result<Option<fs::File>, ConfigError> {
        // Not to wait for the other end of a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match openat(&self.directory, name, flags, Mode::empty()).map(fs::File::from) {
            Ok(file) if file.metadata().is_ok_and(|there| there.is_file()) => Ok(Some(file)),
            Ok(_) => Err(ConfigError::NotAFile(path.into())),
            Err(Errno::NOENT) => match statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => Ok(None),
                _ => Err(ConfigError::NotAFile(path.into())),
            },
            Err(e) => Err(ConfigError::Read(path.into(), e.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::Config;
    use super::*;

    const FILES: usize = 20;

    /// Runs `change` again and again while a configuration with [`FILES`] files is read. Returns how many disks it had.
    fn disks_while(change: impl Fn(&Path) + Sync) -> Vec<usize> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        fs::write(&path, "").unwrap();
        for directory in ["one", "two"] {
            let directory = dir.path().join(directory);
            fs::create_dir(&directory).unwrap();
            for number in 0..FILES {
                let disk = format!("[[disk]]\nfile = \"/{number}.raw\"\n");
                fs::write(directory.join(format!("{number}.toml")), disk).unwrap();
            }
        }
        symlink("one", dir.path().join(DIRECTORY)).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    change(dir.path());
                }
            });
            let read = || match Config::read(&path) {
                Ok(config) if config.directory.is_none() => None,
                Ok(config) => Some(config.disks.len()),
                Err(e) => {
                    assert!(matches!(e, ConfigError::Changing(_)), "{e}");
                    None
                }
            };
            let found = (0..200).filter_map(|_| read()).collect();
            is_over.store(true, Ordering::Relaxed);
            found
        })
    }

    /// As tools for deployment do.
    #[test]
    fn a_directory_that_is_replaced_is_read_as_a_whole() {
        let found = disks_while(|dir| {
            for to in ["two", "one"] {
                symlink(to, dir.join("new")).unwrap();
                fs::rename(dir.join("new"), dir.join(DIRECTORY)).unwrap();
                thread::sleep(Duration::from_micros(300));
            }
        });
        assert!(found.iter().all(|&disks| disks == FILES), "{found:?}");
    }

    /// As git does, and rsync in place.
    #[test]
    fn files_that_are_written_again_are_all_there() {
        let found = disks_while(|dir| {
            for number in 0..FILES {
                let file = dir.join(DIRECTORY).join(format!("{number}.toml"));
                let text = fs::read(&file).unwrap();
                fs::remove_file(&file).unwrap();
                thread::sleep(Duration::from_micros(100));
                let mut new = fs::File::create(&file).unwrap();
                thread::sleep(Duration::from_micros(100));
                new.write_all(&text).unwrap();
            }
            thread::sleep(2 * MOMENT);
        });
        assert!(!found.is_empty());
        assert!(found.iter().all(|&disks| disks == FILES), "{found:?}");
    }

    #[test]
    fn a_directory_that_is_moved_away_is_read_as_a_whole() {
        let found = disks_while(|dir| {
            for (from, to) in [("one", "away"), ("away", "one")] {
                fs::rename(dir.join(from), dir.join(to)).unwrap();
                thread::sleep(Duration::from_micros(300));
            }
        });
        assert!(found.iter().all(|&disks| disks == FILES), "{found:?}");
    }
}
