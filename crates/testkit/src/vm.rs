//! Real Linux guests in QEMU, for tests and the demo.
//!
//! A guest consists of Debian's cloud kernel and an initramfs that is built for it. It runs one shell script and powers
//! off; a second serial port returns the script's output line by line. A guest always has a time limit. It is killed
//! when the limit passes, when its [`Vm::run`] unwinds, and when the process that started it dies.

mod boot;
mod disk;
mod host;
mod migration;
mod scripts;
mod system;

pub use boot::{install_loader, missing_loader};
pub use disk::Disk;
pub use harness::initramfs::{Kernel, kernel_cache};
pub use harness::paths::{cache_dir, find_program};
pub use harness::qemu::Accel;
pub use harness::qmp::Qmp;
pub use host::{accel, missing};
pub use migration::{MigrationTimes, run_migrating};
pub use scripts::{disk_lifecycle, verifying_writers};
pub use system::{HOST_OF_NETWORK, install};

use crate::qemu::Release;
use anyhow::{Context, Result, anyhow, bail, ensure};
use harness::process::{Process, guarded, last_lines, tail};
use harness::qemu::{self, Machine};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use system::Software;

/// The kernel's command line. no_timer_check: on a busy host without KVM, timers fire later than the kernel's check
/// allows.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 mitigations=off nokaslr no_timer_check quiet loglevel=5";

/// How often the guest's console is searched for reports of stalls.
const TIMER_CHECK: Duration = Duration::from_secs(2);

