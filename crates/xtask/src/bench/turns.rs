//! The turns of a run: their order, and how far it is.

use std::io::IsTerminal;
use std::time::Instant;

use super::plan::Server;
use lab::client;

/// The bench's own randomness: the order of the contestants and the clients' seeds.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        client::mix(self.0)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
    }
}

/// One line on the terminal that says where the run is and how long it takes.
pub struct Progress {
    begun: Instant,
    done: usize,
    pub total: usize,
    on_terminal: bool,
}

impl Progress {
    pub fn new(total: usize) -> Progress {
        Progress {
            begun: Instant::now(),
            done: 0,
            total,
            on_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// To be called before each sample.
    pub fn show(&mut self, cell: &str, server: Server, round: usize) {
        let left = match self.done {
            0 => String::new(),
            done => {
                let seconds =
                    self.begun.elapsed().as_secs() * (self.total - done) as u64 / done as u64;
                format!(", {}:{:02} left", seconds / 60, seconds % 60)
            }
        };
        let line = format!("[{}/{}{left}] {cell}", self.done + 1, self.total);
        if self.on_terminal {
            eprint!("\r\x1b[K{line}, round {}: {server}", round + 1);
        } else if round == 0 && self.done.is_multiple_of(8) {
            eprintln!("{line}");
        }
        self.done += 1;
    }

    pub fn complain(&self, text: &str) {
        self.clear();
        eprintln!("{text}");
    }

    pub fn clear(&self) {
        if self.on_terminal {
            eprint!("\r\x1b[K");
        }
    }
}
