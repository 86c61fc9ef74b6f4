//! Descriptor chains of any shape: those that a guest may legally build, and those that only a hostile guest builds.
//!
//! A virtio-blk request consists of one stream of bytes that the device reads (header, data to write) and one that it
//! writes (data read, status). The driver decides how to split the streams into descriptors (virtio 1.3 §2.7.4), so a
//! layout is a list of lengths for each stream.

use std::sync::Arc;

use crate::memory::Memory;
use crate::ring::{Desc, Ring};

/// How a request is split into descriptors, and where those are.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Lengths of the device-readable descriptors; one more descriptor holds the rest.
    pub readable: Vec<u32>,
    /// Lengths of the device-writable descriptors; one more descriptor holds the rest.
    pub writable: Vec<u32>,
    /// Bytes of unused memory between the buffers of two descriptors.
    pub gap: u64,
    /// Where the descriptors are.
    pub table: Table,
}

/// Where the descriptors of a chain are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Table {
    /// In the ring, in order.
    #[default]
    Direct,
    /// In the ring, in reverse order.
    Backwards,
    /// In one indirect table.
    Indirect,
    /// This many in the ring, and the rest in an indirect table at their end.
    Mixed(usize),
}

/// Descriptors in the order of the chain, before they are linked.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    /// The buffers; `place` sets `NEXT` and `next`.
    pub buffers: Vec<Desc>,
}

impl Chain {
    /// Lays out a request: writes the `readable` bytes from address `from` on, and reserves `writable` bytes from `to`
    /// on.
    pub fn request(
        memory: &Memory,
        layout: &Layout,
        from: u64,
        readable: &[u8],
        to: u64,
        writable: u32,
    ) -> Self {
        let mut buffers = Vec::new();
        let mut done = 0;
        for (addr, len) in cut(from, readable.len() as u32, &layout.readable, layout.gap) {
            memory.write(addr, &readable[done..done + len as usize]);
            done += len as usize;
            buffers.push(Desc {
                addr,
                len,
                ..Desc::default()
            });
        }
        for (addr, len) in cut(to, writable, &layout.writable, layout.gap) {
            memory.write(addr, &vec![0xff; len as usize]);
            buffers.push(Desc {
                addr,
                len,
                flags: Desc::WRITE,
                next: 0,
            });
        }
        Self { buffers }
    }

    /// Writes the chain into the descriptors of `ring` from `first` on, and tables into `memory` at `table_at`. Returns
    /// the head.
    pub fn place(
        &self,
        table: Table,
        ring: &mut Ring,
        first: u16,
        memory: &Arc<Memory>,
        table_at: u64,
    ) -> u16 {
        let count = self.buffers.len();
        match table {
            Table::Direct => self
                .link(|i| first + i)
                .for_each(|(i, d)| ring.set_desc(i, d)),
            Table::Backwards => {
                let last = first + count as u16 - 1;
                self.link(|i| last - i)
                    .for_each(|(i, d)| ring.set_desc(i, d));
                return last;
            }
            Table::Indirect => {
                let desc = self.table(memory, table_at, |d| ring.table_bytes(d));
                ring.set_desc(first, desc);
            }
            Table::Mixed(direct) => {
                let (head, tail) = self.buffers.split_at(direct.min(count - 1));
                let mut buffers = head.to_vec();
                let tail = Chain {
                    buffers: tail.to_vec(),
                };
                buffers.push(tail.table(memory, table_at, |d| ring.table_bytes(d)));
                Chain { buffers }
                    .link(|i| first + i)
                    .for_each(|(i, d)| ring.set_desc(i, d));
            }
        }
        first
    }

    /// Writes the chain to guest memory as an indirect table of a split ring. Returns the descriptor that refers to it.
    pub fn indirect(&self, memory: &Memory, table_at: u64) -> Desc {
        self.table(memory, table_at, Desc::bytes)
    }

