//! A minimal virtio-blk driver (virtio 1.3 §5.2) over a vhost-user front-end, for tests and benchmarks.
//!
//! A benchmark fills every slot once with [`Queue::prepare`], and from then on changes only sectors: submitting and
//! polling neither allocate memory nor rebuild descriptors.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::frontend::{F_PROTOCOL_FEATURES, Frontend, Inflight, RingAddresses, protocol};
use crate::memory::Memory;
use crate::ring::{Desc, Ring};

/// How to configure a device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Number of queues to set up.
    pub queues: u16,
    /// Descriptors per queue; for a split queue, a power of two.
    pub queue_size: u16,
    /// Requests that a queue may have in flight: at most `queue_size` with `indirect`, a third of it without.
    pub slots: u16,
    /// Bytes of data buffer per slot.
    pub buffer_len: u32,
    /// Offset in bytes of a data buffer in its page. With 0, an O_DIRECT disk can use the buffers in place.
    pub buffer_offset: u32,
    /// Offset in bytes of the first memory region in its file; twice that for the second region, and so on.
    pub file_offset: u64,
    /// Accept INDIRECT_DESC and use it for every request.
    pub indirect: bool,
    /// Accept EVENT_IDX.
    pub event_idx: bool,
    /// Accept RING_PACKED.
    pub packed: bool,
    /// Have the device track requests in flight in shared memory, where it offers that.
    pub inflight: bool,
    /// Entries per queue in the region for that, if not as many as the queue has descriptors.
    pub region: Option<RegionEntries>,
    /// Virtio features to accept if they are offered.
    pub features: u64,
    /// Protocol features to accept if they are offered.
    pub protocol: u64,
}

/// The size of a region for requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionEntries {
    /// The device is asked for a region of this many entries.
    Asked(u16),
    /// The front-end makes a region of this many entries, as the specification describes.
    Made(u16),
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 256,
            slots: 16,
            buffer_len: 128 << 10,
            buffer_offset: 0,
            file_offset: 0x1_0000,
            indirect: true,
            event_idx: true,
            packed: false,
            inflight: false,
            region: None,
            features: !0,
            protocol: protocol::ALL,
        }
    }
}

impl DeviceConfig {
    /// Bytes from the start of a slot's first page to the end of its buffer.
    fn data_len(&self) -> u64 {
        u64::from(self.buffer_offset) + u64::from(self.buffer_len)
    }
}

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
        let inflight = match config.inflight && protocol & protocol::INFLIGHT_SHMFD != 0 {
            true => Some(region(&mut frontend, config)?),
            false => None,
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
        Ok(Queue::new(index, ring, &memory, indirect, config, data))
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

/// A request, without its sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read into the slot's buffer.
    Read,
    /// Write from the slot's buffer.
    Write,
    /// Make completed writes stable.
    Flush,
    /// Get the serial number.
    GetId,
    /// Discard a range.
    Discard,
    /// Make a range read as zeroes.
    WriteZeroes {
        /// The range may be deallocated.
        unmap: bool,
    },
    /// A request of an undefined type, with data for the device.
    Unknown(u32),
}

/// A virtqueue with a fixed set of request slots.
pub struct Queue {
    /// Number of the queue.
    pub index: u16,
    /// The queue's ring.
    pub ring: Ring,
    memory: Arc<Memory>,
    indirect: bool,
    slots: Box<[Slot]>,
}

struct Slot {
    /// Guest-physical address of the control block: header at 0, status at 16, indirect table at 64.
    control: u64,
    data: u64,
    header: *mut Header,
    status: *mut u8,
    in_flight: bool,
}

// SAFETY: the slots' pointers point into guest memory, which `memory` keeps mapped and which is Sync.
unsafe impl Send for Queue {}

/// Bytes of a slot's control block. Header and status share a cache line, as they do in a guest.
const CONTROL: u64 = 128;
const STATUS_AT: u64 = 16;
const TABLE_AT: u64 = 64;
/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;

/// The request header (virtio 1.3 §5.2.6).
#[repr(C)]
struct Header {
    kind: u32,
    reserved: u32,
    sector: u64,
}

