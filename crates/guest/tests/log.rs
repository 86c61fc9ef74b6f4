//! The dirty log: whatever a ring of any kind changes in guest memory is marked, by the time that its guest may look at
//! it, and nothing else is. Memory is compared with what it was after every step, and the log is read and
//! cleared as a front-end does it.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::Segment;
use guest::{
    DirtyLog, DirtyMarks, GuestMemory, Inflight, InflightLayout, LogError, LogLayout, RegionLayout,
    RingBase, RingLayout, Ticket, Virtqueue,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::memory::Memory;
use testkit::random::Random;
use testkit::ring::{Desc, Ring};

const PAGE: u64 = 4096;
/// Rings of several pages.
const SIZE: u16 = 512;

/// Two regions that meet, and one behind a hole.
const REGIONS: [(u64, u64); 3] = [(0, 0x6000), (0x6000, 0x8000), (0x10_0000, 0x4000)];
const LOG_BYTES: u64 = 33;

/// Where headers are, one for each request; below is the ring.
const HEADERS: u64 = 0x5000;
const REQUESTS: u16 = SIZE / 2;

/// A driver, its memory as it was last seen, and the log.
struct Bench {
    memory: Arc<Memory>,
    ring: Ring,
    log: OwnedFd,
    seen: Vec<(u64, Vec<u8>)>,
    /// Pages that were changed and not marked since.
    unmarked: BTreeSet<u64>,
    /// Pages that were marked, of all steps.
    marked: BTreeSet<u64>,
}

impl Bench {
    fn new(packed: bool, event_idx: bool) -> Self {
        let memory = Arc::new(Memory::new(&REGIONS).unwrap());
        let make = if packed { Ring::packed } else { Ring::new };
        let mut ring = make(&memory, &memory.regions()[0], SIZE, event_idx).unwrap();
        ring.restart(ring.first_base());
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, LOG_BYTES).unwrap();
        Self {
            seen: all_pages(&memory),
            memory,
            ring,
            log,
            unmarked: BTreeSet::new(),
            marked: BTreeSet::new(),
        }
    }

    fn layout(&self) -> RingLayout {
        let at = self.ring.guest_addresses();
        RingLayout {
            number: 0,
            packed: self.ring.is_packed(),
            size: SIZE,
            descriptors: self.memory.user(at.desc),
            available: self.memory.user(at.avail),
            used: self.memory.user(at.used),
            base: RingBase(self.ring.base_word(self.ring.first_base())),
            event_idx: self.ring.event_idx,
            max_segments: 0,
        }
    }

    fn guest(&self) -> Arc<GuestMemory> {
        let mut guest = GuestMemory::default();
        for region in self.memory.regions() {
            let layout = RegionLayout {
                guest: region.gpa,
                len: region.size,
                user: region.user,
                file_offset: region.mmap_offset,
            };
            let file = region.file.try_clone().unwrap();
            guest = guest.with_region(layout, file).unwrap();
        }
        Arc::new(guest)
    }

    fn marks(&self, bytes: u64, used: Option<u64>) -> DirtyMarks {
        let layout = LogLayout {
            len: bytes,
            file_offset: 0,
        };
        DirtyMarks {
            log: Arc::new(DirtyLog::map(layout, self.log.try_clone().unwrap(), None).unwrap()),
            used,
        }
    }

    /// What the driver itself writes is no matter of the log.
    fn forget(&mut self) {
        self.seen = all_pages(&self.memory);
    }

    /// Finds out what was changed since the last look, and what was marked, which is cleared.
    fn look(&mut self) {
        let now = all_pages(&self.memory);
        let pairs = self.seen.iter().zip(&now);
        let changed = pairs.filter(|(old, new)| old.1 != new.1);
        self.unmarked.extend(changed.map(|(_, new)| new.0));
        self.seen = now;
        let mut log = [0; LOG_BYTES as usize];
        rustix::io::pread(&self.log, &mut log, 0).unwrap();
        rustix::io::pwrite(&self.log, &[0; LOG_BYTES as usize], 0).unwrap();
        for page in (0..LOG_BYTES * 8).filter(|p| log[*p as usize / 8] >> (p % 8) & 1 != 0) {
            self.unmarked.remove(&page);
            self.marked.insert(page);
        }
    }

    /// The pages of the ring that the device may write.
    fn ring_pages(&self) -> BTreeSet<u64> {
        let (at, n) = (self.ring.guest_addresses(), u64::from(SIZE));
        if self.ring.is_packed() {
            pages(at.desc, 16 * n).chain(pages(at.used, 4)).collect()
        } else {
            pages(at.used, 6 + 8 * n).collect()
        }
    }
}

