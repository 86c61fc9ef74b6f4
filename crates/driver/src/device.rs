//! A minimal virtio-blk driver (virtio 1.3 §5.2) over a vhost-user front-end.
//!
//! A benchmark fills every slot once with [`Queue::prepare`], and from then on changes only sectors: submitting and
//! polling neither allocate memory nor rebuild descriptors.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::config::{DeviceConfig, RegionEntries};
use crate::frontend::{F_PROTOCOL_FEATURES, Frontend, Inflight, RingAddresses, protocol};
use crate::memory::Memory;
use crate::queue::{CONTROL, Queue};
use crate::ring::Ring;

/// A virtio-blk device at the other end of a vhost-user socket.
pub struct Device {
    /// The connection, for messages that a test sends itself.
    pub frontend: Frontend,
    /// The guest's memory. The device knows [`Device::RINGS`], [`Device::LOW`] and [`Device::HIGH`], but not
    /// [`Device::SPARE`].
    pub memory: Arc<Memory>,
    /// The queues. A test may take them out to drive each from its own thread.
    pub queues: Vec<Queue>,
    /// The negotiated virtio features.
    pub features: u64,
    /// The negotiated protocol features.
    pub protocol: u64,
    /// The region in which the device tracks requests in flight.
    pub inflight: Option<Inflight>,
}

/// Bytes in LOW and in HIGH for a test's own buffers, in addition to those of the slots.
const SCRATCH: u64 = 4 << 20;

impl Device {
    /// The region that holds the rings and the request headers.
    pub const RINGS: usize = 0;
    /// The region of the even queues' data buffers. It is adjacent to `HIGH` in guest-physical addresses only.
    pub const LOW: usize = 1;
    /// The region of the odd queues' data buffers.
    pub const HIGH: usize = 2;
    /// A region after a hole. The device does not know it.
    pub const SPARE: usize = 3;

    /// Connects, negotiates and starts the queues.
    pub fn connect(socket: impl AsRef<Path>, config: &DeviceConfig) -> io::Result<Self> {
        let mut frontend = Frontend::connect(socket)?;
        let (features, protocol) = negotiate(&mut frontend, config)?;
        let inflight = if config.inflight && protocol & protocol::INFLIGHT_SHMFD != 0 {
            Some(region(&mut frontend, config)?)
        } else {
            None
        };
        let (memory, queues) = lay_out(config, features)?;
        let mut device = Self {
            frontend,
            memory,
            queues,
            features,
            protocol,
            inflight,
        };
        device.announce()?;
        for index in 0..device.queues.len() {
            let base = device.queues[index].ring.first_base();
            device.start_queue(index, base)?;
        }
        device.set_driver_ok()?;
        Ok(device)
    }

    /// Stops all queues as QEMU does when a VM is paused, and returns the base of each. QEMU 7.2 resets the device
    /// first, later versions reset it last.
    pub fn pause(&mut self, reset_first: bool) -> io::Result<Vec<u32>> {
        if reset_first {
            self.frontend.set_status(0)?;
        }
        for queue in &self.queues {
            self.frontend.set_vring_enable(queue.index, false)?;
        }
        let each = self.queues.iter().map(|queue| queue.index);
        let bases = each.map(|queue| self.frontend.vring_base(queue)).collect();
        if !reset_first {
            self.frontend.set_status(0)?;
        }
        bases
    }

    /// Continues after a pause, with all requests that are in flight.
    pub fn go_on(&mut self, bases: &[u32]) -> io::Result<()> {
        self.frontend.set_features(self.features)?;
        if let Some(inflight) = &self.inflight {
            self.frontend.set_inflight(inflight)?;
        }
        for (index, &base) in bases.iter().enumerate() {
            self.resume_queue(index, base)?;
        }
        self.set_driver_ok()
    }

    /// Reconnects after the device has died, and continues: the rings are unchanged, and contain all requests in
    /// flight. The device gets the base that QEMU would know: the used index of a split ring, the initial position of a
    /// packed one.
    pub fn reconnect(&mut self, socket: impl AsRef<Path>, config: &DeviceConfig) -> io::Result<()> {
        self.rejoin(socket, config)?;
        for index in 0..self.queues.len() {
            let base = self.queues[index].ring.base_after_death();
            self.resume_queue(index, base)?;
        }
        self.set_driver_ok()
    }

    /// Goes on at another host after the device has died, to which QEMU moved meanwhile: the region for requests in flight is a
    /// new one.
    pub fn move_after_death(
        &mut self,
        socket: impl AsRef<Path>,
        config: &DeviceConfig,
    ) -> io::Result<()> {
        self.frontend = Frontend::connect(socket)?;
        negotiate(&mut self.frontend, config)?;
        self.inflight = Some(region(&mut self.frontend, config)?);
        self.announce()?;
        for index in 0..self.queues.len() {
            let base = self.queues[index].ring.base_after_death();
            self.resume_queue(index, base)?;
        }
        self.set_driver_ok()
    }

