//! Real Linux guests in QEMU, for tests and the demo.
//!
//! A guest is Debian's cloud kernel and an initramfs built on the spot. It runs one shell script and powers off; what
//! the script prints comes back line by line over a second serial port. A guest always has a time limit, and is
//! killed when the limit passes, when its [`Vm::run`] unwinds, and when the process that started it dies.

mod boot;
mod moving;
mod qmp;
mod system;

pub use boot::{install_loader, missing_loader};
pub use initramfs::{Kernel, cache_dir, find_program, kernel_cache};
pub use moving::{Moved, run_moving};
pub use qmp::Qmp;
pub use system::install;

use crate::qemu::Release;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What kernels are told. no_timer_check: on a busy host without KVM, timers come later than the kernel has patience for.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 mitigations=off nokaslr no_timer_check quiet loglevel=5";

/// A guest to be: memory, processors, disks, and the folder for its logs.
#[derive(Clone, Debug)]
pub struct Vm {
    folder: PathBuf,
    memory_mib: u32,
    cpus: u32,
    disks: Vec<Disk>,
    fio: bool,
    root: Option<String>,
    loader: bool,
    may_reboot: bool,
    packed: bool,
    hugepages: bool,
    qmp: Option<PathBuf>,
    more_memory: bool,
    qemu: PathBuf,
    machine: &'static str,
    cpu_model: Option<&'static str>,
    ovmf: Option<[PathBuf; 2]>,
}

/// A virtio-blk disk of a guest.
#[derive(Clone, Debug)]
pub enum Disk {
    /// Served by another process over vhost-user.
    VhostUser {
        /// Where that process listens.
        socket: PathBuf,
        /// Virtqueues, at least 1.
        queues: u16,
        /// Entries of each virtqueue.
        queue_size: u16,
    },
    /// The `-chardev` and `-device` arguments that `ringdisk serve` printed to be pasted.
    Pasted(Vec<String>),
    /// QEMU's own virtio-blk on a raw file, with an iothread named `iothread`.
    Qemu {
        /// The raw file.
        file: PathBuf,
        /// QEMU's `cache=`.
        cache: &'static str,
        /// QEMU's `aio=`.
        aio: &'static str,
        /// Virtqueues, at least 1.
        queues: u16,
        /// What the guest reads as the disk's serial, at most 20 bytes.
        serial: String,
    },
}

/// What a guest boots from, where no boot loader is.
#[derive(Debug)]
pub struct BootFiles {
    /// The kernel's image.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initrd: PathBuf,
    /// What it is told.
    pub command_line: &'static str,
}

/// What a guest did.
#[derive(Debug)]
pub struct Output {
    /// What the script printed.
    pub lines: Vec<String>,
    /// How the script ended; 0 is success.
    pub status: i32,
    /// The guest's kernel messages.
    pub console: PathBuf,
    /// From QEMU's start to its end.
    pub elapsed: Duration,
}

impl Vm {
    /// A guest of 512 MiB and one processor, which writes its logs into `folder` (made if need be).
    pub fn new(folder: impl Into<PathBuf>) -> Vm {
        Vm {
            folder: folder.into(),
            memory_mib: 512,
            cpus: 1,
            disks: Vec::new(),
            fio: false,
            root: None,
            loader: false,
            may_reboot: false,
            packed: false,
            hugepages: false,
            qmp: None,
            more_memory: false,
            qemu: "qemu-system-x86_64".into(),
            machine: "q35",
            cpu_model: None,
            ovmf: None,
        }
    }

    /// Sets the memory, in MiB.
    #[must_use]
    pub fn memory_mib(self, memory_mib: u32) -> Vm {
        Vm { memory_mib, ..self }
    }

    /// Sets the number of processors.
    #[must_use]
    pub fn cpus(self, cpus: u32) -> Vm {
        Vm { cpus, ..self }
    }

    /// Adds a disk; they appear as vda, vdb, … in this order.
    #[must_use]
    pub fn disk(mut self, disk: Disk) -> Vm {
        self.disks.push(disk);
        self
    }

