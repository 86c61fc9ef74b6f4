//! The disks that the lab creates, and the servers that export them.

pub mod disk;
pub mod host_queue;
mod images;
pub mod named;
pub mod rbd;
mod record;
pub mod zram;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::paths::is_block_device;
use harness::process::{Process, Stop, guarded};
use harness::qemu::escaped;
use harness::qmp::Qmp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::own_folder::OwnFolder;
use crate::plan::units::size_text;
use crate::plan::words::{Cache, Device, Format};
use crate::plan::{Backing, IoThread, Plan, Server, Settings};
use disk::fill_file;
pub use disk::{Disk, Fill, OwnDisk};
use harness::cpu;
use named::{Named, Told};
use zram::Zram;

/// Disk files that the lab creates. Dropping this removes them.
#[derive(Debug)]
pub struct Files {
    /// The directory for disks of which the plan does not say where they are.
    directory: PathBuf,
    size: u64,
    made: Vec<PathBuf>,
    /// A folder for each directory in which there are disks.
    folders: BTreeMap<PathBuf, OwnFolder>,
    zrams: Vec<((u16, u16), Zram)>,
    named: Named,
}

/// The folder for disks in memory.
const RAM: &str = "/dev/shm";
/// The space in bytes that the disks must leave free.
const RESERVE: u64 = 256 << 20;

impl Files {
    /// For files of `size` bytes in `directory`, and disks that the plan names.
    pub fn new(directory: PathBuf, size: u64, named: Named) -> Files {
        Files {
            directory,
            size,
            made: Vec::new(),
            folders: BTreeMap::new(),
            zrams: Vec::new(),
            named,
        }
    }

    /// Creates and fills the disks that a plan names, before the first of them is measured.
    ///
    /// # Errors
    /// A disk does not exist, cannot be created or filled, or the user stops the run.
    pub fn prepare(&mut self, plan: &Plan, stop: &Stop, told: Told) -> Result<Vec<Fill>> {
        let mut fills = Vec::new();
        let settings = plan.cases.iter().map(|case| &case.settings);
        for settings in settings.filter(|settings| settings.prefill && settings.opens_disks()) {
            if let Backing::Named(names) = &settings.backing {
                for name in names.all(settings.guests, settings.volumes) {
                    let (_, fill) = self.named.disk(settings, &name, stop, told)?;
                    fills.extend(fill);
                }
            }
        }
        Ok(fills)
    }

    /// The disk of a volume. It is created if necessary, and filled with random data unless the plan wants it empty:
    /// otherwise reads would hit holes, and writes would allocate blocks. Files without data of their own are created
    /// again by each call.
    ///
    /// # Errors
    /// There is not enough space, or the disk is not writable.
    pub fn disk(
        &mut self,
        settings: &Settings,
        guest: u16,
        volume: u16,
        stop: &Stop,
    ) -> Result<Disk> {
        match &settings.backing {
            Backing::Null => Ok(Disk::Null),
            Backing::Named(names) => {
                let name = names.of(guest, volume, settings.volumes);
                let disk = self.named.disk(settings, &name, stop, &mut |_, _, _| {});
                disk.map(|(disk, _)| disk)
            }
            _ => self.file(settings, guest, volume, stop),
        }
    }

