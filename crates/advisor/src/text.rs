//! Configuration texts, positions in them, and changes to them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

/// The maximum size of a text. A domain with ten thousand disks has about 4 MiB.
pub const BYTES_MAX: usize = 16 << 20;

/// A text: a file, standard input or a command line.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file's name, or a description.
    pub name: String,
    /// Does not change after the first call of `position`, which builds an index.
    pub text: String,
    /// The start of each line.
    lines: OnceLock<Vec<usize>>,
    /// The number of characters before each block, since one line may be the whole text.
    characters: OnceLock<Vec<usize>>,
}

/// The size of a block in bytes. `position` counts the characters of at most one block.
const BLOCK: usize = 1024;

/// A part of a text, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// Index into the input's texts.
    pub source: u16,
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl Span {
    pub fn new(source: u16, start: usize, end: usize) -> Self {
        let bound = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Self {
            source,
            start: bound(start),
            end: bound(end),
        }
    }

    pub fn range(self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }

    pub fn contains(self, inner: Self) -> bool {
        self.source == inner.source && self.start <= inner.start && inner.end <= self.end
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
    pub line: usize,
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl Source {
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            text: text.into(),
            lines: OnceLock::new(),
            characters: OnceLock::new(),
        }
    }

    fn characters_before(&self, at: usize) -> usize {
        // Every character has exactly one byte that is not a continuation byte.
        let count = |bytes: &[u8]| bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        let bytes = self.text.as_bytes();
        let blocks = self.characters.get_or_init(|| {
            let mut before = vec![0];
            for block in bytes.chunks(BLOCK) {
                before.push(before.last().unwrap_or(&0) + count(block));
            }
            before
        });
        blocks[at / BLOCK] + count(&bytes[at / BLOCK * BLOCK..at])
    }

    /// The position of the byte `at`, or of the end if `at` is beyond it.
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
            column: 1 + self.characters_before(at) - self.characters_before(start),
        }
    }
}

/// A replacement of a part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The replaced part; empty for an insertion.
    pub span: Span,
    pub text: String,
}

impl Edit {
    pub fn replace(span: Span, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { span, text }
    }
}

/// Edits that do not overlap.
#[derive(Default)]
pub struct Changes {
    by_place: BTreeMap<(u16, u32, u32), Vec<Edit>>,
}

impl Changes {
    /// Adds all edits or none: none if one of them overlaps an earlier one, or inserts at the same place.
    pub fn add(&mut self, edits: Vec<Edit>) -> bool {
        let key = |edit: &Edit| (edit.span.source, edit.span.start, edit.span.end);
        let is_free = |edit: &Edit| {
            let place @ (source, start, end) = key(edit);
            let before = self.by_place.range(..=place).next_back();
            let after = self.by_place.range(place..).next();
            before
                .is_none_or(|(other, _)| other.0 != source || (other.2 <= start && *other != place))
                && after.is_none_or(|(other, _)| other.0 != source || other.1 >= end)
        };
        let mut own: Vec<_> = edits.iter().map(key).collect();
        own.sort_unstable();
        let apart = own
            .windows(2)
            .all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1);
        if !apart || !edits.iter().all(is_free) {
            return false;
        }
        for edit in edits {
            self.by_place.entry(key(&edit)).or_default().push(edit);
        }
        true
    }

    pub fn is_empty(&self) -> bool {
        self.by_place.is_empty()
    }

    /// The changed texts; `None` if an edit is outside its text.
    pub fn apply(&self, sources: &[Source]) -> Option<Vec<Source>> {
        let mut changed: Vec<String> = vec![String::new(); sources.len()];
        let mut ends = vec![0; sources.len()];
        // Added lines get the line ending of the text's first line.
        let has_crlf = |source: &Source| {
            source
                .text
                .find('\n')
                .is_some_and(|at| source.text[..at].ends_with('\r'))
        };
        let crlf: Vec<bool> = sources.iter().map(has_crlf).collect();
        for edit in self.by_place.values().flatten() {
            let place = usize::from(edit.span.source);
            let text = &sources.get(place)?.text;
            let range = edit.span.range();
            text.get(range.clone())?;
            changed[place].push_str(text.get(ends[place]..range.start)?);
            if crlf[place] {
                let lines = edit.text.replace("\r\n", "\n");
                changed[place].push_str(&lines.replace('\n', "\r\n"));
            } else {
                changed[place].push_str(&edit.text);
            }
            ends[place] = range.end;
        }
        let whole = sources.iter().zip(changed).zip(ends);
        Some(
            whole
                .map(|((source, text), end)| Source::new(&source.name, text + &source.text[end..]))
                .collect(),
        )
    }
}

/// Applies edits to the texts of an input. Insertions at one place keep their order.
///
/// `None` if two edits overlap, or one is outside its text.
pub fn apply(sources: &[Source], edits: &[Edit]) -> Option<Vec<Source>> {
    let mut changes = Changes::default();
    if !changes.add(edits.to_vec()) {
        return None;
    }
    changes.apply(sources)
}

pub use harness::text::printable;

/// Whether an id needs no quotes or escapes in any syntax.
pub fn is_plain(id: &str) -> bool {
    !id.is_empty()
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}
