//! Splits a shell script into commands, and commands into words.
//!
//! Redirections, comments, here-documents and arrays are not words of a command. What only a running shell knows, such as
//! the value of a variable, is kept as in the source and marked. Scripts that a shell would refuse, or that are for another
//! interpreter, are refused.

use super::word::Word;
use crate::text::Span;

/// The maximum nesting of quotes, braces and parentheses in a substitution.
const DEPTH_MAX: usize = 32;

/// A script.
#[derive(Debug, Default)]
pub struct Script {
    /// Its commands.
    pub commands: Vec<Simple>,
    /// Its comments.
    pub comments: Vec<(String, Span)>,
    /// The first byte that is not understood, and the reason
    pub broken: Option<(usize, &'static str)>,
}

/// One command, up to the operator that ends it.
#[derive(Debug, Default)]
pub struct Simple {
    /// The words without redirections
    pub words: Vec<Word>,
    /// The positions of redirections
    pub redirections: Vec<Span>,
}

/// Splits a script.
pub fn split(text: &str, source: u16) -> Script {
    let mut lexer = Lexer::new(text, source);
    if let Err(broken) = lexer.script() {
        lexer.script.broken = Some(broken);
    }
    lexer.end();
    lexer.script
}

/// Splits arguments without a shell, such as Proxmox's `args:`: only quotes and backslashes are special.
pub fn arguments(text: &str, source: u16) -> Simple {
    let mut lexer = Lexer::new(text, source);
    while let Some(c) = lexer.peek() {
        match c {
            '\\' => lexer.escape(),
            '\'' | '"' => {
                // Without its end, a quote goes to the end.
                let _ = lexer.quote(c, false);
            }
            c if c.is_whitespace() => {
                lexer.finish();
                lexer.bump();
            }
            _ => lexer.plain(None),
        }
    }
    lexer.finish();
    lexer.command
}

/// The role of the next word.
#[derive(Clone, Copy, Debug)]
enum Target {
    File,
    HereDocument { tabs: bool },
}

type Broken = (usize, &'static str);

struct Lexer<'a> {
    text: &'a str,
    source: u16,
    at: usize,
    word: Option<Word>,
    command: Simple,
    /// The redirection whose target is the next word, and its start
    target: Option<(Target, usize)>,
    /// Here-documents after this line: the delimiter, whether tabs before it are ignored, and the position
    documents: Vec<(String, bool, usize)>,
    script: Script,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str, source: u16) -> Self {
        Self {
            text,
            source,
            at: 0,
            word: None,
            command: Simple::default(),
            target: None,
            documents: Vec::new(),
            script: Script::default(),
        }
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn take(&mut self, text: &str) -> bool {
        let is_there = self.rest().starts_with(text);
        if is_there {
            self.at += text.len();
        }
        is_there
    }

    fn script(&mut self) -> Result<(), Broken> {
        while let Some(c) = self.peek() {
            let start = self.at;
            match c {
                '\\' if self.take("\\\n") || self.take("\\\r\n") => {}
                '\\' => self.escape(),
                '\'' | '"' => self.quote(c, true)?,
                '$' => self.dollar(None)?,
                '`' => self.substitution(None, Self::backticks)?,
                '#' if self.word.is_none() => self.comment(),
                '\n' => {
                    self.finish();
                    if let Some(caret) = self.caret() {
                        return Err((caret, "is a Windows batch file, which ringdisk cannot read"));
                    }
                    self.end();
                    self.bump();
                    if let Some((_, at)) = self.target {
                        return Err((at, "this redirection has no target"));
                    }
                    self.here_documents()?;
                }
                '<' | '>' if matches!(self.rest().as_bytes().get(1), Some(b'(')) => {
                    self.substitution(None, |lexer| {
                        lexer.at += 2;
                        lexer.nested(')', 0)
                    })?;
                }
                '<' | '>' => self.redirection(),
                '&' if self.rest().starts_with("&>") => {
                    self.finish();
                    self.at += 2;
                    self.take(">");
                    self.target = Some((Target::File, start));
                }
                '(' if self.is_array() => {
                    self.substitution(None, |lexer| {
                        lexer.at += 1;
                        lexer.nested(')', 0)
                    })?;
                }
                '(' if self.word.is_none() && self.rest().starts_with("((") => {
                    self.at += 2;
                    self.nested(')', 0)?;
                    if !self.take(")") {
                        // Two parentheses without arithmetic: a subshell in a subshell.
                        self.at = start + 1;
                        self.end();
                    }
                }
                ';' | '&' | '|' | '(' | ')' => {
                    self.end();
                    self.bump();
                }
                c if c.is_whitespace() => {
                    self.finish();
                    self.bump();
                }
                '*' | '?' => self.substitution(None, |lexer| {
                    lexer.bump();
                    Ok(())
                })?,
                '{' => match self.braces() {
                    Some(end) => self.substitution(None, |lexer| {
                        lexer.at = end;
                        Ok(())
                    })?,
                    None => self.plain(None),
                },
                _ => self.plain(None),
            }
        }
        self.end();
        match (self.documents.first(), self.target) {
            (Some((.., at)), _) => Err((*at, "this here-document does not end")),
            (None, Some((_, at))) => Err((at, "this redirection has no target")),
            (None, None) => Ok(()),
        }
    }

    /// The current word.
    fn word(&mut self, start: usize) -> &mut Word {
        let source = self.source;
        self.word.get_or_insert_with(|| Word::new(source, start))
    }

    /// Adds the next character without interpretation.
    fn plain(&mut self, quote: Option<char>) {
        let at = self.at;
        if let Some(c) = self.bump() {
            self.word(at).push(c, at, quote);
        }
    }

    /// A backslash and the character that it escapes.
    fn escape(&mut self) {
        let start = self.at;
        self.bump();
        self.word(start);
        self.plain(None);
    }

    fn quote(&mut self, open: char, is_shell: bool) -> Result<(), Broken> {
        let start = self.at;
        self.bump();
        self.word(start);
        while let Some(c) = self.peek() {
            let next = self.rest().chars().nth(1);
            match c {
                c if c == open => {
                    self.bump();
                    return Ok(());
                }
                '\\' if open == '"' && is_shell && self.take("\\\n") => {}
                '\\' if open == '"' && matches!(next, Some('"' | '\\' | '$' | '`')) => {
                    self.bump();
                    self.plain(Some(open));
                }
                '$' if open == '"' && is_shell => self.dollar(Some(open))?,
                '`' if open == '"' && is_shell => self.substitution(Some(open), Self::backticks)?,
                _ => self.plain(Some(open)),
            }
        }
        Err((start, "this quote does not end"))
    }

    /// Adds what `skip` skips to the word as in the source, and marks it as unknown.
    fn substitution(
        &mut self,
        quote: Option<char>,
        skip: impl FnOnce(&mut Self) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let start = self.at;
        skip(self)?;
        let end = std::mem::replace(&mut self.at, start);
        let from = self.word(start).text.len();
        while self.at < end {
            self.plain(quote);
        }
        let word = self.word(start);
        word.unknown.push(from..word.text.len());
        Ok(())
    }

    /// A `$`: a variable, a command, arithmetic, a quote, or a literal dollar sign.
    fn dollar(&mut self, quote: Option<char>) -> Result<(), Broken> {
        let next = self.rest().chars().nth(1);
        match next {
            Some('(' | '{') => self.substitution(quote, |lexer| lexer.expansion(0)),
            Some('\'') if quote.is_none() => self.substitution(quote, |lexer| {
                let start = lexer.at;
                lexer.at += 2;
                lexer.until('\'', start)
            }),
            // A text for translation, which is quoted normally.
            Some('"') if quote.is_none() => {
                let start = self.at;
                self.bump();
                self.word(start);
                Ok(())
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => self.substitution(quote, |lexer| {
                lexer.bump();
                let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                while lexer.peek().is_some_and(name) {
                    lexer.bump();
                }
                Ok(())
            }),
            Some(c) if c.is_ascii_digit() || "@*#?-$!".contains(c) => {
                self.substitution(quote, |lexer| {
                    lexer.at += 2;
                    Ok(())
                })
            }
            _ => {
                self.plain(quote);
                Ok(())
            }
        }
    }

    /// Skips `$(…)` or `${…}`.
    fn expansion(&mut self, depth: usize) -> Result<(), Broken> {
        let close = if self.rest().starts_with("${") {
            '}'
        } else {
            ')'
        };
        self.at += 2;
        self.nested(close, depth)
    }

    /// Skips to the end of the matching `close`.
    fn nested(&mut self, close: char, depth: usize) -> Result<(), Broken> {
        let start = self.at;
        if depth == DEPTH_MAX {
            return Err((start, "nesting is too deep"));
        }
        let doubled = self.text[..start].ends_with("((") || self.rest().starts_with('(');
        let arithmetic = close == ')' && doubled;
        let mut before = ' ';
        while let Some(c) = self.peek() {
            let next = self.rest().chars().nth(1);
            match c {
                c if c == close => {
                    self.bump();
                    return Ok(());
                }
                '\\' => {
                    self.bump();
                    self.bump();
                }
                '\'' => {
                    let quote = self.at;
                    self.bump();
                    while self.peek().is_some_and(|c| c != '\'') {
                        self.bump();
                    }
                    if self.bump().is_none() {
                        return Err((quote, "this quote does not end"));
                    }
                }
                '"' => {
                    let quote = self.at;
                    self.bump();
                    self.until_quote(quote, depth + 1)?;
                }
                '`' => self.backticks()?,
                '$' if matches!(next, Some('(' | '{')) => self.expansion(depth + 1)?,
                '(' if close == ')' => {
                    self.bump();
                    self.nested(')', depth + 1)?;
                }
                '#' if close == ')' && before.is_whitespace() => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.bump();
                    }
                }
                '<' if next == Some('<') && close == ')' && !arithmetic => {
                    if !self.take("<<<") {
                        return Err((self.at, "here-documents in substitutions are not supported"));
                    }
                }
                _ => {
                    self.bump();
                }
            }
            before = c;
        }
        Err((start.saturating_sub(2), "this substitution does not end"))
    }

