//! A key of the configuration, as `--help` and the configuration reference describe it.

use std::fmt::Write;

/// The width of a line of `--help`, and of the column of keys in it.
const HELP_WIDTH: usize = 100;
const HELP_INDENT: usize = 23;

/// A key of a disk, of a thread, of a group, or of the top level of the configuration file.
#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub form: Form,
    /// The default in Markdown, where it depends on something else.
    pub default: Option<&'static str>,
    /// The meaning in Markdown, in one sentence without its full stop.
    pub about: &'static str,
}

/// What the value of a key looks like.
#[derive(Debug)]
pub enum Form {
    /// Text, which has this name in `--help`, or alternatives separated by `|`.
    Text(&'static str),
    /// One of these words.
    Words(&'static [&'static str]),
    /// A whole number, from the first to the last.
    Number(u64, u64),
    /// A power of two, from the first to the last.
    PowerOfTwo(u64, u64),
}

impl Form {
    /// Checks the form of a value. Text can have any.
    ///
    /// # Errors
    /// The text is not such a value; the message lists the allowed ones.
    pub fn check(&self, text: &str) -> Result<(), String> {
        let number = text.parse::<u64>().ok();
        let is_in = |first: u64, last: u64| number.filter(|n| (first..=last).contains(n));
        match *self {
            Self::Text(_) => Ok(()),
            Self::Words(words) if words.contains(&text) => Ok(()),
            Self::Words([a, b]) => Err(format!("'{text}' is neither {a} nor {b}")),
            Self::Words(words) => Err(format!("'{text}' is not one of {}", words.join(", "))),
            Self::Number(first, last) => match is_in(first, last) {
                Some(_) => Ok(()),
                None => Err(format!("'{text}' is not a number from {first} to {last}")),
            },
            Self::PowerOfTwo(first, last) => match is_in(first, last) {
                Some(n) if n.is_power_of_two() => Ok(()),
                _ => Err(format!(
                    "'{text}' is not a power of two from {first} to {last}"
                )),
            },
        }
    }

    /// The value in `--help`, after `key=`.
    fn placeholder(&self) -> String {
        match self {
            Self::Text(name) => (*name).into(),
            Self::Words(words) => words.join("|"),
            Self::Number(..) | Self::PowerOfTwo(..) => "N".into(),
        }
    }

    /// The value in the reference, as Markdown.
    fn described(&self) -> String {
        match self {
            Self::Text(name) => {
                if name.contains('|') {
                    code_list(name.split('|'))
                } else {
                    (*name).into()
                }
            }
            Self::Words(words) => code_list(words.iter().copied()),
            Self::Number(first, last) => format!("{first} to {last}"),
            Self::PowerOfTwo(first, last) => format!("a power of two from {first} to {last}"),
        }
    }

    /// What `--help` says about the value, if its placeholder does not.
    fn bounds(&self) -> Option<String> {
        matches!(self, Self::Number(..) | Self::PowerOfTwo(..)).then(|| self.described())
    }
}

/// A key without a default of its own.
pub const fn key(name: &'static str, form: Form, about: &'static str) -> Key {
    Key {
        name,
        form,
        default: None,
        about,
    }
}

impl Key {
    pub const fn by_default(self, default: &'static str) -> Self {
        Self {
            default: Some(default),
            ..self
        }
    }

    /// What `--help` says about the key, given its default.
    pub fn help(&self, default: Option<&str>) -> String {
        let parts = [
            Some(self.about.to_owned()),
            self.form.bounds(),
            default.map(|default| match default {
                "required" => default.to_owned(),
                default => format!("default: {default}"),
            }),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        plain(&parts.join("; "))
    }

    /// The lines of `--help` for `name=VALUE`.
    pub fn help_lines(&self, default: Option<&str>) -> String {
        let pair = format!("  {}={}", self.name, self.form.placeholder());
        lines(&pair, &self.help(default))
    }

    /// The row of the reference.
    pub fn row(&self, default: Option<&str>) -> String {
        row(
            &format!("`{}`", self.name),
            &self.form.described(),
            default.unwrap_or_default(),
            self.about,
        )
    }
}

fn code_list<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

/// The head of a table of the reference.
pub const TABLE_HEAD: &str = "| key | value | default | meaning |\n|---|---|---|---|\n";

/// A row of a table of the reference.
pub fn row(names: &str, value: &str, default: &str, about: &str) -> String {
    let cells = [names, value, default, about].map(|cell| match cell {
        "" => " ".to_owned(),
        cell => format!(" {cell} "),
    });
    format!("|{}|\n", cells.join("|"))
}

/// `text` in lines to the right of `head`, or below a `head` that is too long.
pub fn lines(head: &str, text: &str) -> String {
    if head.len() < HELP_INDENT {
        wrap(&format!("{head:HELP_INDENT$}"), text, HELP_INDENT)
    } else {
        wrap("  ", head.trim_start(), 2) + &wrap(&" ".repeat(HELP_INDENT), text, HELP_INDENT)
    }
}

/// `start` and `text` in lines, those after the first with this indentation.
fn wrap(start: &str, text: &str, indent: usize) -> String {
    let mut all = String::new();
    let mut line = start.to_owned();
    for (i, word) in text.split(' ').enumerate() {
        if i > 0 && line.chars().count() + 1 + word.chars().count() > HELP_WIDTH {
            let _ = writeln!(all, "{line}");
            line = " ".repeat(indent);
        } else if i > 0 {
            line.push(' ');
        }
        line += word;
    }
    all + &line + "\n"
}

/// Markdown without links, and without the marks of code; code of several words is quoted.
pub fn plain(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((open, (_, end))) = before.rfind('[').zip(after.split_once(')')) else {
            break;
        };
        text += &before[..open];
        text += &before[open + 1..];
        rest = end;
    }
    text += rest;
    let parts = text.split('`').enumerate().map(|(i, part)| match i % 2 {
        1 if part.contains(' ') => format!("'{part}'"),
        _ => part.to_owned(),
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_the_reference_without_markup() {
        let key = key(
            "queue-size",
            Form::PowerOfTwo(16, 1024),
            "a [queue](threads.md#queues), `rbd:A[/B]`, `a b`",
        );
        assert_eq!(
            key.help_lines(Some("256")),
            "  queue-size=N         a queue, rbd:A[/B], 'a b'; a power of two from 16 to 1024; default: 256\n"
        );
        assert_eq!(
            key.row(Some("256")),
            "| `queue-size` | a power of two from 16 to 1024 | 256 | a [queue](threads.md#queues), `rbd:A[/B]`, \
             `a b` |\n"
        );
        let long = wrap("  ", &"word ".repeat(30), 4);
        let (first, second) = long.split_once('\n').unwrap();
        assert!(first.len() <= HELP_WIDTH && first.len() > HELP_WIDTH - 5);
        assert!(second.starts_with("    word"), "{long}");
    }

    #[test]
    fn form_of_a_value_is_enforced() {
        for (form, good, bad, says) in [
            (Form::Number(1, 256), "256", "0", "a number from 1 to 256"),
            (Form::PowerOfTwo(16, 1024), "32", "33", "power of two"),
            (Form::Words(&["a", "b"]), "b", "c", "neither a nor b"),
            (Form::Words(&["a", "b", "c"]), "c", "", "a, b, c"),
        ] {
            assert_eq!(form.check(good), Ok(()));
            let error = form.check(bad).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(Form::Text("PATH").check(""), Ok(()));
    }
}
