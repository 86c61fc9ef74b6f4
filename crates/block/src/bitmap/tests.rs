use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;

use super::*;

fn bitmap(granularity_bits: u32, size: u64) -> DirtyBitmap {
    DirtyBitmap::new("b".into(), granularity_bits, size, true, false).unwrap()
}

/// The dirty ranges, in units of the granularity.
fn dirty(bitmap: &DirtyBitmap) -> Vec<(u64, u64)> {
    let (mut at, mut found) = (0, Vec::new());
    while let Some((is_dirty, len)) = bitmap.extent(at) {
        assert!(len > 0);
        if is_dirty {
            found.push((
                at >> bitmap.granularity_bits(),
                (at + len).div_ceil(bitmap.granularity()),
            ));
        }
        at += len;
    }
    assert_eq!(at, bitmap.size());
    found
}

#[test]
fn ranges_are_marked_bit_by_bit() {
    // The same operations on an array of bools.
    let size = (FIRST * 64 * 5 + 100) << 9;
    let bitmap = bitmap(9, size);
    let bits = (size >> 9) as usize;
    let mut model = vec![false; bits];
    let mut random = 12345_u64;
    let mut next = |below: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    for _ in 0..2000 {
        let at = next(size);
        let order = 9 + next(16);
        let len = next(1 << order).min(size - at);
        bitmap.mark(at, len);
        if len > 0 {
            model[(at >> 9) as usize..=((at + len - 1) >> 9) as usize].fill(true);
        }
    }
    let mut bytes = vec![0; bitmap.bytes() as usize];
    bitmap.copy_to(0, &mut bytes);
    let mut at = 0;
    for (bit, &is_dirty) in model.iter().enumerate() {
        assert_eq!(bytes[bit / 8] >> (bit % 8) & 1 != 0, is_dirty, "bit {bit}");
        if (bit as u64) << 9 == at {
            let (found, len) = bitmap.extent(at).unwrap();
            let end = model[bit..].iter().position(|&b| b != is_dirty);
            assert_eq!(
                (found, len >> 9),
                (is_dirty, end.unwrap_or(bits - bit) as u64)
            );
            at += len;
        }
    }
    let count = model.iter().filter(|&&is_dirty| is_dirty).count() as u64;
    assert_eq!(bitmap.dirty_bits(), count);
    let copy = self::bitmap(9, size);
    copy.merge_bytes(0, &bytes);
    assert_eq!(dirty(&copy), dirty(&bitmap));
}

/// A part of an extent is not longer than what was asked for, nor longer than the extent.
#[test]
fn extents_within_a_range() {
    let bitmap = bitmap(12, 1 << 20);
    bitmap.mark(8192, 4096);
    assert_eq!(bitmap.extent_within(0, 4096), Some((false, 4096)));
    assert_eq!(bitmap.extent_within(512, 1000), Some((false, 1000)));
    assert_eq!(bitmap.extent_within(512, 1 << 19), Some((false, 7680)));
    assert_eq!(bitmap.extent_within(9000, 100), Some((true, 100)));
    let rest = (1 << 20) - 12288;
    assert_eq!(bitmap.extent_within(12288, u64::MAX), Some((false, rest)));
    assert_eq!(bitmap.extent_within(1 << 20, 1), None);
    assert_eq!(bitmap.extent_within(0, 0), None);
}

/// A guest writes where a client asks, at the same moment: the part that begins there is never empty.
#[test]
fn extents_beside_writes_are_not_empty() {
    const SIZE: u64 = (1 << 16) << 12;
    let bitmap = bitmap(12, SIZE);
    let (asked, mut wrong) = (AtomicU64::new(0), false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut marked = 0;
            while marked < SIZE {
                if asked.load(Acquire) >= marked {
                    bitmap.mark(marked, 4096);
                    marked += 4096;
                }
            }
        });
        for at in (0..SIZE).step_by(4096) {
            asked.store(at, Release);
            for _ in 0..8 {
                let (_, len) = bitmap.extent_within(at + 512, 8192).unwrap();
                wrong |= len == 0 || len > 8192;
            }
        }
    });
    assert!(!wrong);
}