/// The configuration of a guest: memory, processors, disks, and the folder for its logs.
#[derive(Clone, Debug)]
pub struct Vm {
    folder: PathBuf,
    memory_mib: u32,
    cpus: u32,
    disks: Vec<Disk>,
    software: Software,
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

/// The files from which a guest boots without a boot loader.
#[derive(Debug)]
pub struct BootFiles {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The kernel's command line.
    pub command_line: &'static str,
}

/// The result of a guest's run.
#[derive(Debug)]
pub struct Output {
    /// The lines that the script printed.
    pub lines: Vec<String>,
    /// The script's exit status; 0 is success.
    pub status: i32,
    /// The file with the guest's kernel messages.
    pub console: PathBuf,
    /// The time from QEMU's start to its end.
    pub elapsed: Duration,
}

impl Vm {
    /// A guest with 512 MiB and one processor. It writes its logs to `folder`, which is created if necessary.
    pub fn new(folder: impl Into<PathBuf>) -> Vm {
        Vm {
            folder: folder.into(),
            memory_mib: 512,
            cpus: 1,
            disks: Vec::new(),
            software: Software::NONE,
            root: None,
            loader: false,
            may_reboot: false,
            packed: false,
            hugepages: false,
            qmp: None,
            more_memory: false,
            qemu: qemu::SYSTEM.into(),
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

    /// Adds a disk. Disks appear as vda, vdb, … in this order.
    #[must_use]
    pub fn disk(mut self, disk: Disk) -> Vm {
        self.disks.push(disk);
        self
    }

    /// Adds `fio` to the guest. Its libraries have 80 MB, so it is optional.
    #[must_use]
    pub fn fio(mut self) -> Vm {
        self.software.fio = true;
        self
    }

    /// Adds the kernel's NBD client with `nbd-client`, and a network on which the host is [`HOST_OF_NETWORK`].
    #[must_use]
    pub fn nbd_client(mut self) -> Vm {
        self.software.nbd_client = true;
        self
    }

    /// Lets the guest boot from the disk with this serial, on which [`install`] has put a system. Everything but the
    /// kernel comes from that disk, and its script is run instead of the one that [`Vm::run`] is given.
    #[must_use]
    pub fn root(self, serial: &str) -> Vm {
        Vm {
            root: Some(serial.into()),
            ..self
        }
    }

    /// Lets the firmware boot from a disk on which [`install_loader`] has put a boot loader. Everything comes from that
    /// disk, and its script is run instead of the one that [`Vm::run`] is given.
    #[must_use]
    pub fn boot_loader(self) -> Vm {
        Vm {
            loader: true,
            ..self
        }
    }

    /// Allows the script to `reboot -f`: the script is then run again, in the same QEMU. Otherwise QEMU ends at the
    /// reboot.
    #[must_use]
    pub fn may_reboot(self) -> Vm {
        Vm {
            may_reboot: true,
            ..self
        }
    }

    /// Runs the guest on the QEMU of this release instead of the installed one.
    #[must_use]
    pub fn qemu(self, release: &Release) -> Vm {
        Vm {
            qemu: release.program("qemu-system-x86_64"),
            ..self
        }
    }

    /// Uses packed virtqueues (QEMU's `packed=on`) for disks that are served over vhost-user.
    #[must_use]
    pub fn packed(self) -> Vm {
        Vm {
            packed: true,
            ..self
        }
    }

    /// Puts the guest's memory in huge pages, which must be reserved.
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

    /// As [`Vm::qmp`], and allows memory to be plugged in while the guest runs, up to 2 GiB in all.
    #[must_use]
    pub fn hotplug_memory_by(self, socket: impl Into<PathBuf>) -> Vm {
        Vm {
            more_memory: true,
            ..self.qmp(socket)
        }
    }

    /// Fixes the hardware for a guest that migrates to another version of QEMU: a versioned machine, such as
    /// `pc-q35-7.2`, and a processor.
    #[must_use]
    pub fn hardware(self, machine: &'static str, cpu_model: &'static str) -> Vm {
        Vm {
            machine,
            cpu_model: Some(cpu_model),
            ..self
        }
    }

    /// Boots with UEFI, from this code and a copy of these variables (see [`Release::ovmf`]), instead of SeaBIOS.
    #[must_use]
    pub fn uefi(self, ovmf: [PathBuf; 2]) -> Vm {
        Vm {
            ovmf: Some(ovmf),
            ..self
        }
    }

    /// Boots the guest, runs `script` in it with `sh -eu`, and waits for it to power off.
    ///
    /// A script may call `disk SERIAL`, which prints the device with this serial.
    ///
    /// # Errors
    /// QEMU fails, or the guest does not power off within `limit`, or powers off before the end of the script. The
    /// error contains the last console lines. A script that ends with a status other than 0 is not an error here.
    pub fn run(&self, script: &str, limit: Duration) -> Result<Output> {
        self.run_watched(script, limit, &mut |_, _| {})
    }

    /// As [`Vm::run`]; calls `on_line(line, QEMU's process id)` as soon as the script prints a line.
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
        let mut timer_check = started;
        let ended = loop {
            let ended = guest.ended()?;
            lines.read(&mut |line| on_line(line, guest.pid()))?;
            if started.elapsed() > limit {
                break ended;
            }
            if ended.is_none() && timer_check.elapsed() > TIMER_CHECK {
                timer_check = Instant::now();
                ensure!(
                    !timer_failed(&self.folder),
                    "a timer of the guest no longer expires; QEMU was killed{}",
                    self.last_output()
                );
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
        fs::remove_file(&boot.initrd).ok(); // 5 to 90 MB that nothing reads again
        self.output(ended, lines, started, accel, limit)
    }

    /// Makes the files that another program needs to boot the guest, in the guest's folder. The first serial port is
    /// the guest's console; the second one receives the lines that `script` prints, then `vm-exit: STATUS`.
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
        system::write(&initrd, &kernel, self.software, start)?;
        Ok(BootFiles {
            kernel: kernel.image,
            initrd,
            command_line: COMMAND_LINE,
        })
    }

    /// The result of a guest that has ended, or has not ended within its limit.
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
                self.last_output()
            );
        };
        ensure!(
            ended.success(),
            "QEMU failed ({ended}){}",
            self.last_output()
        );
        let status = lines
            .all
            .pop()
            .and_then(|last| last.strip_prefix("vm-exit: ")?.parse().ok())
            .ok_or_else(|| {
                anyhow!(
                    "the guest stopped before its script ended{}",
                    self.last_output()
                )
            })?;
        Ok(Output {
            lines: lines.all,
            status,
            console: self.console(),
            elapsed: started.elapsed(),
        })
    }

