//! Where in a plan's text an error about a whole configuration or load is: at the key without which it would be another
//! error, or none.

use std::ops::Range;

use toml::de::DeTable;

use super::settings::{self, Settings};
use super::values::{Entry, entries, single, table, tables};
use super::workload::{self, Workload};
use super::{Case, Plan, guests};

/// The place of the setting to blame for `problem`, which `check` finds in a case's settings.
pub fn setting(
    root: &DeTable,
    plan: &Plan,
    case: &Case,
    problem: &str,
    check: impl Fn(&Settings) -> Result<(), String>,
) -> Option<Range<usize>> {
    let keys = settings_to_blame(plan, case, problem, check);
    place_of_setting(root, case, first_named(problem, &keys)?)
}

/// The place of the setting, or the key of a load, to blame for `problem`, which `check` finds in a case with loads.
pub fn setting_or_load(
    root: &DeTable,
    plan: &Plan,
    case: &Case,
    problem: &str,
    check: impl Fn(&Settings, &[Workload]) -> Result<(), String>,
) -> Option<Range<usize>> {
    let is_it = |found: Result<(), String>| found.err().is_some_and(|found| found == problem);
    let mut keys = settings_to_blame(plan, case, problem, |settings| {
        check(settings, &plan.workloads)
    });
    let load = plan
        .workloads
        .iter()
        .find(|load| is_it(check(&case.settings, std::slice::from_ref(load))));
    if let Some(load) = load {
        let of_load = workload::KEYS.into_iter().chain(["job"]).filter(|key| {
            let other = with_default(load, key);
            other.is_some_and(|other| !is_it(check(&case.settings, &[other])))
        });
        keys.extend(of_load);
    }
    let key = first_named(problem, &keys)?;
    place_of_setting(root, case, key).or_else(|| place_of_load(root, load?, key))
}

/// The place of a case's setting: in its `[[case]]`, or in `[config]`.
pub fn place_of_setting(root: &DeTable, case: &Case, key: &str) -> Option<Range<usize>> {
    let own = case_tables(root, &case.base)
        .into_iter()
        .find_map(|(own, _)| place(&own, key, &case.settings.value(key)));
    own.or_else(|| place_in(root, "config", key, &case.settings.value(key)))
}

/// The place of a load's key: in a `[[workload]]`, or in `[fio]`.
pub fn place_of_load(root: &DeTable, load: &Workload, key: &str) -> Option<Range<usize>> {
    let value = match key {
        "job" => load.name.clone(),
        _ => load.get(key),
    };
    let own = tables(root, "workload")
        .ok()?
        .into_iter()
        .find_map(|(own, _)| {
            let has_value = |entry: &Entry| entry.values.iter().any(|(text, _)| *text == value);
            let is_meant = own.iter().any(|entry| match entry.key {
                "name" => single(entry).is_ok_and(|name| load.name.starts_with(&name)),
                other => other == key && has_value(entry),
            });
            place(&own, key, &value).filter(|_| is_meant)
        });
    own.or_else(|| place_in(root, "fio", key, &value))
}

/// The `[[case]]` tables of this name, with their places.
pub fn case_tables<'a>(root: &'a DeTable, name: &str) -> Vec<(Vec<Entry<'a>>, Range<usize>)> {
    let all = tables(root, "case").unwrap_or_default();
    let is_it = |(index, (own, _)): &(usize, (Vec<Entry>, Range<usize>))| match own
        .iter()
        .find(|entry| entry.key == "name")
    {
        Some(entry) => single(entry).is_ok_and(|own| own == name),
        None => name == format!("case {}", index + 1),
    };
    let found = all.into_iter().enumerate().filter(is_it);
    found.map(|(_, its)| its).collect()
}

/// The settings of a case whose default value would not give this error.
fn settings_to_blame(
    plan: &Plan,
    case: &Case,
    problem: &str,
    check: impl Fn(&Settings) -> Result<(), String>,
) -> Vec<&'static str> {
    let plain = Settings {
        device: guests::default_device(plan.guest),
        ..Settings::default()
    };
    let is_cause = |key: &&str| {
        let mut other = case.settings.clone();
        case.settings.value(key) != plain.value(key)
            && other.set(key, &plain.value(key)).is_ok()
            && check(&other).err().as_deref() != Some(problem)
    };
    settings::KEYS.into_iter().filter(is_cause).collect()
}

/// The load with the default of a key, if it has another value.
fn with_default(load: &Workload, key: &str) -> Option<Workload> {
    let plain = Workload::default();
    let mut other = load.clone();
    match key {
        "job" => other.job = None,
        "bssplit" => other.bssplit = None,
        // Their defaults do not apply to the default load.
        "arrival" => other.arrival = plain.arrival,
        "rwmixread" => other.rwmixread = plain.rwmixread,
        "fsync" => other.fsync = plain.fsync,
        "burst" => other.burst = plain.burst,
        "refill" => other.refill = plain.refill,
        _ => other.set(key, &plain.get(key)).ok()?,
    }
    (other != *load).then_some(other)
}

/// The key that the message names first; if it names none, the first.
fn first_named<'a>(problem: &str, keys: &[&'a str]) -> Option<&'a str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let place = |key: &str| {
        let mut words = problem.match_indices(key).filter(|(at, _)| {
            !problem[..*at].ends_with(is_part) && !problem[at + key.len()..].starts_with(is_part)
        });
        words.next().map_or(usize::MAX, |(at, _)| at)
    };
    keys.iter().copied().min_by_key(|key| place(key))
}

fn place_in(root: &DeTable, name: &str, key: &str, value: &str) -> Option<Range<usize>> {
    let entries = entries(table(root, name).ok()??).ok()?;
    place(&entries, key, value)
}

/// The place of this value of a key, or that of the key.
fn place(entries: &[Entry], key: &str, value: &str) -> Option<Range<usize>> {
    let entry = entries.iter().find(|entry| entry.key == key)?;
    let of_value = entry.values.iter().find(|(text, _)| text == value);
    Some(of_value.map_or_else(|| entry.span.clone(), |(_, span)| span.clone()))
}
