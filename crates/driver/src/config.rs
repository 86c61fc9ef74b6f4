//! How to configure a device.

use crate::frontend::protocol;

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
    pub(crate) fn data_len(&self) -> u64 {
        u64::from(self.buffer_offset) + u64::from(self.buffer_len)
    }
}