    /// Reconnects as [`reconnect`](Self::reconnect) does, but sets up no queue.
    ///
    /// # Panics
    /// The device is not the same.
    pub fn rejoin(&mut self, socket: impl AsRef<Path>, config: &DeviceConfig) -> io::Result<()> {
        self.frontend = Frontend::connect(socket)?;
        let negotiated = negotiate(&mut self.frontend, config)?;
        assert_eq!(negotiated, (self.features, self.protocol), "another device");
        self.announce()
    }

    /// Uses the connection and the memory for a new device, as QEMU does when a device is unplugged and another one
    /// plugged in on the same chardev. The queues must have stopped.
    pub fn plug_in_again(&mut self, config: &DeviceConfig) -> io::Result<()> {
        negotiate(&mut self.frontend, config)?;
        self.announce()?;
        for index in 0..self.queues.len() {
            let base = self.queues[index].ring.first_base();
            self.start_queue(index, base)?;
        }
        self.set_driver_ok()
    }

    /// Sends the memory map, and the region for requests in flight.
    fn announce(&mut self) -> io::Result<()> {
        if let Some(inflight) = &self.inflight {
            self.frontend.set_inflight(inflight)?;
        }
        let regions = &self.memory.regions()[..Self::SPARE];
        if self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            regions
                .iter()
                .try_for_each(|r| self.frontend.add_mem_reg(r))
        } else {
            let all: Vec<_> = regions.iter().collect();
            self.frontend.set_mem_table(&all)
        }
    }

    fn set_driver_ok(&mut self) -> io::Result<()> {
        match self.protocol & protocol::STATUS {
            0 => Ok(()),
            // ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK
            _ => self.frontend.set_status(0x0f),
        }
    }

    /// Sets up a queue from scratch at index `base`, and enables it. It must have nothing in flight.
    pub fn start_queue(&mut self, index: usize, base: u16) -> io::Result<()> {
        self.queues[index].restart(base);
        let base = self.queues[index].ring.base_word(base);
        self.resume_queue(index, base)
    }

    /// Sets up a queue as it is, with its requests in flight and available, and enables it.
    pub fn resume_queue(&mut self, index: usize, base: u32) -> io::Result<()> {
        let Self {
            frontend,
            memory,
            queues,
            ..
        } = self;
        let queue = &mut queues[index];
        let (ring, index) = (&queue.ring, queue.index);
        let guest = ring.guest_addresses();
        let user = RingAddresses {
            desc: memory.user(guest.desc),
            used: memory.user(guest.used),
            avail: memory.user(guest.avail),
        };
        frontend.set_vring_num(index, ring.size)?;
        frontend.set_vring_base(index, base)?;
        frontend.set_vring_addr(index, user)?;
        frontend.set_vring_err(index, ring.err.as_fd())?;
        frontend.set_vring_call(index, ring.call.as_fd())?;
        frontend.set_vring_kick(index, ring.kick.as_fd())?;
        frontend.set_vring_enable(index, true)
    }

    /// Stops a queue, and returns the index at which the device would continue.
    pub fn stop_queue(&mut self, index: usize) -> io::Result<u16> {
        // For a packed ring, this is the position of the next fetch. As nothing is in flight, the other half is equal.
        let base = self.frontend.vring_base(self.queues[index].index)?;
        Ok(base as u16)
    }

    /// Reads the device's config space.
    pub fn config(&mut self) -> io::Result<DiskConfig> {
        self.frontend
            .config(0, DiskConfig::LEN as u32)
            .map(|bytes| DiskConfig::parse(&bytes))
    }
}

/// Makes or requests a region for requests in flight, of the configured size.
fn region(frontend: &mut Frontend, config: &DeviceConfig) -> io::Result<Inflight> {
    let asked = RegionEntries::Asked(config.queue_size);
    match config.region.unwrap_or(asked) {
        RegionEntries::Asked(entries) => {
            let mut region = frontend.inflight(config.queues, entries)?;
            // QEMU sends back the number that it asked for.
            region.description.3 = entries;
            Ok(region)
        }
        RegionEntries::Made(entries) => Inflight::made(config.queues, entries, config.packed),
    }
}

/// The config space (virtio 1.3 §5.2.4, `struct virtio_blk_config`), without the geometry and fields that no host here
/// offers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub struct DiskConfig {
    pub capacity: u64,
    pub size_max: u32,
    pub seg_max: u32,
    pub blk_size: u32,
    pub physical_block_exp: u8,
    pub alignment_offset: u8,
    pub min_io_size: u16,
    pub opt_io_size: u32,
    pub wce: u8,
    pub num_queues: u16,
    pub max_discard_sectors: u32,
    pub max_discard_seg: u32,
    pub discard_sector_alignment: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_seg: u32,
    pub write_zeroes_may_unmap: u8,
}

