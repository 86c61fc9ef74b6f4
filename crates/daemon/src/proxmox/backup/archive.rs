//! To an archive in a directory, as vzdump makes it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use block::format_size;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::super::vma::{Archive, EXTENT};
use super::{Contents, Data, Part};
use crate::client::CommandLineError;
use crate::client::backup::progress::show;
use crate::client::nbd_client::{Address, NbdClient, Stop};
use crate::token::random;

/// Threads that read, each with a connection of its own.
const WORKERS: usize = 4;

/// Most bytes of a read.
const READ: usize = 2 << 20;

/// `NBD_STATE_ZERO`
const STATE_ZERO: u32 = 2;

pub struct Form<'a> {
    pub dir: &'a Path,
    pub is_compressed: bool,
}

/// Where an archive goes. What is not complete has another name, which Proxmox does not list, and is removed.
struct Output {
    partial: PathBuf,
    /// Writes to the file.
    zstd: Option<Child>,
    /// The archive, or the input of zstd.
    to: Box<dyn Write + Send>,
    is_kept: bool,
}

impl Output {
    /// # Errors
    /// There is an archive of that name, or another command makes it, among others.
    fn create(path: &Path, is_compressed: bool) -> io::Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o640)
            .open(&partial)?;
        let mut output = Self {
            partial,
            zstd: None,
            to: Box::new(io::sink()),
            is_kept: false,
        };
        if !is_compressed {
            output.to = Box::new(file);
            return Ok(output);
        }
        let mut zstd = Command::new("zstd")
            .args(["--quiet", "--stdout"])
            .stdin(Stdio::piped())
            .stdout(file)
            .spawn()?;
        if let Some(input) = zstd.stdin.take() {
            output.to = Box::new(input);
        }
        output.zstd = Some(zstd);
        Ok(output)
    }

    /// All is written and durable, and has its name.
    fn finish(mut self, path: &Path) -> io::Result<u64> {
        self.to.flush()?;
        self.to = Box::new(io::sink());
        if let Some(mut zstd) = self.zstd.take() {
            let status = zstd.wait()?;
            if !status.success() {
                return Err(io::Error::other(format!("zstd failed ({status})")));
            }
        }
        let file = File::open(&self.partial)?;
        file.sync_all()?;
        let renamed = renameat_with(CWD, &self.partial, CWD, path, RenameFlags::NOREPLACE);
        match renamed {
            // Not on this file system, as on NFS.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&self.partial, path)?,
            renamed => renamed?,
        }
        self.is_kept = true;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(file.metadata()?.len())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.to = Box::new(io::sink());
        if let Some(mut zstd) = self.zstd.take() {
            let _ = zstd.kill();
            let _ = zstd.wait();
        }
        if !self.is_kept {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// What the threads that read a device have in common.
struct Reading<'a> {
    archive: &'a Archive,
    part: &'a Part,
    /// The device's number.
    number: u8,
    address: &'a Address,
    next: AtomicU64,
    output: &'a Mutex<Output>,
    done: &'a AtomicU64,
    stop: &'a Stop,
}

/// Writes an archive. Returns what is said to the user.
///
/// # Errors
/// There is none.
pub fn write(
    vm: &str,
    form: &Form<'_>,
    contents: &Contents,
    address: &Address,
    stop: &Stop,
) -> Result<String, CommandLineError> {
    // Names have seconds, and an archive of this second may be there.
    let mut tries = 0..10;
    let (path, output) = loop {
        let path = form.dir.join(name(vm, form.is_compressed)?);
        match Output::create(&path, form.is_compressed) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tries.next().is_some() => {
                thread::sleep(Duration::from_millis(200));
            }
            output => break (path, output),
        }
    };
    let of_target = |e: io::Error| match e.kind() {
        io::ErrorKind::Interrupted => CommandLineError::Interrupted,
        _ => CommandLineError::Target(path.clone(), e),
    };
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&random().to_be_bytes());
    uuid[8..].copy_from_slice(&random().to_be_bytes());
    let archive = Archive::new(uuid);
    let configs: Vec<_> = (contents.configs.iter())
        .map(|(_, name, text)| (*name, text.as_bytes()))
        .collect();
    let devices: Vec<_> = (contents.parts.iter())
        .map(|part| (part.name.as_str(), part.bytes))
        .collect();
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let header = archive.header(time.map_or(0, |time| time.as_secs()), &configs, &devices);
    let header = header.map_err(CommandLineError::Refused)?;
    let mut output = output.map_err(of_target)?;
    output.to.write_all(&header).map_err(of_target)?;
    let output = Mutex::new(output);
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let total = contents.parts.iter().map(|part| part.bytes).sum();
    let all = thread::scope(|scope| {
        scope.spawn(|| show(&is_over, &done, &done, total));
        let read = (1..).zip(&contents.parts).try_for_each(|(number, part)| {
            let reading = Reading {
                archive: &archive,
                part,
                number,
                address,
                next: AtomicU64::new(0),
                output: &output,
                done: &done,
                stop,
            };
            reading.run()
        });
        is_over.store(true, Relaxed);
        read
    });
    all.map_err(of_target)?;
    let output = output.into_inner().unwrap_or_else(PoisonError::into_inner);
    let bytes = output.finish(&path).map_err(of_target)?;
    Ok(format!(
        "VM {vm} is in {} ({})",
        path.display(),
        format_size(bytes)
    ))
}

