//! A whole conversation with a front-end, from the first message to the end, over a real socket and with real memory.
//! Input: what the guest's memory holds at its start (a length in 16 bits, and bytes), then messages, each a request, a
//! byte of [flags](Flags), and what `payload` reads for it.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use block::{DiskFacts, Segment};
use guest::blk::{self, CONFIG_BYTES, ConfigSpace};
use guest::{Device, Driver, FrontendChannel, NewQueue, RingBase, StoppedRing};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{Input, Seeds};

/// Messages in a conversation. All of them wait in the socket before the first is looked at.
const MESSAGES: usize = 48;

const QUEUES: u16 = 2;
const MEMORY_BYTES: u64 = 0x1_0000;
const USER: u64 = 0x7000_0000_0000;

/// What a byte of the input says of a message.
struct Flags(u8);

impl Flags {
    fn need_reply(&self) -> bool {
        self.0 & 1 != 0
    }
    /// Payload and header fields are taken from the input as they are.
    fn raw(&self) -> bool {
        self.0 & 2 != 0
    }
    /// What kind of descriptors come along: the right ones, none, eventfds, one too many.
    fn descriptors(&self) -> u8 {
        self.0 >> 2 & 3
    }
}

pub fn check(data: &[u8]) {
    let mut input = Input(data);
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&memory, MEMORY_BYTES).expect("memory");
    let len = usize::from(input.u16() % 0x4000);
    rustix::io::pwrite(&memory, input.slice(len), 0).expect("memory");

    let (ours, theirs) = UnixStream::pair().expect("sockets");
    for _ in 0..MESSAGES {
        if input.0.is_empty() || send(&ours, &mut input, &memory).is_err() {
            break;
        }
    }
    ours.shutdown(Shutdown::Write).expect("a connected socket");

    let never = event();
    let mut device = FakeDevice::default();
    let _ = guest::serve(&theirs, &mut device, never.as_fd());
    assert!(device.running.is_empty(), "{:?} still run", device.running);
    let stopping = &device.stopping;
    assert!(stopping.is_empty(), "{stopping:?} still stop");
    assert!(!device.has_frontend);
    drop(theirs);
    check_replies(&ours);
}

/// Replies are whole messages of version 1, and not longer than the protocol allows.
fn check_replies(mut socket: &UnixStream) {
    let mut bytes = Vec::new();
    // A reset connection: the back-end left messages unread, because it had enough of us.
    match socket.read_to_end(&mut bytes) {
        Err(e) if e.kind() != io::ErrorKind::ConnectionReset => panic!("{e}"),
        _ => {}
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let word = |at: usize| u32::from_ne_bytes(rest[at..at + 4].try_into().expect("4 bytes"));
        let (flags, len) = (word(4), word(8) as usize);
        assert_eq!(flags, 1 | 4, "flags of a reply");
        assert!(len <= 12 + 256);
        rest = &rest[12 + len..];
    }
}

fn send(socket: &UnixStream, input: &mut Input<'_>, memory: &OwnedFd) -> io::Result<()> {
    let (request, flags) = (u32::from(input.u8()), Flags(input.u8()));
    let (payload, n_fds) = if flags.raw() {
        let len = usize::from(input.u16() % 300);
        (input.slice(len).to_vec(), usize::from(input.u8() % 10))
    } else {
        payload(request, input)
    };
    let mut header = [request, 1, payload.len() as u32];
    if flags.need_reply() {
        header[1] |= 8;
    }
    if flags.raw() {
        header[1] ^= u32::from(input.u8());
        header[2] = header[2].wrapping_add_signed(i32::from(input.u8() as i8) / 64);
    }
    let header: Vec<u8> = header.iter().flat_map(|w| w.to_ne_bytes()).collect();

    let is_memory = matches!(request, 5 | 6 | 32 | 37 | 38);
    let fds: Vec<OwnedFd> = match flags.descriptors() {
        0 if is_memory => (0..n_fds).map(|_| memory.try_clone()).collect(),
        1 => Ok(Vec::new()),
        3 => (0..=n_fds).map(|_| Ok(event())).collect(),
        _ => (0..n_fds).map(|_| Ok(event())).collect(),
    }?;
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let parts = [IoSlice::new(&header), IoSlice::new(&payload)];
    sendmsg(
        socket,
        &parts,
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )?;
    Ok(())
}