    /// Skips the rest of a text in double quotes.
    fn until_quote(&mut self, start: usize, depth: usize) -> Result<(), Broken> {
        if depth >= DEPTH_MAX {
            return Err((start, "nesting is too deep"));
        }
        while let Some(c) = self.peek() {
            match c {
                '"' => {
                    self.bump();
                    return Ok(());
                }
                '\\' => {
                    self.bump();
                    self.bump();
                }
                '`' => self.backticks()?,
                '$' if matches!(self.rest().chars().nth(1), Some('(' | '{')) => {
                    self.expansion(depth + 1)?;
                }
                _ => {
                    self.bump();
                }
            }
        }
        Err((start, "this quote does not end"))
    }

    /// Skips a command in backticks.
    fn backticks(&mut self) -> Result<(), Broken> {
        let start = self.at;
        self.bump();
        self.until('`', start)
    }

    /// Skips to the end of the next `close` that is not escaped.
    fn until(&mut self, close: char, start: usize) -> Result<(), Broken> {
        while let Some(c) = self.bump() {
            match c {
                '\\' => {
                    self.bump();
                }
                c if c == close => return Ok(()),
                _ => {}
            }
        }
        Err((start, "this quote does not end"))
    }

    /// The end of `{a,b}` or `{1..4}`, which some shells expand to several words.
    fn braces(&self) -> Option<usize> {
        let inner = self.rest().get(1..)?;
        let end = inner.find(|c: char| c.is_whitespace() || "}'\"\\".contains(c))?;
        let several = inner[..end].contains(',') || inner[..end].contains("..");
        (several && inner[end..].starts_with('}')).then_some(self.at + 1 + end + 1)
    }

