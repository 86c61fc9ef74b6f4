//! A packed ring in guest memory of any content, next to the reference walk. Input: where the ring is and how it is
//! used, in the 13 bytes that `ring` reads, and then what the guest's memory holds from address 0 on.

use block::Segment;
use guest::{RingBase, RingLayout, Ticket, Virtqueue};

use super::memory::{REGIONS, RefChain, TestMemory, joined, request};
use super::{Input, Seeds};

/// Requests taken from one ring; it bounds the time that one input takes.
const REQUESTS: u16 = 64;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

thread_local! {
    static MEMORY: TestMemory = TestMemory::new();
}

pub fn check(data: &[u8]) {
    MEMORY.with(|memory| check_in(memory, data));
}

/// A packed ring by guest addresses.
#[derive(Clone, Copy, Debug)]
pub struct RefPacked {
    pub size: u16,
    pub ring: u64,
    pub driver: u64,
    pub device: u64,
    pub available: Place,
    pub used: Place,
    pub event_idx: bool,
    pub max_segments: u16,
}

/// A position with its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub index: u16,
    pub wrap: bool,
}

/// A chain as the reference walk finds it.
#[derive(Debug)]
pub struct RefPackedChain {
    pub chain: RefChain,
    pub id: u16,
    pub descriptors: u16,
}

impl Place {
    fn of(word: u16) -> Self {
        Self {
            index: word & 0x7fff,
            wrap: word & 0x8000 != 0,
        }
    }

    pub fn word(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// The next place, step by step.
    pub fn next(self, size: u16) -> Self {
        if self.index + 1 == size {
            Self {
                index: 0,
                wrap: !self.wrap,
            }
        } else {
            Self {
                index: self.index + 1,
                ..self
            }
        }
    }
}

impl RefPacked {
    /// The ring as the code under test is told of it.
    pub fn layout(&self) -> RingLayout {
        RingLayout {
            number: 0,
            packed: true,
            size: self.size,
            descriptors: TestMemory::user(self.ring),
            available: TestMemory::user(self.driver),
            used: TestMemory::user(self.device),
            base: RingBase::packed(self.available.word(), self.used.word()),
            event_idx: self.event_idx,
            max_segments: self.max_segments,
        }
    }

    fn is_legal(&self) -> bool {
        (1..=1024).contains(&self.size)
            && self.available.index < self.size
            && self.used.index < self.size
            && TestMemory::fits(self.ring, 16 * u64::from(self.size), 16)
            && TestMemory::fits(self.driver, 4, 4)
            && TestMemory::fits(self.device, 4, 4)
    }

    fn descriptor(&self, memory: &TestMemory, index: u16) -> (u64, u32, u16, u16) {
        descriptor(memory, self.ring + 16 * u64::from(index)).expect("the ring")
    }

    /// Whether a chain starts at a place (virtio 1.3 §2.8.1).
    fn is_available(&self, memory: &TestMemory, at: Place) -> bool {
        let flags = self.descriptor(memory, at.index).3;
        (flags & AVAIL != 0) == at.wrap && (flags & USED != 0) != at.wrap
    }

