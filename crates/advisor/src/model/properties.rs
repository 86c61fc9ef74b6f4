//! The properties that there are. [Rules](crate::rules) are checked against this table when they are read.

use super::Data;

/// What values a property has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of these words; any, if there are none.
    Word(&'static [&'static str]),
    /// A number; of sizes, bytes.
    Number,
    /// A version.
    Version,
}

/// One property.
#[derive(Clone, Copy, Debug)]
pub struct Property {
    /// Its name. What stands before the point says whose it is.
    pub name: &'static str,
    /// Its values.
    pub kind: Kind,
    /// What it is.
    pub about: &'static str,
}

impl Property {
    /// Whether a value is one of it.
    pub fn allows(&self, data: &Data) -> bool {
        match (self.kind, data) {
            (_, Data::Unknown) => true,
            (Kind::Word([]), Data::Word(_)) => true,
            (Kind::Word(words), Data::Word(word)) => words.contains(&word.as_ref()),
            (Kind::Number, Data::Number(_)) | (Kind::Version, Data::Version(_)) => true,
            _ => false,
        }
    }
}

/// The property of that name.
pub fn property(name: &str) -> Option<&'static Property> {
    PROPERTIES.iter().find(|property| property.name == name)
}

const YES_NO: Kind = Kind::Word(&["yes", "no"]);
const ANY: Kind = Kind::Word(&[]);

const fn p(name: &'static str, kind: Kind, about: &'static str) -> Property {
    Property { name, kind, about }
}