    fn file(&mut self, settings: &Settings, guest: u16, volume: u16, stop: &Stop) -> Result<Disk> {
        let folder = match &settings.backing {
            Backing::Zram => return self.zram(guest, volume).map(Disk::Path),
            Backing::Ram => self.folder_in(Path::new(RAM))?,
            Backing::Directory(directory) => self.folder_in(directory)?,
            Backing::File | Backing::Null | Backing::Named(_) => {
                self.folder_in(&self.directory.clone())?
            }
        };
        let name = format!("{guest}-{volume}");
        let path = |name: String| folder.join(format!("{name}.{}", settings.format));
        let image = &settings.image;
        match (settings.format, settings.prefill) {
            (Format::Raw, true) => {
                let seed = u64::from(guest) << 16 | u64::from(volume);
                let fill = |path: &Path, size| fill_file(&File::create(path)?, size, seed, stop);
                self.once(path(format!("disk-{name}")), fill)
                    .map(Disk::Path)
            }
            (Format::Raw, false) => {
                let create = |path: &Path, size| Ok(File::create(path)?.set_len(size)?);
                self.again(path(format!("new-{name}")), create)
                    .map(Disk::Path)
            }
            (Format::Qcow2, false) => {
                let create = |path: &Path, size| images::create(path, size, image, None);
                self.again(path(format!("new-{name}")), create)
                    .map(Disk::Path)
            }
            (Format::Qcow2, true) => {
                let raw = Settings {
                    format: Format::Raw,
                    ..settings.clone()
                };
                let raw = self.file(&raw, guest, volume, stop)?;
                let raw = raw.path().context("a raw disk has a file")?;
                let layout = image.options().replace(['=', ','], "-");
                let lowest = path(format!("disk-{name}-{layout}"));
                let mut files =
                    vec![self.once(lowest, |path, _| images::convert(raw, path, image))?];
                for layer in 0..settings.backing_files() {
                    let below = files.last().map(PathBuf::as_path);
                    let create = |path: &Path, size| images::create(path, size, image, below);
                    let above = self.again(path(format!("new-{name}-{layer}")), create)?;
                    files.push(above);
                }
                files.reverse();
                Ok(match <[PathBuf; 1]>::try_from(files) {
                    Ok([only]) => Disk::Path(only),
                    Err(files) => Disk::Chain(files),
                })
            }
        }
    }

    /// The folder in a directory, which may have files of the user and of other runs.
    fn folder_in(&mut self, directory: &Path) -> Result<PathBuf> {
        if !self.folders.contains_key(directory) {
            let folder = OwnFolder::new(directory)?;
            self.folders.insert(directory.to_owned(), folder);
        }
        Ok(self.folders[directory].path().to_owned())
    }

    /// A file that the first call creates.
    fn once(
        &mut self,
        path: PathBuf,
        create: impl FnOnce(&Path, u64) -> Result<()>,
    ) -> Result<PathBuf> {
        match self.made.contains(&path) {
            true => Ok(path),
            false => self.again(path, create),
        }
    }

    /// A file that each call creates again.
    fn again(
        &mut self,
        path: PathBuf,
        create: impl FnOnce(&Path, u64) -> Result<()>,
    ) -> Result<PathBuf> {
        // Remove an earlier one, also from the page cache.
        let _ = fs::remove_file(&path);
        self.check_room(path.parent().unwrap_or(&self.directory))?;
        if !self.made.contains(&path) {
            self.made.push(path.clone());
        }
        let what = || format!("creating {}", path.display());
        create(&path, self.size).with_context(what)?;
        File::open(&path)
            .and_then(|file| file.sync_all())
            .with_context(what)?;
        Ok(path)
    }

    fn zram(&mut self, guest: u16, volume: u16) -> Result<PathBuf> {
        let known = self.zrams.iter().find(|(of, _)| *of == (guest, volume));
        if let Some((_, zram)) = known {
            return Ok(zram.device().to_owned());
        }
        let zram = Zram::new(self.size)?;
        let path = zram.device().to_owned();
        self.zrams.push(((guest, volume), zram));
        Ok(path)
    }

    fn check_room(&self, folder: &Path) -> Result<()> {
        let room = rustix::fs::statvfs(folder)
            .with_context(|| format!("looking for room in {}", folder.display()))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        ensure!(
            free >= self.size + RESERVE,
            "{} has {} MiB free, and a disk needs {} and a reserve of {}; set another 'directory' or a smaller 'size' in [storage]",
            folder.display(),
            free >> 20,
            size_text(self.size),
            size_text(RESERVE),
        );
        Ok(())
    }
}

