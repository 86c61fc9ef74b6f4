//! `cargo xtask demo`: compares a disk of ringdisk with QEMU's own virtio-blk in the same guest.

mod lab;

use crate::{cargo, packages, root};
use anyhow::{Context, Result, ensure};
use harness::cpu::{self, Usage};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use testkit::ceph::{Ceph, Options, POOL};
use testkit::qemu::Release;
use testkit::server::Server;
use testkit::vm::{self, Accel, Disk, Vm};

const DISK_BYTES: u64 = 256 << 20;
const SERIAL: &str = "demo";

/// The block size that mkfs uses for disks of a usual size. For a disk as small as this one, mkfs would use 1 KiB, and
/// QEMU's own virtio-blk would have to extend every misaligned read of 4 KiB in a thread pool.
const BLOCK_SIZE: u32 = 4096;

/// A guest takes less than a minute; this leaves time on a busy machine.
const GUEST_LIMIT: Duration = Duration::from_secs(300);

/// The demo to run
#[derive(clap::Args)]
pub struct Args {
    /// Compare configurations with `ringdisk lab` in less than ten minutes
    #[arg(long)]
    lab: bool,
    /// Use an image in a Ceph cluster, which the demo starts on the loopback interface
    #[arg(long, conflicts_with = "lab")]
    ceph: bool,
    /// Draw the picture of the lab's report in docs/lab.md
    #[arg(long, requires = "lab")]
    picture: bool,
    /// Use this ringdisk instead of building one
    #[arg(long, value_name = "PATH")]
    ringdisk: Option<PathBuf>,
}

/// Installs what is missing, builds ringdisk, runs both guests and prints a table; or runs the lab.
pub fn run(args: &Args) -> Result<()> {
    let progress = Progress(Instant::now());
    progress.say("installing what is missing");
    packages::ensure()?;
    if args.ceph {
        packages::ceph::ensure()?;
        packages::tcmalloc::ensure()?;
    }
    progress.say("building ringdisk");
    let ringdisk = match &args.ringdisk {
        Some(path) => path.clone(),
        None => build(args.ceph)?,
    };
    let folder = make_folder()?;
    if args.lab {
        return lab::run(&ringdisk, &folder, args.picture);
    }

    let qemu = packages::qemu::newest_of_system()?;
    progress.say(&format!(
        "guests run on QEMU {} ({} of {}, the newest that this system's archives offer)",
        qemu.version, qemu.package, qemu.name
    ));
    progress.say("checking whether KVM boots a guest");
    let accel = vm::accel()?;
    progress.say(&format!("guests run under {accel:?}"));

    let started = Instant::now();
    let (ours, theirs) = if args.ceph {
        progress.say("starting a Ceph cluster: a monitor, three OSDs, three copies, cephx");
        let cluster = folder.join("ceph");
        if cluster.exists() {
            fs::remove_dir_all(&cluster).context("removing what an earlier demo left")?;
        }
        let ceph = Ceph::start(&cluster, Options::default())?;
        progress.say("Ceph runs");
        let image = |name| {
            ceph.create(name, DISK_BYTES >> 20)?;
            Ok::<_, anyhow::Error>(Storage::Image(&ceph, name))
        };
        let ours = on_ringdisk(&progress, &qemu, &ringdisk, &folder, &image("ringdisk")?)?;
        (ours, on_qemu(&progress, &qemu, &folder, &image("qemu")?)?)
    } else {
        let ours = Storage::File(make_disk(&folder.join("ringdisk.raw"))?);
        let ours = on_ringdisk(&progress, &qemu, &ringdisk, &folder, &ours)?;
        let theirs = Storage::File(make_disk(&folder.join("qemu.raw"))?);
        (ours, on_qemu(&progress, &qemu, &folder, &theirs)?)
    };
    print_table(&ours, &theirs);
    if accel == Accel::Tcg {
        println!(
            "\nNOTE: there is no KVM here, so QEMU translated every instruction of the guests. The guest is the \
             bottleneck:\nabsolute numbers mean nothing, and IOPS mostly show the emulated driver. `cargo xtask bench` \
             measures ringdisk."
        );
    }
    println!(
        "\nBoth guests took {} s. Logs are in {}.",
        started.elapsed().as_secs(),
        folder.display()
    );
    Ok(())
}

/// Builds the release; for a cluster, with the features of the package.
fn build(ceph: bool) -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--package", "ringdisk"]);
    if ceph {
        build.arg(packages::tcmalloc::FEATURE);
    }
    ensure!(
        build.status().context("starting cargo")?.success(),
        "ringdisk does not build"
    );
    Ok(target()?.join("release/ringdisk"))
}

/// Cargo's target folder, which contains this program.
fn target() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let target = program
        .ancestors()
        .nth(2)
        .context("this program is not in a target folder")?;
    Ok(target.to_owned())
}

/// A folder for disks and logs in the target folder, which is more often on a real disk than /tmp.
fn make_folder() -> Result<PathBuf> {
    let folder = target()?.join("demo");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

/// The storage of a disk.
enum Storage<'a> {
    File(PathBuf),
    Image(&'a Ceph, &'a str),
}

