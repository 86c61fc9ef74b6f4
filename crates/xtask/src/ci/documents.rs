//! Rules for the documents: links lead somewhere, and the English stays plain.

use super::{files, none, read};
use crate::root;
use anyhow::Result;
use std::path::{Component, Path, PathBuf};

/// Every link to a file of this repository names a file that exists and, if it has an anchor, a heading in that file.
pub(super) fn links() -> Result<()> {
    let mut wrong = Vec::new();
    for file in files("md")? {
        for link in links_in(&read(&file)?) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            if path.contains("://") || path.starts_with("mailto:") {
                continue;
            }
            let target = match path {
                "" => file.clone(),
                _ => normalised(&file.with_file_name(path)),
            };
            if !root().join(&target).exists() {
                wrong.push(format!("{}: {path} does not exist", file.display()));
            } else if !anchor.is_empty()
                && target
                    .extension()
                    .is_some_and(|extension| extension == "md")
                && !anchors(&read(&target)?).any(|found| found == anchor)
            {
                wrong.push(format!("{}: {link} names no heading", file.display()));
            }
        }
    }
    none(wrong)
}

pub(crate) fn links_in(document: &str) -> impl Iterator<Item = &str> {
    let ends = document.split("](").skip(1);
    ends.filter_map(|rest| rest.split([')', ' ', '\n']).next())
}

/// The anchors that GitHub gives the headings: lower case, without punctuation, with dashes for spaces.
fn anchors(document: &str) -> impl Iterator<Item = String> {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    headings.map(|heading| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c => c.is_alphanumeric().then_some(c),
        });
        kept.collect()
    })
}

/// The path without `..`.
pub(crate) fn normalised(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = result.pop(),
            part => result.push(part),
        }
    }
    result
}

/// Phrases that a reader stumbles over, and what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("whoever", "the actor's name"),
    ("anew", "again"),
    ("besides", "also"),
    ("goes by tables", "is a mapped image"),
    ("go by tables", "are mapped images"),
    (
        "is the guest's to hear of",
        "is reported, stopped on or retried",
    ),
    ("be here", "acquired"),
    ("into force", "apply, or take effect"),
    ("in force", "effective"),
    ("has it not", "does not have it"),
    ("of one's own", "your own"),
    ("goes before", "overrides"),
    ("to and fro", "repeatedly"),
    ("so long", "while"),
    ("but by", "except by"),
    ("for want of", "for lack of"),
    ("is let go", "is released"),
    ("how things stand", "the current state"),
];

/// No document contains a banned phrase.
pub(super) fn plain_english() -> Result<()> {
    let mut wrong = Vec::new();
    for file in files("md")? {
        for (line, phrase, instead) in banned_in(&read(&file)?) {
            let file = file.display();
            wrong.push(format!(
                "{file}:{line}: '{phrase}' is not plain English; write {instead}"
            ));
        }
    }
    none(wrong)
}

/// Each banned phrase in the document, whole words only and also across line breaks, with the number of its first line.
fn banned_in(document: &str) -> Vec<(usize, &'static str, &'static str)> {
    // Phrases match between spaces; punctuation counts as a space.
    let mut text = String::from(" ");
    let mut lines = Vec::from([1]);
    for (number, line) in document.lines().enumerate() {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '\'');
        for word in words.filter(|word| !word.is_empty()) {
            let word = format!("{} ", word.to_lowercase());
            lines.extend(std::iter::repeat_n(number + 1, word.len()));
            text += &word;
        }
    }
    let mut found = Vec::new();
    for &(phrase, instead) in BANNED {
        let places = text.match_indices(phrase);
        let whole = places.filter(|(at, _)| {
            text[..*at].ends_with(' ') && text[at + phrase.len()..].starts_with(' ')
        });
        found.extend(whole.map(|(at, _)| (lines[at], phrase, instead)));
    }
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banned_phrase_is_found_with_its_line() {
        let document =
            "Fine.\nThe file is read Anew,\nand put into\nforce. Renewal and fanewood are fine.\n";
        let found: Vec<_> = banned_in(document)
            .into_iter()
            .map(|(line, phrase, _)| (line, phrase))
            .collect();
        assert_eq!(found, [(2, "anew"), (3, "into force")]);
        assert!(banned_in("The file is read again, and takes effect.").is_empty());
    }

    #[test]
    fn anchors_are_those_of_headings() {
        let document = "# One `[[disk]]`\ntext\n## What happens, when?\n";
        assert!(anchors(document).eq(["one-disk", "what-happens-when"]));
    }

    #[test]
    fn links_end_where_markdown_ends_them() {
        let document = "[a](b.md#c) and ![d](e.png \"title\")";
        assert!(links_in(document).eq(["b.md#c", "e.png"]));
    }
}
