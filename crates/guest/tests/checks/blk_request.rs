//! A virtio-blk header and payload. Input: the disk in three bytes and its size, the header, the lengths of the buffers,
//! the payload.

use block::{DiskFacts, Request, Segment};
use guest::{Chain, Virtqueue, blk};

use super::memory::{RefRing, TestMemory};
use super::{Input, Seeds, split_ring};

thread_local! {
    /// Only a ring can make one.
    static CHAIN: Chain = chain();
}

pub fn check(data: &[u8]) {
    let mut input = Input(data);
    let (blocks, discards, read_only) = (input.u8(), input.u8(), input.u8() & 1 != 0);
    let logical_block = 512 << (blocks % 4);
    let facts = DiskFacts {
        logical_block,
        physical_block: 4096,
        optimal_io: 0,
        address_alignment: 1,
        length_alignment: 1,
        discard_granularity: if discards & 1 != 0 { 4096 } else { 0 },
        read_only,
    };
    // A disk has whole blocks.
    let size = input.u64() & !(u64::from(logical_block) - 1);
    let mut chain = CHAIN.with(|c| *c);
    chain.header = input.bytes();
    // No chain is longer than 2^48 bytes: 65538 descriptors of 32 bits at most.
    chain.readable_len = input.u64() >> 16;
    chain.writable_len = input.u64() >> 16;
    let payload = input.bytes::<16>();
    let payload_len = (chain.readable_len as usize).min(16);

    let parsed = blk::parse(&chain, size, &facts, |to| {
        to[..payload_len].copy_from_slice(&payload[..payload_len]);
        payload_len
    });
    let expected = expected(&chain, size, &facts, &payload);
    assert_eq!(parsed.is_ok(), expected.is_some(), "{chain:x?}: {parsed:?}");
    let (Ok(request), Some(range)) = (parsed, expected) else {
        return;
    };
    match request {
        Request::Read { at, len } => assert_eq!(range, (at.0, len)),
        Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. } => {
            assert_eq!(range, (at.0, len));
            assert!(!read_only);
        }
        Request::Flush | Request::GetId => {}
    }
}

/// The range of a request that is allowed (virtio 1.3 §5.2.6); in 128 bits nothing can overflow.
fn expected(c: &Chain, size: u64, facts: &DiskFacts, payload: &[u8; 16]) -> Option<(u64, u64)> {
    let header = u128::from_le_bytes(c.header);
    let payload = u128::from_le_bytes(*payload);
    // Bit 31 was a barrier once.
    let (kind, sector) = (header as u32 & !(1 << 31), header >> 64);
    let zeroes = (payload as u64 as u128, (payload >> 64) as u32 as u128 * 512);
    let (at, len) = match kind {
        0 => (sector * 512, u128::from(c.writable_len)),
        1 if !facts.read_only => (sector * 512, u128::from(c.readable_len)),
        4 | 5 | 8 | 9 => return Some((0, 0)),
        11 | 13 if !facts.read_only && c.readable_len == 16 => {
            let flags = (payload >> 96) as u32;
            let allowed = match kind {
                11 => flags == 0 && facts.discard_granularity != 0,
                _ => flags <= 1,
            };
            if !allowed || zeroes.1 > 256 << 20 {
                return None;
            }
            (zeroes.0 * 512, zeroes.1)
        }
        _ => return None,
    };
    let block = u128::from(facts.logical_block);
    let good = (1..=1 << 31).contains(&len)
        && at % block == 0
        && len % block == 0
        && at + len <= u128::from(size);
    good.then_some((at as u64, len as u64))
}

fn chain() -> Chain {
    let memory = TestMemory::new();
    let seeds = split_ring::seeds();
    let usual = seeds.iter().find(|s| s.0 == "usual").expect("a seed");
    memory.write(0, &usual.1[10..]);
    let ring = RefRing {
        size: 16,
        descriptors: 0,
        available: 0x100,
        used: 0x140,
        next_available: 0,
        event_idx: false,
        max_segments: 0,
    };
    let mut queue = Virtqueue::new(memory.guest.clone(), ring.layout()).expect("a ring");
    assert_eq!(queue.available(), Ok(1));
    queue
        .fetch(&mut [Segment { addr: 0, len: 0 }; 4])
        .expect("a chain")
}

pub fn seeds() -> Seeds {
    let input = |disk: [u8; 3], kind: u32, sector: u64, lens: [u64; 2], payload: u128| {
        let mut bytes = disk.to_vec();
        bytes.extend((1u64 << 30).to_le_bytes());
        bytes.extend((u128::from(kind) | u128::from(sector) << 64).to_le_bytes());
        lens.iter()
            .for_each(|n| bytes.extend((n << 16).to_le_bytes()));
        bytes.extend(payload.to_le_bytes());
        bytes
    };
    let zeroes = 8 | 16 << 64;
    let last = (1 << 30) / 512 - 8;
    vec![
        ("read", input([0, 1, 0], 0, 8, [0, 4096], 0)),
        ("read_last", input([3, 1, 0], 0, last, [0, 4096], 0)),
        ("write", input([0, 1, 0], 1, 8, [4096, 0], 0)),
        ("write_read_only", input([0, 1, 1], 1, 8, [4096, 0], 0)),
        ("flush", input([0, 1, 0], 4, 0, [0, 0], 0)),
        ("get_id", input([0, 1, 0], 8, 0, [0, 20], 0)),
        ("discard", input([0, 1, 0], 11, 0, [16, 0], zeroes)),
        ("write_zeroes", input([0, 1, 0], 13, 0, [16, 0], zeroes)),
        ("unmap", input([0, 1, 0], 13, 0, [16, 0], zeroes | 1 << 96)),
        ("beyond", input([0, 1, 0], 0, u64::MAX, [0, 512], 0)),
    ]
}
