//! What every engine must do, whichever way it transfers bytes: the same operations have the same results, byte for
//! byte.
//!
//! [`exercise`] runs any sequence of operations on any number of files of one engine, many of them in flight at a time,
//! and compares each completion with a model. Each of the other functions checks one property.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::AsFd;

use block::{Completion, Engine, FileId, FileOffset, Op, Segment, Token};
use proptest::prelude::*;

use crate::frontend::eventfd;
use crate::random::Random;

/// The value of the bytes between segments, which no operation may change.
const CANARY: u8 = 0xa5;

/// A file under test, and its expected content.
pub struct Subject {
    /// The engine's id of the file.
    pub file: FileId,
    /// The bytes that the file must contain.
    pub model: Vec<u8>,
    /// Offsets and lengths of transfers must be multiples of this, in bytes.
    pub unit: usize,
    /// The address of a buffer must be a multiple of this, in bytes.
    pub address_unit: usize,
}

/// An operation. Its numbers are adapted to the file that it is applied to.
#[derive(Clone, Debug)]
pub struct Step {
    subject: usize,
    kind: Kind,
    at: usize,
    len: usize,
    segments: usize,
    /// Push the queued operations to the engine afterwards.
    push: bool,
    /// Wait afterwards until at most this many operations are in flight.
    leave: usize,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write { stable: bool },
    Flush,
    Discard { stable: bool },
    WriteZeroes { unmap: bool, stable: bool },
}

/// Generates any sequence of operations.
pub fn steps(longest: usize) -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![
        4 => Just(Kind::Read),
        4 => any::<bool>().prop_map(|stable| Kind::Write { stable }),
        1 => Just(Kind::Flush),
        1 => any::<bool>().prop_map(|stable| Kind::Discard { stable }),
        1 => any::<(bool, bool)>().prop_map(|(unmap, stable)| Kind::WriteZeroes { unmap, stable }),
    ];
    // Mostly small lengths, so that many operations are in flight.
    let len = prop_oneof![4 => 1..16_384usize, 1 => 1..300_000usize];
    let segments = prop_oneof![4 => Just(1usize), 2 => 2..8usize, 1 => 8..64usize];
    let leave = prop_oneof![3 => Just(usize::MAX), 1 => 0..16usize];
    let step = (
        any::<usize>(),
        kind,
        any::<usize>(),
        len,
        segments,
        any::<bool>(),
        leave,
    );
    let step = step.prop_map(|(subject, kind, at, len, segments, push, leave)| Step {
        subject,
        kind,
        at,
        len,
        segments,
        push,
        leave,
    });
    proptest::collection::vec(step, 1..longest)
}

/// Runs the steps, and then reads all files back. Short transfers are continued, and operations that must be retried
/// are.
///
/// # Panics
/// The engine did something other than requested.
pub fn exercise<E: Engine>(engine: &mut E, subjects: &mut [Subject], steps: &[Step]) {
    let mut exercise = Exercise {
        engine,
        subjects,
        under_way: HashMap::new(),
        next: 0,
    };
    for step in steps {
        exercise.step(step);
    }
    exercise.drain(0);
    for number in 0..exercise.subjects.len() {
        let len = exercise.subjects[number].model.len();
        for start in (0..len).step_by(1 << 20) {
            let range = start..len.min(start + (1 << 20));
            exercise.submit(number, Kind::Read, range, 1);
        }
    }
    exercise.drain(0);
    assert_eq!(exercise.engine.in_flight(), 0);
}

struct Exercise<'a, E> {
    engine: &'a mut E,
    subjects: &'a mut [Subject],
    under_way: HashMap<u64, InFlight>,
    next: u64,
}

struct InFlight {
    subject: usize,
    kind: Kind,
    range: Range<usize>,
    memory: Memory,
    /// Bytes transferred so far.
    moved: usize,
}

