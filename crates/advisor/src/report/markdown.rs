//! Markdown, for tickets and reviews.

use std::fmt::Write;

use super::{Report, severity_word, summary, worth};
use crate::rules::Rules;

/// A table, and the advice of each rule once.
pub fn markdown(report: &Report, rules: &Rules, notes: bool) -> String {
    let mut text = String::from("| | rule | where | what | worth |\n|---|---|---|---|---|\n");
    let groups = report.groups(notes);
    for finding in groups.iter().flatten() {
        let Some(rule) = rules.get(&finding.rule) else {
            continue;
        };
        let at = finding.at.map_or(String::new(), |at| {
            format!(" <code>{}:{at}</code>", cell(&finding.file))
        });
        let _ = writeln!(
            text,
            "| {} | {} | {}{at} | {} | {} |",
            severity_word(finding.severity),
            rule.id,
            cell(&finding.place()),
            cell(&finding.text),
            cell(&worth(finding, rule)),
        );
    }
    text.push('\n');
    for group in &groups {
        if let Some(rule) = group.first().and_then(|first| rules.get(&first.rule)) {
            let _ = writeln!(text, "- **{}**: {}", rule.id, rule.advice);
        }
    }
    let _ = write!(text, "\n{}", summary(report, notes));
    text
}

/// Text in a cell of a table: nothing in it ends the cell, or is a mark or an element.
fn cell(text: &str) -> String {
    let mut cell = String::new();
    for c in text.chars() {
        match c {
            // A backslash before it may have one before itself.
            '|' => cell.push_str("&#124;"),
            '&' => cell.push_str("&amp;"),
            '<' => cell.push_str("&lt;"),
            '`' | '*' | '[' | '\\' => {
                let _ = write!(cell, "&#{};", u32::from(c));
            }
            '\n' => cell.push(' '),
            c => cell.push(c),
        }
    }
    cell
}