    /// The chain at the next place, of `left` descriptors at most; `None` if it breaks a rule (virtio 1.3 §2.8.6, §2.8.7,
    /// §2.8.19).
    pub fn walk(&self, memory: &TestMemory, left: u16) -> Option<RefPackedChain> {
        if left == 0 || !self.is_available(memory, self.available) {
            return None;
        }
        let (mut buffers, mut at, mut descriptors) = (Vec::new(), self.available, 0);
        let id = loop {
            let (addr, len, id, flags) = self.descriptor(memory, at.index);
            (at, descriptors) = (at.next(self.size), descriptors + 1);
            if flags & INDIRECT != 0 {
                let limit = u32::from(self.size).max(u32::from(self.max_segments) + 2);
                if descriptors > 1 || flags & NEXT != 0 || len == 0 || len % 16 != 0 {
                    return None;
                }
                if len / 16 > limit {
                    return None;
                }
                for i in 0..u64::from(len / 16) {
                    let (addr, len, _, flags) = descriptor(memory, addr.checked_add(16 * i)?)?;
                    buffers.push((addr, len, flags));
                }
                break id;
            }
            buffers.push((addr, len, flags));
            if flags & NEXT == 0 {
                break id;
            }
            if descriptors == left {
                return None;
            }
        };
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for (addr, len, flags) in buffers {
            TestMemory::parts(addr, u64::from(len))?;
            match flags & WRITE {
                0 if !writable.is_empty() => return None,
                0 => readable.push((addr, u64::from(len))),
                _ => writable.push((addr, u64::from(len))),
            }
        }
        let chain = request(memory, &readable, &writable)?;
        (id < self.size).then_some(RefPackedChain {
            chain,
            id,
            descriptors,
        })
    }

