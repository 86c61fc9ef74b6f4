//! The messages of front-ends, taken from their sources.

use testkit::frontend::{F_LOG_ALL, F_PROTOCOL_FEATURES, protocol};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// A front-end.
pub struct FrontEnd {
    pub name: &'static str,
    /// The version of the sources.
    pub version: &'static str,
    /// Virtio features that it and its guest accept if offered.
    pub features: u64,
    /// Protocol features that it accepts if offered.
    pub protocol: u64,
    pub queues: u16,
    pub queue_size: u16,
    /// It asks for an acknowledgement of every message once REPLY_ACK is negotiated.
    pub needs_reply: bool,
    /// It is its own guest: its addresses are guest addresses.
    pub own_addresses: bool,
    /// Offset of the memory in its files.
    pub file_offset: u64,
    /// Its steps, in named parts.
    pub script: &'static [(&'static str, &'static [Step])],
}

/// A message, or an event between messages.
#[derive(Clone, Copy)]
pub enum Step {
    All(&'static [Step]),
    Owner,
    GetFeatures,
    SetFeatures,
    GetProtocol,
    SetProtocol,
    QueueNum,
    /// With this many bytes of space after the header.
    GetConfig {
        offset: u32,
        len: u32,
        flags: u32,
        space: usize,
    },
    /// Of one byte, with this many bytes of space after the header.
    SetConfig {
        offset: u32,
        value: u8,
        flags: u32,
        space: usize,
    },
    /// The write cache must have this value.
    CacheIs(u8),
    BackendChannel,
    /// SET_MEM_TABLE with all regions.
    Memory,
    AddMemory,
    /// GET_INFLIGHT_FD, if there is no region yet, and SET_INFLIGHT_FD.
    Inflight,
    /// These steps for each ring in turn.
    Rings(&'static [RingStep]),
    /// SET_LOG_BASE, and SET_FEATURES with the log feature.
    StartLog,
    /// SET_FEATURES without the log feature.
    StopLog,
    /// The guest reads and writes.
    Requests,
    /// A new driver starts with empty rings.
    NewGuest,
    /// The back-end is killed and restarted, and the front-end reconnects.
    Reconnect,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RingStep {
    Num,
    Addr,
    /// With the address of the used ring in the log.
    LoggedAddr,
    Base,
    Call,
    Kick,
    Enable(bool),
    GetBase,
}

use RingStep::{Addr, Base, Call, Enable, GetBase, Kick, LoggedAddr, Num};
use Step::*;

pub const FRONT_ENDS: &[FrontEnd] = &[
    FrontEnd {
        version: "53.0",
        ..CLOUD_HYPERVISOR
    },
    FrontEnd {
        version: "50.0",
        script: &[
            (
                "start",
                &[
                    All(CLOUD_HYPERVISOR_HELLO),
                    // VHOST_USER_CONFIG_OFFSET.
                    GetConfig {
                        offset: 0x100,
                        len: 60,
                        flags: 1,
                        space: 60,
                    },
                    All(CLOUD_HYPERVISOR_START),
                ],
            ),
            ("requests", &[Requests]),
        ],
        ..CLOUD_HYPERVISOR
    },
    CROSVM,
    FIRECRACKER,
    SPDK,
];

// virtio-devices/src/vhost_user/{blk,vu_common_ctrl}.rs

const CLOUD_HYPERVISOR: FrontEnd = FrontEnd {
    name: "Cloud Hypervisor",
    version: "",
    features: 1 << VIRTIO_BLK_F_SIZE_MAX
        | 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_GEOMETRY
        | 1 << VIRTIO_BLK_F_RO
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_FLUSH
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_CONFIG_WCE
        | 1 << VIRTIO_BLK_F_DISCARD
        | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        | 1 << VIRTIO_BLK_F_MQ
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | 1 << VIRTIO_F_VERSION_1
        // IN_ORDER, ORDER_PLATFORM and NOTIFICATION_DATA.
        | 1 << 35
        | 1 << 36
        | 1 << 38
        | F_LOG_ALL
        | F_PROTOCOL_FEATURES,
    protocol: protocol::CONFIG
        | protocol::MQ
        | protocol::CONFIGURE_MEM_SLOTS
        | protocol::REPLY_ACK
        | protocol::INFLIGHT_SHMFD
        | protocol::LOG_SHMFD,
    queues: 2,
    queue_size: 128,
    needs_reply: true,
    own_addresses: false,
    file_offset: 0x1_0000,
    script: &[
        (
            "start",
            &[
                All(CLOUD_HYPERVISOR_HELLO),
                GetConfig {
                    offset: 0,
                    len: 60,
                    flags: 1,
                    space: 60,
                },
                All(CLOUD_HYPERVISOR_START),
            ],
        ),
        ("requests", &[Requests]),
        (
            "the guest's write cache",
            &[
                SetConfig {
                    offset: 32,
                    value: 0,
                    flags: 1,
                    space: 1,
                },
                CacheIs(0),
            ],
        ),
        (
            "pause and resume",
            &[Rings(&[Enable(false)]), Rings(&[Enable(true)]), Requests],
        ),
        ("more memory", &[AddMemory, Requests]),
        (
            "log of dirty memory",
            &[
                StartLog,
                Rings(&[LoggedAddr]),
                Requests,
                StartLog,
                Requests,
                Rings(&[Addr]),
                StopLog,
                Requests,
            ],
        ),
        (
            "reset of the guest",
            &[
                Rings(&[Enable(false), GetBase]),
                NewGuest,
                All(CLOUD_HYPERVISOR_START),
                Requests,
            ],
        ),
        (
            "reconnect",
            &[
                Reconnect,
                Owner,
                GetFeatures,
                SetProtocol,
                All(CLOUD_HYPERVISOR_START),
                Requests,
            ],
        ),
    ],
};

const CLOUD_HYPERVISOR_HELLO: &[Step] = &[Owner, GetFeatures, GetProtocol, SetProtocol, QueueNum];

const CLOUD_HYPERVISOR_START: &[Step] = &[
    SetFeatures,
    Memory,
    Rings(&[Num]),
    Inflight,
    Rings(&[Addr, Base, Call, Kick]),
    Rings(&[Enable(true)]),
];

// devices/src/virtio/vhost_user_frontend/mod.rs

const CROSVM: FrontEnd = FrontEnd {
    name: "crosvm",
    version: "f1e797a68",
    // All device-specific bits, VERSION_1, EVENT_IDX and SUSPEND.
    features: 0xfffc_0000_00ff_ffff
        | 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | F_PROTOCOL_FEATURES,
    protocol: protocol::CONFIG | protocol::MQ | protocol::BACKEND_REQ | protocol::REPLY_ACK,
    queues: 2,
    queue_size: 32768,
    needs_reply: false,
    own_addresses: false,
    file_offset: 0x1_0000,
    script: &[
        (
            "start",
            &[
                Owner,
                GetFeatures,
                GetProtocol,
                SetProtocol,
                BackendChannel,
                QueueNum,
                // The driver reads field by field.
                GetConfig {
                    offset: 0,
                    len: 8,
                    flags: 1,
                    space: 8,
                },
                GetConfig {
                    offset: 34,
                    len: 2,
                    flags: 1,
                    space: 2,
                },
                SetFeatures,
                All(CROSVM_START),
            ],
        ),
        ("requests", &[Requests]),
        (
            "the guest's write cache",
            &[
                SetConfig {
                    offset: 32,
                    value: 0,
                    flags: 0,
                    space: 1,
                },
                CacheIs(0),
            ],
        ),
        (
            "sleep and wake",
            &[
                Rings(&[Enable(false), GetBase]),
                All(CROSVM_START),
                Requests,
            ],
        ),
        (
            "reset of the guest",
            &[
                Rings(&[Enable(false), GetBase]),
                NewGuest,
                All(CROSVM_START),
                Requests,
            ],
        ),
    ],
};

const CROSVM_START: &[Step] = &[Memory, Rings(&[Num, Addr, Base, Call, Kick, Enable(true)])];

// src/vmm/src/devices/virtio/vhost_user.rs, block/vhost_user/device.rs

const FIRECRACKER: FrontEnd = FrontEnd {
    name: "Firecracker",
    version: "1.16.1",
    features: 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | 1 << VIRTIO_BLK_F_RO
        | 1 << VIRTIO_BLK_F_FLUSH
        | F_PROTOCOL_FEATURES,
    protocol: protocol::CONFIG,
    queues: 1,
    queue_size: 256,
    needs_reply: false,
    own_addresses: false,
    file_offset: 0x1_0000,
    script: &[
        (
            "start",
            &[
                Owner,
                GetFeatures,
                GetProtocol,
                SetProtocol,
                FIRECRACKER_CONFIG,
                SetFeatures,
                Memory,
                Rings(&[Num]),
                Rings(&[Addr, Base, Call, Kick, Enable(true)]),
            ],
        ),
        ("requests", &[Requests]),
        ("PATCH /drives", &[FIRECRACKER_CONFIG, Requests]),
    ],
};

const FIRECRACKER_CONFIG: Step = GetConfig {
    offset: 0,
    len: 60,
    flags: 1,
    space: 60,
};

// lib/virtio/virtio_vhost_user.c, module/bdev/virtio/bdev_virtio_blk.c

const SPDK: FrontEnd = FrontEnd {
    name: "SPDK's initiator",
    version: "26.05",
    features: 1 << VIRTIO_BLK_F_SIZE_MAX
        | 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_MQ
        | 1 << VIRTIO_BLK_F_RO
        | 1 << VIRTIO_BLK_F_DISCARD
        | 1 << VIRTIO_BLK_F_FLUSH
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | 1 << VIRTIO_F_VERSION_1
        | F_PROTOCOL_FEATURES,
    protocol: protocol::MQ | protocol::CONFIG,
    queues: 2,
    queue_size: 128,
    needs_reply: false,
    own_addresses: true,
    file_offset: 0,
    script: &[
        (
            "attach",
            &[
                Owner,
                GetFeatures,
                SetFeatures,
                GetProtocol,
                SetProtocol,
                // For the number of queues, then for each field.
                SPDK_CONFIG,
                SPDK_CONFIG,
                SPDK_CONFIG,
                Rings(&[Enable(true)]),
            ],
        ),
        ("start", SPDK_START),
        ("requests", &[Requests]),
        (
            "stop and start",
            &[
                Rings(&[GetBase]),
                SPDK_MEMORY,
                SPDK_MEMORY,
                NewGuest,
                GetFeatures,
                SetFeatures,
                GetProtocol,
                SetProtocol,
                SPDK_CONFIG,
                Rings(&[Enable(true)]),
                All(SPDK_START),
                Requests,
            ],
        ),
        (
            "write to the configuration",
            &[
                SetConfig {
                    offset: 32,
                    value: 0,
                    flags: 0,
                    space: 256,
                },
                CacheIs(0),
                Requests,
            ],
        ),
    ],
};

const SPDK_START: &[Step] = &[
    QueueNum,
    Rings(&[Call]),
    // Once for each registered memory range.
    SPDK_MEMORY,
    SPDK_MEMORY,
    Rings(&[Num, Base, Addr, Kick]),
];

const SPDK_CONFIG: Step = GetConfig {
    offset: 0,
    len: 256,
    flags: 0,
    space: 256,
};

/// The reply tells that the memory is known.
const SPDK_MEMORY: Step = All(&[Memory, GetFeatures]);
