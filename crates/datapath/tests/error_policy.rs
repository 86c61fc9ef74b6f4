//! What a guest sees of an outage of its storage: nothing, if it is not to be told. Requests wait, and go on when storage
//! works again or the operator says so, and nobody has to wait for them.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{FACTS, Served};
use block::{Aio, Backing, OnError};
use datapath::{Disk, IoAction, IoEvent, IoResumed, IoThread, Options, Polling, Replacement};
use image::Image;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::frontend::{F_LOG_ALL, eventfd};
use testkit::memory::Memory;
use testkit::random::Random;

const DISK_BYTES: u64 = 4 << 20;
const DEPTH: u16 = 32;
const LEN: u32 = 4096;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// For others to be at it meanwhile.
const A_WHILE: Duration = Duration::from_millis(100);

const FAULTS: Faults = Faults {
    short: 100,
    again: 50,
    fail: 0,
    late: 4,
    room: 16,
    address_alignment: 1,
    length_alignment: 512,
};

struct Setup {
    memory: Arc<Mutex<MemoryDisk>>,
    disk: Arc<Disk>,
    threads: Arc<Vec<IoThread>>,
    events: Arc<Mutex<Vec<IoEvent>>>,
    served: Served,
    device: Device,
}

fn serve(rerror: OnError, werror: OnError, tracked: bool, stop_timeout: Duration) -> Setup {
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        inflight: tracked,
        ..DeviceConfig::default()
    };
    serve_to(rerror, werror, &config, stop_timeout)
}

fn serve_to(
    rerror: OnError,
    werror: OnError,
    config: &DeviceConfig,
    stop_timeout: Duration,
) -> Setup {
    serve_on(FAULTS, rerror, werror, config, stop_timeout)
}

fn serve_on(
    faults: Faults,
    rerror: OnError,
    werror: OnError,
    config: &DeviceConfig,
    stop_timeout: Duration,
) -> Setup {
    let memory = MemoryDisk::new(DISK_BYTES as usize);
    let its_memory = memory.clone();
    let thread = IoThread::spawn(
        "io-0".into(),
        Polling::up_to(Duration::from_micros(50)),
        move || Faulty::new(its_memory, faults, 7),
    );
    let file = Arc::new(tempfile::tempfile().unwrap().into());
    let disk = Arc::new(Disk::new(
        "out".into(),
        Image::raw(),
        Some((file, Backing::File, Aio::Auto)),
        FACTS,
        DISK_BYTES,
        "",
        Options {
            rerror,
            werror,
            stop_timeout,
            ..Options::default()
        },
    ));
    let events: Arc<Mutex<Vec<IoEvent>>> = Arc::default();
    let sink = events.clone();
    disk.on_event(move |event| sink.lock().unwrap().push(*event));
    let threads = Arc::new(vec![thread.unwrap()]);
    let served = Served::new(disk.clone(), threads.clone(), 1, 256);
    let device = Device::connect(served.socket(), config).unwrap();
    Setup {
        memory,
        disk,
        threads,
        events,
        served,
        device,
    }
}

impl Setup {
    fn outage(&self, errno: Option<i32>) {
        self.memory.lock().unwrap().outage = errno;
    }

    fn hang(&self, on: bool) {
        self.memory.lock().unwrap().hang(on);
    }

    /// Hands over one request of each slot: all of this kind.
    fn submit(&mut self, op: Op) {
        let queue = &mut self.device.queues[0];
        let slots: Vec<u16> = (0..DEPTH).collect();
        for &slot in &slots {
            queue.prepare(slot, op, u64::from(slot) * 8, LEN);
        }
        queue.submit(&slots);
    }

    /// Storage fails requests of this kind. The first are stalled; with `stop`, later ones are held.
    fn stall(&mut self, op: Op) {
        self.outage(Some(EIO));
        self.submit(op);
        self.until("all wait", |disk| {
            disk.stalled() > 0 && disk.stats().under_way == u64::from(DEPTH)
        });
    }

    fn until_all_stalled(&self) {
        self.until("all are stalled", |disk| disk.stalled() == u64::from(DEPTH));
    }

    fn finish(&mut self) -> Vec<u8> {
        let done = self.device.queues[0].finish(usize::from(DEPTH));
        done.into_iter().map(|(_, status)| status).collect()
    }

