//! Runs the checks of `checks/`, which fuzzing runs for hours, for seconds: on the seeds in `fuzz/seeds`, on the recipes, on
//! variations of both, and on random text that resembles one of the formats.

use crate::checks;

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

fn seeds(target: &str) -> Vec<String> {
    let seeds =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds")).join(target);
    let files = fs::read_dir(seeds).unwrap().flatten();
    let text = |entry: fs::DirEntry| fs::read(entry.path()).unwrap();
    let texts: Vec<String> = files
        .map(|entry| String::from_utf8_lossy(&text(entry)).into_owned())
        .collect();
    assert!(texts.len() >= 3, "{target}");
    texts
}

fn plans() -> Vec<String> {
    let recipes = lab::recipes::RECIPES.map(|recipe| recipe.1.to_owned());
    seeds("lab_plan").into_iter().chain(recipes).collect()
}

/// A text with some characters changed, a part removed and another one inserted.
fn changed(texts: Vec<String>) -> impl Strategy<Value = String> {
    let place = || any::<prop::sample::Index>();
    let changes = prop::collection::vec((place(), any::<char>()), 0..4);
    let cut = prop::option::of((place(), 0..40_usize));
    let insert = prop::option::of((place(), "[-=\"'{}:,\\[\\]\n a-z0-9]{0,20}|-|e9|9999999999"));
    (prop::sample::select(texts), changes, cut, insert).prop_map(|(text, changes, cut, insert)| {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, c) in changes {
            if !chars.is_empty() {
                let at = at.index(chars.len());
                chars[at] = c;
            }
        }
        if let Some((at, length)) = cut {
            let at = at.index(chars.len() + 1);
            chars.drain(at..(at + length).min(chars.len()));
        }
        if let Some((at, text)) = insert {
            let at = at.index(chars.len() + 1);
            chars.splice(at..at, text.chars());
        }
        chars.into_iter().collect()
    })
}

#[test]
fn seeds_hold() {
    plans().iter().for_each(|text| checks::plan(text));
    seeds("lab_fio").iter().for_each(|text| checks::fio(text));
    for text in seeds("lab_import") {
        assert!(lab::import::parse(text.as_bytes()).is_ok(), "{text}");
        checks::import(&text);
    }
    for text in seeds("lab_journal") {
        assert!(lab::journal::Journal::parse(&text).is_ok(), "{text}");
        checks::journal(&text);
    }
    for text in plans() {
        lab::plan::Plan::parse("/nonexistent/plan.toml".as_ref(), &text).unwrap();
    }
}

proptest! {
    #[test]
    fn any_plan(text in changed(plans())) {
        checks::plan(&text);
    }

    #[test]
    fn any_text_is_a_plan_or_a_mistake(text in "([a-z]{1,12} ?= ?(\"[a-z0-9]{0,8}\"|[-0-9e.]{1,20}|true|\\[1, 2\\])\n|\\[\\[?(config|fio|case|workload|storage|ssh|claim|exclude)\\]\\]?\n|\\PC{0,3}){0,12}") {
        checks::plan(&text);
    }

    #[test]
    fn any_answer_of_fio(text in changed(seeds("lab_fio"))) {
        checks::fio(&text);
    }

    #[test]
    fn any_imported_file(text in changed(seeds("lab_import"))) {
        checks::import(&text);
    }

    #[test]
    fn any_journal(text in changed(seeds("lab_journal"))) {
        checks::journal(&text);
    }
}
