use super::*;

fn header() -> Header {
    Header {
        version: VERSION,
        file: "p.toml".into(),
        plan: "[config]\nqueues = [1, 2]\n".into(),
        jobs: BTreeMap::new(),
        seed: 1,
        started_ms: 0,
        facts: Facts::new(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    }
}

fn cell(workload: &str) -> Record {
    Record::Cell(Cell {
        workload: workload.into(),
        sample: Some(Sample::default()),
        ..Cell::default()
    })
}

#[test]
fn a_truncated_journal_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), header()).unwrap();
    let mut latencies = Histogram::default();
    latencies.add(1008, 7);
    let sample = Sample {
        latencies: latencies.clone(),
        ..Sample::default()
    };
    let one = Cell {
        workload: "one".into(),
        sample: Some(sample),
        ..Cell::default()
    };
    writer.write(&Record::Cell(one)).unwrap();
    drop(writer);
    assert!(
        Writer::create(folder.path(), header()).is_err(),
        "a result is not overwritten"
    );
    let path = folder.path().join(JOURNAL);
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.clone() + &whole.lines().nth(1).unwrap()[..20]).unwrap();
    let journal = Journal::read(folder.path()).unwrap();
    assert!(journal.truncated && journal.cells.len() == 1);
    assert_eq!(
        journal.cells[0].sample.as_ref().unwrap().latencies,
        latencies
    );
    let (mut writer, resumed) = Writer::resume(folder.path()).unwrap();
    assert!(!resumed.truncated && resumed.cells.len() == 1);
    let second = Writer::resume(folder.path()).unwrap_err();
    assert!(format!("{second:#}").contains("another run"), "{second:#}");
    writer.write(&cell("two")).unwrap();
    let journal = Journal::read(folder.path()).unwrap();
    assert!(!journal.truncated);
    let names: Vec<_> = journal
        .cells
        .iter()
        .map(|cell| cell.workload.as_str())
        .collect();
    assert_eq!(names, ["one", "two"]);
}

#[test]
fn a_journal_that_is_cut_anywhere_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    let mut writer = Writer::create(folder.path(), header()).unwrap();
    let first = fs::metadata(&path).unwrap().len() as usize;
    writer.write(&cell("Größe 4 KiB")).unwrap();
    drop(writer);
    let whole = fs::read(&path).unwrap();
    for end in 0..=whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        let mut writer = match end < first {
            // Nothing but the plan was lost.
            true => Writer::create(folder.path(), header()).unwrap(),
            false => Writer::resume(folder.path()).unwrap().0,
        };
        writer.write(&cell("next")).unwrap();
        let journal = Journal::read(folder.path());
        let journal = journal.unwrap_or_else(|error| panic!("cut at {end}: {error:#}"));
        // A line that lacks only its end is whole.
        let expected = 1 + usize::from(end + 1 >= whole.len());
        assert_eq!(journal.cells.len(), expected, "cut at {end}");
        assert_eq!(journal.cells.last().unwrap().workload, "next");
    }
    let text = String::from_utf8_lossy(&whole).replacen('\n', "\u{fffd}\n\n", 1);
    let in_the_middle: Vec<u8> = text.bytes().filter(|byte| *byte != 0xbf).collect();
    fs::write(&path, in_the_middle).unwrap();
    let error = format!("{:#}", Journal::read(folder.path()).unwrap_err());
    assert!(error.contains("line 1: this is not UTF-8"), "{error}");
    // A file of somebody else is not replaced.
    fs::write(&path, "mine").unwrap();
    let refused = Writer::create(folder.path(), header()).unwrap_err();
    assert!(refused.to_string().contains("exists"), "{refused}");
    assert_eq!(fs::read(&path).unwrap(), b"mine");
}

/// A disk that takes this many bytes; `None` where it cannot be mounted.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u32) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]);
        let mounted = mount.arg(folder.path()).status();
        if !mounted.is_ok_and(|status| status.success()) {
            println!("skipped: a full disk: mounting a tmpfs needs root");
            return None;
        }
        Some(Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = std::process::Command::new("umount");
        let _ = umount.arg(self.0.path()).status();
    }
}

#[test]
fn a_line_that_does_not_fit_leaves_nothing() {
    let Some(disk) = SmallDisk::new(8192) else {
        return;
    };
    let mut writer = Writer::create(disk.0.path(), header()).unwrap();
    let long = cell(&"x".repeat(10_000));
    let failed = format!("{:#}", writer.write(&long).unwrap_err());
    assert!(failed.contains("--resume continues"), "{failed}");
    // As for a disk that the failed run removes, so that there is space again.
    writer.write(&cell("short")).unwrap();
    let journal = Journal::read(disk.0.path()).unwrap();
    assert_eq!(journal.cells.len(), 1);
    assert!(!journal.truncated);
    drop(writer);
    let other = tempfile::tempdir_in(disk.0.path()).unwrap();
    let large = Header {
        plan: "#".repeat(10_000),
        ..header()
    };
    Writer::create(other.path(), large).unwrap_err();
    // The run can begin again, when there is space.
    Writer::create(other.path(), header()).unwrap();
}

#[test]
fn an_invalid_line_in_the_middle_is_an_error_with_its_number() {
    let first = serde_json::to_string(&Record::Plan(header())).unwrap();
    let error = |text: &str| format!("{:#}", Journal::parse(text).unwrap_err());
    assert!(error(&format!("{first}\nnonsense\n{first}\n")).contains("line 2"));
    assert!(error(&format!("{first}\n{first}\n")).contains("second plan"));
    assert!(error("").contains("line 1"));
    assert!(error(&first.replace("\"version\":1", "\"version\":9")).contains("version 9"));
    let cell = serde_json::to_string(&cell("load")).unwrap();
    let escape = format!("{first}\n{{\"what\":\"\\u001b[31mred\"}}\n");
    assert!(!error(&escape).contains('\x1b') && error(&escape).contains("line 2"));
    let impossible = cell.replace("\"took_s\":0.0", "\"took_s\":-1.0");
    assert!(error(&format!("{first}\n{impossible}\n")).contains("line 2: impossible"));
    let rates = "{\"what\":\"rates\",\"workload\":\"x\",\"rates\":[2,1],\"took_s\":1}";
    assert!(error(&format!("{first}\n{rates}\n")).contains("line 2: impossible"));
    assert!(error(&first.replace("queues", "quues")).contains("queues"));
}

#[test]
fn cases_that_could_not_run_are_removed_from_the_plan() {
    let mut header = header();
    header.left_out.insert("queues=1".into(), "why".into());
    let journal = Journal::parse(&serde_json::to_string(&Record::Plan(header)).unwrap()).unwrap();
    assert_eq!(journal.plan.cases.len(), 1);
    assert!(journal.plan.contrasts.is_empty());
}
