//! What must hold for any bytes that a guest or a front-end sends: one function for each border that such bytes cross.
//! The fuzz targets call these, and so do the ordinary tests (`../any_bytes.rs`), with the seeds and with random bytes.

pub mod blk_request;
pub mod changing_ring;
pub mod inflight_region;
pub mod memory;
pub mod packed_ring;
pub mod session;
pub mod split_ring;
pub mod vhost_user_message;

/// Inputs worth starting from, by name.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Reads numbers off the front of an input. Behind its end everything is zero, so that any input is a whole one.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next `N` bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.slice(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    /// The next bytes, as many as are left of `len`.
    pub fn slice(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }
}
