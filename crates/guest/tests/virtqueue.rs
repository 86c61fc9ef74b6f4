//! Virtqueues as legal drivers use them, in every way that the specification allows: what `any_bytes` meets only by
//! chance.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::checks::memory::{RefRing, TestMemory, joined, need_event};
use block::Segment;
use guest::{GuestMemory, RegionLayout, RingBase, RingLayout, Ticket, Virtqueue};
use proptest::collection::vec;
use proptest::prelude::*;
use testkit::frontend::eventfd_wait;
use testkit::memory::{Memory, Region};
use testkit::random::Random;
use testkit::ring::{Desc, Ring};

const RING: RefRing = RefRing {
    size: 64,
    descriptors: 0,
    available: 0x400,
    used: 0x500,
    next_available: 0,
    event_idx: true,
    max_segments: 62,
};

/// A buffer of the given length, somewhere in memory; many lie across the border of the regions that meet at 0x4000.
fn buffer() -> impl Strategy<Value = (u64, u32)> {
    let at = |starts: std::ops::Range<u64>, end: u64| {
        (starts, 0u32..700).prop_map(move |(at, len)| (at, len.min((end - at) as u32)))
    };
    prop_oneof![
        at(0x2000..0x5000, 0x5000),
        at(0x3f00..0x4000, 0x5000),
        at(0x8000..0x9000, 0x9000),
    ]
}

#[derive(Clone, Debug)]
struct Shape {
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
    /// Descriptors in the ring before the indirect table; all, if it is larger than the chain.
    direct: usize,
    /// Where the indirect table is.
    table: u64,
    /// Order of the ring's descriptors.
    places: Vec<u16>,
    /// What memory is filled with.
    fill: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let table = prop_oneof![Just(0x1000u64), 0x1000u64..0x1800, 0x3c00u64..0x4000];
    let places = Just((0..64).collect::<Vec<u16>>()).prop_shuffle();
    (
        vec(buffer(), 0..20),
        vec(buffer(), 0..20),
        0usize..64,
        table,
        places,
        any::<u64>(),
    )
        .prop_map(
            |(mut readable, mut writable, direct, table, places, fill)| {
                // A header, in whatever pieces, and a status: the least that a request has.
                readable.push((0x2100, 16));
                writable.push((0x8100, 1));
                Shape {
                    readable,
                    writable,
                    direct,
                    table,
                    places,
                    fill,
                }
            },
        )
}

/// Writes the chain to memory; gives its head.
fn place(memory: &TestMemory, shape: &Shape) -> u16 {
    let buffers = shape.readable.iter().map(|b| (b, 0));
    let buffers = buffers.chain(shape.writable.iter().map(|b| (b, Desc::WRITE)));
    let mut chain: Vec<Desc> = buffers
        .map(|(&(addr, len), flags)| Desc {
            addr,
            len,
            flags,
            next: 0,
        })
        .collect();
    if shape.direct < chain.len() {
        let mut table = chain.split_off(shape.direct);
        let last = table.len() - 1;
        for (i, d) in table.iter_mut().enumerate() {
            if i < last {
                (d.flags, d.next) = (d.flags | Desc::NEXT, i as u16 + 1);
            }
            memory.write(shape.table + 16 * i as u64, &d.bytes());
        }
        chain.push(Desc {
            addr: shape.table,
            len: 16 * table.len() as u32,
            flags: Desc::INDIRECT,
            next: 0,
        });
    }
    let last = chain.len() - 1;
    for (i, d) in chain.iter_mut().enumerate() {
        if i < last {
            (d.flags, d.next) = (d.flags | Desc::NEXT, shape.places[i + 1]);
        }
        memory.write(16 * u64::from(shape.places[i]), &d.bytes());
    }
    shape.places[0]
}

