//! Rules for the structure of the code: sizes of files and functions, and no import circles.
//!
//! [`EXCEPTIONS`] lists what exceeds a limit today. Its numbers may only fall: the check fails if a number is too low, and
//! also if it is higher than needed.

mod imports;
mod source;
mod tokens;

use super::{files, none, read};
use anyhow::{Context, Result};
use source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const FILE_LINES_MAX: usize = 700;
const FUNCTION_LINES_MAX: usize = 100;

const EXCEPTIONS: &str = "crates/xtask/src/ci/exceptions.txt";

/// A size that exceeds its limit.
struct Excess {
    size: usize,
    unit: &'static str,
    limit: usize,
    /// How to reduce it
    remedy: String,
}

/// By the name under which [`EXCEPTIONS`] lists it
type Excesses = BTreeMap<String, Excess>;

pub(super) fn check() -> Result<()> {
    let mut sources = BTreeMap::new();
    let mut excesses = Excesses::new();
    for file in files("rs")? {
        let text = read(&file)?;
        let path = file.display().to_string();
        let source = Source::parse(&text).with_context(|| path.clone())?;
        add_sizes(&path, &text, &source, &mut excesses);
        sources.insert(path, source);
    }
    for circle in imports::circles(&sources) {
        let excess = Excess {
            size: circle.modules,
            unit: "modules in import circles",
            limit: 0,
            remedy: format!(
                "move what both need to a module below them (one circle: {})",
                circle.example
            ),
        };
        excesses.insert(circle.folder, excess);
    }
    let recorded = exceptions(&read(Path::new(EXCEPTIONS))?)?;
    none(compare(&excesses, &recorded))
}

fn add_sizes(path: &str, text: &str, source: &Source, excesses: &mut Excesses) {
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        let excess = Excess {
            size: lines,
            unit: "lines",
            limit: FILE_LINES_MAX,
            remedy: "split the file".to_owned(),
        };
        excesses.insert(path.to_owned(), excess);
    }
    for (name, lines) in &source.functions {
        let listed = format!("{path}:{name}");
        let is_longest = excesses
            .get(&listed)
            .is_none_or(|other| other.size < *lines);
        if *lines > FUNCTION_LINES_MAX && is_longest {
            let excess = Excess {
                size: *lines,
                unit: "lines",
                limit: FUNCTION_LINES_MAX,
                remedy: "split the function".to_owned(),
            };
            excesses.insert(listed, excess);
        }
    }
}

/// Parses lines of `size name`; `#` starts a comment line.
fn exceptions(text: &str) -> Result<BTreeMap<String, usize>> {
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parsed = lines.map(|line| {
        let context = || format!("{EXCEPTIONS}: '{line}' is not 'size name'");
        let (size, name) = line.split_once(' ').with_context(context)?;
        Ok((name.to_owned(), size.parse().with_context(context)?))
    });
    parsed.collect()
}

fn compare(excesses: &Excesses, recorded: &BTreeMap<String, usize>) -> Vec<String> {
    let names: BTreeSet<&String> = excesses.keys().chain(recorded.keys()).collect();
    let messages = names.into_iter().filter_map(|name| {
        let Some(excess) = excesses.get(name) else {
            return Some(format!(
                "{name}: within its limit, or no longer there; remove its line from {EXCEPTIONS}"
            ));
        };
        let Excess {
            size,
            unit,
            limit,
            remedy,
        } = excess;
        match recorded.get(name) {
            None => Some(format!("{name}: {size} {unit}, limit {limit}; {remedy}")),
            Some(listed) if size > listed => Some(format!(
                "{name}: {size} {unit}, limit {limit}, exception {listed}; {remedy}"
            )),
            Some(listed) if size < listed => Some(format!(
                "{name}: {size} {unit}, exception {listed}; write '{size} {name}' into {EXCEPTIONS}"
            )),
            Some(_) => None,
        }
    });
    messages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(path: &str, text: &str) -> Excesses {
        let source = Source::parse(text).expect("the source has tokens");
        let mut excesses = Excesses::new();
        add_sizes(path, text, &source, &mut excesses);
        excesses
    }

    #[test]
    fn only_sizes_above_the_limit_are_an_excess() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "1;\n".repeat(lines - 2));
        assert!(sizes("a.rs", &function(100)).is_empty());
        assert!(sizes("a.rs", &"\n".repeat(700)).is_empty());
        let found = sizes(
            "a.rs",
            &(function(102) + &function(101) + &"\n".repeat(498)),
        );
        let found: Vec<_> = found
            .iter()
            .map(|(name, excess)| (name.as_str(), excess.size))
            .collect();
        assert_eq!(found, [("a.rs", 701), ("a.rs:f", 102)]);
    }

    #[test]
    fn an_exception_is_exact() {
        let found = sizes("a.rs", &"\n".repeat(720));
        let messages = |list: &str| compare(&found, &exceptions(list).expect("the list is valid"));
        assert!(messages("# why\n\n720 a.rs\n").is_empty());
        assert_eq!(messages(""), ["a.rs: 720 lines, limit 700; split the file"]);
        assert_eq!(
            messages("719 a.rs\n"),
            ["a.rs: 720 lines, limit 700, exception 719; split the file"]
        );
        assert_eq!(
            messages("721 a.rs\n"),
            ["a.rs: 720 lines, exception 721; write '720 a.rs' into \
              crates/xtask/src/ci/exceptions.txt"]
        );
        assert_eq!(
            messages("720 a.rs\n101 b.rs:f\n"),
            [
                "b.rs:f: within its limit, or no longer there; remove its line from \
              crates/xtask/src/ci/exceptions.txt"
            ]
        );
    }

    #[test]
    fn a_line_that_is_not_an_exception_is_an_error() {
        assert!(exceptions("a.rs 720").is_err());
        assert!(exceptions("720").is_err());
    }
}
