//! What a thread does, from its program and its name.

use std::fs;

use serde::{Deserialize, Serialize};

/// A program of the path from the guest to the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// A virtual machine.
    Qemu,
    /// qemu-storage-daemon.
    StorageDaemon,
    /// ringdisk, serving disks.
    Ringdisk,
    /// A program that makes requests itself, such as fio or the lab's client.
    Client,
    /// Anything else.
    Other,
}

impl Program {
    /// The program of a process, by the name of its executable, or of its main thread if that cannot be read.
    pub fn of(pid: u32) -> Program {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
        let exe = exe.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let name = exe.or_else(|| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
        Program::named(name.unwrap_or_default().trim())
    }

    fn named(name: &str) -> Program {
        match name.trim_end_matches(" (deleted)") {
            name if name.starts_with("qemu-storage-da") => Program::StorageDaemon,
            name if name.starts_with("qemu-") || name == "kvm" => Program::Qemu,
            "ringdisk" => Program::Ringdisk,
            "fio" => Program::Client,
            _ => Program::Other,
        }
    }
}

/// What a thread does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Runs a processor of the guest.
    Vcpu,
    /// Makes the requests without a guest.
    Client,
    /// QEMU's main loop, or that of qemu-storage-daemon.
    MainLoop,
    /// An IOThread of QEMU or qemu-storage-daemon.
    IoThread,
    /// An I/O thread of ringdisk.
    Server,
    /// A thread that ringdisk or QEMU gives operations to that would block.
    Blocking,
    /// Sends and receives for librbd.
    Messenger,
    /// Any other thread of librbd and librados.
    Librbd,
    /// A kernel thread that works for the process.
    KernelWorker,
    /// Any other thread of these processes.
    #[default]
    Other,
    /// Kernel threads that work for the whole host: what they do for this disk is unknown.
    Host,
}

impl Role {
    /// All roles, in the order in which they are shown: from the guest to the storage.
    pub const ALL: [Role; 11] = [
        Role::Vcpu,
        Role::Client,
        Role::MainLoop,
        Role::IoThread,
        Role::Server,
        Role::Blocking,
        Role::Messenger,
        Role::Librbd,
        Role::KernelWorker,
        Role::Other,
        Role::Host,
    ];

    /// A name for people.
    pub fn label(self) -> &'static str {
        match self {
            Role::Vcpu => "vCPU",
            Role::Client => "client",
            Role::MainLoop => "main loop",
            Role::IoThread => "IOThread",
            Role::Server => "ringdisk I/O thread",
            Role::Blocking => "worker thread",
            Role::Messenger => "Ceph messenger",
            Role::Librbd => "librbd",
            Role::KernelWorker => "kernel worker",
            Role::Other => "other",
            Role::Host => "kernel, whole host",
        }
    }
}

/// The role of a thread by its name. QEMU names its threads only with `-name …,debug-threads=on`, which libvirt sets; QMP
/// tells the roles of the others.
pub fn role(program: Program, name: &str, is_main: bool) -> Role {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    match program {
        // Kernel threads that are threads of the process; vhost- since Linux 6.4.
        _ if is_numbered(name, "iou-wrk-") || is_numbered(name, "iou-sqp-") => Role::KernelWorker,
        Program::Qemu if is_numbered(name, "vhost-") => Role::KernelWorker,
        _ if starts(&["msgr-worker-"]) => Role::Messenger,
        _ if starts(&["io_context_pool", "tp_librbd", "taskfin_librbd", "rbd"])
            || starts(&["ceph", "safe_timer", "ms_", "radosclient", "admin_socket"]) =>
        {
            Role::Librbd
        }
        Program::Client => Role::Client,
        Program::Qemu | Program::StorageDaemon if is_main => Role::MainLoop,
        Program::Qemu if starts(&["CPU ", "ALL CPUs/"]) => Role::Vcpu,
        Program::Qemu if name == "IO mon_iothread" => Role::Other,
        Program::Qemu | Program::StorageDaemon if starts(&["IO "]) => Role::IoThread,
        Program::Qemu | Program::StorageDaemon if starts(&["worker"]) => Role::Blocking,
        Program::Ringdisk if is_numbered(name, "iothread") => Role::Server,
        Program::Ringdisk if name == "blocking" => Role::Blocking,
        _ => Role::Other,
    }
}

/// Whether a name is this prefix and a number.
fn is_numbered(name: &str, prefix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_roles_by_program_and_name() {
        let cases = [
            (Program::Qemu, "qemu-system-x86", true, Role::MainLoop),
            (Program::Qemu, "CPU 0/KVM", false, Role::Vcpu),
            (Program::Qemu, "CPU 12/TCG", false, Role::Vcpu),
            (Program::Qemu, "ALL CPUs/TCG", false, Role::Vcpu),
            (Program::Qemu, "IO iothread0", false, Role::IoThread),
            (Program::Qemu, "IO mon_iothread", false, Role::Other),
            (Program::Qemu, "worker", false, Role::Blocking),
            (Program::Qemu, "msgr-worker-2", false, Role::Messenger),
            (Program::Qemu, "io_context_pool", false, Role::Librbd),
            (Program::Qemu, "iou-wrk-1234", false, Role::KernelWorker),
            (Program::Qemu, "vhost-1234", false, Role::KernelWorker),
            (Program::Qemu, "qemu-system-x86", false, Role::Other),
            (Program::StorageDaemon, "IO io0", false, Role::IoThread),
            (Program::Ringdisk, "iothread0", false, Role::Server),
            (Program::Ringdisk, "vhost-vm1", false, Role::Other),
            (Program::Ringdisk, "vhost-1", false, Role::Other),
            (Program::Ringdisk, "iothreadless", false, Role::Other),
            (Program::Ringdisk, "iou-sqp-9", false, Role::KernelWorker),
            (Program::Client, "fio", true, Role::Client),
            (Program::Other, "CPU 0/KVM", false, Role::Other),
        ];
        for (program, name, is_main, expected) in cases {
            assert_eq!(role(program, name, is_main), expected, "{program:?} {name}");
        }
    }

    #[test]
    fn programs_have_kinds() {
        let kinds = [
            ("qemu-system-x86_64", Program::Qemu),
            ("qemu-kvm", Program::Qemu),
            ("kvm", Program::Qemu),
            ("qemu-storage-daemon", Program::StorageDaemon),
            ("qemu-storage-da", Program::StorageDaemon),
            ("ringdisk (deleted)", Program::Ringdisk),
            ("fio", Program::Client),
            ("bash", Program::Other),
        ];
        for (name, kind) in kinds {
            assert_eq!(Program::named(name), kind, "{name}");
        }
    }
}
