//! Hostile guests and front-ends. The worst outcome is a virtio error status, a retired queue or a closed connection:
//! other queues, disks and connections continue, and the next front-end finds a working disk.

use std::cell::RefCell;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use testkit::chain::{Chain, header};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::message::*;
use testkit::frontend::{F_LOG_ALL, Frontend, NEED_REPLY, REPLY, VERSION, eventfd};
use testkit::memory::{Memory, Region};
use testkit::ring::Desc;
use testkit::storage::Storage;
use virtio_bindings::virtio_blk::*;

mod eventfds;
mod front_ends;
mod guests;
mod requests;
use crate::support::{self, DISK_BYTES, Disk, content, seed, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// Long enough for an unexpected event to happen.
const QUIET_PERIOD: Duration = Duration::from_millis(100);
const END: u64 = DISK_BYTES / 512;
/// Offset of the status byte of all attacks, from `Attack::at`.
const STATUS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const W: u16 = Desc::WRITE;

fn assert_reads(device: &mut Device, queue: usize) {
    assert_eq!(
        device.queues[queue].read(8, 4096).unwrap(),
        content(8, 4096)
    );
}

fn desc(addr: u64, len: u32, flags: u16) -> Desc {
    Desc {
        addr,
        len,
        flags,
        next: 0,
    }
}

/// The addresses of queue 0 moved by `offset`, with the used ring at `used` unless that is 0.
fn ring_addresses(device: &Device, queue: u32, offset: u64, used: u64) -> Vec<u8> {
    let ring = device.queues[0].ring.guest_addresses();
    let user = |gpa| device.memory.user(gpa).wrapping_add(offset);
    let used = if used == 0 { user(ring.used) } else { used };
    let fields = [user(ring.desc), used, user(ring.avail), 0];
    [
        words(&[queue, 0]),
        fields.iter().flat_map(|f| f.to_ne_bytes()).collect(),
    ]
    .concat()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}
