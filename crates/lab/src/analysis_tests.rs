use super::*;
use crate::host::Facts;
use crate::journal::{BootRecord, Cell, Header, Record};
use harness::random::Rng;

/// A result whose boots came to these settings.
fn booted(plan: &str, boots: &[(&str, &[(&str, &str)])]) -> Journal {
    let header = Header {
        version: 1,
        file: "p.toml".into(),
        plan: plan.into(),
        jobs: Default::default(),
        seed: 1,
        started_ms: 0,
        facts: Facts::new(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let mut text = serde_json::to_string(&Record::Plan(header)).unwrap() + "\n";
    for (case, effective) in boots {
        let effective = effective
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        let boot = BootRecord {
            block: 0,
            case: (*case).into(),
            twin: false,
            effective,
            boot_s: 1.0,
        };
        text += &(serde_json::to_string(&Record::Boot(boot)).unwrap() + "\n");
    }
    Journal::parse(&text).unwrap()
}

#[test]
fn one_setting_is_no_confusion_and_a_second_that_nobody_asked_for_is() {
    let plan = "[config]\niothread = ['off', 'on']\n";
    let of = |queues: &str| {
        let journal = booted(
            plan,
            &[
                ("iothread=off", &[("iothreads", "0"), ("queues", "1")]),
                ("iothread=on", &[("iothreads", "1"), ("queues", queues)]),
            ],
        );
        Analysis::of(&journal).confounded(0, 1)
    };
    assert_eq!(of("1"), None);
    assert_eq!(
        of("4"),
        Some(vec!["iothread".to_owned(), "queues".to_owned()])
    );
}

#[test]
fn what_another_process_serves_is_one_difference() {
    let plan = "[[case]]\nname = 'a'\n[[case]]\nname = 'b'\ndevice = 'vhost-user-blk'\n";
    let journal = booted(
        plan,
        &[
            ("a", &[("cache.direct", "true")]),
            ("b", &[("server", "ringdisk")]),
        ],
    );
    assert_eq!(Analysis::of(&journal).confounded(0, 1), None);
    let journal = booted(
        plan,
        &[
            ("a", &[("queue-size", "256")]),
            ("b", &[("queue-size", "128")]),
        ],
    );
    assert_eq!(
        Analysis::of(&journal).confounded(0, 1),
        Some(vec!["device".to_owned(), "queue-size".to_owned()])
    );
}

/// A result of 8 blocks in which the second case has `gain` times the IOPS of the first at depth 1, and `gain` squared at
/// depth 2.
fn measured(claim: &str, gain: f64, accelerator: &str) -> Journal {
    let plan = format!(
        "[[case]]\nname = 'a'\n[[case]]\nname = 'b'\nqueues = 2\nvcpus = 2\n[fio]\niodepth = [1, 2]\n[[claim]]\nsource = 's'\n\
         figure = 'f'\n{claim}\n"
    );
    let mut journal = booted(&plan, &[]);
    journal.header.facts = Facts::from([("accelerator".into(), accelerator.into())]);
    for block in 0..8 {
        let wobble = if block % 2 == 0 { 1.002 } else { 0.998 };
        for (case, ratio) in [("a", 1.0), ("b", gain)] {
            for (depth, load) in [(1, "randread 4k, depth 1"), (2, "randread 4k, depth 2")] {
                let sample = Sample {
                    iops: 1000.0 * wobble * f64::powi(ratio, depth),
                    ..Sample::default()
                };
                journal.cells.push(Cell {
                    block,
                    case: case.into(),
                    workload: load.into(),
                    sample: Some(sample),
                    ..Cell::default()
                });
            }
        }
    }
    journal
}

#[test]
fn a_claim_is_judged_by_the_mean_of_its_loads_in_its_own_direction() {
    let of = |claim: &str, gain: f64| {
        let journal = measured(claim, gain, "kvm");
        let found = Analysis::of(&journal).replications().remove(0);
        (found.outcome, (found.measured.unwrap() * 1000.0).round())
    };
    let at_1 = "from = 'a'\nto = 'b'\nat = 'iodepth=1'\nsize = '+10 %'";
    let both = "from = 'a'\nto = 'b'\nsize = '+15.4 %'";
    let inverse = "from = 'b'\nto = 'a'\nat = 'iodepth=1,4'\nsize = '-9.1 %'";
    let words = "from = 'a'\nto = 'b'\nexpect = 'loss'";
    assert_eq!(of(at_1, 1.1), (ClaimResult::Reproduced, 100.0));
    assert_eq!(of(at_1, 1.5), (ClaimResult::DirectionOnly, 500.0));
    assert_eq!(of(both, 1.1), (ClaimResult::Reproduced, 154.0));
    assert_eq!(of(inverse, 1.1), (ClaimResult::Reproduced, -91.0));
    assert_eq!(of(inverse, 0.9), (ClaimResult::NotReproduced, 111.0));
    assert_eq!(of(words, 0.9), (ClaimResult::DirectionOnly, -146.0));
    assert_eq!(of(words, 1.1), (ClaimResult::NotReproduced, 154.0));
}

/// Noise that the loads of a block do not share averages out, and noise that they share does not.
#[test]
fn the_mean_of_many_loads_is_as_certain_as_its_blocks_agree() {
    let depths: Vec<String> = (1..=40).map(|depth| depth.to_string()).collect();
    let plan = format!(
        "[[case]]\nname = 'a'\n[[case]]\nname = 'b'\nqueues = 2\nvcpus = 2\n[fio]\niodepth = [{}]\n[[claim]]\n\
         source = 's'\nfigure = 'f'\nfrom = 'a'\nto = 'b'\nsize = '+10 %'\n",
        depths.join(", ")
    );
    let width = |noise: fn(&mut Rng, f64) -> f64, last_block: u32| {
        let mut journal = booted(&plan, &[]);
        let mut rng = Rng::new(7);
        for block in 0..8 {
            let shared = rng.normal();
            for (case, gain) in [("a", 1.0), ("b", 1.1)] {
                // Later blocks lack a load that was decided.
                let skipped = usize::from(block >= last_block);
                for depth in &depths[skipped..] {
                    let ratio = if case == "b" {
                        noise(&mut rng, shared)
                    } else {
                        0.0
                    };
                    let sample = Sample {
                        iops: 1000.0 * gain * f64::exp(0.2 * ratio),
                        ..Sample::default()
                    };
                    journal.cells.push(Cell {
                        block,
                        case: case.into(),
                        workload: format!("randread 4k, depth {depth}"),
                        sample: Some(sample),
                        ..Cell::default()
                    });
                }
            }
        }
        let found = Analysis::of(&journal).replications().remove(0);
        let (low, high) = found.interval.unwrap();
        assert!(low < 0.1 && 0.1 < high, "{low} {high}");
        high - low
    };
    let independent = width(|rng, _| rng.normal(), 8);
    let shared = width(|_, shared| shared, 8);
    assert!(independent < 0.15 && shared > 0.3, "{independent} {shared}");
    // Three complete blocks tell less than the loads' own intervals.
    let incomplete = width(|rng, _| rng.normal(), 3);
    assert!(incomplete > 0.3, "{incomplete}");
}

#[test]
fn all_reports_show_published_and_measured_sizes() {
    let claim = "from = 'a'\nto = 'b'\nat = 'iodepth=1'\nsize = '+10 %'";
    let journal = measured(claim, 1.1, "kvm");
    let analysis = Analysis::of(&journal);
    let text = crate::report::text(&analysis);
    assert!(
        text.contains("reproduced: published +10 %, measured +10 % [+10 %, +10 %] (1 comparison"),
        "{text}"
    );
    let [(_, page), _, (_, json)] = crate::report::files(&analysis).unwrap();
    assert!(
        page.contains(
            "<td>+10 %</td><td>+10 % [+10 %, +10 %]</td><td class=\"good\">reproduced</td>"
        )
    );
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let claim = &json["claims"][0];
    assert!(
        (claim["size-percent"][0].as_f64().unwrap() - 10.0).abs() < 1e-9,
        "{claim}"
    );
    assert!(
        claim["interval-percent"][1].as_f64().unwrap() > 9.0,
        "{claim}"
    );
    assert_eq!(claim["outcome"], "reproduced");
}

#[test]
fn emulation_and_other_storage_give_no_verdict() {
    let claim = "from = 'a'\nto = 'b'\nsize = '+10 %'";
    let of = |claim: &str, accelerator| {
        let journal = measured(claim, 1.1, accelerator);
        Analysis::of(&journal).replications().remove(0)
    };
    let emulated = of(claim, "tcg");
    assert_eq!(
        (emulated.outcome, emulated.interval),
        (ClaimResult::Untestable, None)
    );
    assert!(emulated.why.contains("needs KVM"), "{}", emulated.why);
    let on_files = of(&format!("{claim}\nstorage = 'rbd'"), "kvm");
    assert_eq!(on_files.outcome, ClaimResult::Untestable);
    assert!(on_files.why.contains("--pool"), "{}", on_files.why);
}

#[test]
fn a_claim_of_which_a_part_was_measured_says_so() {
    let of = |claim: &str, gain: f64| {
        let mut journal = measured(&format!("from = 'a'\nto = 'b'\n{claim}"), gain, "kvm");
        journal.plan = journal
            .plan
            .selected(&"iodepth=1".parse().unwrap())
            .unwrap();
        let analysis = Analysis::of(&journal);
        let found = analysis.replications().remove(0);
        assert_eq!((found.selected, found.comparisons), (1, 2), "{claim}");
        let why = &found.why;
        assert!(why.contains("mean of only 1 of 2 comparisons: "), "{why}");
        assert!(crate::report::text(&analysis).contains(why), "{why}");
        found.outcome
    };
    // Of the mean, whatever the other depth has.
    assert_eq!(of("size = '+10 %'", 1.1), ClaimResult::DirectionOnly);
    assert_eq!(of("size = '+10 %'", 0.9), ClaimResult::Undecided);
    assert_eq!(of("size = 'at least -10 %'", 0.95), ClaimResult::Undecided);
    assert_eq!(of("expect = 'loss'", 0.9), ClaimResult::DirectionOnly);
    assert_eq!(
        of("won = '2 of 2 iodepth'", 1.1),
        ClaimResult::DirectionOnly
    );
    assert_eq!(of("won = '2 of 2 iodepth'", 0.9), ClaimResult::Undecided);
    // One difference refutes equality, and one equivalence does not prove it.
    assert_eq!(of("expect = 'equal'", 1.1), ClaimResult::NotReproduced);
    assert_eq!(of("expect = 'equal'", 1.0), ClaimResult::Undecided);
}