    fn until(&self, what: &str, mut is: impl FnMut(&Disk) -> bool) {
        let deadline = Instant::now() + HANG;
        while !is(&self.disk) {
            assert!(Instant::now() < deadline, "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn resumed(&self) -> usize {
        let events = self.events.lock().unwrap();
        let is = |event: &&IoEvent| matches!(event, IoEvent::Resumed(_));
        events.iter().filter(is).count()
    }

    /// How the last outage was; waits for the first to end.
    fn last_resumed(&self) -> IoResumed {
        self.until("it is told", |_| self.resumed() > 0);
        let events = self.events.lock().unwrap();
        let resumed = events.iter().rev().find_map(|event| match event {
            IoEvent::Resumed(resumed) => Some(*resumed),
            IoEvent::Failed(_) => None,
        });
        resumed.unwrap()
    }

    fn actions(&self) -> Vec<IoAction> {
        let events = self.events.lock().unwrap();
        let action = |event: &IoEvent| match event {
            IoEvent::Failed(failure) => Some(failure.action),
            IoEvent::Resumed(_) => None,
        };
        events.iter().filter_map(action).collect()
    }

    /// Nothing has been answered so far.
    fn nothing_is_done(&mut self) {
        let mut done = Vec::new();
        self.device.queues[0].poll(|slot, status| done.push((slot, status)));
        assert_eq!(done, []);
    }
}

/// How long storage is away: RINGDISK_TEST_OUTAGE_S, in seconds.
fn outage_time() -> Duration {
    let given = std::env::var("RINGDISK_TEST_OUTAGE_S").ok();
    Duration::from_secs_f64(given.map_or(1.2, |s| s.parse().unwrap()))
}

/// A guest that cannot take errors: reads what it wrote, flushes, and never sees a failure.
#[test]
fn retry_delays_requests_without_errors() {
    let mut setup = serve(OnError::Retry, OnError::Retry, false, HANG);
    let mut random = Random(3);
    let mut model = vec![0u8; DISK_BYTES as usize];
    let memory = setup.memory.clone();
    let away = outage_time();
    let storage = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        memory.lock().unwrap().outage = Some(EIO);
        std::thread::sleep(away);
        memory.lock().unwrap().outage = None;
    });
    let mut rounds = 0;
    while !storage.is_finished() || rounds < 50 {
        rounds += 1;
        let queue = &mut setup.device.queues[0];
        let mut slots = Vec::new();
        for slot in 0..DEPTH {
            // Each slot has a part of the disk to itself.
            let sector = u64::from(slot) * 256 + random.below(248);
            let at = sector as usize * 512..sector as usize * 512 + LEN as usize;
            let op = [Op::Read, Op::Write, Op::Write, Op::Flush][random.below(4) as usize];
            queue.prepare(slot, op, sector, LEN);
            if op == Op::Write {
                random
                    .any()
                    .to_le_bytes()
                    .repeat(LEN as usize / 8)
                    .swap_with_slice(&mut model[at.clone()]);
                queue.write_buffer(slot, &model[at.clone()]);
            }
            slots.push((slot, op, at));
        }
        queue.submit(&(0..DEPTH).collect::<Vec<_>>());
        let mut left = slots.len();
        while left > 0 {
            queue.wait();
            queue.poll(|_, status| {
                assert_eq!(status, OK, "the guest saw an error");
                left -= 1;
            });
        }
        for (slot, op, at) in slots {
            let bytes = queue.read_buffer(slot, LEN as usize);
            assert!(
                op != Op::Read || bytes == model[at],
                "what was read was never written"
            );
        }
    }
    storage.join().unwrap();
    assert!(setup.memory.lock().unwrap().bytes == model);
    setup.until("nothing is stalled", |disk| disk.stalled() == 0);
    setup.until("the end is told", |_| setup.resumed() == 1);
    let actions = setup.actions();
    assert!(!actions.is_empty() && actions.iter().all(|a| *a == IoAction::Retry));
    // One a second, and one at the beginning.
    assert!(
        actions.len() as u64 <= away.as_secs() + 3,
        "{}",
        actions.len()
    );
    println!(
        "{rounds} rounds of {DEPTH}, away for {away:?}, {} events",
        actions.len()
    );
}

/// What the kernel had no means for, and what has waited for its storage, is tried again at once: never more than the
/// engine has room for. Once, what had waited took the room of what came back in the same batch, and the I/O thread ended.
#[test]
fn retries_respect_the_room_of_the_engine() {
    let faults = Faults {
        again: 400,
        room: 3,
        ..FAULTS
    };
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        ..DeviceConfig::default()
    };
    let mut setup = serve_on(faults, OnError::Retry, OnError::Retry, &config, HANG);
    for round in 0..40 {
        setup.outage(Some(EIO));
        setup.submit(Op::Write);
        setup.until_all_stalled();
        setup.outage(None);
        let done = setup.device.queues[0].finish(DEPTH.into());
        assert!(done.iter().all(|&(_, status)| status == OK), "{round}");
    }
}

