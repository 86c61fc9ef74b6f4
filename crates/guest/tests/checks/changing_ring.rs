//! A ring of either kind in guest memory that changes while it is read and written: what a driver does that wants a
//! check and the use of what was checked to see different bytes. Input: a byte of flags, the changes that another thread
//! goes through again and again (their number, then address and value of each), and then an input of `split_ring` or
//! `packed_ring`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use block::Segment;
use guest::{DirtyLog, DirtyMarks, LogLayout, Virtqueue};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::memory::{REGIONS, TestMemory};
use super::{Input, Seeds, packed_ring, split_ring};

/// Requests taken from one ring, and times that the changes are gone through; they bound the time that one input takes.
const REQUESTS: u16 = 200;
const ROUNDS: usize = 400;

const LOG_BYTES: u64 = 4;

pub fn check(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let changes: Vec<(u64, u8)> = (0..input.u8() % 24)
        .map(|_| (u64::from(input.u16() % 0x9000), input.u8()))
        .filter(|&(at, _)| TestMemory::parts(at, 1).is_some())
        .collect();
    let layout = match flags & 1 {
        0 => split_ring::ring(&mut input).layout(),
        _ => packed_ring::ring(&mut input).0.layout(),
    };
    let memory = TestMemory::new();
    for (start, len, _) in REGIONS {
        memory.write(start, input.slice(len as usize));
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let changing = scope.spawn(|| {
            let mut rounds = 0;
            while rounds < ROUNDS && !done.load(Ordering::Relaxed) {
                for &(at, value) in &changes {
                    memory.write(at, &[value ^ rounds as u8]);
                }
                rounds += 1;
            }
        });
        serve(&memory, layout, flags);
        done.store(true, Ordering::Relaxed);
        // The thread itself is waited for, too: what it has of its own is else a leak to whoever looks at once.
        changing.join().expect("it only writes");
    });
}

/// Whatever the ring says, and then says instead: what is handed out is guest memory, and nothing waits or panics.
fn serve(memory: &TestMemory, layout: guest::RingLayout, flags: u8) {
    let Ok(mut queue) = Virtqueue::new(memory.guest.clone(), layout) else {
        return;
    };
    if flags & 2 != 0 {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, LOG_BYTES).expect("memory");
        let log = LogLayout {
            len: LOG_BYTES,
            file_offset: 0,
        };
        let marks = DirtyMarks {
            log: Arc::new(DirtyLog::map(log, file, None).expect("a log")),
            used: None,
        };
        queue = queue.logged(&layout, marks).expect("long enough");
    }
    let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
    let mut tickets = Vec::new();
    for n in 0..REQUESTS {
        match queue.available() {
            Ok(waiting) if waiting > 0 => assert!(waiting <= 1024),
            _ => break,
        }
        let Ok(chain) = queue.fetch(&mut segments) else {
            break;
        };
        let (readable, writable) = (usize::from(chain.readable), usize::from(chain.writable));
        let list = &segments[..readable + writable];
        assert!(list.iter().all(|s| memory.holds(s)), "{list:x?}");
        let sum = |list: &[Segment]| list.iter().map(|s| s.len as u64).sum::<u64>();
        assert_eq!(sum(&list[..readable]), chain.readable_len);
        assert_eq!(sum(&list[readable..]), chain.writable_len);
        let mut copy = [0; 64];
        assert!(queue.copy_from(&list[..readable], &mut copy) <= copy.len());
        queue.copy_to(&list[readable..], &copy);
        tickets.push(chain.ticket());
        if n % 3 == 0 {
            tickets
                .drain(..)
                .for_each(|ticket| queue.complete(&ticket, 0, 1));
            queue.publish();
            queue.enable_kicks();
            queue.disable_kicks();
        }
    }
    tickets
        .drain(..)
        .for_each(|ticket| queue.complete(&ticket, 0, 1));
    queue.publish();
    queue.base();
}

pub fn seeds() -> Seeds {
    // The index, flags and descriptors of the seeds of both kinds of rings.
    let changes: Vec<u8> = [
        (0x102u16, 9u8),
        (0, 0x40),
        (8, 0xff),
        (12, 2),
        (14, 7),
        (0x42, 1),
    ]
    .iter()
    .flat_map(|&(at, value)| [at.to_le_bytes()[0], at.to_le_bytes()[1], value])
    .collect();
    let input = |flags: u8, ring: Vec<u8>| [&[flags, 6][..], &changes, &ring].concat();
    let of = |seeds: Seeds, flags: u8| seeds.into_iter().map(move |(_, ring)| (flags, ring));
    let names = [
        "split",
        "split2",
        "split3",
        "split_log",
        "split_log2",
        "packed",
        "packed2",
        "packed3",
        "packed_log",
        "packed_log2",
    ];
    let split = of(split_ring::seeds(), 0).take(3);
    let split_log = of(split_ring::seeds(), 2).take(2);
    let packed = of(packed_ring::seeds(), 1).take(3);
    let packed_log = of(packed_ring::seeds(), 3).take(2);
    let all = split.chain(split_log).chain(packed).chain(packed_log);
    names
        .into_iter()
        .zip(all.map(|(flags, ring)| input(flags, ring)))
        .collect()
}