fn read_all(memory: &TestMemory, ranges: &[(u64, u64)]) -> Vec<u8> {
    let parts = ranges
        .iter()
        .map(|&(at, len)| memory.read(at, len).unwrap());
    parts.collect::<Vec<_>>().concat()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_legal_layout_is_found(shape in shape()) {
        let memory = TestMemory::new();
        let mut random = Random(shape.fill);
        for (at, words) in [(0x1000, 0x800), (0x8000, 0x200)] {
            let bytes: Vec<[u8; 8]> = (0..words).map(|_| random.any().to_le_bytes()).collect();
            memory.write(at, bytes.as_flattened());
        }
        let head = place(&memory, &shape);
        memory.write(RING.available + 2, &1u16.to_le_bytes());
        memory.write(RING.available + 4, &head.to_le_bytes());

        let mut queue = Virtqueue::new(memory.guest.clone(), RING.layout()).unwrap();
        prop_assert_eq!(queue.available(), Ok(1));
        let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
        let chain = queue.fetch(&mut segments).unwrap();
        let expected = RING.walk(&memory, head).unwrap();
        prop_assert_eq!(&chain.header[..], &expected.header[..]);

        let (readable, rest) = segments.split_at(usize::from(chain.readable));
        let writable = &rest[..usize::from(chain.writable)];
        prop_assert_eq!(Some(joined(readable)), memory.hosts(&expected.readable));
        prop_assert_eq!(Some(joined(writable)), memory.hosts(&expected.writable));

        // The bytes themselves, through the queue's own copies.
        let bytes = read_all(&memory, &expected.readable);
        let mut copy = vec![0; bytes.len()];
        prop_assert_eq!(queue.copy_from(readable, &mut copy), bytes.len());
        prop_assert_eq!(copy, bytes);
        let before = read_all(&memory, &expected.writable);
        prop_assert_eq!(queue.copy_to(writable, &before), before.len());
        prop_assert_eq!(read_all(&memory, &expected.writable), before);
        // Buffers may overlap, so that only the last one to be written shows what was.
        let pattern: Vec<u8> = (0..chain.writable_len).map(|i| i as u8).collect();
        queue.copy_to(writable, &pattern);
        if let Some(&(at, len)) = expected.writable.last() {
            let tail = &pattern[pattern.len() - len as usize..];
            prop_assert_eq!(&memory.read(at, len).unwrap()[..], tail);
        }
    }

    /// Where the indices stand, also at the end of their 16 bits, decides nothing.
    #[test]
    fn interrupts_are_wanted_as_the_specification_says(
        start in any::<u16>(),
        first in 1u16..1024,
        second in 0u16..1024,
        // Near the indices, where it matters, or anywhere.
        event in prop_oneof![(-1100i16..1100).prop_map(|d| d as u16), any::<u16>()],
    ) {
        let (memory, mut queue, ticket) = ring_in_use(start, start, true);
        for _ in 0..first {
            queue.complete(&ticket, 0, 1);
        }
        prop_assert!(queue.publish(), "the first publication tells the driver");
        let old = start.wrapping_add(first);
        let event = old.wrapping_add(event);
        memory.write(BIG.available + 4 + 2 * u64::from(BIG.size), &event.to_le_bytes());
        for _ in 0..second {
            queue.complete(&ticket, 0, 1);
        }
        let new = old.wrapping_add(second);
        prop_assert_eq!(queue.publish(), second > 0 && need_event(event, new, old));
        prop_assert_eq!(memory.read_u16(BIG.used + 2), Some(new));
        prop_assert!(!queue.publish(), "there is nothing new");
    }

    /// A driver that follows the specification kicks for the very next request, and for none before.
    #[test]
    fn kicks_are_asked_for_as_the_specification_says(
        next in any::<u16>(),
        ahead in 0u16..1024,
        more in 1u16..1024,
        event_idx in any::<bool>(),
    ) {
        let (memory, mut queue, _) = ring_in_use(next.wrapping_sub(1), 0, event_idx);
        prop_assert_eq!(queue.base(), RingBase::split(next));
        queue.disable_kicks();
        let flags = || memory.read_u16(BIG.used).unwrap();
        prop_assert_eq!(flags() & 1, u16::from(!event_idx));
        let old = next.wrapping_add(ahead);
        memory.write(BIG.available + 2, &old.to_le_bytes());
        prop_assert_eq!(queue.enable_kicks(), ahead > 0);
        prop_assert_eq!(flags(), 0);
        if event_idx {
            let event = memory.read_u16(BIG.used + 4 + 8 * u64::from(BIG.size)).unwrap();
            prop_assert_eq!(need_event(event, old.wrapping_add(more), old), ahead == 0);
        }
        prop_assert_eq!(queue.available(), Ok(ahead));
    }
}

/// The largest ring, whose event indices lie at other places than those of a small one.
const BIG: RefRing = RefRing {
    size: 1024,
    descriptors: 0,
    available: 0x8000,
    used: 0x1000,
    next_available: 0,
    event_idx: true,
    max_segments: 0,
};

/// A ring from which one request was taken, at these indices; with its ticket.
fn ring_in_use(next: u16, used: u16, event_idx: bool) -> (TestMemory, Virtqueue, Ticket) {
    // 1024 descriptors fill the first region: of them only one is used, and the used ring lies over the others.
    let ring = RefRing {
        next_available: next,
        event_idx,
        ..BIG
    };
    let memory = TestMemory::new();
    let shape = Shape {
        readable: vec![(0x4000, 16)],
        writable: vec![(0x4010, 1)],
        direct: 2,
        table: 0,
        places: vec![0, 1],
        fill: 0,
    };
    let head = place(&memory, &shape);
    memory.write(ring.available + 2, &next.wrapping_add(1).to_le_bytes());
    let entry = 4 + 2 * u64::from(next & (ring.size - 1));
    memory.write(ring.available + entry, &head.to_le_bytes());
    memory.write(ring.used + 2, &used.to_le_bytes());
    let mut queue = Virtqueue::new(memory.guest.clone(), ring.layout()).unwrap();
    assert_eq!(queue.available(), Ok(1));
    let chain = queue.fetch(&mut [Segment { addr: 0, len: 0 }; 4]).unwrap();
    (memory, queue, chain.ticket())
}

