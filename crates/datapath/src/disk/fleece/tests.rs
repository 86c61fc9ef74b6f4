use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

use super::*;

const MIB: u64 = 1 << 20;

fn fleece(file: Option<File>) -> Arc<Fleece> {
    Fleece::new(64 * MIB, &FleeceLimits { memory: 0 }, file).unwrap()
}

/// Copies a granule of bytes that are not zeroes. Returns false if it must wait.
fn copy(fleece: &Fleece, at: u64, byte: u8) -> bool {
    match fleece.claim(at, GRANULE) {
        Claim::Copy(run) => {
            assert_eq!(run, Run { at, len: GRANULE });
            fleece.copied(run, &[byte; GRANULE as usize]);
            true
        }
        Claim::Wait => false,
        Claim::Ready => true,
    }
}

fn read(fleece: &Fleece, at: u64) -> Result<u8, FleeceError> {
    let mut bytes = [0xee; GRANULE as usize];
    fleece.overlay(at, &mut bytes)?;
    assert!(bytes.iter().all(|&byte| byte == bytes[0]));
    Ok(bytes[0])
}

#[test]
fn granules_are_copied_once_and_read_back() {
    let fleece = fleece(None);
    assert!(fleece.concerns(100, 1));
    let Claim::Copy(run) = fleece.claim(4000, 5000) else {
        panic!("nothing was copied yet");
    };
    let expected = Run {
        at: 0,
        len: 3 * GRANULE,
    };
    assert_eq!(run, expected);
    // Others wait for this request, also if they need more.
    assert_eq!(fleece.claim(GRANULE, 1), Claim::Wait);
    let mut old = vec![1; 3 * GRANULE as usize];
    old[GRANULE as usize..2 * GRANULE as usize].fill(0);
    fleece.copied(run, &old);
    assert_eq!(fleece.claim(0, 3 * GRANULE), Claim::Ready);
    assert!(!fleece.concerns(0, 3 * GRANULE));
    assert!(fleece.concerns(0, 3 * GRANULE + 1));
    let zeroes = read(&fleece, GRANULE).unwrap();
    assert_eq!((read(&fleece, 0).unwrap(), zeroes), (1, 0));
    // What was not copied is left to the disk.
    assert_eq!(read(&fleece, 3 * GRANULE).unwrap(), 0xee);
    assert_eq!(fleece.extent(0, 64 * MIB), (GRANULE, Some(true)));
    assert_eq!(fleece.extent(GRANULE, MIB), (GRANULE, Some(false)));
    assert_eq!(fleece.extent(3 * GRANULE, MIB), (MIB, None));
    // Nothing after the end is concerned.
    assert!(!fleece.concerns(64 * MIB, MIB));
    fleece.end("done");
    assert!(matches!(read(&fleece, 0), Err(FleeceError::Ended(_))));
}

/// A request is copying when the fleece is sealed: others do not wait for it, and what it has read counts for nothing.
#[test]
fn sealed_fleece_keeps_what_it_has_and_takes_nothing() {
    let fleece = fleece(None);
    assert!(copy(&fleece, 0, 1));
    let Claim::Copy(run) = fleece.claim(MIB, GRANULE) else {
        panic!("nothing was copied there");
    };
    let Claim::Copy(unreadable) = fleece.claim(2 * MIB, GRANULE) else {
        panic!("nothing was copied there");
    };
    fleece.seal();
    assert!(!fleece.concerns(MIB, GRANULE) && !fleece.concerns(3 * MIB, GRANULE));
    assert_eq!(fleece.claim(MIB, GRANULE), Claim::Ready);
    fleece.copied(run, &[2; GRANULE as usize]);
    fleece.not_copied(unreadable, &io::ErrorKind::TimedOut.into());
    assert!(fleece.failure().is_none());
    for at in [MIB, 2 * MIB, 3 * MIB] {
        assert_eq!(read(&fleece, at).unwrap(), 0xee, "{at}");
    }
    assert_eq!(read(&fleece, 0).unwrap(), 1);
    assert_eq!(fleece.extent(MIB, GRANULE), (GRANULE, None));
    let usage = fleece.usage();
    assert_eq!((usage.memory, usage.file), (GRANULE, 0));
}

