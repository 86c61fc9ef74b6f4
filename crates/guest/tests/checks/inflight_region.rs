//! A region of requests in flight of any content, for a ring in guest memory of any content. Input: the kind of ring and
//! how it is used, the length of the region, what it holds, and then what the guest's memory holds from address 0 on.

use block::Segment;
use guest::{Inflight, InflightLayout, RingBase, RingLayout, Virtqueue};
use rustix::io::{pread, pwrite};

use super::memory::{REGIONS, TestMemory};
use super::{Input, Seeds};

/// Requests taken from one ring; it bounds the time that one input takes.
const REQUESTS: usize = 64;

thread_local! {
    static MEMORY: TestMemory = TestMemory::new();
}

pub fn check(data: &[u8]) {
    MEMORY.with(|memory| check_in(memory, data));
}

fn check_in(memory: &TestMemory, data: &[u8]) {
    let mut input = Input(data);
    let [kind, how] = input.bytes();
    let packed = kind & 1 != 0;
    let size = if packed {
        1 + u16::from(kind >> 1) % 32
    } else {
        1 << (kind >> 1 & 7)
    };
    let entries = size + u16::from(how & 1);
    let inflight_layout = InflightLayout::new(1, entries, packed);
    let file = Inflight::make(inflight_layout, 1).expect("a region");
    let len = usize::from(input.u16()).min(inflight_layout.len as usize);
    pwrite(&file, input.slice(len), 0).expect("a region");
    memory.clear();
    for (start, len, _) in REGIONS {
        memory.write(start, input.slice(len as usize));
    }
    let layout = RingLayout {
        number: 0,
        packed,
        size,
        descriptors: TestMemory::user(0),
        available: TestMemory::user(0x200),
        used: TestMemory::user(0x280),
        base: RingBase::first(packed),
        event_idx: how & 2 != 0,
        max_segments: 6,
    };
    let device = || {
        let inflight = Inflight::map(inflight_layout, file.try_clone().expect("a descriptor"), 1)
            .expect("a region");
        let region = inflight.queue(0, packed).expect("a region");
        Virtqueue::tracked(memory.guest.clone(), layout, region)
    };
    let Ok(mut queue) = device() else {
        return;
    };
    let left = queue.resubmits();
    assert!(
        left <= usize::from(size),
        "{left} in flight in a ring of {size}"
    );
    let batch = usize::from(how >> 2 & 7) + 1;
    let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
    let mut under_way = Vec::new();
    for _ in 0..REQUESTS {
        if !queue.available().is_ok_and(|n| n > 0) {
            break;
        }
        let Ok(chain) = queue.fetch(&mut segments) else {
            break;
        };
        for s in &segments[..usize::from(chain.readable + chain.writable)] {
            assert!(memory.holds(s), "{s:x?} is not guest memory");
        }
        under_way.push(chain.ticket());
        if under_way.len() >= batch {
            // The last goes first.
            while let Some(ticket) = under_way.pop() {
                queue.complete(&ticket, 0, 1);
            }
            queue.publish();
        }
    }
    // Chains may lie over the ring, so that nothing is known of what a successor finds, but that it is bounded.
    if let Ok(next) = device() {
        assert!(next.resubmits() <= usize::from(size));
    }
    let mut version = [0; 2];
    pread(&file, &mut version, 8).expect("a region");
    assert_eq!(version, [1, 0], "what was taken up is written down");
}

pub fn seeds() -> Seeds {
    let input = |kind: u8, how: u8, region: &[u8], memory: &[(usize, &[u8])]| {
        let mut bytes = vec![kind, how];
        bytes.extend((region.len() as u16).to_le_bytes());
        bytes.extend(region);
        let start = bytes.len();
        for (at, part) in memory {
            bytes.resize(bytes.len().max(start + at + part.len()), 0);
            bytes[start + at..start + at + part.len()].copy_from_slice(part);
        }
        bytes
    };
    let bytes = |words: &[u16]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
    // A ring of 4: chains of a header at 0x1000 and a status at 0x1010.
    let descriptor = |addr: u64, len: u32, third: u16, fourth: u16| {
        let mut d = addr.to_le_bytes().to_vec();
        d.extend(len.to_le_bytes());
        d.extend(bytes(&[third, fourth]));
        d
    };
    let split_ring = [
        descriptor(0x1000, 16, 1, 1),
        descriptor(0x1010, 1, 2, 0),
        descriptor(0x1000, 16, 1, 3),
        descriptor(0x1010, 1, 2, 0),
    ]
    .concat();
    let available = bytes(&[0, 2, 0, 2]);
    let split_entry = |inflight: u8, next: u16, counter: u64| {
        let mut entry = vec![inflight, 0, 0, 0, 0, 0];
        entry.extend(next.to_le_bytes());
        entry.extend(counter.to_le_bytes());
        entry
    };
    let split_region = |last_head: u16, used: u16, entries: [(u8, u16, u64); 4]| {
        let mut region = bytes(&[0, 0, 0, 0, 1, 4, last_head, used]);
        for (inflight, next, counter) in entries {
            region.extend(split_entry(inflight, next, counter));
        }
        region
    };
    let both = [(1, 0, 8), (0, 0, 0), (1, 0, 7), (0, 0, 0)];
    let packed_ring = [
        descriptor(0x1000, 16, 0, 0x81),
        descriptor(0x1010, 1, 0, 0x82),
        descriptor(0x1000, 16, 1, 0x81),
        descriptor(0x1010, 1, 1, 0x82),
    ]
    .concat();
    let packed_entry = |head: [u16; 4], counter: u64, d: [u16; 2], len: u32, addr: u64| {
        let mut entry = bytes(&head);
        entry.extend(counter.to_le_bytes());
        entry.extend(bytes(&d));
        entry.extend(len.to_le_bytes());
        entry.extend(addr.to_le_bytes());
        entry
    };
    let packed_region = |free: [u16; 2], used: [u16; 2], wraps: u16| {
        let mut region = bytes(&[0, 0, 0, 0, 1, 4, free[0], free[1], used[0], used[1], wraps]);
        region.resize(32, 0);
        region.extend(packed_entry([1, 1, 1, 2], 3, [0, 0x81], 16, 0x1000));
        region.extend(packed_entry([0, 4, 0, 0], 0, [0, 0x82], 1, 0x1010));
        region.extend(packed_entry([0, 3, 0, 0], 0, [0, 0], 0, 0));
        region.extend(packed_entry([0, 4, 0, 0], 0, [0, 0], 0, 0));
        region
    };
    let split = |region: &[u8]| input(2 << 1, 0, region, &[(0, &split_ring), (0x200, &available)]);
    let packed = |region: &[u8]| input(3 << 1 | 1, 2, region, &[(0, &packed_ring)]);
    vec![
        ("split_blank", split(&[])),
        ("split_in_flight", split(&split_region(0, 0, both))),
        (
            "split_batch_not_cleared",
            split(&split_region(2, u16::MAX, both)),
        ),
        (
            "split_links_in_a_loop",
            split(&split_region(0, u16::MAX - 3, both)),
        ),
        ("packed_blank", packed(&[])),
        (
            "packed_in_flight",
            packed(&packed_region([2, 2], [0, 0], 0x101)),
        ),
        (
            "packed_batch_published",
            packed(&packed_region([0, 2], [2, 0], 0x101)),
        ),
        (
            "packed_chains_meet",
            packed(&packed_region([4, 4], [3, 3], 0)),
        ),
    ]
}