    /// Starts QEMU; with `incoming`, for a guest that migrates from another QEMU over this socket.
    fn start(&self, accel: Accel, boot: &BootFiles, incoming: Option<&Path>) -> Result<Process> {
        let machine = Machine {
            name: "ringdisk-guest",
            kind: self.machine,
            memory_mib: self.memory_mib.into(),
            more_memory: self.more_memory,
            hugepages: self.hugepages,
            cpus: self.cpus,
            cpu_model: self.cpu_model,
            accel,
        };
        let mut qemu = guarded(&self.qemu);
        qemu.args(machine.arguments())
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
        if self.software.nbd_client {
            qemu.args(system::NETWORK);
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
        Process::start("QEMU", &mut qemu, &self.folder.join("qemu.log"))
    }

    fn console(&self) -> PathBuf {
        self.folder.join("console.log")
    }

    /// The last lines of QEMU and of the guest's kernel, for an error.
    fn last_output(&self) -> String {
        // A kernel panic needs 40 lines.
        let read = |name: &str| tail(&self.folder.join(name), 50);
        format!(
            "\n--- QEMU said:\n{}\n--- the script said last:\n{}\n--- the console's last lines, of {}:\n{}",
            read("qemu.log"),
            read("results.log"),
            self.console().display(),
            read("console.log"),
        )
    }
}

/// Whether QEMU failed the guest in this folder because of a bug in its emulation of processors (without KVM). Disks have
/// no part in either:
///
/// - One processor of a guest may look up an address while another one changes the memory map, as at boot and when devices
///   are added or removed (QEMU issue 1921, seen in 10.0). The access then finds no region, or one that it does not lie in.
/// - On a busy host, the timer of one processor no longer expires (seen in 10.0): its kernel reports stalls, forever.
pub fn emulation_failed(folder: &Path) -> bool {
    translation_failed(folder) || timer_failed(folder)
}

fn translation_failed(folder: &Path) -> bool {
    let log = fs::read(folder.join("qemu.log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    [
        "iotlb_to_section",
        "msix_table_mmio_read",
        "msix_table_mmio_write",
    ]
    .iter()
    .any(|function| log.contains(&format!("{function}: Assertion")))
}

/// Three reports take the guest's kernel more than a minute.
fn timer_failed(folder: &Path) -> bool {
    let console = fs::read(folder.join("console.log")).unwrap_or_default();
    let console = String::from_utf8_lossy(&console);
    console.matches("Possible timer handling issue").count() >= 3
}

impl Output {
    /// Turns a script that failed into an error.
    ///
    /// # Errors
    /// The script ended with a status other than 0; the error contains its last lines.
    pub fn checked(self) -> Result<Output> {
        ensure!(
            self.status == 0,
            "the script in the guest ended with status {}; its last lines (the console is in {}):\n{}",
            self.status,
            self.console.display(),
            last_lines(&self.lines.join("\n"), 20),
        );
        Ok(self)
    }
}

/// A serial port whose output goes to a file; it is appended if the guest migrates from a QEMU that has written to it.
fn log_port(name: &str, file: &Path, incoming: Option<&Path>) -> [String; 4] {
    let append = if incoming.is_some() { "on" } else { "off" };
    [
        "-chardev".into(),
        format!("file,id={name},path={},append={append}", file.display()),
        "-serial".into(),
        format!("chardev:{name}"),
    ]
}

/// Reads the lines of a file that another process writes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_emulation_is_recognised() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!emulation_failed(folder.path()));
        let stall = "[   25.7] rcu: \tPossible timer handling issue on cpu=1 timer-softirq=1\n";
        let console = folder.path().join("console.log");
        fs::write(&console, stall).unwrap();
        assert!(!emulation_failed(folder.path()), "it may go on");
        fs::write(&console, stall.repeat(3)).unwrap();
        assert!(emulation_failed(folder.path()));
        fs::remove_file(&console).unwrap();
        let log = folder.path().join("qemu.log");
        for function in ["iotlb_to_section", "msix_table_mmio_read"] {
            fs::write(&log, format!("a.c:1: {function}: Assertion `x' failed.\n")).unwrap();
            assert!(emulation_failed(folder.path()), "{function}");
        }
    }

    #[test]
    fn failing_guest_reports_its_error() {
        if let Some(missing) = missing(false) {
            println!("skipped: failing_guest_reports_its_error: {missing}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let vm = Vm::new(folder.path());
        // The machine may be busy, and the guest emulated.
        let run = |script| vm.run(script, Duration::from_secs(600));

        let failed = run("echo before; false; echo after").unwrap();
        assert_eq!(
            (failed.lines.join(" ").as_str(), failed.status),
            ("before", 1)
        );

        let panicked = run("echo c >/proc/sysrq-trigger").unwrap_err().to_string();
        assert!(
            panicked.contains("stopped before its script ended"),
            "{panicked}"
        );
        assert!(panicked.contains("Kernel panic"), "{panicked}");

        let mut qemu = 0;
        let mut hang = |limit_s| {
            let script = "echo waiting; sleep 1000";
            let limit = Duration::from_secs(limit_s);
            let result = vm.run_watched(script, limit, &mut |_, pid| qemu = pid);
            result.unwrap_err().to_string()
        };
        // A busy host may need more than the shortest limit to boot the guest.
        let hung = [10, 60, 600]
            .into_iter()
            .map(&mut hang)
            .find(|error| error.contains("waiting"))
            .expect("the guest boots in time");
        assert!(hung.contains("was killed"), "{hung}");
        assert!(qemu > 0 && !Path::new(&format!("/proc/{qemu}")).exists());
    }
}