#[test]
fn stop_holds_all_requests_until_resume() {
    let mut setup = serve(OnError::Stop, OnError::Stop, false, HANG);
    setup.outage(Some(EIO));
    setup.submit(Op::Write);
    setup.until("all fail", |disk| disk.is_stopped());
    setup.until("all wait", |disk| {
        disk.stats().under_way == u64::from(DEPTH)
    });
    setup.outage(None);
    std::thread::sleep(Duration::from_millis(300));
    setup.nothing_is_done();
    setup.disk.resume(&setup.threads, false);
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
    setup.until("the end is told", |_| setup.resumed() == 1);
    assert_eq!(setup.disk.stats().write.errors, 0);
    assert!(setup.actions().iter().all(|a| *a == IoAction::Stop));
    // It has not resumed for good: the next failure stops again, and reads too.
    setup.outage(Some(EIO));
    setup.submit(Op::Read);
    setup.until("it stops again", |disk| disk.is_stopped());
    setup.outage(None);
    setup.nothing_is_done();
    setup.disk.resume(&setup.threads, false);
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
}

#[test]
fn resume_can_report_errors_to_the_guest() {
    let mut setup = serve(OnError::Retry, OnError::Stop, false, HANG);
    setup.outage(Some(EIO));
    setup.submit(Op::Read);
    setup.until_all_stalled();
    setup.disk.resume(&setup.threads, true);
    assert_eq!(setup.finish(), vec![IO_ERROR; usize::from(DEPTH)]);
    assert_eq!(setup.disk.stalled(), 0);
    assert_eq!(setup.disk.stats().read.errors, u64::from(DEPTH));
}

#[test]
fn enospc_retries_writes_without_space_and_reports_other_errors() {
    let mut setup = serve(OnError::Report, OnError::Enospc, false, HANG);
    setup.outage(Some(EIO));
    setup.submit(Op::Write);
    assert_eq!(setup.finish(), vec![IO_ERROR; usize::from(DEPTH)]);
    setup.outage(Some(ENOSPC));
    setup.submit(Op::Read);
    assert_eq!(setup.finish(), vec![IO_ERROR; usize::from(DEPTH)]);
    setup.submit(Op::Write);
    setup.until_all_stalled();
    setup.nothing_is_done();
    setup.outage(None);
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
}

/// A guest may stop while its requests wait: with a record of what is in flight, they complete when it continues.
#[test]
fn a_stopping_queue_leaves_stalled_requests_for_the_next_server() {
    let mut setup = serve(OnError::Retry, OnError::Stop, true, HANG);
    for op in [Op::Read, Op::Write] {
        setup.stall(op);
        let base = setup.device.stop_queue(0).unwrap();
        assert_eq!((setup.disk.stalled(), setup.disk.stats().under_way), (0, 0));
        setup.nothing_is_done();
        setup.outage(None);
        setup.disk.resume(&setup.threads, false);
        setup.device.resume_queue(0, u32::from(base)).unwrap();
        assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)], "{op:?}");
    }
}

/// How long an outage has lasted is counted from its first failure, though the ring was stopped and started in it.
#[test]
fn an_outage_lasts_from_its_first_failure() {
    let mut setup = serve(OnError::Retry, OnError::Retry, true, HANG);
    setup.outage(Some(EIO));
    setup.submit(Op::Write);
    setup.until_all_stalled();
    let since = Instant::now();
    for _ in 0..3 {
        std::thread::sleep(A_WHILE);
        let base = setup.device.stop_queue(0).unwrap();
        assert_eq!(setup.disk.stalled(), 0);
        setup.device.resume_queue(0, u32::from(base)).unwrap();
        setup.until_all_stalled();
    }
    let lasts = since.elapsed();
    setup.outage(None);
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
    setup.until("it is over", |disk| disk.stalled() == 0);
    let resumed = setup.last_resumed();
    assert!(resumed.lasted >= lasts, "{resumed:?}, {lasts:?}");
    assert_eq!(resumed.given_up, 0);
}

