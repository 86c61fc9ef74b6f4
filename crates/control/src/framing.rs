//! Where one JSON value of a stream ends and the next begins. There need not be anything between them.

use thiserror::Error;

/// How much a message may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes.
    pub bytes: usize,
    /// Values and names. One costs up to 350 bytes once parsed: an object with one member, which is two tokens, is a
    /// tree node for eleven.
    pub tokens: usize,
}

impl Limits {
    /// Of what a client sends. The longest sensible command, a `blockdev-add` with a path of 4 kB, has 50 tokens.
    /// Text, strings and the rest of a parsed command are 2 * 1 MiB + 10,000 * 350 bytes at most: less than 6 MB.
    pub const COMMAND: Self = Self {
        bytes: 1 << 20,
        tokens: 10_000,
    };

    /// Of what a server sends, whom the client has chosen: histograms of a thousand disks.
    pub const REPLY: Self = Self {
        bytes: 64 << 20,
        tokens: 4_000_000,
    };
}

/// Deepest nesting of objects and arrays. `blockdev-add` needs 3; less than what `serde_json` takes (128).
const DEPTH_MAX: usize = 64;

/// Cuts a stream of bytes into messages.
///
/// After an error it goes on where a message may begin: behind the offending byte, or, if a message went past a
/// limit, behind the next control character (say, a newline) or 0xFF, whichever comes first. As in QEMU, a client
/// that has lost its place sends 0xFF, gets an error, and is in step again.
pub struct Framer {
    limits: Limits,
    message: Vec<u8>,
    /// The brackets that are open, the innermost last.
    open: Vec<u8>,
    tokens: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between values of an object or an array, or between messages.
    Between,
    String,
    /// Behind a backslash.
    Escape,
    /// A number or a keyword that is a message by itself; whatever can't be part of it ends it.
    Word,
    /// A message was too much; what is left of it is skipped.
    Skipping,
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum FramingError {
    /// 0xFF, which no text contains.
    #[error("byte 0xFF, which is no text: what came before it is forgotten")]
    Reset,
    /// A closing bracket without its opening one.
    #[error("'{0}' closes nothing that is open")]
    Unbalanced(char),
    /// As it is.
    #[error("control character {0:#04x} in a string; write it as an escape")]
    Control(u8),
    /// Too long.
    #[error("a message of more than {0} bytes")]
    TooLong(usize),
    /// Too deep.
    #[error("more than {DEPTH_MAX} objects and arrays in each other")]
    TooDeep,
    /// Too much.
    #[error("more than {0} values and names")]
    TooMany(usize),
}

impl Framer {
    /// A framer for messages within `limits`.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            message: Vec::new(),
            open: Vec::new(),
            tokens: 0,
            state: State::Between,
        }
    }

    /// Takes bytes off the front of `input` until a message is whole, and returns that; `None` when the input is
    /// used up.
    ///
    /// # Errors
    /// The bytes are no message. Calling again goes on behind them.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Result<Vec<u8>, FramingError>> {
        while let Some((&byte, rest)) = input.split_first() {
            if self.state == State::Word && ends_word(byte) {
                return Some(Ok(self.finish())); // the byte stays for the next message
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
                        self.state = State::Skipping;
                    }
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// Whether a message has begun and is not whole.
    pub fn is_midway(&self) -> bool {
        !self.message.is_empty()
    }

    /// Takes a byte; true if it ends a message.
    fn take(&mut self, byte: u8) -> Result<bool, FramingError> {
        if byte == 0xff {
            return Err(FramingError::Reset);
        }
        match self.state {
            State::Skipping => {
                if byte.is_ascii_control() {
                    self.state = State::Between;
                }
                return Ok(false);
            }
            State::Between if byte.is_ascii_whitespace() && self.message.is_empty() => {
                return Ok(false);
            }
            _ if self.message.len() == self.limits.bytes => {
                return Err(FramingError::TooLong(self.limits.bytes));
            }
            _ => self.message.push(byte),
        }
        match (self.state, byte) {
            (State::Escape, _) => self.state = State::String,
            (State::String, b'\\') => self.state = State::Escape,
            (State::String, b'"') => {
                self.state = State::Between;
                return Ok(self.open.is_empty());
            }
            (State::String, byte) if byte < 0x20 => return Err(FramingError::Control(byte)),
            (State::String, _) | (State::Word, _) => {}
            (_, b'"') => self.state = State::String,
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
            (_, b',' | b':') if self.open.is_empty() => return Ok(true), // no value, as the parser will say
            (_, b',' | b':') => self.count()?,
            _ if self.open.is_empty() => self.state = State::Word,
            _ => {}
        }
        Ok(false)
    }

    fn count(&mut self) -> Result<(), FramingError> {
        self.tokens += 1;
        match self.tokens > self.limits.tokens {
            true => Err(FramingError::TooMany(self.limits.tokens)),
            false => Ok(()),
        }
    }

    /// Returns what has been gathered, and is ready for the next message.
    fn finish(&mut self) -> Vec<u8> {
        self.open.clear();
        self.tokens = 0;
        self.state = State::Between;
        std::mem::take(&mut self.message)
    }
}

fn ends_word(byte: u8) -> bool {
    byte.is_ascii_whitespace() || b"{}[]\",:\xff".contains(&byte)
}
