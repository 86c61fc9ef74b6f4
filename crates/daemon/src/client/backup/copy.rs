//! `ringdisk backup copy`: begins a backup, copies it to files through NBD, and ends it.
//!
//! A full copy is written to `FILE.partial`, which becomes `FILE` once the backup has ended with success. Changes of a raw disk
//! are written into the file that has the last backup. It is marked by `FILE.updating` from the first byte until the backup has
//! ended with success: while that is there, the next copy is full.
//!
//! The order: all data, a check of the length, fsync, the end of the backup, and the name of the file.

mod target;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use block::format_size;
use serde_json::{Value, json};

use super::super::interrupt::Interrupt;
use super::super::nbd_client::{Address, Extent, NbdClient, Stop, TRANSFER_MAX};
use super::super::{CommandLineError, CommandResult, Connection, nbd_server};
use super::progress::show;
use super::{CHECKPOINT, Opening};
use crate::config::nbd::NbdAddress;
use crate::log::complain;
use target::{Target, Writer};

/// Threads, each with connections of its own.
const WORKERS: usize = 4;
/// What a thread takes at a time.
const WINDOW: u64 = 64 << 20;
/// Most bytes of a read: larger ones gain nothing, and NBD allows 32 MiB.
const READ: u64 = 2 << 20;
const _: () = assert!(READ <= TRANSFER_MAX);

const NEEDS_BASE: &str =
    "once for each disk: an increment as qcow2 needs the file with the last backup below it";

const STATE_ZERO: u32 = 2;
const STATE_DIRTY: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TargetFormat {
    Raw,
    Qcow2,
}

#[derive(clap::Args)]
pub struct CopyArgs {
    /// Names of disks, which are copied as of one moment
    #[arg(required = true)]
    disks: Vec<String>,
    /// File for the copy of a disk; once for each, in the same order
    #[arg(long, value_name = "FILE", required = true)]
    to: Vec<PathBuf>,
    /// Format of the files; qcow2 needs qemu-img and qemu-nbd
    #[arg(long, value_enum, default_value = "raw")]
    format: TargetFormat,
    /// Id of the backup
    #[arg(long, value_name = "ID", default_value = "backup")]
    id: String,
    /// Bitmap that records what changes from now on, for the next copy with --since
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,
    /// Copy what has changed since the backup with this checkpoint. A raw FILE has that backup, and is updated. If the bitmap has
    /// another checkpoint, everything is copied
    #[arg(long, value_name = "CHECKPOINT", requires = "bitmap")]
    since: Option<String>,
    /// qcow2 file with the last backup, for an incremental one with --format=qcow2; once for each disk
    #[arg(long, value_name = "FILE")]
    base: Vec<PathBuf>,
    /// Copy the disks of a backup that 'ringdisk backup begin' has begun, and end that
    #[arg(long, conflicts_with_all = ["bitmap", "since"])]
    open: bool,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    connection: Connection,
}

/// A disk of the backup, and where it is copied to.
struct Job<'a> {
    disk: &'a Value,
    export: String,
    size: u64,
    /// The bitmap that says what to copy, if not everything.
    bitmap: Option<String>,
    /// Why the copy is full, in JSON.
    why_full: Value,
    target: Target,
}

/// What the threads that copy a disk have in common.
struct Copying<'a> {
    address: &'a Address,
    job: &'a Job<'a>,
    next: AtomicU64,
    /// Bytes that are done, copied or not.
    done: &'a AtomicU64,
    copied: &'a AtomicU64,
    stop: &'a Stop,
}