    /// Puts `fio` into the guest. Its libraries weigh 80 MB, so it's there only on demand.
    #[must_use]
    pub fn fio(self) -> Vm {
        Vm { fio: true, ..self }
    }

    /// Lets the guest boot from the disk with this serial, on which a system is [`install`]ed: all but the kernel comes
    /// from there, and its script is run instead of the one that [`Vm::run`] is given.
    #[must_use]
    pub fn root(self, serial: &str) -> Vm {
        Vm {
            root: Some(serial.into()),
            ..self
        }
    }

    /// Lets the firmware boot from a disk, on which a boot loader is [`install_loader`]ed, and with it all else:
    /// its script is run instead of the one that [`Vm::run`] is given.
    #[must_use]
    pub fn boot_loader(self) -> Vm {
        Vm {
            loader: true,
            ..self
        }
    }

    /// Lets the script `reboot -f`: the script is run again, in the same QEMU. Otherwise QEMU ends at the reboot.
    #[must_use]
    pub fn may_reboot(self) -> Vm {
        Vm {
            may_reboot: true,
            ..self
        }
    }

    /// Runs the guest on the QEMU of this release; otherwise, it is the one that is installed.
    #[must_use]
    pub fn qemu(self, release: &Release) -> Vm {
        Vm {
            qemu: release.program("qemu-system-x86_64"),
            ..self
        }
    }

    /// Gives disks that are served over vhost-user packed virtqueues (QEMU's `packed=on`).
    #[must_use]
    pub fn packed(self) -> Vm {
        Vm {
            packed: true,
            ..self
        }
    }

    /// Puts the guest's memory into huge pages, which must be reserved.
    #[must_use]
    pub fn hugepages(self) -> Vm {
        Vm {
            hugepages: true,
            ..self
        }
    }

    /// Lets [`Qmp`] connect to QEMU at `socket`.
    #[must_use]
    pub fn qmp(self, socket: impl Into<PathBuf>) -> Vm {
        Vm {
            qmp: Some(socket.into()),
            ..self
        }
    }

    /// As [`Vm::qmp`], and lets it plug memory in while the guest runs, up to 2 GiB in all.
    #[must_use]
    pub fn more_memory_by(self, socket: impl Into<PathBuf>) -> Vm {
        Vm {
            more_memory: true,
            ..self.qmp(socket)
        }
    }

    /// Fixes what a guest that moves to another version of QEMU must find there: a versioned machine, such as
    /// `pc-q35-7.2`, and a processor.
    #[must_use]
    pub fn hardware(self, machine: &'static str, cpu_model: &'static str) -> Vm {
        Vm {
            machine,
            cpu_model: Some(cpu_model),
            ..self
        }
    }

    /// Boots by UEFI: by this code, with a copy of these variables (see [`Release::ovmf`]). Otherwise it is SeaBIOS.
    #[must_use]
    pub fn uefi(self, ovmf: [PathBuf; 2]) -> Vm {
        Vm {
            ovmf: Some(ovmf),
            ..self
        }
    }

    /// Boots the guest, runs `script` in it with `sh -eu`, and waits for it to power off.
    ///
    /// A script may call `disk SERIAL`, which prints the device that has this serial.
    ///
    /// # Errors
    /// If QEMU fails, or the guest has not powered off after `limit` or did so without running the script to its end.
    /// The last console lines are part of the error. A script that ends with a status other than 0 is no error here.
    pub fn run(&self, script: &str, limit: Duration) -> Result<Output> {
        self.run_watched(script, limit, &mut |_, _| {})
    }

    /// [`Vm::run`] that calls `on_line(line, QEMU's process id)` as soon as the script prints a line.
    ///
    /// # Errors
    /// As [`Vm::run`].
    pub fn run_watched(
        &self,
        script: &str,
        limit: Duration,
        on_line: &mut dyn FnMut(&str, u32),
    ) -> Result<Output> {
        self.run_with(accel()?, script, limit, on_line)
    }

