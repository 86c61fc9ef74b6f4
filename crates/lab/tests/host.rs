//! Complete runs with fio on the host: the journal, resuming a killed run, and faults.

use std::fs;
use std::path::Path;

use harness::paths::find_program;
use lab::analysis::Analysis;
use lab::guest::{Accel, Stop};
use lab::journal::{Cell, Journal};
use lab::plan::Plan;
use lab::run::progress::Progress;
use lab::run::{Options, run};
use lab::schedule::Boot;

pub struct Silent;

impl Progress for Silent {
    fn say(&mut self, _: &str) {}
    fn filled(&mut self, _: &str, _: u64, _: u64) {}
    fn block(&mut self, _: u32, _: &[Boot], _: &[bool]) {}
    fn boot(&mut self, _: &str, _: bool) {}
    fn cell(&mut self, _: &str) {}
    fn finished(&mut self, _: &Cell) {}
    fn verdicts(&mut self, _: &Analysis) {}
}

const PLAN: &str = "guest = 'none'\nblocks = 2\n[storage]\nsize = '16M'\n[config]\ncache = ['writeback', 'none']\n\
    [fio]\nrw = 'randread'\nruntime = '1s'\nramp = '0s'\n";

fn options(folder: &Path, resume: bool) -> Options {
    Options {
        folder: folder.join("result"),
        ringdisk: "/nonexistent/ringdisk".into(),
        accel: Accel::Tcg,
        resume,
        file: folder.join("plan.toml"),
        budget: None,
        only: Vec::new(),
        profile: false,
    }
}

fn fio() -> bool {
    let found = find_program("fio").is_some();
    if !found {
        println!(
            "skipped: runs of the lab on the host: fio is missing; `cargo xtask install` installs it"
        );
    }
    found
}

#[test]
fn a_run_is_journaled_goes_on_after_a_kill_and_has_a_report() {
    if !fio() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let whole = run(
        PLAN,
        &options(folder.path(), false),
        &Stop::default(),
        &mut Silent,
    )
    .unwrap();
    let errors: Vec<_> = whole
        .cells
        .iter()
        .filter_map(|cell| cell.error.clone())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(
        whole.cells.len(),
        6,
        "two configurations and the twin, in two blocks"
    );
    assert!(
        whole
            .cells
            .iter()
            .all(|cell| cell.sample.as_ref().is_some_and(|sample| sample.iops > 0.0))
    );
    assert!(
        !folder.path().join("result/disks").exists(),
        "its disks are gone"
    );

    // As if the lab was killed while it wrote the fourth cell.
    let path = folder.path().join("result/journal.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let cells = |count: usize| {
        lines
            .iter()
            .filter(|line| line.contains("\"cell\""))
            .take(count)
            .last()
            .copied()
    };
    let fourth = lines
        .iter()
        .position(|line| Some(*line) == cells(4))
        .unwrap();
    fs::write(&path, lines[..fourth].concat() + &lines[fourth][..30]).unwrap();
    assert!(
        run(
            PLAN,
            &options(folder.path(), false),
            &Stop::default(),
            &mut Silent
        )
        .is_err(),
        "nothing is overwritten"
    );
    let resumed = run(
        PLAN,
        &options(folder.path(), true),
        &Stop::default(),
        &mut Silent,
    )
    .unwrap();
    let names = |journal: &Journal| {
        let mut names: Vec<_> = journal
            .cells
            .iter()
            .map(|cell| (cell.block, cell.case.clone(), cell.twin))
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&resumed), names(&whole));
    let read = Journal::read(&folder.path().join("result")).unwrap();
    assert_eq!(names(&read), names(&whole));
    lab::report::write(&Analysis::of(&read), folder.path()).unwrap();
    assert!(
        fs::read_to_string(folder.path().join("cells.csv"))
            .unwrap()
            .lines()
            .count()
            == 7
    );
    let other = run(
        &PLAN.replace("16M", "32M"),
        &options(folder.path(), true),
        &Stop::default(),
        &mut Silent,
    );
    assert!(other.unwrap_err().to_string().contains("another plan"));
}

#[test]
fn a_fio_that_fails_is_a_cell_with_its_words() {
    if !fio() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("bad.fio"),
        "[a]\nrw=randread\nioengine=no-such-engine\n",
    )
    .unwrap();
    let plan = "guest = 'none'\nblocks = 2\n[storage]\nsize = '16M'\n[fio]\njob = 'bad.fio'\nruntime = '1s'\n";
    Plan::parse(&folder.path().join("plan.toml"), plan).unwrap();
    let journal = run(
        plan,
        &options(folder.path(), false),
        &Stop::default(),
        &mut Silent,
    )
    .unwrap();
    assert!(!journal.cells.is_empty());
    // The result does not need the files that the plan names.
    fs::remove_file(folder.path().join("bad.fio")).unwrap();
    let read = Journal::read(&folder.path().join("result")).unwrap();
    assert_eq!(read.cells.len(), journal.cells.len());
    for cell in &journal.cells {
        let error = cell.error.as_deref().unwrap_or_default();
        assert!(
            error.contains("no-such-engine") || error.contains("engine"),
            "{error}"
        );
    }
}

#[test]
fn a_disk_that_does_not_fit_is_a_cell_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let plan = PLAN.replace("16M", "1000T");
    let journal = run(
        &plan,
        &options(folder.path(), false),
        &Stop::default(),
        &mut Silent,
    )
    .unwrap();
    let error = journal.cells[0].error.as_deref().unwrap_or_default();
    assert!(
        error.contains("MiB free") && error.contains("directory"),
        "{error}"
    );
}

#[test]
fn an_end_that_is_wanted_leaves_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let stop = Stop::default();
    stop.flag()
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let journal = run(PLAN, &options(folder.path(), false), &stop, &mut Silent).unwrap();
    assert!(journal.cells.is_empty());
    assert!(Journal::read(&folder.path().join("result")).is_ok());
}
