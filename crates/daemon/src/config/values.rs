//! Values of the configuration file, with their places in it.

use std::fmt::Display;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What is wrong, and where in the text.
#[derive(Debug)]
pub struct Mistake {
    /// In bytes from the start.
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

/// One `[[table]]`.
#[derive(Clone, Copy)]
pub struct Table<'a>(&'a Spanned<DeValue<'a>>, &'a DeTable<'a>);

impl<'a> Table<'a> {
    pub fn entries(&self) -> impl Iterator<Item = Entry<'a>> + use<'a> {
        entries(self.1)
    }

    /// Where it starts.
    pub fn span(&self) -> Range<usize> {
        self.0.span()
    }

    /// Where one of these keys is, or where the table starts.
    pub fn span_of(&self, keys: &[&str]) -> Range<usize> {
        let found = self.entries().find(|entry| keys.contains(&entry.key));
        found.map_or(self.span(), |entry| entry.key_span)
    }
}

/// The entries of a table.
pub fn entries<'a>(table: &'a DeTable<'a>) -> impl Iterator<Item = Entry<'a>> + use<'a> {
    table.iter().map(|(key, value)| Entry {
        key: key.get_ref(),
        key_span: key.span(),
        value,
    })
}

/// A key with its value.
pub struct Entry<'a> {
    pub key: &'a str,
    pub key_span: Range<usize>,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Entry<'a> {
    /// A problem with the value.
    pub fn mistake(&self, problem: impl Display) -> Mistake {
        Mistake::new(self.value.span(), format!("{}: {problem}", self.key))
    }

    /// A problem with the key.
    pub fn unknown(&self, known: &str) -> Mistake {
        let problem = format!("there is no key '{}'; there are {known}", self.key);
        Mistake::new(self.key_span.clone(), problem)
    }

    /// The value as it would be written on the command line.
    ///
    /// # Errors
    /// It is of a kind that cannot be written there.
    pub fn text(&self) -> Result<String, Mistake> {
        text(self.key, self.value)
    }

    /// The value, parsed.
    ///
    /// # Errors
    /// It cannot be parsed.
    pub fn parsed<T: FromStr<Err: Display>>(&self) -> Result<T, Mistake> {
        self.text()?.parse().map_err(|e| self.mistake(e))
    }

    /// Directories: one, or a list of them.
    ///
    /// # Errors
    /// It is something else.
    pub fn directories(&self) -> Result<Vec<PathBuf>, Mistake> {
        let path = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
            DeValue::String(text) if !text.is_empty() => Ok(PathBuf::from(text.as_ref())),
            _ => {
                let problem = format!("{} is a directory, a list of them, or \"none\"", self.key);
                Err(Mistake::new(value.span(), problem))
            }
        };
        match self.value.get_ref() {
            DeValue::Array(array) => array.iter().map(path).collect(),
            _ => Ok(vec![path(self.value)?]),
        }
    }

    /// A list of tables.
    ///
    /// # Errors
    /// It is something else.
    pub fn tables(&self) -> Result<Vec<Table<'a>>, Mistake> {
        let wrong = || {
            let problem = format!("{0} is written [[{0}]], once for each", self.key);
            Mistake::new(self.value.span(), problem)
        };
        let DeValue::Array(array) = self.value.get_ref() else {
            return Err(wrong());
        };
        let table = |value: &'a Spanned<DeValue<'a>>| match value.get_ref() {
            DeValue::Table(table) => Ok(Table(value, table)),
            _ => Err(wrong()),
        };
        array.iter().map(table).collect()
    }

    /// The elements of a list; none if it is no list.
    pub fn elements(&self) -> Option<Vec<Entry<'a>>> {
        let DeValue::Array(array) = self.value.get_ref() else {
            return None;
        };
        let element = |value| Entry {
            key: self.key,
            key_span: self.key_span.clone(),
            value,
        };
        Some(array.iter().map(element).collect())
    }
}

fn text(key: &str, value: &Spanned<DeValue<'_>>) -> Result<String, Mistake> {
    let mistake = |problem: &str| Mistake::new(value.span(), format!("{key}: {problem}"));
    Ok(match value.get_ref() {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(n) if n.radix() == 10 => n.as_str().replace('_', ""),
        DeValue::Boolean(true) => "on".into(),
        DeValue::Boolean(false) => "off".into(),
        DeValue::Array(array) => {
            let element = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
                DeValue::Array(_) => {
                    let problem = format!("{key}: a list within a list has no meaning here");
                    Err(Mistake::new(value.span(), problem))
                }
                _ => text(key, value),
            };
            let each: Vec<_> = array.iter().map(element).collect::<Result<_, _>>()?;
            each.join(",")
        }
        _ => return Err(mistake("is not a text, a whole number, true or false")),
    })
}
