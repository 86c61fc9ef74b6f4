//! QEMU's options in all their syntaxes, converted to one form: dotted keys and values with their positions.

use serde_json::Value as Json;

use super::json;
use super::word::Word;
use crate::input::Mistake;
use crate::text::Span;
use crate::work;

/// The syntax of an option, which determines how it is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Syntax {
    /// `key=value,key=value`
    Pairs,
    /// `{"key": "value"}`, and the shell's quote around it
    Json(Option<char>),
    /// JSON with parts in different quotes, such as around a variable: it is read, but not changed
    Patchwork,
    /// A section of a `-readconfig` file
    Section,
}

/// One option, such as `-device`.
#[derive(Clone, Debug)]
pub struct Opt {
    /// `device`, `drive`, `blockdev`, …, without dashes
    pub group: String,
    /// Its pairs.
    pub pairs: Vec<Pair>,
    /// How it is written.
    pub syntax: Syntax,
    /// The value without quotes
    pub span: Span,
    /// The option and its value
    pub whole: Span,
    /// Whether a shell variable may contain more keys
    pub may_have_more: bool,
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Dotted in every syntax: `cache.direct`
    pub key: String,
    /// JSON flags are `on` and `off`
    pub value: String,
    /// Key and value, for `key=value`
    pub span: Span,
    /// The value, including the quotes of JSON
    pub value_span: Span,
    /// Whether the value contains a shell variable
    pub unknown: bool,
}

impl Opt {
    /// The last pair with this key, which is the effective one.
    pub fn get(&self, key: &str) -> Option<&Pair> {
        let mut pairs = self.pairs.iter().rev().inspect(|_| work::step());
        pairs.find(|pair| pair.key == key)
    }

    /// The same as text.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(|pair| pair.value.as_str())
    }

    /// Whether only a running shell knows a part of it.
    pub fn is_unknown(&self) -> bool {
        self.may_have_more || self.pairs.iter().any(|pair| pair.unknown)
    }

    /// Whether a pair of it stands in it, and not in a `-set`.
    pub fn writes(&self, pair: &Pair) -> bool {
        let Span { source, start, end } = self.whole;
        source == pair.span.source && start <= pair.span.start && pair.span.end <= end
    }

    /// Whether only a running shell knows the driver.
    pub fn has_unknown_driver(&self) -> bool {
        self.get("driver").is_none_or(|pair| pair.unknown)
    }

    /// The number that a key is.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.parse().ok()
    }
}

/// Reads the value of an option. `first` is the key that the first part may omit.
///
/// A variable in a value counts as a single value. It could contain a comma and another key, but nobody writes that.
///
/// # Errors
/// The JSON is invalid.
pub fn read(group: &str, word: &Word, whole: Span, first: &str) -> Result<Opt, Mistake> {
    let is_json = word.text.trim_start().starts_with('{');
    let mut opt = Opt {
        group: group.to_owned(),
        pairs: Vec::new(),
        syntax: Syntax::Pairs,
        span: word.inner(),
        whole,
        may_have_more: false,
    };
    if is_json {
        opt.syntax = if word.mixed {
            Syntax::Patchwork
        } else {
            Syntax::Json(word.quote)
        };
        match json_pairs(word) {
            Ok(pairs) => opt.pairs = pairs,
            Err(mistake) if word.unknown.is_empty() => return Err(mistake),
            Err(_) => opt.may_have_more = true,
        }
    } else {
        (opt.pairs, opt.may_have_more) = pairs(word, first);
    }
    Ok(opt)
}

/// An option whose value is a single name, including commas.
pub fn name(group: &str, word: &Word, whole: Span, key: &str) -> Opt {
    let span = word.inner();
    let pair = Pair {
        key: key.to_owned(),
        value: word.text.clone(),
        span,
        value_span: span,
        unknown: !word.unknown.is_empty(),
    };
    Opt {
        group: group.to_owned(),
        pairs: if word.text.is_empty() {
            Vec::new()
        } else {
            vec![pair]
        },
        syntax: Syntax::Pairs,
        span,
        whole,
        may_have_more: false,
    }
}