/// Brings a disk into the state in which every sample of a cache mode starts, so that no sample includes the writeback of the
/// previous one.
///
/// # Errors
/// The disk cannot be read or synced.
pub fn settle(path: &Path, cache: Cache) -> Result<()> {
    let what = || format!("settling {}", path.display());
    let mut file = File::open(path).with_context(what)?;
    file.sync_data().with_context(what)?;
    match cache.direct() {
        // With O_DIRECT, the kernel would first search the page cache.
        true => {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).with_context(what)?
        }
        false => drop(std::io::copy(&mut file, &mut std::io::sink()).with_context(what)?),
    }
    Ok(())
}

/// How ringdisk's I/O threads have waited since they were started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// The number of times that a thread polled before it slept.
    pub polls: u64,
    /// The number of times that polling found a request.
    pub polls_hit: u64,
    /// Time spent polling.
    pub polled_ns: u64,
    /// The number of times that a thread slept.
    pub sleeps: u64,
    /// CPU time of the threads, polling included.
    pub cpu_ns: u64,
}

impl Polling {
    /// The share of the CPU time that was spent polling.
    pub fn share(&self) -> f64 {
        self.polled_ns as f64 / self.cpu_ns.max(1) as f64
    }
}

/// A server of disks over vhost-user. Dropping this ends it.
pub struct Served {
    /// `None` if the lab did not start the server
    process: Option<Process>,
    /// One socket per disk.
    pub sockets: Vec<PathBuf>,
    /// Seconds from its start until it listened on all sockets.
    pub ready_s: f64,
}

/// The time that a server may take until it is ready, and the additional time per disk: qemu-storage-daemon takes a minute
/// for a thousand disks with native AIO.
const START_MAX: Duration = Duration::from_secs(60);
const START_OF_DISK_MAX: Duration = Duration::from_millis(200);
/// The control socket of a ringdisk, beside those of its disks.
const CONTROL: &str = "control.sock";

impl Served {
    /// Starts the server of a configuration for these disks.
    ///
    /// # Errors
    /// The server does not start; the message contains its last lines.
    pub fn start(
        settings: &Settings,
        ringdisk: &Path,
        folder: &Path,
        disks: &[Disk],
        size: u64,
        cpus: &[usize],
        stop: &Stop,
    ) -> Result<Served> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let sockets: Vec<PathBuf> = (0..disks.len())
            .map(|n| folder.join(format!("disk{n}.sock")))
            .collect();
        let control = folder.join(CONTROL);
        let left = sockets.iter().chain([&control]);
        left.for_each(|socket| drop(fs::remove_file(socket)));
        let mut command = match &settings.server {
            Server::Socket(socket) => {
                ensure!(
                    socket.exists(),
                    "no process listens at {}",
                    socket.display()
                );
                return Ok(Served {
                    process: None,
                    sockets: vec![socket.clone()],
                    ready_s: 0.0,
                });
            }
            Server::Ringdisk => ringdisk_command(settings, ringdisk, folder, disks, size, &sockets),
            Server::Build(path) => ringdisk_command(settings, path, folder, disks, size, &sockets),
            Server::QemuStorageDaemon => daemon_command(settings, disks, size, &sockets),
        };
        if let ([_, _, ..], Server::Ringdisk | Server::Build(_)) = (cpus, &settings.server) {
            let words: Vec<String> = cpus.iter().map(usize::to_string).collect();
            command.arg(format!("--cpus={}", words.join(",")));
        }
        let name = "the server of the disks";
        let log = folder.join("server.log");
        // Pin it from the start: a server that sees one CPU starts one I/O thread.
        if let Some(library) = &settings.preload {
            command.env("LD_PRELOAD", library);
        }
        let begun = Instant::now();
        let process = match cpus {
            [] => Process::start(name, &mut command, &log),
            cpus => cpu::start_on(cpus, || Process::start(name, &mut command, &log))?,
        };
        let mut process = process?.with_grace(Duration::from_secs(10));
        // Do not connect to find out: qemu-storage-daemon would accept that as its guest.
        let limit = START_MAX + START_OF_DISK_MAX * disks.len() as u32;
        process.wait_until(limit, stop, || sockets.iter().all(|socket| socket.exists()))?;
        let ready_s = begun.elapsed().as_secs_f64();
        // It comes after those of the disks, and what is measured is read there.
        if matches!(settings.server, Server::Ringdisk | Server::Build(_)) {
            process.wait_until(limit, stop, || UnixStream::connect(&control).is_ok())?;
        }
        Ok(Served {
            process: Some(process),
            sockets,
            ready_s,
        })
    }

    /// How ringdisk's I/O threads have waited; `None` for other servers, and for a ringdisk that does not report it. Call this
    /// only after a measurement, because ringdisk then starts to measure latencies.
    pub fn polling(&self) -> Option<Polling> {
        self.process.as_ref()?;
        let mut qmp = Qmp::connect(&self.control()?).ok()?;
        let answer = qmp
            .execute("x-ringdisk-stats", serde_json::json!({}))
            .ok()?;
        let threads = answer["iothreads"].as_array()?;
        let sum = |key: &str| threads.iter().filter_map(|it| it[key].as_u64()).sum();
        Some(Polling {
            polls: sum("polls"),
            polls_hit: sum("polls-hit"),
            polled_ns: sum("polled-ns"),
            sleeps: sum("sleeps"),
            cpu_ns: sum("cpu-ns"),
        })
    }

    /// The control socket, if the server is a ringdisk.
    pub fn control(&self) -> Option<PathBuf> {
        Some(self.sockets.first()?.with_file_name(CONTROL))
    }

    /// The server's process id, if the lab started it.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// Succeeds while the server runs.
    ///
    /// # Errors
    /// The server has ended; the message contains its last lines.
    pub fn alive(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Process::check)
    }
}