impl<E: Engine> Exercise<'_, E> {
    fn step(&mut self, step: &Step) {
        let number = step.subject % self.subjects.len();
        let subject = &self.subjects[number];
        let unit = match step.kind {
            Kind::Read | Kind::Write { .. } => subject.unit,
            _ => subject.unit.max(512),
        };
        let units = subject.model.len() / unit;
        let start = step.at % units;
        let len = step.len.div_ceil(unit).min(units - start);
        let range = start * unit..(start + len) * unit;
        // If operations overlap, it is not defined whose bytes remain.
        let overlaps = |u: &InFlight| {
            u.subject == number && u.range.start < range.end && range.start < u.range.end
        };
        if !matches!(step.kind, Kind::Flush) && self.under_way.values().any(overlaps) {
            self.drain(0);
        }
        let range = match step.kind {
            Kind::Flush => 0..0,
            _ => range,
        };
        self.submit(number, step.kind, range, step.segments);
        if step.push {
            self.engine.push().unwrap();
        }
        self.drain(step.leave);
    }

    fn submit(&mut self, subject: usize, kind: Kind, range: Range<usize>, segments: usize) {
        if self.engine.room() == 0 {
            self.drain(self.under_way.len() - 1);
        }
        let s = &self.subjects[subject];
        let len = match kind {
            Kind::Read | Kind::Write { .. } => range.len(),
            _ => 0,
        };
        let mut memory = Memory::new(len, segments, s.unit, s.address_unit);
        if let Kind::Write { .. } = kind {
            memory.fill(self.next);
        }
        let token = self.next;
        self.next += 1;
        let under_way = InFlight {
            subject,
            kind,
            range,
            memory,
            moved: 0,
        };
        let under_way = self
            .under_way
            .entry(token)
            .insert_entry(under_way)
            .into_mut();
        submit(self.engine, s.file, token, under_way);
    }

    /// Waits until at most `leave` operations are in flight.
    fn drain(&mut self, leave: usize) {
        // The capacity varies: an engine must keep the completions that do not fit.
        let mut done = Vec::with_capacity(1 + self.next as usize % 7);
        while self.under_way.len() > leave {
            self.engine.wait().unwrap();
            self.engine.reap(&mut done);
            for completion in done.drain(..) {
                self.complete(completion);
            }
        }
    }

    fn complete(&mut self, Completion { token, result }: Completion) {
        let mut u = self
            .under_way
            .remove(&token.0)
            .unwrap_or_else(|| panic!("{token:?} completes, and is not in flight"));
        let what = format!("{:?} of {:?}, subject {}", u.kind, u.range, u.subject);
        let subject = &mut self.subjects[u.subject];
        let model = &mut subject.model[u.range.clone()];
        let again = [-libc::EAGAIN, -libc::EINTR].contains(&result);
        match u.kind {
            Kind::Read | Kind::Write { .. } if result > 0 => u.moved += result as usize,
            // A transfer of zero bytes is no progress.
            _ => assert!(
                again || result == 0 && u.memory.len == 0,
                "{what}: {result}"
            ),
        }
        assert!(u.moved <= u.memory.len, "{what}: {result}");
        if again || u.moved < u.memory.len {
            let file = subject.file;
            let u = self.under_way.entry(token.0).insert_entry(u).into_mut();
            return submit(self.engine, file, token.0, u);
        }
        match u.kind {
            Kind::Read => assert!(u.memory.bytes() == model, "{what}: other bytes"),
            Kind::Write { .. } => model.copy_from_slice(&u.memory.bytes()),
            Kind::WriteZeroes { .. } => model.fill(0),
            Kind::Flush => {}
            Kind::Discard { .. } => self.check_discarded(u.subject, u.range),
        }
    }

    /// Checks that discarded bytes are unchanged or zero.
    fn check_discarded(&mut self, number: usize, range: Range<usize>) {
        let (unit, address_unit) = {
            let s = &self.subjects[number];
            (s.unit, s.address_unit)
        };
        let mut memory = Memory::new(range.len(), 1, unit, address_unit);
        let subject = &mut self.subjects[number];
        let mut moved = 0;
        // Other operations are in flight: their completions are handled afterwards.
        let mut kept = Vec::new();
        while moved < range.len() {
            let token = Token(1 << 40);
            let segments = memory.rest(moved).to_vec();
            let at = FileOffset((range.start + moved) as u64);
            // SAFETY: memory and list live until the completion has been reaped, below.
            unsafe {
                let to = &segments;
                self.engine.submit(subject.file, Op::Read { at, to }, token);
            }
            let mut done = Vec::with_capacity(16);
            let result = loop {
                self.engine.wait().unwrap();
                self.engine.reap(&mut done);
                let mine = done.iter().find(|c| c.token == token).map(|c| c.result);
                kept.extend(done.drain(..).filter(|c| c.token != token));
                if let Some(result) = mine {
                    break result;
                }
            };
            match result {
                1.. => moved += result as usize,
                _ => assert!([-libc::EAGAIN, -libc::EINTR].contains(&result), "{result}"),
            }
        }
        let now = memory.bytes();
        let model = &mut subject.model[range];
        for (place, (&is, was)) in now.iter().zip(model.iter_mut()).enumerate() {
            assert!(is == 0 || is == *was, "byte {place} after a discard: {is}");
            *was = is;
        }
        kept.into_iter()
            .for_each(|completion| self.complete(completion));
    }
}

