//! What a kill leaves of a ring whose requests in flight are written down: a device is run instruction by instruction,
//! and after each one that changed memory, a successor takes up what is there. Every request must complete once, and
//! those that were fetched must be fetched again in their order and before all others.
#![cfg(target_arch = "x86_64")] // where every loop ends although it is stepped through
#![expect(
    unsafe_code,
    reason = "fork, and memory that the device's process shares"
)]

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use block::Segment;
use guest::{
    Chain, GuestMemory, Inflight, InflightLayout, InflightQueue, RegionLayout, RingBase,
    RingLayout, Virtqueue,
};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use testkit::random::Random;

/// Descriptors of the ring, and requests that it may have in flight: with a chain of three and some of one.
const SIZE: u16 = 8;
const IDS: usize = 4;

// The parts of the ring, the requests, and what the driver remembers.
const DESCRIPTORS: usize = 0;
const DRIVER: usize = 0x100;
const DEVICE: usize = 0x200;
const REQUESTS: usize = 0x400;
const REQUEST_BYTES: usize = 0x80;
const MEMO: usize = 0xc00;
const MEMORY_BYTES: usize = 0x1000;
const USER: u64 = 0x7000_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Memory that two processes share, or a copy of it.
struct Shared {
    file: OwnedFd,
    at: *mut u8,
    len: usize,
}

impl Shared {
    fn new(file: OwnedFd) -> Self {
        let len = rustix::fs::fstat(&file).unwrap().st_size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping; it stays for as long as the process.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        Self {
            at: at.unwrap().cast(),
            file,
            len,
        }
    }