    fn run_with(
        &self,
        accel: Accel,
        script: &str,
        limit: Duration,
        on_line: &mut dyn FnMut(&str, u32),
    ) -> Result<Output> {
        let boot = self.boot_files(script)?;

        let started = Instant::now();
        let mut lines = Lines::of(self.folder.join("results.log"))?;
        let mut guest = self.start(accel, &boot, None)?;
        let ended = loop {
            let ended = guest.0.try_wait().context("waiting for QEMU")?;
            lines.read(&mut |line| on_line(line, guest.0.id()))?;
            if started.elapsed() > limit {
                break ended;
            }
            if ended.is_some() {
                if !lines.all.is_empty() || !translation_failed(&self.folder) {
                    break ended;
                }
                println!("QEMU's translation failed while the guest booted; it is started again");
                guest = self.start(accel, &boot, None)?;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        drop(guest);
        fs::remove_file(&boot.initrd).ok(); // 5 to 90 MB that nobody reads again
        self.output(ended, lines, started, accel, limit)
    }

    /// Makes what another program needs to boot the guest, in its folder. Of serial ports, the first is its console, and
    /// the second has the lines that `script` prints, then `vm-exit: STATUS`.
    ///
    /// # Errors
    /// Something is [`missing`].
    pub fn boot_files(&self, script: &str) -> Result<BootFiles> {
        fs::create_dir_all(&self.folder)
            .with_context(|| format!("making {}", self.folder.display()))?;
        let kernel = Kernel::cached()?;
        let initrd = self.folder.join("initramfs.cpio");
        let start = match &self.root {
            Some(serial) => system::Start::Disk(serial),
            None => system::Start::Script(script),
        };
        system::write(&initrd, &kernel, self.fio, start)?;
        Ok(BootFiles {
            kernel: kernel.image,
            initrd,
            command_line: COMMAND_LINE,
        })
    }

    /// What a guest did that has ended, or not by its limit.
    fn output(
        &self,
        ended: Option<ExitStatus>,
        mut lines: Lines,
        started: Instant,
        accel: Accel,
        limit: Duration,
    ) -> Result<Output> {
        let Some(ended) = ended else {
            bail!(
                "the guest was not done after {} s ({accel:?}); QEMU was killed{}",
                limit.as_secs(),
                self.last_words()
            );
        };
        ensure!(
            ended.success(),
            "QEMU failed ({ended}){}",
            self.last_words()
        );
        let status = lines
            .all
            .pop()
            .and_then(|last| last.strip_prefix("vm-exit: ")?.parse().ok())
            .ok_or_else(|| {
                anyhow!(
                    "the guest stopped before its script ended{}",
                    self.last_words()
                )
            })?;
        Ok(Output {
            lines: lines.all,
            status,
            console: self.console(),
            elapsed: started.elapsed(),
        })
    }

    /// Starts QEMU; with `incoming`, for a guest that comes from another one over this socket.
    fn start(&self, accel: Accel, boot: &BootFiles, incoming: Option<&Path>) -> Result<Guest> {
        let memory = self.memory_mib;
        let slots = if self.more_memory {
            ",slots=4,maxmem=2G"
        } else {
            ""
        };
        let huge = if self.hugepages { ",hugetlb=on" } else { "" };
        // setpriv: a guest must not outlive a test run that is killed.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"])
            .arg(&self.qemu)
            .args(["-name", "ringdisk-guest,debug-threads=on"])
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-monitor",
                "none",
            ])
            .args([
                "-machine",
                &format!("{},memory-backend=mem", self.machine),
                "-m",
                &format!("{memory}M{slots}"),
            ])
            .args([
                "-object",
                &format!("memory-backend-memfd,id=mem,size={memory}M,share=on{huge}"),
            ])
            .args(["-smp", &self.cpus.to_string()])
            .args(["-accel", accel.option()])
            .args(["-cpu", self.cpu_model.unwrap_or(accel.cpu_model())])
            .args(log_port("console", &self.console(), incoming))
            .args(log_port(
                "results",
                &self.folder.join("results.log"),
                incoming,
            ));
        if !self.loader {
            qemu.arg("-kernel").arg(&boot.kernel);
            qemu.arg("-initrd").arg(&boot.initrd);
            qemu.args(["-append", boot.command_line]);
        }
        if let Some([code, variables]) = &self.ovmf {
            let own = self.folder.join("variables.fd");
            fs::copy(variables, &own)
                .with_context(|| format!("copying {}", variables.display()))?;
            let flash = |file: &Path, read_only| {
                format!(
                    "if=pflash,format=raw,readonly={read_only},file={}",
                    file.display()
                )
            };
            qemu.args(["-drive", &flash(code, "on"), "-drive", &flash(&own, "off")]);
        }
        if let Some(socket) = incoming {
            qemu.args(["-incoming", &format!("unix:{}", socket.display())]);
        }
        if !self.may_reboot {
            qemu.arg("-no-reboot");
        }
        if let Some(socket) = &self.qmp {
            let listen = format!("unix:{},server=on,wait=off", socket.display());
            qemu.args(["-qmp", &listen]);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let arguments = disk.arguments(index).into_iter();
            qemu.args(arguments.map(|argument| {
                match self.packed && argument.starts_with("vhost-user-blk-pci,") {
                    true => argument + ",packed=on",
                    false => argument,
                }
            }));
        }
        let log = File::create(self.folder.join("qemu.log")).context("making qemu.log")?;
        qemu.stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(Guest(qemu.spawn().context(
            "starting qemu-system-x86_64; `cargo xtask install` installs it",
        )?))
    }

