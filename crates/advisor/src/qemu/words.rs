//! Commands that start QEMU, with the position of every byte of their words.

use std::ops::Range;

use super::script;
use crate::text::Span;

/// One word, without quotes and escapes.
#[derive(Clone, Debug, Default)]
pub struct Word {
    /// After expansion by the shell; variables stay as in the source
    pub text: String,
    /// The position of each byte
    at: Vec<u32>,
    /// Index into the input's texts
    source: u16,
    /// The whole word in the source, including quotes
    pub outer: Span,
    /// The quote around its last byte
    pub quote: Option<char>,
    /// Whether its bytes are in different quotes
    pub mixed: bool,
    /// The bytes of `text` that are a variable, a command or a pattern, whose value is unknown
    pub unknown: Vec<Range<usize>>,
}

impl Word {
    /// An empty word at a byte of a text.
    pub fn new(source: u16, start: usize) -> Self {
        Self {
            source,
            outer: Span::new(source, start, start),
            ..Self::default()
        }
    }

    /// Adds a character at the byte `at`, in a quote or in none.
    pub fn push(&mut self, c: char, at: usize, quote: Option<char>) {
        self.mixed |= !self.text.is_empty() && self.quote != quote;
        self.quote = quote;
        self.text.push(c);
        self.at
            .extend((at..at + c.len_utf8()).map(|at| u32::try_from(at).unwrap_or(u32::MAX)));
    }

    /// Whether the bytes `start..end` are known.
    pub fn knows(&self, start: usize, end: usize) -> bool {
        !self
            .unknown
            .iter()
            .any(|unknown| unknown.start < end && start < unknown.end)
    }

    /// A word without quotes or escapes.
    pub fn plain(text: &str, source: u16, start: usize) -> Self {
        Self {
            text: text.to_owned(),
            at: (start..start + text.len()).map(|at| at as u32).collect(),
            source,
            outer: Span::new(source, start, start + text.len()),
            ..Self::default()
        }
    }

    /// The position of the bytes `start..end`.
    pub fn span(&self, start: usize, end: usize) -> Span {
        let last = self.at.last().map_or(self.outer.start, |at| at + 1);
        let from = self.at.get(start).copied().unwrap_or(last);
        let to = match end.checked_sub(1) {
            Some(before) if end > start => self.at.get(before).map_or(last, |at| at + 1),
            _ => from,
        };
        Span {
            source: self.source,
            start: from,
            end: to,
        }
    }

    /// The position of the word without its quotes.
    pub fn inner(&self) -> Span {
        self.span(0, self.text.len())
    }
}

/// A command that starts QEMU.
#[derive(Clone, Debug, Default)]
pub struct Command {
    /// Names and values of variables that are set for the command
    pub variables: Vec<(String, Word)>,
    /// Variables that were set before, but not exported
    pub not_exported: Vec<(String, Word)>,
    /// The program
    pub program: Word,
    /// The program's arguments
    pub arguments: Vec<Word>,
    /// The positions of redirections between the arguments
    pub redirections: Vec<Span>,
}

impl Command {
    /// From the program to the last argument.
    pub fn span(&self) -> Span {
        let first = self.program.outer;
        let last = self.arguments.last().map_or(first, |word| word.outer);
        Span {
            end: last.end.max(first.end),
            ..first
        }
    }
}

/// A comment.
pub type Comment = (String, Span);