/// The name that Proxmox gives to an archive of this moment.
fn name(vm: &str, is_compressed: bool) -> Result<String, CommandLineError> {
    // The local time, as vzdump has it.
    let date = Command::new("date").arg("+%Y_%m_%d-%H_%M_%S").output();
    let date = date.map_err(|e| CommandLineError::Here("cannot run date", e))?;
    let date = String::from_utf8_lossy(&date.stdout);
    let suffix = if is_compressed { ".zst" } else { "" };
    Ok(format!("vzdump-qemu-{vm}-{}.vma{suffix}", date.trim()))
}

impl Reading<'_> {
    fn run(&self) -> io::Result<()> {
        let before = self.done.load(Relaxed);
        match &self.part.data {
            Data::File(path) => {
                let mut file = File::open(path)?;
                self.extents(|_, buffer| file.read_exact(buffer))?;
            }
            Data::Export { name, .. } => {
                let work = || {
                    let contexts = ["base:allocation".to_owned()];
                    let mut from = NbdClient::connect(self.address, name, &contexts, self.stop)?;
                    if from.size != self.part.bytes {
                        let text = format!("the export has {} bytes now", from.size);
                        return Err(io::Error::other(text));
                    }
                    self.extents(|at, buffer| read(&mut from, at, buffer))
                };
                thread::scope(|scope| {
                    let workers = [(); WORKERS].map(|()| scope.spawn(work));
                    let ended = workers.map(|worker| worker.join());
                    let mut ended = ended.into_iter();
                    ended.try_for_each(|end| end.unwrap_or_else(|p| std::panic::resume_unwind(p)))
                })?;
            }
        }
        let all = self.done.load(Relaxed) - before;
        if all == self.part.bytes {
            return Ok(());
        }
        let (drive, bytes) = (&self.part.drive, self.part.bytes);
        Err(io::Error::other(format!(
            "{drive}: {all} bytes were read, of {bytes}"
        )))
    }

    /// Writes extents until nothing is left, or something has failed: then the others stop, too.
    fn extents(&self, mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buffer = vec![0; EXTENT as usize];
        loop {
            let at = self.next.fetch_add(EXTENT, Relaxed);
            if at >= self.part.bytes {
                return Ok(());
            }
            let bytes = EXTENT.min(self.part.bytes - at);
            let data = &mut buffer[..bytes as usize];
            let written = self.stop.check().and_then(|()| {
                read(at, data)?;
                let extent = self.archive.extent(self.number, at, data);
                let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
                output.to.write_all(&extent)
            });
            if written.is_err() {
                self.next
                    .store(u64::MAX - EXTENT * 2 * WORKERS as u64, Relaxed);
                return written;
            }
            self.done.fetch_add(bytes, Relaxed);
        }
    }
}

/// Reads an extent, unless all of it is zero.
fn read(from: &mut NbdClient, at: u64, buffer: &mut [u8]) -> io::Result<()> {
    let status = from.status(at, buffer.len() as u64)?;
    let first = status.first().and_then(|extents| extents.first());
    if first.is_some_and(|(bytes, flags)| *bytes == buffer.len() as u64 && flags & STATE_ZERO != 0)
    {
        buffer.fill(0);
        return Ok(());
    }
    for (index, part) in buffer.chunks_mut(READ).enumerate() {
        from.read(at + (index * READ) as u64, part)?;
    }
    Ok(())
}