impl DiskConfig {
    /// Length in bytes, up to and including `write_zeroes_may_unmap` and its padding.
    pub const LEN: usize = 60;
    /// The offset of `writeback`.
    pub const WCE_AT: u32 = 32;

    fn parse(bytes: &[u8]) -> Self {
        let word = |at: usize, len: usize| {
            bytes[at..at + len]
                .iter()
                .rev()
                .fold(0, |n, &b| n << 8 | u64::from(b))
        };
        let (byte, short, long) = (
            |at| bytes[at],
            |at| word(at, 2) as u16,
            |at| word(at, 4) as u32,
        );
        Self {
            capacity: word(0, 8),
            size_max: long(8),
            seg_max: long(12),
            blk_size: long(20),
            physical_block_exp: byte(24),
            alignment_offset: byte(25),
            min_io_size: short(26),
            opt_io_size: long(28),
            wce: byte(32),
            num_queues: short(34),
            max_discard_sectors: long(36),
            max_discard_seg: long(40),
            discard_sector_alignment: long(44),
            max_write_zeroes_sectors: long(48),
            max_write_zeroes_seg: long(52),
            write_zeroes_may_unmap: byte(56),
        }
    }
}

fn negotiate(frontend: &mut Frontend, config: &DeviceConfig) -> io::Result<(u64, u64)> {
    frontend.set_owner()?;
    let offered = frontend.features()?;
    let mut wanted = config.features;
    for (on, bit) in [
        (config.indirect, VIRTIO_RING_F_INDIRECT_DESC),
        (config.event_idx, VIRTIO_RING_F_EVENT_IDX),
        (config.packed, VIRTIO_F_RING_PACKED),
    ] {
        wanted = if on { wanted } else { wanted & !(1 << bit) };
    }
    let known = DISK_FEATURES
        | F_PROTOCOL_FEATURES
        | 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_F_RING_PACKED
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_RING_F_EVENT_IDX;
    let features = offered & known & (wanted | 1 << VIRTIO_F_VERSION_1 | F_PROTOCOL_FEATURES);
    let mut accepted = 0;
    if features & F_PROTOCOL_FEATURES != 0 {
        accepted = frontend.protocol_features()? & config.protocol & protocol::ALL;
        frontend.set_protocol_features(accepted)?;
    }
    frontend.set_features(features)?;
    Ok((features, accepted))
}

/// The virtio-blk feature bits that this driver knows (virtio 1.3 §5.2.3).
pub const DISK_FEATURES: u64 = 1 << VIRTIO_BLK_F_SIZE_MAX
    | 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_RO
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_BLK_F_TOPOLOGY
    | 1 << VIRTIO_BLK_F_CONFIG_WCE
    | 1 << VIRTIO_BLK_F_MQ
    | 1 << VIRTIO_BLK_F_DISCARD
    | 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// Makes a driver's memory and queues, for a front-end that announces them to the device in its own way.
pub fn lay_out(config: &DeviceConfig, features: u64) -> io::Result<(Arc<Memory>, Vec<Queue>)> {
    let memory = Arc::new(guest_memory(config)?);
    let event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
    let indirect = features & 1 << VIRTIO_RING_F_INDIRECT_DESC != 0;
    let make = match features & 1 << VIRTIO_F_RING_PACKED {
        0 => Ring::new,
        _ => Ring::packed,
    };
    let queue = |index| {
        let rings = &memory.regions()[Device::RINGS];
        let ring = make(&memory, rings, config.queue_size, event_idx)?;
        let data = [Device::LOW, Device::HIGH][usize::from(index % 2)];
        let regions = (rings, &memory.regions()[data]);
        Ok(Queue::new(index, ring, &memory, indirect, config, regions))
    };
    let queues = (0..config.queues).map(queue).collect::<io::Result<_>>()?;
    Ok((memory, queues))
}

fn guest_memory(config: &DeviceConfig) -> io::Result<Memory> {
    let (size, slots) = (u64::from(config.queue_size), u64::from(config.slots));
    let page = |bytes: u64| bytes.next_multiple_of(4096);
    let rings = page(u64::from(config.queues) * (26 * size + 256 + slots * CONTROL + 64)) + SCRATCH;
    let per_queue = slots * page(config.data_len());
    let low = u64::from(config.queues.div_ceil(2)) * per_queue + SCRATCH;
    let high = u64::from(config.queues / 2) * per_queue + SCRATCH;
    let base = 0x10_0000;
    let spare = (base + rings + low + high).next_multiple_of(1 << 30) + (4 << 30);
    let layout = [
        (base, rings),
        (base + rings, low),
        (base + rings + low, high),
        (spare, SCRATCH),
    ];
    Memory::with_offsets(&layout, config.file_offset)
}