pub fn copy(args: &CopyArgs) -> CommandResult {
    check(args)?;
    let interrupt = Interrupt::register();
    let (connection, id) = (&args.connection, &*args.id);
    let mut client = connection.open()?;
    let server = nbd_server(&mut client)?;
    let address = address_of(&server)?;
    let (disks, token) = if args.open {
        (super::open_disks(&mut client, id)?, None)
    } else {
        let mode = match (&args.bitmap, &args.since) {
            (None, _) => "none",
            (Some(_), None) => "new",
            (Some(_), Some(_)) => "x-ringdisk-auto",
        };
        let bitmap = args.bitmap.as_deref();
        let devices = super::devices(&args.disks, mode, bitmap, args.since.as_deref());
        let begun = super::open(connection, id, devices, &args.opening, &interrupt)?;
        (begun.disks, Some(begun.token))
    };
    let stop = Stop::default();
    // In one thread: the programs that write images end with the thread that has started them.
    let work = || {
        let mut jobs = prepare(args, &disks, &stop).map_err(|e| match e {
            // Another command can copy it.
            e if args.open => CommandLineError::StaysOpen(Box::new(e)),
            e => e,
        })?;
        let copied = copy_all(&mut jobs, &address, &stop)?;
        Ok((jobs, copied))
    };
    let (copied, watched) = interrupt.watch(None, work, || stop.set());
    let (jobs, copied) = match watched.and(copied) {
        Ok(done) => done,
        Err(e @ CommandLineError::StaysOpen(_)) => return Err(e),
        Err(e) => return Err(super::undo(connection, id, token.as_deref(), e)),
    };
    // The copy is complete: a signal would only keep it from being named and said. The end has a deadline.
    let ended = match super::end(&mut connection.open()?, id, true) {
        Ok(ended) => ended,
        Err(e) => {
            let is_complete = matches!(e, CommandLineError::MayHaveSucceeded(_))
                || super::is_open(&mut connection.open()?, id)?;
            if !is_complete {
                return Err(e);
            }
            let kept = jobs.into_iter().map(|job| {
                let has_bitmap = job.disk["bitmap-name"].is_string();
                job.target.keep_unended(has_bitmap)
            });
            // One that cannot be renamed does not lose the others.
            kept.fold(Ok(()), Result::and)?;
            return Err(CommandLineError::CopyIsComplete(Box::new(e)));
        }
    };
    say(connection, jobs, &copied, &ended)
}

fn check(args: &CopyArgs) -> CommandResult {
    let value = |option: &str, why: &str| {
        let (option, why) = (option.to_owned(), why.to_owned());
        Err(CommandLineError::Value(option, why))
    };
    let is_qcow2 = args.format == TargetFormat::Qcow2;
    // Whether an open backup is incremental is not known yet.
    let wants_base = is_qcow2 && (args.since.is_some() || args.open && !args.base.is_empty());
    match () {
        () if args.to.len() != args.disks.len() => {
            value("--to", "once for each disk, in the same order")
        }
        () if wants_base && args.base.len() != args.disks.len() => value("--base", NEEDS_BASE),
        () if !args.base.is_empty() && !is_qcow2 => {
            value("--base", "only for --format=qcow2: a raw file is updated")
        }
        () if !args.base.is_empty() && !wants_base => value(
            "--base",
            "only for --since or --open: a full copy has no file below it",
        ),
        () => {
            target::check_distinct(&args.to, &target::USED).map_err(|e| in_option("--to", e))?;
            target::check_distinct(&args.base, &[""]).map_err(|e| in_option("--base", e))
        }
    }
}

fn in_option(option: &str, why: String) -> CommandLineError {
    CommandLineError::Value(option.into(), why)
}

pub fn address_of(server: &Value) -> Result<Address, CommandLineError> {
    let address = server["address"].as_str().ok_or(CommandLineError::NoNbd)?;
    if server["tls"] == true {
        return Err(CommandLineError::Tls(address.into()));
    }
    Ok(match address.parse() {
        Ok(NbdAddress::Tcp(address)) => Address::Tcp(address),
        _ => Address::Unix(address.into()),
    })
}