impl Storage<'_> {
    /// The argument for `ringdisk serve`.
    fn argument(&self) -> String {
        match self {
            Self::File(path) => format!("file={}", comma(path)),
            Self::Image(ceph, name) => format!("file=rbd:{POOL}/{name}{}", ceph.options()),
        }
    }

    /// The disk for QEMU itself, with an iothread named `iothread`.
    fn qemu_disk(&self) -> Disk {
        match self {
            Self::File(file) => Disk::Qemu {
                file: file.clone(),
                cache: "none",
                aio: "io_uring",
                queues: 1,
                serial: SERIAL.to_owned(),
            },
            Self::Image(ceph, name) => Disk::Printed(
                [
                    "-object",
                    "iothread,id=iothread",
                    "-blockdev",
                    &format!(
                        "driver=rbd,pool={POOL},image={name},conf={},user=vm,cache.direct=on,discard=unmap,\
                         node-name=disk",
                        comma(&ceph.conf())
                    ),
                    "-device",
                    &format!(
                        "virtio-blk-pci,drive=disk,iothread=iothread,num-queues=1,serial={SERIAL}"
                    ),
                ]
                .map(str::to_owned)
                .to_vec(),
            ),
        }
    }

    /// The allocated bytes.
    fn allocated(&self) -> Result<u64> {
        match self {
            Self::File(path) => Ok(fs::metadata(path).map_or(0, |m| m.blocks() * 512)),
            Self::Image(ceph, name) => {
                let used = ceph.rbd(&["du", "--format=json", &format!("{POOL}/{name}")])?;
                let used: serde_json::Value = serde_json::from_str(&used)?;
                let used = used["images"][0]["used_size"].as_u64();
                used.context("`rbd du` names no size")
            }
        }
    }

    /// Checks the file system on the first partition.
    fn check_file_system(&self, folder: &Path) -> Result<()> {
        match self {
            Self::File(path) => check_file_system(path),
            Self::Image(ceph, name) => {
                let copy = folder.join("exported.raw");
                let to = copy.display().to_string();
                ceph.rbd(&["export", "--no-progress", &format!("{POOL}/{name}"), &to])?;
                let checked = check_file_system(&copy);
                fs::remove_file(&copy).context("removing the copy of the image")?;
                checked
            }
        }
    }
}

/// The result of one guest.
struct GuestResult {
    name: &'static str,
    steps: Vec<String>,
    elapsed: Duration,
    /// Allocated bytes of the disk's file when the guest had filled it, and after it trimmed it.
    filled: u64,
    trimmed: u64,
    fio: Vec<Fio>,
}

/// The result of one fio job in the guest.
struct Fio {
    name: String,
    iops: f64,
    /// CPU time of the threads on the host that move the disk's data
    cpu_us_per_io: f64,
}

fn on_ringdisk(
    progress: &Progress,
    qemu: &Release,
    ringdisk: &Path,
    folder: &Path,
    storage: &Storage<'_>,
) -> Result<GuestResult> {
    let sockets = tempfile::tempdir().context("making a folder for the socket")?; // its path must be short
    let socket = sockets.path().join("demo.sock");
    let disk = format!(
        "{},socket={},serial={SERIAL},queues=1",
        storage.argument(),
        comma(&socket)
    );
    progress.say(&format!(
        "ringdisk serve {}",
        disk.replace(&*root().to_string_lossy(), "")
    ));
    let mut server = Server::ringdisk(ringdisk, &[disk]).context("starting ringdisk")?;

    let disk = Disk::VhostUser {
        socket: socket.clone(),
        queues: 1,
        queue_size: 256,
    };
    let pid = server.pid();
    let cpu = |_| Ok(Duration::from_secs_f64(Usage::of(pid)?.ran_s()));
    let result = run_guest(progress, qemu, "ringdisk", disk, storage, folder, &cpu)?;

    let ended = server.terminate().context("stopping ringdisk")?;
    fs::write(folder.join("ringdisk.log"), server.log()).context("writing ringdisk.log")?;
    ensure!(
        ended.success(),
        "ringdisk ended with {ended} after SIGTERM:\n{}",
        server.log()
    );
    ensure!(
        !socket.exists(),
        "ringdisk did not remove its socket {}",
        socket.display()
    );
    progress.say("ringdisk has stopped after SIGTERM and removed its socket");
    Ok(result)
}

fn on_qemu(
    progress: &Progress,
    qemu: &Release,
    folder: &Path,
    storage: &Storage<'_>,
) -> Result<GuestResult> {
    let disk = storage.qemu_disk();
    // Count the iothread and its workers, but neither the vCPUs nor the main loop, which relays interrupts in both cases.
    let cpu = |qemu| cpu::threads_ran(qemu, &["CPU ", "qemu-system"]);
    run_guest(progress, qemu, "QEMU", disk, storage, folder, &cpu)
}