/// All of them.
pub const PROPERTIES: &[Property] = &[
    p(
        "disk.device",
        Kind::Word(&["disk", "cdrom", "floppy", "lun"]),
        "what the guest sees",
    ),
    p(
        "disk.bus",
        Kind::Word(&[
            "virtio-blk",
            "virtio-scsi",
            "scsi-emulated",
            "ide",
            "sata",
            "nvme",
            "usb",
            "sd",
            "fdc",
            "vhost-user-blk",
            "vhost-user-scsi",
            "pass-through",
            "none",
            "other",
        ]),
        "the device that the guest drives",
    ),
    p(
        "disk.controller",
        Kind::Word(&["own", "shared"]),
        "whether its SCSI controller serves it alone",
    ),
    p(
        "disk.protocol",
        Kind::Word(&[
            "file",
            "block",
            "rbd",
            "nbd",
            "iscsi",
            "nvme",
            "nfs",
            "gluster",
            "ssh",
            "http",
            "vhost-user",
            "vdpa",
            "null",
            "other",
        ]),
        "how QEMU reaches what is behind it",
    ),
    p("disk.format", ANY, "format of the image"),
    p(
        "disk.cache",
        Kind::Word(&["none", "writeback", "writethrough", "directsync", "unsafe"]),
        "cache mode",
    ),
    p(
        "disk.direct",
        YES_NO,
        "whether the page cache is passed by (O_DIRECT)",
    ),
    p(
        "disk.flush",
        YES_NO,
        "whether a guest's flush reaches the storage",
    ),
    p(
        "disk.aio",
        Kind::Word(&["threads", "native", "io_uring"]),
        "how requests are handed to the kernel",
    ),
    p(
        "disk.discard",
        Kind::Word(&["ignore", "unmap"]),
        "whether space that the guest gives back is freed",
    ),
    p(
        "disk.detect-zeroes",
        Kind::Word(&["off", "on", "unmap"]),
        "whether every write is looked through for zeroes",
    ),
    p("disk.queues", Kind::Number, "virtqueues for requests"),
    p("disk.queue-size", Kind::Number, "descriptors of a queue"),
    p("disk.readonly", YES_NO, "whether the guest may not write"),
    p("disk.size", Kind::Number, "bytes that the guest sees"),
    p(
        "disk.l2-cache-size",
        Kind::Number,
        "memory for the tables of a qcow2 image",
    ),
    p(
        "disk.syntax",
        Kind::Word(&["drive", "blockdev"]),
        "which of QEMU's options describes it",
    ),
    p("disk.throttled", YES_NO, "whether limits are set on it"),
    p(
        "disk.reconnect",
        YES_NO,
        "whether QEMU connects again to a vhost-user back-end that was restarted",
    ),
    p(
        "disk.ioeventfd",
        YES_NO,
        "whether a kick does without a stop in QEMU",
    ),
    p(
        "disk.scsi-property",
        YES_NO,
        "whether scsi= is given, which virtio-blk has no longer",
    ),
    p(
        "disk.data-plane",
        YES_NO,
        "whether x-data-plane= is given, which is no longer there",
    ),
    p(
        "disk.config-wce",
        Kind::Word(&["on", "off"]),
        "whether the guest may switch its write cache",
    ),
    p(
        "disk.write-cache",
        Kind::Word(&["on", "off", "auto"]),
        "whether the device shows a write cache",
    ),
    p(
        "disk.ssd",
        YES_NO,
        "whether the guest is told that it is an SSD",
    ),
    p(
        "disk.fixed-buffers",
        YES_NO,
        "whether ringdisk registers the guest's memory",
    ),
    p(
        "disk.iso",
        YES_NO,
        "whether it is the image of a CD, as of an installer or of cloud-init",
    ),
    p(
        "disk.removable",
        YES_NO,
        "whether the guest may take it out",
    ),
    p("disk.served", YES_NO, "whether it is what ringdisk serves"),
    p(
        "disk.threads",
        Kind::Number,
        "I/O threads that serve it; 0 is QEMU's main loop",
    ),
    p("disk.thread-disks", Kind::Number, "disks on its I/O thread"),
    p(
        "disk.thread-ignored",
        YES_NO,
        "whether an I/O thread is asked for where none can be had",
    ),
    p(
        "disk.thread-missing",
        ANY,
        "id of an I/O thread that is named and not defined",
    ),
    p(
        "disk.thread-twice",
        YES_NO,
        "whether both one thread and a map of queues are given",
    ),
    p(
        "disk.mapping-problem",
        ANY,
        "what is wrong with its map of queues",
    ),
    p(
        "disk.queues-inert",
        YES_NO,
        "whether queues are given to a device that has none",
    ),
    p(
        "disk.block-as-file",
        YES_NO,
        "whether a block device is opened as if it were a file",
    ),
    p("disk.storage", ANY, "type of the Proxmox storage"),
    p(
        "disk.store-thin",
        YES_NO,
        "whether that storage allocates as it is written to",
    ),
    p(
        "disk.raw-layer",
        YES_NO,
        "whether a raw node lies between the device and RBD",
    ),
    p(
        "backing.kind",
        Kind::Word(&["file", "block"]),
        "what was found behind it",
    ),
    p("backing.rotational", YES_NO, "whether it turns"),
    p("backing.scheduler", ANY, "its I/O scheduler"),
    p("backing.read-ahead-kb", Kind::Number, "its read-ahead"),
    p(
        "backing.add-random",
        YES_NO,
        "whether its requests feed the entropy pool",
    ),
    p("backing.queue-depth", Kind::Number, "its nr_requests"),
    p(
        "backing.partition-table",
        Kind::Word(&["dos", "gpt", "none"]),
        "its partition table",
    ),
    p("backing.size", Kind::Number, "its bytes"),
    p(
        "backing.lvm",
        Kind::Word(&["no", "thick", "thin", "snapshot"]),
        "kind of logical volume",
    ),
    p(
        "backing.lvm-extent",
        Kind::Number,
        "extent size of its volume group",
    ),
    p(
        "backing.lvm-chunk",
        Kind::Number,
        "chunk size of its thin pool",
    ),
    p(
        "backing.lvm-zero",
        YES_NO,
        "whether its thin pool zeroes what it allocates",
    ),
    p("backing.fs", ANY, "the file system that it is on"),
    p("backing.direct", YES_NO, "whether that takes O_DIRECT"),
    p(
        "backing.sparse",
        YES_NO,
        "whether not all of the file is allocated",
    ),
    p(
        "backing.no-cow",
        YES_NO,
        "whether the file is exempt from copy-on-write (chattr +C)",
    ),
    p(
        "backing.record-size",
        Kind::Number,
        "bytes that the file system rewrites at once",
    ),
    p(
        "backing.nfs-rsize",
        Kind::Number,
        "largest read of its NFS mount",
    ),
    p(
        "backing.nfs-wsize",
        Kind::Number,
        "largest write of its NFS mount",
    ),
    p(
        "backing.nfs-sync",
        YES_NO,
        "whether its NFS mount writes synchronously",
    ),
    p(
        "backing.qcow2-virtual-size",
        Kind::Number,
        "what the guest sees of it",
    ),
    p("backing.qcow2-cluster-size", Kind::Number, "its clusters"),
    p(
        "backing.qcow2-subclusters",
        YES_NO,
        "whether it has extended L2 entries",
    ),
    p(
        "backing.qcow2-backed",
        YES_NO,
        "whether it has a backing file",
    ),
    p(
        "backing.qcow2-l2-needed",
        Kind::Number,
        "memory that its whole L2 table takes",
    ),
    p(
        "backing.qcow2-l2-short",
        YES_NO,
        "whether the cache of its tables is smaller than these",
    ),
    p(
        "backing.pcie-speed-percent",
        Kind::Number,
        "speed of its PCIe link, of what the device can",
    ),
    p(
        "vm.front-end",
        Kind::Word(&["libvirt", "qemu", "proxmox", "ringdisk"]),
        "whose configuration it is",
    ),
    p("vm.machine", ANY, "machine type without its version"),
    p(
        "vm.machine-version",
        Kind::Version,
        "version of the machine type; unversioned ones are the newest",
    ),
    p("vm.qemu", Kind::Version, "version of QEMU"),
    p(
        "vm.accel",
        Kind::Word(&["kvm", "tcg", "xen", "hvf", "other"]),
        "accelerator",
    ),
    p(
        "vm.host",
        Kind::Word(&["linux", "other"]),
        "the host's system, as far as accelerators say it",
    ),
    p("vm.vcpus", Kind::Number, "virtual CPUs"),
    p("vm.memory", Kind::Number, "bytes of memory"),
    p(
        "vm.memory-shared",
        YES_NO,
        "whether other processes may map the guest's memory",
    ),
    p(
        "vm.hugepages",
        YES_NO,
        "whether its memory is in huge pages",
    ),
    p("vm.balloon", YES_NO, "whether it has a balloon"),
    p(
        "vm.os",
        Kind::Word(&["linux", "windows", "other"]),
        "the guest's system",
    ),
    p("vm.cpu-x2apic", Kind::Word(&["on", "off"]), "x2APIC"),
    p(
        "vm.cpu-pv-eoi",
        Kind::Word(&["on", "off"]),
        "paravirtual end of interrupt",
    ),
    p(
        "vm.malloc",
        Kind::Word(&["glibc", "tcmalloc", "jemalloc", "other"]),
        "allocator of QEMU",
    ),
    p(
        "vm.library-path",
        Kind::Word(&["none", "set", "inert"]),
        "LD_LIBRARY_PATH of QEMU; inert if it is set and not exported",
    ),
    p(
        "vm.threads-defined",
        Kind::Number,
        "I/O threads that are defined",
    ),
    p(
        "vm.threads-unused",
        Kind::Number,
        "I/O threads that no disk uses",
    ),
    p(
        "vm.thread-poll",
        Kind::Word(&["default", "off", "set"]),
        "polling of its I/O threads",
    ),
    p("vm.busy-disks", Kind::Number, "disks that are no CD-ROMs"),
    p(
        "vm.virtio-disks",
        Kind::Number,
        "disks on virtio-blk or virtio-scsi",
    ),
    p("vm.rbd-disks", Kind::Number, "disks on RBD"),
    p(
        "vm.pass-through",
        YES_NO,
        "whether host devices are passed through",
    ),
    p(
        "vm.numa-bound",
        YES_NO,
        "whether its memory is bound to nodes of the host",
    ),
    p("vm.virtqueues", Kind::Number, "virtqueues of its disks"),
    p(
        "host.guest",
        YES_NO,
        "whether the facts are of a virtual machine",
    ),
    p("host.kernel", Kind::Version, "version of Linux"),
    p("host.arch", ANY, "machine as uname says"),
    p("host.os", ANY, "ID and VERSION_ID of os-release"),
    p("host.qemu", Kind::Version, "version of QEMU"),
    p("host.libvirt", Kind::Version, "version of libvirt"),
    p("host.proxmox", Kind::Version, "version of Proxmox VE"),
    p("host.librbd", Kind::Version, "version of Ceph's librbd"),
    p("host.zfs", Kind::Version, "version of OpenZFS"),
    p(
        "host.io-uring",
        Kind::Word(&["on", "root", "off"]),
        "whether processes may use io_uring",
    ),
    p(
        "host.thp",
        Kind::Word(&["always", "madvise", "never"]),
        "transparent huge pages",
    ),
    p(
        "host.shmem-thp",
        ANY,
        "transparent huge pages for shared memory",
    ),
    p(
        "host.hugepages-bytes",
        Kind::Number,
        "memory set aside as huge pages",
    ),
    p("host.memory", Kind::Number, "memory"),
    p("host.swap-used", Kind::Number, "swap in use"),
    p(
        "host.vms-memory",
        Kind::Number,
        "memory of all machines of this run",
    ),
    p(
        "host.overcommitted",
        YES_NO,
        "whether these have more memory than the host",
    ),
    p("host.cpus", Kind::Number, "CPUs"),
    p("host.numa-nodes", Kind::Number, "NUMA nodes"),
    p("host.governor", ANY, "CPU frequency governor"),
    p(
        "host.halt-poll-ns",
        Kind::Number,
        "how long KVM polls for a halted vCPU",
    ),
    p("host.cpuidle", ANY, "governor of idle states"),
    p("host.clocksource", ANY, "clock source"),
    p(
        "host.delay-accounting",
        YES_NO,
        "whether delays of tasks are accounted",
    ),
    p(
        "host.use-bio",
        YES_NO,
        "whether virtio_blk.use_bio is on the kernel's command line",
    ),
    p("host.ksm", YES_NO, "whether KSM merges pages"),
    p(
        "host.nfsd-threads",
        Kind::Number,
        "threads of the NFS server here",
    ),
    p(
        "host.nfs-wdelay",
        YES_NO,
        "whether an export waits before it writes",
    ),
    p("ceph.rbd-cache", YES_NO, "rbd_cache in ceph.conf"),
    p("ceph.ms-mode", ANY, "ms_client_mode in ceph.conf"),
    p(
        "ceph.msgr-threads",
        Kind::Number,
        "ms_async_op_threads in ceph.conf",
    ),
    p(
        "ceph.filestore-flusher",
        YES_NO,
        "whether filestore_flusher is in ceph.conf",
    ),
    p(
        "ceph.media",
        Kind::Word(&["hdd", "ssd"]),
        "what the OSDs store on",
    ),
    p("device.name", ANY, "name of a block device of the host"),
    p(
        "device.virtio",
        YES_NO,
        "whether it is a disk of a hypervisor",
    ),
    p("device.rotational", YES_NO, "whether it turns"),
    p("device.nvme", YES_NO, "whether it is NVMe"),
    p(
        "device.rbd",
        YES_NO,
        "whether it is an RBD image of the kernel",
    ),
    p("device.scheduler", ANY, "its I/O scheduler"),
    p("device.read-ahead-kb", Kind::Number, "its read-ahead"),
    p(
        "device.add-random",
        YES_NO,
        "whether its requests feed the entropy pool",
    ),
    p(
        "device.hardware-queues",
        Kind::Number,
        "its hardware queues",
    ),
    p(
        "device.partition-table",
        Kind::Word(&["dos", "gpt", "none"]),
        "its partition table",
    ),
    p("device.size", Kind::Number, "its bytes"),
    p(
        "device.pcie-speed-percent",
        Kind::Number,
        "speed of its PCIe link, of what the device can",
    ),
    p(
        "measured.of-host-percent",
        Kind::Number,
        "what the guest reaches of the host's own speed",
    ),
];
