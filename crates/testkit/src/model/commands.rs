//! Changes to a disk while it is served, by an operator or by the guest's driver: upgrades, resizes, replacements.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::failure::{Failure, Outcome};
use super::oracle::SECTOR;
use super::process::run;
use super::world::World;

impl World {
    pub fn ringdisk(&self, arguments: &[&str]) -> Outcome<(Option<i32>, String)> {
        let mut command = Command::new(&self.binary);
        command.args(arguments).arg("--control").arg(self.control());
        command.env("RUNTIME_DIRECTORY", &self.files.runtime);
        run(&mut command, &self.files.directory)
    }

    pub fn ringdisk_must(&self, arguments: &[&str]) -> Outcome<String> {
        match self.ringdisk(arguments)? {
            (Some(0), said) => Ok(said),
            (code, said) => {
                let what = format!("{arguments:?}: {code:?}, {said}");
                Err(Failure::new("command", what))
            }
        }
    }

    pub fn upgrade(&mut self) -> Outcome<()> {
        if self.full {
            return Ok(());
        }
        self.process
            .as_mut()
            .expect("it is served")
            .may_be_upgraded();
        let reply = self.ringdisk_must(&["upgrade", "--json"])?;
        self.counts.add("upgrades", 1);
        self.process
            .as_mut()
            .expect("it is served")
            .was_upgraded(&reply)
    }

    pub fn switch_write_cache(&mut self, on: bool) -> Outcome<()> {
        let serve = self.serve.as_ref().expect("it is served");
        if serve.cache == "unsafe" || self.full {
            return Ok(());
        }
        self.drain()?;
        let guest = self.guest.as_mut().expect("it is served");
        if guest.switch_write_cache(on)? {
            self.state.oracle.write_through = !on;
            if !on {
                self.state.oracle.durable();
            }
        }
        Ok(())
    }

    pub fn resize(&mut self, sectors: u64) -> Outcome<()> {
        let size = self.state.oracle.size.next_multiple_of(SECTOR as u64) + sectors * 512;
        if self.full {
            return Ok(());
        }
        let (code, said) = self.ringdisk(&["resize", "disk", &size.to_string()])?;
        match code {
            Some(0) => {}
            // In version 2 of the format, a snapshot does not record the disk's size.
            _ if self.files.is_version_2() && !self.state.snapshots.is_empty() => return Ok(()),
            _ => return Err(Failure::new("command", format!("resize to {size}: {said}"))),
        }
        self.counts.add("resizes", 1);
        self.grown(size);
        Ok(())
    }

    /// Records that the disk has grown, with zeroes at the end.
    pub fn grown(&mut self, size: u64) {
        let oracle = &mut self.state.oracle;
        let first = oracle.size.div_ceil(512);
        oracle.size = size;
        oracle.add_window(first, ((size / 512) - first) as usize);
    }

    pub fn snapshot(&mut self, options: &str, drain: bool) -> Outcome<()> {
        if self.files.storage.is_some() || self.full {
            return Ok(());
        }
        if drain {
            self.drain()?;
        }
        let above = self.files.fresh();
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-o", options, "-b"]);
        command
            .arg(&self.files.image)
            .args(["-F", self.files.format()]);
        self.files.expect(command.arg(&above))?;
        let name = above.display().to_string();
        self.ringdisk_must(&["replace", "disk", &name, "--format", "qcow2"])?;
        self.counts.add("snapshots under load", 1);
        self.files.backing = Some((self.files.image.clone(), self.files.format()));
        self.moved_to(above, true);
        Ok(())
    }

    /// Tells ringdisk another name of the disk's file.
    pub fn other_name(&mut self) -> Outcome<()> {
        if self.files.storage.is_some() || self.files.has_data_file || self.full {
            return Ok(());
        }
        self.drain()?;
        let other = self.files.fresh();
        fs::hard_link(&self.files.image, &other)?;
        let name = other.display().to_string();
        self.ringdisk_must(&["replace", "disk", &name, "--format", self.files.format()])?;
        self.counts.add("other names under load", 1);
        self.files.image = other;
        Ok(())
    }

    /// Records that the disk is in another file now.
    pub fn moved_to(&mut self, image: PathBuf, qcow2: bool) {
        self.files.image = image;
        self.files.data = None;
        self.files.qcow2 = qcow2;
        self.state.snapshots.clear();
        self.state.leaks = false;
        // The backing or data file of the copies has changed.
        self.backups.clear();
    }

    pub fn replace(&mut self, qcow2: bool) -> Outcome<()> {
        let volatile = self.serve.as_ref().is_some_and(|s| s.cache == "unsafe");
        if self.files.storage.is_some() || self.full || self.state.oracle.windows.len() > 4 {
            return Ok(());
        }
        self.drain()?;
        self.flush()?;
        if self.serve.as_ref().is_some_and(|s| s.without_flush) && volatile {
            return Ok(());
        }
        let other = self.files.fresh();
        let format = if qcow2 { "qcow2" } else { "raw" };
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-U", "-f", self.files.format(), "-O", format]);
        self.files
            .expect(command.arg(&self.files.image).arg(&other))?;
        if !qcow2 {
            // The converted file ends at a sector boundary: extend it to the disk's full size.
            let size = self.state.oracle.size;
            fs::File::options()
                .write(true)
                .open(&other)?
                .set_len(size)?;
        }
        let name = other.display().to_string();
        self.ringdisk_must(&["replace", "disk", &name, "--format", format])?;
        self.counts.add("replacements", 1);
        self.files.backing = None;
        self.moved_to(other, qcow2);
        Ok(())
    }
}
