//! `ringdisk`: virtual disks for QEMU/KVM at the speed of the hardware beneath them.

#![expect(dead_code, reason = "what the control socket will call")]

mod cpus;
mod device;
mod export;
mod host;
mod iothreads;
mod node;
mod paste;
mod serve;
mod socket;
mod spec;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rustix::process::{Resource, getrlimit, setrlimit};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(name = "ringdisk", version, about, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed (the last line says why and what to do), \
    2 wrong usage.\nRINGDISK_LOG=debug shows what front-ends ask for."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve disks to virtual machines over vhost-user
    Serve(serve::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("RINGDISK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
    raise_file_limit();
    let result = match cli.command {
        Command::Serve(args) => serve::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ringdisk: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

/// Each queue takes a few descriptors, and shells and services start with a limit of 1024 that any
/// process may raise to the hard one.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
