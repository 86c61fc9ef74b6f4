//! Accepts clients, also when the process has run out of descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use datapath::LeftOut;
use rustix::event::{EventfdFlags, eventfd};

/// Accepts the clients of a socket. It reserves a descriptor, so that a client can be told when there are no others.
pub struct Acceptor {
    spare: Option<OwnedFd>,
}

/// A client, and why it cannot be served, if that is so.
pub type Client = (UnixStream, Option<io::Error>);

impl Acceptor {
    pub fn new() -> Self {
        Self { spare: spare() }
    }

    /// The next client.
    ///
    /// # Errors
    /// No client was accepted.
    pub fn accept(&mut self, listener: &UnixListener) -> io::Result<Client> {
        if self.spare.is_none() {
            self.spare = spare();
        }
        match listener.accept() {
            Ok((client, _)) => Ok((client, None)),
            Err(e) if block::is_out_of_descriptors(&e) && self.spare.take().is_some() => {
                let (client, _) = listener.accept()?;
                Ok((client, Some(e)))
            }
            Err(e) => Err(e),
        }
    }
}

fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// Delays retries, and thins out their log lines, the longer something fails.
#[derive(Default)]
pub struct Backoff {
    failures: u64,
}

impl Backoff {
    /// Sleeps, from a tenth of a second up to one second. Logs the first failure, the second, the fourth, the eighth and so
    /// on.
    pub fn failed(&mut self, log: impl FnOnce(LeftOut)) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            log(LeftOut((self.failures / 2).saturating_sub(1)));
        }
        let tenths = self.failures.min(10);
        thread::sleep(Duration::from_millis(100) * tenths as u32);
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}