fn ringdisk_command(
    settings: &Settings,
    ringdisk: &Path,
    folder: &Path,
    disks: &[Disk],
    size: u64,
    sockets: &[PathBuf],
) -> Command {
    let mut command = guarded(ringdisk);
    command
        .args(["serve", "--json", "--control"])
        .arg(folder.join(CONTROL));
    if let Some(us) = settings.poll_max_us {
        command.arg(format!("--poll-max-us={us}"));
    }
    match settings.iothread {
        IoThread::Off => {}
        IoThread::One => drop(command.args(["--iothreads", "1"])),
        IoThread::Mapping(threads) => drop(command.args(["--iothreads", &threads.to_string()])),
    }
    for (index, (disk, socket)) in disks.iter().zip(sockets).enumerate() {
        let mut words = match disk {
            Disk::Path(_) | Disk::Chain(_) => format!(
                "file={},format={},cache={}",
                disk.path().map(escaped).unwrap_or_default(),
                settings.format,
                settings.cache
            ),
            Disk::Rbd(image) => format!(
                "file={image},conf={},id={},cache={}",
                escaped(&image.conf),
                image.user,
                settings.cache
            ),
            Disk::Null => format!("file=null:{size}"),
        };
        words += &format!(",name=lab{index},socket={}", escaped(socket));
        if let (Some(aio), Some(_)) = (settings.aio, disk.path()) {
            words += &format!(",aio={aio}");
        }
        words += &format!(",queues={}", settings.queues.unwrap_or(settings.vcpus));
        if let Some(size) = settings.queue_size {
            words += &format!(",queue-size={size}");
        }
        if settings.fixed_buffers {
            words += ",fixed-buffers=on";
        }
        if let Some(iops) = settings.iops {
            words += &format!(",iops={iops}");
        }
        command.arg(words);
    }
    command
}

