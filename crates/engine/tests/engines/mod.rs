//! All engines are held against one model, on every kind of file that there is here.

mod choice;
mod places;

use block::{Aio, CacheMode, Engine, FileOffset, Op};
use places::{BYTES, Place, WAYS, Way};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestRunner};
use testkit::conformance::{self as conformance, Memory, Subject, exercise, one, read, write};

/// Asks a question of every engine on every kind of file.
fn everywhere(question: impl Fn(&mut engine::MultiEngine, &mut Subject, &Place, Way)) {
    for place in Place::all() {
        for way in WAYS.into_iter().filter(|way| way.serves(place.cache)) {
            println!("{}: {way:?}", place.name);
            let mut engines = way.engines();
            let (_file, mut subject) = place.attach(&mut engines, way.aio);
            question(&mut engines, &mut subject, &place, way);
            assert_eq!(engines.in_flight(), 0);
        }
    }
}

#[test]
fn any_operations_on_any_file() {
    let places = Place::all();
    let mut runner = TestRunner::new(Config::with_cases(96));
    let cases = (any::<Index>(), select(&WAYS), conformance::steps(80));
    let run = runner.run(&cases, |(place, way, steps)| {
        let place = place.get(&places);
        prop_assume!(way.serves(place.cache));
        let mut engines = way.engines();
        let (_file, subject) = place.attach(&mut engines, way.aio);
        exercise(&mut engines, &mut [subject], &steps);
        Ok(())
    });
    run.unwrap();
}

/// One thread, one engine, and each file served in another way.
#[test]
fn any_operations_on_all_files_at_once() {
    let places = Place::all();
    let mut runner = TestRunner::new(Config::with_cases(48));
    let aio = select(&[Aio::Auto, Aio::IoUring, Aio::Native, Aio::Threads][..]);
    let aios = proptest::collection::vec(aio, places.len());
    let cases = (any::<bool>(), aios, conformance::steps(200));
    let run = runner.run(&cases, |(ring, aios, steps)| {
        let way = Way {
            ring,
            aio: Aio::Auto,
        };
        let mut engines = way.engines();
        let fits = |place: &Place, aio| match aio {
            Aio::Native if !place.cache.direct() => Aio::Auto,
            Aio::IoUring if !ring => Aio::Threads,
            aio => aio,
        };
        let (_files, mut subjects): (Vec<_>, Vec<_>) = places
            .iter()
            .zip(aios)
            .map(|(place, aio)| place.attach(&mut engines, fits(place, aio)))
            .unzip();
        exercise(&mut engines, &mut subjects, &steps);
        Ok(())
    });
    run.unwrap();
}

#[test]
fn room_limits_operations_in_flight() {
    everywhere(|engines, subject, _, _| conformance::runs_at_full_capacity(engines, subject));
}

#[test]
fn watched_descriptors_are_reported() {
    everywhere(|engines, subject, _, _| conformance::reports_watched_descriptors(engines, subject));
}

#[test]
fn reads_end_where_the_file_ends() {
    everywhere(|engines, s, place, way| {
        let what = format!("{}: {way:?}", place.name);
        let unit = s.unit.max(512);
        assert_eq!(
            read(engines, s, BYTES - unit, 4 * unit, 1),
            unit as i32,
            "{what}"
        );
        assert_eq!(
            read(engines, s, BYTES - unit, 4 * unit, 3),
            unit as i32,
            "{what}"
        );
        assert_eq!(read(engines, s, BYTES, unit, 1), 0, "{what}");
        assert_eq!(read(engines, s, BYTES + 64 * unit, unit, 1), 0, "{what}");
    });
}

#[test]
fn at_most_1024_segments_are_moved_at_once() {
    everywhere(|engines, s, place, way| {
        let unit = s.unit.max(512).min(s.model.len() / 1100);
        let wide = Subject {
            file: s.file,
            model: Vec::new(),
            unit,
            address_unit: s.address_unit,
        };
        if !unit.is_multiple_of(s.unit) {
            return;
        }
        let moved = read(engines, &wide, 0, 1100 * unit, 1100);
        assert_eq!(moved, 1024 * unit as i32, "{}: {way:?}", place.name);
    });
}

