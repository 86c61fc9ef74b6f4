//! The program `ringdisk` as a library, for the binary and for fuzzing.

mod check;
mod cli;
mod client;
mod config;
mod credentials;
mod hook;
mod inherited;
mod lab;
mod log;
mod manual;
mod monitor;
mod node;
mod profile;
mod proxmox;
mod resource_limits;
mod rights;
mod sandbox;
mod sd_notify;
mod serve;
mod server;
mod socket;
mod state;
mod token;
mod upgrade;

#[cfg(any(test, fuzzing))]
pub mod fuzzing;

pub use cli::main;