    /// Whether the driver wants an interrupt for used elements from `from` up to where we are (virtio 1.3 §2.8.14); `None`
    /// if it said what makes no sense.
    pub fn wants_interrupt(&self, memory: &TestMemory, from: Place) -> Option<bool> {
        let (event, flags) = (
            Place::of(memory.read_u16(self.driver)?),
            memory.read_u16(self.driver + 2)?,
        );
        match flags & 3 {
            0 => Some(true),
            1 => Some(false),
            2 if self.event_idx && event.index < self.size => {
                let mut at = from;
                let mut passed = false;
                loop {
                    passed |= at == event;
                    at = at.next(self.size);
                    if at == self.used {
                        return Some(passed);
                    }
                }
            }
            _ => None,
        }
    }
}

/// Address, length, id and flags.
fn descriptor(memory: &TestMemory, at: u64) -> Option<(u64, u32, u16, u16)> {
    let d = memory.read(at, 16)?;
    Some((
        u64::from_le_bytes(d[..8].try_into().expect("8 bytes")),
        u32::from_le_bytes(d[8..12].try_into().expect("4 bytes")),
        u16::from_le_bytes([d[12], d[13]]),
        u16::from_le_bytes([d[14], d[15]]),
    ))
}

/// A chain under way, as the device and as the reference have it.
type UnderWay = (Ticket, RefPackedChain);

fn check_in(memory: &TestMemory, data: &[u8]) {
    let mut input = Input(data);
    let (mut ring, batch) = ring(&mut input);
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

    let mut under_way: Vec<UnderWay> = Vec::new();
    let mut first = true;
    for _ in 0..REQUESTS {
        let in_flight: u16 = under_way.iter().map(|c| c.1.descriptors).sum();
        let left = ring.size - in_flight;
        let waiting = queue
            .available()
            .expect("nothing but the chain is looked at");
        // What was counted is looked at again, since statuses may have been written over the ring.
        if waiting == 0 {
            assert!(left == 0 || !ring.is_available(memory, ring.available));
            break;
        }
        let Some(chain) = fetch(memory, &ring, &mut queue, left) else {
            return;
        };
        (0..chain.1.descriptors).for_each(|_| ring.available = ring.available.next(ring.size));
        under_way.push(chain);
        if under_way.len() >= batch {
            give_back(memory, &mut ring, &mut queue, &mut under_way, first);
            first = false;
        }
        assert_eq!(queue.base(), ring.layout().base);
    }
    give_back(memory, &mut ring, &mut queue, &mut under_way, first);
    queue.disable_kicks();
    assert_eq!(memory.read_u16(ring.device + 2), Some(1));
    // Last, because it writes to the ring: a kick is missing exactly if there is more to fetch.
    let more = queue.enable_kicks();
    assert_eq!(more, ring.is_available(memory, ring.available));
    let wish = if ring.event_idx {
        (ring.available.word(), 2)
    } else {
        (0, 0)
    };
    let word = |at| memory.read_u16(ring.device + at).expect("the ring");
    assert_eq!((word(0), word(2)), wish);
}

/// Fetches a chain, as the reference walk finds it. `None` if the ring is broken.
fn fetch(
    memory: &TestMemory,
    ring: &RefPacked,
    queue: &mut Virtqueue,
    left: u16,
) -> Option<UnderWay> {
    let expected = ring.walk(memory, left);
    // Room for any list: buffers that span regions have more segments than descriptors.
    let mut segments = [Segment { addr: 0, len: 0 }; 4 * 1024];
    let (expected, chain) = match (expected, queue.fetch(&mut segments)) {
        (None, Err(_)) => return None,
        (Some(expected), Ok(chain)) => (expected, chain),
        (expected, found) => panic!("{ring:x?}: {found:x?} instead of {expected:x?}"),
    };
    assert_eq!(
        (chain.head, &chain.header[..]),
        (expected.id, &expected.chain.header[..])
    );
    let (readable, rest) = segments.split_at(usize::from(chain.readable));
    let writable = &rest[..usize::from(chain.writable)];
    for (list, len, ranges) in [
        (readable, chain.readable_len, &expected.chain.readable),
        (writable, chain.writable_len, &expected.chain.writable),
    ] {
        assert!(list.iter().all(|s| memory.holds(s)), "{list:x?}");
        assert_eq!(list.iter().map(|s| s.len as u64).sum::<u64>(), len);
        assert_eq!(Some(joined(list)), memory.hosts(ranges));
    }
    Some((chain.ticket(), expected))
}

/// Gives chains back in reverse order, with one publication.
fn give_back(
    memory: &TestMemory,
    ring: &mut RefPacked,
    queue: &mut Virtqueue,
    chains: &mut Vec<UnderWay>,
    first: bool,
) {
    if chains.is_empty() {
        assert!(!queue.publish());
        return;
    }
    let bytes = ring.ring..ring.ring + 16 * u64::from(ring.size);
    let intact = chains.iter().all(|c| !bytes.contains(&c.1.chain.status));
    let (from, shown) = (ring.used, memory.read_u16(flags_at(ring, ring.used)));
    let mut elements = Vec::new();
    for (len, (ticket, chain)) in (7..).zip(chains.drain(..).rev()) {
        queue.complete(&ticket, 0xa5, len);
        elements.push((ring.used, chain.id, len));
        (0..chain.descriptors).for_each(|_| ring.used = ring.used.next(ring.size));
    }
    if intact {
        let flags = memory.read_u16(flags_at(ring, from));
        assert_eq!(flags, shown, "the first element is shown too early");
    }
    let notified = queue.publish();
    if intact {
        for (at, id, len) in elements {
            let flags = if at.wrap { AVAIL | USED } else { 0 } | WRITE;
            let (_, found_len, found_id, found_flags) = ring.descriptor(memory, at.index);
            assert_eq!((found_id, found_len, found_flags), (id, len, flags));
        }
    }
    // The driver area may overlap the ring: read after it. The first publication tells the guest in any case.
    match ring.wants_interrupt(memory, from) {
        Some(wanted) => assert!(notified == wanted || notified && first, "{ring:?}"),
        None => assert!(notified, "{ring:?}"),
    }
}

fn flags_at(ring: &RefPacked, at: Place) -> u64 {
    ring.ring + 16 * u64::from(at.index) + 14
}

/// The ring, and how many chains are under way before they are given back.
pub fn ring(input: &mut Input<'_>) -> (RefPacked, usize) {
    let (size, flags, batch) = (input.u8(), input.u8(), input.u8());
    let ring = RefPacked {
        // Any size, but mostly a small one.
        size: match size {
            0x80.. => u16::from(size) * 9,
            n => n.into(),
        },
        event_idx: flags & 1 != 0,
        max_segments: u16::from(flags >> 1),
        available: Place::of(input.u16()),
        used: Place::of(input.u16()),
        ring: u64::from(input.u16()) * 2,
        driver: u64::from(input.u16()) * 2,
        device: u64::from(input.u16()) * 2,
    };
    (ring, 1 + usize::from(batch % 4))
}

pub fn seeds() -> Seeds {
    let usual = |id: u16, turn: u16| {
        [
            (0x200, 16, id, turn | NEXT),
            (0x1000, 0x1000, id, turn | NEXT | WRITE),
            (0x210, 1, id, turn | WRITE),
        ]
    };
    let three = [usual(5, AVAIL), usual(10, AVAIL), usual(0, AVAIL)].concat();
    // Two of the chain's descriptors before the end of the ring, one after it.
    let [a, b, c] = usual(3, AVAIL);
    let odd = [
        (0x200, 4, 0, 0),
        (0x204, 13, 0, NEXT),
        (0x3f80, 0x100, 9, 0),
        (0x8000, 0x1000, 0, WRITE | INDIRECT),
    ];
    let indirect = |at: u64, len: u32| table(&[(at, len, 2, AVAIL | INDIRECT)]);
    let mut endless = vec![(0x200, 16, 1, AVAIL | NEXT); 11];
    endless[10].3 |= NEXT;
    vec![
        (
            "usual",
            input([0, 0], 1 << 15, [0, 0], &[(0, table(&three))]),
        ),
        (
            "out_of_order",
            input([1, 2], 1 << 15, [1 << 15 | 4, 2], &[(0, table(&three))]),
        ),
        (
            "over_the_end",
            input(
                [1, 0],
                1 << 15 | 9,
                [1 << 15 | 9, 2],
                &[(0x90, table(&[a, b])), (0, table(&[c]))],
            ),
        ),
        (
            "second_lap",
            input([1, 1], 0, [4, 2], &[(0, table(&usual(7, USED)))]),
        ),
        (
            "indirect",
            input(
                [40, 0],
                1 << 15,
                [0, 1],
                &[(0, indirect(0x300, 64)), (0x300, table(&odd))],
            ),
        ),
        (
            "table_over_two_regions",
            input(
                [41, 0],
                1 << 15,
                [0, 3],
                &[(0, indirect(0x3fe0, 64)), (0x3fe0, table(&odd))],
            ),
        ),
        (
            "endless",
            input([0, 0], 1 << 15, [0, 0], &[(0, table(&endless))]),
        ),
        (
            "id_beyond",
            input([0, 0], 1 << 15, [0, 0], &[(0, table(&usual(11, AVAIL)))]),
        ),
        (
            "direct_then_indirect",
            input(
                [0, 0],
                1 << 15,
                [0, 0],
                &[
                    (0, table(&[a, (0x300, 32, 3, AVAIL | INDIRECT)])),
                    (0x300, table(&odd[2..])),
                ],
            ),
        ),
    ]
}

/// Descriptors, as they are in memory.
fn table(list: &[(u64, u32, u16, u16)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(addr, len, id, flags) in list {
        bytes.extend(addr.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
    }
    bytes
}

/// A ring of 11 at 0, the driver area at 0x100 and the device area at 0x140: flags and batch, both positions, what the
/// driver area says, and the descriptors and tables by address.
fn input(how: [u8; 2], at: u16, event: [u16; 2], tables: &[(usize, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![11, how[0], how[1]];
    for word in [at, at, 0, 0x100 / 2, 0x140 / 2] {
        bytes.extend(word.to_le_bytes());
    }
    let memory = bytes.len();
    let mut put = |at: usize, what: &[u8]| {
        let at = memory + at;
        bytes.resize(bytes.len().max(at + what.len()), 0);
        bytes[at..at + what.len()].copy_from_slice(what);
    };
    put(0x100, &event[0].to_le_bytes());
    put(0x102, &event[1].to_le_bytes());
    tables.iter().for_each(|(at, table)| put(*at, table));
    bytes
}
