//! Values of a plan's TOML, with their positions.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::units::time;
use super::words::not_one_of;

/// An error at a position in the text.
pub struct Mistake {
    pub at: usize,
    pub problem: String,
}

impl Mistake {
    pub fn new(span: Range<usize>, problem: impl Into<String>) -> Self {
        Self {
            at: span.start,
            problem: problem.into(),
        }
    }
}

pub type Parsed<T> = Result<T, Mistake>;

/// A key with its values: one, or a list.
pub struct Entry<'a> {
    pub key: &'a str,
    pub span: Range<usize>,
    pub values: Vec<(String, Range<usize>)>,
}

pub fn table<'a>(root: &'a DeTable, name: &str) -> Parsed<Option<&'a DeTable<'a>>> {
    match root.iter().find(|(key, _)| key.get_ref() == name) {
        None => Ok(None),
        Some((_, value)) => match value.get_ref() {
            DeValue::Table(table) => Ok(Some(table)),
            _ => Err(Mistake::new(
                value.span(),
                format!("{name} is a table: [{name}]"),
            )),
        },
    }
}

pub fn tables<'a>(root: &'a DeTable, name: &str) -> Parsed<Vec<(Vec<Entry<'a>>, Range<usize>)>> {
    let Some((key, value)) = root.iter().find(|(key, _)| key.get_ref() == name) else {
        return Ok(Vec::new());
    };
    let wrong = || {
        Mistake::new(
            key.span(),
            format!("{name} is a list of tables: [[{name}]]"),
        )
    };
    let DeValue::Array(list) = value.get_ref() else {
        return Err(wrong());
    };
    let each = |item: &'a Spanned<DeValue<'a>>| match item.get_ref() {
        DeValue::Table(table) => Ok((entries(table)?, item.span())),
        _ => Err(wrong()),
    };
    list.iter().map(each).collect()
}

pub fn entries<'a>(table: &'a DeTable<'a>) -> Parsed<Vec<Entry<'a>>> {
    let mut entries: Vec<Entry> = table
        .iter()
        .map(|(key, value)| {
            let name = key.get_ref().as_ref();
            Ok(Entry {
                key: name,
                span: key.span(),
                values: values(name, value)?,
            })
        })
        .collect::<Parsed<_>>()?;
    // In the order of the text, which is the order of the combinations.
    entries.sort_by_key(|entry| entry.span.start);
    Ok(entries)
}

pub fn pairs(entries: &[Entry], known: &[&str]) -> Parsed<Vec<(String, String)>> {
    let pair = |entry: &Entry| {
        if known.contains(&entry.key) {
            Ok((entry.key.to_owned(), single(entry)?))
        } else {
            Err(Mistake::new(
                entry.span.clone(),
                not_one_of(entry.key, known),
            ))
        }
    };
    entries.iter().map(pair).collect()
}

pub fn values(name: &str, value: &Spanned<DeValue>) -> Parsed<Vec<(String, Range<usize>)>> {
    match value.get_ref() {
        DeValue::Array(list) if list.is_empty() => Err(Mistake::new(
            value.span(),
            format!("{name}: the list is empty"),
        )),
        DeValue::Array(list) => list
            .iter()
            .map(|item| Ok((one(name, item)?, item.span())))
            .collect(),
        _ => Ok(vec![(one(name, value)?, value.span())]),
    }
}

pub fn one(name: &str, value: &Spanned<DeValue>) -> Parsed<String> {
    match value.get_ref() {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().replace('_', "")),
        DeValue::Float(number) => Ok(number.as_str().replace('_', "")),
        DeValue::Boolean(switch) => Ok(switch.to_string()),
        _ => Err(Mistake::new(
            value.span(),
            format!("{name} is not text, a number, or true or false"),
        )),
    }
}

pub fn single(entry: &Entry) -> Parsed<String> {
    match &entry.values[..] {
        [(value, _)] => Ok(value.clone()),
        _ => Err(Mistake::new(
            entry.span.clone(),
            format!("{} is one value, not a list", entry.key),
        )),
    }
}

/// A word that can be the name of a folder.
pub fn word(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match !text.is_empty()
        && text.len() <= 64
        && text.chars().all(plain)
        && !text.starts_with(['.', '-'])
    {
        true => Ok(text.into()),
        false => Err(format!(
            "'{text}' is not a word of letters, digits, '-', '_' and '.'"
        )),
    }
}

pub fn host(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-.:".contains(c);
    if !text.is_empty() && text.chars().all(plain) && !text.starts_with('-') {
        Ok(text.into())
    } else {
        Err(format!("'{text}' is not a host name"))
    }
}

pub fn line(text: String) -> Result<String, String> {
    match text.chars().count() <= 200
        && !text.chars().any(char::is_control)
        && !text.trim().is_empty()
    {
        true => Ok(text),
        false => Err("is not one line of up to 200 characters".into()),
    }
}

pub fn absolute(text: &str) -> Result<PathBuf, String> {
    if text.starts_with('/') {
        Ok(text.into())
    } else {
        Err(format!("'{text}' is not an absolute path"))
    }
}

pub fn between(text: &str, min_s: f64, max_s: f64) -> Result<Duration, String> {
    let found = time(text)?;
    if (min_s..=max_s).contains(&found.as_secs_f64()) {
        Ok(found)
    } else {
        Err(format!("'{text}' is not between {min_s} and {max_s} s"))
    }
}
