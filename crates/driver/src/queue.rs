//! A virtqueue with a fixed set of request slots, each with its own buffer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::*;

use crate::config::DeviceConfig;
use crate::memory::{Memory, Region};
use crate::ring::{Desc, Ring};

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
pub(crate) const CONTROL: u64 = 128;
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
    /// `regions` hold the control blocks of its slots, and their data buffers.
    pub(crate) fn new(
        index: u16,
        ring: Ring,
        memory: &Arc<Memory>,
        indirect: bool,
        config: &DeviceConfig,
        (controls, buffers): (&Region, &Region),
    ) -> Self {
        let per_slot = if indirect { 1 } else { CHAIN };
        assert!(
            config.slots * per_slot <= ring.size,
            "{} slots do not fit the ring",
            config.slots
        );
        let slot = |_| {
            let control = controls.alloc(CONTROL, 64);
            let data = buffers.alloc(config.data_len(), 4096);
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