/// A script's commands that start QEMU.
#[derive(Debug, Default)]
pub struct Found {
    /// The commands in their order
    pub commands: Vec<Command>,
    /// All comments.
    pub comments: Vec<Comment>,
    /// The first byte that is not understood, and the reason
    pub broken: Option<(usize, &'static str)>,
}

/// Shell keywords before a command.
const RESERVED: &[&str] = &[
    "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time",
];

/// Programs that run the command in their arguments.
const WRAPPERS: &[&str] = &[
    "builtin",
    "catchsegv",
    "cgexec",
    "chroot",
    "chrt",
    "command",
    "doas",
    "env",
    "exec",
    "firejail",
    "gdb",
    "ionice",
    "ltrace",
    "nice",
    "nohup",
    "nsenter",
    "numactl",
    "perf",
    "prlimit",
    "record",
    "rlwrap",
    "runuser",
    "screen",
    "setpriv",
    "setsid",
    "stat",
    "stdbuf",
    "strace",
    "sudo",
    "systemd-run",
    "taskset",
    "time",
    "timeout",
    "unshare",
    "valgrind",
];

/// The commands of a text that start QEMU, and the comments.
pub fn commands(text: &str, source: u16) -> Found {
    let script = script::split(text, source);
    let mut found = Found {
        comments: script.comments,
        broken: script.broken,
        ..Found::default()
    };
    let mut set: Vec<(String, Word)> = Vec::new();
    let mut exported: Vec<(String, Word)> = Vec::new();
    for simple in script.commands {
        let mut words = simple.words.into_iter().peekable();
        while words
            .next_if(|word| RESERVED.contains(&word.text.as_str()))
            .is_some()
        {}
        let mut own = Vec::new();
        while let Some(variable) = words.peek().and_then(assignment) {
            own.push(variable);
            words.next();
        }
        let Some(first) = words.peek() else {
            set.extend(own);
            continue;
        };
        if first.text == "export" {
            for word in words.skip(1) {
                match assignment(&word) {
                    Some(variable) => exported.push(variable),
                    None => {
                        let known = set.iter().position(|(name, _)| *name == word.text);
                        exported.extend(known.map(|place| set.remove(place)));
                    }
                }
            }
            continue;
        }
        let words: Vec<Word> = words.collect();
        let Some(place) = program(&words) else {
            continue;
        };
        let mut variables = exported.clone();
        variables.extend(own);
        // Words before it may also set variables, as in `sudo nice -n 5 env A=b qemu-system-x86_64`.
        variables.extend(words[..place].iter().filter_map(assignment));
        let mut words = words.into_iter().skip(place);
        found.commands.push(Command {
            variables,
            not_exported: set.clone(),
            program: words.next().unwrap_or_default(),
            arguments: words.collect(),
            redirections: simple.redirections,
        });
    }
    found
}

/// QEMU's options in another configuration, which uses no shell.
pub fn arguments(text: &str) -> Option<Command> {
    let mut words = script::arguments(text, 0).words.into_iter();
    Some(Command {
        program: words.next()?,
        arguments: words.collect(),
        ..Command::default()
    })
}

/// The index of the word that names QEMU, directly or as an argument of a program that runs it.
fn program(words: &[Word]) -> Option<usize> {
    let name = |word: &Word| word.text.rsplit('/').next().unwrap_or_default().to_owned();
    let mut after_option = false;
    let mut looks_up = false;
    for (place, word) in words.iter().enumerate() {
        let is_option = word.text.starts_with('-');
        let starts_others = WRAPPERS.contains(&name(word).as_str());
        // The word after an option may be its value, as in `sudo -u qemu qemu-system-x86_64`.
        let is_whole = name(word).starts_with("qemu-system-");
        if is_qemu(&word.text) && (is_whole || !after_option) {
            return (!looks_up && word.unknown.is_empty()).then_some(place);
        }
        let is_value = after_option || word.text.starts_with(|c: char| c.is_ascii_digit());
        let passes = starts_others || is_option || is_value || assignment(word).is_some();
        if !passes || place == 0 && !starts_others {
            return None;
        }
        // `command -v` only prints a program's path.
        looks_up |= place > 0
            && name(&words[0]) == "command"
            && is_option
            && word.text != "-p"
            && word.text != "--";
        after_option = is_option && word.text != "--";
    }
    None
}

/// Whether a word names a QEMU program that runs VMs.
pub fn is_qemu(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.strip_prefix("qemu-system-").is_some_and(|machine| {
        !machine.is_empty()
            && machine
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_')
    }) || matches!(name, "qemu-kvm" | "kvm" | "qemu")
}

fn assignment(word: &Word) -> Option<(String, Word)> {
    let (name, value) = word.text.split_once('=')?;
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') || !name.chars().all(good) {
        return None;
    }
    let start = name.len() + 1;
    let mut part = word.clone();
    part.text = value.to_owned();
    part.at = word.at.get(start..).unwrap_or_default().to_vec();
    part.unknown = word
        .unknown
        .iter()
        .map(|unknown| unknown.start.saturating_sub(start)..unknown.end.saturating_sub(start))
        .collect();
    Some((name.to_owned(), part))
}

/// A command line in shell syntax, with one option and its value per line.
pub fn shell(arguments: &[String]) -> String {
    let mut text = String::new();
    for (i, argument) in arguments.iter().enumerate() {
        let value = i > 0 && !argument.starts_with('-') && arguments[i - 1].starts_with('-');
        match (i, value) {
            (0, _) => {}
            (_, true) => text.push(' '),
            (_, false) => text.push_str(" \\\n  "),
        }
        text.push_str(&quoted(argument));
    }
    text.push('\n');
    text
}

/// Quotes a word for a shell if necessary.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
#[path = "words/tests.rs"]
mod tests;
