//! Loads that show what a rule is about.

use std::collections::BTreeMap;
use std::path::Path;

use ::lab::plan::Plan;
use ::lab::plan::workload::{self, Workload};
use ::lab::recipes;
use advisor::rules::FREE_PATTERN;

/// The keys that each load names.
pub const LOAD_KEYS: [&str; 3] = ["rw", "bs", "iodepth"];
/// The loads that are tried first, as the values of [`LOAD_KEYS`].
pub const LOADS: [[&str; 3]; 8] = [
    ["randread", "4k", "1"],
    ["randread", "4k", "32"],
    ["randwrite", "4k", "1"],
    ["randwrite", "4k", "32"],
    ["read", "128k", "8"],
    ["write", "128k", "8"],
    ["randread", "16k", "32"],
    ["randread", "128k", "8"],
];

/// The key for libraries to preload.
pub const PRELOAD: &str = "preload";

/// A load from the values of [`LOAD_KEYS`].
pub fn load_of(values: &[&str; 3]) -> Workload {
    let mut load = Workload::default();
    for (key, value) in LOAD_KEYS.iter().zip(values) {
        let set = load.set(key, value);
        debug_assert_eq!(set, Ok(()));
    }
    load.named()
}

/// The keys of a load that a rule's pattern is about.
pub fn pattern_keys(load: &Workload) -> BTreeMap<String, String> {
    let plain = Workload {
        rw: load.rw,
        ..Workload::default()
    };
    workload::KEYS
        .into_iter()
        .map(|key| (key.to_owned(), load.get(key)))
        .filter(|(key, value)| {
            value != "-" && (FREE_PATTERN.contains(&key.as_str()) || *value != plain.get(key))
        })
        .collect()
}

/// The file of a library that a recipe preloads, as the value of a plan. Rules name libraries, as in `tcmalloc`.
///
/// # Errors
/// The recipe names none.
pub fn library(recipe: &str, name: &str) -> Result<String, String> {
    let plan = plan_of(recipe).into_iter();
    let mut settings = plan.flat_map(|plan| plan.cases).map(|case| case.settings);
    let found = settings.find(|settings| ::lab::measured::library(settings) == name);
    found
        .map(|settings| settings.value(PRELOAD))
        .ok_or_else(|| format!("the recipe '{recipe}' names no file of the library '{name}'"))
}

/// Loads that a rule may be about: usual ones, then those of its recipe.
pub fn candidates(recipe: &str) -> Vec<Workload> {
    let of_recipe = plan_of(recipe).map_or_else(Vec::new, |plan| plan.workloads);
    LOADS.iter().map(load_of).chain(of_recipe).collect()
}

fn plan_of(recipe: &str) -> Option<Plan> {
    Plan::parse(Path::new("recipe.toml"), recipes::text(recipe)?).ok()
}