/// Boots a guest with this disk, and runs the steps of demo.sh and fio in it.
fn run_guest(
    progress: &Progress,
    qemu: &Release,
    name: &'static str,
    disk: Disk,
    storage: &Storage<'_>,
    folder: &Path,
    cpu_time: &dyn Fn(u32) -> Result<Duration>,
) -> Result<GuestResult> {
    progress.say(&format!("{name}: booting a guest"));
    let mut result = GuestResult {
        name,
        steps: Vec::new(),
        elapsed: Duration::ZERO,
        filled: 0,
        trimmed: 0,
        fio: Vec::new(),
    };
    let mut cpu_before = Duration::ZERO;
    let mut on_line = |line: &str, qemu: u32| {
        let cpu = cpu_time(qemu).unwrap_or_default();
        if let Some(step) = line.strip_prefix("ok ") {
            progress.say(&format!("{name}: {step}"));
            result.steps.push(step.to_owned());
            match step {
                "fill" => result.filled = storage.allocated().unwrap_or(0),
                "discard" => result.trimmed = storage.allocated().unwrap_or(u64::MAX),
                _ => {}
            }
        } else if line.starts_with("fio-start ") {
            cpu_before = cpu;
        } else if let Some(fio) = line.strip_prefix("fio-end ") {
            result
                .fio
                .extend(Fio::parse(fio, cpu.saturating_sub(cpu_before)));
        }
    };
    let script = format!(
        "{}{}",
        vm::disk_lifecycle(SERIAL, BLOCK_SIZE),
        include_str!("demo.sh")
    );
    let guest = Vm::new(folder.join(name.to_lowercase()));
    let guest = guest.qemu(qemu).fio().disk(disk);
    let output = guest
        .run_watched(&script, GUEST_LIMIT, &mut on_line)?
        .checked()?;
    result.elapsed = output.elapsed;
    ensure!(
        result.trimmed < result.filled / 2,
        "{name}: the guest trimmed its disk, but {} of {} allocated bytes are left",
        result.trimmed,
        result.filled
    );
    storage.check_file_system(folder)?;
    progress.say(&format!(
        "{name}: the disk has holes where the guest trimmed; e2fsck on the host finds no error"
    ));
    Ok(result)
}

impl Fio {
    /// From fio's terse output, version 3: field 8 is the reads' IOPS, 9 their runtime in ms; 49 and 50 the writes'.
    fn parse(result: &str, cpu: Duration) -> Option<Fio> {
        let (name, terse) = result.split_once(' ')?;
        let fields: Vec<&str> = terse.split(';').collect();
        let number = |field: usize| fields.get(field - 1)?.parse::<f64>().ok();
        let (reads, writes) = ((number(8)?, number(9)?), (number(49)?, number(50)?));
        let (iops, runtime_ms) = if reads.0 > 0.0 { reads } else { writes };
        let cpu_us_per_io = cpu.as_secs_f64() * 1e6 / (iops * runtime_ms / 1e3);
        Some(Fio {
            name: name.to_owned(),
            iops,
            cpu_us_per_io,
        })
    }
}

fn print_table(ours: &GuestResult, theirs: &GuestResult) {
    let row = |what: &str, of: &dyn Fn(&GuestResult) -> String| {
        println!("{what:<34}{:>16}{:>16}", of(ours), of(theirs))
    };
    println!();
    row("", &|result| result.name.to_owned());
    row("steps that passed", &|result| {
        result.steps.len().to_string()
    });
    row("allocated when full, MiB", &|result| {
        (result.filled >> 20).to_string()
    });
    row("allocated after fstrim, MiB", &|result| {
        (result.trimmed >> 20).to_string()
    });
    for (index, fio) in ours.fio.iter().enumerate() {
        let value = |result: &GuestResult, of: &dyn Fn(&Fio) -> String| {
            result.fio.get(index).map_or("-".into(), of)
        };
        row(&format!("{}: IOPS in the guest", fio.name), &|result| {
            value(result, &|fio| format!("{:.0}", fio.iops))
        });
        row("    host CPU per I/O, µs", &|result| {
            value(result, &|fio| format!("{:.1}", fio.cpu_us_per_io))
        });
    }
    row("guest's whole run, s", &|result| {
        format!("{:.1}", result.elapsed.as_secs_f64())
    });
    println!(
        "\nHost CPU: of the ringdisk process; of QEMU's iothread and its workers. QEMU: cache=none, aio=io_uring."
    );
}

fn make_disk(path: &Path) -> Result<PathBuf> {
    let file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    file.set_len(DISK_BYTES)
        .with_context(|| format!("setting the length of {}", path.display()))?;
    Ok(path.to_owned())
}

/// Checks the file system on the first partition of an image file.
fn check_file_system(file: &Path) -> Result<()> {
    let e2fsck = vm::find_program("e2fsck").context("e2fsck is missing")?;
    let output = Command::new(e2fsck)
        .arg("-fn")
        .arg(format!("{}?offset={}", file.display(), 1 << 20))
        .output()?;
    ensure!(
        output.status.success(),
        "e2fsck: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

/// A comma in a value is doubled, as in QEMU.
fn comma(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Prints lines with the time since the start.
struct Progress(Instant);

impl Progress {
    fn say(&self, what: &str) {
        println!("[{:6.1} s] {what}", self.0.elapsed().as_secs_f64());
    }
}