/// Finds what to copy of each disk, and opens the files for it. Nothing is copied yet.
///
/// # Errors
/// The files are as they were.
fn prepare<'a>(
    args: &CopyArgs,
    disks: &'a [Value],
    stop: &Stop,
) -> Result<Vec<Job<'a>>, CommandLineError> {
    let of_backup = |name: &String| {
        let disk = disks.iter().find(|disk| disk["device"] == **name);
        let problem = "the backup does not have this disk";
        disk.ok_or_else(|| CommandLineError::Value(name.clone(), problem.into()))
    };
    let named: Vec<_> = args.disks.iter().map(of_backup).collect::<Result<_, _>>()?;
    let mut names = disks.iter().filter_map(|disk| disk["device"].as_str());
    if let Some(name) = names.find(|name| args.disks.iter().all(|it| it != name)) {
        let problem = format!(
            "the backup has this disk too, {} in all, and ends with success for all of them: name each, with a --to",
            disks.len()
        );
        return Err(CommandLineError::Value(name.into(), problem));
    }
    let mut jobs = Vec::new();
    for (at, (disk, to)) in named.into_iter().zip(&args.to).enumerate() {
        let name = &args.disks[at];
        let size = disk["size"].as_u64().unwrap_or(0);
        let full = disk["x-ringdisk-full"].is_string();
        let bitmap = disk["bitmap-name"].as_str().filter(|_| !full);
        let is_update = args.since.is_some() || bitmap.is_some();
        let of_target = |e| CommandLineError::Target(to.clone(), e);
        let is_raw = args.format == TargetFormat::Raw;
        let is_updating = is_raw && is_update && target::is_updating(to).map_err(of_target)?;
        let mut why_full = disk["x-ringdisk-full"].clone();
        if bitmap.is_some() && is_updating {
            complain(&format!(
                "disk {name} is copied in full: the last update of {} has not ended with success",
                to.display()
            ));
            why_full = "unfinished-update".into();
        }
        let bitmap = bitmap.filter(|_| !is_updating);
        let base = args.base.get(at).filter(|_| bitmap.is_some());
        if bitmap.is_some() && base.is_none() && args.format == TargetFormat::Qcow2 {
            return Err(in_option("--base", NEEDS_BASE.into()));
        }
        if let Some(why) = super::why_full(disk).filter(|_| args.since.is_some()) {
            complain(&format!("disk {name} is copied in full: {why}"));
        }
        let target = Target::create(
            to,
            args.format,
            size,
            bitmap.is_some(),
            is_update,
            base,
            stop,
        )
        .map_err(of_target)?;
        jobs.push(Job {
            disk,
            export: disk["node-name"].as_str().unwrap_or_default().into(),
            size,
            bitmap: bitmap.map(Into::into),
            why_full,
            target,
        });
    }
    Ok(jobs)
}

/// Copies all disks durably. Returns what was copied of each, in bytes.
fn copy_all(
    jobs: &mut [Job<'_>],
    address: &Address,
    stop: &Stop,
) -> Result<Vec<u64>, CommandLineError> {
    let [done, copied] = [const { AtomicU64::new(0) }; 2];
    let total = jobs.iter().map(|job| job.size).sum();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| show(&is_over, &done, &copied, total));
        let mut all = Vec::new();
        for job in jobs {
            let before = copied.load(Relaxed);
            match copy_disk(address, job, &done, &copied, stop) {
                Ok(()) => all.push(copied.load(Relaxed) - before),
                Err(e) => {
                    is_over.store(true, Relaxed);
                    return Err(e);
                }
            }
        }
        is_over.store(true, Relaxed);
        Ok(all)
    })
}

fn copy_disk(
    address: &Address,
    job: &mut Job<'_>,
    done: &AtomicU64,
    copied: &AtomicU64,
    stop: &Stop,
) -> Result<(), CommandLineError> {
    let before = done.load(Relaxed);
    job.target.begin(job.size)?;
    let copying = Copying {
        address,
        job,
        next: AtomicU64::new(0),
        done,
        copied,
        stop,
    };
    let of_export = |e| CommandLineError::Copy(job.export.clone(), e);
    thread::scope(|scope| {
        let workers = [(); WORKERS].map(|()| scope.spawn(|| copying.run()));
        let ended = workers.map(|worker| worker.join());
        let mut ended = ended.into_iter();
        ended.try_for_each(|ended| ended.unwrap_or_else(|p| std::panic::resume_unwind(p)))
    })
    .map_err(of_export)?;
    let all = done.load(Relaxed) - before;
    if all != job.size {
        let text = format!("{all} bytes were copied or are unchanged, of {}", job.size);
        return Err(of_export(io::Error::other(text)));
    }
    let path = job.target.path();
    job.target
        .finish(job.size, stop)
        .map_err(|e| CommandLineError::Target(path, e))
}

