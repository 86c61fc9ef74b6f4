//! Configurations as in the documentation of libvirt, QEMU, Proxmox and OpenStack, each with its expected findings: good
//! ones have none, and every planted error is found.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use advisor::check::{check, check_host};
use advisor::facts::Facts;
use advisor::fix::{Wanted, fix};
use advisor::input::{Input, Surroundings};
use advisor::model::Table;
use advisor::read::read;
use advisor::report::{self, Report};
use advisor::rules::{Rules, Severity};
use advisor::steps;
use advisor::text::Source;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    case: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// Below `corpus/`; none for a host alone.
    file: Option<String>,
    /// Facts of a host, below `corpus/facts/`.
    facts: Option<String>,
    /// `rule` or `rule@disk`, in any order: all findings that are no notes.
    finds: Vec<String>,
    /// Notes that must be among those that there are.
    #[serde(default)]
    notes: Vec<String>,
    /// Notes that must not be among them.
    #[serde(default)]
    no_notes: Vec<String>,
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn cases() -> Vec<Case> {
    let text = fs::read_to_string(corpus().join("expected.toml")).unwrap();
    toml::from_str::<Manifest>(&text).unwrap().case
}

fn input(file: &str) -> Input {
    let text = fs::read_to_string(corpus().join(file)).unwrap();
    let storages = fs::read_to_string(corpus().join("proxmox/storage.cfg")).unwrap();
    let named = advisor::read::files_named(&text).into_iter().map(|name| {
        let text = fs::read_to_string(corpus().join("qemu").join(&name)).unwrap();
        Source::new(name, text)
    });
    let surroundings = Surroundings {
        storages: Some(Source::new("storage.cfg", storages)),
        files: named.collect(),
        ..Surroundings::default()
    };
    read(Source::new(file, text), surroundings).unwrap_or_else(|e| panic!("{e}"))
}

fn facts(name: &str) -> Facts {
    let text = fs::read_to_string(corpus().join("facts").join(name)).unwrap();
    let (facts, notes) = Facts::parse(name, &text).unwrap();
    assert_eq!(notes, Vec::<String>::new());
    facts
}

fn report(case: &Case, rules: &Rules) -> Report {
    let facts = case.facts.as_deref().map(facts);
    let mut report = Report::default();
    match &case.file {
        Some(file) => {
            let mut input = input(file);
            let checked = check(&mut input, rules, facts.as_ref(), &[]);
            report.add(&input, checked);
        }
        None => {
            let facts = facts.expect("a host or a file");
            report.absorb(check_host(&facts, Table::default(), rules, &[]));
        }
    }
    report
}