/// A payload that the request could have, and the number of descriptors that belong to it.
fn payload(request: u32, input: &mut Input<'_>) -> (Vec<u8>, usize) {
    let pair = |a: u32, b: u32| [a.to_ne_bytes(), b.to_ne_bytes()].concat();
    let ring = |input: &mut Input<'_>| u32::from(input.u8() % 4);
    match request {
        2 => (
            match input.u8() {
                0 => u64::MAX,
                1 => features() & !blk::F_RING_PACKED,
                2 => features() & !(1 << 30 | blk::F_RING_PACKED),
                3 => features(),
                4 => features() & !blk::F_RING_PACKED | 1 << 26,
                _ => input.u64(),
            }
            .to_ne_bytes()
            .to_vec(),
            0,
        ),
        16 => (
            match input.u8() {
                0 => 0x1_b22bu64,
                _ => input.u64(),
            }
            .to_ne_bytes()
            .to_vec(),
            0,
        ),
        5 => {
            let n = input.u8() % 10;
            let mut bytes = u64::from(n).to_ne_bytes().to_vec();
            (0..n).for_each(|_| bytes.extend(region(input)));
            (bytes, n.into())
        }
        6 => {
            // In steps of 16 bytes, of which the guest's file has more than its memory needs.
            let [len, offset] = input.bytes();
            let word = |n: u8| (u64::from(n) * 16).to_ne_bytes();
            ([word(len), word(offset)].concat(), 1)
        }
        7 => (Vec::new(), 1),
        8 => (pair(ring(input), 1 << (input.u8() % 12)), 0),
        9 => {
            let n = input.u8();
            let mut bytes = pair(u32::from(n % 4), u32::from(n >> 7));
            for _ in 0..3 {
                bytes.extend((USER + u64::from(input.u16()) * 4).to_ne_bytes());
            }
            let log = match n >> 7 {
                0 => 0,
                _ => u64::from(input.u16()) << 8,
            };
            bytes.extend(log.to_ne_bytes());
            (bytes, 0)
        }
        10 | 11 => {
            let n = input.u8();
            let base = u32::from(input.u16());
            // Of a packed ring, nothing is in flight at the same place for both sides.
            let base = if n & 0x80 != 0 {
                base << 16 | base
            } else {
                base
            };
            (pair(u32::from(n % 4), base), 0)
        }
        12..=14 => {
            let word = ring(input) | u32::from(input.u8() & 1) << 8;
            (pair(word, 0), usize::from(word & 0x100 == 0))
        }
        18 => (pair(ring(input), u32::from(input.u8() & 1)), 0),
        21 => (Vec::new(), 1),
        24 | 25 => {
            let (offset, len) = (input.u8(), input.u8());
            let mut bytes = pair(offset.into(), len.into());
            bytes.extend([0; 4]);
            bytes.extend(input.slice(len.into()));
            bytes.resize(12 + usize::from(len), 0);
            (bytes, 0)
        }
        31 | 32 => {
            // Lengths and offsets in steps of 64 bytes, as short as the file of the guest.
            let [len, offset, queues, size] = input.bytes();
            let mut bytes = (u64::from(len) * 64).to_ne_bytes().to_vec();
            bytes.extend((u64::from(offset) * 64).to_ne_bytes());
            bytes.extend(u16::from(queues % 4).to_ne_bytes());
            bytes.extend(u16::from(size).to_ne_bytes());
            bytes.extend([0; 4]);
            (bytes, usize::from(request == 32))
        }
        37 | 38 => {
            let mut bytes = vec![0; 8];
            bytes.extend(region(input));
            (bytes, usize::from(request == 37))
        }
        39 => (u64::from(input.u8()).to_ne_bytes().to_vec(), 0),
        _ => (Vec::new(), 0),
    }
}

/// Guest address, length, front-end address, offset in the file: all in pages, few enough to overlap.
fn region(input: &mut Input<'_>) -> Vec<u8> {
    let page = |n: u8| u64::from(n) << 12;
    let [guest, len, user, offset] = input.bytes();
    [page(guest), page(len), USER + page(user), page(offset)]
        .iter()
        .flat_map(|n| n.to_ne_bytes())
        .collect()
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd")
}

const FACTS: DiskFacts = DiskFacts {
    logical_block: 512,
    physical_block: 4096,
    optimal_io: 0,
    address_alignment: 1,
    length_alignment: 1,
    discard_granularity: 4096,
    read_only: false,
};

fn features() -> u64 {
    blk::features(&FACTS) | 1 << 30
}

/// A device that answers all that is in a ring when it starts, and checks what the session promises it.
#[derive(Default)]
struct FakeDevice {
    running: BTreeSet<u16>,
    stopping: BTreeSet<u16>,
    has_frontend: bool,
}

impl Device for FakeDevice {
    fn ring_failed(&self, _: u16, _: &guest::RingError) {}

    fn features(&self) -> u64 {
        blk::features(&FACTS)
    }

    fn queues(&self) -> u16 {
        QUEUES
    }

    fn seg_max(&self) -> u16 {
        30
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        ConfigSpace {
            size: 1 << 30,
            write_cache: true,
            queues: QUEUES,
            seg_max: self.seg_max(),
        }
        .bytes(&FACTS)
    }

    fn capacity_read(&self, sectors: u64) {
        assert_eq!(sectors, (1 << 30) / 512);
    }

    fn untracked(&self, ring: u16, _size: u16) {
        assert!(self.running.contains(&ring));
    }

    fn set_write_cache(&mut self, _on: bool) {}

    fn set_features(&mut self, accepted: u64) {
        assert_eq!(accepted & !(features() | blk::F_DISK_DEPENDENT), 0);
    }

    fn set_frontend(&mut self, channel: Option<FrontendChannel>) {
        self.has_frontend = channel.is_some();
    }