    /// Whether the word before a parenthesis is `NAME=`, which starts an array.
    fn is_array(&self) -> bool {
        self.word.as_ref().is_some_and(|word| {
            let name = word.text.strip_suffix('=').unwrap_or_default();
            let name = name.strip_suffix('+').unwrap_or(name);
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        })
    }

    /// The position of a caret at the end of the line, which continues the line in a batch file.
    fn caret(&self) -> Option<usize> {
        let word = self.command.words.last()?;
        let is_caret = word.text == "^" && word.quote.is_none();
        is_caret.then_some(word.outer.start as usize)
    }

    fn comment(&mut self) {
        let start = self.at;
        while self.peek().is_some_and(|c| c != '\n') {
            self.bump();
        }
        let span = Span::new(self.source, start, self.at);
        let text = self.text[start..self.at].to_owned();
        self.script.comments.push((text, span));
    }

    /// `>`, `2>&1`, `<<EOF` and so on: the next word is the target.
    fn redirection(&mut self) {
        let mut start = self.at;
        // The number of a descriptor, or the name of its variable.
        let is_descriptor = |word: &Word| {
            let name = word
                .text
                .strip_prefix('{')
                .and_then(|text| text.strip_suffix('}'));
            let is_plain = word.quote.is_none() && !word.mixed && word.unknown.is_empty();
            is_plain && (word.text.bytes().all(|b| b.is_ascii_digit()) || name.is_some())
        };
        match self.word.take_if(|word| is_descriptor(word)) {
            Some(descriptor) => start = descriptor.outer.start as usize,
            None => self.finish(),
        }
        let document = Target::HereDocument { tabs: false };
        let operators = [
            ("<<<", Target::File),
            ("<<-", Target::HereDocument { tabs: true }),
            ("<<", document),
            ("<&", Target::File),
            ("<>", Target::File),
            ("<", Target::File),
            (">>", Target::File),
            (">|", Target::File),
            (">&", Target::File),
            (">", Target::File),
        ];
        for (operator, target) in operators {
            if self.take(operator) {
                self.target = Some((target, start));
                return;
            }
        }
    }

    /// Ends the current word.
    fn finish(&mut self) {
        let Some(mut word) = self.word.take() else {
            return;
        };
        word.outer.end = Span::new(self.source, self.at, self.at).end;
        let Some((target, start)) = self.target.take() else {
            self.command.words.push(word);
            return;
        };
        self.command
            .redirections
            .push(Span::new(self.source, start, self.at));
        if let Target::HereDocument { tabs } = target {
            self.documents.push((word.text, tabs, start));
        }
    }

    /// Ends the current command.
    fn end(&mut self) {
        self.finish();
        let command = std::mem::take(&mut self.command);
        if !command.words.is_empty() {
            self.script.commands.push(command);
        }
    }

    /// Skips the here-documents of the previous line.
    fn here_documents(&mut self) -> Result<(), Broken> {
        for (end, tabs, at) in std::mem::take(&mut self.documents) {
            loop {
                let rest = self.rest();
                if rest.is_empty() {
                    return Err((at, "this here-document does not end"));
                }
                let line = rest.split_inclusive('\n').next().unwrap_or(rest);
                self.at += line.len();
                let line = line.trim_end_matches(['\n', '\r']);
                let line = if tabs {
                    line.trim_start_matches('\t')
                } else {
                    line
                };
                if line == end {
                    break;
                }
            }
        }
        Ok(())
    }
}
