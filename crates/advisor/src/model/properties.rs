//! The table of all properties. Conditions in [rules](crate::rules) are checked against it.

use super::Data;

/// The possible values of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of these words; any word if the list is empty
    Word(&'static [&'static str]),
    /// Sizes are in bytes
    Number,
    Version,
}

#[derive(Clone, Copy, Debug)]
pub struct Property {
    /// The prefix says what it belongs to: `disk.`, `vm.`, `host.`
    pub name: &'static str,
    pub kind: Kind,
    pub about: &'static str,
}

impl Property {
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

pub fn property(name: &str) -> Option<&'static Property> {
    PROPERTIES.iter().find(|property| property.name == name)
}

const YES_NO: Kind = Kind::Word(&["yes", "no"]);
const ANY: Kind = Kind::Word(&[]);

const fn p(name: &'static str, kind: Kind, about: &'static str) -> Property {
    Property { name, kind, about }
}

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
        "whether its SCSI controller serves only this disk",
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
        "how QEMU accesses its storage",
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
        "whether I/O bypasses the page cache (O_DIRECT)",
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
        "whether space that the guest discards is freed",
    ),
    p(
        "disk.detect-zeroes",
        Kind::Word(&["off", "on", "unmap"]),
        "whether QEMU searches every write for zeroes",
    ),
    p("disk.queues", Kind::Number, "virtqueues for requests"),
    p("disk.queue-size", Kind::Number, "descriptors of a queue"),
    p("disk.readonly", YES_NO, "whether the guest may only read"),
    p("disk.size", Kind::Number, "bytes that the guest sees"),
    p(
        "disk.l2-cache-size",
        Kind::Number,
        "memory for a qcow2 image's tables",
    ),
    p(
        "disk.syntax",
        Kind::Word(&["drive", "blockdev"]),
        "the QEMU option that describes it",
    ),
    p("disk.throttled", YES_NO, "whether it has I/O limits"),
    p(
        "disk.limit-iops",
        Kind::Number,
        "its least limit of requests per second",
    ),
    p(
        "disk.limit-bytes",
        Kind::Number,
        "its least limit of bytes per second",
    ),
    p(
        "disk.ringdisk-socket",
        YES_NO,
        "whether its vhost-user socket is in a directory of ringdisk",
    ),
    p(
        "disk.vhost-user-inapt",
        ANY,
        "attributes of its driver that libvirt refuses for a vhostuser disk",
    ),
    p(
        "disk.discard-granularity",
        Kind::Number,
        "bytes that a discard must cover, as the guest is told",
    ),
    p("disk.encrypted", YES_NO, "whether QEMU encrypts it"),
    p("disk.copy-on-read", YES_NO, "whether reads fill the image"),
    p("disk.packed", YES_NO, "whether it has packed virtqueues"),
    p(
        "disk.reconnect",
        YES_NO,
        "whether QEMU reconnects to a restarted vhost-user back-end",
    ),
    p(
        "disk.ioeventfd",
        YES_NO,
        "whether a kick bypasses QEMU's vCPU thread",
    ),
    p(
        "disk.scsi-property",
        YES_NO,
        "whether scsi= is set, which virtio-blk no longer has",
    ),
    p(
        "disk.data-plane",
        YES_NO,
        "whether x-data-plane= is set, which QEMU no longer has",
    ),
    p(
        "disk.config-wce",
        Kind::Word(&["on", "off"]),
        "whether the guest may change its cache mode",
    ),
    p(
        "disk.write-cache",
        Kind::Word(&["on", "off", "auto"]),
        "whether the device reports a write cache",
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
        "whether it is the image of a CD, such as an installer's or cloud-init's",
    ),
    p("disk.removable", YES_NO, "whether the guest may eject it"),
    p(
        "disk.served",
        YES_NO,
        "whether it is in ringdisk's configuration",
    ),
    p(
        "disk.threads",
        Kind::Number,
        "I/O threads that serve it; 0 is QEMU's main loop",
    ),
    p("disk.thread-disks", Kind::Number, "disks on its I/O thread"),
    p(
        "disk.thread-ignored",
        YES_NO,
        "whether an I/O thread is configured for a device that supports none",
    ),
    p(
        "disk.thread-missing",
        ANY,
        "id of an I/O thread that is named but not defined",
    ),
    p(
        "disk.thread-twice",
        YES_NO,
        "whether it has both one I/O thread and a queue mapping",
    ),
    p(
        "disk.mapping-problem",
        ANY,
        "the error in its queue mapping",
    ),
    p(
        "disk.queues-inert",
        YES_NO,
        "whether queues are configured for a device that has none",
    ),
    p(
        "disk.block-as-file",
        YES_NO,
        "whether a block device is opened as a file",
    ),
    p("disk.storage", ANY, "type of the Proxmox storage"),
    p(
        "disk.store-thin",
        YES_NO,
        "whether that storage allocates space on write",
    ),
    p(
        "disk.raw-layer",
        YES_NO,
        "whether a raw node is between the device and RBD",
    ),
    p(
        "backing.kind",
        Kind::Word(&["file", "block"]),
        "the kind of storage that was found",
    ),
    p("backing.rotational", YES_NO, "whether it is a hard disk"),
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
        "whether its thin pool zeroes new chunks",
    ),
    p(
        "backing.lvm-data-percent",
        Kind::Number,
        "used space of its thin pool, in percent",
    ),
    p(
        "backing.lvm-metadata-percent",
        Kind::Number,
        "used metadata of its thin pool, in percent",
    ),
    p("backing.fs", ANY, "its file system"),
    p(
        "backing.direct",
        YES_NO,
        "whether its file system supports O_DIRECT",
    ),
    p(
        "backing.sparse",
        YES_NO,
        "whether part of the file is not allocated",
    ),
    p(
        "backing.no-cow",
        YES_NO,
        "whether the file is exempt from copy-on-write (chattr +C)",
    ),
    p(
        "backing.record-size",
        Kind::Number,
        "block size of the file system",
    ),
    p(
        "backing.zfs-direct",
        Kind::Word(&["standard", "always", "disabled"]),
        "property direct of its ZFS dataset",
    ),
    p(
        "backing.zvol-block",
        Kind::Number,
        "volblocksize of its zvol",
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
    p("backing.nic", ANY, "network link to the NFS server"),
    p(
        "backing.nic-mbps",
        Kind::Number,
        "speed of that link in Mb/s",
    ),
    p(
        "backing.nic-shared",
        YES_NO,
        "whether guests are ports of a bridge on that link",
    ),
    p(
        "backing.nic-pcie-mbps",
        Kind::Number,
        "bandwidth of the card's PCIe slot in Mb/s",
    ),
    p(
        "backing.nic-ports-mbps",
        Kind::Number,
        "speed of all ports of the card in Mb/s",
    ),
    p(
        "backing.qcow2-virtual-size",
        Kind::Number,
        "virtual size of the image",
    ),
    p(
        "backing.qcow2-cluster-size",
        Kind::Number,
        "cluster size of the image",
    ),
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
        "memory for all its L2 tables",
    ),
    p(
        "backing.qcow2-l2-short",
        YES_NO,
        "whether the cache is smaller than its L2 tables",
    ),
    p(
        "backing.pcie-speed-percent",
        Kind::Number,
        "speed of its PCIe link, in percent of the device's",
    ),
    p(
        "vm.front-end",
        Kind::Word(&["libvirt", "qemu", "proxmox", "ringdisk"]),
        "the program whose configuration it is",
    ),
    p("vm.machine", ANY, "machine type without its version"),
    p(
        "vm.machine-version",
        Kind::Version,
        "version of the machine type; unversioned types are the newest",
    ),
    p(
        "vm.machine-numbered",
        YES_NO,
        "whether its machine type is one of QEMU's own with a version",
    ),
    p(
        "vm.machine-removed",
        YES_NO,
        "whether this QEMU has removed its machine type",
    ),
    p("vm.qemu", Kind::Version, "version of QEMU"),
    p(
        "vm.rhel",
        YES_NO,
        "whether QEMU is Red Hat's, by its machine type or path",
    ),
    p(
        "vm.accel",
        Kind::Word(&["kvm", "tcg", "xen", "hvf", "other"]),
        "accelerator",
    ),
    p(
        "vm.host",
        Kind::Word(&["linux", "other"]),
        "the host's operating system, inferred from the accelerator",
    ),
    p("vm.vcpus", Kind::Number, "virtual CPUs"),
    p(
        "vm.cpu-quota",
        Kind::Number,
        "percent of a CPU that a limit leaves a thread",
    ),
    p("vm.memory", Kind::Number, "bytes of memory"),
    p(
        "vm.memory-shared",
        YES_NO,
        "whether other processes may map the guest's memory",
    ),
    p("vm.hugepages", YES_NO, "whether its memory uses huge pages"),
    p("vm.balloon", YES_NO, "whether it has a balloon"),
    p(
        "vm.os",
        Kind::Word(&["linux", "windows", "other"]),
        "the guest's operating system",
    ),
    p("vm.cpu-model", ANY, "model of the virtual CPUs"),
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
        "LD_LIBRARY_PATH of QEMU; inert if it is set but not exported",
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
    p("vm.busy-disks", Kind::Number, "disks other than CD-ROMs"),
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
    p("host.guest", YES_NO, "whether the host itself is a VM"),
    p("host.kernel", Kind::Version, "version of Linux"),
    p("host.arch", ANY, "architecture"),
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
        "memory reserved as huge pages",
    ),
    p("host.memory", Kind::Number, "memory"),
    p("host.swap-used", Kind::Number, "swap in use"),
    p("host.vms-memory", Kind::Number, "memory of all checked VMs"),
    p(
        "host.overcommitted",
        YES_NO,
        "whether the checked VMs have more memory than the host",
    ),
    p("host.cpus", Kind::Number, "CPUs"),
    p(
        "host.running-vcpus",
        Kind::Number,
        "vCPUs of all running VMs",
    ),
    p(
        "host.vcpus-percent",
        Kind::Number,
        "vCPUs of all running VMs, in percent of the CPUs",
    ),
    p(
        "host.cpu-pressure-percent",
        Kind::Number,
        "how long tasks waited for a CPU, in percent of five minutes",
    ),
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
        "whether delay accounting is on",
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
        "threads of the host's NFS server",
    ),
    p(
        "host.nfs-wdelay",
        YES_NO,
        "whether an NFS export delays writes",
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
    p("ceph.nic", ANY, "network link to the monitors"),
    p("ceph.nic-mbps", Kind::Number, "speed of that link in Mb/s"),
    p(
        "ceph.nic-shared",
        YES_NO,
        "whether guests are ports of a bridge on that link",
    ),
    p(
        "ceph.nic-pcie-mbps",
        Kind::Number,
        "bandwidth of the card's PCIe slot in Mb/s",
    ),
    p(
        "ceph.nic-ports-mbps",
        Kind::Number,
        "speed of all ports of the card in Mb/s",
    ),
    p("ceph.media", Kind::Word(&["hdd", "ssd"]), "the OSDs' media"),
    p("device.name", ANY, "name of a block device of the host"),
    p("device.virtio", YES_NO, "whether it is a virtual disk"),
    p("device.rotational", YES_NO, "whether it is a hard disk"),
    p("device.nvme", YES_NO, "whether it is NVMe"),
    p(
        "device.rbd",
        YES_NO,
        "whether it is an RBD image mapped by the kernel",
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
        "device.transport",
        Kind::Word(&[
            "local", "pcie", "tcp", "rdma", "fc", "iscsi", "stacked", "other",
        ]),
        "how the host reaches it; stacked devices consist of others",
    ),
    p("device.paths", Kind::Number, "paths to it"),
    p(
        "device.paths-together",
        Kind::Number,
        "paths that share its requests",
    ),
    p(
        "device.path-policy",
        ANY,
        "how requests are spread over its paths",
    ),
    p(
        "device.multipath",
        YES_NO,
        "whether it is a path of a multipath device",
    ),
    p(
        "device.scsi-queue-depth",
        Kind::Number,
        "requests that it accepts at a time",
    ),
    p(
        "device.io-queues",
        Kind::Number,
        "queues of its NVMe connection",
    ),
    p(
        "device.queue-size",
        Kind::Number,
        "requests that fit into one of these queues",
    ),
    p(
        "device.header-digest",
        YES_NO,
        "whether the headers of its packets have checksums",
    ),
    p(
        "device.data-digest",
        YES_NO,
        "whether the data of its packets has checksums",
    ),
    p("device.nic", ANY, "network link to it"),
    p(
        "device.nic-mbps",
        Kind::Number,
        "speed of that link in Mb/s",
    ),
    p(
        "device.nic-shared",
        YES_NO,
        "whether guests are ports of a bridge on that link",
    ),
    p(
        "device.nic-pcie-mbps",
        Kind::Number,
        "bandwidth of the card's PCIe slot in Mb/s",
    ),
    p(
        "device.nic-ports-mbps",
        Kind::Number,
        "speed of all ports of the card in Mb/s",
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
        "speed of its PCIe link, in percent of the device's",
    ),
    p(
        "measured.of-host-percent",
        Kind::Number,
        "the guest's speed in percent of the host's",
    ),
];
