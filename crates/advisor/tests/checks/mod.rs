//! Properties that hold for any input, shared by the tests and by fuzzing.

use advisor::check::{add_measured, check, check_host};
use advisor::convert::{Direction, convert};
use advisor::facts::Facts;
use advisor::fix::{Wanted, fix, patch};
use advisor::input::{Input, Kind, Surroundings};
use advisor::measured::Measured;
use advisor::model::Table;
use advisor::read::{files_named, read};
use advisor::report::{self, Report};
use advisor::rules::Rules;
use advisor::steps;
use advisor::text::Source;

/// A configuration is refused with a position, or read. Then every position is in the text, reports are complete, and a
/// fixed configuration can be read again and needs no further fix.
pub fn input(rules: &Rules, text: &str) {
    proxmox(text);
    let storages = Source::new(
        "storage.cfg",
        "lvmthin: local-lvm\n\tvgname pve\n\tthinpool data\nrbd: ceph\n\tpool vms\n",
    );
    let surroundings = Surroundings {
        storages: Some(storages),
        // Whatever files the text names have the text itself in them: so that it is asked of their parsers too.
        files: files_named(text)
            .into_iter()
            .map(|name| Source::new(name, text))
            .collect(),
        ..Surroundings::default()
    };
    let lines = text.lines().count() + 1;
    let mut input = match read(Source::new("input", text), surroundings) {
        Ok(input) => input,
        Err(error) => {
            assert!(error.at.line <= lines && error.at.column >= 1, "{error}");
            assert!(!error.problem.is_empty());
            return;
        }
    };
    for vm in &input.vms {
        for disk in &vm.disks {
            for (name, value) in disk.table.iter() {
                if let advisor::model::Origin::Given(span) = value.origin {
                    let source = &input.sources[usize::from(span.source)];
                    assert!(
                        source.text.get(span.range()).is_some(),
                        "{name} of {}: {span:?}",
                        disk.name
                    );
                }
            }
        }
    }
    let checked = check(&mut input, rules, None, &[]);
    for finding in &checked.findings {
        assert!(finding.at.is_some_and(|at| at.line >= 1), "{finding:?}");
    }
    let mut report = Report::default();
    report.add(&input, checked);
    let shown = report::text(&report, rules, true);
    assert!(
        shown.chars().all(|c| c == '\n' || !c.is_control()),
        "{shown:?}"
    );
    let _ = report::sarif(&report, rules, "0");
    let _ = report::markdown(&report, rules, true);
    let _ = report::json(&report, rules);
    let _ = steps::text(&steps::steps(vec![input.clone()], rules, None, &[]));
    // Fixing takes a check for every change.
    if text.len() < 4_000 {
        let fixed =
            fix(input.clone(), rules, None, Wanted::default()).unwrap_or_else(|e| panic!("{e}"));
        let again = fix(fixed.input.clone(), rules, None, Wanted::default())
            .unwrap_or_else(|e| panic!("{e}"));
        let _ = patch(&input, &fixed.input);
        assert_eq!(
            fixed.input.sources[0].text, again.input.sources[0].text,
            "{:?} then {:?}",
            fixed.done, again.done
        );
        outside_of_commands(&input, &fixed.input);
        let _ = convert(vec![input.clone()], Direction::ToRingdisk);
        let _ = convert(vec![input], Direction::ToQemu);
    }
}

/// A fix does not change other commands of a script, and neither adds nor removes disks.
fn outside_of_commands(before: &Input, after: &Input) {
    if before.kind != Kind::Qemu || before.sources.len() > 1 {
        return;
    }
    let (old, new) = (&before.sources[0].text, &after.sources[0].text);
    let start = before.vms.iter().map(|vm| vm.span.start).min();
    let end = before.vms.iter().map(|vm| vm.span.end).max();
    let (Some(start), Some(end)) = (start, end) else {
        return;
    };
    assert!(
        new.starts_with(&old[..start as usize]),
        "{old:?} became {new:?}"
    );
    assert!(
        new.ends_with(&old[end as usize..]),
        "{old:?} became {new:?}"
    );
    let files = |input: &Input| {
        let disks = input.vms.iter().flat_map(|vm| &vm.disks);
        let mut files: Vec<String> = disks.map(|disk| disk.file.clone()).collect();
        files.sort();
        files
    };
    assert_eq!(files(before), files(after), "{old:?} became {new:?}");
}

/// A facts file is refused, or works with all rules.
pub fn facts(rules: &Rules, text: &str) {
    if let Ok((facts, _)) = Facts::parse("facts", text) {
        let checked = check_host(&facts, Table::default(), rules, &[]);
        let xml = "<domain type='kvm'><devices><disk type='file'><source file='/a'/><target dev='vda' bus='virtio'/></disk></devices></domain>";
        let mut input = read(Source::new("x", xml), Surroundings::default()).unwrap();
        let mut report = Report::default();
        report.absorb(checked);
        let checked = check(&mut input, rules, Some(&facts), &[]);
        report.add(&input, checked);
        assert!(!report::text(&report, rules, true).contains('\u{1b}'));
    }
}

/// A results file is refused, or works with all findings.
pub fn measured(rules: &Rules, text: &str) {
    let mut measured = Measured::default();
    if measured.add("results", text, "fingerprint").is_ok() {
        let xml = "<domain type='kvm'><vcpu>4</vcpu><devices><disk type='file'><source file='/a'/><target dev='hda' bus='ide'/></disk></devices></domain>";
        let mut input = read(Source::new("x", xml), Surroundings::default()).unwrap();
        measured.describe(&mut input.vms[0]);
        let mut checked = check(&mut input, rules, None, &[]);
        add_measured(&mut checked.findings, &measured, rules);
        let mut report = Report::default();
        report.add(&input, checked);
        assert!(!report::text(&report, rules, true).contains('\u{1b}'));
    }
}

/// What `ringdisk proxmox` makes of a text can be undone.
fn proxmox(text: &str) {
    let request = advisor::served::Request {
        vm: "100",
        drives: &[],
        snippets: Some("local"),
        storages: None,
    };
    let _ = advisor::served::without_ringdisk(text);
    let _ = advisor::served::served(text, &request);
    let _ = advisor::served::backup(text, &request);
    if let Ok(changed) = advisor::served::enable(text, &request) {
        advisor::served::disable(&changed.text, &request).expect("what was enabled");
    }
}
