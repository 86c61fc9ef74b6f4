//! The plans of docs/performance.md that need more than one raw disk and a closed loop, with short times.

use std::thread::available_parallelism;

use lab::journal::{Journal, Sample};

use super::{PlanFolder, are_installed, errors, succeed};

const SHORT: [&str; 3] = ["blocks=1", "fio.runtime=200ms", "fio.ramp=0s"];

/// Runs a recipe with these values; `None` if something for it is missing here.
fn run(recipe: &str, values: &[&str]) -> Option<(Journal, String)> {
    if !are_installed(recipe, &["qemu-img", "qemu-storage-daemon"]) {
        return None;
    }
    if available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: {recipe}: it needs two CPUs");
        return None;
    }
    let bench = PlanFolder::new(lab::recipes::text(recipe).unwrap());
    let values = SHORT.iter().chain(values);
    let said = succeed(bench.run().args(values.flat_map(|it| ["--set", it])));
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    bench.assert_report(journal.cells.len());
    Some((journal, said))
}

fn samples<'a>(journal: &'a Journal, load: &str) -> Vec<&'a Sample> {
    let cells = journal.cells.iter().filter(|cell| cell.workload == load);
    cells.map(|cell| cell.sample.as_ref().unwrap()).collect()
}

#[test]
fn allocated_qcow2_is_compared_with_raw() {
    let Some((journal, said)) = run("bench-qcow2", &["storage.size=32M"]) else {
        return;
    };
    // Three cases and the twin of the first, under two loads.
    assert_eq!(journal.cells.len(), 4 * 2);
    assert!(
        said.contains("ringdisk's figure over that of the row"),
        "{said}"
    );
}

/// More writes than there are clusters would find some that are allocated already.
#[test]
fn each_sample_of_first_writes_has_a_new_image() {
    let values = ["storage.size=64M", "config.cluster-size=128k"];
    let extended = ["config.extended-l2=on", "fio.once=128k"];
    let Some((journal, _)) = run("bench-qcow2-new", &[values, extended].concat()) else {
        return;
    };
    assert_eq!(journal.cells.len(), 4 * 2);
    for (load, most) in [
        ("4k first writes", 512),
        ("1M writes that fill the image", 64),
    ] {
        for sample in samples(&journal, load) {
            assert!((1..=most).contains(&sample.latencies.requests()), "{load}");
        }
    }
}

#[test]
fn backing_files_are_read_and_copied_from() {
    let Some((journal, _)) = run("bench-qcow2-backing", &["storage.size=64M"]) else {
        return;
    };
    assert_eq!(journal.cells.len(), 4 * 2);
    for sample in samples(&journal, "4k copy-on-write") {
        assert!((1..=1024).contains(&sample.latencies.requests()));
    }
}

#[test]
fn connected_disks_without_io_take_memory_and_descriptors() {
    let Some((journal, said)) = run("bench-idle", &["config.volumes=1,8", "storage.size=16M"])
    else {
        return;
    };
    assert!(
        said.contains("ready s") && said.contains("core %"),
        "{said}"
    );
    let open = |case: &str| {
        let cell = journal.cells.iter().find(|cell| cell.case == case).unwrap();
        let idle = cell.sample.as_ref().unwrap().idle.as_ref().unwrap();
        assert!(idle.footprint.private_kib > 0.0, "{idle:?}");
        idle.footprint.open()
    };
    for server in ["ringdisk", "qemu-storage-daemon"] {
        let (one, eight) = (
            open(&format!("{server} volumes=1")),
            open(&format!("{server} volumes=8")),
        );
        // A connection and a file at least.
        assert!(eight >= one + 2 * 7, "{server}: {one}, {eight}");
    }
}

#[test]
fn a_quiet_disk_is_measured_with_a_busy_neighbour() {
    let Some((journal, said)) = run("bench-fairness", &[]) else {
        return;
    };
    assert!(said.contains("p99 latency"), "{said}");
    for cell in &journal.cells {
        let sample = cell.sample.as_ref().unwrap();
        assert!(sample.iops > 0.0);
        // With a neighbour, the server works for both.
        assert_eq!(sample.cpu_us.is_some(), cell.case == "alone");
    }
}

#[test]
fn queues_disks_and_cpus_are_scaled() {
    let Some((journal, _)) = run("bench-scaling", &[]) else {
        return;
    };
    let two = journal.boots.iter().find(|boot| boot.case.contains("2 q"));
    let two = two.unwrap();
    assert_eq!(two.effective.get("server-cpus").unwrap(), "0,1");
    assert_eq!(two.effective.get("queues").unwrap(), "2");
    let Some((journal, said)) = run("bench-scaling-disks", &[]) else {
        return;
    };
    assert_eq!(journal.cells.len(), 4);
    assert!(
        said.contains("the row's figure over that of the first"),
        "{said}"
    );
}