/// The same if the ring stops and continues because the dirty log is switched: a move to another machine that begins, or
/// is given up, during an outage.
#[test]
fn migration_during_an_outage_reports_no_errors() {
    let mut setup = serve(OnError::Retry, OnError::Stop, true, HANG);
    let memory = Memory::new(&[(0, 1 << 20)]).unwrap();
    let event = eventfd().unwrap();
    let log = &memory.regions()[0];
    setup.device.frontend.set_log(log, event.as_fd()).unwrap();
    let features = setup.device.features;
    for op in [Op::Read, Op::Write] {
        setup.outage(Some(EIO));
        setup.submit(op);
        for features in [features | F_LOG_ALL, features] {
            setup.until("all wait", |disk| {
                let waits = disk.stalled() > 0 || disk.is_stopped();
                waits && disk.stats().under_way == u64::from(DEPTH)
            });
            setup.device.frontend.set_features(features).unwrap();
        }
        setup.nothing_is_done();
        setup.outage(None);
        setup.disk.resume(&setup.threads, false);
        assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)], "{op:?}");
    }
}

/// A guest that is moved, or stopped and saved, takes its rings along, and not the record of what is in flight. It continues
/// where the base says, which is all that QEMU takes along, and everything that its storage had not served is done there.
/// While it is moved, that is not before storage has answered: an old write could land on a newer one.
#[test]
fn unfinished_requests_move_with_the_rings() {
    for case in 0..16 {
        let [packed, hangs, moving, status_first] = [1, 2, 4, 8].map(|bit| case & bit != 0);
        go_on_elsewhere(packed, hangs, moving, status_first);
    }
}

/// `status_first` is the order of QEMU 7.2: SET_STATUS 0 before the bases are asked for.
fn go_on_elsewhere(packed: bool, hangs: bool, moving: bool, status_first: bool) {
    let case =
        format!("packed: {packed}, hangs: {hangs}, moving: {moving}, status first: {status_first}");
    let stop_timeout = Duration::from_millis(100);
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        inflight: true,
        // Chains of three descriptors, which lie in the ring.
        indirect: false,
        packed,
        ..DeviceConfig::default()
    };
    let mut setup = serve_to(OnError::Retry, OnError::Retry, &config, stop_timeout);
    let memory = Memory::new(&[(0, 1 << 20)]).unwrap();
    if moving {
        let (log, event) = (&memory.regions()[0], eventfd().unwrap());
        setup.device.frontend.set_log(log, event.as_fd()).unwrap();
        let features = setup.device.features | F_LOG_ALL;
        setup.device.frontend.set_features(features).unwrap();
    }
    if hangs {
        setup.hang(true)
    } else {
        setup.outage(Some(EIO))
    }
    // Some are writes, which wait. The others are done, again and again: the ring goes round.
    let (writes, others): (Vec<u16>, Vec<u16>) = (0..DEPTH).partition(|slot| slot % 4 == 0);
    let queue = &mut setup.device.queues[0];
    for &slot in &writes {
        queue.prepare(slot, Op::Write, u64::from(slot) * 8, LEN);
        queue.write_buffer(slot, &[slot as u8 + 1; LEN as usize]);
    }
    for &slot in &others {
        queue.prepare(slot, Op::GetId, 0, 20);
    }
    queue.submit(&(0..DEPTH).collect::<Vec<_>>());
    for _ in 0..20 {
        assert_eq!(queue.finish(others.len()).len(), others.len(), "{case}");
        queue.submit(&others);
    }
    queue.finish(others.len());
    setup.until("the writes are under way", |disk| {
        disk.stats().under_way > 0 && (hangs || disk.stalled() > 0)
    });

    let frontend = &mut setup.device.frontend;
    let base = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            if status_first {
                frontend.set_status(0).unwrap();
            }
            frontend.vring_base(0).unwrap()
        });
        if hangs && moving {
            thread::sleep(stop_timeout + A_WHILE);
            assert!(!asking.is_finished(), "{case}: answered too early");
            setup.memory.lock().unwrap().hang(false);
        }
        asking.join().unwrap()
    });
    if packed {
        assert_eq!(base & 0xffff, base >> 16, "{case}")
    } else {
        // What QEMU knows if it gets no answer.
        assert_eq!(
            base,
            setup.device.queues[0].ring.base_after_death(),
            "{case}"
        )
    }
    setup.hang(false);
    setup.outage(None);
    setup.until("storage has answered", |disk| !disk.is_abandoned());

    let elsewhere = Served::new(setup.disk.clone(), setup.threads.clone(), 1, 256);
    setup.device.inflight = None;
    setup.device.rejoin(elsewhere.socket(), &config).unwrap();
    setup.device.resume_queue(0, base).unwrap();
    let queue = &mut setup.device.queues[0];
    let mut done = queue.finish(writes.len());
    done.sort_unstable();
    let expected: Vec<_> = writes.iter().map(|&slot| (slot, OK)).collect();
    assert_eq!(done, expected, "{case}");
    for round in 0..20 {
        for slot in 0..DEPTH {
            queue.prepare(slot, Op::Read, u64::from(slot) * 8, LEN);
        }
        queue.submit(&(0..DEPTH).collect::<Vec<_>>());
        let done = queue.finish(DEPTH.into());
        assert!(
            done.iter().all(|&(_, status)| status == OK),
            "{case}, {round}"
        );
        for &slot in &writes {
            let read = queue.read_buffer(slot, LEN as usize);
            assert_eq!(read, [slot as u8 + 1; LEN as usize], "{case}");
        }
    }
}

