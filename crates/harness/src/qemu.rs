//! QEMU's command line, as far as all guests share it.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The emulator for guests.
pub const SYSTEM: &str = "qemu-system-x86_64";

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the processor.
    Kvm,
    /// Translated: everything works, 10 to 50 times slower, so that absolute speeds mean nothing.
    Tcg,
}

impl Accel {
    /// QEMU's word.
    pub fn word(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }

    fn arguments(self, cpu_model: Option<&str>) -> [&str; 4] {
        let (accel, cpu) = match self {
            Accel::Kvm => ("kvm", "host"),
            Accel::Tcg => ("tcg,thread=multi", "max"),
        };
        ["-accel", accel, "-cpu", cpu_model.unwrap_or(cpu)]
    }

    /// How long a guest may take to boot.
    pub fn boot_limit(self) -> Duration {
        Duration::from_secs(match self {
            Accel::Kvm => 120,
            Accel::Tcg => 600,
        })
    }
}

/// The best accelerator with which QEMU starts here. On some hosts `/dev/kvm` exists, but QEMU aborts when it uses it.
pub fn accel() -> Accel {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    if device.is_err() {
        return Accel::Tcg;
    }
    let mut qemu = Command::new(SYSTEM);
    qemu.args(Accel::Kvm.arguments(None))
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-S", "-qmp", "stdio"])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let Ok(mut child) = qemu.spawn() else {
        return Accel::Tcg;
    };
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n");
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Accel::Kvm,
            Ok(None) => sleep(Duration::from_millis(20)),
            _ => return Accel::Tcg,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    Accel::Tcg
}

/// The first line of `program --version`; empty if the program is missing.
pub fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").output();
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// A guest's machine: no default devices, and memory that vhost-user servers can share.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// The name of QEMU's process.
    pub name: &'a str,
    /// QEMU's machine type, such as `q35`.
    pub kind: &'a str,
    /// The memory in MiB.
    pub memory_mib: u64,
    /// Whether more memory can be plugged in, up to 2 GiB in all.
    pub more_memory: bool,
    /// Whether the memory is in huge pages, which must be reserved.
    pub hugepages: bool,
    /// The number of processors.
    pub cpus: u32,
    /// The processor model; `None` means the best one.
    pub cpu_model: Option<&'a str>,
    /// How instructions run.
    pub accel: Accel,
}

impl Machine<'_> {
    /// QEMU's arguments.
    pub fn arguments(&self) -> Vec<String> {
        let memory = format!("{}M", self.memory_mib);
        let slots = if self.more_memory {
            ",slots=4,maxmem=2G"
        } else {
            ""
        };
        let huge = if self.hugepages { ",hugetlb=on" } else { "" };
        let mut arguments: Vec<String> = [
            "-name",
            &format!("{},debug-threads=on", self.name),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-monitor",
            "none",
            "-machine",
            &format!("{},memory-backend=mem", self.kind),
            "-m",
            &format!("{memory}{slots}"),
            "-object",
            &format!("memory-backend-memfd,id=mem,size={memory},share=on{huge}"),
            "-smp",
            &self.cpus.to_string(),
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.extend(self.accel.arguments(self.cpu_model).map(str::to_owned));
        arguments
    }
}

/// A path as a value in the `key=value` syntax of QEMU and ringdisk, in which commas are doubled.
pub fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
