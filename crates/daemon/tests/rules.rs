//! Each rule of `ringdisk check` that names a comparison can have it: its recipe makes the comparison, on the storage of a
//! configuration to which the rule applies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use advisor::check::{Finding, check, check_host};
use advisor::facts::Facts;
use advisor::input::Surroundings;
use advisor::measured::{FORMAT, Measured};
use advisor::model::Table;
use advisor::read::read;
use advisor::rules::{Contrast, Rule, Rules, Scope};
use advisor::text::Source;
use lab::measured::{Comparison, comparisons};
use lab::plan::{Plan, changes};
use lab::recipes;
use serde_json::{Value, json};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../advisor/tests/corpus")
}

/// The findings of all configurations of the advisor's tests. The results are for rules that need some.
fn findings(rules: &Rules, measured: &Measured) -> Vec<Finding> {
    let manifest = fs::read_to_string(corpus().join("expected.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let mut found = Vec::new();
    for case in manifest["case"].as_array().unwrap() {
        let word = |key: &str| case.get(key).and_then(toml::Value::as_str);
        let facts = word("facts").map(|name| {
            let text = fs::read_to_string(corpus().join("facts").join(name)).unwrap();
            Facts::parse(name, &text).unwrap().0
        });
        let checked = match (word("file"), &facts) {
            (Some(file), _) => {
                let mut input = input(file);
                input.vms.iter_mut().for_each(|vm| measured.describe(vm));
                check(&mut input, rules, facts.as_ref(), &[])
            }
            (None, Some(facts)) => check_host(facts, Table::default(), rules, &[]),
            (None, None) => panic!("a case has neither a file nor facts"),
        };
        found.extend(checked.findings);
    }
    found
}

fn input(file: &str) -> advisor::input::Input {
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
    read(Source::new(file, text), surroundings).unwrap()
}

/// What the recipe measures under KVM on this storage.
///
/// # Errors
/// The recipe cannot use the storage.
fn supplied(
    contrast: &Contrast,
    storage: &str,
    device: Option<&str>,
) -> Result<Vec<Comparison>, String> {
    let recipe = &contrast.recipe;
    let text = recipes::text(recipe).unwrap_or_else(|| panic!("there is no recipe {recipe}"));
    let changes = contrast.changes(storage, device);
    let text = changes::set(text, &changes).unwrap();
    let plan = Plan::parse(Path::new("recipe.toml"), &text);
    Ok(comparisons(
        &plan.map_err(|e| format!("{recipe} with {changes:?}: {e}"))?,
        "kvm",
    ))
}

/// A result that a guest's speed is this share of the host's, or that another change gains as much.
fn result(comparison: &Comparison, gain: f64) -> Value {
    let mut result = json!(comparison);
    result["gain-percent"] = json!(gain);
    result["interval-percent"] = json!([gain - 1.0, gain + 1.0]);
    result["verdict"] = json!("gain");
    result
}

fn measured(results: &[Value]) -> Measured {
    let file = json!({ "format": FORMAT, "fingerprint": "here", "results": results });
    let mut measured = Measured::default();
    measured.add("results", &file.to_string(), "here").unwrap();
    measured
}

/// The findings of each rule; those of the `triage` rules with the results of their recipe.
fn findings_by_rule(rules: &Rules) -> BTreeMap<String, Vec<Finding>> {
    let mut by_rule: BTreeMap<String, Vec<Finding>> = BTreeMap::new();
    let triage = rules.get("triage-good").and_then(Rule::contrast).unwrap();
    let host = supplied(triage, "file", None).unwrap();
    let host: Vec<&Comparison> = host.iter().filter(|it| it.axis == "host").collect();
    for gain in [400.0, 100.0, 5.0] {
        let results: Vec<Value> = host
            .iter()
            .map(|comparison| result(comparison, gain))
            .collect();
        for finding in findings(rules, &measured(&results)) {
            by_rule
                .entry(finding.rule.clone())
                .or_default()
                .push(finding);
        }
    }
    by_rule
}

/// The first result that belongs to a finding of this rule, and the finding.
fn joined<'a>(
    rule: &Rule,
    contrast: &Contrast,
    findings: &'a [Finding],
) -> Option<(Value, &'a Finding)> {
    findings.iter().find_map(|finding| {
        let device = (rule.scope == Scope::Device).then_some(finding.disk.as_str());
        let storage = finding.subject.storage.first()?;
        let results = supplied(contrast, storage, device).ok()?;
        let mut results = results.iter().map(|comparison| result(comparison, 10.0));
        let found = results.find(|result| {
            !measured(std::slice::from_ref(result))
                .join(contrast, &finding.subject)
                .is_empty()
        })?;
        Some((found, finding))
    })
}

#[test]
fn recipes_supply_the_comparisons_that_rules_name() {
    let rules = Rules::built_in().unwrap();
    let found = findings_by_rule(&rules);
    let mut without = Vec::new();
    let mut count = 0;
    for rule in &rules.rules {
        let Some(contrast) = rule.contrast() else {
            continue;
        };
        count += 1;
        let device = (rule.scope == Scope::Device).then_some("NAME");
        let explained = supplied(contrast, rule.storage(), device);
        assert!(explained.is_ok(), "{}: {explained:?}", rule.id);
        let findings = found.get(&rule.id).map_or(&[][..], Vec::as_slice);
        if joined(rule, contrast, findings).is_none() {
            without.push(format!(
                "{}: {contrast} ({} findings)",
                rule.id,
                findings.len()
            ));
        }
    }
    assert!(
        without.is_empty(),
        "of {count} rules, not supplied:\n{}",
        without.join("\n")
    );
    assert!(count > 40, "{count}");
}

/// With one word of its context changed, a result belongs to no finding of the rule.
#[test]
fn every_word_of_the_context_is_compared() {
    let rules = Rules::built_in().unwrap();
    let found = findings_by_rule(&rules);
    for rule in &rules.rules {
        let Some(contrast) = rule.contrast() else {
            continue;
        };
        let findings = found.get(&rule.id).map_or(&[][..], Vec::as_slice);
        let Some((result, finding)) = joined(rule, contrast, findings) else {
            panic!("{} is not supplied", rule.id);
        };
        let joins = |result: &Value| {
            !measured(std::slice::from_ref(result))
                .join(contrast, &finding.subject)
                .is_empty()
        };
        assert!(joins(&result), "{}", rule.id);
        let mut places: Vec<String> = ["axis", "from", "to", "scope", "allocation", "accelerator"]
            .map(|key| format!("/{key}"))
            .into();
        // With the axis `backing`, the storage is in `from` and `to`.
        places.extend((contrast.axis != "backing").then(|| "/storage".to_owned()));
        places.extend(contrast.with.keys().map(|key| format!("/with/{key}")));
        places.extend((rule.scope == Scope::Device).then(|| "/place".to_owned()));
        let pattern = contrast.pattern.keys();
        places.extend(pattern.map(|key| format!("/pattern/{key}")));
        for place in places {
            let mut changed = result.clone();
            let word = changed
                .pointer_mut(&place)
                .unwrap_or_else(|| panic!("{}: {place}", rule.id));
            let other = match word.as_str() {
                Some("guest") if place == "/scope" => "host",
                Some("host") if place == "/scope" => "guest",
                Some("kvm") => "tcg",
                Some("full") => "thin",
                _ => "another",
            };
            *word = json!(other);
            assert!(!joins(&changed), "{}: with another {place}", rule.id);
        }
        for table in ["with", "pattern"] {
            let mut changed = result.clone();
            changed[table]["unusual"] = json!("1");
            assert!(
                !joins(&changed),
                "{}: with an unusual setting in {table}",
                rule.id
            );
        }
    }
}

/// Results that were shown for findings they do not belong to.
#[test]
fn results_of_other_circumstances_are_not_shown() {
    let rules = Rules::built_in().unwrap();
    let found = findings_by_rule(&rules);
    let joins = |rule: &str, comparisons: &[Comparison]| {
        let contrast = rules.get(rule).and_then(Rule::contrast).unwrap();
        let results: Vec<Value> = comparisons.iter().map(|it| result(it, 10.0)).collect();
        let measured = measured(&results);
        found[rule]
            .iter()
            .any(|finding| !measured.join(contrast, &finding.subject).is_empty())
    };
    let of = |recipe: &str, changes: &[&str]| {
        let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
        let text = changes::set(recipes::text(recipe).unwrap(), &changes).unwrap();
        comparisons(
            &Plan::parse(Path::new("recipe.toml"), &text).unwrap(),
            "kvm",
        )
    };
    let rbd = "config.backing=rbd:p/{guest}-{volume}";
    assert!(joins("rbd-cache", &of("ladder", &[rbd])));
    assert!(!joins("rbd-cache", &of("ladder", &[])), "a local file");
    assert!(joins("aio-native-blocks", &of("prefill", &[])));
    assert!(
        !joins("aio-native-blocks", &of("prefill", &["config.prefill=on"])),
        "full files"
    );
    assert!(joins(
        "aio-native-no-iothread",
        &of("aio", &["config.backing=/dev/vg0/a"])
    ));
    assert!(!joins(
        "aio-native-no-iothread",
        &of("aio", &["config.backing=/dev/vg0/a", "config.iothread=on"])
    ));
    assert!(joins("rbd-cache-hdd", &of("rbd-scaling", &[rbd])));
    assert!(
        !joins(
            "rbd-cache-hdd",
            &of("rbd-scaling", &[rbd, "fio.rw=randread"])
        ),
        "no sequential writes"
    );
    assert!(joins("no-iothread", &of("aio", &[])));
    assert!(
        !joins(
            "no-iothread",
            &of("aio", &["config.preload=/usr/lib/libtcmalloc.so.4"])
        ),
        "an unusual setting"
    );
}
