//! Random operations on several queues, compared with an array.

use super::*;

/// An operation on the small area of the disk that one queue has for itself.
#[derive(Clone, Debug)]
struct Step {
    op: Op,
    sector: u64,
    sectors: u64,
    seed: u64,
}

const AREA_SECTORS: u64 = 96;

fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        4 => Just(Op::Write),
        4 => Just(Op::Read),
        1 => Just(Op::Flush),
        1 => Just(Op::WriteZeroes { unmap: false }),
        1 => Just(Op::WriteZeroes { unmap: true }),
    ];
    (op, 0..AREA_SECTORS, 1..=32u64, any::<u64>()).prop_map(|(op, sector, sectors, seed)| {
        let sectors = sectors.min(AREA_SECTORS - sector);
        Step {
            op,
            sector,
            sectors,
            seed: seed >> 16,
        }
    })
}

#[test]
fn random_operations_match_an_array() {
    let seed = seed();
    let config = Config {
        cases: 12,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    };
    let queues = proptest::collection::vec(proptest::collection::vec(step(), 1..200), 3);
    for (cache, packed) in [("none", false), ("writeback", false), ("none", true)] {
        let (server, disk) = serve(&format!("cache={cache},queues=3"));
        let result = TestRunner::new(config.clone()).run(&queues, |plan| {
            let mut device = connect(
                &server,
                DeviceConfig {
                    queues: 3,
                    packed,
                    ..DeviceConfig::default()
                },
            );
            thread::scope(|scope| {
                let queues = device.queues.iter_mut().zip(&plan);
                let players: Vec<_> = queues
                    .map(|(queue, steps)| scope.spawn(|| run_steps(queue, steps, &disk)))
                    .collect();
                players
                    .into_iter()
                    .try_for_each(|p| p.join().expect("a player does not panic"))
            })
        });
        result.unwrap_or_else(|e| panic!("cache={cache}, seed {seed}: {e}"));
    }
}

/// Runs steps on a queue, in parallel where they do not overlap, and compares all reads with a model.
fn run_steps(queue: &mut Queue, steps: &[Step], disk: &Disk) -> Result<(), TestCaseError> {
    let area = u64::from(queue.index) * AREA_SECTORS;
    let mut model = disk.bytes(area, AREA_SECTORS as usize * 512);
    let mut rest = steps;
    while !rest.is_empty() {
        let batch = independent(rest, queue.slots());
        rest = &rest[batch.len()..];
        for (slot, step) in (0..).zip(batch) {
            let len = step.sectors as usize * 512;
            match step.op {
                Op::Write => queue.write_buffer(slot, &content(step.seed, len)),
                _ => queue.write_buffer(slot, &vec![0xa5; len]),
            }
            queue.prepare(slot, step.op, area + step.sector, len as u32);
        }
        queue.submit(&(0..batch.len() as u16).collect::<Vec<_>>());
        for (slot, status) in queue.finish(batch.len()) {
            let step = &batch[usize::from(slot)];
            let range = step.sector as usize * 512..(step.sector + step.sectors) as usize * 512;
            prop_assert_eq!(status, OK, "{:?}", step);
            match step.op {
                Op::Read => prop_assert!(
                    queue.read_buffer(slot, range.len()) == model[range],
                    "{:?}",
                    step
                ),
                Op::Write => model[range.clone()].copy_from_slice(&content(step.seed, range.len())),
                Op::WriteZeroes { .. } => model[range].fill(0),
                _ => {}
            }
        }
    }
    prop_assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    prop_assert!(
        disk.bytes(area, model.len()) == model,
        "the file differs from the model"
    );
    Ok(())
}

/// The longest prefix of `steps` in which no two touch the same sector.
fn independent(steps: &[Step], most: u16) -> &[Step] {
    let apart =
        |a: &Step, b: &Step| a.sector + a.sectors <= b.sector || b.sector + b.sectors <= a.sector;
    let clash = (1..steps.len().min(usize::from(most)))
        .find(|&n| !steps[..n].iter().all(|s| apart(s, &steps[n])));
    &steps[..clash.unwrap_or(steps.len().min(usize::from(most)))]
}
