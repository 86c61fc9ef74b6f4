//! What several tests share.

use advisor::check::check;
use advisor::fix::{Fixed, Wanted, fix};
use advisor::input::{Input, Surroundings};
use advisor::read::read;
use advisor::rules::{Rules, Severity};
use advisor::text::Source;

/// A configuration that must be readable.
pub fn input(name: &str, text: &str) -> Input {
    read(Source::new(name, text), Surroundings::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// A configuration after all its fixes.
pub fn fixed(text: &str) -> Fixed {
    let rules = Rules::built_in().unwrap();
    // The file systems of the files in these tests are unknown.
    let also = ["cache-host-page".to_owned()];
    let wanted = Wanted {
        also: &also,
        ..Wanted::default()
    };
    fix(input("vm", text), &rules, None, wanted).unwrap()
}

/// The text after the fixes.
pub fn text(fixed: &Fixed) -> &str {
    &fixed.input.sources[0].text
}

/// The rules that apply to a configuration, without notes.
pub fn findings(text: &str) -> Vec<String> {
    let rules = Rules::built_in().unwrap();
    let mut input = input("vm", text);
    let found = check(&mut input, &rules, None, &[]).findings.into_iter();
    let bad = found.filter(|finding| finding.severity != Severity::Info);
    bad.map(|finding| finding.rule).collect()
}
