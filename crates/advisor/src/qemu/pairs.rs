//! Sets single pairs in the text of an option.

use super::options::{Opt, Pair, Syntax};
use crate::text::{Edit, Span};

/// Sets a pair of an option in the text that contains it.
pub fn set_in(source: &str, option: &Opt, prefix: &str, key: &str, value: &str) -> Vec<Edit> {
    let full = format!("{prefix}{key}");
    let json = |value: &str| match value {
        "on" => "true".to_owned(),
        "off" => "false".to_owned(),
        number if number.parse::<u64>().is_ok() => number.to_owned(),
        word => format!("\"{word}\""),
    };
    let known = option.get(&full);
    match (&option.syntax, known) {
        (Syntax::Pairs, Some(pair)) => vec![Edit::replace(pair.value_span, value)],
        (Syntax::Pairs, None) => {
            // After a trailing comma, another one would turn both into a comma of the value.
            let text = source.get(option.span.range()).unwrap_or_default();
            let commas = text.len() - text.trim_end_matches(',').len();
            let has_comma = option.pairs.is_empty() || commas % 2 == 1;
            let comma = if has_comma { "" } else { "," };
            vec![Edit::replace(
                option.span.after(),
                format!("{comma}{full}={value}"),
            )]
        }
        (Syntax::Json(quote), Some(pair)) => {
            // The backslash of a quote that is escaped for a shell is not part of the value.
            let before = source.get(..pair.value_span.start as usize);
            if before.is_some_and(|before| before.ends_with('\\')) {
                return Vec::new();
            }
            let text = escaped(&json(value), *quote);
            vec![Edit::replace(pair.value_span, text)]
        }
        (Syntax::Json(quote), None) => {
            // Insert into the object of the key, before its first value that is not itself an object. Create the object if
            // it is missing, and fill it if it is empty.
            let inside = |prefix: &str| {
                let own = option.pairs.iter().filter(|pair| {
                    let key = pair.key.strip_prefix(prefix);
                    key.is_some_and(|key| !key.contains('.'))
                });
                own.min_by_key(|pair| pair.value_span.start)
            };
            let starts = |prefix: &str| {
                let mut pairs = option.pairs.iter();
                pairs.any(|pair| pair.key.starts_with(prefix))
            };
            let (prefix, key, body) = match key.split_once('.') {
                Some((outer, inner)) => {
                    let object = format!("{{\"{inner}\":{}}}", json(value));
                    let whole = format!("{prefix}{outer}");
                    if let Some(pair) = option.get(&whole) {
                        return match pair.value.as_str() {
                            "{}" => vec![Edit::replace(pair.value_span, escaped(&object, *quote))],
                            _ => Vec::new(),
                        };
                    }
                    match format!("{whole}.") {
                        there if starts(&there) => (there, inner, json(value)),
                        _ => (prefix.to_owned(), outer, object),
                    }
                }
                // It already exists as a list or an object.
                None if starts(&format!("{full}.")) => return Vec::new(),
                None => (prefix.to_owned(), key, json(value)),
            };
            match inside(&prefix).and_then(|pair| key_start(source, option, pair)) {
                Some(at) => vec![Edit::replace(
                    at,
                    escaped(&format!("\"{key}\":{body},"), *quote),
                )],
                None => Vec::new(),
            }
        }
        (Syntax::Patchwork, _) => Vec::new(),
        (Syntax::Section, Some(pair)) => {
            vec![Edit::replace(pair.value_span, format!("\"{value}\""))]
        }
        (Syntax::Section, None) => vec![Edit::replace(
            option.span.after(),
            format!("\n  {full} = \"{value}\""),
        )],
    }
}

/// Escapes JSON for the shell's quoting around it.
fn escaped(text: &str, quote: Option<char>) -> String {
    match quote {
        Some('"') => text.replace('"', "\\\""),
        Some(_) => text.to_owned(),
        None => text
            .replace('"', "\\\"")
            .replace('{', "\\{")
            .replace('}', "\\}"),
    }
}

/// The position before the key of a JSON value. Between key and value, the text has quotes (perhaps escaped for a shell), a
/// colon and white space.
pub fn key_start(source: &str, option: &Opt, pair: &Pair) -> Option<Span> {
    let key = pair.key.rsplit('.').next()?;
    let before = source.get(option.span.start as usize..pair.value_span.start as usize)?;
    let before = before
        .trim_end()
        .strip_suffix(':')?
        .trim_end()
        .strip_suffix('"')?;
    let before = before
        .strip_suffix('\\')
        .unwrap_or(before)
        .strip_suffix(key)?
        .strip_suffix('"')?;
    let before = before.strip_suffix('\\').unwrap_or(before);
    let start = option.span.start + u32::try_from(before.len()).ok()?;
    Some(Span {
        start,
        end: start,
        ..pair.value_span
    })
}