    fn table(&self, memory: &Memory, table_at: u64, bytes: impl Fn(&Desc) -> [u8; 16]) -> Desc {
        self.link(|i| i)
            .for_each(|(i, desc)| memory.write(table_at + 16 * u64::from(i), &bytes(&desc)));
        Desc {
            addr: table_at,
            len: 16 * self.buffers.len() as u32,
            flags: Desc::INDIRECT,
            next: 0,
        }
    }

    /// The bytes that the device has written into the chain; the last byte of a completed request is the status.
    pub fn written(&self, memory: &Memory) -> Vec<u8> {
        let writable = self.buffers.iter().filter(|d| d.flags & Desc::WRITE != 0);
        writable
            .flat_map(|d| memory.read(d.addr, d.len as usize))
            .collect()
    }

    /// The buffers with `NEXT` set, at the positions that `place` returns.
    fn link(&self, place: impl Fn(u16) -> u16) -> impl Iterator<Item = (u16, Desc)> {
        let last = self.buffers.len() as u16 - 1;
        (0..=last)
            .zip(&self.buffers)
            .map(move |(i, &desc)| match i {
                i if i == last => (place(i), desc),
                i => (
                    place(i),
                    Desc {
                        flags: desc.flags | Desc::NEXT,
                        next: place(i + 1),
                        ..desc
                    },
                ),
            })
    }
}

/// The header of a request (virtio 1.3 §5.2.6).
pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    (u128::from(kind) | u128::from(sector) << 64)
        .to_le_bytes()
        .to_vec()
}

/// Layouts that the specification allows. Most drivers use only the first.
pub fn legal_layouts() -> Vec<(&'static str, Layout)> {
    let layout = |readable: &[u32], writable: &[u32]| Layout {
        readable: readable.to_vec(),
        writable: writable.to_vec(),
        ..Layout::default()
    };
    // The tests mostly send requests with 4096 bytes of data: a length of 4096 separates the data from the status.
    let usual = layout(&[16], &[4096]);
    vec![
        ("as usual", usual.clone()),
        (
            "header, data and status in as few descriptors as possible",
            layout(&[], &[]),
        ),
        ("header in four pieces", layout(&[4, 4, 7, 1], &[4096])),
        ("header in single bytes", layout(&[1; 16], &[4096])),
        ("end of the header with the data", layout(&[8], &[4096])),
        (
            "header with a piece of the data",
            layout(&[17, 510], &[1, 4095]),
        ),
        (
            "data in odd pieces",
            layout(&[16, 1, 3, 511, 512, 5], &[1, 3, 511, 512, 5]),
        ),
        (
            "data in odd pieces that are apart",
            Layout {
                gap: 13,
                ..layout(&[16, 1, 3, 511], &[1, 3, 511, 3581])
            },
        ),
        (
            "sectors apart",
            Layout {
                gap: 512,
                ..layout(&[16, 512, 512, 1024], &[512, 512, 1024, 2048])
            },
        ),
        (
            "descriptors backwards",
            Layout {
                table: Table::Backwards,
                ..usual.clone()
            },
        ),
        (
            "indirect",
            Layout {
                table: Table::Indirect,
                ..usual.clone()
            },
        ),
        (
            "indirect in odd pieces",
            Layout {
                table: Table::Indirect,
                ..layout(&[3, 14, 1, 511], &[3, 1, 511])
            },
        ),
        (
            "header direct, the others indirect",
            Layout {
                table: Table::Mixed(1),
                ..usual.clone()
            },
        ),
        (
            "header and data direct, status indirect",
            Layout {
                table: Table::Mixed(2),
                ..usual
            },
        ),
    ]
}

/// Splits `len` bytes at `at` into `(address, length)` pieces.
fn cut(mut at: u64, len: u32, cuts: &[u32], gap: u64) -> Vec<(u64, u32)> {
    let mut left = len;
    let mut pieces = Vec::new();
    for wanted in cuts.iter().copied().chain([u32::MAX]) {
        let piece = wanted.min(left);
        if piece > 0 {
            pieces.push((at, piece));
        }
        at += u64::from(piece) + gap;
        left -= piece;
    }
    pieces
}
