//! A split ring in guest memory of any content, walked to its end, next to the reference walk. Input: where the ring
//! is, in the 10 bytes that `ring` reads, and then what the guest's memory holds from address 0 on.

use block::Segment;
use guest::{RingBase, Virtqueue};

use super::memory::{REGIONS, RefRing, TestMemory, joined, need_event};
use super::{Input, Seeds};

/// Requests taken from one ring; it bounds the time that one input takes.
const REQUESTS: u16 = 64;

thread_local! {
    static MEMORY: TestMemory = TestMemory::new();
}

pub fn check(data: &[u8]) {
    MEMORY.with(|memory| check_in(memory, data));
}

fn check_in(memory: &TestMemory, data: &[u8]) {
    let mut input = Input(data);
    let mut ring = ring(&mut input);
    memory.clear();
    for (start, len, _) in REGIONS {
        memory.write(start, input.slice(len as usize));
    }

    let queue = Virtqueue::new(memory.guest.clone(), ring.layout());
    assert_eq!(
        queue.is_ok(),
        ring.is_legal(),
        "{ring:?}: {:?}",
        queue.err()
    );
    let Ok(mut queue) = queue else { return };

    let available = |at| memory.read_u16(ring.available + at).expect("the ring");
    let ahead = available(2).wrapping_sub(ring.next_available);
    let waiting = queue.available();
    assert_eq!(waiting.is_ok(), ahead <= ring.size, "{waiting:?}");
    assert!(waiting.as_ref().is_err() || waiting == Ok(ahead));

    let mut old_used = memory.read_u16(ring.used + 2).expect("the ring");
    for n in 0..waiting.unwrap_or(0).min(REQUESTS) {
        let slot = 4 + 2 * u64::from(ring.next_available & (ring.size - 1));
        let head = available(slot);
        ring.next_available = ring.next_available.wrapping_add(1);
        if !check_chain(memory, &ring, &mut queue, head) {
            return;
        }
        assert_eq!(queue.base(), RingBase::split(ring.next_available));
        let notified = queue.publish();
        // Read after it: rings may overlap. The first publication tells the guest in any case.
        let new_used = old_used.wrapping_add(1);
        let wanted = if ring.event_idx {
            need_event(available(4 + 2 * u64::from(ring.size)), new_used, old_used)
        } else {
            available(0) & 1 == 0
        };
        assert!(notified == wanted || notified && n == 0, "{ring:?}");
        old_used = new_used;
    }
    // Last, because it writes to the ring: a kick is missing exactly if there is more to fetch.
    let more = queue.enable_kicks();
    assert_eq!(more, available(2) != ring.next_available);
}

/// Fetches and completes one request, as the reference walk finds it. False if the ring is broken.
fn check_chain(memory: &TestMemory, ring: &RefRing, queue: &mut Virtqueue, head: u16) -> bool {
    let expected = ring.walk(memory, head);
    // Room for any list: buffers that span regions have more segments than descriptors.
    let mut segments = [Segment { addr: 0, len: 0 }; 4 * 1024];
    let (expected, chain) = match (expected, queue.fetch(&mut segments)) {
        (None, Err(_)) => return false,
        (Some(expected), Ok(chain)) => (expected, chain),
        (expected, found) => panic!("chain {head}: {found:x?} instead of {expected:x?}"),
    };
    assert_eq!(
        (chain.head, &chain.header[..]),
        (head, &expected.header[..])
    );
    let (readable, rest) = segments.split_at(usize::from(chain.readable));
    let writable = &rest[..usize::from(chain.writable)];
    for (list, len, ranges) in [
        (readable, chain.readable_len, &expected.readable),
        (writable, chain.writable_len, &expected.writable),
    ] {
        assert!(list.iter().all(|s| memory.holds(s)), "{list:x?}");
        assert_eq!(list.iter().map(|s| s.len as u64).sum::<u64>(), len);
        assert_eq!(Some(joined(list)), memory.hosts(ranges));
    }
    queue.complete(&chain.ticket(), 0xa5, chain.writable_len as u32);
    let used_bytes = 6 + 8 * u64::from(ring.size);
    if !(ring.used..ring.used + used_bytes).contains(&expected.status) {
        assert_eq!(memory.read(expected.status, 1), Some(vec![0xa5]));
    }
    true
}