    fn console(&self) -> PathBuf {
        self.folder.join("console.log")
    }

    /// What QEMU and the guest's kernel said last, for an error.
    fn last_words(&self) -> String {
        let read = |name: &str| {
            let bytes = fs::read(self.folder.join(name)).unwrap_or_default();
            tail(&String::from_utf8_lossy(&bytes), 50) // a kernel's panic takes 40
        };
        format!(
            "\n--- QEMU said:\n{}\n--- the script said last:\n{}\n--- the console's last lines, of {}:\n{}",
            read("qemu.log"),
            read("results.log"),
            self.console().display(),
            read("console.log"),
        )
    }
}

/// Whether the QEMU of the guest in this folder has ended by a mistake of its own: without KVM, one processor of a guest
/// may look up an address while another one changes the memory map, as at boot and where devices come and go (QEMU's
/// issue 1921, seen in 10.0).
pub fn translation_failed(folder: &Path) -> bool {
    let said = fs::read(folder.join("qemu.log")).unwrap_or_default();
    String::from_utf8_lossy(&said).contains("iotlb_to_section: Assertion")
}

impl Output {
    /// Takes a script that failed for an error.
    ///
    /// # Errors
    /// If the script ended with a status other than 0; with its last lines.
    pub fn checked(self) -> Result<Output> {
        ensure!(
            self.status == 0,
            "the script in the guest ended with status {}; its last lines (the console is in {}):\n{}",
            self.status,
            self.console.display(),
            tail(&self.lines.join("\n"), 20),
        );
        Ok(self)
    }
}

impl Disk {
    fn arguments(&self, index: usize) -> Vec<String> {
        match self {
            Disk::VhostUser {
                socket,
                queues,
                queue_size,
            } => vec![
                "-chardev".into(),
                format!("socket,id=disk{index},path={}", socket.display()),
                "-device".into(),
                format!(
                    "vhost-user-blk-pci,chardev=disk{index},num-queues={queues},queue-size={queue_size}"
                ),
            ],
            // The guest's memory and machine are this module's matter, the rest is taken as printed.
            Disk::Pasted(arguments) => arguments
                .chunks(2)
                // Memory is the guest's own affair; an iothread is the disk's.
                .filter(|pair| match pair[0].as_str() {
                    "-object" => pair[1].starts_with("iothread,"),
                    option => ["-chardev", "-device", "-blockdev"].contains(&option),
                })
                .flatten()
                .cloned()
                .collect(),
            Disk::Qemu {
                file,
                cache,
                aio,
                queues,
                serial,
            } => vec![
                "-object".into(),
                format!("iothread,id=iothread{index}"),
                "-drive".into(),
                format!(
                    "if=none,id=disk{index},format=raw,file={},cache={cache},aio={aio},discard=unmap",
                    file.display()
                ),
                "-device".into(),
                format!(
                    "virtio-blk-pci,drive=disk{index},iothread=iothread{index},num-queues={queues},serial={serial}"
                ),
            ],
        }
    }
}

