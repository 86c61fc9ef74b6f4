//! Texts that configurations are in, places in them, and changes to them.

use std::fmt;
use std::sync::OnceLock;

/// Largest text that is read. The largest domain that libvirt takes is far below it.
pub const BYTES_MAX: usize = 4 << 20;

/// One text: a file, standard input, a command line.
#[derive(Clone, Debug)]
pub struct Source {
    /// Name of the file, or what it is instead.
    pub name: String,
    /// All of it. Whoever changes it makes a new source: places are looked up in an index.
    pub text: String,
    /// Where each line starts.
    lines: OnceLock<Vec<usize>>,
}

/// A part of a text, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// Which of an input's texts.
    pub source: u16,
    /// The first byte.
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl Span {
    /// A part of the text `source`.
    pub fn new(source: u16, start: usize, end: usize) -> Self {
        let bound = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Self {
            source,
            start: bound(start),
            end: bound(end),
        }
    }

    /// As bytes of its text.
    pub fn range(self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }

    /// The place before its first byte.
    pub fn before(self) -> Self {
        Self {
            end: self.start,
            ..self
        }
    }

    /// The place after its last byte.
    pub fn after(self) -> Self {
        Self {
            start: self.end,
            ..self
        }
    }
}

/// Line and column, both from 1; the column counts characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character in it.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl Source {
    /// A text with a name.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            text: text.into(),
            lines: OnceLock::new(),
        }
    }

    /// Where the byte `at` is. What lies behind the end is at the end.
    pub fn position(&self, at: u32) -> Position {
        let mut at = (at as usize).min(self.text.len());
        while !self.text.is_char_boundary(at) {
            at -= 1;
        }
        let lines = self.lines.get_or_init(|| {
            let newlines = self
                .text
                .match_indices('\n')
                .map(|(newline, _)| newline + 1);
            std::iter::once(0).chain(newlines).collect()
        });
        let line = lines.partition_point(|start| *start <= at);
        let start = line
            .checked_sub(1)
            .and_then(|line| lines.get(line))
            .copied()
            .unwrap_or(0);
        Position {
            line,
            column: 1 + self.text[start..at].chars().count(),
        }
    }
}

/// Text that takes the place of other text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// What is replaced; empty for an insertion.
    pub span: Span,
    /// What stands there afterwards.
    pub text: String,
}

impl Edit {
    /// Replaces a part.
    pub fn replace(span: Span, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { span, text }
    }
}

/// Makes changes to the texts of an input. Insertions at one place stay in their order.
///
/// `None` if two of them change the same bytes, or one is not inside its text.
pub fn apply(sources: &[Source], edits: &[Edit]) -> Option<Vec<Source>> {
    let mut edits: Vec<_> = edits.iter().collect();
    edits.sort_by_key(|edit| (edit.span.source, edit.span.start, edit.span.end));
    let mut changed: Vec<Source> = sources
        .iter()
        .map(|source| Source::new(&source.name, &source.text))
        .collect();
    let mut last: Option<Span> = None;
    for pair in edits.windows(2) {
        let (a, b) = (pair[0].span, pair[1].span);
        if a.source == b.source && a.end > b.start {
            return None;
        }
    }
    for edit in edits.iter().rev() {
        let text = &mut changed.get_mut(usize::from(edit.span.source))?.text;
        let range = edit.span.range();
        text.get(range.clone())?;
        // From the last to the first, so that the places of those before stay true.
        debug_assert!(last.is_none_or(|last| last >= edit.span));
        last = Some(edit.span);
        text.replace_range(range, &edit.text);
    }
    Some(changed)
}

/// `text` without what a terminal would take for an order, for messages.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}
