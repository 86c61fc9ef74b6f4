//! How clients are accepted, also when this process may have no more descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use datapath::LeftOut;
use rustix::event::{EventfdFlags, eventfd};

/// Accepts the clients of a socket. It keeps a descriptor to give up, so that a client can be told when there are no more.
pub struct Acceptor {
    spare: Option<OwnedFd>,
}

/// A client, and why it cannot be served, if it can only be told that.
pub type Client = (UnixStream, Option<io::Error>);

impl Acceptor {
    pub fn new() -> Self {
        Self { spare: spare() }
    }

    /// The next client.
    ///
    /// # Errors
    /// There is none that could even be told why.
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

/// What is tried again and again: less often, and with fewer lines in the log, the longer it fails.
#[derive(Default)]
pub struct Backoff {
    failures: u64,
}

impl Backoff {
    /// Waits for a tenth of a second at first, and for a second in the end. Logs the first failure, the second, the fourth,
    /// the eighth and so on.
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