/// A serial port whose output goes to a file; to its end, if a guest comes from elsewhere that has written to it.
fn log_port(name: &str, file: &Path, incoming: Option<&Path>) -> [String; 4] {
    let append = if incoming.is_some() { "on" } else { "off" };
    [
        "-chardev".into(),
        format!("file,id={name},path={},append={append}", file.display()),
        "-serial".into(),
        format!("chardev:{name}"),
    ]
}

/// A script that leads the disk with this serial through a life: it's partitioned, formatted with blocks of
/// `block_size` bytes, filled, trimmed, and what was copied to it is verified after a remount. It prints `ok STEP` after
/// each step. The file system stays mounted on `/mnt`; it's on the first partition, at 1 MiB.
pub fn disk_life(serial: &str, block_size: u32) -> String {
    let life = include_str!("vm/life.sh");
    format!("device=$(disk {serial})\nblock_size={block_size}\n{life}")
}

/// Says what is missing for guests to run here, and what to do about it.
pub fn missing(fio: bool) -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("guests are x86-64 only".into());
    }
    let mut programs = vec![
        "setpriv",
        "ldd",
        "qemu-system-x86_64",
        "busybox",
        "mkfs.ext4",
        "e2fsck",
        "sfdisk",
    ];
    programs.extend(fio.then_some("fio"));
    let mut missing: Vec<String> = Vec::new();
    missing.extend(
        programs
            .into_iter()
            .filter(|name| find_program(name).is_none())
            .map(String::from),
    );
    missing.extend(Kernel::cached().err().map(|_| "a guest kernel".into()));
    (!missing.is_empty()).then(|| {
        format!(
            "{} missing; `cargo xtask install` installs it",
            missing.join(", ")
        )
    })
}

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the processor.
    Kvm,
    /// Translated: everything works, 10 to 50 times slower, so that absolute speeds mean nothing.
    Tcg,
}

impl Accel {
    fn option(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg,thread=multi",
        }
    }

    fn cpu_model(self) -> &'static str {
        match self {
            Accel::Kvm => "host",
            Accel::Tcg => "max",
        }
    }
}

/// The best accelerator that really boots a guest here.
///
/// A `/dev/kvm` that opens proves little: some nested hypervisors offer one on which a stock kernel never boots. So it
/// is tried once, with a short limit, and the answer is kept until the host boots again.
///
/// # Errors
/// If the answer can't be kept.
pub fn accel() -> Result<Accel> {
    static ACCEL: OnceLock<Result<Accel, String>> = OnceLock::new();
    ACCEL
        .get_or_init(|| find_accel().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!(error))
}

fn find_accel() -> Result<Accel> {
    if File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return Ok(Accel::Tcg);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .context("reading the host's boot id")?;
    let answer = cache_dir().join(format!("kvm-{}", boot.trim()));
    if let Ok(answer) = fs::read_to_string(&answer) {
        return Ok(if answer.starts_with("works") {
            Accel::Kvm
        } else {
            Accel::Tcg
        });
    }
    Kernel::cached()?; // without a kernel the trial would say no for the wrong reason
    fs::create_dir_all(cache_dir()).with_context(|| format!("making {}", cache_dir().display()))?;
    let folder = tempfile::tempdir().context("making a folder for the KVM trial")?;
    let trial = Vm::new(folder.path()).run_with(Accel::Kvm, "true", KVM_TRIAL, &mut |_, _| {});
    let (accel, text) = match trial {
        Ok(_) => (Accel::Kvm, "works\n".into()),
        Err(error) => (Accel::Tcg, format!("does not work: {error:#}\n")),
    };
    fs::write(&answer, text).with_context(|| format!("writing {}", answer.display()))?;
    Ok(accel)
}

