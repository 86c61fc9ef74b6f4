//! Random sequences of all operations on ten disks under a load that verifies everything it reads, compared with [a
//! model](world) of what must be served, listed and persisted.
//!
//! A case follows from a seed. A failing case is repeated with fewer steps for up to `RINGDISK_SOAK_SHRINK_SECONDS` (0
//! by default), and reported with its seed: `cargo xtask soak --only SEED` repeats it.

mod disk;
mod steps;
mod world;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use testkit::qemu_img;

use crate::support::seed;
use steps::Step;
use world::World;

type Counts = BTreeMap<&'static str, u64>;

fn seconds(variable: &str, default: u64) -> Duration {
    let given = std::env::var(variable);
    Duration::from_secs(given.map_or(default, |seconds| seconds.parse().unwrap()))
}

#[test]
fn operations() {
    if !qemu_img::is_there("operations") {
        return;
    }
    let only = std::env::var_os("RINGDISK_SOAK_ONLY").is_some();
    let length = seconds("RINGDISK_SOAK_SECONDS", 120);
    // Successive cases use other seeds than those of a neighbouring start.
    let first = if only {
        seed()
    } else {
        seed().wrapping_mul(1_000_000)
    };
    let (start, mut told) = (Instant::now(), Instant::now());
    let (mut counts, mut cases) = (Counts::new(), 0);
    while cases == 0 || !only && start.elapsed() < length {
        let seed = first.wrapping_add(cases);
        let steps = steps::generate(seed);
        println!("case {seed}: {} steps", steps.len());
        if let Err(failure) = run(&steps, &mut counts) {
            let shortest = shrink(steps, &failure);
            let list: Vec<_> = shortest.iter().map(|step| format!("  {step:?}")).collect();
            panic!(
                "{failure}\ncargo xtask soak --only {seed} runs it again; the shortest list of steps that was found:\n{}",
                list.join("\n")
            );
        }
        cases += 1;
        if told.elapsed() > Duration::from_secs(30) {
            told = Instant::now();
            println!("{} s, {cases} cases: {counts:?}", start.elapsed().as_secs());
        }
    }
    println!("{cases} cases: {counts:?}");
}

/// Runs a case. An error names its step.
fn run(steps: &[Step], counts: &mut Counts) -> Result<(), String> {
    let mut at = "the start".to_owned();
    let all = AssertUnwindSafe(|| {
        let mut world = World::start();
        for (number, step) in steps.iter().enumerate() {
            at = format!("step {number}, {step:?}");
            println!("{at}");
            world.step(step);
            world.check();
        }
        at = "the end".to_owned();
        world.end()
    });
    match catch_unwind(all) {
        Ok(its) => {
            for (what, count) in its {
                *counts.entry(what).or_default() += count;
            }
            Ok(())
        }
        Err(panic) => Err(format!("{at}: {}", words(&*panic))),
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message")
}

/// Removes steps, fewer at a time, while the rest still fails.
fn shrink(mut steps: Vec<Step>, failure: &str) -> Vec<Step> {
    let (start, length) = (Instant::now(), seconds("RINGDISK_SOAK_SHRINK_SECONDS", 0));
    if !length.is_zero() {
        println!("{failure}\nremoving steps");
    }
    let mut part = steps.len().div_ceil(2);
    while part > 0 {
        let mut at = 0;
        while at < steps.len() {
            if start.elapsed() > length {
                return steps;
            }
            let mut fewer = steps.clone();
            fewer.drain(at..steps.len().min(at + part));
            match run(&fewer, &mut Counts::new()) {
                Err(_) => steps = fewer,
                Ok(()) => at += part,
            }
        }
        part /= 2;
    }
    steps
}
