//! The disks of a guest.

use std::path::PathBuf;

/// A virtio-blk disk of a guest.
#[derive(Clone, Debug)]
pub enum Disk {
    /// Served over vhost-user by another process.
    VhostUser {
        /// The socket of that process.
        socket: PathBuf,
        /// Virtqueues, at least 1.
        queues: u16,
        /// Entries of each virtqueue.
        queue_size: u16,
    },
    /// The `-chardev` and `-device` arguments that `ringdisk serve` printed for QEMU.
    Printed(Vec<String>),
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
        /// The disk's serial, at most 20 bytes.
        serial: String,
    },
}

impl Disk {
    /// QEMU's arguments for the guest's disk with this index.
    pub(super) fn arguments(&self, index: usize) -> Vec<String> {
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
            // This module configures the guest's memory and machine; everything else is used as printed.
            Disk::Printed(arguments) => arguments
                .chunks(2)
                // An object for memory belongs to the guest; others belong to the disk.
                .filter(|pair| match pair[0].as_str() {
                    "-object" => ["iothread,", "throttle-group,"]
                        .iter()
                        .any(|kind| pair[1].starts_with(kind)),
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