fn all_pages(memory: &Memory) -> Vec<(u64, Vec<u8>)> {
    let regions = REGIONS.iter().flat_map(|&(start, len)| {
        (start..start + len)
            .step_by(PAGE as usize)
            .map(|at| (at / PAGE, memory.read(at, PAGE as usize)))
    });
    regions.collect()
}

fn pages(at: u64, len: u64) -> impl Iterator<Item = u64> {
    at / PAGE..(at + len).div_ceil(PAGE)
}

/// Requests of any sizes in any order, in batches; buffers that cross pages and regions.
fn everything_is_marked(packed: bool, event_idx: bool, tracked: bool, seed: u64) {
    let mut bench = Bench::new(packed, event_idx);
    let mut random = Random(seed);
    let layout = bench.layout();
    let queue = if tracked {
        let region = InflightLayout::new(1, SIZE, packed);
        let file = Inflight::make(region, 1).unwrap();
        let inflight = Inflight::map(region, file, 1).unwrap();
        Virtqueue::tracked(bench.guest(), layout, inflight.queue(0, packed).unwrap())
    } else {
        Virtqueue::new(bench.guest(), layout)
    };
    let used = bench.ring.guest_addresses().used;
    let marks = bench.marks(LOG_BYTES, random.below(2).eq(&0).then_some(used));
    let mut queue = queue.unwrap().logged(&layout, marks).unwrap();
    assert_eq!(queue.is_tracked(), tracked);
    bench.look();
    assert!(bench.unmarked.is_empty());

    let mut free: Vec<u16> = (0..REQUESTS).collect();
    for step in 0..120u8 {
        bench.marked.clear();
        let mut may_be = bench.ring_pages();
        let batch = random.below(free.len().min(5) as u64) as usize + 1;
        let batch = free.split_off(free.len() - batch);
        for &request in &batch {
            may_be.extend(set_request(&mut bench, request, &mut random));
        }
        bench.ring.publish(batch.iter().map(|r| 2 * r));
        bench.forget();

        let tickets = serve_batch(&mut queue, &mut random);
        assert_eq!(tickets.len(), batch.len());
        for ticket in &tickets {
            queue.complete(ticket, step, 1);
        }
        bench.look();
        let not_yet = bench.unmarked.difference(&bench.ring_pages()).count();
        assert_eq!(
            not_yet, 0,
            "before the guest is shown it: {:x?}",
            bench.unmarked
        );
        queue.publish();
        bench.look();
        assert!(bench.unmarked.is_empty(), "{:x?}", bench.unmarked);
        assert!(queue.take_marked());
        // Nothing is new.
        let marked = std::mem::take(&mut bench.marked);
        queue.publish();
        bench.look();
        assert!(bench.marked.is_empty() && !queue.take_marked());
        bench.marked = marked;
        let mut back = Vec::new();
        bench.ring.take_used(|used| back.push(used.id as u16 / 2));
        assert_eq!(back.len(), batch.len());
        free.extend(back);
        bench.forget();
        match random.below(3) {
            0 => queue.disable_kicks(),
            1 => drop(queue.enable_kicks()),
            _ => {}
        }
        bench.look();
        assert!(bench.unmarked.is_empty(), "{:x?}", bench.unmarked);
        let too_many: Vec<_> = bench.marked.difference(&may_be).collect();
        assert!(too_many.is_empty(), "marked for nothing: {too_many:x?}");
    }
}