    fn guest() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY_BYTES as u64).unwrap();
        Self::new(file)
    }

    fn read<T: Copy>(&self, at: usize) -> T {
        assert!(at + size_of::<T>() <= self.len);
        // SAFETY: it lies in the mapping, and only numbers are read.
        unsafe { self.at.add(at).cast::<T>().read_volatile() }
    }

    fn write<T>(&self, at: usize, value: T) {
        assert!(at + size_of::<T>() <= self.len);
        // SAFETY: it lies in the mapping.
        unsafe { self.at.add(at).cast::<T>().write_volatile(value) }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: all of the mapping; whoever else writes there is stopped.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }.to_vec()
    }

    fn set(&self, bytes: &[u8]) {
        bytes
            .iter()
            .enumerate()
            .for_each(|(at, byte)| self.write(at, *byte));
    }

    fn holds(&self, bytes: &[u8]) -> bool {
        // SAFETY: as above.
        bytes == unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

/// A guest with its driver, all of whose state is in memory, and the region of its device.
struct World {
    guest: Shared,
    region: Shared,
    packed: bool,
    /// The region has no room for the ring, which is split.
    in_order: bool,
    layout: InflightLayout,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Split,
    Packed,
    InOrder,
}

/// What the driver remembers, by offset from `MEMO`.
mod memo {
    /// Where it makes the next request available, and where it looks for the next used one.
    pub const AVAILABLE: usize = 2;
    pub const TAKEN: usize = 4;
    /// Requests made so far.
    pub const COUNT: usize = 8;
    /// Of each, by id: whether it is in flight.
    pub const IN_FLIGHT: usize = 16;
}

impl World {
    fn new(kind: Kind) -> Self {
        let packed = kind == Kind::Packed;
        let layout = InflightLayout::new(1, SIZE + 3, packed);
        let world = Self {
            guest: Shared::guest(),
            region: Shared::new(Inflight::make(layout, 1).unwrap()),
            packed,
            in_order: kind == Kind::InOrder,
            layout,
        };
        let start = world.start();
        world.guest.write(MEMO + memo::AVAILABLE, start);
        world.guest.write(MEMO + memo::TAKEN, start);
        if packed {
            (0..5).for_each(|i| world.guest.write(DESCRIPTORS + 16 * i + 14, AVAIL | USED));
        } else {
            world.guest.write(DRIVER + 2, start);
            world.guest.write(DEVICE + 2, start);
        }
        world
    }

    /// Where the ring begins: close to where 16 bits end, or in the midst of a lap.
    fn start(&self) -> u16 {
        if self.packed { 0x8005 } else { 0xfffc }
    }

    /// The same in memory of its own.
    fn copy(&self) -> Self {
        let copy = Self {
            guest: Shared::guest(),
            region: Shared::new(Inflight::make(self.layout, 1).unwrap()),
            ..*self
        };
        copy.guest.set(&self.guest.bytes());
        copy.region.set(&self.region.bytes());
        copy
    }

    /// What a device that takes the ring up is given. Only one that finds nothing written down believes the base.
    fn prepare(&self, base: u16) -> (Arc<GuestMemory>, RingLayout, InflightQueue) {
        let whole = RegionLayout {
            guest: 0,
            len: MEMORY_BYTES as u64,
            user: USER,
            file_offset: 0,
        };
        let memory = GuestMemory::default()
            .with_region(whole, self.guest.file.try_clone().unwrap())
            .unwrap();
        let region = self.region.file.try_clone().unwrap();
        let inflight = Inflight::map(self.layout, region, 1).unwrap();
        let layout = RingLayout {
            number: 0,
            packed: self.packed,
            size: SIZE,
            descriptors: USER + DESCRIPTORS as u64,
            available: USER + DRIVER as u64,
            used: USER + DEVICE as u64,
            base: if self.packed {
                RingBase::packed(base, base)
            } else {
                RingBase::split(base)
            },
            event_idx: false,
            max_segments: 6,
        };
        let region = inflight.queue(0, self.packed).unwrap();
        (Arc::new(memory), layout, region)
    }

    fn device(&self, base: u16) -> Virtqueue {
        self.open_ring(self.prepare(base))
    }

    fn open_ring(
        &self,
        (memory, layout, region): (Arc<GuestMemory>, RingLayout, InflightQueue),
    ) -> Virtqueue {
        if self.in_order {
            Virtqueue::untracked(memory, layout).unwrap()
        } else {
            Virtqueue::tracked(memory, layout, region).unwrap()
        }
    }

    /// Requests in a split ring that the device has given back and the driver not taken yet.
    fn given_back(&self) -> usize {
        let used: u16 = self.guest.read(DEVICE + 2);
        usize::from(used.wrapping_sub(self.memo(memo::TAKEN)))
    }

    fn memo(&self, at: usize) -> u16 {
        self.guest.read(MEMO + at)
    }

    fn in_flight(&self, id: usize) -> bool {
        self.guest.read::<u8>(MEMO + memo::IN_FLIGHT + id) != 0
    }

    fn in_flight_all(&self) -> usize {
        (0..IDS).filter(|&id| self.in_flight(id)).count()
    }

    /// The descriptors of a request: three of them, or two, or a table.
    fn chain(&self, id: usize) -> Vec<(u64, u32, u16)> {
        let at = (REQUESTS + id * REQUEST_BYTES) as u64;
        match id {
            0 => vec![(at, 8, 0), (at + 8, 8, 0), (at + 16, 1, WRITE)],
            1 => vec![(at, 16, 0), (at + 16, 1, WRITE)],
            _ => vec![(at + 32, 32, INDIRECT)],
        }
    }

    /// Makes a request available that is not in flight.
    fn make(&self, id: usize) {
        if self.in_flight(id) {
            return;
        }
        let count = self.guest.read::<u64>(MEMO + memo::COUNT);
        self.guest.write(MEMO + memo::COUNT, count + 1);
        self.guest.write(MEMO + memo::IN_FLIGHT + id, 1u8);
        let at = REQUESTS + id * REQUEST_BYTES;
        self.guest.write(at + 8, count);
        let table_flags = if self.packed {
            [0, WRITE]
        } else {
            [NEXT, WRITE]
        };
        for (i, flags) in table_flags.into_iter().enumerate() {
            let (addr, len) = [(at, 16u32), (at + 16, 1)][i];
            self.descriptor(at + 32 + 16 * i, (addr as u64, len, flags), id as u16, 1);
        }
        let chain = self.chain(id);
        let mut at = self.memo(memo::AVAILABLE);
        if self.packed {
            let first = at;
            let mut flags = Vec::new();
            for (i, &(addr, len, kind)) in chain.iter().enumerate() {
                let next = if i + 1 < chain.len() { NEXT } else { 0 };
                let lap = if at >> 15 != 0 { AVAIL } else { USED };
                flags.push(kind | next | lap);
                let place = DESCRIPTORS + 16 * usize::from(at & 0x7fff);
                let old = self.guest.read::<u16>(place + 14);
                self.descriptor(
                    place,
                    (addr, len, if i == 0 { old } else { flags[i] }),
                    id as u16,
                    0,
                );
                at = step(at, 1);
            }
            self.guest.write(
                DESCRIPTORS + 16 * usize::from(first & 0x7fff) + 14,
                flags[0],
            );
        } else {
            // Each id has descriptors of its own.
            let first = [0, 3, 5, 6][id];
            for (i, &(addr, len, kind)) in chain.iter().enumerate() {
                let next = if i + 1 < chain.len() { NEXT } else { 0 };
                let place = DESCRIPTORS + 16 * (first + i);
                self.descriptor(place, (addr, len, kind | next), 0, (first + i + 1) as u16);
            }
            self.guest
                .write(DRIVER + 4 + 2 * usize::from(at % SIZE), first as u16);
            at = at.wrapping_add(1);
            self.guest.write(DRIVER + 2, at);
        }
        self.guest.write(MEMO + memo::AVAILABLE, at);
    }

    fn descriptor(&self, place: usize, (addr, len, flags): (u64, u32, u16), id: u16, next: u16) {
        self.guest.write(place, addr);
        self.guest.write(place + 8, len);
        let (third, fourth) = if self.packed {
            (id, flags)
        } else {
            (flags, next)
        };
        self.guest.write(place + 12, third);
        self.guest.write(place + 14, fourth);
    }

    /// Takes what was given back; each must have been in flight. Gives the number.
    fn take(&self) -> usize {
        let mut at = self.memo(memo::TAKEN);
        let mut count = 0;
        loop {
            let id = if self.packed {
                let place = DESCRIPTORS + 16 * usize::from(at & 0x7fff);
                let used = if at >> 15 != 0 { AVAIL | USED } else { 0 };
                if self.guest.read::<u16>(place + 14) & (AVAIL | USED) != used {
                    break;
                }
                usize::from(self.guest.read::<u16>(place + 12))
            } else {
                if self.guest.read::<u16>(DEVICE + 2) == at {
                    break;
                }
                let head = self
                    .guest
                    .read::<u32>(DEVICE + 4 + 8 * usize::from(at % SIZE));
                [0, 3, 5, 6]
                    .iter()
                    .position(|&first| first == head)
                    .expect("a head")
            };
            assert!(self.in_flight(id), "{id} was given back twice");
            self.guest.write(MEMO + memo::IN_FLIGHT + id, 0u8);
            at = if self.packed {
                step(at, self.chain(id).len() as u16)
            } else {
                at.wrapping_add(1)
            };
            count += 1;
        }
        self.guest.write(MEMO + memo::TAKEN, at);
        count
    }
}

/// A position of a packed ring, some descriptors on.
fn step(at: u16, count: u16) -> u16 {
    let index = (at & 0x7fff) + count;
    if index >= SIZE {
        (at ^ 0x8000) & 0x8000 | (index - SIZE)
    } else {
        at & 0x8000 | index
    }
}

/// What device and driver do in turn.
#[derive(Clone, Copy, Debug)]
enum Step {
    Make(usize),
    Fetch,
    /// One of those that were fetched.
    Complete(usize),
    Publish,
    Take,
    /// Another device takes over, without a word of the first.
    Successor,
}

/// The number of a request, which is in its header.
fn number(chain: &Chain) -> u64 {
    u64::from_le_bytes(chain.header[8..].try_into().unwrap())
}

fn segments() -> Vec<Segment> {
    vec![Segment { addr: 0, len: 0 }; 32]
}

/// Device and driver at work, for so many steps.
fn run(world: &World, random: &mut Random, steps: usize) {
    let given = unwatched(|| world.prepare(world.start()));
    let (mut device, mut segments) = (world.open_ring(given), segments());
    let mut fetched: Vec<Chain> = Vec::with_capacity(IDS);
    // Of the requests, so many are done and not published, and so many published and not taken.
    let (mut done, mut published) = (0, 0);
    for _ in 0..steps {
        let waits = world.in_flight_all() - fetched.len() - done - published;
        match unwatched(|| choose(world, random, [waits, fetched.len(), done, published])) {
            Step::Make(id) => unwatched(|| world.make(id)),
            Step::Fetch => {
                assert!(device.available().unwrap() > 0);
                fetched.push(device.fetch(&mut segments).unwrap());
            }
            Step::Complete(which) => {
                let chain = fetched.swap_remove(which % fetched.len());
                device.complete(&chain.ticket(), 0, 1);
                done += 1;
            }
            Step::Publish => {
                device.publish();
                let all = published + done;
                published = if world.in_order {
                    unwatched(|| world.given_back())
                } else {
                    all
                };
                done = all - published;
            }
            Step::Take => {
                assert_eq!(unwatched(|| world.take()), published);
                published = 0;
            }
            Step::Successor => {
                fetched.clear();
                done = 0;
                let given = unwatched(|| world.prepare(1));
                device = world.open_ring(given);
            }
        }
    }
}

/// A step that has something to do.
fn choose(world: &World, random: &mut Random, counts: [usize; 4]) -> Step {
    let [waits, fetched, done, published] = counts;
    loop {
        let id = random.below(IDS as u64) as usize;
        return match random.below(16) {
            0..5 if !world.in_flight(id) => Step::Make(id),
            5..9 if waits > 0 => Step::Fetch,
            9..12 if fetched > 0 => Step::Complete(id),
            12 if done > 0 => Step::Publish,
            13..15 if published > 0 => Step::Take,
            15 if fetched + done > 0 => Step::Successor,
            _ => continue,
        };
    }
}

/// Does something that is no device's work, at full speed and as if at once.
fn unwatched<T>(work: impl FnOnce() -> T) -> T {
    raise(Signal::SIGUSR1).expect("to tell");
    let result = work();
    raise(Signal::SIGUSR2).expect("to tell");
    result
}

/// A successor does all that there is to do, and the driver gets each request back once.
fn finish(world: &World, random: &mut Random) {
    let blank = world.region.read::<u16>(8) == 0;
    let mut device = world.device(if blank { world.start() } else { 1 });
    let mut segments = segments();
    let mut fetched = Vec::new();
    while device.available().unwrap() > 0 {
        fetched.push(device.fetch(&mut segments).unwrap());
    }
    assert_eq!(device.resubmits(), 0);
    let numbers: Vec<u64> = fetched.iter().map(number).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "fetched as {numbers:?}");
    while !fetched.is_empty() {
        let chain = fetched.swap_remove(random.below(fetched.len() as u64) as usize);
        device.complete(&chain.ticket(), 0, 1);
        if random.below(2) == 0 {
            device.publish();
            world.take();
        }
    }
    device.publish();
    world.take();
    assert_eq!(
        world.in_flight_all(),
        0,
        "of {numbers:?}, some never came back"
    );
    // And all of that is known to the next one.
    let mut next = world.device(1);
    assert!(next.resubmits() == 0 && next.available().unwrap() == 0);
    assert!(next.base() == device.base());
}

