//! The words of a command, with the position of every byte.

use std::ops::Range;

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

    /// The part of the word from `start` on, which is `text`.
    pub fn after(&self, start: usize, text: &str) -> Self {
        let from_start = |at: usize| at.saturating_sub(start);
        let unknown = self.unknown.iter();
        Self {
            text: text.to_owned(),
            at: self.at.get(start..).unwrap_or_default().to_vec(),
            unknown: unknown
                .map(|unknown| from_start(unknown.start)..from_start(unknown.end))
                .collect(),
            ..self.clone()
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
