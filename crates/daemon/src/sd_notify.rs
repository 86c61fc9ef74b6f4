//! Notifies the service manager (sd_notify(3)). The `sd-notify` crate takes an abstract address for a path, and ignores the
//! error.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::time::{ClockId, clock_gettime};

/// Disks are served.
pub const READY: &str = "READY=1";
/// The process is stopping.
pub const STOPPING: &str = "STOPPING=1";

/// The configuration is being reloaded. systemd 253 and later tells reloads apart by the time.
pub fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
    format!("RELOADING=1\nMONOTONIC_USEC={now_us}")
}

/// Sends a notification, if there is a service manager. If that fails, the manager reports its timeout.
pub fn tell(state: &str) {
    let Some(address) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&address),
    };
    let _ = address
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
}