fn daemon_command(settings: &Settings, disks: &[Disk], size: u64, sockets: &[PathBuf]) -> Command {
    let mut command = guarded(Path::new("qemu-storage-daemon"));
    let through = matches!(settings.cache, Cache::Writethrough | Cache::Directsync);
    // Spread the disks over the threads, as ringdisk does.
    let threads = match settings.iothread {
        IoThread::Off => 0,
        IoThread::One => 1,
        IoThread::Mapping(threads) => usize::from(threads),
    };
    for thread in 0..threads {
        let mut object = serde_json::json!({ "qom-type": "iothread", "id": format!("io{thread}") });
        if let Some(us) = settings.poll_max_us {
            object["poll-max-ns"] = (u64::from(us) * 1000).into();
        }
        command.arg("--object").arg(object.to_string());
    }
    for (index, (disk, socket)) in disks.iter().zip(sockets).enumerate() {
        let cache = serde_json::json!({ "direct": settings.cache.direct(), "no-flush": settings.cache == Cache::Unsafe });
        let node = match disk {
            Disk::Null => {
                serde_json::json!({ "driver": "null-co", "size": size, "read-zeroes": false })
            }
            Disk::Rbd(image) => image.blockdev(cache),
            Disk::Path(_) | Disk::Chain(_) => image_node(settings, disk.files(), &cache),
        };
        let mut node = node;
        node["node-name"] = format!("disk{index}").into();
        let mut export: Value = serde_json::json!({
            "type": "vhost-user-blk", "id": format!("export{index}"), "node-name": format!("disk{index}"),
            "addr": { "type": "unix", "path": socket }, "writable": true, "writethrough": through,
            "num-queues": settings.queues.unwrap_or(settings.vcpus),
        });
        if threads > 0 {
            export["iothread"] = format!("io{}", index % threads).into();
        }
        command.arg("--blockdev").arg(node.to_string());
        if let Some(iops) = settings.iops {
            let group = serde_json::json!({
                "qom-type": "throttle-group", "id": format!("limit{index}"), "limits": { "iops-total": iops },
            });
            let filter = serde_json::json!({
                "driver": "throttle", "node-name": format!("limited{index}"),
                "throttle-group": format!("limit{index}"), "file": format!("disk{index}"),
            });
            command.arg("--object").arg(group.to_string());
            command.arg("--blockdev").arg(filter.to_string());
            export["node-name"] = format!("limited{index}").into();
        }
        command.arg("--export").arg(export.to_string());
    }
    command
}