fn submit<E: Engine>(engine: &mut E, file: FileId, token: u64, u: &mut InFlight) {
    let at = FileOffset((u.range.start + u.moved) as u64);
    let len = u.range.len() as u64;
    let segments = u.memory.rest(u.moved);
    let op = match u.kind {
        Kind::Read => Op::Read { at, to: segments },
        Kind::Write { stable } => Op::Write {
            at,
            from: segments,
            stable,
        },
        Kind::Flush => Op::Flush,
        Kind::Discard { stable } => Op::Discard { at, len, stable },
        Kind::WriteZeroes { unmap, stable } => Op::WriteZeroes {
            at,
            len,
            unmap,
            stable,
        },
    };
    // SAFETY: the memory and the list of segments are on the heap, and stay in the table of operations in flight until
    // the completion has been reaped.
    unsafe { engine.submit(file, op, Token(token)) }
}

/// A buffer of several segments, with canaries between them.
pub struct Memory {
    storage: Vec<u8>,
    segments: Vec<Segment>,
    /// The list that `rest` returned last.
    rest: Vec<Segment>,
    len: usize,
}

impl Memory {
    /// `len` bytes in `segments` segments, or in fewer if they would be smaller than `unit`.
    pub fn new(len: usize, segments: usize, unit: usize, address_unit: usize) -> Self {
        let each = (len / segments / unit).max(1) * unit;
        let gap = address_unit.max(8);
        let stride = each.next_multiple_of(gap) + gap;
        let mut storage = vec![CANARY; (len / each + 1) * stride + unit * segments + 2 * gap];
        let mut place = storage.as_mut_ptr() as usize;
        place = place.next_multiple_of(gap);
        let (mut left, mut list) = (len, Vec::new());
        while left > 0 {
            // The last segment takes the rest.
            let n = if list.len() + 1 == segments {
                left
            } else {
                each.min(left)
            };
            list.push(Segment {
                addr: place,
                len: n,
            });
            place += stride;
            left -= n;
        }
        Self {
            storage,
            segments: list,
            rest: Vec::new(),
            len,
        }
    }

    /// Fills the segments with bytes that depend on the seed.
    fn fill(&mut self, seed: u64) {
        let mut random = Random(seed);
        let start = self.storage.as_ptr() as usize;
        for s in &self.segments {
            let place = s.addr - start;
            for byte in &mut self.storage[place..place + s.len] {
                *byte = random.any() as u8;
            }
        }
    }

    /// The bytes of all segments, in order.
    ///
    /// # Panics
    /// A byte outside the segments was changed.
    pub fn bytes(&self) -> Vec<u8> {
        let start = self.storage.as_ptr() as usize;
        let (mut bytes, mut end) = (Vec::with_capacity(self.len), 0);
        let untouched = |gap: &[u8]| assert!(gap.iter().all(|&b| b == CANARY), "beside a segment");
        for s in &self.segments {
            let place = s.addr - start;
            untouched(&self.storage[end..place]);
            bytes.extend(&self.storage[place..place + s.len]);
            end = place + s.len;
        }
        untouched(&self.storage[end..]);
        bytes
    }

    /// The segments without the first `skip` bytes. The list is valid until the next call.
    pub fn rest(&mut self, mut skip: usize) -> &[Segment] {
        self.rest.clear();
        for s in &self.segments {
            let n = skip.min(s.len);
            skip -= n;
            if n < s.len {
                self.rest.push(Segment {
                    addr: s.addr + n,
                    len: s.len - n,
                });
            }
        }
        &self.rest
    }
}

/// Runs one operation, waits for it, and returns its result.
///
/// # Safety
/// As for [`Engine::submit`].
///
/// # Panics
/// The engine fails.
pub unsafe fn one<E: Engine>(engine: &mut E, file: FileId, op: Op<'_>) -> i32 {
    // SAFETY: as the caller promises; the completion is reaped before this function returns.
    unsafe { engine.submit(file, op, Token(7)) };
    let mut done = Vec::with_capacity(1);
    while done.is_empty() {
        engine.wait().unwrap();
        engine.reap(&mut done);
    }
    assert_eq!(done[0].token, Token(7));
    done[0].result
}

