//! Commands that start QEMU: words with the place of each of their bytes.

use std::ops::Range;

use super::script;
use crate::text::Span;

/// One word, without quotes and escapes.
#[derive(Clone, Debug, Default)]
pub struct Word {
    /// What the shell makes of it; what only a running shell knows is as it is written.
    pub text: String,
    /// Where each byte of it stands.
    at: Vec<u32>,
    /// Which text.
    source: u16,
    /// All of it as it stands there, quotes included.
    pub outer: Span,
    /// The quote that its last byte stands in.
    pub quote: Option<char>,
    /// Whether its bytes stand in different quotes.
    pub mixed: bool,
    /// The bytes of `text` that are a variable, a command or a pattern, of which the value is not known here.
    pub unknown: Vec<Range<usize>>,
}

impl Word {
    /// An empty word at that byte of a text.
    pub fn new(source: u16, start: usize) -> Self {
        Self {
            source,
            outer: Span::new(source, start, start),
            ..Self::default()
        }
    }

    /// Adds a character that stands at the byte `at`, in a quote or in none.
    pub fn push(&mut self, c: char, at: usize, quote: Option<char>) {
        self.mixed |= !self.text.is_empty() && self.quote != quote;
        self.quote = quote;
        self.text.push(c);
        self.at
            .extend((at..at + c.len_utf8()).map(|at| u32::try_from(at).unwrap_or(u32::MAX)));
    }

    /// Whether the bytes `start..end` of it are known.
    pub fn knows(&self, start: usize, end: usize) -> bool {
        !self
            .unknown
            .iter()
            .any(|unknown| unknown.start < end && start < unknown.end)
    }

    /// A word that stands in a text as it is.
    pub fn plain(text: &str, source: u16, start: usize) -> Self {
        Self {
            text: text.to_owned(),
            at: (start..start + text.len()).map(|at| at as u32).collect(),
            source,
            outer: Span::new(source, start, start + text.len()),
            ..Self::default()
        }
    }

    /// Where the bytes `start..end` of it stand.
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

    /// All of it, without its quotes.
    pub fn inner(&self) -> Span {
        self.span(0, self.text.len())
    }
}

/// A command that starts QEMU.
#[derive(Clone, Debug, Default)]
pub struct Command {
    /// Variables that are set for it: name, value.
    pub variables: Vec<(String, Word)>,
    /// Variables that were set before it and not exported.
    pub not_exported: Vec<(String, Word)>,
    /// The program.
    pub program: Word,
    /// What follows it.
    pub arguments: Vec<Word>,
    /// Where redirections stand among these.
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

/// What a script has of QEMU.
#[derive(Debug, Default)]
pub struct Found {
    /// The commands that start it.
    pub commands: Vec<Command>,
    /// All comments.
    pub comments: Vec<Comment>,
    /// The byte from which on the script is not understood, and why.
    pub broken: Option<(usize, &'static str)>,
}

/// Words of a shell that stand before a command.
const RESERVED: &[&str] = &[
    "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time",
];

/// Programs that start the command in their arguments.
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

/// The commands in a text that start QEMU, and its comments.
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
        // What stands before it, as in `sudo nice -n 5 env A=b qemu-system-x86_64`, may set variables too.
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

/// The options of QEMU that another configuration hands to it without a shell.
pub fn arguments(text: &str) -> Option<Command> {
    let mut words = script::arguments(text, 0).words.into_iter();
    Some(Command {
        program: words.next()?,
        arguments: words.collect(),
        ..Command::default()
    })
}

/// Which word of a command is the QEMU that it starts, by itself or through programs that start others.
fn program(words: &[Word]) -> Option<usize> {
    let name = |word: &Word| word.text.rsplit('/').next().unwrap_or_default().to_owned();
    let mut after_option = false;
    let mut looks_up = false;
    for (place, word) in words.iter().enumerate() {
        let is_option = word.text.starts_with('-');
        let starts_others = WRAPPERS.contains(&name(word).as_str());
        // As in `sudo -u qemu qemu-system-x86_64`: what follows an option may be its value.
        let is_whole = name(word).starts_with("qemu-system-");
        if is_qemu(&word.text) && (is_whole || !after_option) {
            return (!looks_up && word.unknown.is_empty()).then_some(place);
        }
        let is_value = after_option || word.text.starts_with(|c: char| c.is_ascii_digit());
        let passes = starts_others || is_option || is_value || assignment(word).is_some();
        if !passes || place == 0 && !starts_others {
            return None;
        }
        // `command -v` only says where a program is.
        looks_up |= place > 0
            && name(&words[0]) == "command"
            && is_option
            && word.text != "-p"
            && word.text != "--";
        after_option = is_option && word.text != "--";
    }
    None
}

/// Whether a word is a program of QEMU that runs machines.
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

/// A command line as a shell takes it: an option and its value on each line.
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

/// Quotes a word for a shell if it needs that.
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
