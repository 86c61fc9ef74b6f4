//! The service manager (sd_notify(3)). The `sd-notify` crate takes an abstract address for a path, and says nothing.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::time::{ClockId, clock_gettime};

/// Disks are served.
pub const READY: &str = "READY=1";
/// No new work is taken.
pub const STOPPING: &str = "STOPPING=1";

/// The configuration is being read again. The time tells systemd from version 253 on which of several reloads
/// this is.
pub fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
    format!("RELOADING=1\nMONOTONIC_USEC={now_us}")
}

/// Tells the manager, if there is one. If it cannot be told, it gives up waiting by itself, and says so.
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
