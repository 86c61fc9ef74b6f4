//! Guests, disks and threads in virtual time: what is tested is the admission as the threads use it,
//! with a clock that takes no time.

use block::{DiskFacts, GuestOffset, Rate, ThrottleLimits};
use image::Image;
use testkit::random::Random;

use super::*;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::disk::Options;
use crate::throttle::ThrottleGroup;
use crate::worker::RELEASE_MAX;

const SECOND: u64 = 1_000_000_000;
const SLOTS: u16 = 256;

/// Later than any real time while the tests run: limits that are changed in between ask the real clock.
fn start() -> u64 {
    now_ns() + 3600 * SECOND
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

fn disk() -> Arc<Disk> {
    let name = "disk".to_owned();
    Arc::new(Disk::new(
        name,
        Image::Null,
        None,
        FACTS,
        1 << 30,
        "",
        Options::default(),
    ))
}

fn rate(average: u64) -> Rate {
    Rate {
        average,
        ..ThrottleLimits::NONE.bps_total
    }
}

fn iops(average: u64) -> ThrottleLimits {
    ThrottleLimits {
        iops_total: rate(average),
        ..ThrottleLimits::NONE
    }
}

fn read(len: u64) -> Request {
    let at = GuestOffset(0);
    Request::Read { at, len }
}

fn write(len: u64) -> Request {
    let at = GuestOffset(0);
    Request::Write { at, len }
}

/// A queue with a thread of its own, and a guest that keeps it as deep as it can.
struct Sim {
    disk: Arc<Disk>,
    held: HeldRequests,
    slots: Slots,
    requests: Vec<Request>,
    depth: usize,
    /// Time from release to completion.
    service: u64,
    /// How late its timer is, at most.
    late: u64,
    in_service: VecDeque<(u64, u16)>,
    next: u64,
    issued: usize,
    /// Requests released, by kind in `requests`' order of directions.
    done: [u64; 2],
    last: u64,
    gap_max: u64,
}

impl Sim {
    fn new(disk: &Arc<Disk>, depth: usize, requests: &[Request]) -> Self {
        Self {
            disk: disk.clone(),
            held: HeldRequests::new(disk.admission.clone()),
            slots: Slots::new(SLOTS),
            requests: requests.to_vec(),
            depth,
            service: 2_000,
            late: 60_000,
            in_service: VecDeque::new(),
            next: 0,
            issued: 0,
            done: [0; 2],
            last: 0,
            gap_max: 0,
        }
    }

    fn turn(&mut self, now: u64, random: &mut Random, released: &mut Vec<u16>) {
        while let Some(&(_, slot)) = self.in_service.front().filter(|s| s.0 <= now) {
            self.in_service.pop_front();
            self.slots.give_back(slot);
        }
        while self.slots.taken() < self.depth {
            let request = self.requests[self.issued % self.requests.len()];
            self.issued += 1;
            self.held
                .hold(&mut self.slots, Ticket::default(), request, &[], 0);
        }
        let (held, slots) = (&mut self.held, &mut self.slots);
        let verdict = held.pass(slots, now, RELEASE_MAX, released);
        if !released.is_empty() {
            if self.last > 0 {
                self.gap_max = self.gap_max.max(now - self.last);
            }
            self.last = now;
        }
        for slot in released.drain(..) {
            let is_write = !matches!(self.slots.get(slot).request, Request::Read { .. });
            self.done[usize::from(is_write)] += 1;
            self.in_service.push_back((now + self.service, slot));
        }
        let completion = self.in_service.front().map_or(u64::MAX, |s| s.0);
        let again = match verdict {
            Verdict::Empty => u64::MAX,
            Verdict::NoRoom => now + 1_000,
            Verdict::Until(at) => at + random.below(self.late + 1),
        };
        self.next = completion.min(again);
    }

    fn all(&self) -> u64 {
        self.done.iter().sum()
    }
}

/// Runs for a while, and returns the time at the end.
fn run(sims: &mut [Sim], start: u64, seconds: f64) -> u64 {
    let end = start + (seconds * SECOND as f64) as u64;
    let mut random = Random(7);
    let mut released = Vec::new();
    sims.iter_mut().for_each(|sim| sim.next = start);
    loop {
        let sim = sims.iter_mut().min_by_key(|sim| sim.next).unwrap();
        if sim.next >= end {
            return end;
        }
        sim.turn(sim.next, &mut random, &mut released);
    }
}

fn within(what: &str, is: f64, wanted: f64, percent: f64) {
    let error = (is / wanted - 1.0) * 100.0;
    assert!(
        error.abs() <= percent,
        "{what}: {is} instead of {wanted}, {error:+.2} %"
    );
}

/// How long to look at a rate: without optimisation, ten seconds at a high rate take as long.
fn seconds(rate: u64) -> f64 {
    if cfg!(debug_assertions) && rate > 10_000 {
        1.5
    } else {
        10.0
    }
}

/// What flows at once at first counts in ten seconds, as it does for a guest, and not in less.
fn warm_up(sims: &mut [Sim], seconds: f64) -> u64 {
    if seconds < 10.0 {
        run(sims, start(), 0.2)
    } else {
        start()
    }
}

#[test]
fn a_rate_is_kept_to_two_percent_and_flows_evenly() {
    for average in [100, 316, 1_000, 10_000, 50_000, 100_000, 200_000] {
        for depth in [1, 8, 32, 128] {
            let disk = disk();
            disk.set_limits(&iops(average)).unwrap();
            let mut sims = [Sim::new(&disk, depth, &[read(4096), write(4096)])];
            let seconds = seconds(average);
            let now = warm_up(&mut sims, seconds);
            let before = sims[0].all();
            run(&mut sims, now, seconds);
            let [sim] = &sims;
            let done = sim.all() - before;
            let error = (done as f64 / seconds / average as f64 - 1.0) * 100.0;
            println!(
                "{average:6} IOPS, depth {depth:3}: {error:+.3} %, longest gap {} us",
                sim.gap_max / 1000
            );
            within("IOPS", done as f64 / seconds, average as f64, 2.0);
            // A gap is what the rate says, up to the next tick, and a thread's coming late.
            let gap = SECOND / average + PAUSE_MIN_NS + TICK_NS + 60_000;
            assert!(sim.gap_max <= gap, "{} ns, {gap} at most", sim.gap_max);
        }
    }
}

#[test]
fn a_late_thread_catches_up() {
    let disk = disk();
    disk.set_limits(&iops(20_000)).unwrap();
    let mut sims = [Sim::new(&disk, 128, &[read(4096)])];
    sims[0].late = 4_000_000;
    run(&mut sims, start(), 10.0);
    within("IOPS", sims[0].all() as f64 / 10.0, 20_000.0, 2.0);
}

#[test]
fn a_burst_lasts_until_the_bucket_is_full() {
    let disk = disk();
    let limits = ThrottleLimits {
        iops_total: Rate {
            average: 100,
            max: 2000,
            max_length: 3,
        },
        ..ThrottleLimits::NONE
    };
    disk.set_limits(&limits).unwrap();
    let mut sims = [Sim::new(&disk, 32, &[read(4096)])];
    let now = run(&mut sims, start(), 1.0);
    // No more than `max` in any second, even the first.
    within("first second", sims[0].all() as f64, 2100.0, 1.0);
    // It leaks at 100 while it is filled at 2000: full after 6000 / 1900 s.
    let full = 6000.0 / 1900.0;
    let now = run(&mut sims, now, full - 1.0);
    within("burst", sims[0].all() as f64, 2000.0 * full, 2.0);
    let before = sims[0].all();
    let now = run(&mut sims, now, 10.0);
    within("after", (sims[0].all() - before) as f64, 1000.0, 2.0);
    // Ten seconds of rest make room for 1000.
    let before = sims[0].all();
    run(&mut sims, now + 10 * SECOND, 0.25);
    within("again", (sims[0].all() - before) as f64, 600.0, 5.0);
}

#[test]
fn large_requests_count_in_proportion() {
    for (len, count) in [(4096, 1.0), (8192, 1.0), (12288, 1.5), (1 << 20, 128.0)] {
        let disk = disk();
        let limits = ThrottleLimits {
            iops_size: 8192,
            ..iops(10_000)
        };
        disk.set_limits(&limits).unwrap();
        let mut sims = [Sim::new(&disk, 32, &[read(len)])];
        run(&mut sims, start(), 10.0);
        within("IOPS", sims[0].all() as f64 / 10.0, 10_000.0 / count, 2.0);
    }
}

#[test]
fn bytes_are_limited_and_discards_count_as_writes() {
    let zeroes = Request::WriteZeroes {
        at: GuestOffset(0),
        len: 65536,
        unmap: true,
    };
    let limits = ThrottleLimits {
        bps_write: rate(100 << 20),
        ..ThrottleLimits::NONE
    };
    for request in [write(65536), zeroes] {
        let disk = disk();
        disk.set_limits(&limits).unwrap();
        let mut sims = [Sim::new(&disk, 16, &[request])];
        run(&mut sims, start(), 10.0);
        within("per second", sims[0].all() as f64 / 10.0, 1600.0, 2.0);
    }
    // One that is larger than all of a second passes as a whole, and the next waits for it.
    let disk = disk();
    let limits = ThrottleLimits {
        bps_total: rate(1 << 20),
        ..ThrottleLimits::NONE
    };
    disk.set_limits(&limits).unwrap();
    let mut sims = [Sim::new(&disk, 4, &[write(4 << 20)])];
    run(&mut sims, start(), 39.0);
    assert_eq!(sims[0].all(), 10);
}

#[test]
fn writes_do_not_wait_for_reads_that_are_limited() {
    let disk = disk();
    let limits = ThrottleLimits {
        iops_read: rate(400),
        ..ThrottleLimits::NONE
    };
    disk.set_limits(&limits).unwrap();
    let mut sims = [Sim::new(&disk, 64, &[read(4096), write(4096)])];
    let mut released = Vec::new();
    let now = start();
    sims[0].turn(now, &mut Random(1), &mut released);
    // 50 ms' worth of reads goes at once, and one; all the writes go.
    assert_eq!(sims[0].done, [21, 32]);
    // What reads may flow does, beside whatever else.
    let mut writer = Sim::new(&disk, 1, &[write(4096)]);
    writer.service = 100_000;
    let reader = Sim::new(&disk, 8, &[read(4096)]);
    let mut sims = [reader, writer];
    run(&mut sims, now + 10 * SECOND, 10.0);
    within("reads", sims[0].all() as f64 / 10.0, 400.0, 2.0);
    within("writes", sims[1].all() as f64 / 10.0, 10_000.0, 2.0);
}

/// A group, and a queue of each depth given, each a disk of its own.
fn group(limits: &ThrottleLimits, depths: &[usize]) -> (Arc<ThrottleGroup>, Vec<Sim>) {
    let group = Arc::new(ThrottleGroup::new("group".into(), limits).unwrap());
    let one = |&depth| {
        let disk = disk();
        disk.set_throttle_group(Some(group.clone()));
        Sim::new(&disk, depth, &[read(4096)])
    };
    let sims = depths.iter().map(one).collect();
    (group, sims)
}

#[test]
fn disks_of_a_group_share_equally_at_any_depth() {
    for average in [100, 1000, 10_000, 50_000, 200_000] {
        let (_group, mut sims) = group(&iops(average), &[32, 128, 64]);
        let seconds = seconds(average);
        let now = warm_up(&mut sims, seconds);
        let before: Vec<u64> = sims.iter().map(Sim::all).collect();
        run(&mut sims, now, seconds);
        let shares = sims.iter().zip(before).map(|(sim, old)| sim.all() - old);
        let shares: Vec<u64> = shares.collect();
        println!("{average:6} IOPS: {shares:?} in {seconds} s");
        let all: u64 = shares.iter().sum();
        within("all", all as f64 / seconds, average as f64, 2.0);
        for share in shares {
            within("share", share as f64 / seconds, average as f64 / 3.0, 3.0);
        }
    }
    // One request at a time is enough for a share that is small enough.
    let (_group, mut sims) = group(&iops(2000), &[1, 128]);
    run(&mut sims, start(), 10.0);
    within("shallow", sims[0].all() as f64 / 10.0, 1000.0, 5.0);
    within("deep", sims[1].all() as f64 / 10.0, 1000.0, 5.0);
}

#[test]
fn more_queues_get_no_larger_share() {
    for average in [400, 20_000] {
        let (_group, mut sims) = group(&iops(average), &[32, 32]);
        for _ in 0..3 {
            let disk = sims[0].disk.clone();
            sims.push(Sim::new(&disk, 32, &[read(4096)]));
        }
        // The first thread is quicker than all others.
        sims[0].late = 0;
        run(&mut sims, start(), 10.0);
        let shares: Vec<u64> = sims.iter().map(Sim::all).collect();
        println!("{average:6} IOPS: {shares:?} in 10 s");
        let four = shares[0] + shares[2] + shares[3] + shares[4];
        within("all", (four + shares[1]) as f64 / 10.0, average as f64, 2.0);
        within("one queue", shares[1] as f64, four as f64, 3.0);
        for share in [shares[0], shares[2], shares[3], shares[4]] {
            within("of four", share as f64, four as f64 / 4.0, 10.0);
        }
    }
}

#[test]
fn other_disks_take_an_unused_share() {
    let (_group, mut sims) = group(&iops(10_000), &[1, 64, 64]);
    // 500 a second, of the 3333 that it could have.
    sims[0].service = 2_000_000;
    run(&mut sims, start(), 10.0);
    within("slow", sims[0].all() as f64 / 10.0, 490.0, 5.0);
    within("others", sims[1].all() as f64 / 10.0, 4755.0, 3.0);
    within("others", sims[2].all() as f64 / 10.0, 4755.0, 3.0);
}

#[test]
fn a_disk_keeps_its_own_limits_in_a_group() {
    let (group, mut sims) = group(&iops(10_000), &[64, 64]);
    sims[0].disk.set_limits(&iops(1000)).unwrap();
    let now = run(&mut sims, start(), 10.0);
    within("own", sims[0].all() as f64 / 10.0, 1000.0, 2.0);
    within("rest", sims[1].all() as f64 / 10.0, 9000.0, 2.0);

    // Changed while it is in use; and left.
    group.set_limits(&iops(500)).unwrap();
    let before: u64 = sims.iter().map(Sim::all).sum();
    let now = run(&mut sims, now, 10.0);
    let after: u64 = sims.iter().map(Sim::all).sum();
    within("all", (after - before) as f64 / 10.0, 500.0, 3.0);
    sims[0].disk.set_throttle_group(None);
    let before = [sims[0].all(), sims[1].all()];
    run(&mut sims, now, 10.0);
    within("alone", (sims[0].all() - before[0]) as f64, 10_000.0, 3.0);
    within("left", (sims[1].all() - before[1]) as f64, 5_000.0, 3.0);
}

#[test]
fn a_stuck_thread_does_not_stop_its_group() {
    let (_group, mut sims) = group(&iops(10_000), &[64, 64]);
    let mut released = Vec::new();
    let now = start();
    // It has a claim, and never comes back.
    sims[0].turn(now, &mut Random(1), &mut released);
    let before = sims[0].all();
    run(&mut sims[1..], now, 10.0);
    assert_eq!(sims[0].all(), before);
    within("other", sims[1].all() as f64 / 10.0, 10_000.0, 2.0);
}

#[test]
fn limits_that_contradict_each_other_change_nothing() {
    let disk = disk();
    disk.set_limits(&iops(100)).unwrap();
    let wrong = ThrottleLimits {
        iops_read: rate(1),
        ..iops(1)
    };
    assert!(disk.set_limits(&wrong).is_err());
    assert_eq!(disk.limits(), iops(100));
    assert!(disk.admission.limits_any());
    disk.set_limits(&ThrottleLimits::NONE).unwrap();
    assert!(!disk.admission.limits_any());
    assert!(ThrottleGroup::new("group".into(), &wrong).is_err());
}

#[test]
fn kicks_are_useless_only_while_the_limit_lets_nothing_go() {
    let shut_after_release = |average: u64, depth: usize| {
        let disk = self::disk();
        disk.set_limits(&iops(average)).unwrap();
        let mut sims = [Sim::new(&disk, depth, &[read(4096)])];
        run(&mut sims, start(), 1.0);
        let [sim] = sims;
        (sim.last, sim.held.shut_until(sim.last), sim)
    };
    for (average, depth) in [(500, 1), (500, 32), (2000, 1), (10_000, 128)] {
        let (last, until, sim) = shut_after_release(average, depth);
        let until = until.unwrap();
        assert!((last + 1..=last + SHUT_MAX_NS).contains(&until));
        assert_eq!(sim.held.shut_until(until), None);
        // After a flush, by whatever queue, the next one does not wait.
        HeldRequests::new(sim.disk.admission.clone()).note_unlimited(last);
        assert_eq!(sim.held.shut_until(last + 1), None);
    }
    // A flush would wait for too long.
    assert_eq!(shut_after_release(100, 1).1, None);
    // The limit is above what the guest wants.
    let disk = disk();
    disk.set_limits(&iops(1_000_000)).unwrap();
    let mut sims = [Sim::new(&disk, 1, &[read(4096)])];
    let mut now = start();
    for _ in 0..20 {
        now = run(&mut sims, now, 0.000_57);
        assert_eq!(sims[0].held.shut_until(sims[0].last), None);
    }
    // Others may leave it something at any time.
    let (_group, mut sims) = group(&iops(500), &[1, 1]);
    run(&mut sims, start(), 1.0);
    assert_eq!(sims[0].held.shut_until(sims[0].last), None);
}