/// The value of `-blockdev` for an image and its backing files, from the top down. QEMU opens backing files like the disk
/// itself, with the same `aio`, only if they are named here.
pub fn image_node(settings: &Settings, files: &[PathBuf], cache: &Value) -> Value {
    let open = |path: &PathBuf| {
        let driver = match is_block_device(path) {
            true => "host_device",
            false => "file",
        };
        let mut file = serde_json::json!({ "driver": driver, "filename": path, "cache": cache, "discard": "unmap" });
        if let Some(aio) = settings.aio {
            file["aio"] = aio.word().into();
        }
        match (settings.format, settings.device) {
            // qemu-storage-daemon needs no format driver, and QEMU's `-drive` has one.
            (Format::Raw, Device::VhostUserBlk) => file,
            (format, _) => serde_json::json!({
                "driver": format.word(), "file": file, "cache": cache, "discard": "unmap",
            }),
        }
    };
    let chain = files.iter().rev().map(open).reduce(|below, mut node| {
        node["backing"] = below;
        node
    });
    chain.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path, size: u64) -> Files {
        let named = Named::new(false, size, folder.to_owned());
        Files::new(folder.to_owned(), size, named)
    }

    #[test]
    fn disks_are_full_of_data_differ_and_go_away() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), 16 << 20);
        let mut disk = |volume| {
            let disk = files.disk(&Settings::default(), 0, volume, &Stop::default());
            disk.unwrap().path().unwrap().to_owned()
        };
        let (one, two) = (disk(0), disk(1));
        assert_eq!(disk(0), one);
        let (a, b) = (fs::read(&one).unwrap(), fs::read(&two).unwrap());
        assert!(
            a.len() == 16 << 20
                && a != b
                && a.chunks(4096)
                    .all(|block| block.iter().any(|byte| *byte != 0))
        );
        drop(files);
        assert!(!one.exists() && !two.exists());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn files_of_others_in_the_directory_of_the_disks_stay() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["disk-0-0.raw", "new-0-0.raw", "disk-0-0.qcow2"];
        for name in names {
            fs::write(folder.path().join(name), "mine").unwrap();
        }
        let mut files = files(Path::new("/nonexistent"), 1 << 20);
        for prefill in [true, false] {
            let settings = Settings {
                backing: Backing::Directory(folder.path().to_owned()),
                prefill,
                ..Settings::default()
            };
            files.disk(&settings, 0, 0, &Stop::default()).unwrap();
        }
        drop(files);
        for name in names {
            let text = fs::read_to_string(folder.path().join(name)).unwrap();
            assert_eq!(text, "mine", "{name}");
        }
    }

    #[test]
    fn a_disk_that_does_not_fit_is_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), 1 << 60);
        let error = files
            .disk(&Settings::default(), 0, 0, &Stop::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("MiB free") && error.contains("directory"),
            "{error}"
        );
        assert!(files.made.is_empty());
    }

    #[test]
    fn a_server_that_fails_is_told_with_its_words() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("ringdisk");
        fs::write(&script, "#!/bin/sh\necho no such disk >&2\nexit 1\n").unwrap();
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let settings = Settings::default();
        let started = Served::start(
            &settings,
            &script,
            folder.path(),
            &[Disk::Null],
            1 << 20,
            &[],
            &Stop::default(),
        );
        let error = started.err().unwrap().to_string();
        assert!(error.contains("no such disk"), "{error}");
    }

    fn words(settings: &Settings, disks: &[&str]) -> Vec<String> {
        let disks: Vec<_> = disks.iter().map(|disk| Disk::Path(disk.into())).collect();
        let sockets: Vec<_> = (0..disks.len())
            .map(|n| PathBuf::from(format!("/{n}")))
            .collect();
        let command = match settings.server {
            Server::QemuStorageDaemon => daemon_command(settings, &disks, 1 << 20, &sockets),
            _ => ringdisk_command(
                settings,
                Path::new("/r"),
                Path::new("/f"),
                &disks,
                1,
                &sockets,
            ),
        };
        let words = command.get_args().map(|word| word.to_string_lossy());
        words.map(|word| word.into_owned()).collect()
    }

    #[test]
    fn exports_take_turns_on_the_threads_and_each_has_its_limit() {
        let settings = Settings {
            device: crate::plan::words::Device::VhostUserBlk,
            server: Server::QemuStorageDaemon,
            iothread: IoThread::Mapping(2),
            iops: Some(500),
            poll_max_us: Some(0),
            volumes: 3,
            ..Settings::default()
        };
        assert_eq!(settings.check(), Ok(()));
        let words = words(&settings, &["/a", "/b", "/c"]);
        let exports = words.iter().filter(|word| word.contains("vhost-user-blk"));
        for (index, (export, thread)) in exports.zip(["io0", "io1", "io0"]).enumerate() {
            let export: Value = serde_json::from_str(export).unwrap();
            assert_eq!(export["iothread"], thread);
            assert_eq!(export["node-name"], format!("limited{index}"));
        }
        let count = |what: &str| words.iter().filter(|word| word.contains(what)).count();
        assert_eq!(count("\"iops-total\":500"), 3);
        assert_eq!(count("\"poll-max-ns\":0"), 2);
    }

    #[test]
    fn ringdisk_is_told_what_differs_from_its_defaults() {
        let settings = Settings {
            fixed_buffers: true,
            iops: Some(500),
            poll_max_us: Some(0),
            ..Settings::default()
        };
        let with = words(&settings, &["/a"]).join(" ");
        assert!(with.contains(",fixed-buffers=on,iops=500") && with.contains("--poll-max-us=0"));
        let without = words(&Settings::default(), &["/a"]).join(" ");
        assert!(
            !without.contains("fixed") && !without.contains("iops") && !without.contains("poll")
        );
    }
}