/// Splits at single commas; a doubled comma is part of a value. Also returns whether a variable may contain more pairs.
fn pairs(word: &Word, first: &str) -> (Vec<Pair>, bool) {
    let text = &word.text;
    let bytes = text.as_bytes();
    let mut pairs = Vec::new();
    let mut open = false;
    let mut start = 0;
    while start <= text.len() && !(start == text.len() && start > 0) {
        let mut end = start;
        while end < bytes.len() {
            match (bytes[end], bytes.get(end + 1)) {
                _ if !word.knows(end, end + 1) => end += 1,
                (b',', Some(b',')) => end += 2,
                (b',', _) => break,
                _ => end += 1,
            }
        }
        let part = &text[start..end];
        let (key, value, value_start) = match part.split_once('=') {
            // The value of `file=` may contain =, and so may a path without a key.
            Some((key, value)) if start > 0 || is_key(key) => (key, value, start + key.len() + 1),
            _ if start == 0 => (first, part, start),
            // As in `-drive file=a,snapshot`. The negation `nosnapshot` is obsolete.
            _ => (part, "on", end),
        };
        // A variable in place of a key may contain any number of pairs.
        let key_end = if value_start > start && value_start < end {
            value_start
        } else {
            end
        };
        open |= !word.knows(start, key_end);
        if !part.is_empty() {
            pairs.push(Pair {
                key: key.to_owned(),
                value: value.replace(",,", ","),
                span: word.span(start, end),
                value_span: word.span(value_start, end),
                unknown: !word.knows(start, end),
            });
        }
        start = end + 1;
    }
    (pairs, open)
}

fn is_key(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn json_pairs(word: &Word) -> Result<Vec<Pair>, Mistake> {
    let leaves = json::leaves(&word.text).map_err(|(at, problem)| {
        let place = word.span(at, at).start as usize;
        Mistake::new(place, format!("invalid JSON: {problem}"))
    })?;
    let pair = |leaf: json::Leaf| {
        let value = match leaf.value {
            Json::String(text) => text,
            Json::Bool(true) => "on".into(),
            Json::Bool(false) => "off".into(),
            other => other.to_string(),
        };
        let value_span = word.span(leaf.start, leaf.end);
        Pair {
            key: leaf.path,
            value,
            span: value_span,
            value_span,
            unknown: !word.knows(leaf.start, leaf.end),
        }
    };
    Ok(leaves.into_iter().map(pair).collect())
}

/// Reads a `-readconfig` file: sections `[group "id"]` with lines `key = "value"`.
pub fn sections(text: &str, source: u16) -> Vec<Opt> {
    let mut options: Vec<Opt> = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let at = start;
        start += line.len();
        let trimmed = line.trim();
        let indent = line.len() - line.trim_start().len();
        let span = Span::new(source, at + indent, at + indent + trimmed.len());
        if let Some(head) = trimmed
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            let (group, id) = head.split_once(' ').unwrap_or((head, ""));
            let id = id.trim().trim_matches('"');
            let mut option = Opt {
                group: group.to_owned(),
                pairs: Vec::new(),
                syntax: Syntax::Section,
                span,
                whole: span,
                may_have_more: false,
            };
            if !id.is_empty() {
                option.pairs.push(Pair {
                    key: "id".into(),
                    value: id.into(),
                    span,
                    value_span: span,
                    unknown: false,
                });
            }
            options.push(option);
        } else if let Some((key, value)) = trimmed.split_once('=')
            && !trimmed.starts_with('#')
            && let Some(option) = options.last_mut()
        {
            let value_start =
                span.start as usize + key.len() + 1 + (value.len() - value.trim_start().len());
            let value = value.trim();
            let value_span = Span::new(source, value_start, value_start + value.len());
            option.pairs.push(Pair {
                key: key.trim().to_owned(),
                value: value.trim_matches('"').to_owned(),
                span,
                value_span,
                unknown: false,
            });
            option.span.end = span.end;
            option.whole.end = span.end;
        }
    }
    options
}
