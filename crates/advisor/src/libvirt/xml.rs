//! Parsing of XML within limits.

use roxmltree::{Document, ParsingOptions};

use crate::input::Mistake;

/// The maximum number of elements and attributes. A domain with a thousand disks has about twenty thousand.
const NODES_MAX: u32 = 500_000;

/// The maximum depth, since the parser is recursive. A domain has about ten levels.
const DEPTH_MAX: usize = 200;

/// Parses XML within limits.
pub(super) fn parse(text: &str) -> Result<Document<'_>, Mistake> {
    if let Some(at) = too_deep(text) {
        return Err(Mistake::new(
            at,
            format!("elements are nested more than {DEPTH_MAX} levels deep"),
        ));
    }
    let options = ParsingOptions {
        allow_dtd: false,
        nodes_limit: NODES_MAX,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).map_err(|error| {
        let at = error.pos();
        let problem = match error {
            roxmltree::Error::DtdDetected => "a domain has no document type declaration".into(),
            // Its text ends with the position, which is reported separately.
            error => {
                let text = error.to_string();
                text.rsplit_once(" at ")
                    .map_or(text.clone(), |(what, _)| what.to_owned())
            }
        };
        Mistake::new(
            offset(text, at.row as usize, at.col as usize),
            format!("is not XML: {problem}"),
        )
    })
}

/// The position of the first element that is too deep. Comments, texts and values do not count.
fn too_deep(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(found) = text[at..].find('<') {
        let start = at + found;
        let rest = &text[start..];
        let skipped = [
            ("<!--", "-->"),
            ("<![CDATA[", "]]>"),
            ("<?", "?>"),
            ("<!", ">"),
            ("</", ">"),
        ];
        if let Some((open, close)) = skipped.iter().find(|(open, _)| rest.starts_with(open)) {
            if *open == "</" {
                depth = depth.saturating_sub(1);
            }
            let end = rest[open.len()..].find(close)?;
            at = start + open.len() + end + close.len();
            continue;
        }
        depth += 1;
        if depth > DEPTH_MAX {
            return Some(start);
        }
        let mut quote = None;
        let end = rest.bytes().position(|byte| match (quote, byte) {
            (Some(open), byte) => {
                quote = quote.filter(|_| byte != open);
                false
            }
            (None, b'"' | b'\'') => {
                quote = Some(byte);
                false
            }
            (None, byte) => byte == b'>',
        });
        // The parser refuses an element without an end.
        let end = start + end?;
        if text[..end].ends_with('/') {
            depth -= 1;
        }
        at = end + 1;
    }
    None
}

fn offset(text: &str, row: usize, column: usize) -> usize {
    let start: usize = text
        .split_inclusive('\n')
        .take(row.saturating_sub(1))
        .map(str::len)
        .sum();
    let line = &text[start..];
    let within = line.char_indices().nth(column.saturating_sub(1));
    start + within.map_or(0, |(at, _)| at)
}