/// Writes the descriptors of a request with a buffer of any length anywhere. Returns the pages of the buffer.
fn set_request(bench: &mut Bench, request: u16, random: &mut Random) -> impl Iterator<Item = u64> {
    let (start, end) = match random.below(3) {
        0 => (0x10_0000, 0x10_4000),
        _ => (0x6000, 0xe000),
    };
    let mut at = start + random.below(end - start - 1);
    if start == 0x6000 && random.below(4) == 0 {
        at = HEADERS + PAGE - 1 - random.below(600); // into the next region
    }
    let len = (random.below(3 * PAGE) + 1).min(end - at);
    let first = 2 * request;
    let header = Desc {
        addr: HEADERS + 16 * u64::from(request),
        len: 16,
        flags: Desc::NEXT,
        next: first + 1,
    };
    let buffer = Desc {
        addr: at,
        len: len as u32,
        flags: Desc::WRITE,
        next: 0,
    };
    bench.ring.set_desc(first, header);
    bench.ring.set_desc(first + 1, buffer);
    pages(at, len)
}

/// Fetches all available requests and writes to their buffers. Returns their tickets, in another order.
fn serve_batch(queue: &mut Virtqueue, random: &mut Random) -> Vec<Ticket> {
    let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
    let mut tickets = Vec::new();
    while queue.available().unwrap() > 0 {
        let chain = queue.fetch(&mut segments).unwrap();
        let from = usize::from(chain.readable);
        let writable = &segments[from..from + usize::from(chain.writable)];
        match random.below(3) {
            0 => queue.zero(writable),
            _ => {
                let bytes: Vec<u8> = (0..chain.writable_len)
                    .map(|_| random.any() as u8)
                    .collect();
                queue.copy_to(writable, &bytes);
            }
        }
        tickets.push(chain.ticket());
    }
    let first = random.below(tickets.len() as u64) as usize;
    tickets.rotate_left(first);
    tickets
}

#[test]
fn changes_are_marked_before_the_guest_sees_them() {
    for seed in 0..6 {
        for kind in 0..8 {
            let [packed, event_idx, tracked] = [1, 2, 4].map(|bit| kind & bit != 0);
            everything_is_marked(packed, event_idx, tracked, seed);
        }
    }
}

/// A request that was under way when its queue was given up, and wrote all the same.
#[test]
fn abandoned_requests_are_marked() {
    let mut bench = Bench::new(false, true);
    let layout = bench.layout();
    let queue = Virtqueue::new(bench.guest(), layout).unwrap();
    let mut queue = queue.logged(&layout, bench.marks(LOG_BYTES, None)).unwrap();
    let header = Desc {
        addr: HEADERS,
        len: 16,
        flags: Desc::NEXT,
        next: 1,
    };
    let buffer = Desc {
        addr: 0x6000,
        len: 5000,
        flags: Desc::WRITE,
        next: 0,
    };
    bench.ring.set_desc(0, header);
    bench.ring.set_desc(1, buffer);
    bench.ring.publish([0]);
    bench.forget();
    assert_eq!(queue.available(), Ok(1));
    let mut segments = vec![Segment { addr: 0, len: 0 }; queue.max_segments()];
    let chain = queue.fetch(&mut segments).unwrap();
    queue.copy_to(&segments[..usize::from(chain.writable)], &[7; 5000]);
    bench.look();
    assert_eq!(bench.unmarked.len(), 2);
    queue.abandon(&chain.ticket());
    bench.look();
    assert!(bench.unmarked.is_empty(), "{:x?}", bench.unmarked);
}

#[test]
fn short_log_is_refused() {
    let bench = Bench::new(false, true);
    let layout = bench.layout();
    let logged = |bytes, used| {
        let queue = Virtqueue::new(bench.guest(), layout).unwrap();
        queue.logged(&layout, bench.marks(bytes, used)).map(drop)
    };
    assert!(logged(LOG_BYTES, None).is_ok());
    assert!(matches!(
        logged(LOG_BYTES - 1, None),
        Err(LogError::Short(32, _))
    ));
    for used in [u64::MAX, LOG_BYTES * 8 * PAGE] {
        assert!(matches!(
            logged(LOG_BYTES, Some(used)),
            Err(LogError::Short(..))
        ));
    }
}