/// Runs a device and its driver in a process of its own, the device one instruction at a time. Gives how often a
/// successor took over.
fn kill_everywhere(kind: Kind, seed: u64) -> usize {
    let mut random = Random(seed);
    let world = World::new(kind);
    let copy = world.copy();
    // SAFETY: the child does what it is to do and nothing else; what it allocates with, the C library keeps usable after
    // a fork.
    let child = match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            ptrace::traceme().expect("to be traced");
            raise(Signal::SIGSTOP).expect("to stop");
            run(&world, &mut random, STEPS);
            // SAFETY: ends the process, and runs nothing of what the parent has to run at its end.
            unsafe { nix::libc::_exit(0) }
        }
        ForkResult::Parent { child } => child,
    };
    let mut kills = 0;
    let mut watched = true;
    let mut last = (world.guest.bytes(), world.region.bytes());
    loop {
        match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, 0) => break,
            WaitStatus::Stopped(_, Signal::SIGTRAP | Signal::SIGSTOP) => {}
            WaitStatus::Stopped(_, Signal::SIGUSR1) => watched = false,
            WaitStatus::Stopped(_, Signal::SIGUSR2) => watched = true,
            other => panic!("seed {seed}: {other:?}"),
        }
        if !watched {
            ptrace::cont(child, None).unwrap();
            continue;
        }
        if !(world.guest.holds(&last.0) && world.region.holds(&last.1)) {
            last = (world.guest.bytes(), world.region.bytes());
            copy.guest.set(&last.0);
            copy.region.set(&last.1);
            let checked = catch_unwind(AssertUnwindSafe(|| finish(&copy, &mut random)));
            if checked.is_err() {
                let _ = kill(child, Signal::SIGKILL);
                let _ = waitpid(child, None);
                panic!("seed {seed}: after {kills} changes of memory");
            }
            kills += 1;
        }
        ptrace::step(child, None).unwrap();
    }
    kills
}

/// What a device and its driver do in one run.
const STEPS: usize = 60;

const RUNS: u64 = 3;

#[test]
fn split_ring_survives_kill_at_any_instruction() {
    let kills: usize = (0..RUNS)
        .map(|seed| kill_everywhere(Kind::Split, seed))
        .sum();
    assert!(kills > 150, "only {kills}");
}

/// Without a region that it fits into: the used index says all.
#[test]
fn in_order_split_ring_survives_kill_at_any_instruction() {
    let kills: usize = (0..RUNS)
        .map(|seed| kill_everywhere(Kind::InOrder, seed))
        .sum();
    assert!(kills > 50, "only {kills}");
}

#[test]
fn packed_ring_survives_kill_at_any_instruction() {
    let kills: usize = (0..RUNS)
        .map(|seed| kill_everywhere(Kind::Packed, seed))
        .sum();
    assert!(kills > 150, "only {kills}");
}