impl Queue {
    fn new(
        index: u16,
        ring: Ring,
        memory: &Arc<Memory>,
        indirect: bool,
        config: &DeviceConfig,
        region: usize,
    ) -> Self {
        let per_slot = if indirect { 1 } else { CHAIN };
        assert!(
            config.slots * per_slot <= ring.size,
            "{} slots do not fit the ring",
            config.slots
        );
        let slot = |_| {
            let control = memory.regions()[Device::RINGS].alloc(CONTROL, 64);
            let data = memory.regions()[region].alloc(config.data_len(), 4096);
            let data = data + u64::from(config.buffer_offset);
            let header = memory.ptr(control, 16).cast();
            let status = memory.ptr(control + STATUS_AT, 1);
            Slot {
                control,
                data,
                header,
                status,
                in_flight: false,
            }
        };
        let slots = (0..config.slots).map(slot).collect();
        Self {
            index,
            ring,
            memory: memory.clone(),
            indirect,
            slots,
        }
    }

    /// The number of slots.
    pub fn slots(&self) -> u16 {
        self.slots.len() as u16
    }

    /// Forgets the requests in flight, and resets the ring to index `base`.
    pub fn restart(&mut self, base: u16) {
        self.ring.restart(base);
        self.slots.iter_mut().for_each(|s| s.in_flight = false);
    }

    /// The first descriptor that no slot uses; a test's own chains go there.
    pub fn first_free_desc(&self) -> u16 {
        self.slots.len() as u16 * if self.indirect { 1 } else { CHAIN }
    }

    /// Builds the descriptor chain of a request in a free slot. `len` is in bytes. A discard or write-zeroes request
    /// puts its only segment into the slot's buffer.
    pub fn prepare(&mut self, slot: u16, op: Op, sector: u64, len: u32) {
        self.prepare_at(slot, op, sector, len, self.buffer(slot));
    }

    /// As `prepare`, with a buffer at any guest-physical address.
    pub fn prepare_at(&mut self, slot: u16, op: Op, sector: u64, len: u32, data: u64) {
        let (kind, data_len, device_writes) = match op {
            Op::Read => (VIRTIO_BLK_T_IN, len, true),
            Op::Write => (VIRTIO_BLK_T_OUT, len, false),
            Op::Flush => (VIRTIO_BLK_T_FLUSH, 0, false),
            Op::GetId => (VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_ID_BYTES, true),
            Op::Discard => (VIRTIO_BLK_T_DISCARD, 16, false),
            Op::WriteZeroes { .. } => (VIRTIO_BLK_T_WRITE_ZEROES, 16, false),
            Op::Unknown(kind) => (kind, len, false),
        };
        if let Op::Discard | Op::WriteZeroes { .. } = op {
            let flags = u32::from(op == Op::WriteZeroes { unmap: true });
            self.write_buffer(slot, &segment(sector, len / 512, flags));
        }
        let Slot {
            control,
            header,
            in_flight,
            ..
        } = self.slots[usize::from(slot)];
        assert!(!in_flight, "slot {slot} is in flight");
        let sector = if matches!(op, Op::Read | Op::Write) {
            sector
        } else {
            0
        };
        // SAFETY: the slot is not in flight, so only the driver accesses its header, which is mapped and aligned.
        unsafe {
            header.write_volatile(Header {
                kind,
                reserved: 0,
                sector,
            })
        };

        let write = if device_writes { Desc::WRITE } else { 0 };
        let mut chain = [
            Desc {
                addr: control,
                len: 16,
                flags: Desc::NEXT,
                next: 1,
            },
            Desc {
                addr: data,
                len: data_len,
                flags: Desc::NEXT | write,
                next: 2,
            },
            Desc {
                addr: control + STATUS_AT,
                len: 1,
                flags: Desc::WRITE,
                next: 0,
            },
        ];
        let mut used = 3;
        if data_len == 0 {
            chain[1] = chain[2];
            used = 2;
        }
        if self.indirect {
            let table = control + TABLE_AT;
            (0..)
                .zip(&chain[..used])
                .for_each(|(i, d)| self.memory.write(table + 16 * i, &self.ring.table_bytes(d)));
            let desc = Desc {
                addr: table,
                len: 16 * used as u32,
                flags: Desc::INDIRECT,
                next: 0,
            };
            self.ring.set_desc(slot, desc);
        } else {
            let first = slot * CHAIN;
            for (i, desc) in (0..).zip(&chain[..used]) {
                self.ring.set_desc(
                    first + i,
                    Desc {
                        next: first + desc.next,
                        ..*desc
                    },
                );
            }
        }
    }