    fn start(&mut self, ring: u16, queue: NewQueue, _driver: Driver) -> io::Result<()> {
        assert!(self.stopping.is_empty(), "{:?} still stop", self.stopping);
        assert!(ring < QUEUES && self.running.insert(ring));
        let mut virtqueue = queue.virtqueue;
        let mut segments = vec![Segment { addr: 0, len: 0 }; virtqueue.max_segments()];
        for _ in 0..virtqueue.available().unwrap_or(0) {
            let Ok(chain) = virtqueue.fetch(&mut segments) else {
                break;
            };
            virtqueue.complete(&chain.ticket(), 0, 1);
        }
        virtqueue.publish();
        Ok(())
    }

    fn begin_stop(&mut self, ring: u16) {
        assert!(self.running.remove(&ring) && self.stopping.insert(ring));
    }

    fn finish_stop(&mut self, ring: u16) -> StoppedRing {
        assert!(self.stopping.remove(&ring));
        StoppedRing {
            base: RingBase(7),
            unfinished: false,
        }
    }

    fn quiesce(&mut self, _: guest::Pause) -> io::Result<()> {
        assert!(self.running.is_empty(), "{:?} still run", self.running);
        assert!(self.stopping.is_empty(), "{:?} still stop", self.stopping);
        Ok(())
    }

    fn storage_answered(&self) -> bool {
        true
    }

    fn set_event_fds(&mut self, ring: u16, _: Option<Arc<OwnedFd>>, _: Option<Arc<OwnedFd>>) {
        assert!(self.running.contains(&ring));
    }
}

pub fn seeds() -> Seeds {
    // Request, flags, and what `payload` reads.
    let connect: &[&[u8]] = &[
        &[3, 0],
        &[1, 0],
        &[15, 0],
        &[16, 0, 0],
        &[2, 1, 1],
        &[17, 0],
    ];
    let table: &[u8] = &[5, 1, 1, 0, 8, 0, 0];
    let word = |request: u8, ring: u8, n: u16| vec![request, 1, ring, n as u8, (n >> 8) as u8];
    // Descriptors at 0x1000, used ring at 0x2000, available ring at 0x3000, in words of 4 bytes.
    let addresses = |ring| vec![9, 1, ring, 0, 4, 0, 8, 0, 12];
    let ring = |n: u8| {
        [
            vec![8, 1, n, 4],
            word(10, n, 0),
            addresses(n),
            vec![14, 1, n, 0],
            vec![13, 1, n, 0],
            vec![12, 1, n, 0],
            vec![18, 1, n, 1],
        ]
    };
    let input = |parts: &[Vec<u8>]| [vec![0, 0], parts.concat()].concat();
    let connect = connect.concat();
    let connect_inflight = connect.clone();
    let connect_packed = [&connect[..], &[2, 1, 3]].concat();
    let start = [
        connect.clone(),
        table.to_vec(),
        ring(0).concat(),
        ring(1).concat(),
    ]
    .concat();
    vec![
        ("connect", input(&[connect.clone(), vec![24, 0, 0, 60]])),
        ("start", input(&[start.clone(), word(11, 0, 0)])),
        (
            "slots",
            input(&[
                connect,
                vec![36, 0, 37, 1, 0, 8, 0, 0, 37, 1, 8, 4, 8, 8],
                ring(0).concat(),
                vec![38, 1, 8, 4, 8, 8, 37, 1, 9, 4, 8, 8, 39, 1, 0],
            ]),
        ),
        (
            "packed",
            input(&[
                connect_packed,
                table.to_vec(),
                vec![8, 1, 0, 3],
                word(10, 0x80, 0x8003),
                addresses(0),
                vec![13, 1, 0, 0, 12, 1, 0, 0, 18, 1, 0, 1],
                word(11, 0, 0),
            ]),
        ),
        (
            "inflight",
            input(&[
                connect_inflight,
                vec![31, 0, 0, 0, 2, 16, 32, 1, 12, 252, 2, 16],
                table.to_vec(),
                ring(0).concat(),
                ring(1).concat(),
                word(11, 0, 0),
                vec![32, 1, 12, 250, 2, 16, 39, 1, 0],
            ]),
        ),
        (
            "reset",
            input(&[start.clone(), vec![34, 1], ring(0).concat()]),
        ),
        (
            "log",
            input(&[
                start.clone(),
                // A log in the guest's last page; then the features that switch it on, and the rings once more.
                vec![6, 1, 1, 0, 2, 1, 4],
                vec![9, 1, 0x80, 0, 4, 0, 8, 0, 12, 0x20, 0],
                vec![7, 1, 9, 1, 1, 0, 4, 0, 8, 0, 12, 2, 1, 1],
                word(11, 0, 0),
            ]),
        ),
        (
            "backend_channel",
            input(&[start.clone(), vec![21, 1, 40, 0, 25, 1, 32, 1, 0]]),
        ),
        (
            "raw",
            input(&[
                start,
                vec![12, 2, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0, 200],
            ]),
        ),
    ]
}