/// Reads `len` bytes in `segments` segments, and returns the result.
///
/// # Panics
/// The engine fails.
pub fn read<E: Engine>(engine: &mut E, s: &Subject, at: usize, len: usize, segments: usize) -> i32 {
    let mut memory = Memory::new(len, segments, s.unit, s.address_unit);
    let at = FileOffset(at as u64);
    let to = &memory.rest(0).to_vec();
    // SAFETY: memory and list outlive the call, which waits for the completion.
    unsafe { one(engine, s.file, Op::Read { at, to }) }
}

/// Writes `len` bytes in one segment, and returns the result.
///
/// # Panics
/// The engine fails.
pub fn write<E: Engine>(engine: &mut E, s: &Subject, at: usize, len: usize, stable: bool) -> i32 {
    let mut memory = Memory::new(len, 1, s.unit, s.address_unit);
    memory.fill(at as u64);
    let at = FileOffset(at as u64);
    let from = &memory.rest(0).to_vec();
    // SAFETY: memory and list outlive the call, which waits for the completion.
    unsafe { one(engine, s.file, Op::Write { at, from, stable }) }
}

/// Checks that as many reads as the engine has capacity for can be in flight at once, and that all of them complete.
///
/// # Panics
/// The check fails.
pub fn runs_at_full_capacity<E: Engine>(engine: &mut E, s: &Subject) {
    let room = engine.room();
    assert!(room > 0);
    let mut memory: Vec<Memory> = (0..room)
        .map(|_| Memory::new(s.unit, 1, s.unit, s.address_unit))
        .collect();
    let units = s.model.len() / s.unit;
    let places: Vec<usize> = (0..room).map(|i| i * 7 % units * s.unit).collect();
    for (i, (memory, place)) in memory.iter_mut().zip(&places).enumerate() {
        assert!(engine.room() > 0);
        let at = FileOffset(*place as u64);
        // SAFETY: memory and list are kept until all completions have been reaped.
        unsafe {
            let to = memory.rest(0);
            engine.submit(s.file, Op::Read { at, to }, Token(i as u64));
        }
    }
    let mut done = Vec::with_capacity(32);
    let mut seen = vec![false; room];
    while engine.in_flight() > 0 {
        engine.wait().unwrap();
        engine.reap(&mut done);
        for completion in done.drain(..) {
            let i = completion.token.0 as usize;
            assert!(!seen[i], "{completion:?} comes twice");
            assert_eq!(completion.result, s.unit as i32);
            assert!(memory[i].bytes() == s.model[places[i]..places[i] + s.unit]);
            seen[i] = true;
        }
    }
    assert!(seen.iter().all(|&seen| seen));
    assert_eq!(engine.room(), room);
}

/// Checks that the engine reports each write to a watched descriptor, although nothing reads the descriptor, even while
/// operations are in flight, and reports none after `unwatch`. The engine must have no other watches.
///
/// # Panics
/// The check fails.
pub fn reports_watched_descriptors<E: Engine>(engine: &mut E, s: &Subject) {
    let (first, second) = (eventfd().unwrap(), eventfd().unwrap());
    engine.watch(first.as_fd(), Token(100)).unwrap();
    engine.watch(second.as_fd(), Token(101)).unwrap();
    let write = |fd: &std::os::fd::OwnedFd| {
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    };
    let mut done: Vec<Completion> = Vec::with_capacity(4);
    for turn in 0..20 {
        let expect = if turn % 3 == 0 {
            (&first, 100)
        } else {
            (&second, 101)
        };
        write(expect.0);
        loop {
            engine.wait().unwrap();
            engine.reap(&mut done);
            let told: Vec<u64> = done.drain(..).map(|c| c.token.0).collect();
            assert!(told.iter().all(|&t| t == expect.1), "{told:?}");
            if !told.is_empty() {
                break;
            }
        }
        assert!(read(engine, s, 0, s.unit, 1) > 0);
    }
    engine.unwatch(Token(100)).unwrap();
    write(&first);
    write(&second);
    while done.is_empty() {
        engine.wait().unwrap();
        engine.reap(&mut done);
    }
    assert!(done.iter().all(|c| c.token.0 == 101), "{done:?}");
    engine.unwatch(Token(101)).unwrap();
    assert_eq!(engine.in_flight(), 0);
}