#[test]
fn read_only_file_is_not_written() {
    for place in Place::all() {
        for way in WAYS.into_iter().filter(|way| way.serves(place.cache)) {
            let mut engines = way.engines();
            let file = place.open(true).unwrap();
            let facts = file.facts();
            let id = engines
                .attach(file.descriptor(), file.backing(), way.aio)
                .unwrap();
            let subject = Subject {
                file: id,
                model: Vec::new(),
                unit: facts.length_alignment as usize,
                address_unit: facts.address_alignment as usize,
            };
            let what = format!("{}: {way:?}", place.name);
            for stable in [false, true] {
                let result = write(&mut engines, &subject, 0, 4096, stable);
                assert_eq!(result, -libc::EBADF, "{what}");
            }
            let zero = Op::WriteZeroes {
                at: FileOffset(0),
                len: 4096,
                unmap: false,
                stable: false,
            };
            // SAFETY: the operation names no memory.
            #[expect(unsafe_code, reason = "the contract of submit")]
            let result = unsafe { one(&mut engines, id, zero) };
            assert_eq!(result, -libc::EBADF, "{what}");
            assert_eq!(read(&mut engines, &subject, 0, 4096, 1), 4096, "{what}");
        }
    }
}

/// What does not fit into a full file system fails with ENOSPC, and what fits has been written.
#[test]
fn full_file_system_returns_enospc() {
    let Some(small) = SmallTmpfs::mount() else {
        return println!("skipped: only root can mount a small file system");
    };
    for way in WAYS.into_iter().filter(|way| way.aio != Aio::Native) {
        let path = small.0.path().join("disk.raw");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(8 << 20)
            .unwrap();
        let file = engine::DiskFile::open(&path, CacheMode::Writeback, false).unwrap();
        let mut engines = way.engines();
        let id = engines
            .attach(file.descriptor(), file.backing(), way.aio)
            .unwrap();
        let subject = Subject {
            file: id,
            model: Vec::new(),
            unit: 1,
            address_unit: 1,
        };
        let results: Vec<i32> = (0..8)
            .map(|i| write(&mut engines, &subject, i << 20, 1 << 20, i % 2 == 0))
            .collect();
        let moved: i64 = results
            .iter()
            .filter(|&&r| r > 0)
            .map(|&r| i64::from(r))
            .sum();
        assert_eq!(moved, 2 << 20, "{way:?}: {results:?}");
        assert_eq!(results.last(), Some(&-libc::ENOSPC), "{way:?}: {results:?}");
        assert_eq!(read(&mut engines, &subject, 0, 1 << 20, 1), 1 << 20);
        // A ring that is closed may refer to the file for a while, so that removing it would not free its space yet.
        std::fs::File::options()
            .write(true)
            .truncate(true)
            .open(&path)
            .unwrap();
    }
}

/// A file system of 2 MiB.
struct SmallTmpfs(tempfile::TempDir);

impl SmallTmpfs {
    fn mount() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
            .arg(directory.path())
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then(|| Self(directory))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

/// Files come and go while others have operations in flight, and numbers are used again.
#[test]
fn files_that_come_and_go() {
    let places = Place::all();
    let (one_place, others) = places.split_first().unwrap();
    for way in WAYS {
        let mut engines = way.engines();
        let steady = if way.serves(one_place.cache) {
            way.aio
        } else {
            Aio::Auto
        };
        let (_steady, s) = one_place.attach(&mut engines, steady);
        for turn in 0..40 {
            let mut memory = Memory::new(4096, 2, s.unit, s.address_unit);
            let segments = memory.rest(0).to_vec();
            // SAFETY: memory and list are kept until the completion has been reaped, below.
            #[expect(unsafe_code, reason = "the contract of submit")]
            unsafe {
                let (at, to) = (FileOffset(turn * 4096), &segments[..]);
                engines.submit(s.file, Op::Read { at, to }, block::Token(turn));
            }
            let place = &others[turn as usize % others.len()];
            if way.serves(place.cache) {
                let file = place.open(false).unwrap();
                let id = engines
                    .attach(file.descriptor(), file.backing(), way.aio)
                    .unwrap();
                assert_ne!(id, s.file);
                engines.detach(id);
            }
            let mut done = Vec::with_capacity(1);
            while done.is_empty() {
                engines.wait().unwrap();
                engines.reap(&mut done);
            }
            assert_eq!((done[0].token.0, done[0].result), (turn, 4096));
            let start = turn as usize * 4096;
            assert!(memory.bytes() == s.model[start..start + 4096]);
        }
    }
}
