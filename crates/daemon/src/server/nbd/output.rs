//! Replies that wait for the client.
//!
//! A reply is one unit: from the beginning of one to its last byte, nothing else is sent. A reply whose data comes in pieces is
//! sent as these come, and all other replies wait behind it.

use std::collections::VecDeque;

use guest::Buffer;

/// Replies that were not sent yet.
#[derive(Default)]
pub struct Output {
    /// What is sent next, in this order.
    parts: VecDeque<Part>,
    /// Replies behind the one that is not complete.
    behind: VecDeque<Part>,
    /// A reply in `parts`, its last, is not complete.
    is_open: bool,
    /// Bytes of the first part that were sent.
    sent: usize,
    /// Bytes of headers and the like.
    bytes: usize,
}

pub enum Part {
    Bytes(Vec<u8>),
    Data(Buffer),
}

/// A reply that has begun, and lacks data. Until it has all of it, no other reply is sent: the client takes whatever follows for
/// its data.
#[must_use = "no other reply is sent before this one is complete"]
#[derive(Debug)]
pub struct OpenReply {
    /// Bytes that are missing.
    missing: u64,
}

impl Output {
    /// Adds a complete reply without data, which `write` appends.
    pub fn add(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.bytes += append(self.next(), write);
    }

    /// Begins a reply with the header that `write` appends and so many bytes of data, which [`push`](Self::push) adds.
    ///
    /// # Panics
    /// Another reply is not complete.
    pub fn begin(&mut self, data: u64, write: impl FnOnce(&mut Vec<u8>)) -> OpenReply {
        assert!(!self.is_open, "a reply begins inside of another");
        self.is_open = true;
        self.bytes += append(&mut self.parts, write);
        OpenReply { missing: data }
    }

    /// Adds a complete reply: the header that `write` appends, and its data.
    pub fn add_with_data(&mut self, data: Buffer, write: impl FnOnce(&mut Vec<u8>)) {
        self.bytes += append(self.next(), write);
        self.next().push_back(Part::Data(data));
    }

    /// Where the next reply belongs.
    fn next(&mut self) -> &mut VecDeque<Part> {
        if self.is_open {
            &mut self.behind
        } else {
            &mut self.parts
        }
    }

    /// Adds the next data of a reply, and returns the reply if more is missing.
    ///
    /// # Panics
    /// That is more than the reply has.
    pub fn push(&mut self, reply: OpenReply, data: Buffer) -> Option<OpenReply> {
        let missing = reply.missing.checked_sub(data.len() as u64);
        let missing = missing.expect("as much data as the header says");
        self.parts.push_back(Part::Data(data));
        if missing > 0 {
            return Some(OpenReply { missing });
        }
        self.is_open = false;
        self.parts.append(&mut self.behind);
        None
    }

    /// What may be sent now.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &Part> {
        self.parts.iter()
    }

    /// Whether anything may be sent now.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes of the first part that were sent.
    pub fn sent(&self) -> usize {
        self.sent
    }

    /// Bytes of headers and the like in all replies.
    pub fn bytes(&self) -> usize {
        self.bytes
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

/// Returns the number of bytes.
fn append(parts: &mut VecDeque<Part>, write: impl FnOnce(&mut Vec<u8>)) -> usize {
    if !matches!(parts.back(), Some(Part::Bytes(_))) {
        parts.push_back(Part::Bytes(Vec::with_capacity(64)));
    }
    let Some(Part::Bytes(bytes)) = parts.back_mut() else {
        return 0;
    };
    let before = bytes.len();
    write(bytes);
    bytes.len() - before
}

#[cfg(test)]
mod tests {
    use guest::LocalQueue;

    use super::*;

    /// Sends all that may be sent, at most `most` bytes at once.
    fn send(output: &mut Output, queue: &mut LocalQueue, most: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while !output.is_empty() {
            let part = match output.parts().next().unwrap() {
                Part::Bytes(bytes) => &bytes[output.sent()..],
                Part::Data(buffer) => &queue.bytes(buffer)[output.sent()..],
            };
            let sent = part.len().min(most);
            all.extend_from_slice(&part[..sent]);
            for buffer in output.advance(sent) {
                queue.give_back(buffer);
            }
        }
        all
    }

    /// Whatever is answered meanwhile, and however the socket takes it.
    #[test]
    fn nothing_is_sent_inside_of_a_reply() {
        for most in [1, 3, 100] {
            let (mut queue, _) = LocalQueue::new(1 << 20).unwrap();
            let mut buffer = |text: &[u8]| {
                let mut buffer = queue.alloc(text.len()).unwrap();
                queue.bytes_mut(&mut buffer).copy_from_slice(text);
                buffer
            };
            let data = [&b"data"[..], b"DA", b"TA", b"more", b"x"].map(&mut buffer);
            let [first, second, third, other, last] = data;
            let mut output = Output::default();
            output.add(|out| out.extend(b"a:"));
            let reply = output.begin(8, |out| out.extend(b"b:"));
            let reply = output.push(reply, first).unwrap();
            output.add(|out| out.extend(b"c:"));
            output.add_with_data(other, |out| out.extend(b"d:"));
            let mut sent = send(&mut output, &mut queue, most);
            assert_eq!(sent, b"a:b:data");
            assert_eq!(output.bytes(), 4);
            let reply = output.push(reply, second).unwrap();
            output.add(|out| out.extend(b"e:"));
            sent.extend(send(&mut output, &mut queue, most));
            assert!(output.push(reply, third).is_none());
            output.add_with_data(last, |out| out.extend(b"f:"));
            sent.extend(send(&mut output, &mut queue, most));
            assert_eq!(sent, b"a:b:dataDATAc:d:moree:f:x");
            assert_eq!(output.bytes(), 0);
        }
    }
}