/// A guest boots in 2 s under a KVM that works; a host may be busy, and the one-time cost must stay bearable.
const KVM_TRIAL: Duration = Duration::from_secs(20);

/// The CPU time, user and system, of the living threads of process `pid`, without those whose names start with one of
/// `without`.
///
/// # Errors
/// If the process is gone.
pub fn cpu_time(pid: u32, without: &[&str]) -> Result<Duration> {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let mut total_ns = 0;
    for task in fs::read_dir(&tasks)
        .with_context(|| format!("listing {}", tasks.display()))?
        .flatten()
    {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if !without.iter().any(|start| name.starts_with(start)) {
            // In ns; stat has ticks of 10 ms, and misses half of what a thread does that often sleeps.
            let schedstat = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let run_ns = schedstat
                .split_whitespace()
                .next()
                .and_then(|ns| ns.parse::<u64>().ok());
            total_ns += run_ns.unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(total_ns))
}

/// A running QEMU that never outlives its owner.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.kill().ok(); // fails only if it has ended by itself
        self.0.wait().ok();
    }
}

/// The lines of a file that another process writes.
struct Lines {
    file: File,
    partial: Vec<u8>,
    all: Vec<String>,
}

impl Lines {
    fn of(path: PathBuf) -> Result<Lines> {
        File::create(&path).with_context(|| format!("making {}", path.display()))?;
        let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Lines {
            file,
            partial: Vec::new(),
            all: Vec::new(),
        })
    }

    fn read(&mut self, on_line: &mut dyn FnMut(&str)) -> Result<()> {
        self.file
            .read_to_end(&mut self.partial)
            .context("reading the guest's results")?;
        while let Some(end) = self.partial.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            on_line(&line);
            self.all.push(line);
        }
        Ok(())
    }
}

fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// The script of a guest with four writers that read back what they wrote, past the guest's page cache, while it prints
/// a word so many times, with so many seconds between.
pub fn writers(word: &str, times: u32, seconds: u32) -> String {
    format!(
        "head -c 1048576 /dev/urandom >/tmp/data
         writer() {{
             until [ -e /tmp/enough ]; do
                 dd if=/tmp/data of=/dev/vda bs=64k seek=$(($1 * 64)) oflag=direct conv=notrunc 2>/tmp/dd.$1
                 dd if=/dev/vda bs=64k skip=$(($1 * 64)) count=16 iflag=direct 2>/tmp/dd.$1 | cmp - /tmp/data
                 echo >>/tmp/rounds
             done
         }}
         writers=
         for i in 1 2 3 4; do writer $i & writers=\"$writers $!\"; done
         for i in $(seq {times}); do
             sleep {seconds}
             echo {word}
         done
         sleep 1
         touch /tmp/enough
         for writer in $writers; do wait $writer; done
         ! dmesg | grep -i 'I/O error'
         [ $(wc -l </tmp/rounds) -ge 4 ]"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_fails_says_so() {
        if let Some(missing) = missing(false) {
            println!("skipped: a_guest_that_fails_says_so: {missing}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let vm = Vm::new(folder.path());
        let run = |script, limit_s| vm.run(script, Duration::from_secs(limit_s));

        let failed = run("echo before; false; echo after", 60).unwrap();
        assert_eq!(
            (failed.lines.join(" ").as_str(), failed.status),
            ("before", 1)
        );

        let panicked = run("echo c >/proc/sysrq-trigger", 60)
            .unwrap_err()
            .to_string();
        assert!(
            panicked.contains("stopped before its script ended"),
            "{panicked}"
        );
        assert!(panicked.contains("Kernel panic"), "{panicked}");

        let mut qemu = 0;
        let mut on_line = |_: &str, pid| qemu = pid;
        let hung = vm.run_watched(
            "echo waiting; sleep 1000",
            Duration::from_secs(10),
            &mut on_line,
        );
        let hung = hung.unwrap_err().to_string();
        assert!(
            hung.contains("was killed") && hung.contains("waiting"),
            "{hung}"
        );
        assert!(qemu > 0 && !Path::new(&format!("/proc/{qemu}")).exists());
    }
}