const STRESS: u64 = 1_000_000;
const LOST: Duration = Duration::from_secs(30);

#[test]
fn no_wakeup_lost_with_event_indices() {
    stress(Ring::new, true);
}

#[test]
fn no_wakeup_lost_with_flags() {
    stress(Ring::new, false);
}

#[test]
fn no_wakeup_lost_in_packed_ring_with_event_indices() {
    stress(Ring::packed, true);
}

#[test]
fn no_wakeup_lost_in_packed_ring_with_flags() {
    stress(Ring::packed, false);
}

type MakeRing = fn(&Arc<Memory>, &Region, u16, bool) -> std::io::Result<Ring>;

/// A driver and a device, each of which now polls and now sleeps until it is told: a wake-up that one owes the other and
/// does not give is a hang.
fn stress(make: MakeRing, event_idx: bool) {
    const SIZE: u16 = 64;
    let memory = Arc::new(Memory::new(&[(0x10_0000, 0x1_0000)]).unwrap());
    let region = &memory.regions()[0];
    let mut ring = make(&memory, region, SIZE, event_idx).unwrap();
    set_flushes(&mut ring, region, SIZE);
    let base = ring.first_base();
    ring.restart(base);

    let layout = RegionLayout {
        guest: region.gpa,
        len: region.size,
        user: region.user,
        file_offset: region.mmap_offset,
    };
    let guest = GuestMemory::default();
    let file = region.file.try_clone().unwrap();
    let guest = guest.with_region(layout, file).unwrap();
    let at = ring.guest_addresses();
    let layout = RingLayout {
        number: 0,
        packed: base != 0,
        size: SIZE,
        descriptors: memory.user(at.desc),
        available: memory.user(at.avail),
        used: memory.user(at.used),
        base: RingBase(ring.base_word(base)),
        event_idx,
        max_segments: 0,
    };
    let queue = Virtqueue::new(Arc::new(guest), layout).unwrap();
    let (kick, call) = (
        ring.kick.try_clone().unwrap(),
        ring.call.try_clone().unwrap(),
    );
    let device = thread::spawn(move || serve_stress(queue, &kick, &call));

    let (mut random, mut sent, mut done, mut sleeps) = (Random(1), 0, 0, 0);
    let mut free: Vec<u16> = (0..SIZE).step_by(2).collect();
    while done < STRESS {
        let batch = random.below(free.len() as u64 + 1).min(STRESS - sent);
        let batch = free.split_off(free.len() - batch as usize);
        sent += batch.len() as u64;
        ring.publish(batch);
        if sent > done && random.below(2) == 0 {
            sleeps += 1;
            assert!(
                ring.wait_timeout(LOST),
                "a call was lost after {done} requests"
            );
        }
        done += ring.take_used(|used| free.push(used.id as u16)) as u64;
    }
    let device_sleeps = device.join().unwrap();
    assert!(
        sleeps > 1000 && device_sleeps > 1000,
        "{sleeps}, {device_sleeps}"
    );
    assert_eq!(free.len(), usize::from(SIZE / 2));
}

/// Makes each pair of descriptors a request of a header and a status.
fn set_flushes(ring: &mut Ring, region: &Region, size: u16) {
    let buffers = region.alloc(64 * u64::from(size), 64);
    for head in (0..size).step_by(2) {
        let addr = buffers + 64 * u64::from(head);
        let header = Desc {
            addr,
            len: 16,
            flags: Desc::NEXT,
            next: head + 1,
        };
        let status = Desc {
            addr: addr + 16,
            len: 1,
            flags: Desc::WRITE,
            next: 0,
        };
        ring.set_desc(head, header);
        ring.set_desc(head + 1, status);
    }
}

/// The device of [`stress`]. Returns how often it slept.
fn serve_stress(mut queue: Virtqueue, kick: &OwnedFd, call: &OwnedFd) -> u64 {
    let interrupt = || rustix::io::write(call, &1u64.to_ne_bytes()).unwrap();
    let (mut random, mut done, mut sleeps) = (Random(2), 0, 0);
    let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
    while done < STRESS {
        for _ in 0..queue.available().unwrap() {
            let chain = queue.fetch(&mut segments).unwrap();
            queue.complete(&chain.ticket(), 0, 1);
            done += 1;
            // In batches of any size.
            if random.below(4) == 0 && queue.publish() {
                interrupt();
            }
        }
        if queue.publish() {
            interrupt();
        }
        if done < STRESS && random.below(2) == 0 {
            if !queue.enable_kicks() {
                sleeps += 1;
                let kicked = eventfd_wait(kick, Some(LOST)).unwrap();
                assert!(kicked, "a kick was lost after {done} requests");
            }
            queue.disable_kicks();
        }
    }
    sleeps
}
