//! Replies that wait for the client.

use std::collections::VecDeque;

use guest::Buffer;

/// Replies that were not sent yet.
#[derive(Default)]
pub struct Output {
    pub parts: VecDeque<Part>,
    /// Bytes of the first part that were sent.
    pub sent: usize,
    /// Bytes of headers and the like.
    pub bytes: usize,
}

pub enum Part {
    Bytes(Vec<u8>),
    Data(Buffer),
}

impl Output {
    /// Adds what `write` appends.
    pub fn add(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if !matches!(self.parts.back(), Some(Part::Bytes(_))) {
            self.parts.push_back(Part::Bytes(Vec::with_capacity(64)));
        }
        if let Some(Part::Bytes(bytes)) = self.parts.back_mut() {
            let before = bytes.len();
            write(bytes);
            self.bytes += bytes.len() - before;
        }
    }

    /// So many bytes were sent. Returns the buffers that are not needed any more.
    pub fn advance(&mut self, sent: usize) -> Vec<Buffer> {
        let mut left = sent + self.sent;
        let mut done = Vec::new();
        while let Some(part) = self.parts.front() {
            let len = match part {
                Part::Bytes(bytes) => bytes.len(),
                Part::Data(buffer) => buffer.len(),
            };
            if left < len {
                break;
            }
            left -= len;
            match self.parts.pop_front() {
                Some(Part::Bytes(bytes)) => self.bytes -= bytes.len(),
                Some(Part::Data(buffer)) => done.push(buffer),
                None => {}
            }
        }
        self.sent = left;
        done
    }
}