#[test]
fn writes_in_flight_are_waited_for_where_they_are() {
    let fleece = fleece(None);
    fleece.add_preceding(&[(0, 512), (MIB, GRANULE)]);
    assert!(!fleece.is_settled());
    assert_eq!(fleece.claim(1024, 512), Claim::Wait);
    assert!(copy(&fleece, 2 * MIB, 1));
    fleece.preceding_ended((0, 512));
    assert!(copy(&fleece, 0, 1));
    assert!(!fleece.wait_settled(Duration::from_millis(1)));
    fleece.preceding_ended((MIB, GRANULE));
    assert!(fleece.wait_settled(Duration::ZERO));
}

#[test]
fn full_memory_goes_to_the_file_and_comes_back() {
    let fleece = fleece(Some(tempfile::tempfile().unwrap()));
    for granule in 0..4096 {
        while !copy(&fleece, granule * GRANULE, granule as u8 | 1) {
            thread::yield_now();
        }
    }
    let usage = fleece.usage();
    assert!(
        usage.memory <= 4 * MIB && usage.memory + usage.file == 16 * MIB,
        "{usage:?}"
    );
    for granule in 0..4096 {
        assert_eq!(read(&fleece, granule * GRANULE).unwrap(), granule as u8 | 1);
    }
    // What was trimmed needs no space, cannot be read, and is not copied again.
    fleece.trim(0, 16 * MIB).unwrap();
    let usage = fleece.usage();
    assert!(usage.memory + usage.file <= MIB, "{usage:?}");
    assert!(matches!(read(&fleece, 0), Err(FleeceError::Trimmed(0))));
    assert!(!fleece.concerns(0, MIB));
    fleece.trim(32 * MIB, MIB).unwrap();
    assert!(!fleece.concerns(32 * MIB, MIB));
    fleece.end("done");
    // An ended one does not delay the end by what a client has trimmed.
    fleece.trim(33 * MIB, MIB).unwrap();
    assert_eq!(fleece.extent(33 * MIB, MIB), (MIB, None));
}

#[test]
fn full_memory_without_a_file_ends_it() {
    let fleece = fleece(None);
    let (tell, told) = mpsc::channel();
    fleece.on_failure(move |why| tell.send(why.to_owned()).unwrap());
    for granule in 0..4096 {
        assert!(copy(&fleece, granule * GRANULE, 1), "nobody waits");
    }
    assert!(told.try_recv().unwrap().contains("memory is full"));
    assert!(read(&fleece, 0).is_err());
}

/// The file cannot be written: those who wait go on.
#[test]
fn file_that_fails_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    File::create(&path).unwrap();
    let fleece = fleece(Some(File::open(path).unwrap()));
    let (tell, told) = mpsc::channel();
    fleece.on_failure(move |why| tell.send(why.to_owned()).unwrap());
    for granule in 0..4096 {
        while !copy(&fleece, granule * GRANULE, 1) {
            thread::yield_now();
        }
    }
    assert!(told.recv().unwrap().contains("cannot be written"));
}

/// A file that takes nothing: those who wait are told in time, and nobody else.
#[test]
fn hang_is_noticed_only_if_somebody_waits() {
    let file = tempfile::tempfile().unwrap();
    // Nothing moves its chunks to the file.
    let store = Store::new(&FleeceLimits { memory: 0 }, Some(file));
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let is_hung = store.wait_for_hang(Duration::from_millis(20));
            has_ended.store(true, SeqCst);
            is_hung
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!has_ended.load(SeqCst), "nobody waits");
        while store.reserve(1) == Room::Reserved {
            store.put(&[1; GRANULE as usize]);
        }
        assert!(watch.join().unwrap());
        let watch = scope.spawn(|| store.wait_for_hang(Duration::from_secs(1000)));
        store.close();
        assert!(!watch.join().unwrap());
    });
}