#[test]
fn findings_are_exactly_those_expected() {
    let rules = Rules::built_in().unwrap();
    let mut wrong = Vec::new();
    let cases = cases();
    for case in &cases {
        let report = report(case, &rules);
        let name = format!("{:?} with {:?}", case.file, case.facts);
        let name_of = |finding: &advisor::check::Finding| match finding.disk.as_str() {
            "" => finding.rule.clone(),
            disk => format!("{}@{disk}", finding.rule),
        };
        let bad = report
            .findings
            .iter()
            .filter(|finding| finding.severity != Severity::Info);
        let mut found: Vec<String> = bad.map(name_of).collect();
        let mut expected = case.finds.clone();
        found.sort();
        expected.sort();
        if found != expected {
            wrong.push(format!(
                "{name}:\n  expected {expected:?}\n  found    {found:?}"
            ));
        }
        let noted = |note: &String| {
            let mut findings = report.findings.iter();
            findings.any(|finding| finding.rule == *note && finding.severity == Severity::Info)
        };
        for note in case.notes.iter().filter(|note| !noted(note)) {
            wrong.push(format!("{name}: no note {note}"));
        }
        for note in case.no_notes.iter().filter(|note| noted(note)) {
            wrong.push(format!("{name}: a note {note}"));
        }
        for finding in report.findings.iter().filter(|_| case.file.is_some()) {
            assert!(finding.at.is_some(), "{name}: {}", finding.rule);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let files: BTreeSet<_> = cases.iter().filter_map(|case| case.file.as_ref()).collect();
    assert!(files.len() >= 60, "{}", files.len());
    for directory in ["libvirt", "qemu", "proxmox", "ringdisk"] {
        for entry in fs::read_dir(corpus().join(directory)).unwrap() {
            let name = format!(
                "{directory}/{}",
                entry.unwrap().file_name().to_string_lossy()
            );
            let aside = name.ends_with(".cfg") || name.ends_with(".args");
            assert!(
                aside || files.contains(&name),
                "{name} is not in expected.toml"
            );
        }
    }
}

/// Every rule applies to some configuration of the corpus.
#[test]
fn every_rule_applies_somewhere() {
    let rules = Rules::built_in().unwrap();
    let mut found = BTreeSet::new();
    for case in cases() {
        found.extend(
            report(&case, &rules)
                .findings
                .into_iter()
                .map(|finding| finding.rule),
        );
    }
    let never: Vec<_> = rules
        .rules
        .iter()
        .map(|rule| &rule.id)
        .filter(|id| !found.contains(*id))
        .collect();
    // These need results of the lab, or several inputs.
    let elsewhere = [
        "memory-overcommitted",
        "triage-misconfigured",
        "triage-tuning",
        "triage-good",
    ];
    let never: Vec<_> = never
        .into_iter()
        .filter(|id| !elsewhere.contains(&id.as_str()))
        .collect();
    assert!(never.is_empty(), "{never:?}");
}

/// After `--fix`, no fixable finding is left, and a second `--fix` changes nothing.
#[test]
fn fix_is_idempotent() {
    let rules = Rules::built_in().unwrap();
    let mut fixed_some = 0;
    for case in cases() {
        let Some(file) = &case.file else {
            continue;
        };
        let facts = case.facts.as_deref().map(facts);
        let before = input(file);
        let fixed = fix(before.clone(), &rules, facts.as_ref(), Wanted::default()).unwrap();
        fixed_some += fixed.done.len();
        let again = fix(
            fixed.input.clone(),
            &rules,
            facts.as_ref(),
            Wanted::default(),
        )
        .unwrap();
        let text = |input: &Input| {
            input
                .sources
                .iter()
                .map(|source| source.text.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(text(&again.input), text(&fixed.input), "{file}");
        assert!(again.done.is_empty(), "{file}: {:?}", again.done);
        let mut input = fixed.input.clone();
        let checked = check(&mut input, &rules, facts.as_ref(), &[]);
        for finding in checked
            .findings
            .iter()
            .filter(|finding| finding.severity != Severity::Info)
        {
            let rule = rules.get(&finding.rule).unwrap();
            let told = fixed.left.iter().any(|left| left.rule == rule.id);
            assert!(
                rule.fix.is_empty() || rule.lowers_durability || told,
                "{file}: {} is still there:\n{}",
                rule.id,
                text(&input)[0]
            );
        }
        // Fixes remove nothing, and never lower durability.
        for (a, b) in before.vms.iter().zip(&fixed.input.vms) {
            assert_eq!(a.disks.len(), b.disks.len(), "{file}");
            for (a, b) in a.disks.iter().zip(&b.disks) {
                assert_eq!(a.file, b.file, "{file}");
                let safety = |disk: &advisor::model::Disk| match disk.table.word("disk.cache") {
                    Some("unsafe") => 0,
                    Some("none" | "writeback") => 1,
                    _ => 2,
                };
                assert!(
                    safety(b) >= safety(a),
                    "{file}: {:?} became {:?}",
                    a.table.word("disk.cache"),
                    b.table.word("disk.cache")
                );
            }
        }
    }
    assert!(fixed_some > 30, "{fixed_some}");
}

#[test]
fn steps_of_a_tuning_are_compared() {
    let rules = Rules::built_in().unwrap();
    let steps = steps::steps(vec![input("qemu/ladder.sh")], &rules, None, &[]);
    let confounded: Vec<bool> = steps.iter().map(|step| step.confounded).collect();
    assert_eq!(
        confounded,
        [false, false, false, false, true, true],
        "{}",
        steps::text(&steps)
    );
    let changed = |step: usize| {
        let changes = steps[step]
            .changes
            .iter()
            .map(|change| format!("{} {}>{}", change.property, change.from, change.to));
        changes.collect::<Vec<_>>()
    };
    assert_eq!(changed(1), ["disk.bus ide>virtio-blk"]);
    assert_eq!(changed(2), ["disk.threads 0>1"]);
    assert_eq!(changed(3), ["disk.cache writeback>none"]);
    assert_eq!(changed(4), ["vm.malloc glibc>tcmalloc", "disk.threads 1>0"]);
    assert_eq!(changed(5), ["disk.aio none>native", "disk.threads 0>1"]);
    assert_eq!(steps[5].inert.len(), 1, "LD_LIBRARY_PATH was not exported");
    let open = |step: usize, rule: &str| steps[step].findings.iter().any(|id| id == rule);
    for (step, rules) in [
        (0, "emulated-bus"),
        (1, "no-iothread"),
        (2, "rbd-cache"),
        (3, "rbd-malloc"),
        (4, "no-iothread"),
    ] {
        assert!(open(step, rules), "step {}: {rules}", step + 1);
        assert!(
            rules == "no-iothread" || !open(step + 1, rules),
            "step {}: {rules}",
            step + 2
        );
    }
}

#[test]
fn thousand_vms_in_one_run() {
    let rules = Rules::built_in().unwrap();
    let files: Vec<String> = cases().into_iter().filter_map(|case| case.file).collect();
    let texts: Vec<(String, String)> = files
        .iter()
        .map(|file| {
            (
                file.clone(),
                fs::read_to_string(corpus().join(file)).unwrap(),
            )
        })
        .collect();
    let started = Instant::now();
    let mut report = Report::default();
    for (file, text) in texts.iter().cycle() {
        if report.vms >= 1000 {
            break;
        }
        let mut input = read(
            Source::new(file.clone(), text.clone()),
            Surroundings::default(),
        )
        .unwrap();
        let checked = check(&mut input, &rules, None, &[]);
        report.add(&input, checked);
    }
    let text = report::text(&report, &rules, true);
    println!(
        "{} machines in {:?}, {} bytes of report",
        report.vms,
        started.elapsed(),
        text.len()
    );
    assert!(report.vms >= 1000 && text.contains("VMs: "));
    assert!(
        text.lines().count() < 600,
        "machines with the same finding share its lines"
    );
}

/// The VMs of one text are fixed independently: each becomes what it would become alone.
#[test]
fn thousand_vms_are_fixed_in_one_text() {
    let rules = Rules::built_in().unwrap();
    // The file systems and QEMU's version are unknown.
    let also = ["cache-host-page", "no-iothread"].map(str::to_owned);
    let wanted = Wanted {
        also: &also,
        ..Wanted::default()
    };
    let fixed = |input: Input| fix(input, &rules, None, wanted).unwrap();
    for (file, separator) in [
        ("libvirt/virt-install-default.xml", "\n"),
        ("libvirt/iothreads-unassigned.xml", "\n"),
        ("qemu/if-virtio.sh", "\n# the next one\n"),
    ] {
        let one = input(file);
        let alone = fixed(one.clone());
        assert!(!alone.done.is_empty(), "{file}");
        let many = |text: &str| {
            let all = vec![text.trim_end(); 1000].join(separator);
            if file.starts_with("libvirt") {
                format!("<domains>{all}</domains>")
            } else {
                all
            }
        };
        let started = Instant::now();
        let text = many(&one.sources[0].text);
        let together = read(Source::new("many", text), Surroundings::default()).unwrap();
        let together = fixed(together);
        println!("{file}, 1000 times: {:?}", started.elapsed());
        let expected = many(&alone.input.sources[0].text);
        assert!(together.input.sources[0].text == expected, "{file}");
        assert_eq!(together.done.len(), 1000 * alone.done.len(), "{file}");
    }
}

#[test]
fn every_report_format_is_complete() {
    let rules = Rules::built_in().unwrap();
    let mut all = Report::default();
    for file in [
        "libvirt/virt-install-default.xml",
        "qemu/quotes.sh",
        "proxmox/not-single.conf",
    ] {
        let mut input = input(file);
        let checked = check(&mut input, &rules, None, &[]);
        all.add(&input, checked);
    }
    let json = report::json(&all, &rules);
    assert_eq!(json["clean"], false);
    assert_eq!(
        json["findings"].as_array().unwrap().len(),
        all.findings.len()
    );
    let first = &json["findings"][0];
    assert!(
        first["because"]
            .as_array()
            .unwrap()
            .iter()
            .all(|why| why["from"].is_string())
    );
    let sarif = report::sarif(&all, &rules, "0");
    assert_eq!(sarif["version"], "2.1.0");
    let results = sarif["runs"][0]["results"].as_array().unwrap();
    assert_eq!(results.len(), all.findings.len());
    let descriptors = sarif["runs"][0]["tool"]["driver"]["rules"]
        .as_array()
        .unwrap();
    for result in results {
        let index = result["ruleIndex"].as_u64().unwrap() as usize;
        assert_eq!(descriptors[index]["id"], result["ruleId"]);
        assert!(
            result["locations"][0]["physicalLocation"]["region"]["startLine"]
                .as_u64()
                .unwrap()
                >= 1
        );
    }
    let markdown = report::markdown(&all, &rules, false);
    assert!(
        markdown.contains("| MEDIUM | iothread-ignored |"),
        "{markdown}"
    );
    for rule in &rules.rules {
        let text = report::explain(rule, &rules);
        assert!(
            text.contains("Evidence") && text.contains("Advice"),
            "{text}"
        );
    }
}

#[test]
fn comments_suppress_findings() {
    let rules = Rules::built_in().unwrap();
    let mut with = input("libvirt/ignored.xml");
    assert_eq!(check(&mut with, &rules, None, &[]).ignored, 1);
    let text = with.sources[0]
        .text
        .replace("because thirty of these share four cores", "");
    let mut without = read(Source::new("x", text), Surroundings::default()).unwrap();
    assert_eq!(check(&mut without, &rules, None, &[]).ignored, 1);
    assert!(
        without
            .notes
            .iter()
            .any(|note| note.text.contains("give a reason"))
    );
}

/// docs/check.md maps recommendations to rules, all of which exist.
#[test]
fn documentation_names_existing_rules() {
    let rules = Rules::built_in().unwrap();
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check.md"))
            .unwrap();
    let rows: Vec<&str> = [
        "| document | recommendation | rules |",
        "| subject | what `check` inspects | rules |",
    ]
    .into_iter()
    .flat_map(|head| {
        let (_, table) = text.split_once(head).unwrap();
        let rows = table.lines().skip(2);
        rows.take_while(|line| line.starts_with('|'))
    })
    .collect();
    assert!(rows.len() > 40, "{}", rows.len());
    for row in rows {
        let names = row.rsplit('|').nth(1).unwrap();
        let names: Vec<&str> = names.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{row}");
        for name in names {
            assert!(rules.get(name).is_some(), "{row}: there is no rule {name}");
        }
    }
}
