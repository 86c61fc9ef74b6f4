//! Copies of an image, made while it is served or not, and replacements of an image: copies and other names.

use std::fs;

use super::failure::Outcome;
use super::files::copy;
use super::image_state::{Backup, ImageState};
use super::world::World;

impl World {
    pub fn copy_served(&mut self, flush: bool) -> Outcome<()> {
        self.drain()?;
        if flush {
            self.flush()?;
        }
        let mut state = self.state.clone();
        state.oracle = state.oracle.copied(false);
        state.tables_lost |= !flush;
        state.leaks = true;
        state.killed = false;
        self.keep_copy(state)
    }

    /// Copies the image's files; `state` is what is known of the copy.
    fn keep_copy(&mut self, state: ImageState) -> Outcome<()> {
        if self.backups.len() > 4 {
            return Ok(());
        }
        let number = self.backups.len();
        let image = self.files.directory.join(format!("backup{number}"));
        copy(&self.files.image, &image)?;
        let data = match &self.files.data {
            Some(data) => {
                let kept = self.files.directory.join(format!("backup{number}.data"));
                copy(data, &kept)?;
                Some(kept)
            }
            None => None,
        };
        self.backups.push(Backup { image, data, state });
        self.counts.add("copies", 1);
        Ok(())
    }

    /// The state for a program other than ringdisk, which ignores the journal.
    pub fn as_flushed(&self) -> ImageState {
        let mut state = self.state.clone();
        if state.killed {
            state.oracle.power_cut();
            state.killed = false;
            state.tables_lost = true;
        }
        state
    }

    pub fn back_up(&mut self) -> Outcome<()> {
        let state = self.as_flushed();
        self.keep_copy(state)
    }

    pub fn restore(&mut self, number: u64, in_place: bool) -> Outcome<()> {
        if self.backups.is_empty() {
            return Ok(());
        }
        let last = self.backups.len() - 1;
        let number = match number {
            u64::MAX => last,
            _ => number as usize % (last + 1),
        };
        let backup = &self.backups[number];
        self.files.free_images();
        if in_place || self.files.storage.is_some() {
            copy(&backup.image, &self.files.image)?;
        } else {
            let beside = self.files.image.with_extension("restored");
            copy(&backup.image, &beside)?;
            fs::rename(&beside, &self.files.image)?;
        }
        if let (Some(kept), Some(data)) = (&backup.data, &self.files.data) {
            copy(kept, data)?;
        }
        // A copy of an empty overlay, restored under another name, is to ringdisk a new overlay over what the disk has left: the
        // administrator knows better.
        let left = self.state_directory().join("left.json");
        match fs::remove_file(left) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
        self.state = backup.state.clone();
        // cp does not make the data durable.
        self.state.volatile = true;
        self.counts.add("restores", 1);
        Ok(())
    }

    pub fn rename(&mut self) -> Outcome<()> {
        if self.files.storage.is_none() {
            let other = self.files.fresh();
            fs::rename(&self.files.image, &other)?;
            self.files.image = other;
            self.counts.add("renames", 1);
        }
        Ok(())
    }

    pub fn link(&mut self) -> Outcome<()> {
        if self.files.storage.is_none() {
            let other = self.files.fresh();
            fs::hard_link(&self.files.image, &other)?;
            self.files.image = other;
            self.counts.add("hard links", 1);
        }
        Ok(())
    }

    pub fn copy_over(&mut self) -> Outcome<()> {
        if self.files.storage.is_some() {
            return Ok(());
        }
        self.files.free_images();
        let beside = self.files.image.with_extension("copy");
        copy(&self.files.image, &beside)?;
        fs::rename(&beside, &self.files.image)?;
        self.state = self.as_flushed();
        self.state.volatile = true;
        self.counts.add("copies in its place", 1);
        Ok(())
    }
}
