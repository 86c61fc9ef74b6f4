//! What it costs a write to be recorded in a dirty bitmap: `cargo run --release -p engine --example bitmap_cost`.
//!
//! 4k writes at random places, in batches, one thread, one bitmap of 64 KiB a bit in shared memory, as disks have it: first to a
//! clean bitmap, where each page of bits comes into being, then to the same places again. Times are in nanoseconds, the best
//! of five, without the time it takes to choose the places.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use block::{
    DirtyBitmap, DirtyBitmaps, NoteStore, RecordingBitmaps, TimeNoted, WriteIntent, region_bits,
};
use engine::MappedWords;

const WRITES: u64 = 2_000_000;
const BATCH: u64 = 32;

struct AlwaysDurable;

impl NoteStore for AlwaysDurable {
    fn note(&self, intent: &WriteIntent) {
        intent.noted(&intent.wanted());
    }
}

fn recording(size: u64, has_intent: bool) -> Result<RecordingBitmaps, Box<dyn Error>> {
    let words = MappedWords::new(tempfile::tempfile_in("/dev/shm")?, size >> 16)?;
    let bitmap = DirtyBitmap::new("cost".into(), 16, size, true, true)
        .and_then(|bitmap| bitmap.in_shared(Arc::new(words)))
        .map_err(|_| "no space for the bits")?;
    let bitmaps = DirtyBitmaps::default();
    bitmaps.set(vec![Arc::new(bitmap)]);
    if has_intent {
        let intent = WriteIntent::new(region_bits(size), Box::new(AlwaysDurable));
        intent.note(0, size);
        bitmaps.set_intent(Some(Arc::new(intent)), true);
    }
    Ok(bitmaps.recording())
}

/// Nanoseconds per write.
fn cost(size: u64, bitmaps: Option<&RecordingBitmaps>) -> f64 {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let began = Instant::now();
    for _ in 0..WRITES / BATCH {
        let mut noted = TimeNoted::default();
        for _ in 0..BATCH {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = black_box(((random >> 12) % size) & !4095);
            if let Some(bitmaps) = bitmaps {
                black_box(bitmaps.mark(at, 4096, &mut noted));
            }
        }
    }
    began.elapsed().as_nanos() as f64 / WRITES as f64
}

fn main() -> Result<(), Box<dyn Error>> {
    for (size, name) in [(64 << 30, "64 GiB"), (1 << 40, "1 TiB")] {
        for (has_intent, with) in [(false, ""), (true, ", noted for power cuts")] {
            let [mut nothing, mut clean, mut dirty] = [f64::MAX; 3];
            for _ in 0..5 {
                let bitmaps = recording(size, has_intent)?;
                nothing = nothing.min(cost(size, None));
                clean = clean.min(cost(size, Some(&bitmaps)));
                dirty = dirty.min(cost(size, Some(&bitmaps)));
            }
            let (clean, dirty) = (clean - nothing, dirty - nothing);
            println!("{name}{with}: clean {clean:.1}, dirty {dirty:.1}");
        }
    }
    Ok(())
}
