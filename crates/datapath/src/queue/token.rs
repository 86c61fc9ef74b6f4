//! Tokens: what a completion of the engine is about.

use block::Token;

use crate::request::RequestId;

/// The token of a request's operation.
#[inline]
pub(crate) fn token(id: RequestId) -> Token {
    Token((id.queue as u64) << 16 | u64::from(id.slot))
}

/// The token of a queue's kick.
pub(crate) fn kick_token(queue: usize) -> Token {
    Token(KICK | (queue as u64) << 16)
}

/// The token of the thread's own wake-up.
pub(crate) const WAKE: Token = Token(1 << 61);

/// The token of the thread's timer.
pub(crate) const TIMER: Token = Token(1 << 59);

const KICK: u64 = 1 << 60;

/// What a completion is about.
pub(crate) enum Event {
    Operation(RequestId),
    Kick { queue: usize },
    Wake,
    Timer,
}

impl From<Token> for Event {
    #[inline]
    fn from(token: Token) -> Self {
        let queue = (token.0 as u32 >> 16) as usize;
        match token {
            WAKE => Self::Wake,
            TIMER => Self::Timer,
            Token(n) if n & KICK != 0 => Self::Kick { queue },
            Token(n) => Self::Operation(RequestId {
                queue,
                slot: n as u16,
            }),
        }
    }
}