/// A queue has not fetched all again that was left, for want of room, when its disk is put on another file; while that
/// waits, the guest stops.
#[test]
fn a_queue_that_stops_during_replace_loses_no_request() {
    let mut setup = serve(OnError::Retry, OnError::Stop, true, HANG);
    setup.stall(Op::Read);
    let base = setup.device.stop_queue(0).unwrap();
    setup.outage(None);
    setup.hang(true);
    setup.device.resume_queue(0, u32::from(base)).unwrap();
    setup.until("there is no more room", |disk| {
        disk.stats().under_way == FAULTS.room as u64
    });
    let (disk, threads) = (setup.disk.clone(), setup.threads.clone());
    let replacing = thread::spawn(move || {
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        let new = Replacement {
            image: Image::raw(),
            storage: vec![(file, Backing::File, Aio::Auto).into()],
            facts: FACTS,
            size: DISK_BYTES,
        };
        disk.replace(&threads, new, Ok, || Ok(()))
    });
    thread::sleep(A_WHILE);
    let memory = setup.memory.clone();
    let mending = thread::spawn(move || {
        thread::sleep(A_WHILE);
        memory.lock().unwrap().hang(false);
    });
    let base = setup.device.stop_queue(0).unwrap();
    mending.join().unwrap();
    replacing.join().unwrap().unwrap();
    setup.device.resume_queue(0, u32::from(base)).unwrap();
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
}

/// Without one, nobody would ever answer them: the guest is told.
#[test]
fn an_untracked_queue_reports_errors_when_it_stops() {
    let mut setup = serve(OnError::Retry, OnError::Stop, false, HANG);
    for op in [Op::Read, Op::Write] {
        setup.stall(op);
        let base = setup.device.stop_queue(0).unwrap();
        assert_eq!(setup.finish(), vec![IO_ERROR; usize::from(DEPTH)], "{op:?}");
        assert_eq!(setup.disk.stalled(), 0);
        // Nobody says that storage works again.
        if op == Op::Read {
            assert_eq!(setup.last_resumed().given_up, u64::from(DEPTH));
        }
        setup.disk.resume(&setup.threads, false);
        setup.outage(None);
        setup.device.start_queue(0, base).unwrap();
    }
}

/// Storage that does not answer keeps nobody: the queue is let go, and taken up again when it has answered.
#[test]
fn a_queue_on_hung_storage_stops() {
    let mut setup = serve(
        OnError::Report,
        OnError::Report,
        true,
        Duration::from_millis(100),
    );
    setup.hang(true);
    setup.submit(Op::Write);
    setup.until("all are under way", |disk| disk.stats().under_way > 0);
    let base = setup.device.stop_queue(0).unwrap();
    assert!(setup.disk.is_abandoned());
    setup.nothing_is_done();
    // An old write could land on a newer one: nothing is served before it has ended.
    setup.hang(false);
    setup.until("storage has answered", |disk| !disk.is_abandoned());
    setup.nothing_is_done();
    setup.device.resume_queue(0, u32::from(base)).unwrap();
    assert_eq!(setup.finish(), vec![OK; usize::from(DEPTH)]);
}

#[test]
fn an_abandoned_disk_is_not_served_and_the_process_can_end() {
    let mut setup = serve(
        OnError::Report,
        OnError::Report,
        true,
        Duration::from_millis(100),
    );
    setup.hang(true);
    setup.submit(Op::Write);
    setup.until("all are under way", |disk| disk.stats().under_way > 0);
    let base = setup.device.stop_queue(0).unwrap();
    assert!(setup.disk.is_abandoned());
    let refused = setup
        .device
        .resume_queue(0, u32::from(base))
        .and_then(|()| setup.device.config());
    assert!(
        refused.is_err(),
        "a queue was started beside one that is under way"
    );
    // Neither the session nor the thread wait for what may never come.
    drop(setup.device);
    drop(setup.served);
    drop(setup.threads);
}