pub fn ring(input: &mut Input<'_>) -> RefRing {
    let (size, flags) = (input.u8(), input.u8());
    RefRing {
        // Any size, but mostly one that is allowed.
        size: match size {
            0x80.. => u16::from(size) * 9,
            n => 1 << (n % 12),
        },
        event_idx: flags & 1 != 0,
        max_segments: u16::from(flags >> 1),
        next_available: input.u16(),
        descriptors: u64::from(input.u16()) * 2,
        available: u64::from(input.u16()) * 2,
        used: u64::from(input.u16()) * 2,
    }
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

pub fn seeds() -> Seeds {
    let usual = [
        (0x200, 16, NEXT, 1),
        (0x1000, 0x1000, NEXT | WRITE, 2),
        (0x210, 1, WRITE, 0),
    ];
    let odd = [
        (0x200, 4, NEXT, 5),
        (0x204, 13, NEXT, 3),
        (0x3f80, 0x100, NEXT, 9),
        (0x8000, 0x1000, WRITE, 0),
    ];
    let scattered = table(&odd);
    let chained = |list: &[(u64, u32, u16, u16)]| {
        let mut list = list.to_vec();
        (1..).zip(&mut list).for_each(|(i, d)| d.3 = i);
        table(&list)
    };
    vec![
        ("usual", input(0, 0, &[0], &[(0, table(&usual))])),
        (
            "event_idx",
            input(1, 0xffff, &[0, 0], &[(0, table(&usual))]),
        ),
        (
            "indirect",
            input(
                40,
                7,
                &[2],
                &[
                    (0x20, table(&[(0x300, 64, INDIRECT, 0)])),
                    (0x300, chained(&odd)),
                ],
            ),
        ),
        (
            "direct_then_indirect",
            input(
                1,
                7,
                &[2],
                &[
                    (
                        0x20,
                        table(&[(0x200, 16, NEXT, 3), (0x300, 32, INDIRECT, 0)]),
                    ),
                    (0x300, chained(&odd[2..])),
                ],
            ),
        ),
        (
            "table_over_two_regions",
            input(
                1,
                3,
                &[0],
                &[
                    (0, table(&[(0x3fe0, 64, INDIRECT, 0)])),
                    (0x3fe0, chained(&odd)),
                ],
            ),
        ),
        (
            "loop",
            input(0, 0, &[0], &[(0, table(&[(0x200, 16, NEXT, 0)]))]),
        ),
        ("too_far_ahead", input(0, 0, &[0; 17], &[(0, scattered)])),
    ]
}

/// Descriptors, as they are in memory.
fn table(list: &[(u64, u32, u16, u16)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(addr, len, flags, next) in list {
        bytes.extend(addr.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
    }
    bytes
}

/// A ring of 16 with descriptors at 0, an available ring at 0x100 and a used one at 0x140. Index and heads as given,
/// and the descriptor tables by address.
fn input(flags: u8, first: u16, heads: &[u16], tables: &[(usize, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![4, flags];
    for word in [first, 0, 0x100 / 2, 0x140 / 2] {
        bytes.extend(word.to_le_bytes());
    }
    let memory = bytes.len();
    let mut put = |at: usize, what: &[u8]| {
        let at = memory + at;
        bytes.resize(bytes.len().max(at + what.len()), 0);
        bytes[at..at + what.len()].copy_from_slice(what);
    };
    let end = first.wrapping_add(heads.len() as u16);
    put(0x102, &end.to_le_bytes());
    for (i, head) in (0..).zip(heads) {
        let entry = usize::from(first.wrapping_add(i) & 15);
        put(0x104 + 2 * entry, &head.to_le_bytes());
    }
    tables.iter().for_each(|(at, table)| put(*at, table));
    bytes
}
