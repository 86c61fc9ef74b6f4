//! A source file as a tree of tokens, without comments and white space.

use anyhow::{Context, Result, ensure};
use ra_ap_rustc_lexer::{FrontmatterAllowed, TokenKind, tokenize};

pub(super) enum Token<'a> {
    Word(Word<'a>),
    Mark(char),
    Group(Group<'a>),
    /// A literal or a lifetime
    Other,
}

#[derive(Clone, Copy)]
pub(super) struct Word<'a> {
    pub(super) text: &'a str,
    pub(super) line: usize,
}

/// What stands between two brackets.
pub(super) struct Group<'a> {
    pub(super) open: char,
    pub(super) tokens: Vec<Token<'a>>,
    pub(super) last_line: usize,
}

impl Token<'_> {
    pub(super) fn is_word(&self, text: &str) -> bool {
        matches!(self, Self::Word(word) if word.text == text)
    }

    pub(super) fn is_mark(&self, mark: char) -> bool {
        matches!(self, Self::Mark(found) if *found == mark)
    }

    pub(super) fn is_braces(&self) -> bool {
        matches!(self, Self::Group(group) if group.open == '{')
    }
}

pub(super) fn tokens(source: &str) -> Result<Vec<Token<'_>>> {
    let mut open_groups = Vec::new();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    for token in tokenize(source, FrontmatterAllowed::No) {
        let text = &source[at..at + token.len as usize];
        match token.kind {
            TokenKind::LineComment { .. }
            | TokenKind::BlockComment { .. }
            | TokenKind::Whitespace => {}
            TokenKind::Ident | TokenKind::RawIdent => tokens.push(Token::Word(Word { text, line })),
            TokenKind::OpenParen | TokenKind::OpenBracket | TokenKind::OpenBrace => {
                open_groups.push((text, tokens));
                tokens = Vec::new();
            }
            TokenKind::CloseParen | TokenKind::CloseBracket | TokenKind::CloseBrace => {
                let (open, outer) = open_groups
                    .pop()
                    .with_context(|| format!("line {line}: '{text}' closes nothing"))?;
                let group = Group {
                    open: open.chars().next().unwrap_or_default(),
                    tokens: std::mem::replace(&mut tokens, outer),
                    last_line: line,
                };
                tokens.push(Token::Group(group));
            }
            TokenKind::Literal { .. } | TokenKind::Lifetime { .. } => tokens.push(Token::Other),
            _ => tokens.extend(text.chars().map(Token::Mark)),
        }
        at += text.len();
        line += text.matches('\n').count();
    }
    ensure!(open_groups.is_empty(), "a bracket is not closed");
    Ok(tokens)
}
