//! How to connect a VM to a disk: arguments for QEMU, and XML for libvirt.

use std::path::PathBuf;

use block::format_size;
use serde::Serialize;

/// A served disk, and how a VM connects to it.
#[derive(Debug, Serialize)]
pub struct ConnectionInfo {
    pub name: String,
    pub file: String,
    pub format: String,
    /// Bytes.
    pub size: u64,
    pub socket: PathBuf,
    pub queues: u16,
    pub queue_size: u16,
    pub readonly: bool,
    /// Arguments for QEMU; the memory's size is the VM's.
    pub qemu: Vec<String>,
    pub libvirt: Libvirt,
    /// The value of `args:` in the configuration of a VM of Proxmox VE; the memory's size is the VM's.
    pub proxmox: String,
}

/// Elements of a domain: one for the domain itself, the others for `<devices>`.
#[derive(Debug, Serialize)]
pub struct Libvirt {
    #[serde(rename = "memoryBacking")]
    pub memory_backing: String,
    /// With fixed buffers, the guest must not have a balloon, which libvirt would give it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memballoon: Option<String>,
    pub disk: String,
}

/// Arguments for QEMU. Guest memory must be shared, or the disk cannot reach it.
pub fn qemu(name: &str, socket: &str, queues: u16, queue_size: u16) -> Vec<String> {
    // A comma in an option's value is doubled.
    let socket = socket.replace(',', ",,");
    [
        "-object",
        "memory-backend-memfd,id=mem,size=4G,share=on",
        "-m",
        "4G",
        "-machine",
        "q35,memory-backend=mem",
        "-chardev",
        &format!("socket,id={name},path={socket},reconnect-ms=1000"),
        "-device",
        &format!("vhost-user-blk-pci,chardev={name},num-queues={queues},queue-size={queue_size}"),
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The value of `args:` for Proxmox VE, which uses neither this address nor those after it on its second bridge: without an
/// address, the disk would move when the VM gets another device.
pub fn proxmox(name: &str, socket: &str, queues: u16, queue_size: u16) -> String {
    let [chardev, device] = [
        format!(
            "socket,id={name},path={},reconnect-ms=1000",
            socket.replace(',', ",,")
        ),
        format!(
            "vhost-user-blk-pci,chardev={name},num-queues={queues},queue-size={queue_size},bus=pci.2,addr=0x19"
        ),
    ];
    let memory = "-object memory-backend-memfd,id=ringmem,size=4096M,share=on -machine memory-backend=ringmem";
    format!(
        "{memory} -chardev {} -device {}",
        quote(&chardev),
        quote(&device)
    )
}

/// XML for libvirt.
pub fn libvirt(socket: &str, queues: u16, queue_size: u16, fixed_buffers: bool) -> Libvirt {
    let socket = escape(socket);
    Libvirt {
        memory_backing: "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n\
            </memoryBacking>"
            .into(),
        memballoon: fixed_buffers.then(|| "<memballoon model='none'/>".into()),
        disk: format!(
            "<disk type='vhostuser' device='disk'>\n  \
             <driver name='qemu' type='raw' queues='{queues}' queue_size='{queue_size}'/>\n  \
             <source type='unix' path='{socket}'>\n    \
             <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
             <target dev='vda' bus='virtio'/>\n</disk>"
        ),
    }
}

/// Text as the value of an attribute in XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

/// The same as text.
pub fn text(disks: &[ConnectionInfo]) -> String {
    let mut text = String::new();
    for (i, disk) in disks.iter().enumerate() {
        let access = if disk.readonly { ", read-only" } else { "" };
        // The memory is described with the first disk only.
        let first = i == 0;
        let (qemu, libvirt) = if first {
            (
                "size= and -m are the VM's memory; before QEMU 9.2, reconnect=1 takes the place of reconnect-ms=1000",
                "memoryBacking in the domain, the rest in its devices",
            )
        } else {
            (
                "and the memory of the first, once for each VM",
                "and the memoryBacking of the first; a VM that gets both needs another target than vda",
            )
        };
        text += &format!(
            "disk {}: {} ({}, {}{access}) at {}\n\n  QEMU ({qemu}):\n",
            disk.name,
            disk.file,
            disk.format,
            format_size(disk.size),
            disk.socket.display(),
        );
        let of_memory = |name: &str| ["-object", "-m", "-machine"].contains(&name);
        let arguments = disk.qemu.chunks(2);
        let lines: Vec<_> = arguments
            .filter(|p| first || !of_memory(&p[0]))
            .map(|p| format!("    {} {}", p[0], quote(&p[1])))
            .collect();
        text += &lines.join(" \\\n");
        text += &format!("\n\n  libvirt ({libvirt}):\n");
        let libvirt = &disk.libvirt;
        let elements = [
            Some(&libvirt.memory_backing).filter(|_| first),
            libvirt.memballoon.as_ref(),
            Some(&libvirt.disk),
        ];
        for element in elements.into_iter().flatten() {
            element
                .lines()
                .for_each(|line| text += &format!("    {line}\n"));
        }
        text += &format!(
            "\n  Proxmox VE (args: of the VM; size= is its memory:{}):\n    {}\n",
            if first {
                ""
            } else {
                "; another disk of the same VM needs only -chardev and -device, and another addr="
            },
            disk.proxmox
        );
        text.push('\n');
    }
    text
}

/// Quotes an argument for a shell if it needs that.
pub fn quote(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:".contains(c);
    if !argument.is_empty() && argument.chars().all(plain) {
        argument.to_owned()
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    }
}
