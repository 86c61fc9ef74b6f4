//! Commands of a shell, as far as they start QEMU: words with the place of each of their bytes.

use crate::text::Span;

/// One word, without quotes and escapes.
#[derive(Clone, Debug, Default)]
pub struct Word {
    /// What the shell makes of it.
    pub text: String,
    /// Where each byte of it stands.
    at: Vec<u32>,
    /// Which text.
    source: u16,
    /// All of it as it stands there, quotes included.
    pub outer: Span,
    /// The quote that its last byte stands in.
    pub quote: Option<char>,
    /// Whether it has a variable or a command in it, the value of which nobody knows here.
    pub expanded: bool,
}

impl Word {
    /// A word that stands in a text as it is.
    pub fn plain(text: &str, source: u16, start: usize) -> Self {
        Self {
            text: text.to_owned(),
            at: (start..start + text.len()).map(|at| at as u32).collect(),
            source,
            outer: Span::new(source, start, start + text.len()),
            quote: None,
            expanded: false,
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

    /// The same word where the text begins `shift` bytes later.
    pub fn moved(mut self, shift: u32) -> Self {
        for at in &mut self.at {
            *at = at.saturating_sub(shift);
        }
        self.outer.start = self.outer.start.saturating_sub(shift);
        self.outer.end = self.outer.end.saturating_sub(shift);
        self
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

/// The commands in a text that start QEMU, and its comments.
pub fn commands(text: &str, source: u16) -> (Vec<Command>, Vec<Comment>) {
    let (lists, comments) = split(text, source);
    let mut found = Vec::new();
    let mut set: Vec<(String, Word)> = Vec::new();
    let mut exported: Vec<(String, Word)> = Vec::new();
    for words in lists {
        let mut words = words.into_iter().peekable();
        let mut variables = exported.clone();
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
        variables.extend(own);
        // What stands before it, as in `sudo nice -n 5 env A=b qemu-system-x86_64`, may set variables too.
        while let Some(word) = words.next() {
            if is_qemu(&word.text) {
                found.push(Command {
                    variables,
                    not_exported: set.clone(),
                    program: word,
                    arguments: words.collect(),
                });
                break;
            }
            variables.extend(assignment(&word));
        }
    }
    (found, comments)
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
    Some((name.to_owned(), part))
}

/// Splits a text as a shell does: into commands, these into words.
fn split(text: &str, source: u16) -> (Vec<Vec<Word>>, Vec<Comment>) {
    let mut commands = vec![Vec::new()];
    let mut comments = Vec::new();
    let mut word: Option<Word> = None;
    let mut quote: Option<char> = None;
    let mut chars = text.char_indices().peekable();
    let finish = |word: &mut Option<Word>, commands: &mut Vec<Vec<Word>>, end: usize| {
        if let Some(mut word) = word.take() {
            word.outer.end = Span::new(source, end, end).end;
            if let Some(command) = commands.last_mut() {
                command.push(word);
            }
        }
    };
    while let Some((at, c)) = chars.next() {
        let started = word.is_some();
        let next = chars.peek().map(|(_, next)| *next);
        match (quote, c) {
            (None, '\\') | (Some('"'), '\\') if next == Some('\n') => {
                chars.next();
            }
            (None, '\\') => {
                if let Some((at, c)) = chars.next() {
                    push(&mut word, c, at, at - 1, None, source);
                }
            }
            (Some('"'), '\\') if matches!(next, Some('"' | '\\' | '$' | '`')) => {
                if let Some((at, c)) = chars.next() {
                    push(&mut word, c, at, at - 1, quote, source);
                }
            }
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => {
                push(&mut word, c, at, at, quote, source);
                if quote == Some('"')
                    && matches!(c, '$' | '`')
                    && let Some(word) = &mut word
                {
                    word.expanded = true;
                }
            }
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_with(|| Word {
                    source,
                    outer: Span::new(source, at, at),
                    ..Word::default()
                });
            }
            (None, '#') if !started => {
                let mut end = at + 1;
                while let Some((next, c)) = chars.next_if(|(_, c)| *c != '\n') {
                    end = next + c.len_utf8();
                }
                comments.push((text[at..end].to_owned(), Span::new(source, at, end)));
            }
            (None, '\n' | ';' | '&' | '|' | '(' | ')') => {
                finish(&mut word, &mut commands, at);
                if commands.last().is_some_and(|command| !command.is_empty()) {
                    commands.push(Vec::new());
                }
            }
            (None, c) if c.is_whitespace() => finish(&mut word, &mut commands, at),
            (None, c) => {
                push(&mut word, c, at, at, None, source);
                if matches!(c, '$' | '`')
                    && let Some(word) = &mut word
                {
                    word.expanded = true;
                }
            }
        }
    }
    finish(&mut word, &mut commands, text.len());
    commands.retain(|command| !command.is_empty());
    (commands, comments)
}

fn push(
    word: &mut Option<Word>,
    c: char,
    at: usize,
    start: usize,
    quote: Option<char>,
    source: u16,
) {
    let word = word.get_or_insert_with(|| Word {
        source,
        outer: Span::new(source, start, start),
        ..Word::default()
    });
    word.text.push(c);
    word.at.extend((at..at + c.len_utf8()).map(|at| at as u32));
    word.quote = quote;
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
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_with_their_places() {
        let text = "# one\nLIB=/usr/local/lib\nLD_PRELOAD=\"/usr/lib/libtcmalloc.so\" sudo /usr/libexec/qemu-kvm \
                    -m 16 \\\n -drive 'file=a,,b c.raw,if=none' -x \"q\\\"q\"; echo qemu; qemu-system-x86_64";
        let (commands, comments) = commands(text, 0);
        assert_eq!(comments[0].0, "# one");
        assert_eq!(commands.len(), 3, "{commands:?}");
        let first = &commands[0];
        assert_eq!(first.variables[0].0, "LD_PRELOAD");
        assert_eq!(first.variables[0].1.text, "/usr/lib/libtcmalloc.so");
        assert_eq!(first.not_exported[0].0, "LIB");
        let words: Vec<_> = first
            .arguments
            .iter()
            .map(|word| word.text.as_str())
            .collect();
        assert_eq!(
            words,
            [
                "-m",
                "16",
                "-drive",
                "file=a,,b c.raw,if=none",
                "-x",
                "q\"q"
            ]
        );
        for word in &first.arguments {
            assert!(text[word.outer.range()].len() >= word.text.len());
        }
        assert_eq!(
            &text[first.arguments[3].inner().range()],
            "file=a,,b c.raw,if=none"
        );
        assert_eq!(&text[first.arguments[3].span(5, 9).range()], "a,,b");
    }

    #[test]
    fn a_shell_reads_back_what_is_written() {
        let arguments: Vec<_> = [
            "qemu-system-x86_64",
            "-blockdev",
            "{\"driver\":\"file\"}",
            "-S",
            "it's",
            "",
        ]
        .map(String::from)
        .into();
        let text = shell(&arguments);
        let (commands, _) = commands(&text, 0);
        let words: Vec<_> = commands[0]
            .arguments
            .iter()
            .map(|word| word.text.clone())
            .collect();
        assert_eq!(words, arguments[1..]);
    }
}
