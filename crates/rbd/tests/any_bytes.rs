//! The check of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in `fuzz/seeds`, with these
//! changed, and with any text.

use crate::checks;

use proptest::prelude::*;

fn seeds() -> Vec<String> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/rbd_location");
    let seeds = std::fs::read_dir(directory).unwrap();
    let seeds: Vec<_> = seeds
        .map(|seed| std::fs::read_to_string(seed.unwrap().path()).unwrap())
        .collect();
    assert!(seeds.len() >= 4);
    seeds
}

#[test]
fn seeds_hold() {
    seeds().iter().for_each(|text| checks::location(text));
}

proptest! {
    #[test]
    fn any_text(text in ".{0,300}") {
        checks::location(&text);
    }

    #[test]
    fn a_seed_with_something_in_it(
        text in prop::sample::select(seeds()),
        at in any::<prop::sample::Index>(),
        more in "[-a-z0-9/@:=\\\\,\u{0}\u{1}\u{2}\n ]{0,12}",
    ) {
        let mut chars: Vec<char> = text.chars().collect();
        let at = at.index(chars.len() + 1);
        chars.splice(at..at, more.chars());
        checks::location(&chars.into_iter().collect::<String>());
    }
}