impl Copying<'_> {
    /// Copies until nothing is left, or something has failed: then the others stop, too.
    fn run(&self) -> io::Result<()> {
        let run = self.windows();
        if run.is_err() {
            self.next.store(u64::MAX - WINDOW * WORKERS as u64, Relaxed);
        }
        run
    }

    fn windows(&self) -> io::Result<()> {
        let job = self.job;
        let mut contexts = vec!["base:allocation".to_owned()];
        contexts.extend(
            job.bitmap
                .iter()
                .map(|name| format!("qemu:dirty-bitmap:{name}")),
        );
        let mut from = NbdClient::connect(self.address, &job.export, &contexts, self.stop)?;
        if from.size != job.size {
            let text = format!(
                "the export has {} bytes, and the disk {}",
                from.size, job.size
            );
            return Err(io::Error::other(text));
        }
        let mut to = job.target.writer(self.stop)?;
        let has = job.target.had();
        let mut buffer = vec![0; READ as usize];
        loop {
            let mut at = self.next.fetch_add(WINDOW, Relaxed);
            if at >= job.size {
                return Ok(());
            }
            let end = job.size.min(at + WINDOW);
            while at < end {
                self.stop.check()?;
                // What the file does not have is copied, whether it has changed or not.
                let is_missing = at >= has;
                let end = if is_missing { end } else { end.min(has) };
                let contexts = from.status(at, end - at)?;
                let (bytes, is_copied, is_zero) = extent(&contexts, is_missing);
                if is_copied {
                    self.extent(&mut from, &mut to, at, bytes, is_zero, &mut buffer)?;
                } else {
                    self.done.fetch_add(bytes, Relaxed);
                }
                at += bytes;
            }
        }
    }

    fn extent(
        &self,
        from: &mut NbdClient,
        to: &mut Writer,
        at: u64,
        bytes: u64,
        is_zero: bool,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        if is_zero {
            to.zero(at, bytes)?;
            self.done.fetch_add(bytes, Relaxed);
            return Ok(());
        }
        let mut done = 0;
        while done < bytes {
            self.stop.check()?;
            let part = READ.min(bytes - done);
            let part_of = &mut buffer[..part as usize];
            from.read(at + done, part_of)?;
            to.write(at + done, part_of)?;
            self.done.fetch_add(part, Relaxed);
            self.copied.fetch_add(part, Relaxed);
            done += part;
        }
        Ok(())
    }
}

/// The first bytes for which all contexts say the same; whether they are copied, and whether they are zeroes. `all`: all are
/// copied.
fn extent(contexts: &[Vec<Extent>], all: bool) -> (u64, bool, bool) {
    let first = |context: usize| contexts.get(context)?.first().copied();
    let (allocated, state) = first(0).unwrap_or((0, 0));
    let (dirty, is_copied) = match first(1) {
        Some((bytes, flags)) if !all => (bytes, flags & STATE_DIRTY != 0),
        _ => (allocated, true),
    };
    if !is_copied {
        return (dirty, false, false);
    }
    (allocated.min(dirty), true, state & STATE_ZERO != 0)
}

/// The files get their names, and the result is printed.
fn say(
    connection: &Connection,
    jobs: Vec<Job<'_>>,
    copied: &[u64],
    ended: &Value,
) -> CommandResult {
    let (mut all, mut text, mut kept) = (Vec::new(), String::new(), Ok(()));
    for (job, copied) in jobs.into_iter().zip(copied) {
        let (name, to) = (
            job.disk["device"].as_str().unwrap_or_default(),
            job.target.name(),
        );
        let mode = if job.bitmap.is_some() {
            "incremental"
        } else {
            "full"
        };
        text += &format!(
            "disk {name}: {mode}, {} copied to {to}\n",
            format_size(*copied)
        );
        let mut disk = json!({
            "device": name, "file": to, "mode": mode, "size": job.size, "copied": copied,
        });
        if mode == "full" {
            disk["x-ringdisk-full"] = job.why_full;
        }
        all.push(disk);
        // One that cannot be renamed does not lose the others, or the checkpoint.
        kept = kept.and(job.target.keep());
    }
    let mut reply = json!({ "disks": all });
    if let Some(checkpoint) = ended[CHECKPOINT].as_str() {
        reply[CHECKPOINT] = checkpoint.into();
        text +=
            &format!("the checkpoint of this backup, for --since of the next one:\n{checkpoint}");
    }
    connection.say(&reply, &text);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_those_of_both_contexts() {
        let both = |allocated, dirty, all| extent(&[vec![allocated], vec![dirty]], all);
        let all = |allocated: Extent, dirty: Extent| both(allocated, dirty, false);
        assert_eq!(all((10, 0), (20, 1)), (10, true, false));
        assert_eq!(all((10, 3), (5, 1)), (5, true, true));
        // What is unchanged is not looked at.
        assert_eq!(all((10, 3), (50, 0)), (50, false, false));
        // Unless everything is copied.
        assert_eq!(both((10, 0), (50, 0), true), (10, true, false));
        assert_eq!(extent(&[vec![(7, 2), (3, 0)]], false), (7, true, true));
    }
}