#[test]
fn bits_stay_when_the_disk_grows() {
    let bitmap = bitmap(16, 100 << 16);
    bitmap.mark(99 << 16, 1 << 16);
    // A write beyond the end of what is covered does nothing.
    bitmap.mark(u64::MAX - 10, 10);
    bitmap.mark(0, u64::MAX);
    assert_eq!(dirty(&bitmap), [(0, 100)]);
    let size = (FIRST * 64 * 10) << 16;
    bitmap.grow(size).unwrap();
    assert_eq!(dirty(&bitmap), [(0, 100)]);
    bitmap.mark(size - 1, 1);
    assert_eq!(dirty(&bitmap), [(0, 100), (FIRST * 640 - 1, FIRST * 640)]);
    assert_eq!(bitmap.grow(u64::MAX >> 1), Err(TooLarge));
    assert_eq!(bitmap.size(), size);
}

#[test]
fn end_of_disk_within_a_bit() {
    let bitmap = bitmap(31, (3 << 31) + 512);
    bitmap.mark(3 << 31, 512);
    assert_eq!(dirty(&bitmap), [(3, 4)]);
    assert_eq!(bitmap.dirty_bits(), 1);
    let mut byte = [0xff];
    bitmap.copy_to(0, &mut byte);
    assert_eq!(byte, [8]);
    bitmap.merge_bytes(0, &[0xff, 0xff]);
    assert_eq!(dirty(&bitmap), [(0, 4)]);
}

#[test]
fn merged_bitmaps_may_have_other_granularities() {
    let (fine, coarse) = (bitmap(9, 1 << 20), bitmap(16, 1 << 20));
    fine.mark(512, 512);
    fine.mark(0x2_fe00, 1024);
    coarse.merge(&fine);
    assert_eq!(dirty(&coarse), [(0, 1), (2, 4)]);
    fine.merge(&coarse);
    assert_eq!(dirty(&fine), [(0, 128), (256, 512)]);
    let copy = coarse.recording(false);
    coarse.mark(0x8_0000, 1);
    assert_eq!(
        (dirty(&copy), copy.is_recording()),
        (vec![(0, 1), (2, 4)], false)
    );
    let cleared = coarse.cleared();
    assert_eq!((cleared.dirty_bits(), cleared.size()), (0, 1 << 20));
    assert!(cleared.is_recording());
}

#[test]
fn threads_lose_no_bits() {
    let bitmap = bitmap(9, 1 << 20);
    thread::scope(|scope| {
        for thread in 0..4 {
            let bitmap = &bitmap;
            scope.spawn(move || {
                for bit in (thread..2048).step_by(4) {
                    bitmap.mark(bit << 9, 512);
                }
            });
        }
    });
    assert_eq!(dirty(&bitmap), [(0, 2048)]);
}

#[test]
fn writes_submitted_together_note_the_time_once() {
    struct Noted(AtomicU64);
    impl SharedWords for Noted {
        fn words(&self) -> &[AtomicU64] {
            std::slice::from_ref(&self.0)
        }
        fn grow(&self, _words: u64) -> io::Result<()> {
            Ok(())
        }
        fn note_time(&self) {
            self.0.fetch_add(1 << 32, SeqCst);
        }
    }
    let words = Arc::new(Noted(AtomicU64::new(0)));
    let times = || words.0.load(SeqCst) >> 32;
    let shared = bitmap(16, 1 << 20).in_shared(words.clone()).unwrap();
    let bitmaps = DirtyBitmaps::default();
    bitmaps.set(vec![Arc::new(shared)]);
    let recording = bitmaps.recording();
    for batch in 1..=2 {
        let mut noted = TimeNoted::default();
        // Not before something is written.
        assert_eq!(times(), batch - 1);
        for at in 0..16 {
            assert!(recording.mark(at << 16, 4096, &mut noted));
            assert_eq!(times(), batch);
        }
    }
    assert_eq!(words.0.load(SeqCst) & 0xffff_ffff, 0xffff);
    // What is not part of a batch.
    bitmaps.find("b").unwrap().mark(0, 512);
    assert_eq!(times(), 3);
}
