//! Splits a byte stream into JSON values. The values need not be separated.

use thiserror::Error;

/// The largest message that is accepted.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest message, in bytes.
    pub bytes: usize,
    /// The most values and names in a message. Each costs up to 350 bytes once parsed: an object with one member, which
    /// is two tokens, takes a tree node with space for eleven.
    pub tokens: usize,
}

impl Limits {
    /// For messages from a client. The longest sensible command, a `blockdev-add` with a path of 4 kB, has 50 tokens.
    /// The text, the strings and the rest of a parsed command take at most 2 * 1 MiB + 10,000 * 350 bytes: less than 6
    /// MB.
    pub const COMMAND: Self = Self {
        bytes: 1 << 20,
        tokens: 10_000,
    };

    /// For messages from a server, which the client has chosen: enough for histograms of a thousand disks.
    pub const REPLY: Self = Self {
        bytes: 64 << 20,
        tokens: 4_000_000,
    };
}

/// The deepest nesting of objects and arrays. `blockdev-add` needs 3; `serde_json` allows 128.
const DEPTH_MAX: usize = 64;

/// Splits a byte stream into messages.
///
/// After an error the framer continues where a message may begin: after the offending byte or, if a message exceeded a
/// limit, after the next control character (such as a newline) or 0xFF, whichever comes first. As in QEMU, a client
/// that has lost synchronisation sends 0xFF, gets an error, and is synchronised again.
pub struct Framer {
    limits: Limits,
    message: Vec<u8>,
    /// The brackets that are open, the innermost last.
    open: Vec<u8>,
    tokens: usize,
    state: LexerState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LexerState {
    /// Between values of an object or an array, or between messages.
    Between,
    String,
    /// After a backslash.
    Escape,
    /// A number or a keyword that is a message by itself; any byte that cannot be part of it ends it.
    Word,
    /// A message exceeded a limit; the rest of it is skipped.
    Skipping,
}

/// Why bytes are not a valid message.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum FramingError {
    /// The byte 0xFF, which is never part of a text.
    #[error("byte 0xFF is not text: everything received before it is discarded")]
    Reset,
    /// A closing bracket without a matching opening bracket.
    #[error("'{0}' has no matching opening bracket")]
    Unbalanced(char),
    /// An unescaped control character in a string.
    #[error("control character {0:#04x} in a string; write it as an escape")]
    Control(u8),
    /// The message has too many bytes.
    #[error("a message of more than {0} bytes")]
    TooLong(usize),
    /// The message is nested too deeply.
    #[error("objects and arrays nested more than {DEPTH_MAX} deep")]
    TooDeep,
    /// The message has too many values and names.
    #[error("more than {0} values and names")]
    TooMany(usize),
}

impl Framer {
    /// A framer that accepts messages within `limits`.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            message: Vec::new(),
            open: Vec::new(),
            tokens: 0,
            state: LexerState::Between,
        }
    }

    /// Consumes `input` up to the end of a message, and returns the message; `None` when the input is used up.
    ///
    /// # Errors
    /// The bytes are not a message. The next call continues after them.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Result<Vec<u8>, FramingError>> {
        while let Some((&byte, rest)) = input.split_first() {
            if self.state == LexerState::Word && ends_word(byte) {
                return Some(Ok(self.finish())); // the byte belongs to the next message
            }
            *input = rest;
            match self.take(byte) {
                Ok(false) => {}
                Ok(true) => return Some(Ok(self.finish())),
                Err(error) => {
                    self.finish();
                    let is_limit = matches!(
                        error,
                        FramingError::TooLong(_) | FramingError::TooDeep | FramingError::TooMany(_)
                    );
                    if is_limit {
                        self.state = LexerState::Skipping;
                    }
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// Whether a message has begun and is incomplete.
    pub fn is_midway(&self) -> bool {
        !self.message.is_empty()
    }

    /// Consumes a byte. Returns true if it ends a message.
    fn take(&mut self, byte: u8) -> Result<bool, FramingError> {
        if byte == 0xff {
            return Err(FramingError::Reset);
        }
        match self.state {
            LexerState::Skipping => {
                if byte.is_ascii_control() {
                    self.state = LexerState::Between;
                }
                return Ok(false);
            }
            LexerState::Between if byte.is_ascii_whitespace() && self.message.is_empty() => {
                return Ok(false);
            }
            _ if self.message.len() == self.limits.bytes => {
                return Err(FramingError::TooLong(self.limits.bytes));
            }
            _ => self.message.push(byte),
        }
        match (self.state, byte) {
            (LexerState::Escape, _) => self.state = LexerState::String,
            (LexerState::String, b'\\') => self.state = LexerState::Escape,
            (LexerState::String, b'"') => {
                self.state = LexerState::Between;
                return Ok(self.open.is_empty());
            }
            (LexerState::String, byte) if byte < 0x20 => return Err(FramingError::Control(byte)),
            (LexerState::String, _) | (LexerState::Word, _) => {}
            (_, b'"') => self.state = LexerState::String,
            (_, b'{' | b'[') => {
                if self.open.len() == DEPTH_MAX {
                    return Err(FramingError::TooDeep);
                }
                self.open.push(byte);
                self.count()?;
            }
            (_, b'}' | b']') => {
                let opening = if byte == b'}' { b'{' } else { b'[' };
                if self.open.pop() != Some(opening) {
                    return Err(FramingError::Unbalanced(byte.into()));
                }
                return Ok(self.open.is_empty());
            }
            (_, b',' | b':') if self.open.is_empty() => return Ok(true), // not a value; the parser reports it
            (_, b',' | b':') => self.count()?,
            _ if self.open.is_empty() => self.state = LexerState::Word,
            _ => {}
        }
        Ok(false)
    }

    fn count(&mut self) -> Result<(), FramingError> {
        self.tokens += 1;
        if self.tokens > self.limits.tokens {
            Err(FramingError::TooMany(self.limits.tokens))
        } else {
            Ok(())
        }
    }

    /// Returns the bytes of the message, and prepares for the next one.
    fn finish(&mut self) -> Vec<u8> {
        self.open.clear();
        self.tokens = 0;
        self.state = LexerState::Between;
        std::mem::take(&mut self.message)
    }
}

fn ends_word(byte: u8) -> bool {
    byte.is_ascii_whitespace() || b"{}[]\",:\xff".contains(&byte)
}