    /// Changes the sector of a prepared read or write.
    #[inline]
    pub fn set_sector(&mut self, slot: u16, sector: u64) {
        let slot = &self.slots[usize::from(slot)];
        debug_assert!(!slot.in_flight);
        // SAFETY: the slot is not in flight, so only the driver accesses its header, which is mapped and aligned.
        unsafe { (&raw mut (*slot.header).sector).write_volatile(sector) }
    }

    /// Submits prepared slots to the device, with a single publication and at most one kick.
    #[inline]
    pub fn submit(&mut self, slots: &[u16]) {
        for &slot in slots {
            let slot = &mut self.slots[usize::from(slot)];
            assert!(!slot.in_flight);
            slot.in_flight = true;
            // SAFETY: the slot was not in flight, so only the driver accesses its status byte; no device writes 0xff
            // there.
            unsafe { slot.status.write_volatile(0xff) };
        }
        let per_slot = if self.indirect { 1 } else { CHAIN };
        self.ring.publish(slots.iter().map(|s| s * per_slot));
    }

    /// Takes all completed requests as `(slot, status)`. Returns their number.
    #[inline]
    pub fn poll(&mut self, mut done: impl FnMut(u16, u8)) -> usize {
        let per_slot = if self.indirect { 1 } else { CHAIN };
        let slots = &mut self.slots;
        self.ring.take_used(|used| {
            let index = used.id as u16 / per_slot;
            let slot = &mut slots[usize::from(index)];
            assert!(
                slot.in_flight && used.id == u32::from(index * per_slot),
                "{used:?} was not in flight"
            );
            slot.in_flight = false;
            // SAFETY: the byte is mapped, and the device no longer accesses it.
            done(index, unsafe { slot.status.read_volatile() });
        })
    }

    /// Sleeps until the device has completed a request.
    pub fn wait(&mut self) {
        self.ring.wait();
    }

    /// Sleeps until the device has completed a request, or until `deadline` (false).
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        self.ring.wait_until(deadline)
    }

    /// Sleeps until the device has completed a request on one of `queues`.
    pub fn wait_any<'a>(queues: impl Iterator<Item = &'a mut Self>) {
        Ring::wait_any(queues.map(|queue| &mut queue.ring));
    }

    /// Copies into a slot's buffer.
    pub fn write_buffer(&mut self, slot: u16, bytes: &[u8]) {
        self.memory.write(self.buffer(slot), bytes);
    }

    /// Copies out of a slot's buffer.
    pub fn read_buffer(&self, slot: u16, len: usize) -> Vec<u8> {
        self.memory.read(self.buffer(slot), len)
    }

    /// Guest-physical address of a slot's buffer.
    pub fn buffer(&self, slot: u16) -> u64 {
        self.slots[usize::from(slot)].data
    }

    /// Runs one request in slot 0, and sleeps until it is done. Returns its status.
    pub fn run(&mut self, op: Op, sector: u64, len: u32) -> u8 {
        self.prepare(0, op, sector, len);
        self.submit(&[0]);
        self.finish(1)[0].1
    }

    /// Sleeps until `count` requests are done, and returns them as `(slot, status)`.
    ///
    /// # Panics
    /// No request completes for 30 seconds.
    pub fn finish(&mut self, count: usize) -> Vec<(u16, u8)> {
        let mut done = Vec::new();
        while done.len() < count {
            assert!(
                self.ring.wait_timeout(HANG),
                "queue {} hangs with {} of {count} done",
                self.index,
                done.len()
            );
            self.poll(|slot, status| done.push((slot, status)));
        }
        done
    }

    /// Writes `bytes`, at most a buffer's length, at a sector. Returns the status.
    pub fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        self.write_buffer(0, bytes);
        self.run(Op::Write, sector, bytes.len() as u32)
    }

    /// Reads `len` bytes, at most a buffer's length, at a sector; an error is the status.
    pub fn read(&mut self, sector: u64, len: usize) -> Result<Vec<u8>, u8> {
        self.write_buffer(0, &vec![0xa5; len]);
        match self.run(Op::Read, sector, len as u32) {
            0 => Ok(self.read_buffer(0, len)),
            status => Err(status),
        }
    }
}

/// How long a request may take before a test considers it lost.
pub const HANG: Duration = Duration::from_secs(30);

/// A discard or write-zeroes segment (virtio 1.3 §5.2.6, `struct virtio_blk_discard_write_zeroes`).
pub fn segment(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    (u128::from(sector) | u128::from(sectors) << 64 | u128::from(flags) << 96).to_le_bytes()
}
