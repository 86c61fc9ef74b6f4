//! Rules for the structure of the code: sizes of files and functions, and no import circles.

mod imports;
mod source;
mod tokens;

use super::{files, none, read};
use anyhow::{Context, Result};
use source::Source;
use std::collections::BTreeMap;

const FILE_LINES_MAX: usize = 700;
const FUNCTION_LINES_MAX: usize = 100;

pub(super) fn check() -> Result<()> {
    let mut sources = BTreeMap::new();
    let mut problems = Vec::new();
    for file in files("rs")? {
        let text = read(&file)?;
        let path = file.display().to_string();
        let source = Source::parse(&text).with_context(|| path.clone())?;
        problems.extend(too_long(&path, &text, &source));
        sources.insert(path, source);
    }
    problems.extend(imports::circles(&sources).into_iter().map(|circle| {
        format!(
            "{}: {} modules in import circles; move what both need to a module below them (one circle: {})",
            circle.folder, circle.modules, circle.example
        )
    }));
    none(problems)
}

/// The file and its functions, if they are too long.
fn too_long(path: &str, text: &str, source: &Source) -> Vec<String> {
    let file = (path.to_owned(), text.lines().count(), FILE_LINES_MAX);
    let functions = source.functions.iter();
    let functions =
        functions.map(|(name, lines)| (format!("{path}:{name}"), *lines, FUNCTION_LINES_MAX));
    std::iter::once(file)
        .chain(functions)
        .filter(|(_, lines, limit)| lines > limit)
        .map(|(name, lines, limit)| format!("{name}: {lines} lines, limit {limit}; split it"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let source = Source::parse(text).expect("the source has tokens");
        too_long("a.rs", text, &source)
    }

    #[test]
    fn only_what_exceeds_its_limit_is_a_problem() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "1;\n".repeat(lines - 2));
        assert!(problems(&function(100)).is_empty());
        assert!(problems(&"\n".repeat(700)).is_empty());
        let text = function(102) + &"\n".repeat(599);
        assert_eq!(
            problems(&text),
            [
                "a.rs: 701 lines, limit 700; split it",
                "a.rs:f: 102 lines, limit 100; split it"
            ]
        );
    }
}
