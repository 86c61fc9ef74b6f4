//! A ringdisk that is led while it serves: over its control socket, by the subcommands that use it, and by a configuration
//! that is reread.

mod churn;
mod cli;
mod config;
mod end_state;
mod limits;
mod qemu;
mod renamed;
mod replace;
mod running;
mod snapshot;
mod state;
